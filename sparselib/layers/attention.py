"""Multi-head self-attention whose projections are any layers: dense, or the sparse ones of section 3.2.

Letters: H = n_heads, dh = d_model/H, S = n_modules, F = kernel_size, P = positions before a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import (
    check_batch,
    check_mask,
    check_prefix,
    check_sequence,
    require,
    require_choice,
    require_multiple,
    require_size,
)
from ..config import ATTENTIONS
from .base import Advance, Chain, Dense, Layer, join_states, prefill_with, step_with
from .module_conv import ModuleConv
from .multiplicative import MultiplicativeDense


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """(B, L, d_model) -> (B, H, L, dh), heads contiguous."""
    return x.unflatten(2, (n_heads, -1)).transpose(1, 2)


def merge_heads(y: Tensor) -> Tensor:
    """(B, H, L, dh) -> (B, L, d_model)."""
    return y.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(dh)) v over the allowed keys (to (B, H, L, T), None: all), heads merged: (B, L, d_model).

    ``causal`` instead of ``allowed``: keys up to a query's own position, without a table of (L, L) ever written.
    """
    return merge_heads(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=causal))


def attend_slowly(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
    """The same, written to be read: the reference that tests hold :func:`attend` to."""
    z = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])  # (B, H, L, T)
    if allowed is not None:
        z = z.masked_fill(~allowed, -math.inf)
    return merge_heads(z.softmax(-1) @ v)


def visible(
    length: int,
    past: int,
    causal: bool,
    mask: Tensor | None,
    prefix_length: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Which of past + length keys each of the last ``length`` positions may see: bool (1 or B, 1, L, P + L), None: all.

    Causal: keys up to itself, and those before ``prefix_length`` (B,) from anywhere. ``mask`` (B, P + L) takes padding
    away, but leaves a causal position itself, so that no row of the softmax is empty.
    """
    keys = torch.arange(past + length, device=device)
    allowed = None
    if causal:
        allowed = (keys <= keys[past:, None])[None, None]  # (1, 1, L, P + L)
        if prefix_length is not None:
            allowed = allowed | (keys < prefix_length[:, None, None, None])
    if mask is not None:
        real = mask[:, None, None]
        allowed = real if allowed is None else (allowed & real) | (keys == keys[past:, None])
    return allowed


def attend_visible(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, prefix_length: Tensor | None
) -> Tensor:
    """:func:`attend` of the last L positions, q, on the T keys of all, over what :func:`visible` allows them."""
    length, past = q.shape[2], k.shape[2] - q.shape[2]
    if causal and not past and mask is None and prefix_length is None:
        return attend(q, k, v, causal=True)
    return attend(q, k, v, visible(length, past, causal, mask, prefix_length, q.device))


@dataclass(frozen=True)
class AttentionState:
    """Keys and values so far, (B, H, T, dh) each, and the states of the layers that make q, k, v and the output.

    ``real`` (B, T) says which of them are there, where sequences of several lengths were joined; None: all.
    """

    keys: Tensor
    values: Tensor
    layers: dict[str, Any]
    real: Tensor | None = None

    @staticmethod
    def join(states: Sequence[AttentionState]) -> AttentionState:
        """One state of single sequences, which need not have the same length."""
        lengths = [state.keys.shape[2] for state in states]
        keys, values = (
            torch.cat([nn.functional.pad(x, (0, 0, 0, max(lengths) - x.shape[2])) for x in parts])
            for parts in ([state.keys for state in states], [state.values for state in states])
        )
        real = torch.arange(max(lengths), device=keys.device) < torch.tensor(lengths, device=keys.device)[:, None]
        return AttentionState(keys, values, join_states([state.layers for state in states]), real)


class SelfAttention(Layer):
    """y = output(attend(q(h), k(h), v(h))) with h = shared(x); any of shared and output may be missing.

    ``k=None`` shares q's layer (and tensor) between both. ``v_modules`` > 0 gives v, in each of so many
    modules, the features of h followed by those of x. Causal unless said otherwise; only a causal one decodes.
    """

    def __init__(
        self,
        n_heads: int,
        *,
        q: Layer,
        k: Layer | None,
        v: Layer,
        shared: Layer | None = None,
        output: Layer | None = None,
        d_model: int,
        causal: bool = True,
        v_modules: int = 0,
    ):
        super().__init__()
        require_size("n_heads", n_heads)
        require_multiple("d_model", d_model, n_heads, "n_heads")
        self.d_model, self.n_heads, self.causal, self.v_modules = d_model, n_heads, causal, v_modules
        self.shared, self.q, self.k, self.v, self.output = shared, q, k, v, output

    def forward(self, x: Tensor, mask: Tensor | None = None, prefix_length: Tensor | None = None) -> Tensor:
        """(B, L, d_model) -> the same. ``mask`` (B, L): 1 = real; ``prefix_length`` (B,): seen from everywhere."""
        check_sequence(x, self.d_model)
        mask = None if mask is None else check_mask(mask, *x.shape[:2])
        if prefix_length is not None:
            check_prefix(prefix_length, len(x))
        q, k, v = self._project(x, lambda name, z: getattr(self, name)(z))
        y = self._attend(q, k, v, mask, prefix_length)
        return y if self.output is None else self.output(y)

    def init_state(self, batch: int) -> AttentionState:
        require(self.causal, "causal", self.causal, "True to decode token by token")
        require_size("batch", batch, minimum=0)
        weight = next(self.parameters())
        empty = weight.new_zeros(batch, self.n_heads, 0, self.d_model // self.n_heads)
        return AttentionState(
            empty, empty, {name: getattr(self, name).init_state(batch) for name, _ in self.named_children()}
        )

    def prefill(
        self, x: Tensor, state: AttentionState, prefix_length: Tensor | None = None
    ) -> tuple[Tensor, AttentionState]:
        return self._advance(x, state, prefix_length, prefill_with)

    def step(self, x_t: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        y, state = self._advance(x_t[:, None], state, None, step_with)
        return y[:, 0], state

    def _advance(
        self, x: Tensor, state: AttentionState, prefix_length: Tensor | None, how: Advance
    ) -> tuple[Tensor, AttentionState]:
        check_sequence(x, self.d_model)
        check_batch(x, len(state.keys))
        states = {}

        def apply(name: str, z: Tensor) -> Tensor:
            y, states[name] = how(getattr(self, name), z, state.layers[name])
            return y

        q, k, v = self._project(x, apply)
        y, state = self._attend_on(q, k, v, state, prefix_length)
        y = y if self.output is None else apply("output", y)
        return y, replace(state, layers=states)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, prefix_length: Tensor | None) -> Tensor:
        """Attention of a whole sequence: (B, H, L, dh) three times -> (B, L, d_model)."""
        return attend_visible(q, k, v, self.causal, mask, prefix_length)

    def _attend_on(
        self, q: Tensor, k: Tensor, v: Tensor, state: AttentionState, prefix_length: Tensor | None
    ) -> tuple[Tensor, AttentionState]:
        """Attention of the positions that follow ``state``, and the state with them, still with its old ``layers``."""
        keys, values = torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2)
        real = state.real if state.real is None else nn.functional.pad(state.real, (0, q.shape[2]), value=True)
        y = attend_visible(q, keys, values, True, real, prefix_length)
        return y, replace(state, keys=keys, values=values, real=real)

    def _project(self, x: Tensor, apply: Callable[[str, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v in heads; ``apply(name, z)`` runs the layer of that name."""
        h = x if self.shared is None else apply("shared", x)
        q = apply("q", h)
        k = q if self.k is None else apply("k", h)
        if self.v_modules:
            modules = [z.unflatten(2, (self.v_modules, -1)) for z in (h, x)]
            h = torch.cat(modules, dim=3).flatten(2)  # (B, L, S * 2M)
        v = apply("v", h)
        return split_heads(q, self.n_heads), split_heads(k, self.n_heads), split_heads(v, self.n_heads)


class DenseAttention(SelfAttention):
    """Q = x WQ, K = x WK, V = x WV, y = attend(Q, K, V) WO, with biases: 4 d_model^2 weights (section 1)."""

    def __init__(self, d_model: int, n_heads: int, causal: bool = True):
        require_size("d_model", d_model)
        q, k, v, output = (Dense(d_model, d_model) for _ in range(4))
        super().__init__(n_heads, q=q, k=k, v=v, output=output, d_model=d_model, causal=causal)


class SparseAttention(SelfAttention):
    """The variants of section 3.2 and figure 5, by ``kind``:

    - ``mult``: q, k, v and the output each a multiplicative layer; ``conv``: each a convolution over modules;
    - ``mult_conv``: Q = convQ(mult(x)), K = convK(mult(x)), V = convV(mult(x)), mult shared, no output layer;
    - ``mult_conv_output``: the same with an output layer conv(mult(y)).

    ``n_heads`` and ``n_modules`` are independent here; the paper takes them equal. ``value_kernel_size`` is the width
    of V's kernel over modules (paper: F, reference code: 1). Two options of the reference code: ``share_qk`` uses one
    tensor as queries and keys, ``v_sees_input`` lets V's convolution see h and x side by side in every module.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_modules: int,
        kernel_size: int = 3,
        kind: str = "mult_conv",
        *,
        value_kernel_size: int | None = None,
        causal: bool = True,
        share_qk: bool = False,
        v_sees_input: bool = False,
    ):
        require_choice("kind", kind, ATTENTIONS[1:])
        require_size("n_modules", n_modules)
        require_multiple("d_model", d_model, n_modules, "n_modules")

        def mult() -> Layer:
            return MultiplicativeDense(d_model, d_model, n_modules)

        def conv(module_kernel: int | None = None, d_in: int = d_model) -> Layer:
            return ModuleConv(d_in, n_modules, kernel_size, module_kernel, d_out=d_model)

        make = mult if kind == "mult" else conv
        v = mult() if kind == "mult" else conv(value_kernel_size, d_model * (1 + v_sees_input))
        outputs = {
            "mult": mult,
            "conv": conv,
            "mult_conv": lambda: None,
            "mult_conv_output": lambda: Chain(mult(), conv()),
        }
        super().__init__(
            n_heads,
            q=make(),
            k=None if share_qk else make(),
            v=v,
            shared=mult() if kind.startswith("mult_conv") else None,
            output=outputs[kind](),
            d_model=d_model,
            causal=causal,
            v_modules=n_modules * v_sees_input,
        )
