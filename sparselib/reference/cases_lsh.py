"""The cases of attention by hashing (section 8 of tests/golden/README.md): B, H, R, L, dh and T as there."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import require, require_choice
from ..layers import DenseLSHAttention, LSHAttention, LSHSizes, SparseLSHAttention, lsh_attend
from ..layers.decisions import remembered
from ..layers.lsh import hash_buckets
from .golden import Comparison, GoldenFile
from .weights import Weights


def lsh_attention(file: GoldenFile, compare: Comparison) -> None:
    sizes, mask = LSHSizes(**_sizes(file)), _mask(file)
    qk, v, cotangent = (_in_heads(file, f"in.{name}") for name in ("qk", "v", "cotangent"))
    qk.requires_grad_()
    v.requires_grad_()
    buckets = hash_buckets(qk, _rotations(file), sizes, mask)
    _compare_buckets(compare, buckets, sizes, mask)
    y = lsh_attend(qk, v, buckets, sizes, file.arg("causal"), mask)
    (y * cotangent).sum().backward()
    y, rows = y.flatten(0, 1), file["in.compare_rows"].bool()
    compare.value("out.y", y, rows=rows)
    real = True if mask is None else mask.bool().repeat_interleave(file.arg("n_heads"), dim=0)
    compare.value("in.v", y, "positions that see nobody else", rows=~rows & real)
    for name, leaf in (("qk", qk), ("v", v)):
        assert leaf.grad is not None
        compare.gradient(f"grad.{name}", leaf.grad.flatten(0, 1))


def lsh_block(file: GoldenFile, compare: Comparison) -> None:
    layer, mask = _layer(file), _mask(file)
    weights = Weights(file, layer)
    weights.attention("w.", layer)
    weights.finish()
    layer.rotations = _rotations(file)
    with remembered() as choices:
        y = layer(file["in.x"], mask)
    _compare_buckets(compare, choices[0], layer.sizes, mask)
    compare.value("out.y", y, rows=file["in.compare_rows"].bool())


def _layer(file: GoldenFile) -> LSHAttention:
    require(file.arg("num_weights") == 3, "num_weights", file.arg("num_weights"), "3: q, k and v")
    require_choice("weights_format", file.arg("weights_format"), ("model", "sparse"))
    d_model, causal = file.arg("n_heads") * file.arg("d_head"), file.arg("causal")
    if file.args["weights_format"] == "model":
        return DenseLSHAttention(d_model, file.arg("n_heads"), causal, **_sizes(file)).eval()
    options = dict(value_kernel_size=1, causal=causal, **_sizes(file))
    return SparseLSHAttention(d_model, file.arg("n_heads"), file.arg("sparsity"), **options).eval()


def _sizes(file: GoldenFile) -> dict:
    """The fields of :class:`LSHSizes`."""
    names = ("n_hashes", "chunk_len", "n_chunks_before", "n_chunks_after")
    n_buckets = file.arg("n_buckets")
    n_buckets = tuple(n_buckets) if isinstance(n_buckets, list) else n_buckets
    return {name: file.arg(name) for name in names} | dict(n_buckets=n_buckets)


def _mask(file: GoldenFile) -> Tensor | None:
    return file["in.mask"] if file.arg("masked") else None


def _in_heads(file: GoldenFile, key: str) -> Tensor:  # [B*H, ...] -> (B, H, ...)
    return file[key].unflatten(0, (-1, file.arg("n_heads")))


def _rotations(file: GoldenFile) -> Tensor:
    return _in_heads(file, "in.rotations").transpose(2, 3)  # (B, H, R, dh, m)


def _compare_buckets(compare: Comparison, buckets: Tensor, sizes: LSHSizes, mask: Tensor | None) -> None:
    """Ours (B, H, R, L) count from 0 in every round, the file's [B*H, R*L] through all rounds."""
    in_a_round = sizes.padding_bucket + (mask is not None)  # T
    through = buckets + in_a_round * torch.arange(sizes.n_hashes)[:, None]
    compare.value("mid.buckets", through.flatten(2).flatten(0, 1))
