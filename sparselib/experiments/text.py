"""Real text in windows of tokens, as every experiment on language takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..tasks.corpora import load_corpus, pack
from ..tasks.tokenizers import bpe_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Text:
    """A corpus cut for training: windows (n, length + 1) of both splits and the tokenizer that made them."""

    tokenizer: Tokenizer
    train: Tensor
    validation: Tensor


def load_text(corpus: str, vocab_size: int, length: int) -> Text:
    """``corpus`` under a BPE vocabulary learned on its training split."""
    tokenizer = bpe_tokenizer(corpus, vocab_size)
    splits = load_corpus(corpus)
    windows = {split: pack(splits[split]["text"], tokenizer, length) for split in ("train", "validation")}
    return Text(tokenizer, windows["train"], windows["validation"])
