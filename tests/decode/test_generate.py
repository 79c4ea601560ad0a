import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparselib.config import VARIANTS
from sparselib.decode import Engine, Sampling, generate, pack

from ..helpers import seeds
from ..models.build import DECODING, Inputs, make, make_preset
from .engines import engine_of

variants = pytest.mark.parametrize("variant", VARIANTS)
decoding = pytest.mark.parametrize("architecture", DECODING)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [0, 1]]


def engine_for(*prompts, **fields):
    return Engine(pack(make(**dict(attention="mult_conv", feedforward="sparse", max_len=24) | fields)), len(prompts))


def by_model(model, prompt, max_tokens, **source):
    """The model's greedy tokens."""
    state, prefix = model.init_state(1, **source), {}
    if model.config.architecture == "prefix_lm":
        prefix["prefix_length"] = len(prompt)
    logits, state = model.prefill(torch.tensor([prompt]), state, **prefix)
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < max_tokens:
        logits, state = model.step(torch.tensor(tokens[-1:]), state)
        tokens.append(int(logits[0].argmax()))
    return tokens


# --- greedy -----------------------------------------------------------------------------------------------------------


@variants
@decoding
def test_greedy_equals_the_model(variant, architecture):
    model = make_preset(variant, architecture)
    inputs = Inputs(model, 1, 4)
    source = {} if inputs.source is None else dict(source=inputs.source)
    expected = by_model(model, PROMPTS[0], 12, **source)
    source = {} if inputs.source is None else dict(source=inputs.source[0])
    options = source | dict(prompt_is_prefix=architecture == "prefix_lm")
    tokens = generate(engine_of(model), PROMPTS[0], 12, **options)
    assert tokens == expected and all(type(token) is int for token in tokens)


@decoding
@pytest.mark.parametrize("options", [{}, dict(temperature=1.5, seed=3)])
def test_prompts_of_a_batch_equal_single_runs(architecture, options):
    model = make(architecture, "mult_conv", "sparse", max_len=24, d_model=24, vocab_size=40, seed=1)
    inputs, engine, stop = Inputs(model, 4, 1), engine_of(model, batch=4), 35  # a frequent token
    source = dict(source=inputs.source, source_mask=inputs.mask) if inputs.source is not None else {}
    together = generate(engine, PROMPTS, 6, **source, **options, stop=stop)
    assert len({len(tokens) for tokens in together}) > 1
    for i, prompt in enumerate(PROMPTS):
        alone = {name: value[i : i + 1] for name, value in source.items()}
        if not options or i == 0:
            assert generate(engine_of(model), [prompt], 6, **alone, **options, stop=stop) == [together[i]]


def test_a_prefix_is_seen_from_everywhere():
    model = make("prefix_lm", "mult_conv", "sparse", max_len=24, d_model=24, vocab_size=40, seed=1)
    prompts = [list(range(n, 3 * n)) for n in range(2, 8)]
    engine = engine_of(model, batch=len(prompts))
    assert generate(engine, prompts, 4, prompt_is_prefix=True) == [by_model(model, prompt, 4) for prompt in prompts]
    assert generate(engine, prompts, 4, prompt_is_prefix=True) != generate(engine, prompts, 4)


def test_each_call_begins_anew_and_one_prompt_gives_one_list():
    engine = engine_for(1)
    tokens = generate(engine, [1, 2], 5)
    assert generate(engine, [3, 4, 5], 5) != tokens == generate(engine, [1, 2], 5)
    assert generate(engine, [[1, 2]], 5) == generate(engine, np.array([[1, 2]]), 5) == [tokens]
    assert generate(engine, np.array([1, 2]), 5) == generate(engine, torch.tensor([1, 2]), 5) == tokens


def test_the_whole_cache_can_be_filled():
    assert len(generate(engine_for(1), [1, 2], 22)) == 22


def test_memory_in_place_of_a_source():
    model = make("encoder_decoder", "mult_conv", "sparse")
    inputs = Inputs(model, 1, 1)
    memory = model.encoder(model.embed(inputs.source)).detach().float().numpy()
    engine = engine_of(model)
    assert generate(engine, [1], 5, memory=memory[0]) == generate(engine, [1], 5, source=inputs.source[0])


# --- stop and stream --------------------------------------------------------------------------------------------------


def test_the_first_stop_token_ends_a_sequence_and_is_not_returned():
    engine = engine_for(1)
    tokens = generate(engine, [1, 2], 10)
    for stop in (tokens[4], [tokens[4]], {tokens[4]}, np.int64(tokens[4]), np.array([tokens[4]]), (tokens[4], 11)):
        ending = set(np.ravel(list(stop) if isinstance(stop, set) else stop).tolist())
        first = next(i for i, token in enumerate(tokens) if token in ending)
        assert generate(engine, [1, 2], 10, stop=stop) == tokens[:first]
    assert generate(engine, [1, 2], 10, stop=tokens[0]) == []
    assert generate(engine, [1, 2], 10, stop=set(range(12)) - set(tokens)) == tokens


def test_stream_is_told_each_token_at_once():
    engine, heard = engine_for(*PROMPTS), [[] for _ in PROMPTS]
    order = []

    def stream(sequence, token):
        order.append(sequence)
        heard[sequence].append(token)
        assert engine.position[sequence] == len(PROMPTS[sequence]) + len(heard[sequence]) - 1

    assert generate(engine, PROMPTS, 5, stream=stream) == heard
    assert order == [0, 1, 2, 3] * 5


@pytest.mark.parametrize("after", [0, 2, 6])
def test_an_exception_of_stream_leaves_a_usable_engine(after):
    engine, heard = engine_for(*PROMPTS), []
    expected = generate(engine, PROMPTS, 5)

    def stream(sequence, token):
        heard.append(token)
        if len(heard) > after:
            raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        generate(engine, PROMPTS, 5, stream=stream)
    assert generate(engine, PROMPTS, 5) == expected


# --- sampling ---------------------------------------------------------------------------------------------------------


def draws(logits, n=5000, seed=0, **options):
    """How often each token is chosen."""
    generator, sampling = np.random.default_rng(seed), Sampling(**options)
    chosen = [sampling.choose(np.asarray(logits, np.float32), generator) for _ in range(n)]
    return np.bincount(chosen, minlength=len(logits))


def fits(counts, shares):
    """Pearson's chi-square stays within six standard deviations of its mean, and what has no share is never drawn."""
    shares = np.asarray(shares) / np.sum(shares)
    expected, freedom = counts.sum() * shares[shares > 0], (shares > 0).sum() - 1
    square = ((counts[shares > 0] - expected) ** 2 / expected).sum()
    return not counts[shares == 0].any() and square < freedom + 6 * math.sqrt(2 * freedom)


LOGITS = np.log([0.08, 0.4, 0.02, 0.3, 0.2])


def test_draws_follow_the_softmax():
    assert fits(draws(LOGITS, temperature=1.0), [8, 40, 2, 30, 20])
    assert fits(draws(LOGITS, temperature=0.5), [64, 1600, 4, 900, 400])
    assert fits(draws(LOGITS, temperature=1e6), [1] * 5)
    assert not fits(draws(LOGITS, temperature=1.0), [10, 40, 2, 30, 18])


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        (dict(top_k=3), [0, 4, 0, 3, 2]),
        (dict(top_k=9), [8, 40, 2, 30, 20]),
        (dict(top_p=0.69), [0, 4, 0, 3, 0]),
        (dict(top_p=0.71), [0, 4, 0, 3, 2]),
        (dict(top_p=1.0), [8, 40, 2, 30, 20]),
        (dict(top_k=3, top_p=0.76), [0, 4, 0, 3, 0]),  # 7 of the 9 tenths that top_k left: 0.78
        (dict(top_k=3, top_p=0.79), [0, 4, 0, 3, 2]),
    ],
)
def test_top_k_and_top_p_cut_the_tail(options, shares):
    assert fits(draws(LOGITS, temperature=1.0, **options), shares)


def test_of_equally_likely_tokens_the_first_are_kept():
    logits = [0.0, 1.0, 1.0, -1.0, 1.0]
    assert fits(draws(logits, temperature=1.0, top_k=2), [0, 1, 1, 0, 0])
    assert fits(draws(logits, temperature=2.0, top_p=0.5), [0, 1, 1, 0, 0])
    assert fits(draws([0.0] * 4, temperature=1.0, top_k=3), [1, 1, 1, 0])
    assert draws(logits, 9)[1] == 9  # greedy
    many = [0.0, 1.0] * 500
    assert not draws(many, 500, temperature=1.0, top_k=100)[200:].any()
    assert not draws(many, 500, temperature=1.0, top_p=0.1)[200:].any()  # 69 of them


@given(seed=seeds, top_k=st.integers(1, 8), top_p=st.floats(1e-6, 1), temperature=st.floats(1e-300, 1e300))
def test_any_setting_keeps_the_most_likely(seed, top_k, top_p, temperature):
    logits = np.random.default_rng(seed).normal(0, 1e3, 7).astype(np.float32)
    kept = np.flatnonzero(draws(logits, 20, seed, temperature=temperature, top_k=top_k, top_p=top_p))
    assert set(kept) <= set(np.argsort(-logits)[:top_k])


@pytest.mark.parametrize("options", [dict(top_k=1), dict(top_p=1e-9), dict(top_k=5, top_p=1e-9), dict()])
def test_narrow_settings_equal_greedy(options):
    engine = engine_for(1)
    temperature = 1.0 if options else 1e-12
    assert generate(engine, [1, 2], 9, temperature=temperature, **options) == generate(engine, [1, 2], 9)


def test_tokens_are_drawn_from_the_engines_logits():
    engine = engine_for(1)
    logits = engine.prefill([1, 2])[0].astype(float)
    counts = np.bincount([generate(engine, [1, 2], 1, temperature=1.0, seed=s)[0] for s in range(800)], minlength=12)
    assert fits(counts, np.exp(logits))


def test_a_seed_fixes_the_tokens_and_sequences_differ():
    engine = engine_for(1, 2)
    options = dict(prompt=[[1, 2], [1, 2]], max_tokens=15, temperature=2.0)
    first = generate(engine, **options)
    assert first == generate(engine, **options) != generate(engine, **options, seed=1)
    assert first[0] != first[1]


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = [
    (dict(prompt=[]), "prompt"),
    (dict(prompt=[[]]), "prompt"),
    (dict(prompt=[[1], [2]]), "prompt = '2 prompts'.*1, the engine's batch"),
    (dict(prompt=[[[1]]]), "prompt.shape"),
    (dict(prompt=[1, 12]), "prompt = 12.*vocab_size - 1 = 11"),
    (dict(prompt=[-1]), "prompt = -1"),
    (dict(prompt=[1.0]), "prompt.dtype"),
    (dict(prompt=[True]), "prompt.dtype"),
    (dict(prompt=["a"]), "prompt.dtype"),
    (dict(max_tokens=0), "max_tokens = 0"),
    (dict(max_tokens=1.0), "max_tokens = 1.0"),
    (dict(max_tokens=23), "2 tokens and max_tokens = 23.*max_len = 24"),
    (dict(prompt=[1] * 24), "24 tokens"),
    (dict(temperature=-0.1), "temperature = -0.1"),
    (dict(temperature=math.nan), "temperature = nan"),
    (dict(temperature=math.inf), "temperature = inf"),
    (dict(temperature="hot"), "temperature = 'hot'"),
    (dict(top_k=0), "top_k = 0"),
    (dict(top_k=1.5), "top_k = 1.5"),
    (dict(top_p=0), "top_p = 0"),
    (dict(top_p=1.01), "top_p = 1.01"),
    (dict(top_p=math.nan), "top_p = nan"),
    (dict(top_p="all"), "top_p = 'all'"),
    (dict(stop=12), "stop = 12"),
    (dict(stop=[1, -1]), "stop = -1"),
    (dict(stop="a"), "stop = 'a'"),
    (dict(stop=[1.5]), "stop = 1.5"),
    (dict(seed=-1), "seed = -1"),
    (dict(prompt_is_prefix=True), "prompt_is_prefix"),
    (dict(source=[1]), "source"),
    (dict(memory=np.zeros((2, 8))), "source"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_input_is_refused_before_anything_changes(options, message):
    engine = engine_for(1)
    engine.prefill([3, 1, 2])
    before = engine.state()
    with pytest.raises(ValueError, match=message):
        generate(engine, **dict(prompt=[1, 2], max_tokens=3) | options)
    after = engine.state()
    assert after.position.tolist() == [3] and all(map(np.array_equal, after.lines, before.lines))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "source"),
        (dict(source=[]), "source"),
        (dict(source=[1, 12]), "source = 12"),
        (dict(source=[[1]]), "source.shape"),
        (dict(source=[1], memory=np.zeros((1, 8))), "source"),
        (dict(source=[1, 2], source_mask=[0, 0]), "mask"),
        (dict(source=[1, 2], source_mask=[1]), "mask.shape"),
        (dict(memory=np.full((1, 8), np.nan)), "memory"),
    ],
)
def test_a_bad_source_is_refused_before_anything_changes(options, message):
    model = make("encoder_decoder")
    engine = engine_of(model, Inputs(model, 1, 1))
    engine.prefill([3, 1, 2])
    before = engine.state()
    with pytest.raises(ValueError, match=message):
        generate(engine, [1, 2], 3, **options)
    after = engine.state()
    assert after.position.tolist() == [3] and all(map(np.array_equal, after.lines, before.lines))
