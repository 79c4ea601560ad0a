"""The engine decodes attention by hashing as the model's steps do: below and above ``full_below``, prompts, sources."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sparselib.config import HASHING, LSHSizes, ModelConfig
from sparselib.decode import DTYPES, Engine, Packed, pack, pack_random
from sparselib.models import make_model

from ..helpers import by_steps, chunk_sizes, ids, randomized, seeds
from ..models.build import DECODING
from .engines import by_engine, dequantized, ends, near, odd_configs, smallest_gap

V, SOURCE, LENGTH = 12, 7, 10
SIZES = dict(vocab_size=V, d_model=8, d_ff=12, n_heads=2, n_layers=2, max_len=20, feedforward="sparse")
LAYERS = dict(ff_sparsity=3, d_lowrank=4, n_modules=2, value_kernel_size=1, loss_sparsity=2)
ARCHITECTURES = (*DECODING, "terraformer")
HASHES = [
    dict(n_hashes=1, n_buckets=2, chunk_len=2),
    dict(n_hashes=3, n_buckets=4, chunk_len=1, n_chunks_before=2, full_below=4),
    dict(n_hashes=2, n_buckets=(2, 4), chunk_len=3, n_chunks_after=1, full_below=9),
    dict(n_hashes=1, n_buckets=64, chunk_len=30, n_chunks_before=0),  # most positions are alone
    dict(n_hashes=2, n_buckets=2, chunk_len=2, full_below=99),
]
HASH = HASHES[1]
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)
each_kind = pytest.mark.parametrize("kind", HASHING)


def make(architecture="decoder", kind="mult_conv", hashing=HASH, seed=0, **fields):
    has_source = architecture in ("encoder_decoder", "terraformer")
    kinds = dict(architecture=architecture, attention=kind, n_encoder_layers=2 * has_source)
    config = ModelConfig(**SIZES | LAYERS | kinds | dict(lsh=LSHSizes(**hashing)) | fields)
    model = make_model(config)
    generator = torch.Generator().manual_seed(seed)
    for buffer in rotations(model).values():
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return randomized(model, seed, scale=0.3)


def rotations(model):
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(".rotations")}


class Inputs:
    """Tokens of a batch, sources of different lengths where the model takes one, and the model's logits (B, L, V).

    Each row by itself: in a batch, an encoder that hashes knows how wide it is. ``gap``: how clear the closest of all
    choices is.
    """

    def __init__(self, model, batch, length=LENGTH, seed=0):
        config = model.config
        self.batch, self.tokens = batch, ids(batch, length, high=config.vocab_size, seed=seed)
        self.source = self.mask = None
        if config.has_source:
            self.source = ids(batch, SOURCE, high=config.vocab_size, seed=seed + 1)
            self.lengths = SOURCE - np.random.default_rng(seed).permutation(SOURCE)[:batch]
            self.mask = np.arange(SOURCE) < self.lengths[:, None]
        with smallest_gap(model) as gap:
            self.logits = self.each_alone(model, model.prefill)
        self.gap = gap()

    @torch.no_grad()
    def each_alone(self, model, how):
        logits = []
        for row in range(self.batch):
            source = () if self.source is None else (self.source[row : row + 1, : self.lengths[row]],)
            logits.append(how(self.tokens[row : row + 1], model.init_state(1, *source))[0])
        return torch.cat(logits)


def settled(batch, *arguments, dtype="fp32", **fields):
    """A model and inputs for which rounding changes no choice; the logits are those of its steps."""
    for seed in itertools.count():
        model = make(*arguments, seed=seed, **fields)
        model = model if dtype == "fp32" else dequantized(model, dtype)
        inputs = Inputs(model, batch, seed=seed)
        if inputs.gap > 5e-4:
            inputs.logits = inputs.each_alone(model, functools.partial(by_steps, model))
            return model, inputs


def engine_of(model, inputs, dtype="fp32", **options):
    sizes = dict(source_len=SOURCE) if model.config.has_source else {}
    engine = Engine(pack(model, dtype), inputs.batch, **dict(threads=1) | sizes | options)
    if inputs.source is not None:
        engine.start(inputs.source, inputs.mask)
    return engine


# --- values -----------------------------------------------------------------------------------------------------------


@each_architecture
@each_kind
@pytest.mark.parametrize("hashing", HASHES, ids=str)
def test_every_kind_of_layer_equals_the_models_steps(architecture, kind, hashing):
    model, inputs = settled(3, architecture, kind, hashing)
    for sizes, threads in itertools.product(([0] * LENGTH, [3, 0, 4, 2]), (1, 2)):
        engine = engine_of(model, inputs, threads=threads)
        near(by_engine(engine, inputs.tokens, sizes).swapaxes(0, 1), inputs.logits[:, ends(sizes)])
        engine.close()


some_sizes = st.builds(
    LSHSizes,
    n_hashes=st.integers(1, 3),
    n_buckets=st.sampled_from([2, 4, 34, (2, 4), (6, 2, 2)]),
    chunk_len=st.integers(1, 9),
    n_chunks_before=st.integers(0, 3),
    n_chunks_after=st.integers(0, 2),
    full_below=st.sampled_from([0, 0, 3, 12, 30]),
)


@settings(max_examples=80)
@given(sizes=some_sizes, kinds=st.tuples(*[st.sampled_from(HASHING)] * 2), seed=seeds, data=st.data())
def test_odd_sizes_and_chunks_equal_the_model(sizes, kinds, seed, data):
    architecture = data.draw(st.sampled_from(ARCHITECTURES))
    fixed = dict(architecture=architecture, attention=kinds[0], encoder_attention=kinds[1])
    config = dataclasses.replace(data.draw(odd_configs(**fixed)), lsh=sizes)
    torch.manual_seed(seed % 2**31)  # the rotations
    model = randomized(make_model(config), seed, scale=0.3)
    length = data.draw(st.integers(1, 70))  # more than are looked at together
    inputs = Inputs(model, data.draw(st.integers(1, 3)), length, seed)
    assume(inputs.gap > 1e-3)
    cuts = data.draw(chunk_sizes(length))
    engine = engine_of(model, inputs, threads=data.draw(st.integers(1, 3)))
    logits = by_engine(engine, inputs.tokens, cuts)
    engine.close()
    near(logits.swapaxes(0, 1), inputs.logits[:, ends(cuts)])


@each_architecture
@each_kind
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_small_dtypes_equal_the_model_with_rounded_weights(architecture, kind, dtype):
    (model, inputs), sizes = settled(2, architecture, kind, dtype=dtype), [0, 6, 3]
    engine = engine_of(model, inputs, dtype, threads=2)
    near(by_engine(engine, inputs.tokens, sizes).swapaxes(0, 1), inputs.logits[:, ends(sizes)])
    engine.close()


@each_architecture
def test_with_one_bucket_and_a_window_over_all_it_is_full_attention(architecture):
    hashing = dict(n_hashes=2, n_buckets=2, chunk_len=40)
    model, inputs = settled(2, architecture, hashing=hashing | dict(full_below=99))
    config = dataclasses.replace(model.config, lsh=LSHSizes(**hashing))
    one_bucket = make_model(config).double().eval()
    one_bucket.load_state_dict(model.state_dict())
    for buffer in rotations(one_bucket).values():
        buffer.zero_()
    near(engine_of(one_bucket, inputs).prefill(inputs.tokens.numpy()), inputs.logits[:, -1])


# --- what is remembered -----------------------------------------------------------------------------------------------


def test_buckets_are_the_models():
    model, inputs = settled(2, hashing=dict(n_hashes=3, n_buckets=(4, 6), chunk_len=2))
    engine = engine_of(model, inputs, threads=2)
    by_engine(engine, inputs.tokens, [4, 0, 5])
    _, state = model.prefill(inputs.tokens, model.init_state(2))
    kept = [cache for cache in engine.program.caches if cache.across]
    for cache, block in zip(kept, state.blocks, strict=True):
        lines = engine._lines(cache)[:, :LENGTH].copy().view(np.int32)
        expected = block.attention.buckets.permute(0, 3, 1, 2).flatten(2)
        assert (lines == expected.numpy()).all() and len(np.unique(lines)) > 4
    engine.close()


@each_architecture
def test_a_state_taken_back_and_a_rewound_engine_give_the_same_again(architecture):
    model, inputs = settled(3, architecture)
    tokens, engine = inputs.tokens.numpy(), engine_of(model, inputs)
    other = engine_of(model, inputs, threads=2)
    engine.prefill(tokens[:, :6])
    state = engine.state()
    first = [engine.step(tokens[:, t]).copy() for t in range(6, LENGTH)]
    engine.rewind(1)
    engine.prefill((tokens[:, 1:9] + 1) % V)
    engine.restore(state)
    other.restore(state)
    for t, expected in enumerate(first, 6):
        assert np.array_equal(engine.step(tokens[:, t]), expected)
        near(other.step(tokens[:, t]), inputs.logits[:, t])
    engine.rewind(7)
    assert np.array_equal(engine.step(tokens[:, 7]), first[1])
    other.close()


@each_architecture
def test_sequences_go_their_own_ways(architecture):
    model, inputs = settled(3, architecture)
    tokens, engine = inputs.tokens.numpy(), engine_of(model, inputs, threads=2)
    for slot, length in ((2, 5), (0, 1), (1, 8)):
        near(engine.prefill(tokens[slot, :length], [slot]), inputs.logits[[slot], length - 1])
    near(engine.step(tokens[[0, 1, 2], [1, 8, 5]]), inputs.logits[[0, 1, 2], [1, 8, 5]])
    engine.rewind(5, [1])
    engine.start(*(() if inputs.source is None else (inputs.source[:1], inputs.mask[:1])), sequences=[2])
    near(engine.prefill(tokens[:1], [2]), inputs.logits[:1, -1])
    near(engine.step(tokens[[0, 1], [2, 5]], [0, 1]), inputs.logits[[0, 1], [2, 5]])
    engine.close()


def test_a_batch_of_unequal_rows_in_the_model_and_in_the_engine():
    model, inputs = settled(3, "terraformer", hashing=HASHES[2])  # whose encoder attends to all sources in full
    state = model.init_state(3, inputs.source, torch.from_numpy(inputs.mask))
    assert len(set(inputs.lengths)) == 3 and SOURCE <= model.config.lsh.full_below < SOURCE + LENGTH
    engine = engine_of(model, inputs)
    with torch.no_grad():
        for token in inputs.tokens.T:
            logits, state = model.step(token, state)
            near(engine.step(token.numpy()), logits)


def test_vectors_in_place_of_a_source_are_read_on():
    model, inputs = settled(1, "terraformer", reversible_encoder=False)  # whose encoder hands on one stream
    with torch.no_grad():
        memory, _, _ = model._encode(inputs.source[:, : inputs.lengths[0]], None)
    engine = Engine(pack(model), source_len=SOURCE, threads=1)
    engine.start(memory=memory.numpy())
    near(engine.prefill(inputs.tokens.numpy()), inputs.logits[:, -1])


# --- packing ----------------------------------------------------------------------------------------------------------


def test_rotations_are_packed_as_they_are_and_come_back_from_a_file(tmp_path):
    model = make("terraformer", hashing=HASHES[2])
    inputs, packed = Inputs(model, 1), pack(model, "int8")
    for name, buffer in rotations(model).items():
        vector = packed.layout.vectors[name]
        assert np.array_equal(packed.p[vector.offset : vector.offset + vector.size], buffer.float().flatten())
    packed.save(tmp_path / "packed.safetensors")
    loaded = Packed.load(tmp_path / "packed.safetensors")
    logits = []
    for weights in (packed, loaded):
        engine = Engine(weights, source_len=SOURCE, threads=1)
        engine.start(inputs.source, inputs.mask)
        logits.append(engine.prefill(inputs.tokens.numpy()))
    assert np.array_equal(*logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_rotations_are_normal_and_follow_the_seed(dtype):
    config = make(hashing=dict(n_hashes=8, n_buckets=64, chunk_len=2)).config
    first, again, other = (pack_random(config, dtype, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.p, again.p)
    vectors = [v for v in first.layout.named() if v.name.endswith(".rotations")]
    drawn = [p[v.offset : v.offset + v.size] for p in (first.p, other.p) for v in vectors]
    assert len(drawn) == 4 and len(np.unique(drawn)) == 4 * 8 * 8 * 32
    assert all(abs(values.mean()) < 0.1 and values.std() == pytest.approx(1, rel=0.05) for values in drawn)
    assert np.isfinite(Engine(first, threads=1).prefill([1, 2, 3])).all()


def test_refusals():
    engine = Engine(pack(make("prefix_lm")), threads=1)
    with pytest.raises(ValueError, match="prefix_length = 1: must be None: attention by hashing has no prefix"):
        engine.prefill([1, 2], prefix_length=1)
    many = dict(n_hashes=1, n_buckets=(2**16, 2**15), chunk_len=2)
    with pytest.raises(ValueError, match=r"lsh.n_buckets = \(65536, 32768\): must be fewer than 2\^31 in all"):
        pack_random(dataclasses.replace(make().config, lsh=LSHSizes(**many)))
