"""Types of the batches."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.type_aliases import TensorDict

__all__ = ["PrioritizedDictReplayBufferSamples", "PrioritizedReplayBufferSamples"]


class PrioritizedReplayBufferSamples(NamedTuple):
    """
    A batch drawn by priority: the fields of SB3's ``ReplayBufferSamples``, then two more.

    :param observations: shape ``(batch, *observation)``
    :param actions: shape ``(batch, action_dim)``
    :param next_observations: observations ``n_steps`` later, or at the end of the episode if that
        comes first; shape as ``observations``
    :param dones: float32, shape ``(batch, 1)``: 1 where the episode terminated, 0 where it
        continued or was truncated by a time limit
    :param rewards: float32, shape ``(batch, 1)``: (discounted n-step) return up to
        ``next_observations``
    :param discounts: float32, shape ``(batch, 1)``: discount of the value of
        ``next_observations``; None if ``n_steps`` is 1: then it is the algorithm's ``gamma``
    :param weights: importance-sampling weights, float32, shape ``(batch, 1)``, in ``[0, 1]``
    :param indices: positions of the transitions, int64, shape ``(batch,)``:
        ``row * n_envs + env``; for ``update_priorities``
    """

    observations: th.Tensor
    actions: th.Tensor
    next_observations: th.Tensor
    dones: th.Tensor
    rewards: th.Tensor
    discounts: th.Tensor | None
    weights: th.Tensor
    indices: npt.NDArray[np.int64]


class PrioritizedDictReplayBufferSamples(NamedTuple):
    """
    A batch drawn by priority with ``Dict`` observations: a tensor for each key, shape
    ``(batch, *observation)``.

    :param observations: one tensor for each key
    :param actions: as in :class:`PrioritizedReplayBufferSamples`
    :param next_observations: one tensor for each key
    :param dones: as in :class:`PrioritizedReplayBufferSamples`
    :param rewards: as in :class:`PrioritizedReplayBufferSamples`
    :param discounts: as in :class:`PrioritizedReplayBufferSamples`
    :param weights: as in :class:`PrioritizedReplayBufferSamples`
    :param indices: as in :class:`PrioritizedReplayBufferSamples`
    """

    observations: TensorDict
    actions: th.Tensor
    next_observations: TensorDict
    dones: th.Tensor
    rewards: th.Tensor
    discounts: th.Tensor | None
    weights: th.Tensor
    indices: npt.NDArray[np.int64]
