"""Text to train on as Hugging Face ``datasets``, whatever it comes from.

A corpus is named by a string: one of ``CORPORA`` (shipped in data/corpora, checked by SHA-256), ``"c4"`` (streamed,
see :mod:`.c4`), or the path of the reader's own file (see :mod:`.local`). Each gives the splits train and validation
with a column ``text``. Shipped and own files are read straight into memory: no network, and no second copy in a cache
that could differ from what was checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from ..checks import require, require_choice
from . import c4, local
from .shipped import shipped_bytes, shipped_checksum

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

SPLITS = ("train", "validation")
COLUMNS = ("id", "source", "license", "title", "text")
CORPORA = {"lm_ci": "lm_ci_{split}.jsonl.gz", "lm_laptop": "lm_laptop_{split}.parquet"}
STREAMED = "c4"


def load_corpus(name: str) -> DatasetDict | IterableDatasetDict:
    """The corpus ``name`` as ``{"train": ..., "validation": ...}``: strings in ``COLUMNS`` if shipped, else ``text``.

    Errors: ValueError for an unknown name, a shipped file that was altered, an own file that cannot be read or has
    an empty document; FileNotFoundError for a missing file; ConnectionError if the hub cannot be reached. Each names
    the file and says what to do.
    """
    from datasets import Dataset, DatasetDict, Features, Value  # a second to import: only when text is read

    _check_name(name)
    if name == STREAMED:
        return c4.c4_streams()
    if name not in CORPORA:
        return DatasetDict({split: Dataset.from_dict({"text": local.local_documents(name, split)}) for split in SPLITS})
    features = Features({column: Value("string") for column in COLUMNS})
    files = {split: CORPORA[name].format(split=split) for split in SPLITS}
    rows = {split: local.parse_rows(shipped_bytes(file), file) for split, file in files.items()}
    return DatasetDict({split: Dataset.from_list(rows[split], features=features) for split in SPLITS})


def corpus_checksum(name: str, split: str) -> str:
    """SHA-256 (hex): of the file that a split comes from, or of what names the text of a stream.

    For a shipped file it is the one it must have. Errors: as :func:`load_corpus`.
    """
    _check_name(name)
    require_choice("split", split, SPLITS)
    if name == STREAMED:
        return c4.c4_checksum(split)
    return shipped_checksum(CORPORA[name].format(split=split)) if name in CORPORA else local.local_checksum(name, split)


def texts(name: str, split: str, most: int | None = None) -> Iterator[str]:
    """The documents of a split in order, at most ``most`` of them. Errors: as :func:`load_corpus`."""
    dataset = load_corpus(name)[split]
    return islice(c4.documents(dataset) if name == STREAMED else iter(dataset["text"]), most)


def check_shipped(name: str) -> None:
    """Raise as :func:`load_corpus` if a shipped file is missing or altered; nothing else is checked."""
    for split in SPLITS if name in CORPORA else ():
        shipped_bytes(CORPORA[name].format(split=split))


def _check_name(name: str) -> None:
    names = ", ".join(map(repr, [*CORPORA, STREAMED]))
    known = name in CORPORA or name == STREAMED or local.is_local(name)
    require(known, "corpus", name, f"one of {names} or the path of a file of {', '.join(local.SUFFIXES)}")
