"""Attention from the decoder to the encoder's output, whose keys and values are computed once and cached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..checks import check_batch, check_mask, check_sequence, require_multiple, require_size
from .attention import attend, split_heads
from .base import Advance, Chain, Dense, Layer, prefill_with, step_with
from .module_conv import ModuleConv
from .multiplicative import MultiplicativeDense


@dataclass(frozen=True)
class CrossAttentionState:
    """Keys and values of the source (B, H, T, dh), its mask (B, 1, 1, T) or None, the state of the query's layer."""

    keys: Tensor
    values: Tensor
    allowed: Tensor | None
    query: Any


class CrossAttention(Layer):
    """y = attend(query(x), m WK, m WV) WO with m the encoder's output: (B, L, d_model) -> the same.

    Dense: query(x) = x WQ, so that a decoded token reads 2 d_model^2 weights (section 1).
    """

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        require_size("n_heads", n_heads)
        require_multiple("d_model", d_model, n_heads, "n_heads")
        self.d_model, self.n_heads = d_model, n_heads
        self.query: Layer = Dense(d_model, d_model)
        self.key, self.value = Dense(d_model, d_model), Dense(d_model, d_model)
        self.output: Dense | None = Dense(d_model, d_model)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """``memory`` (B, T, d_model), ``mask`` (B, T) with 1 = real."""
        return self.prefill(x, self.init_state_from(memory, mask))[0]

    def init_state_from(self, memory: Tensor, mask: Tensor | None = None) -> CrossAttentionState:
        """State before the first position, with the keys and values of ``memory`` (B, T, d_model)."""
        check_sequence(memory, self.d_model, "memory")
        allowed = None if mask is None else check_mask(mask, *memory.shape[:2])[:, None, None]
        keys, values = (
            split_heads(self.key(memory), self.n_heads),
            split_heads(self.value(memory), self.n_heads),
        )
        return CrossAttentionState(keys, values, allowed, self.query.init_state(len(memory)))

    def prefill(self, x: Tensor, state: CrossAttentionState) -> tuple[Tensor, CrossAttentionState]:
        return self._advance(x, state, prefill_with)

    def step(self, x_t: Tensor, state: CrossAttentionState) -> tuple[Tensor, CrossAttentionState]:
        y, state = self._advance(x_t[:, None], state, step_with)
        return y[:, 0], state

    def _advance(self, x: Tensor, state: CrossAttentionState, how: Advance) -> tuple[Tensor, CrossAttentionState]:
        check_sequence(x, self.d_model)
        check_batch(x, len(state.keys))
        q, query_state = how(self.query, x, state.query)
        y = attend(split_heads(q, self.n_heads), state.keys, state.values, state.allowed)
        return (y if self.output is None else self.output(y)), replace(state, query=query_state)


class SparseCrossAttention(CrossAttention):
    """query(x) = conv(mult(x)) and no output layer, as in the sparse self-attention (section 3.2)."""

    def __init__(self, d_model: int, n_heads: int, n_modules: int, kernel_size: int = 3):
        super().__init__(d_model, n_heads)
        mult = MultiplicativeDense(d_model, d_model, n_modules)
        self.query = Chain(mult, ModuleConv(d_model, n_modules, kernel_size))
        self.output = None
