import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparselib.layers import DenseUnembedding, SparseUnembedding

from .. import slow
from ..helpers import by_steps, close, randomized, seeds, vectors


@settings(max_examples=30)
@given(seed=seeds, d=st.integers(1, 5), s=st.sampled_from([1, 2, 4]), per_module=st.integers(1, 4))
def test_both_equal_the_slow_reference(seed, d, s, per_module):
    x = vectors(2, 3, d, seed=seed)
    dense = randomized(DenseUnembedding(d, s * per_module), seed)
    close(dense(x), slow.dense(x.numpy(), slow.weights_of(dense)))
    sparse = randomized(SparseUnembedding(d, s * per_module, s), seed)
    expected = slow.multiplicative(x.numpy(), slow.weights_of(sparse), s)
    close(sparse(x), expected)
    close(by_steps(sparse, x, None)[0], expected)


def test_weights_by_the_papers_formula():
    d, v, s = 1024, 32000, 4
    with torch.device("meta"):
        assert sum(p.numel() for p in DenseUnembedding(d, v).parameters()) == d * v + v
        assert sum(p.numel() for p in SparseUnembedding(d, v, s).parameters()) == d * s + d * v // s + v


def test_a_vocabulary_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"d_out = 10: must be a multiple of n_modules = 4"):
        SparseUnembedding(8, 10, 4)
