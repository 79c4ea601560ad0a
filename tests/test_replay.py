"""Recorded losses that the code can no longer produce must not stand in the book."""

import pytest
import torch

from sparselib.recording import TOLERANCE, replay
from sparselib.results.store import scan

RUNS, FAULTS = scan()
ON_CPU = [run for run in RUNS if run.machine["device"] == "cpu"]
SAMPLE = ON_CPU[:: max(1, -(-len(ON_CPU) // 3))]  # up to three, far apart in the list


def test_the_store_holds_nothing_else():
    assert FAULTS == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine trains on its GPU, the runs are of CPUs")
@pytest.mark.parametrize("run", SAMPLE, ids=lambda run: f"{run.experiment}-{run.variant}-{run.seed}")
def test_recorded_losses_come_again(run):
    assert replay(run, steps=20) < TOLERANCE
