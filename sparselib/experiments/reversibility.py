"""Notebook 14: what reversing costs in time and saves in memory, and the harm of choosing again on the way back.

One training step is a forward and a backward pass with cross-entropy on random tokens. Its activations are the tensors
that it makes and lets go of, and their size is the most that it holds of them at once; the gradients of the weights,
which stay, do not count. ``remember`` as in :class:`~sparselib.layers.ReversibleStack`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pandas import DataFrame
from torch import nn

from ..bench.memory import passing_bytes
from ..bench.protocol import time_call
from ..config import LSHSizes, ModelConfig
from ..layers.recurrence import scan, scan_in_steps
from ..models import make_model
from ..results.figures import log_axes, look, new_figure
from .recorded import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The first row is the baseline. The paper found that choosing again made training worse, and shows no figure of it.
HARM = (
    Row("choices and draws remembered", "appendix/terraformer", "terraformer"),
    Row("choices made again", "reversible/draws", "terraformer", "worse"),
    Row("choices and draws made again", "reversible/nothing", "terraformer", "worse"),
)


@dataclass(frozen=True)
class Shape:
    """Of a batch: rows, tokens of every source, tokens of every target."""

    batch: int
    source: int
    target: int

    @property
    def length(self) -> int:
        """Positions that a Terraformer's decoder works on."""
        return self.source + self.target


def training_step(config: ModelConfig, remember: str, shape: Shape, seed: int = 0) -> Callable[[], nn.Module]:
    """A function that makes one training step of a new model and returns the model, its gradients set.

    Every call makes the same draws.
    """
    torch.manual_seed(seed)
    model = make_model(replace(config, max_len=max(shape.source, shape.target)), remember)
    source = torch.randint(config.vocab_size, (shape.batch, shape.source))
    target = torch.randint(config.vocab_size, (shape.batch, shape.target))

    def step() -> nn.Module:
        torch.manual_seed(seed)
        model.zero_grad()
        nn.functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten()).backward()
        return model

    return step


def step_cost(config: ModelConfig, remember: str, shape: Shape) -> tuple[int, float]:
    """Bytes of activations and seconds of one training step; a step is made for each of both, the timed one first."""
    step = training_step(config, remember, shape)
    seconds = _seconds(lambda: step().zero_grad())
    return passing_bytes(step), seconds


def _seconds(step: Callable[[], object]) -> float:
    return time_call(step, 1, warmup=0).ms_median / 1e3


def step_times(config: ModelConfig, shape: Shape, remember: Sequence[str], repeat: int) -> DataFrame:
    """Median seconds of a training step for each of ``remember``, and the median ratio to the first, taken in turns."""
    steps = [training_step(config, kind, shape) for kind in remember]
    rounds = [[_seconds(step) for step in steps] for _ in range(repeat + 1)][1:]  # the first warms up
    return DataFrame(
        {
            "remembered": kind,
            "step (s)": statistics.median(times[index] for times in rounds),
            "times the first": statistics.median(times[index] / times[0] for times in rounds),
        }
        for index, kind in enumerate(remember)
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_by_depth(config: ModelConfig, shape: Shape, depths: Sequence[int]) -> DataFrame:
    """MB (10^6 bytes) of activations with as many decoder blocks as each of ``depths``, all kept or rebuilt."""
    return DataFrame(
        {"blocks": depth}
        | {
            name: step_cost(replace(config, n_layers=depth), remember, shape)[0] / 1e6
            for name, remember in (("kept (MB)", "everything"), ("rebuilt (MB)", "choices"))
        }
        for depth in depths
    )


def draw_memory_by_depth(frame: DataFrame) -> Figure:
    figure, axis = new_figure()
    for column, kind in (("kept (MB)", "dense"), ("rebuilt (MB)", "terraformer")):
        line = look(kind).line | {"label": column.removesuffix(" (MB)")}
        axis.plot(frame["blocks"], frame[column], **line)
    axis.set(xlabel="decoder blocks", ylabel="activations of a training step (MB)", ylim=(0, None))
    axis.legend()
    return figure


@dataclass(frozen=True)
class Kind:
    """One way to train on long inputs: fields that change in the config, what is remembered, how it is drawn."""

    fields: Mapping[str, Any]
    remember: str
    drawn_as: str


def ways(lsh: LSHSizes, ff_chunk: int) -> dict[str, Kind]:
    """From ordinary training to all that a Terraformer has for long inputs, one thing more in each."""
    return {
        "kept": Kind({}, "everything", "dense"),
        "reversible": Kind({}, "choices", "terraformer"),
        "+ hashing": Kind({"lsh": lsh}, "choices", "lsh"),
        "+ hashing, FF in chunks": Kind({"lsh": lsh, "ff_chunk": ff_chunk}, "choices", "lsh_chunks"),
    }


def cost_by_length(
    config: ModelConfig, shapes: Sequence[Shape], kinds: Mapping[str, Kind], most: Mapping[str, int]
) -> DataFrame:
    """One row for each kind and shape: MB of activations and seconds of one step.

    ``most``: the longest length that a kind is tried at.
    """
    rows = []
    for name, kind in kinds.items():
        sized = replace(config, **kind.fields)
        step_cost(sized, kind.remember, shapes[0])  # what is compiled or cached at the first call is not of interest
        for shape in shapes:
            if shape.length <= most.get(name, shape.length):
                size, seconds = step_cost(sized, kind.remember, shape)
                row = {"kind": name, "length": shape.length, "activations (MB)": size / 1e6, "step (s)": seconds}
                rows.append(row)
    return DataFrame(rows)


def draw_cost_by_length(frame: DataFrame, kinds: Mapping[str, Kind]) -> Figure:
    figure, axes = new_figure(1, 2, width=9.2, height=4.0)
    for axis, column in zip(axes, ("activations (MB)", "step (s)"), strict=True):
        for name, kind in kinds.items():
            part = frame[frame["kind"] == name]
            axis.plot(part["length"], part[column], **look(kind.drawn_as).line | {"label": name})
        log_axes(axis, frame["length"], rotation=30)
        axis.set(xlabel="source and target together (tokens)", ylabel=column)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(kinds))
    return figure


# --- the recurrence ---------------------------------------------------------------------------------------------------


def recurrence_times(units: int, lengths: Sequence[int], repeat: int) -> DataFrame:
    """Median milliseconds of c_t = f_t c_{t-1} + u_t over one sequence (1, L, ``units``), three ways."""
    ways = {"one by one (ms)": _one_by_one, "in log2 steps (ms)": scan_in_steps, "compiled loop (ms)": scan}
    frame = []
    for length in lengths:
        f, u = torch.rand(1, length, units), torch.randn(1, length, units)
        times = {name: time_call(partial(way, f, u), repeat, warmup=1).ms_median for name, way in ways.items()}
        slow, steps, loop = times.values()
        frame.append(
            {"positions": length} | times | {"steps, times faster": slow / steps, "loop, times faster": slow / loop}
        )
    return DataFrame(frame)


def _one_by_one(f: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    cells = [u[:, 0]]
    for t in range(1, u.shape[1]):
        cells.append(f[:, t] * cells[-1] + u[:, t])
    return torch.stack(cells, 1)


# --- gradients --------------------------------------------------------------------------------------------------------


PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def gradient_errors(config: ModelConfig, shape: Shape, seeds: Sequence[int]) -> DataFrame:
    """One row for each precision and way to remember: |g - g0| / |g0|, g0 the gradient with everything kept.

    The median over ``seeds`` and the largest. bf16 is mixed precision: matrix products alone, weights stay fp32.
    """
    rows = []
    for precision in PRECISIONS:
        exact = [gradient(config, "everything", shape, seed, precision) for seed in seeds]
        for remember in ("choices", "draws", "nothing"):
            others = [gradient(config, remember, shape, seed, precision) for seed in seeds]
            errors = [float((g - g0).norm() / g0.norm()) for g, g0 in zip(others, exact, strict=True)]
            median, largest = statistics.median(errors), max(errors)
            rows.append({"precision": precision, "remembered": remember, "error": median, "largest": largest})
    return DataFrame(rows)


def gradient(config: ModelConfig, remember: str, shape: Shape, seed: int, precision: str) -> torch.Tensor:
    """The gradient of all weights after one training step, as one vector."""
    mixed = precision == "bf16"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if mixed else PRECISIONS[precision])
    try:
        with torch.autocast("cpu", PRECISIONS[precision], enabled=mixed):
            model = training_step(config, remember, shape, seed)()
    finally:
        torch.set_default_dtype(before)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
