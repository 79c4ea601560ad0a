import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sparselib.training import OptimizerConfig
from sparselib.training.optimizers import LAST_RATE, cosine, inverse_root, make_optimizer, rate


def config(**changes):
    return OptimizerConfig(**dict(learning_rate=1e-2, warmup=3) | changes)


def test_cosine_rises_in_a_line_and_falls_to_a_tenth():
    rates = [cosine(step, 100, 10) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert all(a > b for a, b in zip(rates[9:], rates[10:], strict=False))
    assert rates[54] == pytest.approx((1 + LAST_RATE) / 2)  # half-way down
    assert rates[-1] == pytest.approx(LAST_RATE)
    assert cosine(1, 5, 0) < 1 and cosine(5, 5, 5) == 1


@given(st.integers(1, 10**6))
def test_inverse_root_is_the_papers_rate(step):
    papers = config(learning_rate=0.01, schedule="inverse_root", warmup=10_000)
    assert rate(papers, step, 524_000) == pytest.approx(1 / math.sqrt(max(step, 10_000)))


def test_rates_at_no_warmup():
    assert [inverse_root(step, 0) for step in (1, 4, 16)] == [1, 0.5, 0.25]
    assert rate(config(warmup=0), 100, 100) == pytest.approx(1e-2 * LAST_RATE)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.kernel = nn.Parameter(torch.randn(2, 3, 4))
        self.matrix = nn.Parameter(1e-4 * torch.randn(5, 3))
        self.bias = nn.Parameter(torch.zeros(4))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_only_matrices_decay(name):
    model = Model()
    matrices, others = make_optimizer(model, config(name=name, weight_decay=0.3)).param_groups
    assert [p is q for p, q in zip(matrices["params"], (model.kernel, model.matrix), strict=True)] == [True, True]
    assert matrices["weight_decay"] == 0.3 and others["weight_decay"] == 0
    assert len(others["params"]) == 1 and others["params"][0] is model.bias


def adafactor_slowly(weight, gradients, learning_rate):
    """Shazeer & Stern (2018), algorithms 4 and 5, without momentum, entry by entry over the last two axes."""
    x = weight.detach().double().clone()
    rows = columns = squares = None
    for t, gradient in enumerate(gradients, start=1):
        g, beta = gradient.double(), 1 - t**-0.8
        square = g**2 + 1e-30
        if g.ndim >= 2:
            rows = (0 if rows is None else beta * rows) + (1 - beta) * square.sum(-1, keepdim=True)
            columns = (0 if columns is None else beta * columns) + (1 - beta) * square.sum(-2, keepdim=True)
            squares = rows * columns / rows.sum(-2, keepdim=True)
        else:
            squares = (0 if squares is None else beta * squares) + (1 - beta) * square
        update = g / squares.sqrt()
        update = update / max(1.0, update.square().mean().sqrt().item() / 1.0)
        x = x - learning_rate * max(1e-3, x.square().mean().sqrt().item()) * update
    return x


@pytest.mark.parametrize("size", [1e-7, 1e-3, 10.0])  # a mean loss over many tokens has gradients of 1e-7
def test_adafactor_is_that_of_its_paper(size):
    model = Model()
    optimizer = make_optimizer(model, config(name="adafactor", weight_decay=0.0))
    chance = torch.Generator().manual_seed(1)
    weights = [model.kernel, model.matrix, model.bias]
    gradients = [[size * torch.randn(w.shape, generator=chance) * 3**t for t in range(4)] for w in weights]
    wanted = [adafactor_slowly(w, g, 1e-2) for w, g in zip(weights, gradients, strict=True)]
    for step in range(4):
        for weight, each in zip(weights, gradients, strict=True):
            weight.grad = each[step].clone()
        optimizer.step()
    for weight, expected in zip(weights, wanted, strict=True):
        torch.testing.assert_close(weight.detach().double(), expected, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_weights_whose_gradient_is_always_zero_stay(name):
    model = Model()
    before = model.matrix.detach().clone()
    optimizer = make_optimizer(model, config(name=name, weight_decay=0.0))
    for _ in range(2):
        model.matrix.grad = torch.zeros_like(before)
        model.matrix.grad[1] = 1.0
        optimizer.step()
    assert torch.equal(model.matrix[[0, 2, 3, 4]], before[[0, 2, 3, 4]]) and not torch.equal(model.matrix[1], before[1])
