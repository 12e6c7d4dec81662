"""The compiled arithmetic on batches against the plain formulas."""

import numpy as np
import pytest

from sb3_per.buffers.importance import effective_sample_size, importance_sampling_weights
from sb3_per.buffers.kernels import (
    batch_means,
    gather,
    priorities_of,
    weights_of,
)


@pytest.mark.parametrize("seed", range(3))
def test_means_are_those_of_the_plain_formulas(seed: int) -> None:
    rng = np.random.default_rng(seed)
    errors = rng.standard_cauchy((3, 7)).astype(np.float32)
    weights = rng.random((3, 7)).astype(np.float32)
    error, weight, ess = batch_means(errors, weights)
    assert error == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert weight == pytest.approx(weights.mean(), rel=1e-5)
    assert ess == pytest.approx(np.mean([effective_sample_size(batch) for batch in weights]))


def test_effective_size_of_weights_that_all_underflowed_is_full() -> None:
    zeros = np.zeros((1, 4), np.float32)
    assert batch_means(zeros, zeros) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("smallest", [None, 0.05])
def test_weights_are_those_of_the_public_function(smallest: float | None, beta: float) -> None:
    priorities = np.array([0.3, 0.1, 7.0, 1e-300, 0.1])[: 3 if smallest else None]
    weights = weights_of(priorities, smallest or 0.0, beta)
    assert weights.dtype == np.float32
    assert weights.shape == (len(priorities), 1)
    expected = importance_sampling_weights(priorities, beta, smallest)
    np.testing.assert_allclose(weights[:, 0], expected.astype(np.float32), rtol=1e-6)


def test_a_timeout_is_no_end_of_the_episode() -> None:
    rewards = np.array([1.0, 2.0, 3.0], np.float32)
    dones = np.array([1.0, 1.0, 0.0], np.float32)
    timeouts = np.array([1.0, 0.0, 0.0], np.float32)
    batch_rewards, batch_dones = gather(np.array([2, 0, 1, 1]), rewards, dones, timeouts)
    np.testing.assert_array_equal(batch_rewards, [[3.0], [1.0], [2.0], [2.0]])
    np.testing.assert_array_equal(batch_dones, [[0.0], [0.0], [1.0], [1.0]])


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    ("errors", "indices", "is_valid"),
    [
        ([1.5, -2.0, 0.0], [0, 4, 2], True),
        ([1.5, np.nan, 0.0], [0, 4, 2], False),
        ([1.5, -np.inf, 0.0], [0, 4, 2], False),
        ([1.5, 2.0, 0.0], [0, 5, 2], False),
        ([1.5, 2.0, 0.0], [0, -1, 2], False),
    ],
)
def test_priorities_and_what_is_wrong_with_them(
    errors: list[float], indices: list[int], is_valid: bool, alpha: float
) -> None:
    td_errors = np.array(errors, np.float32)
    priorities, found = priorities_of(td_errors, np.array(indices), 5, 0.25, alpha, 1e300)
    assert found is is_valid
    if is_valid:
        expected = (np.abs(np.array(errors)) + 0.25) ** alpha
        np.testing.assert_allclose(priorities, expected, rtol=1e-14)


def test_a_priority_above_the_limit_is_found() -> None:
    errors, indices = np.array([1.0, 3.0], np.float32), np.array([0, 1])
    assert priorities_of(errors, indices, 2, 0.0, 2.0, 9.1)[1]
    assert not priorities_of(errors, indices, 2, 0.0, 2.0, 8.9)[1]
