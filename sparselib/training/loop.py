"""A training loop that one can read in a minute. Losses are in nats a token, times in seconds.

The run is fixed by its arguments, the model's weights, and ``seed``: the order of the batches has a generator
of its own, and what the model draws (dropout, Gumbel noise) comes from torch's generator, seeded here and
given back after.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from ..checks import require, require_size
from .objectives import next_token_loss

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
CLIP = 1.0  # largest norm of all gradients together
LAST_RATE = 0.1  # the cosine ends at this share of the learning rate


@dataclass(frozen=True)
class TrainingRun:
    """What a training gave. Losses are in nats a token; step s is the s-th update, counted from 1."""

    losses: tuple[float, ...]  # of the batch of every step, before its update
    validation: tuple[tuple[int, float], ...]  # (step, loss over all validation windows after that step)
    seconds: float  # the steps alone, without validation and on_step
    tokens_per_second: float
    config: dict[str, Any]  # the settings of the loop
    seed: int


def train(
    model: nn.Module,
    windows: Tensor,
    validation: Tensor,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    warmup: int,
    seed: int,
    validate_every: int | None = None,
    on_step: Callable[[int, float], None] | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> TrainingRun:
    """Train ``model`` (tokens (B, T) -> logits (B, T, vocab)) in place, on windows (n, T + 1) of tokens.

    AdamW, weight decay on matrices only; the rate rises linearly for ``warmup`` steps, then falls as a cosine
    to a tenth; gradients are clipped at norm 1. Every epoch goes through the windows in a new order, whole
    batches only. Validation comes after the last step and every ``validate_every`` steps; then
    ``on_step(step, loss)`` may look at the model. ``progress`` shows a bar with tokens/s, time left and loss.

    Errors: ValueError for settings that cannot be; FloatingPointError, naming the step, when a loss is NaN or
    infinite.
    """
    _check(windows, validation, steps, batch, learning_rate, warmup, seed)
    every = steps if validate_every is None else validate_every
    require_size("validate_every", every)
    model.to(device)
    optimizer = _optimizer(model, learning_rate)
    schedule = LambdaLR(optimizer, lambda step: rate(step + 1, steps, warmup))
    order = _batches(windows, batch, torch.Generator().manual_seed(seed))
    tokens = batch * (windows.shape[1] - 1)
    losses: list[float] = []
    points: list[tuple[int, float]] = []
    seconds = 0.0
    bar = tqdm(total=steps * tokens, unit="tok", unit_scale=True, desc="training", disable=not progress)
    with _own_randomness(seed), bar:
        for step in range(1, steps + 1):
            start = time.perf_counter()
            losses.append(_step(model, next(order).to(device), optimizer, step))
            schedule.step()
            seconds += time.perf_counter() - start
            if step % every == 0 or step == steps:
                points.append((step, _finite(evaluate(model, validation, batch), step, "validation loss")))
            if on_step is not None:
                with _own_randomness(seed):  # what on_step draws does not change the run
                    on_step(step, losses[-1])
            bar.update(tokens)
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    config = {
        "steps": steps,
        "batch": batch,
        "length": windows.shape[1] - 1,
        "learning_rate": learning_rate,
        "warmup": warmup,
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "clip": CLIP,
        "last_rate": LAST_RATE,
        "validate_every": every,
    }
    return TrainingRun(tuple(losses), tuple(points), seconds, steps * tokens / seconds, config, seed)


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch: int) -> float:
    """Mean loss (nats a token) of all ``windows`` (n, T + 1), ``batch`` at a time, no dropout or noise."""
    require_size("batch", batch)
    _check_windows("windows", windows)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = 0.0
    for part in windows.split(batch):
        part = part.to(device)
        total += next_token_loss(model(part[:, :-1]), part[:, 1:]).item() * len(part)
    model.train(was_training)
    return total / len(windows)


def rate(step: int, steps: int, warmup: int) -> float:
    """Share of the learning rate at ``step`` (from 1): up to 1 at ``warmup``, a cosine down to a tenth."""
    if step <= warmup:
        return step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def _step(model: nn.Module, part: Tensor, optimizer: Optimizer, step: int) -> float:
    model.train()
    loss = next_token_loss(model(part[:, :-1]), part[:, 1:])
    value = _finite(loss.item(), step, "loss")
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return value


def _optimizer(model: nn.Module, learning_rate: float) -> AdamW:
    """AdamW that pulls matrices, not biases and scales, towards zero."""
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=learning_rate, betas=BETAS)


def _batches(windows: Tensor, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Whole batches without end; a new order every epoch."""
    while True:
        for chosen in torch.randperm(len(windows), generator=generator).split(batch):
            if len(chosen) == batch:
                yield windows[chosen]


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Torch's generators start from ``seed`` inside, and are as before outside."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def _finite(loss: float, step: int, name: str) -> float:
    if not math.isfinite(loss):
        raise FloatingPointError(f"{name} is {loss} at step {step}: lower the learning rate or lengthen the warm-up")
    return loss


def _check(
    windows: Tensor, validation: Tensor, steps: int, batch: int, learning_rate: float, warmup: int, seed: int
) -> None:
    _check_windows("windows", windows)
    _check_windows("validation", validation)
    require_size("steps", steps)
    require_size("batch", batch)
    require(batch <= len(windows), "batch", batch, f"at most the {len(windows)} windows")
    positive = math.isfinite(learning_rate) and learning_rate > 0
    require(positive, "learning_rate", learning_rate, "a finite number above 0")
    require_size("warmup", warmup, 0)
    require(warmup <= steps, "warmup", warmup, f"at most steps = {steps}")
    require_size("seed", seed, 0)


def _check_windows(name: str, windows: Tensor) -> None:
    good = windows.ndim == 2 and windows.shape[0] >= 1 and windows.shape[1] >= 2
    require(good, f"{name}.shape", tuple(windows.shape), "(n, length + 1) with n and length at least 1")
    require(windows.dtype == torch.int64, f"{name}.dtype", windows.dtype, "torch.int64")
