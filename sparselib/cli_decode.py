"""The commands that decode or measure decoding: `sparselib decode` and `sparselib bench ...`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer

bench_app = typer.Typer(no_args_is_help=True, help="Measure this machine, and decoding on it.")

Preset = Annotated[str, typer.Option(help="paper_800m, paper_17b, laptop or smoke.")]
Variant = Annotated[str, typer.Option(help="dense, ff, qkv, ff_qkv or ff_qkv_loss.")]
Threads = Annotated[int | None, typer.Option(help="Default: all that the process may use.")]
Seed = Annotated[int, typer.Option(help="Of the random weights and tokens.")]


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


def _bar(total: float, what: str = "") -> Any:
    """A progress bar with the time left, on stderr; not drawn before half a second has passed."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, delay=0.5, bar_format="{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}")
