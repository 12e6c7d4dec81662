"""
Measures of a comparison, as functions of plain arrays.

Everything statistical comes from SciPy. Intervals are 95 % intervals unless said otherwise.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

__all__ = [
    "Estimate",
    "TimeToThreshold",
    "at_steps",
    "bootstrap_interval",
    "first_reaching",
    "interquartile_mean",
    "interquartile_mean_interval",
    "median_time",
    "moving_average",
    "probability_of_improvement",
    "probability_of_improvement_interval",
    "restricted_mean_time",
    "share_reached",
]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

#: Share of the runs that the interquartile mean leaves out at either end
TRIMMED = 0.25

#: Number of resamples of a bootstrap interval, and a smaller number for the points of a curve
RESAMPLES, RESAMPLES_OF_CURVES = 9999, 2000


class Estimate(NamedTuple):
    """
    A value with its 95 % interval.

    :param value: the estimate
    :param low: lower end of the interval, NaN with a single run
    :param high: upper end of the interval, NaN with a single run
    """

    value: float
    low: float
    high: float


# Curves


def moving_average(values: npt.ArrayLike, window: int) -> FloatArray:
    """
    Mean of each value and those before it. A value that is huge, infinite or not a number changes
    only the means that it is part of.

    :param values: shape ``(n,)``
    :param window: number of values averaged; fewer at the beginning
    :return: shape ``(n,)``

    >>> moving_average([1.0, 3.0, 5.0, 7.0], window=2)
    array([1., 2., 4., 6.])
    """
    values = np.asarray(values, dtype=np.float64)
    n_first = min(window - 1, len(values))
    with np.errstate(over="ignore", invalid="ignore"):
        first = np.cumsum(values[:n_first]) / np.arange(1, n_first + 1)
        if len(values) == n_first:
            return first
        # Not differences of one running sum, in which a huge value cancels the others
        rest = np.lib.stride_tricks.sliding_window_view(values, window).mean(axis=1)
    return np.concatenate([first, rest])


def at_steps(steps: npt.ArrayLike, values: npt.ArrayLike, grid: npt.ArrayLike) -> FloatArray:
    """
    Latest value at each point of a grid, so that runs whose episodes end at different steps can be
    averaged.

    :param steps: steps of the values, ascending, shape ``(n,)``
    :param values: shape ``(n,)``
    :param grid: steps of the grid, shape ``(m,)``
    :return: values on the grid, NaN where there is no value yet, shape ``(m,)``

    >>> at_steps([10, 20], [1.0, 2.0], [5, 10, 19, 20, 30])
    array([nan,  1.,  1.,  2.,  2.])
    """
    latest = np.searchsorted(np.asarray(steps), np.asarray(grid), side="right") - 1
    padded = np.append(np.asarray(values, dtype=np.float64), np.nan)
    found: FloatArray = padded[latest]  # -1 is the NaN at the end
    return found


# Interquartile mean and intervals


def interquartile_mean(scores: npt.ArrayLike, axis: int = 0) -> Any:
    """
    Mean of the middle half of the runs: less sensitive to outliers than the mean, with less
    variance than the median (Agarwal et al. 2021).

    A quarter of the runs at either end is left out, rounded down to whole runs as
    ``scipy.stats.trim_mean`` does: of 10 runs, 2 and 2; of 3 runs, none.

    :param scores: scores with runs along ``axis``
    :param axis: axis of the runs
    :return: the mean over that axis, a number for one-dimensional scores

    >>> float(interquartile_mean([0.0, 1.0, 2.0, 90.0]))
    1.5
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return stats.trim_mean(scores, TRIMMED, axis=axis)


def bootstrap_interval(
    samples: Sequence[npt.ArrayLike],
    statistic: Callable[..., Any],
    axis: int = 0,
    n_resamples: int = RESAMPLES,
) -> tuple[Any, Any]:
    """
    95 % percentile interval by ``scipy.stats.bootstrap``, which draws runs with replacement, of
    each sample independently. The same samples always give the same interval.

    :param samples: runs along ``axis``
    :param statistic: function of the samples and ``axis``
    :param axis: axis of the runs
    :param n_resamples: number of resamples
    :return: lower and upper end, each of the shape of the statistic; NaN where a sample has only
        one run, or the statistic is infinite, too large or not a number
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    if min(array.shape[axis] for array in arrays) < 2:
        nothing = np.full_like(statistic(*arrays, axis=axis), np.nan)
        return nothing, nothing
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # Warnings about values that can't be averaged; the result is not a number
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        interval = stats.bootstrap(
            arrays,
            statistic,
            axis=axis,
            n_resamples=n_resamples,
            vectorized=True,
            # Other methods correct for bias by a formula that fails when all runs are equal
            method="percentile",
            random_state=np.random.default_rng(0),
        ).confidence_interval
    low, high = np.asarray(interval.low), np.asarray(interval.high)
    known = np.isfinite(low) & np.isfinite(high)
    return np.where(known, low, np.nan), np.where(known, high, np.nan)


def interquartile_mean_interval(scores: npt.ArrayLike) -> Estimate:
    """
    :param scores: one for each run, shape ``(runs,)``
    :return: their interquartile mean with its bootstrap interval
    """
    low, high = bootstrap_interval([scores], interquartile_mean)
    return Estimate(float(interquartile_mean(scores)), float(low), float(high))


# Time to threshold


class TimeToThreshold(NamedTuple):
    """
    Time until a run reached the threshold, or its length if it did not.

    :param reached: whether it reached the threshold; otherwise the run is censored
    :param episodes: number of episodes until then, or of the whole run
    :param steps: number of environment steps until then, or of the whole run
    """

    reached: bool
    episodes: int
    steps: int


def first_reaching(
    rewards: npt.ArrayLike, steps: npt.ArrayLike, budget: int, threshold: float, window: int
) -> TimeToThreshold:
    """
    First episode at whose end the mean reward of the last ``window`` episodes was at least the
    threshold; there must be that many episodes.

    :param rewards: rewards of the episodes of a run, shape ``(n,)``
    :param steps: environment steps at the end of each, shape ``(n,)``
    :param budget: environment steps of the whole run
    :param threshold: threshold of the mean reward
    :param window: number of episodes that are averaged
    :return: episodes and steps until then; those of the whole run if it never reached the threshold

    >>> first_reaching([0.0, 1.0, 1.0], [10, 20, 30], 35, threshold=1.0, window=2)
    TimeToThreshold(reached=True, episodes=3, steps=30)
    >>> first_reaching([0.0, 1.0, 1.0], [10, 20, 30], 35, threshold=1.0, window=3)
    TimeToThreshold(reached=False, episodes=3, steps=35)
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    # A mean of equal rewards can differ from them by rounding
    enough = threshold - 1e-9 * max(1.0, abs(threshold))
    there = np.flatnonzero(moving_average(rewards, window)[window - 1 :] >= enough)
    if not there.size:
        return TimeToThreshold(False, len(rewards), budget)
    at = int(there[0]) + window - 1
    return TimeToThreshold(True, at + 1, int(np.asarray(steps)[at]))


def share_reached(
    times: npt.ArrayLike, reached: npt.ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """
    Share of the runs that reached the threshold, as a function of time, by Kaplan and Meier
    (``scipy.stats.ecdf``): a run that stopped before counts until it stopped, and then neither as a
    success nor as a failure.

    :param times: time to the threshold, or until the run stopped, shape ``(runs,)``
    :param reached: whether the run reached the threshold, shape ``(runs,)``
    :return: times of events, ascending; the share from each on; the lower and upper ends of its
        95 % interval (log-log, NaN where there is none)

    >>> times, share, _, _ = share_reached([10, 20, 15], [True, True, False])
    >>> times, share
    (array([10., 15., 20.]), array([0.33333333, 0.33333333, 1.        ]))
    """
    times, reached = np.asarray(times, dtype=np.float64), np.asarray(reached, dtype=bool)
    survival = stats.ecdf(stats.CensoredData.right_censored(times, ~reached)).sf
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # At shares of 0 and 1 the interval is not defined, which makes SciPy warn
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = survival.confidence_interval(0.95, method="log-log")
    return (
        survival.quantiles,
        1.0 - survival.probabilities,
        1.0 - interval.high.probabilities,
        1.0 - interval.low.probabilities,
    )


def median_time(times: npt.ArrayLike, reached: npt.ArrayLike) -> Estimate:
    """
    Time by which half of the runs reached the threshold, by Kaplan and Meier; infinite if they
    never did.

    :param times: time to the threshold, or until the run stopped, shape ``(runs,)``
    :param reached: whether the run reached the threshold, shape ``(runs,)``
    :return: the median; its interval is where the 95 % interval of the share crosses one half,
        and infinite where it does not

    >>> median_time([10, 30, 20], [True, True, True]).value
    20.0
    >>> median_time([10, 30, 30], [True, False, False]).value
    inf
    """
    when, share, low, high = share_reached(times, reached)

    def crossing(curve: FloatArray) -> float:
        # NaN stands for no interval: the share itself
        there = np.flatnonzero(np.where(np.isnan(curve), share, curve) >= 0.5 - 1e-12)
        return float(when[there[0]]) if there.size else np.inf

    if len(np.asarray(times)) < 2:
        return Estimate(crossing(share), np.nan, np.nan)
    return Estimate(crossing(share), crossing(high), crossing(low))


def restricted_mean_time(times: npt.ArrayLike, budget: float) -> Estimate:
    """
    Mean time to the threshold within the budget: a run that did not reach it counts with the whole
    budget, so that the mean is always defined, and too small rather than too large. When all runs
    have the same budget, this is the area above the curve of :func:`share_reached`.

    :param times: time to the threshold, or until the run stopped, shape ``(runs,)``
    :param budget: length of each run, in the same unit
    :return: the mean with its bootstrap interval
    """
    restricted = np.minimum(np.asarray(times, dtype=np.float64), budget)
    low, high = bootstrap_interval([restricted], np.mean)
    return Estimate(float(restricted.mean()), float(low), float(high))


# Comparison of two agents


def probability_of_improvement(better: npt.ArrayLike, than: npt.ArrayLike, axis: int = 0) -> Any:
    """
    Probability that a run of one agent scores higher than a run of another, with ties counted as
    one half: Mann and Whitney's U divided by the number of pairs.

    :param better: scores of the first agent, runs along ``axis``
    :param than: scores of the other, runs along ``axis``
    :param axis: axis of the runs
    :return: probability in ``[0, 1]``; 0.5 if neither is better

    >>> float(probability_of_improvement([2.0, 3.0], [1.0, 2.0]))
    0.875
    """
    better, than = np.asarray(better, dtype=np.float64), np.asarray(than, dtype=np.float64)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # The p-value that comes with it is not defined when all scores are equal
        warnings.simplefilter("ignore", RuntimeWarning)
        u = stats.mannwhitneyu(better, than, method="asymptotic", axis=axis).statistic
    return u / (better.shape[axis] * than.shape[axis])


def probability_of_improvement_interval(better: npt.ArrayLike, than: npt.ArrayLike) -> Estimate:
    """
    :param better: scores of the first agent, shape ``(runs,)``
    :param than: scores of the other, shape ``(runs of the other,)``
    :return: the probability that the first is better, with its bootstrap interval
    """
    low, high = bootstrap_interval([better, than], probability_of_improvement, n_resamples=2000)
    value = float(probability_of_improvement(better, than))
    return Estimate(value, float(low), float(high))
