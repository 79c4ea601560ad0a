"""Notebooks 08 to 11: which recorded runs each figure is of, model sizes, learning rates, and a training to watch.

A row says what the paper finds against dense (results/paper.py, FIGURES), where it says something. Experiments share
runs: what several figures show was trained once, mostly for figure 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pandas as pd
from pandas import DataFrame, Series

from ..config import model_parts
from ..results.figures import look, new_figure
from ..results.statistics import mean_over_seeds
from ..training.config import DataConfig, OptimizerConfig, TrainConfig
from ..training.loop import TrainingResult, train_run
from .recorded import Recorded, Row, by_seed, difference, interval, load, note_source, planned_runs, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DENSE = Row("dense", "figure1/dense", "dense")


def figure_1(experiment: str = "figure1") -> tuple[Row, ...]:
    """Dense and the three sparse models of figure 1, as an experiment with these four variants trains them."""
    variants = ("dense", "ff", "qkv", "ff_qkv")
    return tuple(Row(look(v).label, f"{experiment}/{v}", v, "equal" if v != "dense" else "") for v in variants)


@dataclass(frozen=True)
class Feedforwards:
    """Figure 3 and the experts of table 2. One of the ``units``, ``alike``, is as sparse as the ``experts``."""

    dense: Row
    units: tuple[Row, ...]
    experts: tuple[Row, ...]
    alike: Row

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.dense, *self.units, *self.experts)


N4 = Row("N = 4", "figure3/n4", "ff", "equal")
N16 = Row("N = 16", "figure1/ff", "ff", "equal")
FIGURE_3 = Feedforwards(
    DENSE,
    (
        N4,
        Row("N = 8", "figure3/n8", "ff", "equal"),
        N16,
        Row("N = 32", "figure3/n32", "ff", "equal"),
        Row("N = 64", "figure3/n64", "ff", "equal"),
    ),
    (
        Row("16 experts (block)", "figure3/block", "block", "worse"),
        Row("16 experts (Switch)", "figure3/switch", "switch", "worse"),
    ),
    N16,
)
# The two things that a sparse feedforward could be short of: active units, and a controller that can tell them apart.
CAUSES = (
    DENSE,
    N16,
    Row("N = 16, rank 64", "ablations/rank64", "ff"),
    N4,
    Row("N = 4, rank 64", "figure3/n4_rank64", "ff"),
)
FIGURE_5 = (
    DENSE,
    Row("mult S=4", "figure5/mult", "mult", "equal"),
    Row("conv S=4 F=3", "figure5/conv", "conv", "equal"),
    Row("mult+conv S=4 F=3", "figure1/qkv", "mult_conv", "better"),
    Row("mult+conv S=2 F=3", "figure5/s2", "mult_conv", "equal"),
    Row("mult+conv S=8 F=3", "figure5/s8", "mult_conv", "equal"),
    Row("mult+conv S=4 F=1", "figure5/f1", "mult_conv", "equal"),
    Row("mult+conv S=4 F=5", "figure5/f5", "mult_conv", "equal"),
)
LOSS = (
    DENSE,
    Row("2 modules", "loss/loss2", "ff_qkv_loss", "worse"),
    Row("4 modules", "loss/loss4", "ff_qkv_loss", "worse"),
    Row("4 modules with the dense d_ff", "loss/loss4_same_d_ff", "ff_qkv_loss"),
)

# Figure 1 with the warm-up and the learning rate that load_warmup finds best for each model; and the sparse feedforward
# with what it is short of (CAUSES).
TUNED = (
    *figure_1("figure1_tuned"),
    Row("sparse FF (rank 64)", "figure1_tuned/ff_rank64", "ff"),
    Row("sparse FF (rank 64, N = 4)", "figure1_tuned/ff_n4_rank64", "ff"),
)

# The same at the paper's sizes.
PAPER_DENSE = Row("dense", "figure1_paper/dense", "dense")
PAPER_N64 = Row("N = 64", "figure1_paper/ff", "ff", "equal")
FIGURE_3_PAPER = Feedforwards(
    PAPER_DENSE,
    (PAPER_N64, Row("N = 128", "figure3_paper/n128", "ff", "worse")),
    (
        Row("64 experts (block)", "figure3_paper/block", "block", "worse"),
        Row("64 experts (Switch)", "figure3_paper/switch", "switch", "worse"),
    ),
    PAPER_N64,
)
FIGURE_5_PAPER = (
    PAPER_DENSE,
    Row("mult S=16", "figure5_paper/mult", "mult", "equal"),
    Row("conv S=16 F=3", "figure5_paper/conv", "conv", "equal"),
    Row("mult+conv S=16 F=3", "figure1_paper/qkv", "mult_conv", "better"),
    Row("mult+conv S=8 F=3", "figure5_paper/s8", "mult_conv", "equal"),
    Row("mult+conv S=32 F=3", "figure5_paper/s32", "mult_conv", "equal"),
    Row("mult+conv S=16 F=1", "figure5_paper/f1", "mult_conv", "equal"),
    Row("mult+conv S=16 F=5", "figure5_paper/f5", "mult_conv", "equal"),
)
LOSS_PAPER = (
    PAPER_DENSE,
    Row("2 modules", "loss_paper/loss2", "ff_qkv_loss", "worse"),
    Row("4 modules", "loss_paper/loss4", "ff_qkv_loss", "worse"),
)


def with_reads(recorded: Recorded, frame: DataFrame) -> DataFrame:
    """:func:`~sparselib.experiments.recorded.table` with the weights that a token reads of the feedforward and its
    controller, in percent of those of the first row."""
    experiments = {row.run.split("/")[0] for row in recorded.rows}
    planned = {f"{c.experiment}/{c.variant}": c for name in experiments for c in planned_runs(name)}
    parts = [model_parts(planned[row.run].model_config_()) for row in recorded.rows]
    reads = [of_model["feedforward"].reads + of_model["controller"].reads for of_model in parts]
    return frame.assign(**{"read (%)": [100 * number / reads[0] for number in reads]})


# --- model sizes ------------------------------------------------------------------------------------------------------


def scale_rows() -> dict[int, tuple[Row, ...]]:
    """The models of figure 1 by d_model, each size with its own dense model first; without sparse QKV alone."""
    rows = tuple(row for row in figure_1() if row.kind != "qkv")

    def sized(size: str) -> tuple[Row, ...]:
        return tuple(Row(row.label, f"scale/{size}_{row.kind}", row.kind, row.paper) for row in rows)

    return {64: sized("small"), 128: rows, 256: sized("large")}


def scale_table(sizes: Mapping[int, Recorded]) -> DataFrame:
    """The tables of all sizes, one below the other; what the paper finds is that of figure 1 throughout."""
    frames = [table(recorded).drop(columns="paper") for recorded in sizes.values()]
    for size, frame in zip(sizes, frames, strict=True):
        frame.insert(0, "d_model", size)
    return pd.concat(frames, ignore_index=True)


def trend(sizes: Mapping[int, Recorded]) -> str:
    """How each model's difference from dense changes from the smallest to the largest size, in words."""
    (small, first), *_, (large, last) = sizes.items()
    words = []
    for index, row in enumerate(first.rows[1:], start=1):
        here, there = by_seed(first, index), by_seed(last, index)
        changes = [there[seed] - here[seed] for seed in here.keys() & there.keys()]
        if len(changes) > 1:
            change = mean_over_seeds(changes)
            told = f"the difference of {row.label} changes by {change.mean:+.3f} ({interval(change)})"
        else:
            told = f"the difference of {row.label} is not recorded yet at both"
        words.append(told)
    return f"from d_model {small} to {large} " + "; ".join(words)


def draw_scale(sizes: Mapping[int, Recorded]) -> Figure:
    """Final difference from the dense model of the same size, with its interval, against the size."""
    figure, axis = new_figure()
    axis.axhline(0, color=look("dense").color, linewidth=1, label=look("dense").label)
    rows = next(iter(sizes.values())).rows
    for index, row in enumerate(rows[1:], start=1):
        gaps = [(place, difference(recorded, index)) for place, recorded in enumerate(sizes.values())]
        points = [(place + 0.08 * (index - 2), gap) for place, gap in gaps if gap]
        if points:
            places, means = [place for place, _ in points], [gap.mean for _, gap in points]
            spread = [[gap.mean - gap.low for _, gap in points], [gap.high - gap.mean for _, gap in points]]
            axis.errorbar(places, means, yerr=spread, capsize=3, **look(row.kind).line)
    axis.set_xticks(range(len(sizes)), map(str, sizes))
    axis.set(xlabel="d_model", ylabel="final loss minus that of dense (nats)")
    figure.legend(loc="outside upper center", ncols=4)
    note_source(figure, list(sizes.values()))
    return figure


# --- learning rates ---------------------------------------------------------------------------------------------------


TUNING = ("tuning", "tuning_again")
WARM_UPS = ("warmup", "warmup_again", "warmup_edge")
WARM_UP = "{} steps, {:g}x"  # and of which multiple of the rate


def load_tuning(sweeps: Sequence[str] = TUNING) -> tuple[Recorded, DataFrame]:
    """The runs of sweeps over learning rates, and a row for each model and rate: its mean loss, of how many seeds."""
    recorded, frame = _load_tries([config for name in sweeps for config in planned_runs(name)])
    tries = frame.groupby(["variant", "learning rate"], sort=False, as_index=False)
    return recorded, tries.agg(**{"loss (nats)": ("loss (nats)", "mean"), "seeds": ("loss (nats)", "count")})


def by_rate(sweeps: Sequence[str] = TUNING) -> DataFrame:
    """A row a model: its loss minus that of dense at the same rate, the mean over the seeds that both have."""
    _, frame = _load_tries([config for name in sweeps for config in planned_runs(name)])
    losses = frame.pivot(index=["learning rate", "seed"], columns="variant", values="loss (nats)")
    gaps = losses.sub(losses["dense"], axis=0).groupby("learning rate").mean().T
    return _labelled(gaps.loc[[kind for kind in frame["variant"].unique() if kind != "dense"]], "{:g} (nats)")


def load_warmup() -> tuple[Recorded, DataFrame]:
    """The runs of the sweeps over warm-up with those of `tuning` at the rate of each model in figure 1; a row a model,
    its mean losses by warm-up, at that rate and at multiples of it, the best and what `figure1_tuned` takes.

    The best is one of those with most seeds.
    """
    used = {config.variant: config.optimizer.learning_rate for config in planned_runs("figure1")}
    configs = [c for c in planned_runs("tuning") if c.optimizer.learning_rate == used.get(_kind(c))]
    recorded, frame = _load_tries([*configs, *chain.from_iterable(map(planned_runs, WARM_UPS))])
    frame["rate"] = frame["learning rate"] / frame["variant"].map(used)
    frame = frame.sort_values(["rate", "warm-up"])
    frame["try"] = [WARM_UP.format(*cell) for cell in zip(frame["warm-up"], frame["rate"], strict=True)]
    losses, counts = (
        frame.pivot_table("loss (nats)", "variant", "try", aggfunc=how, sort=False, dropna=False).loc[list(used)]
        for how in ("mean", "count")
    )
    often = losses.where(counts.eq(counts.max(axis=1), axis=0))
    best = [row.idxmin() if row.notna().any() else None for _, row in often.iterrows()]
    tuned = {config.variant: config.optimizer for config in planned_runs("figure1_tuned")}
    taken = [WARM_UP.format(tuned[v].warmup, tuned[v].learning_rate / rate) for v, rate in used.items()]
    table = _labelled(losses, "{} (nats)")
    return recorded, table.assign(best=Series(best), used=Series(taken))


def _labelled(table: DataFrame, column: str) -> DataFrame:
    """A table of kinds by what was tried, with the kinds' labels and columns that are written as ``column``."""
    table.index = pd.Index([look(kind).label for kind in table.index], name="model")
    table.columns = pd.Index(map(column.format, table.columns))
    return table.reset_index()


def _kind(config: TrainConfig) -> str:
    """Of a model that is named by its kind and by what is tried with it."""
    return config.variant.rpartition("_")[0]


def _load_tries(configs: Sequence[TrainConfig]) -> tuple[Recorded, DataFrame]:
    """The runs of these configs, and a row for each: what was tried, and the loss, if it is recorded."""
    recorded = load([Row(c.variant, f"{c.experiment}/{c.variant}", _kind(c)) for c in configs])
    rows = [
        {
            "variant": _kind(config),
            "learning rate": config.optimizer.learning_rate,
            "warm-up": config.optimizer.warmup,
            "seed": config.seed,
            "loss (nats)": next((run.final_loss for run in runs.values()), None),
        }
        for config, runs in zip(configs, recorded.runs, strict=True)
    ]
    return recorded, DataFrame(rows).astype({"loss (nats)": float})


def tuning_table(frame: DataFrame, takers: Sequence[str] = ("figure1", "ablations")) -> DataFrame:
    """For every model the rates tried, the best of them, and the one that its runs in the sweeps ``takers`` take.

    The best is one of those with most seeds: the first seed said which deserve a second one.
    """
    others = [config for name in takers for config in planned_runs(name)]
    used = {config.variant: config.optimizer.learning_rate for config in others}
    rows = []
    for variant, group in frame.groupby("variant", sort=False):
        rates, most = sorted(group["learning rate"]), group["seeds"] == group["seeds"].max()
        losses = group[most].dropna().set_index("learning rate")["loss (nats)"]
        best = losses.idxmin() if len(losses) else None
        rows.append(
            {
                "model": look(str(variant)).label,
                "rates tried": ", ".join(map(str, rates)),
                "recorded": int((group["seeds"] > 0).sum()),
                "best": best,
                "loss (nats)": losses.min() if len(losses) else None,
                "used": used[str(variant)],
                "best at the edge": None if best is None else "yes" if best in (rates[0], rates[-1]) else "no",
            }
        )
    return DataFrame(rows)


def draw_tuning(frame: DataFrame, recorded: Recorded) -> Figure:
    """Final loss of each model against its learning rate."""
    figure, axis = new_figure()
    for variant, group in frame.dropna().groupby("variant", sort=False):
        axis.plot(group["learning rate"], group["loss (nats)"], **look(str(variant)).line)
    axis.set(xscale="log", xlabel="learning rate", ylabel="validation loss at the end (nats)")
    rates = sorted(set(frame["learning rate"]))
    axis.set_xticks(rates, map(str, rates))
    axis.minorticks_off()
    if axis.lines:
        axis.legend()
    note_source(figure, [recorded])
    return figure


# --- live -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Live:
    """One training of a few seconds."""

    label: str
    config: TrainConfig
    result: TrainingResult


def train_live(models: Mapping[str, Mapping[str, Any]], *, seed: int, steps: int = 40) -> list[Live]:
    """Train small models on the small corpus, here and now; ``models`` names fields of the ``smoke`` preset to set."""
    trained: list[Live] = []
    for label, fields in models.items():
        config = TrainConfig(
            experiment="live",
            variant=f"model{len(trained) + 1}",
            model={"preset": "smoke"} | dict(fields),
            data=DataConfig(corpus="lm_ci", vocab_size=512, length=32),
            optimizer=OptimizerConfig(learning_rate=5e-3, warmup=steps // 10),
            steps=steps,
            batch=16,
            seed=seed,
        )
        trained.append(Live(label, config, train_run(config, folder=None, resume=False, progress=False)))
    return trained


def live_table(trained: Sequence[Live]) -> DataFrame:
    """Loss of the first step's batch, and over the validation text after the last."""
    return DataFrame(
        [
            {
                "model": live.label,
                "weights": live.result.parameters,
                "steps": len(live.result.losses),
                "loss at first (nats)": live.result.losses[0],
                "validation loss (nats)": live.result.validation[-1][1],
            }
            for live in trained
        ]
    )


LIVE_FORMATS = {"weights": "{:,}", "loss at first (nats)": "{:.2f}", "validation loss (nats)": "{:.2f}"}
