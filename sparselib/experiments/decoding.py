"""Notebooks 04 and 05: the decode times of tables 1, 2 and 6 beside the paper's, from runs of the benchmark."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pandas import DataFrame

from ..bench.roofline import Reader, Roofline, Scope, limit, peak_gflops
from ..bench.rounds import CONTEXT, SOURCE_LENGTH, WARMUP, Rounds, engine_bytes, figures, free_room, time_in_rounds
from ..config import VARIANTS, ModelConfig, preset
from ..decode import Engine, pack_random
from ..decode.engine import usable_threads
from ..results.figures import look, new_figure
from ..results.paper import TABLE_2, DecodeTime, PaperTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = {
    "paper (ms)": "{:,.1f}",
    "here (ms)": "{:,.2f}",
    "paper, times dense": "{:.2f}",
    "here, times dense": "{:.2f}",
    "MB touched": "{:,.1f}",
    "GB/s": "{:.1f}",
    "read GB/s": "{:.1f}",
    "limit (ms)": "{:,.2f}",
    "% of limit": "{:.0f}",
    "meet in (ns)": "{:.0f}",
    "dense (ms)": "{:,.2f}",
    "dense, % of limit": "{:.0f}",
}

# What is compared with dense: the variant, block or whole model, and how it is drawn.
COMPARED: dict[str, tuple[str, Scope, str]] = {
    "FF+QKV, block": ("ff_qkv", "block", "--"),
    "FF+QKV, whole model": ("ff_qkv", "model", "-"),
    "FF+QKV+loss, whole model": ("ff_qkv_loss", "model", "-"),
}


def formats(frame: DataFrame) -> dict[str, str]:
    """How the columns of a table of this module are written."""
    return {name: form for name, form in FORMATS.items() if name in frame}


def rows_of(result: Mapping[str, Any], dtype: str, scope: Scope) -> dict[str, dict[str, Any]]:
    """The rows of a benchmark's result in one dtype and scope, by variant, in the paper's order.

    Those with the cores at the usual distance; :func:`by_distance` has the others.
    """
    rows = [row for row in result["rows"] if row["dtype"] == dtype and row["scope"] == scope and row["usual"]]
    return {row["variant"]: row for row in sorted(rows, key=lambda row: VARIANTS.index(row["variant"]))}


def against_paper(
    result: Mapping[str, Any], dtype: str, scope: Scope, paper: PaperTable[DecodeTime], size: str
) -> DataFrame:
    """One row a variant: the paper's time and speed-up over dense, those measured here, and the limit here."""
    printed = {row.variant: row for row in paper.rows if row.size == size}
    frame = []
    for variant, row in rows_of(result, dtype, scope).items():
        theirs, dense = (_paper_ms(printed.get(v), scope) for v in (variant, "dense"))
        frame.append(
            {
                "variant": look(variant).label,
                "cores": row["cores"],
                "paper (ms)": theirs,
                "here (ms)": row["ms_median"],
                "quartiles": f"{row['ms_q1']:,.2f} to {row['ms_q3']:,.2f}",
                "paper, times dense": dense / theirs if dense and theirs else None,
                "here, times dense": row["speedup"],
                "MB touched": row["bytes"] / 1e6,
                "GB/s": row["gb_s"],
                "limit (ms)": row["limit_ms"],
                "% of limit": 100 * row["limit_fraction"],
                "how": "derived" if row["derived"] else "measured",
            }
        )
    return DataFrame(frame)


def _paper_ms(row: DecodeTime | None, scope: Scope) -> float | None:
    seconds = None if row is None else row.block_seconds if scope == "block" else row.seconds
    return None if seconds is None else 1e3 * seconds


def by_distance(result: Mapping[str, Any], dtype: str = "fp32") -> DataFrame:
    """Dense and sparse with the cores near each other and far apart, wherever both were timed in the same rounds."""
    rows = {(row["variant"], row["scope"], row["cores"]): row for row in result["rows"] if row["dtype"] == dtype}
    frame = []
    for label, (variant, scope, _) in COMPARED.items():
        for cores in (cores for v, s, cores in rows if (v, s) == (variant, scope)):
            row, dense = rows[variant, scope, cores], rows.get(("dense", scope, cores))
            if dense and row["side_by_side"]:
                frame.append(
                    {
                        "sparse": label,
                        "cores": cores,
                        "meet in (ns)": row["handover_ns"],
                        "read GB/s": row["read_gb_s"],
                        "dense (ms)": dense["ms_median"],
                        "here (ms)": row["ms_median"],
                        "here, times dense": row["speedup"],
                        "dense, % of limit": 100 * dense["limit_fraction"],
                        "% of limit": 100 * row["limit_fraction"],
                        "n": row["n"],
                    }
                )
    return DataFrame(frame)


def draw_speedups(frames: Mapping[str, DataFrame]) -> Figure:
    """Bars of the speed-up over dense, the paper's (grey) beside ours, for every frame of :func:`against_paper`."""
    figure, axes = new_figure(1, len(frames), width=4.2 * len(frames), height=3.6, squeeze=False)
    colors = {look(variant).label: look(variant).color for variant in VARIANTS}
    for axis, (title, frame) in zip(axes[0], frames.items(), strict=True):
        places = np.arange(len(frame))
        theirs = axis.bar(places - 0.2, frame["paper, times dense"].fillna(0), 0.4, color=look("paper").color)
        ours = axis.bar(
            places + 0.2, frame["here, times dense"].fillna(0), 0.4, color=[colors[v] for v in frame["variant"]]
        )
        for bars in (theirs, ours):
            axis.bar_label(bars, [f"{bar.get_height():.1f}" if bar.get_height() else "" for bar in bars], fontsize=8)
        axis.set_xticks(places, [v.replace("sparse ", "").replace("+", "\n+") for v in frame["variant"]])
        axis.set(title=title, ylabel="speed-up over dense (grey: paper)")
        axis.margins(y=0.15)
    return figure


def draw_times(result: Mapping[str, Any], dtype: str, scopes: Mapping[Scope, str]) -> Figure:
    """Median time of each variant with quartiles, on a logarithmic axis, and its limit as a line."""
    figure, axes = new_figure(1, len(scopes), width=4.2 * len(scopes), height=3.6, squeeze=False)
    for axis, (scope, title) in zip(axes[0], scopes.items(), strict=True):
        rows = rows_of(result, dtype, scope)
        for place, (variant, row) in enumerate(rows.items()):
            spread = [[row["ms_median"] - row["ms_q1"]], [row["ms_q3"] - row["ms_median"]]]
            axis.bar(place, row["ms_median"], 0.6, yerr=spread, color=look(variant).color, ecolor=look("limit").color)
            label = "limit of this machine" if place == 0 else None
            axis.hlines(
                row["limit_ms"], place - 0.4, place + 0.4, color=look("limit").color, linestyle="--", label=label
            )
        names = [look(v).label.replace("sparse ", "").replace("+", "\n+") for v in rows]
        axis.set_xticks(range(len(rows)), names)
        axis.set(title=title, ylabel="ms (median, quartiles)", yscale="log")
        axis.legend()
    return figure


def left_out(result: Mapping[str, Any]) -> str:
    """One sentence a thing that was not measured as asked, or that nothing was."""
    if not result["left_out"]:
        return "nothing was left out"
    return "; ".join(f"{row['variant']} in {row['dtype']}: {row['reason']}" for row in result["left_out"])


def about(result: Mapping[str, Any]) -> str:
    """The machine of a result, in one line."""
    here = result["machine"]
    return (
        f"{here['cpu']}, {here['threads']} threads: reads up to {here['read_gb_s']:.1f} GB/s, "
        f"peak {here['peak_gflops']:.0f} GFLOP/s; load before the run {result['load']:.1f}"
    )


# --- other sparsities: table 2, and the loss layer --------------------------------------------------------------------


def time_configs(
    configs: Mapping[str, ModelConfig],
    dtype: str = "fp32",
    *,
    tokens: int,
    rounds: int,
    threads: int | None = None,
    seed: int = 0,
) -> tuple[Rounds, Roofline]:
    """Decode with random weights of every config in turn. Errors: MemoryError, with the numbers, if they do not fit."""
    max_len = CONTEXT + WARMUP + tokens
    reader = Reader(threads or usable_threads())
    needed = sum(engine_bytes(config, dtype, max_len, reader.threads) for config in configs.values())
    if needed > free_room():
        raise MemoryError(
            f"{len(configs)} models side by side need {needed / 1e9:.1f} GB, {free_room() / 1e9:.1f} are free"
        )
    engines = {
        name: Engine(
            pack_random(config, dtype, seed, encoder=False),
            max_len=max_len,
            source_len=SOURCE_LENGTH if config.has_source else None,
            threads=reader.threads,
        )
        for name, config in configs.items()
    }
    measured = time_in_rounds(engines, tokens, rounds, seed=seed, reader=reader)
    for engine in engines.values():
        engine.close()
    del engines
    gc.collect()
    return measured, Roofline(reader.threads, float(np.median(measured.read_gb_s)), peak_gflops(reader.threads))


def ff_configs(name: str, sparsities: Sequence[int]) -> dict[str, ModelConfig]:
    """Table 2: the dense model, the sparse feedforward with every N, and one of as many experts as the middle N."""
    middle = sparsities[len(sparsities) // 2]
    configs = {"dense": preset(name)}
    configs |= {f"N = {n}": preset(name, "ff", ff_sparsity=n) for n in sparsities}
    return configs | {f"{middle} experts": replace(preset(name), feedforward="block", ff_sparsity=middle)}


def ff_table(configs: Mapping[str, ModelConfig], measured: Rounds, roofline: Roofline) -> DataFrame:
    """Table 2, times only: the paper's and ours, with the speed-up over dense."""
    printed = {(row.feedforward, row.ff_sparsity): row.seconds for row in TABLE_2.rows}
    dense = printed["dense", 1]
    frame = []
    for name, config in configs.items():
        n = {"dense": 1, "block": None}.get(config.feedforward, config.ff_sparsity)
        theirs = printed.get((config.feedforward, n))
        row = figures(measured.samples[name].token, _limit(config, measured, roofline))
        frame.append(
            {
                "feedforward": name,
                "paper (ms)": None if theirs is None else 1e3 * theirs,
                "here (ms)": row["ms_median"],
                "quartiles": f"{row['ms_q1']:,.2f} to {row['ms_q3']:,.2f}",
                "paper, times dense": None if theirs is None else dense / theirs,
                "here, times dense": measured.ratio("dense", name),
                "MB touched": row["bytes"] / 1e6,
                "% of limit": 100 * row["limit_fraction"],
            }
        )
    return DataFrame(frame)


def draw_ff(configs: Mapping[str, ModelConfig], frame: DataFrame) -> Figure:
    """Time of a token against N, the limit, the dense model and the experts."""
    figure, axis = new_figure()
    ours = dict(zip(frame["feedforward"], frame["here (ms)"], strict=True))
    limits = dict(zip(frame["feedforward"], frame["here (ms)"] * frame["% of limit"] / 100, strict=True))
    sparse = [name for name, config in configs.items() if config.feedforward == "sparse"]
    ns = [configs[name].ff_sparsity for name in sparse]
    axis.plot(ns, [ours[name] for name in sparse], **look("ff").line)
    axis.plot(ns, [limits[name] for name in sparse], color=look("limit").color, linestyle="--", label="its limit")
    axis.axhline(ours["dense"], color=look("dense").color, label=look("dense").label)
    experts = next(name for name, config in configs.items() if config.feedforward == "block")
    axis.plot(configs[experts].ff_sparsity, ours[experts], **look("block").line | {"linestyle": ""})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ns, [str(n) for n in ns])
    axis.set(xlabel="N, one hidden unit in N is active", ylabel="ms a token", ylim=(0, None))
    axis.legend()
    return figure


def loss_configs(name: str, sparsities: Sequence[int]) -> dict[str, ModelConfig]:
    """A model whose token is little but its output layer, with every loss sparsity."""
    small = dict(architecture="decoder", n_encoder_layers=0, n_layers=1, feedforward="dense", d_ff=64)
    return {f"loss sparsity {s}": preset(name, "qkv", loss_sparsity=s, **small) for s in sparsities}


def loss_table(configs: Mapping[str, ModelConfig], measured: Rounds, roofline: Roofline) -> DataFrame:
    """Time of the output layer alone."""
    frame = []
    dense = measured.samples[next(iter(configs))].parts["unembedding"]
    for name, config in configs.items():
        times = measured.samples[name].parts["unembedding"]
        least = _limit(config, measured, roofline).parts["unembedding"]
        median = float(np.median(times))
        q1, q3 = np.quantile(times, (0.25, 0.75))
        frame.append(
            {
                "output layer": name if config.loss_sparsity > 1 else "dense",
                "here (ms)": median,
                "quartiles": f"{q1:,.2f} to {q3:,.2f}",
                "here, times dense": float(np.median(np.median(dense, 1) / np.median(times, 1))),
                "limit (ms)": least,
                "% of limit": 100 * least / median,
            }
        )
    return DataFrame(frame)


def _limit(config: ModelConfig, measured: Rounds, roofline: Roofline) -> Any:
    return limit(config, "fp32", roofline, context=measured.context, source_length=SOURCE_LENGTH)


# --- what the limits allow --------------------------------------------------------------------------------------------


def allowed(name: str, peak_gflops: float, bandwidths: Sequence[float], context: int) -> DataFrame:
    """The speed-up over dense that the limits alone give, in fp32, if memory were read at each of ``bandwidths``."""
    rows = []
    for bandwidth in bandwidths:
        roofline = Roofline(1, bandwidth, peak_gflops)
        row: dict[str, float] = {"GB/s": bandwidth}
        for label, (variant, scope, _) in COMPARED.items():
            dense, sparse = (
                limit(preset(name, v), "fp32", roofline, context=context, source_length=SOURCE_LENGTH, scope=scope).ms
                for v in ("dense", variant)
            )
            row[label] = dense / sparse
        rows.append(row)
    return DataFrame(rows)


def draw_allowed(frame: DataFrame, result: Mapping[str, Any], paper_bandwidth: tuple[float, float]) -> Figure:
    """Lines of :func:`allowed`, what was measured as points, and the band of the bandwidth that the paper had."""
    figure, axis = new_figure()
    axis.axvspan(*paper_bandwidth, color=look("paper").color, alpha=0.3, label="the paper's memory")
    for label, (variant, scope, linestyle) in COMPARED.items():
        style = look(variant)
        axis.plot(frame["GB/s"], frame[label], color=style.color, linestyle=linestyle, label=label)
        marker = style.marker if scope == "model" else "o"
        points = [
            row for row in result["rows"] if (row["dtype"], row["variant"], row["scope"]) == ("fp32", variant, scope)
        ]
        for row in points:
            axis.plot(row["read_gb_s"], row["speedup"], color=style.color, marker=marker, linestyle="")
    axis.set(xlabel="read bandwidth (GB/s)", ylabel="speed-up over dense", ylim=(0, None))
    axis.legend(title="what the limits allow (points: measured)")
    return figure


def verdict(pairs: Sequence[tuple[float, float]]) -> str:
    """In the book's words, of speed-ups measured and printed: (here, paper) each."""
    reached = sum(here >= theirs for here, theirs in pairs)
    if reached == len(pairs):
        return "reproduced, and exceeded"
    if all(here > 1 for here, _ in pairs):
        return f"partly reproduced: sparse is faster throughout, {reached} of {len(pairs)} speed-ups are the paper's"
    return "not reproduced"
