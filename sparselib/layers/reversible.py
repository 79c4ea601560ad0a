"""Layers whose activations are rebuilt on the way back instead of kept (section 4; Gomez et al. 2017).

Two streams x1, x2 go through halves F: x1 <- x1 + F(x2), then the streams change places. From the outputs
x1 = y1 - F(x2) comes back, so a stack of any depth keeps its two last activations. F is called again for that, and
must be the same function as before: with the same random draws and the same discrete choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..checks import require, require_choice, require_size
from .decisions import remembered, repeated

REMEMBER = ("everything", "choices", "draws", "nothing")
BETWEEN = "between the forward and the backward pass, so the activations cannot be rebuilt"


@dataclass(frozen=True)
class Call:
    """A call of a module, and what makes it repeatable: torch's generators before it, its choices, mixed precision."""

    module: nn.Module
    context: dict[str, Any]
    generators: tuple[Tensor, ...]  # none: not kept
    choices: list[Tensor] | None
    autocast: dict[str, Any]
    modes: list[bool]

    def again(self, x: Tensor) -> Tensor:
        """What the module did, if ``x`` is what it was; generators are as before afterwards."""
        if _modes(self.module) != self.modes:
            raise RuntimeError(f"train(), eval() or requires_grad_() was called {BETWEEN}")
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(**self.autocast))
            if self.generators:
                stack.enter_context(torch.random.fork_rng(_gpus(x.device)))
                torch.set_rng_state(self.generators[0])
                for gpu, state in zip(_gpus(x.device), self.generators[1:], strict=True):
                    torch.cuda.set_rng_state(state, gpu)
            stack.enter_context(nullcontext() if self.choices is None else repeated(self.choices))
            return self.module(x, **self.context)


def call(
    module: nn.Module,
    x: Tensor,
    context: dict[str, Any],
    remember: str = "choices",
    earlier: Call | None = None,
) -> tuple[Tensor, Call]:
    """module(x, **context), and how to call it again: with the same ``choices``, only the same random ``draws``, or
    ``nothing``. ``earlier``: the call before this one."""
    kind = x.device.type
    autocast = dict(device_type=kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
    generators = () if remember == "nothing" else _generators(x.device)
    if earlier is not None and all(map(torch.equal, generators, earlier.generators)):
        generators = earlier.generators  # nothing was drawn: 5 KB need not be kept twice
    with remembered() as choices:
        y = module(x, **context)
    kept = choices if remember == "choices" else None
    return y, Call(module, context, generators, kept, autocast, _modes(module))


def _generators(device: torch.device) -> tuple[Tensor, ...]:
    return torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in _gpus(device))


def _gpus(device: torch.device) -> list[int]:
    return [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []


def _modes(module: nn.Module) -> list[bool]:
    """Which parts of the module train, and which of its weights."""
    return [part.training for part in module.modules()] + [p.requires_grad for p in module.parameters()]


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _held(made: Call) -> list[Tensor]:
    """The tensors besides x that its result depends on."""
    given = [value for value in made.context.values() if isinstance(value, Tensor)]
    return [*made.module.parameters(), *made.module.buffers(), *given]


def _saved(ctx) -> tuple[Tensor, ...]:
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(f"a weight, a buffer or an input changed {BETWEEN}: {error}") from None


def _pull_back(made: Call, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
    """The call again: y, and what ``grad``, the gradient of y, is for x and for the weights (None: unused)."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = made.again(x)
        of_x, *of_weights = torch.autograd.grad(y, (x, *_parameters(made.module)), grad, allow_unused=True)
    return y.detach(), torch.zeros_like(x) if of_x is None else of_x, of_weights


def in_chunks(layer: nn.Module, x: Tensor, chunk: int) -> Tensor:
    """``layer``, which treats every position by itself, on ``chunk`` positions at a time: only its input is kept.

    x (B, L, d) -> layer(x). In the backward pass each chunk is worked through again, so that at no time the inner
    activations (the d_ff of a feedforward) of more than one chunk are held. Errors: as :class:`ReversibleStack`.
    """
    require_size("chunk", chunk)
    weights = _parameters(layer)
    if torch.is_grad_enabled() and (x.requires_grad or weights):
        return _Recomputed.apply(layer, chunk, x, *weights)
    return torch.cat([layer(part) for part in x.split(chunk, dim=1)], dim=1)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer: nn.Module, chunk: int, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.chunk, ctx.calls, ys = chunk, [], []
        for part in x.split(chunk, dim=1):
            y, made = call(layer, part, {}, earlier=ctx.calls[-1] if ctx.calls else None)
            ys.append(y)
            ctx.calls.append(made)
        ctx.save_for_backward(x, *_held(ctx.calls[0]))
        return torch.cat(ys, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *_ = _saved(ctx)
        of_x = []
        sums: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 3)
        for part, made, its_grad in zip(x.split(ctx.chunk, 1), ctx.calls, grad.split(ctx.chunk, 1), strict=True):
            _, grad_x, grads = _pull_back(made, part, its_grad)
            of_x.append(grad_x)
            sums = list(map(_plus, sums, grads))
        return None, None, torch.cat(of_x, dim=1), *sums


class ReversibleStack(nn.Module):
    """Halves one after the other: x1 <- x1 + half(x2), then the two streams change places where ``swaps`` says so.

    (B, L, d) twice -> the same. ``remember``: what the second call of a half has from the first: its random draws and
    ``choices``, its ``draws`` alone (choices are made again from rebuilt inputs), or ``nothing``. The last two give
    other gradients, to show the harm. With ``everything`` there is no second call: all activations are kept, as in
    ordinary differentiation. Keywords of :meth:`forward` go to every half, and get no gradient.
    Errors: RuntimeError in the backward pass if since the forward pass a weight (frozen ones too), a buffer, the result
    or a tensor among the keywords was written to, or a part was switched between training and evaluation.
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

    def forward(self, *streams: Tensor, **context: Any) -> tuple[Tensor, Tensor]:
        require(len(streams) == 2, "streams", len(streams), "2, x1 and x2")
        x1, x2 = streams
        same = x1.shape == x2.shape and x1.dtype == x2.dtype
        require(same, "x2", (tuple(x2.shape), x2.dtype), f"as x1, {tuple(x1.shape)} {x1.dtype}")
        if self.remember != "everything" and torch.is_grad_enabled():
            way = _Way(self, context)
            for index, half in enumerate(self.halves):
                x1, x2 = cast(tuple[Tensor, Tensor], _Half.apply(way, index, x1, x2, *_parameters(half)))
            return x1, x2
        for half, swap in zip(self.halves, self.swaps, strict=True):
            x1 = x1 + half(x2, **context)
            x1, x2 = (x2, x1) if swap else (x1, x2)
        return x1, x2


@dataclass
class _Way:
    """What the halves of a stack share on their way there and back."""

    stack: ReversibleStack
    context: dict[str, Any]
    call: Call | None = None  # the last one so far
    rebuilt: tuple[Tensor, ...] = ()  # both streams, where the way back has come to


class _Half(torch.autograd.Function):
    """One half. It is a node of the graph by itself, so that the gradients of its weights are handed over when it is
    done, and not those of the whole stack at its end."""

    @staticmethod
    def forward(ctx, way: _Way, index: int, x1: Tensor, x2: Tensor, *weights: Tensor):
        stack, ctx.way, ctx.index = way.stack, way, index
        delta, way.call = call(stack.halves[index], x2, way.context, stack.remember, way.call)
        ctx.call, ctx.swap, ctx.is_last = way.call, stack.swaps[index], index == len(stack.halves) - 1
        streams = (x2, x1 + delta) if ctx.swap else (x1 + delta, x2)
        ctx.save_for_backward(*_held(ctx.call), *(streams if ctx.is_last else ()))
        return streams

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, order = _saved(ctx), (1, 0) if ctx.swap else (0, 1)
        x1, x2 = ((saved[-2:] if ctx.is_last else ctx.way.rebuilt)[i] for i in order)
        grad1, grad2 = (grads[i] for i in order)
        delta, grad_x, of_weights = _pull_back(ctx.call, x2, grad1)
        ctx.way.rebuilt = (x1 - delta, x2) if ctx.index else ()  # to the half before
        return None, None, grad1, grad2 + grad_x, *of_weights
