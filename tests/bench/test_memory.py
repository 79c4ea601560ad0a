"""The peak of memory in cases where it is known to the byte."""

import gc
import subprocess
import sys

import pytest
import torch

from sparselib.bench.memory import passing_bytes, peak_bytes

FLOAT = 4  # bytes


def floats(n):
    return torch.empty(n)


def test_nothing_takes_nothing():
    assert peak_bytes(lambda: None) == 0


def test_the_peak_is_what_is_held_at_once():
    def step():
        first, second = floats(1000), floats(500)
        del first
        third = floats(700)  # in all 2200 are made, never more than 1500 are held
        return second, third

    assert [peak_bytes(step) for _ in range(3)] == [FLOAT * 1500] * 3


def test_what_is_returned_or_kept_counts_while_the_step_runs():
    kept = []

    def step():
        kept.append(floats(10))
        return floats(100), floats(1000)

    assert peak_bytes(step) == FLOAT * 1110


def test_what_passes_is_what_is_gone_at_the_end():
    kept = []

    def step():
        first = floats(1000)
        kept.append(floats(5000))
        second = floats(300)
        del first
        kept.append(floats(7000))
        return floats(800), second

    assert passing_bytes(step) == FLOAT * (1000 + 300)
    assert peak_bytes(step) == FLOAT * (5000 + 300 + 7000 + 800)


def test_gradients_do_not_pass():
    model, x = torch.nn.Linear(300, 200, bias=False), floats(50 * 300).zero_().view(50, 300)

    def step():
        model.zero_grad()
        model(x).square().sum().backward()

    results = FLOAT * 50 * 200  # the layer's, and beside it at most its square and its gradient in the making
    assert 2 * results <= passing_bytes(step) < 4.1 * results
    assert peak_bytes(step) >= FLOAT * 300 * 200


@pytest.mark.parametrize("profiled", [False, True])
def test_letting_go_of_what_was_there_before_makes_no_room(profiled):
    older = []

    def make():
        older.append(floats(5000))

    if profiled:
        assert peak_bytes(make) == FLOAT * 5000  # the profiler knows the address, but not from this call
    else:
        make()

    def step():
        older.clear()
        return floats(1000)

    assert peak_bytes(step) == FLOAT * 1000


def test_forward_and_backward_of_a_chain():
    n = 1000
    x = floats(n).zero_().requires_grad_()

    def step():
        y = x
        for _ in range(3):
            y = y.exp()  # keeps its result for the backward pass
        y.backward(torch.ones_like(y))

    # at most the three results, the cotangent, and two gradients: the one that comes in and the one that goes out
    assert peak_bytes(step) == FLOAT * n * 6


@pytest.mark.parametrize("enabled", [False, True])
def test_an_error_of_the_step_is_raised_and_leaves_nothing_behind(enabled):
    def step():
        assert not gc.isenabled()
        raise ZeroDivisionError

    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            peak_bytes(step)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert peak_bytes(lambda: floats(10)) == FLOAT * 10


def test_nothing_is_said():
    code = "import torch; from sparselib.bench.memory import peak_bytes; print(peak_bytes(lambda: torch.empty(3)))"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("12\n", "")
