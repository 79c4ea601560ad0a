import copy
import gc
import itertools
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sparselib.config import ATTENTIONS, FEEDFORWARDS, VARIANTS
from sparselib.decode import DTYPES, Engine, pack
from sparselib.models import Transformer

from ..helpers import chunk_sizes, randomized, seeds
from ..models.build import DECODING, Inputs, make, make_preset
from .engines import by_engine, dequantized, ends, engine_of, near, odd_configs, smallest_gap

COMBINATIONS = list(itertools.product(DECODING, ATTENTIONS, FEEDFORWARDS))
combinations = pytest.mark.parametrize(("architecture", "attention", "feedforward"), COMBINATIONS)
decoding = pytest.mark.parametrize("architecture", DECODING)
variants = pytest.mark.parametrize("variant", VARIANTS)
SPARSE = dict(attention="mult_conv", feedforward="sparse", loss_sparsity=2)


# --- values -----------------------------------------------------------------------------------------------------------


@combinations
def test_every_kind_of_layer_equals_the_model(architecture, attention, feedforward):
    for loss_sparsity in (1, 2, 12):
        model = make(architecture, attention, feedforward, loss_sparsity=loss_sparsity, value_kernel_size=1)
        inputs = Inputs(model, 3, 9)
        expected = inputs.forward()
        for sizes, threads in itertools.product(([0] * 9, [1, 4, 0, 3]), (1, 2, 3)):
            engine = engine_of(model, inputs, threads=threads)
            logits = by_engine(engine, inputs.tokens, sizes).swapaxes(0, 1)
            near(logits, expected[:, ends(sizes)])
            assert (logits.argmax(-1) == expected[:, ends(sizes)].argmax(-1).numpy()).all()
            assert engine.position.tolist() == [9, 9, 9]
            engine.close()


@settings(max_examples=200)
@given(config=odd_configs(), seed=seeds, data=st.data())
def test_odd_sizes_and_chunks_equal_the_model(config, seed, data):
    model = randomized(Transformer(config), seed)
    batch = data.draw(st.integers(1, 9))
    inputs = Inputs(model, batch, data.draw(st.integers(1, 80 // batch)), seed)
    sizes = data.draw(chunk_sizes(inputs.tokens.shape[1]))
    sizes = [0 if size == 1 and data.draw(st.booleans()) else size for size in sizes]
    first = {}
    if config.architecture == "prefix_lm" and sizes[0] and data.draw(st.booleans()):
        first["prefix_length"] = inputs.prefix = data.draw(st.integers(0, sizes[0]))
    with smallest_gap(model) as gap:
        expected = inputs.forward()
    assume(gap() > 1e-3)
    engine = engine_of(model, inputs, threads=data.draw(st.integers(1, 3)))
    logits = by_engine(engine, inputs.tokens, sizes, **first)
    engine.close()
    near(logits.swapaxes(0, 1), expected[:, ends(sizes)])


@variants
@decoding
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_small_dtypes_equal_the_model_with_rounded_weights(variant, architecture, dtype):
    model = dequantized(make_preset(variant, architecture), dtype)
    inputs = Inputs(model, 2, 6)
    sizes = [0, 3, 2]
    expected = inputs.forward()[:, ends(sizes)]
    near(by_engine(engine_of(model, inputs, dtype), inputs.tokens, sizes).swapaxes(0, 1), expected)


BOUNDS = {"bf16": 0.03, "int8": 0.1}  # of the logits' standard deviation, where no unit is chosen


@decoding
@pytest.mark.parametrize("variant", ["dense", "qkv"])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_small_dtypes_stay_near_the_model(variant, architecture, dtype):
    for seed in range(3):
        torch.manual_seed(seed)
        model = Transformer(make_preset(variant, architecture).config).double().eval()
        inputs = Inputs(model, 2, 8, seed)
        expected = inputs.forward()[:, -1].detach()
        near(engine_of(model, inputs, dtype).prefill(inputs.tokens.numpy()), expected, BOUNDS[dtype] * expected.std())


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_models_in_other_dtypes_are_packed_as_well(kind):
    model = make(**SPARSE).to(getattr(torch, kind))
    inputs = Inputs(copy.deepcopy(model).double(), 1, 4)
    near(engine_of(model).prefill(inputs.tokens.numpy()), inputs.forward()[:, -1])


def test_memory_in_place_of_a_source_gives_the_same():
    model = make("encoder_decoder", **SPARSE)
    inputs = Inputs(model, 2, 3)
    memory = model.encoder(model.embed(inputs.source), inputs.mask).detach().float().numpy()
    engine = Engine(pack(model), batch=2, threads=1)
    engine.start(memory=memory, mask=inputs.mask)
    near(engine.prefill(inputs.tokens), inputs.forward()[:, -1])


# --- what is remembered -----------------------------------------------------------------------------------------------


@variants
@decoding
def test_a_state_taken_back_and_a_rewound_engine_give_the_same_again(variant, architecture):
    model = make_preset(variant, architecture)
    inputs = Inputs(model, 3, 8)
    tokens, engine = inputs.tokens.numpy(), engine_of(model, inputs)
    engine.prefill(tokens[:, :4])
    state, other = engine.state(), engine_of(model, batch=3, threads=2)
    first = [engine.step(tokens[:, t]).copy() for t in range(4, 8)]
    engine.rewind(1)
    engine.prefill((tokens[:, 1:7] + 1) % 12)
    if inputs.source is not None:
        engine.start((inputs.source + 1) % 12)
    engine.restore(state)
    other.restore(state)
    for t in range(4, 8):
        assert np.array_equal(engine.step(tokens[:, t]), first[t - 4])
        near(other.step(tokens[:, t]), inputs.forward()[:, t])
    engine.rewind(5)
    assert engine.position.tolist() == [5, 5, 5]
    assert np.array_equal(engine.step(tokens[:, 5]), first[1])
    engine.rewind(0)
    near(engine.prefill(tokens), inputs.forward()[:, -1])
    other.close()


@variants
@decoding
def test_sequences_go_their_own_ways(variant, architecture):
    """Prompts of several lengths, read in turns and stepped in groups, give what each gives alone."""
    model = make_preset(variant, architecture)
    inputs = Inputs(model, 4, 9)
    tokens, engine, expected = inputs.tokens.numpy(), engine_of(model, inputs, threads=2), inputs.forward()
    for slot, length in ((2, 5), (0, 1), (3, 3), (1, 8)):
        near(engine.prefill(tokens[slot, :length], [slot]), expected[[slot], length - 1])
    near(engine.step(tokens[[3, 2], [3, 5]], [3, 2]), expected[[3, 2], [3, 5]])
    near(engine.prefill(tokens[[0, 2], [[1, 6], [2, 7]]].T, [0, 2]), expected[[0, 2], [2, 7]])
    assert engine.position.tolist() == [3, 8, 8, 4]
    engine.rewind(2, [1, 3])
    near(engine.step(tokens[[0, 1, 2, 3], [3, 2, 8, 2]]), expected[[0, 1, 2, 3], [3, 2, 8, 2]])
    engine.close()


def test_sequences_begin_anew_while_others_go_on():
    model = make("encoder_decoder", **SPARSE)
    inputs = Inputs(model, 3, 6)
    tokens, engine, expected = inputs.tokens.numpy(), engine_of(model, inputs), inputs.forward()
    engine.prefill(tokens[:, :3])
    engine.start(inputs.source[[2, 1]], inputs.mask[[2, 1]], sequences=[0, 1])
    assert engine.position.tolist() == [0, 0, 3]
    near(engine.prefill(tokens[[2, 1], :2], [0, 1]), expected[[2, 1], 1])
    near(engine.step(tokens[[2], 3], [2]), expected[[2], 3])


def test_nothing_of_an_earlier_sequence_is_left():
    model = make("encoder_decoder", **SPARSE)
    engine = Engine(pack(model), batch=2, threads=1)
    for seed in range(3):
        inputs = Inputs(model, 2, 7 - seed, seed)
        engine.start(inputs.source, inputs.mask)
        near(engine.prefill(inputs.tokens), inputs.forward()[:, -1])


def test_the_last_position_can_be_used():
    model = make(**SPARSE)
    inputs = Inputs(model, 1, model.config.max_len)
    engine = engine_of(model, inputs)
    engine.prefill(inputs.tokens[:, :-1])
    near(engine.step(inputs.tokens[:, -1]), inputs.forward()[:, -1])


# --- threads ----------------------------------------------------------------------------------------------------------


def test_more_threads_than_work_give_the_same():
    model = make(**SPARSE)
    inputs = Inputs(model, 1, 5)
    engine = engine_of(model, inputs, threads=9)
    near(engine.prefill(inputs.tokens), inputs.forward()[:, -1])
    engine.close()


def test_engines_work_side_by_side_and_from_other_threads():
    models = [make(seed=seed, **SPARSE) for seed in range(2)]
    inputs = [Inputs(model, 2, 9, seed) for seed, model in enumerate(models)]
    engines = [engine_of(model, batch=2, threads=2) for model in models]
    for t in range(4):  # in turns
        for engine, i in zip(engines, inputs, strict=True):
            near(engine.step(i.tokens[:, t]), i.forward()[:, t])
    results = [None, None]

    def finish(n):
        results[n] = by_engine(engines[n], inputs[n].tokens[:, 4:], [0] * 5)

    workers = [threading.Thread(target=finish, args=(n,)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    for result, i, engine in zip(results, inputs, engines, strict=True):
        near(result.swapaxes(0, 1), i.forward()[:, 4:])
        engine.close()


def helpers_of(make_engine):
    """The engine and its helper threads."""
    before = set(threading.enumerate())
    engine = make_engine()
    return engine, set(threading.enumerate()) - before


@pytest.mark.parametrize("how", ["close", "collection"])
@pytest.mark.parametrize("used", [False, True])
def test_threads_end_with_the_engine(how, used):
    model = make()
    engine, helpers = helpers_of(lambda: engine_of(model, threads=3))
    assert len(helpers) == 2 and all(helper.daemon for helper in helpers)
    if used:
        engine.step(1)
    if how == "close":
        engine.close()
        engine.close()
        with pytest.raises(ValueError, match="engine = 'closed'"):
            engine.step(1)
    else:
        reference = weakref.ref(engine)
        del engine
        gc.collect()
        assert reference() is None
    for helper in helpers:
        helper.join(30)
        assert not helper.is_alive()


def test_an_engine_wakes_up_after_a_pause():
    model = make()
    inputs = Inputs(model, 1, 4)
    engine = engine_of(model, inputs, threads=2)
    for t in range(4):
        near(engine.step(inputs.tokens[:, t]), inputs.forward()[:, t])
        threading.Event().wait(0.1)  # long enough for helpers to go to sleep
    engine.close()


# --- inputs and outputs -----------------------------------------------------------------------------------------------


def test_tokens_come_in_any_whole_type_and_layout():
    model = make(**SPARSE)
    inputs = Inputs(model, 2, 4)
    expected, tokens = inputs.forward()[:, -1], inputs.tokens.numpy()
    for given_tokens in (tokens.tolist(), tokens.astype(np.uint8), np.asfortranarray(tokens), inputs.tokens.int()):
        near(engine_of(model, inputs).prefill(given_tokens), expected)


def test_logits_are_float32_of_every_token():
    logits = engine_of(make(loss_sparsity=2), batch=3).step([1, 2, 3])
    assert logits.shape == (3, 12) and logits.dtype == np.float32


def test_shares_of_the_time_add_up_to_one():
    engine = engine_of(make("encoder_decoder", **SPARSE), Inputs(make("encoder_decoder"), 1, 1))
    engine.clear_clock()
    engine.step(1)
    shares = engine.shares()
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0
    assert 0 < engine.share_of_a_block() < 0.5  # two blocks, and the head


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_smaller_cache_gives_the_same(dtype):
    model = dequantized(make("encoder_decoder", **SPARSE), dtype)
    inputs = Inputs(model, 2, 5)
    engine = engine_of(model, inputs, dtype, max_len=5, source_len=4)
    near(engine.prefill(inputs.tokens), inputs.forward()[:, -1])
