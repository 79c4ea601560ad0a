"""What the numbers were measured on: enough to compare, nothing that names a person's machine."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import cpuinfo
import numpy
import psutil
import torch

CACHES = Path("/sys/devices/system/cpu")  # Linux only
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@cache
def _fixed() -> dict[str, Any]:
    cores = psutil.cpu_count(logical=False)
    return {
        "cpu": cpuinfo.get_cpu_info().get("brand_raw") or platform.machine(),
        "physical_cores": cores or psutil.cpu_count(),
        "threads": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "os": f"{platform.system()} {platform.machine()}",
    }


def machine() -> dict[str, Any]:
    """CPU, physical cores, hardware threads, memory in GB (10^9 bytes), versions, OS."""
    return dict(_fixed())


def load() -> float:
    """Processes that were running or waiting to, averaged over the last minute: timings want it near 0."""
    return psutil.getloadavg()[0]


def last_level_cache() -> int:
    """Bytes of the outermost CPU caches, all together; 0 where the system does not tell (all but Linux)."""
    largest: dict[str, tuple[int, int]] = {}  # CPUs that share a cache -> (its level, its bytes)
    for folder in CACHES.glob("cpu[0-9]*/cache/index*"):
        try:
            level, size, shared = ((folder / f).read_text().strip() for f in ("level", "size", "shared_cpu_list"))
        except OSError:
            continue
        largest[shared] = max(largest.get(shared, (0, 0)), (int(level), int(size[:-1]) * UNITS[size[-1]]))
    outermost = max((level for level, _ in largest.values()), default=0)
    return sum(size for level, size in largest.values() if level == outermost)
