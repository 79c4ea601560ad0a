"""Trains what the store does not hold, and trains recorded runs again to see that the losses are still the same."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState
from torch import nn

from .bench.machine import machine
from .checks import require, require_size
from .experiments.controller import controller_statistics
from .paths import repository
from .results import store
from .results.store import RECIPE, RunRecord, key_of
from .tasks import load_splits
from .tasks.tokenizers import cache_dir
from .tasks.toy import accuracies
from .training.config import DataConfig, TrainConfig
from .training.loop import Hook, train_run

TOLERANCE = 1e-3  # nats a token: more than another CPU's rounding in the first steps, far less than another recipe
WINDOWS = 32  # of validation, at which the controllers are looked at


class Code(NamedTuple):
    """The code that trains: its commit, and git's hash of sparselib/ alone, which other commits may share."""

    commit: str
    tree: str


def code() -> Code:
    """Errors: ValueError where git does not know the code, or sparselib/ or data/corpora/ differ from the commit."""
    changed = _git("status", "--porcelain", "--untracked-files=all", "--", "sparselib", "data/corpora").splitlines()
    require(not changed, "code", "; ".join(changed[:3]), "committed before a run is recorded")
    return Code(*_git("rev-parse", "HEAD", "HEAD:./sparselib").split())


def _git(*command: str) -> str:
    try:
        run = subprocess.run(["git", *command], cwd=repository(), check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[0]
        raise ValueError(f"code version: unknown, runs are recorded only in a git clone ({reason})") from None
    return run.stdout


@cache
def data_checksum(data: DataConfig) -> str:
    """Of the texts that ``data`` names: part of a run's key."""
    return load_splits(data).checksum


def held(config: TrainConfig) -> RunRecord | None:
    """The recorded run of ``config``, if there is one."""
    return store.find(config, data_checksum(config.data))


def record(config: TrainConfig, hook: Hook | None = None, *, progress: bool = True) -> RunRecord:
    """The recorded run of ``config``: from the store, or trained now and put there.

    A training that was interrupted goes on from its last checkpoint if the code is still the same, else starts again.
    At every validation ``hook(step, model)`` gives the numbers of ``extra``; without it they are the statistics of a
    decoder's sparse feedforward, or the accuracies at copying or adding. Of several processes under a launcher the
    first one records. Errors: ValueError as :func:`code`, and those of ``train_run``.
    """
    found = held(config)
    if found is not None:
        return found
    version = code()
    folder = _checkpoints(config, version)
    look = hook or _look(config.data)
    result = train_run(config, folder=folder, resume=True, progress=progress, on_validate=look)
    checksum, processes = data_checksum(config.data), PartialState()
    trained_by = {"training_threads": torch.get_num_threads(), "processes": processes.num_processes}
    done = RunRecord(
        experiment=config.experiment,
        variant=config.variant,
        seed=config.seed,
        key=key_of(config, checksum),
        config=config.model_dump(mode="json"),
        recipe=RECIPE,
        data_checksum=checksum,
        parameters=result.parameters,
        tokens=result.tokens,
        losses=list(result.losses),
        validation=list(result.validation),
        final_loss=result.validation[-1][1],
        minutes=round(result.seconds / 60, 4),
        peak_memory_gb=round(result.peak_memory_bytes / 1e9, 3),
        code_version=version.commit,
        date=datetime.datetime.now(datetime.UTC).date(),
        machine=machine() | trained_by | _device(result.model),
        extra=result.extra,
    )
    if processes.is_main_process:
        store.save(done)
        shutil.rmtree(folder, ignore_errors=True)
    return done


def _look(data: DataConfig) -> Hook | None:
    """Accuracies of a toy task; of a decoder on text, statistics on some windows of validation; else nothing."""
    if data.objective == "toy":
        return lambda step, model: accuracies(model, data.corpus, data.length)
    if data.objective != "causal":
        return None
    windows = load_splits(data).validation_windows[:WINDOWS]
    return lambda step, model: controller_statistics(model, windows)


def _device(model: nn.Module) -> dict[str, str]:
    """Kind of device that the model is on, and the name of a GPU."""
    device = next(model.parameters()).device
    return {"device": device.type} | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def _checkpoints(config: TrainConfig, version: Code) -> Path:
    """Folder of the run's checkpoints by this code; those by other code are thrown away."""
    root, key = cache_dir() / "checkpoints", key_of(config, data_checksum(config.data))
    folder = root / f"{key}-{version.tree}"
    for other in root.glob(f"{key}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def replay(run: RunRecord, steps: int = 20, *, progress: bool = False) -> float:
    """Train the first ``steps`` of a recorded run again: the largest difference of a loss, to judge by ``TOLERANCE``.

    Errors: ValueError where the data is no longer that of the run, or where this machine trains on another kind of
    device, which draws other random numbers.
    """
    require_size("steps", steps)
    config = run.train_config()
    checksum = data_checksum(config.data)
    require(checksum == run.data_checksum, "data checksum", checksum, f"that of the run, {run.data_checksum}")
    steps = min(steps, len(run.losses))
    result = train_run(config, folder=None, resume=False, progress=progress, stop_after=steps)
    device, recorded_on = _device(result.model)["device"], run.machine.get("device")
    require(device == recorded_on, "device", device, f"{recorded_on!r}, on which the run was recorded")
    return max(abs(here - then) for here, then in zip(result.losses, run.losses[:steps], strict=True))


def main() -> None:
    """Record the run whose config is the JSON on stdin, on one thread: one process of a sweep."""
    torch.set_num_threads(1)
    record(TrainConfig.model_validate_json(sys.stdin.read()), progress=False)


if __name__ == "__main__":
    main()
