"""The decode benchmark: every variant of a preset, a token at a time, against the limit of the machine.

Variants that fit in memory together are timed in turns (rounds.py). A model that does not fit is measured as an engine
with one block, and its time is derived: blocks x (one block) + the rest.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from .. import __version__
from ..checks import require, require_choice, require_size
from ..config import VARIANTS, ModelConfig, model_parts, preset
from ..decode import DTYPES, Engine, Packed, pack_random
from ..decode.engine import usable_threads
from ..decode.layout import Layout
from .machine import last_level_cache, load, machine
from .roofline import Limit, Reader, Roofline, Scope, limit, peak_gflops
from .rounds import (
    CONTEXT,
    SOURCE_LENGTH,
    WARMUP,
    Rounds,
    engine_bytes,
    figures,
    free_room,
    side_by_side,
    silent,
    time_in_rounds,
)

_ARCHITECTURE: dict[str, dict[str, str]] = {"transformer": {}, "terraformer": {"architecture": "terraformer"}}
SCOPES: tuple[Scope, ...] = ("block", "model")
FEWER = ("dense", "ff_qkv", "ff_qkv_loss")  # variants timed by default in bf16 and int8
BUILT_A_SECOND = 1e9  # weights, for the estimate of the time left only


@dataclass(frozen=True)
class _Group:
    """Variants timed side by side in one dtype; ``configs`` are as built: whole, or with one block."""

    dtype: str
    configs: Mapping[str, ModelConfig]
    is_whole: bool


@dataclass
class _Bench:
    """One run of :func:`bench_decode`: what was asked for, the machine, and what has been measured so far."""

    preset: str
    model: str
    threads: int
    tokens: int
    rounds: int
    seed: int
    progress: Callable[[str, float], Any]
    reader: Reader
    peak: float
    room: int
    cores: str | None = None  # the distance of the first group's rounds, which is looked for in the others
    measured: dict[str, list[tuple[_Group, Rounds]]] = field(default_factory=dict)  # by dtype
    left_out: list[dict[str, str]] = field(default_factory=list)
    work_done: float = 0.0
    work: float = 0.0

    @property
    def max_len(self) -> int:
        return CONTEXT + WARMUP + self.tokens

    def config(self, variant: str, **changes: Any) -> ModelConfig:
        return preset(self.preset, variant, **_ARCHITECTURE[self.model] | changes)

    def plan(self, dtype: str, variants: Sequence[str]) -> list[_Group]:
        """Whole models if the largest fits, else engines of one block."""
        for is_whole in (True, False):
            changes = {} if is_whole else {"n_layers": 1}
            configs = {v: self.config(v, **changes) for v in variants}
            sizes = {v: engine_bytes(config, dtype, self.max_len, self.threads) for v, config in configs.items()}
            if max(sizes.values()) <= self.room:
                break
            for variant, size in sizes.items():
                if size > self.room:
                    self._leave_out(dtype, variant, is_whole, f"{size / 1e9:.1f} GB, {self.room / 1e9:.1f} GB are free")
        groups = side_by_side(sizes, self.room)
        return [_Group(dtype, {v: configs[v] for v in names}, is_whole) for names in groups]

    def _leave_out(self, dtype: str, variant: str, is_whole: bool, reason: str) -> None:
        what = "the whole model" if is_whole else "one block"
        self.left_out.append({"variant": variant, "dtype": dtype, "reason": f"{what} needs {reason}"})

    def run(self, groups: Sequence[_Group]) -> None:
        self.work = sum(sum(work.values()) for _, work in self._steps(groups))
        engines: dict[str, Engine] = {}
        dtype = ""
        for group, work in self._steps(groups):
            stale = [v for v in engines if group.dtype != dtype or v not in group.configs]
            for variant in stale:
                engines.pop(variant).close()
            gc.collect()
            dtype = group.dtype
            try:
                for variant, config in group.configs.items():
                    if variant not in engines:
                        engines[variant] = self._build(group, variant, config, work[f"build {variant}"])
                self._time(group, engines, work)
            except MemoryError as error:  # somebody else took the memory since it was counted
                self.left_out += [{"variant": v, "dtype": dtype, "reason": str(error)} for v in group.configs]

    def _steps(self, groups: Sequence[_Group]) -> Iterator[tuple[_Group, dict[str, float]]]:
        """Every group with the seconds that building its new engines and their tokens may take."""
        before: tuple[str, Mapping[str, ModelConfig]] = ("", {})
        for group in groups:
            work = {}
            for v, config in group.configs.items():
                if before[0] != group.dtype or v not in before[1]:
                    work[f"build {v}"] = Layout(config, group.dtype, encoder=False).w_size / BUILT_A_SECOND
                ms = self._limit(config, group.dtype, self.reader.highest, CONTEXT, "model").ms
                work[v] = ms / 1e3 * self.rounds * (WARMUP + self.tokens)
            before = group.dtype, group.configs
            yield group, work

    def _build(self, group: _Group, variant: str, config: ModelConfig, work: float) -> Engine:
        self._advance(f"{group.dtype}: making {variant}", 0.0)
        needed = engine_bytes(config, group.dtype, self.max_len, self.threads)
        for _ in range(50):  # the threads of a closed engine let go of its weights a moment later
            if free_room() >= needed:
                break
            time.sleep(0.1)
        total = Layout(config, group.dtype, encoder=False).w_size
        label = f"{group.dtype}: making {variant}"
        packed = pack_random(
            config,
            group.dtype,
            self.seed,
            encoder=False,
            progress=lambda entries: self._advance(label, work * entries / total),
        )
        return Engine(packed, 1, self.max_len, SOURCE_LENGTH if config.has_source else None, self.threads)

    def _time(self, group: _Group, engines: Mapping[str, Engine], work: Mapping[str, float]) -> None:
        label = f"{group.dtype}: decoding {', '.join(group.configs)}"
        each = self.rounds * (WARMUP + self.tokens)
        left = sum(work[variant] for variant in group.configs)

        def tell(variant: str) -> None:
            nonlocal left  # rounds beyond those asked for are not part of the work that was foreseen
            step = min(left, work[variant] / each)
            left -= step
            self._advance(label, step)

        rounds = time_in_rounds(
            {v: engines[v] for v in group.configs},
            self.tokens,
            self.rounds,
            seed=self.seed,
            reader=self.reader,
            cores=self.cores,
            progress=tell,
        )
        self.cores = self.cores or rounds.cores
        if not group.is_whole:
            rounds = rounds.whole(self.config("dense").n_layers)
        self.measured.setdefault(group.dtype, []).append((group, rounds))

    def _advance(self, label: str, work: float) -> None:
        self.work_done += work
        self.progress(label, min(1.0, self.work_done / self.work))

    def _limit(self, config: ModelConfig, dtype: str, read_gb_s: float, context: int, scope: Scope) -> Limit:
        roofline = Roofline(self.threads, read_gb_s, self.peak)
        return limit(config, dtype, roofline, context=context, source_length=SOURCE_LENGTH, scope=scope)

    def rows(self) -> list[dict[str, Any]]:
        return [
            self._row(dtype, variant, scope, cores)
            for dtype in self.measured
            for variant in VARIANTS
            for scope in SCOPES
            for cores in dict.fromkeys(rounds.cores for _, rounds in self._of(dtype, variant))
        ]

    def _of(self, dtype: str, variant: str, cores: str | None = None) -> list[tuple[_Group, Rounds]]:
        """What was measured of a variant, at the usual distance of the cores first."""
        own = [(group, rounds) for group, rounds in self.measured.get(dtype, []) if variant in group.configs]
        own += [(group, rounds.other) for group, rounds in own if rounds.other]
        return [(group, rounds) for group, rounds in own if cores in (None, rounds.cores)]

    def _row(self, dtype: str, variant: str, scope: Scope, cores: str) -> dict[str, Any]:
        own = self._of(dtype, variant, cores)
        times = np.concatenate([r.samples[variant].of(scope).ravel() for _, r in own])
        read = float(np.median(np.concatenate([r.read_gb_s for _, r in own])))
        config, context = self.config(variant), own[0][1].context
        least = self._limit(config, dtype, read, context, scope)
        token = self._limit(config, dtype, read, context, "model")
        speedup, together = self._speedup(dtype, variant, scope, cores, times)
        return {
            "variant": variant,
            "dtype": dtype,
            "scope": scope,
            "cores": cores,
            "usual": cores == self._of(dtype, variant)[0][1].cores,
            **figures(times, least),
            "read_gb_s": read,
            "handover_ns": float(np.median([r.handover_ns for _, r in own])),
            "speedup": speedup,
            "side_by_side": together,
            "derived": scope == "model" and not own[0][0].is_whole,
            "in_cache": token.bytes <= last_level_cache(),
        }

    def _speedup(
        self, dtype: str, variant: str, scope: Scope, cores: str, times: np.ndarray
    ) -> tuple[float | None, bool]:
        """Over dense of the same dtype at the same distance of the cores, and whether both had the same rounds."""
        dense = [r for _, r in self._of(dtype, "dense", cores)]
        together = [r for r in dense if variant in r.samples]
        if together:
            return together[0].ratio("dense", variant, scope), True
        if not dense:
            return None, False
        slow = np.concatenate([r.samples["dense"].of(scope).ravel() for r in dense])
        return float(np.median(slow) / np.median(times)), False


# --- the benchmark ----------------------------------------------------------------------------------------------------


def bench_decode(
    preset_name: str,
    model: str = "transformer",
    *,
    dtypes: Sequence[str] | None = None,
    variants: Sequence[str] | None = None,
    threads: int | None = None,
    tokens: int = 8,
    rounds: int = 10,
    seed: int = 0,
    progress: Callable[[str, float], Any] = silent,
) -> dict[str, Any]:
    """Time the variants of a preset's decoder, block and whole model, at batch 1 with random weights.

    Default: all variants in fp32; dense, ff_qkv and ff_qkv_loss in bf16 and int8. ``tokens`` are timed in each of
    ``rounds`` rounds, more where the cores move. ``progress`` is told what is done at the moment, and the share of all
    work that is done (0 .. 1).

    Returns what the command writes as JSON: machine, preset, model, ``rows`` and ``left_out`` (what did not fit, and
    why). A row's ``limit_ms`` is computed with its own ``read_gb_s``, the median of the bandwidths seen beside it;
    the machine's is the best of all. ``speedup`` is over dense of the same dtype and scope; ``side_by_side`` says
    whether in the same rounds. ``cores`` says whether the cores shared a cache in those rounds ("near") or not
    ("far"); where both were seen there are rows for both. ``usual`` is the distance of the first rounds wherever the
    others had it, too, so that rows can be compared. ``derived`` marks what was computed from one block; ``in_cache``,
    that a token's bytes fit in the last-level cache, so that the limit, which is memory's, may be beaten.

    Errors: ValueError for anything unknown or impossible, before anything is built.
    """
    require_choice("model", model, tuple(_ARCHITECTURE))
    dtypes = tuple(DTYPES) if dtypes is None else tuple(dict.fromkeys(dtypes))
    for name, values, known in (("dtype", dtypes, tuple(DTYPES)), ("variant", variants or (), VARIANTS)):
        for value in values:
            require_choice(name, value, known)
    require_size("rounds", rounds)
    check_length(tokens, CONTEXT, preset(preset_name))
    started, load_before = datetime.now(UTC), load()
    threads = usable_threads() if threads is None else threads
    reader = Reader(threads)
    peak, room = peak_gflops(threads), free_room()
    bench = _Bench(preset_name, model, threads, tokens, rounds, seed, progress, reader, peak, room)
    groups: list[_Group] = []
    for dtype in dtypes:
        chosen = variants or (VARIANTS if dtype == "fp32" else FEWER)
        groups += bench.plan(dtype, [v for v in VARIANTS if v in chosen])
    bench.run(groups)
    progress("done", 1.0)
    here = machine() | {"threads": threads, "read_gb_s": reader.highest, "peak_gflops": bench.peak}
    return {
        "machine": here,
        "preset": preset_name,
        "model": model,
        "batch": 1,
        "context": CONTEXT + WARMUP + (tokens + 1) // 2,
        "source_length": SOURCE_LENGTH * bench.config("dense").has_source,
        "seed": seed,
        "date": started.isoformat(timespec="seconds"),
        "sparselib": __version__,
        "load": load_before,
        "rows": bench.rows(),
        "left_out": bench.left_out,
    }


def as_csv(result: Mapping[str, Any]) -> str:
    """A result of :func:`bench_decode` as one line a row, with what it was measured on; left out: without times."""
    from pandas import DataFrame

    about = {name: result[name] for name in ("preset", "model", "date", "sparselib", "load")}
    about |= {name: result["machine"][name] for name in ("cpu", "threads", "peak_gflops")}
    frame = DataFrame([about | row for row in (*result["rows"], *result["left_out"])])
    return frame.to_csv(index=False, lineterminator="\n")


def check_length(tokens: int, context: int, config: ModelConfig | None) -> None:
    """Errors: ValueError unless there is room for ``tokens`` after ``context`` and the warm-up."""
    require_size("tokens", tokens)
    require_size("context", context, 0)
    positions, longest = context + WARMUP + tokens, config.max_len if config else None
    require(
        longest is None or positions <= longest, "context + warmup + tokens", positions, f"at most max_len = {longest}"
    )


def count_weights(packed: Packed) -> int:
    """The model's weights that were packed: without the encoder's where it was left out."""
    parts = model_parts(packed.config)
    return sum(part.weights for name, part in parts.items() if name != "encoder" or packed.layout.encoder)


def decode_once(
    packed: Packed,
    tokens: int,
    reader: Reader,
    *,
    context: int = CONTEXT,
    seed: int = 0,
    progress: Callable[[str], Any] = silent,
) -> dict[str, float | int]:
    """Decode ``tokens`` random tokens after ``context`` of them, with the reader's threads.

    Returns a row's numbers (see :func:`figures`), ``threads``, ``read_gb_s`` and ``tokens_per_s``. Errors: ValueError
    for counts that do not fit in the model's ``max_len``; MemoryError, with the numbers, for caches that do not fit.
    """
    config, threads = packed.config, reader.threads
    check_length(tokens, context, config)
    source = SOURCE_LENGTH if config.has_source else None
    engine = Engine(packed, 1, context + WARMUP + tokens, source, threads)
    rounds = time_in_rounds({"it": engine}, tokens, 1, context=context, seed=seed, reader=reader, progress=progress)
    engine.close()
    roofline = Roofline(threads, float(rounds.read_gb_s[0]), peak_gflops(threads))
    times = rounds.samples["it"].token
    least = limit(config, packed.dtype, roofline, context=rounds.context, source_length=SOURCE_LENGTH)
    measured = {"threads": threads, "read_gb_s": roofline.read_gb_s, "tokens_per_s": 1e3 / float(times.mean())}
    return figures(times, least) | measured
