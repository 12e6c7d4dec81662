"""``learn`` again, ``set_env``, ``load``: no transition reaches from one episode into the next."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import SAC, HerReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from model_helpers import SAVING_MEMORY, Prioritized, buffer_of, side_by_side, small_model
from sb3_per import PERDQN, PERQRDQN, PrioritizedHerReplayBuffer


class PERSAC(Prioritized, SAC):
    """An algorithm of a user's; it does not come to train here."""


class RunsEnv(gym.Env[Any, Any]):
    """
    Never ends. Observes the number of resets; the reward is 1 in the first run and 100 later.
    """

    def __init__(self, algorithm: type[Any], has_dict: bool, n_resets: int = 0) -> None:
        box = spaces.Box(0.0, 100.0, (1,), np.float32)
        self.has_dict = has_dict
        self.observation_space = spaces.Dict({"run": box}) if has_dict else box
        has_q_values = issubclass(algorithm, PERDQN | PERQRDQN)
        self.action_space = spaces.Discrete(2) if has_q_values else spaces.Box(-1.0, 1.0, (1,))
        self.n_resets = n_resets

    def _observe(self) -> Any:
        run = np.full(1, self.n_resets, np.float32)
        return {"run": run} if self.has_dict else run

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.n_resets += 1
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observe(), 1.0 if self.n_resets == 1 else 100.0, False, False, {}


def runs(algorithm: type[Any], has_dict: bool, n_envs: int, n_resets: int = 0) -> VecEnv:
    return side_by_side(n_envs, lambda: RunsEnv(algorithm, has_dict, n_resets))


def learn_in_two_parts(
    way: str, algorithm: type[Any], n_envs: int, has_dict: bool, folder: Path, **options: Any
) -> Any:
    """:return: a model after ten steps of one run and ten of another"""
    model: Any = small_model(
        runs(algorithm, has_dict, n_envs), algorithm, learning_starts=1000, gamma=0.9, **options
    )
    model.learn(10 * n_envs)
    goes_on = {"reset_num_timesteps": False}
    if way == "learn again":
        return model.learn(10 * n_envs)
    if way == "go on":
        return model.learn(10 * n_envs, **goes_on)
    later = runs(algorithm, has_dict, n_envs, n_resets=1)
    if way == "set_env":
        model.set_env(later)
    else:
        model.save(folder / "model")
        model.save_replay_buffer(folder / "buffer")
        model = algorithm.load(folder / "model", env=later)
        model.load_replay_buffer(folder / "buffer")
    return model.learn(10 * n_envs, **({} if way == "load and learn again" else goes_on))


# SB3 says of memory saving that the episode is cut off
@pytest.mark.filterwarnings("ignore:The last trajectory in the replay buffer:UserWarning")
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize(
    "case",
    [
        {"way": "learn again"},
        {"way": "learn again", "n_envs": 2},
        {"way": "learn again", "has_dict": True},
        {"way": "learn again", "n_envs": 2, **SAVING_MEMORY},
        {"way": "learn again", "algorithm": PERQRDQN},
        {"way": "learn again", "algorithm": PERSAC},
        {"way": "set_env"},
        {"way": "set_env", **SAVING_MEMORY},
        {"way": "set_env", "n_envs": 2, "has_dict": True, "algorithm": PERQRDQN},
        {"way": "load and go on"},
        {"way": "load and go on", "n_envs": 2, **SAVING_MEMORY},
        {"way": "load and go on", "algorithm": PERSAC, "has_dict": True},
        {"way": "load and learn again", **SAVING_MEMORY},
    ],
    ids=lambda case: "-".join(getattr(x, "__name__", str(x)) for x in case.values()),
)
def test_the_last_transition_before_the_break_bootstraps_from_its_own_next_observation(
    case: dict[str, Any], n_steps: int, tmp_path: Path
) -> None:
    options = {"algorithm": PERDQN, "n_envs": 1, "has_dict": False, **case}
    model = learn_in_two_parts(**options, n_steps=n_steps, folder=tmp_path)
    n_envs = options["n_envs"]
    buffer = buffer_of(model)
    assert buffer.n_transitions == 20 * n_envs
    batch: Any = buffer.batch_of(np.arange(10 * n_envs))
    seen = [
        values["run"] if options["has_dict"] else values
        for values in (batch.observations, batch.next_observations)
    ]
    for values in seen:
        np.testing.assert_array_equal(values, np.ones((10 * n_envs, 1)))
    assert not batch.dones.any()
    returns, discounts = [1.0] * 10, [0.9] * 10
    if n_steps == 3:
        returns, discounts = [2.71] * 8 + [1.9, 1.0], [0.729] * 8 + [0.81, 0.9]
        np.testing.assert_allclose(batch.discounts[:, 0], np.repeat(discounts, n_envs), rtol=1e-6)
    np.testing.assert_allclose(batch.rewards[:, 0], np.repeat(returns, n_envs), rtol=1e-6)
    # And the second run is one of its own
    batch = buffer.batch_of(np.arange(10 * n_envs, 20 * n_envs))
    assert float(batch.rewards.min()) == 100.0


@pytest.mark.parametrize("options", [{}, SAVING_MEMORY], ids=["plain", "saving"])
def test_an_episode_that_goes_on_is_not_broken_off(options: dict[str, Any], tmp_path: Path) -> None:
    model = learn_in_two_parts("go on", PERDQN, 1, False, tmp_path, n_steps=3, **options)
    batch = buffer_of(model).batch_of(np.arange(18))
    np.testing.assert_allclose(batch.rewards[:, 0], np.full(18, 2.71), rtol=1e-6)
    assert batch.discounts is not None
    np.testing.assert_allclose(batch.discounts[:, 0], np.full(18, 0.729), rtol=1e-6)


# --- hindsight


class EpisodesEnv(gym.Env[Any, Any]):
    """Episodes of 20 steps. What was achieved is the number of the episode and of the step."""

    goal = spaces.Box(-1.0, 1e6, (2,), np.float32)
    observation_space = spaces.Dict(
        {"observation": goal, "achieved_goal": goal, "desired_goal": goal}
    )
    action_space = spaces.Discrete(2)
    wanted = np.full(2, -1.0, np.float32)

    def __init__(self, n_episodes: int = 0) -> None:
        self.n_episodes = n_episodes

    def _observe(self) -> dict[str, Any]:
        here = np.array([self.n_episodes, self.n_steps], np.float32)
        return {"observation": here, "achieved_goal": here, "desired_goal": self.wanted}

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.n_episodes += 1
        self.n_steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        return self._observe(), -1.0, self.n_steps == 20, False, {}

    def compute_reward(self, achieved: Any, desired: Any, infos: Any) -> Any:
        return (achieved == desired).all(axis=-1) - 1.0


class Stop(BaseCallback):
    """Stops in the middle of an episode, before the step is stored."""

    def _on_step(self) -> bool:
        return self.n_calls < 33


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("way", ["learn again", "stopped, learn again", "set_env", "load"])
def test_no_hindsight_episode_is_longer_than_its_own_and_no_goal_comes_from_another(
    way: str, n_envs: int, tmp_path: Path
) -> None:
    model: Any = small_model(
        side_by_side(n_envs, EpisodesEnv),
        buffer_size=200 * n_envs,
        learning_starts=30 * n_envs,
        train_freq=5,
        replay_buffer_class=HerReplayBuffer,
    )
    model.learn(25 * n_envs)
    if way == "load":
        model.save(tmp_path / "model")
        model.save_replay_buffer(tmp_path / "buffer")
        model = PERDQN.load(tmp_path / "model", env=side_by_side(n_envs, lambda: EpisodesEnv(50)))
        model.load_replay_buffer(tmp_path / "buffer")
    elif way == "set_env":
        model.set_env(side_by_side(n_envs, lambda: EpisodesEnv(50)))
    elif way.startswith("stopped"):
        model.learn(40 * n_envs, callback=Stop())
    model.learn(40 * n_envs, reset_num_timesteps="learn" in way)

    buffer = buffer_of(model)
    assert isinstance(buffer, PrioritizedHerReplayBuffer)
    assert buffer.ep_length.max() == 20
    # The five steps of the first part are an episode, too
    np.testing.assert_array_equal(buffer.ep_length[20:25], 5)
    assert (buffer.priorities[: 25 * n_envs] > 0.0).all()
    n_foreign = 0
    for _ in range(20):
        batch: Any = buffer.sample(160)
        episode = batch.observations["observation"][:, 0]
        assert bool((batch.next_observations["observation"][:, 0] == episode).all())
        goal = batch.observations["desired_goal"][:, 0]
        n_foreign += int(((goal != episode) & (goal != -1.0)).sum())
        assert bool((goal == episode).any())
    assert n_foreign == 0
