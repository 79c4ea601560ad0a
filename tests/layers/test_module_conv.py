import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import ModuleConv

from .. import slow
from ..helpers import close, randomized, seeds, vectors
from .memory import largest_tensor, saved_elements


@settings(max_examples=60)
@given(
    seed=seeds,
    s=st.integers(1, 4),
    m=st.integers(1, 3),
    o=st.integers(1, 3),
    length_kernel=st.integers(1, 5),
    module_kernel=st.sampled_from([1, 3, 5, None]),
    length=st.integers(1, 7),
)
def test_equals_the_slow_reference(seed, s, m, o, length_kernel, module_kernel, length):
    if module_kernel is None and length_kernel % 2 == 0:
        length_kernel += 1  # the length's kernel is the modules' too
    layer = randomized(ModuleConv(s * m, s, length_kernel, module_kernel, d_out=s * o), seed)
    assert layer.weight.shape == (o, m, length_kernel, module_kernel or length_kernel)
    x = vectors(2, length, s * m, seed=seed)
    close(layer(x), slow.module_conv(x.numpy(), slow.weights_of(layer), s))


@pytest.mark.parametrize(("d", "s", "f"), [(8, 2, 3), (64, 8, 5), (1024, 16, 3), (9216, 64, 3), (6, 6, 1)])
def test_weights_by_the_papers_formula(d, s, f):
    m = d // s
    with torch.device("meta"):
        assert sum(p.numel() for p in ModuleConv(d, s, f).parameters()) == f**2 * m**2 + m
        assert sum(p.numel() for p in ModuleConv(d, s, f, 1).parameters()) == f * m**2 + m


def test_a_module_sees_its_neighbours_and_no_wrap_around():
    layer, x = randomized(ModuleConv(8, 4, 3)), vectors(1, 5, 8)
    y = layer(x).unflatten(2, (4, 2))
    changed = x.clone()
    changed[:, 1, 0:2] += 1  # module 0 of position 1
    touched = (layer(changed).unflatten(2, (4, 2)) != y).any(dim=3)[0]
    assert touched.tolist() == [[1 <= t <= 3 and s <= 1 for s in range(4)] for t in range(5)]


def test_a_kernel_of_one_module_sees_no_neighbour():
    layer, x = randomized(ModuleConv(8, 4, 3, 1)), vectors(1, 5, 8)
    changed = x.clone()
    changed[:, :, 2:4] += 1
    touched = (layer(changed) != layer(x)).unflatten(2, (4, 2)).any(dim=3).any(dim=1)[0]
    assert touched.tolist() == [False, True, False, False]


def test_the_state_is_the_last_inputs_oldest_first():
    layer, x = ModuleConv(4, 2, 3).double(), vectors(2, 5, 4)
    state = layer.init_state(2)
    assert state.shape == (2, 2, 2, 2) and not state.any()
    _, state = layer.prefill(x[:, :1], state)
    assert not state[:, 0].any() and torch.equal(state[:, 1].flatten(1), x[:, 0])
    _, state = layer.prefill(x[:, 1:], state)
    assert torch.equal(state.flatten(2), x[:, 3:])


def test_initial_values():
    torch.manual_seed(0)
    layer = ModuleConv(240, 8, 3)
    bound = (6 / (30 * 9 + 30 * 9)) ** 0.5
    assert 0.98 * bound < layer.weight.abs().max() <= bound and not layer.bias.any()


def test_no_tensor_of_batch_length_width_and_modules_is_built():
    batch, length, d, s = 4, 16, 64, 32
    layer, x = ModuleConv(d, s, 3), torch.randn(batch, length, d, requires_grad=True)
    largest = largest_tensor(lambda: layer(x).sum().backward())
    assert batch * length * d <= largest < batch * length * d * 2
    assert saved_elements(lambda: layer(x)) <= 2 * batch * length * d + layer.weight.numel()


BAD_SIZES = [
    (dict(d_in=10, n_modules=4), r"d_in = 10: must be a multiple of n_modules = 4"),
    (dict(d_in=8, n_modules=4, d_out=10), r"d_out = 10: must be a multiple of n_modules = 4"),
    (dict(d_in=8, n_modules=0), r"n_modules = 0: must be an int of at least 1"),
    (dict(d_in=8, n_modules=4, kernel_size=4), r"module_kernel = 4: must be odd"),
    (dict(d_in=8, n_modules=4, kernel_size=3, module_kernel=2), r"module_kernel = 2: must be odd"),
    (dict(d_in=8, n_modules=4, kernel_size=0), r"kernel_size = 0: must be an int of at least 1"),
    (dict(d_in=8, n_modules=4, module_kernel=-1), r"module_kernel = -1: must be an int of at least 1"),
    (dict(d_in=8, n_modules=4, d_out=0), r"d_out = 0: must be an int of at least 1"),
]


@pytest.mark.parametrize(("sizes", "message"), BAD_SIZES)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        ModuleConv(**sizes)
