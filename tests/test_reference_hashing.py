"""The checker of golden files passes on files of attention by hashing of other sizes, made by loops in float64.

Letters and formulas are those of tests/golden/README.md, section 8.
"""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sparselib.layers import LSHSizes

from . import slow
from .test_reference_sizes import Generator, few, seeds, size


def hashed(g, qk, v, H, sizes, causal, mask):
    """y and compare_rows [B*H, L, ...] of section 8 for qk and v [B*H, L, dh], and the function with these buckets."""
    n, L, dh = qk.shape
    R, T = sizes.n_hashes, sizes.padding_bucket + (mask is not None)
    rotations = g.draw("in.rotations", n, dh, R, sum(sizes.factors) // 2).transpose(0, 2, 1, 3)
    real = np.ones((n, L), bool) if mask is None else np.repeat(mask, H, axis=0) == 1
    buckets = np.array([[slow.lsh_buckets(x, rotations[i], sizes.factors) for x in qk[i]] for i in range(n)])
    buckets = np.where(real[..., None], buckets, T - 1).transpose(0, 2, 1)  # [B*H, R, L]

    def attention(qk, v):
        return np.array([slow.lsh_attention(qk[i], v[i], buckets[i], sizes, causal, real[i]) for i in range(n)])

    y = attention(qk, v)
    g.tensors["mid.buckets"] = (buckets + T * np.arange(R)[:, None]).reshape(n, R * L)
    return y, real & (y != v).any(-1), attention


def by_differences(function, at, cotangent):
    """Gradient of sum(cotangent * function(at))."""
    gradient, step = np.zeros_like(at), 1e-6
    for place in np.ndindex(at.shape):
        shift = np.zeros_like(at)
        shift[place] = step
        gradient[place] = ((function(at + shift) - function(at - shift)) * cotangent).sum() / (2 * step)
    return gradient


hashing = st.fixed_dictionaries(
    dict(
        n_hashes=st.integers(1, 3),
        n_buckets=st.sampled_from([2, 6, [4, 2]]),
        chunk_len=st.integers(1, 3),
        n_chunks_before=st.integers(0, 2),
        n_chunks_after=st.integers(0, 1),
    )
)


def sizes_and_mask(g, args, B, n_chunks, masked):
    n_buckets = args["n_buckets"]
    sizes = LSHSizes(**{**args, "n_buckets": tuple(n_buckets) if isinstance(n_buckets, list) else n_buckets})
    L = args["chunk_len"] * n_chunks
    mask = None
    if masked:
        mask = g.tensors["in.mask"] = 1 * (np.arange(L) < g.rng.integers(1, L + 1, (B, 1)))
    return sizes, L, mask


@few
@given(args=hashing, n_chunks=st.integers(1, 3), causal=st.booleans(), masked=st.booleans(), seed=seeds)
def test_other_hashing(args, n_chunks, causal, masked, seed):
    g, B, H, dh = Generator(seed), 2, 2, 2
    sizes, L, mask = sizes_and_mask(g, args, B, n_chunks, masked)
    qk, v, cotangent = g.draws("in.", qk=(B * H, L, dh), v=(B * H, L, dh), cotangent=(B * H, L, dh))
    y, rows, attention = hashed(g, qk, v, H, sizes, causal, mask)
    cotangent = cotangent * rows[..., None]
    g.tensors |= {"out.y": y, "in.compare_rows": 1 * rows, "in.cotangent": cotangent}
    g.tensors["grad.qk"] = by_differences(lambda z: attention(z, v), qk, cotangent)
    g.tensors["grad.v"] = by_differences(lambda z: attention(qk, z), v, cotangent)
    g.check(case="lsh_attention", n_heads=H, d_head=dh, causal=causal, masked=masked, **args)


@few
@given(
    args=hashing,
    S=st.none() | size,
    H=size,
    m=size,
    n_chunks=size,
    causal=st.booleans(),
    masked=st.booleans(),
    seed=seeds,
)
def test_other_blocks_of_hashing(args, S, H, m, n_chunks, causal, masked, seed):
    g, B, d = Generator(seed), 2, math.lcm(H, S or 1) * m
    sizes, L, mask = sizes_and_mask(g, args, B, n_chunks, masked)
    h = g.draw("in.x", B, L, d)
    if S:
        h = g.mult("w.mult.", S, d, d)(h)
        layers = [g.conv(f"w.conv_{name}.", S, 3, 1 if name == "v" else 3, d // S, d // S) for name in "qkv"]
    else:
        layers = [g.dense(f"w.{name}.", d, d) for name in "qkv"]
    q, k, v = (layer(h).reshape(B, L, H, -1).swapaxes(1, 2).reshape(B * H, L, -1) for layer in layers)
    y, rows, _ = hashed(g, (q + k) / 2, v, H, sizes, causal, mask)
    y = y.reshape(B, H, L, -1).swapaxes(1, 2).reshape(B, L, d)
    g.tensors["out.y"] = y if S else g.dense("w.o.", d, d)(y)
    g.tensors["in.compare_rows"] = 1 * rows.reshape(B, H, L).all(1)
    options = dict(sparsity=S, weights_format="sparse" if S else "model", num_weights=3)
    g.check(case="lsh_block", n_heads=H, d_head=d // H, causal=causal, masked=masked, **options, **args)
