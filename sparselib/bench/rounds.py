"""Engines timed side by side, in turns, and what fits in memory for it.

A virtual machine's cores are moved: for seconds or minutes they share a cache, then they are on two dies, where they
read up to twice as many bytes a second but hand results over four times as slowly. So engines that are compared are all
in memory at once and take turns: in every round each of them decodes a few tokens, with a look at the bandwidth and at
the distance of the cores before and after, and only rounds with the cores at one distance are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import psutil

from ..checks import require, require_size
from ..config import ModelConfig
from ..decode import DTYPES, Engine
from ..decode.engine import CHUNK
from ..decode.layout import Layout
from ..decode.program_terraformer import make_program
from .roofline import FAR, Limit, Reader, Scope

CONTEXT = 32  # positions in the cache before the first token
WARMUP = 2  # tokens not counted at the beginning of every turn
SOURCE_LENGTH = 16  # as the reference code times it
MOST = 3  # times as many rounds as are asked for, at most
FEW = 3  # rounds at the other distance that are worth a row
SPARE = 2_000_000_000  # bytes that a benchmark leaves to the machine


def silent(*_: Any) -> None:
    """No progress shown."""


@dataclass(frozen=True)
class Samples:
    """Times of one engine in milliseconds, (rounds, tokens): of a token, of a mean block, of each part of the model."""

    token: np.ndarray
    block: np.ndarray
    parts: Mapping[str, np.ndarray]

    def of(self, scope: Scope) -> np.ndarray:
        return self.block if scope == "block" else self.token


@dataclass(frozen=True)
class Rounds:
    """What :func:`time_in_rounds` measured with the cores at one distance.

    Samples by engine, bandwidth (rounds,), mean positions attended to; ``cores`` is "near" (they share a cache), "far",
    or "moving" where they moved in every round; ``handover_ns`` is what the threads take to meet. ``other`` holds the
    rounds at the other distance, if there were a few.
    """

    samples: Mapping[str, Samples]
    read_gb_s: np.ndarray
    context: int
    cores: str = "near"
    handover_ns: float = 0.0
    other: Rounds | None = None

    def ratio(self, slow: str, fast: str, scope: Scope = "model") -> float:
        """Speed-up: the median over rounds of the ratio of the two engines' medians in a round."""
        medians = [np.median(self.samples[name].of(scope), axis=1) for name in (slow, fast)]
        return float(np.median(medians[0] / medians[1]))

    def whole(self, n_layers: int) -> Rounds:
        """The same with the tokens of engines of one block made those of ``n_layers``: the rest, and so many blocks."""
        samples = {
            name: replace(s, token=s.token + (n_layers - 1) * s.block, parts={}) for name, s in self.samples.items()
        }
        return replace(self, samples=samples, other=self.other and self.other.whole(n_layers))


def time_in_rounds(
    engines: Mapping[str, Engine],
    tokens: int,
    rounds: int,
    *,
    context: int = CONTEXT,
    warmup: int = WARMUP,
    seed: int = 0,
    reader: Reader | None = None,
    cores: str | None = None,
    progress: Callable[[str], Any] = silent,
) -> Rounds:
    """Time ``tokens`` tokens of every engine in each of ``rounds`` rounds, the engines in turn.

    Rounds are taken until there are ``rounds`` of them with the cores at one distance, that of ``cores`` ("near" or
    "far") if it is given, or ``MOST`` times as many in all. All tokens are random and new, so that new rows are read
    for each. A turn begins at ``context`` positions, with ``warmup`` tokens that are not counted. An encoder-decoder
    gets a random source of ``source_len`` tokens, or random vectors where its encoder was left out. ``reader`` looks at
    the bandwidth and the distance (default: one of the first engine's threads), ``progress`` is told the engine's name
    after every token, outside the times.
    Errors: ValueError for no engines, bad counts, or more positions than an engine's ``max_len``.
    """
    require(len(engines) > 0, "engines", dict(engines), "at least one")
    for name, value, least in (("tokens", tokens, 1), ("rounds", rounds, 1), ("context", context, 0)):
        require_size(name, value, least)
    require_size("warmup", warmup, 0)
    for name, engine in engines.items():
        positions = context + warmup + tokens
        require(
            positions <= engine.max_len, "context + warmup + tokens", positions, f"at most {name}'s {engine.max_len}"
        )
    reader = reader or Reader(next(iter(engines.values())).threads)
    generator = np.random.default_rng(seed)
    for engine in engines.values():
        _begin(engine, context, generator)
    taken: dict[str, list[np.ndarray]] = {name: [] for name in engines}
    looks, seen = [_look(reader)], np.array([], str)
    while len(seen) < MOST * rounds and _most(seen, cores) < rounds:
        for name, engine in engines.items():
            engine.rewind(context)
            taken[name].append(_turn(engine, name, tokens, warmup, generator, progress))
        looks.append(_look(reader))
        seen = _distances(looks, reader.threads)
    times = {name: np.array(turns) for name, turns in taken.items()}
    attended = context + warmup + (tokens + 1) // 2
    between = (np.array(looks[1:]) + np.array(looks[:-1])) / 2  # (rounds, 2)

    def of(distance: str) -> Rounds:
        kept = seen == distance
        samples = {name: _samples(times[name][kept], engine) for name, engine in engines.items()}
        return Rounds(samples, between[kept, 0], attended, distance, float(np.median(between[kept, 1])))

    counts = _count(seen)
    usual, other = sorted(counts, key=lambda distance: (distance != cores or counts[distance] < FEW, -counts[distance]))
    if not counts[usual]:
        return of("moving")
    return replace(of(usual), other=of(other) if counts[other] >= FEW else None)


def _look(reader: Reader) -> tuple[float, float]:
    """GB/s and ns."""
    return reader.now(), reader.handover()


def _distances(looks: list[tuple[float, float]], threads: int) -> np.ndarray:
    """(rounds,) of "near", "far", or "moving" where the looks before and after a round differ."""
    far = [ns > FAR * threads for _, ns in looks]
    names = {(False, False): "near", (True, True): "far"}
    return np.array([names.get(pair, "moving") for pair in pairwise(far)])


def _count(seen: np.ndarray) -> dict[str, int]:
    return {distance: int((seen == distance).sum()) for distance in ("near", "far")}


def _most(seen: np.ndarray, cores: str | None) -> int:
    """Rounds at the distance that is looked for, or at the more frequent one."""
    counts = _count(seen)
    return counts.get(cores or "", max(counts.values()))


def _begin(engine: Engine, context: int, generator: np.random.Generator) -> None:
    """Read a source, if there is one, and ``context`` tokens."""
    config, batch = engine.config, engine.batch
    if not config.has_source:
        engine.start()
    elif engine.packed.layout.encoder:
        engine.start(generator.integers(config.vocab_size, size=(batch, engine.source_len)))
    else:
        shape = (batch, engine.source_len, config.d_model)
        engine.start(memory=generator.standard_normal(shape, np.float32))
    if context:
        engine.prefill(generator.integers(config.vocab_size, size=(batch, context)))


def _turn(
    engine: Engine,
    name: str,
    tokens: int,
    warmup: int,
    generator: np.random.Generator,
    progress: Callable[[str], Any],
) -> np.ndarray:
    """(tokens, 2 + parts): ms of the token, of a block and of each part."""
    times = []
    for token in generator.integers(engine.config.vocab_size, size=(warmup + tokens, engine.batch)):
        engine.clear_clock()
        start = time.perf_counter()
        engine.step(token)
        ms = 1e3 * (time.perf_counter() - start)
        times.append([ms, ms * engine.share_of_a_block(), *(ms * share for share in engine.shares().values())])
        progress(name)
    return np.array(times[warmup:])


def _samples(times: np.ndarray, engine: Engine) -> Samples:
    parts = {name: times[:, :, 2 + i] for i, name in enumerate(engine.shares())}
    return Samples(times[:, :, 0], times[:, :, 1], parts)


def figures(times: np.ndarray, least: Limit) -> dict[str, float | int]:
    """Median, quartiles, bytes and share of the limit of one row; ``times`` in ms, of any shape."""
    q1, median, q3 = (float(q) for q in np.quantile(times, (0.25, 0.5, 0.75)))
    return {
        "ms_median": median,
        "ms_q1": q1,
        "ms_q3": q3,
        "ms_min": float(times.min()),
        "n": int(times.size),
        "bytes": least.bytes,
        "flops": least.flops,
        "gb_s": least.bytes / median / 1e6,
        "limit_ms": least.ms,
        "limit_fraction": least.ms / median,
    }


# --- what fits in memory ----------------------------------------------------------------------------------------------


def engine_bytes(config: ModelConfig, dtype: str, max_len: int, threads: int) -> int:
    """Memory of an engine without encoder: weights, cache and buffers."""
    layout = Layout(config, dtype, encoder=False)
    program = make_program(layout, 1, max_len, SOURCE_LENGTH * config.has_source, CHUNK, threads)
    return layout.w_size * DTYPES[dtype].itemsize + 4 * (layout.p_size + program.size)


def free_room() -> int:
    """Bytes that a benchmark may take now."""
    return psutil.virtual_memory().available - SPARE


def side_by_side(sizes: Mapping[str, int], room: int) -> list[tuple[str, ...]]:
    """Groups that fit in ``room`` bytes, each with the first name in it so that all are compared with the same.

    A name that fits beside nothing is alone in its group; what does not fit at all is in none.
    """

    def fit(*names: str) -> bool:
        return sum(sizes[name] for name in names) <= room

    fitting = [name for name in sizes if fit(name)]
    groups: list[tuple[str, ...]] = []
    for name in fitting:
        first = fitting[0]
        if groups and first in groups[-1] and fit(*groups[-1], name):
            groups[-1] += (name,)
        else:
            groups.append((first, name) if name != first and fit(first, name) else (name,))
    return groups
