"""
Frequencies of draws through the buffer, over several environments.

Seeds are fixed: a test passes always or never. A p-value has to be above 0.001, which for single
draws a right buffer misses once in a thousand seeds. Batches are stratified, so their counts vary
less than those of independent draws and the same threshold is missed less often still. Each
broken twin has to be found out at 1e-9.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from scipy import stats

from sb3_per import PrioritizedReplayBuffer, SumTree

FloatArray = npt.NDArray[np.float64]

ROWS, N_ENVS = 5, 3
N = ROWS * N_ENVS
#: TD errors of the transitions; priorities differ by a factor of 20 at alpha = 0.7
ERRORS = np.array([0.1, 3.0, 0.5, 7.0, 1.0, 0.2, 2.0, 0.4, 5.0, 1.5, 0.3, 4.0, 0.7, 6.0, 2.5])
ALPHA, EPS = 0.7, 0.01
N_DRAWS = 20_000
ACCEPT, REJECT = 1e-3, 1e-9


def make(
    kind: type[PrioritizedReplayBuffer] = PrioritizedReplayBuffer,
    n_adds: int = ROWS + 2,
    **options: Any,
) -> PrioritizedReplayBuffer:
    """A ring that went round; the reward of a transition is its flat index."""
    base: dict[str, Any] = {"alpha": ALPHA, "eps": EPS, **options}
    space = spaces.Box(-1.0, 1.0, (1,))
    buffer = kind(N, space, spaces.Discrete(2), "cpu", N_ENVS, **base)
    zeros = np.zeros((N_ENVS, 1))
    for _ in range(n_adds):
        rewards = buffer.pos * N_ENVS + np.arange(N_ENVS)
        buffer.add(zeros, zeros, zeros, rewards, zeros.ravel(), [{}] * N_ENVS)
    return buffer


def expected_probabilities(errors: FloatArray = ERRORS, alpha: float = ALPHA) -> FloatArray:
    priorities: FloatArray = (np.abs(errors) + EPS) ** alpha
    probabilities: FloatArray = priorities / priorities.sum()
    return probabilities


def count(
    buffer: PrioritizedReplayBuffer, n_draws: int = N_DRAWS, batch_size: int = 50, seed: int = 0
) -> FloatArray:
    """How often each transition came, told by its content and not by its index."""
    np.random.seed(seed)
    rewards = [
        buffer.sample(batch_size).rewards.numpy().ravel() for _ in range(n_draws // batch_size)
    ]
    return np.bincount(np.concatenate(rewards).astype(np.int64), minlength=N).astype(np.float64)


def p_value(counts: FloatArray, probabilities: FloatArray) -> float:
    """Of a chi-square test, N - 1 degrees of freedom; what has probability 0 must not come."""
    possible = probabilities > 0.0
    if counts[~possible].any():
        return 0.0
    expected = counts.sum() * probabilities[possible]
    return float(stats.chisquare(counts[possible], expected).pvalue)


# --- frequencies ---


@pytest.mark.parametrize(("batch_size", "n_draws"), [(1, 5000), (50, N_DRAWS), (10_000, N_DRAWS)])
def test_transitions_come_in_proportion_to_their_priorities(batch_size: int, n_draws: int) -> None:
    buffer = make()
    buffer.update_priorities(np.arange(N), ERRORS)
    assert p_value(count(buffer, n_draws, batch_size), expected_probabilities()) > ACCEPT
    np.testing.assert_allclose(buffer.probabilities, expected_probabilities(), rtol=1e-12)


class UniformTwin(PrioritizedReplayBuffer):
    """Ignores the priorities."""

    def sample(self, batch_size: int, env: Any = None) -> Any:
        return self._get_samples(np.random.randint(0, self.size(), size=batch_size), env)


class AlphaTwiceTwin(PrioritizedReplayBuffer):
    """Raises to the power of alpha twice."""

    def update_priorities(self, indices: Any, td_errors: Any) -> None:
        super().update_priorities(indices, (np.abs(td_errors) + self.eps) ** self.alpha)


class EpsOutsideTwin(PrioritizedReplayBuffer):
    """``|error| ** alpha + eps``, with an eps that is large enough to tell."""

    def update_priorities(self, indices: Any, td_errors: Any) -> None:
        priorities = np.abs(td_errors) ** self.alpha + 0.2
        super().update_priorities(indices, priorities ** (1.0 / self.alpha) - self.eps)


class SwappedAxesTwin(PrioritizedReplayBuffer):
    """Takes the numbers of leaves for ``env * rows + row``."""

    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        envs, rows = np.divmod(batch_inds, self.buffer_size)
        return super()._get_samples(rows * self.n_envs + envs, env)


class OtherEnvTwin(PrioritizedReplayBuffer):
    """Takes the row that the tree chose, and any of its environments, as SB3's buffers do."""

    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        envs = np.random.randint(0, self.n_envs, size=len(batch_inds))
        return super()._get_samples(batch_inds // self.n_envs * self.n_envs + envs, env)


class OffByOneTree(SumTree):
    """Never reaches its last leaf."""

    def sample(self, batch_size: Any) -> Any:
        indices, priorities = super().sample(batch_size)
        return np.minimum(indices, self.capacity - 2), priorities


class LastLeftOutTwin(PrioritizedReplayBuffer):
    """Cuts the mass of the last transition off."""

    def _start_tree(self) -> None:
        super()._start_tree()
        self.tree = OffByOneTree(self.tree.capacity)


@pytest.mark.parametrize(
    "twin",
    [
        UniformTwin,
        AlphaTwiceTwin,
        EpsOutsideTwin,
        SwappedAxesTwin,
        OtherEnvTwin,
        LastLeftOutTwin,
    ],
)
def test_the_chi_square_test_finds_broken_twins_out(twin: type[PrioritizedReplayBuffer]) -> None:
    buffer = make(twin)
    buffer.update_priorities(np.arange(N), ERRORS)
    assert p_value(count(buffer), expected_probabilities()) < REJECT


def test_new_transitions_come_as_often_as_the_most_likely_one() -> None:
    buffer = make(n_adds=ROWS - 1)
    buffer.update_priorities(np.arange(N - N_ENVS), ERRORS[:-N_ENVS])
    zeros = np.zeros((N_ENVS, 1))
    rewards = np.arange(N - N_ENVS, N)
    buffer.add(zeros, zeros, zeros, rewards, zeros.ravel(), [{}] * N_ENVS)
    errors = np.append(ERRORS[:-N_ENVS], np.full(N_ENVS, 7.0))
    assert p_value(count(buffer), expected_probabilities(errors)) > ACCEPT


def test_a_partly_filled_buffer_gives_only_what_is_stored() -> None:
    buffer = make(n_adds=2)
    buffer.update_priorities(np.arange(6), ERRORS[:6])
    probabilities = np.append(expected_probabilities(ERRORS[:6]), np.zeros(N - 6))
    assert p_value(count(buffer), probabilities) > ACCEPT


def test_the_row_without_a_next_observation_never_comes_and_the_others_in_proportion() -> None:
    buffer = make(optimize_memory_usage=True, handle_timeout_termination=False)
    assert buffer.pos == 2
    buffer.update_priorities(np.arange(N), ERRORS)
    probabilities = expected_probabilities()
    probabilities[2 * N_ENVS : 3 * N_ENVS] = 0.0
    assert p_value(count(buffer), probabilities / probabilities.sum()) > ACCEPT


def test_alpha_0_and_beta_0_are_uniform_replay() -> None:
    buffer = make(alpha=0.0, beta=0.0)
    buffer.update_priorities(np.arange(N), ERRORS)
    assert p_value(count(buffer), np.full(N, 1 / N)) > ACCEPT
    np.testing.assert_array_equal(buffer.sample(64).weights, np.ones((64, 1)))


# --- batches are stratified ---


def test_each_equal_mass_of_a_batch_gives_one_transition() -> None:
    # A stratified draw takes transition i at least floor(n * P(i)) - 1 and at most
    # ceil(n * P(i)) + 1 times; independent draws would leave that range at once.
    buffer = make()
    buffer.update_priorities(np.arange(N), ERRORS)
    shares = 200 * expected_probabilities()
    for seed in range(100):
        counts = count(buffer, n_draws=200, batch_size=200, seed=seed)
        assert (counts >= np.floor(shares) - 1).all()
        assert (counts <= np.ceil(shares) + 1).all()


def test_an_independent_draw_would_not_pass_for_a_stratified_one() -> None:
    shares = 200 * expected_probabilities()
    rng = np.random.default_rng(0)
    counts = rng.multinomial(200, expected_probabilities(), size=100)
    within = (counts >= np.floor(shares) - 1) & (counts <= np.ceil(shares) + 1)
    assert within.all(axis=1).sum() < 5


# --- what the weights are for ---


@pytest.mark.parametrize("normalization", ["batch", "buffer"])
def test_beta_1_takes_the_bias_of_an_average_away(normalization: Any) -> None:
    # E[w_i * x_i] is proportional to sum(x_i): dividing by the sum of the weights gives the plain
    # mean. The reward of a transition is its index, 7 on average.
    buffer = make(beta=1.0, weight_normalization=normalization)
    # Late transitions are the likely ones, so that the bias is large.
    buffer.update_priorities(np.arange(N), np.sort(ERRORS))
    np.random.seed(0)
    # One batch, so that all weights are divided by the same number
    batch = buffer.sample(N_DRAWS)
    rewards = batch.rewards.numpy().ravel().astype(np.float64)
    weights = batch.weights.numpy().ravel().astype(np.float64)
    assert rewards.mean() > 9.5
    assert np.average(rewards, weights=weights) == pytest.approx(7.0, abs=0.05)
