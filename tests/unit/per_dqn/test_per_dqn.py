"""The update of PERDQN: targets, TD errors, losses, weights, and what goes back to the buffer."""

import inspect
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from model_helpers import (
    NEXT_S,
    S,
    ScriptedEnv,
    buffer_of,
    parameters_of,
    same,
    silent,
    small_model,
)
from sb3_per import PERDQN, PrioritizedReplayBuffer, PrioritizedReplayBufferSamples


class Call(NamedTuple):
    """One gradient step, as seen at the two methods of the buffer that it calls."""

    parameters: list[th.Tensor]
    leaves: npt.NDArray[np.float64]
    batch: PrioritizedReplayBufferSamples
    env: VecNormalize | None
    indices: Any = None
    td_errors: th.Tensor = th.empty(0)


class Recorder:
    """
    Wraps ``sample`` and ``update_priorities`` of a model's buffer, as a user would, and keeps what
    went through; ``weights`` replaces those of the batch.
    """

    def __init__(
        self,
        model: PERDQN,
        monkeypatch: pytest.MonkeyPatch,
        weights: list[float] | None = None,
    ) -> None:
        self.events: list[str] = []
        self.calls: list[Call] = []
        buffer = buffer_of(model)
        sample, update_priorities = buffer.sample, buffer.update_priorities

        # As the algorithm calls it: whatever users put in its place has to take this much
        def recording_sample(
            batch_size: int, *, env: VecNormalize | None
        ) -> PrioritizedReplayBufferSamples:
            self.events.append("sample")
            leaves = buffer.priorities
            batch = sample(batch_size, env=env)
            if weights is not None:
                batch = batch._replace(weights=th.tensor(weights)[:, None])
            self.calls.append(Call(parameters_of(model), leaves, batch, env))
            return batch

        def recording_update(indices: Any, td_errors: Any) -> None:
            self.events.append("update")
            self.calls[-1] = self.calls[-1]._replace(
                indices=indices, td_errors=td_errors.detach().clone()
            )
            update_priorities(indices, td_errors)

        monkeypatch.setattr(buffer, "sample", recording_sample)
        monkeypatch.setattr(buffer, "update_priorities", recording_update)


def make_model(env: Any = None, **kwargs: Any) -> PERDQN:
    """A model with linear Q-values, trained by plain gradient descent."""
    policy_kwargs = {"net_arch": [], "optimizer_class": th.optim.SGD}
    kwargs = {
        "buffer_size": 20,
        "gamma": 0.9,
        "train_freq": 1,
        "learning_rate": 0.1,
        "max_grad_norm": 1e9,
        "policy_kwargs": policy_kwargs,
        "seed": 0,
        "device": "cpu",
        **kwargs,
    }
    model: PERDQN = silent(small_model(env or ScriptedEnv(), **kwargs))
    return model


def set_q_values(
    model: PERDQN,
    online: list[float] | None = None,
    next_online: list[float] | None = None,
    next_target: list[float] | None = None,
) -> None:
    """Make the networks give these values, one for each action, at S and at NEXT_S."""
    zeros = [0.0, 0.0, 0.0]
    for network, here, there in (
        (model.q_net, online or zeros, next_online or zeros),
        # The target network's values at S are never asked for
        (model.q_net_target, [1e6, 1e6, 1e6], next_target or zeros),
    ):
        (layer,) = (part for part in network.modules() if isinstance(part, th.nn.Linear))
        with th.no_grad():
            layer.weight.copy_(th.tensor([here, there]).T)
            layer.bias.zero_()


def add(
    model: PERDQN,
    reward: float,
    *,
    action: int = 1,
    obs: list[float] = S,
    next_obs: list[float] = NEXT_S,
    done: bool = False,
    timeout: bool = False,
) -> None:
    buffer_of(model).add(
        np.array([obs], dtype=np.float32),
        np.array([next_obs], dtype=np.float32),
        np.array([action]),
        np.array([reward]),
        np.array([done]),
        [{"TimeLimit.truncated": timeout}],
    )


def logged(model: PERDQN, key: str) -> float:
    return float(model.logger.name_to_value[key])


def linear_gradient(before: list[th.Tensor], model: PERDQN, learning_rate: float = 0.1) -> Any:
    """What plain gradient descent followed, for the weights of the linear layer."""
    return ((before[0] - parameters_of(model)[0]) / learning_rate).numpy()


# --- signature


def test_the_arguments_are_those_of_dqn_then_options_by_name_only() -> None:
    ours = list(inspect.signature(PERDQN).parameters.values())
    theirs = list(inspect.signature(DQN).parameters.values())
    shared, options = ours[: len(theirs)], ours[len(theirs) :]

    def essence(parameters: list[inspect.Parameter]) -> list[tuple[Any, ...]]:
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    assert essence(shared) == essence(theirs)
    assert {parameter.kind for parameter in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert {parameter.name: parameter.default for parameter in options} == {
        "alpha": 0.6,
        "beta": 0.4,
        "beta_final": 1.0,
        "beta_fraction": 1.0,
        "priority_eps": 1e-6,
        "weight_normalization": "batch",
        "double_q": False,
        "loss": "huber",
        "prioritization": "proportional",
        "initial_priority": "max",
        "priority": "td_error",
        "compiled": True,
    }


@pytest.mark.parametrize("method", ["learn", "train", "predict", "save", "load"])
def test_the_methods_take_what_those_of_dqn_take(method: str) -> None:
    ours = inspect.signature(getattr(PERDQN, method)).parameters
    theirs = inspect.signature(getattr(DQN, method)).parameters
    assert list(ours) == list(theirs)
    changed = {
        name: ours[name].default for name in ours if ours[name].default != theirs[name].default
    }
    assert changed == ({"tb_log_name": "PERDQN"} if method == "learn" else {})


def test_every_argument_arrives() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(PERDQN).parameters.items()
        if name not in ("policy", "env", "_init_setup_model")
    }
    given: dict[str, Any] = {
        "learning_rate": 0.25,
        "buffer_size": 33,
        "learning_starts": 7,
        "batch_size": 5,
        "tau": 0.5,
        "gamma": 0.75,
        "train_freq": 3,
        "gradient_steps": 2,
        "replay_buffer_class": PrioritizedReplayBuffer,
        "replay_buffer_kwargs": {"handle_timeout_termination": False},
        "optimize_memory_usage": True,
        "n_steps": 2,
        "target_update_interval": 11,
        "exploration_fraction": 0.3,
        "exploration_initial_eps": 0.9,
        "exploration_final_eps": 0.2,
        "max_grad_norm": 4.0,
        "stats_window_size": 13,
        "tensorboard_log": "logs",
        "policy_kwargs": {"net_arch": [3]},
        "verbose": 0,
        "seed": 5,
        "device": "cpu",
        "alpha": 0.3,
        "beta": 0.2,
        "beta_final": 0.8,
        "beta_fraction": 0.5,
        "priority_eps": 0.01,
        "weight_normalization": "buffer",
        "double_q": True,
        "loss": "mse",
        "prioritization": "rank",
        "initial_priority": "td_error",
        "priority": "clipped",
        "compiled": False,
    }
    assert given.keys() == defaults.keys()
    assert [name for name in given if given[name] == defaults[name]] == ["verbose"]

    # By position, as far as DQN takes them so, which a swap of two would not survive
    n_positional = list(given).index("alpha")
    model = PERDQN(
        "MlpPolicy",
        ScriptedEnv(),
        *list(given.values())[:n_positional],
        **dict(list(given.items())[n_positional:]),
    )
    plain = DQN("MlpPolicy", ScriptedEnv(), **dict(list(given.items())[:4]), device="cpu")
    for name, value in given.items():
        if name == "train_freq":
            assert cast(Any, model.train_freq).frequency == 3
        elif name == "device":
            assert model.device == th.device("cpu")
        elif name == "stats_window_size":
            assert model._stats_window_size == 13
        else:
            assert getattr(model, name) == value, name
    assert set(vars(model)) - set(vars(plain)) == {
        "alpha",
        "beta",
        "beta_final",
        "beta_fraction",
        "priority_eps",
        "weight_normalization",
        "double_q",
        "loss",
        "prioritization",
        "initial_priority",
        "priority",
        "compiled",
        # How small networks are trained, not saved
        "_told_reason",
        "_update_choice",
        # Names of the optimizers that were made faster, not saved
        "_fused",
    }
    buffer = buffer_of(model)
    assert (buffer.buffer_size, buffer.alpha, buffer.eps, buffer.beta) == (33, 0.3, 0.01, 0.2)
    assert (buffer.n_steps, buffer.gamma, buffer.weight_normalization) == (2, 0.75, "buffer")
    assert buffer.prioritization == "rank"
    assert (buffer.optimize_memory_usage, buffer.handle_timeout_termination) == (True, False)


def test_no_network_and_no_buffer_before_they_are_asked_for() -> None:
    model = PERDQN("MlpPolicy", ScriptedEnv(), _init_setup_model=False)
    assert model.replay_buffer is None
    assert not hasattr(model, "policy")


# --- targets and TD errors


@pytest.mark.parametrize("action", [0, 1, 2])
def test_the_td_error_is_the_one_step_error_of_the_stored_action(
    action: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(alpha=0.5, priority_eps=0.25)
    set_q_values(model, [2.0, -1.0, 4.0], [50.0, 60.0, 70.0], [10.0, 8.0, 9.0])
    add(model, reward=0.5, action=action)
    recorder = Recorder(model, monkeypatch)
    model.train(1, batch_size=4)

    expected = 0.5 + 0.9 * 10.0 - [2.0, -1.0, 4.0][action]
    (call,) = recorder.calls
    assert call.td_errors.shape == (4, 1)
    np.testing.assert_allclose(call.td_errors.numpy(), expected, rtol=1e-6)
    assert call.indices is call.batch.indices
    np.testing.assert_array_equal(call.indices, 0)
    leaf = (abs(float(call.td_errors[0])) + 0.25) ** 0.5
    assert buffer_of(model).priorities.tolist() == [pytest.approx(leaf, rel=1e-14)]


def test_the_other_actions_of_the_state_have_no_influence() -> None:
    leaves: list[float] = []
    for others in (0.0, 100.0):
        model = make_model(alpha=1.0, priority_eps=0.0)
        set_q_values(model, [others, 2.0, -others], [others] * 3, [10.0, 8.0, 9.0])
        add(model, reward=0.5, action=1)
        model.train(1, batch_size=2)
        leaves.extend(buffer_of(model).priorities)
    assert leaves[0] == pytest.approx(7.5, abs=1e-5)
    assert leaves[0] == leaves[1]


def test_double_q_takes_the_online_choice_at_the_target_networks_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = {}
    for double_q in (False, True):
        model = make_model(double_q=double_q)
        # The online network prefers action 2, the target network action 0
        set_q_values(model, [0.0, 3.0, 0.0], [5.0, 6.0, 7.0], [10.0, 8.0, 4.0])
        add(model, reward=1.0, action=1)
        recorder = Recorder(model, monkeypatch)
        model.train(1, batch_size=3)
        errors[double_q] = recorder.calls[0].td_errors.numpy()
    np.testing.assert_allclose(errors[False], np.full((3, 1), 1.0 + 0.9 * 10.0 - 3.0), rtol=1e-6)
    np.testing.assert_allclose(errors[True], np.full((3, 1), 1.0 + 0.9 * 4.0 - 3.0), rtol=1e-6)


def test_double_q_chooses_for_each_transition_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(double_q=True)
    set_q_values(model, [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [10.0, 20.0, 30.0])
    # At S the target network says 1e6 for all actions, at NEXT_S the online one prefers action 2
    add(model, reward=0.0, next_obs=NEXT_S)
    add(model, reward=0.0, next_obs=S)
    recorder = Recorder(model, monkeypatch)
    model.train(1, batch_size=2)
    np.testing.assert_array_equal(recorder.calls[0].indices, [0, 1])
    np.testing.assert_allclose(recorder.calls[0].td_errors[:, 0], [27.0, 0.9e6], rtol=1e-6)


@pytest.mark.parametrize("double_q", [False, True])
def test_no_gradient_flows_through_the_targets(double_q: bool) -> None:
    model = make_model(double_q=double_q)
    set_q_values(model, [0.0, 2.0, 0.0], [5.0, 6.0, 7.0], [10.0, 8.0, 4.0])
    target = [parameter.clone() for parameter in model.q_net_target.parameters()]
    before = parameters_of(model)
    add(model, reward=0.5)
    model.train(1, batch_size=2)
    # Column 1 belongs to the next state; an error of 7.5 or 2.1 pulls with a slope of 1
    expected = [[0.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(linear_gradient(before, model), expected, atol=1e-5)
    assert same(target, list(model.q_net_target.parameters()))
    # Gradients there would count in the norm that is clipped
    assert all(parameter.grad is None for parameter in model.q_net_target.parameters())


def test_the_bootstrap_ends_with_the_task_and_not_with_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Three episodes of one step: terminated, out of time, and both at once
    steps = [(NEXT_S, 1.0, True, False), (NEXT_S, 1.0, False, True), (NEXT_S, 1.0, True, True)]
    model = make_model(ScriptedEnv(steps), learning_starts=100)
    model.learn(3)
    set_q_values(model, next_target=[10.0, 0.0, 0.0])
    recorder = Recorder(model, monkeypatch)
    model.train(1, batch_size=3)

    (call,) = recorder.calls
    np.testing.assert_array_equal(call.indices, [0, 1, 2])
    np.testing.assert_array_equal(call.batch.dones[:, 0], [1.0, 0.0, 1.0])
    # Of the episode that ended, not the first one after the reset
    np.testing.assert_array_equal(call.batch.next_observations, [NEXT_S] * 3)
    # The Q-values at S are zero: the errors are the targets
    np.testing.assert_allclose(call.td_errors[:, 0], [1.0, 10.0, 1.0], rtol=1e-6)


def test_time_limits_end_the_task_if_the_buffer_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(
        ScriptedEnv([(NEXT_S, 1.0, False, True)]),
        learning_starts=100,
        replay_buffer_kwargs={"handle_timeout_termination": False},
    )
    model.learn(1)
    set_q_values(model, next_target=[10.0, 0.0, 0.0])
    recorder = Recorder(model, monkeypatch)
    model.train(1, batch_size=1)
    np.testing.assert_array_equal(recorder.calls[0].td_errors, [[1.0]])


def test_n_step_returns_and_their_discounts_make_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(n_steps=3, gamma=0.5)
    set_q_values(model, [0.0, 2.0, 0.0], [0.0, 3.0, 0.0], [10.0, 16.0, 0.0])
    for reward in (1.0, 2.0, 4.0):
        add(model, reward)
    add(model, 8.0, done=True)
    recorder = Recorder(model, monkeypatch)
    model.train(1, batch_size=4)

    (call,) = recorder.calls
    np.testing.assert_array_equal(call.indices, [0, 1, 2, 3])
    # 1 + 2/2 + 4/4 and 1/8 of 16; from the second on, the end of the episode is in sight
    expected = [3.0 + 2.0 - 2.0, 2.0 + 2.0 + 2.0 - 2.0, 4.0 + 4.0 - 2.0, 8.0 - 2.0]
    np.testing.assert_allclose(call.td_errors[:, 0], expected, rtol=1e-6)


def test_n_step_returns_cut_short_bootstrap_by_the_steps_there_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(n_steps=3, gamma=0.5)
    set_q_values(model, next_target=[16.0, 0.0, 0.0])
    add(model, 1.0)
    add(model, 2.0, done=True, timeout=True)
    add(model, 4.0)
    recorder = Recorder(model, monkeypatch)
    model.train(1, batch_size=3)
    np.testing.assert_allclose(
        recorder.calls[0].td_errors[:, 0], [1.0 + 1.0 + 4.0, 2.0 + 8.0, 4.0 + 8.0], rtol=1e-6
    )


# --- losses and weights


def huber(error: float) -> float:
    return 0.5 * error**2 if abs(error) < 1.0 else abs(error) - 0.5


@pytest.mark.parametrize("loss", ["huber", "mse"])
def test_the_loss_is_the_mean_of_weighted_losses(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(loss=loss)
    set_q_values(model)
    # Terminal transitions from Q = 0: the reward is the TD error
    errors, weights = [8.0, -0.5, 3.0], [0.1, 0.5, 1.0]
    for action, error in enumerate(errors):
        add(model, error, action=action, done=True)
    recorder = Recorder(model, monkeypatch, weights)
    before = parameters_of(model)
    model.train(1, batch_size=3)

    (call,) = recorder.calls
    np.testing.assert_array_equal(call.indices, [0, 1, 2])
    # Raw, neither clipped nor weighted
    np.testing.assert_array_equal(call.td_errors[:, 0], errors)
    pairs = list(zip(weights, errors, strict=True))
    if loss == "huber":
        expected = sum(weight * huber(error) for weight, error in pairs) / 3
        slopes = [-weight * np.clip(error, -1.0, 1.0) / 3 for weight, error in pairs]
        # What the weight inside the Huber loss would give
        assert abs(expected - sum(huber(weight * error) for weight, error in pairs) / 3) > 0.1
    else:
        expected = sum(weight * error**2 for weight, error in pairs) / 3
        slopes = [-2.0 * weight * error / 3 for weight, error in pairs]
    assert logged(model, "train/loss") == pytest.approx(expected, rel=1e-6)
    # S has a 1 in the first place: each action's slope stands in the first column
    np.testing.assert_allclose(linear_gradient(before, model)[:, 0], slopes, rtol=1e-4)
    np.testing.assert_array_equal(linear_gradient(before, model)[:, 1], 0.0)


@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_weights_of_zero_leave_the_parameters_alone(
    loss: str, n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(loss=loss, n_steps=n_steps)
    for reward in (3.0, -200.0, 0.1):
        add(model, reward)
    before = parameters_of(model)
    with monkeypatch.context() as patch:
        Recorder(model, patch, [0.0] * 4)
        model.train(3, batch_size=4)
    assert same(before, parameters_of(model))
    # And the broken twin: with its own weights, the same model moves
    model.train(1, batch_size=4)
    assert not same(before, parameters_of(model))


def test_gradients_are_clipped_by_their_norm() -> None:
    model = make_model(max_grad_norm=0.01, loss="mse")
    set_q_values(model)
    before = parameters_of(model)
    add(model, 50.0, done=True)
    model.train(1, batch_size=2)
    steps = [(old - new) / 0.1 for old, new in zip(before, parameters_of(model), strict=True)]
    assert float(th.sqrt(sum(((step**2).sum() for step in steps), th.tensor(0.0)))) == (
        pytest.approx(0.01, rel=1e-3)
    )


def test_the_learning_rate_follows_its_schedule() -> None:
    model = make_model(learning_rate=lambda progress: 0.5 * progress)
    add(model, 1.0)
    model._current_progress_remaining = 0.3
    model.train(1, batch_size=2)
    assert model.policy.optimizer.param_groups[0]["lr"] == 0.15
    assert logged(model, "train/learning_rate") == 0.15


# --- what goes to the buffer and when


def test_td_errors_are_those_of_the_step_that_drew_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Steps so large that an error taken after the optimizer step would be another
    model = make_model(learning_rate=10.0, alpha=1.0, priority_eps=0.0)
    set_q_values(model, [0.0, 2.0, 0.0], [1.0, 2.0, 3.0], [10.0, 8.0, 4.0])
    add(model, reward=0.5)
    recorder = Recorder(model, monkeypatch)
    model.train(3, batch_size=1)

    for call in recorder.calls:
        weight, bias = call.parameters[:2]
        expected = 9.5 - float(weight[1, 0] + bias[1])
        assert float(call.td_errors) == pytest.approx(expected, rel=1e-5)
    errors = [float(call.td_errors) for call in recorder.calls]
    assert errors == pytest.approx([7.5, -12.5, 7.5], rel=1e-5)
    # The leaf after the last step is of that step's error, before it took effect
    assert buffer_of(model).priorities[0] == pytest.approx(abs(errors[-1]), rel=1e-14)


def test_each_gradient_step_draws_once_and_then_feeds_back_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    for reward in range(5):
        add(model, float(reward))
    recorder = Recorder(model, monkeypatch)
    model.train(7, batch_size=3)
    assert recorder.events == ["sample", "update"] * 7
    assert all(call.indices is call.batch.indices for call in recorder.calls)
    assert all(call.env is None for call in recorder.calls)
    assert model._n_updates == 7


def test_the_normalization_of_the_environment_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = [(NEXT_S, 6.0, True, False)] * 8
    venv = VecNormalize(DummyVecEnv([lambda: ScriptedEnv(steps)]), gamma=0.9, clip_reward=100.0)
    model = make_model(venv, learning_starts=100)
    model.learn(8)
    set_q_values(model)
    venv.ret_rms.var = np.array(4.0)
    recorder = Recorder(model, monkeypatch)
    model.train(1, batch_size=2)
    (call,) = recorder.calls
    assert call.env is venv
    np.testing.assert_array_equal(buffer_of(model).rewards[:8], 6.0)
    np.testing.assert_allclose(call.batch.rewards, np.full((2, 1), 3.0), rtol=1e-6)
    np.testing.assert_allclose(call.td_errors, np.full((2, 1), 3.0), rtol=1e-6)


@pytest.mark.parametrize("weight_normalization", ["batch", "buffer"])
def test_each_step_draws_by_the_priorities_of_the_step_before(
    weight_normalization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(
        alpha=0.7, beta=0.5, weight_normalization=weight_normalization, learning_rate=0.3
    )
    for reward in np.linspace(-3.0, 30.0, 12):
        add(model, float(reward))
    recorder = Recorder(model, monkeypatch)
    model.train(6, batch_size=4)

    expected = np.ones(12)
    for call in recorder.calls:
        # NumPy's power and the compiled one may differ in the last place
        np.testing.assert_allclose(call.leaves, expected, rtol=1e-14)
        drawn = call.leaves[call.indices]
        smallest = drawn.min() if weight_normalization == "batch" else call.leaves.min()
        np.testing.assert_allclose(call.batch.weights[:, 0], (smallest / drawn) ** 0.5, rtol=1e-6)
        errors = call.td_errors[:, 0].double().numpy()
        expected[call.indices] = (np.abs(errors) + 1e-6) ** 0.7
    np.testing.assert_allclose(buffer_of(model).priorities, expected, rtol=1e-14)
    assert any(bool((call.batch.weights < 1.0).any()) for call in recorder.calls)


def test_one_update_for_each_transition_of_all_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = DummyVecEnv([ScriptedEnv] * 4)
    model = make_model(
        env, buffer_size=100, learning_starts=0, train_freq=4, gradient_steps=-1, batch_size=2
    )
    recorder = Recorder(model, monkeypatch)
    model.learn(16)
    assert model.num_timesteps == 16
    assert recorder.events == ["sample", "update"] * 16
    assert model._n_updates == 16
    assert logged(model, "train/n_updates") == 16


def test_no_gradient_steps_touch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(learning_starts=0, train_freq=1, gradient_steps=0, batch_size=2)
    recorder = Recorder(model, monkeypatch)
    before = parameters_of(model)
    model.learn(12)
    model.train(0, batch_size=2)
    assert recorder.events == []
    assert model._n_updates == 0
    assert same(before, parameters_of(model))
    assert not [key for key in model.logger.name_to_value if key.startswith("per/")]


# --- what is not finite


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("loss", ["huber", "mse"])
def test_a_reward_that_is_not_finite_stops_training_with_everything_whole(
    reward: float, loss: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = make_model(loss=loss, policy_kwargs={"net_arch": [4]})
    for value in (1.0, 2.0, reward, 3.0):
        add(model, value)
    before = parameters_of(model)
    leaves = buffer_of(model).priorities

    with pytest.raises(ValueError, match=rf"got {reward} for transition 2 .*Rewards or obs"):
        model.train(1, batch_size=4)
    assert same(before, parameters_of(model))
    np.testing.assert_array_equal(buffer_of(model).priorities, leaves)
    assert buffer_of(model).tree.check_valid() == (True, "")
    assert model._n_updates == 0
    assert not model.policy.optimizer.state_dict()["state"]

    model.save_replay_buffer(tmp_path / "buffer")
    other = make_model(policy_kwargs={"net_arch": [4]})
    other.load_replay_buffer(tmp_path / "buffer")
    np.testing.assert_array_equal(buffer_of(other).priorities, leaves)
    np.testing.assert_array_equal(buffer_of(other).rewards, buffer_of(model).rewards)

    # Once the cause is gone, training goes on
    buffer_of(model).rewards[2] = 0.0
    model.train(2, batch_size=4)
    assert all(bool(parameter.isfinite().all()) for parameter in parameters_of(model))
    assert not same(before, parameters_of(model))


def test_a_network_that_has_diverged_is_reported() -> None:
    model = make_model()
    set_q_values(model, [0.0, np.nan, 0.0])
    add(model, 1.0)
    with pytest.raises(ValueError, match=r"nan for transition 0 .*lower the learning rate"):
        model.train(1, batch_size=1)
    np.testing.assert_array_equal(buffer_of(model).priorities, [1.0])


@pytest.mark.parametrize("double_q", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_follows_a_terminal_transition_may_have_any_value(
    value: float, double_q: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked actions, say: all are forbidden where the task is over."""
    model = make_model(double_q=double_q)
    set_q_values(model, next_target=[value] * 3)
    add(model, 5.0, done=True)
    recorder = Recorder(model, monkeypatch)
    model.train(1, batch_size=2)
    np.testing.assert_array_equal(recorder.calls[0].td_errors, [[5.0], [5.0]])
    assert all(bool(p.isfinite().all()) for p in model.q_net.parameters())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_such_a_value_of_what_goes_on_stops_training_with_everything_whole(value: float) -> None:
    model = make_model()
    set_q_values(model, next_target=[value] * 3)
    add(model, 5.0, done=True)
    add(model, 1.0)
    before = parameters_of(model)
    with pytest.raises(ValueError, match=r"for transition 1 \(1 of 2 are not finite, .*\[1\]\)"):
        model.train(1, batch_size=2)
    np.testing.assert_array_equal(buffer_of(model).priorities, [1.0, 1.0])
    assert model._n_updates == 0
    # NaN equals nothing, itself included: by bytes
    assert [p.numpy().tobytes() for p in before] == [
        p.numpy().tobytes() for p in parameters_of(model)
    ]


# --- modes of the network


class Moody(BaseFeaturesExtractor):
    """Batch normalization and dropout, which both depend on the mode."""

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space, features_dim=2)
        self.normalize = th.nn.BatchNorm1d(2)
        self.drop = th.nn.Dropout(0.5)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        features: th.Tensor = self.drop(self.normalize(observations))
        return features


class Modes(BaseCallback):
    """Notes the mode of the network whenever the environment makes a step."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def _on_step(self) -> bool:
        assert isinstance(self.model, DQN)
        self.modes.append(self.model.q_net.training)
        return True


def test_batch_norm_and_dropout_are_on_in_training_and_off_in_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(
        learning_starts=4,
        train_freq=2,
        batch_size=8,
        target_update_interval=1000,
        policy_kwargs={"net_arch": [], "features_extractor_class": Moody},
    )
    training: list[tuple[bool, bool]] = []
    buffer = buffer_of(model)
    update_priorities = buffer.update_priorities

    def recording_update(indices: Any, td_errors: Any) -> None:
        training.append((model.q_net.training, model.q_net_target.training))
        update_priorities(indices, td_errors)

    monkeypatch.setattr(buffer, "update_priorities", recording_update)
    modes = Modes()
    model.learn(12, callback=modes)
    assert modes.modes == [False] * 12
    # The target network stays in the mode for evaluation, as in DQN
    assert training == [(True, False)] * 4

    def n_batches(network: th.nn.Module) -> int:
        (norm,) = (part for part in network.modules() if isinstance(part, th.nn.BatchNorm1d))
        assert norm.num_batches_tracked is not None
        return int(norm.num_batches_tracked)

    assert n_batches(model.q_net) == 4
    assert n_batches(model.q_net_target) == 0
