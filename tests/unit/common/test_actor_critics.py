"""What PERSAC, PERTD3, PERDDPG and PERTQC have in common."""

import inspect
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv

from actor_critic_helpers import (
    ALGORITHM,
    PAIR,
    PushEnv,
    differences,
    make,
    tensors_of,
)
from sb3_per import PERDQN, PrioritizedReplayBuffer, PrioritizedReplayBufferSamples

PER_LOGS = {
    "per/beta",
    "per/ess",
    "per/priority_max",
    "per/priority_mean",
    "per/td_error_mean",
    "per/weight_mean",
}


@PAIR
def test_arguments_are_those_of_the_original_then_those_of_perdqn_by_name(
    ours: Any, theirs: Any
) -> None:
    mine, its, dqn = (dict(inspect.signature(cls).parameters) for cls in (ours, theirs, PERDQN))
    assert list(mine)[: len(its)] == list(its)
    for name, parameter in its.items():
        assert mine[name].default == parameter.default, name
        assert mine[name].kind == parameter.kind == parameter.POSITIONAL_OR_KEYWORD
    own = {name: mine[name] for name in mine if name not in its}
    has_loss = "TQC" not in theirs.__name__
    assert set(own) == {
        name
        for name, parameter in dqn.items()
        if parameter.kind == parameter.KEYWORD_ONLY
        and name not in {"double_q", "compiled"}
        and (has_loss or name != "loss")
    }
    for name, parameter in own.items():
        assert parameter.kind == parameter.KEYWORD_ONLY
        assert parameter.default == ("mse" if name == "loss" else dqn[name].default), name


OPTIONS: dict[str, Any] = {
    "learning_rate": 0.25,
    "buffer_size": 33,
    "learning_starts": 7,
    "batch_size": 5,
    "tau": 0.5,
    "gamma": 0.75,
    "gradient_steps": 2,
    "action_noise": NormalActionNoise(np.zeros(2), np.ones(2)),
    "replay_buffer_class": PrioritizedReplayBuffer,
    "replay_buffer_kwargs": {"handle_timeout_termination": False},
    "optimize_memory_usage": True,
    "n_steps": 2,
    "ent_coef": 0.5,
    "target_update_interval": 11,
    "target_entropy": -7.0,
    "top_quantiles_to_drop_per_net": 1,
    "use_sde": True,
    "sde_sample_freq": 9,
    "use_sde_at_warmup": True,
    "policy_delay": 3,
    "target_policy_noise": 0.3,
    "target_noise_clip": 0.4,
    "tensorboard_log": "logs",
    "policy_kwargs": {"net_arch": [3]},
    "verbose": 0,
    "seed": 5,
    "alpha": 0.3,
    "beta": 0.2,
    "beta_final": 0.8,
    "beta_fraction": 0.5,
    "priority_eps": 0.01,
    "weight_normalization": "buffer",
    "loss": "huber",
    "prioritization": "rank",
    "initial_priority": "td_error",
    "priority": "clipped",
}
#: Seen elsewhere, or not kept as they are
OTHERS = {"self", "policy", "env", "train_freq", "stats_window_size", "device"}


@PAIR
def test_every_argument_arrives(ours: Any, theirs: Any) -> None:
    names = [name for name in inspect.signature(ours).parameters if not name.startswith("_")]
    # SB3 writes into `policy_kwargs`
    given = deepcopy({name: OPTIONS[name] for name in names if name not in OTHERS})
    more = {"stats_window_size": 13} if "stats_window_size" in names else {}
    model = ours("MlpPolicy", PushEnv(), train_freq=(3, "step"), device="cpu", **more, **given)
    for name, value in given.items():
        if name == "policy_kwargs":
            assert model.policy_kwargs["net_arch"] == [3]
        elif name == "action_noise":
            assert isinstance(model.action_noise, NormalActionNoise)
        else:
            assert getattr(model, name) == value, name
    assert model.train_freq.frequency == 3
    assert model._stats_window_size == more.get("stats_window_size", 100)
    buffer = model.replay_buffer
    assert (buffer.alpha, buffer.eps, buffer.gamma, buffer.n_steps) == (0.3, 0.01, 0.75, 2)
    # As the original has them
    plain = theirs("MlpPolicy", PushEnv(), device="cpu", buffer_size=10)
    assert vars(plain).keys() - vars(model).keys() == set()


@ALGORITHM
def test_each_step_is_logged_and_none_for_no_gradient_steps(algorithm: Any) -> None:
    model = make(algorithm)
    model.train(0)
    assert set(model.logger.name_to_value) == {"train/learning_rate", "train/n_updates"}
    assert model._n_updates == 0
    model.learn(20)
    logged = model.logger.name_to_value
    assert set(logged) >= PER_LOGS | {"train/critic_loss", "train/actor_loss"}
    assert ("train/ent_coef_loss" in logged) is hasattr(model, "ent_coef")
    assert model._n_updates == 10


def train_once(algorithm: Any, weights: th.Tensor) -> dict[str, th.Tensor]:
    """By how much one step of gradient descent with these weights changes each tensor."""
    kwargs: dict[str, Any] = {"policy_delay": 1} if algorithm.__name__ == "PERTD3" else {}
    policy_kwargs = {"net_arch": [8], "optimizer_class": th.optim.SGD}
    model = make(algorithm, learning_starts=100, policy_kwargs=policy_kwargs, **kwargs).learn(20)
    sample = model.replay_buffer.sample

    def weighted(batch_size: int, env: Any = None) -> PrioritizedReplayBufferSamples:
        batch: PrioritizedReplayBufferSamples = sample(batch_size, env=env)
        return batch._replace(weights=weights)

    model.replay_buffer.sample = weighted
    before = dict(model.policy.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in before.items()}
    model.train(1, batch_size=7)
    return {name: (p - before[name]).detach() for name, p in model.policy.named_parameters()}


@ALGORITHM
def test_weights_scale_the_loss_of_the_critics_alone(algorithm: Any) -> None:
    nothing, once, thrice = (
        train_once(algorithm, factor * th.arange(7.0)[:, None]) for factor in (0.0, 1.0, 3.0)
    )
    n_critic, n_actor = 0, 0
    for name, change in once.items():
        if name.startswith("critic."):
            assert not nothing[name].any()
            th.testing.assert_close(thrice[name], 3.0 * change, rtol=1e-3, atol=1e-6)
            n_critic += int(change.any())
        elif name.startswith("actor."):
            n_actor += int(nothing[name].any())
    assert n_critic >= 4
    assert n_actor >= 4


@ALGORITHM
@pytest.mark.parametrize("dictionary", [False, True], ids=["Box", "Dict"])
def test_what_networks_say_after_a_terminal_state_counts_nothing(
    algorithm: Any, dictionary: bool
) -> None:
    space: spaces.Space[Any] = spaces.Box(-9.0, 9.0, (3,), np.float32)
    if dictionary:
        space = spaces.Dict({"one": space, "two": spaces.Discrete(4)})
    model = make(algorithm, PushEnv(space), "MultiInputPolicy" if dictionary else "MlpPolicy")
    model.learn(30)
    buffer = model.replay_buffer
    indices = np.arange(30)
    over = buffer.dones[:30, 0] * (1 - buffer.timeouts[:30, 0]) > 0
    assert 1 < over.sum() < 6
    expected = model.priority_context(buffer.batch_of(indices)).targets
    stored = buffer.next_observations
    (stored["one"] if dictionary else stored)[:30][over] = np.nan
    targets = model.priority_context(buffer.batch_of(indices)).targets
    flat = targets.reshape(30, -1)
    assert th.equal(flat[over], buffer.batch_of(indices).rewards[over].expand_as(flat[over]))
    assert th.equal(targets, expected)
    before = tensors_of(model)
    model.train(5, batch_size=20)
    assert differences(model, before)
    assert all(bool(th.isfinite(tensor).all()) for tensor in tensors_of(model).values())
    # Elsewhere it stops training, as it should
    (stored["one"] if dictionary else stored)[:30] = np.nan
    before = tensors_of(model)
    with pytest.raises(ValueError, match="nan"):
        model.train(1, batch_size=20)
    assert differences(model, before) == []


@ALGORITHM
def test_training_is_the_same_with_and_without_errors_of_new_transitions(algorithm: Any) -> None:
    """At alpha=0 the errors decide nothing: only random numbers could make a difference."""
    models = [
        make(
            algorithm,
            DummyVecEnv([PushEnv, PushEnv]),
            alpha=0.0,
            initial_priority=initial,
        ).learn(40)
        for initial in ("max", "td_error")
    ]
    assert differences(*models) == []


@ALGORITHM
def test_an_error_in_the_second_step_leaves_the_first(algorithm: Any) -> None:
    model = make(algorithm).learn(20)
    before = tensors_of(model)
    sample, n_draws = model.replay_buffer.sample, 0

    def failing(batch_size: int, env: Any = None) -> PrioritizedReplayBufferSamples:
        nonlocal n_draws
        n_draws += 1
        batch: PrioritizedReplayBufferSamples = sample(batch_size, env=env)
        return batch if n_draws == 1 else batch._replace(rewards=batch.rewards * th.inf)

    model.replay_buffer.sample = failing
    with pytest.raises(ValueError, match="TD errors must be finite"):
        model.train(2, batch_size=7)
    assert n_draws == 2
    once = make(algorithm).learn(20)
    assert differences(once, before) == []
    once.train(1, batch_size=7)
    assert differences(once, model) == []
