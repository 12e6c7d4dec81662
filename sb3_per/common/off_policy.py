"""What the algorithms with prioritized replay share."""

import io
import pathlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast, get_args

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.save_util import recursive_getattr
from stable_baselines3.common.type_aliases import Schedule, TensorDict
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_per.buffers.dictionary import PrioritizedDictReplayBuffer
from sb3_per.buffers.her import PrioritizedHerReplayBuffer
from sb3_per.buffers.kernels import LOSS_CODES, batch_means
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
from sb3_per.common.losses import Loss, check_loss
from sb3_per.common.training import (
    PolicyStructure,
    TrainingModeSwitch,
    clip_grad_norm,
    fuse,
    in_rows,
    without_fusing,
)

__all__ = ["PrioritizedOffPolicyAlgorithm"]

#: SB3's own default, for those who ask for its n-step buffer and name no number
SB3_DEFAULT_N_STEPS = 3

#: How far a schedule of the user's may leave [0, 1]: SB3's LinearSchedule does by some 1e-16
ROUNDING = 1e-9

#: New transitions whose errors are measured at once, so that images don't fill the memory
CHUNK = 256

#: What a buffer class of SB3's stands for. Not here: NStepReplayBuffer, whose counterpart depends
#: on the observations.
COUNTERPARTS: dict[type[ReplayBuffer], type[PrioritizedReplayBuffer]] = {
    ReplayBuffer: PrioritizedReplayBuffer,
    DictReplayBuffer: PrioritizedDictReplayBuffer,
    HerReplayBuffer: PrioritizedHerReplayBuffer,
}


class BetaSchedule:
    """
    Beta by the progress of training: linear, then constant (Schaul et al. 2016, section 3.4).

    :param start: value at the beginning
    :param end: value from ``fraction`` on
    :param fraction: of training over which it changes, in ``[0, 1]``
    """

    def __init__(self, start: float, end: float, fraction: float) -> None:
        self.start = start
        self.end = end
        self.fraction = fraction

    def __call__(self, progress_remaining: float) -> float:
        """
        :param progress_remaining: from 1 to 0
        :return: beta, between ``start`` and ``end`` whatever the rounding
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
    override ``train()``, with :meth:`_prepare_buffer` at its beginning and :meth:`_record_per` at
    its end. This class chooses the buffer, sets beta by SB3's training progress, records the
    ``per/…`` keys, and takes care of saving and loading.
    """

    #: Options of some of the algorithms only, checked where they are set
    double_q: bool
    loss: Loss
    initial_priority: InitialPriority

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
        **own_options: Any,
    ) -> None:
        """
        Keep the options as attributes, as SB3 does: so they are saved with the model, and
        ``load(..., alpha=0.5)`` replaces one. They are checked in :meth:`_setup_model`, which
        every way of making a model leads through, and whenever ``train`` applies them.

        :param own_options: that the algorithm has besides; ``double_q``, ``loss`` and
            ``initial_priority`` are checked as those of PERDQN, for others extend
            :meth:`_check_per_options`
        """
        self.alpha = alpha
        self.beta = beta
        self.beta_final = beta_final
        self.beta_fraction = beta_fraction
        self.priority_eps = priority_eps
        self.weight_normalization = weight_normalization
        self.prioritization = prioritization
        for name, value in own_options.items():
            setattr(self, name, value)

    def _check_per_options(self) -> None:
        self.alpha = check_number("alpha", self.alpha)
        if not callable(self.beta):
            self.beta = check_number("beta", self.beta, high=1.0)
        self.beta_final = check_number("beta_final", self.beta_final, high=1.0)
        self.beta_fraction = check_number("beta_fraction", self.beta_fraction, high=1.0)
        self.priority_eps = check_number("priority_eps", self.priority_eps)
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        if hasattr(self, "double_q") and not isinstance(self.double_q, bool | np.bool_):
            raise ValueError(f"`double_q` must be True or False, got {self.double_q!r}")
        if hasattr(self, "loss"):
            check_loss(self.loss)
        if hasattr(self, "initial_priority"):
            check_choice("initial_priority", self.initial_priority, get_args(InitialPriority))
            if self.initial_priority == "td_error" and self._replays_with_hindsight():
                raise ValueError(
                    "`initial_priority='td_error'` is not supported with hindsight experience "
                    "replay: a new transition has no goal to be measured by until its episode is "
                    "over; use 'max'"
                )

    def _replays_with_hindsight(self) -> bool:
        classes = (self.replay_buffer_class, type(self.replay_buffer))
        return any(isinstance(cls, type) and issubclass(cls, HerReplayBuffer) for cls in classes)

    def _check_action_space(self) -> None:
        start = getattr(self.action_space, "start", 0)
        if isinstance(self.action_space, spaces.Discrete) and start != 0:
            raise ValueError(
                f"the actions of {self.action_space} start at {start}: Q-values are numbered from "
                "0, so that greedy and random actions would mean different things. Wrap the "
                f"environment in a gymnasium.ActionWrapper with the action space "
                f"Discrete({self.action_space.n}) that adds {start} to each action."
            )

    def _setup_model(self) -> None:
        self._check_per_options()
        self._check_action_space()
        if self.replay_buffer is None:
            self.replay_buffer = self._make_replay_buffer()
        # SB3 finds a buffer and makes none. For the time being the two attributes say what that
        # buffer is, so that SB3 neither picks a class nor warns of one that the user never gave.
        # Then they are again what the user asked for: that is what gets saved.
        asked_for = self.replay_buffer_class, self.n_steps
        self.replay_buffer_class, self.n_steps = type(self.replay_buffer), 1
        try:
            super()._setup_model()
        finally:
            self.replay_buffer_class, self.n_steps = asked_for
        self._structure: PolicyStructure | None = None
        TrainingModeSwitch.install(self.policy)
        self._fuse_optimizers()

    @property
    def beta_schedule(self) -> Schedule:
        """Beta as a function of the progress remaining (from 1 to 0), by the present options."""
        if callable(self.beta):
            return self.beta
        return BetaSchedule(self.beta, self.beta_final, self.beta_fraction)

    def _scheduled_beta(self, progress_remaining: float) -> float:
        """
        :param progress_remaining: from 1 to 0, or below when several environments make more steps
            than were asked for
        :return: beta at this point of training
        :raises ValueError: if a schedule of the user's returns what is no beta
        """
        beta = self.beta_schedule(max(progress_remaining, 0.0))
        if isinstance(beta, float) and -ROUNDING <= beta <= 1.0 + ROUNDING:
            beta = min(max(beta, 0.0), 1.0)
        return check_number("beta", beta, high=1.0)

    def _make_replay_buffer(self) -> PrioritizedReplayBuffer:
        """
        :return: the buffer that the options, ``replay_buffer_class`` and ``replay_buffer_kwargs``
            ask for
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
        return buffer_class(
            self.buffer_size, self.observation_space, self.action_space, **{**kwargs, **options}
        )

    def _buffer_options(self) -> dict[str, Any]:
        """
        :return: the options that a prioritized buffer of this model must have, beta aside, which
            changes during training
        """
        return {
            # Before alpha, by which stored priorities are converted
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
        :return: the class for ``replay_buffer_class``, where one of SB3's stands for its
            prioritized counterpart
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
                "PrioritizedHerReplayBuffer) or a class derived from it."
            )
        return counterpart

    def load_replay_buffer(
        self, path: str | pathlib.Path | io.BufferedIOBase, truncate_last_traj: bool = True
    ) -> None:
        """
        Load a replay buffer that ``save_replay_buffer`` wrote.

        A prioritized buffer comes back as it was, to the last bit; the options of this model apply
        from then on, with a warning where they differ. One of SB3's own buffers is converted, with
        each transition at priority 1, and a warning.

        :param path: path of the file, or the opened file
        :param truncate_last_traj: with hindsight experience replay, take the episode that ran
            when the buffer was saved as over; False goes on with it
        :raises ValueError: if the buffer does not fit this model (observations, actions, number of
            environments); the model keeps the buffer that it had
        """
        before = self.replay_buffer
        try:
            super().load_replay_buffer(path, truncate_last_traj)
            self.replay_buffer = self._adopt(cast(ReplayBuffer, self.replay_buffer))
        except BaseException:
            self.replay_buffer = before
            raise

    def _adopt(self, loaded: ReplayBuffer) -> PrioritizedReplayBuffer:
        """
        :param loaded: a buffer from a file
        :return: the same content as a buffer of this model
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
                _warn(
                    f"the replay buffer in the file was made with {name}={theirs!r}, this model "
                    f"has {ours!r}, which applies from now on; stored priorities stay"
                )
                setattr(loaded, name, ours)
        if not isinstance(loaded, PrioritizedReplayBuffer):
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

    def _prepare_buffer(self) -> None:
        """
        Apply the options of this model, as they are now, to its buffer, and set beta by the
        progress of training.

        :raises ValueError: if an option was set to what it can't be, a schedule of the user's
            returns what is no beta, or the buffer was replaced by one without priorities
        """
        self._check_per_options()
        beta = self._scheduled_beta(self._current_progress_remaining)
        buffer = cast(PrioritizedReplayBuffer, self.replay_buffer)
        if not hasattr(buffer, "update_priorities"):
            raise ValueError(
                f"the replay buffer of this model is a {type(buffer).__name__}, which has no "
                "priorities: PrioritizedReplayBuffer.from_replay_buffer makes one of it that has"
            )
        for name, value in self._buffer_options().items():
            # Most of the time it is so already
            if getattr(buffer, name, None) != value:
                setattr(buffer, name, value)
        buffer.beta = beta

    def _measure_new(
        self, td_errors_of: Callable[[PrioritizedReplayBufferSamples], th.Tensor]
    ) -> None:
        """
        Give the transitions added since the last call the priorities of their own TD errors.

        :param td_errors_of: of a batch, under the networks as they are, shape ``(batch, 1)``
        """
        buffer = cast(PrioritizedReplayBuffer, self.replay_buffer)
        new = buffer.new_transitions()
        if not len(new):
            return
        # As when acting: dropout and batch normalization must not notice
        self.policy.set_training_mode(False)
        with th.no_grad():
            chunks = [new[start : start + CHUNK] for start in range(0, len(new), CHUNK)]
            batches = (buffer.batch_of(chunk, self._vec_normalize_env) for chunk in chunks)
            # All at once, so that an error that is not finite leaves all priorities as they were
            buffer.update_priorities(new, th.cat([td_errors_of(batch) for batch in batches]))
        buffer.forget_new()

    def _sample(self, batch_size: int) -> PrioritizedReplayBufferSamples:
        """
        :param batch_size: number of transitions
        :return: a batch, normalized if the environment is
        """
        buffer = cast(PrioritizedReplayBuffer, self.replay_buffer)
        return buffer.sample(batch_size, env=self._vec_normalize_env)

    def _policy_parameters(self) -> tuple[th.nn.Parameter, ...]:
        """:return: all parameters of the policy, as ``policy.parameters()`` lists them"""
        self._structure = PolicyStructure.of(self.policy, self._structure)
        return self._structure.parameters

    def _step_policy(self, outputs: th.Tensor, gradient: th.Tensor | None = None) -> None:
        """
        One step of the policy's optimizer, with gradients cut to ``max_grad_norm`` where the
        algorithm has one.

        :param outputs: what to go back from: the loss, shape ``()``, or predictions of any shape
        :param gradient: derivative of the loss by ``outputs``, same shape; not for the loss itself
        """
        parameters = self._policy_parameters()
        for parameter in parameters:
            parameter.grad = None
        outputs.backward(gradient)  # type: ignore[no-untyped-call]
        max_grad_norm: float | None = getattr(self, "max_grad_norm", None)
        if max_grad_norm is not None:
            clip_grad_norm(parameters, max_grad_norm)
        self.policy.optimizer.step()

    def _record_per(
        self,
        td_errors: Sequence[th.Tensor],
        weights: Sequence[th.Tensor],
        loss: Loss | None = None,
    ) -> None:
        """
        Record the ``per/…`` keys of one call of ``train``.

        :param td_errors: those of each gradient step, shape ``(batch, 1)``; at least one step
        :param weights: of the same batches, same shape
        :param loss: record ``train/loss``, too, the mean of the weighted losses of the TD errors
        """
        buffer = cast(PrioritizedReplayBuffer, self.replay_buffer)
        td_error_mean, weight_mean, ess, loss_mean = batch_means(
            in_rows(td_errors), in_rows(weights), LOSS_CODES[loss] if loss else 0
        )
        if loss:
            self.logger.record("train/loss", loss_mean)
        self.logger.record("per/beta", buffer.beta)
        self.logger.record("per/td_error_mean", td_error_mean)
        self.logger.record("per/weight_mean", weight_mean)
        self.logger.record("per/ess", ess)
        self.logger.record("per/priority_max", buffer.tree.max_priority)
        self.logger.record("per/priority_mean", buffer.tree.total / buffer.n_transitions)

    # Saving and loading: an optimizer made faster here is saved as the user made it, so that SB3's
    # own algorithm loads it as one of its own.

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

        :return: from names of objects to their state-dicts
        """
        parameters = super().get_parameters()
        for name in self._fused & parameters.keys():
            parameters[name] = without_fusing(parameters[name])
        return parameters

    def set_parameters(
        self,
        load_path_or_dict: str | TensorDict,
        exact_match: bool = True,
        device: th.device | str = "auto",
    ) -> None:
        """
        As in SB3.

        :param load_path_or_dict: path of a zip file, or what :meth:`get_parameters` returned
        :param exact_match: whether all parameters must be there
        :param device: on which to load the file
        """
        super().set_parameters(load_path_or_dict, exact_match, device)
        self._fuse_optimizers()

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_structure", "_fused"]


def _layout(space: spaces.Space[Any]) -> str:
    """
    :param space: of observations or actions
    :return: what must be the same for stored transitions to fit; not the bounds, which may change
        between versions of an environment without harm
    """
    if isinstance(space, spaces.Box):
        return f"Box of shape {space.shape} and type {space.dtype}"
    return str(space)


def _warn(message: str) -> None:
    # Points at the line that called `load_replay_buffer`
    warnings.warn(message, UserWarning, stacklevel=4)
