"""How a timing is taken: warm-up, calls timed one by one, median and quartiles, and the least it can be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..checks import require, require_size


@dataclass(frozen=True)
class Timing:
    """Times of ``n`` calls in milliseconds, with what is known of the least they can take."""

    ms_median: float
    ms_q1: float
    ms_q3: float
    ms_min: float
    n: int
    threads: int  # torch's
    bytes: int | None = None  # touched by one call
    limit_ms: float | None = None  # the least time one call can take here

    @property
    def gb_s(self) -> float | None:
        """Bytes touched a second at the median, in 10^9 bytes; None where the bytes are not known."""
        return None if self.bytes is None else self.bytes / self.ms_median / 1e6

    @property
    def limit_fraction(self) -> float | None:
        """Share of the limit reached, 1 = as fast as can be; None where the limit is not known."""
        return None if self.limit_ms is None else self.limit_ms / self.ms_median


def time_call(
    function: Callable[..., Any],
    repeat: int,
    warmup: int,
    setup: Callable[[], Any] | None = None,
    *,
    bytes: int | None = None,
    limit_ms: float | None = None,
) -> Timing:
    """Time ``function()``, or ``function(setup())`` with a new, untimed ``setup()`` before every call.

    ``warmup`` calls come first and are not counted, then ``repeat`` calls are timed. Errors: ValueError for
    counts below 1 (warmup: 0), bytes or a limit that are not positive.
    """
    require_size("repeat", repeat)
    require_size("warmup", warmup, 0)
    require(bytes is None or bytes > 0, "bytes", bytes, "above 0")
    require(limit_ms is None or limit_ms > 0, "limit_ms", limit_ms, "above 0")
    times = []
    for _ in range(warmup + repeat):
        arguments = () if setup is None else (setup(),)
        start = time.perf_counter()
        function(*arguments)
        times.append(1e3 * (time.perf_counter() - start))
    counted = times[warmup:]
    q1, median, q3 = (float(q) for q in np.quantile(counted, (0.25, 0.5, 0.75)))
    return Timing(median, q1, q3, min(counted), repeat, torch.get_num_threads(), bytes, limit_ms)


@torch.inference_mode()
def time_decode(
    model: Any,
    tokens: int,
    context: int,
    *,
    warmup: int = 4,
    seed: int = 0,
    bytes: int | None = None,
    limit_ms: float | None = None,
) -> Timing:
    """Time ``model.step`` at batch 1, a token a call, on the CPU; each step gets a new random token.

    ``context`` random tokens are in the cache before the first step; ``warmup`` (4, as the paper's code)
    steps are not counted, then ``tokens`` steps are, each on the state of the one before. ``model`` is a
    :class:`~sparselib.models.Transformer` without encoder.

    Errors: ValueError for bad counts, more positions than ``max_len``, or a model that is not on the CPU.
    """
    require_size("tokens", tokens)
    require_size("context", context, 0)
    require_size("warmup", warmup, 0)
    positions = context + warmup + tokens
    longest = model.config.max_len
    require(positions <= longest, "context + warmup + tokens", positions, f"at most max_len = {longest}")
    device = next(model.parameters()).device
    require(device.type == "cpu", "model's device", device.type, "'cpu'")
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(model.config.vocab_size, (1, positions), generator=generator)
    was_training = model.training
    model.eval()
    state = model.init_state(1)
    if context:
        _, state = model.prefill(stream[:, :context], state)
    fresh = iter(stream[0, context:].split(1))  # (1,) each

    def step(token: torch.Tensor) -> None:
        nonlocal state
        _, state = model.step(token, state)

    timing = time_call(step, tokens, warmup, lambda: next(fresh), bytes=bytes, limit_ms=limit_ms)
    model.train(was_training)
    return timing
