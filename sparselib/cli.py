"""The command `sparselib`. Every command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from . import __version__
from .cli_runs import runs_app, sweep

# What a user can mend: one clear line and no traceback.
BAD_INPUT = (ValueError, FileNotFoundError, MemoryError)


class _Commands(typer.core.TyperGroup):
    """Ends with one line on stderr and exit code 2 for bad input, 1 for a book or notebook that failed."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
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
bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine, and decoding on it.")
app.add_typer(bench_app, name="bench")
app.add_typer(runs_app, name="runs")
app.command()(sweep)

Profile = Annotated[str, typer.Option(help="Size of the experiments: smoke (seconds), laptop (minutes), paper (GPUs).")]
Preset = Annotated[str, typer.Option(help="paper_800m, paper_17b, laptop or smoke.")]
Variant = Annotated[str, typer.Option(help="dense, ff, qkv, ff_qkv or ff_qkv_loss.")]
Threads = Annotated[int | None, typer.Option(help="Default: all that the process may use.")]
Seed = Annotated[int, typer.Option(help="Of the random weights and tokens.")]


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


@bench_app.command("machine")
def bench_machine() -> None:
    """Read bandwidth and peak FLOPs of 1, 2, 4 .. threads."""
    from rich.console import Console
    from rich.table import Table

    from .bench.machine import load, machine
    from .bench.roofline import Roofline
    from .decode.engine import usable_threads

    most = usable_threads()
    table = Table(title=f"{machine()['cpu']}, load {load():.1f}")
    for column in ("threads", "read GB/s", "fp32 GFLOP/s"):
        table.add_column(column, justify="right")
    for threads in sorted({2**i for i in range(most.bit_length())} | {most}):
        roofline = Roofline.measure(threads)
        table.add_row(str(threads), f"{roofline.read_gb_s:.1f}", f"{roofline.peak_gflops:.0f}")
    Console().print(table)


@bench_app.command("decode")
def bench_decode(
    preset: Preset,
    model: Annotated[str, typer.Option(help="transformer or terraformer.")] = "transformer",
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16, int8; may be repeated. Default: all.")] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated. Default: all in fp32; dense, ff_qkv and ff_qkv_loss in bf16 and int8."),
    ] = None,
    threads: Threads = None,
    tokens: Annotated[int, typer.Option(help="Timed tokens of each engine in a round.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds, in which the engines take turns.")] = 10,
    seed: Seed = 0,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the results here.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Write the rows here.")] = None,
) -> None:
    """Time dense and sparse decoding side by side, and compare both with the limit of this machine."""
    from rich.console import Console

    from .bench import decode as bench
    from .files import write_atomically

    with _bar(1.0) as bar:

        def show(what: str, done: float) -> None:
            bar.set_description(what, refresh=False)
            bar.update(done - bar.n)

        result = bench.bench_decode(
            preset,
            model,
            dtypes=dtype or None,
            variants=variant or None,
            threads=threads,
            tokens=tokens,
            rounds=rounds,
            seed=seed,
            progress=show,
        )
    if json_file:
        write_atomically(json_file, json.dumps(result, indent=2) + "\n")
    if csv_file:
        write_atomically(csv_file, bench.as_csv(result))
    Console().print(_table_of_rows(result))
    for out in result["left_out"]:
        typer.echo(f"{out['dtype']} {out['variant']}: {out['reason']}")


def _table_of_rows(result: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    here = result["machine"]
    table = Table(
        title=f"{result['preset']}, one token at batch 1, load {result['load']:.1f}\n{here['cpu']}, {here['threads']} "
        f"threads: {here['read_gb_s']:.1f} GB/s, {here['peak_gflops']:.0f} GFLOP/s",
        caption="* derived: blocks x (one block) + the rest   ~ not timed side by side   c fits in the CPU's cache\n"
        "near: the cores share a cache; far: they do not",
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    for column in ("dtype", "variant", "scope", "cores"):
        table.add_column(column, no_wrap=True)
    for column in ("ms", "quartiles", "speed-up", "GB/s", "% lim"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        mark = "" if row["side_by_side"] else "~"
        table.add_row(
            row["dtype"],
            row["variant"],
            row["scope"] + " *" * row["derived"] + " c" * row["in_cache"],
            row["cores"],
            _ms(row["ms_median"]),
            f"{_ms(row['ms_q1'])}-{_ms(row['ms_q3'])}",
            "" if row["speedup"] is None else f"{mark}{row['speedup']:.2f}x",
            f"{row['gb_s']:.1f}",
            f"{100 * row['limit_fraction']:.0f}",
        )
    return table


def _ms(time: float) -> str:
    """Four digits or so, whatever the size."""
    return f"{time:.{1 if time >= 100 else 2 if time >= 10 else 3}f}"


@app.command()
def decode(
    preset: Annotated[str | None, typer.Option(help="paper_800m, paper_17b, laptop or smoke.")] = None,
    variant: Variant = "ff_qkv_loss",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or int8.")] = "fp32",
    tokens: Annotated[int, typer.Option(help="Tokens to time.")] = 64,
    threads: Threads = None,
    seed: Seed = 0,
    context: Annotated[int, typer.Option(help="Random tokens before the first.")] = 32,
    packed: Annotated[
        Path | None, typer.Option(help="A file of Packed.save, in place of a preset's random weights.")
    ] = None,
    encoder: Annotated[
        bool, typer.Option(help="Make an encoder-decoder's encoder, too, and let it read a source of 16 tokens.")
    ] = True,
) -> None:
    """Decode random tokens with random weights, made straight in their dtype: speed, share of the limit, memory."""
    from .bench import decode as bench
    from .bench.roofline import Reader
    from .checks import require, require_choice
    from .config import preset as preset_of
    from .decode import DTYPES, Packed, pack_random
    from .decode.engine import usable_threads
    from .decode.layout import Layout
    from .decode.memory import require_memory
    from .memory import peak_memory

    require((preset is None) != (packed is None), "preset, packed", (preset, packed), "exactly one given")
    config = None if preset is None else preset_of(preset, variant)
    require_choice("dtype", dtype, tuple(DTYPES))
    bench.check_length(tokens, context, config)
    if packed is not None:
        require_memory(packed.stat().st_size, f"loading {packed.name}")
    reader = Reader(usable_threads() if threads is None else threads)
    if config is None:
        weights = Packed.load(cast(Path, packed))
    else:
        with _bar(Layout(config, dtype, encoder).w_size, "making weights") as bar:
            weights = pack_random(config, dtype, seed, encoder=encoder, progress=bar.update)
    typer.echo(f"{preset or packed}: {bench.count_weights(weights):,} weights, {weights.nbytes / 1e9:.2f} GB")
    with _bar(tokens + bench.WARMUP, "decoding") as bar:
        n = bench.decode_once(weights, tokens, reader, context=context, seed=seed, progress=lambda _: bar.update())
    typer.echo(f"{n['tokens_per_s']:.2f} tokens/s")
    typer.echo(f"{n['ms_median']:.2f} ms a token (quartiles {n['ms_q1']:.2f} .. {n['ms_q3']:.2f}, {n['n']} tokens)")
    typer.echo(f"{n['gb_s']:.1f} GB/s of the {n['read_gb_s']:.1f} GB/s that {n['threads']} threads can read")
    typer.echo(f"{100 * n['limit_fraction']:.0f} % of the limit ({n['limit_ms']:.2f} ms)")
    peak, looking = peak_memory() / 1e9, reader.nbytes / 1e9
    typer.echo(f"{peak:.2f} GB of memory at the peak, {looking:.2f} of them to measure the bandwidth")


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file of a run, such as data/configs/laptop_dense.yaml.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")] = False,
    seed: Annotated[int | None, typer.Option(help="In place of the config's.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoints; default: _build/training/EXPERIMENT/VARIANT-SEED.")
    ] = None,
) -> None:
    """Train a model on this machine; on several GPUs: accelerate launch -m sparselib.cli train CONFIG."""
    from accelerate import PartialState

    from .paths import repository
    from .training import TrainConfig, train_run

    settings = TrainConfig.load(config)
    if seed is not None:
        settings = TrainConfig.model_validate(settings.model_dump() | {"seed": seed})
    name = f"{settings.variant}-{settings.seed}"
    folder = out or repository() / "_build" / "training" / settings.experiment / name
    try:
        result = train_run(settings, folder=folder, resume=resume, progress=True)
    except KeyboardInterrupt as stop:
        again = f"sparselib train {config} --resume --seed {settings.seed} --out {folder}"
        typer.echo(f"sparselib: {stop or 'stopped'}; to go on: {again}", err=True)
        raise typer.Exit(130) from None
    except (FloatingPointError, OSError) as error:
        typer.echo(f"sparselib: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, FileNotFoundError) else 1) from None
    if PartialState().is_main_process:
        typer.echo(f"{result.parameters:,} weights, {result.tokens:,} tokens in {result.seconds / 60:.1f} min")
        speed, peak = result.tokens / result.seconds, result.peak_memory_bytes / 1e9
        typer.echo(f"{speed:,.0f} tokens/s, {peak:.2f} GB at the peak")
        typer.echo(f"validation loss {result.validation[-1][1]:.4f} nats a token")
        typer.echo(f"kept in {result.checkpoint}")


def _bar(total: float, what: str = "") -> Any:
    """A progress bar with the time left, on stderr; not drawn before half a second has passed."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, delay=0.5, bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}")


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


if __name__ == "__main__":
    app()
