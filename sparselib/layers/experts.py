"""Mixtures of experts beside the sparse feedforward (the MoE row of section 3.1 and of table 2).

Letters: f = d_ff hidden units; E = n_experts; expert e owns units e f/E .. (e+1) f/E - 1; C (d_model, E) the router.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn, relu_

from ..checks import check_token_vector, require_multiple, require_size
from .feedforward import FeedForward
from .selector import Selector, one_hot_of_best


class _ExpertFeedForward(FeedForward):
    """y = relu(g_e (x W1_e + b1_e)) W2_e + b2 for the one expert e = argmax(x C); g_e is what subclasses differ in."""

    def __init__(self, d_model: int, d_ff: int, n_experts: int, hidden_bias: bool = True):
        super().__init__(d_model, d_ff, hidden_bias)
        require_size("n_experts", n_experts)
        require_multiple("d_ff", d_ff, n_experts, "n_experts")
        self.n_experts, self.d_expert = n_experts, d_ff // n_experts
        self.c = nn.Parameter(nn.init.xavier_uniform_(torch.empty(d_model, n_experts)))

    def hidden(self, x: Tensor) -> Tensor:
        gate = self.gate(x @ self.c).repeat_interleave(self.d_expert, dim=-1)  # (n, E) -> (n, f)
        return relu_(self.preactivation(x) * gate)

    def step(self, x_t: Tensor, state: None = None) -> tuple[Tensor, None]:
        check_token_vector(x_t, self.d_model)
        z = x_t @ self.c  # (B, E)
        expert = z.argmax(-1, keepdim=True)
        units = expert * self.d_expert + torch.arange(self.d_expert, device=x_t.device)  # (B, f / E)
        return self.step_units(x_t, units, self.scale(z).gather(-1, expert)), None

    def scale(self, z: Tensor) -> Tensor:
        """What each expert would be scaled by if it were the active one: (..., E)."""
        raise NotImplementedError

    def gate(self, z: Tensor) -> Tensor:
        """The scale of the active expert, 0 for the others: (..., E)."""
        return self.scale(z) * one_hot_of_best(z)


class BlockFeedForward(_ExpertFeedForward):
    """y = relu(x W1_e + b1_e) W2_e + b2, e = argmax(x C); trained as the sparse feedforward, experts for units.

    Errors: ValueError if d_ff is no multiple of E. Keywords: those of :class:`~sparselib.layers.selector.Selector`.
    """

    def __init__(self, d_model: int, d_ff: int, n_experts: int, hidden_bias: bool = True, **selector):
        super().__init__(d_model, d_ff, n_experts, hidden_bias)
        self.select = Selector(**selector)

    def scale(self, z: Tensor) -> Tensor:
        return torch.ones_like(z)

    def gate(self, z: Tensor) -> Tensor:
        return self.select(z[..., None, :]).squeeze(-2)  # the experts are one block


class SwitchFeedForward(_ExpertFeedForward):
    """y = relu(p_e (x W1_e + b1_e)) W2_e + b2, p = softmax(x C), e = argmax(p): the router learns through p_e.

    Source: Fedus et al., without their balancing loss. Errors: ValueError if d_ff is no multiple of E.
    """

    def scale(self, z: Tensor) -> Tensor:
        return z.softmax(-1)
