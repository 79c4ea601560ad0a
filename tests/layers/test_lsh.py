"""The weightless rules: hashing, chunks, rounds, decoding by buckets, against loops and in the corner cases."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import LSHSizes, lsh_attend
from sparselib.layers.lsh import bucket_attend, full_attend, hash_buckets, normalized

from .. import slow
from ..helpers import close, generator, seeds, vectors
from .memory import largest_tensor, saved_elements

B, H, DH = 2, 2, 4
WHO = list(np.ndindex(B, H))

factors = st.sampled_from([2, 4, 6, (2,), (2, 4), (4, 2, 2)])
any_sizes = st.builds(
    LSHSizes,
    n_hashes=st.integers(1, 3),
    n_buckets=factors,
    chunk_len=st.integers(1, 6),
    n_chunks_before=st.integers(0, 2),
    n_chunks_after=st.integers(0, 2),
)
lengths = st.integers(1, 13)
GRADIENT_SIZES = LSHSizes(n_hashes=2, n_buckets=4, chunk_len=2, n_chunks_after=1)


def qk_and_v(length, seed=0):
    return vectors(B, H, length, DH, seed=seed), vectors(B, H, length, DH, seed=seed + 1)


def rotations_for(sizes, seed=0):
    return vectors(H, sizes.n_hashes, DH, sum(sizes.factors) // 2, seed=seed)


def some_mask(length, seed):
    """Padding anywhere, of all of a row too."""
    return torch.rand(B, length, generator=generator(seed)) < 0.6


def reals(mask, length):
    return np.ones((B, length), bool) if mask is None else mask.numpy()


def by_head(function):
    """The results of ``function(b, h)`` for every sequence and head, as one tensor."""
    return torch.tensor(np.array([[function(b, h) for h in range(H)] for b in range(B)]))


# --- against the slow references --------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(sizes=any_sizes, length=lengths, masked=st.booleans(), seed=seeds)
def test_buckets_equal_the_slow_reference(sizes, length, masked, seed):
    (qk, _), rotations = qk_and_v(length, seed), rotations_for(sizes, seed)
    mask = some_mask(length, seed) if masked else None
    buckets = hash_buckets(qk, rotations, sizes, mask)
    real, last = reals(mask, length), sizes.padding_bucket

    def head(b, h):
        slowly = [slow.lsh_buckets(x.numpy(), rotations[h].numpy(), sizes.factors) for x in qk[b, h]]
        return np.where(real[b], np.array(slowly).T, last)

    assert torch.equal(buckets, by_head(head))
    per_sequence = torch.stack([rotations, -rotations])  # the reference draws rotations for every sequence
    first, second = hash_buckets(qk, per_sequence, sizes, mask)
    assert torch.equal(first, buckets[0])
    assert torch.equal(second, hash_buckets(-qk, rotations, sizes, mask)[1])


@settings(max_examples=60)
@given(sizes=any_sizes, length=lengths, causal=st.booleans(), masked=st.booleans(), seed=seeds)
def test_chunks_equal_the_slow_reference(sizes, length, causal, masked, seed):
    qk, v = qk_and_v(length, seed)
    mask = some_mask(length, seed) if masked else None
    buckets = hash_buckets(qk, rotations_for(sizes, seed), sizes, mask)
    real = reals(mask, length)
    y = by_head(
        lambda b, h: slow.lsh_attention(
            qk[b, h].numpy(), v[b, h].numpy(), buckets[b, h].tolist(), sizes, causal, real[b]
        )
    )
    close(lsh_attend(qk, v, buckets, sizes, causal, mask), y)


@settings(max_examples=30)
@given(length=lengths, causal=st.booleans(), masked=st.booleans(), seed=seeds, data=st.data())
def test_full_attention_equals_the_slow_reference(length, causal, masked, seed, data):
    qk, v = qk_and_v(length, seed)
    mask = some_mask(length, seed) if masked else None
    real = reals(mask, length)
    y = by_head(lambda b, h: slow.lsh_full(qk[b, h].numpy(), v[b, h].numpy(), causal, real[b]))
    start = data.draw(st.integers(0, length - 1))
    close(full_attend(qk[:, :, start:], normalized(qk), v, causal, mask), y[:, :, start:])


@settings(max_examples=30)
@given(sizes=any_sizes, length=lengths, seed=seeds, data=st.data())
def test_decoding_equals_the_slow_reference(sizes, length, seed, data):
    qk, v = qk_and_v(length, seed)
    buckets = hash_buckets(qk, rotations_for(sizes, seed), sizes)
    y = by_head(lambda b, h: slow.lsh_decoding(qk[b, h].numpy(), v[b, h].numpy(), buckets[b, h].tolist(), sizes.window))
    start = data.draw(st.integers(0, length - 1))
    close(bucket_attend(qk[:, :, start:], normalized(qk), v, buckets, sizes.window), y[:, :, start:])


# --- what the rules say -----------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(sizes=any_sizes, length=lengths, causal=st.booleans(), seed=seeds)
def test_filling_up_by_hand_with_padding_is_the_same(sizes, length, causal, seed):
    (qk, v), extra = qk_and_v(length, seed), -length % sizes.chunk_len
    rotations = rotations_for(sizes, seed)
    y = lsh_attend(qk, v, hash_buckets(qk, rotations, sizes), sizes, causal)
    qk, v = (torch.cat([z, vectors(B, H, extra, DH, seed=9)], dim=2) for z in (qk, v))
    mask = (torch.arange(length + extra) < length).expand(B, -1)
    z = lsh_attend(qk, v, hash_buckets(qk, rotations, sizes, mask), sizes, causal, mask)
    close(z[:, :, :length], y)


@settings(max_examples=30)
@given(length=lengths, chunk_len=st.integers(1, 13), before=st.integers(0, 12), causal=st.booleans(), seed=seeds)
def test_one_bucket_and_neighbours_over_the_length_is_full_attention(length, chunk_len, before, causal, seed):
    """However many more neighbours than chunks there are."""
    after = max(-(-length // chunk_len) - 1 - before, 0) + seed % 3
    chunks = dict(chunk_len=chunk_len, n_chunks_before=before, n_chunks_after=after)
    sizes, (qk, v) = LSHSizes(n_hashes=1, n_buckets=2, **chunks), qk_and_v(length, seed)
    y = lsh_attend(qk, v, torch.zeros(B, H, 1, length, dtype=torch.long), sizes, causal)
    close(y, full_attend(qk, normalized(qk), v, causal))


@settings(max_examples=30)
@given(
    n_hashes=st.integers(1, 3),
    before=st.integers(0, 2),
    after=st.integers(0, 2),
    length=lengths,
    longer=st.integers(0, 3),
    causal=st.booleans(),
    masked=st.booleans(),
    seed=seeds,
)
def test_one_bucket_and_a_chunk_over_the_length_is_full_attention(
    n_hashes, before, after, length, longer, causal, masked, seed
):
    chunks = dict(chunk_len=length + longer, n_chunks_before=before, n_chunks_after=after)
    sizes, (qk, v) = LSHSizes(n_hashes=n_hashes, n_buckets=2, **chunks), qk_and_v(length, seed)
    buckets, mask = torch.zeros(B, H, n_hashes, length, dtype=torch.long), None
    if masked:
        mask = some_mask(length, seed)
        buckets = buckets.masked_fill(~mask[:, None, None], 2)
    y = full_attend(qk, normalized(qk), v, causal, mask)
    close(lsh_attend(qk, v, buckets, sizes, causal, mask), y)
    if causal and not masked:
        close(bucket_attend(qk, normalized(qk), v, buckets, sizes.window), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_hashes", [1, 2, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_who_sees_nobody_else_has_its_own_value_exactly(dtype, n_hashes, causal):
    sizes = LSHSizes(n_hashes=n_hashes, n_buckets=4, chunk_len=1, n_chunks_before=0)
    qk, v = (100 * z.to(dtype) for z in qk_and_v(7))
    buckets = hash_buckets(qk, rotations_for(sizes).to(dtype), sizes)
    assert torch.equal(lsh_attend(qk, v, buckets, sizes, causal), v)
    wide = LSHSizes(n_hashes=n_hashes, n_buckets=4, chunk_len=3, n_chunks_before=2, n_chunks_after=1)
    for y in (
        lsh_attend(qk, v, buckets, wide),
        full_attend(qk, normalized(qk), v),
        bucket_attend(qk, normalized(qk), v, buckets, wide.window),
    ):
        assert torch.equal(y[:, :, 0], v[:, :, 0]) and not torch.equal(y, v)


def test_a_round_in_which_it_is_alone_does_not_count():
    sizes, (qk, v) = LSHSizes(n_hashes=2, n_buckets=2, chunk_len=2, n_chunks_before=0), qk_and_v(4)
    buckets = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 1]]).expand(B, H, 2, 4)
    y = lsh_attend(qk, v, buckets, sizes)
    assert torch.equal(y[:, :, 1], v[:, :, 0])  # with 0 in the first round, in the second only with 3
    close(y[:, :, 2:], torch.stack([v[:, :, 0], slow_two(qk, v, 3, 2, 1)], dim=2))


def slow_two(qk, v, t, first, second):
    """Position t with one other in each of two rounds."""
    return by_head(lambda b, h: slow.look(qk[b, h].numpy(), v[b, h].numpy(), t, [first, second])[0])


@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_padding_only_stay_finite(causal):
    (qk, v), mask = qk_and_v(5), torch.tensor([[0] * 5, [0, 0, 1, 0, 0]])
    qk, v = qk.requires_grad_(), v.requires_grad_()
    buckets = hash_buckets(qk, rotations_for(GRADIENT_SIZES), GRADIENT_SIZES, mask)
    for y in (
        lsh_attend(qk, v, buckets, GRADIENT_SIZES, causal, mask),
        full_attend(qk, normalized(qk), v, causal, mask),
    ):
        assert y.isfinite().all() and torch.equal(y[0], v[0])
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.square().sum(), (qk, v)))


@settings(max_examples=20)
@given(sizes=any_sizes, length=st.integers(2, 13), seed=seeds, data=st.data())
def test_given_the_buckets_nobody_sees_the_future_or_padding(sizes, length, seed, data):
    (qk, v), (other_qk, other_v) = qk_and_v(length, seed), qk_and_v(length, seed + 7)
    buckets = hash_buckets(qk, rotations_for(sizes, seed), sizes)
    t = data.draw(st.integers(1, length - 1))
    changed = [torch.cat([a[:, :, :t], b[:, :, t:]], dim=2) for a, b in ((qk, other_qk), (v, other_v))]
    now, then = lsh_attend(qk, v, buckets, sizes), lsh_attend(*changed, buckets, sizes)
    assert torch.equal(now[:, :, :t], then[:, :, :t])
    mask = (torch.arange(length) < t).expand(B, -1)
    buckets = hash_buckets(qk, rotations_for(sizes, seed), sizes, mask)
    now, then = (lsh_attend(*z, buckets, sizes, False, mask) for z in ((qk, v), changed))
    assert torch.equal(now[:, :, :t], then[:, :, :t])


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_with_buckets_and_order_as_constants(causal):
    qk, v = (z.requires_grad_() for z in qk_and_v(5))
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    buckets = hash_buckets(qk, rotations_for(GRADIENT_SIZES), GRADIENT_SIZES, mask)
    assert torch.autograd.gradcheck(lambda q, v: lsh_attend(q, v, buckets, GRADIENT_SIZES, causal, mask), (qk, v))
    assert torch.autograd.gradcheck(lambda q, v: full_attend(q, normalized(q), v, causal, mask), (qk, v))
    if causal:
        assert torch.autograd.gradcheck(lambda q, v: bucket_attend(q, normalized(q), v, buckets, 2), (qk, v))


def test_memory_grows_with_the_length_and_not_with_its_square():
    sizes = LSHSizes(n_hashes=2, n_buckets=16, chunk_len=8)

    def elements(length):
        qk, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(2))
        buckets = hash_buckets(qk, torch.randn(1, 2, 4, 8), sizes)
        whole = largest_tensor(lambda: lsh_attend(qk, v, buckets, sizes).sum().backward())
        return whole, saved_elements(lambda: lsh_attend(qk, v, buckets, sizes))

    largest, saved = elements(512)
    assert largest == 2 * 512 * 2 * 8  # R L K C
    assert elements(1024) == (2 * largest, pytest.approx(2 * saved, rel=0.01))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n_hashes", 0, "an int of at least 1"),
        ("chunk_len", 0, "an int of at least 1"),
        ("chunk_len", 2.0, "an int of at least 1"),
        ("n_chunks_before", -1, "an int of at least 0"),
        ("n_chunks_after", -1, "an int of at least 0"),
        ("full_below", -1, "an int of at least 0"),
        ("n_buckets", 0, "an even int of at least 2, or a tuple of such"),
        ("n_buckets", 5, "an even int"),
        ("n_buckets", -2, "an even int"),
        ("n_buckets", 4.0, "an even int"),
        ("n_buckets", True, "an even int"),
        ("n_buckets", (), "an even int"),
        ("n_buckets", (4, 3), "an even int"),
    ],
)
def test_bad_sizes_are_refused(field, value, allowed):
    good = dict(n_hashes=1, n_buckets=4, chunk_len=2)
    with pytest.raises(ValueError) as error:
        LSHSizes(**{**good, field: value})
    assert f"{field} = {value!r}: must be {allowed}" in str(error.value)


def test_shapes_that_do_not_fit_are_refused():
    sizes, (qk, v) = GRADIENT_SIZES, qk_and_v(5)
    rotations, buckets = rotations_for(sizes), torch.zeros(B, H, 2, 5, dtype=torch.long)
    bad_mask = torch.ones(B, 4)
    for use, message in (
        (lambda: hash_buckets(qk, rotations[:, :1], sizes), r"rotations.shape = .*: must be \(2, 2, 4, 2\)"),
        (lambda: hash_buckets(qk, rotations, sizes, bad_mask), r"mask.shape = \(2, 4\): must be \(2, 5\)"),
        (lambda: lsh_attend(qk, v, buckets, sizes, mask=bad_mask), r"mask.shape = \(2, 4\): must be \(2, 5\)"),
        (lambda: lsh_attend(qk, v, buckets[..., :4], sizes), r"buckets.shape = \(2, 2, 2, 4\): must be \(2, 2, 2, 5\)"),
        (lambda: lsh_attend(qk, v[:, :, 1:], buckets, sizes), r"v.shape = \(2, 2, 4, 4\): must be \(2, 2, 5, 4\)"),
        (lambda: full_attend(qk, qk, v, mask=bad_mask), r"mask.shape = \(2, 4\): must be \(2, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            use()
