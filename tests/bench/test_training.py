from sparselib.bench.training import step_ratio


def test_ratio_is_of_sparse_over_dense():
    assert 0 < step_ratio(8, 16, tokens=4, repeat=3, warmup=1) < float("inf")
