"""The two sides of the roofline, bytes and multiply-adds a second, and the least time that a decoded token can take.

A token decoded alone touches each weight once, so bytes / bandwidth is the least time most of its parts can take; only
the multiplicative layers and convolutions multiply enough for FLOPs / peak to matter. Both are measured with the
engine's own inner loops, on memory in 2 MiB pages as the engine has it. One stream in the order of memory is what a
core reads fastest: here 60 GB/s on two cores of two dies, where four streams 256 KiB apart read 56, 4 KiB apart 38.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import numpy as np
import psutil
from numba import njit

from ..checks import require, require_choice, require_size
from ..config import ModelConfig, decode_cost
from ..decode.layout import GROUP, PANEL
from ..decode.memory import allocate
from ..decode.pack import DTYPES
from ..decode.products import C_SIZE, barrier
from ..decode.simd import address_of, tile_1x4, tile_tx1
from .machine import last_level_cache

STREAM = 1024  # inputs of a panel that is read in one go: 64 KB
GRAIN = STREAM * PANEL  # a thread's part is a multiple of this many floats
PASSES = 8
SMALLEST = 2**29  # bytes
MEETINGS = 20_000  # a millisecond or three
FAR = 50  # ns a thread: cores that share a cache meet faster than that (here 18), those of two dies do not (here 80)
INNER = 256  # inputs of the tile that peak_gflops multiplies: 24 KB, which the first-level cache holds
TILES = 2**15  # tiles a pass: INNER x TILES = 2^23 ones are still counted exactly in fp32
OUTSIDE_BLOCKS = ("embedding", "positions", "unembedding")

Scope = Literal["model", "block"]


def _require_threads(threads: int) -> None:
    require_size("threads", threads)
    most = psutil.cpu_count() or 1
    require(threads <= most, "threads", threads, f"at most the {most} of this machine")


# --- bytes a second, and how fast threads meet ------------------------------------------------------------------------


@njit(nogil=True)
def _read(part, ones, sums):  # untyped, as kernels are: checkers cannot see through intrinsics
    """Sum of ``part``, panel by panel, each times ``ones`` (STREAM,) into ``sums`` (PANEL,)."""
    total = 0.0
    for at in range(0, part.size, GRAIN):
        sums[:] = 0
        tile_1x4(ones, 0, 1, 0, part, at, 0, 0, STREAM, sums, 0)
        total += sums.sum()
    return total


@njit(nogil=True)
def _meet(sync, threads, times):
    for _ in range(times):
        barrier(sync, threads)


class Reader:
    """Memory to read again and again: how fast it is read at this moment, for benchmarks that last minutes.

    ``size`` bytes (default: 512 MiB, or four times the last-level cache if that is more) are shared out among the
    threads, each of which writes its part first. Errors: as :func:`read_bandwidth`.
    """

    def __init__(self, threads: int, size: int | None = None):
        _require_threads(threads)
        wanted = max(SMALLEST, 4 * last_level_cache()) if size is None else size
        floats = wanted // 4 // threads // GRAIN * GRAIN
        require(floats > 0, "size", size, f"at least {4 * threads * GRAIN} bytes for {threads} threads")
        free = psutil.virtual_memory().available
        if 4 * floats * threads > free / 2:
            raise MemoryError(f"read_bandwidth needs {wanted / 1e9:.1f} GB, of which {free / 2e9:.1f} GB may be taken")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._parts = list(self._pool.map(_ones, [floats] * threads))
        self._sums = [np.zeros(PANEL, np.float32) for _ in range(threads)]
        self._best(1)  # compiles
        self.highest = self._best(PASSES)  # GB/s, of all passes so far

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def now(self) -> float:
        """GB/s (10^9 bytes), the best of a few passes: a tenth of a second."""
        rate = self._best(4)
        self.highest = max(self.highest, rate)
        return rate

    def handover(self) -> float:
        """ns that the threads take to meet at a barrier; 0 for one thread.

        It tells cores that share a cache from cores that do not (``FAR``). On a virtual machine that changes within
        seconds, and bandwidth with it: cores of two dies read more than those of one, but hand results over slowly.
        """
        sync, shortest = np.zeros(16, np.int64), float("inf")
        for _ in range(3):
            start = time.perf_counter()
            list(self._pool.map(_meet, repeat(sync, self.threads), repeat(self.threads), repeat(MEETINGS)))
            shortest = min(shortest, time.perf_counter() - start)
        return 1e9 * shortest / MEETINGS if self.threads > 1 else 0.0

    def _best(self, passes: int) -> float:
        """GB/s of the fastest of ``passes`` passes; the sum shows that every float was read."""
        ones, size, shortest = np.ones(STREAM, np.float32), self.nbytes, float("inf")
        for _ in range(passes):
            start = time.perf_counter()
            total = sum(self._pool.map(_read, self._parts, repeat(ones), self._sums))
            shortest = min(shortest, time.perf_counter() - start)
            if total * 4 != size:
                raise RuntimeError(f"read {total:.0f} floats of {size // 4}: the bandwidth would be wrong")
        return size / shortest / 1e9


def read_bandwidth(threads: int, size: int | None = None) -> float:
    """Read bandwidth of ``threads`` threads in GB/s (10^9 bytes): the best of passes over ``size`` bytes.

    ``size`` is as in :class:`Reader`. About three seconds. Errors: ValueError for threads outside 1 .. the machine's,
    or a size below one grain a thread; MemoryError, with the numbers, where it would take over half the free memory.
    """
    return Reader(threads, size).highest


def _ones(floats: int) -> np.ndarray:
    part = allocate(floats, np.float32)
    part.fill(1.0)
    return part


# --- multiply-adds a second -------------------------------------------------------------------------------------------


@njit(nogil=True)
def _multiply(a, w, c, inner, tiles):  # untyped, as kernels are: checkers cannot see through intrinsics
    """``tiles`` times the engine's tile: c (TILE, PANEL) += a (TILE, inner) w (inner, PANEL)."""
    for _ in range(tiles):
        tile_tx1(a, 0, GROUP, 1, w, 0, address_of(w, 0), 0, inner, c, 0)


def peak_gflops(threads: int) -> float:
    """fp32 GFLOP/s (10^9, 2 per multiply-add) of ``threads`` threads: the best of passes of the engine's inner loop.

    Sums stay in registers and inputs in the first-level cache, each thread's its own. Under two seconds. Errors:
    ValueError for threads outside 1 .. the machine's.
    """
    _require_threads(threads)
    sums = [np.zeros(C_SIZE, np.float32) for _ in range(threads)]
    ones = [[np.ones(INNER * width, np.float32) for _ in range(threads)] for width in (GROUP, PANEL)]
    shortest = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(1 + 2 * PASSES):  # the first compiles
            for c in sums:
                c.fill(0)
            start = time.perf_counter()
            list(pool.map(_multiply, *ones, sums, repeat(INNER), repeat(TILES)))
            shortest = min(shortest, time.perf_counter() - start)
            if any((c != INNER * TILES).any() for c in sums):
                raise RuntimeError(f"sums of {INNER * TILES} ones came out as {sums}: the peak would be wrong")
    return 2 * threads * INNER * TILES * C_SIZE / shortest / 1e9


# --- the limit --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Roofline:
    """What ``threads`` threads of this machine can do at best: GB/s read, fp32 GFLOP/s (both 10^9)."""

    threads: int
    read_gb_s: float
    peak_gflops: float

    @classmethod
    def measure(cls, threads: int) -> Roofline:
        """About five seconds. Errors: as :func:`read_bandwidth`."""
        return cls(threads, read_bandwidth(threads), peak_gflops(threads))


@dataclass(frozen=True)
class Limit:
    """The least time of one token: ``ms``, the sum over ``parts`` (ms each), and the bytes and FLOPs behind it."""

    ms: float
    bytes: float
    flops: float
    parts: Mapping[str, float]


def limit(
    config: ModelConfig,
    dtype: str,
    roofline: Roofline,
    *,
    context: int,
    source_length: int = 16,
    scope: Scope = "model",
) -> Limit:
    """Sum over the parts of the model of max(bytes / bandwidth, FLOPs / peak), for one token at batch 1.

    ``scope`` "block" is one decoder block, the mean of all: every part but embedding, positions and unembedding, over
    n_layers. All weights count as ``dtype`` (fp32 4, bf16 2, int8 1 byte), the cache as fp32, which it always is; the
    scales of int8 and the few vectors that stay fp32 are not counted. ``context`` and ``source_length`` as in
    :func:`~sparselib.config.decode_cost`. Errors: ValueError for an unknown dtype or scope, and decode_cost's.
    """
    require_choice("dtype", dtype, tuple(DTYPES))
    require_choice("scope", scope, ("model", "block"))
    weight = DTYPES[dtype].itemsize
    cost = decode_cost(
        config, context=context, source_length=source_length, bytes_per_weight=weight, bytes_per_cached=4
    )
    is_block = scope == "block"
    counted = {name: part for name, part in cost.parts.items() if not (is_block and name in OUTSIDE_BLOCKS)}
    share = 1 / config.n_layers if is_block else 1.0
    parts = {
        name: share * max(part.bytes / roofline.read_gb_s, part.flops / roofline.peak_gflops) / 1e6
        for name, part in counted.items()
    }
    bytes, flops = sum(part.bytes for part in counted.values()), sum(part.flops for part in counted.values())
    return Limit(sum(parts.values()), share * bytes, share * flops, parts)
