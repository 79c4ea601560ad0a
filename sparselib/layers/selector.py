"""How a controller's logits become the choice of one unit in every block, with and without Gumbel noise (section 3.1).

Letters: z logits; g noise; n tokens; X blocks of N units; tau = temperature; p soft mask, sums to 1 in a block.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn

from ..checks import require, require_choice
from ..config import CONTROLLERS
from .decisions import choose

_LEVELS = 1 << 16
EXACT = (torch.float32, torch.float64)  # the types numpy and numba know


@functools.cache
def _gumbel_quantiles(dtype: torch.dtype) -> np.ndarray:
    """The Gumbel distribution's quantile -log(-log u) at the midpoints u of 65,536 equal slices of (0, 1)."""
    u = (torch.arange(_LEVELS, dtype=torch.float64) + 0.5) / _LEVELS
    return (-(-u.log()).log()).to(dtype).numpy()


def new_seed() -> np.uint64:
    """One draw from torch's generator."""
    return np.uint64(torch.randint(1 << 62, ()))


def add_gumbel_(z: Tensor, scale: float = 1.0, seed: np.uint64 | None = None) -> Tensor:
    """``z`` becomes scale (z + g) with independent Gumbel noise g, which follows torch's seed, or on a CPU ``seed``.

    On a CPU by inverting the distribution at 16 random bits a number, so that g lies between -2.5 and 11.8: torch's
    uniform numbers come one after another on one core, and with two logarithms each they cost more than the layer's
    matrix products. Elsewhere, and in half precision, by the formula -log(-log u).
    """
    if z.device.type != "cpu" or z.dtype not in EXACT:
        uniform = torch.rand_like(z).clamp_(min=torch.finfo(z.dtype).tiny, max=1 - torch.finfo(z.dtype).eps)
        return z.add_(gumbel_of(uniform)).mul_(scale)
    seed = new_seed() if seed is None else seed
    _add_gumbel(seed, _gumbel_quantiles(z.dtype), z.numpy().dtype.type(scale), z.view(-1).numpy())
    return z


def gumbel_like(z: Tensor) -> Tensor:
    """Independent Gumbel noise in the shape of ``z``."""
    return add_gumbel_(torch.zeros_like(z, memory_format=torch.contiguous_format))


@njit(nogil=True)
def _add_gumbel(seed: np.uint64, quantiles: np.ndarray, scale: float, z: np.ndarray) -> None:
    """Every 64 bits of the generator SplitMix64 (Steele et al. 2014) pick four quantiles."""
    state = seed
    for first in range(0, z.size, 4):
        state += np.uint64(0x9E3779B97F4A7C15)
        bits = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        for i in range(first, min(first + 4, z.size)):
            z[i] = scale * (z[i] + quantiles[bits & np.uint64(0xFFFF)])
            bits >>= np.uint64(16)


def gumbel_of(uniform: Tensor) -> Tensor:
    """-log(-log u) of numbers u in (0, 1)."""
    return -(-uniform.log()).log()


def _best_of_rows(z: Tensor, rows: Tensor) -> Tensor:
    """Where the largest of the last axis of z (n, X, N) is, int64 (n, X), in the ``rows`` (n,) asked for; else 0."""
    best = torch.zeros(z.shape[:2], dtype=torch.long)
    _find_best(z.numpy(), rows.numpy(), best.numpy())
    return best


@njit(nogil=True)
def _find_best(z: np.ndarray, rows: np.ndarray, best: np.ndarray) -> None:
    for t in range(len(z)):
        for x in range(z.shape[1] if rows[t] else 0):
            for n in range(1, z.shape[2]):
                if z[t, x, n] > z[t, x, best[t, x]]:
                    best[t, x] = n


def one_hot_of_best(z: Tensor) -> Tensor:
    """1 at the largest of the last axis, else 0, in the type of ``z``."""
    best = choose(lambda: z.max(-1, keepdim=True).indices, z.shape[-1])
    return torch.zeros_like(z).scatter_(-1, best, 1)


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
        noise = gumbel_like(z) if uniform is None else gumbel_of(uniform)
        if self.reading == "paper":
            choice = (z + noise) / self.temperature
            soft = choice.softmax(-1)
        else:
            choice = z + self.temperature * noise
            soft = z.softmax(-1)
        hard = one_hot_of_best(choice.detach())
        rows = self.hard_rows(z.shape[:-2].numel(), z.device).view(*z.shape[:-2], 1, 1)
        return torch.where(rows, hard + (soft - soft.detach()), soft)  # straight-through: soft's gradient everywhere

    def decide_(self, z: Tensor, uniform: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What training's mask of logits z (n, X, N) on a CPU is made of, by the same draws as :meth:`forward`.

        The soft mask, in place of ``z``; the chosen unit of every block, int64 (n, X), of which only those of hard rows
        count; which rows are hard, bool (n,). Without a gradient.
        """
        seed = new_seed() if uniform is None else None

        def with_noise_(logits: Tensor, scale: float) -> Tensor:
            return add_gumbel_(logits, scale, seed) if uniform is None else logits.add_(gumbel_of(uniform)).mul_(scale)

        if self.reading == "paper":
            noisy = with_noise_(z, 1 / self.temperature)
        hard = self.hard_rows(len(z), z.device)
        if self.reading != "paper":  # the noise decides hard rows alone
            noisy = z.add(with_noise_(torch.zeros_like(z), self.temperature)) if hard.any() else z
        best = choose(lambda: _best_of_rows(noisy, hard), z.shape[-1])
        return torch.softmax(z, -1, out=z), best, hard

    def hard_rows(self, tokens: int, device: torch.device) -> Tensor:
        """Which of the tokens take the one-hot mask: bool (tokens,)."""
        draws = tokens if self.reading == "paper" else 1
        return (torch.rand(draws, device=device) < self.hard_share).expand(tokens)
