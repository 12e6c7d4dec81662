"""Priority functions: by name or by the user, for each algorithm; what they see, and what stops."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from stable_baselines3 import DQN
from torch.nn import functional as F

from actor_critic_helpers import make, tensors_of
from buffer_helpers import random_state
from model_helpers import TenStepEnv
from sb3_per import (
    PERDDPG,
    PERDQN,
    PERQRDQN,
    PERSAC,
    PERTD3,
    PERTQC,
    PrioritizedOffPolicyAlgorithm,
    PriorityContext,
)
from sb3_per.common.losses import quantile_huber_loss
from sb3_per.common.priorities import PRIORITIES, priorities_of
from sb3_per.per_qrdqn.per_qrdqn import wasserstein_distance

ALL = [PERDQN, PERQRDQN, PERSAC, PERTD3, PERDDPG, PERTQC]
ALGORITHM = pytest.mark.parametrize("algorithm", ALL, ids=lambda cls: str(cls.__name__))


def small(algorithm: Any, **kwargs: Any) -> Any:
    """With target networks that differ from the others, and targets far from 0."""
    if algorithm in (PERDQN, PERQRDQN):
        kwargs = {"env": TenStepEnv(), "target_update_interval": 25, "train_freq": 1, **kwargs}
    return make(algorithm, **kwargs).learn(20)


def tensor(*values: float) -> th.Tensor:
    return th.tensor(values)[:, None]


class Batch:
    """What is read of a batch here."""

    def __init__(self, n: int) -> None:
        self.indices = np.arange(n) + 40


def context_of(*errors: float) -> PriorityContext:
    batch: Any = Batch(len(errors))
    return PriorityContext(batch, th.zeros(len(errors), 1), tensor(*errors))


def recorded(model: Any) -> dict[str, Any]:
    """Train on one batch; its context, all that this has, and what it was made."""
    seen: dict[str, Any] = {}
    # Compiled code has its own way to the same priorities
    model.compiled = False
    priorities = model._priorities_of

    def recording(context: PriorityContext) -> th.Tensor:
        seen["context"] = context
        for name in ("td_errors", "critic_td_errors", "losses", "target_losses"):
            seen[name] = getattr(context, name)
        values: th.Tensor = priorities(context)
        seen["values"] = values
        return values

    model._priorities_of = recording
    model.train(1, batch_size=7)
    return seen


# --- What a function sees


def test_only_what_is_asked_for_is_computed() -> None:
    calls: list[str] = []

    def errors_of(estimates: th.Tensor, targets: th.Tensor) -> th.Tensor:
        calls.append("errors")
        return targets - estimates

    def losses_of(estimates: th.Tensor, targets: th.Tensor) -> th.Tensor:
        calls.append("losses")
        return (targets - estimates).square().sum(dim=1, keepdim=True)

    def target_estimates() -> th.Tensor:
        calls.append("target network")
        return th.tensor([[0.0, 1.0]])

    batch: Any = Batch(1)
    context = PriorityContext(
        batch,
        th.tensor([[1.0, -2.0]], requires_grad=True),
        tensor(3.0),
        errors_of=errors_of,
        losses_of=losses_of,
        target_estimates=target_estimates,
    )
    assert calls == []
    assert not context.estimates.requires_grad
    assert (float(context.td_errors), float(context.td_errors)) == (3.5, 3.5)
    assert calls == ["errors"]
    assert float(context.losses) == 4.0 + 25.0
    assert calls == ["errors", "losses"]
    assert float(context.target_losses) == 9.0 + 4.0
    assert calls == ["errors", "losses", "target network", "losses"]
    assert float(PRIORITIES["clipped"](context)) == 5.0
    assert float(PRIORITIES["reducible"](context)) == 16.0


def test_a_loss_of_the_whole_batch_is_refused() -> None:
    batch: Any = Batch(2)
    context = PriorityContext(batch, th.zeros(2, 1), th.ones(2, 1), losses_of=F.mse_loss)
    with pytest.raises(ValueError, match=r'shape \(2, 1\), got \(\): use `reduction="none"`'):
        context.losses  # noqa: B018  # computes


@pytest.mark.parametrize("loss", ["huber", "mse"])
def test_pertd3_and_persac_have_the_loss_that_they_train_on_of_both_critics(loss: str) -> None:
    for algorithm, factor in ((PERTD3, 1.0), (PERSAC, 0.5)):
        model = small(algorithm, loss=loss, beta=0.0, beta_final=0.0)
        seen = recorded(model)
        context = seen["context"]
        assert context.estimates.shape == (7, 2)
        assert context.targets.shape == (7, 1)
        errors = (context.targets - context.estimates).abs()
        by_hand = errors**2
        if loss == "huber":
            by_hand = th.where(errors < 1, by_hand / 2, errors - 0.5)
        np.testing.assert_allclose(seen["losses"], factor * by_hand.sum(1, True), rtol=1e-5)
        logged = model.logger.name_to_value["train/critic_loss"]
        np.testing.assert_allclose(logged, seen["losses"].mean(), rtol=1e-5)


def test_perdqn_sees_one_error_with_its_sign_and_the_loss_of_the_target_network() -> None:
    model = small(PERDQN, loss="mse")
    batch = model.replay_buffer.sample(7)
    context = model.priority_context(batch)
    with th.no_grad():
        actions = batch.actions.long()
        by_target = model.q_net_target(batch.observations).gather(1, actions)
    assert th.equal(context.critic_td_errors, model.td_errors(batch).detach())
    assert bool((context.critic_td_errors < 0).any())
    assert th.equal(context.td_errors, context.critic_td_errors.abs())
    assert th.equal(context.target_losses, (context.targets - by_target).square())
    assert not th.equal(context.target_losses, context.losses)


def test_perqrdqn_sees_distances_of_distributions() -> None:
    model = small(PERQRDQN, policy_kwargs={"net_arch": [8], "n_quantiles": 5})
    context = model.priority_context(model.replay_buffer.sample(7))
    assert context.estimates.shape == context.targets.shape == (7, 5)
    distances = wasserstein_distance(context.estimates, context.targets)
    assert th.equal(context.td_errors, distances)
    losses = quantile_huber_loss(context.estimates, context.targets).mean(1, True)
    assert th.equal(context.losses, losses)


def test_pertqc_sees_errors_of_means_and_quantile_losses() -> None:
    policy_kwargs = {"net_arch": [8], "n_quantiles": 5, "n_critics": 3}
    model = small(PERTQC, policy_kwargs=policy_kwargs, beta=0.0, beta_final=0.0)
    seen = recorded(model)
    context = seen["context"]
    assert context.estimates.shape == (7, 3, 5)
    assert context.targets.shape == (7, 1, 3 * (5 - 2))
    errors = context.targets.mean(2) - context.estimates.mean(2)
    np.testing.assert_allclose(seen["critic_td_errors"], errors, rtol=1e-5)
    np.testing.assert_allclose(seen["td_errors"], errors.abs().mean(1, True), rtol=1e-5)
    losses = [
        quantile_huber_loss(context.estimates[:, critic], context.targets[:, 0]).mean(1) / 5
        for critic in range(3)
    ]
    np.testing.assert_allclose(seen["losses"][:, 0], sum(losses) / 3, rtol=1e-4)
    logged = model.logger.name_to_value["train/critic_loss"]
    np.testing.assert_allclose(logged, seen["losses"].mean(), rtol=1e-5)


@ALGORITHM
def test_what_train_feeds_back_is_the_function_of_what_it_trains_on(algorithm: Any) -> None:
    kwargs: dict[str, Any] = {"alpha": 0.5, "priority_eps": 0.25}
    models = {name: small(algorithm, priority=name, **kwargs) for name in PRIORITIES}
    seen = {name: recorded(model) for name, model in models.items()}

    def check(name: str, expected: th.Tensor) -> None:
        got = seen[name]["values"].abs()
        assert got.shape == (7, 1)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        indices = seen[name]["context"].batch.indices
        last: dict[int, float] = {
            index: float(value) for index, value in zip(indices, got[:, 0], strict=True)
        }
        leaves = models[name].replay_buffer.priorities
        for place, last_value in last.items():
            assert leaves[place] == pytest.approx((last_value + 0.25) ** 0.5)

    check("td_error", seen["td_error"]["critic_td_errors"].abs().mean(1, True))
    largest = seen["clipped"]["critic_td_errors"].abs().max(1, True).values
    assert bool((largest < 1.0).any() or (largest > 1.0).any())
    check("clipped", th.maximum(largest, th.ones(1)))
    reducible = seen["reducible"]["losses"] - seen["reducible"]["target_losses"]
    assert bool((reducible != 0.0).any())
    check("reducible", F.relu(reducible))
    # The log has TD errors, whatever the priorities are made of
    for name, model in models.items():
        logged = model.logger.name_to_value["per/td_error_mean"]
        assert logged == pytest.approx(float(seen[name]["td_errors"].mean()), rel=1e-5)


@ALGORITHM
def test_new_transitions_get_the_priority_of_the_function_too(algorithm: Any) -> None:
    def of_rewards(context: PriorityContext) -> th.Tensor:
        return context.batch.rewards.abs() + 3.0

    model = small(algorithm, priority=of_rewards, initial_priority="td_error", alpha=1.0)
    rewards = model.replay_buffer.rewards[:19].ravel()
    priorities = model.replay_buffer.priorities[:19]
    np.testing.assert_allclose(priorities, np.abs(rewards) + 3.0 + 1e-6, rtol=1e-6)


@ALGORITHM
def test_looking_at_a_batch_leaves_the_random_numbers_and_the_networks_alone(
    algorithm: Any,
) -> None:
    model = small(algorithm)
    batch = model.replay_buffer.sample(7)
    before, states = tensors_of(model), (th.get_rng_state(), random_state())
    errors = model.td_errors(batch)
    assert errors.shape == (7, 1)
    assert th.equal(errors, model.td_errors(batch))
    model.priority_context(batch).target_losses  # noqa: B018  # computes
    assert all(map(th.equal, before.values(), tensors_of(model).values()))
    assert th.equal(states[0], th.get_rng_state())
    assert states[1] == random_state()


# --- What a function returns


@pytest.mark.parametrize(
    "returned",
    [
        th.tensor([[1.0], [2.0]]),
        th.tensor([1.0, 2.0]),
        th.tensor([1, 2]),
        th.tensor([1.0, 2.0], dtype=th.bfloat16, requires_grad=True),
        np.array([1.0, 2.0]),
        [1.0, 2.0],
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_one_number_for_each_transition_is_taken_in_either_shape(returned: Any) -> None:
    values = priorities_of(lambda context: returned, context_of(1.0, -1.0))
    assert values.shape == (2, 1)
    assert values[:, 0].tolist() == [1.0, 2.0]
    assert not values.requires_grad


BAD: list[tuple[Any, type[Exception], str]] = [
    (
        th.ones(7, 7),
        ValueError,
        r"or \(7,\), got tensor[^=]*of shape \(7, 7\).*keepdim",
    ),
    (th.ones(6), ValueError, r"of shape \(6,\)"),
    (th.tensor(1.0), ValueError, r"of shape \(\)"),
    (th.full((7, 1), th.nan), ValueError, r"must be finite, got nan .*7 of 7"),
    (th.full((7,), th.inf), ValueError, r"must be finite, got inf "),
    (th.arange(7.0) - 1, ValueError, r"at least 0, got -1.0 .*1 of 7.*`.abs\(\)`"),
    (None, TypeError, r"must return a tensor, got None"),
    (th.ones(7) * 1j, TypeError, r"real numbers"),
]


@pytest.mark.parametrize(("returned", "error", "message"), BAD, ids=[str(bad[2]) for bad in BAD])
def test_what_can_be_no_priorities_stops_with_nothing_changed(
    returned: Any, error: type[Exception], message: str
) -> None:
    for algorithm in (PERSAC, PERTD3, PERTQC, PERDQN, PERQRDQN):
        model = small(algorithm)

        def mine(context: PriorityContext) -> Any:
            return returned

        model.priority = mine
        before, leaves = tensors_of(model), model.replay_buffer.priorities
        n_updates = model._n_updates
        with pytest.raises(error, match=message) as raised:
            model.train(2, batch_size=7)
        assert "mine" in str(raised.value)
        assert all(map(th.equal, before.values(), tensors_of(model).values()))
        np.testing.assert_array_equal(model.replay_buffer.priorities, leaves)
        assert model._n_updates == n_updates


@ALGORITHM
@pytest.mark.parametrize("priority", ["td_error", "clipped", "reducible", "mine"])
@pytest.mark.parametrize("reward", [th.nan, -th.inf])
def test_an_error_that_is_not_finite_stops_whatever_the_function_makes_of_it(
    algorithm: Any, priority: str, reward: float
) -> None:
    # As if the error had nothing to do with it
    chosen: Any = (lambda context: th.ones(7)) if priority == "mine" else priority
    model = small(algorithm)
    model.priority = chosen
    model.replay_buffer.rewards[:] = reward
    before, leaves = tensors_of(model), model.replay_buffer.priorities
    n_updates = model._n_updates
    with pytest.raises(ValueError, match=r"TD errors must be finite, got .*learning rate"):
        model.train(2, batch_size=7)
    assert all(map(th.equal, before.values(), tensors_of(model).values()))
    np.testing.assert_array_equal(model.replay_buffer.priorities, leaves)
    assert model._n_updates == n_updates


# --- The option


@ALGORITHM
def test_an_option_that_is_no_priority_is_refused_wherever_it_comes_in(
    algorithm: Any, tmp_path: Path
) -> None:
    message = r"`priority` must be one of \['clipped', 'reducible', 'td_error'\] or a function"
    with pytest.raises(ValueError, match=rf"{message}.*got 'tderror'"):
        small(algorithm, priority="tderror")
    model = small(algorithm)
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match=rf"{message}.*got 3"):
        algorithm.load(tmp_path / "model", priority=3)
    model.priority = None
    with pytest.raises(ValueError, match=rf"{message}.*got None"):
        model.train(1, batch_size=7)


class Squared:
    """A function with settings."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, context: PriorityContext) -> th.Tensor:
        return self.factor * context.td_errors.square()


def test_names_and_functions_are_saved_with_the_model(tmp_path: Path) -> None:
    factor = 3.0
    for priority in ("reducible", lambda context: factor * context.losses, Squared(factor)):
        model = small(PERTD3, priority=priority)
        model.save(tmp_path / "model")
        loaded = PERTD3.load(tmp_path / "model", env=model.get_env())
        loaded.replay_buffer = model.replay_buffer
        context = model.priority_context(model.replay_buffer.sample(7))
        expected, got = (priorities_of(each.priority, context) for each in (model, loaded))
        assert th.equal(expected, got)
        assert bool((got != context.td_errors).any())


def test_a_function_that_cannot_be_saved_is_told_so_when_saving(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(context: PriorityContext) -> th.Tensor:
        with lock:
            return context.td_errors

    model = small(PERDQN, priority=locked)
    with pytest.raises(ValueError, match=r"`priority` is .*locked.*can't be saved.*exclude"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model.zip").exists()
    model.save(tmp_path / "model", exclude=["priority"])
    assert PERDQN.load(tmp_path / "model").priority == "td_error"
    assert PERDQN.load(tmp_path / "model", priority=locked).priority is locked
    # SB3's own class has no use for it
    assert DQN.load(tmp_path / "model").num_timesteps == 20


class Holder:
    """Holds what it is given."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, context: PriorityContext) -> th.Tensor:
        return context.td_errors

    def method(self, context: PriorityContext) -> th.Tensor:
        return context.td_errors


class Derived(PERTD3):
    def own(self, context: PriorityContext) -> th.Tensor:
        return context.td_errors


def test_a_function_that_would_take_the_model_into_the_file_is_refused(tmp_path: Path) -> None:
    model = small(Derived)

    def enclosing(context: PriorityContext) -> th.Tensor:
        errors: th.Tensor = context.td_errors * model.gamma
        return errors

    script = "def from_a_script(context):\n    return context.td_errors * model.gamma\n"
    namespace: dict[str, Any] = {"__name__": "__main__", "model": model}
    exec(script, namespace)
    functions = [enclosing, namespace["from_a_script"], model.own, Holder(model.replay_buffer)]
    for function in functions:
        model.priority = function
        with pytest.raises(ValueError, match=r"refers to a model or its buffer.*exclude"):
            model.save(tmp_path / "model")
        assert not (tmp_path / "model.zip").exists()
    model.priority = Holder(3).method
    model.save(tmp_path / "model")


class WithoutContext(PrioritizedOffPolicyAlgorithm, DQN):
    """An algorithm of a user's whose ``train`` knows nothing of priority functions."""

    def __init__(self, *args: Any, priority: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "_init_setup_model": False})
        self._set_per_options(priority=priority)
        self._setup_model()


def test_an_algorithm_without_a_context_refuses_functions() -> None:
    message = r"WithoutContext has no method `priority_context\(batch\)`"
    for priority in ("clipped", lambda context: context.td_errors):
        with pytest.raises(ValueError, match=message):
            WithoutContext("MlpPolicy", TenStepEnv(), buffer_size=10, priority=priority)
    model = WithoutContext("MlpPolicy", TenStepEnv(), buffer_size=10, priority="td_error")
    batch: Any = Batch(1)
    with pytest.raises(TypeError, match=message.replace("WithoutContext ", "")):
        model.td_errors(batch)
    for attribute in ("losses", "target_losses"):
        with pytest.raises(TypeError, match="this algorithm gives no"):
            getattr(context_of(1.0), attribute)
