"""What a buffer stores: n-step returns, ends of episodes, memory saving, arrays of its own."""

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import (
    ReplayBuffer,
)
from stable_baselines3.common.vec_env import DummyVecEnv

from buffer_helpers import (
    ACTIONS,
    OBSERVATIONS,
    SAVING,
    Array,
    add_rows,
    by_index,
    leaves_of,
    make_buffer,
    refused,
    state_of,
)
from sb3_per import PrioritizedReplayBuffer

# --- n-step returns and ends of episodes


def test_n_step_returns_end_with_the_episode_and_with_the_newest_row() -> None:
    buffer = make_buffer(6, n_steps=3, gamma=0.9)
    for t in range(8):
        add_rows(buffer, 1, t, reward=np.array([1.0 + t]), done=np.array([t == 4]))
    stored = {
        name: value.copy() for name, value in vars(buffer).items() if isinstance(value, np.ndarray)
    }
    assert {"observations", "next_observations", "rewards", "dones", "timeouts"} <= set(stored)
    # The priority is that of the first of the steps.
    buffer.update_priorities(range(6), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    np.testing.assert_array_equal(buffer.priorities, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    batch = buffer.sample(60)
    assert batch.discounts is not None
    expected = np.array(
        [
            [14.2, 8, 0, 0.81],
            [8.0, 8, 0, 0.9],
            [10.65, 5, 1, 0.729],
            [8.5, 5, 1, 0.81],
            [5.0, 5, 1, 0.9],
            [18.78, 8, 0, 0.729],
        ]
    )
    assert set(batch.indices.tolist()) == set(range(6))
    got = th.cat(
        [batch.rewards, batch.next_observations[:, :1], batch.dones, batch.discounts], dim=1
    )
    np.testing.assert_allclose(got, expected[batch.indices], rtol=1e-6)
    for name, value in stored.items():
        np.testing.assert_array_equal(getattr(buffer, name), value, name)


def test_gamma_of_the_buffer_discounts_the_returns_and_what_follows() -> None:
    buffer = make_buffer(8, n_adds=0, n_steps=2, gamma=0.5)
    for number in range(3):
        add_rows(buffer, 1, number, reward=np.ones(1))
    batch = buffer.sample(30)
    assert batch.discounts is not None
    # The last one reaches the newest transition.
    assert by_index(batch, "rewards") == {0: [1.5], 1: [1.5], 2: [1.0]}
    assert by_index(batch, "discounts") == {0: [0.25], 1: [0.25], 2: [0.5]}


class ThreeEndings(gym.Env[Any, Any]):
    """Episodes of one step that end in turn: terminated, truncated, both."""

    observation_space = OBSERVATIONS
    action_space = ACTIONS
    n_steps = 0

    def reset(self, **kwargs: Any) -> tuple[Array, dict[str, Any]]:
        return np.zeros(2), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        terminated, truncated = [(True, False), (False, True), (True, True)][self.n_steps]
        self.n_steps += 1
        return np.full(2, 10 * self.n_steps), 1.0, terminated, truncated, {}


@pytest.mark.parametrize("n_steps", [1, 3])
def test_timeouts_bootstrap_and_terminations_do_not(n_steps: int) -> None:
    buffer = make_buffer(4, n_steps=n_steps, gamma=0.9)
    venv = DummyVecEnv([ThreeEndings])
    observations: Any = venv.reset()
    for _ in range(3):
        action = np.array([0])
        following, rewards, dones, infos = venv.step(action)
        last = np.array([info["terminal_observation"] for info in infos])
        buffer.add(observations, last, action, rewards, dones, infos)
        observations = following
    batch = buffer.sample(3)
    assert by_index(batch, "dones") == {0: [1.0], 1: [0.0], 2: [1.0]}
    discounts = 0.9 if batch.discounts is None else batch.discounts
    targets = (batch.rewards + (1.0 - batch.dones) * discounts * 10.0).ravel()
    np.testing.assert_allclose(targets, [1.0, 10.0, 1.0])
    assert by_index(batch, "next_observations") == {0: [10, 10], 1: [20, 20], 2: [30, 30]}


# --- one observation array instead of two


def test_saving_memory_without_timeout_handling_works() -> None:
    saving = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    buffer = make_buffer(4, n_adds=6, **saving)
    assert not hasattr(buffer, "next_observations")
    batch = buffer.sample(30)
    assert by_index(batch, "observations") == {0: [4, 4], 1: [5, 5], 3: [3, 3]}
    assert by_index(batch, "next_observations") == {0: [5, 5], 1: [6, 6], 3: [4, 4]}


@pytest.mark.parametrize("n_envs", [1, 3])
def test_the_row_without_a_next_observation_has_no_mass(n_envs: int) -> None:
    buffer = make_buffer(4 * n_envs, n_envs=n_envs, **SAVING)
    for k in range(1, 11):
        add_rows(buffer, 1, first=k)
        expected = np.ones((4, n_envs))
        expected[k:] = 0.0
        if k >= 4:
            expected[k % 4] = 0.0
        np.testing.assert_array_equal(leaves_of(buffer), expected.ravel())
        batch = buffer.sample(8 * n_envs)
        np.testing.assert_array_equal(batch.next_observations, batch.observations + 1)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_an_update_of_the_row_without_a_next_observation_changes_nothing(n_envs: int) -> None:
    buffer = make_buffer(4 * n_envs, 6, n_envs, **SAVING)
    n = 4 * n_envs
    buffer.update_priorities(range(n), np.arange(1.0, n + 1))
    expected = np.arange(1.0, n + 1)
    expected[2 * n_envs : 3 * n_envs] = 0.0
    np.testing.assert_array_equal(buffer.priorities, expected)
    before = state_of(buffer)
    buffer.update_priorities([2 * n_envs], [99.0])
    assert state_of(buffer) == before
    # It takes errors that can't be, like any other.
    with refused(buffer, "nan"):
        buffer.update_priorities([2 * n_envs], [math.nan])
    # The next add makes it a new transition, and the row after it the one without.
    add_rows(buffer)
    expected[2 * n_envs : 3 * n_envs] = n
    expected[3 * n_envs :] = 0.0
    np.testing.assert_array_equal(buffer.priorities, expected)


def test_the_position_of_a_buffer_that_is_not_full_is_no_stored_transition() -> None:
    buffer = make_buffer(4, n_adds=2, **SAVING)
    buffer.update_priorities([0, 1], [5.0, 6.0])
    np.testing.assert_array_equal(leaves_of(buffer), [5.0, 6.0, 0.0, 0.0])
    with refused(buffer, r"\b2\b", IndexError):
        buffer.update_priorities([2], [7.0])


@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_single_row_without_a_next_observation_can_not_be_sampled(n_envs: int) -> None:
    buffer = make_buffer(n_envs, 2, n_envs, **SAVING)
    np.testing.assert_array_equal(buffer.probabilities, np.zeros(n_envs))
    with refused(buffer, "optimize_memory_usage"):
        buffer.sample(2)


def test_all_the_mass_beside_or_on_the_invalid_row_does_not_hang() -> None:
    saving = {"optimize_memory_usage": True, "handle_timeout_termination": False, "n_steps": 3}
    buffer = make_buffer(4, n_adds=5, **saving)
    buffer.update_priorities([1, 2, 3, 0], [1e12, 1e12, 1e-6, 1e-6])
    np.testing.assert_array_equal(buffer.priorities, [1e-6, 0.0, 1e12, 1e-6])
    add_rows(buffer, 1, 5)  # row 2, with nearly all the mass, becomes the invalid one
    buffer.update_priorities([0, 1, 2, 3], [1e-6, 1e-6, 1e12, 1e-6])
    batch = buffer.sample(32)
    assert set(batch.indices.tolist()) == {0, 1, 3}


# --- arrays


@pytest.mark.parametrize("saving", [False, True])
def test_images_stay_bytes(saving: bool) -> None:
    space = spaces.Box(0, 255, (3, 7, 7), np.uint8)
    arguments = (10, space, ACTIONS, "cpu", 2, saving, False)
    ours, theirs = PrioritizedReplayBuffer(*arguments), ReplayBuffer(*arguments)
    image = np.full((2, 3, 7, 7), 255, dtype=np.uint8)
    for _ in range(3):
        ours.add(image, image, np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}])
    batch = ours.sample(4)
    assert batch.observations.dtype == batch.next_observations.dtype == th.uint8
    assert (batch.observations == 255).all()

    def n_bytes(buffer: ReplayBuffer) -> int:
        arrays = [value for value in vars(buffer).values() if isinstance(value, np.ndarray)]
        return sum(array.nbytes for array in arrays)

    assert ours.observations.dtype == np.uint8
    assert n_bytes(ours) == n_bytes(theirs)
    images = ours.observations.nbytes + (0 if saving else ours.next_observations.nbytes)
    assert images == (1 if saving else 2) * 5 * 2 * 147


@pytest.mark.parametrize("n_steps", [1, 2])
@pytest.mark.parametrize("saving", [False, True])
def test_arrays_given_and_tensors_got_are_not_the_buffers_own(saving: bool, n_steps: int) -> None:
    buffer = make_buffer(
        4, optimize_memory_usage=saving, handle_timeout_termination=False, n_steps=n_steps
    )
    given = {
        "obs": np.full((1, 2), 1.0),
        "next_obs": np.full((1, 2), 2.0),
        "action": np.array([3]),
        "reward": np.array([4.0]),
        "done": np.array([0.0]),
    }
    before = {name: array.copy() for name, array in given.items()}
    infos = [{"TimeLimit.truncated": False}]
    buffer.add(**given, infos=infos)
    for name, array in given.items():
        np.testing.assert_array_equal(array, before[name], name)
        assert array.shape == before[name].shape
        array += 5
    assert infos == [{"TimeLimit.truncated": False}]

    batch = buffer.sample(2)
    indices, errors = np.array([0, 0]), np.array([[-3.0], [-2.0]])
    buffer.update_priorities(indices, errors)
    np.testing.assert_array_equal(indices, [0, 0])
    np.testing.assert_array_equal(errors, [[-3.0], [-2.0]])
    for tensor in batch:
        if isinstance(tensor, th.Tensor):
            tensor += 7
    batch = buffer.sample(2)
    assert batch.observations.tolist() == [[1.0, 1.0]] * 2
    assert batch.next_observations.tolist() == [[2.0, 2.0]] * 2
    assert batch.actions.tolist() == [[3]] * 2
    assert batch.rewards.tolist() == [[4.0]] * 2
    assert batch.dones.tolist() == [[0.0]] * 2
