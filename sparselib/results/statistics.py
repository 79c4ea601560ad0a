"""Losses over seeds: means, differences from the dense model, and what may be said of them.

An interval is a percentile bootstrap over the seeds. Few seeds make it too narrow: that of three is the range of their
losses, which holds the true mean in about three cases of four. A page that shows one says how many seeds it is from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from scipy.stats import bootstrap

from ..checks import require

CONFIDENCE = 0.95
RESAMPLES = 9999


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` values and its interval, in their unit."""

    mean: float
    low: float
    high: float
    n: int


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """Mean of at least two values, each of another seed, with its 95 % interval; the same values give the same."""
    require(len(values) >= 2, "values", list(values), "of two seeds or more")
    found = bootstrap(
        (numpy.asarray(values, dtype=float),),
        numpy.mean,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",  # the corrected methods have no answer when values are equal
        rng=numpy.random.default_rng(0),
    )
    interval = found.confidence_interval
    return Estimate(float(numpy.mean(values)), float(interval.low), float(interval.high), len(values))


def verdict(difference: Estimate) -> str:
    """What a difference of losses says, in words: an interval that holds 0 tells nothing apart; less loss is better."""
    if difference.low <= 0 <= difference.high:
        return f"no difference beyond the noise of {difference.n} seeds"
    return "worse" if difference.mean > 0 else "better"
