"""The contract of every layer: forward, step and prefill agree, states are values, nothing sees the future."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import (
    SRU,
    BlockFeedForward,
    Chain,
    CrossAttention,
    Dense,
    DenseAttention,
    DenseLSHAttention,
    DenseUnembedding,
    FeedForward,
    Layer,
    ModuleConv,
    MultiplicativeDense,
    RecurrentBranch,
    SparseAttention,
    SparseCrossAttention,
    SparseFeedForward,
    SparseLSHAttention,
    SparseUnembedding,
    Stateless,
    SwitchFeedForward,
)

from .. import slow
from ..helpers import (
    by_chunks,
    by_steps,
    chunk_sizes,
    close,
    non_contiguous,
    randomized,
    seeds,
    snapshot,
    unchanged,
    vectors,
)

D, SOURCE = 4, 3
KERNEL = 3


class WithMemory(Layer):
    """Cross-attention to a fixed memory, so that it is used like any other layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def memory(self, batch):
        dtype = next(self.parameters()).dtype
        return vectors(batch, SOURCE, D, seed=11, dtype=dtype), torch.ones(batch, SOURCE)

    def forward(self, x):
        return self.layer(x, *self.memory(len(x)))

    def init_state(self, batch):
        return self.layer.init_state_from(*self.memory(batch))

    def prefill(self, x, state):
        return self.layer.prefill(x, state)

    def step(self, x_t, state):
        return self.layer.step(x_t, state)


def in_one_bucket(layer):
    """Attention by hashing whose forward and decoding do the same: a chunk covers all lengths tried here."""
    layer.rotations.zero_()
    return layer


LSH = dict(n_hashes=2, n_buckets=4, chunk_len=16)
LAYERS = {
    "dense": lambda: Dense(D, 3),
    "chain": lambda: Chain(MultiplicativeDense(D, D, 2), ModuleConv(D, 2, KERNEL), Dense(D, 5)),
    "feedforward": lambda: FeedForward(D, 6),
    "feedforward_no_b1": lambda: FeedForward(D, 6, hidden_bias=False),
    "sparse_feedforward": lambda: SparseFeedForward(D, 6, 3, 2),
    "sparse_feedforward_reference": lambda: SparseFeedForward(
        D, 6, 2, 3, controller="reference", hidden_bias=False, controller_bias=True
    ),
    "block": lambda: BlockFeedForward(D, 6, 3),
    "switch": lambda: SwitchFeedForward(D, 6, 2, hidden_bias=False),
    "multiplicative": lambda: MultiplicativeDense(D, 6, 2),
    "multiplicative_no_bias": lambda: MultiplicativeDense(D, D, 4, bias=False),
    "conv": lambda: ModuleConv(D, 2, KERNEL),
    "conv_length_1": lambda: ModuleConv(D, 2, 1),
    "conv_modules_1": lambda: ModuleConv(D, 2, KERNEL, 1),
    "conv_wide": lambda: ModuleConv(D, 2, 5, 3, d_out=6),
    "attention": lambda: DenseAttention(D, 2),
    "attention_mult": lambda: SparseAttention(D, 2, 2, KERNEL, "mult"),
    "attention_conv": lambda: SparseAttention(D, 2, 2, KERNEL, "conv"),
    "attention_mult_conv": lambda: SparseAttention(D, 2, 2, KERNEL, "mult_conv"),
    "attention_mult_conv_output": lambda: SparseAttention(D, 4, 2, KERNEL, "mult_conv_output", value_kernel_size=1),
    "attention_options": lambda: SparseAttention(
        D, 1, 2, KERNEL, "mult_conv_output", value_kernel_size=1, share_qk=True, v_sees_input=True
    ),
    "lsh_below": lambda: DenseLSHAttention(D, 2, **LSH, full_below=16),
    "lsh_one_bucket": lambda: in_one_bucket(DenseLSHAttention(D, 2, **LSH)),
    "lsh_one_bucket_in_part": lambda: in_one_bucket(DenseLSHAttention(D, 1, **LSH, full_below=3)),
    "lsh_sparse": lambda: in_one_bucket(SparseLSHAttention(D, 2, 2, KERNEL, **LSH)),
    "cross": lambda: WithMemory(CrossAttention(D, 2)),
    "cross_sparse": lambda: WithMemory(SparseCrossAttention(D, 2, 2, KERNEL)),
    "sru": lambda: SRU(D),
    "recurrent_branch": lambda: RecurrentBranch(D, 3, 2),
    "unembedding": lambda: DenseUnembedding(D, 7),
    "unembedding_sparse": lambda: SparseUnembedding(D, 8, 2),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def make(name):
    return randomized(LAYERS[name](), seed=5)


@every_layer
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_steps_and_one_prefill_equal_the_forward(name, batch):
    layer = make(name)
    for length in range(1, KERNEL + 3):
        x = vectors(batch, length, D, seed=length)
        y = layer(x)
        assert y.shape[:2] == (batch, length) and y.isfinite().all()
        close(by_steps(layer, x, layer.init_state(batch))[0], y)
        close(layer.prefill(x, layer.init_state(batch))[0], y)


@every_layer
@settings(max_examples=10)
@given(data=st.data())
def test_any_chunks_equal_the_forward(name, data):
    layer, length = make(name), data.draw(st.integers(1, 9))
    x = vectors(2, length, D, seed=data.draw(seeds))
    state = layer.init_state(2)
    sizes = data.draw(chunk_sizes(length))
    close(by_chunks(layer, x, state, sizes)[0], layer(x))
    head = data.draw(st.integers(0, length - 1))  # the two ways of decoding hand their states to one another
    mid = by_steps(layer, x[:, :head], state)[1] if head else state
    close(layer.prefill(x[:, head:], mid)[0], layer(x)[:, head:])
    mid = layer.prefill(x[:, :head], state)[1] if head else state
    close(by_steps(layer, x[:, head:], mid)[0], layer(x)[:, head:])


@every_layer
def test_non_contiguous_input_gives_the_same(name):
    layer, x = make(name), vectors(3, 5, D)
    y = layer(x)
    close(layer(non_contiguous(x)), y)
    close(layer(x.transpose(0, 1).contiguous().transpose(0, 1)), y)
    close(layer.prefill(non_contiguous(x), layer.init_state(3))[0], y)
    close(layer.step(non_contiguous(x[:, 0]), layer.init_state(3))[0], y[:, 0])


@every_layer
@pytest.mark.parametrize("how", ["step", "prefill"])
def test_an_old_state_can_be_used_again(name, how):
    layer, x = make(name), vectors(2, 6, D)
    _, state = by_steps(layer, x[:, :3], layer.init_state(2))
    before = snapshot(state)

    def advance(z):
        return layer.step(z[:, 0], state) if how == "step" else layer.prefill(z, state)

    first, after = advance(x[:, 3:4])
    kept, kept_state = first.clone(), snapshot(after)
    advance(x[:, 4:5] + 7)
    assert torch.equal(first, kept) and unchanged(after, kept_state) and unchanged(state, before)
    again, _ = advance(x[:, 3:4])
    assert torch.equal(again, kept)
    close(layer.step(x[:, 4], after)[0], layer(x)[:, 4])


@every_layer
def test_a_change_at_t_changes_nothing_before_t_and_something_at_t(name):
    layer, x = make(name), vectors(2, 6, D)
    y = layer(x)
    for t in range(6):
        changed = x.clone()
        changed[:, t:] = vectors(2, 6 - t, D, seed=99)
        z = layer(changed)
        assert torch.equal(z[:, :t], y[:, :t])
        if t != 1 or "lsh" not in name:  # there position 1 sees 0 alone, whatever its own query and value
            assert (z[:, t] != y[:, t]).any()


@every_layer
def test_gradients_in_float64(name):
    layer = make(name)
    x = vectors(1, 4, D, seed=3).requires_grad_()
    names, weights = zip(*layer.named_parameters(), strict=True)

    def function(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *weights))


@every_layer
def test_gradients_through_chunks_and_steps_are_those_of_the_forward(name):
    layer, x = make(name), vectors(2, 5, D).requires_grad_()
    weights = list(layer.parameters())

    def grads(y):
        scalar = (y * vectors(*y.shape, seed=1)).sum()
        return torch.autograd.grad(scalar, [x, *weights], allow_unused=True)  # no gradient for an arg-max

    whole = grads(layer(x))
    for decode in (by_steps, lambda *a: by_chunks(*a, [2, 3])):
        for part, full in zip(grads(decode(layer, x, layer.init_state(2))[0]), whole, strict=True):
            assert (part is None) == (full is None)
            if full is not None:
                close(part, full)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_follow_the_float64_result(name, dtype):
    layer, x = make(name), vectors(2, 5, D, seed=4)
    y = layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    steps, _ = by_steps(layer, x.to(dtype), layer.init_state(2))
    assert steps.dtype == dtype
    layer.double()
    exact = layer(x.to(dtype).double())
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype is torch.float32 else dict(rtol=0.1, atol=0.15)
    torch.testing.assert_close(y.double(), exact, **tolerance)
    torch.testing.assert_close(steps.double(), exact, **tolerance)


@every_layer
@pytest.mark.parametrize("face", ["forward", "prefill", "step"])
def test_bad_vectors_are_refused_by_every_face(name, face):
    layer = make(name)

    def use(x):
        if face == "forward":
            return layer(x)
        return getattr(layer, face)(x if face == "prefill" else x.select(1, 0), layer.init_state(2))

    nan = vectors(2, 3, D)
    nan[1, 0, 2] = float("nan")
    with pytest.raises(ValueError, match=r"= 'NaN': must be free of NaN"):
        use(nan)
    with pytest.raises(ValueError, match=rf"shape = \(.*{D + 1}\): must be .*{D}"):
        use(vectors(2, 3, D + 1))
    with pytest.raises(ValueError, match=r"dtype = torch.float16: must be float32, float64 or bfloat16 on a CPU"):
        use(vectors(2, 3, D, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"dtype = torch.int64: must be a floating-point type"):
        use(vectors(2, 3, D, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape = \(2, .*3, 1, 4\): must be \(batch, "):
        use(vectors(2, 3, 1, D) if face != "step" else vectors(2, 1, 3, 1, D))
    if face != "step":
        with pytest.raises(ValueError, match=r"shape = \(2, 0, 4\): must be a sequence of at least one position"):
            use(vectors(2, 0, D))


@pytest.mark.parametrize("name", [name for name in LAYERS if "cross" not in name])
@pytest.mark.parametrize("batch", [-1, 2.0])
def test_an_impossible_batch_is_refused(name, batch):
    layer = make(name)
    with pytest.raises(ValueError, match=rf"batch = {batch}: must be an int of at least 0"):
        layer.init_state(batch)


@pytest.mark.parametrize("name", [name for name, new in LAYERS.items() if not isinstance(new(), Stateless)])
@pytest.mark.parametrize("face", ["prefill", "step"])
@pytest.mark.parametrize(("batch", "others"), [(2, 3), (1, 3), (3, 1)])
def test_the_state_of_another_batch_is_refused(name, face, batch, others):
    layer = make(name)
    state = layer.init_state(batch)
    before = snapshot(state)
    x = vectors(others, 1, D)
    with pytest.raises(ValueError, match=rf"{others}.*must be .*{batch}"):
        layer.prefill(x, state) if face == "prefill" else layer.step(x[:, 0], state)
    assert unchanged(state, before)


@settings(max_examples=20)
@given(seed=seeds, d_in=st.integers(1, 5), d_out=st.integers(1, 5), length=st.integers(1, 4))
def test_dense_equals_the_slow_reference(seed, d_in, d_out, length):
    layer, x = randomized(Dense(d_in, d_out), seed), vectors(2, length, d_in, seed=seed)
    close(layer(x), slow.dense(x.numpy(), slow.weights_of(layer)))


def test_dense_starts_glorot_uniform_with_bias_zero():
    torch.manual_seed(0)
    layer = Dense(300, 100)
    bound = (6 / 400) ** 0.5
    assert 0.99 * bound < layer.weight.abs().max() <= bound
    assert layer.weight.var().item() == pytest.approx(bound**2 / 3, rel=0.03)
    assert not layer.bias.any()


def test_a_chain_is_its_layers_one_after_another():
    torch.manual_seed(0)
    first, second, x = Dense(4, 6), ModuleConv(6, 2), vectors(2, 5, 4, dtype=torch.float32)
    assert torch.equal(Chain(first, second)(x), second(first(x)))
