import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import MultiplicativeDense

from .. import slow
from ..helpers import by_steps, close, randomized, seeds, vectors
from .memory import largest_tensor, saved_elements


@settings(max_examples=40)
@given(seed=seeds, d_in=st.integers(1, 5), s=st.integers(1, 4), m=st.integers(1, 3), bias=st.booleans())
def test_equals_the_slow_reference(seed, d_in, s, m, bias):
    layer = randomized(MultiplicativeDense(d_in, s * m, s, bias), seed)
    x = vectors(2, 3, d_in, seed=seed)
    y = slow.multiplicative(x.numpy(), slow.weights_of(layer), s)
    close(layer(x), y)
    close(by_steps(layer, x, None)[0], y)
    folded = layer.folded()
    assert folded.shape == (d_in, s * m)
    close(x @ folded + (layer.bias if bias else 0), y)


@pytest.mark.parametrize(("d", "s"), [(8, 2), (64, 8), (1024, 16), (96, 96), (12, 1)])
def test_weights_by_the_papers_formula(d, s):
    layer = MultiplicativeDense(d, d, s)
    assert sum(p.numel() for p in layer.parameters()) == d * d // s + d * s + d
    assert sum(p.numel() for p in MultiplicativeDense(d, d, s, bias=False).parameters()) == d * d // s + d * s


def test_initial_values():
    torch.manual_seed(0)
    layer = MultiplicativeDense(400, 800, 40)
    assert layer.D.mean().item() == pytest.approx(0, abs=0.02)
    assert layer.D.std().item() == pytest.approx(0.5, rel=0.03)
    bound = (6 / (400 + 20)) ** 0.5
    assert 0.98 * bound < layer.E.abs().max() <= bound
    assert layer.E.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    assert not layer.bias.any()


# --- permutations: theorem 1 ------------------------------------------------------------------------------------------


@st.composite
def bijections(draw):
    """(S, M, flat targets): i goes to module target // M, place target % M."""
    s, m = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return s, m, draw(st.permutations(range(s * m)))


def permuting(s, m, f, dtype):
    layer = MultiplicativeDense(s * m, s * m, s).to(dtype)
    D, E = layer.permutation_weights(f)
    assert D.dtype == E.dtype == dtype and D.shape == layer.D.shape and E.shape == layer.E.shape
    with torch.no_grad():
        layer.D.copy_(D)
        layer.E.copy_(E)
    return layer


@settings(max_examples=40)
@given(case=bijections(), dtype=st.sampled_from([torch.float32, torch.float64]), seed=seeds)
def test_any_bijection_gives_back_its_input_bitwise(case, dtype, seed):
    s, m, flat = case
    x = vectors(2, 3, s * m, seed=seed, dtype=dtype) * 10.0 ** torch.arange(-2, 1)[:, None]
    pairs = [divmod(t, m) for t in flat]
    expected = torch.empty_like(x)
    expected[..., flat] = x
    for f in (flat, torch.tensor(flat), pairs, torch.tensor(pairs), lambda i: pairs[i]):
        layer = permuting(s, m, f, dtype)
        assert torch.equal(layer(x), expected)
        assert torch.equal(by_steps(layer, x, None)[0], expected)
        assert ((layer.D == 0) | (layer.D == 1)).all() and (layer.D.sum(1) == 1).all() and (layer.E.sum(1) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bijection_at_full_width_gives_back_its_input_bitwise(dtype):
    torch.manual_seed(0)
    flat = torch.randperm(1024)
    layer, x = permuting(16, 64, flat, dtype), vectors(1, 5, 1024, dtype=dtype)
    assert torch.equal(layer(x)[..., flat], x) and torch.equal(by_steps(layer, x, None)[0][..., flat], x)


NO_BIJECTIONS = {
    "twice the same": [0, 1, 2, 3, 4, 4],
    "too large": [0, 1, 2, 3, 4, 6],
    "negative": [0, 1, 2, 3, 4, -1],
    "too short": [0, 1, 2, 3, 4],
    "too long": [0, 1, 2, 3, 4, 5, 6],
    "same pair twice": [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 1)],
    "pairs beyond the module": [(0, 0), (0, 1), (0, 5), (0, 3), (0, 4), (0, 2)],
    "module beyond the last": [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 2)],
    "triples": [(0, 0, 0)] * 6,
    "callable onto one target": lambda i: (0, 0),
    "fractions": [0.2, 1.2, 2.2, 3.2, 4.2, 5.2],
    "NaN": [0.0, 1.0, 2.0, 3.0, 4.0, float("nan")],
}


@pytest.mark.parametrize("f", NO_BIJECTIONS.values(), ids=NO_BIJECTIONS)
def test_what_is_no_bijection_is_refused(f):
    with pytest.raises(ValueError, match=r"^f = .*: must be "):
        MultiplicativeDense(6, 6, 2).permutation_weights(f)


def test_a_layer_that_is_not_square_has_no_permutations():
    with pytest.raises(ValueError, match=r"d_out = 12: must be d_in = 6"):
        MultiplicativeDense(6, 12, 2).permutation_weights(list(range(6)))


# --- memory, bad sizes ------------------------------------------------------------------------------------------------


def test_no_tensor_of_batch_length_width_and_modules_is_built():
    batch, length, d, s = 4, 16, 64, 32
    layer, x = MultiplicativeDense(d, d, s), torch.randn(batch, length, d, requires_grad=True)
    largest = largest_tensor(lambda: layer(x).sum().backward())
    assert batch * length * d <= largest < batch * length * d * s / 8
    assert saved_elements(lambda: layer(x)) <= 2 * batch * length * d + 3 * d * d


BAD_SIZES = [
    ((4, 10, 4), r"d_out = 10: must be a multiple of n_modules = 4"),
    ((0, 4, 2), r"d_in = 0: must be an int of at least 1"),
    ((4, 0, 2), r"d_out = 0: must be an int of at least 1"),
    ((4, 4, 0), r"n_modules = 0: must be an int of at least 1"),
    ((4, 4.0, 2), r"d_out = 4.0: must be an int of at least 1"),
]


@pytest.mark.parametrize(("sizes", "message"), BAD_SIZES)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        MultiplicativeDense(*sizes)
