"""The recurrent unit against its loop, its scan against the recurrence, its gradients, its refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparselib.layers import SRU, RecurrentBranch
from sparselib.layers.recurrence import LinearScan, scan, scan_in_steps

from .. import slow
from ..helpers import close, randomized, seeds, vectors


@given(batch=st.integers(1, 3), length=st.integers(1, 40), units=st.integers(1, 5), seed=seeds)
def test_sru_is_its_equations(batch, length, units, seed):
    layer, x = randomized(SRU(units), seed), vectors(batch, length, units, seed=seed)
    close(layer(x), torch.from_numpy(slow.sru(x.numpy(), slow.weights_of(layer))))


@given(n_layers=st.integers(1, 3), seed=seeds)
def test_branch_is_its_layers(n_layers, seed):
    layer, x = randomized(RecurrentBranch(4, 3, n_layers), seed), vectors(2, 5, 4, seed=seed)
    close(layer(x), torch.from_numpy(slow.recurrent_branch(x.numpy(), slow.weights_of(layer))))


@given(length=st.integers(1, 70), seed=seeds)
def test_scan_is_the_recurrence(length, seed):
    f, u = vectors(2, length, 3, seed=seed).sigmoid(), vectors(2, length, 3, seed=seed + 1)
    kept = f.clone(), u.clone()
    cell, cells = torch.zeros(2, 3, dtype=f.dtype), []
    for t in range(length):
        cell = f[:, t] * cell + u[:, t]
        cells.append(cell)
    for way in (LinearScan.apply, scan, scan_in_steps):
        close(way(f, u), torch.stack(cells, 1))
    assert torch.equal(f, kept[0]) and torch.equal(u, kept[1])


def test_half_precision_and_views_are_scanned_too():
    f, u = vectors(6, 2, 3).sigmoid().transpose(0, 1), vectors(6, 2, 3, seed=1).transpose(0, 1)
    close(scan(f, u), scan_in_steps(f, u))
    close(scan(f.bfloat16(), u.bfloat16()).double(), scan(f, u), atol=0.1)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_gradients(length):
    f = vectors(2, length, 2, seed=1).sigmoid().requires_grad_()
    u = vectors(2, length, 2, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(LinearScan.apply, (f, u))
    layer, x = randomized(SRU(2), 3), vectors(2, length, 2, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))


def test_mixed_precision_leaves_gates_and_cell_in_float32():
    layer, found = randomized(SRU(4)).float(), []
    with torch.no_grad():
        layer.gates.bias[4:8] += 6  # forget gates near 1
    for mixed in (True, False):
        x = vectors(1, 2000, 4, dtype=torch.bfloat16).requires_grad_()
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            y, c = layer.prefill(x if mixed else x.float(), layer.init_state(1))
        y.square().mean().backward()
        assert y.dtype == c.dtype == torch.float32
        found.append((y, c, x.grad, layer.gates.weight.grad.clone()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("way", [scan, scan_in_steps])
def test_a_gate_that_is_shut_or_open_in_float32_gives_no_nan(way):
    f = torch.zeros(1, 5000, 2)
    f[..., 1] = 1
    c = way(f, torch.ones(1, 5000, 2))
    assert torch.equal(c[0, :, 0], torch.ones(5000))
    assert torch.equal(c[0, :, 1], torch.arange(1.0, 5001))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SRU(0), "sru_units = 0: must be an int of at least 1"),
        (lambda: RecurrentBranch(4, 2, 0), "sru_layers = 0: must be an int of at least 1"),
        (lambda: SRU(3)(torch.zeros(1, 2, 4)), r"x.shape = \(1, 2, 4\)"),
        (lambda: SRU(3).prefill(torch.zeros(1, 2, 3), torch.zeros(2, 3)), "2"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
