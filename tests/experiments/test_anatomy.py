"""The experiment of notebook 06: what is counted, fitted and left out; never a time."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas import DataFrame

from sparselib.bench.roofline import GRAIN, Reader, Roofline, limit
from sparselib.bench.rounds import Rounds, Samples
from sparselib.config import decode_cost, preset
from sparselib.decode.program import PARTS
from sparselib.experiments import anatomy
from sparselib.experiments.anatomy import PAIR, RECIPE, Timer
from sparselib.experiments.sparse_layers import decoder_block_parts
from sparselib.results.figures import look

ROOF = Roofline(1, 20.0, 100.0)
WIDTHS = (512, 1024, 2048, 4096)


@pytest.fixture(scope="module")
def timer():
    return Timer(Reader(1, 4 * GRAIN), 50.0, tokens=2, rounds=2)


@pytest.fixture(scope="module")
def parts(timer):
    sizes = {
        "two": (anatomy.pair("smoke"), ("fp32",)),
        "cross": (anatomy.pair("smoke", architecture="encoder_decoder", n_encoder_layers=1), ("bf16",)),
    }
    return anatomy.time_parts(sizes, timer)


def rounds(dense, sparse, context=40):
    """Every token of a model takes (rest, block, blocks) ms: the rest, and so many blocks."""
    samples = {}
    for name, (rest, block, blocks) in zip(PAIR, (dense, sparse), strict=True):
        ones = np.ones((2, 3))
        shares = {part: ones * place for place, part in enumerate(PARTS, 1)}
        samples[name] = Samples(ones * (rest + block * blocks), ones * block, shares)
    return Rounds(samples, np.array([10.0, 30.0]), context)


class Told:
    """A timer that has been told what it measures."""

    def __init__(self, *measured):
        self.measured, self.asked = list(measured), []

    def time(self, packed, **how):
        self.asked.append(how)
        return self.measured.pop(0), ROOF


# --- parts ---


def test_parts_add_up_to_the_token(parts):
    assert list(parts.rooflines) == ["two, fp32", "cross, bf16"]
    assert parts.said() == "nothing"
    for _, own in parts.frame.groupby(["size", "model"]):
        whole, rest = own[own["part"] == anatomy.WHOLE].iloc[0], own[own["part"] != anatomy.WHOLE]
        for column in ("MB", "MFLOP", "limit (ms)"):
            assert rest[column].sum() == pytest.approx(whole[column])
        assert own["% of limit"].to_numpy() == pytest.approx((100 * own["limit (ms)"] / own["ms"]).to_numpy())
    named = parts.frame.groupby("size")["part"].apply(set)
    assert named["cross, bf16"] - named["two, fp32"] == {"cross-attention"}


def test_parts_are_counted_as_the_limit_counts_them():
    config, measured = preset("smoke", "ff_qkv_loss"), rounds((1, 2, 2), (3, 4, 2))
    rows = {row["part"]: row for row in anatomy._part_rows(config, "int8", measured, PAIR[1], ROOF)}
    cost = decode_cost(config, context=40, bytes_per_weight=1, bytes_per_cached=4)
    assert rows["controller"]["MB"] == cost.parts["controller"].bytes / 1e6
    assert rows["cached keys and values"]["MFLOP"] == cost.parts["kv_cache"].flops / 1e6
    assert rows["feedforward"]["limit (ms)"] == limit(config, "int8", ROOF, context=40).parts["feedforward"]
    assert rows["embedding, norms"]["ms"] == PARTS.index("embedding") + PARTS.index("norms") + 2
    assert rows[anatomy.WHOLE]["ms"] == 11
    assert "cross-attention" not in rows


def test_parts_take_the_first_dtype_that_fits(timer, monkeypatch):
    configs = anatomy.pair("smoke")
    sizes = {"it": (configs, ("fp32", "bf16", "int8"))}
    monkeypatch.setattr(anatomy, "free_room", lambda: timer.needs(configs, "fp32") - 1)
    assert list(anatomy.time_parts(sizes, timer).rooflines) == ["it, bf16"]
    monkeypatch.setattr(anatomy, "free_room", lambda: 5)
    nothing = anatomy.time_parts(sizes, timer)
    assert nothing.frame.empty and not nothing.rooflines
    assert nothing.said().startswith("it: needs 0.0 GB in int8")


def test_figures_of_parts(parts):
    roofline = anatomy.draw_roofline(parts)
    assert [axis.get_title() for axis in roofline.axes] == list(parts.rooflines)
    roof = roofline.axes[0].lines[0].get_ydata()
    assert roof[0] < roof[-1] == parts.rooflines["two, fp32"].peak_gflops
    points = [line for line in roofline.axes[0].lines[1:] if len(line.get_xdata())]
    assert len(points) == 4 + 5  # no controller in the dense model, no cross-attention in both
    bars = anatomy.draw_parts(parts)
    assert bars.axes[0].yaxis_inverted() and len(bars.axes) == 4


# --- width ---


def test_modules_of_the_widths_of_the_book():
    widths = {512: 16, 1024: 32, 2048: 32, 4096: 64, 8192: 64, 12288: 128}
    assert {d: anatomy.modules_of(d) for d in widths} == widths


@given(st.integers(1, 20000))
def test_no_power_of_two_that_divides_is_nearer(d):
    s = anatomy.modules_of(d)
    assert d % s == 0 and s.bit_count() == 1
    others = [2**i for i in range(15) if d % 2**i == 0]
    assert abs(s - math.sqrt(d)) == min(abs(other - math.sqrt(d)) for other in others)


@given(st.sampled_from(WIDTHS), st.sampled_from(RECIPE), st.integers(0, 10**9), st.integers(0, 10**8))
def test_blocks_are_as_many_as_are_asked_for_and_no_more(d, variant, held, touched):
    config = anatomy.width_config(d, variant, held=held, touched=touched)
    assert (config.d_ff, config.ff_sparsity * config.d_lowrank) == (4 * d, d)
    parts = decoder_block_parts(config).values()
    weights, reads = 4 * sum(p.weights for p in parts), 4 * sum(p.reads for p in parts)
    n = config.n_layers
    assert n * weights >= held and n * reads >= touched
    assert n == 1 or (n - 1) * weights < held or (n - 1) * reads < touched


def test_widths_that_do_not_fit_are_left_out(timer, monkeypatch):
    small = {variant: anatomy.width_config(128, variant) for variant in RECIPE}
    monkeypatch.setattr(anatomy, "free_room", lambda: timer.needs(small, "fp32"))
    measured = anatomy.time_widths([128, 256], timer, held=0)
    assert measured.frame["d_model"].tolist() == [128, 128] and list(measured.rooflines) == [128]
    assert len(measured.left_out) == 1 and measured.said().startswith("width 256: needs")
    least = limit(small["ff_qkv"], "fp32", measured.rooflines[128], context=35, scope="block")
    assert measured.frame["limit (ms)"].iloc[1] == pytest.approx(least.ms)
    assert measured.frame["speed-up"].iloc[0] == 1


@settings(max_examples=20)
@given(st.floats(-3, 3), st.floats(0.01, 100))
def test_fit_finds_a_power(exponent, factor):
    x = np.array([1.0, 2, 5, 11])
    found, error, scale = anatomy.fit(x, factor * x**exponent)
    assert (found, scale) == pytest.approx((exponent, factor), abs=1e-6, rel=1e-6)
    assert error < 1e-6


def test_error_of_the_fit_is_two_standard_errors():
    x, noise = np.array([0.0, 1, 2, 3]), np.array([0.1, -0.1, -0.1, 0.1])
    found, error, _ = anatomy.fit(np.exp(x), np.exp(2 * x + noise))
    assert found == pytest.approx(2)
    assert error == pytest.approx(2 * math.sqrt((noise**2).sum() / 2 / ((x - 1.5) ** 2).sum()))
    with pytest.raises(ValueError, match="three"):
        anatomy.fit([1, 2], [1, 2])


def widths():
    rows = []
    for d in WIDTHS:
        for variant in RECIPE:
            least = limit(anatomy.width_config(d, variant), "fp32", ROOF, context=36, scope="block")
            numbers = {"MB": least.bytes / 1e6, "MFLOP": least.flops / 1e6, "ms": least.ms * 2, "limit (ms)": least.ms}
            rows.append({"d_model": d, "model": look(variant).label, "speed-up": 1.0} | numbers)
    return DataFrame(rows)


def test_dense_blocks_grow_with_the_square_and_sparse_ones_do_not():
    frame = anatomy.exponents(widths()).set_index(["model", "quantity"])
    for quantity in ("bytes", "FLOPs"):
        assert frame.loc[("dense", quantity), "exponent"] == pytest.approx(2, abs=0.02)
    sparse = frame.loc["sparse FF+QKV"]
    assert 1.3 < sparse.loc["bytes", "exponent"] < sparse.loc["FLOPs", "exponent"] < 2
    assert sparse["paper"].dropna().tolist() == [1.5]
    figure = anatomy.draw_widths(widths())
    shown = [f"{model}: d^{frame.loc[(model, 'time'), 'exponent']:.2f}" for model in ("dense", "sparse FF+QKV")]
    assert [line.get_label() for line in figure.axes[0].lines[::3]] == shown
    assert figure.axes[1].lines[1].get_ydata()[-1] > figure.axes[1].lines[1].get_ydata()[0] > 1


def test_arithmetic_of_the_multiplicative_layer():
    frame = anatomy.arithmetic([1024, 4096, 16384, 65536], ROOF)
    d = frame["d_model"].to_numpy()
    assert (frame["MFLOP"] * 1e6).to_numpy() == pytest.approx(2 * d**2)
    assert anatomy.fit(d, frame["MB"])[0] == pytest.approx(1.5, abs=0.03)
    at = anatomy.overtakes(frame)
    assert at is not None and 4096 < at < 65536
    slower = anatomy.overtakes(anatomy.arithmetic(d.tolist(), replace(ROOF, peak_gflops=50.0)))
    assert slower is not None and slower < at
    assert anatomy.overtakes(anatomy.arithmetic(d.tolist(), replace(ROOF, peak_gflops=1e6))) is None
    assert len(anatomy.draw_arithmetic(frame).axes[0].lines) == 2


def test_first_below():
    x = [1, 4, 16, 64]
    assert anatomy.first_below(x, [9, 7, 3, 4], 5) == pytest.approx(8)
    assert anatomy.first_below(x, [9, 7, 6, 6], 5) is None
    assert anatomy.first_below(x, [4, 7, 6, 1], 5) == 1


# --- length, threads, batch ---


def pair():
    return dict.fromkeys(PAIR, type("Weights", (), {"config": preset("smoke", "ff_qkv_loss", n_layers=2)}))


def test_length_derives_the_token_of_all_blocks():
    told = Told(rounds((4, 8, 2), (1, 2, 2), 16), rounds((4, 9, 2), (1, 6, 2), 64))
    frame = anatomy.time_lengths(pair(), told, (8, 56), n_layers=10)
    assert told.asked == [{"context": 8}, {"context": 56}]
    assert frame["positions"].tolist() == [16, 64]
    assert frame["speed-up, block"].tolist() == [4, 1.5]
    assert frame["speed-up, token"].tolist() == pytest.approx([84 / 21, 94 / 61])
    share = (PARTS.index("kv_cache") + 1) / 2
    assert frame["cache, % of sparse"].tolist() == pytest.approx([100 * share / 2, 100 * share / 6])
    assert anatomy.halved(frame, "block") == pytest.approx(16 * 4**0.8)
    assert anatomy.halved(frame.head(1), "token") is None
    figure = anatomy.draw_against(frame, "positions", "ms a block", "positions")
    assert [line.get_label() for line in figure.axes[1].lines][:2] == ["speed-up, block", "speed-up, token"]


def test_batch_counts_the_tokens_of_all_sequences():
    told = Told(rounds((2, 3, 1), (1, 1, 1)), rounds((4, 6, 1), (10, 10, 1)))
    frame = anatomy.time_batches(pair(), told, (1, 4))
    assert told.asked == [{"batch": 1}, {"batch": 4}]
    assert frame["dense (tokens/s)"].tolist() == [200, 400]
    assert frame["speed-up"].tolist() == [2.5, 0.5]
    n = preset("smoke", "ff").ff_sparsity
    assert frame["units read (%)"].tolist() == pytest.approx([100 / n, 100 * (1 - (1 - 1 / n) ** 4)])
    figure = anatomy.draw_against(frame, "batch", "tokens/s", "sequences")
    assert len(figure.axes[0].lines) == 2 and len(figure.axes[1].lines) == 2


def test_thread_counts():
    assert [anatomy.thread_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_threads_and_batches_decode(timer):
    packed = timer.pack(anatomy.pair("smoke"))
    frame = anatomy.time_threads(packed, [timer])
    assert frame["threads"].tolist() == [1, 1] and frame["speed-up"].iloc[0] == 1
    bytes = [limit(p.config, "fp32", ROOF, context=35).bytes for p in packed.values()]
    assert (frame["GB/s"] * frame["ms"] * 1e6).tolist() == pytest.approx(bytes)
    assert anatomy.time_batches(packed, timer, (1, 3))["batch"].tolist() == [1, 3]
    with pytest.raises(ValueError, match="max_len"):
        anatomy.time_lengths(packed, timer, (100,), 2)


def test_timer_looks_at_the_machine_first(monkeypatch):
    monkeypatch.setattr(anatomy, "Reader", lambda threads: f"reader of {threads}")
    monkeypatch.setattr(anatomy, "peak_gflops", lambda threads: 7.0 * threads)
    assert Timer.of(3, tokens=1, rounds=2, seed=5) == Timer("reader of 3", 21.0, 1, 2, 5)


def test_formats_are_for_columns_that_are_there():
    frame = DataFrame({"d_model": [512], "model": ["dense"], "limit (ms)": [0.25], "% of limit": [3.0]})
    assert anatomy.formats(frame) == {"d_model": "{:,}", "limit (ms)": "{:,.3f}", "% of limit": "{:.0f}"}
