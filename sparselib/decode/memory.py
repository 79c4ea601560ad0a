"""Large arrays on large pages, and the refusal to begin what does not fit."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import psutil
from numpy.typing import DTypeLike

SPARE = 500_000_000  # bytes left to everything else


def require_memory(bytes: int, what: str) -> None:
    """Errors: MemoryError, with the numbers, unless ``bytes`` more are free."""
    free = psutil.virtual_memory().available - SPARE
    if bytes > free:
        raise MemoryError(f"{what} needs {bytes / 1e9:.1f} GB, {max(free, 0) / 1e9:.1f} GB are free on this machine")


def allocate(size: int, dtype: DTypeLike) -> np.ndarray:
    """``size`` zeros, on pages of 2 MiB where the system can: weights picked row by row then cost fewer look-ups of
    addresses. The system makes a page when it is first written, which takes its time."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(size, dtype)
    area = mmap.mmap(-1, max(size * np.dtype(dtype).itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without large pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, dtype, size)
