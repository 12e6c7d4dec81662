import math

import numpy as np
import pytest
from scipy import stats

from sb3_per.compare.metrics import (
    Estimate,
    TimeToThreshold,
    at_steps,
    bootstrap_interval,
    first_reaching,
    interquartile_mean,
    interquartile_mean_interval,
    median_time,
    moving_average,
    probability_of_improvement,
    probability_of_improvement_interval,
    restricted_mean_time,
    share_reached,
)

INF = math.inf


def test_moving_average_has_fewer_values_at_the_beginning() -> None:
    # By hand: 4; (4+0)/2; (4+0+2)/3; (0+2+7)/3; (2+7+6)/3
    assert moving_average([4, 0, 2, 7, 6], 3) == pytest.approx([4, 2, 2, 3, 5])


def test_moving_average_over_more_values_than_there_are() -> None:
    assert moving_average([1.0, 2.0], 20) == pytest.approx([1.0, 1.5])
    assert moving_average([], 20).shape == (0,)


@pytest.mark.parametrize("odd", [INF, -INF, math.nan, 1e300, -1e300])
def test_moving_average_after_an_odd_value_is_as_without_it(odd: float) -> None:
    averages = moving_average([1.0, odd, 3.0, 5.0, 7.0], 2)
    assert averages[[0, 3, 4]].tolist() == [1.0, 4.0, 6.0]
    # It is in two means
    assert (averages[[1, 2]] == pytest.approx([odd / 2, odd / 2], nan_ok=True)) is True


def test_moving_average_of_huge_values_overflows_without_a_warning() -> None:
    assert moving_average([1.7e308, 1.7e308, 0.0, 0.0], 2).tolist() == [1.7e308, INF, 8.5e307, 0.0]


def test_at_steps_takes_the_latest_value_and_nothing_from_the_future() -> None:
    found = at_steps([3, 7, 7], [10.0, 20.0, 30.0], [0, 3, 6, 7, 100])
    assert np.isnan(found[0])
    assert found[1:].tolist() == [10.0, 10.0, 30.0, 30.0]


@pytest.mark.parametrize(
    ("scores", "mean"),
    [
        # Of 10, two at either end are left out: (2+3+4+5+6+7) / 6
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 1000], 4.5),
        # Of 4, one at either end
        ([-50, 1, 2, 90], 1.5),
        # Of 3, none
        ([0, 0, 9], 3.0),
        ([7], 7.0),
    ],
)
def test_interquartile_mean(scores: list[float], mean: float) -> None:
    assert interquartile_mean(np.random.permutation(scores)) == pytest.approx(mean)


def test_interquartile_mean_over_an_axis() -> None:
    scores = np.array([[0, 10], [1, 11], [2, 12], [90, -90]])
    assert interquartile_mean(scores).tolist() == [1.5, 10.5]
    assert interquartile_mean(scores.T, axis=1).tolist() == [1.5, 10.5]


def test_bootstrap_interval_is_that_of_the_resampled_means() -> None:
    """Against the distribution itself: all 4^4 ways of drawing 4 runs with replacement."""
    scores = np.array([0.0, 1.0, 5.0, 20.0])
    draws = np.array(np.meshgrid(*[scores] * 4)).reshape(4, -1)
    exact = np.quantile(draws.mean(axis=0), [0.025, 0.975])
    low, high = bootstrap_interval([scores], np.mean)
    # Quantiles of 9999 of them; the steps of the distribution are 0.25 apart
    assert (low, high) == pytest.approx(exact, abs=0.51)
    assert low < 6.5 < high


def test_bootstrap_interval_is_the_same_each_time_and_leaves_the_global_state_alone() -> None:
    before = np.random.get_state()
    first = bootstrap_interval([[1.0, 2.0, 4.0]], interquartile_mean)
    assert bootstrap_interval([[1.0, 2.0, 4.0]], interquartile_mean) == first
    after = np.random.get_state()
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(before, after, strict=True))


def test_equal_runs_have_an_interval_of_no_width_and_one_run_has_none() -> None:
    assert interquartile_mean_interval([500.0] * 10) == Estimate(500.0, 500.0, 500.0)
    value, low, high = interquartile_mean_interval([3.0])
    assert value == 3.0
    assert np.isnan([low, high]).all()


def test_intervals_of_curves_have_the_shape_of_the_curve() -> None:
    curves = np.arange(10)[:, None] + np.array([0.0, 100.0, 1000.0])
    low, high = bootstrap_interval([curves], interquartile_mean)
    assert low.shape == high.shape == (3,)
    # The same runs are drawn at every point
    assert low - low[0] == pytest.approx([0.0, 100.0, 1000.0])


# Time to threshold


def test_threshold_needs_a_whole_window() -> None:
    rewards, steps = [1, 1, 1, 0, 1, 1, 1], [10, 20, 30, 40, 50, 60, 70]
    assert first_reaching(rewards, steps, 75, 1.0, 3) == TimeToThreshold(True, 3, 30)
    assert first_reaching(rewards, steps, 75, 1.0, 4) == TimeToThreshold(False, 7, 75)
    assert first_reaching(rewards, steps, 75, 0.75, 4) == TimeToThreshold(True, 4, 40)
    assert first_reaching(rewards, steps, 75, 0.75, 1) == TimeToThreshold(True, 1, 10)


def test_threshold_is_reached_whatever_the_rounding() -> None:
    # The mean of 20 times 0.1, taken from a running sum, is not exactly 0.1
    rewards = [-1.7] * 7 + [0.1] * 20
    time = first_reaching(rewards, np.arange(1, 28), 30, 0.1, 20)
    assert time == TimeToThreshold(True, 27, 27)


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_run_with_fewer_episodes_than_the_window_is_censored(rewards: list[float]) -> None:
    assert first_reaching(rewards, [9] * len(rewards), 40, 0.0, 2) == TimeToThreshold(
        False, len(rewards), 40
    )


def test_negative_thresholds_work() -> None:
    assert first_reaching([-200, -110, -108], [200, 310, 418], 500, -110.0, 2) == TimeToThreshold(
        True, 3, 418
    )


def test_share_reached_by_hand() -> None:
    """
    Kaplan and Meier: at 10, one of 5 gets there; at 15 one stops; at 20, one of the 3 left gets
    there; at 30, two of two stop.
    """
    times, reached = [10, 15, 20, 30, 30], [True, False, True, False, False]
    when, share, low, high = share_reached(times, reached)
    assert when.tolist() == [10, 15, 20, 30]
    after_20 = 1 - (4 / 5) * (2 / 3)
    assert share == pytest.approx([0.2, 0.2, after_20, after_20])
    assert (low < share).all()
    assert (high > share).all()


def test_median_counts_censored_runs_instead_of_dropping_them() -> None:
    # Dropping the two would give 20
    assert median_time([10, 20, 30, 40, 40], [True, True, True, False, False]).value == 30
    assert median_time([10, 20, 30], [True, True, True]).value == 20


def test_median_is_not_reached_when_less_than_half_of_the_runs_got_there() -> None:
    assert median_time([10, 20, 40, 40, 40], [True, True, False, False, False]).value == INF
    assert median_time([40, 40], [False, False]) == Estimate(INF, INF, INF)


def test_median_interval_is_where_scipys_band_crosses_one_half() -> None:
    times, reached = np.arange(1.0, 31.0), np.array([True] * 25 + [False] * 5)
    value, low, high = median_time(times, reached)
    survival = stats.ecdf(stats.CensoredData.right_censored(times, ~reached)).sf
    with np.errstate(all="ignore"):
        band = survival.confidence_interval(0.95, method="log-log")
    assert value == 15.0
    assert low == times[np.flatnonzero(band.low.probabilities <= 0.5)[0]]
    assert high == times[np.flatnonzero(band.high.probabilities <= 0.5)[0]]
    assert low < value < high < INF


def test_single_run_has_a_median_and_no_interval() -> None:
    value, low, high = median_time([10], [True])
    assert value == 10
    assert np.isnan([low, high]).all()


def test_restricted_mean_counts_a_run_that_never_got_there_with_its_budget() -> None:
    assert restricted_mean_time([10, 20, 100], 100).value == pytest.approx(130 / 3)


def test_restricted_mean_is_the_area_above_the_share_that_got_there() -> None:
    times, reached = np.array([10, 20, 20, 70, 100, 100]), np.array([True] * 4 + [False] * 2)
    when, share, _, _ = share_reached(times, reached)
    edges = np.append(np.concatenate(([0.0], when[when < 100])), 100.0)
    left = np.concatenate(([1.0], 1 - share[when < 100]))
    assert restricted_mean_time(times, 100).value == pytest.approx((np.diff(edges) * left).sum())


# Which is better


@pytest.mark.parametrize(
    ("better", "than", "probability"),
    [
        # By hand: of the pairs (2,1) (2,2) (3,1) (3,2), three are won and one is a tie
        ([2, 3], [1, 2], 0.875),
        ([1, 2], [2, 3], 0.125),
        ([5, 5, 5], [5, 5], 0.5),
        ([10], [1, 2, 3], 1.0),
        # Scores of runs that never got to the threshold: they tie with each other
        ([-INF, -10], [-INF, -20], 0.625),
    ],
)
def test_probability_of_improvement(
    better: list[float], than: list[float], probability: float
) -> None:
    assert probability_of_improvement(better, than) == pytest.approx(probability)


def test_probability_of_improvement_is_the_share_of_pairs() -> None:
    better, than = np.random.randint(0, 6, 17), np.random.randint(0, 5, 11)
    pairs = better[:, None] - than[None, :]
    share = ((pairs > 0) + 0.5 * (pairs == 0)).mean()
    assert probability_of_improvement(better, than) == pytest.approx(share)


def test_interval_of_the_probability_of_improvement() -> None:
    assert probability_of_improvement_interval([3.0, 4.0], [1.0, 2.0]) == Estimate(1.0, 1.0, 1.0)
    value, low, high = probability_of_improvement_interval(np.arange(10.0), np.arange(10.0) + 0.5)
    assert 0.0 < low < value < high < 1.0
    value, low, high = probability_of_improvement_interval([2.0], [1.0, 1.5])
    assert value == 1.0
    assert np.isnan([low, high]).all()


@pytest.mark.parametrize("odd", [INF, -INF, math.nan])
def test_scores_that_can_not_be_averaged_have_no_interval(odd: float) -> None:
    estimate = interquartile_mean_interval([odd, 1.0, 2.0])
    assert estimate.value == pytest.approx(odd, nan_ok=True)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)
    # Of curves, at that point alone
    low, high = bootstrap_interval([[[1.0, odd], [2.0, 4.0]]], interquartile_mean)
    assert np.isnan([low, high]).tolist() == [[False, True], [False, True]]
    better = probability_of_improvement_interval([odd, 1.0], [2.0, 3.0])
    assert better.value == pytest.approx({INF: 0.5, -INF: 0.0}.get(odd, math.nan), nan_ok=True)


def test_huge_scores_have_an_interval_or_none_and_no_warning() -> None:
    for scores in ([1.7e308] * 3, [-1e300, 1e300, 0.0], [1.7e308, -1.7e308]):
        interquartile_mean_interval(scores)
    assert interquartile_mean_interval([-1e300, 1e300]).low == -1e300
