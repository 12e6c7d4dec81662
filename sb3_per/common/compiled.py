"""What algorithms of discrete actions share whose small networks are trained by compiled code."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces

from sb3_per.buffers.replay import check_flag
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.common.losses import Loss
from sb3_per.common.mlp import Architecture, CompiledUpdate, UpdateChoice
from sb3_per.common.off_policy import PrioritizedOffPolicyAlgorithm
from sb3_per.common.priorities import priorities_of

__all__ = ["CompiledOffPolicyAlgorithm"]


class CompiledOffPolicyAlgorithm(PrioritizedOffPolicyAlgorithm):
    """
    Base class of PERDQN and PERQRDQN: where network and optimizer are exactly known, a gradient
    step is compiled code that works on the memory of the parameters and of the optimizer's state,
    and so is the choice of the greedy action (:mod:`~sb3_per.common.mlp` says what is known).
    Anything else is trained by torch, in the plain way. Which one it is is decided again whenever
    it could have changed.

    Its arguments are those of SB3's ``OffPolicyAlgorithm``.
    """

    #: What the policy must be made of
    _architecture: ClassVar[Architecture]
    #: Methods that compiled code stands for: who overrides one is trained in the plain way
    _compiled_methods: ClassVar[tuple[str, ...]] = ("td_errors", "priority_context")

    #: Whether to use compiled code where it can be
    compiled: bool
    double_q: bool
    max_grad_norm: Any
    #: That of the TD errors; quantiles have no other
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
        """Whether ``train`` runs compiled code, by the model as it is now."""
        return self._compiled_update() is not None

    def _compiled_update(self) -> CompiledUpdate | None:
        """:return: what trains the model as it is now; None if torch does"""
        reason = self._reason_for_the_plain_way()
        update = None if reason else self._update_choice.for_training(self.policy)
        if self.verbose >= 1:
            self._tell(reason or self._update_choice.reason)
        return update

    def _reason_for_the_plain_way(self) -> str | None:
        """:return: why compiled code can't stand for this model's own; None if it can"""
        if not self.compiled:
            return "`compiled` is False"
        if not isinstance(self.priority, str):
            return "`priority` is a function"
        # The class that the compiled code was written for
        known = next(cls for cls in type(self).__mro__ if "_architecture" in vars(cls))
        for name in self._compiled_methods:
            if name in vars(self) or getattr(type(self), name) is not getattr(known, name):
                return f"{type(self).__name__} has its own `{name}`"
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
        What follows :meth:`_prepare_replay` in ``train``, by compiled code.

        :param gradient_steps: how many batches
        :param batch_size: number of transitions in each
        :return: whether it could be done so; if not, nothing has changed
        """
        update = self._compiled_update()
        if update is None:
            return False
        self._update_learning_rate(self.policy.optimizer)
        losses, errors, weights = [], [], []
        for _ in range(gradient_steps):
            batch = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            td_errors = update.td_errors(batch, self.gamma, self.double_q)
            # Before the step, so that an error that is not finite stops training while the
            # network is still whole
            self.replay_buffer.update_priorities(
                batch.indices, self._compiled_priorities(batch, td_errors)
            )
            losses.append(update.descend(batch.weights, self.max_grad_norm, self.loss))
            errors.append(td_errors)
            weights.append(batch.weights)
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if losses:
            self.logger.record("train/loss", sum(losses) / len(losses))
            self._record_per(errors, weights)
        return True

    def _compiled_priorities(
        self, batch: PrioritizedReplayBufferSamples, td_errors: th.Tensor
    ) -> th.Tensor:
        if self.priority == "td_error":
            return td_errors
        if self.priority == "clipped":
            # There is one critic. NaN stays, and is refused by the buffer.
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
        :param observation: what ``predict`` was given
        :return: greedy actions; None where the plain way must take over
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
        # An array without dimensions, as from torch
        return actions.squeeze(axis=0) if is_single else actions
