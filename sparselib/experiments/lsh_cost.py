"""Notebook 13: what attention by hashing costs beside full attention, in training and for a decoded token.

Letters: B sequences; H heads of width dh; L or T positions; R = n_hashes rounds. All attention here is causal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pandas import DataFrame, Series
from torch import Tensor, nn

from ..bench.memory import peak_bytes
from ..bench.protocol import time_call
from ..config import LSHSizes
from ..layers import lsh_attend
from ..layers.lsh import full_attend, hash_buckets, normalized
from ..results.figures import log_axes, look, new_figure, shades
from .anatomy import first_below
from .lsh import draw_rotations, random_vectors
from .sparse_layers import exponent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = ("full attention, scores written", "full attention, fused")


def contenders(
    length: int, width: int, rounds: Sequence[int], sizes: LSHSizes, seed: int
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Forward and backward of one head of attention on random vectors in float32, without projections: the gradients.

    Full attention by the rules of hashing with its scores written out; full attention by PyTorch's fused kernel, which
    keeps none and lets a position see itself; and hashing in so many rounds, the draw of its rotations included.
    """
    qk, v, cotangent = (random_vectors(1, 1, length, width, seed=seed + i).float() for i in range(3))
    inputs = qk.requires_grad_(), v.requires_grad_()

    def hashing(n_hashes: int) -> Tensor:
        own = replace(sizes, n_hashes=n_hashes)
        return lsh_attend(qk, v, hash_buckets(qk, draw_rotations(qk, own, seed), own), own)

    def gradients(forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), inputs, cotangent)

    forwards: dict[str, Callable[[], Tensor]] = {
        FULL[0]: lambda: full_attend(qk, normalized(qk), v),
        FULL[1]: lambda: nn.functional.scaled_dot_product_attention(qk, normalized(qk), v, is_causal=True),
    }
    forwards |= {hashing_in(n): partial(hashing, n) for n in rounds}
    return {name: partial(gradients, forward) for name, forward in forwards.items()}


def hashing_in(rounds: int) -> str:
    return f"hashing, {rounds} round{'' if rounds == 1 else 's'}"


def measure_cost(
    lengths: Sequence[int],
    width: int,
    rounds: Sequence[int],
    sizes: LSHSizes,
    *,
    repeat: int,
    most_bytes: float,
    seed: int = 0,
) -> DataFrame:
    """Median time in ms and peak memory in MB of all :func:`contenders` at ``lengths``, each twice the one before.

    What must be expected to take more than ``most_bytes``, growing as it did before, is left out.
    """
    rows: list[dict[str, Any]] = []
    peaks: dict[str, list[int]] = {}
    for length in lengths:
        for name, step in contenders(length, width, rounds, sizes, seed).items():
            before = peaks.setdefault(name, [])
            if len(before) > 1 and before[-1] ** 2 / before[-2] > most_bytes:
                continue
            ms = time_call(step, repeat, warmup=1).ms_median
            before.append(peak_bytes(step))
            rows.append({"attention": name, "positions": length, "ms": ms, "MB": before[-1] / 1e6})
    return DataFrame(rows)


def cost_table(frame: DataFrame) -> DataFrame:
    """One row a contender: at the longest length that it was measured at, and exponents over its last three."""
    rows = []
    for _, own in frame.groupby("attention", sort=False):
        last, row = own.tail(3), own.iloc[-1]
        lengths = last["positions"].tolist()
        rows.append(
            dict(row)
            | {"KB a position": 1e3 * row["MB"] / row["positions"]}
            | {f"exponent of {unit}": exponent(lengths, last[unit].tolist()) for unit in ("ms", "MB")}
        )
    return DataFrame(rows)


def crossing(frame: DataFrame, hashing: str, full: str, unit: str) -> str:
    """From which length on hashing takes less of ``unit`` ("ms" or "MB") than full attention at every one, in words."""
    ratios = ratio(frame, hashing, full, unit)
    more = np.flatnonzero(ratios >= 1)
    late = ratios.iloc[more[-1] if len(more) else 0 :]
    even = first_below(late.index, late, 1)
    return (
        f"at no length up to {ratios.index[-1]:,}"
        if even is None
        else f"from about {round(even, -2):,.0f} positions on"
    )


def ratio(frame: DataFrame, hashing: str, full: str, unit: str) -> Series:
    """What hashing takes over what full attention takes, at the lengths of both."""
    table = frame.pivot(index="positions", columns="attention", values=unit)
    return (table[hashing] / table[full]).dropna()


def cost_verdict(frame: DataFrame, hashing: str) -> str:
    """Whether hashing takes less time and memory than each kind of full attention at the longest length of both."""
    held = [ratio(frame, hashing, full, unit).iloc[-1] < 1 for full, unit in product(FULL, ("ms", "MB"))]
    return "reproduced" if all(held) else "partly reproduced" if any(held) else "not reproduced"


def draw_cost(frame: DataFrame) -> Figure:
    """Time and peak memory of forward and backward against length, all axes logarithmic."""
    figure, axes = new_figure(1, 2, width=7.8, height=4.4)
    names = list(frame["attention"].unique())
    lines = {FULL[0]: look("dense").line, FULL[1]: look("fused").line}
    hashing = [name for name in names if name not in lines]
    for name, color in zip(hashing, shades(len(hashing)), strict=True):
        lines[name] = look("lsh").line | {"color": color}
    for axis, unit, title in zip(axes, ("ms", "MB"), ("time (ms)", "peak memory (MB)"), strict=True):
        for name in names:
            own = frame[frame["attention"] == name]
            axis.plot(own["positions"], own[unit], **lines[name] | {"label": name})
        log_axes(axis, frame["positions"])
        axis.set(ylabel=title, xlabel="positions")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# --- what a decoded token reads ---------------------------------------------------------------------------------------


def earlier_alike(buckets: Tensor) -> Tensor:
    """How many earlier positions have the same bucket: (..., T) -> the same."""
    order = buckets.argsort(stable=True)
    ranked = buckets.gather(-1, order)
    before = torch.arange(buckets.shape[-1]) - torch.searchsorted(ranked, ranked)
    return torch.empty_like(before).scatter(-1, order, before)


@torch.no_grad()
def count_candidates(
    qk: Tensor, contexts: Sequence[int], rounds: Sequence[int], sizes: LSHSizes, seeds: int
) -> DataFrame:
    """How many earlier positions a decoded token attends to: the mean over seeds of the rotations, sequences, heads,
    and the last eighth of each context. What is found in two rounds counts twice.

    ``qk`` (B, H, L, dh). ``even``: with all buckets equally full. ``most``: what the windows allow.
    """
    rows = []
    for n in rounds:
        own = replace(sizes, n_hashes=n)
        drawn = (hash_buckets(qk, draw_rotations(qk, own, seed), own) for seed in range(seeds))
        found = torch.stack([earlier_alike(b).clamp(max=own.window).sum(2) for b in drawn])  # (seeds, B, H, L)
        for context in contexts:
            last = found[..., context - context // 8 : context]
            even = n * min(context / own.padding_bucket, own.window)
            about = {"context": context, "rounds": n, "positions": float(last.double().mean())}
            rows.append(about | {"even": even, "most": n * own.window})
    return DataFrame(rows)


def reading_table(frame: DataFrame, width: int) -> DataFrame:
    """KB that a token reads at most in one head of ``width`` in float32: the keys and values it attends to, all buckets
    (4 bytes each; the engine stops where every round's window is full), and what full attention reads."""
    pair, number = 2 * 4 * width / 1e3, 4 / 1e3
    table = frame.assign(
        **{
            "of context (%)": 100 * frame["positions"] / frame["context"],
            "keys and values (KB)": frame["positions"] * pair,
            "buckets (KB)": frame["context"] * frame["rounds"] * number,
            "full attention (KB)": frame["context"] * pair,
        }
    )
    read = table["keys and values (KB)"] + table["buckets (KB)"]
    return table.assign(**{"of full attention (%)": 100 * read / table["full attention (KB)"]})


def draw_candidates(frame: DataFrame) -> Figure:
    """Positions that a token attends to against the context; dotted, what it would be with equally full buckets."""
    figure, axis = new_figure(width=7.6, height=3.8)
    contexts, rounds = sorted(frame["context"].unique()), sorted(frame["rounds"].unique())
    axis.plot(contexts, contexts, **look("dense").line | {"label": "full attention"})
    for n, color in zip(rounds, shades(len(rounds)), strict=True):
        own = frame[frame["rounds"] == n]
        axis.plot(own["context"], own["positions"], **look("lsh").line | {"color": color, "label": hashing_in(n)})
        axis.plot(own["context"], own["even"], color=color, linestyle=":")
    log_axes(axis, contexts)
    axis.set(xlabel="context (positions)", ylabel="positions attended to")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right center")
    return figure
