"""Convolution over positions and modules (paper, section 3.2).

Letters: S = n_modules; M, O = width of a module going in and out; F = kernel_size along length; k = over modules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..checks import check_batch, check_sequence, require, require_multiple, require_size
from .base import Layer


class ModuleConv(Layer):
    """y[t, s] = b + sum_{f, j} W[f, j]^T x[t - (F-1) + f, s + j - (k-1)/2], the same W for every module.

    Causal along length (tap f = F-1 is the current position), zero-padded over modules ("same"), not flipped. Weights:
    F k M O + O; with k = F and O = M the paper's F^2 M^2 + M. k = 1 looks at no neighbour (the reference's V kernel).
    ``weight`` (O, M, F, k), Glorot-uniform. The state is the last F-1 inputs, oldest first: (B, F-1, S, M).
    """

    def __init__(
        self,
        d_in: int,
        n_modules: int,
        kernel_size: int = 3,
        module_kernel: int | None = None,
        d_out: int | None = None,
    ):
        super().__init__()
        d_out = d_in if d_out is None else d_out
        module_kernel = kernel_size if module_kernel is None else module_kernel
        sizes = {"d_in": d_in, "d_out": d_out, "n_modules": n_modules, "kernel_size": kernel_size}
        for field, size in {**sizes, "module_kernel": module_kernel}.items():
            require_size(field, size)
        require_multiple("d_in", d_in, n_modules, "n_modules")
        require_multiple("d_out", d_out, n_modules, "n_modules")
        require(module_kernel % 2 == 1, "module_kernel", module_kernel, "odd, as many neighbours on both sides")
        self.d_in, self.n_modules, self.kernel_size, self.module_kernel = (
            d_in,
            n_modules,
            kernel_size,
            module_kernel,
        )
        shape = (d_out // n_modules, d_in // n_modules, kernel_size, module_kernel)
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(shape)))
        self.bias = nn.Parameter(torch.zeros(d_out // n_modules))

    def forward(self, x: Tensor) -> Tensor:  # (B, L, S * M) -> (B, L, S * O)
        check_sequence(x, self.d_in)
        modules = self._split(x)
        return self._convolve(torch.cat([self.init_state(len(x)), modules], dim=1))

    def init_state(self, batch: int) -> Tensor:
        require_size("batch", batch, minimum=0)
        return self.weight.new_zeros(batch, self.kernel_size - 1, self.n_modules, self.weight.shape[1])

    def prefill(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        check_sequence(x, self.d_in)
        check_batch(x, len(state))
        window = torch.cat([state, self._split(x)], dim=1)  # (B, F-1 + L, S, M)
        return self._convolve(window), window[:, x.shape[1] :]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.n_modules, -1))

    def _convolve(self, window: Tensor) -> Tensor:  # (B, F-1 + L, S, M) -> (B, L, S * O)
        images = window.permute(0, 3, 1, 2)  # the modules' axis is a picture's width, M its channels
        y = nn.functional.conv2d(images, self.weight, self.bias, padding=(0, self.module_kernel // 2))
        return y.permute(0, 2, 3, 1).flatten(2)
