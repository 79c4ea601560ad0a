"""Bad input to the model: a ValueError that says what, and nothing half-done."""

import pytest
import torch

from sparselib.config import TRANSFORMERS

from ..helpers import close, ids, snapshot, unchanged
from .build import DECODING, VOCAB, Inputs, make


def refused(message, function, *arguments, **keywords):
    with pytest.raises(ValueError, match=message):
        function(*arguments, **keywords)


BAD_TOKENS = [
    (torch.tensor([[0, VOCAB]]), rf"= {VOCAB}: must be ids in 0 .. vocab_size - 1 = {VOCAB - 1}"),
    (torch.tensor([[-1, 0]]), rf"= -1: must be ids in 0 .. vocab_size - 1 = {VOCAB - 1}"),
    (torch.zeros(1, 0, dtype=torch.int64), r"shape = \(1, 0\): must be a sequence of at least one token"),
    (torch.zeros(3, dtype=torch.int64), r"shape = \(3,\): must be (\(batch, length\)|of batch 1)"),
    (torch.zeros(1, 2, 3, dtype=torch.int64), r"shape = \(1, 2, 3\): must be \(batch, length\)"),
    (torch.zeros(1, 2), r"dtype = torch.float32: must be int32 or int64"),
    (torch.zeros(1, 2, dtype=torch.bool), r"dtype = torch.bool: must be int32 or int64"),
    (torch.zeros(1, 11, dtype=torch.int64), r"position = 10: must be below max_len = 10"),
]


@pytest.mark.parametrize(("tokens", "message"), BAD_TOKENS)
def test_bad_tokens_are_refused_everywhere(tokens, message):
    model, both = make(), make("encoder_decoder")
    good = torch.zeros(1, 2, dtype=torch.int64)
    refused(message, model, tokens)
    refused(message, model.prefill, tokens, model.init_state(1))
    refused(message, both, tokens, good)
    refused(message, both, good, tokens)
    refused(message, both.init_state, 1, source=tokens)
    refused("^(source|position)", both, tokens, good)
    refused("^(target|position)", both, good, tokens)


@pytest.mark.parametrize("architecture", DECODING)
def test_a_refused_step_leaves_the_state_usable(architecture):
    model = make(architecture, "mult_conv", "sparse")
    inputs = Inputs(model, 2, 4)
    _, state = model.prefill(inputs.tokens[:, :3], inputs.state())
    before = snapshot(state)
    refused(rf"tokens = {VOCAB}: must be ids in 0", model.step, torch.tensor([0, VOCAB]), state)
    refused(r"tokens = -2: must be ids in 0", model.step, torch.tensor([-2, 0]), state)
    refused(r"tokens.shape = \(3,.*\): must be of the state's batch 2", model.step, torch.tensor([0, 1, 2]), state)
    refused(r"tokens.shape = \(1,.*\): must be of the state's batch 2", model.step, torch.tensor([0]), state)
    refused(r"tokens.shape = \(2, 1\): must be \(batch,\)", model.step, torch.tensor([[0], [1]]), state)
    refused(r"tokens.dtype = torch.float32: must be int32 or int64", model.step, torch.zeros(2), state)
    refused(r"tokens.shape = \(1, 2\): must be of the state's batch 2", model.prefill, inputs.tokens[:1, :2], state)
    refused(r"position = 10: must be below max_len = 10", model.prefill, ids(2, 8, high=VOCAB), state)
    assert unchanged(state, before)
    close(model.step(inputs.tokens[:, 3], state)[0], inputs.forward()[:, 3])


def test_decoding_beyond_max_len_is_refused():
    model = make()
    _, state = model.prefill(ids(1, 10, high=VOCAB), model.init_state(1))
    before = snapshot(state)
    refused(r"position = 10: must be below max_len = 10", model.step, torch.tensor([0]), state)
    assert unchanged(state, before)


@pytest.mark.parametrize("architecture", TRANSFORMERS)
def test_bad_masks_are_refused(architecture):
    model, tokens = make(architecture), ids(2, 3, high=VOCAB)
    bad = [
        (torch.ones(2, 4), r"^mask.shape = \(2, 4\): must be \(2, 3\)"),
        (torch.ones(3), r"^mask.shape = \(3,\): must be \(2, 3\)"),
        (torch.tensor([[1, 1, 1], [0, 0, 0]]), r"^mask = 'all false in row \[1\]': must be true somewhere"),
        (torch.tensor([[1, 2, 0], [1, 1, 1]]), r"^mask = .*: must be made of bool or 0 and 1"),
    ]
    for mask, message in bad:
        if architecture == "encoder_decoder":
            refused(message, model, tokens, tokens, mask=mask)
            refused(message, model.init_state, 2, source=tokens, mask=mask)
        else:
            refused(message, model, tokens, mask=mask)


def test_a_mask_without_a_source_is_refused():
    refused(r"^mask.* = .*: must be ", make().init_state, 2, mask=torch.ones(2, 3))


def test_sources_and_targets_go_to_encoder_decoders_only():
    tokens = ids(2, 3, high=VOCAB)
    for architecture in ("decoder", "encoder", "prefix_lm"):
        only = rf"= \(2, 3\): must be given to an encoder_decoder and to no other, this is a {architecture}"
        refused("^target " + only, make(architecture), tokens, tokens)
        if architecture != "encoder":
            refused("^source " + only, make(architecture).init_state, 2, source=tokens)
    model = make("encoder_decoder")
    refused(r"^target = None: must be given to an encoder_decoder", model, tokens)
    refused(r"^source = None: must be given to an encoder_decoder", model.init_state, 2)
    refused(r"^source.shape = \(2, 3\): must be of batch 3", model.init_state, 3, source=tokens)
    refused(r"^target.shape = \(1, 3\): must be of batch 2", model, tokens, tokens[:1])


def test_an_encoder_does_not_decode():
    refused(r"^architecture = 'encoder': must be one with a decoder", make("encoder").init_state, 2)


@pytest.mark.parametrize("batch", [-1, 2.0])
def test_an_impossible_batch_is_refused(batch):
    refused(rf"^batch = {batch}: must be an int of at least 0", make().init_state, batch)


def test_prefixes_go_to_prefix_models_and_fit_the_tokens():
    tokens = ids(2, 3, high=VOCAB)
    for architecture in ("decoder", "encoder"):
        refused(r"^prefix_length = 2: must be given to a prefix_lm", make(architecture), tokens, prefix_length=2)
    refused(
        r"^prefix_length = 2: must be given to a prefix_lm", make("encoder_decoder"), tokens, tokens, prefix_length=2
    )
    model = make("prefix_lm")
    state = model.init_state(2)
    for prefix in (4, -1, torch.tensor([1, 4])):
        refused(r"^prefix_length = .*: must be in 0 .. 3", model, tokens, prefix_length=prefix)
        refused(r"^prefix_length = .*: must be in 0 .. 3", model.prefill, tokens, state, prefix_length=prefix)
    _, later = model.prefill(tokens, state)
    refused(
        r"^prefix_length = 1: must be given with the first chunk only", model.prefill, tokens, later, prefix_length=1
    )


@pytest.mark.parametrize("prefix", [torch.tensor([1, 1, 1]), torch.ones(2, 1, dtype=torch.int64), 1.5])
def test_prefixes_are_one_whole_number_for_each_row(prefix):
    refused(r"^prefix_length.* = .*: must be ", make("prefix_lm"), ids(2, 3, high=VOCAB), prefix_length=prefix)


def test_float16_on_a_cpu_and_nan_weights_are_refused():
    tokens = ids(2, 3, high=VOCAB)
    model = make().half()
    for use in (model, lambda x: model.step(x[:, 0], model.init_state(2))):
        refused(r"dtype = torch.float16: must be float32, float64 or bfloat16 on a CPU", use, tokens)
    model = make()
    with torch.no_grad():
        model.embedding.weight[tokens[0, 0]] = float("nan")
    refused(r"= 'NaN': must be free of NaN", model, tokens)
