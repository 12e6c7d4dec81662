"""TD errors of the transitions in a replay buffer, under the current networks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_per.buffers import (
    PrioritizedDictReplayBuffer,
    PrioritizedHerReplayBuffer,
    PrioritizedReplayBuffer,
)
from sb3_per.common.off_policy import PrioritizedOffPolicyAlgorithm

__all__ = ["check_has_td_errors", "drawable_indices", "replay_buffer_of", "td_errors_in_buffer"]

#: Prioritized counterparts of SB3's buffers, by which these are read
COUNTERPARTS: dict[type[ReplayBuffer], type[PrioritizedReplayBuffer]] = {
    ReplayBuffer: PrioritizedReplayBuffer,
    NStepReplayBuffer: PrioritizedReplayBuffer,
    DictReplayBuffer: PrioritizedDictReplayBuffer,
    HerReplayBuffer: PrioritizedHerReplayBuffer,
}

#: Number of transitions that go through the networks at once
CHUNK = 1024

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

#: From observations to Q-values, shape ``(batch, n_actions)``
ValueFunction = Callable[[Any], th.Tensor]


def drawable_indices(buffer: ReplayBuffer) -> IntArray:
    """
    Stored transitions that can be drawn. Left out are the oldest row of a full buffer with
    ``optimize_memory_usage``, whose next observation is overwritten, and, with hindsight experience
    replay, transitions of episodes that have not finished.

    :param buffer: one of SB3's or of this package
    :return: transitions ``row * n_envs + env``, ascending, shape ``(n,)``
    """
    if isinstance(buffer, PrioritizedReplayBuffer):
        return np.flatnonzero(buffer.drawable())
    if isinstance(buffer, HerReplayBuffer):
        return np.flatnonzero(buffer.ep_length[: buffer.size()] > 0)
    indices: IntArray = np.arange(buffer.size() * buffer.n_envs)
    if buffer.optimize_memory_usage and buffer.full:
        indices = indices[indices // buffer.n_envs != buffer.pos]
    return indices


def td_errors_in_buffer(model: BaseAlgorithm, indices: npt.ArrayLike | None = None) -> FloatArray:
    """
    TD errors of stored transitions under the current networks: target minus Q-value, with the
    targets that ``train`` uses (n-step returns, double Q-learning, time limits, VecNormalize).

    Nothing changes: no random number is drawn, no gradient is left, every module keeps its mode.
    Dropout and batch normalization are in evaluation mode. With hindsight experience replay, errors
    are those for the agent's original goals. The Q-values of a quantile network are the means of
    its quantiles; the priorities of PERQRDQN, which come from a distance between distributions,
    use an error at least as large as this one.

    TD errors of PERSAC, PERTD3, PERDDPG and PERTQC are those of their method ``td_errors``: the
    mean absolute error of the critics, with next actions and noise of the target drawn as in
    training.

    :param model: DQN, QRDQN, an algorithm of this package, or one derived from these
    :param indices: stored transitions, ``row * n_envs + env``, shape ``(n,)``; all of
        :func:`drawable_indices` by default
    :return: one signed TD error for each, shape ``(n,)``
    :raises IndexError: if an index is not that of a stored transition
    :raises ValueError: if one can't be drawn, the algorithm is not one of the above, or the class
        of its buffer is neither one of SB3's nor of this package

    >>> from sb3_per import PERDQN
    >>> model = PERDQN("MlpPolicy", "CartPole-v1", learning_starts=50, seed=1).learn(200)
    >>> td_errors_in_buffer(model).shape
    (200,)
    """
    check_has_td_errors(model)
    buffer = replay_buffer_of(model)
    chosen = drawable_indices(buffer)
    if indices is not None:
        chosen = _check_drawable(np.asarray(indices), buffer, chosen)
    source = _as_prioritized(buffer)
    env = model.get_vec_normalize_env()
    errors = np.empty(len(chosen))
    cuda = [model.device] if model.device.type == "cuda" else []
    with _evaluation_mode(model.policy), th.no_grad(), th.random.fork_rng(cuda):
        for start in range(0, len(chosen), CHUNK):
            chunk = slice(start, start + CHUNK)
            batch = source.batch_of(chosen[chunk], env)
            errors[chunk] = _td_errors(model, batch).double().cpu().numpy().ravel()
    return errors


def replay_buffer_of(model: BaseAlgorithm) -> ReplayBuffer:
    """
    :param model: any algorithm
    :return: its replay buffer
    :raises ValueError: if it has none
    """
    buffer = getattr(model, "replay_buffer", None)
    if not isinstance(buffer, ReplayBuffer):
        raise ValueError(
            f"an off-policy algorithm with a replay buffer is needed, {type(model).__name__} has "
            f"{'none' if buffer is None else f'a {type(buffer).__name__}'}"
        )
    return buffer


def check_has_td_errors(model: BaseAlgorithm) -> None:
    """
    :param model: any algorithm
    :raises ValueError: if it has no Q-values, no replay buffer, or a buffer of an unsupported class
    """
    buffer = replay_buffer_of(model)
    if not _tells_td_errors(model):
        _value_functions(model)
    if not isinstance(buffer, PrioritizedReplayBuffer) and type(buffer) not in COUNTERPARTS:
        raise ValueError(
            "TD errors are computed from a prioritized buffer or one of SB3's "
            f"{', '.join(cls.__name__ for cls in COUNTERPARTS)}, got a {type(buffer).__name__}"
        )


def _value_functions(model: Any) -> tuple[ValueFunction, ValueFunction]:
    """
    :param model: any algorithm
    :return: Q-values of its network and of its target network
    :raises ValueError: if it has none
    """
    if hasattr(model, "q_net_target"):
        return model.q_net, model.q_net_target
    if hasattr(model, "quantile_net_target"):
        # Quantiles have the shape (batch, n_quantiles, n_actions)
        return (
            lambda observations: model.quantile_net(observations).mean(dim=1),
            lambda observations: model.quantile_net_target(observations).mean(dim=1),
        )
    raise ValueError(
        "TD errors need the Q-values of discrete actions or an algorithm with prioritized replay: "
        f"give DQN, QRDQN, one of this package or one derived from them, got {type(model).__name__}"
    )


def _tells_td_errors(model: BaseAlgorithm) -> bool:
    """
    :param model: any algorithm
    :return: whether its method ``td_errors`` is used: for actor-critics, whose targets need more
        than a Q-network
    """
    actions = model.action_space
    return isinstance(model, PrioritizedOffPolicyAlgorithm) and isinstance(actions, spaces.Box)


def _td_errors(model: Any, batch: Any) -> th.Tensor:
    """
    :param model: algorithm with Q-values, or with a method ``td_errors``
    :param batch: batch from its buffer
    :return: targets minus Q-values, shape ``(batch, 1)``
    """
    if _tells_td_errors(model):
        errors: th.Tensor = model.td_errors(batch)
        return errors
    values, target_values = _value_functions(model)
    next_values = target_values(batch.next_observations)  # (batch, n_actions)
    # An option of this package's algorithms; SB3's don't have it
    is_double = getattr(model, "double_q", False)
    chooser = values(batch.next_observations) if is_double else next_values
    next_values = next_values.gather(1, chooser.argmax(dim=1, keepdim=True))  # (batch, 1)
    discounts = model.gamma if batch.discounts is None else batch.discounts
    # The value of the observation after the end of an episode does not count, even if it is NaN
    targets = th.where(batch.dones > 0, batch.rewards, batch.rewards + discounts * next_values)
    return targets - values(batch.observations).gather(1, batch.actions.long())


def _check_drawable(
    indices: npt.NDArray[Any], buffer: ReplayBuffer, drawable: IntArray
) -> IntArray:
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise ValueError(
            f"`indices` must be integers of shape (n,), got {indices.dtype} of {indices.shape}"
        )
    n_stored = buffer.size() * buffer.n_envs
    outside = (indices < 0) | (indices >= n_stored)
    if outside.any():
        raise IndexError(
            f"index {indices[outside][0]} is not that of a stored transition: there are "
            f"{n_stored}, numbered from 0"
        )
    faulty = ~np.isin(indices, drawable)
    if faulty.any():
        raise ValueError(
            f"transition {indices[faulty][0]} can't be drawn now, and has no TD error: see "
            "`drawable_indices`"
        )
    return indices.astype(np.int64)


def _as_prioritized(buffer: ReplayBuffer) -> PrioritizedReplayBuffer:
    """
    SB3's buffers don't return the batch for given transitions. The prioritized counterpart does,
    with the same numbers in it.

    :param buffer: see :func:`check_has_td_errors`; it is not changed
    :return: a buffer with the same arrays
    """
    if isinstance(buffer, PrioritizedReplayBuffer):
        return buffer
    return COUNTERPARTS[type(buffer)].from_replay_buffer(buffer)


@contextmanager
def _evaluation_mode(policy: BasePolicy) -> Iterator[None]:
    """
    Set a policy to evaluation mode inside the ``with`` block; afterwards, each of its modules is
    back in its previous mode.

    :param policy: the policy
    """
    was_training = policy.training
    modes = [(module, module.training) for module in policy.modules()]
    policy.set_training_mode(False)
    try:
        yield
    finally:
        policy.set_training_mode(was_training)
        # Parents come before their children, since setting a mode sets it for children, too
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
