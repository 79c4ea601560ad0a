"""How much longer a training step takes with the sparse feedforward: ``python -m sparselib.bench.training``.

Forward and backward of one layer at the laptop preset's width and at twice it, dense and sparse in turn at equal d_ff,
in both readings of the controller, on one thread and on all; the median of the ratios of pairs of steps.
"""

from __future__ import annotations

import statistics
import time
from itertools import product

import torch
from torch import Tensor, nn

from ..config import CONTROLLERS, preset
from ..layers import FeedForward, SparseFeedForward
from .machine import load, machine


def step_ratio(d_model: int, d_ff: int, reading: str, tokens: int = 2048, repeat: int = 50, warmup: int = 5) -> float:
    """Time of the sparse layer's training step over the dense one's: the median over ``repeat`` pairs of steps."""
    config = preset("laptop", "ff")
    x = torch.randn(1, tokens, d_model, requires_grad=True)
    cotangent = torch.randn(1, tokens, d_model)
    sparse = SparseFeedForward(d_model, d_ff, config.ff_sparsity, config.d_lowrank, controller=reading)
    layers = FeedForward(d_model, d_ff), sparse
    pairs = [[_seconds(layer, x, cotangent) for layer in layers] for _ in range(warmup + repeat)]
    return statistics.median(slow / fast for fast, slow in pairs[warmup:])


def _seconds(layer: nn.Module, x: Tensor, cotangent: Tensor) -> float:
    layer.zero_grad()
    x.grad = None
    start = time.perf_counter()
    layer(x).backward(cotangent)
    return time.perf_counter() - start


def main() -> None:
    here, config = machine(), preset("laptop", "ff")
    print(f"{here['cpu']}, load {load():.1f}; training step, sparse (N = {config.ff_sparsity}) over dense")
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for scale, reading in product((1, 2), CONTROLLERS):
            d, f = scale * config.d_model, scale * config.d_ff
            print(f"threads {threads}, d_model {d}, d_ff {f}, {reading}: {step_ratio(d, f, reading):.2f}", flush=True)


if __name__ == "__main__":
    main()
