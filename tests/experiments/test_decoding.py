"""Tables of notebooks 04 and 05, from a benchmark of the smallest models."""

import pytest

from sparselib.bench.decode import bench_decode
from sparselib.config import VARIANTS
from sparselib.experiments import decoding
from sparselib.results.figures import look
from sparselib.results.paper import TABLE_1, TABLE_2, TABLE_6


@pytest.fixture(scope="module")
def result():
    return bench_decode("smoke", dtypes=("fp32",), threads=1, tokens=2, rounds=2)


@pytest.mark.parametrize(("scope", "field"), [("model", "seconds"), ("block", "block_seconds")])
def test_paper_and_measurement_stand_in_one_row(result, scope, field):
    frame = decoding.against_paper(result, "fp32", scope, TABLE_1, "800M").set_index("variant")
    assert list(frame.index) == [look(v).label for v in VARIANTS]
    rows = decoding.rows_of(result, "fp32", scope)
    dense = getattr(TABLE_1.row(size="800M", variant="dense"), field)
    for variant in ("dense", "ff", "qkv", "ff_qkv"):
        cells, theirs = frame.loc[look(variant).label], getattr(TABLE_1.row(size="800M", variant=variant), field)
        assert cells["paper (ms)"] == pytest.approx(1e3 * theirs)
        assert cells["paper, times dense"] == pytest.approx(dense / theirs)
        assert cells["here (ms)"] == rows[variant]["ms_median"]
        assert cells["% of limit"] == pytest.approx(100 * rows[variant]["limit_ms"] / rows[variant]["ms_median"])
    assert frame["paper (ms)"].isna().loc[look("ff_qkv_loss").label]


def test_the_sparse_loss_is_in_table_6(result):
    frame = decoding.against_paper(result, "fp32", "model", TABLE_6, "17B").set_index("variant")
    row = TABLE_6.row(size="17B", variant="ff_qkv_loss")
    assert frame.loc[look("ff_qkv_loss").label, "paper, times dense"] == pytest.approx(row.speedup, abs=0.01)


def test_only_columns_with_numbers_have_a_format(result):
    frame = decoding.against_paper(result, "fp32", "model", TABLE_1, "800M")
    shown, apart = set(decoding.formats(frame)), set(decoding.formats(decoding.by_distance(result)))
    assert shown | apart == set(decoding.FORMATS)
    assert set(decoding.formats(frame.drop(columns=["GB/s"]))) == shown - {"GB/s"}


def test_figures_draw_every_variant(result):
    frame = decoding.against_paper(result, "fp32", "model", TABLE_1, "800M")
    assert len(decoding.draw_speedups({"one": frame, "two": frame}).axes) == 2
    (axis,) = decoding.draw_times(result, "fp32", {"model": "whole model"}).axes
    assert len(axis.get_xticks()) == len(VARIANTS)


def test_what_was_left_out_is_said(result):
    assert decoding.left_out(result) == "nothing was left out"
    gone = {"left_out": [{"variant": "dense", "dtype": "bf16", "reason": "needs 99 GB"}]}
    assert decoding.left_out(gone) == "dense in bf16: needs 99 GB"
    assert str(result["machine"]["threads"]) in decoding.about(result)


def test_rows_are_those_of_the_usual_distance_and_both_stand_in_a_table_of_their_own(result):
    far = [row | dict(cores="far", usual=False, ms_median=2 * row["ms_median"]) for row in result["rows"]]
    both = result | {"rows": far + result["rows"]}
    assert decoding.rows_of(both, "fp32", "model") == decoding.rows_of(result, "fp32", "model")
    frame = decoding.by_distance(both)
    assert list(frame["cores"]) == ["far", "near"] * len(decoding.COMPARED)
    assert list(frame["here (ms)"][::2]) == [2 * ms for ms in frame["here (ms)"][1::2]]
    alone = [row | dict(side_by_side=False) for row in result["rows"]]
    assert decoding.by_distance(result | {"rows": alone}).empty
    assert len(decoding.draw_allowed(decoding.allowed("smoke", 200.0, [10], 32), both, (1, 2)).axes[0].lines) == 9


def test_table_2():
    configs = decoding.ff_configs("smoke", (4, 8))
    assert [c.feedforward for c in configs.values()] == ["dense", "sparse", "sparse", "block"]
    measured, roofline = decoding.time_configs(configs, tokens=2, rounds=2, threads=1)
    frame = decoding.ff_table(configs, measured, roofline)
    assert list(frame["feedforward"]) == list(configs)
    assert frame["paper (ms)"].iloc[0] == 1e3 * TABLE_2.row(feedforward="dense").seconds
    assert frame["here, times dense"].iloc[0] == 1
    assert decoding.draw_ff(configs, frame).axes[0].get_ylim()[0] == 0


def test_loss_sparsity():
    configs = decoding.loss_configs("smoke", (1, 2, 4))
    measured, roofline = decoding.time_configs(configs, tokens=2, rounds=2, threads=1)
    frame = decoding.loss_table(configs, measured, roofline)
    assert list(frame["output layer"]) == ["dense", "loss sparsity 2", "loss sparsity 4"]
    assert frame["limit (ms)"].is_monotonic_decreasing


def test_models_that_do_not_fit_are_refused_with_numbers(monkeypatch):
    monkeypatch.setattr(decoding, "free_room", lambda: 1000)
    with pytest.raises(MemoryError, match=r"3 models side by side need 0\.\d GB"):
        decoding.time_configs(decoding.loss_configs("smoke", (1, 2, 4)), tokens=2, rounds=2, threads=1)


def test_faster_memory_allows_less(result):
    frame = decoding.allowed("paper_17b", 200.0, [10, 20, 40], context=32)
    for label in decoding.COMPARED:
        assert frame[label].is_monotonic_decreasing
    assert len(decoding.draw_allowed(frame, result, (18.0, 20.0)).axes[0].lines) == 2 * len(decoding.COMPARED)


@pytest.mark.parametrize(
    ("pairs", "word"),
    [([(3, 2), (5, 5)], "reproduced, and"), ([(3, 2), (4, 5)], "1 of 2"), ([(3, 2), (0.9, 5)], "not reproduced")],
)
def test_verdicts(pairs, word):
    assert word in decoding.verdict(pairs)
