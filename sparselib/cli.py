"""The command `sparselib`. Every command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .checks import require
from .cli_decode import Preset, Variant, bench_app, decode
from .cli_runs import runs_app, sweep
from .paths import repository

# What a user can mend: one clear line and no traceback.
BAD_INPUT = (ValueError, OSError, MemoryError)


class _Commands(typer.core.TyperGroup):
    """Ends with one line on stderr and exit code 2 for bad input, 1 for a book or notebook that failed."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # what reads the output has seen enough
            raise
        except BAD_INPUT as error:
            typer.echo(f"sparselib: {error}", err=True)
            raise typer.Exit(2) from None
        except RuntimeError as error:
            if type(error).__name__ not in ("NotebookFailed", "BookFailed"):
                raise
            typer.echo(f"sparselib: {error}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    help='Sparse Transformers of "Sparse is Enough in Scaling Transformers": sizes, costs, notebooks and the book.',
)
notebooks_app = typer.Typer(no_args_is_help=True, help="Run and check the notebooks.")
app.add_typer(notebooks_app, name="notebooks")
app.add_typer(bench_app, name="bench")
app.add_typer(runs_app, name="runs")

Profile = Annotated[str, typer.Option(help="Size of the experiments: smoke (seconds), laptop (minutes), paper (GPUs).")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparselib {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Sizes, costs, notebooks and the book."""


@app.command()
def presets() -> None:
    """Table of every preset and variant: weights, and bytes and FLOPs of one decoded token."""
    from rich.console import Console
    from rich.table import Table

    from .config import PRESETS, VARIANTS, count_parameters, decode_cost, preset

    table = Table(title="float32 weights, first token, batch 1")
    for column in ("preset", "variant"):
        table.add_column(column)
    for column in ("weights", "MB per token", "MFLOP per token"):
        table.add_column(column, justify="right")
    for name in PRESETS:
        for variant in VARIANTS:
            config = preset(name, variant)
            cost = decode_cost(config)
            figures = (f"{cost.bytes / 1e6:,.2f}", f"{cost.flops / 1e6:,.2f}")
            table.add_row(name, variant, f"{count_parameters(config):,}", *figures)
        table.add_section()
    Console().print(table)


@app.command()
def cost(
    preset: Preset,
    variant: Variant = "dense",
    context: Annotated[int, typer.Option(help="Positions attended to, the new one included.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file, too.")] = None,
) -> None:
    """Bytes of weights and cache that one decoded token touches, and its FLOPs, for each part of the model."""
    from rich.console import Console
    from rich.table import Table

    from . import config
    from .files import write_atomically

    total = config.decode_cost(config.preset(preset, variant), context=context)
    table = Table(title=f"{preset}, {variant}: one token, float32, batch 1, context {context}")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("FLOPs", justify="right")
    for name, part in total.parts.items():
        table.add_row(name, f"{part.bytes:,.0f}", f"{part.flops:,}")
    table.add_section()
    table.add_row("all", f"{total.bytes:,.0f}", f"{total.flops:,}")
    Console().print(table)
    if json_file:
        parts = {name: {"bytes": part.bytes, "flops": part.flops} for name, part in total.parts.items()}
        numbers = {"preset": preset, "variant": variant, "context": context, "parts": parts}
        numbers |= {"bytes": total.bytes, "flops": total.flops}
        write_atomically(json_file, json.dumps(numbers, indent=2) + "\n")


@app.command()
def reference(
    folder: Annotated[Path, typer.Argument(help="Folder of .safetensors files with golden values.")],
) -> None:
    """Compare layers and models with golden values of the reference implementation; exit code 1 on a difference."""
    from .reference import main as check

    raise typer.Exit(check(folder))


@app.command()
def book(profile: Profile = "laptop") -> None:
    """Run the notebooks and build the book into _build/html."""
    from .book import build

    started = time.monotonic()
    page = build(profile)
    typer.echo(f"The book is ready ({_minutes(started)}). Open {page}")


@notebooks_app.command("run")
def run_notebooks(
    names: Annotated[list[str] | None, typer.Argument(help="Such as 01_permutation_proof; default: all.")] = None,
    profile: Profile = "laptop",
    parameter: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameter", metavar="NAME=VALUE", help="Set a parameter of the notebooks."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to put notebooks/ and data/results/; default: _build/source.")
    ] = None,
) -> None:
    """Run notebooks with papermill; the committed ones are not changed."""
    from . import notebooks

    started = time.monotonic()
    values = dict(_parse_parameter(text) for text in parameter or [])
    executed = notebooks.run_notebooks(profile, names, output.resolve() if output else None, values)
    typer.echo(f"{len(executed)} run in {_minutes(started)}: {executed[0].parent}")


@notebooks_app.command()
def lint(
    folder: Annotated[Path | None, typer.Argument(help="Executed notebooks; default: the committed ones.")] = None,
    profile: Profile = "laptop",
) -> None:
    """Check that executed notebooks are fit to publish; exit code 1 if one is not."""
    from .notebooks import lint_notebooks

    faults = lint_notebooks(folder, profile)
    for fault in faults:
        typer.echo(fault, err=True)
    typer.echo(f"{len(faults)} faults")
    raise typer.Exit(bool(faults))


@notebooks_app.command()
def refresh(
    names: Annotated[list[str] | None, typer.Argument(help="Such as 01_permutation_proof; default: all.")] = None,
) -> None:
    """Run notebooks at profile laptop and write them and data/results back into the repository."""
    from . import book

    started = time.monotonic()
    written = book.refresh(names)
    typer.echo(f"{len(written)} files written in {_minutes(started)}; see `git diff --stat`")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file of a run, such as data/configs/laptop_dense.yaml.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")] = False,
    seed: Annotated[int | None, typer.Option(help="In place of the config's.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoints; default: _build/training/EXPERIMENT/VARIANT-SEED.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Put the finished run into the store; the same command goes on.")
    ] = False,
) -> None:
    """Train a model on this machine; on several GPUs: accelerate launch -m sparselib.cli train CONFIG."""
    from .recording import record as record_run
    from .training import TrainConfig, train_run

    settings = TrainConfig.load(config)
    if seed is not None:
        settings = TrainConfig.of(settings.model_dump() | {"seed": seed}, "--seed")
    if record:
        require(out is None, "--out", str(out), "left out with --record, which has a place for checkpoints")
        with _ending_told(config, "--record", "--seed", settings.seed):
            run = record_run(settings)
        seconds, kept = 60 * run.minutes, f"recorded as {run.key}"
        _tell(run.parameters, run.tokens, seconds, run.peak_memory_gb, run.final_loss, kept)
        return
    folder = out or repository() / "_build" / "training" / settings.experiment / f"{settings.variant}-{settings.seed}"
    with _ending_told(config, "--resume", "--seed", settings.seed, "--out", folder):
        done = train_run(settings, folder=folder, resume=resume, progress=True)
    peak, loss = done.peak_memory_bytes / 1e9, done.validation[-1][1]
    _tell(done.parameters, done.tokens, done.seconds, peak, loss, f"kept in {done.checkpoint}")


@contextmanager
def _ending_told(*arguments: object) -> Iterator[None]:
    """What ends a training early, in one line; after Ctrl-C with the command, of these arguments, that goes on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        launched = int(os.environ.get("WORLD_SIZE", 1)) > 1
        command = ["accelerate", "launch", "-m", "sparselib.cli"] if launched else ["sparselib"]
        again = shlex.join([*command, "train", *map(str, arguments)])
        typer.echo(f"sparselib: {stop or 'stopped'}; to go on: {again}", err=True)
        raise typer.Exit(130) from None
    except (FloatingPointError, OSError) as error:
        typer.echo(f"sparselib: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, FileNotFoundError) else 1) from None


def _tell(parameters: int, tokens: int, seconds: float, peak_gb: float, loss: float, kept: str) -> None:
    from accelerate import PartialState

    if PartialState().is_main_process:
        typer.echo(f"{parameters:,} weights, {tokens:,} tokens in {seconds / 60:.1f} min")
        typer.echo(f"{tokens / seconds:,.0f} tokens/s, {peak_gb:.2f} GB at the peak")
        typer.echo(f"validation loss {loss:.4f} nats a token")
        typer.echo(kept)


def _parse_parameter(text: str) -> tuple[str, Any]:
    """Splits NAME=VALUE; the value is read as YAML: 3 is a number, true a bool, abc a text."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"-p {text!r}: must be NAME=VALUE")
    if name == "profile":
        raise ValueError(f"-p {text!r}: use --profile")
    return name, yaml.safe_load(value)


def _minutes(started: float) -> str:
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    return f"{minutes} min {seconds} s"


app.command()(decode)
app.command()(sweep)

if __name__ == "__main__":
    app()
