"""Base class of the algorithms with prioritized replay."""

import io
import pathlib
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import cache
from typing import Any, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.save_util import recursive_getattr
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule, TensorDict
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_per.buffers.dictionary import PrioritizedDictReplayBuffer
from sb3_per.buffers.frames import PrioritizedFrameReplayBuffer
from sb3_per.buffers.her import PrioritizedHerReplayBuffer
from sb3_per.buffers.kernels import batch_means
from sb3_per.buffers.replay import (
    CHOICES,
    InitialPriority,
    Prioritization,
    PrioritizedReplayBuffer,
    WeightNormalization,
    check_choice,
    check_number,
)
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.common.priorities import (
    Priority,
    PriorityContext,
    check_can_be_saved,
    check_priority,
    priorities_of,
)
from sb3_per.common.saving import check_model_file, load_pickle, replaced_file

__all__ = ["PrioritizedOffPolicyAlgorithm"]

SelfAlgorithm = TypeVar("SelfAlgorithm", bound="PrioritizedOffPolicyAlgorithm")

#: SB3's own default, for those who ask for its n-step buffer and name no number
SB3_DEFAULT_N_STEPS = 3

#: Tolerance for a beta schedule outside of [0, 1]: SB3's LinearSchedule leaves it by about 1e-16
ROUNDING = 1e-9

#: Number of new transitions whose errors are computed at once, so that images don't fill the memory
CHUNK = 256

#: Prioritized counterparts of SB3's buffer classes. NStepReplayBuffer is missing here, because its
#: counterpart depends on the observations.
COUNTERPARTS: dict[type[ReplayBuffer], type[PrioritizedReplayBuffer]] = {
    ReplayBuffer: PrioritizedReplayBuffer,
    DictReplayBuffer: PrioritizedDictReplayBuffer,
    HerReplayBuffer: PrioritizedHerReplayBuffer,
}


class BetaSchedule:
    """
    Schedule of beta: linear, then constant (Schaul et al. 2016, section 3.4).

    :param start: value at the beginning
    :param end: value from ``fraction`` on
    :param fraction: fraction of training over which beta changes, in ``[0, 1]``
    """

    def __init__(self, start: float, end: float, fraction: float) -> None:
        self.start = start
        self.end = end
        self.fraction = fraction

    def __call__(self, progress_remaining: float) -> float:
        """
        :param progress_remaining: progress remaining, from 1 to 0
        :return: beta, between ``start`` and ``end`` despite rounding
        """
        progress = 1.0 - progress_remaining
        if progress >= self.fraction:
            return self.end
        beta = self.start + (self.end - self.start) * (progress / self.fraction)
        return min(max(beta, min(self.start, self.end)), max(self.start, self.end))

    def __repr__(self) -> str:
        return f"BetaSchedule(start={self.start}, end={self.end}, fraction={self.fraction})"


class PrioritizedOffPolicyAlgorithm(OffPolicyAlgorithm):
    """
    Prioritized replay for an off-policy algorithm of SB3.

    Put it before the algorithm in the list of base classes, call :meth:`_set_per_options` between
    that algorithm's ``__init__`` (with ``_init_setup_model=False``) and ``_setup_model()``, and
    override ``train()``: SB3's code, with :meth:`_prepare_replay` at its beginning,
    ``self.replay_buffer.update_priorities`` and the weights in the loss for each batch, and
    :meth:`_record_per` at its end. This class chooses the buffer, sets beta by SB3's training
    progress, records the ``per/…`` keys, and handles saving and loading.

    Takes the arguments of SB3's ``OffPolicyAlgorithm``.
    """

    replay_buffer: PrioritizedReplayBuffer
    #: Number of frames in a stack, found in the wrappers of the environment; saved with the model
    _found_frame_stack: int | None = None

    def _set_per_options(
        self,
        *,
        alpha: float = 0.6,
        beta: float | Schedule = 0.4,
        beta_final: float = 1.0,
        beta_fraction: float = 1.0,
        priority_eps: float = 1e-6,
        weight_normalization: WeightNormalization = "batch",
        prioritization: Prioritization = "proportional",
        initial_priority: InitialPriority = "max",
        priority: Priority = "td_error",
    ) -> None:
        """
        Keep the options as attributes, as SB3 does, so that they are saved with the model, and
        ``load(..., alpha=0.5)`` replaces one. They are checked in :meth:`_setup_model`, which is
        called whenever a model is created, and whenever ``train`` applies them. For their meaning
        see :class:`~sb3_per.PERDQN`.

        :param alpha: strength of the prioritization, at least 0
        :param beta: strength of the importance-sampling correction when training starts, in
            ``[0, 1]``; or a schedule
        :param beta_final: strength at the end of ``beta_fraction``, in ``[0, 1]``
        :param beta_fraction: fraction of training over which beta changes, in ``[0, 1]``
        :param priority_eps: constant added to every absolute TD error, at least 0
        :param weight_normalization: ``"batch"`` or ``"buffer"``
        :param prioritization: ``"proportional"`` or ``"rank"``
        :param initial_priority: ``"max"``, or ``"td_error"``, which needs :meth:`td_errors` or
            :meth:`priority_context`
        :param priority: ``"td_error"``, or any other priority function, which needs
            :meth:`priority_context`
        """
        self.alpha = alpha
        self.beta = beta
        self.beta_final = beta_final
        self.beta_fraction = beta_fraction
        self.priority_eps = priority_eps
        self.weight_normalization = weight_normalization
        self.prioritization = prioritization
        self.initial_priority = initial_priority
        self.priority = priority

    def _check_per_options(self) -> None:
        """
        Check the options; algorithms with further options extend this.

        :raises ValueError: if an option is out of its range
        """
        self.alpha = check_number("alpha", self.alpha)
        if not callable(self.beta):
            self.beta = check_number("beta", self.beta, high=1.0)
        self.beta_final = check_number("beta_final", self.beta_final, high=1.0)
        self.beta_fraction = check_number("beta_fraction", self.beta_fraction, high=1.0)
        self.priority_eps = check_number("priority_eps", self.priority_eps)
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        check_choice("initial_priority", self.initial_priority, get_args(InitialPriority))
        check_priority(self.priority)
        base, cls = PrioritizedOffPolicyAlgorithm, type(self)
        has_context = cls.priority_context is not base.priority_context
        if self.priority != "td_error" and not has_context:
            raise ValueError(
                f"`priority={self.priority!r}` needs more of a batch than its TD errors, and "
                f"{cls.__name__} has no method `priority_context(batch)`: define it, or use "
                "'td_error'"
            )
        if self.initial_priority == "td_error":
            if cls.td_errors is base.td_errors and not has_context:
                raise ValueError(
                    f"`initial_priority='td_error'` needs the TD errors of new transitions, and "
                    f"{cls.__name__} has no method `td_errors(batch)`: define it, or use 'max'"
                )
            if self._replays_with_hindsight():
                raise ValueError(
                    "`initial_priority='td_error'` is not supported with hindsight experience "
                    "replay: a new transition has no goal to be measured by until its episode is "
                    "over; use 'max'"
                )

    def _replays_with_hindsight(self) -> bool:
        classes = (self.replay_buffer_class, type(self.replay_buffer))
        return any(isinstance(cls, type) and issubclass(cls, HerReplayBuffer) for cls in classes)

    def td_errors(self, batch: PrioritizedReplayBufferSamples) -> th.Tensor:
        """
        TD errors of a batch under the current networks, for ``initial_priority="td_error"``.

        :param batch: transitions from the replay buffer
        :return: TD errors, shape ``(batch, 1)``; the priorities come from their absolute values
        """
        return self.priority_context(batch).td_errors

    def priority_context(self, batch: PrioritizedReplayBufferSamples) -> PriorityContext:
        """
        Context of a batch for a priority function, under the current networks.

        :param batch: transitions from the replay buffer
        :return: the context
        """
        raise TypeError(f"{type(self).__name__} has no method `priority_context(batch)`")

    def _priorities_of(self, context: PriorityContext) -> th.Tensor:
        """
        Values that ``train`` passes to ``self.replay_buffer.update_priorities``.

        :param context: context of a batch
        :return: values of the option ``priority``, shape ``(batch, 1)``
        :raises ValueError: if the priority function returns invalid priorities
        """
        return priorities_of(self.priority, context)

    @staticmethod
    def _next_observations_of(batch: PrioritizedReplayBufferSamples) -> Any:
        """
        For algorithms that sample the next action from a distribution, which refuses NaN:
        observations after a terminal state do not count, and must not stop training.

        :param batch: transitions from the replay buffer
        :return: their next observations, with zeros for values after a terminal state that are not
            finite
        """

        def readable(observations: th.Tensor) -> th.Tensor:
            if bool(th.isfinite(observations).all()):
                return observations
            is_terminal = batch.dones.reshape(-1, *[1] * (observations.ndim - 1)) > 0.0
            zeros = observations.nan_to_num(0.0, 0.0, 0.0)
            return th.where(is_terminal, zeros, observations)

        observations: Any = batch.next_observations
        if isinstance(observations, dict):
            return {key: readable(part) for key, part in observations.items()}
        return readable(observations)

    def _fork_rng(self) -> AbstractContextManager[None]:
        """:return: context manager that restores the random state of torch at its end"""
        return th.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def _check_spaces(self) -> None:
        if isinstance(self.action_space, spaces.Discrete) and self.action_space.start != 0:
            n, start = self.action_space.n, self.action_space.start
            raise ValueError(
                f"the actions of {self.action_space} start at {start}: Q-values are numbered from "
                "0, so that greedy and random actions would mean different things. Wrap the "
                "environment in a gymnasium.ActionWrapper with the action space "
                f"Discrete({n}) that adds {start} to each action."
            )
        observations = self.observation_space
        parts = observations.values() if isinstance(observations, spaces.Dict) else [observations]
        for part in parts:
            if isinstance(part, spaces.Discrete | spaces.MultiDiscrete) and np.any(part.start):
                raise ValueError(
                    f"observations of {part} start at {part.start}: SB3 encodes them as one-hot "
                    "vectors, numbered from 0. Wrap the environment in a "
                    "gymnasium.ObservationWrapper that subtracts the start from each observation."
                )

    def _setup_model(self) -> None:
        self._check_per_options()
        self._check_spaces()
        if self.replay_buffer is None:
            self.replay_buffer = self._make_replay_buffer()
        # SB3 finds a buffer and creates none. Meanwhile the two attributes describe that buffer, so
        # that SB3 neither chooses a class nor warns about one that the user never gave. Then they
        # are set back to the values given by the user, which are the ones to save.
        asked_for = self.replay_buffer_class, self.n_steps
        self.replay_buffer_class, self.n_steps = type(self.replay_buffer), 1
        try:
            super()._setup_model()
        finally:
            self.replay_buffer_class, self.n_steps = asked_for
        self._fuse_optimizers()

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        # When SB3 resets the environments
        resets = reset_num_timesteps or self._last_obs is None
        if resets and isinstance(self.replay_buffer, PrioritizedReplayBuffer):
            self.replay_buffer.truncate_last_trajectory()
        return super()._setup_learn(
            total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
        )

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """
        As in SB3. With hindsight experience replay, rewards come from the new environment, too.

        :param env: environment to learn from
        :param force_reset: whether to reset it before training continues
        """
        super().set_env(env, force_reset)
        if isinstance(self.replay_buffer, PrioritizedHerReplayBuffer) and self.env is not None:
            self.replay_buffer.set_env(self.env)

    @property
    def beta_schedule(self) -> Schedule:
        """Beta as a function of the progress remaining (from 1 to 0), by the current options."""
        if callable(self.beta):
            return self.beta
        return BetaSchedule(self.beta, self.beta_final, self.beta_fraction)

    def _scheduled_beta(self, progress_remaining: float) -> float:
        """
        :param progress_remaining: progress remaining, from 1 to 0, or below when several
            environments take more steps than requested
        :return: beta at this point of training
        :raises ValueError: if the user's schedule returns a value that is out of range
        """
        beta = self.beta_schedule(max(progress_remaining, 0.0))
        if isinstance(beta, float) and -ROUNDING <= beta <= 1.0 + ROUNDING:
            beta = min(max(beta, 0.0), 1.0)
        return check_number("beta", beta, high=1.0)

    def _make_replay_buffer(self) -> PrioritizedReplayBuffer:
        """
        :return: replay buffer by the options, ``replay_buffer_class`` and ``replay_buffer_kwargs``
        :raises ValueError: if they contradict each other or the class can't be used
        """
        buffer_class = self._prioritized_class()
        options: dict[str, Any] = {
            **self._buffer_options(),
            "beta": self.beta,
            "n_envs": self.n_envs,
            "device": self.device,
            "optimize_memory_usage": self.optimize_memory_usage,
        }
        kwargs = dict(self.replay_buffer_kwargs)
        for name, given in kwargs.items():
            if name == "beta_increment":
                raise ValueError(
                    f"`replay_buffer_kwargs` has beta_increment={given!r}, which only hand-written "
                    f"loops need: {type(self).__name__} takes beta from `beta` to `beta_final` "
                    "over `beta_fraction` of training"
                )
            if name in options and given != options[name]:
                option = "priority_eps" if name == "eps" else name
                raise ValueError(
                    f"`replay_buffer_kwargs` has {name}={given!r}, but `{option}` of "
                    f"{type(self).__name__} is {options[name]!r}: give it once, as `{option}`"
                )
        options["beta"] = self._scheduled_beta(1.0)
        if issubclass(buffer_class, HerReplayBuffer):
            if self.env is None:
                raise ValueError(
                    f"{buffer_class.__name__} computes rewards by the environment: give `env`"
                )
            options["env"] = self.env
        if issubclass(buffer_class, PrioritizedFrameReplayBuffer):
            options.update(self._frame_options())
        buffer = buffer_class(
            self.buffer_size, self.observation_space, self.action_space, **{**kwargs, **options}
        )
        if isinstance(buffer, PrioritizedFrameReplayBuffer):
            self._found_frame_stack = buffer.frame_stack
        return buffer

    def _frame_options(self) -> dict[str, Any]:
        """
        :return: options from which a buffer of frames gets the size of a stack, unless the user
            gave it
        """
        if self.replay_buffer_kwargs.get("frame_stack", "auto") != "auto":
            return {}
        if self.env is not None:
            return {"env": self.env}
        # A model that was loaded without an environment
        return {"frame_stack": self._found_frame_stack or "auto"}

    def _buffer_options(self) -> dict[str, Any]:
        """
        :return: options of a prioritized buffer of this model, except beta, which changes during
            training
        """
        return {
            # Before alpha, since the conversion of stored priorities depends on it
            "prioritization": self.prioritization,
            "alpha": self.alpha,
            "eps": self.priority_eps,
            "weight_normalization": self.weight_normalization,
            "n_steps": self._wanted_n_steps(),
            "gamma": self.gamma,
        }

    def _wanted_n_steps(self) -> int:
        asked_for = self.replay_buffer_class
        if asked_for is NStepReplayBuffer and self.n_steps == 1:
            return cast(int, self.replay_buffer_kwargs.get("n_steps", SB3_DEFAULT_N_STEPS))
        return self.n_steps

    def _prioritized_class(self) -> type[PrioritizedReplayBuffer]:
        """
        :return: class of the replay buffer: ``replay_buffer_class``, or the prioritized counterpart
            of one of SB3's
        :raises ValueError: if there is no counterpart
        """
        asked_for = self.replay_buffer_class
        if isinstance(asked_for, type) and issubclass(asked_for, PrioritizedReplayBuffer):
            return asked_for
        if asked_for in (None, NStepReplayBuffer):
            has_dict = isinstance(self.observation_space, spaces.Dict)
            return PrioritizedDictReplayBuffer if has_dict else PrioritizedReplayBuffer
        counterpart = COUNTERPARTS.get(asked_for) if isinstance(asked_for, type) else None
        if counterpart is None:
            raise ValueError(
                f"`replay_buffer_class` {getattr(asked_for, '__name__', asked_for)!r} draws "
                f"without priorities, so {type(self).__name__} can't use it. Leave it out, or use "
                "sb3_per.PrioritizedReplayBuffer (PrioritizedDictReplayBuffer, "
                "PrioritizedHerReplayBuffer, PrioritizedFrameReplayBuffer) or a class derived "
                "from it."
            )
        return counterpart

    def load_replay_buffer(
        self, path: str | pathlib.Path | io.BufferedIOBase, truncate_last_traj: bool = True
    ) -> None:
        """
        Load a replay buffer that ``save_replay_buffer`` wrote.

        A prioritized buffer is restored bit for bit; the options of this model apply from then on,
        with a warning if they differ. One of SB3's buffers is converted, with a priority of 1 for
        each transition, and a warning.

        :param path: path of the file, or the opened file
        :param truncate_last_traj: with hindsight experience replay, whether to truncate the episode
            that was in progress when the buffer was saved; False continues it
        :raises ValueError: if the buffer does not fit this model (observations, actions, number of
            environments); the model keeps its buffer
        """
        loaded = load_pickle(path, self.verbose)
        if not isinstance(loaded, ReplayBuffer):
            name = path if isinstance(path, str | pathlib.Path) else "the file"
            raise ValueError(
                f"can't load {name}: there is no replay buffer in it, but an object of the type "
                f"{type(loaded).__name__}"
            )
        # As in SB3 from here on, on a buffer that is not the model's yet
        if not hasattr(loaded, "handle_timeout_termination"):
            # Of SB3 before 2.1
            loaded.handle_timeout_termination = False
            loaded.timeouts = np.zeros_like(loaded.dones)
        if isinstance(loaded, HerReplayBuffer):
            if self.env is None:
                raise ValueError(
                    f"a {type(loaded).__name__} computes rewards by the environment: give the "
                    "model one, by `set_env`, before loading"
                )
            loaded.set_env(self.env)
            if truncate_last_traj:
                loaded.truncate_last_trajectory()
        loaded.device = self.device
        self.replay_buffer = self._adopt(loaded)

    def save_replay_buffer(self, path: str | pathlib.Path | io.BufferedIOBase) -> None:
        """
        Save the replay buffer as a pickle file. An existing file is replaced when the
        new one is complete, so that one of the two always exists, complete.

        :param path: path of the file, or a file opened for writing
        :raises OSError: if the file can't be written, for example for lack of space; an old file is
            kept
        """
        if not isinstance(path, str | pathlib.Path):
            super().save_replay_buffer(path)
            return
        with replaced_file(path, "pkl", self.verbose) as file:
            super().save_replay_buffer(file)

    def save(
        self,
        path: str | pathlib.Path | io.BufferedIOBase,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """
        Save the model as a zip file, without its replay buffer. A file that is there already is
        replaced when the new one is complete.

        :param path: path of the file, or a file opened for writing
        :param exclude: names of attributes that are left out, in addition to the default ones
        :param include: names of attributes that are saved in spite of that
        :raises OSError: if the file can't be written, for example for lack of space; an old file is
            kept
        :raises ValueError: if ``priority`` is a function that can't be pickled
        """
        exclude = None if exclude is None else list(exclude)
        if "priority" not in (exclude or []):
            check_can_be_saved(self.priority)
        if not isinstance(path, str | pathlib.Path):
            super().save(path, exclude, include)
            return
        with replaced_file(path, "zip") as file:
            super().save(file, exclude, include)

    @classmethod
    def load(
        cls: type[SelfAlgorithm],
        path: str | pathlib.Path | io.BufferedIOBase,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> SelfAlgorithm:
        """
        Load a model, as in SB3.

        :param path: path of the zip file, or the opened file
        :param env: environment to continue in; None for prediction alone
        :param device: device on which the model runs
        :param custom_objects: objects to use in place of those in the file, by name
        :param print_system_info: whether to print the system info of the file and of this machine
        :param force_reset: whether to reset the environment before training continues
        :param kwargs: options of the algorithm that replace those of the file
        :return: a new model
        :raises ValueError: if there is no model in the file, or it is incomplete
        """
        check_model_file(path)
        return super().load(
            path, env, device, custom_objects, print_system_info, force_reset, **kwargs
        )

    def _adopt(self, loaded: ReplayBuffer) -> PrioritizedReplayBuffer:
        """
        :param loaded: buffer from a file
        :return: buffer of this model with the same content
        :raises ValueError: if it does not fit this model
        """
        for what, theirs, ours in (
            ("number of environments", loaded.n_envs, self.n_envs),
            ("observations", _layout(loaded.observation_space), _layout(self.observation_space)),
            ("actions", _layout(loaded.action_space), _layout(self.action_space)),
        ):
            if theirs != ours:
                raise ValueError(
                    f"the replay buffer in the file does not fit this model, whose own is kept: "
                    f"{what} there {theirs}, here {ours}"
                )
        buffer_class = self._prioritized_class()
        if isinstance(loaded, HerReplayBuffer) != issubclass(buffer_class, HerReplayBuffer):
            raise ValueError(
                f"the replay buffer in the file is a {type(loaded).__name__}, this model works "
                f"with a {buffer_class.__name__}: only one of them replays with hindsight"
            )
        options = self._buffer_options()
        for name, ours in options.items():
            # A plain buffer has at most the options of n-step returns
            theirs = getattr(loaded, name, ours)
            if theirs != ours:
                converts = name == "prioritization"
                _warn(
                    f"the replay buffer in the file was made with {name}={theirs!r}, this model "
                    f"has {ours!r}, which applies from now on; stored priorities "
                    f"{'are converted' if converts else 'stay'}"
                )
                setattr(loaded, name, ours)
        if not isinstance(loaded, PrioritizedReplayBuffer):
            options["beta"] = self._scheduled_beta(self._current_progress_remaining)
            if issubclass(buffer_class, PrioritizedFrameReplayBuffer):
                options["compression"] = self.replay_buffer_kwargs.get("compression")
                options["frame_stack"] = self._found_frame_stack
            converted = buffer_class.from_replay_buffer(loaded, **options)
            _warn(
                f"the replay buffer in the file is a {type(loaded).__name__} without priorities: "
                f"its {converted.n_transitions} transitions all start at priority 1"
            )
            return converted
        if loaded.optimize_memory_usage != self.optimize_memory_usage:
            _warn(
                "the replay buffer in the file was made with "
                f"optimize_memory_usage={loaded.optimize_memory_usage!r}, this model has "
                f"{self.optimize_memory_usage!r}; the buffer stays as it is"
            )
        return loaded

    def _prepare_replay(self) -> None:
        """
        Prepare the replay buffer at the start of ``train``: apply the current options of this model
        to it, set beta by the progress of training, and give new transitions their priorities.

        :raises ValueError: if an option was set to an invalid value, the user's schedule returns a
            beta that is out of range, or the buffer was replaced by one without priorities
        """
        self._check_per_options()
        beta = self._scheduled_beta(self._current_progress_remaining)
        buffer = self.replay_buffer
        if not isinstance(buffer, PrioritizedReplayBuffer):
            raise ValueError(
                f"the replay buffer of this model is a {type(buffer).__name__}, which has no "
                "priorities: PrioritizedReplayBuffer.from_replay_buffer makes one of it that has"
            )
        for name, value in self._buffer_options().items():
            # Most of the time it is already set
            if getattr(buffer, name) != value:
                setattr(buffer, name, value)
        buffer.beta = beta
        if self.initial_priority == "td_error":
            self._measure_new_transitions()

    def _measure_new_transitions(self) -> None:
        """Set the priorities of the transitions added since the last call by their TD errors."""
        buffer = self.replay_buffer
        new = buffer.new_transitions()
        if not len(new):
            return
        # In evaluation mode, so that dropout and batch normalization are not affected
        self.policy.set_training_mode(False)
        with th.no_grad():
            chunks = [new[start : start + CHUNK] for start in range(0, len(new), CHUNK)]
            batches = (buffer.batch_of(chunk, self._vec_normalize_env) for chunk in chunks)
            priorities = [self._initial_priorities_of(batch) for batch in batches]
            # All at once, so that an error that is not finite leaves all priorities as they were
            buffer.update_priorities(new, th.cat(priorities))
        buffer.forget_new()

    def _initial_priorities_of(self, batch: PrioritizedReplayBufferSamples) -> th.Tensor:
        if self.priority == "td_error":
            return self.td_errors(batch)
        return self._priorities_of(self.priority_context(batch))

    def _record_per(self, td_errors: Sequence[th.Tensor], weights: Sequence[th.Tensor]) -> None:
        """
        Record the ``per/…`` keys at the end of ``train``.

        :param td_errors: TD errors of each gradient step, shape ``(batch, 1)``; at least one step
        :param weights: weights of the same batches, same shape
        """
        buffer = self.replay_buffer
        td_error_mean, weight_mean, ess = batch_means(_in_rows(td_errors), _in_rows(weights))
        self.logger.record("per/beta", buffer.beta)
        self.logger.record("per/td_error_mean", td_error_mean)
        self.logger.record("per/weight_mean", weight_mean)
        self.logger.record("per/ess", ess)
        self.logger.record("per/priority_max", buffer.tree.max_priority)
        self.logger.record("per/priority_mean", buffer.tree.total / buffer.n_transitions)

    # An optimizer made faster here is saved as the user made it, so that SB3's own algorithm loads
    # it as one of its own.

    def _fuse_optimizers(self) -> None:
        self._fused = {
            name
            for name in self._get_torch_save_params()[0]
            if isinstance(optimizer := recursive_getattr(self, name), th.optim.Optimizer)
            and fuse(optimizer)
        }

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        """
        As in SB3.

        :return: state-dicts by the names of their objects
        """
        parameters = super().get_parameters()
        for name in self._fused & parameters.keys():
            groups = parameters[name]["param_groups"]
            parameters[name]["param_groups"] = [{**group, "fused": None} for group in groups]
        return parameters

    def set_parameters(
        self,
        load_path_or_dict: str | TensorDict,
        exact_match: bool = True,
        device: th.device | str = "auto",
    ) -> None:
        """
        As in SB3; if anything does not fit, the model keeps all the parameters that it had.

        :param load_path_or_dict: path of a zip file, or the result of :meth:`get_parameters`
        :param exact_match: whether all parameters must be given
        :param device: device on which to load the file
        """
        if not isinstance(load_path_or_dict, dict):
            check_model_file(load_path_or_dict)
        before: Any = deepcopy(self.get_parameters())
        try:
            super().set_parameters(load_path_or_dict, exact_match, device)
        except BaseException:
            # SB3 finds what doesn't fit while it goes on
            super().set_parameters(cast(TensorDict, before))
            raise
        finally:
            self._fuse_optimizers()

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_fused"]


def fuse(optimizer: th.optim.Optimizer) -> bool:
    """
    Use the fused implementation of torch, which updates all parameters in one kernel, if the
    optimizer is Adam and the user chose no implementation. Results are those of the loop over
    parameters, up to rounding.

    :param optimizer: any optimizer; all but Adam are unchanged
    :return: whether this function fused it
    """
    if type(optimizer) is not th.optim.Adam:
        return False
    for group in optimizer.param_groups:
        if group["fused"] is not None or group["foreach"] is not None:
            return False
        if group["capturable"] or group["differentiable"]:
            return False
        if not all(_has_fused_kernel(parameter.device) for parameter in group["params"]):
            return False
    for group in optimizer.param_groups:
        group["fused"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                # The kernel reads the number of steps on the device of the parameter
                state["step"] = state["step"].to(parameter.device, th.float32)
    return True


@cache
def _has_fused_kernel(device: th.device) -> bool:
    parameter = th.zeros(1, device=device, requires_grad=True)
    parameter.grad = th.zeros_like(parameter)
    try:
        th.optim.Adam([parameter], fused=True).step()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _in_rows(tensors: Sequence[th.Tensor]) -> npt.NDArray[np.float32]:
    """
    Copy one number for each transition of some batches to the CPU, all at once.

    :param tensors: one tensor for each batch, shape ``(batch, 1)``, on any device, without gradient
    :return: array of shape ``(len(tensors), batch)``
    """
    together = tensors[0] if len(tensors) == 1 else th.stack(tuple(tensors))
    # NumPy has no bfloat16
    return together.to(th.float32).cpu().numpy().reshape(len(tensors), -1)


def _layout(space: spaces.Space[Any]) -> str:
    """
    :param space: observation or action space
    :return: description of the properties that must be equal for stored transitions to fit; without
        the bounds, which may change between versions of an environment
    """
    if isinstance(space, spaces.Dict):
        return str({key: _layout(part) for key, part in space.items()})
    if isinstance(space, spaces.Box):
        return f"Box of shape {space.shape} and type {space.dtype}"
    return str(space)


def _warn(message: str) -> None:
    # The warning points to the line that called `load_replay_buffer`
    warnings.warn(message, UserWarning, stacklevel=4)
