"""The table of main numbers, in README.md and on the book's first page, from data/results and the papers' numbers."""

from __future__ import annotations

import re
from pathlib import Path

from pandas import DataFrame, read_csv

from ..checks import require
from ..paths import results_dir
from .paper import TABLE_1, TABLE_6, WEIGHTS
from .tables import MISSING

START, END = "<!-- numbers:start -->", "<!-- numbers:end -->"

QUALITY = (
    ("perplexity", "figure 1, one warm-up for all", "equal"),
    ("perplexity_tuned", "figure 1, each at its own warm-up", "equal"),
    ("feedforward_sparsity", "figure 3 and experts", "equal, experts worse"),
    ("qkv_variants", "figure 5", "equal, some a little better"),
    ("sparse_loss", "sparse loss", "a little worse"),
)


def numbers_table(folder: Path | None = None) -> str:
    """Markdown: what the paper says beside the last recorded run. Errors: FileNotFoundError for a missing CSV."""
    folder = folder or results_dir()
    rows = [("", "paper", "here"), ("---", "---", "---")]
    rows += [_permutations(folder), _weights(folder)]
    rows += [_losses(folder, *row) for row in QUALITY]
    small, large = TABLE_1.row(size="800M", variant="ff_qkv"), TABLE_1.row(size="17B", variant="ff_qkv")
    loss = TABLE_6.row(size="17B", variant="ff_qkv_loss")
    for file, timed, what, paper in (
        ("decoding_800m_distance", "FF+QKV, whole model", "800M, sparse over dense", small.speedup),
        ("decoding_17b_distance", "FF+QKV, block", "a block of 17B (*)", large.block_speedup),
        ("decoding_17b_distance", "FF+QKV, whole model", "17B (*)", large.speedup),
        (
            "decoding_17b_distance",
            "FF+QKV+loss, whole model",
            "17B with sparse loss (*; paper: Terraformer)",
            loss.speedup,
        ),
    ):
        rows.append(_speedup(folder, file, timed, what, paper))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def with_numbers(page: str, table: str) -> str:
    """``page`` with ``table`` between its two markers. Errors: ValueError where the markers are missing."""
    pattern = re.compile(f"{re.escape(START)}.*{re.escape(END)}", re.S)
    require(len(pattern.findall(page)) == 1, "page", "no markers", f"with {START} and {END} once each")
    return pattern.sub(lambda _: f"{START}\n\n{table}\n\n{END}", page)


def _permutations(folder: Path) -> tuple[str, str, str]:
    frame = _read(folder, "permutation_check")
    exact = frame[["exact in float32", "exact in float64"]].min(axis=1).sum()
    here = f"{exact} of {frame['bijections'].sum()} random permutations exact to the bit"
    return ("the multiplicative layer can be any permutation", "proved", here)


def _weights(folder: Path) -> tuple[str, str, str]:
    frame = _read(folder, "reference_counts").set_index("800M model as the reference code lays it out")
    counts = frame["weights here (millions)"].astype(float)
    here = " and ".join(f"{counts[v]:.0f}M" for v in ("dense", "ff_qkv"))
    paper = " and ".join(f"{WEIGHTS.row(size='800M', model=v).weights / 1e6:.0f}M" for v in ("dense", "ff_qkv"))
    return ("weights of the 800M model, dense and sparse", f"{paper} (its code)", here)


def _losses(folder: Path, file: str, what: str, paper: str) -> tuple[str, str, str]:
    """The difference of every model, or of more than five the least and the greatest."""
    frame = _read(folder, file).iloc[1:]
    frame = frame[frame["difference (nats)"] != MISSING]
    told = [f"{row['model']} {row['difference (nats)']}" for _, row in frame.iterrows()]
    if len(told) > 5:
        order = frame["difference (nats)"].astype(float).argsort()
        told = [f"{told[order.iloc[0]]} to {told[order.iloc[-1]]}"]
    seeds = f"{frame['seeds'].min()} seeds, `laptop`"
    return (f"{what}: loss minus that of dense (nats a token)", paper, f"{', '.join(told)} ({seeds})")


def _speedup(folder: Path, file: str, timed: str, what: str, paper: float | None) -> tuple[str, str, str]:
    """What was measured with the cores near each other, and far apart, wherever there is a run."""
    frame = _read(folder, file)
    rows = frame[frame["sparse"] == timed].sort_values("cores", ascending=False).to_dict("records")
    here = "; ".join(
        f"{row['here, times dense']:.1f}x, cores {row['cores']} ({row['here (ms)']:.1f} ms, "
        f"{row['% of limit']:.0f} % of the limit)"
        for row in rows
    )
    return (f"decoding a token, {what}", f"{paper:.1f}x" if paper else "not printed", here)


def _read(folder: Path, name: str) -> DataFrame:
    path = folder / f"{name}.csv"
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is missing in {folder.name}: run `make refresh`")
    return read_csv(path)
