"""Environments and small models for tests, and checks of them."""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, TypeVar, overload

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib import QRDQN
from stable_baselines3 import DQN
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_per import PERDQN, PrioritizedOffPolicyAlgorithm, PrioritizedReplayBuffer

Algorithm = TypeVar("Algorithm", bound=OffPolicyAlgorithm)

SMALL: dict[str, Any] = {
    "buffer_size": 60,
    "learning_starts": 10,
    "train_freq": 1,
    "batch_size": 8,
    "learning_rate": 0.01,
    "policy_kwargs": {"net_arch": [8]},
    "seed": 0,
    "device": "cpu",
}
SAVING_MEMORY: dict[str, Any] = {
    "optimize_memory_usage": True,
    "replay_buffer_kwargs": {"handle_timeout_termination": False},
}


class TenStepEnv(gym.Env[Any, Any]):
    """
    Random observations of any space; which action is the better one depends on the first number
    observed. An episode ends after ten steps.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
    ) -> None:
        self.observation_space = observation_space or spaces.Box(-10.0, 10.0, (3,), np.float32)
        self.action_space = action_space or spaces.Discrete(2)
        self.observation_space.seed(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.n_steps = 0
        self.observation = self.observation_space.sample()
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        seen = self.observation
        number = np.ravel(next(iter(seen.values())) if isinstance(seen, dict) else seen)[0]
        reward = float(number) * (1.0 if action else -1.0)
        self.observation = self.observation_space.sample()
        return self.observation, reward, self.n_steps == 10, False, {}


#: Observations of ScriptedEnv that tests of targets go from and to
S = [1.0, 0.0]
NEXT_S = [0.0, 1.0]


class ScriptedEnv(gym.Env[Any, Any]):
    """Two features, three actions. Plays the steps it is given, or else stands still."""

    observation_space = spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(3)

    def __init__(self, steps: list[tuple[list[float], float, bool, bool]] | None = None) -> None:
        self.script = iter(steps or [])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.array(S, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated = next(self.script, (S, 0.0, False, False))
        return np.array(observation, dtype=np.float32), reward, terminated, truncated, {}


@overload
def small_model(env: Any, algorithm: type[Algorithm], **kwargs: Any) -> Algorithm: ...


@overload
def small_model(env: Any = None, *, algorithm: type[Algorithm], **kwargs: Any) -> Algorithm: ...


@overload
def small_model(env: Any = None, **kwargs: Any) -> PERDQN: ...


def small_model(env: Any = None, algorithm: type[Any] = PERDQN, **kwargs: Any) -> Any:
    """A model of a small network that learns at once; ``kwargs`` replaces arguments of it."""
    env = TenStepEnv() if env is None else env
    has_dict = isinstance(getattr(env, "observation_space", None), spaces.Dict)
    policy = kwargs.pop("policy", "MultiInputPolicy" if has_dict else "MlpPolicy")
    arguments: dict[str, Any] = {**SMALL, **kwargs}
    if issubclass(algorithm, DQN | QRDQN):
        # The others move their target networks a little in each step
        arguments.setdefault("target_update_interval", 16)
    # SB3 writes into `policy_kwargs`
    arguments["policy_kwargs"] = deepcopy(arguments["policy_kwargs"])
    return algorithm(policy, env, **arguments)


class Prioritized(PrioritizedOffPolicyAlgorithm):
    """The constructor of docs/own_algorithm.md; put it before an algorithm of SB3's."""

    def __init__(self, *args: Any, alpha: float = 0.6, beta: float = 0.4, **kwargs: Any) -> None:
        set_up = kwargs.pop("_init_setup_model", True)
        super().__init__(*args, **{**kwargs, "_init_setup_model": False})
        self._set_per_options(alpha=alpha, beta=beta)
        if set_up:
            self._setup_model()


def side_by_side(n_envs: int, env: Any = TenStepEnv) -> VecEnv:
    return DummyVecEnv([env] * n_envs)


def buffer_of(model: OffPolicyAlgorithm) -> PrioritizedReplayBuffer:
    assert isinstance(model.replay_buffer, PrioritizedReplayBuffer)
    return model.replay_buffer


def silent(model: Algorithm) -> Algorithm:
    """Without output, and with a log that keeps its values."""
    model.set_logger(Logger(None, []))
    return model


def parameters_of(model: OffPolicyAlgorithm) -> list[th.Tensor]:
    return [parameter.detach().clone() for parameter in model.policy.parameters()]


def same(one: Iterable[th.Tensor], other: Iterable[th.Tensor]) -> bool:
    return all(th.equal(mine, its) for mine, its in zip(one, other, strict=True))
