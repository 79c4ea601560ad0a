"""What is read from the store for a figure, what is said of it, and that the figures can be drawn."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparselib.experiments import recorded
from sparselib.experiments.recorded import RELATIONS, Recorded, Row, load, pick, told, verdict
from sparselib.results import statistics
from sparselib.results.store import RECIPE
from sparselib.results.tables import save_table

from .invented import invent, save

ROWS = (Row("dense", "figure1/dense", "dense"), Row("FF", "figure1/ff", "ff", "equal"))
LOSSES = {"dense": 5.0, "ff": 5.0, "qkv": 4.9, "ff_qkv": 5.1}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SPARSELIB_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(statistics, "RESAMPLES", 999)
    (tmp_path / "runs").mkdir()


def figure_1(config):
    """Sparse FF differs from dense by chance alone, the others by 0.1."""
    return LOSSES[config.variant] + 0.01 * config.seed + 0.02 * (config.variant == "ff") * (config.seed - 1)


def made_up(*rows):
    """Recorded runs of (paper's finding, losses by seed)."""
    runs = [{seed: SimpleNamespace(final_loss=loss) for seed, loss in enumerate(losses)} for _, losses in rows]
    names = tuple(Row(f"row {i}", "a/b", "ff", paper) for i, (paper, _) in enumerate(rows))
    return Recorded(names, tuple(runs), tuple(len(of_row) == 3 for of_row in runs), ())


def test_load_finds_all_runs_and_says_where_they_are_from():
    invent("figure1", figure_1)
    found = load(ROWS)
    assert [sorted(runs) for runs in found.runs] == [[0, 1, 2], [0, 1, 2]]
    assert found.runs[1][2].variant == "ff" and found.runs[1][2].seed == 2
    assert recorded.gaps([found]) == "nothing is missing"
    assert recorded.source([found, found]) == "recorded 2026-01-02, some CPU, 45 minutes in 6 runs"


def test_a_run_on_a_gpu_says_so():
    save(recorded.planned_runs("figure1")[0], 5.0, machine={"cpu": "some CPU", "gpu": "some GPU"})
    assert recorded.source([load(ROWS)]) == "recorded 2026-01-02, some GPU, 8 minutes in 1 run"


def test_what_is_missing_is_named():
    assert recorded.source([load(ROWS)]) == "nothing recorded yet"
    config = recorded.planned_runs("figure1")[0]
    save(config, 5.0)
    assert recorded.gaps([load(ROWS)]) == "not recorded yet: figure1/dense (seed 1, 2), figure1/ff"


def test_a_file_that_is_no_run_is_named(tmp_path):
    (tmp_path / "runs" / "figure1").mkdir()
    (tmp_path / "runs" / "figure1" / "odd.json").write_text("{}")
    assert "odd.json" in recorded.gaps([load(ROWS)])


def test_runs_of_another_config_are_not_taken_for_those_of_the_sweep():
    config = recorded.planned_runs("figure1")[0]
    longer = config.model_copy(update={"steps": config.steps + 1})
    save(longer, 5.0)
    assert not load(ROWS).all_runs


def test_runs_of_an_older_recipe_do_not_count(monkeypatch):
    invent("figure1", figure_1)
    monkeypatch.setattr(recorded, "RECIPE", RECIPE + 1)
    assert not load(ROWS).all_runs


def test_refusals():
    with pytest.raises(ValueError, match="row = 'figure1/wide': must be a variant of the sweep figure1"):
        load([Row("wide", "figure1/wide", "ff")])
    first, second = recorded.planned_runs("figure1")[:2]
    save(first, 5.0)
    save(second, 5.0, tokens=7)
    with pytest.raises(ValueError, match="tokens = .*: must be the same in all runs that are compared"):
        load(ROWS)


def test_differences_are_paired_over_the_seeds_that_both_have():
    found = made_up(("", [5.0, 5.5, 6.0]), ("", [5.1, 5.6]), ("", [5.0]))
    gap = recorded.difference(found, 1)
    assert (gap.mean, gap.low, gap.high, gap.n) == pytest.approx((0.1, 0.1, 0.1, 2))
    assert recorded.difference(found, 2) is None


FOUND = {"better": [4.9, 4.8, 4.9], "equal": [5.1, 4.9, 5.0], "worse": [5.1, 5.2, 5.1]}


@given(st.lists(st.tuples(st.sampled_from(sorted(RELATIONS)), st.sampled_from(sorted(FOUND))), min_size=1, max_size=4))
def test_the_verdict_follows_from_the_findings(pairs):
    word, why = verdict(made_up(("", [5.0] * 3), *((paper, FOUND[here]) for paper, here in pairs)))
    held = [paper == here or (paper, here) == ("equal", "better") for paper, here in pairs]
    assert word == ("reproduced" if all(held) else "partly reproduced" if any(held) else "not reproduced")
    assert why.count(", not ") == held.count(False)
    assert ("better than it says" in why) == any((paper, here) == ("equal", "better") for paper, here in pairs)
    assert why.count("row ") == len(pairs)


def test_verdict_without_runs_and_with_some():
    assert verdict(made_up(("", []), ("equal", []))) == ("not tested", "not wholly recorded yet: row 1")
    for some in ([], [5.0, 5.0]):  # two of three seeds are none
        word, why = verdict(made_up(("", [5.0] * 3), ("worse", FOUND["worse"]), ("equal", some)))
        assert word == "partly reproduced"
        assert why.startswith("as the paper says: row 1 is worse (+0.133, ")
        assert why.endswith("; not wholly recorded yet: row 2")
    assert verdict(made_up(("", [5.0, 5.0]), ("worse", FOUND["worse"])))[0] == "not tested"


def test_what_the_paper_says_of_the_baseline_does_not_count():
    found = made_up(("", [5.0] * 3), ("equal", FOUND["equal"]), ("worse", FOUND["better"]))
    word, why = verdict(pick(found, *found.rows[1:]))
    assert word == "not reproduced" and "row 1" not in why


def test_told_and_pick():
    found = made_up(("", [5.0] * 3), ("", FOUND["worse"]), ("", []))
    assert told(found, "row 1") == "row 1 is worse (+0.133, +0.100 to +0.200)"
    assert told(found) == "row 1 is worse (+0.133, +0.100 to +0.200); row 2 is not recorded yet"
    other = pick(found, found.rows[1], found.rows[0])
    assert told(other) == "row 0 is better (-0.133, -0.200 to -0.100)"


def test_table_with_and_without_runs():
    empty = save_table("empty", recorded.table(load(ROWS)), recorded.FORMATS)
    assert empty["difference (nats)"].tolist() == ["–", "–"]
    invent("figure1", figure_1)
    frame = save_table("full", recorded.table(load(ROWS)), recorded.FORMATS)
    assert frame["weights"].tolist() == ["1,878,784", "1,884,800"] and frame["d_ff"].tolist() == ["512", "480"]
    assert recorded.rates([load(ROWS)]) == "learning rates: 0.004 (dense, FF)"
    assert frame["loss (nats)"].tolist() == ["5.010", "5.010"]
    assert frame["low (nats)"].tolist() == ["–", "-0.020"] and frame["high (nats)"].tolist() == ["–", "+0.020"]
    assert frame["here"].tolist() == ["–", "equal"] and frame["paper"].tolist() == ["–", "equal"]
    assert "paper" not in recorded.table(load(ROWS[:1]))


def test_least_and_most_leave_out_the_baseline_and_what_is_not_recorded():
    rows = (*ROWS, Row("QKV", "figure1/qkv", "qkv"), Row("both", "figure1/ff_qkv", "ff_qkv"))
    assert recorded.least_and_most(load(rows)) == ("not recorded yet", "not recorded yet")
    invent("figure1", figure_1)
    assert recorded.least_and_most(load(rows)) == ("4.910 (QKV)", "5.110 (both)")
    assert recorded.least_and_most(load(ROWS)) == ("5.010 (FF)", "5.010 (FF)")


def test_draw_with_and_without_runs():
    left, right = recorded.draw(load(ROWS)).axes
    assert not left.lines and [label.get_text() for label in right.get_yticklabels()] == ["dense", "FF"]
    invent("figure1", figure_1)
    figure = recorded.draw(load(ROWS))
    left, right = figure.axes
    tokens = left.lines[1].get_xdata()
    assert tokens[-1] == pytest.approx(600 * 32 * 128 / 1e6)
    assert left.lines[1].get_ydata()[-1] == pytest.approx(5.01)
    assert "45 minutes in 6 runs" in figure.get_supxlabel()


def test_rows_of_a_kind_get_darker_and_no_two_are_alike():
    rows = [Row(str(i), "a/b", kind) for i, kind in enumerate(["dense", "ff", "ff", "ff"])]
    shades = [tuple(color) for color in recorded.colors(rows)]
    assert len(set(shades)) == 4 and sum(shades[1]) > sum(shades[2]) > sum(shades[3])
    assert len({tuple(color) for color in recorded.colors(rows, "viridis")}) == 4
