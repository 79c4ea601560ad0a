"""Notebook 07: the engine beside the decoders of other libraries, at equal sizes, all in one run.

Every row is one decoder in one dtype on one number of threads. Bytes are those of the weights a token touches, for
engine and peers alike. The speed of memory changes within minutes, and rows are minutes apart, so that each carries the
bandwidth seen beside it. Two rows are compared twice: by their times, and by their times in units of their limits.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pandas import DataFrame

from .. import __version__
from ..bench.peers import NotRun, PeerTiming
from ..bench.peers.base import SOURCE_LENGTH, shape_of, weights_read
from ..bench.protocol import Timing
from ..bench.roofline import Reader
from ..bench.rounds import WARMUP, Samples, engine_bytes, free_room, time_in_rounds
from ..checks import require_size
from ..config import ModelConfig
from ..decode import DTYPES, Engine, pack_random
from ..decode.engine import usable_threads
from ..results.figures import GREY, look, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = PeerTiming | NotRun

ENGINE = {f"sparselib {look(variant).label}": variant for variant in ("dense", "ff_qkv", "ff_qkv_loss")}
NAMES = {variant: name for name, variant in ENGINE.items()}
BITS = {"fp32": 32, "bf16": 16, "F16": 16, "int8": 8, "Q8_0": 8, "Q4_0": 4}  # of a weight, without scales
RAW, EVEN = "times as fast", "times as fast at equal bandwidth"
FORMATS = {
    "MB a token": "{:,.1f}",
    "ms a token": "{:.2f}",
    "ms q1": "{:.2f}",
    "ms q3": "{:.2f}",
    "GB/s": "{:.1f}",
    "read GB/s": "{:.1f}",
    "% of limit": "{:.0f}",
}
COMPARED = {"ms a token": "{:.2f}", "its ms a token": "{:.2f}", RAW: "{:.2f}", EVEN: "{:.2f}"}


# --- measuring --------------------------------------------------------------------------------------------------------


def make_readers(size: int | None = None) -> dict[int, Reader]:
    """Readers of one thread and of all threads this process may use; ``size`` in bytes as in :class:`Reader`."""
    return {threads: Reader(threads, size) for threads in sorted({1, usable_threads()})}


def time_engines(
    configs: Mapping[str, ModelConfig],
    plan: Mapping[str, Sequence[str]],
    readers: Mapping[int, Reader],
    *,
    tokens: int,
    rounds: int,
    context: int,
    seed: int = 0,
) -> list[Result]:
    """Time the variants that ``plan`` lists for each dtype, side by side, on each of the readers' numbers of threads.

    ``configs`` by variant. Weights of one dtype at a time are in memory; those that do not fit become a ``NotRun``.
    Errors: ValueError for bad counts, or more positions than ``max_len``.
    """
    require_size("tokens", tokens)
    require_size("context", context, 0)
    results: list[Result] = []
    for dtype, variants in plan.items():
        chosen, length = {v: configs[v] for v in variants}, context + WARMUP + tokens
        need, room = sum(engine_bytes(c, dtype, length, max(readers)) for c in chosen.values()), free_room()
        if need > room:
            reason = f"side by side they need {need / 1e9:.1f} GB of memory, {room / 1e9:.1f} GB are free"
            results += [NotRun(NAMES[v], dtype, n, reason) for n in readers for v in variants]
        else:
            results += _time_group(chosen, dtype, readers, tokens, rounds, context, seed)
        gc.collect()
    return results


def _time_group(
    configs: Mapping[str, ModelConfig],
    dtype: str,
    readers: Mapping[int, Reader],
    tokens: int,
    rounds: int,
    context: int,
    seed: int,
) -> list[PeerTiming]:
    packed = {variant: pack_random(config, dtype, seed, encoder=False) for variant, config in configs.items()}
    results = []
    for threads, reader in readers.items():
        length = context + WARMUP + tokens
        engines = {variant: Engine(p, 1, length, SOURCE_LENGTH, threads) for variant, p in packed.items()}
        measured = time_in_rounds(engines, tokens, rounds, context=context, seed=seed, reader=reader)
        for variant, engine in engines.items():
            engine.close()
            timing = _timing(measured.samples[variant], threads, configs[variant], dtype)
            shape = shape_of(configs[variant], "decoder with cross-attention")
            result = PeerTiming(NAMES[variant], __version__, dtype, threads, shape, timing)
            results.append(result.beside(float(np.median(measured.read_gb_s))))
    return results


def _timing(samples: Samples, threads: int, config: ModelConfig, dtype: str) -> Timing:
    q1, median, q3 = (float(q) for q in np.quantile(samples.token, (0.25, 0.5, 0.75)))
    bytes = DTYPES[dtype].itemsize * weights_read(config)
    return Timing(median, q1, q3, float(samples.token.min()), samples.token.size, threads, bytes)


# --- what came out ----------------------------------------------------------------------------------------------------


def timings(results: Sequence[Result], *, of_engine: bool) -> list[PeerTiming]:
    """The engine's timings, or the peers'."""
    return [r for r in results if isinstance(r, PeerTiming) and (r.peer in ENGINE) == of_engine]


def dense_rows(results: Sequence[Result]) -> list[PeerTiming]:
    return [r for r in timings(results, of_engine=True) if r.peer == NAMES["dense"]]


def fastest(rows: Sequence[PeerTiming]) -> PeerTiming | None:
    return min(rows, key=lambda row: row.timing.ms_median, default=None)


def name_of(row: PeerTiming) -> str:
    return f"{row.peer} {row.dtype}"


def ratio(slow: PeerTiming, fast: PeerTiming) -> float:
    """How many times as fast ``fast`` is."""
    return slow.timing.ms_median / fast.timing.ms_median


def even_ratio(slow: PeerTiming, fast: PeerTiming) -> float:
    """The same if both had had the same bandwidth: time goes as 1 / bandwidth where memory is what is waited for."""
    return ratio(slow, fast) * (slow.read_gb_s or np.nan) / (fast.read_gb_s or np.nan)


def equal_peers(ours: PeerTiming, results: Sequence[Result]) -> list[PeerTiming]:
    """The peers with as many bits a weight on as many threads."""
    peers = timings(results, of_engine=False)
    return [p for p in peers if BITS[p.dtype] == BITS[ours.dtype] and p.threads == ours.threads]


def against_peers(results: Sequence[Result]) -> DataFrame:
    """Each row of the dense engine against the fastest of its equal peers; None where none was run."""
    rows: list[dict[str, Any]] = []
    for ours in dense_rows(results):
        peer = fastest(equal_peers(ours, results))
        rows.append(
            {
                "bits a weight": BITS[ours.dtype],
                "threads": ours.threads,
                "engine, dense": ours.dtype,
                "ms a token": ours.timing.ms_median,
                "fastest peer": peer and name_of(peer),
                "its ms a token": peer and peer.timing.ms_median,
                RAW: peer and ratio(peer, ours),
                EVEN: peer and even_ratio(peer, ours),
            }
        )
    return DataFrame(rows, dtype=object)


def not_run(results: Sequence[Result]) -> str:
    """One line for each decoder and reason; says so if there is none."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in results:
        if isinstance(r, NotRun):
            reasons.setdefault((r.peer, r.reason), []).append(f"{r.dtype} on {r.threads} thread{'s' * (r.threads > 1)}")
    lines = [f"{peer} ({', '.join(rows)}): {reason}" for (peer, reason), rows in reasons.items()]
    return "\n".join(["Not run:", *lines]) if lines else "All were run."


def verdict(results: Sequence[Result]) -> dict[str, str]:
    """``word`` (yes, partly, no or not measured) and sentences: ``dense``, ``sparse`` and ``peers`` that were run."""
    word, dense = _dense_verdict(results)
    return {"word": word, "dense": dense, "sparse": _sparse_verdict(results), "peers": _ran(results)}


def _ran(results: Sequence[Result]) -> str:
    peers = dict.fromkeys(r.peer for r in results if r.peer not in ENGINE)
    ran = {r.peer for r in timings(results, of_engine=False)}
    return f"{len(ran)} of {len(peers)} ({', '.join(p for p in peers if p in ran) or 'none'})"


def _dense_verdict(results: Sequence[Result]) -> tuple[str, str]:
    """The word and the sentence; faster means by the times as measured and at equal bandwidth."""
    pairs = [(peer, ours) for ours in dense_rows(results) for peer in equal_peers(ours, results)]
    if not pairs:
        return "not measured", "No peer was run with as many bits a weight as the dense engine."
    least = [min(ratio(*pair), even_ratio(*pair)) for pair in pairs]
    won = sum(times > 1 for times in least)
    word = "yes" if won == len(pairs) else "partly" if won else "no"
    peer, ours = pairs[int(np.argmin(least))]
    return word, (
        f"The dense engine is faster in {won} of {len(pairs)} comparisons with a peer of as many bits a weight on as "
        f"many threads. The closest is {name_of(peer)} on {peer.threads} thread{'s' * (peer.threads > 1)}: the engine "
        f"is {ratio(peer, ours):.2f} times as fast, {even_ratio(peer, ours):.2f} times at equal bandwidth."
    )


def _sparse_verdict(results: Sequence[Result]) -> str:
    """The fastest sparse engine against the fastest peer, whatever its dtype and threads, and both in fp32.

    As measured only: the sparse engine does not wait for memory alone, so that its time does not go with the bandwidth.
    """
    ours = [r for r in timings(results, of_engine=True) if r.peer != NAMES["dense"]]
    peers = timings(results, of_engine=False)
    pairs: dict[tuple[str, str], str] = {}  # once, if it is the same pair
    for of, dtypes in (("of all", tuple(BITS)), ("in fp32", ("fp32",))):
        sparse = fastest([r for r in ours if r.dtype in dtypes])
        peer = fastest([r for r in peers if r.dtype in dtypes])
        if sparse and peer:
            sentence = (
                f"The fastest peer {of}, {name_of(peer)}, takes {peer.timing.ms_median:.2f} ms a token, and the "
                f"fastest sparse engine, {name_of(sparse)}, {sparse.timing.ms_median:.2f} ms: it is "
                f"{ratio(peer, sparse):.1f} times as fast."
            )
            pairs.setdefault((name_of(peer), name_of(sparse)), sentence)
    return " ".join(pairs.values()) or "No peer was run beside the sparse engine."


def draw_times(results: Sequence[Result]) -> Figure:
    """Bars of ms a token, the fastest on top: the engine in the colours of its variants, peers grey."""
    from matplotlib.patches import Patch

    rows = timings(results, of_engine=True) + timings(results, of_engine=False)
    counts = sorted({row.threads for row in rows})
    bars: dict[str, list[PeerTiming]] = {}
    for row in sorted(rows, key=lambda row: row.timing.ms_median):
        bars.setdefault(name_of(row), []).append(row)
    figure, axis = new_figure(height=1.5 + 0.2 * len(counts) * len(bars))
    thick = 0.8 / len(counts)
    for place, row in ((place, row) for place, by_threads in enumerate(bars.values()) for row in by_threads):
        y = place + (counts.index(row.threads) - (len(counts) - 1) / 2) * thick
        ms, color = row.timing.ms_median, _color(row)
        axis.barh(y, ms, 0.8 * thick, color=color if row.threads == counts[-1] else "none", edgecolor=color)
        axis.annotate(f"{ms:.3g}", (ms, y), (3, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), list(bars))
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="ms a token (median, log scale)")
    axis.set_xlim(0.5 * min(r.timing.ms_median for r in rows), 2 * max(r.timing.ms_median for r in rows))
    axis.grid(axis="y", visible=False)
    kinds = {_kind(row): Patch(color=_color(row), label=_kind(row)) for row in rows}
    title = f"outlined: {counts[0]} thread, filled: {counts[-1]} threads" if len(counts) > 1 else None
    figure.legend(handles=list(kinds.values()), title=title, loc="outside upper center", ncols=2)
    return figure


def _kind(row: PeerTiming) -> str:
    return row.peer if row.peer in ENGINE else "other libraries"


def _color(row: PeerTiming) -> str:
    return look(ENGINE[row.peer]).color if row.peer in ENGINE else GREY
