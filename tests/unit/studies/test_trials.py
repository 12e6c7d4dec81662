"""Variants that were tried: each does what its name says."""

import inspect
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from scipy import stats

from sb3_per import PERDQN
from sb3_per.callbacks import td_errors_in_buffer
from sb3_per.compare.agents import parse_agent
from sb3_per.compare.settings import SettingsError
from studies.trials import PERDQNTrial, TrialReplayBuffer


def buffer_of(n: int, **options: Any) -> TrialReplayBuffer:
    box = spaces.Box(-1.0, 1.0, (1,))
    buffer = TrialReplayBuffer(n, box, spaces.Discrete(2), "cpu", **options)
    for _ in range(n):
        add(buffer)
    return buffer


def add(buffer: TrialReplayBuffer) -> None:
    one = np.zeros((1, 1), dtype=np.float32)
    buffer.add(one, one, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])


def model_of(**options: Any) -> PERDQNTrial:
    model = PERDQNTrial(
        "MlpPolicy",
        "CartPole-v1",
        learning_starts=20,
        target_update_interval=30,
        policy_kwargs={"net_arch": [8]},
        seed=0,
        **options,
    )
    return model.learn(100)


def test_new_transitions_at_the_largest_priority_of_all_or_of_those_replayed() -> None:
    for new_priority, expected in (("max", 1.0), ("measured", 0.25)):
        buffer = buffer_of(4, alpha=1.0, eps=0.0, new_priority=new_priority)
        # Nothing was replayed yet
        np.testing.assert_array_equal(buffer.priorities, np.ones(4))
        buffer.update_priorities(np.array([1, 2]), np.array([0.25, 0.125]))
        add(buffer)
        np.testing.assert_array_equal(buffer.priorities, [expected, 0.25, 0.125, 1.0])
        # The only one that has 0.25 goes, and what comes in its place was never replayed
        add(buffer)
        buffer.update_priorities(np.array([0]), np.array([0.0625]))
        add(buffer)
        assert buffer.priorities[2] == (1.0 if new_priority == "max" else 0.125)


def test_refresh_measures_all_when_the_target_network_has_changed() -> None:
    model = model_of(refresh=True)
    buffer = model.replay_buffer
    assert isinstance(buffer, TrialReplayBuffer)
    before = buffer.priorities
    model.train(0)
    np.testing.assert_array_equal(buffer.priorities, before)
    model._n_calls += model.target_update_interval
    model.train(0)
    expected = (np.abs(td_errors_in_buffer(model)) + model.priority_eps) ** model.alpha
    np.testing.assert_allclose(buffer.priorities, expected, rtol=1e-6)
    assert np.abs(expected / before - 1.0).max() > 0.01


@pytest.mark.parametrize("prioritization", ["proportional", "rank"])
@pytest.mark.parametrize("weight_normalization", ["batch", "buffer"])
@pytest.mark.parametrize("uniform_share", [0.0, 0.25, 1.0])
def test_weights_undo_the_probabilities_that_were_drawn_with(
    prioritization: Any, weight_normalization: Any, uniform_share: float
) -> None:
    """Divided by the largest of the batch or of the buffer: at most 1, for whatever masses."""
    n, beta = 50, 0.7
    buffer = buffer_of(
        n,
        alpha=0.9,
        beta=beta,
        eps=1e-3,
        prioritization=prioritization,
        weight_normalization=weight_normalization,
        uniform_share=uniform_share,
    )
    buffer.update_priorities(np.arange(n), 100.0 * np.arange(n))
    probabilities = (1.0 - uniform_share) * buffer.probabilities + uniform_share / n
    np.random.seed(1)
    for _ in range(5):
        batch = buffer.sample(8)
        among = probabilities[batch.indices] if weight_normalization == "batch" else probabilities
        expected = (among.min() / probabilities[batch.indices]) ** beta
        weights = batch.weights.numpy().ravel()
        np.testing.assert_allclose(weights, expected, rtol=1e-6)
        assert weights.max() <= 1.0


def test_a_share_of_each_batch_is_drawn_uniformly() -> None:
    """Chi-square at 0.001 with a fixed seed; without the share the same test fails."""
    n, share = 8, 0.25
    errors = np.arange(n) + 0.5
    probabilities = errors / errors.sum()
    mixed = (1.0 - share) * probabilities + share / n
    np.random.seed(3)
    for used, passes in ((share, True), (0.0, False)):
        buffer = buffer_of(n, alpha=1.0, eps=0.0, beta=0.5, uniform_share=used)
        buffer.update_priorities(np.arange(n), errors)
        counts = np.zeros(n)
        for _ in range(200):
            batch = buffer.sample(64)
            counts += np.bincount(batch.indices, minlength=n)
        # Strata make counts more even than independent draws would be: the test is lenient
        assert (stats.chisquare(counts, mixed * counts.sum()).pvalue > 0.001) == passes
        if passes:
            weights = (n * mixed[batch.indices]) ** -0.5
            expected = weights / weights.max()
            np.testing.assert_allclose(batch.weights.numpy().ravel(), expected, rtol=1e-6)


def test_what_weights_are_divided_by() -> None:
    errors = np.array([1.0, 2.0, 5.0, 8.0])
    weights = (4 * errors / errors.sum()) ** -0.5
    for divisor in ("max", "mean", "none"):
        buffer = buffer_of(4, alpha=1.0, eps=0.0, beta=0.5, weight_divisor=divisor)
        buffer.update_priorities(np.arange(4), errors)
        np.random.seed(0)
        batch = buffer.sample(6)
        drawn = weights[batch.indices]
        expected = drawn / {"max": drawn.max(), "mean": drawn.mean(), "none": 1.0}[divisor]
        np.testing.assert_allclose(batch.weights.numpy().ravel(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"new_priority": "one"}, {"weight_divisor": "sum"}, {"uniform_share": 1.5}],
)
def test_unknown_options_are_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"`{name}` must be .*{value}"):
        PERDQNTrial("MlpPolicy", "CartPole-v1", **options)


def test_memory_saving_is_refused() -> None:
    """It keeps transitions that may not be drawn, uniformly neither."""
    with pytest.raises(ValueError, match="does not support `optimize_memory_usage=True`"):
        buffer_of(4, optimize_memory_usage=True, handle_timeout_termination=False)


def test_as_an_agent_it_takes_the_options_of_both() -> None:
    agent = parse_agent("per_trial(alpha=0.7, refresh=True)")
    agent.check({"policy": "MlpPolicy"})
    parameters = inspect.signature(PERDQNTrial).parameters
    assert set(inspect.signature(PERDQN).parameters) < set(parameters)
    with pytest.raises(SettingsError, match="refreshing is no option of per_trial"):
        parse_agent("per_trial(refreshing=True)").check({})
