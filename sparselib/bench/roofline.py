"""The memory's side of the roofline: how many bytes a second this machine can read.

A token decoded alone touches each weight once, so bytes / bandwidth is the least time it can take. The
measured bandwidth has to be the best there is, else a kernel would seem to beat its own limit: a core that
follows one stream of addresses waits for memory longer than one that follows four (here 13 against 18 GB/s on
one core).
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import psutil
from numba import njit

from ..checks import require, require_size
from .machine import last_level_cache

STREAMS = 4
STRIDES = (1024, 4096, 65536)  # floats between streams: which is best depends on the machine
GRAIN = STREAMS * max(STRIDES)  # a thread's part is a multiple of this many floats
PASSES = 8
SMALLEST = 2**29  # bytes


@njit(nogil=True, fastmath=True)
def _sum(part: np.ndarray, stride: int) -> float:
    """Sum of ``part``, read as four streams ``stride`` floats apart; fastmath allows vector registers."""
    total = 0.0
    for first in range(0, part.size, 4 * stride):
        a, b = part[first : first + stride], part[first + stride : first + 2 * stride]
        c, d = part[first + 2 * stride : first + 3 * stride], part[first + 3 * stride : first + 4 * stride]
        sum_a = sum_b = sum_c = sum_d = np.float32(0)
        for i in range(stride):
            sum_a += a[i]
            sum_b += b[i]
            sum_c += c[i]
            sum_d += d[i]
        total += float(sum_a + sum_b + sum_c + sum_d)
    return total


def read_bandwidth(threads: int, size: int | None = None) -> float:
    """Read bandwidth of ``threads`` threads in GB/s (10^9 bytes): the best of passes over ``size`` bytes.

    ``size`` (default: 512 MiB, or four times the last-level cache if that is more) is shared out among the
    threads, each of which writes its part first. About three seconds. Errors: ValueError for threads outside
    1 .. the machine's, or a size below one grain a thread; MemoryError, with the numbers, where it would take
    over half the free memory.
    """
    require_size("threads", threads)
    most = psutil.cpu_count() or 1
    require(threads <= most, "threads", threads, f"at most the {most} of this machine")
    wanted = max(SMALLEST, 4 * last_level_cache()) if size is None else size
    floats = wanted // 4 // threads // GRAIN * GRAIN
    require(floats > 0, "size", size, f"at least {4 * threads * GRAIN} bytes for {threads} threads")
    free = psutil.virtual_memory().available
    if 4 * floats * threads > free / 2:
        raise MemoryError(f"read_bandwidth needs {wanted / 1e9:.1f} GB, of which {free / 2e9:.1f} GB may be taken")
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(_ones, [floats] * threads))
        return max(_best(pool, parts, stride) for stride in STRIDES)


def _ones(floats: int) -> np.ndarray:
    part = np.empty(floats, np.float32)
    part.fill(1.0)  # written, so that the pages exist: unwritten memory is one shared page of zeros
    return part


def _best(pool: ThreadPoolExecutor, parts: list[np.ndarray], stride: int) -> float:
    """GB/s of the fastest of ``PASSES`` passes; the sum shows that every float was read."""
    size = sum(part.nbytes for part in parts)
    shortest = float("inf")
    for _ in range(1 + PASSES):  # the first compiles
        start = time.perf_counter()
        total = sum(pool.map(partial(_sum, stride=stride), parts))
        shortest = min(shortest, time.perf_counter() - start)
        if total * 4 != size:
            raise RuntimeError(f"read {total:.0f} floats of {size // 4}: the bandwidth would be wrong")
    return size / shortest / 1e9
