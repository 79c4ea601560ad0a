import math

import numpy as np
import psutil
import pytest

from sparselib.bench import roofline
from sparselib.bench.roofline import GRAIN, STRIDES, read_bandwidth


def test_one_thread_reads_at_a_positive_finite_rate():
    rate = read_bandwidth(1, size=4 * GRAIN)
    assert math.isfinite(rate) and rate > 0


@pytest.mark.parametrize("stride", STRIDES)
def test_every_float_is_read_once(stride):
    values = np.random.default_rng(0).integers(0, 4, 2 * GRAIN).astype(np.float32)
    assert roofline._sum(values, stride) == values.sum(dtype=np.float64)


def test_a_pass_that_did_not_read_everything_is_an_error(monkeypatch):
    monkeypatch.setattr(roofline, "_sum", lambda part, stride: float(part.size - 1))
    with pytest.raises(RuntimeError, match="bandwidth would be wrong"):
        read_bandwidth(1, size=4 * GRAIN)


def test_the_default_size_is_larger_than_the_cache(monkeypatch):
    sizes = []
    monkeypatch.setattr(roofline, "last_level_cache", lambda: 2**30)
    monkeypatch.setattr(roofline, "_ones", lambda floats: sizes.append(4 * floats) or np.ones(GRAIN, np.float32))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**40}))
    read_bandwidth(1)
    assert sizes == [2**32]


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, 10**6])
def test_threads_that_cannot_be_are_refused(threads):
    with pytest.raises(ValueError, match="threads"):
        read_bandwidth(threads)


def test_a_size_below_one_grain_is_refused():
    with pytest.raises(ValueError, match="size = 100: must be at least"):
        read_bandwidth(1, size=100)


def test_more_than_half_the_free_memory_is_refused():
    with pytest.raises(MemoryError, match="GB"):
        read_bandwidth(1, size=2**50)
