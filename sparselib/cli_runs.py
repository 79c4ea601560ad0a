"""The commands about recorded trainings: `sparselib runs ...` and `sparselib sweep`."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

runs_app = typer.Typer(no_args_is_help=True, help="Recorded trainings: list, show, replay, export.")

Experiment = Annotated[str | None, typer.Option(help="Such as figure1; default: all.")]
RunVariant = Annotated[str | None, typer.Option(help="Name within the experiment; default: all.")]
RunSeed = Annotated[int | None, typer.Option(help="Default: all.")]
COLUMNS = ("key", "experiment", "variant", "seed", "parameters", "tokens", "final_loss", "minutes", "code_version")
SHORT = ("key", "experiment", "variant", "seed", "weights", "tokens", "loss", "min", "code")


@runs_app.command("list")
def list_runs(
    experiment: Experiment = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list in place of the table.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit code 1 if a file in the store is no run.")] = False,
) -> None:
    """Table of the recorded runs; files that are no runs are named on stderr."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from .results.store import scan

    runs, faults = scan(experiment)
    if as_json:
        typer.echo(json.dumps([{name: getattr(run, name) for name in COLUMNS} for run in runs], indent=2))
    else:
        table = Table(box=box.SIMPLE, padding=0, pad_edge=False)
        for name in SHORT:  # what 80 columns hold; --json and export give all
            justify: Literal["left", "right"] = "right" if name in SHORT[3:8] else "left"
            table.add_column(name, justify=justify, no_wrap=name != "variant")
        for run in runs:
            millions = (f"{run.parameters / 1e6:.3f}M", f"{run.tokens / 1e6:.2f}M")
            ended = (f"{run.final_loss:.4f}", f"{run.minutes:.1f}", run.code_version[:7])
            table.add_row(run.key[:8], run.experiment, run.variant, str(run.seed), *millions, *ended)
        Console().print(table)
    raise typer.Exit(_warned(faults) and strict)


@runs_app.command()
def show(
    key: Annotated[str | None, typer.Argument(help="Key of a run, or how it begins.")] = None,
    experiment: Experiment = None,
    variant: RunVariant = None,
    seed: RunSeed = None,
) -> None:
    """Print one run: all but the losses of its steps, of which it says the first and the last."""
    from .results.store import select

    runs, faults = select(key, experiment=experiment, variant=variant, seed=seed)
    _warned(faults)
    if len(runs) > 1:
        names = ", ".join(f"{run.key} ({run.experiment} {run.variant} seed {run.seed})" for run in runs)
        raise ValueError(f"{len(runs)} runs, one is asked for: {names}")
    fields = runs[0].model_dump(mode="json")
    losses = fields.pop("losses")
    typer.echo(json.dumps(fields | {"steps": len(losses), "first_loss": losses[0], "last_loss": losses[-1]}, indent=2))


@runs_app.command()
def replay(
    experiment: Experiment = None,
    variant: RunVariant = None,
    seed: RunSeed = None,
    steps: Annotated[int, typer.Option(help="Steps to train again.")] = 20,
) -> None:
    """Train the first steps of recorded runs again and compare the losses; exit code 1 if they differ, or if a file in
    the store is no run."""
    from . import recording
    from .results.store import select

    worst = 0.0
    runs, faults = select(experiment=experiment, variant=variant, seed=seed)
    for run in runs:
        difference = recording.replay(run, steps)
        name = f"{run.experiment} {run.variant} seed {run.seed}"
        typer.echo(f"{name}: losses differ by {difference:.1e} at most (allowed {recording.TOLERANCE:g})")
        worst = max(worst, difference)
    raise typer.Exit(_warned(faults) or worst > recording.TOLERANCE)


@runs_app.command()
def export(
    csv_file: Annotated[Path, typer.Option("--csv", dir_okay=False, help="File to write.")],
    experiment: Experiment = None,
) -> None:
    """Write a CSV with a row for each run: the columns of `list`, memory, date and machine; exit code 1 if a file in
    the store is no run and so is left out."""
    from pandas import DataFrame

    from .files import write_atomically
    from .results.store import select

    columns = (*COLUMNS, "peak_memory_gb", "date")
    runs, faults = select(experiment=experiment)
    rows = [{name: getattr(run, name) for name in columns} | run.machine for run in runs]
    write_atomically(csv_file, DataFrame(rows).to_csv(index=False, lineterminator="\n"))
    raise typer.Exit(_warned(faults))


def _warned(faults: list[str]) -> bool:
    """Say on stderr what is wrong with files of the store; whether there are such."""
    for fault in faults:
        typer.echo(fault, err=True)
    return bool(faults)


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", dir_okay=False, help="base, points, seeds.")],
    executor: Annotated[str, typer.Option(help="local or dask://HOST[:PORT].")] = "local",
    workers: Annotated[int, typer.Option(help="Local processes, one thread each.")] = 2,
) -> None:
    """Record the runs of a sweep file that the store does not hold; exit code 1 if one failed. Ctrl-C stops, the same
    command goes on."""
    from .sweep import Sweep, run_sweep

    try:
        with _both_signals_interrupt():
            faults = run_sweep(Sweep.load(file).configs(), executor, workers=workers, say=typer.echo)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from the last checkpoints", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(_warned(faults))


@contextmanager
def _both_signals_interrupt() -> Iterator[None]:
    """SIGTERM ends a sweep as Ctrl-C does, and so does SIGINT, which shells let their background jobs ignore."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, signal.default_int_handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
