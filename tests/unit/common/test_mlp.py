"""The compiled update does what torch does, and only where it is known to."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.qrdqn.policies import QRDQNPolicy, QuantileNetwork
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.dqn.policies import CnnPolicy, DQNPolicy, QNetwork
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.common import mlp_kernels
from sb3_per.common.losses import LOSSES, Loss, quantile_huber_loss
from sb3_per.common.mlp import DQN_ARCHITECTURE, Architecture, CompiledUpdate, UpdateChoice

QUANTILE_ARCHITECTURE = Architecture(QRDQNPolicy, QuantileNetwork, "quantile_net", True)


def make_policy(
    n_inputs: int = 4,
    n_actions: int = 3,
    net_arch: tuple[int, ...] = (8, 8),
    activation: type[nn.Module] = nn.ReLU,
    n_quantiles: int = 0,
    learning_rate: float = 1e-3,
    space: spaces.Space[Any] | None = None,
    **optimizer_kwargs: Any,
) -> BasePolicy:
    """
    :param n_quantiles: of each action; 0 for a policy of DQN
    :return: a policy whose target network differs from the online one
    """
    kind: Any = QRDQNPolicy if n_quantiles else DQNPolicy
    policy = kind(
        space or spaces.Box(-np.inf, np.inf, (n_inputs,)),
        spaces.Discrete(n_actions),
        lambda _: learning_rate,
        net_arch=list(net_arch),
        activation_fn=activation,
        optimizer_kwargs=optimizer_kwargs,
        **({"n_quantiles": n_quantiles} if n_quantiles else {}),
    )
    with th.no_grad():
        for parameter in networks(policy)[1].parameters():
            parameter += 0.1 * th.randn(parameter.shape)
    return cast(BasePolicy, policy)


def architecture_of(policy: BasePolicy) -> Architecture:
    return QUANTILE_ARCHITECTURE if isinstance(policy, QRDQNPolicy) else DQN_ARCHITECTURE


def networks(policy: BasePolicy) -> tuple[Any, Any]:
    """:return: online and target network"""
    name = architecture_of(policy).body
    return getattr(policy, name), getattr(policy, f"{name}_target")


def compiled(policy: BasePolicy) -> CompiledUpdate:
    """:return: the update of a policy that must have one"""
    update = CompiledUpdate.of(policy, architecture_of(policy))
    assert isinstance(update, CompiledUpdate), update
    return update


def make_batch(
    rng: np.random.Generator,
    n: int = 16,
    n_inputs: int = 4,
    n_actions: int = 3,
    has_discounts: bool = False,
) -> PrioritizedReplayBufferSamples:
    """:return: a batch of random transitions, some of them terminal"""

    def column(values: Any, dtype: Any = np.float32) -> th.Tensor:
        return th.from_numpy(values.astype(dtype).reshape(n, -1))

    return PrioritizedReplayBufferSamples(
        observations=column(rng.normal(size=(n, n_inputs))),
        actions=column(rng.integers(n_actions, size=n), np.int64),
        next_observations=column(rng.normal(size=(n, n_inputs))),
        dones=column(rng.random(n) < 0.2),
        rewards=column(2.0 * rng.normal(size=n)),
        discounts=column(0.9 + 0.1 * rng.random(n)) if has_discounts else None,
        weights=column(rng.random(n)),
        indices=np.arange(n),
    )


def permuted(batch: PrioritizedReplayBufferSamples, order: Any) -> PrioritizedReplayBufferSamples:
    """:return: the batch with its rows in another order"""
    fields: Any = [None if value is None else value[order] for value in batch]
    return PrioritizedReplayBufferSamples(*fields)


def torch_outputs(
    policy: BasePolicy, batch: PrioritizedReplayBufferSamples, gamma: float, double_q: bool
) -> tuple[th.Tensor, th.Tensor]:
    """:return: outputs for the actions of the batch, and their targets, shape ``(n, outputs)``"""
    online, target = networks(policy)
    n = len(batch.indices)
    n_actions = int(policy.action_space.n)  # type: ignore[attr-defined]

    def of(outputs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        outputs = outputs.view(n, -1, n_actions)
        return outputs.gather(2, actions[:, :, None].expand(-1, outputs.shape[1], 1)).squeeze(2)

    with th.no_grad():
        chooser = online if double_q else target
        values = chooser(batch.next_observations).view(n, -1, n_actions).mean(dim=1)
        following = of(target(batch.next_observations), values.argmax(dim=1, keepdim=True))
        discounts = gamma if batch.discounts is None else batch.discounts
        targets = batch.rewards + th.where(batch.dones > 0, 0.0, discounts * following)
    return of(online(batch.observations), batch.actions), targets


def torch_step(
    policy: BasePolicy,
    batch: PrioritizedReplayBufferSamples,
    gamma: float = 0.99,
    double_q: bool = False,
    loss: Loss = "huber",
    max_grad_norm: float | None = 10.0,
) -> tuple[th.Tensor, float]:
    """
    The plain way, by torch.

    :return: TD errors, shape ``(n, 1)``, and the loss
    """
    outputs, targets = torch_outputs(policy, batch, gamma, double_q)
    if isinstance(policy, QRDQNPolicy):
        distances = targets.sort(dim=1).values - outputs.detach().sort(dim=1).values
        td_errors = distances.abs().mean(dim=1, keepdim=True)
        losses = quantile_huber_loss(outputs, targets)
    else:
        td_errors = targets - outputs.detach()
        losses = LOSSES[loss](outputs, targets)
    mean = (batch.weights * losses).mean()
    policy.optimizer.zero_grad()
    mean.backward()  # type: ignore[no-untyped-call]
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
    policy.optimizer.step()
    return td_errors, mean.item()


def compiled_step(
    update: CompiledUpdate,
    batch: PrioritizedReplayBufferSamples,
    gamma: float = 0.99,
    double_q: bool = False,
    loss: Loss = "huber",
    max_grad_norm: float | None = 10.0,
) -> tuple[th.Tensor, float]:
    """:return: as :func:`torch_step`"""
    td_errors = update.td_errors(batch, gamma, double_q)
    return td_errors, update.descend(batch.weights, max_grad_norm, loss)


def flat_parameters(policy: BasePolicy) -> th.Tensor:
    """:return: those of the online network, shape ``(n,)``, a copy"""
    return nn.utils.parameters_to_vector(networks(policy)[0].parameters()).detach()


def flat_state(policy: BasePolicy, key: str) -> th.Tensor:
    """:return: a part of Adam's state, for the parameters in their order, shape ``(n,)``, a copy"""
    state = policy.optimizer.state
    return th.cat([state[p][key].reshape(-1) for p in networks(policy)[0].parameters()])


def distance(policy: BasePolicy, other: BasePolicy) -> float:
    """:return: between the parameters of two policies, relative to their norm"""
    ours, theirs = flat_parameters(policy), flat_parameters(other)
    return float((ours - theirs).norm() / theirs.norm())


def twin_of(policy: BasePolicy) -> BasePolicy:
    """:return: a copy with an optimizer of its own"""
    return copy.deepcopy(policy)


# --- the same as torch ---------------------------------------------------------------------------


def random_case(seed: int) -> tuple[dict[str, Any], dict[str, Any], int, bool]:
    """:return: arguments of a policy, of a step, the batch size, whether batches have discounts"""
    rng = np.random.default_rng(seed)
    depth = seed % 5
    policy = {
        "n_inputs": int(rng.integers(1, 40)),
        "n_actions": int(rng.integers(2, 19)),
        "net_arch": tuple(int(width) for width in 300 ** rng.random(depth)),
        "activation": nn.Tanh if seed % 2 else nn.ReLU,
        "weight_decay": float(rng.choice([0.0, 0.1])),
        "betas": [(0.9, 0.999), (0.0, 0.9), (0.5, 0.99)][rng.integers(3)],
        "eps": float(rng.choice([1e-8, 1e-3])),
        "learning_rate": 3e-4,
    }
    step = {
        "gamma": float(rng.choice([0.9, 1.0])),
        "double_q": bool(rng.integers(2)),
        "loss": ["huber", "mse"][rng.integers(2)],
        "max_grad_norm": [None, 1e-3, 1.0, 1e6][rng.integers(4)],
    }
    return policy, step, int(300 ** rng.random()), bool(rng.integers(2))


@pytest.mark.parametrize("seed", range(25))
def test_steps_are_those_of_torch(seed: int) -> None:
    """Random depth, widths, activation, actions, batch size and options; Adam's state, too."""
    policy_kwargs, step_kwargs, n, has_discounts = random_case(seed)
    th.manual_seed(seed)
    policy = make_policy(**policy_kwargs)
    twin = twin_of(policy)
    update = compiled(policy)
    rng = np.random.default_rng(seed)
    n_inputs, n_actions = policy_kwargs["n_inputs"], policy_kwargs["n_actions"]
    for _ in range(3):
        batch = make_batch(rng, n, n_inputs, n_actions, has_discounts)
        td_errors, loss = compiled_step(update, batch, **step_kwargs)
        expected_errors, expected_loss = torch_step(twin, batch, **step_kwargs)
        th.testing.assert_close(td_errors, expected_errors, rtol=1e-5, atol=1e-5)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert distance(policy, twin) < 2e-6
    for key in ("exp_avg", "exp_avg_sq"):
        ours, theirs = flat_state(policy, key), flat_state(twin, key)
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), key
    assert th.equal(flat_state(policy, "step"), flat_state(twin, "step"))
    assert set(flat_state(policy, "step").tolist()) == {3.0}


@pytest.mark.parametrize("double_q", [False, True])
@pytest.mark.parametrize("n_quantiles", [1, 2, 25, 200])
@pytest.mark.parametrize(("n", "activation"), [(1, nn.Tanh), (19, nn.ReLU)])
def test_steps_on_quantiles_are_those_of_torch(
    n_quantiles: int, n: int, activation: type[nn.Module], double_q: bool
) -> None:
    policy = make_policy(net_arch=(20,), activation=activation, n_quantiles=n_quantiles)
    twin = twin_of(policy)
    update = compiled(policy)
    rng = np.random.default_rng(n_quantiles)
    for _ in range(3):
        batch = make_batch(rng, n)
        td_errors, loss = compiled_step(update, batch, double_q=double_q, max_grad_norm=None)
        expected = torch_step(twin, batch, double_q=double_q, max_grad_norm=None)
        th.testing.assert_close(td_errors, expected[0], rtol=1e-5, atol=1e-6)
        assert loss == pytest.approx(expected[1], rel=1e-5)
    assert distance(policy, twin) < 2e-6
    for key in ("exp_avg", "exp_avg_sq"):
        ours, theirs = flat_state(policy, key), flat_state(twin, key)
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), key


@pytest.mark.parametrize(
    "kwargs",
    [
        {"net_arch": (64, 64)},
        {"net_arch": (32,), "activation": nn.Tanh, "weight_decay": 1e-3},
        {"net_arch": (16,), "n_quantiles": 10},
    ],
    ids=["two layers", "tanh", "quantiles"],
)
def test_after_many_steps_it_is_no_further_from_torch_than_torch_from_itself(
    kwargs: dict[str, Any],
) -> None:
    """The order of the rows in a batch changes nothing but the rounding."""
    policy = make_policy(**kwargs, learning_rate=3e-4)
    plain, shuffled = twin_of(policy), twin_of(policy)
    start = twin_of(policy)
    update = compiled(policy)
    rng = np.random.default_rng(0)
    batches = [make_batch(rng, 32) for _ in range(20)]
    for step in range(500):
        batch = batches[step % len(batches)]
        compiled_step(update, batch)
        torch_step(plain, batch)
        torch_step(shuffled, permuted(batch, rng.permutation(32)))
    assert distance(start, plain) > 0.05
    assert distance(policy, plain) < 1e-5
    assert distance(policy, plain) < 2 * distance(shuffled, plain) + 1e-7


def test_runs_are_the_same_to_the_last_bit_wherever_the_memory_is() -> None:
    policy = make_policy(net_arch=(33, 17))
    twins = [policy, *(twin_of(policy) for _ in range(3))]
    keep = []
    for twin in twins:
        update = compiled(twin)
        rng = np.random.default_rng(0)
        for n in (32, 7, 32):
            compiled_step(update, make_batch(rng, n))
            keep.append(np.empty(rng.integers(1000), np.float32))
    assert all(th.equal(flat_parameters(twin), flat_parameters(policy)) for twin in twins)
    assert all(
        th.equal(flat_state(twin, "exp_avg"), flat_state(policy, "exp_avg")) for twin in twins
    )


def test_both_ways_can_take_turns() -> None:
    policy = make_policy()
    twin = twin_of(policy)
    choice = UpdateChoice(DQN_ARCHITECTURE)
    rng = np.random.default_rng(0)
    for turn in range(8):
        batch = make_batch(rng)
        torch_step(twin, batch)
        if turn in (0, 3, 4, 7):
            torch_step(policy, batch)
        else:
            update = choice.for_training(policy)
            assert update is not None
            compiled_step(update, batch)
    assert distance(policy, twin) < 1e-6
    assert set(flat_state(policy, "step").tolist()) == {8.0}


def test_one_compiled_form_serves_all_depths_widths_and_options() -> None:
    for n_quantiles in (0, 5):
        for net_arch in ((), (3,), (8, 8, 8)):
            policy = make_policy(net_arch=net_arch, n_quantiles=n_quantiles)
            update = compiled(policy)
            for n in (1, 5):
                compiled_step(update, make_batch(np.random.default_rng(0), n))
                update.greedy_actions(np.zeros((n, 4), np.float32))
    kernels: list[Any] = [mlp_kernels.td_errors, mlp_kernels.step, mlp_kernels.greedy_actions]
    assert [len(kernel.signatures) for kernel in kernels] == [1, 1, 1]


# --- errors before anything changes ------------------------------------------------------------


def whole_state(policy: BasePolicy) -> bytes:
    return pickle.dumps((policy.state_dict(), policy.optimizer.state_dict()))


@pytest.mark.parametrize("n_quantiles", [0, 5])
def test_td_errors_change_nothing(n_quantiles: int) -> None:
    policy = make_policy(n_quantiles=n_quantiles)
    update = compiled(policy)
    batch = make_batch(np.random.default_rng(0))
    for _ in range(2):
        before = whole_state(policy)
        batch.rewards[3] = np.nan
        td_errors = update.td_errors(batch, 0.99, double_q=True)
        assert td_errors.isnan().nonzero()[:, 0].tolist() == [3]
        assert whole_state(policy) == before
        batch.rewards[3] = 0.0
        # Once with the state that the first step makes, too
        compiled_step(update, batch)
        assert whole_state(policy) != before


@pytest.mark.parametrize("n_quantiles", [0, 5])
@pytest.mark.parametrize("double_q", [False, True])
def test_what_follows_a_terminal_transition_does_not_count_not_even_as_nan(
    n_quantiles: int, double_q: bool
) -> None:
    policy = make_policy(n_quantiles=n_quantiles)
    batch = make_batch(np.random.default_rng(0))
    batch.dones[:] = 0.0
    batch.dones[:2] = 1.0
    batch.next_observations[[0, 5]] = np.nan
    td_errors = compiled(policy).td_errors(batch, 0.99, double_q)
    outputs, _ = torch_outputs(policy, batch, 0.99, False)
    expected = batch.rewards[:2] - outputs[:2].detach()
    expected = expected.abs().mean(dim=1, keepdim=True) if n_quantiles else expected
    th.testing.assert_close(td_errors[:2], expected)
    assert td_errors.isnan().nonzero()[:, 0].tolist() == [5]


@pytest.mark.parametrize("action", [-1, 3])
@pytest.mark.parametrize("n_quantiles", [0, 5])
def test_an_action_that_does_not_exist_is_refused(n_quantiles: int, action: int) -> None:
    policy = make_policy(n_quantiles=n_quantiles)
    update = compiled(policy)
    before = whole_state(policy)
    batch = make_batch(np.random.default_rng(0))
    batch.actions[7] = action
    with pytest.raises(RuntimeError, match=f"action {action} .* 3 actions"):
        update.td_errors(batch, 0.99, double_q=False)
    assert whole_state(policy) == before


def test_batches_of_wrong_shapes_are_refused() -> None:
    """Else a kernel would read what is beside them."""
    update = compiled(make_policy())
    batch = make_batch(np.random.default_rng(0))
    for name in ("actions", "rewards", "dones", "next_observations"):
        short = batch._replace(**{name: getattr(batch, name)[:-1]})
        with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
            update.td_errors(short, 0.99, double_q=False)
    update.td_errors(batch, 0.99, double_q=False)
    with pytest.raises(ValueError, match=r"shape|size"):
        update.descend(batch.weights[:-1])


def test_a_step_needs_the_errors_of_a_batch() -> None:
    with pytest.raises(RuntimeError, match="td_errors"):
        compiled(make_policy()).descend(th.ones(4, 1))


# --- observations and actions ------------------------------------------------------------------

SPACES: dict[str, spaces.Space[Any]] = {
    "float32": spaces.Box(-1, 1, (5,)),
    "float64": spaces.Box(-1, 1, (2, 3), np.float64),
    "int64": spaces.Box(-9, 9, (3, 1, 2), np.int64),
    "uint8, no image": spaces.Box(0, 255, (7,), np.uint8),
    "Discrete": spaces.Discrete(6),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2, 4]),
    "MultiBinary": spaces.MultiBinary(5),
    "MultiBinary, two dimensions": spaces.MultiBinary((2, 3)),
}


@pytest.mark.parametrize("n_quantiles", [0, 5])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_observations_are_taken_as_sb3_takes_them(
    space: spaces.Space[Any], n_quantiles: int
) -> None:
    policy = make_policy(space=space, n_quantiles=n_quantiles, n_actions=8)
    with th.no_grad():
        # So that the observation decides
        for parameter in networks(policy)[0].parameters():
            parameter *= 4.0 if parameter.ndim == 2 else 0.0
    space.seed(0)
    observations = np.stack([space.sample() for _ in range(40)])
    # As a buffer stores them: numbers without dimensions get one
    stored = th.from_numpy(observations.reshape(40, *(space.shape or (1,))))
    batch = make_batch(np.random.default_rng(0), 20, n_actions=8)._replace(
        observations=stored[:20], next_observations=stored[20:]
    )
    update = compiled(policy)
    twin = twin_of(policy)
    td_errors, _ = compiled_step(update, batch)
    th.testing.assert_close(td_errors, torch_step(twin, batch)[0], rtol=1e-5, atol=1e-6)
    assert distance(policy, twin) < 1e-6
    observations.flags.writeable = False
    actions = update.greedy_actions(observations)
    expected, _ = policy.predict(observations.copy(), deterministic=True)
    assert actions.dtype == expected.dtype
    assert np.array_equal(actions, expected)
    assert len(set(actions.tolist())) > 1


@pytest.mark.parametrize("value", [-1, 6])
def test_an_observation_outside_of_its_range_is_refused_as_by_torch(value: int) -> None:
    policy = make_policy(space=SPACES["Discrete"])
    observations = np.array([2, value])
    with pytest.raises(RuntimeError, match="Class values") as expected:
        policy.predict(observations)
    with pytest.raises(RuntimeError, match="Class values") as error:
        compiled(policy).greedy_actions(observations)
    assert str(error.value) == str(expected.value)


@pytest.mark.parametrize("n_quantiles", [0, 7])
def test_of_equally_good_actions_the_first_is_taken(n_quantiles: int) -> None:
    policy = make_policy(n_quantiles=n_quantiles, n_actions=4)
    online, _ = networks(policy)
    last = list(online.modules())[-1]
    with th.no_grad():
        last.weight.zero_()
        last.bias.copy_(th.tensor([0.0, 2.0, 1.0, 2.0]).repeat(max(n_quantiles, 1)))
    update = compiled(policy)
    observations = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    assert update.greedy_actions(observations).tolist() == [1, 1, 1]
    with th.no_grad():
        last.bias[2] = np.nan
    # As torch has it
    assert policy.predict(observations)[0].tolist() == [2, 2, 2]
    assert update.greedy_actions(observations).tolist() == [2, 2, 2]


# --- whether there is one ----------------------------------------------------------------------


class OwnNetwork(QNetwork):
    pass


class OwnPolicy(DQNPolicy):
    pass


class OwnExtractor(FlattenExtractor):
    pass


class OwnLinear(nn.Linear):
    pass


def nothing(*_: Any) -> None:
    return None


def body(policy: Any) -> Any:
    return policy.q_net.q_net


def set_attribute(name: str, value: Any) -> Callable[[Any], None]:
    return lambda policy: setattr(policy, name, value)


def freeze(policy: Any) -> None:
    body(policy)[0].weight.requires_grad_(False)


def freeze_all(policy: Any) -> None:
    policy.q_net.requires_grad_(False)


def to_double(policy: Any) -> None:
    policy.double()


def to_another_device(policy: Any) -> None:
    policy.to("meta")


def share_a_parameter(policy: Any) -> None:
    body(policy)[2].bias = body(policy)[0].bias


def share_memory_of_parameters(policy: Any) -> None:
    body(policy)[2].bias.data = body(policy)[0].bias.data


def share_memory_with_the_target(policy: Any) -> None:
    policy.q_net_target.q_net[0].weight.data = body(policy)[0].weight.data


def transpose(policy: Any) -> None:
    weight = body(policy)[2].weight
    weight.data = weight.data.t()


def parametrize_weight(policy: Any) -> None:
    nn.utils.parametrizations.orthogonal(body(policy)[2])


def change_class(policy: Any) -> None:
    body(policy)[0].__class__ = OwnLinear


def drop_bias(policy: Any) -> None:
    body(policy)[0].bias = None


def replace_layer(kind: Callable[[], nn.Module], at: int) -> Callable[[Any], None]:
    def replace(policy: Any) -> None:
        body(policy)[at] = kind()

    return replace


def add_layer(policy: Any) -> None:
    body(policy).append(nn.Tanh())


def replace_optimizer(kind: Any, **kwargs: Any) -> Callable[[Any], None]:
    def replace(policy: Any) -> None:
        policy.optimizer = kind(policy.q_net.parameters(), lr=1e-3, **kwargs)

    return replace


def add_group(policy: Any) -> None:
    policy.optimizer.add_param_group({"params": [nn.Parameter(th.zeros(1))]})


def drop_parameter(policy: Any) -> None:
    policy.optimizer.param_groups[0]["params"].pop()


def swap_parameters(policy: Any) -> None:
    params = policy.optimizer.param_groups[0]["params"]
    params[0], params[2] = params[2], params[0]


def set_option(name: str, value: Any) -> Callable[[Any], None]:
    def change(policy: Any) -> None:
        policy.optimizer.param_groups[0][name] = value

    return change


def state_in_double(policy: Any) -> None:
    parameter = body(policy)[0].weight
    policy.optimizer.state[parameter] = {
        "step": th.tensor(1.0),
        "exp_avg": th.zeros_like(parameter, dtype=th.float64),
        "exp_avg_sq": th.zeros_like(parameter),
    }


def replace_target(policy: Any) -> None:
    policy.q_net_target = OwnNetwork(**policy._update_features_extractor(policy.net_args))


def set_observations(space: spaces.Space[Any]) -> Callable[[Any], None]:
    def change(policy: Any) -> None:
        for network in networks(policy):
            network.observation_space = space

    return change


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook before the policy": (lambda p: p.register_forward_pre_hook(nothing), "hooks"),
    "hook before the network": (lambda p: p.q_net.register_forward_pre_hook(nothing), "hooks"),
    "hook of the target": (lambda p: p.q_net_target.register_forward_hook(nothing), "hooks"),
    "hook of a layer": (lambda p: body(p)[0].register_forward_hook(nothing), "hooks"),
    "backward hook": (lambda p: body(p)[0].register_full_backward_hook(nothing), "hooks"),
    "hook before backward": (
        lambda p: body(p)[1].register_full_backward_pre_hook(nothing),
        "hooks",
    ),
    "hook of the extractor": (
        lambda p: p.q_net.features_extractor.flatten.register_forward_hook(nothing),
        "hooks",
    ),
    "hook of a parameter": (lambda p: body(p)[0].weight.register_hook(nothing), "hooks"),
    "hook after a gradient": (
        lambda p: body(p)[0].bias.register_post_accumulate_grad_hook(nothing),
        "hooks",
    ),
    "hook before the optimizer": (
        lambda p: p.optimizer.register_step_pre_hook(nothing),
        "hooks",
    ),
    "hook after the optimizer": (
        lambda p: p.optimizer.register_step_post_hook(nothing),
        "hooks",
    ),
    "forward of a layer": (lambda p: setattr(body(p)[0], "forward", nothing), "'forward'"),
    "forward of the network": (lambda p: setattr(p.q_net, "forward", nothing), "'forward'"),
    "extract_features": (
        lambda p: setattr(p.q_net, "extract_features", nothing),
        "'extract_features'",
    ),
    "predict of the policy": (set_attribute("_predict", nothing), "'_predict'"),
    "compiled network": (lambda p: p.q_net.compile(backend="eager"), "'_compiled_call_impl'"),
    "step of the optimizer": (lambda p: setattr(p.optimizer, "step", nothing), "'step'"),
    "scheduler of the learning rate": (
        lambda p: th.optim.lr_scheduler.StepLR(p.optimizer, 1),
        "'step'",
    ),
    "frozen layer": (freeze, "frozen"),
    "frozen network": (freeze_all, "frozen"),
    "float64": (to_double, "float64"),
    "another device": (to_another_device, "meta"),
    "shared parameter": (share_a_parameter, "share memory"),
    "shared memory": (share_memory_of_parameters, "share memory"),
    "memory shared with the target": (share_memory_with_the_target, "share memory"),
    "not contiguous": (transpose, "not contiguous"),
    "parametrization": (parametrize_weight, "ParametrizedLinear"),
    "class of a layer": (change_class, "OwnLinear"),
    "no bias": (drop_bias, "NoneType"),
    "another activation": (replace_layer(nn.ELU, 1), "ELU"),
    "two activations": (replace_layer(nn.Tanh, 3), "Tanh"),
    "another layer": (replace_layer(nn.Identity, 2), "Identity"),
    "layer at the end": (add_layer, "end"),
    "other widths": (replace_layer(lambda: nn.Linear(8, 9), 2), "fit together"),
    "own network": (replace_target, "OwnNetwork"),
    "own extractor": (
        lambda p: setattr(p.q_net, "features_extractor", OwnExtractor(p.observation_space)),
        "OwnExtractor",
    ),
    "another optimizer": (replace_optimizer(th.optim.SGD), "SGD"),
    "a relative of Adam": (replace_optimizer(th.optim.AdamW), "AdamW"),
    "amsgrad": (replace_optimizer(th.optim.Adam, amsgrad=True), "amsgrad"),
    "maximize": (set_option("maximize", True), "maximize"),
    "decoupled weight decay": (set_option("decoupled_weight_decay", True), "decoupled"),
    "learning rate as a tensor": (set_option("lr", th.tensor(1e-3)), "plain numbers"),
    "two groups": (add_group, "several groups"),
    "parameter without optimizer": (drop_parameter, "other parameters"),
    "parameters in another order": (swap_parameters, "other parameters"),
    "state in float64": (state_in_double, "float64"),
    "no dimension": (set_observations(spaces.Box(0, 1, ())), "no dimension"),
    "images": (set_observations(spaces.Box(0, 255, (1, 2, 2), np.uint8)), "images"),
    "Dict": (set_observations(spaces.Dict({"a": spaces.Discrete(4)})), "Dict"),
    "numbers in an observation": (set_observations(spaces.Box(0, 1, (5,))), "5 numbers"),
}


@pytest.mark.parametrize("decided_before", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_whatever_is_not_known_exactly_is_left_to_torch(case: str, decided_before: bool) -> None:
    change, reason = REFUSED[case]
    policy = make_policy()
    choice = UpdateChoice(DQN_ARCHITECTURE)
    if decided_before:
        update = choice.for_training(policy)
        assert update is not None
        compiled_step(update, make_batch(np.random.default_rng(0)))
        assert choice.for_training(policy) is update
        assert choice.reason is None
    change(policy)
    assert choice.for_training(policy) is None
    assert choice.reason is not None
    assert reason in choice.reason


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnPolicy(
            spaces.Box(-1, 1, (4,)), spaces.Discrete(2), lambda _: 1e-3, net_arch=[8]
        ),
        lambda: CnnPolicy(
            spaces.Box(0, 255, (1, 36, 36), np.uint8), spaces.Discrete(2), lambda _: 1e-3
        ),
        lambda: th.compile(make_policy(), backend="eager"),
        lambda: nn.Sequential(make_policy()),
    ],
    ids=["subclass", "images", "compiled", "wrapped"],
)
def test_only_the_policy_classes_of_sb3_are_known(make: Callable[[], Any]) -> None:
    reason = CompiledUpdate.of(make(), DQN_ARCHITECTURE)
    assert isinstance(reason, str)
    assert "not a DQNPolicy" in reason


def test_hooks_for_all_modules_and_optimizers_count() -> None:
    policy = make_policy()
    choice = UpdateChoice(DQN_ARCHITECTURE)
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        assert choice.for_training(policy) is not None
        handle = register(nothing)
        try:
            assert choice.for_training(policy) is None
            assert "hooks" in str(choice.reason)
        finally:
            handle.remove()


def test_where_torch_computes_in_another_way_it_is_left_to_torch() -> None:
    policy = make_policy()
    choice = UpdateChoice(DQN_ARCHITECTURE)
    assert choice.for_training(policy) is not None
    with th.autocast("cpu", th.bfloat16):
        assert choice.for_training(policy) is None
        assert choice.for_acting(policy) is None
        assert "autocast" in str(choice.reason)
    with th.no_grad():
        assert choice.for_acting(policy) is not None
        assert choice.for_training(policy) is None
        assert "gradients" in str(choice.reason)
    assert choice.for_training(policy) is not None


def test_implementations_of_adam_are_all_one() -> None:
    compiled(make_policy(fused=True))
    compiled(make_policy(foreach=True))
    compiled(make_policy(foreach=False))


# --- what was replaced, and is known again -----------------------------------------------------


def reload_state(policy: Any) -> None:
    policy.load_state_dict(copy.deepcopy(policy.state_dict()))
    policy.optimizer.load_state_dict(copy.deepcopy(policy.optimizer.state_dict()))


def new_memory(policy: Any) -> None:
    for parameter in policy.parameters():
        parameter.data = parameter.data.clone()


def new_parameter(policy: Any) -> None:
    layer = body(policy)[0]
    old = layer.weight
    layer.weight = nn.Parameter(old.detach() + 0.1)
    group = policy.optimizer.param_groups[0]
    group["params"][0] = layer.weight
    policy.optimizer.state[layer.weight] = policy.optimizer.state.pop(old)


def new_network(policy: Any) -> None:
    policy.q_net = copy.deepcopy(policy.q_net)
    policy.optimizer = th.optim.Adam(policy.q_net.parameters(), lr=1e-3)


def new_target(policy: Any) -> None:
    policy.q_net_target = copy.deepcopy(policy.q_net)


def new_state(policy: Any) -> None:
    for state in policy.optimizer.state.values():
        state["exp_avg"] = th.ones_like(state["exp_avg"])


def new_memory_of_the_state(policy: Any) -> None:
    for state in policy.optimizer.state.values():
        state["exp_avg_sq"].data = state["exp_avg_sq"].data * 4.0


def no_state(policy: Any) -> None:
    policy.optimizer.state.clear()


def less_state(policy: Any) -> None:
    policy.optimizer.state.pop(body(policy)[2].weight)


def new_options(policy: Any) -> None:
    policy.optimizer.param_groups[0].update(lr=0.05, betas=(0.5, 0.6), weight_decay=0.2)


def new_values(policy: Any) -> None:
    with th.no_grad():
        for parameter in policy.parameters():
            parameter *= 0.5


REPLACED = (
    reload_state,
    new_memory,
    new_parameter,
    new_network,
    new_target,
    new_state,
    new_memory_of_the_state,
    no_state,
    less_state,
    new_options,
    new_values,
)


@pytest.mark.parametrize("change", REPLACED, ids=lambda change: change.__name__)
def test_what_was_replaced_is_trained_from_then_on(change: Callable[[Any], None]) -> None:
    policy = make_policy()
    rng = np.random.default_rng(0)
    choice = UpdateChoice(DQN_ARCHITECTURE)
    update = choice.for_training(policy)
    assert update is not None
    compiled_step(update, make_batch(rng))
    twin = twin_of(policy)
    change(policy)
    change(twin)
    for _ in range(3):
        batch = make_batch(rng)
        update = choice.for_training(policy)
        assert update is not None
        compiled_step(update, batch)
        torch_step(twin, batch)
        observations = batch.observations.numpy()
        acting = choice.for_acting(policy)
        assert acting is not None
        assert np.array_equal(acting.greedy_actions(observations), twin.predict(observations)[0])
    assert distance(policy, twin) < 1e-5
    for key in ("exp_avg", "exp_avg_sq"):
        ours, theirs = flat_state(policy, key), flat_state(twin, key)
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), key
    assert th.equal(flat_state(policy, "step"), flat_state(twin, "step"))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: body(p)[0].register_forward_hook(nothing),
        lambda p: setattr(p, "_predict", nothing),
        lambda p: setattr(p.q_net, "normalize_images", not p.q_net.normalize_images),
        new_memory,
        lambda p: setattr(body(p)[0], "weight", nn.Parameter(th.zeros(8, 4))),
    ],
    ids=["hook", "predict", "setting", "memory", "parameter"],
)
def test_what_changes_actions_is_noticed_when_acting(change: Callable[[Any], None]) -> None:
    policy = make_policy()
    update = compiled(policy)
    assert update.holds_for_acting(policy)
    change(policy)
    assert not update.holds_for_acting(policy)
    assert not update.holds_for_acting(make_policy())


def test_as_long_as_nothing_changes_it_is_decided_once() -> None:
    policy = make_policy()
    choice = UpdateChoice(DQN_ARCHITECTURE)
    first = choice.for_training(policy)
    assert first is not None
    for turn in range(3):
        policy.set_training_mode(turn % 2 == 0)
        policy.optimizer.param_groups[0]["lr"] = 0.1 / (turn + 1)
        update = choice.for_training(policy)
        assert update is first
        assert choice.for_acting(policy) is first
        compiled_step(update, make_batch(np.random.default_rng(0)))
        networks(policy)[1].load_state_dict(networks(policy)[0].state_dict())


def test_a_copy_of_the_choice_decides_for_its_own_model() -> None:
    policy = make_policy()
    choice = UpdateChoice(DQN_ARCHITECTURE)
    update = choice.for_training(policy)
    assert update is not None
    for twice in (copy.deepcopy((choice, policy)), pickle.loads(pickle.dumps((choice, None)))):
        other_choice, other_policy = twice
        other_policy = other_policy or twin_of(policy)
        before = flat_parameters(policy)
        other = other_choice.for_training(other_policy)
        assert other is not None
        assert other is not update
        compiled_step(other, make_batch(np.random.default_rng(0)))
        assert th.equal(flat_parameters(policy), before)
        assert not th.equal(flat_parameters(other_policy), before)
    with pytest.raises(TypeError, match="can't be copied"):
        copy.copy(update)


def test_without_numbas_compiler_torch_trains() -> None:
    """And the kernels work by themselves, which is how to debug them."""
    code = """
import runpy, sys
import numpy as np
from sb3_per.common import mlp
here = runpy.run_path(sys.argv[1])
make_policy, twin_of, distance = here["make_policy"], here["twin_of"], here["distance"]
print(mlp.CompiledUpdate.of(make_policy(), mlp.DQN_ARCHITECTURE))
mlp.config.DISABLE_JIT = 0
for n_quantiles in (0, 3):
    policy = make_policy(net_arch=(5, 3), n_quantiles=n_quantiles)
    twin = twin_of(policy)
    for _ in range(3):
        batch = here["make_batch"](np.random.default_rng(0), 6)
        here["compiled_step"](here["compiled"](policy), batch)
        here["torch_step"](twin, batch)
    print(distance(policy, twin) < 1e-6)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, __file__],
        capture_output=True,
        text=True,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        timeout=600,
    )
    assert result.stdout.splitlines() == ["numba's compiler is switched off", "True", "True"], (
        result.stderr
    )
