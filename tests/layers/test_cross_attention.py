import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import CrossAttention, SparseCrossAttention

from .. import slow
from ..helpers import by_steps, close, randomized, seeds, vectors
from .test_attention import random_mask, rows


def make(sparse, d=8, heads=2, modules=4, kernel=3, seed=0):
    layer = SparseCrossAttention(d, heads, modules, kernel) if sparse else CrossAttention(d, heads)
    return randomized(layer, seed)


both = pytest.mark.parametrize("sparse", [False, True])


@both
@settings(max_examples=25)
@given(seed=seeds, data=st.data())
def test_equals_the_slow_reference(sparse, seed, data):
    heads, modules, batch = (data.draw(st.sampled_from([1, 2, 3])) for _ in range(3))
    d, kernel = heads * modules * data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 3, 5]))
    length, source = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    layer = make(sparse, d, heads, modules, kernel, seed)
    x, memory = vectors(batch, length, d, seed=seed), vectors(batch, source, d, seed=seed + 1)
    mask = random_mask(batch, source, seed) if data.draw(st.booleans()) else None
    sees = slow.sight(False, rows(mask))
    y = slow.cross_attention(x.numpy(), memory.numpy(), slow.weights_of(layer), heads, modules, sees)
    close(layer(x, memory, mask), y)
    close(by_steps(layer, x, layer.init_state_from(memory, mask))[0], y)


@both
def test_gradients_reach_query_and_memory(sparse):
    layer, mask = make(sparse, 4, 2, 2), torch.tensor([[1, 1, 0], [1, 0, 1]])
    x, memory = vectors(2, 3, 4).requires_grad_(), vectors(2, 3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, m: layer(x, m, mask), (x, memory))


@both
def test_masked_positions_of_the_source_do_not_count(sparse):
    layer, x, memory = make(sparse), vectors(2, 3, 8), vectors(2, 5, 8, seed=1)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1]])
    changed = memory.clone()
    changed[mask == 0] = 7.0
    assert torch.equal(layer(x, changed, mask), layer(x, memory, mask))
    close(layer(x[:1], memory[:1], mask[:1]), layer(x[:1], memory[:1, :3]))


@both
def test_a_step_reads_neither_key_nor_value_weights(sparse):
    layer, x = make(sparse), vectors(2, 1, 8)
    state = layer.init_state_from(vectors(2, 5, 8, seed=1))
    y, _ = layer.step(x[:, 0], state)
    with torch.no_grad():
        for p in (*layer.key.parameters(), *layer.value.parameters()):
            p.fill_(float("nan"))
    assert torch.equal(layer.step(x[:, 0], state)[0], y)


def test_weights_by_the_papers_formula():
    def count(layer):
        return sum(p.numel() for p in layer.parameters())

    d, s, f = 1024, 16, 3
    m = d // s
    with torch.device("meta"):
        assert count(CrossAttention(d, s)) == 4 * d * d + 4 * d
        assert count(SparseCrossAttention(d, s, s, f)) == 2 * (d * d + d) + d * s + d * m + d + f * f * m * m + m


@both
def test_bad_input_is_refused(sparse):
    layer, x, memory = make(sparse), vectors(2, 3, 8), vectors(2, 5, 8)
    nan = memory.clone()
    nan[0, 1, 2] = float("nan")
    bad = [
        (x, memory[:, :, :7], None, r"memory.shape = \(2, 5, 7\): must be a last axis of d_model = 8"),
        (x, memory[:, :0], None, r"memory.shape = \(2, 0, 8\): must be a sequence of at least one position"),
        (x, memory[0], None, r"memory.shape = \(5, 8\): must be \(batch, length, 8\)"),
        (x, nan, None, r"memory = 'NaN': must be free of NaN"),
        (x, memory.half(), None, r"memory.dtype = torch.float16: must be float32, float64 or bfloat16 on a CPU"),
        (x, memory, torch.ones(2, 3), r"mask.shape = \(2, 3\): must be \(2, 5\)"),
        (x, memory, torch.zeros(2, 5), r"mask = 'all false in row \[0\]': must be true somewhere in every row"),
        (x, memory, 2 * torch.ones(2, 5), r"mask = .*: must be made of bool or 0 and 1"),
        (x, memory[:1], None, r"shape = \(.*: must be .*batch"),
        (x[:1], memory, None, r"shape = \(.*: must be .*batch"),
    ]
    for *inputs, message in bad:
        with pytest.raises(ValueError, match=message):
            layer(*inputs)


BAD_SIZES = [
    (lambda: CrossAttention(10, 4), r"d_model = 10: must be a multiple of n_heads = 4"),
    (lambda: CrossAttention(8, 0), r"n_heads = 0: must be an int of at least 1"),
    (lambda: SparseCrossAttention(12, 2, 5), r"d_\w+ = 12: must be a multiple of n_modules = 5"),
    (lambda: SparseCrossAttention(12, 2, 4, 2), r"kernel\w* = 2: must be odd"),
]


@pytest.mark.parametrize(("build", "message"), BAD_SIZES)
def test_bad_sizes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
