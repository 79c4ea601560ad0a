"""From a ``DataConfig`` to batches: the train and validation split of any corpus behind one interface.

A source is fixed by its seed: batch i is the same whenever it is asked for, so a run that stopped after i batches goes
on with ``skip=i`` as if it had not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from ..checks import require, require_size
from . import c4
from .corpora import SPLITS, STREAMED, check_shipped, corpus_checksum, load_corpus
from .objectives import Batch, Causal, Objective, SpanCorruption
from .tokenizers import Vocabulary, vocabulary_of
from .toy import Digits, ToySource
from .windows import cut, token_row, token_stream

if TYPE_CHECKING:
    from ..training.config import DataConfig

BUFFER = 10_000  # documents of a stream among which the next is drawn


class Source(Protocol):
    """Batches of one split."""

    @property
    def windows(self) -> Tensor | None:
        """All windows in the text's order, int64 (n, tokens of a window); None for a stream."""

    def batches(self, batch: int, seed: int, skip: int = 0) -> Iterator[Batch]:
        """Batches of ``batch`` windows without end, the same for the same seed, after the first ``skip`` of them.

        Errors: ValueError for sizes that cannot be, a batch larger than the source.
        """


@dataclass(frozen=True)
class WindowSource:
    """A split in memory. Each pass goes through its windows in a new order, whole batches only; skipping is free."""

    cuts: Tensor  # int32 (n, objective.size), overlapping in memory
    objective: Objective

    @property
    def windows(self) -> Tensor:
        """All windows in the text's order, int64 (n, objective.size)."""
        return self.cuts.long()

    def batches(self, batch: int, seed: int, skip: int = 0) -> Iterator[Batch]:
        """As :class:`Source` says."""
        _check(batch, seed, skip)
        require(batch <= len(self.cuts), "batch", batch, f"at most the {len(self.cuts)} windows")
        return self._batches(batch, seed, skip)

    def _batches(self, batch: int, seed: int, skip: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        a_pass = len(self.cuts) // batch
        for number in count():
            order = torch.randperm(len(self.cuts), generator=generator)
            for index in range(max(number * a_pass, skip), (number + 1) * a_pass):
                start = (index - number * a_pass) * batch
                yield self.objective(self.cuts[order[start : start + batch]], _chance(seed, index))

    def in_order(self, batch: int) -> Iterator[Batch]:
        """Every window once, in the text's order, spans taken out always alike; the last batch may be smaller."""
        require_size("batch", batch)
        whole = self.objective(self.cuts, _chance(0, 0))
        for start in range(0, len(self.cuts), batch):
            yield {name: rows[start : start + batch] for name, rows in whole.items()}


@dataclass(frozen=True)
class StreamSource:
    """A split that is read while it is used, shuffled among ``BUFFER`` documents. Nothing of it stays on this machine.

    ``skip`` reads and encodes what was skipped, without making batches of it.
    """

    corpus: str
    vocabulary: Vocabulary
    objective: Objective
    windows: None = None

    def batches(self, batch: int, seed: int, skip: int = 0) -> Iterator[Batch]:
        """As :class:`Source` says. Errors, besides: those of :func:`.c4.documents`."""
        _check(batch, seed, skip)
        return self._batches(batch, seed, skip)

    def _batches(self, batch: int, seed: int, skip: int) -> Iterator[Batch]:
        windows = token_stream(self._documents(seed), self.vocabulary, self.objective.size, self.objective.stride)
        windows = islice(windows, skip * batch, None)
        for index in count(skip):
            yield self.objective(torch.stack(list(islice(windows, batch))), _chance(seed, index))

    def _documents(self, seed: int) -> Iterator[str]:
        stream = load_corpus(self.corpus)["train"].shuffle(seed=seed, buffer_size=BUFFER)
        for number in count():
            stream.set_epoch(number)  # another order
            empty = True
            for text in c4.documents(stream):
                empty = False
                yield text
            require(not empty, "corpus", self.corpus, "documents with something in them")


@dataclass(frozen=True)
class Splits:
    """What a training reads. ``checksum``: SHA-256 (hex) over what both splits' texts, or examples, come from."""

    train: WindowSource | StreamSource | ToySource
    validation: WindowSource | ToySource
    vocabulary: Vocabulary
    checksum: str

    @property
    def validation_windows(self) -> Tensor:
        """All windows of validation. Errors: ValueError for a task that has none."""
        if self.validation.windows is None:
            raise ValueError("objective = 'toy': must be one on text, to have windows")
        return self.validation.windows

    @property
    def vocab_size(self) -> int:
        """Ids that the model must know, sentinels among them."""
        return self.vocabulary.vocab_size


def load_splits(data: DataConfig) -> Splits:
    """Both splits of ``data.corpus``, tokenized and cut, from the cache where they are in it.

    Errors: those of ``load_corpus``; ValueError for lengths that cannot be, a split with too little text, a
    ``vocab_size`` that is not the tokenizer's.
    """
    if data.objective == "toy":
        source, digits = ToySource(data.corpus, 2, data.length, data.growing or 0), Digits()
        return Splits(source, source, digits, digits.checksum)
    check_shipped(data.corpus)
    checksums = "".join(corpus_checksum(data.corpus, split) for split in SPLITS)
    vocabulary = vocabulary_of(data)
    size = vocabulary.vocab_size
    require(data.vocab_size == size, "vocab_size", data.vocab_size, f"{size}, as tokenizer {data.tokenizer} has it")
    objective = _objective(data, vocabulary)
    validation = _whole(data.corpus, "validation", vocabulary, objective)
    train: WindowSource | StreamSource
    if data.corpus == STREAMED:
        train = StreamSource(data.corpus, vocabulary, objective)
    else:
        train = _whole(data.corpus, "train", vocabulary, objective)
    return Splits(train, validation, vocabulary, hashlib.sha256(checksums.encode()).hexdigest())


def _objective(data: DataConfig, vocabulary: Vocabulary) -> Objective:
    if data.target_length is not None:  # DataConfig: given with the objective "span" only
        return SpanCorruption(data.length, data.target_length, vocabulary)
    return Causal(data.length)


def _whole(corpus: str, split: str, vocabulary: Vocabulary, objective: Objective) -> WindowSource:
    row = token_row(corpus, split, vocabulary)
    return WindowSource(cut(row, objective.size, objective.stride, f"{corpus}, {split}"), objective)


def _chance(seed: int, index: int) -> np.random.Generator:
    """Chance of its own for every batch, so that no batch needs the ones before it."""
    return np.random.default_rng([seed, index])


def _check(batch: int, seed: int, skip: int) -> None:
    require_size("batch", batch)
    require_size("seed", seed, 0)
    require_size("skip", skip, 0)
