"""Layers whose activations are rebuilt on the way back instead of kept (section 4; Gomez et al. 2017).

Two streams x1, x2 go through halves F: x1 <- x1 + F(x2), then the streams change places. From the outputs
x1 = y1 - F(x2) comes back, so a stack of any depth keeps its two last activations. F is called again for that, and
must be the same function as before: with the same random draws and the same discrete choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..checks import require, require_choice, require_size
from .decisions import remembered, repeated

REMEMBER = ("everything", "choices", "draws", "nothing")
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Call:
    """What makes a call of a function repeatable: torch's generators before it, its choices, its mixed precision."""

    generators: tuple[Tensor, ...] | None
    choices: list[Tensor] | None
    autocast: dict[str, Any]

    @contextmanager
    def again(self, device: torch.device) -> Iterator[None]:
        """Inside, the function does what it did; generators are as before afterwards."""
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(**self.autocast))
            if self.generators is not None:
                stack.enter_context(torch.random.fork_rng(_gpus(device)))
                torch.set_rng_state(self.generators[0])
                for gpu, state in zip(_gpus(device), self.generators[1:], strict=True):
                    torch.cuda.set_rng_state(state, gpu)
            stack.enter_context(nullcontext() if self.choices is None else repeated(self.choices))
            yield


def call(f: Function, x: Tensor, remember: str = "choices") -> tuple[Tensor, Call]:
    """f(x), and how to call f again: with the same ``choices``, only the same random ``draws``, or ``nothing``."""
    kind = x.device.type
    autocast = dict(device_type=kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
    generators = (torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus(x.device)))
    with remembered() as choices:
        y = f(x)
    return y, Call(generators if remember != "nothing" else None, choices if remember == "choices" else None, autocast)


def _gpus(device: torch.device) -> list[int]:
    return [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _pull_back(f: Function, x: Tensor, made: Call, weights: Sequence[Tensor], grad: Tensor):
    """f called again: y = f(x), and what ``grad``, the gradient of y, is for x and for the weights (None: unused)."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        with made.again(x.device):
            y = f(x)
        of_x, *of_weights = torch.autograd.grad(y, (x, *weights), grad, allow_unused=True)
    return y.detach(), torch.zeros_like(x) if of_x is None else of_x, of_weights


class _Sums(dict[int, Tensor]):
    """Sums of the gradients of weights."""

    def add(self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                self[id(weight)] = self[id(weight)] + gradient if id(weight) in self else gradient

    def of(self, weights: Sequence[Tensor]) -> list[Tensor | None]:
        return [self.get(id(weight)) for weight in weights]


def _saved(ctx) -> tuple[Tensor, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        raise RuntimeError(
            "a weight or an input changed between the forward and the backward pass, so the activations cannot be "
            f"rebuilt: {error}"
        ) from None


def in_chunks(layer: nn.Module, x: Tensor, chunk: int) -> Tensor:
    """``layer``, which treats every position by itself, on ``chunk`` positions at a time: only its input is kept.

    x (B, L, d) -> layer(x). In the backward pass each chunk is worked through again, so that at no time the inner
    activations (the d_ff of a feedforward) of more than one chunk are held.
    """
    require_size("chunk", chunk)
    weights = _parameters(layer)
    if torch.is_grad_enabled() and (x.requires_grad or weights):
        return _Recomputed.apply(layer, chunk, x, *weights)
    return torch.cat([layer(part) for part in x.split(chunk, dim=1)], dim=1)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f: Function, chunk: int, x: Tensor, *weights: Tensor) -> Tensor:
        made = [call(f, part) for part in x.split(chunk, dim=1)]
        ctx.f, ctx.chunk, ctx.calls = f, chunk, [how for _, how in made]
        ctx.save_for_backward(x, *weights)
        return torch.cat([y for y, _ in made], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = _saved(ctx)
        sums, of_x = _Sums(), []
        for part, made, its_grad in zip(x.split(ctx.chunk, 1), ctx.calls, grad.split(ctx.chunk, 1), strict=True):
            _, grad_x, grads = _pull_back(ctx.f, part, made, weights, its_grad)
            of_x.append(grad_x)
            sums.add(weights, grads)
        return None, None, torch.cat(of_x, dim=1), *sums.of(weights)


class ReversibleStack(nn.Module):
    """Halves one after the other: x1 <- x1 + half(x2), then the two streams change places where ``swaps`` says so.

    (B, L, d) twice -> the same. ``remember``: what the second call of a half has from the first: its random draws and
    ``choices``, its ``draws`` alone (choices are made again from rebuilt inputs), or ``nothing``. The last two give
    other gradients, to show the harm. With ``everything`` there is no second call: all activations are kept, as in
    ordinary differentiation. Keywords of :meth:`forward` go to every half, and get no gradient.
    Errors: RuntimeError in the backward pass if a weight changed since the forward pass.
    """

    def __init__(
        self,
        halves: Sequence[nn.Module],
        swaps: Sequence[bool] | None = None,
        remember: str = "choices",
    ):
        super().__init__()
        require_choice("remember", remember, REMEMBER)
        self.halves = nn.ModuleList(halves)
        self.swaps = [True] * len(halves) if swaps is None else list(swaps)
        require(len(self.swaps) == len(halves), "swaps", len(self.swaps), f"one for each of {len(halves)} halves")
        self.remember = remember

    def forward(self, x1: Tensor, x2: Tensor, **context: Any) -> tuple[Tensor, Tensor]:
        same = x1.shape == x2.shape and x1.dtype == x2.dtype
        require(same, "x2", (tuple(x2.shape), x2.dtype), f"as x1, {tuple(x1.shape)} {x1.dtype}")
        weights = _parameters(self)
        rebuilds = self.remember != "everything" and torch.is_grad_enabled()
        if rebuilds and (x1.requires_grad or x2.requires_grad or weights):
            return cast(tuple[Tensor, Tensor], _Reversed.apply(self, context, x1, x2, *weights))
        for half, swap in zip(self.halves, self.swaps, strict=True):
            x1 = x1 + half(x2, **context)
            x1, x2 = (x2, x1) if swap else (x1, x2)
        return x1, x2


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stack: ReversibleStack, context: dict, x1: Tensor, x2: Tensor, *weights: Tensor):
        ctx.stack, ctx.context, ctx.calls = stack, context, []
        for half, swap in zip(stack.halves, stack.swaps, strict=True):
            delta, made = call(partial(half, **context), x2, stack.remember)
            x1, x2 = (x2, x1 + delta) if swap else (x1 + delta, x2)
            ctx.calls.append(made)
        ctx.save_for_backward(x1, x2, *weights)
        return x1, x2

    @staticmethod
    @once_differentiable
    def backward(ctx, grad1: Tensor, grad2: Tensor) -> tuple[Tensor | None, ...]:
        x1, x2, *weights = _saved(ctx)
        sums = _Sums()
        for half, swap, made in zip(*map(reversed, (ctx.stack.halves, ctx.stack.swaps, ctx.calls)), strict=True):
            if swap:
                x1, x2, grad1, grad2 = x2, x1, grad2, grad1
            own = _parameters(half)
            delta, grad_x, grads = _pull_back(partial(half, **ctx.context), x2, made, own, grad1)
            x1, grad2 = x1 - delta, grad2 + grad_x
            sums.add(own, grads)
        return None, None, grad1, grad2, *sums.of(weights)
