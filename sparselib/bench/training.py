"""What a training step costs on this machine: ``python -m sparselib.bench.training``.

Whole steps of the laptop models of figure 1 and of the batches that they are fed, one model after the other, at equal
weights; then the sparse feedforward alone over the dense one at equal d_ff, forward and backward, at the laptop
preset's width and at twice it, in both readings of the controller. On one thread and on all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import product

import torch
from torch import Tensor, nn

from ..config import CONTROLLERS, ModelConfig, count_parameters, preset, with_equal_weights
from ..layers import FeedForward, SparseFeedForward
from ..models import make_model
from ..tasks import load_splits
from ..training.config import DataConfig, OptimizerConfig
from ..training.trainer import Trainer
from .machine import load, machine

BATCH = 32
DATA = DataConfig(corpus="lm_laptop", vocab_size=4096, length=128)


def models() -> dict[str, ModelConfig]:
    """The models of figure 1 and the sparse feedforward by the paper's text, as many weights as dense."""
    dense = preset("laptop")
    sparse = {variant: preset("laptop", variant) for variant in ("ff", "qkv", "ff_qkv")}
    sparse["ff, paper's text"] = preset("laptop", "ff", controller="paper")
    equal = {name: with_equal_weights(config, count_parameters(dense)) for name, config in sparse.items()}
    return {"dense": dense} | equal


def whole_steps(configs: Mapping[str, ModelConfig], repeat: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of ``repeat`` updates of each model, and of making their batches, as "data"; in turns."""
    batches = load_splits(DATA).train.batches(BATCH, seed=0)
    optimizer = OptimizerConfig(learning_rate=1e-4, warmup=0)
    trainers = {name: Trainer(make_model(config), optimizer, warmup + repeat) for name, config in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ("data", *configs)}
    for step in range(1, warmup + repeat + 1):
        batch, took = _timed(lambda: next(batches))
        seconds["data"].append(took)
        for name, trainer in trainers.items():
            seconds[name].append(_timed(lambda t=trainer, b=batch, s=step: t.update(b, s))[1])  # type: ignore[misc]
    return {name: times[warmup:] for name, times in seconds.items()}


def matrix_rate(size: int = 1024, repeat: int = 20) -> float:
    """Multiply-adds a second, times 2, of the fastest of ``repeat`` products of two square fp32 matrices."""
    a, b = torch.randn(2, size, size)
    return 2 * size**3 / min(_timed(lambda: a @ b)[1] for _ in range(repeat))


def step_ratio(d_model: int, d_ff: int, reading: str, tokens: int = 2048, repeat: int = 50, warmup: int = 5) -> float:
    """Time of the sparse layer's training step over the dense one's: the median over ``repeat`` pairs of steps."""
    config = preset("laptop", "ff")
    x = torch.randn(1, tokens, d_model, requires_grad=True)
    cotangent = torch.randn(1, tokens, d_model)
    sparse = SparseFeedForward(d_model, d_ff, config.ff_sparsity, config.d_lowrank, controller=reading)
    layers = FeedForward(d_model, d_ff), sparse
    pairs = [[_layer_step(layer, x, cotangent) for layer in layers] for _ in range(warmup + repeat)]
    return statistics.median(slow / fast for fast, slow in pairs[warmup:])


def _layer_step(layer: nn.Module, x: Tensor, cotangent: Tensor) -> float:
    layer.zero_grad()
    x.grad = None
    return _timed(lambda: layer(x).backward(cotangent))[1]


def _timed(run: Callable[[], object]) -> tuple[object, float]:
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def tell_whole_steps(repeat: int = 10) -> None:
    """A line for each model: its step, times dense's, the rate by 6 x weights x tokens over that of matrices."""
    configs = models()
    seconds, rate = whole_steps(configs, repeat), matrix_rate()
    dense = seconds["dense"]
    for name, config in configs.items():
        median = statistics.median(seconds[name])
        ratio = statistics.median(own / other for own, other in zip(seconds[name], dense, strict=True))
        flops = 6 * count_parameters(config) * BATCH * DATA.length / median
        share = f"{flops / 1e9:.0f} of {rate / 1e9:.0f} GFLOPS ({flops / rate:.0%})"
        print(f"  {name}: {1e3 * median:.0f} ms a step, {ratio:.2f} times dense, {share}", flush=True)
    data = statistics.median(seconds["data"])
    print(f"  data: {1e3 * data:.2f} ms a batch, {data / statistics.median(dense):.1%} of dense's step", flush=True)


def main() -> None:
    here, config = machine(), preset("laptop", "ff")
    print(f"{here['cpu']}, load {load():.1f}")
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        print(f"threads {threads}: whole training steps, {BATCH} x {DATA.length} tokens")
        tell_whole_steps()
        print(f"threads {threads}: sparse feedforward (N = {config.ff_sparsity}) over dense, one layer's step")
        for scale, reading in product((1, 2), CONTROLLERS):
            d, f = scale * config.d_model, scale * config.d_ff
            print(f"  d_model {d}, d_ff {f}, {reading}: {step_ratio(d, f, reading):.2f}", flush=True)


if __name__ == "__main__":
    main()
