"""How much memory a computation needs for its tensors, by the account of torch's own allocator."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

SILENT = "99"  # above every level of the profiler's log, which else writes to stderr


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes that CPU tensors made while ``step()`` runs, its backward passes included, hold at once.

    Exact and the same in every run: tensors that were there before count neither as held nor, where ``step`` lets go of
    them, as freed. Not seen: memory that numba, NumPy or BLAS take for themselves, and tensors that threads started by
    Python make. Whatever is made once only, such as a cache or the first gradients, counts in the call that makes it.
    Python's garbage collector waits meanwhile. torch warns on stderr where ``step`` lets go of older tensors.
    """
    changes, _ = _changes(step)
    return max(accumulate(changes, initial=0))


def passing_bytes(step: Callable[[], object]) -> int:
    """As :func:`peak_bytes`, of tensors alone that are gone again when ``step`` has ended.

    These are a training step's activations if its weights had no gradients before: the gradients stay.
    """
    changes, kept = _changes(step)
    return max(accumulate((size for index, size in enumerate(changes) if index not in kept), initial=0))


def _changes(step: Callable[[], object]) -> tuple[list[int], set[int]]:
    """Bytes that ``step`` takes (> 0) and gives back (< 0), in order; and which of them it has not given back."""
    os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)  # read when the process profiles for the first time
    with _no_garbage_collected(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    changes: list[int] = []
    live: dict[int, int] = {}  # address -> which of the changes took it
    for event in _allocations(profiler):
        address, size = event["Addr"], event["Bytes"]
        if size > 0:
            live[address] = len(changes)
        elif live.pop(address, None) is None:
            continue  # older than the profile
        changes.append(size)
    return changes, set(live.values())


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """When it would be collected depends on all that the process did before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _allocations(profiler: profile) -> list[dict[str, Any]]:
    """What was taken (Bytes > 0) and given back (< 0) in main memory, and at which address (Addr), in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    taken = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == 0]
    return [event["args"] for event in sorted(taken, key=lambda event: event["ts"])]
