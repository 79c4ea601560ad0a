"""Optimizers and how their rate moves.

Adafactor is torch's. It follows Shazeer & Stern (2018), as the paper's C4 training does (factored second moments,
decay 1 - t^-0.8, no momentum, update clipped at RMS 1, step relative to the RMS of the weights), with two differences.
It guards against division by zero by a floor on the second moments, where they add 1e-30 to the squared gradients:
``EPSILON`` is small enough for both to agree, which torch's default of 1e-7 is not, as gradients of a mean loss are
smaller. And it never takes more than 1/sqrt(t), which 1/sqrt(max(t, 10000)) never does either.
"""

from __future__ import annotations

import math

from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer

from .config import OptimizerConfig

BETAS = (0.9, 0.98)
DECAY = -0.8
EPSILON = (1e-15, 1e-3)  # least RMS of a gradient (its square must be a float), least RMS of a matrix
LAST_RATE = 0.1  # the cosine ends at this share of the learning rate


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer of all trainable weights; matrices, not biases and scales, decay towards zero."""
    weights = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.name == "adafactor":
        return Adafactor(groups, lr=config.learning_rate, beta2_decay=DECAY, eps=EPSILON, d=1.0)
    return AdamW(groups, lr=config.learning_rate, betas=BETAS, fused=True)


def rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of update ``step``, counted from 1, of ``steps``."""
    if config.schedule == "cosine":
        return config.learning_rate * cosine(step, steps, config.warmup)
    return config.learning_rate * inverse_root(step, config.warmup)


def cosine(step: int, steps: int, warmup: int) -> float:
    """Share of the learning rate: up in a line to 1 at ``warmup``, then a cosine down to ``LAST_RATE`` at ``steps``."""
    if step <= warmup:
        return step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def inverse_root(step: int, warmup: int) -> float:
    """Share of the learning rate: 1 up to ``warmup``, then sqrt(warmup / step)."""
    return math.sqrt(max(1, warmup) / max(step, warmup, 1))
