"""Bad input to an engine: refused with the field's name, the engine's state as before."""

import dataclasses
import math

import numpy as np
import pytest

from sparselib.config import LSHSizes
from sparselib.decode import Engine, pack, pack_random

from ..models.build import Inputs, make
from .engines import engine_of, near

NAN = math.nan


@pytest.fixture(params=["decoder", "encoder_decoder", "prefix_lm"])
def engine(request):
    """Two sequences of three tokens, of up to ten."""
    return started(request.param)


def started(architecture):
    model = make(architecture, "mult_conv", "sparse")
    inputs = Inputs(model, 2, 3)
    engine = engine_of(model, inputs, source_len=4)
    engine.prefill(inputs.tokens)
    return engine


def refused(engine, message, call):
    before = engine.state()
    with pytest.raises(ValueError, match=message):
        call(engine)
    after = engine.state()
    for field in ("position", "source"):
        assert getattr(after, field).tolist() == getattr(before, field).tolist()
    assert all(map(np.array_equal, after.lines, before.lines))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 12], "tokens = 12: must be ids in 0 .. vocab_size - 1 = 11"),
        ([-1, 1], "tokens = -1"),
        ([1], "tokens.shape = .*of 2 sequences"),
        ([1, 2, 3], "tokens.shape = .*of 2 sequences"),
        (1, "tokens.shape = .*of 2 sequences"),
        ([[1], [2]], r"tokens.shape = \(2, 1\): must be \(batch,\)"),
        ([], "tokens"),
        ([1.0, 2.0], "tokens.dtype = 'float64'"),
        ([NAN, NAN], "tokens.dtype = 'float64'"),
        ([True, False], "tokens.dtype = 'bool'"),
        (["a", "b"], "tokens.dtype"),
    ],
)
def test_step_refuses(engine, tokens, message):
    refused(engine, message, lambda e: e.step(tokens))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1] * 8] * 2, "position = 10: must be below max_len = 10"),
        ([[1, 2, 3, 12], [1, 2, 3, 4]], "tokens = 12"),
        ([[1, 2], [3, -4]], "tokens = -4"),
        ([[], []], "tokens"),
        (np.zeros((2, 0), int), "tokens.shape = .*at least one token"),
        ([1, 2], "tokens.shape"),
        (3, "tokens.shape"),
        ([[[1]], [[2]]], "tokens.shape"),
        (np.ones((3, 2), int), "tokens.shape = .*of 2 sequences"),
        (np.ones((2, 2)), "tokens.dtype"),
    ],
)
def test_prefill_refuses(engine, tokens, message):
    refused(engine, message, lambda e: e.prefill(tokens))


@pytest.mark.parametrize("sequences", [[2], [-1], [0, 0], [], [[0]], 0, [0, 1, 2]])
def test_sequences_out_of_range_or_named_twice_are_refused(engine, sequences):
    n = np.size(sequences)
    refused(engine, "sequences = .*different numbers in 0 .. 1", lambda e: e.step([1] * n, sequences))
    refused(engine, "sequences = ", lambda e: e.prefill([[1, 2]] * n, sequences))
    refused(engine, "sequences = ", lambda e: e.rewind(0, sequences))
    refused(engine, "sequences = ", lambda e: e.start(sequences=sequences))


def test_a_full_cache_is_refused_for_one_sequence_as_well(engine):
    engine.prefill([[1] * 7], [1])
    refused(engine, "position = 10: must be below max_len = 10", lambda e: e.step([1, 1]))
    refused(engine, "position = 10", lambda e: e.step(1, [1]))
    assert engine.step(1, [0]).shape == (1, 12)


@pytest.mark.parametrize("position", [4, -1, 1.0, None, True])
def test_rewinding_elsewhere_is_refused(engine, position):
    refused(engine, "position = ", lambda e: e.rewind(position))


def test_rewinding_beyond_one_sequence_is_refused(engine):
    engine.step(1, [1])
    refused(engine, "position = 4: must be at most 3", lambda e: e.rewind(4))
    engine.rewind(4, [1])


@pytest.mark.parametrize(
    "other",
    [
        dict(batch=3),
        dict(n_layers=1),
        dict(n_layers=3),
        dict(d_model=12),
        dict(attention="dense"),
        dict(attention="mult_conv_output"),
        dict(lsh=LSHSizes(n_hashes=1, n_buckets=2, chunk_len=2)),
        dict(architecture="encoder_decoder"),
    ],
)
def test_the_state_of_another_model_is_refused(other):
    fields = dict(attention="mult_conv", feedforward="sparse") | other
    batch = fields.pop("batch", 2)
    model = make(**fields)
    state = engine_of(model, Inputs(model, batch, 1)).state()
    refused(started("decoder"), "state = .*of this model and batch", lambda e: e.restore(state))


def test_a_state_that_is_too_long_is_refused():
    model = make("encoder_decoder")
    inputs = Inputs(model, 2, 6)
    engine = engine_of(model, inputs)
    engine.prefill(inputs.tokens)
    short = engine_of(model, Inputs(model, 2, 1), max_len=5, source_len=4)
    refused(short, "state.position = 6: must be at most max_len = 5", lambda e: e.restore(engine.state()))
    narrow = Engine(pack(model), 2, source_len=3, threads=1)
    refused(narrow, "state.source = 4: must be at most source_len = 3", lambda e: e.restore(engine.state()))


# --- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "source"),
        (dict(source=[[1, 2]]), "source.shape = .*of 2 sequences"),
        (dict(source=[1, 2]), r"source.shape = \(2,\)"),
        (dict(source=[[1, 12], [1, 2]]), "source = 12"),
        (dict(source=[[], []]), "source"),
        (dict(source=[[1.0], [2.0]]), "source.dtype"),
        (dict(source=[[1] * 5] * 2), "source.shape = .*source_len = 4"),
        (dict(source=[[1, 2]] * 2, mask=[[1, 1], [0, 0]]), "mask"),
        (dict(source=[[1, 2]] * 2, mask=[[1, 1], [0, 1]]), r"mask = 'otherwise in row \[1\]': must be 1 for at least"),
        (dict(source=[[1, 2]] * 2, mask=[1, 1]), "mask.shape"),
        (dict(memory=np.full((2, 3, 8), NAN)), "memory = 'NaN or infinite'"),
        (dict(memory=np.full((2, 3, 8), math.inf)), "memory = 'NaN or infinite'"),
        (dict(memory=np.ones((2, 3, 9))), "memory.shape"),
        (dict(memory=np.ones((2, 8))), "memory.shape"),
        (dict(memory=np.ones((1, 3, 8))), "memory.shape"),
        (dict(memory=np.ones((2, 0, 8))), "memory.shape"),
        (dict(source=[[1, 2]] * 2, memory=np.ones((2, 3, 8))), "source"),
        (dict(source=[[1, 2]] * 2, sequences=[0]), "source.shape = .*of 1 sequences"),
    ],
)
def test_start_refuses(options, message):
    refused(started("encoder_decoder"), message, lambda e: e.start(**options))


@pytest.mark.parametrize("architecture", ["decoder", "prefix_lm"])
@pytest.mark.parametrize("options", [dict(source=[[1], [2]]), dict(memory=np.ones((2, 1, 8)))])
def test_a_source_is_for_encoder_decoders_only(architecture, options):
    refused(started(architecture), "source = .*not given here", lambda e: e.start(**options))


def test_an_encoder_decoder_needs_its_source_first():
    model = make("encoder_decoder")
    inputs = Inputs(model, 2, 1)
    engine = Engine(pack(model), batch=2, threads=1)
    refused(engine, "source = None: must be given with start", lambda e: e.step([1, 2]))
    engine.start(inputs.source[:1], inputs.mask[:1], sequences=[0])
    refused(engine, "source = None: must be given with start", lambda e: e.step([1, 2]))
    near(engine.step(inputs.tokens[0], [0]), inputs.forward()[:1, 0])


@pytest.mark.parametrize("prefix_length", [-1, 3, 1.0, True])
def test_impossible_prefixes_are_refused(prefix_length):
    engine = started("prefix_lm")
    engine.start()
    refused(engine, "prefix_length = ", lambda e: e.prefill([[1, 2]] * 2, prefix_length=prefix_length))


def test_a_prefix_is_for_the_first_tokens_of_a_prefix_lm(engine):
    message = "first tokens only" if engine.config.architecture == "prefix_lm" else "given to a prefix_lm"
    refused(engine, f"prefix_length = 1.*{message}", lambda e: e.prefill([[1, 2]] * 2, prefix_length=1))


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
@pytest.mark.parametrize("field", ["batch", "max_len", "source_len", "threads"])
def test_sizes_are_whole_numbers_above_zero(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value!r}"):
        Engine(pack(make()), **{field: value})


@pytest.mark.parametrize("field", ["max_len", "source_len"])
def test_a_cache_is_no_longer_than_the_models(field):
    with pytest.raises(ValueError, match=f"{field} = 11: must be at most the model's max_len = 10"):
        Engine(pack(make()), **{field: 11})


def test_a_state_is_a_value(engine):
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine.state().position = None
    engine.position[:] = 7
    assert engine.position.tolist() == [3, 3]


@pytest.mark.parametrize("sequences", [[0.7], [True], ["a"], [2**70]])
def test_sequences_are_whole_numbers(sequences):
    engine = Engine(pack(make()), batch=2, threads=1)
    with pytest.raises(ValueError, match="sequences"):
        engine.step([1], sequences=sequences)


def test_a_decoder_takes_no_mask():
    with pytest.raises(ValueError, match="mask"):
        Engine(pack(make()), threads=1).start(mask=[[1, 0]])


def test_a_mask_is_made_of_zeros_and_ones():
    engine = Engine(pack(make("encoder_decoder")), threads=1)
    with pytest.raises(ValueError, match="mask"):
        engine.start([[1, 2]], mask=[[1, 7]])


def test_weights_that_are_not_finite_are_not_packed():
    model = make()
    model.unembedding.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"unembedding\.weight"):
        pack(model, "int8")


@pytest.mark.parametrize("seed", [-2, 1.5])
def test_seeds_of_random_weights(seed):
    with pytest.raises(ValueError, match="seed"):
        pack_random(make().config, seed=seed)
