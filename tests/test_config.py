import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.config import (
    PRESETS,
    VARIANTS,
    LSHSizes,
    ModelConfig,
    count_parameters,
    model_parts,
    preset,
    with_equal_weights,
)
from sparselib.models import Transformer

from .helpers import configs

SMALL = dict(vocab_size=12, d_model=8, d_ff=12, n_heads=2, n_layers=2)
REFERENCE_LAYOUT = dict(
    encoder_attention="dense",
    cross_attention="dense",
    d_lowrank=96,
    value_kernel_size=1,
    hidden_bias=False,
    controller_bias=True,
)


def built(config):
    """The model without memory for its weights."""
    with torch.device("meta"):
        return Transformer(config)


def n_weights(module):
    return sum(p.numel() for p in module.parameters())


# --- fields -----------------------------------------------------------------------------------------------------------


def test_a_config_is_frozen_and_comparable():
    config = ModelConfig(**SMALL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 16
    assert config == ModelConfig(**SMALL) and hash(config) == hash(ModelConfig(**SMALL))
    assert dataclasses.replace(config, d_ff=24).d_ff == 24
    with pytest.raises(ValueError, match=r"d_model = 9: must be a multiple of n_heads = 2"):
        dataclasses.replace(config, d_model=9)


def test_the_config_needs_no_torch():
    code = "import sparselib.config, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


HASHES = dict(n_hashes=2, n_buckets=8, chunk_len=4)


def test_hashing_may_come_from_a_file():
    config = ModelConfig(**SMALL, lsh=HASHES | {"n_buckets": [4, 2]})
    assert config.lsh == LSHSizes(n_hashes=2, n_buckets=(4, 2), chunk_len=4)
    assert config == ModelConfig(**SMALL, lsh=config.lsh)


MULT_CONV = dict(attention="mult_conv", n_modules=2)
BAD_FIELDS = [
    (dict(d_ff=10, feedforward="sparse", ff_sparsity=4), r"d_ff = 10: must be a multiple of ff_sparsity = 4"),
    (dict(d_ff=10, feedforward="block", ff_sparsity=4), r"d_ff = 10: must be a multiple of ff_sparsity = 4"),
    (dict(d_ff=10, feedforward="switch", ff_sparsity=4), r"d_ff = 10: must be a multiple of ff_sparsity = 4"),
    (dict(feedforward="sparse", ff_sparsity=1), r"ff_sparsity = 1: must be an int of at least 2"),
    (dict(feedforward="sparse", ff_sparsity=4, d_lowrank=0), r"d_lowrank = 0: must be an int of at least 1"),
    (dict(lsh=HASHES | {"n_buckets": 3}), r"n_buckets = 3: must be an even int"),
    (
        dict(lsh=HASHES, attention="mult", n_modules=2),
        r"attention = 'mult': must be one of 'dense', 'mult_conv' with lsh",
    ),
    (dict(lsh=HASHES, encoder_attention="conv"), r"encoder_attention = 'conv': must be one of .* with lsh"),
    (dict(d_model=9), r"d_model = 9: must be a multiple of n_heads = 2"),
    (MULT_CONV | dict(n_modules=3, modules_are_heads=False), r"d_model = 8: must be a multiple of n_modules = 3"),
    (MULT_CONV | dict(n_modules=4), r"n_modules = 4: must be n_heads = 2 .*unless modules_are_heads=False"),
    (MULT_CONV | dict(n_modules=0), r"n_modules = 0: must be an int of at least 1"),
    (MULT_CONV | dict(kernel_size=4), r"kernel_size = 4: must be odd"),
    (MULT_CONV | dict(kernel_size=0), r"kernel_size = 0: must be an int of at least 1"),
    (MULT_CONV | dict(value_kernel_size=2), r"value_kernel_size = 2: must be odd"),
    (MULT_CONV | dict(value_kernel_size=0), r"value_kernel_size = 0: must be an int of at least 1"),
    (
        dict(attention="sparse"),
        r"attention = 'sparse': must be one of 'dense', 'mult', 'conv', 'mult_conv', 'mult_conv_o",
    ),
    (dict(encoder_attention="sparse"), r"encoder_attention = 'sparse': must be one of 'dense', 'mult'"),
    (dict(cross_attention="mult"), r"cross_attention = 'mult': must be one of 'dense', 'sparse'"),
    (dict(feedforward="moe"), r"feedforward = 'moe': must be one of 'dense', 'sparse', 'block', 'switch'"),
    (
        dict(architecture="gpt"),
        r"architecture = 'gpt': must be one of 'decoder', 'encoder', 'encoder_decoder', 'prefix",
    ),
    (dict(positions="rotary"), r"positions = 'rotary': must be one of 'learned', 'sinusoidal', 'shifted'"),
    (dict(controller="trax"), r"controller = 'trax': must be one of 'paper', 'reference'"),
    (dict(loss_sparsity=5), r"vocab_size = 12: must be a multiple of loss_sparsity = 5"),
    (dict(loss_sparsity=0), r"loss_sparsity = 0: must be an int of at least 1"),
    (dict(dropout=1.0), r"dropout = 1.0: must be in \[0, 1\)"),
    (dict(dropout=-0.1), r"dropout = -0.1: must be in \[0, 1\)"),
    (dict(temperature=0.0), r"temperature = 0.0: must be above 0"),
    (dict(temperature=math.nan), r"temperature = nan: must be above 0"),
    (dict(hard_share=1.1), r"hard_share = 1.1: must be in \[0, 1\]"),
    (dict(hard_share=math.nan), r"hard_share = nan: must be in \[0, 1\]"),
    (dict(n_encoder_layers=2), r"n_encoder_layers = 2: must be 0 when architecture is 'decoder'"),
    (dict(architecture="encoder_decoder"), r"n_encoder_layers = 0: must be an int of at least 1"),
    (dict(architecture="encoder_decoder", n_encoder_layers=-1), r"n_encoder_layers = -1: must be an int of at least 1"),
    (
        dict(architecture="encoder_decoder", n_encoder_layers=1, cross_attention="sparse", n_modules=4),
        r"n_modules = 4: must be n_heads = 2",
    ),
    (
        dict(architecture="encoder_decoder", n_encoder_layers=1, encoder_attention="conv", n_modules=3),
        r"d_model = 8: must be a multiple of n_modules = 3",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match="^" + message):
        ModelConfig(**SMALL | fields)


SIZES = ["vocab_size", "d_model", "d_ff", "n_heads", "n_layers", "max_len", "loss_sparsity", "n_encoder_layers"]


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [-2, 1.5, 4.0, "4", None, True])
def test_sizes_must_be_whole_numbers(field, value):
    with pytest.raises(ValueError, match=rf"^{field} = {value!r}: must be an int of at least"):
        ModelConfig(**SMALL | {field: value})


@pytest.mark.parametrize("field", ["ff_sparsity", "d_lowrank", "n_modules", "kernel_size"])
@pytest.mark.parametrize("value", [-2, 1.5, 4.0, "4", None, True])
def test_sizes_of_sparse_layers_must_be_whole_numbers(field, value):
    with pytest.raises(ValueError, match=rf"^{field} = {value!r}: must be an int of at least"):
        ModelConfig(**SMALL | dict(feedforward="sparse", ff_sparsity=4) | MULT_CONV | {field: value})


@pytest.mark.parametrize("field", ["dropout", "temperature", "hard_share"])
@pytest.mark.parametrize("value", ["0.1", None])
def test_shares_must_be_numbers(field, value):
    with pytest.raises(ValueError, match=rf"^{field} = {value!r}: must be "):
        ModelConfig(**SMALL | {field: value})


@pytest.mark.parametrize("field", ["hidden_bias", "controller_bias", "modules_are_heads"])
@pytest.mark.parametrize("value", [2, "no", None])
def test_switches_must_be_bool(field, value):
    with pytest.raises(ValueError, match=rf"^{field} = {value!r}: must be "):
        ModelConfig(**SMALL | {field: value})


def test_fields_that_a_dense_model_does_not_use_do_not_bind_it():
    ModelConfig(**SMALL, ff_sparsity=7, n_modules=5, kernel_size=2)


def test_modules_need_not_be_heads_when_asked_for():
    config = ModelConfig(**SMALL, attention="mult_conv", n_modules=4, modules_are_heads=False)
    assert count_parameters(config) == n_weights(built(config))


# --- presets ----------------------------------------------------------------------------------------------------------


def test_the_papers_sizes():
    dense, sparse = preset("paper_800m"), preset("paper_800m", "ff_qkv")
    for config in (dense, sparse):
        sizes = (config.vocab_size, config.d_model, config.n_heads, config.n_layers, config.n_encoder_layers)
        assert sizes == (32000, 1024, 16, 24, 24) and config.dropout == 0.1
    assert (dense.d_ff, sparse.d_ff) == (4096, 6144)
    assert (sparse.ff_sparsity, sparse.d_lowrank, sparse.n_modules, sparse.kernel_size) == (64, 64, 16, 3)
    assert (sparse.temperature, sparse.hard_share, sparse.controller) == (0.1, 0.3, "paper")
    dense, sparse = preset("paper_17b"), preset("paper_17b", "ff_qkv")
    assert (dense.d_model, dense.n_heads, dense.n_layers, dense.d_ff, sparse.d_ff) == (9216, 96, 6, 40960, 65536)
    assert (sparse.ff_sparsity, sparse.d_lowrank, sparse.n_modules) == (256, 32, 64)


@pytest.mark.parametrize("name", PRESETS)
def test_variants_switch_on_the_sparse_layers_they_name(name):
    kinds = {v: preset(name, v) for v in VARIANTS}
    assert preset(name) == kinds["dense"]
    seen = {v: (c.feedforward, c.attention, c.cross_attention, c.loss_sparsity) for v, c in kinds.items()}
    assert seen == {
        "dense": ("dense", "dense", "dense", 1),
        "ff": ("sparse", "dense", "dense", 1),
        "qkv": ("dense", "mult_conv", "sparse", 1),
        "ff_qkv": ("sparse", "mult_conv", "sparse", 1),
        "ff_qkv_loss": ("sparse", "mult_conv", "sparse", 4),
    }
    assert {v: c.d_ff for v, c in kinds.items() if "qkv" not in v} == dict.fromkeys(
        ["dense", "ff"], kinds["dense"].d_ff
    )
    expected = "encoder_decoder" if name.startswith("paper") else "decoder"
    assert {c.architecture for c in kinds.values()} == {expected}


def test_fields_of_a_preset_can_be_set_otherwise():
    assert preset("smoke", "ff", d_lowrank=2, controller="reference").d_lowrank == 2
    assert preset("laptop", "ff").controller == "reference" != preset("laptop", "ff", controller="paper").controller
    assert preset("laptop", architecture="prefix_lm").architecture == "prefix_lm"


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (("huge",), {}, r"^preset = 'huge': must be one of 'paper_800m', 'paper_17b', 'laptop', 'smoke'"),
        (("smoke", "sparse"), {}, r"^variant = 'sparse': must be one of 'dense', 'ff', 'qkv', 'ff_qkv', 'ff_qkv_loss'"),
        (("smoke", "ff"), {"d_lowrnk": 2}, r"^preset field = 'd_lowrnk': must be a field of ModelConfig"),
        (("smoke", "ff"), {"d_ff": 30}, r"^d_ff = 30: must be a multiple of ff_sparsity = 8"),
    ],
)
def test_unknown_presets_variants_and_fields_are_refused(arguments, changes, message):
    with pytest.raises(ValueError, match=message):
        preset(*arguments, **changes)


# --- weights ----------------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(config=configs())
def test_count_equals_the_built_model(config):
    assert count_parameters(config) == n_weights(built(config))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PRESETS)
def test_count_of_every_preset_equals_the_built_model(name, variant):
    config = preset(name, variant)
    assert count_parameters(config) == n_weights(built(config))


def test_each_parts_weights_equal_those_of_the_built_part():
    config = ModelConfig(
        **SMALL | MULT_CONV,
        feedforward="sparse",
        ff_sparsity=4,
        architecture="encoder_decoder",
        n_encoder_layers=3,
        cross_attention="sparse",
        max_len=9,
        controller_bias=True,
        sru_units=3,
        sru_layers=2,
    )
    model, parts = Transformer(config), model_parts(config)
    blocks = model.stack.blocks
    controller = sum(b.feedforward.c1.numel() + b.feedforward.c2.numel() + b.feedforward.bc.numel() for b in blocks)
    expected = {
        "embedding": n_weights(model.embedding),
        "positions": n_weights(model.stack.positions),
        "self_attention": sum(n_weights(b.attention) for b in blocks),
        "cross_attention": sum(n_weights(b.cross) for b in blocks),
        "controller": controller,
        "feedforward": sum(n_weights(b.feedforward) for b in blocks) - controller,
        "recurrence": sum(n_weights(b.recurrence) + n_weights(b.recurrence_norm) for b in blocks),
        "norms": sum(p.numel() for n, p in model.stack.named_parameters() if "norm" in n and "recurrence" not in n),
        "unembedding": n_weights(model.unembedding),
        "encoder": n_weights(model.encoder),
    }
    assert {name: part.weights for name, part in parts.items()} == expected


def test_counts_of_the_paper_and_the_reference():
    assert count_parameters(preset("paper_800m")) == pytest.approx(772e6, abs=0.5e6)
    reference = preset("paper_800m", "ff_qkv", **REFERENCE_LAYOUT)
    assert count_parameters(reference) == pytest.approx(910e6, abs=1e6) == n_weights(built(reference))
    dense = preset("paper_17b")
    d, d_ff = dense.d_model, dense.d_ff
    blocks = 6 * (4 * d * d + 2 * d * d_ff) + 6 * (8 * d * d + 2 * d * d_ff)  # encoder; decoder with cross-attention
    assert count_parameters(dense) == pytest.approx(blocks + 2 * 32000 * d, rel=1e-3)


def test_attention_of_the_reference_has_its_weights():
    sparse = preset("paper_800m", "qkv", n_layers=1, n_encoder_layers=1, value_kernel_size=1)
    assert model_parts(sparse)["self_attention"].weights == 169_152
    assert model_parts(preset("paper_800m", n_layers=1, n_encoder_layers=1))["self_attention"].weights == 4_198_400


# --- equal weights ----------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(config=configs(), units=st.integers(1, 50), off=st.floats(-0.49, 0.49))
def test_equal_weights_come_as_close_as_d_ff_allows(config, units, off):
    step = 1 if config.feedforward == "dense" else config.ff_sparsity
    slope = count_parameters(dataclasses.replace(config, d_ff=2 * step)) - count_parameters(
        dataclasses.replace(config, d_ff=step)
    )
    target = count_parameters(dataclasses.replace(config, d_ff=units * step)) + round(off * slope)
    found = with_equal_weights(config, target)
    assert dataclasses.replace(found, d_ff=config.d_ff) == config  # nothing else moved
    assert abs(count_parameters(found) - target) <= slope / 2
    assert count_parameters(found) == n_weights(built(found))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_laptop_preset_can_weigh_the_same(variant):
    target = count_parameters(preset("laptop"))
    found = with_equal_weights(preset("laptop", variant), target)
    assert count_parameters(found) == pytest.approx(target, rel=0.01)


def test_a_target_below_the_smallest_model_is_refused():
    with pytest.raises(ValueError, match=r"^target = 10: must be reachable with a positive d_ff"):
        with_equal_weights(preset("smoke"), 10)


@pytest.mark.parametrize(
    ("architecture", "field", "value", "message"),
    [
        ("encoder_decoder", "n_attentions", 3, "n_attentions = 3: must be 2 when architecture is 'encoder_decoder'"),
        ("decoder", "reversible_encoder", False, "reversible_encoder = False: must be True when architecture is"),
        ("decoder", "two_swaps", False, "two_swaps = False: must be True when"),
        ("decoder", "ff_chunk", 4, "ff_chunk = 4: must be 0 when"),
    ],
)
def test_what_an_architecture_would_not_heed_is_refused(architecture, field, value, message):
    with pytest.raises(ValueError, match=message):
        preset("smoke", architecture=architecture, n_encoder_layers=int(architecture != "decoder"), **{field: value})
