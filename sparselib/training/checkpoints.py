"""Checkpoints: all that a run needs to go on as if it had never stopped.

A checkpoint is a folder ``step_00000500`` with weights.safetensors, state.safetensors (the optimizer's tensors and the
random generators) and run.json (:class:`Manifest`: the rest, and the SHA-256 of both files). It is written aside and
renamed, so that there is never half of one; when it stands, those of earlier steps go.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..checks import require
from .config import TrainConfig, explain

WEIGHTS, STATE, RUN = "weights.safetensors", "state.safetensors", "run.json"
GENERATORS = "generators"  # a row of bytes for each process


class Trace(BaseModel):
    """What a run has given so far. Losses in nats a token; ``losses[s - 1]`` is that of update s.

    ``extra`` holds, under each name, a value for every point of ``validation``. ``tokens`` counts targets,
    ``seconds`` the updates alone.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")  # a hook may have nothing to say: NaN

    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    extra: dict[str, list[float]] = {}
    tokens: int = 0
    seconds: float = 0.0

    @property
    def step(self) -> int:
        return len(self.losses)


class Manifest(BaseModel):
    """The contents of run.json. ``checksums``: of the data and of the vocabulary, by what they are of."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[2] = 2
    config: TrainConfig
    checksums: dict[str, str]
    processes: int
    trace: Trace
    sha256: dict[str, str]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back and found whole; ``weights`` and ``state`` are those of ``Trainer.state``."""

    path: Path
    manifest: Manifest
    weights: dict[str, Tensor]
    state: dict[str, Tensor]


def latest(folder: Path) -> Path | None:
    """The checkpoint of the highest step in ``folder``, or None."""
    return max(_checkpoints(folder), default=None, key=lambda path: path.name)


def prepare(folder: Path) -> None:
    """Make ``folder`` before anything is trained that could not be kept there. Errors: OSError naming it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"checkpoints cannot be written to {folder} ({error})") from None


def save(
    folder: Path,
    config: TrainConfig,
    checksums: dict[str, str],
    trace: Trace,
    weights: dict[str, Tensor],
    state: dict[str, Tensor],
) -> Path:
    """Write the checkpoint of step ``trace.step``, then remove the earlier ones; after a failure they stand untouched.

    Errors: OSError, naming the checkpoint that is left, where the disk is full or may not be written to.
    """
    path, earlier = folder / f"step_{trace.step:08d}", _checkpoints(folder)
    if path in earlier:
        return path
    try:
        with _new_folder(path) as aside:
            save_file(weights, aside / WEIGHTS)
            save_file(state, aside / STATE)
            manifest = Manifest(
                config=config,
                checksums=checksums,
                processes=len(state[GENERATORS]),
                trace=trace,
                sha256={file: _digest(aside / file) for file in (WEIGHTS, STATE)},
            )
            (aside / RUN).write_text(manifest.model_dump_json(indent=1) + "\n", "utf-8")
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        left = f"the last good one is {earlier[-1]}" if earlier else "there is no earlier one"
        raise OSError(f"the checkpoint of step {trace.step} could not be written ({error}); {left}") from error
    for old in earlier:
        shutil.rmtree(old, ignore_errors=True)
    return path


def load(path: Path) -> Checkpoint:
    """Read a checkpoint. Errors: ValueError naming a file that is missing, damaged or no checkpoint's."""
    try:
        manifest = Manifest.model_validate_json((path / RUN).read_text("utf-8"))
        for file in (WEIGHTS, STATE):
            whole = _digest(path / file) == manifest.sha256[file]
            require(whole, "checkpoint", str(path / file), "as it was written: the file is damaged")
        return Checkpoint(path, manifest, load_file(path / WEIGHTS), load_file(path / STATE))
    except ValidationError as error:
        raise ValueError(f"{path / RUN} is damaged or no checkpoint's: {explain(error)}") from None
    except (OSError, KeyError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"{path} is no whole checkpoint: {error}") from None


def check_same_run(checkpoint: Checkpoint, config: TrainConfig, checksums: dict[str, str], processes: int) -> None:
    """Refuse to go on with another config, data, vocabulary or number of processes: ValueError names the field."""
    manifest, path = checkpoint.manifest, checkpoint.path
    saved, wanted = (_fields(c) for c in (manifest.config, config))
    for field, value in sorted(wanted.items()):
        was = saved.get(field)
        require(value == was, field, value, f"{was!r} to go on from {path}")
    for name, checksum in checksums.items():
        was = manifest.checksums.get(name)
        require(checksum == was, f"{name} checksum", checksum, f"{was!r} to go on from {path}")
    require(processes == manifest.processes, "processes", processes, f"{manifest.processes} to go on from {path}")


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which then becomes ``path``; after any failure nothing of it is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield aside
        aside.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        aside.replace(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8}", path.name))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fields(config: TrainConfig) -> dict[str, Any]:
    """All fields of the config, and of its model those, too, that are left at their defaults."""
    return _flat(config.model_dump(mode="json") | {"model": dataclasses.asdict(config.model_config_())})


def _flat(fields: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested fields as ``a.b``."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return flat
