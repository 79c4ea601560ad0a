"""The output layer from d_model to the vocabulary: dense, or the paper's sparse loss (section 3.3)."""

from __future__ import annotations

from .base import Dense
from .multiplicative import MultiplicativeDense


class DenseUnembedding(Dense):
    """logits = x W + b, d_model vocab_size + vocab_size weights."""

    def __init__(self, d_model: int, vocab_size: int):
        super().__init__(d_model, vocab_size)


class SparseUnembedding(MultiplicativeDense):
    """logits[s * vocab_size/S_loss + m] = sum_i x_i D[i, s] E[i, m] + b: the sparse loss with S_loss modules.

    Weights: d_model S_loss + d_model vocab_size / S_loss + vocab_size.
    """

    def __init__(self, d_model: int, vocab_size: int, loss_sparsity: int):
        super().__init__(d_model, vocab_size, loss_sparsity)
