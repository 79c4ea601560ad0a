"""The kernels' file, and numbers that they make themselves."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparselib.decode import hashing, kernels, products, simd

BUILT_ON = [(products, [simd]), (hashing, [simd, products]), (kernels, [simd, products, hashing])]


@pytest.mark.parametrize(("module", "built_on"), BUILT_ON)
def test_numba_compiles_again_when_what_a_file_is_built_on_changes(module, built_on):
    """numba's cache sees that a kernel's own file changed, not the files of kernels that it calls."""
    digest = hashlib.sha256(b"".join(Path(part.__file__).read_bytes() for part in built_on)).hexdigest()[:12]
    assert digest == module.BUILT_ON, f'write BUILT_ON = "{digest}" in {Path(module.__file__).name}'


@given(st.lists(st.floats(-200, 0, width=32), min_size=1, max_size=50))
def test_exp(values):
    x = np.array(values, np.float32)
    relative = 3e-7 + 1e-7 * np.abs(x)  # a float32 cannot say better which power is meant
    exact = np.exp(x.astype(float))
    assert (np.abs([kernels._exp(v) for v in x] - exact) <= relative * exact + 2e-38).all()


@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 0.1), (np.uint16, 0.1), (np.int8, 127.99)])
def test_fill_is_uniform_and_follows_its_seed(dtype, bound):
    first, again, other = (np.zeros(40_000, dtype) for _ in range(3))
    for array, seed in ((first, 1), (again, 1), (other, 2)):
        kernels.fill(array, 0, array.size, np.float32(bound), np.uint64(seed))
    assert (first == again).all() and (first != other).mean() > 0.9
    values = (first.astype(np.uint32) << 16).view(np.float32) if dtype == np.uint16 else first.astype(np.float32)
    assert np.abs(values).max() <= bound
    assert abs(values.mean()) < 0.02 * bound and values.std() == pytest.approx(bound / 3**0.5, rel=0.02)
