"""Small actor-critics for tests, and all that training changes in them."""

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import TQC
from stable_baselines3 import DDPG, SAC, TD3
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.save_util import recursive_getattr

from sb3_per import PERDDPG, PERSAC, PERTD3, PERTQC

#: Ours, and what they are made of
PAIRS: list[tuple[Any, Any]] = [(PERSAC, SAC), (PERTD3, TD3), (PERDDPG, DDPG), (PERTQC, TQC)]
PAIR = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda cls: str(cls.__name__))
ALGORITHM = pytest.mark.parametrize(
    "algorithm", [pair[0] for pair in PAIRS], ids=lambda cls: str(cls.__name__)
)

SMALL: dict[str, Any] = {
    "buffer_size": 60,
    "learning_starts": 10,
    "batch_size": 7,
    "learning_rate": 0.01,
    "policy_kwargs": {"net_arch": [8]},
    "seed": 3,
    "device": "cpu",
}


class PushEnv(gym.Env[Any, Any]):
    """Random observations, rewards by the action; every second episode of six ends by time."""

    action_space = spaces.Box(-2.0, 3.0, (2,), np.float32)

    def __init__(self, observation_space: spaces.Space[Any] | None = None) -> None:
        self.observation_space = observation_space or spaces.Box(-9.0, 9.0, (3,), np.float32)
        self.n_episodes = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.n_steps = 0
        self.n_episodes += 1
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        over, late = self.n_steps == 6, self.n_episodes % 2 == 0
        reward = float(action[0] - action[1]) + float(self.np_random.normal())
        return self.observation_space.sample(), reward, over and not late, over and late, {}


def make(algorithm: Any, env: Any = None, policy: str = "MlpPolicy", **kwargs: Any) -> Any:
    """A small model that learns at once, without output, and with a log that keeps its values."""
    # SB3 writes into `policy_kwargs`
    arguments = deepcopy({**SMALL, **kwargs})
    model = algorithm(policy, PushEnv() if env is None else env, **arguments)
    model.set_logger(Logger(None, []))
    return model


def tensors_of(model: Any) -> dict[str, th.Tensor]:
    """A copy of all that training changes: networks, entropy coefficient, optimizers."""
    tensors = dict(model.policy.state_dict())
    names, variables = model._get_torch_save_params()
    tensors.update({name: recursive_getattr(model, name) for name in variables})
    for name in names[1:]:
        for number, values in recursive_getattr(model, name).state_dict()["state"].items():
            tensors.update({f"{name}.{number}.{key}": value for key, value in values.items()})
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differences(one: Any, other: Any) -> list[str]:
    """Names of the tensors in which two models, or earlier copies, differ."""
    mine, its = (each if isinstance(each, dict) else tensors_of(each) for each in (one, other))
    assert mine.keys() == its.keys()
    return [name for name in mine if not th.equal(mine[name], its[name])]
