"""Documents as one row of tokens, and the row as windows of one length. Splits never meet: each has its own row.

The row of a split is kept in the cache, so that only the first start of a run pays for the tokenizer.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..checks import require, require_size
from ..files import replacing
from .corpora import corpus_checksum, texts
from .tokenizers import Vocabulary, cache_dir, cache_name

RECIPE = 1  # raised by hand when the same text and vocabulary give other tokens
TOGETHER = 256  # documents that are encoded in one call


def pack(documents: Iterable[str], vocabulary: Vocabulary, length: int) -> Tensor:
    """Windows of tokens, int64 (n_windows, length + 1): ``inputs = w[:, :-1]``, ``targets = w[:, 1:]``.

    The documents of ONE split are joined, ``end`` after each, and cut every ``length`` tokens. A window's
    last token is the next one's first, so every token but the very first is a target exactly once; a tail
    shorter than a window is left out. Errors: ValueError for no documents, an empty document, too little text.
    """
    require_size("length", length)
    require(not isinstance(documents, str), "documents", "one string", "a list of strings")
    return cut(join(documents, vocabulary), length + 1, length).long()


def cut(row: Tensor, size: int, stride: int, name: str = "documents") -> Tensor:
    """Windows (n, size) of ``row`` (n_tokens,), one every ``stride`` tokens, sharing its memory.

    Errors: ValueError for a row shorter than a window, which calls it ``name``.
    """
    require(len(row) >= size, name, f"{len(row)} tokens", f"at least the {size} tokens of a window")
    return row.unfold(0, size, stride)


def join(documents: Iterable[str], vocabulary: Vocabulary) -> Tensor:
    """All tokens, int32 (n_tokens,). Errors: ValueError for no documents or an empty one."""
    row = torch.from_numpy(np.concatenate([np.empty(0, np.int32), *_encoded(_checked(documents), vocabulary)]))
    require(len(row) > 0, "documents", [], "at least one document")
    return row


def token_row(corpus: str, split: str, vocabulary: Vocabulary) -> Tensor:
    """The row of a split, int32 (n_tokens,), from the cache or made now (lm_laptop: seconds).

    A cached file that is damaged is made again; a cache folder that cannot be written to only costs a warning.
    Errors: those of ``load_corpus``.
    """
    recipe = f"{RECIPE} {corpus_checksum(corpus, split)} {split} {vocabulary.checksum}"
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    path = cache_dir() / "tokens" / f"{cache_name(corpus)}-{split}-{key}.safetensors"
    row = _read(path)
    if row is None:
        row = join(texts(corpus, split), vocabulary)
        _write(path, row)
    return row


def token_stream(documents: Iterable[str], vocabulary: Vocabulary, size: int, stride: int) -> Iterator[Tensor]:
    """Windows int32 (size,) of documents that come one by one, as :func:`cut` gives them, and as few documents ahead
    as the tokenizer takes together."""
    rest = np.empty(0, np.int32)
    for encoded in _encoded(documents, vocabulary):
        rest = np.concatenate([rest, encoded])
        if len(rest) >= size:
            windows = cut(torch.from_numpy(rest), size, stride)
            yield from windows
            rest = rest[len(windows) * stride :]


def _encoded(documents: Iterable[str], vocabulary: Vocabulary) -> Iterator[np.ndarray]:
    remaining = iter(documents)
    while group := list(islice(remaining, TOGETHER)):
        tokens = chain.from_iterable((*ids, vocabulary.end) for ids in vocabulary.encode_batch(group))
        yield np.fromiter(tokens, np.int32)


def _checked(documents: Iterable[str]) -> Iterator[str]:
    for index, text in enumerate(documents):
        require(bool(text.strip()), f"documents[{index}]", text, "a text with something in it")
        yield text


def _write(path: Path, row: Tensor) -> None:
    from safetensors.torch import save_file

    try:
        with replacing(path) as temporary:
            save_file({"row": row}, temporary, metadata={"sha256": _digest(row)})
    except OSError as error:
        warnings.warn(f"tokens not kept ({error}): set $SPARSELIB_CACHE to a writable folder", stacklevel=3)


def _read(path: Path) -> Tensor | None:
    """The row in ``path``, or None where there is none that is whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            row, expected = file.get_tensor("row"), file.metadata()["sha256"]
    except (OSError, SafetensorError, KeyError, TypeError):
        return None
    return row if _digest(row) == expected else None


def _digest(row: Tensor) -> str:
    return hashlib.sha256(row.numpy().data).hexdigest()
