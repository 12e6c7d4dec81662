"""
What surrounds the arithmetic of a gradient step, done once and not in every step.

Small networks spend most of a step in Python: walking over all modules to list the parameters or
to set the training mode, and starting one kernel for each parameter in the optimizer. Nothing
here changes what is computed.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.policies import BasePolicy
from torch import nn
from torch.optim import Optimizer

__all__ = [
    "PolicyStructure",
    "TrainingModeSwitch",
    "clip_grad_norm",
    "fuse",
    "in_rows",
    "without_fusing",
]

#: Where SB3's and sb3-contrib's own policies live: their ways of setting the mode are known
KNOWN_PACKAGES = ("stable_baselines3", "sb3_contrib")

#: What a user can set to choose an implementation of the optimizer; with these values, none is
NO_CHOICE = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}


class PolicyStructure:
    """
    The modules and parameters of a policy, listed once and again only after a change.

    :param policy: to be listed
    """

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        #: All modules, the policy first
        self.modules = tuple(policy.modules())
        #: All parameters, those of target networks included
        self.parameters = tuple(policy.parameters())
        self._seen = [
            (held, tuple(held.values()))
            for module in self.modules
            for held in (module._modules, module._parameters)
            # Modules without children, or without parameters, don't get any later
            if held
        ]

    def is_current(self) -> bool:
        """:return: whether each module still has the children and the parameters it had"""
        for held, seen in self._seen:
            if len(held) != len(seen) or not all(map(is_, held.values(), seen)):
                return False
        return True

    @classmethod
    def of(cls, policy: nn.Module, known: "PolicyStructure | None") -> "PolicyStructure":
        """
        :param policy: to be listed
        :param known: what was listed last
        :return: the same if it still holds, else a new list
        """
        if known is not None and known.policy is policy and known.is_current():
            return known
        return cls(policy)


class TrainingModeSwitch:
    """
    ``policy.set_training_mode`` without a walk over all modules.

    SB3 calls it three times for each step of the environment. This one remembers which modules
    the policy's own method reaches, and sets their flags. It notices when modules were replaced.

    :param policy: a policy of SB3's whose method this is to stand in for
    """

    def __init__(self, policy: BasePolicy) -> None:
        self._policy = policy
        self._structure: PolicyStructure | None = None
        self._switched: list[nn.Module] = []

    @classmethod
    def install(cls, policy: nn.Module) -> None:
        """
        Stand in for the policy's own method, unless what that one does can't be known: a module
        with a ``train`` of its own, or a ``set_training_mode`` from elsewhere than SB3.

        :param policy: of a model
        """
        if isinstance(policy, BasePolicy) and all(map(_switches_as_usual, policy.modules())):
            policy.set_training_mode = cls(policy)  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the policy lists its own modules
        return {"_policy": self._policy, "_structure": None, "_switched": []}

    def __call__(self, mode: bool) -> None:
        """:param mode: True for training, False for evaluation"""
        structure = PolicyStructure.of(self._policy, self._structure)
        if structure is not self._structure:
            self._structure = structure
            self._learn(structure.modules)
        for module in self._switched:
            # Past nn.Module.__setattr__, which looks for parameters first
            module.__dict__["training"] = mode

    def _learn(self, modules: Sequence[nn.Module]) -> None:
        set_training_mode = type(self._policy).set_training_mode
        set_training_mode(self._policy, False)
        before = [module.training for module in modules]
        set_training_mode(self._policy, True)
        self._switched = [
            module
            for module, was_training in zip(modules, before, strict=True)
            if module.training != was_training
        ]


def _switches_as_usual(module: nn.Module) -> bool:
    own = getattr(type(module), "set_training_mode", None)
    return type(module).train is nn.Module.train and (
        own is None or own.__module__.startswith(KNOWN_PACKAGES)
    )


def in_rows(tensors: Sequence[th.Tensor]) -> npt.NDArray[np.float32]:
    """
    Bring one number for each transition of some batches to the CPU, all at once.

    :param tensors: of each batch, shape ``(batch, 1)``, on any device, without gradient
    :return: shape ``(len(tensors), batch)``
    """
    together = tensors[0] if len(tensors) == 1 else th.stack(tuple(tensors))
    if together.dtype != th.float32:
        # NumPy has no bfloat16
        together = together.to(th.float32)
    return together.cpu().numpy().reshape(len(tensors), -1)


def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float) -> None:
    """
    Scale gradients down to a norm of at most ``max_norm``, with the result of
    ``torch.nn.utils.clip_grad_norm_``.

    :param parameters: whose gradients to take; those without are left out
    :param max_norm: the largest norm allowed, over all gradients together
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    if not _is_well_below(with_gradient, max_norm):
        nn.utils.clip_grad_norm_(with_gradient, max_norm)


def _is_well_below(parameters: Sequence[nn.Parameter], max_norm: float) -> bool:
    """
    :param parameters: all with a gradient
    :param max_norm: the largest norm allowed
    :return: whether the gradients are so small that they would be multiplied by 1, which saves the
        rest; False where it would take long to find out
    """
    squares = 0.0
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.device.type != "cpu" or gradient.layout != th.strided:
            # On a GPU, to look at the norm would be to wait for it
            return False
        flat = gradient.reshape(-1)
        # For networks of a few thousand parameters in half the time of torch's norms
        squares += th.dot(flat, flat).item()
    # With a margin for rounding. Neither NaN nor infinity is below.
    return squares < (0.99 * max_norm) ** 2


def fuse(optimizer: Optimizer) -> bool:
    """
    Let one kernel update all parameters, where torch has such a kernel and the user chose nothing
    about it. Results are those of the loop over parameters, up to rounding.

    :param optimizer: one of torch's own; any other stays as it is
    :return: whether it is now fused by this function
    """
    chosen = any(optimizer.defaults.get(name, value) != value for name, value in NO_CHOICE.items())
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"] or chosen:
        return False
    devices = {
        parameter.device for group in optimizer.param_groups for parameter in group["params"]
    }
    if not all(_has_fused_kernel(type(optimizer), device) for device in devices):
        return False
    for group in optimizer.param_groups:
        group["fused"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), th.Tensor):
                # The kernel reads the number of steps where the parameter is
                state["step"] = state["step"].to(parameter.device, th.float32)
    return True


def _has_fused_kernel(optimizer_class: type[Optimizer], device: th.device) -> bool:
    parameter = nn.Parameter(th.zeros(1, device=device))
    parameter.grad = th.zeros(1, device=device)
    try:
        optimizer_class([parameter], lr=0.1, fused=True).step()  # type: ignore[call-arg]
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


def without_fusing(state_dict: dict[str, Any]) -> dict[str, Any]:
    """
    :param state_dict: of an optimizer that :func:`fuse` has fused
    :return: the same as it was without: what gets saved fits an optimizer of any setting
    """
    return {
        **state_dict,
        "param_groups": [{**group, "fused": None} for group in state_dict["param_groups"]],
    }
