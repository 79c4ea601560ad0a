"""Discrete choices that are made once and taken again.

A reversible stack rebuilds a layer's input from its output, with rounding errors. A choice (a unit of a block, a
bucket) that is made again from the rebuilt input may fall otherwise and then gives the gradient of another function. So
what a layer chooses in the forward pass is remembered, in order, and taken again on the way back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Make = Callable[[], Tensor]
Choose = Callable[[Make, int], Tensor]


class _Scope(threading.local):  # autograd may work backward in a thread of its own
    choose: Choose | None = None


_scope = _Scope()


def choose(make: Make, options: int) -> Tensor:
    """The integers in 0 .. ``options`` - 1 that ``make`` gives; inside :func:`repeated`, those remembered."""
    return make() if _scope.choose is None else _scope.choose(make, options)


def _smallest(options: int) -> torch.dtype:
    """The type that keeps a choice in the fewest bytes: of all that is remembered, these alone grow with depth."""
    return torch.uint8 if options <= 2**8 else torch.int16 if options <= 2**15 else torch.int32


@contextmanager
def remembered() -> Iterator[list[Tensor]]:
    """Collects what is chosen inside, in order; inside :func:`repeated`, what is repeated."""
    choices: list[Tensor] = []
    outer = _scope.choose

    def remember(make: Make, options: int) -> Tensor:
        made = make() if outer is None else outer(make, options)
        choices.append(made.to(_smallest(options)))
        return made

    with _choosing(remember):
        yield choices


@contextmanager
def repeated(choices: list[Tensor]) -> Iterator[None]:
    """Inside, the choices are those remembered. Errors: RuntimeError if there are more or fewer of them."""
    rest = iter(choices)

    def repeat(make: Make, options: int) -> Tensor:
        found = next(rest, None)
        if found is None:
            raise RuntimeError(f"more than the {len(choices)} choices remembered")
        return found.long()

    with _choosing(repeat):
        yield
    if next(rest, None) is not None:
        raise RuntimeError(f"fewer than the {len(choices)} choices remembered")


@contextmanager
def _choosing(how: Choose) -> Iterator[None]:
    before, _scope.choose = _scope.choose, how
    try:
        yield
    finally:
        _scope.choose = before
