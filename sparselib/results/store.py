"""Recorded trainings, one JSON file a run: <runs_dir>/<experiment>/<key>.json. Losses are in nats a token.

The key is a hash of the config with its seed, the checksum of the data and the recipe. A config counts by what it sets
otherwise than the defaults, so a new field with a default moves no key. A changed default does: the recorded config is
kept whole, and its file is then refused as one whose key is not its own.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..checks import require
from ..config import count_parameters
from ..files import write_atomically
from ..paths import runs_dir
from ..training.config import TrainConfig, explain

RECIPE = 1  # raise it when the same config would give other losses: every run is then recorded again

Rounded = Annotated[float, Field(allow_inf_nan=False), AfterValidator(lambda value: round(value, 5))]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class RunRecord(BaseModel):
    """One finished training: what fixed it (``config`` whole, ``recipe``, ``data_checksum``), what it gave, and where.

    ``losses`` are those of every step, ``validation`` pairs (step, loss), ``final_loss`` the last of these; ``minutes``
    of training, ``peak_memory_gb`` in 10^9 bytes; ``code_version`` the commit; ``extra`` what a hook saw at each
    validation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str
    variant: str
    seed: int
    key: str
    config: dict[str, Any]
    recipe: int
    data_checksum: str
    parameters: int
    tokens: int
    losses: Annotated[list[Rounded], Field(min_length=1)]
    validation: Annotated[list[tuple[int, Rounded]], Field(min_length=1)]
    final_loss: Rounded
    minutes: Positive
    peak_memory_gb: Positive
    code_version: Annotated[str, Field(pattern="^[0-9a-f]{40,64}$")]
    date: datetime.date
    machine: dict[str, Any]
    extra: dict[str, list[Rounded]] = {}

    @model_validator(mode="after")
    def _is_of_its_config(self) -> Self:
        config = self.train_config()
        for field in ("experiment", "variant", "seed"):
            expected = getattr(config, field)
            require(getattr(self, field) == expected, field, getattr(self, field), f"the config's {expected!r}")
        key = key_of(config, self.data_checksum, self.recipe)
        require(self.key == key, "key", self.key, f"{key}, the hash of its config, data and recipe")
        weights, steps = count_parameters(config.model_config_()), len(self.losses)
        require(self.parameters == weights, "parameters", self.parameters, f"{weights}, those of its model")
        require(config.steps in (None, steps), "losses", f"{steps} steps", f"one for each of {config.steps} steps")
        return self

    @model_validator(mode="after")
    def _ends_where_it_says(self) -> Self:
        step, loss = self.validation[-1]
        require(step == len(self.losses), "validation", f"up to step {step}", f"up to the last, {len(self.losses)}")
        require(self.final_loss == loss, "final_loss", self.final_loss, f"{loss}, the last of validation")
        return self

    def train_config(self) -> TrainConfig:
        """The config to train it again. Errors: ValueError where today's code knows no such config."""
        return TrainConfig.of(self.config, "config")


def key_of(config: TrainConfig, data_checksum: str, recipe: int = RECIPE) -> str:
    """Name of a run, 16 hex digits: the same wherever and whenever the run is the same."""
    settings = config.model_dump(mode="json", exclude_defaults=True)
    identity = json.dumps([settings, config.seed, data_checksum, recipe], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def find(config: TrainConfig, data_checksum: str) -> RunRecord | None:
    """The recorded run of this config and data, None if there is none. Errors: ValueError for a file that is no run."""
    path = _path(config.experiment, key_of(config, data_checksum))
    return read(path) if path.is_file() else None


def read(path: Path) -> RunRecord:
    """The run in a file of the store. Errors: ValueError naming the file and what is wrong with it."""
    try:
        record = RunRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is no recorded run: {explain(error)}") from None
    place = _path(record.experiment, record.key)
    if path.resolve() != place.resolve():
        raise ValueError(f"{path} is a recorded run in a wrong place: it belongs to {place}")
    return record


def save(record: RunRecord) -> Path:
    """Write the run to its place in the store, the whole file or nothing; returns the place."""
    path = _path(record.experiment, record.key)
    write_atomically(path, record.model_dump_json() + "\n")
    return path


def scan(experiment: str | None = None) -> tuple[list[RunRecord], list[str]]:
    """All recorded runs, or those of one experiment, by experiment, variant and seed; and what is wrong with every
    other file there. Errors: ValueError for an experiment of which the store has no folder."""
    root = runs_dir()
    if experiment is not None:
        names = sorted(path.name for path in root.glob("*/"))
        require(experiment in names, "experiment", experiment, f"one of those recorded: {', '.join(names) or 'none'}")
    records, faults = [], []
    for path in sorted((root / experiment if experiment else root).rglob("[!.]*")):
        if path.is_dir() or path == root / "README.md":
            continue
        try:
            records.append(read(path))
        except (ValueError, OSError) as error:
            faults.append(str(error))
    return sorted(records, key=lambda run: (run.experiment, run.variant, run.seed)), faults


def select(
    key: str | None = None, *, experiment: str | None = None, variant: str | None = None, seed: int | None = None
) -> tuple[list[RunRecord], list[str]]:
    """The runs whose key starts with ``key`` and whose other fields are those given (None: any); and, as :func:`scan`,
    what is wrong with files that could not be read, any of which may be one of them.

    Errors: ValueError where there are none, naming these files.
    """
    records, faults = scan(experiment)
    wanted = {"variant": variant, "seed": seed}
    found = [
        run
        for run in records
        if run.key.startswith(key or "") and all(value in (None, getattr(run, name)) for name, value in wanted.items())
    ]
    if not found:
        asked = {"key": key, "experiment": experiment} | wanted
        described = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
        raise ValueError("; ".join([f"no recorded run of {described or 'any kind'} in {runs_dir()}", *faults]))
    return found, faults


def _path(experiment: str, key: str) -> Path:
    return runs_dir() / experiment / f"{key}.json"
