import pytest

from sparselib.bench.training import step_ratio
from sparselib.config import CONTROLLERS


@pytest.mark.parametrize("reading", CONTROLLERS)
def test_ratio_is_of_sparse_over_dense(reading):
    assert 0 < step_ratio(8, 16, reading, tokens=4, repeat=3, warmup=1) < float("inf")
