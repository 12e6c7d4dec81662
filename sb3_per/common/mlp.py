"""
The compiled update: supported networks, and access to their memory.

Small networks spend most of a gradient step on the overhead of many small operations. For supported
networks and optimizers, the step is compiled code that works on the memory of the parameters and of
the optimizer (:mod:`~sb3_per.common.mlp_kernels`). The network changes as in a step of torch; only
``.grad`` is not set.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from numba import config
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import (
    get_flattened_obs_dim,
    is_image_space,
    preprocess_obs,
)
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.dqn.policies import DQNPolicy, QNetwork
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from sb3_per.buffers.replay import PrioritizedReplayBuffer
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.common.losses import Loss
from sb3_per.common.mlp_kernels import (
    ALL_WELL,
    EXP_AVG,
    ONLINE,
    TARGET,
    AddressArray,
    Float32Array,
    IntArray,
    greedy_actions,
    one_hot,
    replay,
    step,
    td_errors,
)
from sb3_per.trees.sum_kernels import FloatArray

__all__ = ["DQN_ARCHITECTURE", "Architecture", "CompiledUpdate", "UpdateChoice"]

#: Global hooks of torch for every module and every optimizer of the process
GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
)
GLOBAL_OPTIMIZER_HOOKS: tuple[dict[Any, Any], ...] = (
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)

#: Attributes that a network may override: switching modes has no effect on the supported modules
HARMLESS_ATTRIBUTES = {"training", "set_training_mode"}

#: Options of Adam that must be off. Options missing here are supported by the kernel, or choose
#: between implementations of the same update.
MUST_BE_OFF = ("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay")

#: State of Adam for each parameter, in the order of the kernel's addresses
STATE = ("exp_avg", "exp_avg_sq", "step")

#: Number of batch sizes whose memory is kept
N_SIZES_KEPT = 4

#: End of a sequence, so that one that became longer or shorter differs from it
_END = (object(),)
_gradient_state = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_values: Callable[[dict[Any, Any]], Iterable[Any]] = dict.values
_address: Callable[[th.Tensor], int] = th.Tensor.data_ptr
_stride: Callable[[th.Tensor], tuple[int, ...]] = th.Tensor.stride
_numel: Callable[[th.Tensor], int] = th.Tensor.numel


@dataclass(frozen=True)
class Architecture:
    """
    Architecture of a policy.

    :param policy: class of the policy
    :param network: class of the online and of the target network
    :param body: name of the layers in a network, and of the online network in the policy; that of
        the target network has ``_target`` added
    :param has_quantiles: whether the network has ``n_quantiles`` for each action
    """

    policy: type[BasePolicy]
    network: type[BasePolicy]
    body: str
    has_quantiles: bool = False


DQN_ARCHITECTURE = Architecture(DQNPolicy, QNetwork, "q_net")


class Replayed(NamedTuple):
    """
    Values of a gradient step for the log.

    :param loss: weighted loss, before the step
    :param errors: TD errors, shape ``(batch, 1)``
    :param weights: weights of the batch, same shape
    """

    loss: float
    errors: th.Tensor
    weights: th.Tensor


class UnsuitableError(Exception):
    """There is no compiled update; the message says why."""


class _Network:
    """
    A network that the kernels support.

    :param network: online or target network
    :param architecture: required architecture
    :param name: name of the network, for messages
    :raises UnsuitableError: if it has another architecture
    """

    def __init__(self, network: nn.Module, architecture: Architecture, name: str) -> None:
        extractor = _only(network, architecture.network, name).features_extractor
        body = getattr(network, architecture.body)
        layers = list(_only(body, nn.Sequential, f"the layers of {name}"))
        linear = [
            _only(layer, nn.Linear, f"layer {at} of {name}")
            for at, layer in enumerate(layers)
            if at % 2 == 0
        ]
        activations = layers[1::2]
        if len(linear) != len(activations) + 1:
            raise UnsuitableError(f"{name} does not end with a linear layer")
        kind = type(activations[0]) if activations else nn.ReLU
        if kind not in (nn.ReLU, nn.Tanh):
            raise UnsuitableError(f"the activation of {name} is {kind.__name__}, not ReLU or Tanh")
        for activation in activations:
            _only(activation, kind, f"an activation of {name}")
        flatten = _only(extractor, FlattenExtractor, f"the features extractor of {name}").flatten
        _only(flatten, nn.Flatten, f"the features extractor of {name}")
        if (flatten.start_dim, flatten.end_dim) != (1, -1):
            raise UnsuitableError(f"the features extractor of {name} flattens in its own way")
        #: All modules of the network
        self.modules: tuple[nn.Module, ...] = (network, extractor, flatten, body, *layers)
        self.parameters: tuple[nn.Parameter, ...] = ()
        for layer in linear:
            self.parameters += (layer.weight, layer.bias)
        for parameter in self.parameters:
            _check_tensor(parameter, nn.Parameter, f"a parameter of {name}")
        widths = [(layer.in_features, layer.out_features) for layer in linear]
        if any(before[1] != after[0] for before, after in pairwise(widths)) or any(
            tuple(layer.weight.shape) != (n_out, n_in) or tuple(layer.bias.shape) != (n_out,)
            for layer, (n_in, n_out) in zip(linear, widths, strict=True)
        ):
            raise UnsuitableError(f"the layers of {name} don't fit together")
        self.sizes = [widths[0][0], *(n_out for _, n_out in widths)]
        self.is_tanh = kind is nn.Tanh
        #: Dictionaries whose content must not change
        self.held = (
            network._modules,
            extractor._modules,
            body._modules,
            *(layer._parameters for layer in linear),
        )


def _is_autocast_enabled() -> bool:
    """:return: whether torch would compute in another precision on the CPU"""
    try:
        return th.is_autocast_enabled("cpu")
    except TypeError:
        # torch 2.3
        return th.is_autocast_cpu_enabled()


def _only(module: Any, kind: type[Any], name: str) -> Any:
    """
    :param module: module to check
    :param kind: required class, not a derived one, without hooks or replaced methods
    :param name: name of the module, for messages
    :return: the module
    :raises UnsuitableError: if it is of another class or was changed
    """
    if type(module) is not kind:
        raise UnsuitableError(f"{name} is a {type(module).__name__}, not a {kind.__name__}")
    if any(_hooks_of(module)):
        raise UnsuitableError(f"{name} has hooks")
    _check_nothing_replaced(module, name)
    return module


def _check_nothing_replaced(instance: Any, name: str) -> None:
    for attribute in vars(instance).keys() - HARMLESS_ATTRIBUTES:
        if hasattr(type(instance), attribute):
            raise UnsuitableError(f"{name} has {attribute!r} of its own")


def _hooks_of(module: nn.Module) -> tuple[dict[Any, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def _hooks_of_parameters(parameters: Iterable[th.Tensor]) -> list[dict[Any, Any]]:
    _, *hooks = zip(*map(_gradient_state, parameters), strict=True)
    return [hook for hook in chain(*hooks) if hook is not None]


def _check_tensor(tensor: Any, kind: type[th.Tensor], name: str) -> None:
    if type(tensor) is not kind:
        raise UnsuitableError(f"{name} is a {type(tensor).__name__}, not a {kind.__name__}")
    if tensor.dtype != th.float32 or tensor.device.type != "cpu":
        raise UnsuitableError(f"{name} is {tensor.dtype} on {tensor.device}, not float32 on cpu")
    if tensor.layout != th.strided or not tensor.is_contiguous():
        raise UnsuitableError(f"{name} is not contiguous")


def _check_apart(tensors: Iterable[th.Tensor]) -> None:
    places = sorted((tensor.data_ptr(), 4 * tensor.numel()) for tensor in tensors)
    if any(start + length > following for (start, length), (following, _) in pairwise(places)):
        raise UnsuitableError("parameters share memory")


def _check_optimizer(
    optimizer: Any, parameters: Sequence[nn.Parameter]
) -> tuple[dict[Any, Any], ...]:
    """
    :param optimizer: optimizer of the policy
    :param parameters: parameters of the online network
    :return: dictionaries of its hooks
    :raises UnsuitableError: if it isn't torch's Adam for these parameters, with supported options
    """
    if type(optimizer) is not th.optim.Adam:
        raise UnsuitableError(f"the optimizer is {type(optimizer).__name__}, not Adam")
    _check_nothing_replaced(optimizer, "the optimizer")
    hooks: tuple[dict[Any, Any], ...] = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        *GLOBAL_OPTIMIZER_HOOKS,
    )
    if any(hooks):
        raise UnsuitableError("the optimizer has hooks")
    if len(optimizer.param_groups) != 1:
        raise UnsuitableError("the optimizer has several groups of parameters")
    group = optimizer.param_groups[0]
    if not _are_same(group["params"], parameters):
        raise UnsuitableError("the optimizer has other parameters than the network")
    for option in MUST_BE_OFF:
        if group.get(option):
            raise UnsuitableError(f"the optimizer has {option}={group[option]!r}")
    numbers = (*group["betas"], group["eps"], group["weight_decay"], group["lr"])
    if not all(isinstance(number, float | int) for number in numbers):
        raise UnsuitableError("the optimizer's options are not plain numbers")
    return hooks


def _state_of(optimizer: th.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any] | None:
    """
    :return: state of Adam for a parameter; None if there is none yet
    :raises UnsuitableError: if the kernel does not support it
    """
    state: dict[str, Any] | None = optimizer.state.get(parameter)
    if not state:
        return None
    for name in STATE:
        _check_tensor(state.get(name), th.Tensor, f"{name!r} of the optimizer")
    if not parameter.shape == state["exp_avg"].shape == state["exp_avg_sq"].shape:
        raise UnsuitableError("the optimizer's state has other shapes than the parameters")
    if state["step"].numel() != 1:
        raise UnsuitableError("'step' of the optimizer is not one number")
    return state


def _are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


class _Fingerprint:
    """
    Fast check whether modules and tensors are unchanged.

    It compares everything that can be replaced by identity, so that it takes some microseconds.
    Memory of replaced tensors is kept, so that nothing else gets its address.

    :param modules: modules whose classes, hooks and numbers of attributes must not change
    :param held: dictionaries whose values must not change
    :param hooks: dictionaries that must stay empty, besides those of the modules
    :param parameters: parameters whose memory and shape must not change
    :param online: parameters that are learned
    :param states: tensors whose memory must not change
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        held: Sequence[dict[Any, Any]],
        hooks: Sequence[dict[Any, Any]],
        parameters: Sequence[th.Tensor],
        online: Sequence[th.Tensor] = (),
        states: Sequence[th.Tensor] = (),
    ) -> None:
        tensors = (*parameters, *states)
        self._modules = tuple(modules)
        self._classes = tuple(map(type, modules))
        self._attributes = tuple(map(vars, modules))
        self._n_attributes = tuple(map(len, self._attributes))
        self._held = tuple(held)
        self._seen = (*chain.from_iterable(map(_values, held)), *_END)
        self._hooks = (*hooks, *chain.from_iterable(map(_hooks_of, modules)))
        self._tensors = tensors
        self._memory = [tensor.detach() for tensor in tensors]
        self._addresses = tuple(map(_address, tensors))
        self._parameters = tuple(parameters)
        self._strides = tuple(map(_stride, parameters))
        self._numels = tuple(map(_numel, parameters))
        self._online = tuple(online)
        self._gradient_states = tuple(map(_gradient_state, online))

    def holds(self) -> bool:
        """:return: whether nothing has changed"""
        return (
            not any(self._hooks)
            and all(map(is_, map(type, self._modules), self._classes))
            and tuple(map(len, self._attributes)) == self._n_attributes
            and all(
                map(is_, chain(chain.from_iterable(map(_values, self._held)), _END), self._seen)
            )
            and tuple(map(_address, self._tensors)) == self._addresses
            and tuple(map(_stride, self._parameters)) == self._strides
            and tuple(map(_numel, self._parameters)) == self._numels
            and tuple(map(_gradient_state, self._online)) == self._gradient_states
        )


class _Inputs:
    """
    Inputs of the first layer: observations after SB3's ``preprocess_obs`` and a
    ``FlattenExtractor``.

    :param network: network that gets the observations
    :param n_inputs: number of inputs of its first layer
    :raises UnsuitableError: if the preprocessing of SB3 for them is not supported
    """

    def __init__(self, network: BasePolicy, n_inputs: int) -> None:
        space = network.observation_space
        self._space: spaces.Space[Any] = space
        self._n_inputs = n_inputs
        self._one_hot_sizes: IntArray | None = None
        if isinstance(space, spaces.Discrete):
            self._one_hot_sizes = np.array([space.n], np.int64)
        elif isinstance(space, spaces.MultiDiscrete):
            if space.nvec.ndim != 1:
                raise UnsuitableError("observations have more than one dimension of one-hot codes")
            self._one_hot_sizes = space.nvec.astype(np.int64)
        elif not isinstance(space, spaces.Box | spaces.MultiBinary):
            raise UnsuitableError(f"observations are {type(space).__name__}")
        elif not space.shape:
            raise UnsuitableError("observations have no dimension")
        elif is_image_space(space):
            raise UnsuitableError("observations are images")
        wanted = get_flattened_obs_dim(space)
        if wanted != n_inputs:
            raise UnsuitableError(f"{wanted} numbers in an observation, {n_inputs} inputs")

    def are_stored_in(self, observations: npt.NDArray[Any]) -> bool:
        """
        :param observations: array of a replay buffer, shape ``(rows, n_envs, *observation)``
        :return: whether they are stored in the form of the first layer's inputs
        """
        return (
            self._one_hot_sizes is None
            and observations.dtype == np.float32
            and math.prod(observations.shape[2:]) == self._n_inputs
        )

    def of(self, observations: th.Tensor, n: int) -> Float32Array:
        """
        :param observations: shape ``(n, *observation)``, on the CPU
        :param n: required number
        :return: shape ``(n, n_inputs)``
        """
        if self._one_hot_sizes is None:
            if observations.dtype is not th.float32:
                observations = observations.float()
            return np.ascontiguousarray(observations.numpy().reshape(n, self._n_inputs))
        values = observations.long().numpy().reshape(n, len(self._one_hot_sizes))
        inputs = np.empty((n, self._n_inputs), np.float32)
        if not one_hot(np.ascontiguousarray(values), self._one_hot_sizes, inputs):
            # Raises an error that names the fault
            preprocess_obs(observations, self._space)
        return inputs

    def of_array(self, observations: npt.NDArray[Any], n: int) -> Float32Array:
        """
        :meth:`of` an array, in new memory: the given array may be read-only.

        :param observations: shape ``(n, *observation)``
        :param n: required number
        :return: shape ``(n, n_inputs)``
        """
        if self._one_hot_sizes is None and observations.dtype == np.float32:
            return np.array(observations, order="C").reshape(n, self._n_inputs)
        return self.of(th.from_numpy(np.array(observations)), n)


class CompiledUpdate:
    """
    The gradient steps of one model, and its greedy actions, by compiled code.

    A step is two calls: :meth:`td_errors` changes nothing; :meth:`descend` changes the network. In
    between, the replay buffer gets the errors, and refuses those that are not finite.

    It is created by :meth:`of` and can be used as long as :meth:`holds` is true. It belongs to the
    memory of this process: it can't be copied or pickled, but :class:`UpdateChoice` can.

    :param policy: policy of the model
    :param architecture: required architecture
    :raises UnsuitableError: if the policy has another one
    """

    def __init__(self, policy: BasePolicy, architecture: Architecture) -> None:
        if config.DISABLE_JIT:  # type: ignore[attr-defined]  # numba sets it as the module loads
            raise UnsuitableError("numba's compiler is switched off")
        _only(policy, architecture.policy, "the policy")
        self._policy = policy
        name = architecture.body
        self.network: Any = getattr(policy, name)
        self.target: Any = getattr(policy, f"{name}_target")
        online = _Network(self.network, architecture, name)
        target = _Network(self.target, architecture, f"{name}_target")
        if online.sizes != target.sizes or online.is_tanh != target.is_tanh:
            raise UnsuitableError("online and target network differ")
        _check_apart((*online.parameters, *target.parameters))
        if not all(parameter.requires_grad for parameter in online.parameters):
            raise UnsuitableError("parameters are frozen")
        if any(_hooks_of_parameters(online.parameters)):
            raise UnsuitableError("parameters have hooks")
        if any(GLOBAL_HOOKS):
            raise UnsuitableError("hooks are set for all modules")
        self._online, self._target = online, target
        self._sizes = np.array(online.sizes, np.int64)
        # Number of outputs of all layers for one row
        self._n_results = sum(online.sizes[1:])
        self._is_tanh = online.is_tanh
        self._n_quantiles: int = self.network.n_quantiles if architecture.has_quantiles else 0
        self._n_actions = online.sizes[-1] // max(self._n_quantiles, 1)
        if self._n_actions * max(self._n_quantiles, 1) != online.sizes[-1] or (
            self._n_actions != self.network.action_space.n
        ):
            raise UnsuitableError("the number of outputs is not that of the actions")
        self._settings = attrgetter(
            "observation_space",
            "action_space",
            "normalize_images",
            *(["n_quantiles"] if architecture.has_quantiles else []),
        )
        self._known_settings = (*self._settings(self.network), *self._settings(self.target))
        if self._settings(self.network) != self._settings(self.target):
            raise UnsuitableError("online and target network differ")
        self._inputs = _Inputs(self.network, online.sizes[0])
        self._acting = _Fingerprint(
            (policy, *online.modules),
            (policy._modules, *online.held),
            GLOBAL_HOOKS,
            online.parameters,
        )
        self._batch: tuple[Float32Array, IntArray, Float32Array] | None = None
        self._memory: dict[int, tuple[Float32Array, Float32Array, Float32Array]] = {}
        self._discounts: tuple[float, Float32Array] = (0.0, np.empty((0, 1), np.float32))
        self._gradients = np.empty(sum(p.numel() for p in online.parameters), np.float32)
        self._take_optimizer(policy.optimizer)

    @classmethod
    def of(cls, policy: BasePolicy, architecture: Architecture) -> "CompiledUpdate | str":
        """
        :param policy: policy of a model
        :param architecture: required architecture
        :return: its compiled update; or the reason why there is none
        """
        try:
            return cls(policy, architecture)
        except UnsuitableError as reason:
            return str(reason)

    def _take_optimizer(self, optimizer: Any) -> None:
        parameters = self._online.parameters
        hooks = _check_optimizer(optimizer, parameters)
        group = optimizer.param_groups[0]
        states = [state for p in parameters if (state := _state_of(optimizer, p))]
        tensors = [state[name] for name in STATE for state in states]
        _check_apart((*parameters, *self._target.parameters, *tensors))
        self._optimizer = optimizer
        self._group: dict[str, Any] = group
        self._options = itemgetter(*(name for name in group if name not in ("params", "lr")))
        self._known_options = self._options(group)
        self._addresses: AddressArray = np.zeros((5, len(parameters)), np.uint64)
        self._addresses[ONLINE] = [*map(_address, parameters)]
        self._addresses[TARGET] = [*map(_address, self._target.parameters)]
        # Missing state of the optimizer is created at the first step, as in torch
        self._has_state = len(states) == len(parameters)
        if self._has_state:
            self._addresses[EXP_AVG:] = np.reshape([*map(_address, tensors)], (3, -1))
        online, target = self._online, self._target
        self._training = _Fingerprint(
            (self._policy, *online.modules, *target.modules),
            (
                self._policy._modules,
                *online.held,
                *target.held,
                vars(optimizer),
                optimizer.state,
                *states,
            ),
            (*GLOBAL_HOOKS, *hooks, *_hooks_of_parameters(parameters)),
            (*parameters, *target.parameters),
            parameters,
            tensors,
        )

    def holds(self, policy: BasePolicy) -> bool:
        """
        :param policy: current policy of the model
        :return: whether :meth:`td_errors` and :meth:`descend` still have the results of torch
        """
        group = self._group
        groups = self._optimizer.param_groups
        return (
            policy is self._policy
            and policy.optimizer is self._optimizer
            and self._training.holds()
            and self._has_known_settings()
            and len(groups) == 1
            and groups[0] is group
            and self._options(group) == self._known_options
            and isinstance(group["lr"], float | int)
            and _are_same(group["params"], self._online.parameters)
        )

    def holds_for_acting(self, policy: BasePolicy) -> bool:
        """
        :param policy: current policy of the model
        :return: whether :meth:`greedy_actions` still has the results of torch
        """
        return policy is self._policy and self._acting.holds() and self._has_known_settings()

    def _has_known_settings(self) -> bool:
        settings = self._settings
        now = (*settings(self.network), *settings(self.target))
        return all(map(is_, now, self._known_settings))

    def _memory_of(self, n: int) -> tuple[Float32Array, Float32Array, Float32Array]:
        """
        :param n: batch size
        :return: memory for results of layers, twice, and for distributions
        """
        memory = self._memory.get(n)
        if memory is None:
            if len(self._memory) >= N_SIZES_KEPT:
                self._memory.clear()
            size = n * self._n_results
            memory = self._memory[n] = (
                np.empty(size, np.float32),
                np.empty(size, np.float32),
                np.empty(4 * n * self._n_quantiles, np.float32),
            )
        return memory

    def _discounts_of(self, gamma: float, n: int) -> Float32Array:
        known, discounts = self._discounts
        if known != gamma or len(discounts) != n:
            discounts = np.full((n, 1), gamma, np.float32)
            self._discounts = (gamma, discounts)
        return discounts

    def td_errors(
        self, batch: PrioritizedReplayBufferSamples, gamma: float, double_q: bool
    ) -> th.Tensor:
        """
        TD errors of a batch under the current networks. Nothing changes.

        :param batch: batch from the replay buffer
        :param gamma: discount factor, if the batch has no ``discounts``
        :param double_q: whether the online network chooses the next action
        :return: targets minus Q-values; or, for quantiles, the mean distance of sorted targets and
            estimates; shape ``(batch, 1)``, not necessarily finite
        :raises RuntimeError: if an action doesn't exist
        """
        n = len(batch.observations)
        inputs = self._inputs.of(batch.observations, n)
        actions = _column(batch.actions, n, th.int64)
        errors = np.empty((n, 1), np.float32)
        self._batch = inputs, actions, errors
        at = td_errors(
            self._addresses,
            self._sizes,
            self._is_tanh,
            inputs,
            self._inputs.of(batch.next_observations, n),
            actions,
            _column(batch.rewards, n),
            _column(batch.dones, n),
            self._discounts_of(gamma, n)
            if batch.discounts is None
            else _column(batch.discounts, n),
            double_q,
            self._n_quantiles,
            *self._memory_of(n),
            errors,
        )
        if at != ALL_WELL:
            raise RuntimeError(
                f"action {actions[at, 0]} in the replay buffer is out of bounds: there are "
                f"{self._n_actions} actions, numbered from 0"
            )
        return th.from_numpy(errors)

    def descend(
        self, weights: th.Tensor, max_grad_norm: float | None = None, loss: Loss = "huber"
    ) -> float:
        """
        Step of the optimizer on the weighted loss of the last batch of :meth:`td_errors`.

        :param weights: shape ``(batch, 1)``
        :param max_grad_norm: largest norm of the gradient; None for no limit
        :param loss: loss of the TD errors; quantiles have only the Huber loss
        :return: weighted loss, before the step
        :raises RuntimeError: if there was no such batch
        """
        if self._batch is None:
            raise RuntimeError("no batch: ask for its `td_errors` first")
        inputs, actions, errors = self._batch
        if not self._has_state:
            self._make_state()
        n = len(inputs)
        return step(
            self._addresses,
            self._sizes,
            self._is_tanh,
            inputs,
            actions,
            errors,
            _column(weights, n),
            *self._step_arguments(n, max_grad_norm, loss),
        )

    def _step_arguments(
        self, n: int, max_grad_norm: float | None, loss: Loss
    ) -> tuple[
        bool,
        int,
        Float32Array,
        Float32Array,
        Float32Array,
        Float32Array,
        float,
        float,
        float,
        float,
        float,
        float,
    ]:
        group = self._group
        beta_1, beta_2 = group["betas"]
        return (
            loss == "huber",
            self._n_quantiles,
            *self._memory_of(n),
            self._gradients,
            np.inf if max_grad_norm is None else float(max_grad_norm),
            float(group["lr"]),
            beta_1,
            beta_2,
            float(group["eps"]),
            float(group["weight_decay"]),
        )

    def takes_from(self, buffer: PrioritizedReplayBuffer) -> bool:
        """
        :param buffer: replay buffer of the model
        :return: whether :meth:`replay` can work on its arrays
        """
        return (
            self._has_state
            and buffer.can_be_bypassed
            and self._inputs.are_stored_in(buffer.observations)
            and buffer.actions.dtype == np.int64
        )

    def replay(
        self,
        buffer: PrioritizedReplayBuffer,
        indices: IntArray,
        masses: FloatArray,
        is_clipped: bool,
        gamma: float,
        double_q: bool,
        max_grad_norm: float | None,
        loss: Loss,
    ) -> "Replayed | None":
        """
        All steps after a draw in one call of compiled code: gather the batch, :meth:`td_errors`,
        check the priorities, :meth:`descend`, and write the priorities to the buffer. The results
        are those of the buffer's methods and of these two, bit for bit.

        :param buffer: buffer for which :meth:`takes_from` is true; its methods are not called
        :param indices: drawn transitions, shape ``(batch,)``
        :param masses: their masses, shape ``(batch,)``
        :param is_clipped: whether priorities come from ``max(|error|, 1)``; otherwise from
            ``|error|``
        :param gamma: discount factor, if the buffer has no n-step returns
        :param double_q: whether the online network chooses the next action
        :param max_grad_norm: largest norm of the gradient; None for no limit
        :param loss: loss of the TD errors; quantiles have only the Huber loss
        :return: values to log; None if an action or a priority is not allowed, and nothing has
            changed
        """
        n = len(indices)
        errors, weights = np.empty((n, 1), np.float32), np.empty((n, 1), np.float32)
        priorities = np.empty(n, np.float64)
        smallest_mass, beta = buffer.weight_arguments
        n_transitions, eps, exponent, limit = buffer.priority_arguments
        is_well, loss_before = replay(
            buffer.batch_source(indices),
            indices,
            masses,
            smallest_mass,
            beta,
            n_transitions,
            eps,
            exponent,
            limit,
            is_clipped,
            float(gamma),
            double_q,
            errors,
            weights,
            priorities,
            self._addresses,
            self._sizes,
            self._is_tanh,
            *self._step_arguments(n, max_grad_norm, loss),
        )
        if not is_well:
            return None
        buffer.write(indices, priorities)
        return Replayed(loss_before, th.from_numpy(errors), th.from_numpy(weights))

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} works on the memory of its model and can't be copied: make "
            "one for the copy"
        )

    def _make_state(self) -> None:
        for parameter in self._online.parameters:
            state = self._optimizer.state[parameter]
            if not state:
                state["step"] = th.zeros((), dtype=th.float32)
                state["exp_avg"] = th.zeros_like(parameter, memory_format=th.preserve_format)
                state["exp_avg_sq"] = th.zeros_like(parameter, memory_format=th.preserve_format)
        self._take_optimizer(self._optimizer)

    def greedy_actions(self, observations: npt.NDArray[Any]) -> IntArray:
        """
        :param observations: shape ``(n, *observation)``
        :return: greedy action for each, the first one of equal values, shape ``(n,)``
        """
        n = len(observations)
        inputs = self._inputs.of_array(observations, n)
        actions = np.empty(n, np.int64)
        greedy_actions(
            self._addresses,
            self._sizes,
            self._is_tanh,
            inputs,
            np.empty(n * self._n_results, np.float32),
            self._n_actions,
            actions,
        )
        return actions


def _column(tensor: th.Tensor, n: int, dtype: th.dtype = th.float32) -> npt.NDArray[Any]:
    """
    :param tensor: one number for each transition, on the CPU
    :param n: required number
    :param dtype: type of the result
    :return: array of shape ``(n, 1)``
    """
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return np.ascontiguousarray(tensor.numpy().reshape(n, 1))


class UpdateChoice:
    """
    Compiled update of a model, created again whenever the model could have changed.

    :param architecture: required architecture of the policy
    """

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._update: CompiledUpdate | None = None
        # Reason why none could be created the last time
        self._refusal: str | None = None
        #: Reason why there was none in the last call
        self.reason: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The update belongs to the memory of its model
        return {**self.__dict__, "_update": None}

    def for_training(self, policy: BasePolicy) -> CompiledUpdate | None:
        """
        :param policy: policy of the model
        :return: compiled update for its current state; None if only torch can train it
        """
        if not th.is_grad_enabled():
            self.reason = "gradients are switched off"
            return None
        return self._current(policy, CompiledUpdate.holds)

    def for_acting(self, policy: BasePolicy) -> CompiledUpdate | None:
        """
        :param policy: policy of the model
        :return: compiled update for its current state; None if only torch can choose its actions,
            or if there was none at the last check: torch is then used until the next training,
            which costs less than a check at each step
        """
        if self._refusal is not None:
            return None
        return self._current(policy, CompiledUpdate.holds_for_acting)

    def _current(
        self, policy: BasePolicy, holds: Callable[[CompiledUpdate, BasePolicy], bool]
    ) -> CompiledUpdate | None:
        if _is_autocast_enabled():
            self.reason = "autocast is switched on"
            return None
        if self._update is None or not holds(self._update, policy):
            found = CompiledUpdate.of(policy, self._architecture)
            self._update = None if isinstance(found, str) else found
            self._refusal = found if isinstance(found, str) else None
        self.reason = self._refusal
        return self._update
