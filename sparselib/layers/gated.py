"""The sparse feedforward layer's training on a CPU: the same function as its equation, in few passes over memory.

By itself PyTorch takes new memory for each elementwise result, which costs more than the arithmetic. Here the (n, f)
tensors are written over as soon as they are read, and masks are never stored. Letters: n tokens, f = d_ff hidden units
in X blocks of N, p the soft mask, r the controller's rank; a row is hard where its one-hot mask goes forward, the ones
at the units ``best``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit
from torch import Tensor, relu_

if TYPE_CHECKING:
    from .feedforward import SparseFeedForward


class Gated(torch.autograd.Function):
    """Y W2 + b2 with Y = max(0, x W1 + b1) * mask, straight-through (see :class:`~.selector.Selector`)."""

    @staticmethod
    def forward(ctx, layer: SparseFeedForward, uniform: Tensor | None, x: Tensor, *weights: Tensor | None) -> Tensor:
        soft, best, hard = layer.select.decide_(layer.logits(x), uniform)
        active = relu_(layer.preactivation(x))  # (n, f)
        ctx.select = layer.select
        ctx.save_for_backward(x, soft, best, active, hard, *weights)
        return layer.output(_hidden(soft, best, active, hard))

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, soft, best, active, hard, w1, b1, w2, _, c1, c2, bc = ctx.saved_tensors
        grad, in_paper = grads[0], ctx.select.reading == "paper"  # (n, d_model)
        hidden = _hidden(soft, best, active, hard)
        grad_w2 = hidden.T @ grad
        grad_a, grad_mask = grad @ w2.T, hidden  # (n, f); to become what they are called
        grads_of_both = grad_a.numpy(), grad_mask.numpy()
        _backward(*grads_of_both, active.numpy(), soft.numpy(), best.numpy(), hard.numpy(), in_paper)
        blocks = grad_mask.view_as(soft)
        torch._softmax_backward_data(blocks, soft, -1, x.dtype, grad_input=blocks)
        grad_z = grad_mask.div_(ctx.select.temperature) if in_paper else grad_mask
        low, grad_low = x @ c1, grad_z @ c2.T  # (n, r)
        grad_x = torch.addmm(grad_low @ c1.T, grad_a, w1)
        grad_b1 = None if b1 is None else grad_a.sum(0)
        grad_bc = None if bc is None else grad_z.sum(0)
        first, second = (grad_a.T @ x, grad_b1), (grad_w2, grad.sum(0))
        return None, None, grad_x, *first, *second, x.T @ grad_low, low.T @ grad_z, grad_bc


def _hidden(soft: Tensor, best: Tensor, active: Tensor, hard: Tensor) -> Tensor:
    hidden = torch.empty_like(active)
    _gate(soft.numpy(), best.numpy(), active.numpy(), hard.numpy(), hidden.numpy())
    return hidden


@njit(nogil=True)
def _gate(soft: np.ndarray, best: np.ndarray, active: np.ndarray, hard: np.ndarray, hidden: np.ndarray) -> None:
    """hidden (n, f) = active * mask, the mask being p (n, X, N) or, in hard rows, one-hot at best (n, X)."""
    n, blocks, units = soft.shape
    for t in range(n):
        a, p, h = active[t], soft[t].ravel(), hidden[t]
        if not hard[t]:
            for i in range(a.size):
                h[i] = a[i] * p[i]
            continue
        h[:] = 0
        for x in range(blocks):
            i = x * units + best[t, x]
            h[i] = a[i]


@njit(nogil=True)
def _backward(
    grad: np.ndarray,
    grad_mask: np.ndarray,
    active: np.ndarray,
    soft: np.ndarray,
    best: np.ndarray,
    hard: np.ndarray,
    in_paper: bool,
) -> None:
    """From the hidden units' ``grad`` (n, f): the mask's, and in its place that of x W1 + b1.

    ``grad_mask`` comes as the hidden units. A hard row's mask has a gradient at all units in the paper's reading, else
    where it is one, inside the ReLU; there its other hidden units are the zeros it needs.
    """
    n, blocks, units = soft.shape
    for t in range(n):
        g, a, p, m = grad[t], active[t], soft[t].ravel(), grad_mask[t]
        if in_paper or not hard[t]:
            for i in range(a.size):
                m[i] = g[i] * a[i]
        if not hard[t]:
            for i in range(a.size):
                if a[i] > 0:  # not `g[i] = ... if ... else 0`, whose two types would meet in float64
                    g[i] *= p[i]
                else:
                    g[i] = 0
            continue
        for x in range(blocks):
            chosen = x * units + best[t, x]
            m[chosen] = g[chosen] * a[chosen]
            for i in range(x * units, (x + 1) * units):
                if i != chosen or a[i] <= 0:
                    g[i] = 0
