"""Faults known from other replay buffers, as cases for this one (the buffer alone)."""

import inspect
import re
import time
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_per import PrioritizedReplayBuffer
from sb3_per_envs import GridWorldEnv

Array = npt.NDArray[Any]

OBSERVATIONS = spaces.Box(-np.inf, np.inf, (2,), np.float64)
ACTIONS = spaces.Discrete(4)


def make(
    buffer_size: int, n_adds: int = 0, n_envs: int = 1, **options: Any
) -> PrioritizedReplayBuffer:
    """With alpha = 1 and eps = 0 a priority is the absolute error."""
    base = {"alpha": 1.0, "eps": 0.0, **options}
    buffer = PrioritizedReplayBuffer(buffer_size, OBSERVATIONS, ACTIONS, "cpu", n_envs, **base)
    for number in range(n_adds):
        add(buffer, number)
    return buffer


def add(buffer: PrioritizedReplayBuffer, number: int, **values: Any) -> None:
    """One row: observations ``number``, then ``number + 1``, rewards ``number * n_envs + env``."""
    n = buffer.n_envs
    transition: dict[str, Any] = {
        "obs": np.full((n, 2), number),
        "next_obs": np.full((n, 2), number + 1),
        "action": np.zeros(n, dtype=np.int64),
        "reward": np.arange(number * n, number * n + n),
        "done": np.zeros(n, dtype=bool),
        "infos": [{}] * n,
    }
    buffer.add(**{**transition, **values})


def by_index(batch: Any, field: str) -> dict[int, Any]:
    """The values that a batch gives for each transition."""
    return dict(zip(batch.indices.tolist(), getattr(batch, field).numpy().tolist(), strict=True))


ERROR_FORMS: dict[str, Any] = {
    "list": [1.0, 2.0, 3.0],
    "float64 (3,)": np.array([1.0, 2.0, 3.0]),
    "float32 (3, 1)": np.array([[1.0], [2.0], [3.0]], dtype=np.float32),
    "float16 (3,)": np.array([1.0, 2.0, 3.0], dtype=np.float16),
    "tensor with gradient (3, 1)": th.tensor([[1.0], [2.0], [3.0]], requires_grad=True),
    "inside a graph (3, 1)": th.tensor([[0.5], [1.0], [1.5]], requires_grad=True) * 2.0,
}
ERROR_FORMS["read-only"] = np.array([1.0, 2.0, 3.0])
ERROR_FORMS["read-only"].flags.writeable = False
INDEX_FORMS: dict[str, Any] = {
    "list": [0, 1, 2],
    "int32": np.arange(3, dtype=np.int32),
    "int64": np.arange(3),
    "tensor": th.arange(3),
}


@pytest.mark.parametrize("errors", ERROR_FORMS)
@pytest.mark.parametrize("indices", INDEX_FORMS)
def test_errors_and_indices_of_any_form_set_the_priorities_they_belong_to(
    indices: str, errors: str
) -> None:
    """Known fault 27."""
    buffer = make(4, n_adds=4, eps=1e-9)
    buffer.update_priorities(INDEX_FORMS[indices], ERROR_FORMS[errors])
    np.testing.assert_allclose(buffer.priorities, [1.0, 2.0, 3.0, 1.0], rtol=1e-8)


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 3), (1, 3), (4,), (3, 1, 1), ()])
@pytest.mark.parametrize("kind", [np.ones, th.ones])
def test_errors_of_another_length_never_broadcast(kind: Any, shape: tuple[int, ...]) -> None:
    """Known fault 27."""
    buffer = make(4, n_adds=4)
    buffer.update_priorities(range(4), [5.0, 6.0, 7.0, 8.0])
    with pytest.raises(ValueError, match=f"3 indices.*{re.escape(str(shape))}"):
        buffer.update_priorities([0, 1, 2], kind(shape))
    np.testing.assert_array_equal(buffer.priorities, [5.0, 6.0, 7.0, 8.0])


def test_draws_are_proportional_in_batches_too() -> None:
    """Known fault 28."""
    np.random.seed(0)
    buffer = make(4, n_adds=4)
    buffer.update_priorities(range(4), [1.0, 2.0, 3.0, 4.0])
    counts = np.zeros(4)
    for _ in range(20_000):
        np.add.at(counts, buffer.tree.sample(8)[0], 1)
    np.testing.assert_allclose(counts / 160_000, [0.1, 0.2, 0.3, 0.4], atol=0.005)
    # The buffer hands on what the tree draws.
    np.random.seed(0)
    drawn = [buffer.tree.sample(8)[0] for _ in range(50)]
    np.random.seed(0)
    np.testing.assert_array_equal([buffer.sample(8).indices for _ in range(50)], drawn)


def test_extra_draws_change_neither_beta_nor_priorities() -> None:
    """Known fault 33."""
    buffer = make(8, n_adds=6, beta=0.4, beta_increment=0.1)
    buffer.update_priorities(range(6), [3.0, 0.5, 2.0, 1.0, 4.0, 7.0])
    before = buffer.tree[:]
    for _ in range(100):
        buffer.sample(4)
    assert buffer.beta == 0.4
    np.testing.assert_array_equal(buffer.tree[:], before)


@pytest.mark.parametrize("normalization", ["batch", "buffer"])
def test_weights_are_on_the_device_of_the_buffer(normalization: Any) -> None:
    """Known fault 41: any device, here the one that needs no hardware."""
    buffer = make(4, n_adds=4, weight_normalization=normalization)
    buffer.device = th.device("meta")
    batch = buffer.sample(3)
    tensors = [value for value in batch if isinstance(value, th.Tensor)]
    assert len(tensors) == 6
    assert {tensor.device for tensor in tensors} == {th.device("meta")}
    assert isinstance(batch.indices, np.ndarray)


@pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
def test_a_buffer_on_a_gpu_gives_and_takes_gpu_tensors() -> None:
    """Known fault 41."""
    buffer = PrioritizedReplayBuffer(4, OBSERVATIONS, ACTIONS, "cuda", alpha=1.0, eps=0.0)
    for number in range(4):
        add(buffer, number)
    batch = buffer.sample(3)
    assert batch.weights.device.type == batch.rewards.device.type == "cuda"
    errors = th.tensor([[5.0], [6.0], [7.0]], device="cuda", requires_grad=True)
    buffer.update_priorities(th.arange(3, device="cuda"), errors)
    np.testing.assert_array_equal(buffer.priorities, [5.0, 6.0, 7.0, 1.0])


def test_capacity_and_content_are_counted_over_all_envs() -> None:
    """Known fault 43."""
    buffer = make(10, n_envs=3)
    assert (buffer.buffer_size, buffer.tree.capacity) == (3, 9)
    for number in range(2):
        add(buffer, number)
    np.testing.assert_array_equal(np.flatnonzero(buffer.tree[:]), range(6))
    assert buffer.priorities.shape == buffer.probabilities.shape == (6,)
    np.testing.assert_array_equal(np.unique(buffer.sample(60).indices), range(6))
    for number in range(2, 9):
        add(buffer, number)
    np.testing.assert_array_equal(np.unique(buffer.sample(90).indices), range(9))


def test_more_envs_than_transitions_asked_for_make_one_row() -> None:
    """Known fault 43."""
    buffer = make(2, n_adds=3, n_envs=4)
    assert (buffer.buffer_size, buffer.tree.capacity) == (1, 4)
    assert by_index(buffer.sample(8), "rewards") == {0: [8.0], 1: [9.0], 2: [10.0], 3: [11.0]}


@pytest.mark.parametrize("n_steps", [1, 2])
def test_rewards_and_observations_are_normalized_by_the_given_env(n_steps: int) -> None:
    """Known fault 44."""
    buffer = PrioritizedReplayBuffer(
        4, spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(2), "cpu", n_steps=n_steps
    )
    venv = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]))
    venv.ret_rms.var = np.array(4.0)
    assert isinstance(venv.obs_rms, RunningMeanStd)
    venv.obs_rms.mean = np.full(4, 2.0)
    for _ in range(3):
        observation = np.full((1, 4), 5.0)
        buffer.add(observation, observation, np.zeros(1), np.full(1, 6.0), np.ones(1), [{}])
    batch = buffer.sample(3, env=venv)
    assert batch.rewards.dtype == th.float32
    np.testing.assert_allclose(batch.rewards, np.full((3, 1), 3.0))
    np.testing.assert_allclose(batch.observations, np.full((3, 4), 3.0))
    np.testing.assert_allclose(batch.next_observations, np.full((3, 4), 3.0))
    np.testing.assert_array_equal(buffer.sample(3).rewards, np.full((3, 1), 6.0))
    np.testing.assert_array_equal(buffer.sample(3).observations, np.full((3, 4), 5.0))
    venv.close()


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
    """Known fault 45."""
    buffer = make(4, n_steps=n_steps, gamma=0.9)
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


def test_all_the_mass_beside_or_on_the_invalid_row_does_not_hang() -> None:
    """Known fault 47."""
    saving = {"optimize_memory_usage": True, "handle_timeout_termination": False, "n_steps": 3}
    buffer = make(4, n_adds=5, **saving)
    buffer.update_priorities([1, 2, 3, 0], [1e12, 1e12, 1e-6, 1e-6])
    np.testing.assert_array_equal(buffer.priorities, [1e-6, 0.0, 1e12, 1e-6])
    add(buffer, 5)  # row 2, with nearly all the mass, becomes the invalid one
    buffer.update_priorities([0, 1, 2, 3], [1e-6, 1e-6, 1e12, 1e-6])
    start = time.perf_counter()
    batch = buffer.sample(32)
    assert time.perf_counter() - start < 1.0
    assert set(batch.indices.tolist()) == {0, 1, 3}


def test_saving_memory_with_timeout_handling_is_refused_as_in_sb3() -> None:
    """Known fault 48."""
    arguments = (4, OBSERVATIONS, ACTIONS, "cpu", 1)
    with pytest.raises(ValueError, match="optimize_memory_usage") as theirs:
        ReplayBuffer(*arguments, optimize_memory_usage=True)
    with pytest.raises(ValueError, match="handle_timeout_termination") as ours:
        PrioritizedReplayBuffer(*arguments, optimize_memory_usage=True, n_steps=2)
    assert str(ours.value) == str(theirs.value)


def test_saving_memory_without_timeout_handling_works() -> None:
    """Known fault 48."""
    saving = {"optimize_memory_usage": True, "handle_timeout_termination": False}
    buffer = make(4, n_adds=6, **saving)
    assert not hasattr(buffer, "next_observations")
    batch = buffer.sample(30)
    assert by_index(batch, "observations") == {0: [4, 4], 1: [5, 5], 3: [3, 3]}
    assert by_index(batch, "next_observations") == {0: [5, 5], 1: [6, 6], 3: [4, 4]}


def test_n_step_returns_end_with_the_episode_and_with_the_newest_row() -> None:
    """Known fault 50."""
    buffer = make(6, n_steps=3, gamma=0.9)
    for t in range(8):
        add(buffer, t, reward=np.array([1.0 + t]), done=np.array([t == 4]))
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
    """Known fault 51."""
    buffer = make(8, n_adds=0, n_steps=2, gamma=0.5)
    for number in range(3):
        add(buffer, number, reward=np.ones(1))
    batch = buffer.sample(30)
    assert batch.discounts is not None
    # The last one sees the end of what is stored.
    assert by_index(batch, "rewards") == {0: [1.5], 1: [1.5], 2: [1.0]}
    assert by_index(batch, "discounts") == {0: [0.25], 1: [0.25], 2: [0.5]}


@pytest.mark.parametrize("n_steps", [1, 2])
def test_discrete_observations_of_several_envs_are_stored_as_they_are(n_steps: int) -> None:
    """Known fault 52."""
    venv = DummyVecEnv([lambda: GridWorldEnv(25, start=None, observation="discrete")] * 3)
    assert venv.observation_space == spaces.Discrete(25)
    venv.seed(7)
    buffer = PrioritizedReplayBuffer(
        15, venv.observation_space, venv.action_space, "cpu", 3, n_steps=n_steps
    )
    observations: Any = venv.reset()
    seen = []
    for t in range(7):
        assert observations.shape == (3,)
        seen.append(observations.copy())
        actions = np.array([t % 2, 1, 0])
        following, rewards, dones, infos = venv.step(actions)
        buffer.add(observations, following, actions, rewards, dones, infos)  # type: ignore[arg-type]
        observations = following
    assert len(np.unique(seen)) > 3
    batch = buffer.sample(30)
    cells = by_index(batch, "observations")
    expected = np.array([seen[5], seen[6], *seen[2:5]]).ravel()
    assert cells == {index: [cell] for index, cell in enumerate(expected)}
    assert batch.observations.shape == batch.next_observations.shape == (30, 1)


@pytest.mark.parametrize("saving", [False, True])
def test_images_stay_bytes(saving: bool) -> None:
    """Known fault 53."""
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
    """Known fault 55."""
    buffer = make(
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


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("n_steps", [1, 2])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1.0, 1.0, (2, 3, 1), np.float64),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(5),
    ],
    ids=["Box", "MultiDiscrete", "MultiBinary"],
)
def test_odd_spaces_give_the_shapes_and_dtypes_of_sb3(
    space: spaces.Space[Any], n_steps: int, n_envs: int
) -> None:
    """Known fault 56."""
    arguments = (3 * n_envs, space, ACTIONS, "cpu", n_envs)
    ours, theirs = PrioritizedReplayBuffer(*arguments, n_steps=n_steps), ReplayBuffer(*arguments)
    for _ in range(4):
        observations = np.array([space.sample() for _ in range(n_envs)])
        actions = np.arange(n_envs)
        for buffer in (ours, theirs):
            buffer.add(observations, observations, actions, actions, actions == 0, [{}] * n_envs)
    batch, expected = ours.sample(5), theirs.sample(5)
    for field in ("observations", "actions", "next_observations", "dones", "rewards"):
        got, wanted = getattr(batch, field), getattr(expected, field)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), field
    assert (batch.actions.dtype, batch.actions.shape) == (th.int64, (5, 1))


def test_sample_and_add_take_what_sb3_gives_them() -> None:
    """Known faults 44 and 56: SB3 calls these by position and by name."""
    for name in ("add", "sample"):
        ours = inspect.signature(getattr(PrioritizedReplayBuffer, name)).parameters
        theirs = inspect.signature(getattr(ReplayBuffer, name)).parameters
        assert list(ours) == list(theirs)
        assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
