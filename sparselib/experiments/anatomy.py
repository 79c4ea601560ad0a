"""Notebook 06: where the time of a decoded token goes, and what it grows with.

Everything is timed in pairs, dense beside sparse, in turns. Letters: d = d_model; N = ff_sparsity; S = n_modules.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike
from pandas import DataFrame

from ..bench.machine import last_level_cache
from ..bench.roofline import Reader, Roofline, limit, peak_gflops
from ..bench.rounds import CONTEXT, WARMUP, Rounds, engine_bytes, figures, free_room, time_in_rounds
from ..checks import require
from ..config import ModelConfig, Part, PartCost, decode_cost, model_parts, preset
from ..decode import DTYPES, Engine, Packed, pack_random
from ..results.figures import look, new_figure
from .decoding import SOURCE_LENGTH
from .sparse_layers import decoder_block_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAIR = ("dense", "ff_qkv_loss")
RECIPE = ("dense", "ff_qkv")  # of the widths: their vocabulary is too small for a sparse loss to matter
PAPER_EXPONENTS = {"dense": 2.0, "ff_qkv": 1.5}  # of the weights a block touches; the paper's section 1
PARTS = {
    "self-attention": ("self_attention",),
    "cross-attention": ("cross_attention",),
    "cached keys and values": ("kv_cache",),
    "controller": ("controller",),
    "feedforward": ("feedforward", "recurrence"),
    "unembedding": ("unembedding",),
    "embedding, norms": ("embedding", "positions", "norms"),
}
MARKERS = dict(zip(PARTS, "o^Ps*DX", strict=True))
WHOLE = "whole token"
HEAD = 128  # width of a head in all widths, as GPT-3's
CACHE_TIMES = 1.5  # a token touches so many times the last-level cache, or it would be timed and not the memory
FORMATS = {  # of all columns whose names hold these words
    "d_model": "{:,}",
    "MB": "{:,.2f}",
    "MFLOP": "{:,.2f}",
    "GFLOP/s": "{:,.0f}",
    "GB/s": "{:.1f}",
    "tokens/s": "{:,.0f}",
    "ms": "{:,.3f}",
    "%": "{:.0f}",
    "speed-up": "{:.2f}",
    "exponent": "{:.2f}",
    "errors": "{:.2f}",
    "paper": "{:.1f}",
}


@dataclass(frozen=True)
class Timer:
    """How everything is timed: ``tokens`` in each of ``rounds`` rounds, with the reader's threads."""

    reader: Reader
    peak_gflops: float
    tokens: int
    rounds: int
    seed: int = 0

    @classmethod
    def of(cls, threads: int, **timing: int) -> Timer:
        """Looks at bandwidth and peak first: about three seconds."""
        return cls(Reader(threads), peak_gflops(threads), **timing)

    def needs(self, configs: Mapping[str, ModelConfig], dtype: str) -> int:
        """Bytes of all engines together."""
        positions = CONTEXT + WARMUP + self.tokens
        return sum(engine_bytes(config, dtype, positions, self.reader.threads) for config in configs.values())

    def pack(self, configs: Mapping[str, ModelConfig], dtype: str = "fp32") -> dict[str, Packed]:
        """Random weights, without encoders."""
        return {name: pack_random(config, dtype, self.seed, encoder=False) for name, config in configs.items()}

    def time(self, packed: Mapping[str, Packed], context: int = CONTEXT, batch: int = 1) -> tuple[Rounds, Roofline]:
        """Decode ``batch`` sequences with each model in turn after ``context`` positions; the machine's limits then."""
        engines = {
            name: Engine(
                weights,
                batch,
                context + WARMUP + self.tokens,
                SOURCE_LENGTH if weights.config.has_source else None,
                self.reader.threads,
            )
            for name, weights in packed.items()
        }
        measured = time_in_rounds(
            engines, self.tokens, self.rounds, context=context, seed=self.seed, reader=self.reader
        )
        for engine in engines.values():
            engine.close()
        return measured, Roofline(self.reader.threads, float(np.median(measured.read_gb_s)), self.peak_gflops)

    def time_new(self, configs: Mapping[str, ModelConfig], dtype: str = "fp32") -> tuple[Rounds, Roofline]:
        """Build, time and drop the models. Errors: MemoryError, with the numbers, if they do not fit together."""
        needed, room = self.needs(configs, dtype), free_room()
        if needed > room:
            raise MemoryError(f"needs {needed / 1e9:.1f} GB in {dtype}, {room / 1e9:.1f} GB are free")
        timed = self.time(self.pack(configs, dtype))
        time.sleep(0.2)  # the threads of a closed engine let go of its weights a moment later
        gc.collect()
        return timed


@dataclass(frozen=True)
class Measured:
    """Rows of a table, the machine's limits when each size was timed, and why sizes were left out."""

    frame: DataFrame
    rooflines: Mapping[Any, Roofline]
    left_out: list[str]

    def said(self) -> str:
        return "; ".join(self.left_out) or "nothing"


def formats(frame: DataFrame) -> dict[str, str]:
    """How each column of a table of this module is shown."""
    return {column: form for column in map(str, frame) for unit, form in FORMATS.items() if unit in column}


# --- the parts of a token ---------------------------------------------------------------------------------------------


def pair(name: str, **changes: Any) -> dict[str, ModelConfig]:
    """A preset's dense and sparsest configs, with ``changes``."""
    return {variant: preset(name, variant, **changes) for variant in PAIR}


def time_parts(sizes: Mapping[str, tuple[Mapping[str, ModelConfig], Sequence[str]]], timer: Timer) -> Measured:
    """One row for each part of each model; ``sizes`` gives a title the models and the dtypes to try, best first.

    A part's ``ms`` is its median over all tokens; the parts' medians need not add up to the whole token's.
    """
    rows: list[dict[str, Any]] = []
    rooflines, left_out = {}, []
    for title, (configs, dtypes) in sizes.items():
        dtype = next((dtype for dtype in dtypes if timer.needs(configs, dtype) <= free_room()), dtypes[-1])
        try:
            measured, roofline = timer.time_new(configs, dtype)
        except MemoryError as error:
            left_out.append(f"{title}: {error}")
            continue
        size = f"{title}, {dtype}"
        rooflines[size] = roofline
        for variant, config in configs.items():
            about = {"size": size, "model": look(variant).label}
            rows += [about | row for row in _part_rows(config, dtype, measured, variant, roofline)]
    return Measured(DataFrame(rows), rooflines, left_out)


def _part_rows(
    config: ModelConfig, dtype: str, measured: Rounds, variant: str, roofline: Roofline
) -> list[dict[str, Any]]:
    context, size = measured.context, DTYPES[dtype].itemsize
    cost = decode_cost(config, context=context, source_length=SOURCE_LENGTH, bytes_per_weight=size, bytes_per_cached=4)
    least = limit(config, dtype, roofline, context=context, source_length=SOURCE_LENGTH)
    samples, rows = measured.samples[variant], []
    for part, names in PARTS.items():
        counted = [name for name in names if name in cost.parts and name in least.parts]
        if counted:
            took = sum(times for name, times in samples.parts.items() if name in counted)
            total = PartCost(*(sum(getattr(cost.parts[n], f) for n in counted) for f in ("bytes", "flops")))
            rows.append({"part": part} | _row(total, took, sum(least.parts[name] for name in counted)))
    return [*rows, {"part": WHOLE} | _row(PartCost(cost.bytes, cost.flops), samples.token, least.ms)]


def _row(cost: PartCost, times: Any, limit_ms: float) -> dict[str, float]:
    ms = float(np.median(times))
    return {
        "MB": cost.bytes / 1e6,
        "MFLOP": cost.flops / 1e6,
        "ms": ms,
        "limit (ms)": limit_ms,
        "% of limit": 100 * limit_ms / ms,
    }


def draw_roofline(measured: Measured) -> Figure:
    """FLOP/s of every part against FLOPs a byte, below the machine's two roofs; a panel for each size."""
    figure, axes = new_figure(1, len(measured.rooflines), width=8.4, height=4.2, squeeze=False, sharey=True)
    for axis, (size, roofline) in zip(axes[0], measured.rooflines.items(), strict=True):
        points = measured.frame[(measured.frame["size"] == size) & (measured.frame["MFLOP"] > 0)]
        points = points[points["part"].isin(list(MARKERS))]
        intensity = points["MFLOP"] / points["MB"]
        x = np.geomspace(intensity.min() / 2, max(2 * intensity.max(), 4 * roofline.peak_gflops / roofline.read_gb_s))
        axis.plot(x, np.minimum(x * roofline.read_gb_s, roofline.peak_gflops), color=look("limit").color)
        for variant in PAIR:
            for part, marker in MARKERS.items():
                own = points[(points["model"] == look(variant).label) & (points["part"] == part)]
                axis.plot(
                    own["MFLOP"] / own["MB"], own["MFLOP"] / own["ms"], marker, color=look(variant).color, markersize=7
                )
        axis.set(xscale="log", yscale="log", title=size, xlabel="FLOPs per byte")
    axes[0, 0].set_ylabel("GFLOP/s")
    parts = [_handle(look("limit").color, marker, part) for part, marker in list(MARKERS.items())[:-1]]
    models = [_handle(look(variant).color, "s", look(variant).label) for variant in PAIR]
    figure.legend(handles=models + parts, loc="outside right upper")
    return figure


def _handle(color: str, marker: str, label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, marker=marker, linestyle="", label=label)


def draw_parts(measured: Measured) -> Figure:
    """Measured time of every part beside its limit: a row of panels for each size, dense and sparse each on its own
    scale."""
    sizes = list(measured.rooflines)
    figure, axes = new_figure(len(sizes), 2, width=8.0, height=2.9 * len(sizes), squeeze=False, sharey=True)
    for line, size in zip(axes, sizes, strict=True):
        for axis, variant in zip(line, PAIR, strict=True):
            frame = measured.frame
            own = frame[(frame["size"] == size) & (frame["model"] == look(variant).label) & (frame["part"] != WHOLE)]
            places = np.array([list(PARTS).index(part) for part in own["part"]])
            axis.barh(places - 0.2, own["ms"], 0.4, color=look(variant).color, label="measured")
            axis.barh(places + 0.2, own["limit (ms)"], 0.4, color=look("limit").color, label="limit")
            axis.set_yticks(range(len(PARTS)), list(PARTS))
            axis.set(title=f"{look(variant).label}\n{size}", xlabel="ms a token")
            axis.legend()
    axes[0, 0].invert_yaxis()  # and all others, which share it
    return figure


# --- width ------------------------------------------------------------------------------------------------------------


def modules_of(d_model: int) -> int:
    """The power of two nearest to sqrt(d) among those that divide d."""
    powers = [2**i for i in range(d_model.bit_length()) if d_model % 2**i == 0]
    return min(powers, key=lambda s: abs(s - math.sqrt(d_model)))


def width_config(d_model: int, variant: str, *, held: float = 0, touched: float = 0) -> ModelConfig:
    """The recipe at one width: d_ff = 4d, S = N about sqrt(d), rank d/N, in as many blocks as ``held`` and ``touched``
    ask for: bytes in fp32 of all blocks' weights, and of those that a token touches."""
    s = modules_of(d_model)
    sizes = dict(d_model=d_model, d_ff=4 * d_model, n_heads=d_model // HEAD, n_modules=s, modules_are_heads=False)
    sizes |= dict(ff_sparsity=s, d_lowrank=d_model // s, vocab_size=1024, max_len=64, n_layers=1)
    config = preset("smoke", variant, **sizes)
    block = sum(decoder_block_parts(config).values(), Part())
    return replace(config, n_layers=max(1, math.ceil(held / (4 * block.weights)), math.ceil(touched / 4 / block.reads)))


def time_widths(widths: Sequence[int], timer: Timer, held: float) -> Measured:
    """One row for each width and variant, of one block in fp32; blocks enough that memory is timed and no cache."""
    rows: list[dict[str, Any]] = []
    rooflines, left_out = {}, []
    touched = CACHE_TIMES * last_level_cache() if held else 0
    for d in widths:
        configs = {variant: width_config(d, variant, held=held, touched=touched) for variant in RECIPE}
        try:
            measured, rooflines[d] = timer.time_new(configs)
        except MemoryError as error:
            left_out.append(f"width {d:,}: {error}")
            continue
        for variant, config in configs.items():
            least = limit(config, "fp32", rooflines[d], context=measured.context, scope="block")
            sizes = {"d_model": d, "model": look(variant).label, "S = N": config.n_modules, "blocks": config.n_layers}
            cost = PartCost(least.bytes, round(least.flops))
            row = _row(cost, measured.samples[variant].block, least.ms)
            rows.append(sizes | row | {"speed-up": measured.ratio("dense", variant, "block")})
    return Measured(DataFrame(rows), rooflines, left_out)


def fit(x: ArrayLike, y: ArrayLike) -> tuple[float, float, float]:
    """y = factor x^exponent by least squares of the logarithms: exponent, two standard errors of it, factor.

    The error is that of the points' scatter about the line. Errors: ValueError for fewer than three points.
    """
    logs = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    require(len(logs[0]) > 2, "widths", np.asarray(x).tolist(), "at least three that fit in memory")
    (slope, intercept), covariance = np.polyfit(*logs, 1, cov=True)
    return float(slope), 2 * math.sqrt(covariance[0, 0]), math.exp(intercept)


def exponents(frame: DataFrame) -> DataFrame:
    """What the time, bytes and FLOPs of a block grow with, fitted over the widths of :func:`time_widths`."""
    rows = []
    for variant in RECIPE:
        own = frame[frame["model"] == look(variant).label]
        for quantity, column in (("time", "ms"), ("bytes", "MB"), ("FLOPs", "MFLOP")):
            exponent, error, _ = fit(own["d_model"], own[column])
            paper = PAPER_EXPONENTS[variant] if column == "MB" else None
            about = {"model": look(variant).label, "quantity": quantity}
            rows.append(about | {"exponent": exponent, "± 2 standard errors": error, "paper": paper})
    return DataFrame(rows)


def draw_widths(frame: DataFrame) -> Figure:
    """Time of a block against width with the fitted powers, and the speed-up, measured and at the limit."""
    figure, axes = new_figure(1, 2, width=8.4, height=3.8)
    own = {variant: frame[frame["model"] == look(variant).label] for variant in RECIPE}
    for variant, rows in own.items():
        d, style = rows["d_model"].to_numpy(), look(variant)
        exponent, _, factor = fit(d, rows["ms"])
        axes[0].plot(d, rows["ms"], **style.line | {"linestyle": "", "label": f"{style.label}: d^{exponent:.2f}"})
        axes[0].plot(d, factor * d**exponent, color=style.color)
        axes[0].plot(d, rows["limit (ms)"], color=style.color, linestyle=":", label=f"{style.label}, limit")
    dense, sparse = own.values()
    axes[1].plot(sparse["d_model"], sparse["speed-up"], **look("ff_qkv").line)
    possible = dense["limit (ms)"].to_numpy() / sparse["limit (ms)"].to_numpy()
    axes[1].plot(sparse["d_model"], possible, color=look("limit").color, linestyle="--", label="of the limits")
    axes[0].set(xscale="log", yscale="log", xlabel="d_model", ylabel="ms a block")
    axes[1].set(xscale="log", xlabel="d_model", ylabel="speed-up of a block", ylim=(0, None))
    for axis in axes:
        axis.legend()
        axis.set_xticks(dense["d_model"], [str(d) for d in dense["d_model"]], rotation=45)
        axis.minorticks_off()
    return figure


def arithmetic(widths: Sequence[int], roofline: Roofline) -> DataFrame:
    """Two least times of a sparse block at the recipe, counted: to read its bytes, and to do the multiply-adds of its
    multiplicative layer."""
    rows = []
    for d in widths:
        config = width_config(d, "ff_qkv")
        mult = model_parts(replace(config, attention="mult"))["self_attention"].flops / 4  # that variant has four
        bytes = limit(config, "fp32", roofline, context=1, scope="block").bytes
        times = {"read (ms)": bytes / roofline.read_gb_s / 1e6, "multiply (ms)": mult / roofline.peak_gflops / 1e6}
        rows.append({"d_model": d, "MB": bytes / 1e6, "MFLOP": mult / 1e6} | times)
    return DataFrame(rows)


def overtakes(frame: DataFrame) -> float | None:
    """The width from which the multiply-adds of :func:`arithmetic` take longer than all reading; None: none of them."""
    return first_below(frame["d_model"], frame["read (ms)"] / frame["multiply (ms)"], 1)


def draw_arithmetic(frame: DataFrame) -> Figure:
    """The two times of :func:`arithmetic` against width."""
    figure, axis = new_figure()
    for column, style in (("read (ms)", look("ff_qkv")), ("multiply (ms)", look("mult"))):
        exponent, _, _ = fit(frame["d_model"], frame[column])
        what = "reading all of a sparse block" if column == "read (ms)" else "arithmetic of its multiplicative layer"
        axis.plot(frame["d_model"], frame[column], **style.line | {"label": f"{what}: d^{exponent:.2f}"})
    axis.set(xscale="log", yscale="log", xlabel="d_model", ylabel="least time (ms)")
    axis.legend()
    return figure


def first_below(x: ArrayLike, y: ArrayLike, level: float) -> float | None:
    """The x at which y first falls below ``level``, between two points in proportion to log x; None where it never
    does."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    below = np.flatnonzero(ys < level)
    if not len(below) or below[0] == 0:
        return float(xs[0]) if len(below) else None
    i = below[0]
    share = (ys[i - 1] - level) / (ys[i - 1] - ys[i])
    return float(xs[i - 1] * (xs[i] / xs[i - 1]) ** share)


# --- length, threads, batch -------------------------------------------------------------------------------------------


def time_lengths(packed: Mapping[str, Packed], timer: Timer, lengths: Sequence[int], n_layers: int) -> DataFrame:
    """Time of a block and speed-up against positions in the cache; the speed-up of a token is that of ``n_layers``
    blocks, derived from those built."""
    rows = []
    for length in lengths:
        measured, _ = timer.time(packed, context=length)
        built = packed[PAIR[0]].config.n_layers
        sparse = measured.samples[PAIR[1]]
        share = np.median(sparse.parts["kv_cache"] / built / sparse.block)
        rows.append(
            {"positions": measured.context}
            | {f"{look(name).label} (ms a block)": float(np.median(measured.samples[name].block)) for name in PAIR}
            | {
                "cache, % of sparse": 100 * float(share),
                "speed-up, block": measured.ratio(*PAIR, "block"),
                "speed-up, token": measured.whole(n_layers - built + 1).ratio(*PAIR),
            }
        )
    return DataFrame(rows)


def halved(frame: DataFrame, scope: str) -> float | None:
    """Positions at which the speed-up of :func:`time_lengths` is half of the first; None where it never is."""
    speedup = frame[f"speed-up, {scope}"]
    return first_below(frame["positions"], speedup, speedup.iloc[0] / 2)


def draw_against(frame: DataFrame, x: str, unit: str, xlabel: str) -> Figure:
    """Dense and sparse in ``unit``, and every speed-up of a table, against its column ``x``."""
    figure, axes = new_figure(1, 2, width=8.4, height=3.6)
    for name in PAIR:
        axes[0].plot(frame[x], frame[f"{look(name).label} ({unit})"], **look(name).line)
    for column, linestyle in zip(frame.filter(like="speed-up"), ("-", "--"), strict=False):
        axes[1].plot(frame[x], frame[column], **look(PAIR[1]).line | {"linestyle": linestyle, "label": column})
    axes[1].axhline(1, color=look("dense").color, label="as fast as dense")
    axes[0].set(yscale="log", ylabel=unit)
    axes[1].set(ylabel="times dense", ylim=(0, None))
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(frame[x], [f"{tick:,}" for tick in frame[x]], rotation=45)
        axis.set_xlabel(xlabel)
        axis.legend()
    return figure


def thread_counts(most: int) -> list[int]:
    """Powers of two below ``most``, and ``most``."""
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]


def time_threads(packed: Mapping[str, Packed], timers: Sequence[Timer]) -> DataFrame:
    """One row for each timer and model, against the limit of so many threads."""
    rows = []
    for timer in timers:
        measured, roofline = timer.time(packed)
        for name, weights in packed.items():
            least = limit(
                weights.config, "fp32", roofline, context=measured.context, source_length=SOURCE_LENGTH, scope="model"
            )
            row = figures(measured.samples[name].token, least)
            rows.append(
                {
                    "threads": roofline.threads,
                    "machine, GB/s": roofline.read_gb_s,
                    "machine, GFLOP/s": roofline.peak_gflops,
                    "model": look(name).label,
                    "ms": row["ms_median"],
                    "GB/s": row["gb_s"],
                    "% of limit": 100 * row["limit_fraction"],
                    "speed-up": measured.ratio(PAIR[0], name),
                }
            )
    return DataFrame(rows)


def time_batches(packed: Mapping[str, Packed], timer: Timer, batches: Sequence[int]) -> DataFrame:
    """Tokens a second of all sequences together, and the units that at least one of them is expected to choose, when
    all units are chosen alike."""
    rows = []
    n = packed[PAIR[1]].config.ff_sparsity
    for batch in batches:
        measured, _ = timer.time(packed, batch=batch)
        rates = {name: 1e3 * batch / float(np.median(measured.samples[name].token)) for name in PAIR}
        rows.append(
            {"batch": batch}
            | {f"{look(name).label} (tokens/s)": rate for name, rate in rates.items()}
            | {"speed-up": measured.ratio(*PAIR), "units read (%)": 100 * (1 - (1 - 1 / n) ** batch)}
        )
    return DataFrame(rows)
