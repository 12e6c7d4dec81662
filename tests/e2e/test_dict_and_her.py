"""PERDQN with Dict observations and with hindsight experience replay, from learning to files."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN, HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv, SimpleMultiObsEnv
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
    VecFrameStack,
    VecNormalize,
)

from model_helpers import parameters_of, same, small_model
from sb3_per import PERDQN, PrioritizedDictReplayBuffer, PrioritizedHerReplayBuffer

# A small head for images
SMALL_IMAGES = {"net_arch": [8], "features_extractor_kwargs": {"cnn_output_dim": 8}}
GOALS: dict[str, Any] = {"n_sampled_goal": 3, "goal_selection_strategy": "future"}
TRUNCATION = "last trajectory in the replay buffer will be truncated"
HER_CLASSES = pytest.mark.parametrize(
    "buffer_class", [HerReplayBuffer, PrioritizedHerReplayBuffer], ids=["SB3's", "by name"]
)


class RoomEnv(gym.Env[Any, np.int64]):
    """
    All keys of an observation tell the same random number; ends after seven steps, by a time
    limit every second time.
    """

    observation_space = spaces.Dict(
        {
            "vector": spaces.Box(-100.0, 100.0, (2,), np.float32),
            "room": spaces.Discrete(100),
            "camera": spaces.Box(0, 255, (3,), np.uint8),
        }
    )
    action_space: spaces.Space[Any] = spaces.Discrete(3)

    def __init__(self) -> None:
        self.n_episodes = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        self.n_episodes += 1
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        reward = self.number / 10.0 if action == self.number % 3 else 0.0
        over, late = self.n_steps == 7, self.n_episodes % 2 == 0
        return self._observe(), reward, over and not late, over and late, {}

    def _observe(self) -> dict[str, Any]:
        self.number = int(self.np_random.integers(100))
        return {
            "vector": np.full(2, self.number, np.float32),
            "room": self.number,
            "camera": np.full(3, self.number, np.uint8),
        }


def bits(n_envs: int = 1, **kwargs: Any) -> VecEnv:
    return DummyVecEnv([lambda: BitFlippingEnv(**{"n_bits": 4, **kwargs})] * n_envs)


make_model: Any = partial(small_model, buffer_size=80, learning_starts=12, batch_size=10)


def make_her(
    env: Any = None, kind: type[DQN] = PERDQN, buffer_class: Any = HerReplayBuffer, **kwargs: Any
) -> Any:
    options = {"replay_buffer_class": buffer_class, "replay_buffer_kwargs": GOALS, **kwargs}
    return make_model(bits() if env is None else env, algorithm=kind, **options)


def her_of(model: PERDQN) -> PrioritizedHerReplayBuffer:
    buffer = model.replay_buffer
    assert type(buffer) is PrioritizedHerReplayBuffer
    assert buffer.tree.check_valid() == (True, "")
    np.testing.assert_array_equal(buffer.tree[:] > 0.0, buffer.ep_length.ravel() > 0)
    return buffer


def dict_of(model: PERDQN) -> PrioritizedDictReplayBuffer:
    buffer = model.replay_buffer
    assert type(buffer) is PrioritizedDictReplayBuffer
    assert buffer.tree.check_valid() == (True, "")
    assert (buffer.priorities > 0.0).all()
    return buffer


def assert_same_content(one: Any, other: Any) -> None:
    for name in ("observations", "next_observations"):
        mine, its = getattr(one, name), getattr(other, name)
        assert list(mine) == list(its)
        for key in mine:
            np.testing.assert_array_equal(mine[key], its[key])
    for name in ("actions", "rewards"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert (one.pos, one.full) == (other.pos, other.full)


def train_alike(model: Any, seed: int = 7) -> list[th.Tensor]:
    """Parameters after some training by the same random numbers."""
    model.set_logger(Logger(None, []))
    np.random.seed(seed)
    model.train(5, batch_size=16)
    return parameters_of(model)


# --- Dict observations


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_dict_observations_are_learned_from(n_envs: int, n_steps: int) -> None:
    env = DummyVecEnv([RoomEnv] * n_envs)
    model = make_model(env, n_steps=n_steps, buffer_size=60, gamma=0.5)
    before = parameters_of(model)
    model.learn(40 * n_envs)
    assert model._n_updates == 40 - 12 // n_envs
    assert not same(parameters_of(model), before)
    buffer = dict_of(model)
    assert len(np.unique(buffer.priorities)) > buffer.n_transitions / 2

    rows = np.arange(buffer.size())
    rooms = buffer.observations["room"][rows, :, 0]
    next_rooms = buffer.next_observations["room"][rows, :, 0]
    np.testing.assert_array_equal(buffer.observations["vector"][rows, :, 1], rooms)
    np.testing.assert_array_equal(buffer.next_observations["camera"][rows, :, 2], next_rooms)
    # What follows in an episode, and the rest of its rewards
    batch: Any = buffer.sample(200)
    newest = (buffer.pos - 1) % buffer.buffer_size
    for at, index in enumerate(batch.indices.tolist()):
        row, env_index = divmod(index, n_envs)
        total, discount, last = 0.0, 1.0, row
        for step in range(n_steps):
            last = (row + step) % buffer.buffer_size
            total += discount * float(buffer.rewards[last, env_index])
            discount *= 0.5
            if buffer.dones[last, env_index] or last == newest:
                break
        assert batch.observations["room"][at].item() == rooms[row, env_index]
        assert batch.next_observations["room"][at].item() == next_rooms[last, env_index]
        assert batch.rewards[at].item() == pytest.approx(total, rel=1e-6)
        ended = buffer.dones[last, env_index] and not buffer.timeouts[last, env_index]
        assert batch.dones[at].item() == float(ended)
        if n_steps > 1:
            assert batch.discounts[at].item() == discount
    assert 0.0 < buffer.timeouts.sum() < buffer.dones.sum()


def test_the_same_seed_gives_the_same_run_with_dict_observations() -> None:
    runs = [make_model(DummyVecEnv([RoomEnv] * 2), seed=seed).learn(80) for seed in (0, 0, 1)]
    assert same(parameters_of(runs[0]), parameters_of(runs[1]))
    np.testing.assert_array_equal(dict_of(runs[0]).priorities, dict_of(runs[1]).priorities)
    assert not same(parameters_of(runs[0]), parameters_of(runs[2]))


def test_dict_observations_are_normalized_when_drawn() -> None:
    env = VecNormalize(DummyVecEnv([RoomEnv] * 2), norm_obs_keys=["vector"])
    model = make_model(env).learn(80)
    buffer = dict_of(model)
    np.testing.assert_array_equal(
        buffer.observations["vector"][:, :, 0], buffer.observations["camera"][:, :, 0]
    )
    batch: Any = buffer.sample(30, env)
    original = batch.observations["camera"][:, :2].numpy().astype(np.float32)
    expected = env.normalize_obs({"vector": original})
    np.testing.assert_array_equal(batch.observations["vector"].numpy(), expected["vector"])
    assert np.abs(batch.observations["vector"].numpy()).max() < 5.0


@pytest.mark.parametrize("n_stack", [1, 2])
@pytest.mark.parametrize("channel_last", [True, False])
def test_sb3s_env_of_images_and_vectors(channel_last: bool, n_stack: int) -> None:
    env: VecEnv = make_vec_env(
        lambda: SimpleMultiObsEnv(random_start=False, channel_last=channel_last), 2
    )
    if n_stack > 1:
        env = VecFrameStack(env, n_stack)
    model = make_model(env, policy_kwargs=SMALL_IMAGES, n_steps=2)
    before = parameters_of(model)
    # Half of them before learning: images take long
    model.learning_starts = 24
    model.learn(40)
    assert not same(parameters_of(model), before)
    buffer = dict_of(model)
    # Channels first, as SB3 hands images to its networks
    assert buffer.observations["img"].shape == (40, 2, n_stack, 64, 64)
    assert buffer.observations["vec"].shape == (40, 2, 5 * n_stack)
    for row in np.flatnonzero(buffer.dones[:19].sum(axis=1) == 0):
        for key in ("img", "vec"):
            following = buffer.observations[key][row + 1]
            np.testing.assert_array_equal(buffer.next_observations[key][row], following)
    if n_stack > 1:
        goes_on = buffer.dones[:19, 0] == 0
        old = buffer.observations["vec"][:19, 0][goes_on][:, 5:]
        np.testing.assert_array_equal(old, buffer.next_observations["vec"][:19, 0][goes_on][:, :5])


@pytest.mark.parametrize("n_steps", [1, 3])
def test_dict_buffers_go_to_files_and_back(n_steps: int, tmp_path: Path) -> None:
    model = make_model(DummyVecEnv([RoomEnv] * 2), n_steps=n_steps).learn(60)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded: Any = PERDQN.load(tmp_path / "model", DummyVecEnv([RoomEnv] * 2), device="cpu")
    assert dict_of(loaded).n_transitions == 0
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert_same_content(dict_of(loaded), dict_of(model))
    np.testing.assert_array_equal(dict_of(loaded).priorities, dict_of(model).priorities)
    assert same(train_alike(loaded), train_alike(model))
    loaded.learn(20, reset_num_timesteps=False)
    assert loaded.num_timesteps == 80


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_plain_dict_buffer_is_converted(n_steps: int, tmp_path: Path) -> None:
    plain = make_model(DummyVecEnv([RoomEnv] * 2), algorithm=DQN).learn(60)
    assert type(plain.replay_buffer) is DictReplayBuffer
    plain.save_replay_buffer(tmp_path / "buffer")
    model = make_model(DummyVecEnv([RoomEnv] * 2), n_steps=n_steps)
    with pytest.warns(UserWarning, match=r"is a DictReplayBuffer .* 60 tr.* priority 1"):
        model.load_replay_buffer(tmp_path / "buffer.pkl")
    buffer = dict_of(model)
    assert buffer.n_steps == n_steps
    assert_same_content(buffer, plain.replay_buffer)
    np.testing.assert_array_equal(buffer.priorities, np.ones(60))
    model.learn(30)
    assert len(np.unique(dict_of(model).priorities)) > 10


# --- hindsight


@HER_CLASSES
@pytest.mark.parametrize("n_envs", [1, 2])
def test_hindsight_learns(n_envs: int, buffer_class: Any) -> None:
    model = make_her(bits(n_envs), buffer_class=buffer_class)
    assert model.replay_buffer_class is buffer_class
    before = parameters_of(model)
    # Warnings are errors here: neither SB3 nor this package has a reason to warn
    model.learn(60 * n_envs)
    assert model._n_updates == 60 - 12 // n_envs
    assert not same(parameters_of(model), before)
    buffer = her_of(model)
    assert (buffer.n_sampled_goal, buffer.her_ratio) == (3, 0.75)
    assert (buffer.alpha, buffer.eps, buffer.n_steps) == (0.6, 1e-6, 1)
    assert buffer.beta == model.beta_schedule(model._current_progress_remaining)
    assert len(np.unique(buffer.priorities)) > 10

    batch: Any = buffer.sample(40)
    wanted = batch.observations["desired_goal"].numpy()
    achieved = batch.next_observations["achieved_goal"].numpy()
    np.testing.assert_array_equal(batch.rewards[:, 0], (wanted == achieved).all(axis=1) - 1.0)
    # The goal of the task is all ones; an episode that reaches it may be relabeled with it
    assert (wanted.all(axis=1)).sum() >= 10
    assert not wanted.all()


@pytest.mark.parametrize(
    "kwargs", [{"discrete_obs_space": True}, {"image_obs_space": True, "channel_first": True}]
)
def test_goals_may_be_numbers_or_images(kwargs: dict[str, Any]) -> None:
    policy_kwargs = SMALL_IMAGES if "image_obs_space" in kwargs else {"net_arch": [8]}
    model = make_her(bits(2, **kwargs), policy_kwargs=policy_kwargs).learn(40)
    assert model._n_updates > 5
    her_of(model)


def test_the_same_seed_gives_the_same_run_with_hindsight() -> None:
    runs = [make_her(bits(2), seed=seed).learn(100) for seed in (0, 0, 1)]
    assert same(parameters_of(runs[0]), parameters_of(runs[1]))
    np.testing.assert_array_equal(her_of(runs[0]).priorities, her_of(runs[1]).priorities)
    assert not same(parameters_of(runs[0]), parameters_of(runs[2]))


def test_rewards_of_hindsight_are_normalized_when_drawn() -> None:
    # The observations of this environment, bits, can't be
    env = VecNormalize(bits(2), norm_obs=False)
    model = make_her(env).learn(80)
    batch: Any = her_of(model).sample(40, env)
    wanted = batch.observations["desired_goal"].numpy()
    achieved = batch.next_observations["achieved_goal"].numpy()
    reached = (wanted == achieved).all(axis=1)
    assert reached.any()
    expected = env.normalize_reward(reached - np.float32(1.0))
    np.testing.assert_allclose(batch.rewards.numpy()[:, 0], expected, rtol=1e-6)
    assert expected.min() != -1.0
    assert set(np.unique(her_of(model).rewards)) == {-1.0, 0.0}


def test_learning_before_the_first_end_is_refused_with_a_hint() -> None:
    model = make_her(bits(n_bits=12, max_steps=30), learning_starts=2)
    with pytest.raises(ValueError, match=r"`learning_starts`.* larger than the longest episode"):
        model.learn(20)


def test_n_step_returns_are_refused() -> None:
    with pytest.raises(ValueError, match="`n_steps=3`"):
        make_her(n_steps=3)


def test_hindsight_needs_goals() -> None:
    with pytest.raises(ValueError, match="PrioritizedReplayBuffer"):
        PERDQN("MlpPolicy", "CartPole-v1", replay_buffer_class=HerReplayBuffer)


class PaidEnv(BitFlippingEnv):
    """Every reward is the same, that of hindsight, too."""

    def __init__(self, reward: float) -> None:
        self.paid = reward
        super().__init__(n_bits=4)

    def compute_reward(self, achieved: Any, desired: Any, infos: Any) -> Any:
        return np.full(len(np.atleast_2d(achieved)), self.paid, np.float32)

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, self.paid, *rest


@pytest.mark.parametrize("in_processes", [False, True])
def test_rewards_of_hindsight_come_from_the_environment_that_the_model_has_now(
    in_processes: bool,
) -> None:
    first: Any = (SubprocVecEnv if in_processes else DummyVecEnv)([partial(PaidEnv, -1.0)])
    model = make_her(first, buffer_size=40).learn(40)
    assert set(np.unique(her_of(model).sample(40).rewards)) == {-1.0}
    model.set_env(PaidEnv(-7.0))
    # Its processes are gone
    first.close()
    model.learn(100)
    for _ in range(5):
        np.testing.assert_array_equal(her_of(model).sample(40).rewards, np.full((40, 1), -7.0))
    assert her_of(model).env is model.env


# --- hindsight, files


def saved(folder: Path, n_envs: int, buffer_class: Any = HerReplayBuffer) -> Any:
    """A model in the middle of an episode of each environment, and its files."""
    model = make_her(bits(n_envs), buffer_class=buffer_class)
    for n in range(14, 40):
        model.learn(n * n_envs - model.num_timesteps, reset_num_timesteps=False)
        buffer = her_of(model)
        if (buffer._current_ep_start != buffer.pos).all():
            break
    assert (buffer._current_ep_start != buffer.pos).all()
    model.save(folder / "model")
    model.save_replay_buffer(folder / "buffer")
    return model


@HER_CLASSES
@pytest.mark.parametrize("n_envs", [1, 2])
def test_hindsight_goes_on_in_the_running_episode(
    n_envs: int, buffer_class: Any, tmp_path: Path
) -> None:
    model = saved(tmp_path, n_envs, buffer_class)
    env = bits(n_envs)
    loaded: Any = PERDQN.load(tmp_path / "model", env, device="cpu")
    assert loaded.replay_buffer_class is buffer_class
    assert loaded.replay_buffer_kwargs == GOALS
    assert her_of(loaded).n_transitions == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=False)
    buffer, original = her_of(loaded), her_of(model)
    assert buffer.env is env
    assert_same_content(buffer, original)
    for name in ("dones", "timeouts", "ep_start", "ep_length", "_current_ep_start"):
        np.testing.assert_array_equal(getattr(buffer, name), getattr(original, name))
    np.testing.assert_array_equal(buffer.tree[:], original.tree[:])
    assert same(train_alike(loaded), train_alike(model))
    running = buffer.tree[(buffer.pos - 1) * n_envs]
    assert running == 0.0
    loaded.learn(30 * n_envs, reset_num_timesteps=False)
    her_of(loaded)


@HER_CLASSES
@pytest.mark.parametrize("n_envs", [1, 2])
def test_hindsight_cuts_the_running_episode_off(
    n_envs: int, buffer_class: Any, tmp_path: Path
) -> None:
    original = her_of(saved(tmp_path, n_envs, buffer_class))
    loaded: Any = PERDQN.load(tmp_path / "model", bits(n_envs), device="cpu")
    # Without SB3's warning: nothing is lost
    loaded.load_replay_buffer(tmp_path / "buffer")
    buffer = her_of(loaded)
    assert_same_content(buffer, original)
    largest = original.tree.max_priority
    for env in range(n_envs):
        rows = np.arange(original._current_ep_start[env], original.pos)
        leaves = buffer.tree[:].reshape(-1, n_envs)
        np.testing.assert_array_equal(leaves[rows, env], largest)
    others = original.tree[:] > 0.0
    np.testing.assert_array_equal(buffer.tree[:][others], original.tree[:][others])
    assert not (buffer.tree[:][: buffer.n_transitions] == 0.0).any()
    loaded.learn(30 * n_envs, reset_num_timesteps=False)
    her_of(loaded)


@HER_CLASSES
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_plain_hindsight_buffer_is_converted(
    n_envs: int, truncate: bool, buffer_class: Any, tmp_path: Path
) -> None:
    plain = make_her(bits(n_envs), DQN)
    for n in range(14, 40):
        plain.learn(n * n_envs - plain.num_timesteps, reset_num_timesteps=False)
        if (plain.replay_buffer._current_ep_start != plain.replay_buffer.pos).all():
            break
    plain.save_replay_buffer(tmp_path / "buffer")
    model = make_her(bits(n_envs), buffer_class=buffer_class, replay_buffer_kwargs={})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=truncate)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 1 + truncate
    assert "is a HerReplayBuffer without priorities" in messages[-1]
    assert all(TRUNCATION in message for message in messages[:-1])
    buffer = her_of(model)
    assert_same_content(buffer, plain.replay_buffer)
    assert buffer.env is model.env
    # Goals are chosen as they were
    assert buffer.n_sampled_goal == 3
    drawable = buffer.priorities > 0.0
    assert drawable.all() == truncate
    assert drawable.any()
    np.testing.assert_array_equal(buffer.priorities[drawable], 1.0)
    model.learn(30 * n_envs)
    assert len(np.unique(her_of(model).priorities)) > 5


def test_a_buffer_without_goals_does_not_become_one_with_hindsight(tmp_path: Path) -> None:
    plain = make_model(bits(), algorithm=DQN).learn(30)
    plain.save_replay_buffer(tmp_path / "buffer")
    model = make_her()
    before = model.replay_buffer
    with pytest.raises(ValueError, match="DictReplayBuffer"):
        model.load_replay_buffer(tmp_path / "buffer")
    assert model.replay_buffer is before


@pytest.mark.parametrize("n_steps", [1, 3])
def test_hindsight_does_not_come_or_go_by_a_file(n_steps: int, tmp_path: Path) -> None:
    make_her().learn(30).save_replay_buffer(tmp_path / "with")
    without = make_model(bits(), n_steps=n_steps).learn(30)
    without.save_replay_buffer(tmp_path / "without")
    her = make_her()
    for model, file in ((without, "with"), (her, "without")):
        before = model.replay_buffer
        with pytest.raises(ValueError, match="only one of them replays with hindsight"):
            model.load_replay_buffer(tmp_path / file, truncate_last_traj=False)
        assert model.replay_buffer is before


# --- hindsight pays


class AnyGoalEnv(BitFlippingEnv):
    """
    The goal is random, too, as in the paper. One goal alone is learned without hindsight as well.
    """

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self._obs_space.seed(seed)
        self.desired_goal = self._obs_space.sample()
        return super().reset()


def success_rate(model: DQN, env: BitFlippingEnv, n_episodes: int = 50) -> float:
    """Of greedy episodes from random starts."""
    successes = []
    for seed in range(1000, 1000 + n_episodes):
        obs: Any = env.reset(seed=seed)[0]
        over = False
        while not over:
            action, _ = model.predict(obs, deterministic=True)
            obs, _, terminated, truncated, info = env.step(int(action))
            over = terminated or truncated
        successes.append(info["is_success"])
    return float(np.mean(successes))


SOLVES: dict[str, Any] = {
    "learning_rate": 1e-3,
    "buffer_size": 50_000,
    "learning_starts": 500,
    "batch_size": 128,
    "tau": 0.05,
    "gamma": 0.95,
    "target_update_interval": 1,
    "exploration_fraction": 0.5,
    "policy_kwargs": {"net_arch": [128]},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", [BitFlippingEnv, AnyGoalEnv])
def test_ten_bits_are_flipped(kind: type[BitFlippingEnv], seed: int) -> None:
    goals = {"n_sampled_goal": 4}
    model = make_her(kind(n_bits=10), replay_buffer_kwargs=goals, **{**SOLVES, "seed": seed})
    assert success_rate(model, kind(n_bits=10)) < 0.2
    model.learn(3000)
    assert success_rate(model, kind(n_bits=10)) >= 0.95


@pytest.mark.slow
def test_without_hindsight_ten_bits_to_any_goal_stay_unsolved() -> None:
    # So that the other test shows that hindsight does its work
    model = make_model(AnyGoalEnv(n_bits=10), **SOLVES).learn(3000)
    assert success_rate(model, AnyGoalEnv(n_bits=10)) < 0.3
