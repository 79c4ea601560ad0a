"""Shipped text as Hugging Face ``datasets``, and its cutting into windows of tokens.

A corpus is two files of data/corpora, one a split, whose SHA-256 is checked each time before they are opened.
They are read straight into memory: no network, and no second copy in a cache that could differ from what was
checked.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checks import require, require_choice, require_size
from ..paths import corpora_dir

if TYPE_CHECKING:
    from datasets import DatasetDict
    from tokenizers import Tokenizer

END = "<|end|>"  # stands after every document
SPLITS = ("train", "validation")
COLUMNS = ("id", "source", "license", "title", "text")
CORPORA = {"lm_ci": "lm_ci_{split}.jsonl.gz"}
RESTORE = "bring the shipped files back with `git checkout -- data/corpora`"


def load_corpus(name: str) -> DatasetDict:
    """The corpus ``name`` as ``{"train": Dataset, "validation": Dataset}`` of strings in ``COLUMNS``.

    Errors: ValueError for an unknown name or a file that is not the one shipped, FileNotFoundError for a
    missing file; both name the file and how to get it back.
    """
    from datasets import Dataset, DatasetDict, Features, Value  # a second to import: only when text is read

    features = Features({column: Value("string") for column in COLUMNS})
    splits = {}
    for split in SPLITS:
        lines = gzip.decompress(_checked_bytes(name, split)).decode("utf-8").splitlines()
        splits[split] = Dataset.from_list([json.loads(line) for line in lines], features=features)
    return DatasetDict(splits)


def corpus_checksum(name: str, split: str) -> str:
    """SHA-256 (hex) that the file of this corpus and split must have. Errors: as :func:`load_corpus`."""
    require_choice("corpus", name, tuple(CORPORA))
    require_choice("split", split, SPLITS)
    listing = corpora_dir() / "checksums.json"
    file = CORPORA[name].format(split=split)
    try:
        return json.loads(listing.read_text("utf-8"))[file]
    except FileNotFoundError:
        raise FileNotFoundError(f"{listing} is missing: {RESTORE}") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{listing} holds no checksum of {file}: {RESTORE}") from None


def _checked_bytes(name: str, split: str) -> bytes:
    expected = corpus_checksum(name, split)
    path = corpora_dir() / CORPORA[name].format(split=split)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {RESTORE}")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"{path} was altered: its SHA-256 is {found}, not {expected}; {RESTORE}")
    return content


def pack(documents: Iterable[str], tokenizer: Tokenizer, length: int) -> Tensor:
    """Windows of tokens, int64 (n_windows, length + 1): ``inputs = w[:, :-1]``, ``targets = w[:, 1:]``.

    The documents of ONE split are joined, ``END`` after each, and cut every ``length`` tokens. A window's
    last token is the next one's first, so every token but the very first is a target exactly once; a tail
    shorter than a window is left out. Errors: ValueError for no documents, an empty document, a tokenizer
    without ``END``, too little text.
    """
    require_size("length", length)
    require(not isinstance(documents, str), "documents", "one string", "a list of strings")
    texts = list(documents)
    require(len(texts) > 0, "documents", texts, "at least one document")
    for index, text in enumerate(texts):
        require(bool(text.strip()), f"documents[{index}]", text, "a text with something in it")
    end = tokenizer.token_to_id(END)
    require(end is not None, "tokenizer", tokenizer, f"one that knows the token {END}")
    stream = [token for encoding in tokenizer.encode_batch(texts) for token in [*encoding.ids, end]]
    require(len(stream) > length, "length", length, f"below the {len(stream)} tokens of the documents")
    return torch.tensor(stream).unfold(0, length + 1, length).contiguous()
