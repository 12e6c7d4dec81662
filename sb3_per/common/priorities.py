"""Priority functions, which compute the priorities of the transitions of a batch."""

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.save_util import data_to_json

from sb3_per.buffers.samples import PrioritizedReplayBufferSamples

__all__ = [
    "PRIORITIES",
    "Priority",
    "PriorityContext",
    "PriorityFunction",
    "check_can_be_saved",
    "check_priority",
    "priorities_of",
]

#: Function of estimates and targets that returns losses or errors
Comparison = Callable[[th.Tensor, th.Tensor], th.Tensor]


def difference(estimates: th.Tensor, targets: th.Tensor) -> th.Tensor:
    """
    :param estimates: Q-values of each critic, shape ``(batch, n_critics)``
    :param targets: shape ``(batch, 1)``
    :return: TD error of each critic, shape ``(batch, n_critics)``
    """
    return targets - estimates


class PriorityContext:
    """
    Argument of a priority function: a batch with its estimates, targets, errors and losses. Each
    attribute is computed when it is read, without gradient, under the networks before the gradient
    step: so read it within the function, not later.

    ====================== =================================== ===================================
    algorithm              :attr:`estimates`                   :attr:`targets`
    ====================== =================================== ===================================
    PERDQN                 ``(batch, 1)``                      ``(batch, 1)``
    PERQRDQN               ``(batch, n_quantiles)``            ``(batch, n_quantiles)``
    PERSAC, PERTD3,        ``(batch, n_critics)``              ``(batch, 1)``
    PERDDPG
    PERTQC                 ``(batch, n_critics, n_quantiles)`` ``(batch, 1, n_target_quantiles)``
    ====================== =================================== ===================================

    :param batch: the batch
    :param estimates: estimates of the critics for the actions of the batch
    :param targets: their targets
    :param errors_of: function of estimates and targets that returns the TD errors, shape
        ``(batch, n_critics)``; targets minus estimates by default
    :param losses_of: function of estimates and targets that returns the loss of each transition,
        shape ``(batch, 1)``
    :param target_estimates: function that returns the estimates of the target network for the same
        actions, shape as ``estimates``
    """

    def __init__(
        self,
        batch: PrioritizedReplayBufferSamples,
        estimates: th.Tensor,
        targets: th.Tensor,
        *,
        errors_of: Comparison = difference,
        losses_of: Comparison | None = None,
        target_estimates: Callable[[], th.Tensor] | None = None,
    ) -> None:
        #: The batch: observations, actions, rewards, dones, weights, indices, ...
        self.batch = batch
        #: Estimates of the critics for its actions
        self.estimates = estimates.detach()
        #: Their targets
        self.targets = targets.detach()
        self._errors_of = errors_of
        self._losses_of = losses_of
        self._target_estimates = target_estimates

    @cached_property
    def critic_td_errors(self) -> th.Tensor:
        """
        TD errors of each critic, with sign, shape ``(batch, n_critics)``: targets minus estimates;
        for PERTQC the mean of the targets minus the mean of the critic's quantiles; for PERQRDQN
        the distance of the two distributions, which has no sign.
        """
        with th.no_grad():
            return self._errors_of(self.estimates, self.targets)

    @cached_property
    def td_errors(self) -> th.Tensor:
        """Absolute TD errors, the mean over the critics, shape ``(batch, 1)``."""
        errors = self.critic_td_errors.abs()
        return errors if errors.shape[1] == 1 else errors.mean(dim=1, keepdim=True)

    @cached_property
    def losses(self) -> th.Tensor:
        """
        Loss of each transition in training, before its weight, shape ``(batch, 1)``: their mean is
        the loss at weights of 1.
        """
        return self._losses_by(self.estimates)

    @cached_property
    def target_losses(self) -> th.Tensor:
        """Losses of the estimates of the target network, with the same targets."""
        if self._target_estimates is None:
            raise TypeError("this algorithm gives no estimates of its target network")
        with th.no_grad():
            return self._losses_by(self._target_estimates())

    def _losses_by(self, estimates: th.Tensor) -> th.Tensor:
        if self._losses_of is None:
            raise TypeError("this algorithm gives no losses of transitions")
        with th.no_grad():
            losses = self._losses_of(estimates, self.targets)
        if losses.shape != (len(estimates), 1):
            raise ValueError(
                f"`losses_of` must return one loss for each transition, shape ({len(estimates)}, "
                f'1), got {tuple(losses.shape)}: use `reduction="none"`'
            )
        return losses


def _td_error(context: PriorityContext) -> th.Tensor:
    # The buffer takes the absolute value of the error of a single critic
    errors = context.critic_td_errors
    return errors if errors.shape[1] == 1 else context.td_errors


def _clipped(context: PriorityContext) -> th.Tensor:
    return context.critic_td_errors.abs().amax(dim=1, keepdim=True).clamp(min=1.0)


def _reducible(context: PriorityContext) -> th.Tensor:
    return (context.losses - context.target_losses).clamp(min=0.0)


#: Function of a context that returns one number of at least 0 for each transition, shape
#: ``(batch, 1)`` or ``(batch,)``
PriorityFunction = Callable[[PriorityContext], th.Tensor]

#: Name of a priority function, or a custom function
Priority = Literal["td_error", "clipped", "reducible"] | PriorityFunction

#: Priority functions by name
PRIORITIES: dict[str, PriorityFunction] = {
    "td_error": _td_error,
    "clipped": _clipped,
    "reducible": _reducible,
}


def check_priority(priority: Any) -> None:
    """
    :param priority: value given by the user
    :raises ValueError: if it is neither a name nor callable
    """
    if isinstance(priority, str) and priority in PRIORITIES:
        return
    if not callable(priority):
        raise ValueError(
            f"`priority` must be one of {sorted(PRIORITIES)} or a function of a PriorityContext, "
            f"got {priority!r}"
        )


def check_can_be_saved(priority: Priority) -> None:
    """
    :param priority: name or function
    :raises ValueError: if it is a function that can't be pickled, or that holds a model
    """
    if isinstance(priority, str):
        return
    if _holds_a_model(priority):
        raise ValueError(
            f"`priority` is {priority!r}, which refers to a model or its buffer: these would go "
            f"into the file with it. {WAYS_OUT}"
        )
    try:
        # As SB3 saves it
        data_to_json({"priority": priority})
    except Exception as error:
        raise ValueError(
            f"`priority` is {priority!r}, which can't be saved with the model "
            f"({type(error).__name__}: {error}). {WAYS_OUT}"
        ) from error


#: What to do about a function that can't be saved
WAYS_OUT = (
    "Make it a function that uses nothing but its context, or save without it, "
    '`save(path, exclude=["priority"])`: the loaded model has "td_error" then, unless '
    "`load(path, priority=...)` gives the function again."
)


def _holds_a_model(function: Any) -> bool:
    """
    :param function: of the user
    :return: whether a model or a buffer is among what is pickled with it: its attributes, what it
        encloses and, in a script or a notebook, global variables
    """
    held = [*getattr(function, "__dict__", {}).values(), getattr(function, "__self__", None)]
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        held += variables.nonlocals.values()
        if function.__module__ == "__main__":
            held += variables.globals.values()
    return any(isinstance(value, BaseAlgorithm | ReplayBuffer) for value in held)


def priorities_of(priority: Priority, context: PriorityContext) -> th.Tensor:
    """
    :param priority: name or function
    :param context: context of a batch
    :return: values that take the place of the absolute TD error in the buffer, shape
        ``(batch, 1)``. For ``"td_error"`` they are unchecked, since the buffer checks them, and
        signed if there is a single critic.
    :raises ValueError: if a TD error or a priority is NaN or infinite, or a priority is negative
        or of another shape
    :raises TypeError: if the function does not return numbers
    """
    if priority == "td_error":
        return _td_error(context)
    indices = context.batch.indices
    # Checked even if the function does not use them
    _check_finite("TD errors", context.td_errors.flatten(), indices, BAD_TD_ERROR)
    name = repr(priority) if isinstance(priority, str) else _name_of(priority)
    function = PRIORITIES[priority] if isinstance(priority, str) else priority
    with th.no_grad():
        returned = function(context)
    try:
        values = th.as_tensor(returned).detach()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"the priority function {name} must return a tensor, got {returned!r}"
        ) from None
    if values.is_complex():
        raise TypeError(f"the priority function {name} must return real numbers, got {values}")
    n = len(indices)
    if values.shape not in ((n,), (n, 1)):
        raise ValueError(
            f"the priority function {name} must return one number for each of the {n} transitions, "
            f"shape ({n}, 1) or ({n},), got {values} of shape {tuple(values.shape)}. Attributes of "
            "the context have the shape (batch, 1): use `keepdim=True` where you reduce."
        )
    values = values.flatten()
    what = f"priorities by {name}"
    _check_finite(what, values, indices, "See what the function divides by or takes the root of.")
    if bool((values < 0).any()):
        faults = (values < 0).nonzero().flatten().tolist()
        raise ValueError(
            f"{what} must be at least 0, got {values[faults[0]].item()} for transition "
            f"{indices[faults[0]]} ({len(faults)} of {n} are negative). Use `.abs()`, or "
            "`.clamp(min=0)` if what is negative should hardly be drawn."
        )
    return values[:, None]


#: Advice for errors about values that are not finite
BAD_TD_ERROR = (
    "Rewards or observations may hold NaN or infinity, or training may have diverged: check them, "
    "or lower the learning rate."
)


def _check_finite(what: str, values: th.Tensor, indices: Any, hint: str) -> None:
    is_finite = th.isfinite(values)
    if not bool(is_finite.all()):
        faults = (~is_finite).nonzero().flatten().tolist()
        raise ValueError(
            f"{what} must be finite, got {values[faults[0]].item()} for transition "
            f"{indices[faults[0]]} ({len(faults)} of {len(values)} are not finite, at the indices "
            f"{[int(indices[at]) for at in faults[:10]]}). {hint}"
        )


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))
