"""Means, intervals and verdicts over seeds, against arithmetic done by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparselib.results import statistics
from sparselib.results.statistics import Estimate, final_losses, mean_over_seeds, paired_difference, verdict

from .runs import record


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


def test_pairs_take_away_what_a_seed_does_to_both():
    dense = {0: 3.0, 1: 4.0, 2: 5.0}
    found = paired_difference({2: 5.1, 0: 3.1, 1: 4.1}, dense)
    assert (found.low, found.mean, found.high) == pytest.approx((0.1, 0.1, 0.1))


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


def test_final_losses_by_variant_and_seed():
    runs = [record(variant=v, seed=s, final_loss=6.0 + s) for v in ("dense", "ff") for s in (0, 1)]
    assert final_losses(runs) == {"dense": {0: 6.0, 1: 7.0}, "ff": {0: 6.0, 1: 7.0}}
    with pytest.raises(ValueError, match="dense seed 0 twice"):
        final_losses([*runs, record(steps=9)])


def test_refusals():
    with pytest.raises(ValueError, match=r"values = \[3.0\]: must be of two seeds or more"):
        mean_over_seeds([3.0])
    with pytest.raises(ValueError, match=r"seeds = \[0, 1\]: must be those of the dense runs, \[0, 2\]"):
        paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 2: 2.0})
