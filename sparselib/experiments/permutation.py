"""Notebook 01: the multiplicative layer can be any permutation (theorem 1), checked bit by bit and learned.

Letters: d = d_model; S = n_modules; M = d/S; D (d, S) and E (d, M) the layer's weights; k = rank of the dense rival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pandas import DataFrame
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..layers import Dense, MultiplicativeDense
from ..results.figures import look, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def permuting_layer(target: Tensor, n_modules: int, dtype: torch.dtype = torch.float32) -> MultiplicativeDense:
    """A layer that is the permutation x_i -> y[target[i]], with the weights of theorem 1's proof."""
    layer = MultiplicativeDense(len(target), len(target), n_modules, bias=False).to(dtype)
    D, E = layer.permutation_weights(target)
    with torch.no_grad():
        layer.D.copy_(D)
        layer.E.copy_(E)
    return layer


@torch.no_grad()
def is_exact(target: Tensor, n_modules: int, dtype: torch.dtype, generator: torch.Generator) -> bool:
    """Whether forward and step give back 64 random vectors bit for bit, each number where ``target`` says."""
    layer = permuting_layer(target, n_modules, dtype)
    x = torch.randn(64, len(target), dtype=dtype, generator=generator)
    expected = torch.empty_like(x)
    expected[:, target] = x
    outputs = layer(x[None])[0], layer.step(x)[0]
    return all(torch.equal(y.view(_BITS[dtype]), expected.view(_BITS[dtype])) for y in outputs)


def check_construction(sizes: Sequence[tuple[int, int]], bijections: int, seed: int = 0) -> DataFrame:
    """For each (d_model, S): how many of so many random bijections the constructed layer gives back exactly."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for d, s in sizes:
        targets = [torch.randperm(d, generator=generator) for _ in range(bijections)]
        exact = {t: sum(is_exact(f, s, t, generator) for f in targets) for t in _BITS}
        rows.append(
            {
                "d_model": d,
                "S": s,
                "bijections": bijections,
                "exact in float32": exact[torch.float32],
                "exact in float64": exact[torch.float64],
                "weights": d * d // s + d * s,
                "dense weights": d * d,
            }
        )
    return DataFrame(rows)


def cost_by_modules(d_model: int, modules: Sequence[int]) -> DataFrame:
    """Weights, bytes and multiply-adds of one token through layers of several S, counted on the built layers."""
    rows = [_cost("dense", Dense(d_model, d_model))]
    rows += [_cost(f"multiplicative, S = {s}", MultiplicativeDense(d_model, d_model, s)) for s in modules]
    for row in rows:
        row["of dense"] = row["weights"] / rows[0]["weights"]
    return DataFrame(rows)


def _cost(name: str, layer: Dense | MultiplicativeDense) -> dict[str, Any]:
    d_in = layer.weight.shape[1] if isinstance(layer, Dense) else layer.d_in
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer.step(torch.zeros(1, d_in))
    weights = sum(p.numel() for p in layer.parameters())
    return {
        "layer": name,
        "weights": weights,
        "MB in float32": 4 * weights / 1e6,
        "multiply-adds": counter.get_total_flops() // 2,
    }


# --- learning one -----------------------------------------------------------------------------------------------------


class LowRank(nn.Module):
    """The dense layer x A B of rank k: k (d + d) weights, glorot-uniform."""

    def __init__(self, d_model: int, rank: int):
        super().__init__()
        self.A = nn.Parameter(nn.init.xavier_uniform_(torch.empty(d_model, rank)))
        self.B = nn.Parameter(nn.init.xavier_uniform_(torch.empty(rank, d_model)))

    def folded(self) -> Tensor:
        return self.A @ self.B


def equal_rank(d_model: int, n_modules: int) -> int:
    """The rank at which a factored dense layer has the multiplicative layer's weights: 2 d k = d^2/S + d S."""
    return (d_model // n_modules + n_modules) // 2


@dataclass(frozen=True)
class Learned:
    """How a layer learned permutations: losses (seeds, steps), its weights, what it ended as."""

    name: str
    weights: int
    losses: Tensor
    floor: float  # the least error a layer of this form can have
    layer: nn.Module  # of the last seed
    target: Tensor  # of the last seed


def learn_permutation(
    d_model: int, n_modules: int, steps: int, seeds: int, learning_rate: float = 0.02
) -> list[Learned]:
    """Train the multiplicative layer and its dense rival of equal weights to be random permutations.

    The error is the mean square of y - P x over x ~ N(0, 1), in closed form |W - P|^2 / d with W the layer's matrix, so
    that no sampling noise is in the curves. 1 is the error of a layer that says 0. Adam.
    """
    rank = equal_rank(d_model, n_modules)
    makers = {
        "multiplicative": (lambda: MultiplicativeDense(d_model, d_model, n_modules, bias=False), 0.0),
        "dense": (lambda: LowRank(d_model, rank), 1 - rank / d_model),  # P has d singular values of 1; k can be kept
    }
    found = []
    for name, (make, floor) in makers.items():
        losses = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            layer, target = make(), torch.randperm(d_model)
            losses.append(_learn(layer, torch.eye(d_model)[:, target.argsort()], steps, learning_rate))
        weights = sum(p.numel() for p in layer.parameters())
        found.append(Learned(name, weights, torch.tensor(losses), floor, layer, target))
    return found


def _learn(layer: nn.Module, matrix: Tensor, steps: int, learning_rate: float) -> list[float]:
    optimizer = torch.optim.Adam(layer.parameters(), lr=learning_rate)
    losses = []
    for _ in range(steps):
        loss = (layer.folded() - matrix).square().sum() / len(matrix)  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw_weights(layer: MultiplicativeDense, title: str) -> Figure:
    """D, E and the matrix they fold to, as pictures: a row is an input."""
    figure, axes = new_figure(
        1, 3, width=8.4, height=4.2, width_ratios=[layer.n_modules, layer.d_module, layer.d_out / 2]
    )
    with torch.no_grad():
        pictures = {"D": layer.D, "E": layer.E, "folded": layer.folded()}
        limit = max(float(p.abs().max()) for p in pictures.values())
    labels = {"D": "module s", "E": "place m in the module", "folded": "output s M + m"}
    for axis, (name, picture) in zip(axes, pictures.items(), strict=True):
        image = axis.imshow(
            picture.detach().numpy(), aspect="auto", cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="none"
        )
        axis.set(title=name, xlabel=labels[name], ylabel="input i" if name == "D" else "")
        axis.grid(False)
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    figure.suptitle(title)
    return figure


def draw_learning(found: Sequence[Learned]) -> Figure:
    """Error against step: median over seeds, and the range between the seeds."""
    figure, axis = new_figure()
    looks = {"multiplicative": look("mult"), "dense": look("dense")}
    for learned in found:
        style = looks[learned.name]
        steps = range(1, learned.losses.shape[1] + 1)
        label = f"{learned.name}, {learned.weights:,} weights"
        axis.plot(steps, learned.losses.median(0).values, color=style.color, label=label)
        low, high = learned.losses.min(0).values, learned.losses.max(0).values
        axis.fill_between(steps, low, high, color=style.color, alpha=0.2, linewidth=0)
        if learned.floor:
            axis.axhline(learned.floor, color=look("limit").color, linestyle="--", label="least error at that rank")
    axis.set(xlabel="step", ylabel="mean square error (output variance = 1)", yscale="log", ylim=(1e-7, 10))
    axis.legend(loc="lower left")
    return figure
