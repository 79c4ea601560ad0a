"""Many trainings that differ in a few settings: a sweep file, and the processes or machines that record its runs.

base:                       # a TrainConfig without variant and seed
  experiment: figure1
  model: {preset: laptop}
  ...
points:                     # variant: what it sets otherwise; fields of fields with dots or in a mapping
  dense: {}
  ff_16: {model.variant: ff, model.ff_sparsity: 16}
  ff_64: {model: {variant: ff, ff_sparsity: 64}}
seeds: [0, 1, 2]            # all points with the first seed, then with the next one
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .checks import require, require_size
from .recording import Code, code, held, record
from .results import store
from .results.store import RunRecord
from .training.config import TrainConfig, explain, read_yaml

# One thread each: two such trainings side by side get about 1.4 times as much done as one that uses both cores.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
CHILD = (sys.executable, "-m", "sparselib.recording")
TRIES = 2  # of a run whose process dies
PATIENCE = 30.0  # seconds that a stopped process has to end by itself
DASK = re.compile(r"dask://([A-Za-z0-9_.-]+)(?::(\d+))?")
DASK_PORT = 8786
TIMEOUT = 10.0  # seconds for a scheduler to answer, and for its first worker

Outcome = tuple[TrainConfig, RunRecord | str]  # the record, or what went wrong


class Sweep(BaseModel):
    """What a sweep file holds; see the head of this module."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: dict[str, Any]
    points: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    seeds: Annotated[list[int], Field(min_length=1)]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML file. Errors: ValueError naming file and field; OSError."""
        try:
            return cls.model_validate(read_yaml(path))
        except ValidationError as error:
            raise ValueError(f"{path}: {explain(error)}") from None

    def configs(self) -> list[TrainConfig]:
        """One config for each point and seed, in order. Errors: ValueError naming the point, the field, its value."""
        require(len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "all different")
        places = {"base": self.base} | {f"points.{name}": fields for name, fields in self.points.items()}
        for place, fields in places.items():
            for field in ("variant", "seed"):
                require(field not in fields, f"{place}.{field}", fields.get(field), "left to points and seeds")
        return [self._config(name, seed) for seed in self.seeds for name in self.points]

    def _config(self, name: str, seed: int) -> TrainConfig:
        fields = deepcopy(self.base) | {"variant": name, "seed": seed}
        try:
            for dotted, value in self.points[name].items():
                _set(fields, dotted, value)
        except ValueError as error:
            raise ValueError(f"points.{name}: {error}") from None
        return TrainConfig.of(fields, f"points.{name}")


def _set(fields: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``a.b`` to ``value``; a mapping sets what it names and leaves the rest."""
    first, _, rest = dotted.partition(".")
    if rest:
        value = {rest: value}
    if not isinstance(value, dict):
        fields[first] = value
        return
    inner = fields.setdefault(first, {})
    require(isinstance(inner, dict), first, inner, f"a mapping, for {', '.join(value)} is set in it")
    for name, of_name in value.items():
        _set(inner, name, of_name)


def run_sweep(
    configs: Iterable[TrainConfig], executor: str = "local", *, workers: int = 2, say: Callable[[str], None] = print
) -> list[str]:
    """Record the runs that the store does not hold; returns what went wrong, a line for each run that failed.

    ``executor``: "local", ``workers`` processes of one thread each, or "dask://HOST[:PORT]", the cluster whose
    scheduler listens there. ``say`` gets a line for each run that ends. An interrupt (Ctrl-C) stops local processes;
    the next call goes on from their checkpoints. Errors: ValueError for an executor that is none, unclean code.
    """
    require_size("workers", workers)
    match = DASK.fullmatch(executor)
    require(executor == "local" or match is not None, "executor", executor, "local or dask://HOST[:PORT]")
    configs = list(configs)
    missing = [config for config in configs if held(config) is None]
    say(f"{len(configs) - len(missing)} of {len(configs)} runs are recorded")
    if not missing:
        return []
    code()  # refuses here, not in every process
    runs = _on_dask(missing, f"tcp://{match[1]}:{match[2] or DASK_PORT}") if match else _locally(missing, workers)
    faults, started = [], time.monotonic()
    with closing(runs) as outcomes:  # an interrupt that comes here must stop the processes, too
        for done, (config, found) in enumerate(outcomes, 1):
            told = f"{config.variant} seed {config.seed}: "
            if isinstance(found, str):
                told += found
                faults.append(told)
            else:
                told += f"loss {found.final_loss:.3f}, {found.minutes:.1f} min"
            left = (time.monotonic() - started) / 60 / done * (len(missing) - done)
            say(f"{told} ({done} of {len(missing)}, about {left:.0f} min left)")
    return faults


# --- local processes --------------------------------------------------------------------------------------------------


def _locally(configs: list[TrainConfig], workers: int) -> Generator[Outcome]:
    children = _Children()
    with ThreadPoolExecutor(workers) as threads:
        waiting = {threads.submit(children.train, config): config for config in configs}
        try:
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            children.stop()


class _Children:
    """One process a run, so that the memory of a run ends with it and its death is its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[subprocess.Popen] = set()
        self._stopping = False

    def train(self, config: TrainConfig) -> RunRecord | str:
        """The record, or what went wrong. An error is told at once; after a death the run is tried again."""
        for _ in range(TRIES):
            exit_code, errors = self._train_once(config)
            found = held(config)
            if found is not None:
                return found
            if exit_code == 1:  # an error of Python, which would come again
                return (errors.strip() or "exit code 1").splitlines()[-1]
        return f"its process died (exit code {exit_code})"

    def stop(self) -> None:
        """Interrupt all processes and wait for their end."""
        with self._lock:
            self._stopping = True
            live = list(self._live)
        for process in live:
            process.send_signal(signal.SIGINT)
        for process in live:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()

    def _train_once(self, config: TrainConfig) -> tuple[int, str]:
        with self._lock:
            if self._stopping:
                return 1, "stopped"
            process = subprocess.Popen(
                CHILD,
                env=os.environ | ONE_THREAD,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # else Ctrl-C reaches it twice: from the terminal and from stop()
            )
            self._live.add(process)
        _, errors = process.communicate(config.model_dump_json())
        with self._lock:
            self._live.discard(process)
        return process.returncode, errors


# --- a Dask cluster ---------------------------------------------------------------------------------------------------

_one_at_a_time = threading.Lock()


def _on_dask(configs: list[TrainConfig], address: str) -> Generator[Outcome]:
    """Dask gives the run of a lost worker to another one. Every record is also put into the store of this machine."""
    try:
        from distributed import Client
        from distributed import as_completed as as_completed_on_dask
    except ModuleNotFoundError:
        raise ValueError("executor dask: needs the package distributed, `pip install -e .[cluster]`") from None
    try:
        client = Client(address, timeout=TIMEOUT)
    except OSError:
        raise ValueError(f"executor dask: no scheduler answers at {address}") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=TIMEOUT)
        except TimeoutError:
            raise ValueError(f"executor dask: the scheduler at {address} has no workers") from None
        here = code()
        _require_same_code(client.run(code), here)
        waiting = {
            client.submit(record_here, config.model_dump_json(), here.tree, pure=False): config for config in configs
        }
        for done in as_completed_on_dask(waiting):
            error = done.exception()
            if error is None:
                run = RunRecord.model_validate_json(done.result())
                store.save(run)
                yield waiting[done], run
            else:
                yield waiting[done], f"{type(error).__name__}: {error}"


def _require_same_code(workers: dict[str, Any], here: Code) -> None:
    others = sorted(name for name, there in workers.items() if there.tree != here.tree)
    require(not others, "code of workers", ", ".join(others), f"that of commit {here.commit}")


def record_here(config: str, tree: str) -> str:
    """What a Dask worker does: record the run of a config (JSON), and return the record (JSON).

    Errors: ValueError where its code is not that of ``tree``: it may have joined after the others were asked.
    """
    import torch

    require(code().tree == tree, "code of a worker", code().commit, "that of the machine that runs the sweep")
    torch.set_num_threads(1)
    with _one_at_a_time:  # a worker may have several threads, but torch has one random generator in a process
        return record(TrainConfig.model_validate_json(config), progress=False).model_dump_json()
