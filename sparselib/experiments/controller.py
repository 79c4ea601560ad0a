"""Notebook 12: what the controllers of a sparse feedforward do while they learn.

Letters: X blocks of N units; z the controller's logits; g Gumbel noise.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ..layers.selector import Selector
from ..models import Transformer
from .sparse_layers import chosen_shares, controller_inputs, entropies, sparse_layers

# What is followed, and how a figure says it.
STATISTICS = {
    "decision": "entropy at one token / log2 N",
    "usage": "entropy of the units' use / log2 N",
    "dead": "units never chosen",
    "agreement": "noisy choice is inference's choice",
    "soft_mass": "soft mask's share on the hard choice",
}


@torch.no_grad()
def controller_statistics(model: nn.Module, windows: Tensor) -> dict[str, float]:
    """Numbers from 0 to 1 on every sparse feedforward layer, named ``decision.1``: a statistic and its block, from 1.

    ``windows`` (n, T + 1) are tokens of the model's vocabulary; their last token is not read. ``decision``: entropy of
    softmax(z) at a token over log2 N; ``usage``: entropy of how often each unit of a block is chosen, likewise;
    ``dead``: the share of units that no token chooses; ``agreement``: how often the choice with training's noise is the
    one that inference makes; ``soft_mass``: what the soft mask gives to the unit that the hard mask takes. Empty for a
    model without such layers. The model, its mode and torch's generator stay as they are.
    """
    transformer = cast(Transformer, model)
    layers = sparse_layers(transformer)
    if not layers:
        return {}
    tokens = windows[:, :-1].to(transformer.embedding.weight.device)
    values: dict[str, float] = {}
    for block, (layer, x) in enumerate(zip(layers, controller_inputs(transformer, tokens), strict=True), start=1):
        z = layer.logits(x).flatten(0, 1).float()  # (tokens, X, N)
        decision, usage = entropies(z)
        soft, hard = training_masks(layer.select, z)
        found: dict[str, Tensor | float] = {
            "decision": decision,
            "usage": usage,
            "dead": (chosen_shares(z) == 0).double().mean(),
            "agreement": (hard.argmax(-1) == z.argmax(-1)).double().mean(),
            "soft_mass": (soft * hard).sum(-1).mean(),
        }
        values |= {f"{name}.{block}": float(found[name]) for name in STATISTICS}
    return values


def training_masks(select: Selector, z: Tensor) -> tuple[Tensor, Tensor]:
    """The soft and the hard mask that training would take at logits ``z``, with the same noise, always the same."""
    soft, hard = (_mask(Selector(select.temperature, share, select.reading), z) for share in (0.0, 1.0))
    return soft, hard.round()  # straight-through leaves rounding errors on the ones


def _mask(select: Selector, z: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        return select(z)
