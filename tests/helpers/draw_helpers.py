"""Draws of whole batches for tests: made many times, and compared with their probabilities."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: A right tree fails a check with probability RIGHT, a wrong one has to fail beyond WRONG
RIGHT, WRONG = 1e-3, 1e-9


def strata(batch_size: int) -> FloatArray:
    """
    :return: one random point in each of ``batch_size`` equal parts of the unit interval
    """
    return (np.arange(batch_size) + np.random.random_sample(batch_size)) / batch_size


def batches(draw: Callable[[], IntArray], n: int, seed: int = 0) -> IntArray:
    """
    :return: drawn leaves, shape ``(n, batch)``
    """
    np.random.seed(seed)
    return np.array([draw() for _ in range(n)])


def p_value_of_each_stratum(drawn: IntArray, masses: FloatArray) -> float:
    """
    Chi-square test of all strata at once: each row of the table (stratum, leaf) is multinomial,
    with the share of the stratum that a leaf covers for its probability.

    :param drawn: shape ``(n, batch)``
    :param masses: masses of the draw, in the order of the strata
    """
    n, batch_size = drawn.shape
    ends = np.concatenate([[0.0], np.cumsum(masses)]) / masses.sum()
    statistic, freedom = 0.0, 0
    for j in range(batch_size):
        expected = np.diff(np.clip(ends * batch_size - j, 0.0, 1.0)) * n
        counts = np.bincount(drawn[:, j], minlength=len(masses))
        if (counts[expected < 1e-9 * n] > 0).any():
            return 0.0
        # What hardly overlaps the stratum goes together
        rare = expected < 5.0
        expected = np.append(expected[~rare], expected[rare].sum())
        counts = np.append(counts[~rare], counts[rare].sum())
        used = expected > 1e-9 * n
        statistic += float((((counts - expected) ** 2)[used] / expected[used]).sum())
        freedom += int(used.sum()) - 1
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0


def has_one_draw_in_each_stratum(drawn: IntArray, masses: FloatArray) -> bool:
    """
    Whether the interval of what was drawn j-th overlaps the mass from j to j + 1 strata, always.

    :param drawn: shape ``(n, batch)``
    :param masses: masses of the draw, in the order of the strata
    """
    batch_size = drawn.shape[1]
    ends = np.concatenate([[0.0], np.cumsum(masses)]) / masses.sum() * batch_size
    slack = 1e-9
    low = ends[drawn] < np.arange(1, batch_size + 1) + slack
    high = ends[drawn + 1] > np.arange(batch_size) - slack
    return bool((low & high).all())
