"""Feedforward layers: dense, and sparse with one active unit in every N (paper, section 3.1).

Letters: f = d_ff hidden units; N = ff_sparsity, units of a block; X = f/N blocks, unit n of block x is hidden unit
x N + n; r = d_lowrank, rank of the controller. Matrices are neuron-major: a row is a hidden unit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn, relu_

from ..checks import (
    check_sequence,
    check_token_vector,
    require_multiple,
    require_size,
)
from .base import Stateless
from .gated import Gated
from .selector import EXACT, Selector


class FeedForward(Stateless):
    """FFN(x) = max(0, x W1 + b1) W2 + b2, (B, L, d_model) -> the same.

    ``w1`` and ``w2`` (f, d_model), ``b1`` (f) or None, ``b2`` (d_model). Subclasses say which hidden units are active.
    """

    def __init__(self, d_model: int, d_ff: int, hidden_bias: bool = True):
        super().__init__()
        require_size("d_model", d_model)
        require_size("d_ff", d_ff)
        self.d_model, self.d_ff = d_model, d_ff
        self.w1 = nn.Parameter(nn.init.xavier_uniform_(torch.empty(d_ff, d_model)))
        self.w2 = nn.Parameter(nn.init.xavier_uniform_(torch.empty(d_ff, d_model)))
        self.b1 = nn.Parameter(torch.zeros(d_ff)) if hidden_bias else None
        self.b2 = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Tensor) -> Tensor:
        check_sequence(x, self.d_model)
        return self.output(self.hidden(x.flatten(0, 1))).view(x.shape)  # (n = B L, d_model) inside

    def output(self, hidden: Tensor) -> Tensor:  # (n, f) -> (n, d_model)
        return torch.addmm(self.b2, hidden, self.w2)

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden units' values: (n, d_model) -> (n, f)."""
        # Two axes, because autograd copies all of a view that a ReLU writes over, twice.
        return relu_(self.preactivation(x))

    def preactivation(self, x: Tensor) -> Tensor:  # (n, d_model) -> (n, f)
        return nn.functional.linear(x, self.w1, self.b1)

    def step_units(self, x_t: Tensor, units: Tensor, scale: Tensor | None = None) -> Tensor:
        """b2 + sum over the units given of relu(scale (x w1 + b1)) w2, reading only their rows.

        x_t (B, d_model), units (B, U) hidden-unit numbers, scale (B, 1) -> (B, d_model).
        """
        a = (self.w1[units] @ x_t[:, :, None])[:, :, 0]  # (B, U, d_model) @ (B, d_model, 1)
        a = a if self.b1 is None else a + self.b1[units]
        a = a if scale is None else a * scale
        return (relu_(a)[:, None] @ self.w2[units])[:, 0] + self.b2


class SparseFeedForward(FeedForward):
    """FFN(x) = Y W2 + b2, Y = max(0, x W1 + b1) * Controller(x), Controller(x) = onehot(argmax of blocks of x C1 C2).

    One hidden unit in every block of N is active, so that ``step`` reads f/N rows of each matrix. ``c1`` (d_model, r),
    ``c2`` (r, f), ``bc`` (f) or None. ``controller="reference"`` also puts the mask inside the ReLU, which is the same
    value, but keeps the controller's gradient to the units that were selected. Source: section 3.1.
    Errors: ValueError if d_ff is no multiple of N.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        ff_sparsity: int,
        d_lowrank: int,
        *,
        temperature: float = 0.1,
        hard_share: float = 0.3,
        controller: str = "paper",
        hidden_bias: bool = True,
        controller_bias: bool = False,
    ):
        super().__init__(d_model, d_ff, hidden_bias)
        require_size("ff_sparsity", ff_sparsity)
        require_size("d_lowrank", d_lowrank)
        require_multiple("d_ff", d_ff, ff_sparsity, "ff_sparsity")
        self.ff_sparsity, self.d_lowrank = ff_sparsity, d_lowrank
        self.c1 = nn.Parameter(nn.init.xavier_uniform_(torch.empty(d_model, d_lowrank)))
        self.c2 = nn.Parameter(nn.init.xavier_uniform_(torch.empty(d_lowrank, d_ff)))
        self.bc = nn.Parameter(torch.zeros(d_ff)) if controller_bias else None
        self.select = Selector(temperature, hard_share, controller)

    def logits(self, x: Tensor) -> Tensor:
        """The controller's logits x C1 C2 in blocks: (..., d_model) -> (..., X, N)."""
        z = x @ self.c1 @ self.c2
        return (z if self.bc is None else z + self.bc).unflatten(-1, (-1, self.ff_sparsity))

    def units(self, x: Tensor) -> Tensor:
        """The hidden units that inference activates: (..., d_model) -> (..., X), one of every block."""
        first = torch.arange(0, self.d_ff, self.ff_sparsity, device=x.device)
        return first + self.logits(x).argmax(-1)

    def forward(self, x: Tensor, uniform: Tensor | None = None) -> Tensor:
        """(B, L, d_model) -> the same. ``uniform`` (B, L, X, N): see :class:`Selector`."""
        check_sequence(x, self.d_model)
        tokens, uniform = x.flatten(0, 1), None if uniform is None else uniform.flatten(0, 1)
        on_cpu = x.device.type == "cpu" and x.dtype in EXACT and not torch.is_autocast_enabled("cpu")
        return (self.fused if self.training and on_cpu else self.plain)(tokens, uniform).view(x.shape)

    def plain(self, x: Tensor, uniform: Tensor | None = None) -> Tensor:
        """The layer as its equation reads, on every device, in training and outside: (n, d_model) -> the same."""
        mask = self.select(self.logits(x), uniform).flatten(1)  # (n, f)
        a = self.preactivation(x)
        return self.output(relu_(a) * mask if self.select.reading == "paper" else relu_(a * mask))

    def fused(self, x: Tensor, uniform: Tensor | None = None) -> Tensor:
        """The same in training, with kernels and a backward pass of its own for CPUs."""
        return Gated.apply(self, uniform, x, self.w1, self.b1, self.w2, self.b2, self.c1, self.c2, self.bc)

    def step(self, x_t: Tensor, state: None = None) -> tuple[Tensor, None]:
        check_token_vector(x_t, self.d_model)
        return self.step_units(x_t, self.units(x_t)), None
