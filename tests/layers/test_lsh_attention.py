"""The layers with projections: what is fixed and what is drawn, full attention below a length, decoding, choices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import DenseLSHAttention, LSHState, SparseLSHAttention
from sparselib.layers.decisions import remembered, repeated

from .. import slow
from ..helpers import by_chunks, by_steps, chunk_sizes, close, randomized, seeds, vectors
from .memory import largest_tensor

D, H, S = 8, 2, 4
KINDS = ["dense", "sparse"]
SIZES = dict(n_hashes=2, n_buckets=4, chunk_len=3)
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, seed=0, causal=True, **sizes):
    torch.manual_seed(seed % 2**31)
    sizes = SIZES | sizes
    if kind == "dense":
        return randomized(DenseLSHAttention(D, H, causal, **sizes), seed)
    return randomized(SparseLSHAttention(D, H, S, value_kernel_size=1, causal=causal, **sizes), seed)


def in_one_bucket(layer):
    layer.rotations.zero_()
    return layer


def slowly(layer, x, attend):
    """The whole layer in loops: ``attend(qk, v, buckets, b)`` for one head, all arrays."""
    w, x = slow.weights_of(layer), x.numpy()
    if layer.shared is None:
        q, k, v = (slow.dense(x, slow.under(w, name)) for name in "qkv")
    else:
        h = slow.multiplicative(x, slow.under(w, "shared"), S)
        q, k, v = (slow.module_conv(h, slow.under(w, name), S) for name in "qkv")
    qk, y, rotations = (q + k) / 2, np.zeros_like(v), layer.rotations.numpy()
    for b, h in np.ndindex(len(x), H):
        own = slice(h * D // H, (h + 1) * D // H)
        buckets = [slow.lsh_buckets(z, rotations[h], layer.sizes.factors) for z in qk[b, :, own]]
        y[b, :, own] = attend(qk[b, :, own], v[b, :, own], np.array(buckets).T, b)
    return y if layer.output is None else slow.dense(y, slow.under(w, "output"))


some_sizes = st.fixed_dictionaries(
    dict(
        n_hashes=st.integers(1, 3),
        n_buckets=st.sampled_from([2, 4, (2, 4)]),
        chunk_len=st.integers(1, 5),
        n_chunks_before=st.integers(0, 2),
        n_chunks_after=st.integers(0, 1),
        full_below=st.integers(0, 9),
    )
)
lengths = st.integers(1, 9)


@each_kind
@settings(max_examples=20)
@given(sizes=some_sizes, length=lengths, causal=st.booleans(), masked=st.booleans(), seed=seeds)
def test_forward_equals_the_slow_reference(kind, sizes, length, causal, masked, seed):
    layer, x, mask = make(kind, seed, causal, **sizes), vectors(2, length, D, seed=seed), None
    real = np.ones((2, length), bool)
    if masked:
        real = np.random.default_rng(seed).random((2, length)) < 0.6
        real[:, seed % length] = True
        mask = torch.tensor(real)

    def attend(qk, v, buckets, b):
        full, buckets = layer.sizes.full_below, np.where(real[b], buckets, layer.sizes.padding_bucket)
        y = slow.lsh_attention(qk, v, buckets, layer.sizes, causal, real[b])
        if not real[b, full:].any():  # padding does not count
            y[:full] = slow.lsh_full(qk, v, causal, real[b])[:full]
        return y

    close(layer(x, mask), slowly(layer, x, attend))


@each_kind
@settings(max_examples=20)
@given(sizes=some_sizes, length=lengths, seed=seeds, data=st.data())
def test_steps_and_any_chunks_equal_the_slow_rule_of_decoding(kind, sizes, length, seed, data):
    layer, x = make(kind, seed, **sizes), vectors(2, length, D, seed=seed)
    full = layer.sizes.full_below

    def attend(qk, v, buckets, b):
        y = slow.lsh_decoding(qk, v, buckets, layer.sizes.window)
        return np.concatenate([slow.lsh_full(qk, v, True, np.ones(length))[:full], y[full:]])

    y = slowly(layer, x, attend)
    steps, state = by_steps(layer, x, layer.init_state(2))
    close(steps, y)
    assert isinstance(state, LSHState) and state.buckets.shape == (2, H, layer.sizes.n_hashes, length)
    close(by_chunks(layer, x, layer.init_state(2), data.draw(chunk_sizes(length)))[0], y)


@each_kind
@pytest.mark.parametrize("full_below", [0, 4, 8])
def test_up_to_full_below_decoding_is_the_forward(kind, full_below):
    layer = make(kind, full_below=full_below)
    for length in range(1, full_below + 1):
        x = vectors(2, length, D, seed=length)
        close(by_steps(layer, x, layer.init_state(2))[0], layer(x))
        close(layer.prefill(x, layer.init_state(2))[0], layer(x))
    x = vectors(2, full_below + 4, D)
    assert not torch.allclose(layer(x), make(kind, full_below=99)(x))


@each_kind
@pytest.mark.parametrize(("n_hashes", "chunk_len", "before"), [(1, 9, 1), (2, 9, 0), (3, 11, 2)])
def test_with_one_bucket_and_a_chunk_over_the_length_every_face_is_full_attention(kind, n_hashes, chunk_len, before):
    sizes = dict(n_hashes=n_hashes, chunk_len=chunk_len, n_chunks_before=before)
    layer = in_one_bucket(make(kind, **sizes))
    full, x = make(kind, **sizes, full_below=9), vectors(2, 9, D)
    y = full(x)
    close(layer(x), y)
    close(by_steps(layer, x, layer.init_state(2))[0], y)
    close(layer.prefill(x, layer.init_state(2))[0], y)


@each_kind
def test_padding_at_the_end_does_not_reach_real_positions(kind):
    for full_below in (0, 9):
        layer, x = make(kind, causal=False, full_below=full_below), vectors(3, 9, D)
        mask = torch.arange(9) < torch.tensor([9, 6, 1])[:, None]
        changed = torch.where(mask[..., None], x, 9.0)
        assert torch.equal(layer(changed, mask)[mask], layer(x, mask)[mask])


# --- rotations and choices --------------------------------------------------------------------------------------------


@each_kind
def test_rotations_are_fixed_outside_training_and_drawn_by_the_seed_in_it(kind):
    layer, x = make(kind, n_buckets=8), vectors(2, 30, D)
    y, kept = layer(x), layer.rotations.clone()
    assert torch.equal(layer(x), y)
    layer.train()

    def trained(seed):
        torch.manual_seed(seed)
        return layer(x)

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2)) and not torch.equal(trained(1), y)
    assert torch.equal(layer.rotations, kept)
    torch.manual_seed(3)
    with remembered() as choices:
        first, second = layer(x), layer(x)
    assert not torch.equal(*choices) and not torch.equal(first, second)


def test_a_checkpoint_decodes_alike():
    layer, other, x = make("dense", seed=1), make("dense", seed=2), vectors(2, 12, D)
    assert not torch.equal(layer.rotations, other.rotations)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer.prefill(x, layer.init_state(2))[0], other.prefill(x, other.init_state(2))[0])


@each_kind
@pytest.mark.parametrize("training", [True, False])
def test_buckets_chosen_for_another_input_are_taken_again(kind, training):
    layer, x, other = make(kind, n_buckets=8).train(training), vectors(2, 20, D, seed=1), vectors(2, 20, D, seed=2)

    def run(x):
        torch.manual_seed(0)
        return layer(x), torch.rand(())

    with remembered() as choices:
        y, after = run(x)
    assert len(choices) == 1 and choices[0].shape == (2, H, 2, 20)
    with repeated(choices):
        again, after_again = run(x)
    assert torch.equal(again, y) and after_again == after  # what is drawn later is drawn alike
    with remembered() as own:
        chosen, _ = run(other)
    with repeated(choices):
        taken, _ = run(other)
    assert not torch.equal(own[0], choices[0]) and not torch.allclose(chosen, taken)


def test_full_attention_chooses_nothing():
    layer = make("dense", full_below=5).train()
    with remembered() as choices:
        layer(vectors(2, 5, D))
    assert not choices


# --- memory, bad input ------------------------------------------------------------------------------------------------


def test_prefill_builds_nothing_of_length_times_length():
    layer, x = make("dense", chunk_len=4), vectors(1, 600, D)
    with torch.no_grad():
        largest = largest_tensor(lambda: layer.prefill(x, layer.init_state(1)))
    assert largest == H * 2 * 4 * 600  # for each head and round, which of the keys a chunk of queries sees


@each_kind
@pytest.mark.parametrize(
    ("field", "value"), [("n_hashes", 0), ("n_buckets", 3), ("n_buckets", 0), ("chunk_len", 0), ("full_below", -1)]
)
def test_bad_sizes_are_refused(kind, field, value):
    with pytest.raises(ValueError, match=rf"{field} = {value}: must be an "):
        make(kind, **{field: value})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DenseLSHAttention(10, 4, **SIZES), r"d_model = 10: must be a multiple of n_heads = 4"),
        (lambda: DenseLSHAttention(0, 2, **SIZES), r"d_model = 0: must be an int of at least 1"),
        (lambda: SparseLSHAttention(12, 2, 5, **SIZES), r"d_model = 12: must be a multiple of n_modules = 5"),
        (lambda: SparseLSHAttention(12, 2, 0, **SIZES), r"n_modules = 0: must be an int of at least 1"),
        (lambda: SparseLSHAttention(12, 2, 4, 2, **SIZES), r"module_kernel = 2: must be odd"),
    ],
)
def test_projections_that_do_not_fit_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@each_kind
def test_masks_and_prefixes_that_do_not_fit_are_refused(kind):
    layer, x, prefix = make(kind), vectors(2, 3, D), torch.tensor([1, 1])
    for mask, message in (
        (torch.ones(2, 4), r"mask.shape = \(2, 4\): must be \(2, 3\)"),
        (torch.tensor([[1, 1, 1], [0, 0, 0]]), r"mask = 'all false in row \[1\]': must be true somewhere in every row"),
        (torch.full((2, 3), 2), r"mask = .*: must be made of bool or 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(x, mask)
    for use in (lambda: layer(x, None, prefix), lambda: layer.prefill(x, layer.init_state(2), prefix)):
        with pytest.raises(ValueError, match=r"prefix_length = .*: must be None: attention by hashing has no prefix"):
            use()
    with pytest.raises(ValueError, match=r"causal = False: must be True to decode token by token"):
        make(kind, causal=False).init_state(1)
