"""Notebook 03: a dense and a fully sparse model trained on real text, then decoded token by token with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pandas import DataFrame

from ..bench.protocol import time_decode
from ..config import ModelConfig, count_parameters, decode_cost
from ..models import Transformer
from ..results.figures import look, new_figure
from ..training.loop import TrainingRun, train
from .text import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Trained:
    """A model in evaluation mode and the run that made it."""

    model: Transformer
    run: TrainingRun


def train_variants(
    configs: Mapping[str, ModelConfig],
    text: Text,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    validate_every: int,
    seed: int,
    progress: bool = True,
) -> dict[str, Trained]:
    """Train each config from the same seed on the same batches in the same order."""
    trained = {}
    for name, config in configs.items():
        torch.manual_seed(seed)
        model = Transformer(config)
        run = train(
            model,
            text.train,
            text.validation,
            steps=steps,
            batch=batch,
            learning_rate=learning_rate,
            warmup=max(1, steps // 10),
            validate_every=validate_every,
            seed=seed,
            progress=progress,
        )
        trained[name] = Trained(model.cpu().eval(), run)
    return trained


def training_table(trained: Mapping[str, Trained]) -> DataFrame:
    """One row a variant: weights, last losses in nats a token, speed of training."""
    return DataFrame(
        [
            {
                "variant": look(name).label,
                "weights": count_parameters(t.model.config),
                "training loss, last 10 steps (nats)": sum(t.run.losses[-10:]) / len(t.run.losses[-10:]),
                "validation loss (nats)": t.run.validation[-1][1],
                "tokens per second": t.run.tokens_per_second,
                "step, times dense": trained["dense"].run.tokens_per_second / t.run.tokens_per_second,
            }
            for name, t in trained.items()
        ]
    )


def draw_losses(trained: Mapping[str, Trained]) -> Figure:
    """Training loss of every step (thin) and validation loss (marked) against training tokens."""
    figure, axis = new_figure()
    for name, t in trained.items():
        style = look(name)
        tokens = t.run.config["batch"] * t.run.config["length"] / 1e3
        steps = range(1, len(t.run.losses) + 1)
        axis.plot([s * tokens for s in steps], t.run.losses, color=style.color, linewidth=0.7, alpha=0.5)
        axis.plot([s * tokens for s, _ in t.run.validation], [v for _, v in t.run.validation], **style.line)
    axis.set(xlabel="training tokens (thousands)", ylabel="loss (nats a token)")
    axis.legend(title="validation (thin: training)")
    return figure


def time_variants(
    models: Mapping[str, Transformer], bandwidth: float, *, tokens: int, context: int, size: str
) -> DataFrame:
    """Milliseconds a token by ``step`` at batch 1, with the bytes a token touches and the time it takes to read them.

    ``bandwidth`` in GB/s. The floor holds once the weights are larger than the last-level cache.
    """
    rows: list[dict[str, Any]] = []
    for name, model in models.items():
        bytes_ = round(decode_cost(model.config, context=context + tokens // 2).bytes)
        timing = time_decode(model, tokens, context, bytes=bytes_, limit_ms=bytes_ / bandwidth / 1e6)
        rows.append(
            {
                "size": size,
                "variant": look(name).label,
                "ms a token": timing.ms_median,
                "quartiles": f"{timing.ms_q1:.2f} to {timing.ms_q3:.2f}",
                "MB touched": bytes_ / 1e6,
                "GB/s": timing.gb_s,
                "floor (ms)": timing.limit_ms,
                "% of limit": 100 * (timing.limit_fraction or 0),
                "speed-up": rows[0]["ms a token"] / timing.ms_median if rows else 1.0,
            }
        )
    return DataFrame(rows)


def draw_decoding(frames: Sequence[DataFrame]) -> Figure:
    """Measured time and floor of every size and variant, as bars."""
    figure, axes = new_figure(1, len(frames), width=4.0 * len(frames), height=3.4)
    colors = {look(name).label: look(name).color for name in ("dense", "ff", "qkv", "ff_qkv", "ff_qkv_loss")}
    for axis, frame in zip(axes if len(frames) > 1 else [axes], frames, strict=True):
        names = [name.replace("+", "\n+", 1) for name in frame["variant"]]
        axis.bar(names, frame["ms a token"], color=[colors[v] for v in frame["variant"]], width=0.6)
        for place, floor in enumerate(frame["floor (ms)"]):
            label = "floor: bytes / bandwidth" if place == 0 else None
            axis.hlines(floor, place - 0.4, place + 0.4, color=look("limit").color, linestyle="--", label=label)
        axis.set(title=frame["size"].iloc[0], ylabel="ms a token (median)")
        axis.margins(y=0.2)
        axis.legend()
    return figure
