"""Adam in one kernel: where the user chose no other, the same results, files as SB3 writes them."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch as th
from stable_baselines3 import DQN
from torch import nn

from model_helpers import small_model
from sb3_per import PERDQN
from sb3_per.common.off_policy import fuse


class DerivedAdam(th.optim.Adam):
    """What a user makes of Adam."""


@pytest.mark.parametrize(
    ("optimizer_class", "kwargs", "expected"),
    [
        (th.optim.Adam, {}, True),
        (th.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}, True),
        (th.optim.Adam, {"fused": False}, False),
        (th.optim.Adam, {"foreach": True}, False),
        (th.optim.Adam, {"foreach": False}, False),
        (th.optim.Adam, {"differentiable": True}, False),
        (DerivedAdam, {}, False),
        # Sparse gradients have no such kernel
        (th.optim.SGD, {}, False),
        (th.optim.AdamW, {}, False),
        (th.optim.RMSprop, {}, False),
    ],
)
def test_adam_alone_is_fused_and_only_where_the_user_chose_nothing(
    optimizer_class: Any, kwargs: dict[str, Any], expected: bool
) -> None:
    optimizer = optimizer_class([nn.Parameter(th.zeros(2))], lr=0.1, **kwargs)
    before = dict(optimizer.param_groups[0])
    assert fuse(optimizer) is expected
    assert optimizer.param_groups[0] == ({**before, "fused": True} if expected else before)


def test_a_parameter_where_there_is_no_kernel_leaves_all_as_they_are() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(th.zeros(2))]},
        {"params": [th.zeros(2, device="meta")]},
    ]
    optimizer = th.optim.Adam(groups)
    assert not fuse(optimizer)
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]


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


def fused(model: DQN) -> set[Any]:
    return {group.get("fused") for group in model.policy.optimizer.param_groups}


def test_zips_load_whatever_the_optimizer_was_set_to(tmp_path: Path) -> None:
    """Saved by one of DQN and PERDQN, loaded by the other, trained on: never a leftover."""
    ours, theirs = (small_model(algorithm=algorithm).learn(30) for algorithm in (PERDQN, DQN))
    assert (fused(ours), fused(theirs)) == ({True}, {None})
    ours.save(tmp_path / "ours")
    theirs.save(tmp_path / "theirs")
    env = ours.get_env()
    for path in ("ours", "theirs"):
        assert fused(DQN.load(tmp_path / path, env=env)) == {None}
        assert fused(PERDQN.load(tmp_path / path, env=env)) == {True}
    saved = ours.get_parameters()["policy.optimizer"]
    assert {group["fused"] for group in saved["param_groups"]} == {None}
    assert fused(PERDQN.load(tmp_path / "theirs", env=env).learn(30)) == {True}
    assert fused(DQN.load(tmp_path / "ours", env=env).learn(30)) == {None}


def test_what_the_user_chose_is_saved_and_stays(tmp_path: Path) -> None:
    chosen = {"net_arch": [8], "optimizer_kwargs": {"foreach": True}}
    small_model(policy_kwargs=chosen).save(tmp_path / "model")
    loaded = PERDQN.load(tmp_path / "model")
    assert fused(loaded) == {None}
    assert loaded.policy.optimizer.param_groups[0]["foreach"] is True


def test_parameters_set_by_hand_leave_the_optimizer_fused() -> None:
    model, other = (small_model(seed=seed).learn(20) for seed in (0, 1))
    model.set_parameters(cast(Any, other.get_parameters()))
    assert fused(model) == {True}
    ours, theirs = (one.policy.optimizer.state_dict()["state"] for one in (model, other))
    assert th.equal(ours[0]["exp_avg"], theirs[0]["exp_avg"])
    with pytest.raises(ValueError, match="Names of parameters do not match"):
        model.set_parameters(cast(Any, {"policy": other.policy.state_dict()}))
    assert fused(model) == {True}
    np.testing.assert_array_equal(ours[0]["exp_avg"], theirs[0]["exp_avg"])
