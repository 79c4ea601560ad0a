"""What is asked of a model about a window of tokens: the next token, or the spans that were taken out.

Letters: B batch, S length of the source, T length of the target.
Span corruption is T5's (Raffel et al., 2020): 15% of the tokens, in spans of 3 on average, are replaced by one sentinel
each; the target lists every sentinel with what stood there. A window starts with a kept span and ends with a lost one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..checks import require, require_size
from .tokenizers import PAD, Vocabulary

NOISE = 0.15  # share of the tokens that is taken out
MEAN_SPAN = 3.0  # tokens
SMALLEST = 3  # a sentinel, a token, the end

Batch = dict[str, Tensor]


class Objective(Protocol):
    """Takes windows of ``size`` tokens, one every ``stride`` of the text, and makes batches of them."""

    @property
    def size(self) -> int: ...

    @property
    def stride(self) -> int: ...

    def __call__(self, windows: Tensor, rng: np.random.Generator) -> Batch:
        """Windows (B, size) -> batch. ``rng``: all that chance has a say in."""


@dataclass(frozen=True)
class Causal:
    """``{"tokens": int64 (B, T + 1)}`` with T = ``length``: each token but the first is to be predicted."""

    length: int

    def __post_init__(self) -> None:
        require_size("length", self.length)

    @property
    def size(self) -> int:
        """T + 1: the last token is the next window's first."""
        return self.length + 1

    @property
    def stride(self) -> int:
        """T: every token is a target once."""
        return self.length

    def __call__(self, windows: Tensor, rng: np.random.Generator) -> Batch:
        return {"tokens": windows.long()}


@dataclass(frozen=True)
class SpanCorruption:
    """``{"source": int64 (B, S), "mask": bool (B, S), "target": int64 (B, T + 1), "target_mask": bool (B, T)}``.

    The decoder reads ``target[:, :-1]``, which starts with ``PAD``, and predicts ``target[:, 1:]``; ``target_mask``
    says which of these count. Both sides end with the vocabulary's end, then ``PAD``. Every row has the same number of
    real tokens: a window has the most tokens whose source fits in ``length`` and whose target in ``target_length``
    (568 for 512 and 114 or more).

    Errors: ValueError for lengths below 3, a vocabulary without sentinels, more spans than it has sentinels.
    """

    length: int
    target_length: int
    vocabulary: Vocabulary

    def __post_init__(self) -> None:
        require_size("length", self.length, SMALLEST)
        require_size("target_length", self.target_length, SMALLEST)
        spans, most = span_counts(self.size)[1], self.vocabulary.sentinels
        require(spans <= most, "length", self.length, f"shorter: {spans} spans, the vocabulary has {most} sentinels")

    @cached_property
    def size(self) -> int:
        """Tokens of the text in one window."""
        size = 2
        while self._fits(size + 1):
            size += 1
        return size

    @property
    def stride(self) -> int:
        """Windows share no token."""
        return self.size

    def _fits(self, size: int) -> bool:
        noise, spans = span_counts(size)
        return size - noise + spans + 1 <= self.length and noise + spans + 1 <= self.target_length

    def __call__(self, windows: Tensor, rng: np.random.Generator) -> Batch:
        spans = random_spans(len(windows), self.size, rng)
        kept, lost = corrupt(windows.numpy(), spans, self.vocabulary.vocab_size)
        source, mask = self._filled(kept, self.length)
        target, target_mask = self._filled(lost, self.target_length)
        start = torch.full((len(windows), 1), PAD)
        return {"source": source, "mask": mask, "target": torch.cat([start, target], 1), "target_mask": target_mask}

    def _filled(self, rows: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
        filled = torch.full((len(rows), length), PAD)
        used = rows.shape[1] + 1
        filled[:, : used - 1] = torch.from_numpy(rows)
        filled[:, used - 1] = self.vocabulary.end
        return filled, (torch.arange(length) < used).expand(len(rows), -1)


def span_counts(size: int) -> tuple[int, int]:
    """(tokens taken out, spans) of a window of ``size`` tokens, both at least 1."""
    noise = max(1, round(size * NOISE))
    return noise, max(1, round(noise / MEAN_SPAN))


def random_spans(rows: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """For each token the number of its span, (rows, size): 0, 2, .. are kept, 1, 3, .. taken out.

    Every way to cut the kept and the lost tokens into their spans is equally likely.
    """
    noise, spans = span_counts(size)
    lengths = np.stack([_parts(rows, size - noise, spans, rng), _parts(rows, noise, spans, rng)], axis=2)
    numbers = np.tile(np.arange(2 * spans), rows)
    return np.repeat(numbers, lengths.ravel()).reshape(rows, size)


def corrupt(windows: np.ndarray, spans: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Source and target, without end and padding, of windows (B, size) under the numbers of :func:`random_spans`."""
    lost = spans % 2 == 1
    first = lost & np.diff(spans, axis=1, prepend=0).astype(bool)
    sentinels = vocab_size - 1 - spans // 2
    kept = ~lost | first
    source = np.where(lost, sentinels, windows)[kept].reshape(len(windows), -1)
    pairs = np.stack([sentinels, windows], axis=2)  # (B, size, 2): a sentinel stands before its span's first token
    target = pairs[np.stack([first, lost], axis=2)].reshape(len(windows), -1)
    return source, target


def _parts(rows: int, total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """``total`` as sums of ``parts`` random lengths of at least 1: (rows, parts)."""
    cuts = np.argsort(rng.random((rows, total - 1)), axis=1)[:, : parts - 1] + 1
    cuts.sort(axis=1)
    return np.diff(cuts, axis=1, prepend=0, append=total)
