from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.config import preset
from sparselib.layers import LearnedPositions, ShiftedPositions, SinusoidalPositions
from sparselib.layers.positions import sinusoids
from sparselib.models import make_model

from .. import slow
from ..helpers import close, vectors

each = pytest.mark.parametrize("kind", [LearnedPositions, SinusoidalPositions, ShiftedPositions])


@settings(max_examples=30)
@given(max_len=st.integers(1, 40), d_model=st.integers(1, 9))
def test_sinusoids_equal_the_slow_reference(max_len, d_model):
    close(sinusoids(max_len, d_model).double(), slow.sinusoids(max_len, d_model), atol=1e-7)  # held in float32


@each
def test_positions_are_added_from_the_offset_on(kind):
    layer, x = kind(9, 4).double().eval(), vectors(2, 3, 4)
    table = slow.sinusoids(9, 4)
    close(layer(x), x + torch.tensor(table[:3]), atol=1e-7)
    close(layer(x, 6), x + torch.tensor(table[6:]), atol=1e-7)
    close(torch.cat([layer(x[:, :1], 4), layer(x[:, 1:], 5)], dim=1), layer(x, 4))


def test_only_the_learned_table_is_trained():
    assert sum(p.numel() for p in LearnedPositions(9, 4).parameters()) == 36
    assert not [*SinusoidalPositions(9, 4).parameters(), *ShiftedPositions(9, 4).parameters()]
    layer, x = LearnedPositions(5, 4).double(), vectors(2, 3, 4).requires_grad_()

    def function(x, table):
        return torch.func.functional_call(layer, {"table": table}, (x, 1))

    assert torch.autograd.gradcheck(function, (x, layer.table))


@each
def test_all_follow_the_models_type_and_are_saved_with_it(kind):
    layer = kind(5, 4)
    assert layer.bfloat16()(torch.zeros(1, 2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert list(layer.state_dict()) == ["table"]


@each
@pytest.mark.parametrize(("length", "offset", "position"), [(6, 0, 5), (1, 5, 5), (3, 4, 6)])
def test_positions_beyond_max_len_are_refused(kind, length, offset, position):
    with pytest.raises(ValueError, match=rf"position = {position}: must be below max_len = 5"):
        kind(5, 4)(torch.zeros(1, length, 4), offset)


@each
def test_bad_sizes_are_refused(kind):
    with pytest.raises(ValueError, match=r"max_len = 0: must be an int of at least 1"):
        kind(0, 4)
    with pytest.raises(ValueError, match=r"d_model = 0: must be an int of at least 1"):
        kind(4, 0)


def places(layer, rows):
    return [[int((layer.table - vector).abs().sum(-1).argmin()) for vector in row] for row in rows]


def test_shifted_rows_start_at_any_place_while_training():
    layer = ShiftedPositions(9, 4).double()
    starts = layer.starts(400, 3)
    found = places(layer, layer(torch.zeros(400, 3, 4), starts))
    assert all(row == [start, start + 1, start + 2] for row, start in zip(found, starts[:, 0].tolist(), strict=True))
    assert set(starts[:, 0].tolist()) == set(range(7))  # 400 draws of 7 places
    assert layer.starts(2, 9).tolist() == [[0], [0]]  # no room to shift


@each
def test_outside_training_and_beyond_the_table_everything_starts_at_0(kind):
    assert kind(5, 4).eval().starts(2, 3) == 0
    assert kind(5, 4).starts(2, 6) == 0


def test_a_source_and_its_target_start_at_one_place(monkeypatch):
    """What a model sees of a place is the same on both sides, as outside training, where both begin at 0."""
    seen = []

    def forward(layer, x, offset=0):
        seen.append(offset)
        return x

    monkeypatch.setattr(ShiftedPositions, "forward", forward)
    for architecture in ("encoder_decoder", "terraformer"):
        seen.clear()
        model = make_model(replace(preset("smoke", architecture=architecture, n_encoder_layers=1), positions="shifted"))
        model(torch.ones(3, 5, dtype=torch.long), torch.ones(3, 7, dtype=torch.long))
        source, target = seen
        assert torch.equal(source, target) and source.shape == (3, 1) and int(source.max()) <= 64 - 7
        model.eval()(torch.ones(3, 5, dtype=torch.long), torch.ones(3, 7, dtype=torch.long))
        assert seen[2:] == [0, 0]
