import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import LearnedPositions, SinusoidalPositions
from sparselib.layers.positions import sinusoids

from .. import slow
from ..helpers import close, vectors

both = pytest.mark.parametrize("kind", [LearnedPositions, SinusoidalPositions])


@settings(max_examples=30)
@given(max_len=st.integers(1, 40), d_model=st.integers(1, 9))
def test_sinusoids_equal_the_slow_reference(max_len, d_model):
    close(sinusoids(max_len, d_model).double(), slow.sinusoids(max_len, d_model), atol=1e-7)  # held in float32


@both
def test_positions_are_added_from_the_offset_on(kind):
    layer, x = kind(9, 4).double(), vectors(2, 3, 4)
    table = slow.sinusoids(9, 4)
    close(layer(x), x + torch.tensor(table[:3]), atol=1e-7)
    close(layer(x, 6), x + torch.tensor(table[6:]), atol=1e-7)
    close(torch.cat([layer(x[:, :1], 4), layer(x[:, 1:], 5)], dim=1), layer(x, 4))


def test_only_the_learned_table_is_trained():
    assert sum(p.numel() for p in LearnedPositions(9, 4).parameters()) == 36
    assert not list(SinusoidalPositions(9, 4).parameters())
    layer, x = LearnedPositions(5, 4).double(), vectors(2, 3, 4).requires_grad_()

    def function(x, table):
        return torch.func.functional_call(layer, {"table": table}, (x, 1))

    assert torch.autograd.gradcheck(function, (x, layer.table))


@both
def test_both_follow_the_models_type_and_are_saved_with_it(kind):
    layer = kind(5, 4)
    assert layer.bfloat16()(torch.zeros(1, 2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert list(layer.state_dict()) == ["table"]


@both
@pytest.mark.parametrize(("length", "offset", "position"), [(6, 0, 5), (1, 5, 5), (3, 4, 6)])
def test_positions_beyond_max_len_are_refused(kind, length, offset, position):
    with pytest.raises(ValueError, match=rf"position = {position}: must be below max_len = 5"):
        kind(5, 4)(torch.zeros(1, length, 4), offset)


@both
def test_bad_sizes_are_refused(kind):
    with pytest.raises(ValueError, match=r"max_len = 0: must be an int of at least 1"):
        kind(0, 4)
    with pytest.raises(ValueError, match=r"d_model = 0: must be an int of at least 1"):
        kind(4, 0)
