"""Draws from a buffer of frames, part of whose transitions have lost theirs."""

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from scipy import stats

from sb3_per import PrioritizedFrameReplayBuffer

pytestmark = pytest.mark.slow

N_BATCHES, BATCH_SIZE = 2000, 32


def buffer_of_short_episodes(prioritization: str) -> PrioritizedFrameReplayBuffer:
    """Of two steps each: three frames for two transitions, so that a third of them lose theirs."""
    space = spaces.Box(0, 255, (2, 14, 13), np.uint8)
    buffer = PrioritizedFrameReplayBuffer(
        200,
        space,
        spaces.Discrete(2),
        "cpu",
        frame_stack=2,
        prioritization=prioritization,
    )
    rng = np.random.default_rng(0)
    zero = np.zeros((14, 13), np.uint8)
    for _ in range(170):
        frames = [zero, *rng.integers(1, 256, (3, 14, 13), np.uint8)]
        for step in range(2):
            obs, next_obs = (np.stack(frames[i : i + 2])[None] for i in (step, step + 1))
            buffer.add(obs, next_obs, np.zeros(1), np.zeros(1), np.array([step == 1]), [{}])
    buffer.update_priorities(np.arange(200), rng.exponential(size=200))
    return buffer


def p_value(buffer: PrioritizedFrameReplayBuffer, probabilities: npt.NDArray[np.float64]) -> float:
    """Of the counts of all draws. Draws of a batch exclude each other, which narrows the counts."""
    counts = np.zeros(200)
    for _ in range(N_BATCHES):
        np.add.at(counts, buffer.sample(BATCH_SIZE).indices, 1)
    possible = probabilities > 0.0
    assert not counts[~possible].any()
    expected = N_BATCHES * BATCH_SIZE * probabilities[possible]
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, possible.sum() - 1))


@pytest.mark.parametrize("prioritization", ["proportional", "rank"])
def test_draws_follow_the_exact_probabilities(prioritization: str) -> None:
    buffer = buffer_of_short_episodes(prioritization)
    lost = ~buffer.drawable()
    assert 40 < lost.sum() < 80
    probabilities = buffer.probabilities
    assert probabilities.sum() == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_array_equal(probabilities == 0.0, lost)
    assert p_value(buffer, probabilities) > 1e-3
    # The twin: draws that are repeated until a transition near the wanted one is whole
    crowded = probabilities.copy()
    crowded[np.flatnonzero(~lost)[0]] += 0.01
    assert p_value(buffer, crowded / crowded.sum()) < 1e-6
