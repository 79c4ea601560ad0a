"""The training loop. Losses are in nats a token, times in seconds.

:func:`train_run` trains what a :class:`TrainConfig` says, with checkpoints; :func:`train` is its short form for
a model and windows at hand. A run is fixed by its arguments, the model's weights, and the seed: the order of the
batches has a generator of its own, and what the model draws (dropout, Gumbel noise) comes from torch's generator,
seeded here and given back after.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..checks import require, require_size
from ..models import Terraformer, Transformer, make_model
from ..tasks.objectives import Batch, Causal
from ..tasks.sources import Splits, WindowSource, load_splits
from . import checkpoints
from .checkpoints import Trace
from .config import OptimizerConfig, TrainConfig
from .objectives import count_targets, mean_loss, predict, total_loss_
from .optimizers import BETAS, LAST_RATE
from .trainer import Trainer

WEIGHT_DECAY = 0.01
CLIP = 1.0  # largest norm of all gradients together

Hook = Callable[[int, nn.Module], dict[str, float]]


@dataclass(frozen=True)
class TrainingResult:
    """What :func:`train_run` gave.

    ``losses`` of every update's batch before it; ``validation`` pairs (step, loss of all validation windows); ``extra``
    under each name what ``on_validate`` said at every point of validation. ``tokens`` counts targets, ``seconds`` the
    updates, also of earlier starts. ``peak_memory_bytes``: of this process since it began, on a GPU of the run.
    """

    losses: tuple[float, ...]
    validation: tuple[tuple[int, float], ...]
    extra: dict[str, list[float]]
    tokens: int
    seconds: float
    peak_memory_bytes: int
    parameters: int
    model: Transformer | Terraformer
    checkpoint: Path | None


def train_run(
    config: TrainConfig,
    *,
    folder: Path | None,
    resume: bool,
    progress: bool,
    stop_after: int | None = None,
    on_validate: Hook | None = None,
) -> TrainingResult:
    """Train what ``config`` says, or go on with it, and keep checkpoints in ``folder`` (None: keep none).

    ``resume`` takes up the last checkpoint in ``folder``, if there is one, to the same losses as a run that never
    stopped. ``stop_after`` ends before that many steps are exceeded, as Ctrl-C would, but quietly. At every validation
    ``on_validate(step, model)`` may look at the model; what it returns is collected.

    Errors: ValueError for data or a checkpoint that is not that of ``config``; FloatingPointError naming the step and
    the last checkpoint when a loss is NaN or infinite; KeyboardInterrupt after Ctrl-C or SIGTERM, once the step is done
    and saved; OSError when a checkpoint cannot be written (the one before stays), or ``folder``, before the first step.
    """
    splits = load_splits(config.data)
    steps = _steps(config, splits)
    with _own_randomness(config.seed):
        model = make_model(config.model_config_(), config.remember)
    trainer = Trainer(model, config.optimizer, steps, accumulate=config.accumulate, precision=config.precision)
    keeper = _Keeper(folder, config, {"data": splits.checksum, "vocabulary": splits.vocabulary.checksum}, trainer)
    with _own_randomness(config.seed + trainer.accelerator.process_index), _interrupt_noted() as interrupted:
        trace = keeper.start(resume)

        def after_step(step: int) -> bool:
            stop = trainer.any(interrupted())
            if not stop and config.checkpoint_every is not None and step % config.checkpoint_every == 0:
                keeper.save(trace)
            return stop

        try:
            stopped = _fit(
                trainer,
                splits.train.batches(config.batch, config.seed, skip=trace.step),
                lambda: splits.validation.in_order(config.batch // config.accumulate),
                trace,
                last=steps if stop_after is None else min(steps, stop_after),
                validate_every=config.validate_every,
                after_step=after_step,
                on_validate=on_validate,
                progress=progress,
            )
        except FloatingPointError as error:
            last_good = folder and checkpoints.latest(folder)
            raise FloatingPointError(f"{error}; last good checkpoint: {last_good or 'none'}") from None
        checkpoint = keeper.save(trace)
    if stopped:
        raise KeyboardInterrupt(f"stopped after step {trace.step} of {steps}, kept in {checkpoint or 'no folder'}")
    return TrainingResult(
        losses=tuple(trace.losses),
        validation=tuple(trace.validation),
        extra=trace.extra,
        tokens=trace.tokens,
        seconds=trace.seconds,
        peak_memory_bytes=trainer.peak_memory(),
        parameters=sum(p.numel() for p in model.parameters()),
        model=model,
        checkpoint=checkpoint,
    )


@dataclass(frozen=True)
class TrainingRun:
    """What :func:`train` gave. Losses are in nats a token; step s is the s-th update, counted from 1."""

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
    progress: bool = True,
) -> TrainingRun:
    """Train ``model`` (tokens (B, T) -> logits (B, T, vocab)) in place, on windows (n, T + 1) of tokens.

    It is moved to the GPU, if there is one. AdamW, weight decay on matrices only; the rate rises linearly for
    ``warmup`` steps, then falls as a cosine to a tenth; gradients are clipped at norm 1. Every epoch goes through the
    windows in a new order, whole batches only. Validation comes after the last step and every ``validate_every`` steps;
    then ``on_step(step, loss)`` may look at the model. ``progress`` shows a bar with tokens/s, time left and loss.

    Errors: ValueError for settings that cannot be; FloatingPointError, naming the step, when a loss is NaN or
    infinite.
    """
    _check(windows, validation, steps, batch, learning_rate, warmup, seed)
    if validate_every is not None:
        require_size("validate_every", validate_every)
    optimizer = OptimizerConfig(learning_rate=learning_rate, warmup=warmup, weight_decay=WEIGHT_DECAY, clip=CLIP)
    sources = [WindowSource(split, Causal(split.shape[1] - 1)) for split in (windows, validation)]
    trace = Trace()

    def after_step(step: int) -> bool:
        if on_step is not None:
            with _own_randomness(seed):  # what on_step draws does not change the run
                on_step(step, trace.losses[-1])
        return False

    with _own_randomness(seed):
        _fit(
            Trainer(model, optimizer, steps),
            sources[0].batches(batch, seed),
            lambda: sources[1].in_order(batch),
            trace,
            last=steps,
            validate_every=validate_every,
            after_step=after_step,
            progress=progress,
        )
    settings = {
        "steps": steps,
        "batch": batch,
        "length": windows.shape[1] - 1,
        "learning_rate": learning_rate,
        "warmup": warmup,
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "clip": CLIP,
        "last_rate": LAST_RATE,
        "validate_every": steps if validate_every is None else validate_every,
    }
    speed = trace.tokens / trace.seconds
    return TrainingRun(tuple(trace.losses), tuple(trace.validation), trace.seconds, speed, settings, seed)


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch: int) -> float:
    """Mean loss (nats a token) of all ``windows`` (n, T + 1), ``batch`` at a time, no dropout or noise."""
    require_size("batch", batch)
    _check_windows("windows", windows)
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    parts = ({"tokens": part.to(device)} for part in windows.split(batch))
    loss = mean_loss(lambda part: total_loss_(*predict(model, part)), parts)
    model.train(was_training)
    return loss


def _fit(
    trainer: Trainer,
    batches: Iterator[Batch],
    validation: Callable[[], Iterable[Batch]],
    trace: Trace,
    *,
    last: int,
    validate_every: int | None,
    after_step: Callable[[int], bool],
    on_validate: Hook | None = None,
    progress: bool,
) -> bool:
    """Update up to step ``last``, writing into ``trace``; True if ``after_step(step)`` said to stop before."""
    every = trainer.steps if validate_every is None else validate_every
    with _bar(trace, last, progress and trainer.accelerator.is_main_process) as bar:
        while trace.step < last:
            start = time.perf_counter()
            batch, step = next(batches), trace.step + 1
            loss, targets = trainer.update(batch, step), count_targets(batch)
            trace.seconds += time.perf_counter() - start
            trace.losses.append(loss)
            trace.tokens += targets
            if step % every == 0 or step == trainer.steps:
                trace.validation.append((step, trainer.validate(validation(), step)))
                if on_validate is not None:
                    with _own_randomness(step):
                        _collect(trace, on_validate(step, trainer.bare_model))
            bar.total = bar.total or targets * last
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(targets)
            if after_step(step):
                return step < trainer.steps
    return False


def _bar(trace: Trace, last: int, shown: bool) -> tqdm:
    """Tokens a second, time left and loss; a run that goes on starts where it stopped."""
    total = round(trace.tokens / trace.step * last) if trace.step else None
    return tqdm(total=total, initial=trace.tokens, unit="tok", unit_scale=True, desc="training", disable=not shown)


def _collect(trace: Trace, values: dict[str, float]) -> None:
    for name, value in values.items():
        trace.extra.setdefault(name, []).append(value)
    complete = all(len(found) == len(trace.validation) for found in trace.extra.values())
    require(complete, "on_validate", sorted(values), f"the same names at every validation, {sorted(trace.extra)}")


@dataclass(frozen=True)
class _Keeper:
    """Checkpoints of a run in ``folder``; None: none are kept."""

    folder: Path | None
    config: TrainConfig
    checksums: dict[str, str]
    trainer: Trainer

    def start(self, resume: bool) -> Trace:
        """What the run has given before: nothing, or all up to the last checkpoint, which the trainer takes up."""
        if self.folder is None:
            return Trace()
        checkpoints.prepare(self.folder)
        path = checkpoints.latest(self.folder)
        if path is None:
            return Trace()
        allowed = f"without a checkpoint, to start ({path.name} is there: --resume goes on, --out takes another folder)"
        require(resume, "folder", str(self.folder), allowed)
        found = checkpoints.load(path)
        checkpoints.check_same_run(found, self.config, self.checksums, self.trainer.accelerator.num_processes)
        self.trainer.load_state(found.weights, found.state)
        return found.manifest.trace

    def save(self, trace: Trace) -> Path | None:
        """The checkpoint of where the run stands."""
        if self.folder is None or not trace.step:
            return None
        state = self.trainer.state()
        if self.trainer.accelerator.is_main_process:
            checkpoints.save(self.folder, self.config, self.checksums, trace, *state)
        self.trainer.accelerator.wait_for_everyone()
        return checkpoints.latest(self.folder)


def _steps(config: TrainConfig, splits: Splits) -> int:
    """Updates of the whole run."""
    require(
        splits.vocab_size == config.data.vocab_size,
        "data.vocab_size",
        config.data.vocab_size,
        f"{splits.vocab_size}, that of the tokenizer",
    )
    if config.epochs is None:
        return cast(int, config.steps)
    windows = splits.train.windows
    require(windows is not None, "epochs", config.epochs, "replaced by steps: a stream has no end")
    steps = max(1, round(config.epochs * len(cast(Tensor, windows)) / config.batch))
    require(config.optimizer.warmup <= steps, "warmup", config.optimizer.warmup, f"at most steps = {steps}")
    return steps


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, or a scheduler's SIGTERM, does not strike in the middle of a step, but is noted; a second one strikes."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
        yield lambda: False
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        noted.append(number)
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: bool(noted)
    finally:
        restore()


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Torch's generators start from ``seed`` inside, and are as before outside."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


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
