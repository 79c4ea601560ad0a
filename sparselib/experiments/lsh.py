"""Notebook 13: attention by hashing beside full attention: where both are equal, and what hashing finds.

Letters: B sequences; H heads of width dh; L positions; R = n_hashes rounds; W = window, as in ``layers.lsh``. Queries
and keys are one vector qk; z = qk_t . key_s / sqrt(dh) are the scores. All attention here is causal but where said.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from pandas import DataFrame
from torch import Tensor, nn

from ..config import LSHSizes
from ..layers import DenseLSHAttention, lsh_attend
from ..layers.attention import split_heads
from ..layers.lsh import bucket_attend, full_attend, hash_buckets, normalized
from ..models import Transformer
from ..results.figures import look, new_figure, shades
from .recorded import draw_band

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOUND_FORMATS = {
    "positions": "{:.1f}",
    "chance": "{:.3f}",
    "mass": "{:.3f}",
    "latest": "{:.3f}",
    "best": "{:.3f}",
    "error": "{:.2f}",
}


# --- where both are equal ---------------------------------------------------------------------------------------------


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference between two tensors."""
    return float((a - b).detach().abs().max())


def random_vectors(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_rotations(qk: Tensor, sizes: LSHSizes, seed: int) -> Tensor:
    """Rotations (H, R, dh, half the sum of the factors of ``n_buckets``) for ``qk`` (B, H, L, dh)."""
    shape = (qk.shape[1], sizes.n_hashes, qk.shape[3], sum(sizes.factors) // 2)
    return random_vectors(*shape, seed=seed).to(qk)


def check_exactness(length: int, n_buckets: int, seed: int = 0) -> DataFrame:
    """How far hashing in two rounds is from full attention, on random vectors in float64, of output and gradient of qk.

    With one bucket and a chunk as long as the sequence, and with ``n_buckets`` and chunks of length / n_buckets. With
    padding, the last third of the second sequence is none of its positions.
    """
    qk, v, cotangent = (random_vectors(2, 2, length, 16, seed=seed + i) for i in range(3))
    qk.requires_grad_()
    padded = torch.arange(length) < torch.tensor([length, length - length // 3])[:, None]
    several = LSHSizes(n_hashes=2, n_buckets=n_buckets, chunk_len=length // n_buckets)
    one = replace(several, chunk_len=length)
    rotations = draw_rotations(qk, several, seed)
    rows = []
    for causal, mask in product((True, False), (None, padded)):
        full = _with_gradient(full_attend(qk, normalized(qk), v, causal, mask), qk, cotangent)
        row: dict[str, Any] = {"causal": "yes" if causal else "no", "padding": "no" if mask is None else "yes"}
        for name, sizes, drawn in (("one bucket", one, 0 * rotations), (f"{n_buckets} buckets", several, rotations)):
            y = lsh_attend(qk, v, hash_buckets(qk, drawn, sizes, mask), sizes, causal, mask)
            hashed = _with_gradient(y, qk, cotangent)
            row |= {f"output, {name}": gap(hashed[0], full[0]), f"gradient, {name}": gap(hashed[1], full[1])}
        rows.append(row)
    return DataFrame(rows)


def _with_gradient(y: Tensor, x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    return y, torch.autograd.grad(y, x, cotangent)[0]


# --- vectors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vectors:
    """What a layer attends with: ``qk`` and ``v`` (B, H, L, dh)."""

    qk: Tensor
    v: Tensor


@torch.no_grad()
def text_vectors(model: Transformer, tokens: Tensor) -> Vectors:
    """Those of the first attention layer for ``tokens`` (B, L); the model's queries and keys must be shared (LSH)."""
    block: Any = model.eval().stack.blocks[0]
    x = block.attention_norm(model.stack.positions(model.embedding(tokens)))
    q, k, v = (split_heads(getattr(block.attention, name)(x), model.config.n_heads) for name in "qkv")
    return Vectors((q + k) / 2, v)


def clustered_vectors(like: Vectors, n_clusters: int, cosine: float, norm: float, seed: int = 0) -> Vectors:
    """Random vectors of the same shape: every qk near one of the centres of its head.

    Two of one cluster have about ``cosine`` between them, two of different ones about 0; all have length ``norm``, so
    that scores go up to ``norm``. Each v is drawn from N(0, 1) on its own.
    """
    batch, heads, length, width = like.qk.shape
    centres = random_vectors(batch, heads, n_clusters, width, seed=seed)
    own = random_vectors(batch, heads, length, n_clusters, seed=seed + 1).argmax(-1, keepdim=True)
    noise, v = (random_vectors(*like.qk.shape, seed=seed + i) for i in (2, 3))
    qk = math.sqrt(cosine) * centres.take_along_dim(own, dim=2) + math.sqrt(1 - cosine) * noise
    return Vectors((norm * nn.functional.normalize(qk, dim=-1)).to(like.qk), v.to(like.qk))


def one_after_another(vectors: Vectors) -> Vectors:
    """The B sequences as one of length B L."""
    joined = (z.transpose(0, 1).flatten(1, 2)[None] for z in (vectors.qk, vectors.v))
    return Vectors(*joined)


# --- decoding ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_decoding(length: int, seed: int = 0) -> DataFrame:
    """How far the faces of one layer are from each other, on random input in float64: the largest differences.

    The layer has random weights, 2 rounds, 8 buckets and chunks of an eighth of the length; the first half of the
    positions is ``early``.
    """
    torch.manual_seed(seed)
    early, d_model = length // 2, 32
    layer = DenseLSHAttention(d_model, 2, n_hashes=2, n_buckets=8, chunk_len=length // 8).double().eval()
    mixed, full = (_full_below(layer, positions) for positions in (early, length))
    x = random_vectors(2, length, d_model, seed=seed)
    y, y_mixed, y_full = (one.prefill(x, one.init_state(2))[0] for one in (layer, mixed, full))
    gaps = {
        "decoding at once and step by step, hashing": gap(y, _by_steps(layer, x)),
        f"the same, with full attention up to {early} positions": gap(y_mixed, _by_steps(mixed, x)),
        f"that layer's first {early} positions and full attention": gap(y_mixed[:, :early], y_full[:, :early]),
        "its later positions and full attention": gap(y_mixed[:, early:], y_full[:, early:]),
        "its later positions and hashing alone": gap(y_mixed[:, early:], y[:, early:]),
        "decoding and the forward pass of training, hashing": gap(y, layer(x)),
    }
    return DataFrame([{"compared": what, "largest difference": size} for what, size in gaps.items()])


def _full_below(layer: DenseLSHAttention, positions: int) -> DenseLSHAttention:
    """The same layer with full attention up to so many positions."""
    other = copy.deepcopy(layer)
    other.sizes = replace(layer.sizes, full_below=positions)
    return other


def _by_steps(layer: DenseLSHAttention, x: Tensor) -> Tensor:
    state, ys = layer.init_state(len(x)), []
    for x_t in x.unbind(1):
        y, state = layer.step(x_t, state)  # type: ignore[assignment]
        ys.append(y)
    return torch.stack(ys, dim=1)


# --- what hashing finds -----------------------------------------------------------------------------------------------


def identity(qk: Tensor) -> Tensor:
    """Values (B, H, L, L) with which attention returns its own weights."""
    length = qk.shape[2]
    return torch.eye(length, dtype=qk.dtype).expand(*qk.shape[:2], length, length)


def decoding_weights(qk: Tensor, buckets: Tensor, sizes: LSHSizes, queries: Tensor) -> Tensor:
    """Weights (B, H, Q, L) that the rule of decoding gives at the positions ``queries`` (Q,), one after another."""
    keys, v = normalized(qk), identity(qk)
    rows = []
    for t in queries.tolist():
        past = slice(t + 1)
        seen = keys[:, :, past], v[:, :, past], buckets[..., past]
        rows.append(bucket_attend(qk[:, :, t : t + 1], *seen, sizes.window))
    return torch.cat(rows, dim=2)


@torch.no_grad()
def measure_found(
    vectors: Mapping[str, Vectors], rounds: Sequence[int], buckets: Sequence[int], chunk_len: int, seeds: int
) -> DataFrame:
    """One row for each of the vectors, rule (training's and decoding's), rounds, buckets and seed of the rotations.

    The rows hold what :func:`quality` says of every eighth position in the second half of the sequences, where there
    is something to choose from.
    """
    rows = []
    for name, one in vectors.items():
        length = one.qk.shape[2]
        queries = torch.arange(length // 2, length, 8)
        full = full_attend(one.qk, normalized(one.qk), identity(one.qk))[:, :, queries]
        for n_hashes, n_buckets, seed in product(rounds, buckets, range(seeds)):
            sizes = LSHSizes(n_hashes=n_hashes, n_buckets=n_buckets, chunk_len=chunk_len)
            hashed = hash_buckets(one.qk, draw_rotations(one.qk, sizes, seed), sizes)
            rules = {
                "training": lsh_attend(one.qk, identity(one.qk), hashed, sizes)[:, :, queries],
                "decoding": decoding_weights(one.qk, hashed, sizes, queries),
            }
            about = {"vectors": name, "buckets": n_buckets, "rounds": n_hashes, "seed": seed}
            rows += [about | {"rule": rule} | quality(full, w, one.v, queries) for rule, w in rules.items()]
    return DataFrame(rows)


def quality(full: Tensor, weights: Tensor, v: Tensor, queries: Tensor) -> dict[str, float]:
    """How near attention with ``weights`` is to ``full``, both (B, H, Q, L), at the positions ``queries`` (Q,).

    Means over all queries: ``positions`` that are found, their share of all earlier ones (``chance``, what as many
    drawn at random would hold), their share of the mass of full attention (``mass``), what as many of the latest and
    of the heaviest hold (``latest``, ``best``). ``error``: of the output, over the size of full attention's.
    """
    past = queries[:, None]  # (Q, 1): how many are earlier
    found = (weights > 0) & (torch.arange(full.shape[-1]) < past)
    n = found.sum(-1, keepdim=True)  # (B, H, Q, 1)
    means = {
        "positions": n.float(),
        "chance": n / past,
        "mass": (full * found).sum(-1),
        "latest": 1 - _first(full, past - n),
        "best": _first(full.sort(-1, descending=True).values, n),
    }
    error = ((weights - full) @ v).norm() / (full @ v).norm()
    return {name: float(values.mean()) for name, values in means.items()} | {"error": float(error)}


def _first(z: Tensor, n: Tensor) -> Tensor:
    """The sum of the first ``n`` (..., 1) numbers of each row of ``z`` (..., L): (..., 1)."""
    return nn.functional.pad(z.cumsum(-1), (1, 0)).take_along_dim(n, dim=-1)


def found_table(frame: DataFrame, n_buckets: int, rule: str = "training") -> DataFrame:
    """Means over seeds with so many buckets by one of the rules: a row for each of the vectors and rounds."""
    chosen = frame[(frame["buckets"] == n_buckets) & (frame["rule"] == rule)]
    return chosen.groupby(["vectors", "rounds"], sort=False)[list(FOUND_FORMATS)].mean().reset_index()


def draw_found(frame: DataFrame, n_buckets: int) -> Figure:
    """Mass found and error of the output against rounds, a line for each number of buckets, a band over seeds.

    Grey: what as many of the best, of the latest and of random positions as with ``n_buckets`` hold.
    """
    names, buckets = frame["vectors"].unique(), sorted(frame["buckets"].unique())
    figure, axes = new_figure(2, len(names), width=7.6, height=6.0, sharex=True, sharey="row", squeeze=False)
    for column, name in enumerate(names):
        own = frame[(frame["vectors"] == name) & (frame["rule"] == "training")]
        for n, color in zip(buckets, shades(len(buckets)), strict=True):
            for row, what in enumerate(("mass", "error")):
                _band(axes[row, column], own[own["buckets"] == n], what, color=color, label=f"{n} buckets")
        means = found_table(frame, n_buckets).query("vectors == @name")
        for what, linestyle in (("best", "--"), ("latest", ":"), ("chance", "-.")):
            grey = dict(color=look("limit").color, linestyle=linestyle, label=f"as many: {what}")
            axes[0, column].plot(means["rounds"], means[what], **grey)
        axes[0, column].set_title(name)
        _rounds_axis(axes[1, column], frame)
    axes[0, 0].set(ylabel="share of full attention's mass", ylim=(0, 1.02))
    axes[1, 0].set(ylabel="error of the output / its size", ylim=(0, None))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _band(axis: Axes, frame: DataFrame, what: str, **line: Any) -> None:
    table = frame.pivot(index="seed", columns="rounds", values=what)
    draw_band(axis, table.columns.to_numpy(), table.to_numpy(), marker=look("lsh").marker, markersize=4, **line)


def _rounds_axis(axis: Axes, frame: DataFrame) -> None:
    axis.set_xscale("log", base=2)
    ticks = sorted(frame["rounds"].unique())
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("rounds of hashing")


def draw_rules(frame: DataFrame, n_buckets: int) -> Figure:
    """Mass found by the rules of training and of decoding against rounds, with ``n_buckets``; a band over seeds."""
    names = frame["vectors"].unique()
    figure, axes = new_figure(1, len(names), width=8.0, height=3.4, sharey=True, squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for rule, linestyle, color in zip(("training", "decoding"), ("-", "--"), shades(3)[:2], strict=True):
            own = frame[(frame["vectors"] == name) & (frame["rule"] == rule) & (frame["buckets"] == n_buckets)]
            _band(axis, own, "mass", color=color, linestyle=linestyle, label=f"{rule}'s rule")
        axis.set_title(name)
        _rounds_axis(axis, frame)
    axes[0, 0].set(ylabel="share of full attention's mass", ylim=(0, 1.02))
    axes[0, 0].legend()
    return figure
