"""Attention among positions of one bucket: locality-sensitive hashing (Kitaev et al. 2020, taken over in section 4).

No weights here: :mod:`~sparselib.layers.lsh_attention` has the layers. Query and key are one vector qk, so that like
sees like. Keys are normalised, queries are not; a position sees itself only if there is nothing else.
:func:`full_attend` keeps these rules and does without buckets.

Letters: H heads of width dh; R = n_hashes rounds; C = chunk_len; n chunks, each with the keys of K = n_chunks_before
+ 1 + n_chunks_after chunks; T keys; W = C (n_chunks_before + 1), how far back one position looks in decoding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..checks import require
from ..config import LSHSizes


def hash_buckets(qk: Tensor, rotations: Tensor, sizes: LSHSizes, mask: Tensor | None = None) -> Tensor:
    """Bucket of every position in every round: ints (B, H, R, L), counted from 0 in each round.

    ``qk`` (B, H, L, dh); ``rotations`` (H, R, dh, m), or with a batch in front, where m is half the sum of the factors
    of ``n_buckets``; ``mask`` (B, L), 1 = real. With u = qk . rotation the bucket is the arg-max of [u, -u]; of several
    factors n1, n2, ..., each with its own slice of u, it is a1 + n1 a2 + n1 n2 a3 ...
    """
    halves = [n // 2 for n in sizes.factors]
    shape = (qk.shape[1], sizes.n_hashes, qk.shape[3], sum(halves))
    require(rotations.shape[-4:] == shape, "rotations.shape", tuple(rotations.shape), f"{shape}")
    u = qk.detach()[:, :, None] @ rotations  # (B, H, R, L, m)
    buckets = torch.zeros(u.shape[:-1], dtype=torch.long, device=u.device)
    below = 1
    for part, half in zip(u.split(halves, dim=-1), halves, strict=True):
        buckets += below * torch.cat([part, -part], dim=-1).argmax(-1)
        below *= 2 * half
    return buckets if mask is None else buckets.masked_fill(~_real(mask, qk)[:, None, None], sizes.padding_bucket)


def normalized(qk: Tensor) -> Tensor:
    """The keys of ``qk``: each divided by the root of its mean square."""
    return nn.functional.rms_norm(qk, qk.shape[-1:], eps=1e-6)


def lsh_attend(
    qk: Tensor, v: Tensor, buckets: Tensor, sizes: LSHSizes, causal: bool = True, mask: Tensor | None = None
) -> Tensor:
    """Every position attends to the positions near it in the list sorted by bucket: (B, H, L, dh) -> the same.

    All rounds' (bucket, position) make one list, cut in n chunks of C; the chunk before the first is the last. What a
    query finds twice among its chunks counts twice, but no chunk comes twice. So with one bucket it is full attention
    if a query finds all that it may see equally often: with one round and enough neighbours, or with chunks over the
    whole length. Lengths are filled up to a multiple of C with padding. The rounds' results are combined by their sums
    of exp(z), z = qk_t . k_s / sqrt(dh). ``mask`` (B, L): 1 = real. ``buckets`` (B, H, R, L) are constants for the
    gradient. Memory: R L K C scores, R L K dh numbers of keys. Causal means that no position sees a later one; which of
    the earlier ones it finds does depend on where later ones fall in the list. Errors: ValueError for shapes that do
    not fit.
    """
    require(qk.ndim == 4 and v.shape[:3] == qk.shape[:3], "v.shape", tuple(v.shape), f"{tuple(qk.shape)}, as qk")
    shape = (*qk.shape[:2], sizes.n_hashes, qk.shape[2])
    require(buckets.shape == shape, "buckets.shape", tuple(buckets.shape), f"{shape}")
    length, extra = qk.shape[2], -qk.shape[2] % sizes.chunk_len
    real = qk.new_ones(len(qk), length, dtype=torch.bool) if mask is None else _real(mask, qk)
    padded = nn.functional.pad(buckets, (0, extra), value=sizes.padding_bucket)
    order = padded.sort(dim=-1, stable=True).indices  # (B, H, R, L'): rounds share no bucket, each is sorted by itself
    place = order.flatten(2).unflatten(2, (-1, sizes.chunk_len))  # (B, H, n, C): position of every item of the list

    def listed(z: Tensor) -> Tensor:  # (B, H, L, w) -> (B, H, n, C, w)
        filled = nn.functional.pad(z, (0, 0, 0, extra))
        return filled.take_along_dim(order.flatten(2)[..., None], dim=2).unflatten(2, place.shape[2:])

    allowed = _others(place, _beside(place, sizes), causal)  # (B, H, n, C, K C)
    allowed &= _beside(listed(real[:, None, :, None]), sizes)[..., None, :, 0]
    o, lse = _attend(listed(qk), _beside(listed(normalized(qk)), sizes), _beside(listed(v), sizes), allowed)
    back = order.argsort(-1)[..., :length, None]  # where in its round's part of the list a position went

    def unlisted(z: Tensor) -> Tensor:  # (B, H, n, C, w) -> (B, H, R, L, w)
        return z.flatten(2, 3).unflatten(2, order.shape[2:]).take_along_dim(back, dim=3)

    return _combine(unlisted(o), unlisted(lse), v)


def full_attend(q: Tensor, keys: Tensor, v: Tensor, causal: bool = True, mask: Tensor | None = None) -> Tensor:
    """The last L of T positions attend to all, by the same rules: ``q`` (B, H, L, dh) -> the same.

    ``keys`` (normalised) and ``v`` (B, H, T, dh); ``mask`` (B, T): 1 = real.
    """
    place = torch.arange(keys.shape[2], device=q.device)
    allowed = _others(place[-q.shape[2] :], place, causal)  # (L, T)
    if mask is not None:
        allowed = allowed & _real(mask, keys)[:, None, None]
    o, lse = _attend(q, keys, v, allowed)
    return _combine(o[:, :, None], lse[:, :, None], v[:, :, -q.shape[2] :])


def bucket_attend(q: Tensor, keys: Tensor, v: Tensor, buckets: Tensor, window: int) -> Tensor:
    """The rule of decoding, for the last L of T positions: (B, H, L, dh) -> the same, as if one after another.

    In every round a query sees the latest ``window`` keys before it that share its bucket; rounds are combined as in
    :func:`lsh_attend`. ``keys`` (normalised) and ``v`` (B, H, T, dh), ``buckets`` (B, H, R, T). A query reads
    R T buckets and R ``window`` keys and values.
    """
    place, length = torch.arange(keys.shape[2], device=q.device), q.shape[2]
    seen = buckets[..., None, :] == buckets[..., -length:, None]  # (B, H, R, L, T)
    seen &= _others(place[-length:], place, causal=True)
    latest = torch.where(seen, place, -1).topk(min(window, len(place))).values  # (B, H, R, L, W), -1: no more

    def found(z: Tensor) -> Tensor:  # (B, H, T, dh) -> (B, H, R, L, W, dh)
        index = latest.clamp(min=0).flatten(2)[..., None]
        return z.take_along_dim(index, dim=2).unflatten(2, latest.shape[2:])

    o, lse = _attend(q[:, :, None, :, None], found(keys), found(v), (latest >= 0)[..., None, :])
    return _combine(o[..., 0, :], lse[..., 0, :], v[:, :, -length:])


def _real(mask: Tensor, z: Tensor) -> Tensor:
    """``mask`` as bool, if its shape is (B, L) of ``z`` (B, H, L, dh)."""
    shape = (z.shape[0], z.shape[2])
    require(mask.shape == shape, "mask.shape", tuple(mask.shape), f"{shape}")
    return mask.bool()


def _others(queries: Tensor, keys: Tensor, causal: bool) -> Tensor:
    """Which keys' positions (..., T) a query's (..., L) may see, itself apart: bool (..., L, T)."""
    q, k = queries[..., :, None], keys[..., None, :]
    return k < q if causal else k != q


def _beside(z: Tensor, sizes: LSHSizes) -> Tensor:
    """The items of every chunk and its neighbours: (B, H, n, C, ...) -> (B, H, n, K C, ...), K at most n.

    Of fewer chunks than that, each has all others as neighbours, once.
    """
    shifts = range(sizes.n_chunks_before, -sizes.n_chunks_after - 1, -1)[: z.shape[2]]
    return torch.cat([z.roll(shift, dims=2) for shift in shifts], dim=3)


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """o = softmax(z) v (..., L, dh) and lse = logsumexp(z) (..., L, 1) over the allowed keys (..., L, T).

    A query without any has the lowest number as its lse and some finite o, for :func:`_combine` to leave out.
    """
    z = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (..., L, T)
    alone = ~allowed.any(-1, keepdim=True)
    z = z.masked_fill(~(allowed | alone), -math.inf)  # no row is -inf everywhere: its gradient would be NaN
    return z.softmax(-1) @ v, z.logsumexp(-1, keepdim=True).masked_fill(alone, torch.finfo(z.dtype).min)


def _combine(o: Tensor, lse: Tensor, v: Tensor) -> Tensor:
    """Rounds o (B, H, R, L, dh) by their lse (B, H, R, L, 1); a query alone in all of them has its own v exactly."""
    alone = (lse == torch.finfo(lse.dtype).min).all(2)
    return torch.where(alone, v, (lse.softmax(2) * o).sum(2))
