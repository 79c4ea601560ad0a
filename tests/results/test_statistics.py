"""Means, intervals and verdicts over seeds, against arithmetic done by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparselib.results import statistics
from sparselib.results.statistics import Estimate, mean_over_seeds, verdict


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 999)


losses = st.lists(st.floats(0, 20), min_size=2, max_size=6)


@given(losses)
def test_the_mean_lies_in_its_interval_and_that_in_the_values(values):
    found, slack = mean_over_seeds(values), 1e-9
    assert found.n == len(values)
    assert found.mean == pytest.approx(sum(values) / len(values))
    assert min(values) - slack <= found.low <= found.high <= max(values) + slack
    assert found.low - slack <= found.mean <= found.high + slack
    assert mean_over_seeds(values) == found


def test_the_interval_of_three_seeds_is_their_range():
    found = mean_over_seeds([3.1, 3.4, 3.2])
    assert (found.low, found.high) == (3.1, 3.4)


def test_more_seeds_give_a_narrower_interval():
    few, many = (mean_over_seeds([3.0, 3.2] * n) for n in (2, 20))
    assert many.high - many.low < (few.high - few.low) / 2


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        (Estimate(0.1, 0.05, 0.15, 3), "worse"),
        (Estimate(-0.1, -0.15, -0.05, 3), "better"),
        (Estimate(0.1, -0.01, 0.2, 3), "no difference beyond the noise of 3 seeds"),
    ],
)
def test_verdict(difference, words):
    assert verdict(difference) == words


def test_refusals():
    with pytest.raises(ValueError, match=r"values = \[3.0\]: must be of two seeds or more"):
        mean_over_seeds([3.0])
