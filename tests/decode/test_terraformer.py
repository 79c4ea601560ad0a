"""The engine decodes a Terraformer as the model does: every layer, any chunks, rows of different sources."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sparselib.config import ATTENTIONS, FEEDFORWARDS, ModelConfig
from sparselib.decode import Engine, generate, pack, pack_random
from sparselib.models import Terraformer

from ..helpers import chunk_sizes, ids, randomized, seeds
from .engines import by_engine, dequantized, ends, near, odd_configs, smallest_gap

V, SOURCE, TARGET = 12, 5, 6
SIZES = dict(vocab_size=V, d_model=8, d_ff=12, n_heads=2, n_layers=2, n_encoder_layers=2, max_len=10, sru_units=3)
LAYERS = dict(ff_sparsity=3, d_lowrank=4, n_modules=2, value_kernel_size=1)


def make(seed=0, **fields):
    config = ModelConfig(**SIZES | LAYERS | dict(architecture="terraformer") | fields)
    return randomized(Terraformer(config), seed, scale=0.3)


class Inputs:
    """Sources of different lengths, their mask, targets."""

    def __init__(self, model, batch, length=TARGET, seed=0):
        vocab = model.config.vocab_size
        self.source, self.tokens = (
            ids(batch, SOURCE, high=vocab, seed=seed),
            ids(batch, length, high=vocab, seed=seed + 1),
        )
        lengths = np.random.default_rng(seed).integers(1, SOURCE + 1, batch)
        self.mask = torch.arange(SOURCE) < torch.from_numpy(lengths)[:, None]
        with torch.no_grad():
            self.logits = model(self.source, self.tokens, mask=self.mask)


def engine_of(model, inputs, dtype="fp32", threads=1):
    engine = Engine(pack(model, dtype), len(inputs.source), source_len=SOURCE, threads=threads)
    engine.start(inputs.source.numpy(), inputs.mask.numpy())
    return engine


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
def test_every_kind_of_layer_equals_the_model(attention, feedforward):
    for reversible, sru_units in itertools.product((True, False), (0, 3)):
        model = make(
            attention=attention,
            feedforward=feedforward,
            reversible_encoder=reversible,
            sru_units=sru_units,
            sru_layers=2,
        )
        inputs = Inputs(model, 3)
        for sizes, threads in itertools.product(([0] * TARGET, [1, 3, 0, 1]), (1, 2)):
            engine = engine_of(model, inputs, threads=threads)
            near(by_engine(engine, inputs.tokens, sizes).swapaxes(0, 1), inputs.logits[:, ends(sizes)])
            assert engine.position.tolist() == [TARGET] * 3
            engine.close()


@settings(max_examples=60)
@given(config=odd_configs(architecture="terraformer"), n_attentions=st.integers(1, 3), seed=seeds, data=st.data())
def test_odd_sizes_and_chunks_equal_the_model(config, n_attentions, seed, data):
    fields = dict(n_attentions=n_attentions, reversible_encoder=data.draw(st.booleans()))
    model = randomized(Terraformer(ModelConfig(**vars(config) | fields)), seed, scale=0.3)
    length = data.draw(st.integers(1, 40))
    with smallest_gap(model) as gap:
        inputs = Inputs(model, data.draw(st.integers(1, 4)), length, seed)
    assume(gap() > 1e-3)
    sizes = data.draw(chunk_sizes(length))
    engine = engine_of(model, inputs, threads=data.draw(st.integers(1, 3)))
    logits = by_engine(engine, inputs.tokens, sizes)
    engine.close()
    near(logits.swapaxes(0, 1), inputs.logits[:, ends(sizes)])


SPARSE = dict(attention="mult_conv", feedforward="sparse", loss_sparsity=2)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_small_dtypes_equal_the_model_with_rounded_weights(dtype):
    model = dequantized(make(**SPARSE), dtype)
    inputs = Inputs(model, 2)
    sizes = [0, 3, 2]
    near(by_engine(engine_of(model, inputs, dtype), inputs.tokens, sizes).swapaxes(0, 1), inputs.logits[:, ends(sizes)])


def test_sequences_go_their_own_ways():
    """Start one anew, rewind the other, take back a state: rows do not touch each other."""
    model = make(**SPARSE)
    inputs = Inputs(model, 2)
    engine, tokens = engine_of(model, inputs), inputs.tokens.numpy()
    near(engine.prefill(tokens[:, :4]), inputs.logits[:, 3])
    state = engine.state()
    engine.rewind(2, [0])
    near(engine.step(tokens[:1, 2], [0]), inputs.logits[:1, 2])
    near(engine.step(tokens[1:, 4], [1]), inputs.logits[1:, 4])
    other = Inputs(model, 1, seed=9)
    engine.start(other.source, other.mask, sequences=[1])
    near(engine.prefill(other.tokens.numpy(), [1]), other.logits[:, -1])
    near(engine.step(tokens[:1, 3], [0]), inputs.logits[:1, 3])
    engine.restore(state)
    near(engine.prefill(tokens[:, 4:]), inputs.logits[:, -1])


def test_generation_is_the_models_greedy_choice():
    model = make(**SPARSE)
    inputs = Inputs(model, 1)
    engine = Engine(pack(model), source_len=SOURCE)
    found = generate(engine, [0], 4, source=inputs.source[0], source_mask=inputs.mask[0])
    state, token, expected = model.init_state(1, inputs.source, inputs.mask), torch.tensor([0]), []
    for _ in range(4):
        logits, state = model.step(token, state)
        token = logits.argmax(-1)
        expected.append(int(token))
    assert found == expected


def test_vectors_in_place_of_a_source_go_into_both_streams():
    model = make(**SPARSE)
    inputs = Inputs(model, 1)
    vectors = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model._encode = lambda *_: (vectors, vectors, torch.tensor([3]))
    with torch.no_grad():
        expected = model(inputs.source, inputs.tokens)
    engine = Engine(pack(model), source_len=3)
    engine.start(memory=vectors.float().numpy())
    near(engine.prefill(inputs.tokens.numpy()), expected[:, -1])
    left_out = Engine(pack_random(model.config, encoder=False), source_len=3)
    left_out.start(memory=vectors.float().numpy())
    assert np.isfinite(left_out.step([0])).all()


def test_refusals():
    model = make()
    engine = Engine(pack(model), source_len=3)
    with pytest.raises(ValueError, match="source = None: must be given with start"):
        engine.step([0])
    with pytest.raises(ValueError, match=r"source = \[\]: must be one of source and memory"):
        engine.start()
    with pytest.raises(ValueError, match="source_len = 3"):
        engine.start(np.zeros((1, 4), np.int64))
