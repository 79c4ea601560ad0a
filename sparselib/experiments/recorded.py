"""Recorded trainings as notebooks 08 to 12 show them: curves over seeds, differences from a baseline, a verdict.

Losses are validation losses in nats a token. The baseline is a figure's first row. Differences are paired by seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pandas import DataFrame

from ..checks import require
from ..paths import repository
from ..results import statistics
from ..results.figures import look, new_figure, shades
from ..results.statistics import Estimate, mean_over_seeds
from ..results.store import RECIPE, RunRecord, scan
from ..sweep import Sweep
from ..training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What a model is against the baseline; and what each finding of the paper's allows: nothing is lost by being better.
RELATIONS = {"better": ("better",), "equal": ("equal", "better"), "worse": ("worse",)}
FORMATS = {
    "weights": "{:,}",
    "loss (nats)": "{:.3f}",
    "difference (nats)": "{:+.3f}",
    "low (nats)": "{:+.3f}",
    "high (nats)": "{:+.3f}",
}


@dataclass(frozen=True)
class Row:
    """One model of a figure: the runs "experiment/variant" of all seeds, drawn as the ``kind`` of :func:`look`.

    ``paper``: one of RELATIONS, what the paper finds against the first row; empty where it says nothing.
    """

    label: str
    run: str
    kind: str
    paper: str = ""


@dataclass(frozen=True)
class Recorded:
    """The runs of a figure's ``rows``: one mapping of seed to run for each, and what is not recorded yet.

    ``whole``: whether all seeds of a row that were planned are recorded.
    """

    rows: tuple[Row, ...]
    runs: tuple[Mapping[int, RunRecord], ...]
    whole: tuple[bool, ...]
    missing: tuple[str, ...]

    @property
    def all_runs(self) -> list[RunRecord]:
        return [run for runs in self.runs for run in runs.values()]


def planned_runs(experiment: str) -> list[TrainConfig]:
    """All runs of data/sweeps/<experiment>.yaml."""
    return Sweep.load(repository() / "data" / "sweeps" / f"{experiment}.yaml").configs()


def load(rows: Sequence[Row]) -> Recorded:
    """The recorded runs of all rows: those whose config stands in the experiment's sweep today.

    Errors: ValueError for a row that is in no sweep, for two runs of the same config, and for runs that saw different
    numbers of tokens, which are not to be compared.
    """
    planned = {name: planned_runs(name) for name in {row.run.split("/")[0] for row in rows}}
    found: dict[str, dict[int, RunRecord]] = {row.run: {} for row in rows}
    runs, faults = scan()
    for run in runs:
        name = f"{run.experiment}/{run.variant}"
        if name in found and run.recipe == RECIPE and run.train_config() in planned[run.experiment]:
            require(run.seed not in found[name], "recorded runs", f"{name} seed {run.seed} twice", "one of each seed")
            found[name][run.seed] = run
    missing = [_missing(row, planned[row.run.split("/")[0]], found[row.run]) for row in rows]
    names = tuple(name for name in [*faults, *missing] if name)
    whole = tuple(not name for name in missing)
    recorded = Recorded(tuple(rows), tuple(found[row.run] for row in rows), whole, names)
    tokens = {run.tokens for run in recorded.all_runs}
    require(len(tokens) <= 1, "tokens", sorted(tokens), "the same in all runs that are compared")
    return recorded


def of_variants(rows: Sequence[Row], *variants: str) -> tuple[Row, ...]:
    """The row of each variant, as its sweep calls it."""
    by_variant = {row.run.split("/")[1]: row for row in rows}
    return tuple(by_variant[variant] for variant in variants)


def _missing(row: Row, planned: Sequence[TrainConfig], found: Mapping[int, RunRecord]) -> str:
    """The row's name where runs of it are not recorded, with their seeds if some are."""
    experiment, variant = row.run.split("/")
    seeds = [config.seed for config in planned if config.variant == variant]
    require(bool(seeds), "row", row.run, f"a variant of the sweep {experiment}")
    absent = [seed for seed in seeds if seed not in found]
    some = f" (seed {', '.join(map(str, absent))})" if len(absent) < len(seeds) else ""
    return row.run + some if absent else ""


def source(parts: Sequence[Recorded]) -> str:
    """When and where the runs were made, and how long they took; or that there are none."""
    runs = {run.key: run for part in parts for run in part.all_runs}.values()
    if not runs:
        return "nothing recorded yet"
    dates = sorted({str(run.date) for run in runs})
    machines = sorted({str(run.machine.get("gpu") or run.machine["cpu"]) for run in runs})
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    took = f"{sum(run.minutes for run in runs):.0f} minutes in {len(runs)} run{'s' * (len(runs) > 1)}"
    return f"recorded {when}, {', '.join(machines)}, {took}"


def gaps(parts: Sequence[Recorded]) -> str:
    """What is not recorded yet, in one line."""
    missing = dict.fromkeys(name for part in parts for name in part.missing)
    return "not recorded yet: " + ", ".join(missing) if missing else "nothing is missing"


def rates(parts: Sequence[Recorded]) -> str:
    """The learning rate of every model, in one line."""
    of_rate: dict[float, dict[str, None]] = {}
    for part in parts:
        for row, runs in zip(part.rows, part.runs, strict=True):
            for run in runs.values():
                of_rate.setdefault(run.train_config().optimizer.learning_rate, {})[row.label] = None
    return "learning rates: " + "; ".join(f"{rate:g} ({', '.join(labels)})" for rate, labels in sorted(of_rate.items()))


# --- differences and verdicts -----------------------------------------------------------------------------------------


def by_seed(recorded: Recorded, index: int) -> dict[int, float]:
    """Final loss of row ``index`` minus the baseline's, for every seed that both have."""
    runs, baseline = recorded.runs[index], recorded.runs[0]
    return {seed: runs[seed].final_loss - baseline[seed].final_loss for seed in sorted(runs.keys() & baseline.keys())}


def difference(recorded: Recorded, index: int) -> Estimate | None:
    """The mean of :func:`by_seed` with its interval; None for fewer than two seeds."""
    gaps = by_seed(recorded, index)
    return mean_over_seeds(list(gaps.values())) if len(gaps) > 1 else None


def relation(estimate: Estimate) -> str:
    """The one of RELATIONS that a difference amounts to."""
    word = statistics.verdict(estimate)
    return word if word in RELATIONS else "equal"


def table(recorded: Recorded) -> DataFrame:
    """One row a model: its sizes, losses over seeds, difference from the baseline with its interval, ours and the
    paper's finding. No column of the paper where it says nothing of any row."""
    rows = []
    for index, (row, runs) in enumerate(zip(recorded.rows, recorded.runs, strict=True)):
        losses = [run.final_loss for run in runs.values()]
        gap = difference(recorded, index) if index else None
        first = next(iter(runs.values()), None)
        rows.append(
            {
                "model": row.label,
                "d_ff": first and first.train_config().model_config_().d_ff,
                "weights": first and first.parameters,
                "seeds": len(losses),
                "loss (nats)": float(np.mean(losses)) if losses else None,
                "difference (nats)": gap and gap.mean,
                "low (nats)": gap and gap.low,
                "high (nats)": gap and gap.high,
                "paper": row.paper or None,
                "here": gap and relation(gap),
            }
        )
    frame = DataFrame(rows).astype({"d_ff": "Int64", "weights": "Int64"})  # an int may be missing
    return frame if any(row.paper for row in recorded.rows) else frame.drop(columns="paper")


def interval(estimate: Estimate) -> str:
    return f"{estimate.low:+.3f} to {estimate.high:+.3f}"


def told(recorded: Recorded, *labels: str) -> str:
    """What the differences of these rows (none named: of all) from the baseline are, in words."""
    words = []
    for index, row in enumerate(recorded.rows[1:], start=1):
        if not labels or row.label in labels:
            gap = difference(recorded, index)
            words.append(phrase(row, gap) if gap else f"{row.label} is not recorded yet")
    return "; ".join(words)


def phrase(row: Row, gap: Estimate) -> str:
    return f"{row.label} is {relation(gap)} ({gap.mean:+.3f}, {interval(gap)})"


def least_and_most(recorded: Recorded) -> tuple[str, str]:
    """The lowest and the highest mean loss of all rows but the first, with their models, in words."""
    losses = table(recorded)[1:].dropna(subset="loss (nats)").sort_values("loss (nats)")
    if losses.empty:
        return ("not recorded yet",) * 2
    least, most = (f"{row['loss (nats)']:.3f} ({row['model']})" for _, row in losses.iloc[[0, -1]].iterrows())
    return least, most


def pick(recorded: Recorded, *rows: Row) -> Recorded:
    """The same runs for some of the rows; the first becomes the baseline."""
    places = [recorded.rows.index(row) for row in rows]
    runs, whole = tuple(recorded.runs[place] for place in places), tuple(recorded.whole[place] for place in places)
    return Recorded(rows, runs, whole, recorded.missing)


def verdict(recorded: Recorded) -> tuple[str, str]:
    """In the book's words, whether the differences are as the paper says, and which are.

    "reproduced" if all of them are, "partly reproduced" if some are; a better model counts as an equal one, one of
    which a seed is missing as not tested.
    """
    as_said, better, other, absent = (list[str]() for _ in range(4))
    for index, row in enumerate(recorded.rows[1:], start=1):
        gap = difference(recorded, index) if row.paper and recorded.whole[0] and recorded.whole[index] else None
        if gap and relation(gap) == row.paper:
            as_said.append(phrase(row, gap))
        elif gap and relation(gap) in RELATIONS[row.paper]:
            better.append(phrase(row, gap))
        elif gap:
            other.append(f"{phrase(row, gap)}, not {row.paper}")
        elif row.paper:
            absent.append(row.label)
    groups = {"as the paper says": as_said, "better than it says": better, "not as it says": other}
    words = [f"{name}: {', '.join(rows)}" for name, rows in groups.items() if rows]
    if absent:
        words.append(f"not wholly recorded yet: {', '.join(absent)}")
    why, held = "; ".join(words), len(as_said) + len(better)
    if not held and not other:
        return "not tested", why
    return "reproduced" if not other and not absent else "partly reproduced" if held else "not reproduced", why


# --- figures ----------------------------------------------------------------------------------------------------------


def colors(rows: Sequence[Row], palette: str | None = None) -> list[Any]:
    """The colour of each row: its kind's, from pale to full where several rows are of one kind.

    With a matplotlib ``palette``, for rows that are settings of one layer, only the baseline has its kind's colour.
    """
    from matplotlib.colors import to_rgb

    if palette is not None:
        return [look(rows[0].kind).color, *shades(len(rows) - 1, palette)]
    of_kind, seen, result = Counter(row.kind for row in rows), Counter[str](), []
    for row in rows:
        seen[row.kind] += 1
        strength = 0.35 + 0.65 * seen[row.kind] / of_kind[row.kind] if of_kind[row.kind] > 1 else 1.0
        result.append(tuple(1 - strength * (1 - part) for part in to_rgb(look(row.kind).color)))
    return result


def curves(runs: Mapping[int, RunRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (points,) in millions and validation losses (seeds, points)."""
    first = next(iter(runs.values()))
    tokens = np.array([step for step, _ in first.validation]) * first.tokens / len(first.losses) / 1e6
    return tokens, np.array([[loss for _, loss in run.validation] for run in runs.values()])


def draw_band(axis: Axes, x: np.ndarray, values: np.ndarray, **line: Any) -> None:
    """The mean over seeds (seeds, points) as a line, least and most as a band."""
    axis.plot(x, values.mean(0), **line)
    axis.fill_between(x, values.min(0), values.max(0), color=line["color"], alpha=0.2, linewidth=0)


def draw(recorded: Recorded, palette: str | None = None) -> Figure:
    """Loss against tokens after the first quarter of the training, a band over seeds; and the final differences.

    ``palette``: that of :func:`colors`.
    """
    figure, (left, right) = new_figure(1, 2, width=9.2, height=4.0)
    shades = colors(recorded.rows, palette)
    for row, runs, color in zip(recorded.rows, recorded.runs, shades, strict=True):
        if runs:
            tokens, losses = curves(runs)
            late = slice(len(tokens) // 4, None)
            draw_band(left, tokens[late], losses[:, late], color=color, marker=look(row.kind).marker, markersize=4)
    left.set(xlabel="training tokens (millions)", ylabel="validation loss (nats a token)")
    draw_differences(right, recorded, shades)
    note_source(figure, [recorded])
    return figure


def draw_differences(axis: Axes, recorded: Recorded, shades: Sequence[Any]) -> None:
    """A line for every row: a dot for each seed, and of two or more the mean and its interval; the baseline is zero."""
    baseline = recorded.rows[0]
    axis.axvline(0, color=shades[0], linewidth=1)
    for index, (row, color) in enumerate(zip(recorded.rows, shades, strict=True)):
        gap, dots = difference(recorded, index), list(by_seed(recorded, index).values()) if index else []
        axis.plot(dots, [index + 0.25] * len(dots), color=color, marker=".", linestyle="")
        if gap:
            axis.hlines(index, gap.low, gap.high, color=color, linewidth=3)
            axis.plot(gap.mean, index, color=color, marker=look(row.kind).marker, markersize=8)
    axis.locator_params(axis="x", nbins=5)
    axis.set_yticks(range(len(recorded.rows)), [row.label for row in recorded.rows])
    axis.set(xlabel=f"final loss minus that of {baseline.label} (nats)", ylim=(len(recorded.rows) - 0.4, -0.6))


def note_source(figure: Figure, parts: Sequence[Recorded]) -> None:
    """Say under the figure where its runs are from."""
    figure.supxlabel(source(parts), fontsize=8, color=look("paper").color)
