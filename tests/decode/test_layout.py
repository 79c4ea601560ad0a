import itertools

import pytest
import torch
from hypothesis import given

from sparselib.config import (
    ATTENTIONS,
    CROSS_ATTENTIONS,
    FEEDFORWARDS,
    POSITIONS,
    VARIANTS,
    count_parameters,
    decode_cost,
    preset,
)
from sparselib.decode.layout import Layout
from sparselib.decode.pack import DTYPES, pack
from sparselib.models import Transformer

from ..helpers import randomized
from ..models.build import DECODING, make
from .engines import odd_configs, unpacked

combinations = pytest.mark.parametrize(
    ("architecture", "attention", "feedforward"), list(itertools.product(DECODING, ATTENTIONS, FEEDFORWARDS))
)


def entries(layout):
    """What of the model stands in the packed arrays: name -> number of weights."""
    matrices = [(m.name, m.rows * m.columns) for m in layout.matrices.values()]
    return matrices + [(v.name, v.size) for v in layout.named()]


@combinations
def test_every_weight_is_packed_exactly_once(architecture, attention, feedforward):
    for cross, bias, loss, positions in itertools.product(CROSS_ATTENTIONS, (False, True), (1, 3), POSITIONS):
        options = dict(cross_attention=cross, hidden_bias=bias, controller_bias=bias, positions=positions)
        model = make(architecture, attention, feedforward, loss_sparsity=loss, **options)
        layout = Layout(model.config, "fp32")
        expected = {name: weight.numel() for name, weight in model.state_dict().items()}
        assert sorted(entries(layout)) == sorted(expected.items())
        tables = [v.size for v in layout.vectors.values() if v.initial is None]
        constant = 0 if positions == "learned" else sum(tables)  # in the state_dict, but nothing trained
        assert sum(size for _, size in entries(layout)) == count_parameters(model.config) + constant


@given(config=odd_configs())
def test_nothing_overlaps(config):
    for dtype in DTYPES:
        layout = Layout(config, dtype)
        matrices, vectors = layout.matrices.values(), layout.vectors.values()
        for places, end in ((matrices, layout.w_size), (vectors, layout.p_size)):
            spans = sorted((place.offset, place.offset + place.size) for place in places)
            assert spans[0][0] == 0 and spans[-1][1] <= end
            assert all(a[1] <= b[0] and b[0] % 64 == 0 for a, b in itertools.pairwise(spans))
        for matrix in matrices:
            scale = layout.vectors.get(f"{matrix.name}.scale")
            assert (scale is not None) == (dtype == "int8")
            assert (matrix.scale, matrix.rows) == ((scale.offset, scale.size) if scale else (-1, matrix.rows))


@given(config=odd_configs())
def test_packed_weights_are_the_models(config):
    model = randomized(Transformer(config))
    weights = unpacked(pack(model), model)
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight.float().double()), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["paper_800m", "paper_17b"])
@pytest.mark.parametrize(("dtype", "bytes_per_weight"), [("fp32", 4), ("bf16", 2), ("int8", 1)])
def test_bytes_are_those_of_the_config(variant, name, dtype, bytes_per_weight):
    config = preset(name, variant)
    layout = Layout(config, dtype)
    packed = layout.w_size * bytes_per_weight + 4 * layout.p_size
    # Filled-up rows, vectors that stay fp32 and scales come on top.
    assert 1 <= packed / (count_parameters(config) * bytes_per_weight) < 1.02


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["paper_800m", "paper_17b"])
def test_a_tokens_bytes_are_those_of_decode_cost(variant, name):
    """Whatever a token reads of the layout, from the names alone."""
    config = preset(name, variant)
    layout = Layout(config, "fp32")
    read = 0
    for entry, size in entries(layout):
        if entry.startswith("encoder.") or ".cross.key." in entry or ".cross.value." in entry:
            continue
        if entry in ("embedding.weight", "stack.positions.table"):
            size = config.d_model
        elif config.feedforward == "sparse" and entry.rpartition(".")[2] in ("w1", "w2", "b1"):
            size //= config.ff_sparsity
        read += size
    cost = decode_cost(config)
    assert 4 * read == cost.bytes - cost.parts["kv_cache"].bytes
