import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.config import ATTENTIONS
from sparselib.layers import Dense, DenseAttention, SelfAttention, SparseAttention
from sparselib.layers.attention import attend, attend_slowly

from .. import slow
from ..helpers import by_chunks, chunk_sizes, close, generator, randomized, seeds, vectors
from .memory import largest_tensor, saved_elements


def make(kind, d, heads, modules, seed=0, causal=True, **options):
    layer = DenseAttention(d, heads, causal) if kind == "dense" else None
    layer = layer or SparseAttention(d, heads, modules, kind=kind, causal=causal, **options)
    return randomized(layer, seed)


def random_mask(batch, length, seed):
    """Any padding, with at least one real position in every row."""
    draws = generator(seed)
    mask = torch.rand(batch, length, generator=draws) < 0.6
    mask[torch.arange(batch), torch.randint(length, (batch,), generator=draws)] = True
    return mask


def rows(array):
    return None if array is None else array.tolist()


@pytest.mark.parametrize("kind", ATTENTIONS)
@settings(max_examples=20)
@given(seed=seeds, data=st.data())
def test_equals_the_slow_reference(kind, seed, data):
    heads, modules, batch = (data.draw(st.sampled_from([1, 2, 3])) for _ in range(3))
    d, length = heads * modules * data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5))
    causal = data.draw(st.booleans())
    options = {}
    if kind != "dense":
        options = dict(kernel_size=data.draw(st.sampled_from([1, 3, 5])))
        if kind != "mult":
            options |= dict(value_kernel_size=data.draw(st.sampled_from([None, 1, 3])))
            options |= dict(share_qk=data.draw(st.booleans()), v_sees_input=data.draw(st.booleans()))
    layer = make(kind, d, heads, modules, seed, causal, **options)
    mask = random_mask(batch, length, seed) if data.draw(st.booleans()) else None
    prefix = None
    if causal and data.draw(st.booleans()):
        prefix = torch.randint(length + 1, (batch,), generator=generator(seed))
    x = vectors(batch, length, d, seed=seed)
    sees = slow.sight(causal, rows(mask), rows(prefix))
    y = slow.self_attention(x.numpy(), slow.weights_of(layer), kind, heads, modules, sees)
    close(layer(x, mask, prefix), y)
    if mask is None:
        return
    for as_numbers in (mask.int(), mask.double()):
        assert torch.equal(layer(x, as_numbers, prefix), layer(x, mask, prefix))


@pytest.mark.parametrize("kind", ATTENTIONS)
@settings(max_examples=10)
@given(seed=seeds, data=st.data())
def test_a_prefix_in_the_first_chunk_equals_the_forward(kind, seed, data):
    layer, length = make(kind, 8, 2, 4, seed), data.draw(st.integers(1, 7))
    x = vectors(3, length, 8, seed=seed)
    sizes = data.draw(chunk_sizes(length))
    prefix = torch.randint(sizes[0] + 1, (3,), generator=generator(seed))
    y, _ = by_chunks(layer, x, layer.init_state(3), sizes, prefix_length=prefix)
    close(y, layer(x, prefix_length=prefix))


@settings(max_examples=30)
@given(seed=seeds, length=st.integers(1, 6), keys=st.integers(1, 6), masked=st.booleans())
def test_attend_equals_its_readable_form(seed, length, keys, masked):
    q, k, v = (vectors(2, 3, n, 4, seed=seed + i) for i, n in enumerate((length, keys, keys)))
    allowed = random_mask(2 * length, keys, seed).view(2, 1, length, keys) if masked else None
    close(attend(q, k, v, allowed), attend_slowly(q, k, v, allowed))
    flat = [z.transpose(1, 2).flatten(2).numpy() for z in (q, k, v)]

    def sees(b, t, j):
        return allowed is None or bool(allowed[b, 0, t, j])

    close(attend_slowly(q, k, v, allowed), slow.attend(*flat, 3, sees))


@settings(max_examples=10)
@given(seed=seeds, length=st.integers(1, 6))
def test_causal_attention_is_that_of_the_keys_up_to_a_position(seed, length):
    q, k, v = (vectors(2, 3, length, 4, seed=seed + i) for i in range(3))
    close(attend(q, k, v, causal=True), attend_slowly(q, k, v, torch.ones(length, length).tril().bool()))


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_plain_causal_attention_holds_no_table_of_positions_by_positions(kind):
    layer, x = make(kind, 8, 2, 4, seed=1), vectors(1, 256, 8).requires_grad_()
    assert largest_tensor(lambda: layer(x).sum().backward()) < 256 * 256


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_gradcheck_with_mask_and_prefix_and_without_causality(kind):
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])
    for causal, prefix in ((True, torch.tensor([2, 0])), (False, None)):
        layer = make(kind, 4, 2, 2, seed=3, causal=causal)
        x = vectors(2, 4, 4).requires_grad_()
        assert torch.autograd.gradcheck(lambda x, f=layer, p=prefix: f(x, mask, p), (x,))


@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("prefix", [0, 1, 3, 6])
def test_a_prefix_is_seen_from_everywhere_and_nothing_beyond_it_early(kind, prefix):
    layer, x = make(kind, 8, 2, 4, seed=1), vectors(1, 6, 8)
    lengths = torch.tensor([prefix])
    y = layer(x, prefix_length=lengths)
    for t in range(6):
        changed = x.clone()
        changed[:, t] += 1
        touched = (layer(changed, prefix_length=lengths) != y).any(dim=2)[0]
        if t < prefix:
            assert touched.all()
        else:
            assert not touched[:t].any() and touched[t:].all()


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_without_causality_every_position_sees_every_other(kind):
    layer, x = make(kind, 8, 2, 4, seed=1, causal=False), vectors(2, 5, 8)
    y = layer(x)
    for t in range(5):
        changed = x.clone()
        changed[:, t] += 1
        assert (layer(changed) != y).any(dim=2).all()


@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_padding_at_the_end_does_not_reach_real_positions(kind, causal):
    layer, x = make(kind, 8, 2, 4, seed=2, causal=causal), vectors(3, 6, 8)
    lengths = [6, 4, 1]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    changed = x.clone()
    changed[~mask] = 9.0
    y, z = layer(x, mask), layer(changed, mask)
    assert torch.equal(z[mask], y[mask])
    for b, length in enumerate(lengths):  # and padded means the same as absent
        close(y[b : b + 1, :length], layer(x[b : b + 1, :length]))


@pytest.mark.parametrize("kind", ["dense", "mult"])
def test_padding_anywhere_does_not_reach_real_positions(kind):
    layer, x, mask = make(kind, 8, 2, 4, causal=False), vectors(3, 6, 8), random_mask(3, 6, 1)
    changed = x.clone()
    changed[~mask] = 9.0
    assert torch.equal(layer(changed, mask)[mask], layer(x, mask)[mask])


def test_a_row_that_is_padding_everywhere_but_late_stays_finite():
    layer, x = make("dense", 8, 2, 4), vectors(1, 4, 8).requires_grad_()
    y = layer(x, torch.tensor([[0, 0, 0, 1]]))
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()


def test_weights_of_the_reference_and_of_the_dense_layer():
    def count(layer):
        return sum(p.numel() for p in layer.parameters())

    d, s, f = 1024, 16, 3
    m = d // s
    mult, conv = d * s + d * m + d, f * f * m * m + m
    with torch.device("meta"):
        assert count(DenseAttention(d, s)) == 4 * d * d + 4 * d == 4_198_400
        assert count(SparseAttention(d, s, s, f, value_kernel_size=1)) == 169_152
        assert count(SparseAttention(d, s, s, f)) == mult + 3 * conv
        assert count(SparseAttention(d, s, s, f, "mult")) == 4 * mult
        assert count(SparseAttention(d, s, s, f, "conv")) == 4 * conv
        assert count(SparseAttention(d, s, s, f, "mult_conv_output")) == 2 * mult + 4 * conv
        assert count(SparseAttention(d, s, s, f, share_qk=True)) == mult + 2 * conv
        assert count(SparseAttention(d, s, s, f, v_sees_input=True)) == mult + 3 * conv + f * f * m * m


def test_the_projections_may_be_any_layers():
    q, v, output = (Dense(4, 4) for _ in range(3))
    layer = randomized(SelfAttention(2, q=q, k=None, v=v, output=output, d_model=4))
    x = vectors(2, 3, 4)
    w = slow.weights_of(layer)
    y = slow.self_attention(x.numpy(), w, "dense", 2, 1, slow.sight(True))
    close(layer(x), y)
    assert len(w) == 6


@pytest.mark.parametrize("kind", ["mult", "conv", "mult_conv", "mult_conv_output"])
def test_no_tensor_of_batch_length_width_and_modules_is_built(kind):
    batch, length, d, s = 2, 16, 64, 32
    layer, x = SparseAttention(d, 4, s, kind=kind), torch.randn(batch, length, d, requires_grad=True)
    largest = largest_tensor(lambda: layer(x).sum().backward())
    assert batch * length * d <= largest < batch * length * d * s / 8
    assert saved_elements(lambda: layer(x)) < batch * length * d * s


@pytest.mark.parametrize("kind", ["dense", "mult_conv"])
def test_bad_masks_are_refused(kind):
    layer, x = make(kind, 8, 2, 4), vectors(2, 3, 8)
    bad = [
        (torch.ones(2, 4), r"mask.shape = \(2, 4\): must be \(2, 3\)"),
        (torch.ones(3), r"mask.shape = \(3,\): must be \(2, 3\)"),
        (torch.ones(2, 1, 3), r"mask.shape = \(2, 1, 3\): must be \(2, 3\)"),
        (torch.tensor([[1, 1, 1], [0, 0, 0]]), r"mask = 'all false in row \[1\]': must be true somewhere in every row"),
        (torch.tensor([[1, 2, 0], [1, 1, 1]]), r"mask = .*: must be made of bool or 0 and 1"),
        (torch.full((2, 3), 0.5), r"mask = .*: must be made of bool or 0 and 1"),
        (torch.full((2, 3), math.nan), r"mask = .*: must be made of bool or 0 and 1"),
    ]
    for mask, message in bad:
        with pytest.raises(ValueError, match=message):
            layer(x, mask)


BAD_SIZES = [
    (lambda: DenseAttention(10, 4), r"d_model = 10: must be a multiple of n_heads = 4"),
    (lambda: DenseAttention(8, 0), r"n_heads = 0: must be an int of at least 1"),
    (lambda: DenseAttention(0, 2), r"d_model = 0: must be an int of at least 1"),
    (lambda: SparseAttention(12, 2, 5), r"d_model = 12: must be a multiple of n_modules = 5"),
    (lambda: SparseAttention(12, 5, 4), r"d_model = 12: must be a multiple of n_heads = 5"),
    (lambda: SparseAttention(12, 2, 0), r"n_modules = 0: must be an int of at least 1"),
    (lambda: SparseAttention(12, 2, 4, 2), r"module_kernel = 2: must be odd"),
    (lambda: SparseAttention(12, 2, 4, value_kernel_size=2), r"module_kernel = 2: must be odd"),
    (lambda: SparseAttention(12, 2, 4, kind="dense"), r"kind = 'dense': must be one of 'mult', 'conv', 'mult_conv'"),
]


@pytest.mark.parametrize(("build", "message"), BAD_SIZES)
def test_bad_sizes_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_only_a_causal_layer_decodes():
    with pytest.raises(ValueError, match=r"causal = False: must be True to decode token by token"):
        DenseAttention(8, 2, causal=False).init_state(1)


def test_the_prefix_of_another_batch_is_refused():
    layer = make("dense", 8, 2, 4)
    with pytest.raises(ValueError, match=r"prefix_length.* = .*\(3,\).*: must be .*\(2,\)"):
        layer(vectors(2, 3, 8), prefix_length=torch.tensor([1, 1, 1]))
