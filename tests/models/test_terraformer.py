"""Terraformer: decoding is the forward pass, a batch of unequal rows is its rows, reversing changes no gradient."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.bench.memory import peak_bytes
from sparselib.config import (
    ATTENTIONS,
    FEEDFORWARDS,
    POSITIONS,
    LSHSizes,
    ModelConfig,
    count_parameters,
    decode_cost,
    model_parts,
)
from sparselib.models import Terraformer, Transformer, make_model
from sparselib.models.terraformer import concatenate, strip
from sparselib.training import TrainConfig, train_run
from sparselib.training.config import DataConfig, OptimizerConfig

from .. import slow
from ..helpers import by_chunks, by_steps, chunk_sizes, close, ids, randomized, seeds, snapshot, unchanged

V, SOURCE, TARGET = 12, 5, 4


def config(**fields):
    sizes = dict(vocab_size=V, d_model=8, d_ff=12, n_heads=2, n_layers=2, n_encoder_layers=1, max_len=10)
    layers = dict(ff_sparsity=3, d_lowrank=4, n_modules=2, encoder_attention="dense", sru_units=3)
    return ModelConfig(**sizes | layers | dict(architecture="terraformer") | fields)


def make(seed=0, **fields):
    return randomized(Terraformer(config(**fields)), seed)


def mask_of(lengths, width=SOURCE):
    return torch.arange(width) < torch.tensor(lengths)[:, None]


@st.composite
def configs(draw):
    return config(
        feedforward=draw(st.sampled_from(FEEDFORWARDS)),
        attention=draw(st.sampled_from(ATTENTIONS)),
        encoder_attention=draw(st.sampled_from(ATTENTIONS)),
        loss_sparsity=draw(st.sampled_from([1, 2])),
        sru_units=draw(st.integers(0, 3)),
        sru_layers=draw(st.integers(1, 2)),
        n_attentions=draw(st.integers(1, 3)),
        n_layers=draw(st.integers(1, 2)),
        reversible_encoder=draw(st.booleans()),
        two_swaps=draw(st.booleans()),
        ff_chunk=draw(st.sampled_from([0, 2, 20])),
        positions=draw(st.sampled_from(POSITIONS)),
        controller=draw(st.sampled_from(["paper", "reference"])),
    )


def outcome(model, source, target, mask):
    """Logits and the gradients of the weights, with the same draws."""
    model.zero_grad()
    torch.manual_seed(0)
    logits = model(source, target, mask=mask)
    logits.square().sum().backward()
    return [logits, *(p.grad for p in model.parameters())]


@settings(max_examples=25)
@given(config=configs(), n=st.integers(1, SOURCE), seed=seeds)
def test_logits_equal_the_slow_reference(config, n, seed):
    model = randomized(Terraformer(config), seed, scale=0.3)
    source, target = ids(1, n, high=V, seed=seed), ids(1, TARGET, high=V, seed=seed + 1)
    expected = slow.terraformer(slow.weights_of(model), config, source[0].tolist(), target[0].tolist())
    # Sinusoids are held in float32.
    close(model(source, target)[0], expected, atol=1e-9 if config.positions == "learned" else 1e-4)


@settings(max_examples=15)
@given(config=configs(), data=st.data(), seed=seeds)
def test_decoding_is_the_forward_pass(config, data, seed):
    model = randomized(Terraformer(config), seed, scale=0.3)
    lengths = data.draw(st.lists(st.integers(1, SOURCE), min_size=1, max_size=3))
    source, mask = ids(len(lengths), SOURCE, high=V, seed=seed), mask_of(lengths)
    target = ids(len(lengths), TARGET, high=V, seed=seed + 1)
    logits = model(source, target, mask=mask)
    state = model.init_state(len(lengths), source, mask)
    before = snapshot(state)
    close(by_steps(model, target, state)[0], logits)
    close(by_chunks(model, target, state, data.draw(chunk_sizes(TARGET)))[0], logits)
    assert unchanged(state, before)


@settings(max_examples=10)
@given(config=configs(), seed=seeds)
def test_a_batch_of_unequal_rows_is_its_rows(config, seed):
    model = randomized(Terraformer(config), seed, scale=0.3)
    lengths = [2, SOURCE, 1]
    source, target = ids(3, SOURCE, high=V, seed=seed), ids(3, TARGET, high=V, seed=seed + 1)
    together = model(source, target, mask=mask_of(lengths))
    for row, n in enumerate(lengths):
        close(together[row], model(source[row : row + 1, :n], target[row : row + 1])[0])
    other = source.clone()
    other[0, 2:], other[2, 1:] = 0, 0
    assert torch.equal(model(other, target, mask=mask_of(lengths)), together)  # padding is not seen


LSH = LSHSizes(n_hashes=2, n_buckets=4, chunk_len=2)


@settings(max_examples=15)
@given(config=configs(), dropout=st.sampled_from([0.0, 0.3]), hashing=st.booleans(), seed=seeds)
def test_reversing_changes_no_gradient(config, dropout, hashing, seed):
    config = dataclasses.replace(config, dropout=dropout)
    if hashing:
        config = dataclasses.replace(config, attention="mult_conv", encoder_attention="dense", lsh=LSH)
    model = randomized(Terraformer(config), seed, scale=0.3).train()
    plain = Terraformer(config, remember="everything").double().train()
    plain.load_state_dict(model.state_dict())
    inputs = ids(2, SOURCE, high=V, seed=seed), ids(2, TARGET, high=V, seed=seed + 1), mask_of([3, SOURCE])
    for found, expected in zip(outcome(model, *inputs), outcome(plain, *inputs), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("lsh", [None, LSH])
def test_reversing_changes_little_in_mixed_precision(lsh):
    """Streams stay float32, so that what is rebuilt is off by float32's rounding alone."""
    layers = dict(attention="mult_conv", feedforward="sparse", ff_chunk=3, dropout=0.2, lsh=lsh)
    model = randomized(Terraformer(config(**layers)), scale=0.3).float().train()
    plain = Terraformer(model.config, remember="everything").train()
    plain.load_state_dict(model.state_dict())
    inputs, found = (ids(2, SOURCE, high=V), ids(2, TARGET, high=V, seed=1), mask_of([3, SOURCE])), []
    for one in (model, plain):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            logits = one(*inputs[:2], mask=inputs[2])
        logits.float().square().sum().backward()
        found.append((logits, torch.cat([p.grad.flatten() for p in one.parameters()])))
    (logits, gradient), (expected, exact) = found
    assert logits.dtype == torch.bfloat16 and torch.equal(logits, expected)
    assert exact.norm() > 0 and (gradient - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_short_training_with_hashing_is_the_same_however_it_is_kept(precision):
    hashing = {"n_hashes": 2, "n_buckets": [2, 4], "chunk_len": 8}
    sizes = {"architecture": "terraformer", "positions": "shifted", "dropout": 0.1, "ff_chunk": 8, "lsh": hashing}
    run = TrainConfig(
        experiment="test",
        variant="terraformer",
        model={"preset": "smoke", "variant": "ff_qkv"} | sizes,
        data=DataConfig(corpus="copy", objective="toy", vocab_size=16, length=12, growing=4),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup=2),
        steps=6,
        batch=8,
        seed=0,
        precision=precision,
    )
    rebuilt, kept = (
        train_run(run.model_copy(update={"remember": remember}), folder=None, resume=False, progress=False).losses
        for remember in ("choices", "everything")
    )
    assert rebuilt == pytest.approx(kept, rel=1e-4 if precision == "fp32" else 1e-2)
    assert rebuilt[0] > rebuilt[-1] > 0


@given(data=st.data(), seed=seeds)
def test_concatenation_by_its_words(data, seed):
    lengths = data.draw(st.lists(st.integers(0, SOURCE), min_size=1, max_size=3))
    source = torch.arange(1.0, len(lengths) * SOURCE * 2 + 1).view(-1, SOURCE, 2)
    target = -torch.arange(1.0, len(lengths) * TARGET * 2 + 1).view(-1, TARGET, 2)
    joined = concatenate(source, target, torch.tensor(lengths))
    for row, n in enumerate(lengths):
        expected = [*source[row], *torch.zeros(TARGET, 2)]
        expected[n : n + TARGET] = target[row]
        assert torch.equal(joined[row], torch.stack(expected))
    assert torch.equal(strip(joined, torch.tensor(lengths), TARGET), target)


def test_a_short_sequence_is_attended_to_in_full_by_the_rules_of_hashing():
    source, target = ids(2, SOURCE, high=V), ids(2, TARGET, high=V, seed=1)
    model = make(attention="mult_conv", lsh=dataclasses.replace(LSH, full_below=SOURCE + TARGET))
    logits = model(source, target)
    close(by_steps(model, target, model.init_state(2, source))[0], logits)
    assert not torch.allclose(make(attention="mult_conv", lsh=LSH)(source, target), logits)


@pytest.mark.parametrize("full_below", [0, 4, 7, 20])
def test_ragged_rows_with_hashing_decode_as_each_alone(full_below):
    """Their encoder attends in full: a row's neighbours in its list depend on the width of the batch."""
    model, lengths = make(attention="mult_conv", lsh=dataclasses.replace(LSH, full_below=full_below)), [2, SOURCE, 1]
    model.encoder.halves[0].attention.sizes = dataclasses.replace(LSH, full_below=SOURCE)
    source, target = ids(3, SOURCE, high=V), ids(3, TARGET, high=V, seed=1)
    state = model.init_state(3, source, mask_of(lengths))
    before = snapshot(state)
    together, _ = by_steps(model, target, state)
    close(by_chunks(model, target, state, [1, TARGET - 1])[0], together)
    assert unchanged(state, before)
    for row, n in enumerate(lengths):
        alone = model.init_state(1, source[row : row + 1, :n])
        close(together[row : row + 1], by_steps(model, target[row : row + 1], alone)[0])


@pytest.mark.parametrize("seed", range(4))
def test_padding_has_no_place_among_the_buckets(seed):
    width = 3 + TARGET + 3  # the target covers the first padding of its source, so three are left behind it
    model = make(seed, attention="mult_conv", lsh=LSH)
    source, target, mask = ids(2, width, high=V), ids(2, TARGET, high=V, seed=1), mask_of([3, width], width)
    logits = model(source, target, mask=mask)
    for shift in range(1, V):
        other = torch.where(mask, source, (source + shift) % V)
        assert torch.equal(model(other, target, mask=mask), logits)


def test_a_short_row_is_attended_to_in_full_however_long_the_others():
    model = make(attention="mult_conv", lsh=dataclasses.replace(LSH, full_below=2 + TARGET))
    source, target = ids(2, SOURCE, high=V), ids(2, TARGET, high=V, seed=1)
    together = model(source, target, mask=mask_of([2, SOURCE]))
    close(together[0], model(source[:1, :2], target[:1])[0])
    close(together[1], model(source[1:], target[1:])[0])


def test_a_long_prompt_takes_the_feedforward_by_chunks():
    whole, chunked = (make(d_ff=256, ff_chunk=chunk).eval() for chunk in (0, 2))
    x, results, sizes = torch.randn(1, 64, 8, dtype=torch.float64), [], []
    for half in (model.decoder.halves[2] for model in (whole, chunked)):
        state = half.init_state(1)
        with torch.no_grad():
            sizes.append(peak_bytes(lambda half=half, state=state: half.prefill(x, state)))
            results.append(half.prefill(x, state)[0])
    close(*results)
    assert sizes[1] < sizes[0] / 2


def test_nothing_sees_a_later_target_and_all_sees_the_source():
    model, source, target = make(attention="mult_conv"), ids(1, SOURCE, high=V), ids(1, TARGET, high=V, seed=1)
    logits = model(source, target)
    for t in range(TARGET):
        other = target.clone()
        other[0, t] = (other[0, t] + 1) % V
        changed = (model(source, other) - logits).abs().amax(-1)[0] > 1e-12
        assert changed.tolist() == [False] * t + [True] * (TARGET - t)
    other = source.clone()
    other[0, 0] = (other[0, 0] + 1) % V
    assert ((model(other, target) - logits).abs().amax(-1) > 1e-12).all()


@settings(max_examples=20)
@given(config=configs())
def test_weights_and_cost_in_closed_form(config):
    model = Terraformer(config)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    parts = model_parts(config)
    assert parts["encoder"].reads == 0
    cost, longer = (decode_cost(config, context=n, source_length=3) for n in (1, 2))
    assert longer.bytes - cost.bytes == 4 * 2 * config.d_model * config.n_layers * config.n_attentions


def test_make_model_takes_the_architecture():
    assert isinstance(make_model(config()), Terraformer)
    small = ModelConfig(vocab_size=V, d_model=8, d_ff=12, n_heads=2, n_layers=1)
    assert isinstance(make_model(small), Transformer)
    with pytest.raises(ValueError, match="architecture = 'decoder': must be 'terraformer'"):
        Terraformer(small)
    with pytest.raises(ValueError, match="architecture = 'terraformer': must be one of 'decoder'"):
        Transformer(config())


def test_an_empty_batch():
    model, none = make(), torch.zeros(0, SOURCE, dtype=torch.int64)
    assert model(none, none[:, :TARGET]).shape == (0, TARGET, V)
    logits, _ = model.step(none[:, 0], model.init_state(0, none))
    assert logits.shape == (0, V)


@pytest.mark.parametrize(
    ("source", "target", "mask", "message"),
    [
        ((2, 0), (2, 3), None, r"source.shape = \(2, 0\)"),
        ((2, 3), (1, 3), None, r"target.shape = \(1, 3\): must be of batch 2"),
        ((2, 11), (2, 3), None, "position = 10: must be below max_len = 10"),
        ((1, 3), (1, 11), None, "position = 10: must be below max_len = 10"),
        ((1, 3), (1, 3), [[0, 1, 1]], "mask = 'padding in front': must be padded at the end only"),
        ((2, 3), (2, 3), [[1, 1, 1], [0, 0, 0]], r"mask = 'all false in row \[1\]'"),
    ],
)
def test_refusals(source, target, mask, message):
    model = make()
    mask = None if mask is None else torch.tensor(mask)
    with pytest.raises(ValueError, match=message):
        model(torch.zeros(source, dtype=torch.int64), torch.zeros(target, dtype=torch.int64), mask=mask)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(n_encoder_layers=0), "n_encoder_layers = 0: must be an int of at least 1"),
        (dict(n_attentions=0), "n_attentions = 0"),
        (dict(sru_units=-1), "sru_units = -1"),
        (dict(sru_layers=0), "sru_layers = 0"),
        (dict(ff_chunk=-2), "ff_chunk = -2"),
        (dict(reversible_encoder=1), "reversible_encoder = 1: must be True or False"),
    ],
)
def test_configs_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)
