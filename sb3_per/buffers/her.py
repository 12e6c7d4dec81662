"""Hindsight experience replay that draws transitions by priority."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.her.goal_selection_strategy import (
    KEY_TO_GOAL_STRATEGY,
    GoalSelectionStrategy,
)
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_per.buffers.dictionary import PrioritizedDictReplayBuffer
from sb3_per.buffers.replay import SelfBuffer, Steps, check_size

__all__ = ["PrioritizedHerReplayBuffer"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]


class PrioritizedHerReplayBuffer(PrioritizedDictReplayBuffer, HerReplayBuffer):  # type: ignore[misc]
    """
    Hindsight experience replay (Andrychowicz et al. 2017) with draws by priority.

    As in SB3's ``HerReplayBuffer``, the share ``n_sampled_goal / (n_sampled_goal + 1)`` of a batch
    is relabeled: it gets a goal that was achieved in the same episode, and the reward for it. The
    transitions to relabel are chosen at random in each batch.

    A transition has one priority, that of its latest TD error, whatever goal it was replayed with.
    The importance-sampling weight corrects for the probability of a transition; the goals are drawn
    uniformly, so that they need no correction.

    Transitions of an unfinished episode have zero mass, since their goals are not known yet; when
    it ends, all of them get the largest stored priority. When the first row of an episode is
    overwritten, the rest of it loses its mass, as SB3 no longer draws it either.

    :param buffer_size: maximum number of transitions, over all environments
    :param observation_space: ``Dict`` with ``observation``, ``achieved_goal``, ``desired_goal``
    :param action_space: action space
    :param env: training environment, with a method ``compute_reward``
    :param device: PyTorch device of the batches
    :param n_envs: number of parallel environments
    :param optimize_memory_usage: not supported, as in SB3
    :param handle_timeout_termination: whether to bootstrap at the time limit of an episode
    :param n_sampled_goal: number of relabeled transitions for each real one
    :param goal_selection_strategy: ``"future"``, ``"final"`` or ``"episode"``
    :param copy_info_dict: whether to pass the stored infos to ``compute_reward``
    :param options: the keyword-only options of :class:`PrioritizedReplayBuffer`; ``n_steps`` must
        be 1, because the rewards of the steps in between would belong to another goal
    :raises ValueError: if an option is out of its range
    """

    _counterparts = (HerReplayBuffer,)
    _content = (
        *PrioritizedDictReplayBuffer._content,
        "_current_ep_start",
        "ep_length",
        "ep_start",
        "infos",
    )

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        env: VecEnv,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        if not (isinstance(n_sampled_goal, int | float | np.number) and n_sampled_goal >= 0):
            raise ValueError(f"`n_sampled_goal` must be at least 0, got {n_sampled_goal!r}")
        if isinstance(goal_selection_strategy, str):
            strategy = KEY_TO_GOAL_STRATEGY.get(goal_selection_strategy.lower())
        else:
            strategy = goal_selection_strategy
        if not isinstance(strategy, GoalSelectionStrategy):
            raise ValueError(
                f"`goal_selection_strategy` must be one of {sorted(KEY_TO_GOAL_STRATEGY)}, got "
                f"{goal_selection_strategy!r}"
            )
        self._entry_priority = 1.0
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            env=env,
            n_sampled_goal=n_sampled_goal,
            goal_selection_strategy=strategy,
            copy_info_dict=copy_info_dict,
            **options,
        )

    @property
    def n_steps(self) -> int:
        """Length of the returns: 1, because the rewards in between are for another goal."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        if check_size("n_steps", value) != 1:
            raise ValueError(
                f"`n_steps={value}` is not supported with hindsight experience replay: the "
                "rewards in between belong to another goal than the relabeled one"
            )
        self._n_steps = 1

    @classmethod
    def from_replay_buffer(
        cls: type[SelfBuffer], buffer: ReplayBuffer, **options: Any
    ) -> SelfBuffer:
        """
        Take over the content of SB3's ``HerReplayBuffer``, including its goals and its environment,
        each transition with a priority of 1.

        :param buffer: SB3's buffer; its arrays are taken over, not copied, so don't use it again
        :param options: the keyword-only options of :class:`PrioritizedReplayBuffer`
        :return: a prioritized buffer with the same transitions
        :raises ValueError: if an option is out of its range, or the buffer is of another kind
        """
        if isinstance(buffer, HerReplayBuffer):
            for name in ("env", "n_sampled_goal", "goal_selection_strategy", "copy_info_dict"):
                options[name] = getattr(buffer, name)
        return super().from_replay_buffer(buffer, **options)

    def set_env(self, env: VecEnv) -> None:
        """
        Set the environment that computes the rewards of relabeled transitions.

        :param env: training environment
        """
        self.env = env

    def __getstate__(self) -> dict[str, Any]:
        # As in SB3: environments can't be pickled in general
        return {name: value for name, value in super().__getstate__().items() if name != "env"}

    def reset(self) -> None:
        """Remove all transitions, their priorities and their episodes."""
        super().reset()
        self.ep_start[:] = 0
        self.ep_length[:] = 0
        self._current_ep_start[:] = 0

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
        Store one transition of each environment; it can be drawn when its episode has ended.

        :param obs: arrays of shape ``(n_envs, *observation)``, one for each key
        :param next_obs: the observation after the step (of the same episode), same shapes
        :param action: shape ``(n_envs, *action)``
        :param reward: shape ``(n_envs,)``
        :param done: whether the episode ended, shape ``(n_envs,)``
        :param infos: one dict for each environment; ``"TimeLimit.truncated"`` is read
        """
        self._forget_overwritten()
        super().add(obs, next_obs, action, reward, done, infos)

    def _forget_overwritten(self) -> None:
        """Forget the whole rest of each episode whose next row is about to be overwritten."""
        self._entry_priority = self.tree.max_priority or 1.0
        for env in np.flatnonzero(self.ep_length[self.pos] > 0):
            end = self.ep_start[self.pos, env] + self.ep_length[self.pos, env]
            rest = np.arange(self.pos, end if end > self.pos else end + self.buffer_size)
            rest %= self.buffer_size
            self.ep_length[rest, env] = 0
            self.tree.update(rest * self.n_envs + env, 0.0)

    def _store_run(self, steps: Steps, start: int, stop: int) -> int:
        ends = np.flatnonzero(steps.dones[start:stop].any(axis=1))
        if ends.size:
            stop = start + int(ends[0]) + 1
        self._forget_overwritten()
        first, last = self.pos, self.pos + stop - start
        others = np.flatnonzero((self.ep_length[first + 1 : last] > 0).any(axis=1))
        if others.size:
            # Another old episode begins there
            stop = start + 1 + int(others[0])
        last = first + stop - start
        if stop - start > 1:
            # Each step reads the maximum again; dropped transitions no longer count
            self._entry_priority = self.tree.max_priority or 1.0
        self.ep_start[first:last] = self._current_ep_start
        if self.copy_info_dict:
            for step in range(start, stop):
                infos = [{}] * self.n_envs if steps.infos is None else steps.infos[step]
                self.infos[first + step - start] = infos
        super()._store_run(steps, start, stop)
        for env in np.flatnonzero(steps.dones[stop - 1]):
            self._compute_episode_length(int(env))
        return stop

    def _admit(self, start: int, stop: int, priority: float) -> None:
        # In `add`, the end of an episode came first: it let in all of its rows, this one included
        running = np.flatnonzero(self._flat(self.ep_length)[start:stop] == 0)
        self.tree.update(start + running, 0.0)

    def _compute_episode_length(self, env_idx: int) -> None:
        first = self._current_ep_start[env_idx]
        super()._compute_episode_length(env_idx)
        rows = (first + np.arange(self.ep_length[first, env_idx])) % self.buffer_size
        self.tree.update(rows * self.n_envs + env_idx, self._entry_priority)

    def truncate_last_trajectory(self) -> None:
        """
        Truncate the episodes in progress, so that they can be drawn: the environments are about to
        be reset. The last transition of each bootstraps from its next observation.
        """
        self._entry_priority = self.tree.max_priority or 1.0
        super().truncate_last_trajectory()
        for env in np.flatnonzero(self._current_ep_start != self.pos):
            self._compute_episode_length(int(env))

    def batch_of(self, indices: IntArray, env: VecNormalize | None = None) -> Any:
        """
        Return the batch for given transitions, without a draw, with the agent's original goals.

        :param indices: stored transitions that can be drawn, int64, shape ``(batch,)``:
            ``row * n_envs + env``
        :param env: environment that normalizes the observations and rewards of the batch, if given
        :return: the batch, with weights as if these transitions had been drawn
        """
        weights = self._weights_of(self.tree.masses(indices))
        return super()._get_samples(indices, env)._replace(weights=weights)

    def _is_drawable(self, indices: IntArray) -> npt.NDArray[np.bool_]:
        drawable: npt.NDArray[np.bool_] = self._flat(self.ep_length)[indices] > 0
        return drawable

    def _why_nothing_can_be_drawn(self) -> str:
        if self.n_transitions and not (self.ep_length > 0).any():
            return (
                f"none of the {self.n_transitions} stored transitions belongs to an episode that "
                "is over: hindsight needs whole episodes. Choose `learning_starts`, and "
                f"`buffer_size` (now {self.buffer_size} rows), larger than the longest episode."
            )
        return super()._why_nothing_can_be_drawn()

    def _get_samples(self, batch_inds: IntArray, env: VecNormalize | None = None) -> Any:
        batch = super()._get_samples(batch_inds, env)
        # At random, because a draw by priority is in the order of the rows
        n_relabeled = int(self.her_ratio * len(batch_inds))
        chosen = np.random.permutation(len(batch_inds))[:n_relabeled]
        if n_relabeled:
            rows, envs = np.divmod(batch_inds[chosen], self.n_envs)
            relabeled = self._get_virtual_samples(rows, envs, env)
            for ours, new in (
                (batch.observations, relabeled.observations),
                (batch.next_observations, relabeled.next_observations),
            ):
                for key in ours:
                    ours[key][chosen] = new[key]
            batch.rewards[chosen] = relabeled.rewards
        return batch
