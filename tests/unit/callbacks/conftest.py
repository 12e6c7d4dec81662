"""Environments and models whose transitions tell themselves apart."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_per import PERDQN

Array = npt.NDArray[Any]

SMALL: dict[str, Any] = {
    "buffer_size": 60,
    "learning_starts": 20,
    "train_freq": 1,
    "batch_size": 8,
    "target_update_interval": 16,
    "learning_rate": 0.01,
    "policy_kwargs": {"net_arch": [8]},
    "seed": 0,
    "device": "cpu",
}


class TagEnv(gym.Env[Any, Any]):
    """
    Observes its number and how many steps it made: no observation is ever made twice. Ends after
    seven steps, after eight by time limit, and so on in turn; the reward is the number of steps.
    """

    def __init__(self, number: int = 0, kind: str = "box") -> None:
        is_continuous = kind == "continuous"
        self.action_space = spaces.Box(-1, 1, (1,)) if is_continuous else spaces.Discrete(3)
        self.number = number
        self.kind = kind
        self.n_steps = 0
        self.n_episodes = 0
        box = spaces.Box(-1e6, 1e6, (2,), np.float32)
        goal = spaces.Box(-1e6, 1e6, (1,), np.float32)
        self.observation_space = {
            "box": box,
            "continuous": box,
            "dict": spaces.Dict({"a": box, "b": goal}),
            "goal": spaces.Dict({"observation": box, "achieved_goal": goal, "desired_goal": goal}),
            "image": spaces.Box(0, 255, (1, 36, 36), np.uint8),
        }[kind]

    def observe(self) -> Any:
        box = np.array([self.number, self.n_steps], dtype=np.float32)
        tag = np.array([self.n_steps % 5], dtype=np.float32)
        return {
            "box": box,
            "continuous": box,
            "dict": {"a": box, "b": tag},
            "goal": {"observation": box, "achieved_goal": tag, "desired_goal": tag * 0},
            "image": np.full((1, 36, 36), self.n_steps % 256, dtype=np.uint8),
        }[self.kind]

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.n_steps += 1
        self.length = 7 + self.n_episodes % 2
        self.n_episodes += 1
        self.age = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        self.age += 1
        over = self.age == self.length
        reward = float(self.n_steps % 11)
        return self.observe(), reward, over and self.length == 7, over and self.length == 8, {}

    def compute_reward(self, achieved: Array, desired: Array, infos: Any) -> Array:
        rewards: Array = -np.abs(achieved - desired).sum(axis=-1)
        return rewards


@pytest.fixture(scope="session")
def make_env() -> Callable[..., Any]:
    """Vectorized environments of this kind."""

    def make(n_envs: int = 1, kind: str = "box", normalize: bool = False) -> Any:
        makers: list[Callable[[], Any]] = [
            lambda number=number: TagEnv(number, kind)  # type: ignore[misc]
            for number in range(n_envs)
        ]
        env = DummyVecEnv(makers)
        return VecNormalize(env) if normalize else env

    return make


@pytest.fixture(scope="session")
def make_model(make_env: Callable[..., Any]) -> Callable[..., Any]:
    """Small agents that learn at each step."""

    def make(algorithm: Any = PERDQN, env: Any = None, **options: Any) -> Any:
        env = make_env() if env is None else env
        is_dict = isinstance(env.observation_space, spaces.Dict)
        options = {**SMALL, **options}
        return algorithm("MultiInputPolicy" if is_dict else "MlpPolicy", env, **options)

    return make


class Rows(Logger):
    """Keeps the written rows, a dict for each."""

    def __init__(self) -> None:
        super().__init__(None, [])
        self.rows: list[dict[str, Any]] = []

    def dump(self, step: int = 0) -> None:
        self.rows.append({**self.name_to_value, "step": step})
        super().dump(step)
        for values in (self.name_to_value, self.name_to_count, self.name_to_excluded):
            values.clear()


@pytest.fixture
def logger() -> Rows:
    """Keeps the written rows in ``rows``, a dict for each."""
    return Rows()
