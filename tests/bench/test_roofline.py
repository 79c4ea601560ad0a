import math

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparselib.bench import roofline
from sparselib.bench.roofline import (
    GRAIN,
    OUTSIDE_BLOCKS,
    Reader,
    Roofline,
    limit,
    peak_gflops,
    read_bandwidth,
)
from sparselib.config import VARIANTS, decode_cost, preset
from sparselib.decode.engine import usable_threads
from sparselib.decode.layout import PANEL


def test_one_thread_reads_at_a_positive_finite_rate():
    rate = read_bandwidth(1, size=4 * GRAIN)
    assert math.isfinite(rate) and rate > 0


def test_every_float_is_read_once():
    values = np.random.default_rng(0).integers(0, 4, 2 * GRAIN).astype(np.float32)
    total = roofline._read(values, np.ones(roofline.STREAM, np.float32), np.zeros(PANEL, np.float32))
    assert total == values.sum(dtype=np.float64)


def test_a_pass_that_did_not_read_everything_is_an_error(monkeypatch):
    monkeypatch.setattr(roofline, "_read", lambda part, ones, sums: float(part.size - 1))
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


def test_a_reader_looks_again_and_keeps_the_best():
    reader = Reader(1, size=4 * GRAIN)
    first = reader.highest
    later = [reader.now() for _ in range(3)]
    assert reader.threads == 1 and min(later) > 0
    assert reader.highest == max(first, *later)


@pytest.mark.skipif(usable_threads() < 2, reason="takes two threads")
def test_threads_take_some_time_to_meet_and_one_none():
    assert Reader(1, size=4 * GRAIN).handover() == 0
    assert 1 < Reader(2, size=8 * GRAIN).handover() < 1e6


def test_the_memory_that_is_read_is_the_engines_kind(monkeypatch):
    made = []
    monkeypatch.setattr(roofline, "allocate", lambda size, dtype: made.append(size) or np.zeros(size, dtype))
    read_bandwidth(1, size=8 * GRAIN)
    assert made == [2 * GRAIN]


def test_usable_threads_are_threads_of_this_machine():
    assert 1 <= usable_threads() <= psutil.cpu_count()


def test_the_peak_is_positive_and_every_product_was_summed(monkeypatch):
    monkeypatch.setattr(roofline, "TILES", 2**8)
    assert 0 < peak_gflops(1) < math.inf
    monkeypatch.setattr(roofline, "_multiply", lambda a, w, c, inner, tiles: c.fill(inner * tiles - 1))
    with pytest.raises(RuntimeError, match="peak would be wrong"):
        peak_gflops(1)


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, 10**6])
def test_a_peak_of_threads_that_cannot_be_is_refused(threads):
    with pytest.raises(ValueError, match="threads"):
        peak_gflops(threads)


def test_a_roofline_holds_both(monkeypatch):
    monkeypatch.setattr(roofline, "read_bandwidth", lambda threads: 10.0 * threads)
    monkeypatch.setattr(roofline, "peak_gflops", lambda threads: 100.0 * threads)
    assert Roofline.measure(2) == Roofline(2, 20.0, 200.0)


@given(
    name=st.sampled_from(["smoke", "paper_800m", "paper_17b"]),
    variant=st.sampled_from(VARIANTS),
    dtype=st.sampled_from([("fp32", 4), ("bf16", 2), ("int8", 1)]),
    gb_s=st.floats(1, 1000),
    gflops=st.floats(1, 10000),
    context=st.integers(1, 512),
)
def test_the_limit_is_the_slower_of_memory_and_arithmetic_part_by_part(name, variant, dtype, gb_s, gflops, context):
    config = preset(name, variant)
    here, asked = Roofline(1, gb_s, gflops), dict(context=context, source_length=7)
    cost = decode_cost(config, **asked, bytes_per_weight=dtype[1], bytes_per_cached=4)
    whole = limit(config, dtype[0], here, **asked)
    assert (whole.bytes, whole.flops) == (cost.bytes, cost.flops)
    assert whole.parts.keys() == cost.parts.keys()
    for part, ms in whole.parts.items():
        slower = max(cost.parts[part].bytes / gb_s, cost.parts[part].flops / gflops)
        assert ms == pytest.approx(slower / 1e6)
    assert whole.ms == pytest.approx(sum(whole.parts.values()))
    block = limit(config, dtype[0], here, **asked, scope="block")
    inside = {part: ms for part, ms in whole.parts.items() if part not in OUTSIDE_BLOCKS}
    assert set(whole.parts) - set(inside) == set(OUTSIDE_BLOCKS)
    assert block.ms * config.n_layers == pytest.approx(sum(inside.values()))
    outside = [cost.parts[part] for part in OUTSIDE_BLOCKS]
    assert block.bytes * config.n_layers == pytest.approx(whole.bytes - sum(part.bytes for part in outside))
    assert block.flops * config.n_layers == pytest.approx(whole.flops - sum(part.flops for part in outside))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(dtype="fp16"), r"^dtype = 'fp16': must be one of 'fp32', 'bf16', 'int8'"),
        (dict(scope="layer"), r"^scope = 'layer': must be one of 'model', 'block'"),
        (dict(context=0), r"^context = 0"),
    ],
)
def test_impossible_limits_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        limit(preset("smoke"), **dict(dtype="fp32", roofline=Roofline(1, 1.0, 1.0), context=1) | asked)
