"""Callbacks that look into the replay buffer while an agent trains."""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import TensorBoardOutputFormat
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_per.buffers.importance import importance_sampling_weights
from sb3_per.buffers.replay import PrioritizedReplayBuffer, check_size

__all__ = [
    "PERLoggerCallback",
    "ReplaySnapshot",
    "ReplaySnapshotCallback",
    "drawable_indices",
    "td_errors_in_buffer",
]

#: How many transitions go through the networks at once
CHUNK = 1024

#: Observations of more numbers than this (images) are not kept in snapshots
LARGEST_OBSERVATION = 1024

#: Quantiles of the priorities that are logged, in percent
QUANTILES = (5, 25, 50, 75, 95)

#: How many of the latest batches the histogram of replay ages is made of, at most
BATCHES_IN_HISTOGRAM = 1000

#: How many batches are counted together
BATCHES_AT_ONCE = 250

#: All formats of SB3's logger but TensorBoard
NO_HISTOGRAMS = ("stdout", "log", "json", "csv")

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


# TD errors of what is stored


def drawable_indices(buffer: ReplayBuffer) -> IntArray:
    """
    :param buffer: SB3's or prioritized
    :return: the stored transitions that a batch may contain, ascending, shape ``(n,)``:
        transition ``row * n_envs + env``. Left out are the oldest row of a full buffer with
        ``optimize_memory_usage``, whose next observation is gone, and, with hindsight experience
        replay, episodes that still run.
    """
    indices: IntArray = np.arange(buffer.size() * buffer.n_envs)
    if isinstance(buffer, PrioritizedReplayBuffer):
        drawable = buffer._is_drawable(indices)
        return indices if drawable is None else indices[drawable]
    if isinstance(buffer, HerReplayBuffer):
        indices = indices[buffer.ep_length[: buffer.size()].ravel() > 0]
    elif buffer.optimize_memory_usage and buffer.full:
        indices = indices[indices // buffer.n_envs != buffer.pos]
    return indices


def td_errors_in_buffer(model: BaseAlgorithm, indices: npt.ArrayLike | None = None) -> FloatArray:
    """
    TD errors of stored transitions under the networks as they are now: target minus Q-value, with
    the targets that ``train`` uses (n-step returns, double Q-learning, time limits, VecNormalize).

    Nothing changes: no random number is drawn, no gradient is left, every module keeps its mode.
    Dropout and batch normalization work as when acting. With hindsight experience replay, errors
    are those for the goals that the agent had. The values of a quantile network are the means of
    its quantiles; what PERQRDQN makes priorities of, a distance of distributions, is at least as
    large as this error.

    :param model: DQN, QRDQN, PERDQN, PERQRDQN, or an algorithm derived from one
    :param indices: which transitions, numbers ``row * n_envs + env``, shape ``(n,)``; all of
        :func:`drawable_indices` by default
    :return: one signed TD error for each, shape ``(n,)``
    :raises IndexError: if an index is not that of a stored transition
    :raises ValueError: if one can't be drawn, or the algorithm is none of the above

    >>> from sb3_per import PERDQN
    >>> model = PERDQN("MlpPolicy", "CartPole-v1", learning_starts=50, seed=1).learn(200)
    >>> td_errors_in_buffer(model).shape
    (200,)
    """
    buffer = _replay_buffer_of(model)
    _check_has_q_values(model)
    drawable = drawable_indices(buffer)
    places = drawable if indices is None else _check_drawable(np.asarray(indices), buffer, drawable)
    errors = np.empty(len(places))
    env = model.get_vec_normalize_env()
    with _evaluation_mode(model.policy), th.no_grad(), th.random.fork_rng(_cuda(model)):
        for start in range(0, len(places), CHUNK):
            chunk = slice(start, start + CHUNK)
            order, batch = _batch_at(buffer, places[chunk], env)
            errors[chunk][order] = _td_errors(model, batch).cpu().numpy().ravel()
    return errors


def _replay_buffer_of(model: BaseAlgorithm) -> ReplayBuffer:
    buffer = getattr(model, "replay_buffer", None)
    if not isinstance(buffer, ReplayBuffer):
        raise ValueError(
            f"an off-policy algorithm with a replay buffer is needed, {type(model).__name__} has "
            f"{'none' if buffer is None else f'a {type(buffer).__name__}'}"
        )
    return buffer


def _check_has_q_values(model: BaseAlgorithm) -> None:
    if not (hasattr(model, "q_net_target") or hasattr(model, "quantile_net_target")):
        raise ValueError(
            "TD errors need the Q-values of discrete actions: give DQN, QRDQN or an algorithm "
            f"derived from one, got {type(model).__name__}"
        )


def _check_drawable(
    indices: npt.NDArray[Any], buffer: ReplayBuffer, drawable: IntArray
) -> IntArray:
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise ValueError(
            f"`indices` must be integers of shape (n,), got {indices.dtype} of {indices.shape}"
        )
    n_stored = buffer.size() * buffer.n_envs
    places: IntArray = indices.astype(np.int64)
    outside = (places < 0) | (places >= n_stored)
    if outside.any():
        raise IndexError(
            f"index {places[outside][0]} is not that of a stored transition: there are "
            f"{n_stored}, numbered from 0"
        )
    can_be_drawn = np.zeros(n_stored, dtype=bool)
    can_be_drawn[drawable] = True
    if not can_be_drawn[places].all():
        raise ValueError(
            f"transition {places[~can_be_drawn[places]][0]} can't be drawn now, and has no TD "
            "error: see `drawable_indices`"
        )
    return places


@contextmanager
def _evaluation_mode(policy: th.nn.Module) -> Iterator[None]:
    """
    :param policy: whose modules are in evaluation mode inside the ``with`` block, and afterwards
        each in the mode it was in
    """
    modes = [(module, module.training) for module in policy.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _cuda(model: BaseAlgorithm) -> list[th.device]:
    return [model.device] if model.device.type == "cuda" else []


def _batch_at(
    buffer: ReplayBuffer, indices: IntArray, env: VecNormalize | None
) -> tuple[IntArray, Any]:
    """
    What ``sample`` returns, for given transitions, without a random draw.

    :param buffer: SB3's or prioritized
    :param indices: transitions that can be drawn, shape ``(n,)``
    :param env: normalizes observations and rewards, if given
    :return: which of ``indices`` each row of the batch is, shape ``(n,)``, and the batch
    """
    order: IntArray = np.arange(len(indices))
    if isinstance(buffer, PrioritizedReplayBuffer):
        return order, buffer.batch_of(indices, env)
    rows, envs = np.divmod(indices, buffer.n_envs)
    if isinstance(buffer, HerReplayBuffer):
        return order, buffer._get_real_samples(rows, envs, env)
    return _batch_of_sb3(buffer, rows, envs, env)


def _batch_of_sb3(
    buffer: ReplayBuffer, rows: IntArray, envs: IntArray, env: VecNormalize | None
) -> tuple[IntArray, Any]:
    """
    SB3 lets one name the rows of a batch, but draws the environments itself. So each environment
    gets a buffer of its own, whose arrays are views of its columns, and in which there is nothing
    to draw.

    :param buffer: one of SB3's
    :param rows: shape ``(n,)``
    :param envs: shape ``(n,)``
    :param env: normalizes observations and rewards, if given
    :return: which of the given each row of the batch is, shape ``(n,)``, and the batch
    """
    state = np.random.get_state()
    try:
        orders, batches = [], []
        for number in np.unique(envs):
            column = slice(number, number + 1)
            single = copy(buffer)
            single.n_envs = 1
            for name in ("actions", "rewards", "dones", "timeouts"):
                setattr(single, name, getattr(buffer, name)[:, column])
            names = ["observations"] if buffer.optimize_memory_usage else OBSERVATIONS
            for name in names:
                stored: Any = getattr(buffer, name)
                if isinstance(stored, dict):
                    setattr(single, name, {key: array[:, column] for key, array in stored.items()})
                else:
                    setattr(single, name, stored[:, column])
            chosen = np.flatnonzero(envs == number)
            orders.append(chosen)
            batches.append(single._get_samples(rows[chosen], env))
    finally:
        np.random.set_state(state)
    columns = zip(*batches, strict=True)
    return np.concatenate(orders), type(batches[0])(*(_concatenate(parts) for parts in columns))


OBSERVATIONS = ["observations", "next_observations"]


def _concatenate(parts: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    if isinstance(parts[0], dict):
        return {key: th.cat([part[key] for part in parts]) for key in parts[0]}
    return th.cat(list(parts))


def _td_errors(model: Any, batch: Any) -> th.Tensor:
    """
    :param model: with Q-values or quantiles of them
    :param batch: from its buffer
    :return: targets minus Q-values, shape ``(batch, 1)``
    """
    discounts = getattr(batch, "discounts", None)
    if discounts is None:
        discounts = model.gamma
    outcome = batch.next_observations, batch.rewards, batch.dones, discounts
    # Targets of the algorithm's own, if it has a method for them; of SB3's, those of its `train`
    if hasattr(model, "quantile_net_target"):
        q_values = model.quantile_net(batch.observations).mean(dim=1)  # (batch, n_actions)
        if hasattr(model, "_target_quantiles"):
            targets = model._target_quantiles(batch).mean(dim=1, keepdim=True)  # (batch, 1)
        else:
            next_q_values = model.quantile_net_target(batch.next_observations).mean(dim=1)
            targets = _targets(next_q_values, *outcome[1:])
    else:
        q_values = model.q_net(batch.observations)  # (batch, n_actions)
        if hasattr(model, "_target_q_values"):
            targets = model._target_q_values(batch)  # (batch, 1)
        else:
            targets = _targets(model.q_net_target(batch.next_observations), *outcome[1:])
    return cast(th.Tensor, targets - q_values.gather(1, batch.actions.long()))


def _targets(
    next_q_values: th.Tensor,
    rewards: th.Tensor,
    dones: th.Tensor,
    discounts: th.Tensor | float,
) -> th.Tensor:
    """
    :param next_q_values: shape ``(batch, n_actions)``
    :param rewards: shape ``(batch, 1)``
    :param dones: shape ``(batch, 1)``
    :param discounts: a number, or shape ``(batch, 1)``
    :return: what the Q-values should be, shape ``(batch, 1)``
    """
    return rewards + (1 - dones) * discounts * next_q_values.max(dim=1, keepdim=True).values


# Snapshots


@dataclass(frozen=True, eq=False)
class ReplaySnapshot:
    """
    What was in the replay buffer at one moment of training.

    :param episode: what it was taken for: the number of finished episodes, with 0 for the start
        of learning; of a snapshot along time, how many episodes were over
    :param timesteps: environment steps made, of all environments together
    :param reason: ``"episode"`` or ``"freq"``
    :param n_transitions: how many transitions were stored
    :param indices: the stored transitions that were looked at, ``row * n_envs + env``, ascending,
        shape ``(n,)``: all that can be drawn, or a random choice of them
    :param td_errors: their signed TD errors under the networks of that moment, shape ``(n,)``
    :param priorities: their priorities as stored, shape ``(n,)``; None without priorities
    :param probabilities: of each to be drawn, among all in the buffer, shape ``(n,)``
    :param ages: environment steps since each was stored, 0 for the newest, shape ``(n,)``
    :param observations: where each starts, as stored, shape ``(n, *observation)``; None for Dict
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
    Keep what is in the replay buffer at chosen moments: TD errors, priorities, ages, and draws.

    Works for DQN, QRDQN and the prioritized algorithms, with any of their buffers. Training is
    the same, to the last bit, as without the callback: it has random numbers of its own, from the
    seed of the model.

    A snapshot for a number of episodes is taken as soon as the last transition of that episode
    is stored, after the update that may follow, with several environments when at least as many
    episodes are over. Number 0 is the start of learning: just before the first update, with
    untrained networks and what was collected until then, or at the end of a training that never
    updates. ``learn(..., reset_num_timesteps=True)`` counts anew, and its snapshots come after
    those that are there.

    :param episodes: numbers of finished episodes, at least 0
    :param freq: take one every so many environment steps, too (of all environments together)
    :param max_transitions: of more transitions, look at a random choice of so many; this bounds
        time and memory
    :param n_draws: how many draws each snapshot contains
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
        #: In the order in which they were taken
        self.snapshots: list[ReplaySnapshot] = []
        self._rng: np.random.Generator | None = None
        self._due: list[int] = []
        self._next_time: float = np.inf
        self._is_step_stored = True

    def _init_callback(self) -> None:
        _replay_buffer_of(self.model)
        _check_has_q_values(self.model)
        if self._rng is None:
            self._rng = np.random.default_rng(self.model.seed)

    def _on_training_start(self) -> None:
        n_finished, timesteps = self._n_finished(), self.model.num_timesteps
        self._is_step_stored = True
        if timesteps == 0:
            self._due = list(self.episodes)
        else:
            # Training goes on: only what is still to come
            self._due = [number for number in self.episodes if number > n_finished]
        if self.freq is not None:
            self._next_time = (timesteps // self.freq + 1) * self.freq

    def _n_finished(self) -> int:
        return cast(OffPolicyAlgorithm, self.model)._episode_num

    def _on_step(self) -> bool:
        # SB3 calls this before it stores the step: what is stored is one step behind
        self._is_step_stored = False
        self._take_what_is_due(self.num_timesteps - self.model.n_envs)
        return True

    def _on_rollout_end(self) -> None:
        self._is_step_stored = True
        # Updates follow now
        if self.model.num_timesteps > cast(OffPolicyAlgorithm, self.model).learning_starts:
            self._take_start(self.model.num_timesteps)

    def _on_training_end(self) -> None:
        # Stopped by a callback, training ends before the last step is stored
        unstored = 0 if self._is_step_stored else self.model.n_envs
        timesteps = self.model.num_timesteps - unstored
        self._take_start(timesteps)
        self._take_what_is_due(timesteps)

    def _take_start(self, timesteps: int) -> None:
        if self._due[:1] == [0] and self._take(0, timesteps, "episode"):
            del self._due[0]

    def _take_what_is_due(self, timesteps: int) -> None:
        n_finished = self._n_finished()
        for number in [number for number in self._due if 0 < number <= n_finished]:
            if self._take(number, timesteps, "episode"):
                self._due.remove(number)
        if timesteps >= self._next_time and self._take(n_finished, timesteps, "freq"):
            assert self.freq is not None
            self._next_time = (timesteps // self.freq + 1) * self.freq

    def _take(self, episode: int, timesteps: int, reason: Literal["episode", "freq"]) -> bool:
        """
        :param episode: for which it is taken
        :param timesteps: environment steps stored
        :param reason: why it is taken
        :return: whether there was something to look at
        """
        assert self._rng is not None
        buffer = _replay_buffer_of(self.model)
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
        Batches drawn as the sum-tree draws them, one from each of ``batch_size`` equal masses.

        :param probabilities: shape ``(n,)``, not all of them zero
        :return: positions in it, batch after batch, shape ``(n_draws,)``
        """
        assert self._rng is not None
        cumulative = np.cumsum(probabilities)
        number_in_batch, size_of_batch = self._strata()
        masses = (number_in_batch + self._rng.random(self.n_draws)) / size_of_batch
        found = np.searchsorted(cumulative, masses * cumulative[-1], side="right")
        # Rounding can lead to the very end, past the last that has mass
        last: int = int(np.flatnonzero(probabilities)[-1])
        positions: IntArray = np.minimum(found, last).astype(np.int64)
        return positions

    def _strata(self) -> tuple[IntArray, IntArray]:
        """
        :return: of each draw, its number in its batch, and the size of that batch, both of shape
            ``(n_draws,)``; the last batch may be a smaller one
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
        :param buffer: whose beta and normalization apply
        :param probabilities: of the draws, batch after batch, shape ``(n_draws,)``
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
    :return: environment steps since each was stored, of all environments together, 0 for those
        stored last, shape ``(n,)``
    """
    rows_ago: IntArray = (buffer.pos - 1 - indices // buffer.n_envs) % buffer.buffer_size
    return rows_ago * buffer.n_envs


def _first_observations(buffer: ReplayBuffer, indices: IntArray) -> npt.NDArray[Any] | None:
    stored: Any = buffer.observations
    if isinstance(stored, dict) or np.prod(stored.shape[2:]) > LARGEST_OBSERVATION:
        return None
    rows, envs = np.divmod(indices, buffer.n_envs)
    observations: npt.NDArray[Any] = stored[rows, envs]
    return observations


# What is replayed


class _ReplayRecord:
    """
    How often each stored transition was replayed, and how old it was then.

    Batches are noted when they are drawn, and counted many at a time, which costs far less.

    :param model: whose training counts; other draws from its buffer don't
    :param buffer: of the model
    """

    def __init__(self, model: BaseAlgorithm, buffer: ReplayBuffer) -> None:
        self.model = model
        self.buffer = buffer
        #: Where the next row goes, so that rows are noticed that were added unwatched
        self.pos = buffer.pos
        self._was_full = buffer.full
        self._n_added = self._n_added_when_counted = 0
        self._counts = np.zeros(buffer.buffer_size * buffer.n_envs, dtype=np.int32)
        #: Batches not counted yet: their transitions, and how many rows had been added then
        self._noted: list[tuple[IntArray, int]] = []
        #: A batch was drawn of which it can't be known what it contains
        self.is_incomplete = False
        self.forget_ages()

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """How often each was replayed since it was stored, by ``row * n_envs + env``."""
        self.follow()
        self._count()
        return self._counts

    def forget_ages(self) -> None:
        """Begin a new interval."""
        self._count()
        self.n_ages, self.sum_of_ages = 0, 0
        #: Ages when replayed, of the latest batches
        self.latest_ages: deque[IntArray] = deque(maxlen=BATCHES_IN_HISTOGRAM // BATCHES_AT_ONCE)

    def is_about(self, buffer: ReplayBuffer) -> bool:
        """
        :param buffer: of a model
        :return: whether the record is one of it as it is now
        """
        return buffer is self.buffer and buffer.pos == self.pos

    def follow(self) -> None:
        """Notice what was added since the last look, less than the whole buffer."""
        buffer = self.buffer
        if buffer.pos == self.pos and buffer.full == self._was_full:
            return
        if not buffer.full and (self._was_full or buffer.pos < self.pos):
            # Emptied, and filled anew
            self._count()
            self._counts[:] = 0
            self.pos = 0
        self._n_added += (buffer.pos - self.pos) % buffer.buffer_size
        self.pos, self._was_full = buffer.pos, buffer.full

    def on_sample(self, indices: IntArray | None) -> None:
        """
        :param indices: which transitions a batch contains, shape ``(batch,)``; None if that can't
            be known
        """
        # SB3 sets it in `train`, and unsets it while it collects
        if not self.model.policy.training:
            return
        if indices is None:
            self.is_incomplete = True
            return
        self.follow()
        self._noted.append((indices, self._n_added))
        if len(self._noted) == BATCHES_AT_ONCE:
            self._count()

    def _count(self) -> None:
        buffer, n_rows = self.buffer, self.buffer.buffer_size
        # Rows are added one after the other, and begin anew
        n_new = min(self._n_added - self._n_added_when_counted, n_rows)
        new = (self.pos - 1 - np.arange(n_new)) % n_rows
        self._counts.reshape(n_rows, buffer.n_envs)[new] = 0
        self._n_added_when_counted = self._n_added
        if not self._noted:
            return
        indices = np.concatenate([batch for batch, _ in self._noted])
        sizes = [len(batch) for batch, _ in self._noted]
        # How many rows were added since each was drawn
        added = self._n_added - np.repeat([n_added for _, n_added in self._noted], sizes)
        self._noted.clear()
        # When it was drawn, the next row was to go `added` rows before the place it goes now
        rows_ago = (self.pos - added - 1 - indices // buffer.n_envs) % n_rows
        ages = rows_ago * buffer.n_envs
        self.n_ages += len(ages)
        self.sum_of_ages += int(ages.sum())
        self.latest_ages.append(ages)
        # Where another is stored now, the count has begun anew
        np.add.at(self._counts, indices[rows_ago + added < n_rows], 1)


class _Watch:
    """Who wants to know what happens to one buffer."""

    def __init__(self) -> None:
        # Weak, because an error ends training without a word to the callbacks
        self.records: weakref.WeakSet[_ReplayRecord] = weakref.WeakSet()
        self.is_drawing = False


#: By buffer, and not an attribute of it, so that a buffer saved meanwhile contains nothing of it
_WATCHES: "weakref.WeakKeyDictionary[ReplayBuffer, _Watch]" = weakref.WeakKeyDictionary()


class _NotedArray:
    """
    Stands for an array while a batch is drawn, and notes what is read from it.

    :param array: shape ``(rows, n_envs, ...)``
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.keys: list[Any] = []

    def __getitem__(self, key: Any) -> Any:
        self.keys.append(key)
        return self.array[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.array, name)

    def indices(self, n_envs: int) -> IntArray | None:
        """
        :param n_envs: number of environments
        :return: which transitions were read, shape ``(n,)``; None if that can't be told
        """
        found = []
        for key in self.keys:
            if not (isinstance(key, tuple) and len(key) >= 2):
                return None
            rows, envs = key[:2]
            if not all(isinstance(part, np.ndarray) and part.ndim == 1 for part in (rows, envs)):
                return None
            found.append(rows * n_envs + envs)
        return np.concatenate(found) if found else None


def _watched_sample(buffer: Any, sample: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    watch = _WATCHES.get(buffer)
    if watch is None or watch.is_drawing:
        return sample(*args, **kwargs)
    watch.is_drawing = True
    # A batch of SB3's own buffers does not say what it contains
    actions = None if isinstance(buffer, PrioritizedReplayBuffer) else _NotedArray(buffer.actions)
    if actions is not None:
        buffer.actions = actions
    try:
        batch = sample(*args, **kwargs)
    finally:
        watch.is_drawing = False
        if actions is not None:
            buffer.actions = actions.array
    given = getattr(batch, "indices", None)
    indices = given if actions is None else actions.indices(buffer.n_envs)
    for record in watch.records:
        record.on_sample(indices)
    return batch


@functools.cache
def _watched_class(cls: Any) -> Any:
    """
    :param cls: of a buffer
    :return: the class, under the same name, of that buffer while someone watches it
    """

    def get(self: Any) -> Any:
        own = self.__dict__.get("sample")
        sample = functools.partial(cls.sample, self) if own is None else own
        return functools.partial(_watched_sample, self, sample)

    def put(self: Any, sample: Any) -> None:
        self.__dict__["sample"] = sample

    def remove(self: Any) -> None:
        del self.__dict__["sample"]

    def reduce(self: Any, protocol: Any) -> Any:
        # Copies, and what is saved, are buffers like any other
        reduced: Any = cls.__reduce_ex__(self, protocol)
        return (object.__new__, (cls,), *reduced[2:])

    # One base only: with a second one, memory is laid out otherwise, and no buffer could change
    # its class
    watched: Any = type(cls)(
        cls.__name__,
        (cls,),
        {
            **{name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")},
            "_unwatched": cls,
            "__reduce_ex__": reduce,
            # A property comes before the attributes of an instance: so whoever has put a function
            # of his own there is watched, too
            "sample": property(get, put, remove),
        },
    )
    return watched


def _watch(buffer: Any, record: _ReplayRecord) -> None:
    """
    :param buffer: from now on watched; it stays the object that it is
    :param record: is told of batches
    """
    _WATCHES.setdefault(buffer, _Watch()).records.add(record)
    if not hasattr(buffer, "_unwatched"):
        cls: Any = type(buffer)
        buffer.__class__ = _watched_class(cls)


def _unwatch(buffer: Any, record: _ReplayRecord) -> None:
    """
    :param buffer: as it was before, unless others watch it
    :param record: is told no more
    """
    watch = _WATCHES.get(buffer)
    if watch is None:
        return
    watch.records.discard(record)
    if not watch.records:
        del _WATCHES[buffer]
        buffer.__class__ = buffer._unwatched


class PERLoggerCallback(BaseCallback):
    """
    Log what is in the replay buffer, and what is replayed, at an interval.

    Each time, the values go to the model's logger together with SB3's own (reward, length, frames
    a second), and are written at once, in all of its formats. Works with every off-policy
    algorithm of SB3; without priorities, their keys are left out.

    ================================== ========================================================
    ``per/priority_min``               smallest priority of those that can be drawn
    ``per/priority_quantile_05``       quantiles of the priorities that can be drawn: 5, 25, 50,
    to ``per/priority_quantile_95``    75 and 95 %
    ``per/share_never_replayed``       share of the stored transitions that were in no batch
                                       since they were stored, of those that can be drawn
    ``per/replay_age_mean``            mean age in environment steps of what was replayed since
                                       the last time
    ``per/priority_histogram``         TensorBoard: priorities that can be drawn
    ``per/replay_age_histogram``       TensorBoard: ages, of at most 1000 batches
    ``per/replay_count_histogram``     TensorBoard: how often each was replayed
    ================================== ========================================================

    Replays are counted while the callback is in use: what was replayed before then counts as
    never replayed. Only training counts, not batches that others draw from the buffer.

    :param log_freq: write every so many environment steps (of all environments together)
    :param histograms: write histograms, too, if TensorBoard is among the formats
    :param verbose: as in SB3; has no effect
    :raises ValueError: if ``log_freq`` is below 1, or, when training starts, the algorithm has no
        replay buffer
    """

    def __init__(self, log_freq: int = 1000, histograms: bool = True, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.log_freq = check_size("log_freq", log_freq)
        self.histograms = histograms
        self._record: _ReplayRecord | None = None
        self._next_time = 0

    def _init_callback(self) -> None:
        _replay_buffer_of(self.model)

    def _on_training_start(self) -> None:
        self._next_time = (self.num_timesteps // self.log_freq + 1) * self.log_freq
        self._watch()

    def _watch(self) -> None:
        buffer = _replay_buffer_of(self.model)
        if self._record is None or not self._record.is_about(buffer):
            self._unwatch()
            self._record = _ReplayRecord(self.model, buffer)
        _watch(buffer, self._record)

    def _unwatch(self) -> None:
        if self._record is not None:
            _unwatch(self._record.buffer, self._record)

    def _on_step(self) -> bool:
        assert self._record is not None
        if self.model.replay_buffer is not self._record.buffer:  # type: ignore[attr-defined]
            # Another was loaded meanwhile
            self._watch()
        self._record.follow()
        if self.num_timesteps >= self._next_time:
            self._next_time = (self.num_timesteps // self.log_freq + 1) * self.log_freq
            if len(indices := drawable_indices(self._record.buffer)):
                self._record_statistics(self._record, indices)
                self.model.dump_logs()
        return True

    def _on_training_end(self) -> None:
        self._unwatch()

    def _record_statistics(self, record: _ReplayRecord, indices: IntArray) -> None:
        """
        :param record: of what was replayed
        :param indices: the transitions that can be drawn, at least one
        """
        histograms: dict[str, npt.NDArray[Any]] = {}
        buffer, counts = record.buffer, record.counts[indices]
        if isinstance(buffer, PrioritizedReplayBuffer):
            priorities = buffer.priorities
            priorities = priorities[priorities > 0.0]
            if len(priorities):
                self.logger.record("per/priority_min", float(priorities.min()))
                quantiles = np.quantile(priorities, np.divide(QUANTILES, 100))
                for percent, quantile in zip(QUANTILES, quantiles.tolist(), strict=True):
                    self.logger.record(f"per/priority_quantile_{percent:02}", quantile)
                histograms["per/priority_histogram"] = priorities
        if not record.is_incomplete:
            share = 1.0 - np.count_nonzero(counts) / len(counts)
            self.logger.record("per/share_never_replayed", share)
            histograms["per/replay_count_histogram"] = counts
            if record.n_ages:
                self.logger.record("per/replay_age_mean", record.sum_of_ages / record.n_ages)
                histograms["per/replay_age_histogram"] = np.concatenate(record.latest_ages)
        record.forget_ages()
        formats = self.logger.output_formats
        if self.histograms and any(isinstance(form, TensorBoardOutputFormat) for form in formats):
            for key, values in histograms.items():
                self.logger.record(key, th.as_tensor(values), exclude=NO_HISTOGRAMS)
