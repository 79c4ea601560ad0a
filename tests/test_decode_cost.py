"""What one decoded token costs: the closed forms against a counted and a watched step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sparselib.config import ATTENTIONS, FEEDFORWARDS, VARIANTS, LSHSizes, count_parameters, decode_cost, preset
from sparselib.models import Transformer

from .helpers import configs, ids

CASES = [
    *[(preset("smoke", v, architecture=a), c) for v in VARIANTS for a in ("decoder", "prefix_lm") for c in (1, 7)],
    *[(preset("smoke", v, architecture="encoder_decoder", n_encoder_layers=1), c) for v in VARIANTS for c in (1, 2, 5)],
    *[(preset("smoke", "ff_qkv", attention=a, feedforward=f), 3) for a in ATTENTIONS for f in FEEDFORWARDS],
    (preset("smoke", "ff_qkv", hidden_bias=False, controller_bias=True, value_kernel_size=1, kernel_size=5), 4),
    (preset("smoke", "ff", positions="sinusoidal", dropout=0.1), 2),
]
LSH = LSHSizes(n_hashes=2, n_buckets=(4, 6), chunk_len=2, full_below=5)  # up to 4 keys a round
HASHED = [(preset("smoke", v, lsh=LSH), c) for v in ("dense", "ff_qkv") for c in (1, 5, 6, 20)]


def ready_to_step(config, context, source_length=5):
    """(model, state with context - 1 positions, tokens of the next one), at batch 1."""
    torch.manual_seed(0)
    model = Transformer(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    source = dict(source=ids(1, source_length, high=config.vocab_size)) if config.is_encoder_decoder else {}
    state = model.init_state(1, **source)
    if context > 1:
        _, state = model.prefill(ids(1, context - 1, high=config.vocab_size, seed=1), state)
    return model, state, torch.tensor([3])


@pytest.mark.parametrize(("config", "context"), CASES + HASHED)
def test_flops_equal_those_counted_around_a_step(config, context):
    model, state, token = ready_to_step(config, context)
    # The counter knows nothing of the fused attention kernel of CPUs; as plain matrix products it counts it.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.step(token, state)
    assert decode_cost(config, context=context, source_length=5).flops == counter.get_total_flops()


def hide(p, rows=()):
    """Make all of a tensor NaN but these rows of it."""
    kept = p[list(rows)].clone()
    p.fill_(math.nan)
    if rows:
        p[list(rows)] = kept


def chosen_units(model, token, state):
    """The hidden units that each feedforward computes in this step."""
    units = []
    for block in model.stack.blocks:
        layer = block.feedforward
        original = layer.step_units

        def record(x_t, chosen, *rest, original=original):
            units.append(chosen[0].tolist())
            return original(x_t, chosen, *rest)

        layer.step_units = record
    model.step(token, state)
    for block in model.stack.blocks:
        del block.feedforward.step_units
    return units


@torch.no_grad()
def hide_what_a_step_does_not_read(model, token, state):
    """NaN into the weights that the cost leaves out."""
    config = model.config
    units = chosen_units(model, token, state)
    hide(model.embedding.weight, token.tolist())
    hide(model.stack.positions.table, [state.position])
    if config.is_encoder_decoder:
        for tensor in (*model.encoder.parameters(), *model.encoder.buffers()):
            hide(tensor)
    for i, block in enumerate(model.stack.blocks):
        if config.feedforward != "dense":
            for p in (block.feedforward.w1, block.feedforward.w2, block.feedforward.b1):
                if p is not None:
                    hide(p, units[i])
        if block.has_cross:
            for p in (*block.cross.key.parameters(), *block.cross.value.parameters()):
                hide(p)


@pytest.mark.parametrize(("config", "context"), CASES)
@torch.no_grad()
def test_bytes_are_the_weights_that_a_step_reads_and_the_cache(config, context):
    model, state, token = ready_to_step(config, context)
    logits, after = model.step(token, state)
    hide_what_a_step_does_not_read(model, token, state)
    hidden_logits, _ = model.step(token, state)
    assert torch.equal(hidden_logits, logits)  # what is NaN now was not read
    tensors = [*model.parameters(), *model.buffers()]
    read = sum(int((~t.isnan()).sum()) for t in tensors)
    cached = [t.numel() for part in after.blocks for t in (part.attention.keys, part.attention.values)]
    if config.is_encoder_decoder:
        cached += [t.numel() for part in after.blocks for t in (part.cross.keys, part.cross.values)]
    cost = decode_cost(config, context=context, source_length=5)
    assert cost.bytes == 4 * (read + sum(cached))
    assert cost.parts["kv_cache"].bytes == 4 * sum(cached)
    assert decode_cost(config, context=context, source_length=5, bytes_per_weight=2).bytes == cost.bytes / 2


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
@sdpa_kernel(SDPBackend.MATH)  # the fused kernel of CPUs answers a NaN query with finite numbers
def test_every_weight_that_is_counted_is_read(variant):
    model, state, token = ready_to_step(preset("smoke", variant, architecture="encoder_decoder", n_encoder_layers=1), 3)
    hide_what_a_step_does_not_read(model, token, state)
    for name, p in model.named_parameters():
        if p.isnan().all():
            continue
        kept = p.clone()
        p.fill_(math.nan)
        try:
            logits, _ = model.step(token, state)
        except ValueError as error:
            assert "NaN" in str(error)
        else:
            assert logits.isnan().any(), name
        p.copy_(kept)
    assert model.step(token, state)[0].isfinite().all()


@settings(max_examples=60)
@given(config=configs(), context=st.integers(1, 40), source_length=st.integers(1, 40))
def test_costs_add_up_and_grow_with_the_cache(config, context, source_length):
    if not config.has_decoder:
        with pytest.raises(ValueError, match=r"^architecture = 'encoder': must be one with a decoder"):
            decode_cost(config)
        return
    cost = decode_cost(config, context=context, source_length=source_length)
    assert cost.bytes == sum(part.bytes for part in cost.parts.values())
    assert cost.flops == sum(part.flops for part in cost.parts.values())
    assert cost.bytes < 4 * count_parameters(config) + cost.parts["kv_cache"].bytes + 4 * config.d_model
    more = decode_cost(config, context=context + 1, source_length=source_length)
    assert more.bytes - cost.bytes == 4 * 2 * config.d_model * config.n_layers
    assert more.flops - cost.flops == 4 * config.d_model * config.n_layers
    longer = decode_cost(config, context=context, source_length=source_length + 1)
    assert longer.bytes - cost.bytes == config.is_encoder_decoder * 4 * 2 * config.d_model * config.n_layers


@given(config=configs(), context=st.integers(1, 40), weight=st.sampled_from([1, 2, 4]), cached=st.sampled_from([2, 4]))
def test_the_cache_may_have_numbers_of_another_size(config, context, weight, cached):
    if not config.has_decoder:
        return
    parts = decode_cost(config, context=context, bytes_per_weight=weight, bytes_per_cached=cached).parts
    same = decode_cost(config, context=context, bytes_per_weight=weight).parts
    assert parts["kv_cache"].bytes * weight == same["kv_cache"].bytes * cached
    assert {name: part for name, part in parts.items() if name != "kv_cache"} == {
        name: part for name, part in same.items() if name != "kv_cache"
    }


def test_a_dense_block_reads_what_section_1_says():
    d, f, n = 1024, 4096, 24
    parts = decode_cost(preset("paper_800m")).parts
    assert parts["self_attention"].bytes == pytest.approx(4 * n * 4 * d * d, rel=1e-2)
    assert parts["cross_attention"].bytes == pytest.approx(4 * n * 2 * d * d, rel=1e-2)
    assert parts["feedforward"].bytes == pytest.approx(4 * n * 2 * d * f, rel=1e-2)
    assert "encoder" not in parts


@pytest.mark.parametrize(
    ("context", "keys", "buckets"),
    [(1, 1, 0), (5, 5, 0), (6, 6, 6), (9, 8, 9), (30, 8, 30)],  # 8: 2 rounds of 4
)
def test_hashing_reads_rotations_all_buckets_and_few_keys(context, keys, buckets):
    d, heads, rounds, columns, layers = 32, 4, 2, 5, 2
    config = preset("smoke", "qkv", lsh=LSH)
    part = decode_cost(config, context=context, bytes_per_weight=1, bytes_per_cached=2).parts["kv_cache"]
    assert part.bytes == layers * (2 * 2 * d * keys + 4 * heads * rounds * buckets + 4 * d * rounds * columns)
    blocks = dict(architecture="terraformer", n_encoder_layers=1, n_attentions=3)
    read_on = decode_cost(preset("smoke", lsh=LSH, **blocks), context=context, source_length=40).parts["kv_cache"]
    far = decode_cost(preset("smoke", lsh=LSH), context=context + 40).parts["kv_cache"]
    assert (read_on.bytes, read_on.flops) == (3 * far.bytes, 3 * far.flops)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(context=0), r"^context = 0: must be an int of at least 1"),
        (dict(source_length=0), r"^source_length = 0: must be an int of at least 1"),
        (dict(context=1.5), r"^context = 1.5: must be an int of at least 1"),
    ],
)
def test_impossible_costs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        decode_cost(preset("smoke"), **arguments)
