"""What surrounds a gradient step gives what the plain way gives."""

import copy
import pickle
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch as th
from sb3_contrib import TQC
from sb3_per.common.training import (
    PolicyStructure,
    TrainingModeSwitch,
    clip_grad_norm,
    fuse,
    in_rows,
    without_fusing,
)
from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor
from stable_baselines3.dqn.policies import DQNPolicy
from torch import nn

from sb3_per import PERDQN

SMALL: dict[str, Any] = {
    "learning_starts": 8,
    "buffer_size": 50,
    "batch_size": 4,
    "policy_kwargs": {"net_arch": [8]},
    "seed": 0,
    "device": "cpu",
}


def modes(policy: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in policy.named_modules()}


class NormedExtractor(BaseFeaturesExtractor):
    """Has what depends on the mode: batch normalization and dropout."""

    def __init__(self, observation_space: Any) -> None:
        super().__init__(observation_space, 4)
        self.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.layers(observations)  # type: ignore[no-any-return]


# --- the training mode -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "env"),
    [(DQN, "CartPole-v1"), (SAC, "Pendulum-v1"), (TD3, "Pendulum-v1"), (TQC, "Pendulum-v1")],
)
def test_the_switch_sets_the_flags_that_the_policy_itself_sets(
    algorithm: type[BaseAlgorithm], env: str
) -> None:
    policy = algorithm("MlpPolicy", env, buffer_size=10).policy  # type: ignore[call-arg]
    expected = {}
    for mode in (True, False):
        policy.set_training_mode(mode)
        expected[mode] = modes(policy)
    assert expected[True] != expected[False]
    TrainingModeSwitch.install(policy)
    assert isinstance(policy.set_training_mode, TrainingModeSwitch)
    for mode in (True, False, False, True):
        policy.set_training_mode(mode)
        assert modes(policy) == expected[mode]


def test_the_switch_follows_modules_that_were_replaced() -> None:
    model = PERDQN("MlpPolicy", "CartPole-v1", **SMALL)
    model.policy.set_training_mode(False)
    model.policy.q_net.q_net[1] = nn.Dropout(0.5)
    assert model.policy.q_net.q_net[1].training
    model.policy.set_training_mode(False)
    assert not model.policy.q_net.q_net[1].training
    model.policy.q_net.q_net.append(nn.Dropout(0.5))
    model.policy.set_training_mode(False)
    assert not model.policy.q_net.q_net[-1].training
    model.policy.set_training_mode(True)
    assert model.policy.q_net.q_net[-1].training


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_the_policy_switches_itself_and_not_the_original(copied: Any) -> None:
    policy = PERDQN("MlpPolicy", "CartPole-v1", **SMALL).policy
    policy.set_training_mode(True)
    twin = copied(policy)
    twin.set_training_mode(False)
    assert not twin.q_net.training
    assert policy.q_net.training
    policy.set_training_mode(False)
    twin.set_training_mode(True)
    assert not policy.q_net.training


def test_a_policy_with_its_own_way_keeps_it() -> None:
    class Own(DQNPolicy):
        calls = 0

        def set_training_mode(self, mode: bool) -> None:
            Own.calls += 1
            super().set_training_mode(mode)

    class Frozen(FlattenExtractor):
        def train(self, mode: bool = True) -> "Frozen":
            return super().train(False)

    own = PERDQN(Own, "CartPole-v1", **SMALL)
    Own.calls = 0
    own.policy.set_training_mode(True)
    assert Own.calls == 1
    kwargs = {**SMALL, "policy_kwargs": {"features_extractor_class": Frozen}}
    frozen = PERDQN("MlpPolicy", "CartPole-v1", **kwargs)
    frozen.policy.set_training_mode(True)
    assert frozen.policy.q_net.training
    assert not frozen.policy.q_net.features_extractor.training


def test_dropout_and_batch_norm_train_in_train_and_rest_in_predict() -> None:
    kwargs = {**SMALL, "policy_kwargs": {"features_extractor_class": NormedExtractor}}
    model = PERDQN("MlpPolicy", "CartPole-v1", **kwargs)
    model.learn(20)
    extractor = model.policy.q_net.features_extractor
    assert isinstance(extractor, NormedExtractor)
    assert extractor.layers[0].num_batches_tracked == model._n_updates > 0
    model.policy.set_training_mode(True)
    observation = np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32)
    actions = {int(model.predict(observation, deterministic=True)[0]) for _ in range(20)}
    assert len(actions) == 1
    assert not extractor.layers[1].training
    model.train(1, 4)
    assert extractor.layers[1].training
    assert not model.policy.q_net_target.training


# --- lists of parameters ------------------------------------------------------------------------


def test_parameters_are_listed_again_only_after_a_change() -> None:
    model = PERDQN("MlpPolicy", "CartPole-v1", **SMALL)
    listed = model._policy_parameters()
    assert [id(one) for one in listed] == [id(one) for one in model.policy.parameters()]
    assert model._policy_parameters() is listed
    layer = cast(nn.Linear, model.policy.q_net.q_net[0])
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    assert model._policy_parameters() is not listed
    assert any(one is layer.weight for one in model._policy_parameters())
    before = model._policy_parameters()
    model.policy = copy.deepcopy(model.policy)
    assert not any(one is other for one in model._policy_parameters() for other in before)


def test_structure_notices_a_child_that_went() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    structure = PolicyStructure(net)
    assert structure.is_current()
    assert PolicyStructure.of(net, structure) is structure
    del net[1]
    assert not structure.is_current()
    assert len(PolicyStructure.of(net, structure).parameters) == 2


# --- clipping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 2.2, 2.236068, 2.24, 10.0, float("inf")])
def test_clipping_equals_that_of_torch_to_the_last_bit(max_norm: float) -> None:
    # Together of norm sqrt(5) = 2.236...
    gradients = [th.tensor([1.0, -1.0]), th.tensor([[1.0], [1.0]]), th.tensor(1.0)]
    ours, theirs = (
        [nn.Parameter(th.zeros_like(gradient)) for gradient in gradients] for _ in range(2)
    )
    for parameters in (ours, theirs):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
    ours.append(nn.Parameter(th.zeros(3)))  # without gradient, as those of a target network
    clip_grad_norm(ours, max_norm)
    nn.utils.clip_grad_norm_(theirs, max_norm)
    assert ours[-1].grad is None
    for one, other in zip(ours, theirs, strict=False):
        assert one.grad is not None
        assert other.grad is not None
        assert th.equal(one.grad, other.grad)


@pytest.mark.parametrize("max_norm", [1.0, 450.0, 1000.0])
def test_clipping_where_squares_overflow_and_strides_are_odd(max_norm: float) -> None:
    """The norm is 424.3; the squares are too large for 16 bits."""
    gradient = th.tensor([[300.0, 0.0], [300.0, 0.0]], dtype=th.float16).T
    ours, theirs = (nn.Parameter(th.zeros(2, 2, dtype=th.float16)) for _ in range(2))
    ours.grad, theirs.grad = gradient.clone(), gradient.clone()
    assert not ours.grad.is_contiguous()
    clip_grad_norm([ours], max_norm)
    nn.utils.clip_grad_norm_([theirs], max_norm)
    assert th.equal(ours.grad, theirs.grad)
    assert (ours.grad.max() < 300.0) == (max_norm < 424.0)


def test_clipping_passes_nan_on_as_torch_does() -> None:
    parameters = [nn.Parameter(th.zeros(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = th.tensor([np.nan, 1.0]), th.ones(2)
    clip_grad_norm(parameters, 10.0)
    assert parameters[1].grad.isnan().all()


# --- optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "expected"),
    [
        (th.optim.Adam, {}, True),
        (th.optim.AdamW, {}, True),
        (th.optim.SGD, {}, True),
        (th.optim.RMSprop, {}, False),  # torch has no such kernel
        (th.optim.Adam, {"fused": False}, False),
        (th.optim.Adam, {"foreach": True}, False),
        (th.optim.Adam, {"differentiable": True}, False),
    ],
)
def test_an_optimizer_is_fused_where_torch_can_and_the_user_chose_nothing(
    optimizer_class: Any, kwargs: dict[str, Any], expected: bool
) -> None:
    optimizer = optimizer_class([nn.Parameter(th.zeros(2))], lr=0.1, **kwargs)
    chosen = optimizer.param_groups[0].get("fused")
    assert fuse(optimizer) is expected
    assert optimizer.param_groups[0].get("fused") is (True if expected else chosen)


def test_an_optimizer_of_the_users_own_stays_as_it_is() -> None:
    class Own(th.optim.Adam):
        pass

    optimizer = Own([nn.Parameter(th.zeros(2))], lr=0.1)
    assert not fuse(optimizer)
    assert optimizer.param_groups[0]["fused"] is None


def test_fusing_during_training_goes_on_with_the_state_there_is() -> None:
    once, never = (nn.Parameter(th.ones(3)) for _ in range(2))
    optimizers = [th.optim.Adam([parameter], lr=0.1) for parameter in (once, never)]
    for step in range(4):
        if step == 2:
            assert fuse(optimizers[0])
        for parameter, optimizer in zip((once, never), optimizers, strict=True):
            parameter.grad = th.tensor([1.0, -2.0, 0.5 * step])
            optimizer.step()
    th.testing.assert_close(once, never, rtol=1e-6, atol=1e-6)
    state = without_fusing(optimizers[0].state_dict())
    assert state["param_groups"] == optimizers[1].state_dict()["param_groups"]
    assert optimizers[0].param_groups[0]["fused"] is True


def flags(model: DQN) -> set[Any]:
    return {group.get("fused") for group in model.policy.optimizer.param_groups}


def test_zips_load_whatever_the_optimizer_was_set_to(tmp_path: Path) -> None:
    """Saved by one of DQN and PERDQN, loaded by the other, trained on: never a leftover."""
    ours, theirs = (
        algorithm("MlpPolicy", "CartPole-v1", **SMALL).learn(30) for algorithm in (PERDQN, DQN)
    )
    assert (flags(ours), flags(theirs)) == ({True}, {None})
    ours.save(tmp_path / "ours")
    theirs.save(tmp_path / "theirs")
    env = ours.get_env()
    for path in ("ours", "theirs"):
        assert flags(DQN.load(tmp_path / path, env=env)) == {None}
        assert flags(PERDQN.load(tmp_path / path, env=env)) == {True}
    saved = ours.get_parameters()["policy.optimizer"]
    assert {group["fused"] for group in saved["param_groups"]} == {None}
    loaded = PERDQN.load(tmp_path / "theirs", env=env).learn(30)
    assert flags(loaded) == {True}
    back = DQN.load(tmp_path / "ours", env=env).learn(30)
    assert flags(back) == {None}
    # What the user chose is part of the model, and stays in it
    chosen = {**SMALL, "policy_kwargs": {"net_arch": [8], "optimizer_kwargs": {"foreach": True}}}
    PERDQN("MlpPolicy", "CartPole-v1", **chosen).save(tmp_path / "chosen")
    assert flags(PERDQN.load(tmp_path / "chosen")) == {None}


def test_parameters_set_by_hand_leave_the_optimizer_fused() -> None:
    model, other = (PERDQN("MlpPolicy", "CartPole-v1", **SMALL).learn(20) for _ in range(2))
    model.set_parameters(cast(Any, other.get_parameters()))
    assert flags(model) == {True}
    with pytest.raises(ValueError, match="Names of parameters do not match"):
        model.set_parameters(cast(Any, {"policy": other.policy.state_dict()}))
    assert flags(model) == {True}


# --- the log ------------------------------------------------------------------------------------


def test_rows_hold_one_batch_each_whatever_the_type() -> None:
    batches = [th.tensor([[1.0], [2.0]]), th.tensor([[3.0], [4.0]])]
    np.testing.assert_array_equal(in_rows(batches), [[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(in_rows(batches[:1]), [[1.0, 2.0]])
    assert in_rows([batches[0].to(th.bfloat16)]).dtype == np.float32
