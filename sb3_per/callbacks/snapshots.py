"""Snapshots of a replay buffer, taken during training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from sb3_per.buffers.frames import PrioritizedFrameReplayBuffer
from sb3_per.buffers.importance import importance_sampling_weights
from sb3_per.buffers.replay import PrioritizedReplayBuffer, check_size
from sb3_per.callbacks.td_errors import (
    check_has_td_errors,
    drawable_indices,
    replay_buffer_of,
    td_errors_in_buffer,
)

__all__ = ["ReplaySnapshot", "ReplaySnapshotCallback"]

#: Largest number of elements of an observation that snapshots keep; images have more
LARGEST_OBSERVATION = 1024

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ReplaySnapshot:
    """
    Content of the replay buffer at one moment of training.

    :param episode: number of finished episodes for which it was taken, 0 for the start of
        learning; for ``reason="freq"``, number of episodes finished at that moment
    :param timesteps: number of environment steps, over all environments
    :param reason: ``"episode"`` or ``"freq"``
    :param n_transitions: number of stored transitions
    :param indices: stored transitions in the snapshot, ``row * n_envs + env``, ascending, shape
        ``(n,)``: all that can be drawn, or a random subset of them
    :param td_errors: their TD errors under the networks of that moment, signed with discrete
        actions, shape ``(n,)``
    :param priorities: their stored priorities, shape ``(n,)``; None without priorities
    :param probabilities: their probabilities, among all transitions of the buffer, shape ``(n,)``
    :param ages: environment steps since each was stored, 0 for the newest, shape ``(n,)``
    :param observations: their observations as stored, shape ``(n, *observation)``; None for Dict
        observations and for those of more than 1024 numbers
    :param sampled: draws among them, as in training, as positions in ``indices``, shape
        ``(n_draws,)``
    :param weights: importance-sampling weights of those draws, as in training, shape
        ``(n_draws,)``; None without priorities
    """

    episode: int
    timesteps: int
    reason: Literal["episode", "freq"]
    n_transitions: int
    indices: IntArray
    td_errors: FloatArray
    priorities: FloatArray | None
    probabilities: FloatArray
    ages: IntArray
    observations: npt.NDArray[Any] | None
    sampled: IntArray
    weights: FloatArray | None


class ReplaySnapshotCallback(BaseCallback):
    """
    Take snapshots of the replay buffer at chosen moments: TD errors, priorities, ages, and draws.

    Works for DQN, QRDQN and all prioritized algorithms, with any of their buffers. Training is
    the same, bit for bit, as without the callback: the callback has a separate random generator,
    seeded by the seed of the model.

    A snapshot for a number of episodes is taken as soon as the last transition of that episode is
    stored, after the update that may follow; with several environments, when at least that number
    of episodes have finished. Number 0 is the start of learning: just before the first update, with
    untrained networks and the transitions collected until then, or at the end of training if there
    is no update. ``learn(..., reset_num_timesteps=True)`` counts again from 0, and appends its
    snapshots to the existing ones.

    Inside a callback that does not call this one at every step (``EveryNTimesteps``,
    ``EvalCallback``), a snapshot is taken at the first call at which it is due, and number 0 at
    the last call before the first update, if calls come at equal intervals and one is early enough.

    :param episodes: numbers of finished episodes, at least 0
    :param freq: number of environment steps (over all environments) between further snapshots
    :param max_transitions: maximum number of transitions in a snapshot, which bounds time and
        memory; of more transitions, a random subset is taken
    :param n_draws: number of draws in each snapshot
    :param verbose: 1 prints a line for each snapshot
    :raises ValueError: if a number is out of its range, or, when training starts, the algorithm
        has no Q-values
    """

    def __init__(
        self,
        episodes: Sequence[int] = (0, 50, 100, 200),
        freq: int | None = None,
        max_transitions: int = 10_000,
        n_draws: int = 4096,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        for number in episodes:
            if not isinstance(number, int | np.integer) or number < 0:
                raise ValueError(f"`episodes` must be integers of at least 0, got {number!r}")
        self.episodes = tuple(sorted({int(number) for number in episodes}))
        self.freq = None if freq is None else check_size("freq", freq)
        self.max_transitions = check_size("max_transitions", max_transitions)
        self.n_draws = check_size("n_draws", n_draws)
        #: Snapshots in the order in which they were taken
        self.snapshots: list[ReplaySnapshot] = []
        self._rng: np.random.Generator | None = None
        #: Numbers of episodes whose snapshots are not taken yet
        self._due: list[int] = []
        self._next_time: float = np.inf
        self._is_step_stored = True
        #: Whether this callback is called at each step
        self._sees_rollouts = False
        self._last_call = 0

    # Not in `_on_training_start`, which SB3 doesn't call for every callback inside another
    def _init_callback(self) -> None:
        check_has_td_errors(self.model)
        if self._rng is None:
            self._rng = np.random.default_rng(self.model.seed)
        self._sees_rollouts = False
        self._is_step_stored = True
        n_finished, timesteps = self._n_finished(), self.model.num_timesteps
        self._last_call = timesteps
        if timesteps == 0:
            self._due = list(self.episodes)
        else:
            # Training continues
            self._due = [n for n in self.episodes if n > n_finished or n in self._due]
        if self.freq is not None:
            self._next_time = (timesteps // self.freq + 1) * self.freq

    def _n_finished(self) -> int:
        return cast(OffPolicyAlgorithm, self.model)._episode_num

    def _on_rollout_start(self) -> None:
        self._sees_rollouts = True

    def _on_step(self) -> bool:
        # SB3 calls this before it stores the step: the buffer is one step behind
        self._is_step_stored = False
        timesteps = self.num_timesteps - self.model.n_envs
        if self._sees_rollouts:
            self._take_what_is_due(timesteps, timesteps)
        else:
            next_call = 2 * self.num_timesteps - self._last_call
            self._last_call = self.num_timesteps
            if next_call > self._learning_starts():
                self._take_start(timesteps)
            self._take_what_is_due(timesteps, self.num_timesteps)
        return True

    def _learning_starts(self) -> int:
        return cast(OffPolicyAlgorithm, self.model).learning_starts

    def _on_rollout_end(self) -> None:
        self._is_step_stored = True
        # Updates follow now
        if self.model.num_timesteps > self._learning_starts():
            self._take_start(self.model.num_timesteps)

    def _on_training_end(self) -> None:
        # When a callback stops training, the last step is not stored
        unstored = 0 if self._is_step_stored else self.model.n_envs
        timesteps = self.model.num_timesteps - unstored
        self._take_start(timesteps)
        self._take_what_is_due(timesteps, timesteps)

    def _take_start(self, timesteps: int) -> None:
        if self._due[:1] == [0] and self._take(0, timesteps, "episode"):
            del self._due[0]

    def _take_what_is_due(self, timesteps: int, reached: int) -> None:
        """
        :param timesteps: number of environment steps stored
        :param reached: number of environment steps that is compared with ``freq``
        """
        n_finished = self._n_finished()
        for number in [number for number in self._due if 0 < number <= n_finished]:
            if self._take(number, timesteps, "episode"):
                self._due.remove(number)
        if reached >= self._next_time and self._take(n_finished, timesteps, "freq"):
            assert self.freq is not None
            self._next_time = (reached // self.freq + 1) * self.freq

    def _take(self, episode: int, timesteps: int, reason: Literal["episode", "freq"]) -> bool:
        """
        :param episode: number of finished episodes, see :class:`ReplaySnapshot`
        :param timesteps: number of environment steps stored
        :param reason: ``"episode"`` or ``"freq"``
        :return: whether there were transitions that can be drawn
        """
        assert self._rng is not None
        buffer = replay_buffer_of(self.model)
        indices = drawable_indices(buffer)
        n_drawable = len(indices)
        if not n_drawable:
            return False
        if n_drawable > self.max_transitions:
            indices = np.sort(self._rng.choice(indices, self.max_transitions, replace=False))
        priorities, weights = None, None
        if isinstance(buffer, PrioritizedReplayBuffer):
            everywhere = buffer.probabilities
            probabilities = everywhere[indices]
            if not probabilities.any():
                return False
            priorities = buffer.priorities[indices]
            sampled = self._draw(probabilities)
            weights = self._weights(buffer, probabilities[sampled], everywhere)
        else:
            probabilities = np.full(len(indices), 1.0 / n_drawable)
            sampled = self._draw(probabilities)
        self.snapshots.append(
            ReplaySnapshot(
                episode=episode,
                timesteps=timesteps,
                reason=reason,
                n_transitions=buffer.size() * buffer.n_envs,
                indices=indices,
                td_errors=td_errors_in_buffer(self.model, indices),
                priorities=priorities,
                probabilities=probabilities,
                ages=_ages(buffer, indices),
                observations=_first_observations(buffer, indices),
                sampled=sampled,
                weights=weights,
            )
        )
        if self.verbose >= 1:
            print(f"Replay snapshot at {timesteps} steps ({reason}, {episode} episodes)")
        return True

    def _draw(self, probabilities: FloatArray) -> IntArray:
        """
        Draw batches as the sum-tree does, one transition from each of ``batch_size`` equal masses.

        :param probabilities: shape ``(n,)``, not all of them zero
        :return: positions in it, batch after batch, shape ``(n_draws,)``
        """
        assert self._rng is not None
        cumulative = np.cumsum(probabilities)
        number_in_batch, size_of_batch = self._strata()
        masses = (number_in_batch + self._rng.random(self.n_draws)) / size_of_batch
        found = np.searchsorted(cumulative, masses * cumulative[-1], side="right")
        # Rounding can lead past the last transition that has mass
        last: int = int(np.flatnonzero(probabilities)[-1])
        positions: IntArray = np.minimum(found, last).astype(np.int64)
        return positions

    def _strata(self) -> tuple[IntArray, IntArray]:
        """
        :return: for each draw, its number in its batch, and the size of that batch, both of shape
            ``(n_draws,)``; the last batch may be smaller
        """
        draws: IntArray = np.arange(self.n_draws)
        batch_size = self._batch_size()
        starts = draws // batch_size * batch_size
        return draws - starts, np.minimum(batch_size, self.n_draws - starts)

    def _batch_size(self) -> int:
        return cast(OffPolicyAlgorithm, self.model).batch_size

    def _weights(
        self, buffer: PrioritizedReplayBuffer, probabilities: FloatArray, everywhere: FloatArray
    ) -> FloatArray:
        """
        :param buffer: buffer with the beta and the normalization of the weights
        :param probabilities: those of the draws, batch after batch, shape ``(n_draws,)``
        :param everywhere: probabilities of all stored transitions
        :return: weights of the draws, shape ``(n_draws,)``
        """
        smallest = None
        if buffer.weight_normalization == "buffer":
            smallest = float(everywhere[everywhere > 0.0].min())
        batch_size = self._batch_size()
        batches = np.split(probabilities, range(batch_size, len(probabilities), batch_size))
        return np.concatenate(
            [importance_sampling_weights(batch, buffer.beta, smallest) for batch in batches]
        )


def _ages(buffer: ReplayBuffer, indices: IntArray) -> IntArray:
    """
    :param buffer: SB3's or prioritized
    :param indices: stored transitions, shape ``(n,)``
    :return: number of environment steps since each was stored, over all environments, 0 for those
        stored last, shape ``(n,)``
    """
    rows_ago: IntArray = (buffer.pos - 1 - indices // buffer.n_envs) % buffer.buffer_size
    return rows_ago * buffer.n_envs


def _first_observations(buffer: ReplayBuffer, indices: IntArray) -> npt.NDArray[Any] | None:
    shape = buffer.obs_shape
    if isinstance(shape, dict) or math.prod(shape) > LARGEST_OBSERVATION:
        return None
    if isinstance(buffer, PrioritizedFrameReplayBuffer):
        stacks: npt.NDArray[Any] = buffer.batch_of(indices).observations.cpu().numpy()
        return stacks
    stored: Any = buffer.observations
    rows, envs = np.divmod(indices, buffer.n_envs)
    observations: npt.NDArray[Any] = stored[rows, envs]
    return observations
