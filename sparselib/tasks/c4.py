"""C4 (English), streamed: web pages, the paper's text, too much to keep.

It comes from the Hugging Face hub, at a fixed revision. A machine without network reads the same files from
data/corpora/local/c4: as many of them as were put there, at least one of each split. Nothing is copied: a page is read
when its turn comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..paths import corpora_dir

if TYPE_CHECKING:
    from datasets import IterableDatasetDict

HUB, SUBSET = "allenai/c4", "en"
REVISION = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"
FIRST = {"train": "c4-train.00000-of-01024.json.gz", "validation": "c4-validation.00000-of-00008.json.gz"}
VALIDATION_DOCUMENTS = 1000  # read once, then kept


def c4_folder() -> Path:
    """Where C4's files are looked for before the hub is asked."""
    return corpora_dir() / "local" / "c4"


def c4_streams() -> IterableDatasetDict:
    """Both splits as streams with a column ``text``; validation is its first ``VALIDATION_DOCUMENTS``.

    Errors: ConnectionError if neither folder nor hub has it, saying which files to put where; FileNotFoundError if the
    folder has files of one split only.
    """
    from datasets import IterableDatasetDict, load_dataset  # a second to import

    local = {split: [str(path) for path in _local_files(split)] for split in FIRST}
    if any(local.values()):
        for split, files in local.items():
            if not files:
                raise FileNotFoundError(f"{c4_folder()} holds no file like {FIRST[split]}: {_advice()}")
        streams = load_dataset("json", data_files=local, streaming=True)
    else:
        try:
            streams = load_dataset(HUB, SUBSET, revision=REVISION, streaming=True)
        except Exception as error:  # each layer below raises its own kinds
            _unreachable(error)
    train, validation = (streams[split].select_columns(["text"]) for split in FIRST)
    return IterableDatasetDict({"train": train, "validation": validation.take(VALIDATION_DOCUMENTS)})


def c4_checksum(split: str) -> str:
    """SHA-256 (hex) of what names the text: name and revision on the hub; in the folder each file's name and last
    eight bytes, where gzip writes checksum and length of the text."""
    parts = [HUB, SUBSET, REVISION, split]
    if files := _local_files(split):
        parts = [f"{path.name} {_last_bytes(path)}" for path in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def documents(stream) -> Iterator[str]:
    """The texts of a stream that are not blank.

    Errors: ConnectionError when the hub is lost on the way; ValueError for a damaged file of the folder.
    """
    try:
        for row in stream:
            if row["text"].strip():
                yield row["text"]
    except Exception as error:
        if any(map(_local_files, FIRST)):
            raise ValueError(f"a file in {c4_folder()} cannot be read: {error}") from error
        _unreachable(error)


def _local_files(split: str) -> list[Path]:
    return sorted(c4_folder().glob(f"c4-{split}.*.json.gz"))


def _last_bytes(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 8))
        return file.read().hex()


def _advice() -> str:
    return (
        f"to work without the hub, put {FIRST['train']} and {FIRST['validation']} (or more of their kind; folder "
        f"{SUBSET} of the data set {HUB}) in {c4_folder()}"
    )


def _unreachable(error: Exception) -> NoReturn:
    raise ConnectionError(f"{HUB} could not be read ({type(error).__name__}: {error}); {_advice()}") from error
