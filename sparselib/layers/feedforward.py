"""Feedforward layers: dense, and sparse with one active unit in every N (paper, section 3.1).

Letters: f = d_ff hidden units; N = ff_sparsity, units of a block; X = f/N blocks, unit n of block x is hidden unit
x N + n; r = d_lowrank, rank of the controller; tau = temperature. Matrices are neuron-major: a row is a hidden unit.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn, relu_

from ..checks import (
    check_sequence,
    check_token_vector,
    require,
    require_choice,
    require_multiple,
    require_size,
)
from ..config import CONTROLLERS
from .base import Stateless

_LEVELS = 1 << 16
_CHUNK = 1 << 16  # numbers made at once: their working memory stays in the processor's cache


@functools.cache
def _gumbel_quantiles(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The Gumbel distribution's quantile -log(-log u) at the midpoints u of 65,536 equal slices of (0, 1)."""
    u = (torch.arange(_LEVELS, device=device, dtype=torch.float64) + 0.5) / _LEVELS
    return (-(-u.log()).log()).to(dtype)


def gumbel_like(z: Tensor) -> Tensor:
    """Independent Gumbel noise in the shape of ``z``, by inverting the distribution at 16 random bits per number.

    One 64-bit draw serves four numbers: torch's generator is serial on CPUs and two logarithms are slow, so the
    textbook formula cost more than the layer's matrix products. The noise lies between -2.5 and 11.8.
    """
    noise, table = torch.empty(z.shape, dtype=z.dtype, device=z.device), _gumbel_quantiles(z.device, z.dtype)
    for part in noise.view(-1).split(_CHUNK):
        draws = torch.empty((part.numel() + 3) // 4, dtype=torch.int64, device=z.device)
        levels = draws.random_(-(1 << 63), (1 << 63) - 1).view(torch.int16)[: part.numel()].int()
        torch.index_select(table, 0, levels.add_(_LEVELS // 2), out=part)
    return noise


def one_hot_of_best(z: Tensor) -> Tensor:
    """1 at the largest of the last axis, else 0, in the type of ``z``."""
    return torch.zeros_like(z).scatter_(-1, z.max(-1, keepdim=True).indices, 1)


class _Mask(torch.autograd.Function):
    """The training mask of :class:`Selector`, in as few passes over memory as torch allows.

    z and noise g (n, X, N), the latter written over; rows (n,) bool, those that go forward one-hot; -> (n, X, N).
    Straight-through: the gradient is the soft mask's everywhere.
    """

    @staticmethod
    def forward(ctx, z: Tensor, noise: Tensor, temperature: float, rows: Tensor, reading: str) -> Tensor:
        if reading == "paper":
            scores = choice = noise.add_(z).div_(temperature)
        else:
            scores, choice = z, noise.mul_(temperature).add_(z)
        soft = scores.softmax(-1)
        ctx.save_for_backward(soft)
        ctx.temperature = temperature if reading == "paper" else 1.0
        mask = soft.clone()
        mask[rows] = one_hot_of_best(choice[rows])
        return mask

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (soft,) = ctx.saved_tensors
        grad_z = torch._softmax_backward_data(grads[0], soft, -1, soft.dtype).div_(ctx.temperature)
        return grad_z, None, None, None, None


class Selector(nn.Module):
    """From a controller's logits z (..., X, N) to the mask that picks one unit in every block.

    Outside training: one-hot of the arg-max. In training, with g ~ Gumbel:
    - ``paper``: soft mask p = softmax((z + g) / tau); with probability ``hard_share``, drawn for every token, the
      one-hot of its arg-max goes forward and the gradient is p's (straight-through).
    - ``reference``: p = softmax(z) without noise or temperature; the arg-max is that of z + tau g; hard or soft is
      drawn once per call.
    Sources: Jang et al., Maddison et al. for the Gumbel-softmax; section 3.1 for 0.3 and 0.1.
    """

    def __init__(self, temperature: float = 0.1, hard_share: float = 0.3, reading: str = "paper"):
        super().__init__()
        require_choice("controller", reading, CONTROLLERS)
        lowest = "above 0" if reading == "paper" else "0 or more"
        require(temperature > 0 or (reading == "reference" and temperature == 0), "temperature", temperature, lowest)
        require(0 <= hard_share <= 1, "hard_share", hard_share, "in [0, 1]")
        self.temperature, self.hard_share, self.reading = temperature, hard_share, reading

    def forward(self, z: Tensor, uniform: Tensor | None = None) -> Tensor:
        """Mask in the shape of ``z``. ``uniform``: numbers in (0, 1) that make the noise instead of random ones."""
        if not self.training:
            return one_hot_of_best(z)
        shape = z.shape
        noise = gumbel_like(z) if uniform is None else -(-uniform.log()).log()
        z, noise = z.flatten(0, -3), noise.flatten(0, -3)  # (B * L, X, N)
        draws = len(z) if self.reading == "paper" else 1
        rows = (torch.rand(draws, device=z.device) < self.hard_share).expand(len(z))
        return _Mask.apply(z, noise, self.temperature, rows, self.reading).view(shape)


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
        return self.output(relu_(self.preactivation(x)))

    def preactivation(self, x: Tensor) -> Tensor:  # (B, L, d_model) -> (B, L, f)
        return nn.functional.linear(x, self.w1, self.b1)

    def output(self, hidden: Tensor) -> Tensor:  # (B, L, f) -> (B, L, d_model)
        return hidden @ self.w2 + self.b2

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
        mask = self.select(self.logits(x), uniform).flatten(-2)  # (B, L, f)
        a = self.preactivation(x)
        hidden = relu_(a) * mask if self.select.reading == "paper" else relu_(a * mask)
        return self.output(hidden)

    def step(self, x_t: Tensor, state: None = None) -> tuple[Tensor, None]:
        check_token_vector(x_t, self.d_model)
        return self.step_units(x_t, self.units(x_t)), None
