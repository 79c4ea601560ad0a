"""The simple recurrent unit (Lei et al. 2018) of Terraformer, and the narrow branch that carries it (section 4).

Letters: U = sru_units, the width of the recurrence; r, f gates; y candidate; c cell, the only thing remembered.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..checks import check_batch, check_sequence, require_size
from .base import Chain, Dense, Layer
from .selector import EXACT


class LinearScan(torch.autograd.Function):
    """c_t = f_t c_{t-1} + u_t with c_{-1} = 0, for f and u (B, L, U).

    In log2 L steps over all positions; on a CPU, where that is log2 L times the work, in one pass by a compiled loop.
    """

    @staticmethod
    def forward(ctx, f: Tensor, u: Tensor) -> Tensor:
        c = scan(f, u)
        ctx.save_for_backward(f, c)
        return c

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The same recurrence from the end: g_t = grad_t + f_{t+1} g_{t+1}."""
        f, c = ctx.saved_tensors
        next_f = torch.cat([f[:, 1:], torch.zeros_like(f[:, :1])], dim=1)
        g = scan(next_f.flip(1), grad.flip(1)).flip(1)
        before = torch.cat([torch.zeros_like(c[:, :1]), c[:, :-1]], dim=1)
        return g * before, g


def scan(f: Tensor, u: Tensor) -> Tensor:
    """The recurrence of :class:`LinearScan`, without its gradient."""
    if f.device.type != "cpu" or f.dtype not in EXACT:
        return scan_in_steps(f, u)
    c = u.clone(memory_format=torch.contiguous_format)
    _scan_in_order(f.contiguous().numpy(), c.numpy())
    return c


@njit(nogil=True)
def _scan_in_order(f: np.ndarray, c: np.ndarray) -> None:
    """``c`` (B, L, U) comes as u."""
    for b in range(c.shape[0]):
        for t in range(1, c.shape[1]):
            for i in range(c.shape[2]):
                c[b, t, i] += f[b, t, i] * c[b, t - 1, i]


def scan_in_steps(f: Tensor, u: Tensor) -> Tensor:
    """After the step of width k, (f, c) at t stand for the last 2k positions up to t taken together."""
    f, c, k = f.clone(), u.clone(), 1
    while k < f.shape[1]:
        c[:, k:] += f[:, k:] * c[:, :-k]  # the product is made before c is written
        f[:, k:] *= f[:, :-k].clone()
        k *= 2
    return c


class SRU(Layer):
    """[r | f | y] = x W + b, r and f through a sigmoid; c_t = f_t c_{t-1} + (1 - f_t) y_t, h_t = r_t c_t +
    (1 - r_t) x_t sqrt(3): (B, L, U) -> the same, causal.

    ``gates`` holds W and b, 3 U^2 + 3 U weights. The state is c (B, U), 0 before the first position. In mixed
    precision all is computed in the type of the weights: a forget gate near 1, rounded, is wrong at every position.
    """

    def __init__(self, units: int):
        super().__init__()
        require_size("sru_units", units)
        self.units, self.gates = units, Dense(units, 3 * units)

    def forward(self, x: Tensor) -> Tensor:
        return self.prefill(x, self.init_state(len(x)))[0]

    def init_state(self, batch: int) -> Tensor:
        require_size("batch", batch, minimum=0)
        return self.gates.bias.new_zeros(batch, self.units)

    def prefill(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        check_sequence(x, self.units)
        check_batch(x, len(state))
        with torch.autocast(x.device.type, enabled=False):
            return self._advance(x.to(self.gates.weight.dtype), state)

    def _advance(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        r, f, y = self.gates(x).chunk(3, dim=2)
        r, f = r.sigmoid(), f.sigmoid()
        u = (1 - f) * y
        u = torch.cat([u[:, :1] + f[:, :1] * state[:, None], u[:, 1:]], dim=1)
        c = LinearScan.apply(f, u)
        return r * c + (1 - r) * x * math.sqrt(3), c[:, -1]


class RecurrentBranch(Chain):
    """x -> d_model to U, ``n_layers`` SRUs, U to d_model: what runs beside a feedforward to carry order and counts.

    Weights: 2 d_model U + d_model + U and those of the SRUs.
    """

    def __init__(self, d_model: int, units: int, n_layers: int = 1):
        require_size("sru_layers", n_layers)
        recurrent = [SRU(units) for _ in range(n_layers)]
        super().__init__(Dense(d_model, units), *recurrent, Dense(units, d_model))
