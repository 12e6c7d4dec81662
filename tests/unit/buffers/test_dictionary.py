"""PrioritizedDictReplayBuffer: what it takes and refuses, priorities, n-step returns, pickles."""

import copy
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

from buffer_helpers import ACTIONS, assert_same_batches
from buffer_helpers import OBSERVATIONS as BOX
from sb3_per import (
    PrioritizedDictReplayBuffer,
    PrioritizedDictReplayBufferSamples,
    PrioritizedReplayBuffer,
)

SPACE = spaces.Dict(
    {"place": BOX, "room": spaces.Discrete(50), "camera": spaces.Box(0, 255, (1, 2, 2), np.uint8)}
)


def make_dict_buffer(
    rows: int, n_adds: int = 0, n_envs: int = 1, **options: Any
) -> PrioritizedDictReplayBuffer:
    """With alpha = 1 and eps = 0 a priority is the absolute error."""
    base = {"alpha": 1.0, "eps": 0.0, **options}
    buffer = PrioritizedDictReplayBuffer(rows * n_envs, SPACE, ACTIONS, "cpu", n_envs, **base)
    add_episodes(buffer, n_adds)
    return buffer


def observe(k: int, n_envs: int) -> dict[str, npt.NDArray[Any]]:
    """All keys tell ``k`` and the environment."""
    numbers = k * n_envs + np.arange(n_envs)
    return {
        "place": np.repeat(numbers[:, None], 2, axis=1).astype(np.float64),
        "room": numbers % 50,
        "camera": np.broadcast_to(numbers[:, None, None, None], (n_envs, 1, 2, 2)).astype(np.uint8),
    }


def add_episodes(buffer: ReplayBuffer, n_adds: int = 1, first: int = 0) -> None:
    """Row ``k``: observations ``k``, then ``k + 1``; reward ``k * n_envs + env``; 4th ends."""
    n = buffer.n_envs
    for k in range(first, first + n_adds):
        obs: Any = observe(k, n)
        next_obs: Any = observe(k + 1, n)
        rewards = k * n + np.arange(n, dtype=np.float64)
        done = np.full(n, k % 4 == 3)
        buffer.add(obs, next_obs, np.full(n, k % 4), rewards, done, [{}] * n)


def draw(buffer: PrioritizedDictReplayBuffer, batch_size: int = 64, seed: int = 0) -> Any:
    np.random.seed(seed)
    return buffer.sample(batch_size)


# --- what it is ---


def test_it_is_a_buffer_of_both_families_and_so_are_its_batches() -> None:
    buffer = make_dict_buffer(4, n_adds=3)
    assert isinstance(buffer, PrioritizedReplayBuffer)
    assert isinstance(buffer, DictReplayBuffer)
    batch = draw(buffer, 5)
    assert type(batch) is PrioritizedDictReplayBufferSamples
    assert list(batch.observations) == list(batch.next_observations) == list(SPACE.spaces)
    for values in (batch.observations, batch.next_observations):
        assert values["place"].shape == (5, 2)
        assert values["room"].shape == (5, 1)
        assert values["camera"].shape == (5, 1, 2, 2)
        assert values["camera"].dtype == th.uint8
    assert batch.rewards.shape == batch.dones.shape == batch.weights.shape == (5, 1)
    assert batch.weights.dtype == batch.rewards.dtype == th.float32
    assert batch.indices.shape == (5,)
    assert batch.indices.dtype == np.int64


@pytest.mark.parametrize("space", [BOX, spaces.Discrete(3), spaces.MultiBinary(2)], ids=str)
def test_other_spaces_are_refused_by_name_before_memory_is_asked_for(
    space: spaces.Space[Any],
) -> None:
    with pytest.raises(ValueError, match="PrioritizedReplayBuffer") as error:
        PrioritizedDictReplayBuffer(10**15, space, ACTIONS)
    assert str(space) in str(error.value)


@pytest.mark.parametrize("timeouts", [True, False])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_saving_memory_is_refused_and_both_are_named(n_steps: int, timeouts: bool) -> None:
    with pytest.raises(ValueError, match=r"`optimize_memory_usage=True`.*Dict") as error:
        make_dict_buffer(10**15, optimize_memory_usage=True, handle_timeout_termination=timeouts)
    assert "'place': Box" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", -1.0), ("beta", 1.5), ("eps", -1e-9), ("gamma", 2.0), ("n_steps", 0)],
)
def test_wrong_options_are_refused_with_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}`.*{value!r}"):
        make_dict_buffer(4, **{name: value})


# --- what it stores ---


@pytest.mark.parametrize("n_envs", [1, 3])
def test_add_leaves_the_callers_dicts_and_arrays_alone(n_envs: int) -> None:
    buffer = make_dict_buffer(4, n_envs=n_envs)
    obs, next_obs = observe(3, n_envs), observe(4, n_envs)
    given = [dict(obs), dict(next_obs)]
    before = copy.deepcopy(given)
    zeros = np.zeros(n_envs)
    buffer.add(obs, next_obs, zeros, zeros, zeros, [{}] * n_envs)
    for mine, same, expected in zip((obs, next_obs), given, before, strict=True):
        assert list(mine) == list(expected)
        for key in mine:
            # The very arrays, in the shape that they had: SB3 would put its own in their place
            assert mine[key] is same[key]
            assert mine[key].shape == expected[key].shape
            np.testing.assert_array_equal(mine[key], expected[key])


def test_what_is_stored_does_not_change_with_the_callers_arrays() -> None:
    buffer = make_dict_buffer(4)
    obs, next_obs = observe(3, 1), observe(4, 1)
    buffer.add(obs, next_obs, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    for values in (*obs.values(), *next_obs.values()):
        values[...] = 0
    batch = draw(buffer, 4)
    assert (batch.observations["place"] == 3).all()
    assert (batch.next_observations["room"] == 4).all()


@pytest.mark.parametrize("n_envs", [1, 2, 3])
def test_all_keys_come_from_the_row_and_env_of_the_index(n_envs: int) -> None:
    buffer = make_dict_buffer(5, n_adds=8, n_envs=n_envs)
    batch = draw(buffer, 10 * n_envs)
    assert set(batch.indices) == set(range(5 * n_envs))
    rows, envs = np.divmod(batch.indices, n_envs)
    added = rows + np.where(rows < 3, 5, 0)
    numbers = added * n_envs + envs
    np.testing.assert_array_equal(batch.observations["place"][:, 0], numbers)
    np.testing.assert_array_equal(batch.observations["room"][:, 0], numbers % 50)
    np.testing.assert_array_equal(batch.observations["camera"][:, 0, 1, 1], numbers)
    np.testing.assert_array_equal(batch.next_observations["place"][:, 0], numbers + n_envs)
    np.testing.assert_array_equal(batch.next_observations["room"][:, 0], (numbers + n_envs) % 50)
    np.testing.assert_array_equal(batch.rewards[:, 0], numbers)
    np.testing.assert_array_equal(batch.actions[:, 0], added % 4)
    np.testing.assert_array_equal(batch.dones[:, 0], added % 4 == 3)


@pytest.mark.parametrize("form", ["one number an env", "as stored"])
def test_discrete_keys_of_several_envs_may_come_in_both_shapes(form: str) -> None:
    buffer = PrioritizedDictReplayBuffer(
        12, spaces.Dict({"room": spaces.Discrete(9)}), ACTIONS, "cpu", 3
    )
    rooms = np.array([7, 1, 4])
    given = {"room": rooms if form == "one number an env" else rooms[:, None]}
    buffer.add(given, given, np.zeros(3), np.zeros(3), np.zeros(3), [{}] * 3)
    np.testing.assert_array_equal(buffer.observations["room"][0], rooms[:, None])
    batch = draw(buffer, 6)
    np.testing.assert_array_equal(batch.observations["room"][:, 0], rooms[batch.indices])


def test_batches_are_copies() -> None:
    buffer = make_dict_buffer(4, n_adds=4)
    stored = copy.deepcopy((buffer.observations, buffer.next_observations))
    batch = draw(buffer)
    for values in (*batch.observations.values(), *batch.next_observations.values()):
        values.zero_()
    for mine, its in zip((buffer.observations, buffer.next_observations), stored, strict=True):
        for key in mine:
            np.testing.assert_array_equal(mine[key], its[key])


# --- priorities ---


def test_priorities_are_those_of_the_parent_class() -> None:
    buffer = make_dict_buffer(4, n_adds=3, n_envs=2)
    np.testing.assert_array_equal(buffer.priorities, np.ones(6))
    buffer.update_priorities([0, 1, 2, 3, 4, 5], [0.5, -3.0, 2.0, 0.0, 1.0, 1.0])
    np.testing.assert_array_equal(buffer.priorities, [0.5, 3.0, 2.0, 0.0, 1.0, 1.0])
    add_episodes(buffer, 2, first=3)
    # Env 0 and 1 of row 0 were overwritten, at the largest priority of that moment
    np.testing.assert_array_equal(buffer.priorities, [3.0, 3.0, 2.0, 0.0, 1.0, 1.0, 3.0, 3.0])
    assert buffer.tree.check_valid() == (True, "")
    assert 3 not in draw(buffer, 500).indices


def test_weights_follow_from_the_leaves() -> None:
    buffer = make_dict_buffer(8, n_adds=8, beta=0.5)
    buffer.update_priorities(range(8), np.arange(1.0, 9.0))
    batch = draw(buffer, 100)
    weights = (8 * buffer.probabilities[batch.indices]) ** -0.5
    np.testing.assert_allclose(batch.weights.numpy()[:, 0], weights / weights.max(), rtol=1e-6)


def test_an_empty_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        make_dict_buffer(4).sample(2)
    buffer = make_dict_buffer(4, n_adds=3)
    buffer.reset()
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(2)


# --- n-step returns ---


@pytest.mark.parametrize("n_steps", [2, 3, 20])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_adds", [3, 6, 15])
def test_n_step_batches_are_those_of_the_buffer_for_other_observations(
    n_adds: int, n_envs: int, n_steps: int
) -> None:
    options: dict[str, Any] = {"n_steps": n_steps, "gamma": 0.9, "alpha": 1.0, "eps": 0.0}
    ours = make_dict_buffer(6, n_adds, n_envs, **options)
    theirs = PrioritizedReplayBuffer(6 * n_envs, BOX, ACTIONS, "cpu", n_envs, **options)
    for k in range(n_adds):
        obs, next_obs = observe(k, n_envs)["place"], observe(k + 1, n_envs)["place"]
        rewards = k * n_envs + np.arange(n_envs, dtype=np.float64)
        done = np.full(n_envs, k % 4 == 3)
        theirs.add(obs, next_obs, np.full(n_envs, k % 4), rewards, done, [{}] * n_envs)
    errors = np.arange(1.0, ours.n_transitions + 1)
    for buffer in (ours, theirs):
        buffer.update_priorities(np.arange(ours.n_transitions), errors)
    np.random.seed(4)
    batch: Any = ours.sample(50)
    np.random.seed(4)
    expected = theirs.sample(50)
    np.testing.assert_array_equal(batch.indices, expected.indices)
    assert th.equal(batch.observations["place"], expected.observations)
    assert th.equal(batch.next_observations["place"], expected.next_observations)
    for field in ("actions", "dones", "rewards", "discounts", "weights"):
        assert th.equal(getattr(batch, field), getattr(expected, field)), field


def test_n_step_returns_by_hand() -> None:
    buffer = make_dict_buffer(6, n_adds=6, n_steps=3, gamma=0.5)
    batch = draw(buffer, 24)
    # The episode of rows 0 to 3 ends with row 3; row 5 is the newest
    returns = {0: 0 + 0.5 + 0.5, 1: 1 + 1 + 0.75, 2: 2 + 1.5, 3: 3, 4: 4 + 2.5, 5: 5}
    length = {0: 3, 1: 3, 2: 2, 3: 1, 4: 2, 5: 1}
    assert set(batch.indices.tolist()) == set(returns)
    for at, index in enumerate(batch.indices.tolist()):
        assert batch.rewards[at].item() == returns[index]
        assert batch.discounts[at].item() == 0.5 ** length[index]
        assert batch.dones[at].item() == float(index in (1, 2, 3))
        assert batch.next_observations["place"][at, 0].item() == index + length[index]
        assert batch.next_observations["room"][at].item() == index + length[index]


# --- pickles and buffers of SB3 ---


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_adds", [0, 3, 9])
def test_a_pickle_brings_everything_back(n_adds: int, n_steps: int, n_envs: int) -> None:
    buffer = make_dict_buffer(6, n_adds, n_envs, n_steps=n_steps, beta=0.25)
    n = buffer.n_transitions
    buffer.update_priorities(np.arange(n), np.linspace(0.1, 5.0, n) ** 3)
    twin = pickle.loads(pickle.dumps(buffer))
    assert type(twin) is PrioritizedDictReplayBuffer
    np.testing.assert_array_equal(twin.priorities, buffer.priorities)
    for name in ("pos", "full", "alpha", "beta", "eps", "n_steps", "gamma", "weight_normalization"):
        assert getattr(twin, name) == getattr(buffer, name)
    if n:
        assert_same_batches(twin, buffer)
    for each in (twin, buffer):
        add_episodes(each, 2, first=n_adds)
    np.testing.assert_array_equal(twin.tree[:], buffer.tree[:])
    assert_same_batches(twin, buffer)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_adds", [0, 3, 9])
def test_a_buffer_of_sb3_is_taken_over(n_adds: int, n_envs: int) -> None:
    plain = DictReplayBuffer(6 * n_envs, SPACE, ACTIONS, "cpu", n_envs)
    add_episodes(plain, n_adds)
    options: dict[str, Any] = {"alpha": 1.0, "eps": 0.0, "n_steps": 2, "gamma": 0.5, "beta": 0.75}
    buffer = PrioritizedDictReplayBuffer.from_replay_buffer(plain, **options)
    assert type(buffer) is PrioritizedDictReplayBuffer
    n = min(n_adds, 6) * n_envs
    np.testing.assert_array_equal(buffer.priorities, np.ones(n))
    assert buffer.tree.total == n
    twin = make_dict_buffer(6, n_adds, n_envs, **options)
    assert {name: getattr(buffer, name) for name in options} == options
    if n:
        assert_same_batches(buffer, twin)
    for each in (buffer, twin):
        add_episodes(each, 2, first=n_adds)
    assert_same_batches(buffer, twin)
    assert_same_batches(pickle.loads(pickle.dumps(buffer)), twin)


def test_buffers_of_another_kind_are_not_taken_over() -> None:
    for kind in (ReplayBuffer, NStepReplayBuffer):
        with pytest.raises(ValueError, match=f"SB3's DictReplayBuffer, got a {kind.__name__}"):
            PrioritizedDictReplayBuffer.from_replay_buffer(kind(6, BOX, ACTIONS, "cpu"))
    with pytest.raises(ValueError, match="PrioritizedDictReplayBuffer"):
        PrioritizedDictReplayBuffer.from_replay_buffer(make_dict_buffer(4))
    plain = DictReplayBuffer(6, SPACE, ACTIONS, "cpu")
    with pytest.raises(ValueError, match="alpha"):
        PrioritizedDictReplayBuffer.from_replay_buffer(plain, alpha=-1)
