"""Recorded losses that the code can no longer produce must not stand in the book."""

import pytest

from sparselib.recording import TOLERANCE, replay
from sparselib.results.store import scan

RUNS, FAULTS = scan()
SAMPLE = RUNS[:: max(1, -(-len(RUNS) // 3))]  # up to three, far apart in the list


def test_the_store_holds_nothing_else():
    assert FAULTS == []


@pytest.mark.parametrize("run", SAMPLE, ids=lambda run: f"{run.experiment}-{run.variant}-{run.seed}")
def test_recorded_losses_come_again(run):
    assert replay(run, steps=20) < TOLERANCE
