"""Where a token stands: sinusoidal positions (Vaswani et al., section 3.5), and two ways of training with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checks import require, require_size


def sinusoids(max_len: int, d_model: int) -> Tensor:
    """P[t, 2i] = sin(t / 10000^(2i/d_model)), P[t, 2i+1] = cos of the same: (max_len, d_model)."""
    rate = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    angle = torch.arange(max_len, dtype=torch.float64)[:, None] * rate  # (max_len, ceil(d_model / 2))
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)[:, :d_model].float()


class SinusoidalPositions(nn.Module):
    """x[t] + P[offset + t], nothing trained; ``offset`` is one int, or one a row, (B, 1), as :meth:`starts` gives them.

    Errors: ValueError beyond ``max_len``.
    """

    def __init__(self, max_len: int, d_model: int):
        super().__init__()
        require_size("max_len", max_len)
        require_size("d_model", d_model)
        self._hold(sinusoids(max_len, d_model))

    table: Tensor

    def _hold(self, table: Tensor) -> None:
        self.register_buffer("table", table)

    def starts(self, batch: int, length: int) -> int | Tensor:
        """Where whole sequences of up to ``length`` positions begin in the table."""
        return 0

    def forward(self, x: Tensor, offset: int | Tensor = 0) -> Tensor:  # (B, L, d_model) -> the same
        if isinstance(offset, Tensor):
            return x + self.table[offset + torch.arange(x.shape[1], device=x.device)]
        end = offset + x.shape[1]
        require(end <= len(self.table), "position", end - 1, f"below max_len = {len(self.table)}")
        return x + self.table[offset:end]


class LearnedPositions(SinusoidalPositions):
    """x[t] + P[offset + t] with a trained table that starts as the sinusoids (the paper's C4 runs)."""

    def _hold(self, table: Tensor) -> None:
        self.table = nn.Parameter(table)


class ShiftedPositions(SinusoidalPositions):
    """Sinusoidal positions which, while training, start at a random place in every row: that of its source and target.

    So the model meets all ``max_len`` places in training, however short the sequences, and only distances tell it
    anything. The reference code trains its models for copying and adding with random starts, of positions written as
    digits in several bases; here the table is the sinusoids. Outside training everything starts at 0.
    """

    def starts(self, batch: int, length: int) -> int | Tensor:
        room = len(self.table) - length
        if not self.training or room < 0:
            return 0
        return torch.randint(room + 1, (batch, 1), device=self.table.device)
