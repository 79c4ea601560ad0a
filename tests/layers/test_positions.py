import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import LearnedPositions, ShiftedPositions, SinusoidalPositions
from sparselib.layers.positions import sinusoids

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


def test_shifted_rows_start_at_any_place_while_training():
    layer, x = ShiftedPositions(9, 4).double(), torch.zeros(400, 3, 4)
    rows = layer(x)
    places = [[int((layer.table - vector).abs().sum(-1).argmin()) for vector in row] for row in rows]
    assert all(row == [row[0], row[0] + 1, row[0] + 2] for row in places)
    assert {row[0] for row in places} == set(range(7))  # 400 draws of 7 places
    close(layer(torch.zeros(2, 9, 4)), layer.table.expand(2, 9, 4))  # no room to shift
