"""Streams of steps for buffers of this package and of SB3, and comparisons to the last bit."""

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

Array = npt.NDArray[Any]

#: Rows of the buffers
ROWS = 7
#: One row only; half filled; one short of full; full with the position at 0, inside, at the last
N_ADDS = (1, 4, ROWS - 1, ROWS, 2 * ROWS + 3, 2 * ROWS - 1)

#: How a step ends: done, and "TimeLimit.truncated", which SB3's vectorized envs set only where the
#: episode did not terminate as well. The last two no env of SB3's sends, yet its buffers take them.
ENDINGS: list[tuple[bool, dict[str, Any]]] = [
    (False, {"TimeLimit.truncated": False}),
    (True, {"TimeLimit.truncated": False}),
    (True, {"TimeLimit.truncated": True}),
    (True, {}),
    (False, {"TimeLimit.truncated": True}),
]
SHARES = (0.6, 0.14, 0.14, 0.06, 0.06)


class Step(NamedTuple):
    """The arguments of ``add``."""

    obs: Any
    next_obs: Any
    action: Array
    reward: Array
    done: Array
    infos: list[dict[str, Any]]


def several(space: spaces.Space[Any], n_envs: int) -> Any:
    """Samples of a space for each environment; of a ``Dict`` space, key by key."""
    if isinstance(space, spaces.Dict):
        return {key: several(part, n_envs) for key, part in space.spaces.items()}
    return np.array([space.sample() for _ in range(n_envs)])


def stream(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    n_envs: int,
    n: int,
    seed: int = 0,
) -> tuple[Step, ...]:
    """Episodes of all kinds; within one, a next observation is the following observation."""
    rng = np.random.default_rng(seed)
    observation_space.seed(seed)
    action_space.seed(seed)

    def after(done: Array, first: Any, following: Any) -> Any:
        if isinstance(first, dict):
            return {key: after(done, first[key], following[key]) for key in first}
        return np.where(done.reshape(-1, *[1] * (first.ndim - 1)), first, following)

    steps = []
    obs = several(observation_space, n_envs)
    for _ in range(n):
        next_obs = several(observation_space, n_envs)
        ends = [ENDINGS[kind] for kind in rng.choice(len(SHARES), size=n_envs, p=SHARES)]
        done = np.array([end[0] for end in ends])
        infos = [dict(end[1]) for end in ends]
        rewards = rng.normal(0.0, 2.0, n_envs)
        actions = several(action_space, n_envs)
        steps.append(Step(obs, next_obs, actions, rewards, done, infos))
        obs = after(done, several(observation_space, n_envs), next_obs)
    return tuple(steps)


class IdleEnv(gym.Env[Any, Any]):
    """Never stepped: it only lends its spaces to a VecNormalize."""

    action_space = spaces.Discrete(4)

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        self.observation_space = observation_space


def normalizer(observation_space: spaces.Space[Any], **options: Any) -> VecNormalize:
    """With random statistics, always the same; ``options`` are those of VecNormalize."""
    venv = DummyVecEnv([lambda: IdleEnv(observation_space)])
    # The clip is narrow enough that some of the rewards reach it
    env = VecNormalize(venv, clip_reward=1.0, **options)
    rng = np.random.default_rng(0)
    if env.norm_obs:
        each = env.obs_rms.values() if isinstance(env.obs_rms, dict) else [env.obs_rms]
        for statistics in each:
            assert isinstance(statistics, RunningMeanStd)
            statistics.mean = rng.normal(size=statistics.mean.shape)
            statistics.var = rng.uniform(0.5, 4.0, statistics.var.shape)
    env.ret_rms.var = np.array(2.7)
    return env


def assert_bitwise_equal(
    ours: th.Tensor | None,
    theirs: th.Tensor | None,
    context: object,
    where: npt.NDArray[np.bool_] | slice = slice(None),
) -> None:
    if ours is None or theirs is None:
        assert ours is theirs, context
        return
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), context
    assert ours.device == theirs.device
    # Bytes: to == a zero of either sign is the same
    assert ours.numpy()[where].tobytes() == theirs.numpy()[where].tobytes(), context
