"""Ratios of medians with paired-bootstrap intervals.

Cells of a block are timed in the same trials, so trials are resampled jointly for all of them (Efron and Tibshirani,
1993, chapter 8): what slowed a whole trial down cancels in a ratio.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 2000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A point estimate and its 95% interval; the interval is NaN where one trial is all there is."""

    value: float
    lo: float
    hi: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.lo:.2f}, {self.hi:.2f}]"


def joint_medians(columns: Sequence[Sequence[float]], seed: int, resamples: int = RESAMPLES) -> tuple[Floats, Floats]:
    """Medians of k paired columns: [k] of the data, and [resamples, k] of trials resampled jointly.

    Raises ValueError for columns of unequal length, without samples, or with a value that is not a positive number.
    """
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            f"columns of {sorted(lengths)} trials: paired samples have one value each a trial, in equal number"
        )
    data = np.array(columns, dtype=np.float64)
    if not (np.isfinite(data).all() and (data > 0).all()):
        raise ValueError("a sample is not a positive finite number: such a cell has no time to compare")
    picks = np.random.default_rng(seed).integers(0, data.shape[1], (resamples, data.shape[1]))
    return np.median(data, axis=1), np.median(data[:, picks], axis=2).T


def interval(value: float, distribution: Floats, trials: int) -> Estimate:
    """`value` with the percentile interval of `distribution`."""
    if trials < 2:
        return Estimate(float(value), float("nan"), float("nan"))
    lo, hi = np.quantile(distribution, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(value), float(lo), float(hi))


def paired_ratio(base: Sequence[float], other: Sequence[float], seed: int = 0) -> Estimate:
    """median(base) / median(other): how many times faster `other` is."""
    medians, resampled = joint_medians([base, other], seed)
    return interval(medians[0] / medians[1], resampled[:, 0] / resampled[:, 1], len(base))


def median_interval(samples: Sequence[float], seed: int = 0) -> Estimate:
    """Median of one cell's samples with its interval."""
    medians, resampled = joint_medians([samples], seed)
    return interval(medians[0], resampled[:, 0], len(samples))
