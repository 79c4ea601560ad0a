"""Notebook 12: the recorded statistics of the controllers, and what the settings of a controller change.

The statistics are those of :mod:`sparselib.experiments.controller`, taken at every validation of a recorded training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pandas import DataFrame, isna

from ..recording import WINDOWS
from ..results.figures import new_figure, shades
from ..results.store import RunRecord
from ..tasks import load_splits
from .controller import STATISTICS, controller_statistics
from .perplexity import Live
from .recorded import Recorded, Row, curves, draw_band, note_source

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The first row is the controller of the laptop preset: hard share 0.3, temperature 0.1, N = 16, rank 16, the reading of
# the reference code. By the paper's text, the temperature divides logits and noise.
BASE = Row("sparse FF of figure 1", "figure1/ff", "ff")
# The paper's reason for hard steps is the stability of training; it prints no result of theirs.
ABLATIONS = (
    BASE,
    Row("hard share 0", "ablations/hard0", "ff"),
    Row("hard share 1", "ablations/hard1", "ff"),
    Row("temperature 0.5", "ablations/temperature05", "ff"),
    Row("temperature 1", "ablations/temperature1", "ff"),
    Row("rank 4", "ablations/rank4", "ff"),
    Row("rank 64", "ablations/rank64", "ff"),
    Row("by the paper's text", "ablations/ff_paper", "ff_paper"),
)
SPARSITIES = (
    BASE,
    *(Row(f"N = {n}", f"figure3/n{n}", "ff") for n in (4, 8, 32, 64)),
    Row("with sparse QKV", "figure1/ff_qkv", "ff_qkv"),
)


def trace(run: RunRecord, name: str) -> np.ndarray:
    """One of the STATISTICS at every validation of a run: (points, blocks); no block where none was recorded."""
    blocks = sum(key.startswith(f"{name}.") for key in run.extra)
    return np.array([run.extra[f"{name}.{block}"] for block in range(1, blocks + 1)]).T


def draw_traces(recorded: Recorded) -> Figure:
    """Every statistic of the first row's runs against tokens: a line for each block, a band over seeds."""
    figure, axes = new_figure(2, 3, width=9.6, height=5.4, sharex=True)
    runs = {seed: run for seed, run in recorded.runs[0].items() if run.extra}
    places = dict(zip(STATISTICS, axes.flat, strict=False))
    for name, axis in places.items():
        axis.set_title(STATISTICS[name], fontsize=9)
        axis.set_ylim(0, 1.05)
        if not runs:
            continue
        values = np.stack([trace(run, name) for run in runs.values()])  # (seeds, points, blocks)
        for block, color in enumerate(shades(values.shape[-1])):
            draw_band(axis, curves(runs)[0], values[..., block], color=color, label=f"block {block + 1}")
    spare = axes.flat[-1]
    spare.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    if handles:
        spare.legend(handles, labels, loc="center")
    for axis in axes[-1, :-1]:
        axis.set_xlabel("training tokens (millions)")
    note_source(figure, [Recorded(recorded.rows[:1], (runs,), recorded.whole[:1], ())])
    return figure


def last_statistics(recorded: Recorded) -> DataFrame:
    """One row a model: every statistic in percent at the end of training, the mean over blocks and seeds."""
    rows = []
    for row, runs in zip(recorded.rows, recorded.runs, strict=True):
        told = [run for run in runs.values() if run.extra]
        means = {
            f"{name} (%)": 100 * float(np.mean([trace(run, name)[-1] for run in told])) if told else None
            for name in STATISTICS
        }
        rows.append({"model": row.label, "seeds": len(told)} | means)
    return DataFrame(rows)


def at_the_end(recorded: Recorded, label: str) -> dict[str, str]:
    """A row of :func:`last_statistics`, written for prose."""
    found = last_statistics(recorded).set_index("model").loc[label]
    values = {name: found[f"{name} (%)"] for name in STATISTICS}
    return {name: "(not recorded yet)" if isna(value) else f"{value:.0f} %" for name, value in values.items()}


def dead_by_n(recorded: Recorded) -> str:
    """The share of dead units at the end of training for every N of sparse feedforward alone, written for prose."""
    shares = {}
    for row, runs in zip(recorded.rows, recorded.runs, strict=True):
        if row.kind == BASE.kind and runs:
            n = next(iter(runs.values())).train_config().model_config_().ff_sparsity
            shares[n] = at_the_end(recorded, row.label)["dead"]
    return ", ".join(f"{shares[n]} at N = {n}" for n in sorted(shares)) or "(not recorded yet)"


def live_statistics(live: Live) -> dict[str, float]:
    """The statistics, in percent, at the end of a training of :func:`~sparselib.experiments.perplexity.train_live`."""
    windows = load_splits(live.config.data).validation_windows
    statistics = controller_statistics(live.result.model, windows[:WINDOWS])
    return {name: 100 * value for name, value in statistics.items()}


STATISTICS_FORMATS = {f"{name} (%)": "{:.1f}" for name in STATISTICS}
