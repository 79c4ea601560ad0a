"""Notebook 15: copying and adding numbers longer than any in training (table 4), and what of a Terraformer it takes.

Accuracies are those of :func:`~sparselib.tasks.toy.accuracies`, here in percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pandas import DataFrame
from torch import nn

from ..config import count_parameters
from ..results.figures import look, new_figure
from ..results.paper import TABLE_4
from ..results.statistics import Estimate, mean_over_seeds
from ..results.store import RunRecord
from ..tasks.toy import END, TASKS, VOCAB_SIZE, Digits, ToySource
from ..training.config import DataConfig, OptimizerConfig, TrainConfig
from ..training.loop import TrainingResult, train_run
from .recorded import Recorded, Row, planned_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = {"tokens": "tokens (%)", "sequences": "sequences (%)"}
FORMATS = {f"{where}, {name}": "{:.1f}" for where in ("within", "beyond", "paper") for name in MEASURES.values()}


def tuning_of(task: str) -> tuple[str, ...]:
    """Sweeps over learning rates of the two models of a task."""
    return (f"{task}_tuning",)


def rows_of(task: str) -> tuple[Row, ...]:
    """The models of a task: the two of table 4, the Terraformer with one thing otherwise, a Transformer with its
    positions."""
    return (
        Row("Transformer", f"{task}/dense", "dense"),
        Row("Terraformer", f"{task}/terraformer", "terraformer"),
        Row("without recurrence", f"{task}_parts/no_recurrence", "terraformer"),
        Row("positions from 0", f"{task}_parts/from_zero", "terraformer"),
        Row("one attention", f"{task}_parts/one_attention", "terraformer"),
        Row("Transformer, its positions", f"{task}_parts/transformer", "dense"),
    )


def sizes() -> DataFrame:
    """One row a model: what it is made of. Both tasks have the same models."""
    frame = []
    for row in rows_of(TASKS[0]):
        experiment, variant = row.run.split("/")
        config = next(c for c in planned_runs(experiment) if c.variant == variant).model_config_()
        frame.append(
            {
                "model": row.label,
                "d_model": config.d_model,
                "blocks": f"{config.n_encoder_layers} + {config.n_layers}",
                "positions": config.positions,
                "recurrent units": config.sru_units,
                "attentions in a decoder block": config.attentions_in_block + config.is_encoder_decoder,
                "weights": count_parameters(config),
            }
        )
    return DataFrame(frame)


# --- recorded runs ----------------------------------------------------------------------------------------------------


def last(runs: Mapping[int, RunRecord], name: str) -> list[float]:
    """An accuracy at the end of every run, in percent, by seed."""
    return [100 * runs[seed].extra[name][-1] for seed in sorted(runs)]


def estimate(runs: Mapping[int, RunRecord], name: str) -> Estimate | None:
    """Its mean over seeds with an interval; None for fewer than two."""
    return mean_over_seeds(last(runs, name)) if len(runs) > 1 else None


def table(recorded: Mapping[str, Recorded]) -> DataFrame:
    """One row a task and model: accuracies in percent, the mean over seeds, and the paper's."""
    frame = []
    for task, part in recorded.items():
        for row, runs in zip(part.rows, part.runs, strict=True):
            cells: dict[str, Any] = {"task": task, "model": row.label, "seeds": len(runs)}
            for where in ("within", "beyond"):
                for measure, column in MEASURES.items():
                    values = last(runs, f"{where}.{measure}")
                    cells[f"{where}, {column}"] = float(np.mean(values)) if values else None
            frame.append(cells | _papers(task, row))
    return DataFrame(frame)


def _papers(task: str, row: Row) -> dict[str, float | None]:
    model = row.run.split("/")[1]
    found = [printed for printed in TABLE_4.rows if (printed.task, printed.model) == (task, model)]
    of_measure = dict(zip(MEASURES, (found[0].digits, found[0].sequences) if found else (None, None), strict=True))
    return {f"paper, {MEASURES[measure]}": value for measure, value in of_measure.items()}


def draw(recorded: Mapping[str, Recorded]) -> Figure:
    """For every task a panel for each accuracy beyond the lengths of training: bars with intervals, dots for seeds."""
    figure, axes = new_figure(len(recorded), 2, width=9.2, height=3.4 * len(recorded), squeeze=False)
    for line, (task, part) in zip(axes, recorded.items(), strict=True):
        for axis, measure in zip(line, MEASURES, strict=True):
            for place, (row, runs) in enumerate(zip(part.rows, part.runs, strict=True)):
                _draw_bar(axis, place, row, runs, f"beyond.{measure}")
                theirs = _papers(task, row)[f"paper, {MEASURES[measure]}"]
                if theirs is not None:
                    axis.hlines(theirs, place - 0.45, place + 0.45, color=look("paper").color, linestyle=":")
            axis.set_xticks(range(len(part.rows)), [row.label.replace(" ", "\n", 1) for row in part.rows], fontsize=8)
            axis.set(title=f"{task}: {measure}", ylabel="right (%)", ylim=(0, 102))
    return figure


def _draw_bar(axis: Any, place: int, row: Row, runs: Mapping[int, RunRecord], name: str) -> None:
    values, found = last(runs, name), estimate(runs, name)
    if values:
        axis.bar(place, np.mean(values), 0.7, color=look(row.kind).color, alpha=0.5)
        axis.plot([place] * len(values), values, color=look(row.kind).color, marker=".", linestyle="")
    if found:
        axis.vlines(place, found.low, found.high, color=look(row.kind).color, linewidth=2)


def gap(part: Recorded, index: int, baseline: int, name: str) -> Estimate | None:
    """How many points of percent more row ``index`` has right than row ``baseline``, over the seeds that both have."""
    both = sorted(part.runs[index].keys() & part.runs[baseline].keys())
    if len(both) < 2:
        return None
    here, there = ({s: part.runs[i][s] for s in both} for i in (index, baseline))
    return mean_over_seeds([a - b for a, b in zip(last(here, name), last(there, name), strict=True)])


def verdict(recorded: Mapping[str, Recorded]) -> tuple[str, str]:
    """In the book's words, whether a Terraformer gets more right than a Transformer beyond the lengths of training."""
    held, reasons = [], []
    for task, part in recorded.items():
        for measure in MEASURES:
            found = gap(part, 1, 0, f"beyond.{measure}")
            if found:
                held.append(found.low > 0)
                reasons.append(f"{task}, {measure}: {found.mean:+.1f} points ({found.low:+.1f} to {found.high:+.1f})")
            else:
                reasons.append(f"{task}, {measure}: not recorded yet")
    if not held:
        return "not tested", "; ".join(reasons)
    word = "reproduced" if all(held) else "partly reproduced" if any(held) else "not reproduced"
    return word, "; ".join(reasons)


def parts(part: Recorded) -> str:
    """What each thing taken away from the Terraformer costs, and how far a Transformer with its positions is behind."""
    words = []
    for index, row in enumerate(part.rows[2:], start=2):
        found = gap(part, index, 1, "beyond.tokens")
        told = f"{found.mean:+.1f} points ({found.low:+.1f} to {found.high:+.1f})" if found else "not recorded yet"
        words.append(f"{row.label} {told}")
    return "; ".join(words)


# --- live -------------------------------------------------------------------------------------------------------------


def train_live(*, steps: int, length: int, seed: int) -> TrainingResult:
    """A small Terraformer that learns to copy up to ``length`` digits, here and now."""
    sizes = {"preset": "smoke", "architecture": "terraformer", "positions": "shifted", "max_len": 4 * length}
    config = TrainConfig(
        experiment="live",
        variant="terraformer",
        model=sizes,
        data=DataConfig(
            corpus="copy", objective="toy", vocab_size=VOCAB_SIZE, length=length, growing=max(1, steps // 2)
        ),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup=steps // 10),
        steps=steps,
        batch=32,
        seed=seed,
    )
    return train_run(config, folder=None, resume=False, progress=False)


def answer(model: Any, source: Sequence[int], most: int) -> list[int]:
    """Greedy decoding of one source (tokens): at most ``most`` tokens, without the end."""
    tokens: list[int] = []
    state, token = model.init_state(1, torch.tensor([list(source)])), torch.tensor([0])
    for _ in range(most):
        logits, state = model.step(token, state)
        token = logits.argmax(-1)
        if int(token) == END:
            break
        tokens.append(int(token))
    return tokens


@torch.no_grad()
def examples(model: nn.Module, task: str, lengths: Sequence[int]) -> DataFrame:
    """What ``model`` answers to one example of each length, the lowest digit first."""
    digits, frame = Digits(), []
    for length in lengths:
        batch = next(ToySource(task, length, length).batches(1, seed=0))
        source, target = batch["source"][0].tolist(), batch["target"][0, 1:-1].tolist()
        given = answer(model, source, len(target) + 5)
        frame.append(
            {
                "digits": length,
                "source": digits.decode(source),
                "answer": digits.decode(given),
                "right": "yes" if given == target else "no",
            }
        )
    return DataFrame(frame)
