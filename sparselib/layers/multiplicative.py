"""Multiplicative dense layer: can permute its inputs with d^2/S + d S weights (paper, section 3.2 and theorem 1).

Letters: d_in, d_out widths; S = n_modules; M = d_out/S = d_module; D (d_in, S) gates; E (d_in, M) projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..checks import check_sequence, check_token_vector, require, require_multiple, require_size
from .base import Stateless

Bijection = Tensor | Sequence | Callable[[int], tuple[int, int]]


class MultiplicativeDense(Stateless):
    """y[s, m] = sum_i x_i D[i, s] E[i, m] + b[s, m], the output flattened to s * M + m.

    Weights: d_in S + d_in d_out / S (+ d_out). Multiply-adds: d_in d_out whatever S is: S saves bytes, not arithmetic.
    ``forward`` folds both factors into one (d_in, d_out) matrix, so that its cost over many tokens is that of a dense
    layer; ``step`` keeps them apart and touches only their weights. Neither builds a (B, L, d_in, S) tensor.
    Initial values as in the reference code: D ~ N(0, 0.5^2), E Glorot-uniform, b = 0.
    """

    def __init__(self, d_in: int, d_out: int, n_modules: int, bias: bool = True):
        super().__init__()
        for field, size in (("d_in", d_in), ("d_out", d_out), ("n_modules", n_modules)):
            require_size(field, size)
        require_multiple("d_out", d_out, n_modules, "n_modules")
        self.d_in, self.d_out, self.n_modules, self.d_module = d_in, d_out, n_modules, d_out // n_modules
        self.D = nn.Parameter(0.5 * torch.randn(d_in, n_modules))
        self.E = nn.Parameter(nn.init.xavier_uniform_(torch.empty(d_in, self.d_module)))
        self.bias = nn.Parameter(torch.zeros(d_out)) if bias else None

    def folded(self) -> Tensor:
        """The dense matrix this layer is: W[i, s * M + m] = D[i, s] E[i, m], (d_in, d_out)."""
        return (self.D[:, :, None] * self.E[:, None, :]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d_in) -> (B, L, d_out)
        check_sequence(x, self.d_in)
        y = x @ self.folded()
        return y if self.bias is None else y + self.bias

    def step(self, x_t: Tensor, state: None = None) -> tuple[Tensor, None]:  # (B, d_in) -> (B, d_out)
        check_token_vector(x_t, self.d_in)
        gated = x_t[:, None] * self.D.T  # (B, S, d_in)
        y = (gated @ self.E).flatten(1)  # (B, S, M) -> (B, d_out)
        return (y if self.bias is None else y + self.bias), None

    def permutation_weights(self, f: Bijection) -> tuple[Tensor, Tensor]:
        """Weights (D, E) with which y[s(i), m(i)] = x_i exactly, for the bijection f: i -> (s(i), m(i)).

        ``f`` is a callable, the d_in pairs, or the d_in flat targets s * M + m. Source: theorem 1 and its proof in the
        appendix: D[i, s'] = 1 if s' = s(i) else 0, E[i, m'] = 1 if m' = m(i) else 0.
        Errors: ValueError if f is no bijection onto {0..S-1} x {0..M-1}.
        """
        require(self.d_in == self.d_out, "d_out", self.d_out, f"d_in = {self.d_in} to be a permutation")
        target = torch.as_tensor([f(i) for i in range(self.d_in)] if callable(f) else f)
        require(not target.is_floating_point(), "f", target.tolist(), "made of whole numbers")
        target = target.long()
        if target.ndim == 2 and target.shape[1] == 2:
            s, m = target.unbind(1)
            inside = bool(((s >= 0) & (s < self.n_modules) & (m >= 0) & (m < self.d_module)).all())
            require(inside, "f", target.tolist(), f"pairs in {self.n_modules} x {self.d_module}")
            target = s * self.d_module + m
        require(
            target.shape == (self.d_in,),
            "f",
            tuple(target.shape),
            f"d_in = {self.d_in} flat targets or pairs",
        )
        is_bijection = torch.equal(target.sort().values, torch.arange(self.d_in))
        require(is_bijection, "f", target.tolist(), "a bijection: every target once")
        one_hot = nn.functional.one_hot
        D = one_hot(target // self.d_module, self.n_modules).to(self.D)
        E = one_hot(target % self.d_module, self.d_module).to(self.E)
        return D, E
