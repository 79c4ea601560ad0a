"""Self-attention by hashing, with dense or sparse projections (section 4: Terraformer for long sequences).

Letters: H = n_heads, dh = d_model/H, R = n_hashes; qk = (q + k) / 2 is query and key at once (reference code).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import require, require_multiple, require_size
from .attention import AttentionState, SelfAttention, merge_heads
from .base import Dense, Layer
from .decisions import choose
from .lsh import LSHSizes, bucket_attend, full_attend, hash_buckets, lsh_attend, normalized
from .module_conv import ModuleConv
from .multiplicative import MultiplicativeDense


@dataclass(frozen=True)
class LSHState(AttentionState):
    """As in any attention, with the keys normalised, and the buckets of all positions so far: ints (B, H, R, T).

    Positions that are not ``real`` are in ``padding_bucket``, which no query is in.
    """

    buckets: Tensor = field(kw_only=True)

    padding_bucket: int = field(kw_only=True)

    @staticmethod
    def join(states: Sequence[Any]) -> LSHState:
        joined, number = AttentionState.join(states), states[0].padding_bucket
        width = joined.keys.shape[2]
        rows = [nn.functional.pad(s.buckets, (0, width - s.buckets.shape[3]), value=number) for s in states]
        parts = dict(layers=joined.layers, real=joined.real, padding_bucket=number)
        return LSHState(joined.keys, joined.values, **parts, buckets=torch.cat(rows))


class LSHAttention(SelfAttention):
    """y = output(attention by hashing of (q(h) + k(h)) / 2 and v(h)), h = shared(x); sizes: :class:`LSHSizes`.

    Up to ``full_below`` positions all see all, by the same rules. Above, ``forward`` sorts the sequence by bucket and
    cuts it in chunks (:func:`lsh_attend`); the fixed cuts part positions of one bucket, and let some of other buckets
    in. That needs the whole sequence, so ``step`` does what those chunks stand for (:func:`bucket_attend`): it sees the
    latest chunk_len (n_chunks_before + 1) earlier positions of its own bucket in each round, and nobody of another.
    ``prefill`` equals the steps, not the forward. All are equal if one bucket holds all and a chunk covers the length.
    In decoding the first ``full_below`` positions of a row keep full attention, however many follow. Padding does not
    count: a row of a batch is attended to in full if it were so alone.

    Buckets come from ``rotations`` (H, R, dh, half the sum of the factors of n_buckets), a buffer drawn once; while
    training, forward draws others at every call, the same for all sequences of the batch. Errors: ValueError for a
    ``prefix_length``, else as in any self-attention.
    """

    rotations: Tensor

    def __init__(self, n_heads: int, sizes: LSHSizes, *, d_model: int, **projections: Any):
        super().__init__(n_heads, d_model=d_model, **projections)
        self.sizes = sizes
        shape = (n_heads, sizes.n_hashes, d_model // n_heads, sum(sizes.factors) // 2)
        self.register_buffer("rotations", torch.randn(shape))  # saved with the weights: decoding depends on them

    def init_state(self, batch: int) -> LSHState:
        before = super().init_state(batch)
        buckets = torch.zeros(batch, self.n_heads, self.sizes.n_hashes, 0, dtype=torch.long, device=before.keys.device)
        number = self.sizes.padding_bucket
        return LSHState(before.keys, before.values, before.layers, buckets=buckets, padding_bucket=number)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, prefix_length: Tensor | None) -> Tensor:
        _refuse(prefix_length)
        qk = (q + k) / 2
        if qk.shape[2] <= self.sizes.full_below:
            return merge_heads(full_attend(qk, normalized(qk), v, self.causal, mask))
        # Drawn outside of the choice: when it is repeated, the generator moves on as it did the first time.
        rotations = torch.randn_like(self.rotations) if self.training else self.rotations
        buckets = choose(lambda: hash_buckets(qk, rotations, self.sizes, mask), self.sizes.padding_bucket + 1)
        y = lsh_attend(qk, v, buckets, self.sizes, self.causal, mask)
        return merge_heads(y if mask is None else self._short_in_full(y, qk, v, mask))

    def _short_in_full(self, y: Tensor, qk: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """``y`` with full attention in the rows that have nothing real behind the first ``full_below`` positions."""
        n = self.sizes.full_below
        short = ~mask[:, n:].any(1)
        if not n or not short.any():
            return y
        full = full_attend(qk[:, :, :n], normalized(qk[:, :, :n]), v[:, :, :n], self.causal, mask[:, :n])
        return torch.cat([torch.where(short[:, None, None, None], full, y[:, :, :n]), y[:, :, n:]], dim=2)

    def _attend_on(
        self, q: Tensor, k: Tensor, v: Tensor, state: Any, prefix_length: Tensor | None
    ) -> tuple[Tensor, LSHState]:
        _refuse(prefix_length)
        qk = (q + k) / 2
        buckets = choose(lambda: hash_buckets(qk, self.rotations, self.sizes), self.sizes.padding_bucket + 1)
        real = state.real if state.real is None else nn.functional.pad(state.real, (0, qk.shape[2]), value=True)
        state = replace(
            state,
            real=real,
            keys=torch.cat([state.keys, normalized(qk)], dim=2),
            values=torch.cat([state.values, v], dim=2),
            buckets=torch.cat([state.buckets, buckets], dim=3),
        )
        return merge_heads(self._decode(qk, state)), state

    def _decode(self, q: Tensor, state: LSHState) -> Tensor:
        """The last positions of ``state``, a chunk at a time, which bounds the memory."""
        total = state.keys.shape[2]
        past, y = total - q.shape[2], []
        for start in range(past, total, self.sizes.chunk_len):
            stop = min(total, start + self.sizes.chunk_len)
            y.append(self._decode_chunk(q[:, :, start - past : stop - past], state, stop))
        return torch.cat(y, dim=2)

    def _decode_chunk(self, q: Tensor, state: LSHState, stop: int) -> Tensor:
        """The queries of the positions before ``stop``: full attention if its place in its row is below
        ``full_below``, else buckets."""
        keys, v, start = state.keys[:, :, :stop], state.values[:, :, :stop], stop - q.shape[2]
        real = None if state.real is None else state.real[:, :stop]
        places = torch.arange(stop, device=q.device)[None] if real is None else real.cumsum(1) - 1  # (1 or B, T)
        in_full = places[:, start:] < self.sizes.full_below  # (1 or B, L)
        if in_full.all():
            return full_attend(q, keys, v, mask=real)
        found = bucket_attend(q, keys, v, state.buckets[..., :stop], self.sizes.window)
        if not in_full.any():
            return found
        return torch.where(in_full[:, None, :, None], full_attend(q, keys, v, mask=real), found)


class DenseLSHAttention(LSHAttention):
    """Dense q, k, v and output, with biases. ``sizes``: the fields of :class:`LSHSizes`."""

    def __init__(self, d_model: int, n_heads: int, causal: bool = True, **sizes: Any):
        require_size("d_model", d_model)
        q, k, v, output = (Dense(d_model, d_model) for _ in range(4))
        hashing = LSHSizes(**sizes)
        super().__init__(n_heads, hashing, q=q, k=k, v=v, output=output, d_model=d_model, causal=causal)


class SparseLSHAttention(LSHAttention):
    """q, k, v = convolutions of mult(x) and no output layer (section 3.2, ``mult_conv``). ``sizes``: as above."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_modules: int,
        kernel_size: int = 3,
        *,
        value_kernel_size: int | None = None,
        causal: bool = True,
        **sizes: Any,
    ):
        require_size("n_modules", n_modules)
        require_multiple("d_model", d_model, n_modules, "n_modules")

        def conv(module_kernel: int | None = None) -> Layer:
            return ModuleConv(d_model, n_modules, kernel_size, module_kernel)

        shared, hashing = MultiplicativeDense(d_model, d_model, n_modules), LSHSizes(**sizes)
        parts = dict(shared=shared, q=conv(), k=conv(), v=conv(value_kernel_size))
        super().__init__(n_heads, hashing, **parts, d_model=d_model, causal=causal)


def _refuse(prefix_length: Tensor | None) -> None:
    require(prefix_length is None, "prefix_length", prefix_length, "None: attention by hashing has no prefix")
