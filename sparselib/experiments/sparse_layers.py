"""Notebook 02: what the controller chooses on real text, and how many weights the variants have.

Letters: X blocks of N units; z the controller's logits; MI = mutual information, in bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from pandas import DataFrame
from torch import Tensor

from ..config import ModelConfig, Part, count_parameters, model_parts, preset
from ..layers import SparseFeedForward
from ..models import Transformer
from ..results.figures import look, new_figure, shades
from ..training.loop import TrainingRun, train
from .text import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sparse_layers(model: Transformer) -> list[SparseFeedForward]:
    """The sparse feedforward layers of a model, first block first."""
    return [m for m in model.modules() if isinstance(m, SparseFeedForward)]


@torch.no_grad()
def controller_inputs(model: Transformer, tokens: Tensor) -> list[Tensor]:
    """What enters every sparse feedforward layer for ``tokens`` (B, T): a (B, T, d_model) for each."""
    seen: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for layer in sparse_layers(model)]
    was_training = model.training
    model.eval()(tokens)
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    return seen


def entropy(p: Tensor) -> Tensor:
    """-sum p log2 p over the last axis, in bits."""
    return -torch.special.xlogy(p, p).sum(-1) / math.log(2)


# --- the controller through training ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ControllerTrace:
    """Entropies as shares of log2 N, arrays (points, layers), at ``steps``; the run and the trained model.

    ``decision`` is the entropy of softmax(z) at a token: 1 = undecided. ``usage`` is that of how often each unit of a
    block is chosen: 1 = all equally, 0 = always the same one.
    """

    steps: list[int]
    decision: np.ndarray
    usage: np.ndarray
    run: TrainingRun
    model: Transformer


def trace_controller(
    config: ModelConfig, text: Text, *, steps: int, batch: int, learning_rate: float, every: int, seed: int = 0
) -> ControllerTrace:
    """Train a model with sparse feedforward and look at its controllers on fixed validation text on the way."""
    torch.manual_seed(seed)
    model = Transformer(config)
    probe = text.validation[:16, :-1]
    at: list[int] = []
    decision: list[list[float]] = []
    usage: list[list[float]] = []

    def look_at_controllers(step: int, loss: float) -> None:
        if step == 1 or step % every == 0:
            values = [
                entropies(layer.logits(x).flatten(0, 1).detach())
                for layer, x in zip(sparse_layers(model), controller_inputs(model, probe), strict=True)
            ]
            at.append(step)
            decision.append([v[0] for v in values])
            usage.append([v[1] for v in values])

    run = train(
        model,
        text.train,
        text.validation,
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        warmup=max(1, steps // 10),
        seed=seed,
        on_step=look_at_controllers,
        progress=False,
    )
    return ControllerTrace(at, np.array(decision), np.array(usage), run, model.eval())


def chosen_shares(z: Tensor) -> Tensor:
    """How often inference chooses each unit: logits (tokens, X, N) -> shares (X, N), of sum 1 in a block."""
    return torch.nn.functional.one_hot(z.argmax(-1), z.shape[-1]).double().mean(0)


def entropies(z: Tensor) -> tuple[float, float]:
    """Decision and usage, as in :class:`ControllerTrace`, of one layer's logits (tokens, X, N)."""
    most = math.log2(z.shape[-1])
    return float(entropy(z.softmax(-1)).mean()) / most, float(entropy(chosen_shares(z)).mean()) / most


def draw_trace(trace: ControllerTrace) -> Figure:
    """Both entropies against step, a line a layer."""
    figure, axes = new_figure(1, 2, width=8.0, height=3.4, sharey=True)
    for axis, values, title in zip(
        axes,
        (trace.decision, trace.usage),
        ("at one token: softmax of the logits", "over the text: units chosen"),
        strict=True,
    ):
        for layer, color in enumerate(shades(trace.usage.shape[1])):
            axis.plot(trace.steps, values[:, layer], color=color, marker="o", markersize=3, label=f"block {layer + 1}")
        axis.set(title=title, xlabel="training step", ylim=(0, 1.05))
    axes[0].set_ylabel("entropy / log2 N (1 = uniform)")
    axes[1].legend()
    return figure


# --- which units fire for which words ---------------------------------------------------------------------------------


def unit_counts(model: Transformer, windows: Tensor) -> list[Tensor]:
    """How often each unit is chosen at each token id: for every layer (X, vocab_size, N)."""
    vocab, layers = model.config.vocab_size, sparse_layers(model)
    n = layers[0].ff_sparsity
    counts = [torch.zeros(layer.d_ff // n, vocab * n, dtype=torch.int64) for layer in layers]
    for tokens in windows[:, :-1].split(64):
        for layer, x, count in zip(layers, controller_inputs(model, tokens), counts, strict=True):
            cells = tokens[..., None] * n + layer.units(x) % n  # (B, T, X)
            for block, cell in enumerate(cells.flatten(0, 1).T):
                count[block] += torch.bincount(cell, minlength=vocab * n)
    return [count.view(-1, vocab, n) for count in counts]


def token_information(counts: Tensor, least: int = 20) -> Tensor:
    """Mutual information in bits between the token and the unit chosen, for every block: (X, vocab, N) -> (X,).

    Tokens seen fewer than ``least`` times are left out: with few sightings every choice looks informative.
    """
    kept = counts[:, counts[0].sum(-1) >= least].double()
    joint = kept / kept.sum((1, 2), keepdim=True)
    return entropy(joint.sum(1)) + entropy(joint.sum(2)) - entropy(joint.flatten(1))


def words_of_units(counts: Tensor, tokenizer, words: int = 6, least: int = 20) -> DataFrame:
    """For every unit of one block (vocab, N): how often it fires, and the tokens at which it does so far more often."""
    seen = counts.sum(1)
    share = counts.sum(0) / counts.sum()
    lift = counts / seen.clamp(min=1)[:, None] / share.clamp(min=1e-9)  # P(unit | token) / P(unit)
    lift[seen < least] = 0
    rows = []
    for unit in share.argsort(descending=True).tolist():
        best = [i for i in lift[:, unit].argsort(descending=True)[:words].tolist() if lift[i, unit] > 1]
        shown = " ".join(f"{tokenizer.decode([i]).strip() or repr(tokenizer.decode([i]))}" for i in best)
        rows.append({"unit": unit, "tokens (%)": 100 * float(share[unit]), "fires most above average at": shown or "-"})
    return DataFrame(rows)


# --- weights ----------------------------------------------------------------------------------------------------------


def decoder_block_parts(config: ModelConfig) -> dict[str, Part]:
    """One decoder block's parts."""
    parts = model_parts(replace(config, n_layers=1, n_encoder_layers=min(1, config.n_encoder_layers)))
    return {name: parts[name] for name in ("self_attention", "cross_attention", "controller", "feedforward")}


def count_variants(presets: Sequence[str], variants: Sequence[str]) -> DataFrame:
    """Weights of every preset and variant: whole model, one decoder block, what a token reads of a block."""
    rows = []
    for name in presets:
        dense = count_parameters(preset(name, "dense"))
        for variant in variants:
            config = preset(name, variant)
            block = sum(decoder_block_parts(config).values(), Part())
            total = count_parameters(config)
            rows.append(
                {
                    "preset": name,
                    "variant": variant,
                    "d_ff": config.d_ff,
                    "weights (millions)": total / 1e6,
                    "of dense": total / dense,
                    "decoder block (millions)": block.weights / 1e6,
                    "read a token (millions)": block.reads / 1e6,
                }
            )
    return DataFrame(rows)


def reference_layout() -> ModelConfig:
    """The 800M model as the reference code lays it out: dense encoder and cross-attention, rank d_ff/N."""
    return preset(
        "paper_800m",
        "ff_qkv",
        encoder_attention="dense",
        cross_attention="dense",
        d_lowrank=96,
        value_kernel_size=1,
        hidden_bias=False,
        controller_bias=True,
    )


def square_config(root: int, variant: str) -> ModelConfig:
    """A model of d_model = root^2 with S = heads = sqrt(d), d_ff = 4 d, N = 2 sqrt(d), rank d/N: the d^1.5 recipe."""
    d = root * root
    base = preset("paper_800m", variant)
    sizes = dict(d_model=d, d_ff=4 * d, n_heads=root, n_modules=root, ff_sparsity=2 * root, d_lowrank=root // 2)
    return replace(base, **sizes)  # type: ignore[arg-type]


def scaling_of_reads(roots: Sequence[int]) -> DataFrame:
    """Weights of a decoder block that a token reads, built and by the paper's formulas, against d_model."""
    rows = []
    for root in roots:
        d = root * root
        dense, sparse = (
            {name: part.reads for name, part in decoder_block_parts(square_config(root, v)).items()}
            for v in ("dense", "ff_qkv")
        )
        rows.append(
            {
                "d_model": d,
                "dense": sum(dense.values()),
                "dense, formula": 4 * d**2 + 2 * d**2 + 2 * d * 4 * d,
                "sparse": sum(sparse.values()),
                "sparse QKV": sparse["self_attention"],
                "sparse cross": sparse["cross_attention"],
                "controller": sparse["controller"],
                "sparse FF": sparse["feedforward"],
                "sparse, formula": 16 * round(d**1.5),
            }
        )
    return DataFrame(rows)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of log y against log x by least squares."""
    return float(np.polyfit(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)), 1)[0])


def draw_scaling(frame: DataFrame) -> Figure:
    """Weights read a token against d_model, both axes logarithmic, with the fitted exponents in the legend."""
    figure, axis = new_figure()
    d = frame["d_model"]
    for column, name in (("dense", "dense"), ("sparse", "ff_qkv")):
        style = look(name)
        slope = exponent(cast(Sequence[float], d), cast(Sequence[float], frame[column]))
        axis.plot(d, frame[column], color=style.color, marker=style.marker, label=f"{style.label}: d^{slope:.2f}")
        formula = frame[f"{column}, formula"]
        axis.plot(d, formula, color=style.color, linestyle=":", label=f"{style.label}, paper's formula")
    axis.set(xscale="log", yscale="log", xlabel="d_model", ylabel="weights of a block read per token")
    axis.legend()
    return figure
