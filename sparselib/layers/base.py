"""What every layer offers, and the dense layer that most are made of.

Shapes: B batch, L positions of a sequence or chunk, d the width a layer takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checks import check_sequence, check_token_vector, require_size

Advance = Callable[["Layer", Tensor, Any], tuple[Tensor, Any]]


class Layer(nn.Module):
    """A layer with three faces that hold the same function.

    ``forward(x (B, L, d))`` works on whole sequences. ``prefill(x (B, L, d), state)`` works on the next L positions and
    ``step(x_t (B, d), state)`` on the next one; both return ``(y, new state)``. States are values: nothing is
    overwritten, so an old state can be used again, to rewind or to branch.
    """

    def init_state(self, batch: int) -> Any:
        """State before the first position of ``batch`` sequences."""
        raise NotImplementedError

    def prefill(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        raise NotImplementedError

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.prefill(x_t[:, None], state)
        return y[:, 0], state


class Stateless(Layer):
    """A layer that treats every position by itself, so that it has nothing to remember."""

    def init_state(self, batch: int) -> Any:
        require_size("batch", batch, minimum=0)
        return None

    def prefill(self, x: Tensor, state: None = None) -> tuple[Tensor, None]:
        return self(x), None


class Dense(Stateless):
    """y = x W + b. Weights: ``weight`` (d_out, d_in), ``bias`` (d_out). Glorot-uniform, bias 0."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(d_out, d_in)))
        self.bias = nn.Parameter(torch.zeros(d_out))

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d_in) -> (B, L, d_out)
        check_sequence(x, self.weight.shape[1])
        return nn.functional.linear(x, self.weight, self.bias)

    def step(self, x_t: Tensor, state: None = None) -> tuple[Tensor, None]:
        check_token_vector(x_t, self.weight.shape[1])
        return nn.functional.linear(x_t, self.weight, self.bias), None


def prefill_with(layer: Layer, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """``layer.prefill``, as a function to hand on."""
    return layer.prefill(x, state)


def step_with(layer: Layer, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """``layer.step`` on a chunk of one position (B, 1, d), so that layers made of layers have one body for both."""
    y, state = layer.step(x[:, 0], state)
    return y[:, None], state


def join_states(states: Sequence[Any]) -> Any:
    """The states of several sequences, each of batch 1, as the state of all of them together."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(list(states))
    if isinstance(first, tuple):
        return tuple(join_states(parts) for parts in zip(*states, strict=True))
    if isinstance(first, dict):
        return {name: join_states([state[name] for state in states]) for name in first}
    return first if first is None else first.join(states)


class Chain(Layer):
    """Layers applied one after another; its state is the tuple of theirs."""

    def __init__(self, *layers: Layer):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def init_state(self, batch: int) -> tuple:
        return tuple(layer.init_state(batch) for layer in self._chain())

    def prefill(self, x: Tensor, state: tuple) -> tuple[Tensor, tuple]:
        return self._advance(x, state, prefill_with)

    def step(self, x_t: Tensor, state: tuple) -> tuple[Tensor, tuple]:
        y, state = self._advance(x_t[:, None], state, step_with)
        return y[:, 0], state

    def _chain(self) -> Iterator[Layer]:
        return iter(cast("Iterable[Layer]", self.layers))

    def _advance(self, x: Tensor, state: tuple, how: Advance) -> tuple[Tensor, tuple]:
        states = []
        for layer, part in zip(self._chain(), state, strict=True):
            x, part = how(layer, x, part)
            states.append(part)
        return x, tuple(states)
