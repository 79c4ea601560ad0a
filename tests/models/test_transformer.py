import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.config import ATTENTIONS, FEEDFORWARDS, TRANSFORMERS, VARIANTS, preset
from sparselib.models import Transformer

from .. import slow
from ..helpers import (
    by_chunks,
    by_steps,
    chunk_sizes,
    close,
    configs,
    generator,
    ids,
    non_contiguous,
    randomized,
    seeds,
    snapshot,
    unchanged,
)
from .build import DECODING, KERNEL, VOCAB, Inputs, make, make_preset

COMBINATIONS = list(itertools.product(TRANSFORMERS, ATTENTIONS, FEEDFORWARDS))
DECODING_COMBINATIONS = [c for c in COMBINATIONS if c[0] != "encoder"]
combinations = pytest.mark.parametrize(("architecture", "attention", "feedforward"), COMBINATIONS)
decoding_combinations = pytest.mark.parametrize(("architecture", "attention", "feedforward"), DECODING_COMBINATIONS)
variants = pytest.mark.parametrize("variant", VARIANTS)
decoding = pytest.mark.parametrize("architecture", DECODING)


# --- values -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(config=configs(), seed=seeds, data=st.data())
def test_logits_equal_the_slow_reference(config, seed, data):
    model = randomized(Transformer(config), seed)
    batch, length = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5))
    tokens = ids(batch, length, high=config.vocab_size, seed=seed)
    options, target = {}, None
    if data.draw(st.booleans()):
        lengths = torch.randint(1, length + 1, (batch,), generator=generator(seed))
        options["mask"] = torch.arange(length) < lengths[:, None]
    if config.architecture == "prefix_lm":
        options["prefix_length"] = torch.randint(length + 1, (batch,), generator=generator(seed))
    if config.is_encoder_decoder:
        target = ids(batch, data.draw(st.integers(1, 5)), high=config.vocab_size, seed=seed + 1)
    expected = slow.transformer(
        slow.weights_of(model),
        config,
        tokens.tolist(),
        None if target is None else target.tolist(),
        **{name: value.tolist() for name, value in options.items()},
    )
    # Sinusoids are held in float32.
    close(model(tokens, target, **options), expected, atol=1e-9 if config.positions == "learned" else 1e-4)


@pytest.mark.parametrize("architecture", TRANSFORMERS)
def test_gradcheck_with_respect_to_every_weight(architecture):
    model = make(
        architecture, "mult_conv", "sparse", n_layers=1, vocab_size=4, d_model=4, d_ff=3, max_len=3, d_lowrank=1
    )
    tokens = torch.tensor([[1, 3, 0], [2, 1, 1]])
    target = tokens.flip(0) if architecture == "encoder_decoder" else None
    names, weights = zip(*model.named_parameters(), strict=True)

    def function(*weights):
        return torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (tokens, target)).sum(0)

    assert torch.autograd.gradcheck(function, weights, fast_mode=True)


# --- decoding -------------------------------------------------------------------------------------------------------


@decoding_combinations
def test_steps_and_chunks_equal_the_forward_for_every_kind_of_layer(architecture, attention, feedforward):
    model = make(architecture, attention, feedforward)
    inputs = Inputs(model, 2, 5)
    y = inputs.forward()
    close(by_steps(model, inputs.tokens, inputs.state())[0], y)
    close(by_chunks(model, inputs.tokens, inputs.state(), [1, 3, 1])[0], y)


@variants
@decoding
def test_steps_equal_the_forward_for_every_variant_batch_and_length(variant, architecture):
    model = make_preset(variant, architecture)
    for batch, length in itertools.product((0, 1, 3), range(1, KERNEL + 3)):
        inputs = Inputs(model, batch, length)
        y = inputs.forward()
        assert y.shape == (batch, length, model.config.vocab_size) and y.isfinite().all()
        steps, state = by_steps(model, inputs.tokens, inputs.state())
        close(steps, y)
        close(model.prefill(inputs.tokens, inputs.state())[0], y)
        assert state.position == length


@settings(max_examples=40)
@given(config=st.sampled_from(DECODING).flatmap(lambda a: configs(architecture=a)), data=st.data())
def test_any_mix_of_steps_and_chunks_equals_the_forward(config, data):
    model = randomized(Transformer(config))
    length = data.draw(st.integers(1, 8))
    inputs = Inputs(model, data.draw(st.integers(0, 3)), length, data.draw(seeds))
    sizes = data.draw(chunk_sizes(length))
    first = {}
    if config.architecture == "prefix_lm":
        first["prefix_length"] = inputs.prefix = data.draw(st.integers(0, sizes[0]))
    y, state = by_chunks(model, inputs.tokens[:, : sizes[0]], inputs.state(), sizes[:1], **first)
    ys = [y]
    for chunk in inputs.tokens[:, sizes[0] :].split(sizes[1:], dim=1) if sizes[1:] else ():
        how = by_steps if data.draw(st.booleans()) else (lambda m, x, s: m.prefill(x, s))
        y, state = how(model, chunk, state)
        ys.append(y)
    close(torch.cat(ys, dim=1), inputs.forward())


@variants
@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_a_prefix_in_the_first_chunk_equals_the_forward(variant, kind):
    model = make_preset(variant, "prefix_lm")
    inputs = Inputs(model, 3, 7)
    inputs.prefix = 2 if kind == "int" else torch.tensor([0, 3, 2])
    y, state = model.prefill(inputs.tokens[:, :3], inputs.state(), prefix_length=inputs.prefix)
    rest, _ = by_steps(model, inputs.tokens[:, 3:], state)
    close(torch.cat([y, rest], dim=1), inputs.forward())
    assert not torch.allclose(inputs.forward()[:, :3], model(inputs.tokens)[:, :3])


@variants
@decoding
def test_non_contiguous_and_int32_tokens_give_the_same(variant, architecture):
    model = make_preset(variant, architecture)
    inputs = Inputs(model, 3, 4)
    y = inputs.forward()
    for tokens in (non_contiguous(inputs.tokens), inputs.tokens.T.contiguous().T, inputs.tokens.int()):
        close(inputs.forward(tokens), y)
        close(model.step(tokens[:, 0], inputs.state())[0], y[:, 0])
        close(model.prefill(tokens, inputs.state())[0], y)


@variants
@decoding
def test_an_old_state_can_be_used_again(variant, architecture):
    model = make_preset(variant, architecture)
    inputs = Inputs(model, 2, 5)
    _, state = model.prefill(inputs.tokens[:, :3], inputs.state())
    before = snapshot(state)
    first, after = model.step(inputs.tokens[:, 3], state)
    kept, kept_state = first.clone(), snapshot(after)
    other, _ = model.step((inputs.tokens[:, 3] + 1) % VOCAB, state)
    model.prefill(inputs.tokens[:, 1:4], state)
    assert not torch.equal(other, first)
    assert torch.equal(first, kept) and unchanged(after, kept_state) and unchanged(state, before)
    assert torch.equal(model.step(inputs.tokens[:, 3], state)[0], first)
    close(model.step(inputs.tokens[:, 4], after)[0], inputs.forward()[:, 4])


# --- who sees whom ----------------------------------------------------------------------------------------------------


def touched(before, after):
    """Positions whose logits differ, of the only row."""
    return (before != after).any(dim=2)[0].tolist()


@decoding_combinations
def test_a_token_changes_nothing_before_itself(architecture, attention, feedforward):
    model = make(architecture, attention, feedforward)
    inputs = Inputs(model, 1, 6)
    y = inputs.forward()
    for t in range(6):
        changed = inputs.tokens.clone()
        changed[:, t:] = (changed[:, t:] + 1 + torch.arange(6 - t)) % VOCAB
        after = touched(y, inputs.forward(changed))
        assert not any(after[:t]) and after[t]


@variants
@decoding
def test_no_variant_sees_the_future(variant, architecture):
    model = make_preset(variant, architecture)
    inputs = Inputs(model, 1, 6)
    y = inputs.forward()
    for t in range(6):
        changed = inputs.tokens.clone()
        changed[:, t:] += 1
        after = touched(y, inputs.forward(changed % model.config.vocab_size))
        assert not any(after[:t]) and after[t]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("prefix", [0, 1, 3, 6])
def test_a_prefix_is_seen_from_everywhere_and_the_rest_only_from_later_on(attention, prefix):
    model = make("prefix_lm", attention)
    tokens = ids(1, 6, high=VOCAB)
    y = model(tokens, prefix_length=prefix)
    for t in range(6):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % VOCAB
        after = touched(y, model(changed, prefix_length=prefix))
        assert after == [t < prefix or at >= t for at in range(6)]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
def test_an_encoder_sees_every_token_from_everywhere(attention, feedforward):
    model = make("encoder", attention, feedforward)
    tokens = ids(1, 5, high=VOCAB)
    y = model(tokens)
    for t in range(5):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % VOCAB
        assert all(touched(y, model(changed)))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_target_position_sees_every_source_token(attention):
    model = make("encoder_decoder", attention)
    source, target = ids(1, 4, high=VOCAB), ids(1, 3, high=VOCAB, seed=1)
    y = model(source, target)
    for t in range(4):
        changed = source.clone()
        changed[:, t] = (changed[:, t] + 1) % VOCAB
        assert all(touched(y, model(changed, target)))


@combinations
def test_padding_at_the_end_does_not_reach_the_logits(architecture, attention, feedforward):
    model = make(architecture, attention, feedforward)
    lengths = torch.tensor([5, 3, 1])
    mask = torch.arange(5) < lengths[:, None]
    tokens = ids(3, 5, high=VOCAB)
    changed = torch.where(mask, tokens, (tokens + 1) % VOCAB)
    if architecture != "encoder_decoder":
        y = model(tokens, mask=mask)
        assert torch.equal(model(changed, mask=mask)[mask], y[mask])
        close(y[1:2, :3], model(tokens[1:2, :3]))
        return
    target = ids(3, 4, high=VOCAB, seed=2)
    y = model(tokens, target, mask=mask)
    assert torch.equal(model(changed, target, mask=mask), y)
    close(y[1:2], model(tokens[1:2, :3], target[1:2]))
    state, other = (model.init_state(3, source=source, mask=mask) for source in (tokens, changed))
    assert torch.equal(model.step(target[:, 0], state)[0], model.step(target[:, 0], other)[0])


# --- training, types, randomness --------------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("architecture", TRANSFORMERS)
def test_training_reaches_every_weight(variant, architecture):
    torch.manual_seed(0)
    layers = dict(n_encoder_layers=1) if architecture == "encoder_decoder" else {}
    model = Transformer(preset("smoke", variant, architecture=architecture, dropout=0.1, **layers)).train()
    inputs = Inputs(model, 4, 30)
    y = inputs.forward()
    assert y.isfinite().all()
    torch.nn.functional.cross_entropy(y.flatten(0, 1), inputs.tokens.flatten()).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@variants
def test_dropout_and_noise_act_in_training_only(variant):
    torch.manual_seed(0)
    model = Transformer(preset("smoke", variant, dropout=0.5))
    tokens = ids(2, 5, high=VOCAB)
    assert not torch.equal(model.train()(tokens), model(tokens))
    model.eval()
    before = torch.get_rng_state()
    y = model(tokens)
    assert torch.equal(model(tokens), y)
    by_steps(model, tokens, model.init_state(2))
    assert torch.equal(torch.get_rng_state(), before)


@variants
@decoding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_run_and_follow_the_model(variant, architecture, dtype):
    model = make_preset(variant, architecture)
    inputs = Inputs(model, 2, 5)
    exact = inputs.forward()
    model.to(dtype)
    y = inputs.forward()
    steps, _ = by_steps(model, inputs.tokens, inputs.state())
    assert y.dtype == steps.dtype == dtype and y.isfinite().all() and steps.isfinite().all()
    if dtype is torch.float32:
        torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(steps, y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["laptop", "smoke"])
@variants
def test_weights_can_be_saved_and_loaded(name, variant):
    torch.manual_seed(1)
    model, other = (Transformer(preset(name, variant)).eval() for _ in range(2))
    tokens = ids(1, 4, high=VOCAB)
    assert not torch.equal(other(tokens), model(tokens))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens), model(tokens))
