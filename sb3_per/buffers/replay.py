"""Replay buffer that draws transitions by priority."""

import math
import warnings
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from sb3_per.buffers.draws import DrawRecord
from sb3_per.buffers.kernels import (
    SMALLEST_PRIORITY,
    gather,
    look_ahead,
    priorities_of,
    weights_of,
)
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.trees.priority_tree import as_floats, as_indices
from sb3_per.trees.rank_tree import RankTree
from sb3_per.trees.sum_tree import SumTree

__all__ = [
    "InitialPriority",
    "Prioritization",
    "PrioritizedReplayBuffer",
    "Steps",
    "WeightNormalization",
    "check_choice",
    "check_flag",
    "check_number",
    "check_size",
]

#: Probabilities in proportion to the priorities, or by their ranks alone
Prioritization = Literal["proportional", "rank"]

#: Divisor of the importance-sampling weights: the largest one of the batch, or the largest one
#: that any stored transition would have
WeightNormalization = Literal["batch", "buffer"]

#: Priority of new transitions: the largest stored one, or that of their TD error
InitialPriority = Literal["max", "td_error"]

#: Allowed values of options that are strings
CHOICES: dict[str, tuple[str, ...]] = {
    "weight_normalization": get_args(WeightNormalization),
    "prioritization": get_args(Prioritization),
}

#: Number of draws without an update after which a warning says that priorities never change
DRAWS_BEFORE_WARNING = 1000

#: In place of n-step returns with one step
_NO_RETURNS = np.empty((0, 1), np.float32)

SelfBuffer = TypeVar("SelfBuffer", bound="PrioritizedReplayBuffer")
Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class BatchSource(NamedTuple):
    """
    What a batch is made of: everything that is stored, without copies, one row for each transition,
    and the rows that count.

    :param observations: shape ``(n_rows, n_features)``
    :param next_observations: same shape
    :param actions: shape ``(n_rows, n_numbers)``
    :param rewards: shape ``(n_rows,)``
    :param dones: whether episodes ended, same shape
    :param timeouts: whether that was for lack of time, same shape
    :param last: where the returns of the batch end, shape ``(n,)``
    :param following: where the observations after them are, shape ``(n,)``
    :param returns: n-step returns, shape ``(n, 1)``; ``(0, 1)`` with one step
    :param discounts: of what follows these, same shape
    """

    observations: Array
    next_observations: Array
    actions: Array
    rewards: Array
    dones: Array
    timeouts: Array
    last: IntArray
    following: IntArray
    returns: Array
    discounts: Array


def check_number(name: str, value: Any, low: float = 0.0, high: float = math.inf) -> float:
    """
    :param name: name of the option, for error messages
    :param value: value given by the user
    :param low: smallest value allowed
    :param high: largest value allowed; infinity itself never is
    :return: the value as a plain float
    :raises ValueError: if it is not a finite number from ``low`` to ``high``
    """
    try:
        # `float` would accept text, too
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and low <= number <= high):
        allowed = f"in [{low:g}, {high:g}]" if math.isfinite(high) else f"of at least {low:g}"
        raise ValueError(f"`{name}` must be a finite number {allowed}, got {value!r}")
    return number


def check_size(name: str, value: Any) -> int:
    """
    :param name: name of the option, for error messages
    :param value: value given by the user
    :return: the value as a plain int
    :raises ValueError: if it is not an integer of at least 1
    """
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}")
    return int(value)


def check_flag(name: str, value: Any) -> None:
    """
    :param name: name of the option, for error messages
    :param value: value given by the user
    :raises ValueError: if it is neither True nor False
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"`{name}` must be True or False, got {value!r}")


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """
    :param name: name of the option, for error messages
    :param value: value given by the user
    :param allowed: allowed values
    :raises ValueError: if it is not one of them
    """
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {list(allowed)}, got {value!r}")


class Steps(NamedTuple):
    """Steps to be stored by ``extend``: checked, with the axes time and environment first."""

    observations: Any
    next_observations: Any
    actions: Array
    rewards: Array
    dones: Array
    timeouts: Array | None
    infos: list[list[dict[str, Any]]] | None


class PrioritizedReplayBuffer(ReplayBuffer):
    """
    Replay buffer that draws a transition ``i`` with probability
    ``P(i) = priority_i / sum(priorities)``, where ``priority_i = (|td_error_i| + eps) ** alpha``
    (Schaul et al. 2016, section 3.3, proportional variant). With ``prioritization="rank"``,
    ``P(i)`` is in proportion to ``(1 / rank_i) ** alpha`` instead, where rank 1 has the largest
    ``|td_error| + eps`` (the same section's rank-based variant).

    It stores the same data as SB3's ``ReplayBuffer``, in the same arrays, and a batch contains the
    same numbers, bit for bit, as one of SB3's ``ReplayBuffer`` (or ``NStepReplayBuffer``, if
    ``n_steps`` is above 1) for the same transitions. Only the draw differs, which is over all
    environments at once: transition ``row * n_envs + env`` is leaf ``row * n_envs + env`` of
    :attr:`tree`.

    A new transition gets the largest stored priority (1 if there is none), so that it is likely to
    be replayed soon. After replaying a batch, pass its TD errors to :meth:`update_priorities`;
    :class:`~sb3_per.PERDQN` does so automatically.

    Draws come from the global state of ``np.random``, as in SB3's buffers.

    :param buffer_size: maximum number of transitions, over all environments
    :param observation_space: observation space; for ``Dict``, use
        :class:`PrioritizedDictReplayBuffer`
    :param action_space: action space
    :param device: PyTorch device of the batches
    :param n_envs: number of parallel environments
    :param optimize_memory_usage: store each observation once instead of twice; needs
        ``handle_timeout_termination=False``, as in SB3. The oldest row then has no next
        observation and can't be drawn.
    :param handle_timeout_termination: whether to bootstrap at the time limit of an episode
    :param alpha: strength of the prioritization: 0 draws uniformly, 1 in proportion to the errors;
        at least 0. A change applies to later updates, stored priorities stay.
    :param beta: strength of the importance-sampling correction, in ``[0, 1]``
    :param beta_increment: increment of ``beta`` per call of :meth:`anneal_beta`; at least 0. For
        hand-written loops: algorithms of this package set ``beta`` themselves.
    :param eps: constant added to every absolute TD error, so that every transition can be drawn
        again; at least 0. With 0, a transition whose error is 0 is never drawn again.
    :param n_steps: length of the n-step returns, at least 1
    :param gamma: discount factor for n-step returns, in ``[0, 1]``; has no effect with
        ``n_steps=1``
    :param weight_normalization: divide weights by the largest one of the ``"batch"`` or of the
        whole ``"buffer"``
    :param prioritization: ``"proportional"``, or ``"rank"``, for which the paper uses
        ``alpha=0.7``. :attr:`priorities` are then ``|td_error| + eps``, ranks are exact at any
        time, and a change of ``alpha`` applies to all stored transitions.
    :param sb3_options: further arguments of the SB3 buffer that a derived class builds on
    :raises ValueError: if an option is out of its range
    """

    _batch_type: type[Any] = PrioritizedReplayBufferSamples
    #: SB3's buffers whose content :meth:`from_replay_buffer` takes over
    _counterparts: tuple[type[ReplayBuffer], ...] = (ReplayBuffer, NStepReplayBuffer)
    #: Attributes that it takes over
    _content: tuple[str, ...] = (
        "actions",
        "buffer_size",
        "dones",
        "full",
        "observations",
        "pos",
        "rewards",
        "timeouts",
    )

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_increment: float = 0.0,
        eps: float = 1e-6,
        n_steps: int = 1,
        gamma: float = 0.99,
        weight_normalization: WeightNormalization = "batch",
        prioritization: Prioritization = "proportional",
        **sb3_options: Any,
    ) -> None:
        # First, so that a wrong option is found before gigabytes are allocated
        self.alpha = alpha
        self.beta = beta
        self.beta_increment = beta_increment
        self.eps = eps
        self.n_steps = n_steps
        self.gamma = gamma
        self.weight_normalization = weight_normalization
        self.prioritization = prioritization
        buffer_size = check_size("buffer_size", buffer_size)
        n_envs = check_size("n_envs", n_envs)
        self._check_storage(observation_space, optimize_memory_usage)
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device=device,
            n_envs=n_envs,
            optimize_memory_usage=optimize_memory_usage,
            handle_timeout_termination=handle_timeout_termination,
            **sb3_options,
        )
        # Number of rows ever added, and that number at the last call of `forget_new`
        self._n_adds = 0
        self._n_known = 0
        # With `optimize_memory_usage`: the next observation of the last transition of a truncated
        # episode, by the number of that transition
        self._kept_observations: dict[int, Array] = {}
        # Counted only until the first update
        self._n_draws_unanswered = 0
        self._was_updated = False
        #: Record of the draws since :meth:`record_draws` was first called; None before
        self.draws: DrawRecord | None = None
        self._start_tree()

    @classmethod
    def _check_storage(
        cls, observation_space: spaces.Space[Any], optimize_memory_usage: bool
    ) -> None:
        if isinstance(observation_space, spaces.Dict):
            raise ValueError(
                f"{cls.__name__} can't store Dict observations, got the observation space "
                f"{observation_space}; use PrioritizedDictReplayBuffer"
            )

    def _start_tree(self) -> None:
        capacity = self.buffer_size * self.n_envs
        self.tree: SumTree | RankTree
        if self._prioritization == "rank":
            self.tree = RankTree(capacity, self.alpha)
        else:
            self.tree = SumTree(capacity)

    # Options are checked whenever they are set, also by an assignment.

    @property
    def alpha(self) -> float:
        """Strength of the prioritization, at least 0."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._alpha = check_number("alpha", value)
        tree = getattr(self, "tree", None)
        if isinstance(tree, RankTree):
            tree.alpha = self._alpha

    @property
    def beta(self) -> float:
        """Strength of the importance-sampling correction, in ``[0, 1]``."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = check_number("beta", value, high=1.0)

    @property
    def beta_increment(self) -> float:
        """Increment of ``beta`` per call of :meth:`anneal_beta`, at least 0."""
        return self._beta_increment

    @beta_increment.setter
    def beta_increment(self, value: float) -> None:
        self._beta_increment = check_number("beta_increment", value)

    @property
    def eps(self) -> float:
        """Constant added to every absolute TD error, at least 0."""
        return self._eps

    @eps.setter
    def eps(self, value: float) -> None:
        self._eps = check_number("eps", value)

    @property
    def gamma(self) -> float:
        """Discount factor for n-step returns, in ``[0, 1]``."""
        return self._gamma

    @gamma.setter
    def gamma(self, value: float) -> None:
        self._gamma = check_number("gamma", value, high=1.0)

    @property
    def n_steps(self) -> int:
        """Length of the n-step returns, at least 1."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        self._n_steps = check_size("n_steps", value)

    @property
    def weight_normalization(self) -> WeightNormalization:
        """``"batch"`` or ``"buffer"``."""
        return self._weight_normalization

    @weight_normalization.setter
    def weight_normalization(self, value: WeightNormalization) -> None:
        check_choice("weight_normalization", value, CHOICES["weight_normalization"])
        self._weight_normalization = value

    @property
    def prioritization(self) -> Prioritization:
        """``"proportional"`` or ``"rank"``. A change converts the stored priorities."""
        return self._prioritization

    @prioritization.setter
    def prioritization(self, value: Prioritization) -> None:
        check_choice("prioritization", value, CHOICES["prioritization"])
        before = getattr(self, "_prioritization", value)
        self._prioritization = value
        if value == before:
            return
        # A sum-tree holds powers of the errors, a rank-tree the errors themselves
        leaves = self.tree[:]
        with_mass = np.flatnonzero(leaves)
        exponent = self.alpha if value == "proportional" else 1.0 / (self.alpha or np.inf)
        self._start_tree()
        with np.errstate(over="ignore", under="ignore"):
            converted = leaves[with_mass] ** exponent
        # A mass above zero stays above zero and finite, even if the power does not fit into a float
        priorities = np.clip(converted, SMALLEST_PRIORITY, self.tree.priority_limit)
        self.tree.update(with_mass, priorities)

    @property
    def n_transitions(self) -> int:
        """Number of stored transitions: rows times environments."""
        return self.size() * self.n_envs

    @property
    def priorities(self) -> FloatArray:
        """
        Copy of the priorities of the stored transitions, shape ``(n_transitions,)``; zero for those
        that can't be drawn.
        """
        leaves: FloatArray = self.tree[: self.n_transitions]
        return leaves

    @property
    def probabilities(self) -> FloatArray:
        """Probability of each stored transition to be drawn, shape ``(n_transitions,)``."""
        masses: FloatArray = self.tree.masses(slice(self.n_transitions))
        return masses / self.tree.total if masses.any() else masses

    @property
    def nbytes(self) -> int:
        """Memory of all arrays and of the tree, in bytes."""
        arrays: list[Any] = []
        for stored in self.__dict__.values():
            arrays += stored.values() if isinstance(stored, dict) else [stored]
        stored_bytes = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        return stored_bytes + self.tree.nbytes

    def __getstate__(self) -> dict[str, Any]:
        # A loaded buffer does not count its draws until `record_draws` is called again
        return {**self.__dict__, "draws": None}

    def record_draws(self) -> DrawRecord:
        """
        Count from now on the draws of each transition by :meth:`sample`.

        :return: the record, :attr:`draws`; further calls return the same one
        """
        if self.draws is None:
            self.draws = DrawRecord(self.buffer_size, self.n_envs)
        return self.draws

    def add(
        self,
        obs: Array,
        next_obs: Array,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Store one transition of each environment, with the largest stored priority.

        :param obs: shape ``(n_envs, *observation)``
        :param next_obs: the observation after the step (of the same episode), same shape
        :param action: shape ``(n_envs, *action)``
        :param reward: shape ``(n_envs,)``
        :param done: whether the episode ended, shape ``(n_envs,)``
        :param infos: one dict for each environment; ``"TimeLimit.truncated"`` is read
        """
        # Read both before SB3 moves on: the row being overwritten counts in the maximum.
        row = self.pos
        priority = self.tree.max_priority or 1.0
        super().add(obs, next_obs, action, reward, done, infos)
        self._enter(row, row + 1, priority)

    def extend(
        self,
        obs: Any,
        next_obs: Any,
        action: npt.ArrayLike,
        reward: npt.ArrayLike,
        done: npt.ArrayLike,
        infos: Any = None,
        *,
        timeouts: npt.ArrayLike | None = None,
    ) -> None:
        """
        Store many steps of each environment at once, oldest first, as if :meth:`add` were called
        for each: the arguments are those of ``add`` with an axis of time before the others. With
        one environment, its axis may be left out.

        The last step may be in the middle of an episode. If what is added next doesn't follow on
        it, call :meth:`truncate_last_trajectory` in between.

        :param obs: shape ``(time, n_envs, *observation)``
        :param next_obs: the observations after the steps (of the same episodes), same shape
        :param action: shape ``(time, n_envs, *action)``
        :param reward: shape ``(time, n_envs)``
        :param done: whether the episode ended, shape ``(time, n_envs)``
        :param infos: for each step, one dict for each environment; ``"TimeLimit.truncated"`` is
            read
        :param timeouts: in place of ``infos``: whether the episode ended for lack of time, shape
            ``(time, n_envs)``
        :raises ValueError: if a shape does not fit, before anything is stored
        """
        n = len(np.atleast_1d(np.asarray(reward)))
        rewards = self._steps_of("reward", reward, n)
        if infos is not None:
            if timeouts is not None:
                raise ValueError("`infos` and `timeouts` say the same: give one of them")
            infos = [[step] if isinstance(step, dict) else list(step) for step in infos]
            timeouts = [[info.get("TimeLimit.truncated", False) for info in step] for step in infos]
        steps = Steps(
            observations=self._observation_steps("obs", obs, n),
            next_observations=self._observation_steps("next_obs", next_obs, n),
            actions=self._steps_of("action", action, n, (self.action_dim,)),
            rewards=rewards,
            dones=self._steps_of("done", done, n),
            timeouts=None if timeouts is None else self._steps_of("timeouts", timeouts, n),
            infos=infos,
        )
        start = 0
        while start < n:
            # Up to the last row, or to the end of what is given
            start = self._store_run(steps, start, min(start + self.buffer_size - self.pos, n))

    def _store_run(self, steps: "Steps", start: int, stop: int) -> int:
        """
        Store neighbouring rows, all at once.

        :param steps: what is to be stored
        :param start: number of the step for row ``pos``
        :param stop: one past the last step; not beyond the last row
        :return: one past the last step that was stored
        """
        priority = self.tree.max_priority or 1.0
        first, last = self.pos, self.pos + stop - start
        self._store_observations(first, steps, start, stop)
        self.actions[first:last] = steps.actions[start:stop]
        self.rewards[first:last] = steps.rewards[start:stop]
        self.dones[first:last] = steps.dones[start:stop]
        if self.handle_timeout_termination:
            self.timeouts[first:last] = (
                0.0 if steps.timeouts is None else steps.timeouts[start:stop]
            )
        self.full = self.full or last == self.buffer_size
        self.pos = last % self.buffer_size
        self._enter(first, last, priority)
        return stop

    def _observation_steps(self, name: str, obs: Any, n: int) -> Any:
        """
        :param name: name of the argument, for error messages
        :param obs: what the user gave
        :param n: number of steps
        :return: the same with the shape ``(n, n_envs, *observation)``
        """
        return self._steps_of(name, obs, n, self.obs_shape)

    def _steps_of(
        self, name: str, values: npt.ArrayLike, n: int, shape: tuple[int, ...] = ()
    ) -> Array:
        """
        :param name: name of the argument, for error messages
        :param values: what the user gave
        :param n: number of steps
        :param shape: of one step of one environment, as it is stored
        :return: the same with the shape ``(n, n_envs, *shape)``
        :raises ValueError: if there are more or fewer numbers than that
        """
        array = np.asarray(values)
        leading = (n, self.n_envs) if array.shape[:2] == (n, self.n_envs) else (n,)
        fits = len(leading) == 2 or self.n_envs == 1
        if not (fits and array.shape[: len(leading)] == leading) or (
            array.size != n * self.n_envs * math.prod(shape)
        ):
            raise ValueError(
                f"`{name}` has the shape {array.shape}, but {n} steps of {self.n_envs} "
                f"environment(s) need {(n, self.n_envs, *shape)}"
            )
        return array.reshape(n, self.n_envs, *shape)

    def _store_observations(self, first: int, steps: "Steps", start: int, stop: int) -> None:
        """
        :param first: row for the first of them
        :param steps: what is to be stored
        :param start: number of the first step
        :param stop: one past the last step
        """
        last = first + stop - start
        self.observations[first:last] = steps.observations[start:stop]
        if self.optimize_memory_usage:
            self.observations[last % self.buffer_size] = steps.next_observations[stop - 1]
        else:
            self.next_observations[first:last] = steps.next_observations[start:stop]

    def _enter(self, first: int, last: int, priority: float) -> None:
        """
        Count rows just added, and give them their places in the tree.

        :param first: the first of them
        :param last: one past the last of them
        :param priority: of new transitions
        """
        if self.draws is not None:
            self.draws.forget(slice(first, last))
        if not self.handle_timeout_termination:
            # SB3 leaves what was there: an episode of the lap before may have been broken off
            self.timeouts[first:last] = 0.0
        start, stop = first * self.n_envs, last * self.n_envs
        self._admit(start, stop, priority)
        self._n_adds += last - first
        if self._kept_observations:
            for index in [index for index in self._kept_observations if start <= index < stop]:
                del self._kept_observations[index]

    def _admit(self, start: int, stop: int, priority: float) -> None:
        """
        Give rows just added their places in the tree.

        :param start: their first transition
        :param stop: one past their last one
        :param priority: of new transitions
        """
        self.tree.fill(start, stop, priority)
        if self.optimize_memory_usage:
            # The next observation was just written over the observation of the oldest row
            oldest = self.pos * self.n_envs
            self.tree.fill(oldest, oldest + self.n_envs, 0.0)

    def truncate_last_trajectory(self) -> None:
        """
        Truncate the episodes in progress: the environments are about to be reset.

        The last transition of each then counts like one at a time limit: it bootstraps from its
        next observation, and no n-step return reaches beyond it. Algorithms of this package call
        this whenever ``learn`` resets the environments; call it yourself in hand-written loops.
        """
        if self.n_transitions == 0:
            return
        newest = (self.pos - 1) % self.buffer_size
        running = np.flatnonzero(self.dones[newest] == 0.0)
        self.dones[newest, running] = 1.0
        self.timeouts[newest, running] = 1.0
        if self.optimize_memory_usage:
            # The next `add` stores the first observation of other episodes there
            for env in running:
                following = self.observations[self.pos, env].copy()
                self._kept_observations[int(newest * self.n_envs + env)] = following

    def new_transitions(self) -> IntArray:
        """
        :return: transitions added since the last call of :meth:`forget_new` that can be drawn,
            oldest first, shape ``(n,)``; none of those taken over from another buffer
        """
        n_rows = min(self._n_adds - self._n_known, self.size())
        rows = (self.pos - n_rows + np.arange(n_rows)) % self.buffer_size
        indices: IntArray = (rows[:, None] * self.n_envs + np.arange(self.n_envs)).ravel()
        drawable = self._is_drawable(indices)
        return indices if drawable is None else indices[drawable]

    def forget_new(self) -> None:
        """Stop counting the stored transitions as new."""
        self._n_known = self._n_adds

    def drawable(self) -> npt.NDArray[np.bool_]:
        """
        Whether each stored transition can be drawn.

        :return: shape ``(n_transitions,)``: False for the oldest row of a full buffer with
            ``optimize_memory_usage``, whose next observation is overwritten, and, with hindsight
            experience replay, for unfinished episodes
        """
        indices = np.arange(self.n_transitions)
        drawable = self._is_drawable(indices)
        return np.ones(len(indices), dtype=bool) if drawable is None else drawable

    def _is_drawable(self, indices: IntArray) -> npt.NDArray[np.bool_] | None:
        """
        :param indices: stored transitions, shape ``(n,)``
        :return: whether each of them may have mass, shape ``(n,)``; None if all may
        """
        if self.optimize_memory_usage and self.full:
            drawable: npt.NDArray[np.bool_] = indices // self.n_envs != self.pos
            return drawable
        return None

    def reset(self) -> None:
        """Remove all transitions and their priorities."""
        super().reset()
        self._kept_observations.clear()
        self._start_tree()
        if self.draws is not None:
            self.draws.forget(slice(None))

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None
    ) -> PrioritizedReplayBufferSamples:
        """
        Draw a batch by priority: one transition from each of ``batch_size`` equal masses.

        :param batch_size: number of transitions, at least 1; one can be drawn repeatedly
        :param env: environment that normalizes the observations and rewards of the batch, if given
        :return: the batch, with weights and with the indices for :meth:`update_priorities`
        :raises ValueError: if nothing is stored or no stored transition can be drawn
        """
        indices, masses = self.draw(batch_size)
        if not self._was_updated:
            self._count_unanswered_draw()
        return self._get_samples(indices, env)._replace(weights=self._weights_of(masses))

    def draw(self, batch_size: int) -> tuple[IntArray, FloatArray]:
        """
        What :meth:`sample` begins with: draw transitions without gathering them.

        :param batch_size: number of transitions, at least 1
        :return: which transitions, and their masses in the tree, shape ``(batch_size,)`` each
        :raises ValueError: if nothing is stored or no stored transition can be drawn
        """
        if self.tree.total == 0.0:
            raise ValueError(self._why_nothing_can_be_drawn())
        indices, masses = self.tree.sample(batch_size)
        if self.draws is not None:
            self.draws.note(indices, self.pos)
        return indices, masses

    def write(self, indices: IntArray, priorities: FloatArray) -> None:
        """
        What :meth:`update_priorities` ends with, once all is checked.

        :param indices: stored transitions, int64, shape ``(n,)``
        :param priorities: as the tree holds them, finite, not negative, at most its
            ``priority_limit``, shape ``(n,)``
        """
        self._was_updated = True
        drawable = self._is_drawable(indices)
        if drawable is not None:
            indices, priorities = indices[drawable], priorities[drawable]
        self.tree.write(indices, priorities)

    # For compiled code that does itself what `sample` and `update_priorities` do between the two.

    @property
    def can_be_bypassed(self) -> bool:
        """
        Whether the arguments below say all that there is to a batch: the buffer is of this very
        class, no method is replaced, by whatever means, and no observation is kept aside.
        """
        return (
            type(self) is PrioritizedReplayBuffer
            and not self._kept_observations
            and vars(self).keys().isdisjoint(_NAMES)
            and _members(PrioritizedReplayBuffer) == _MEMBERS
        )

    def batch_source(self, indices: IntArray) -> BatchSource:
        """
        :param indices: which transitions, shape ``(n,)``
        :return: what their batch is made of
        """
        if self._n_steps == 1:
            last, returns, discounts = indices, _NO_RETURNS, _NO_RETURNS
        else:
            last, returns, discounts = self._n_step_returns(indices, None)
        n = self.tree.capacity
        observations = self.observations.reshape(n, -1)
        saves_memory = self.optimize_memory_usage
        return BatchSource(
            observations,
            observations if saves_memory else self.next_observations.reshape(n, -1),
            self.actions.reshape(n, -1),
            self.rewards.reshape(n),
            self.dones.reshape(n),
            self.timeouts.reshape(n),
            last,
            (last + self.n_envs) % n if saves_memory else last,
            returns,
            discounts,
        )

    @property
    def weight_arguments(self) -> tuple[float, float]:
        """The mass whose weight is 1, 0 for the smallest one of the batch; and beta."""
        is_by_buffer = self._weight_normalization == "buffer"
        return self.tree.min_mass if is_by_buffer else 0.0, self._beta

    @property
    def priority_arguments(self) -> tuple[int, float, float, float]:
        """Number of stored transitions, eps, exponent and largest priority allowed."""
        # Ranks are taken of the errors as they are; alpha is the rank-tree's part
        exponent = 1.0 if self._prioritization == "rank" else self._alpha
        return self.n_transitions, self._eps, exponent, self.tree.priority_limit

    def _why_nothing_can_be_drawn(self) -> str:
        if self.n_transitions == 0:
            return "the replay buffer is empty: there is nothing to sample yet"
        if self.optimize_memory_usage and self.buffer_size == 1:
            return (
                "no next observation is at hand: `optimize_memory_usage=True` keeps it in the next "
                f"row, and there is just one row for {self.n_envs} environment(s); `buffer_size` "
                f"must be at least {2 * self.n_envs}"
            )
        if self._n_adds == 0:
            return (
                f"none of the {self.n_transitions} transitions has a priority: they were written "
                "into the arrays by hand. Store transitions by `add`, or make a prioritized buffer "
                f"of SB3's own by `{type(self).__name__}.from_replay_buffer`."
            )
        return (
            f"all {self.n_transitions} stored transitions have a priority of zero, which leaves "
            f"nothing to sample: `eps` is {self.eps}, set it above 0 so that a transition with a "
            "TD error of 0 can still be drawn"
        )

    def _count_unanswered_draw(self) -> None:
        self._n_draws_unanswered += 1
        if self._n_draws_unanswered == DRAWS_BEFORE_WARNING and self.alpha > 0.0:
            warnings.warn(
                f"{DRAWS_BEFORE_WARNING} batches were sampled from a {type(self).__name__} and "
                "`update_priorities` was never called: transitions are drawn by priorities that "
                "don't follow the TD errors. Plain DQN does not feed them back; use "
                "`sb3_per.PERDQN`, or call `update_priorities(batch.indices, td_errors)` after "
                "each batch.",
                UserWarning,
                stacklevel=3,
            )

    def batch_of(
        self, indices: IntArray, env: VecNormalize | None = None
    ) -> PrioritizedReplayBufferSamples:
        """
        Return the batch for given transitions, without a draw.

        :param indices: stored transitions that can be drawn, int64, shape ``(batch,)``:
            ``row * n_envs + env``
        :param env: environment that normalizes the observations and rewards of the batch, if given
        :return: the batch, with weights as if these transitions had been drawn
        """
        weights = self._weights_of(self.tree.masses(indices))
        return self._get_samples(indices, env)._replace(weights=weights)

    def _weights_of(self, masses: FloatArray) -> th.Tensor:
        """
        :param masses: masses of the drawn transitions, shape ``(batch,)``
        :return: their importance-sampling weights, shape ``(batch, 1)``
        """
        return self._to_tensor(weights_of(masses, *self.weight_arguments))

    def _get_samples(  # type: ignore[override]
        self, batch_inds: IntArray, env: VecNormalize | None = None
    ) -> PrioritizedReplayBufferSamples:
        """
        Gather a batch. As with SB3's buffers, this is the method to override to change the batches,
        for example to augment observations.

        :param batch_inds: stored transitions, ``row * n_envs + env``, shape ``(batch,)``
        :param env: environment that normalizes the observations and rewards, if given
        :return: the batch, in new tensors on the buffer's device; its weights are 1, since the
            masses are not known here
        """
        if self._n_steps == 1:
            last, discounts = batch_inds, None
        else:
            last, returns, discounts = self._n_step_returns(batch_inds, env)
        rewards, dones = gather(
            last, self._flat(self.rewards), self._flat(self.dones), self._flat(self.timeouts)
        )
        rewards = self._normalize_reward(rewards, env) if discounts is None else returns
        observations, next_observations = self._observations_of(batch_inds, last, env)
        batch: PrioritizedReplayBufferSamples = self._batch_type(
            observations=observations,
            actions=self._to_tensor(self._flat(self.actions).take(batch_inds, axis=0)),
            next_observations=next_observations,
            dones=self._to_tensor(dones),
            rewards=self._to_tensor(rewards),
            discounts=None if discounts is None else self._to_tensor(discounts),
            weights=self._to_tensor(np.ones((len(batch_inds), 1), np.float32)),
            indices=batch_inds,
        )
        return batch

    def _n_step_returns(
        self, indices: IntArray, env: VecNormalize | None
    ) -> tuple[IntArray, Array, Array]:
        """
        Look ahead from each transition up to ``n_steps``, to the end of its episode or to the
        newest row, whichever comes first. The order of the float32 operations is that of SB3's
        ``NStepReplayBuffer``, so that the results are the same bit for bit.

        :param indices: first transitions, shape ``(batch,)``
        :param env: environment that normalizes the rewards, if given
        :return: the last transition of each look-ahead, shape ``(batch,)``; the discounted sum of
            rewards and the discount of the value that follows, both float32, shape ``(batch, 1)``
        """
        factors = self.gamma ** np.arange(self.n_steps + 1, dtype=np.float32)
        last, rewards, counts, discounts = look_ahead(
            indices,
            self.n_envs,
            (self.pos - 1) % self.buffer_size,
            self._flat(self.rewards),
            self._flat(self.dones),
            self._flat(self.timeouts),
            factors,
        )
        rewards = self._normalize_reward(rewards, env)  # [batch, n_steps]
        return last, (rewards * counts).sum(axis=1, keepdims=True), discounts

    def _observations_of(
        self, indices: IntArray, last: IntArray, env: VecNormalize | None
    ) -> tuple[Any, Any]:
        """
        :param indices: which transitions, shape ``(batch,)``
        :param last: the last step of each one's return, shape ``(batch,)``
        :param env: normalizes, if given
        :return: observations before ``indices`` and after ``last``
        """
        observations = self._observations_at(self.observations, indices, env)
        return observations, self._next_observations_at(last, env)

    def _next_observations_at(self, indices: IntArray, env: VecNormalize | None) -> Any:
        if not self.optimize_memory_usage:
            return self._observations_at(self.next_observations, indices, env)
        following = (indices + self.n_envs) % self.tree.capacity
        observations = self._flat(self.observations).take(following, axis=0)
        if self._kept_observations:
            for position, index in enumerate(indices.tolist()):
                if index in self._kept_observations:
                    observations[position] = self._kept_observations[index]
        return self._to_tensor(self._normalize_obs(observations, env))

    def _observations_at(self, storage: Any, indices: IntArray, env: VecNormalize | None) -> Any:
        """
        :param storage: ``observations`` or ``next_observations``
        :param indices: stored transitions, shape ``(batch,)``
        :param env: environment that normalizes the observations, if given
        :return: tensor of shape ``(batch, *observation)``
        """
        # `take` is several times faster than an index array for rows as short as these
        observations = self._flat(storage).take(indices, axis=0)
        return self._to_tensor(self._normalize_obs(observations, env))

    @staticmethod
    def _flat(storage: Array) -> Array:
        """
        :param storage: shape ``(rows, n_envs, ...)``
        :return: a view with one index for each transition, shape ``(rows * n_envs, ...)``
        """
        return storage.reshape(-1, *storage.shape[2:])

    def _to_tensor(self, array: Any) -> th.Tensor:
        # Every array passed here was just gathered and is used nowhere else: no copy is needed
        return self.to_torch(array, copy=False)

    def to_torch(self, array: Array, copy: bool = True) -> th.Tensor:
        """
        Convert an array to a tensor.

        :param array: array to convert
        :param copy: whether to copy the data; has no effect if the device is not the CPU
        :return: tensor on the buffer's device
        """
        if not copy and self.device.type == "cpu":
            # Same result as `as_tensor`, five times faster
            return th.from_numpy(array)
        return super().to_torch(array, copy)

    def update_priorities(self, indices: npt.ArrayLike, td_errors: Any) -> None:
        """
        Set the priorities of transitions to ``(|td_error| + eps) ** alpha``; with
        ``prioritization="rank"``, to ``|td_error| + eps``.

        An index stands for a position in the buffer: a late error counts for the transition that is
        stored there by then. Transitions that can't be drawn (:meth:`drawable`) keep their priority
        of zero.

        :param indices: ``batch.indices``, or any array or tensor of positions of stored
            transitions, shape ``(n,)``; where one is repeated, its last TD error counts
        :param td_errors: one for each index, with or without sign: list, array or tensor (any
            float type, any device, with or without gradient), shape ``(n,)`` or ``(n, 1)``
        :raises IndexError: if an index is not that of a stored transition
        :raises TypeError: if indices are not integers
        :raises ValueError: if a TD error is NaN or infinite or its priority too large for the
            sum of all, or the shapes differ. After any of these errors the priorities are
            unchanged.
        """
        self.write(*self._check_update(indices, td_errors))

    def _check_update(self, indices: npt.ArrayLike, td_errors: Any) -> tuple[IntArray, FloatArray]:
        """
        :param indices: indices given by the caller
        :param td_errors: TD errors given by the caller
        :return: indices and priorities as plain arrays, shape ``(n,)`` each
        """
        if isinstance(td_errors, th.Tensor) and td_errors.device.type == "cpu":
            td_errors = td_errors.detach()
            if td_errors.dtype == th.float32:
                td_errors = td_errors.numpy()
        if (
            type(indices) is type(td_errors) is np.ndarray
            and indices.dtype == np.int64
            and indices.ndim == 1
            and td_errors.dtype == np.float32
            and td_errors.shape in ((len(indices),), (len(indices), 1))
        ):
            # The types that a training loop passes
            priorities, is_valid = priorities_of(
                td_errors.ravel(), indices, *self.priority_arguments
            )
            if is_valid:
                return indices, priorities
        # Anything else is converted if possible, with an error that names the fault otherwise
        places = self._check_indices(indices)
        errors = self._check_td_errors(td_errors, places)
        _, eps, exponent, limit = self.priority_arguments
        with np.errstate(over="ignore", under="ignore"):
            bases = np.abs(errors) + eps
            # What is above zero stays so, also where the power is too small for a float
            priorities = np.maximum(bases**exponent, np.where(bases > 0.0, SMALLEST_PRIORITY, 0.0))
        too_large = np.flatnonzero(~(priorities <= limit))
        if too_large.size:
            at = too_large[0]
            raise ValueError(
                f"TD error {errors[at]} of transition {places[at]} is too large: its priority "
                f"(|error| + eps) ** {exponent:g} = {priorities[at]} is above "
                f"{limit:.4g}, the most that {self.tree.capacity} leaves can "
                "hold"
            )
        return places, priorities

    def _check_indices(self, indices: npt.ArrayLike) -> IntArray:
        places = as_indices(indices.cpu().numpy() if isinstance(indices, th.Tensor) else indices)
        if places.ndim > 1 and places.shape != (len(places), 1):
            raise ValueError(f"indices must have the shape (n,), got {places.shape}")
        places = places.ravel()
        outside = (places < 0) | (places >= self.n_transitions)
        if outside.any():
            raise IndexError(
                f"index {places[outside][0]} is not that of a stored transition: there are "
                f"{self.n_transitions}, numbered from 0"
            )
        return places

    @staticmethod
    def _check_td_errors(td_errors: Any, places: IntArray) -> FloatArray:
        if isinstance(td_errors, th.Tensor):
            # Through torch: NumPy has no bfloat16
            td_errors = td_errors.detach().cpu()
            is_real = not td_errors.is_complex()
            td_errors = td_errors.to(th.float64).numpy() if is_real else td_errors.numpy()
        errors = as_floats("TD errors", td_errors)
        n = len(places)
        if errors.shape not in ((n,), (n, 1)) and not (n == 1 and errors.ndim == 0):
            raise ValueError(
                f"one TD error for each index is needed: {n} indices, TD errors of shape "
                f"{errors.shape}"
            )
        errors = errors.ravel()
        faults = np.flatnonzero(~np.isfinite(errors))
        if faults.size:
            raise ValueError(
                f"TD errors must be finite, got {errors[faults[0]]} for transition "
                f"{places[faults[0]]} ({faults.size} of {n} are not finite, at the indices "
                f"{places[faults][:10].tolist()}). Rewards or observations may hold NaN or "
                "infinity, or training may have diverged: check them, or lower the learning rate."
            )
        return errors

    def anneal_beta(self) -> None:
        """Add ``beta_increment`` to ``beta``, up to 1; for hand-written loops."""
        self.beta = min(1.0, self.beta + self.beta_increment)

    @classmethod
    def from_replay_buffer(
        cls: type[SelfBuffer], buffer: ReplayBuffer, **options: Any
    ) -> SelfBuffer:
        """
        Take over the content of one of SB3's buffers, each transition with a priority of 1.

        :param buffer: SB3's counterpart of this class; its arrays are taken over, not copied, so
            don't use it again
        :param options: the keyword-only options of this class; ``n_steps`` and ``gamma`` default
            to those of an ``NStepReplayBuffer``
        :return: a prioritized buffer with the same transitions, which draws them uniformly until
            priorities are updated
        :raises ValueError: if an option is out of its range, or the buffer is of another kind
        """
        options = cls._options_for(buffer, options)
        # As small as it can be, since the arrays are replaced
        prioritized = cls(
            buffer.n_envs,
            buffer.observation_space,
            buffer.action_space,
            device=buffer.device,
            n_envs=buffer.n_envs,
            optimize_memory_usage=buffer.optimize_memory_usage,
            handle_timeout_termination=buffer.handle_timeout_termination,
            **options,
        )
        for name in cls._content:
            setattr(prioritized, name, getattr(buffer, name))
        if not buffer.optimize_memory_usage:
            prioritized.next_observations = buffer.next_observations
        prioritized._start_tree()
        prioritized.tree.update(np.flatnonzero(prioritized.drawable()), 1.0)
        prioritized._n_adds = prioritized._n_known = prioritized.size()
        return prioritized

    @classmethod
    def _options_for(cls, buffer: ReplayBuffer, options: dict[str, Any]) -> dict[str, Any]:
        """
        :param buffer: whose content is to be taken over
        :param options: what the user gave
        :return: the same, with what the buffer says where the user said nothing
        :raises ValueError: if the buffer is of another kind
        """
        if type(buffer) not in cls._counterparts:
            names = " or ".join(counterpart.__name__ for counterpart in cls._counterparts)
            raise ValueError(
                f"{cls.__name__} takes over the content of SB3's {names}, got a "
                f"{type(buffer).__name__}"
            )
        if isinstance(buffer, NStepReplayBuffer):
            options = {"n_steps": buffer.n_steps, "gamma": buffer.gamma, **options}
        return options


# Who asks for SB3's n-step buffer gets one that has `n_steps` and `gamma`, and the same rows
NStepReplayBuffer.register(PrioritizedReplayBuffer)

# What the class is made of as it was written, to know whether somebody replaced a part of it
_NAMES = [name for name in dir(PrioritizedReplayBuffer) if not name.startswith("__")]
_members = attrgetter(*_NAMES)
_MEMBERS = _members(PrioritizedReplayBuffer)
