"""The recorded statistics of notebook 12."""

import numpy as np
import pytest

from sparselib.experiments import controller_traces, perplexity
from sparselib.experiments.controller import STATISTICS
from sparselib.experiments.recorded import load

from .invented import POINTS, invent


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSELIB_RUNS", str(tmp_path))


def extra(config):
    """The first statistic grows to 0.8 in block 1 and 0.6 in block 2, the others stay at 0.5."""
    if "ff" not in config.variant:
        return {}
    values = {f"{name}.{block}": [0.5] * POINTS for name in STATISTICS for block in (1, 2)}
    rising = np.linspace(0, 1, POINTS)
    return values | {"decision.1": list(0.8 * rising), "decision.2": list(0.6 * rising)}


def test_nothing_recorded_is_drawn_and_told_as_that():
    recorded = load(controller_traces.SPARSITIES)
    assert len(controller_traces.draw_traces(recorded).axes) == 6
    assert controller_traces.at_the_end(recorded, recorded.rows[0].label)["dead"] == "(not recorded yet)"
    assert controller_traces.dead_by_n(recorded) == "(not recorded yet)"


def test_traces_have_a_line_for_each_block_and_their_end_is_averaged():
    invent("figure1", lambda config: 5.0, extra)
    recorded = load(controller_traces.SPARSITIES)
    assert controller_traces.trace(recorded.runs[0][1], "decision").shape == (POINTS, 2)
    first = controller_traces.draw_traces(recorded).axes[0]
    assert [line.get_ydata()[-1] for line in first.lines] == pytest.approx([0.8, 0.6])
    frame = controller_traces.last_statistics(recorded)
    assert frame["decision (%)"].iloc[0] == pytest.approx(70)
    assert frame["seeds"].tolist() == [3, 0, 0, 0, 0, 3]
    assert controller_traces.at_the_end(recorded, recorded.rows[0].label) == dict.fromkeys(STATISTICS, "50 %") | {
        "decision": "70 %"
    }


def test_dead_units_are_told_by_n_in_order():
    for experiment in ("figure1", "figure3"):
        invent(experiment, lambda config: 5.0, lambda config: {f"{name}.1": [0.5] * POINTS for name in STATISTICS})
    told = controller_traces.dead_by_n(load(controller_traces.SPARSITIES))
    assert told == ", ".join(f"50 % at N = {n}" for n in (4, 8, 16, 32, 64))


def test_live_statistics():
    live = perplexity.train_live({"FF": {"variant": "ff"}}, seed=0, steps=2)[0]
    values = controller_traces.live_statistics(live)
    assert len(values) == 2 * len(STATISTICS) and all(0 <= value <= 100 for value in values.values())
    assert max(values.values()) > 1  # percent
