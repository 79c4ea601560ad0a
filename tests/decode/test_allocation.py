"""A token makes no memory: neither the kernels nor Python keep asking for more."""

import itertools
import tracemalloc

import numba
import numpy as np
import pytest
from numba.core.runtime import _nrt_python, rtsys

from sparselib.config import LSHSizes, preset
from sparselib.decode import DTYPES, Engine, pack_random

KILOBYTES = 1024


LSH = LSHSizes(n_hashes=2, n_buckets=(2, 2), chunk_len=1)  # the encoder's source of three is sorted
ARRAYS = 9  # handed to compiled code for a token by each thread; numba notes each of them in a small record


@pytest.fixture(params=[*itertools.product(DTYPES, (1, 2), (None,)), ("fp32", 2, LSH)], ids=str)
def engine(request):
    dtype, threads, lsh = request.param
    config = preset("smoke", "ff_qkv_loss", architecture="encoder_decoder", n_encoder_layers=1, lsh=lsh)
    engine = Engine(pack_random(config, dtype), batch=3, threads=threads)
    engine.start([[1, 2, 3]] * 3)
    engine.step([1, 2, 3])
    yield engine
    engine.close()


@pytest.fixture
def statistics():
    _nrt_python.memsys_enable_stats()
    yield
    _nrt_python.memsys_disable_stats()


def test_kernels_allocate_nothing(engine, statistics):
    before = rtsys.get_allocation_stats().alloc
    for _ in range(20):
        engine.step([1, 2, 3])
    engine.prefill([[1, 2, 3]] * 3)
    made = rtsys.get_allocation_stats().alloc - before
    assert made == 21 * ARRAYS if engine.threads == 1 else made <= 21 * ARRAYS * engine.threads


def test_the_statistics_notice_an_allocation(statistics):
    before = rtsys.get_allocation_stats()
    kept = numba.njit(lambda n: np.zeros(n))(3)
    assert rtsys.get_allocation_stats() != before and kept.size == 3


def test_python_holds_no_more_after_many_tokens(engine):
    tokens = [1, 2, 3]
    tracemalloc.start()
    try:
        engine.step(tokens)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(200):
            engine.step(tokens)
            engine.rewind(1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 8 * KILOBYTES  # one array kept a token would be over 20


def test_the_memory_of_an_engine_is_what_its_program_says(engine):
    assert engine._m.nbytes == 4 * engine.program.size
