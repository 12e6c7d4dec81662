"""Replay buffer for ``Dict`` observations that draws transitions by priority."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from sb3_per.buffers.replay import PrioritizedReplayBuffer, Steps
from sb3_per.buffers.samples import PrioritizedDictReplayBufferSamples

__all__ = ["PrioritizedDictReplayBuffer"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]


class PrioritizedDictReplayBuffer(PrioritizedReplayBuffer, DictReplayBuffer):  # type: ignore[misc]
    """
    Prioritized replay buffer for ``Dict`` observations; everything else is as in
    :class:`PrioritizedReplayBuffer`, including n-step returns, which SB3 does not support with
    ``Dict`` observations.

    :param buffer_size: maximum number of transitions, over all environments
    :param observation_space: observation space, a ``Dict``
    :param action_space: action space
    :param device: PyTorch device of the batches
    :param n_envs: number of parallel environments
    :param optimize_memory_usage: not supported, as in SB3's ``DictReplayBuffer``
    :param handle_timeout_termination: whether to bootstrap at the time limit of an episode
    :param alpha: strength of the prioritization, at least 0
    :param beta: strength of the importance-sampling correction, in ``[0, 1]``
    :param beta_increment: increment of ``beta`` per call of ``anneal_beta``, at least 0
    :param eps: constant added to every absolute TD error, at least 0
    :param n_steps: length of the n-step returns, at least 1
    :param gamma: discount factor for n-step returns, in ``[0, 1]``
    :param weight_normalization: ``"batch"`` or ``"buffer"``
    :param prioritization: ``"proportional"`` or ``"rank"``
    :raises ValueError: if an option is out of its range
    """

    observations: dict[str, Array]
    next_observations: dict[str, Array]
    _batch_type = PrioritizedDictReplayBufferSamples
    _counterparts: tuple[type[ReplayBuffer], ...] = (DictReplayBuffer,)

    @classmethod
    def _check_storage(
        cls, observation_space: spaces.Space[Any], optimize_memory_usage: bool
    ) -> None:
        if not isinstance(observation_space, spaces.Dict):
            raise ValueError(
                f"{cls.__name__} stores Dict observations, got the observation space "
                f"{observation_space}; use PrioritizedReplayBuffer"
            )
        if optimize_memory_usage:
            raise ValueError(
                "`optimize_memory_usage=True` is not supported with Dict observations, got the "
                f"observation space {observation_space}"
            )

    def add(  # type: ignore[override]
        self,
        obs: dict[str, Array],
        next_obs: dict[str, Array],
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Store one transition of each environment, with the largest stored priority.

        :param obs: arrays of shape ``(n_envs, *observation)``, one for each key
        :param next_obs: the observation after the step (of the same episode), same shapes
        :param action: shape ``(n_envs, *action)``
        :param reward: shape ``(n_envs,)``
        :param done: whether the episode ended, shape ``(n_envs,)``
        :param infos: one dict for each environment; ``"TimeLimit.truncated"`` is read
        """
        # Copies, because SB3 puts reshaped arrays into the dict that it gets
        super().add(dict(obs), dict(next_obs), action, reward, done, infos)  # type: ignore[arg-type]

    def _observation_steps(self, name: str, obs: Any, n: int) -> dict[str, Array]:
        shapes: Any = self.obs_shape
        if not isinstance(obs, Mapping) or set(obs) != set(shapes):
            given = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
            raise ValueError(f"`{name}` must map {sorted(shapes)} to arrays, got {given}")
        return {
            key: self._steps_of(f"{name}[{key!r}]", obs[key], n, shape)
            for key, shape in shapes.items()
        }

    def _store_observations(self, first: int, steps: Steps, start: int, stop: int) -> None:
        last = first + stop - start
        for key in self.observations:
            self.observations[key][first:last] = steps.observations[key][start:stop]
            self.next_observations[key][first:last] = steps.next_observations[key][start:stop]

    def _observations_at(
        self, storage: dict[str, Array], indices: IntArray, env: VecNormalize | None
    ) -> dict[str, th.Tensor]:
        observations = {
            key: self._flat(array).take(indices, axis=0) for key, array in storage.items()
        }
        normalized = self._normalize_obs(observations, env)
        return {key: self._to_tensor(array) for key, array in normalized.items()}  # type: ignore[union-attr]
