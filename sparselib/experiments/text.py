"""Real text in windows of tokens, as every experiment on language takes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..tasks.sources import load_splits
from ..tasks.tokenizers import Vocabulary
from ..training.config import DataConfig


@dataclass(frozen=True)
class Text:
    """A corpus cut for training: windows (n, length + 1) of both splits and the tokenizer that made them."""

    tokenizer: Vocabulary
    train: Tensor
    validation: Tensor


def load_text(corpus: str, vocab_size: int, length: int) -> Text:
    """``corpus`` under a BPE vocabulary learned on its training split.

    Errors: those of ``load_splits``; ValueError for a corpus that is streamed.
    """
    splits = load_splits(DataConfig(corpus=corpus, vocab_size=vocab_size, length=length))
    train = splits.train.windows
    if train is None:
        raise ValueError(f"corpus = {corpus!r}: must be one that is in memory, not a stream")
    return Text(splits.vocabulary, train, splits.validation_windows)
