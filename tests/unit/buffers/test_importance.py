"""Importance-sampling weights and effective sample size, from their definitions."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_per.buffers.importance import effective_sample_size, importance_sampling_weights

FloatArray = npt.NDArray[np.float64]

TINY = 5e-324  # the smallest float64 above zero
priorities_ = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=30).map(np.array)
any_priorities = st.lists(
    st.one_of(st.sampled_from((TINY, 1e-300, 1.0, 1e300)), st.floats(TINY, 1e300)),
    min_size=1,
    max_size=30,
).map(np.array)
betas = st.one_of(st.sampled_from((0.0, 0.4, 1.0)), st.floats(0.0, 1.0))
examples = settings(max_examples=100, derandomize=True, deadline=None)


@examples
@given(priorities=priorities_, beta=betas, others=st.floats(0.0, 1e9), n=st.integers(1, 10**6))
def test_weights_are_those_of_the_paper(
    priorities: FloatArray, beta: float, others: float, n: int
) -> None:
    """(N * P(i)) ** -beta over the largest of them; N and the rest of the total cancel."""
    probabilities = priorities / (priorities.sum() + others)
    expected = (n * probabilities) ** -beta
    weights = importance_sampling_weights(priorities, beta)
    np.testing.assert_allclose(weights, expected / expected.max(), rtol=1e-9)
    assert weights.shape == priorities.shape
    assert weights.dtype == np.float64


@examples
@given(priorities=any_priorities, beta=betas)
def test_weights_stay_between_0_and_1(priorities: FloatArray, beta: float) -> None:
    """For any priorities that a tree can hold, next to each other."""
    before = priorities.copy()
    weights = importance_sampling_weights(priorities, beta)
    assert weights.max() == 1.0
    assert weights.min() >= 0.0
    # The smaller the priority, the larger the weight
    by_priority = weights[np.argsort(priorities, kind="stable")]
    assert (np.diff(by_priority) <= 0.0).all()
    np.testing.assert_array_equal(priorities, before)


@examples
@given(priorities=priorities_, beta=betas, factor=st.floats(1e-12, 1.0))
def test_weights_over_those_of_the_whole_buffer(
    priorities: FloatArray, beta: float, factor: float
) -> None:
    """A smaller priority elsewhere in the buffer takes the weight of 1 and scales all others."""
    smallest = float(priorities.min()) * factor
    weights = importance_sampling_weights(priorities, beta, smallest)
    expected = importance_sampling_weights(np.array([smallest, *priorities]), beta)[1:]
    np.testing.assert_allclose(weights, expected, rtol=1e-14)
    of_the_batch = importance_sampling_weights(priorities, beta)
    np.testing.assert_allclose(weights, of_the_batch * factor**beta, rtol=1e-9)


def test_ratios_of_weights() -> None:
    weights = importance_sampling_weights(np.array([4.0, 1.0, 16.0]), 0.5)
    np.testing.assert_array_equal(weights, [0.5, 1.0, 0.25])
    weights = importance_sampling_weights(np.array([4.0, 1.0, 16.0]), 0.5, 0.25)
    np.testing.assert_array_equal(weights, [0.25, 0.5, 0.125])


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_extreme_priorities_side_by_side(beta: float) -> None:
    """A weight may underflow to 0, with no warning, but never where it should be 1."""
    weights = importance_sampling_weights(np.array([1e-300, 1e300, TINY]), beta)
    assert weights[2] == 1.0
    if beta == 0.0:
        np.testing.assert_array_equal(weights, [1.0, 1.0, 1.0])
    else:
        assert 0.0 < weights[0] < 1e-8
        assert weights[1] == 0.0


@pytest.mark.parametrize("priority", [TINY, 1e-6, 1.0, 1e300])
def test_equal_priorities_weigh_exactly_1(priority: float) -> None:
    weights = importance_sampling_weights(np.full(7, priority), 0.37)
    np.testing.assert_array_equal(weights, np.ones(7))


# --- effective sample size ---

weights_ = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=40).filter(any).map(np.array)


@examples
@given(weights=weights_)
def test_effective_sample_size_is_kishs(weights: FloatArray) -> None:
    # Not of weights whose squares underflow
    weights = np.where(weights < 1e-100, 0.0, weights)
    weights[0] = 1.0
    n = len(weights)
    expected = math.fsum(weights) ** 2 / (n * math.fsum(weights**2))
    assert effective_sample_size(weights) == pytest.approx(expected, rel=1e-12)
    assert effective_sample_size(weights[:, None]) == effective_sample_size(weights)
    # Between those of one transition and of all
    assert (1.0 - 1e-12) / n <= effective_sample_size(weights) <= 1.0


@examples
@given(ulps=st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_effective_sample_size_of_nearly_equal_weights_is_at_most_1(ulps: list[int]) -> None:
    weights = 1.0 - np.array(ulps) * 2.0**-53
    assert 1.0 - 1e-12 < effective_sample_size(weights) <= 1.0


@pytest.mark.parametrize("n", [1, 2, 7, 256])
@pytest.mark.parametrize("weight", [TINY, 1e-200, 0.3, 1.0, 1e200])
def test_effective_sample_size_of_the_extremes(n: int, weight: float) -> None:
    """Also where the square of a weight is no float64."""
    equal = np.full(n, weight)
    assert effective_sample_size(equal) == 1.0
    alone = np.zeros(n)
    alone[n // 2] = weight
    assert effective_sample_size(alone) == 1.0 / n


def test_effective_sample_size_takes_lists_and_float32() -> None:
    assert effective_sample_size([1.0, 1.0, 0.0, 0.0]) == 0.5
    assert effective_sample_size([3, 1]) == pytest.approx(0.8)
    assert effective_sample_size(np.array([[3.0], [1.0]], np.float32)) == pytest.approx(0.8)
    assert type(effective_sample_size([1.0])) is float


def test_effective_sample_size_of_weights_that_all_underflowed() -> None:
    assert effective_sample_size(np.zeros((4, 1))) == 1.0
