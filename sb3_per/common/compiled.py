"""Base class of algorithms with discrete actions that train small networks by compiled code."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces

from sb3_per.buffers.replay import check_flag
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.common.losses import Loss
from sb3_per.common.mlp import Architecture, CompiledUpdate, Replayed, UpdateChoice
from sb3_per.common.off_policy import PrioritizedOffPolicyAlgorithm
from sb3_per.common.priorities import priorities_of

#: Priorities that compiled code computes from the TD errors alone
BYPASSING = ("td_error", "clipped")

__all__ = ["CompiledOffPolicyAlgorithm"]


class CompiledOffPolicyAlgorithm(PrioritizedOffPolicyAlgorithm):
    """
    Base class of PERDQN and PERQRDQN: for supported networks and optimizers, a gradient step is
    compiled code that works on the memory of the parameters and of the optimizer's state, and so is
    the choice of the greedy action (:mod:`~sb3_per.common.mlp` lists the conditions). All other
    models are trained by torch. The choice is made again whenever it could have changed.

    Takes the arguments of SB3's ``OffPolicyAlgorithm``.
    """

    #: Required architecture of the policy
    _architecture: ClassVar[Architecture]
    #: Methods that compiled code replaces: a class that overrides one is trained by torch
    _compiled_methods: ClassVar[tuple[str, ...]] = ("td_errors", "priority_context")

    #: Whether to use compiled code if possible
    compiled: bool
    double_q: bool
    max_grad_norm: Any
    #: Loss of the TD errors; quantiles have only the Huber loss
    loss: Loss = "huber"
    exploration_rate: float

    def _check_per_options(self) -> None:
        super()._check_per_options()
        check_flag("double_q", self.double_q)
        check_flag("compiled", self.compiled)

    def _setup_model(self) -> None:
        self._update_choice = UpdateChoice(self._architecture)
        self._told_reason: str | None = None
        super()._setup_model()

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_update_choice", "_told_reason"]

    @property
    def uses_compiled_update(self) -> bool:
        """
        Whether ``train`` of this class runs compiled code for the model as it is now. A derived
        class with a ``train`` of its own uses it by calling this one.
        """
        return self._compiled_update()[0] is not None

    def _compiled_update(self) -> tuple[CompiledUpdate | None, str | None]:
        """:return: compiled update of the current model, or None and the reason for torch"""
        reason = self._reason_for_the_plain_way()
        if reason:
            return None, reason
        return self._update_choice.for_training(self.policy), self._update_choice.reason

    def _reason_for_the_plain_way(self) -> str | None:
        """:return: reason why compiled code can't replace this model's methods; None if it can"""
        if not self.compiled:
            return "`compiled` is False"
        if not isinstance(self.priority, str):
            return "`priority` is a function"
        cls = type(self)
        # The class for which the compiled code was written
        known = next(base for base in cls.__mro__ if "_architecture" in vars(base))
        own = vars(self)
        for name in self._compiled_methods:
            if name in own or (cls is not known and getattr(cls, name) is not getattr(known, name)):
                return f"{cls.__name__} has its own `{name}`"
        network = self._architecture.body
        for name in (network, f"{network}_target"):
            if getattr(self, name) is not getattr(self.policy, name):
                return f"`{name}` of the model is not that of its policy"
        return None

    def _tell(self, reason: str | None) -> None:
        text = (
            f"torch trains the network: {reason}" if reason else "compiled code trains the network"
        )
        if text != self._told_reason:
            print(text)
            self._told_reason = text

    def _train_compiled(self, gradient_steps: int, batch_size: int) -> bool:
        """
        Gradient steps after :meth:`_prepare_replay` in ``train``, by compiled code.

        :param gradient_steps: number of gradient steps, each with a batch
        :param batch_size: number of transitions in a batch
        :return: whether compiled code was used; if not, nothing has changed
        """
        update, reason = self._compiled_update()
        if self.verbose >= 1:
            self._tell(reason)
        if update is None:
            return False
        self._update_learning_rate(self.policy.optimizer)
        buffer = self.replay_buffer
        # Other priority functions need the batch
        can_be_bypassed = self._vec_normalize_env is None and self.priority in BYPASSING
        losses, errors, weights = [], [], []
        for _ in range(gradient_steps):
            if can_be_bypassed and update.takes_from(buffer):
                replayed = self._replay_at_once(update, batch_size)
            else:
                batch = buffer.sample(batch_size, env=self._vec_normalize_env)
                replayed = self._replay(update, batch)
            losses.append(replayed.loss)
            errors.append(replayed.errors)
            weights.append(replayed.weights)
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if losses:
            self.logger.record("train/loss", sum(losses) / len(losses))
            self._record_per(errors, weights)
        return True

    def _replay(self, update: CompiledUpdate, batch: PrioritizedReplayBufferSamples) -> Replayed:
        """
        :param update: compiled update of this model
        :param batch: batch from the replay buffer
        :return: values to log
        """
        td_errors = update.td_errors(batch, self.gamma, self.double_q)
        # Before the step, so that a TD error that is not finite stops training before the
        # network changes
        priorities = self._compiled_priorities(batch, td_errors)
        self.replay_buffer.update_priorities(batch.indices, priorities)
        loss = update.descend(batch.weights, self.max_grad_norm, self.loss)
        return Replayed(loss, td_errors, batch.weights)

    def _replay_at_once(self, update: CompiledUpdate, batch_size: int) -> Replayed:
        """
        The same as :meth:`_replay` for a batch drawn here, without the methods of the buffer.

        :param update: compiled update that works on the arrays of the buffer
        :param batch_size: number of transitions
        :return: values to log
        """
        buffer = self.replay_buffer
        indices, masses = buffer.draw(batch_size)
        replayed = update.replay(
            buffer,
            indices,
            masses,
            self.priority == "clipped",
            self.gamma,
            self.double_q,
            self.max_grad_norm,
            self.loss,
        )
        # There is a fault in the batch: the methods raise the error
        return replayed or self._replay(update, buffer.batch_of(indices))

    def _compiled_priorities(
        self, batch: PrioritizedReplayBufferSamples, td_errors: th.Tensor
    ) -> th.Tensor:
        if self.priority == "td_error":
            return td_errors
        if self.priority == "clipped":
            # There is one critic. NaN is kept, and refused by the buffer.
            return td_errors.abs().clamp(min=1.0)
        return priorities_of(self.priority, self.priority_context(batch))

    def predict(
        self,
        observation: npt.NDArray[Any] | dict[str, npt.NDArray[Any]],
        state: tuple[npt.NDArray[Any], ...] | None = None,
        episode_start: npt.NDArray[Any] | None = None,
        deterministic: bool = False,
    ) -> tuple[npt.NDArray[Any], tuple[npt.NDArray[Any], ...] | None]:
        """
        As in SB3: the greedy action, or a random one with the probability ``exploration_rate``.

        :param observation: one observation, or several of shape ``(n, *observation)``
        :param state: not used
        :param episode_start: not used
        :param deterministic: whether to take the greedy action in any case
        :return: the actions, and ``state``
        """
        explores = not deterministic and np.random.rand() < self.exploration_rate
        if explores:
            return self._random_actions(observation), state
        actions = self._compiled_actions(observation)
        if actions is not None:
            return actions, state
        return self.policy.predict(observation, state, episode_start, deterministic)

    def _random_actions(self, observation: Any) -> npt.NDArray[Any]:
        if not self.policy.is_vectorized_observation(observation):
            return np.array(self.action_space.sample())
        one = next(iter(observation.values())) if isinstance(observation, dict) else observation
        return np.array([self.action_space.sample() for _ in range(len(one))])

    def _compiled_actions(self, observation: Any) -> npt.NDArray[Any] | None:
        """
        :param observation: argument of ``predict``
        :return: greedy actions; None if torch must be used
        """
        space: spaces.Space[Any] = self.observation_space
        if not self.compiled or not isinstance(observation, np.ndarray) or space.shape is None:
            return None
        is_single = observation.shape == space.shape
        if not is_single and observation.shape[1:] != space.shape:
            return None
        update = self._update_choice.for_acting(self.policy)
        if update is None:
            return None
        actions = update.greedy_actions(observation[None] if is_single else observation)
        # An array without dimensions, as with torch
        return actions.squeeze(axis=0) if is_single else actions
