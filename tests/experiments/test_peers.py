"""Notebook 07: the engine beside other libraries."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import same_color

from sparselib.bench import peers as bench
from sparselib.bench.peers import PEERS, NotRun, PeerTiming, peers_frame
from sparselib.bench.peers.base import weights_read
from sparselib.bench.protocol import Timing
from sparselib.config import preset
from sparselib.decode import DTYPES
from sparselib.experiments import peers
from sparselib.results.figures import GREY, look

VARIANTS = ("dense", "ff_qkv", "ff_qkv_loss")
CONFIGS = {v: preset("smoke", v, architecture="encoder_decoder", n_encoder_layers=1) for v in VARIANTS}
COUNTS = dict(tokens=3, rounds=2, context=4)
DENSE, SPARSE = peers.NAMES["dense"], peers.NAMES["ff_qkv_loss"]


def row(peer, dtype, ms, read=10.0, threads=1):
    timing = Timing(ms, ms, ms, ms, n=5, threads=1, bytes=10**8)
    return PeerTiming(peer, "1.0", dtype, threads, "a shape", timing).beside(read)


def reader(read=20.0):
    return SimpleNamespace(now=lambda: read, handover=lambda: 0.0, threads=1)


@pytest.fixture(scope="module")
def timed():
    return peers.time_engines(CONFIGS, {"fp32": VARIANTS, "int8": ("dense",)}, {1: reader(), 2: reader(30)}, **COUNTS)


# --- measuring --------------------------------------------------------------------------------------------------------


def test_engines_are_timed_in_every_dtype_and_on_all_threads(timed):
    named = [(peers.ENGINE[r.peer], r.dtype, r.threads) for r in timed]
    assert named == [(v, "fp32", n) for n in (1, 2) for v in VARIANTS] + [("dense", "int8", n) for n in (1, 2)]
    for result, (variant, dtype, threads) in zip(timed, named, strict=True):
        assert result.timing.n == 6 and result.timing.threads == threads
        assert result.timing.bytes == DTYPES[dtype].itemsize * weights_read(CONFIGS[variant])
        assert result.read_gb_s == pytest.approx({1: 20, 2: 30}[threads])
        assert f"d_ff {CONFIGS[variant].d_ff}" in result.shape


def test_quartiles_are_those_of_all_samples():
    samples = SimpleNamespace(token=np.arange(1.0, 10).reshape(3, 3))
    timing = peers._timing(samples, 1, CONFIGS["dense"], "fp32")
    assert (timing.ms_q1, timing.ms_median, timing.ms_q3, timing.ms_min) == (3, 5, 7, 1)


def test_engines_that_do_not_fit_are_not_run_and_others_are(monkeypatch):
    need = {dtype: peers.engine_bytes(CONFIGS["dense"], dtype, 9, 1) for dtype in ("fp32", "int8")}
    monkeypatch.setattr(peers, "free_room", lambda: need["int8"])
    none, some = peers.time_engines(CONFIGS, {"fp32": ("dense",), "int8": ("dense",)}, {1: reader()}, **COUNTS)
    assert isinstance(none, NotRun) and (none.peer, none.dtype, none.threads) == (DENSE, "fp32", 1)
    assert "GB are free" in none.reason and isinstance(some, PeerTiming)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens = 0"),
        ({"context": -1}, "context = -1"),
        ({"rounds": 0}, "rounds = 0"),
        ({"context": 64}, "max_len = 70: must be at most the model's max_len = 64"),
    ],
)
def test_bad_counts_are_refused(changes, message):
    counts = COUNTS | {"tokens": 4} | changes
    with pytest.raises(ValueError, match=message):
        peers.time_engines(CONFIGS, {"fp32": ("dense",)}, {1: reader()}, **counts)


def test_readers_are_of_one_thread_and_of_all(monkeypatch):
    monkeypatch.setattr(peers, "Reader", lambda threads, size: (threads, size))
    for usable, counts in ((1, [1]), (2, [1, 2]), (16, [1, 16])):
        monkeypatch.setattr(peers, "usable_threads", lambda usable=usable: usable)
        assert peers.make_readers(7) == {n: (n, 7) for n in counts}


def test_each_peer_is_held_against_the_bandwidth_before_and_after_it(monkeypatch):
    looks = {1: iter([10.0, 20.0]), 2: iter([8.0, 6.0, 5.0])}
    readers = {n: SimpleNamespace(now=looks[n].__next__) for n in looks}
    ran = {n: PeerTiming("llama.cpp", "1.0", "F16", n, "a shape", Timing(100, 1, 1, 1, 5, n, 10**9)) for n in looks}
    missing = NotRun("CTranslate2", "fp32", 2, "ctranslate2 is not installed")
    monkeypatch.setattr(bench, "_run", lambda job, _: ran[job.threads] if job.peer == "llama.cpp" else missing)
    results = bench.run_peers(
        CONFIGS["dense"], (1, 2), peers=[("llama.cpp", "F16")], tokens=5, readers=readers, progress=False
    )
    assert [r.read_gb_s for r in results] == pytest.approx([15, 7])
    one, two = peers_frame(results).to_dict("records")
    assert one["read GB/s"] == pytest.approx(15) and two["% of limit"] == pytest.approx(100 * 10 / 7)
    found = bench.run_peers(
        CONFIGS["dense"], (2,), peers=[("CTranslate2", "fp32")], tokens=5, readers=readers, progress=False
    )
    assert found == [missing] and peers_frame(found)["read GB/s"].isna().all()


def test_without_readers_there_is_no_limit_and_a_reader_that_lacks_is_named(monkeypatch):
    ran = PeerTiming("llama.cpp", "1.0", "F16", 1, "a shape", Timing(100, 1, 1, 1, 5, 1, 10**9))
    monkeypatch.setattr(bench, "_run", lambda *_: ran)
    settings = dict(peers=[("llama.cpp", "F16")], tokens=5, progress=False)
    assert bench.run_peers(CONFIGS["dense"], (1,), **settings) == [ran] and ran.read_gb_s is None
    with pytest.raises(ValueError, match=r"threads = 2: must be one of the readers' \[1\]"):
        bench.run_peers(CONFIGS["dense"], (1, 2), readers={1: reader()}, **settings)


# --- comparing --------------------------------------------------------------------------------------------------------


@given(*[st.floats(0.1, 1e3)] * 4)
def test_at_equal_bandwidth_is_the_ratio_in_units_of_the_limit(ms, other, read, other_read):
    slow, fast = row("a", "fp32", ms, read), row(DENSE, "fp32", other, other_read)
    assert peers.ratio(slow, fast) == ms / other
    shares = fast.timing.limit_fraction / slow.timing.limit_fraction  # of as many bytes
    assert peers.even_ratio(slow, fast) == pytest.approx(shares)


RESULTS = [
    row(DENSE, "fp32", 100),
    row(DENSE, "bf16", 50),
    row(DENSE, "int8", 30),
    row(SPARSE, "fp32", 10),
    row(SPARSE, "int8", 4),
    row("slow", "fp32", 300),
    row("quick", "fp32", 120, read=8.0),
    row("quick", "fp32", 1, threads=2),
    row("llama.cpp", "Q8_0", 45),
    row("llama.cpp", "Q4_0", 20),
    NotRun("CTranslate2", "int8", 1, "ctranslate2 is not installed"),
    NotRun("CTranslate2", "int8", 2, "ctranslate2 is not installed"),
]


def test_dense_is_set_against_the_fastest_peer_of_equal_bits_and_threads():
    fp32, bf16, int8 = peers.against_peers(RESULTS).to_dict("records")
    assert (fp32["fastest peer"], fp32["its ms a token"]) == ("quick fp32", 120)
    assert fp32[peers.RAW] == pytest.approx(1.2) and fp32[peers.EVEN] == pytest.approx(1.2 * 8 / 10)
    assert (int8["bits a weight"], int8["fastest peer"], int8[peers.RAW]) == (8, "llama.cpp Q8_0", 1.5)
    assert bf16["fastest peer"] is None and bf16[peers.RAW] is None


def test_dense_has_to_be_faster_than_every_peer_both_ways():
    ours = row(DENSE, "fp32", 100)
    for peer, faster in ((("fp32", 101), True), (("fp32", 99), False), (("fp32", 101, 9.0), False)):
        assert peers.verdict([ours, row("a", *peer)])["word"] == ("yes" if faster else "no")
    found = peers.verdict(RESULTS)
    assert found["word"] == "partly"
    assert "faster in 2 of 3 comparisons" in found["dense"]  # not against quick, which had slow memory
    assert "closest is quick fp32 on 1 thread: the engine is 1.20 times as fast, 0.96 times" in found["dense"]


def test_sparse_is_set_against_the_fastest_peer_of_all_and_of_fp32():
    found = peers.verdict([r for r in RESULTS if r.threads == 1])
    assert "llama.cpp Q4_0, takes 20.00 ms" in found["sparse"] and "5.0 times as fast" in found["sparse"]
    assert "in fp32, quick fp32, takes 120.00 ms" in found["sparse"] and "12.0 times as fast" in found["sparse"]
    assert found["peers"] == "3 of 4 (slow, quick, llama.cpp)"


def test_one_pair_is_told_once():
    found = peers.verdict([row(SPARSE, "fp32", 10), row("a", "fp32", 30)])
    assert found["sparse"].count("times as fast") == 1 and "3.0 times" in found["sparse"]


def test_without_peers_nothing_is_claimed(timed):
    for results in (timed, [*timed, NotRun("llama.cpp", "F16", 1, "llama_cpp is not installed")]):
        found = peers.verdict(results)
        assert found["word"] == "not measured" and found["dense"].startswith("No peer")
        assert found["sparse"].startswith("No peer") and "(none)" in found["peers"]
        assert peers.against_peers(results)["fastest peer"].isna().all()
        assert len(peers.draw_times(results).axes[0].patches) == len(timed)


def test_what_was_not_run_is_listed_once_a_reason():
    last = "CTranslate2 (int8 on 1 thread, int8 on 2 threads): ctranslate2 is not installed"
    assert peers.not_run(RESULTS) == f"Not run:\n{last}"
    assert peers.not_run(RESULTS[:3]) == "All were run."


def test_bars_are_sorted_and_coloured_and_leave_out_what_was_not_run():
    axis = peers.draw_times(RESULTS).axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels[:2] == ["quick fp32", f"{SPARSE} int8"] and labels[-1] == "slow fp32"  # quick: on 2 threads
    assert len(axis.patches) == 10 and axis.get_xscale() == "log" and axis.yaxis_inverted()
    bars = {bar.get_width(): bar for bar in axis.patches}
    for ms, color in ((4, look("ff_qkv_loss").color), (300, GREY), (30, look("dense").color)):
        assert same_color(bars[ms].get_edgecolor(), color)
    assert [ms for ms, bar in bars.items() if bar.get_facecolor()[3]] == [1]  # filled: the most threads


def test_every_dtype_has_its_bits():
    assert set(DTYPES) <= set(peers.BITS)
    assert {dtype for _, dtype in PEERS} <= set(peers.BITS)


def test_table_has_formats_for_its_numbers():
    assert set(peers.FORMATS) <= set(peers_frame(RESULTS).columns)
    assert set(peers.COMPARED) <= set(peers.against_peers(RESULTS).columns)
