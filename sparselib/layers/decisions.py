"""Discrete choices that are made once and taken again.

A reversible stack rebuilds a layer's input from its output, with rounding errors. A choice (a unit of a block, a
bucket) that is made again from the rebuilt input may fall otherwise and then gives the gradient of another function. So
what a layer chooses in the forward pass is remembered, in order, and taken again on the way back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, int32


class _Scope(threading.local):  # autograd may work backward in a thread of its own
    choose: Callable[[Callable[[], Tensor]], Tensor] | None = None


_scope = _Scope()


def choose(make: Callable[[], Tensor]) -> Tensor:
    """The integers that ``make`` gives; inside :func:`repeated`, those that it gave when they were remembered."""
    return make() if _scope.choose is None else _scope.choose(make)


def are_followed() -> bool:
    """Whether choices are being remembered or repeated here."""
    return _scope.choose is not None


@contextmanager
def remembered() -> Iterator[list[Tensor]]:
    """Collects what is chosen inside, in order; inside :func:`repeated`, what is repeated."""
    choices: list[Tensor] = []
    outer = _scope.choose

    def remember(make: Callable[[], Tensor]) -> Tensor:
        made = make() if outer is None else outer(make)
        choices.append(made.to(int32))
        return made

    with _choosing(remember):
        yield choices


@contextmanager
def repeated(choices: list[Tensor]) -> Iterator[None]:
    """Inside, the choices are those remembered. Errors: RuntimeError if there are more or fewer of them."""
    rest = iter(choices)

    def repeat(make: Callable[[], Tensor]) -> Tensor:
        found = next(rest, None)
        if found is None:
            raise RuntimeError(f"more than the {len(choices)} choices remembered")
        return found.long()

    with _choosing(repeat):
        yield
    if next(rest, None) is not None:
        raise RuntimeError(f"fewer than the {len(choices)} choices remembered")


@contextmanager
def _choosing(how: Callable[[Callable[[], Tensor]], Tensor]) -> Iterator[None]:
    before, _scope.choose = _scope.choose, how
    try:
        yield
    finally:
        _scope.choose = before
