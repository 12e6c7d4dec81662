"""
Models that are trained by compiled code become the models that torch trains, and whatever compiled
code doesn't know exactly is left to torch.
"""

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from threading import Thread
from typing import Any, cast

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import QRDQN
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.utils import polyak_update
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from stable_baselines3.dqn.policies import DQNPolicy
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import sb3_per
from model_helpers import (
    SAVING_MEMORY,
    TenStepEnv,
    buffer_of,
    parameters_of,
    same,
    side_by_side,
    silent,
    small_model,
)
from sb3_per import PERDQN, PERQRDQN, PrioritizedReplayBufferSamples, PriorityContext
from sb3_per.common.compiled import CompiledOffPolicyAlgorithm

QUANTILES = {"net_arch": [8], "n_quantiles": 5}


def adam_state(model: OffPolicyAlgorithm) -> dict[str, th.Tensor]:
    """:return: each part of the optimizer's state, of all parameters together, a copy"""
    states = model.policy.optimizer.state_dict()["state"].values()
    names = dict.fromkeys(name for state in states for name in state)
    return {name: th.cat([state[name].flatten() for state in states]) for name in names}


def relative_distance(ours: th.Tensor, theirs: th.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def distance(model: OffPolicyAlgorithm, other: OffPolicyAlgorithm) -> float:
    """:return: between the parameters of both networks of two models, relative to their norm"""
    ours, theirs = (
        th.cat([parameter.flatten() for parameter in parameters_of(each)])
        for each in (model, other)
    )
    return relative_distance(ours, theirs)


def assert_alike(model: OffPolicyAlgorithm, plain: OffPolicyAlgorithm) -> None:
    """Both saw the same, drew the same and learned the same, up to the rounding of float32."""
    ours, theirs = buffer_of(model), buffer_of(plain)
    for name in ("observations", "actions", "rewards", "dones"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    # The priorities of what was drawn changed: another draw would leave others
    np.testing.assert_allclose(ours.priorities, theirs.priorities, rtol=1e-3, atol=1e-4)
    assert model._n_updates == plain._n_updates
    assert distance(model, plain) < 1e-5
    states, expected = adam_state(model), adam_state(plain)
    assert states.keys() == expected.keys()
    for name, state in states.items():
        assert relative_distance(state, expected[name]) < 1e-4, name
    if "step" in states:
        assert th.equal(states["step"], expected["step"])


def assert_same(model: OffPolicyAlgorithm, plain: OffPolicyAlgorithm) -> None:
    """To the last bit."""
    assert same(parameters_of(model), parameters_of(plain))
    states, expected = adam_state(model), adam_state(plain)
    assert states.keys() == expected.keys()
    assert all(th.equal(states[name], expected[name]) for name in states)
    np.testing.assert_array_equal(buffer_of(model).priorities, buffer_of(plain).priorities)
    assert model._n_updates == plain._n_updates


def whole_state(model: OffPolicyAlgorithm) -> bytes:
    buffer = buffer_of(model)
    return pickle.dumps(
        (
            model.policy.state_dict(),
            model.policy.optimizer.state_dict(),
            buffer.priorities,
            model._n_updates,
        )
    )


def train(model: OffPolicyAlgorithm, gradient_steps: int = 4, seed: int = 1) -> None:
    np.random.seed(seed)
    th.manual_seed(seed)
    model.train(gradient_steps, 8)


def told(model: CompiledOffPolicyAlgorithm, capsys: pytest.CaptureFixture[str]) -> str:
    """
    :return: what ``verbose=1`` says of how the model is trained now, which no gradient step is
        needed for; nothing if it was said before
    """
    capsys.readouterr()
    model.verbose = 1
    model.train(0, 8)
    model.verbose = 0
    return capsys.readouterr().out


class Logs(BaseCallback):
    """Keeps what stands in the log at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.rows.append(dict(self.logger.name_to_value))
        return True


# --- the same as in the plain way ----------------------------------------------------------------


def run(
    compiled: bool, timesteps: int, env: Callable[[], Any] = TenStepEnv, **kwargs: Any
) -> tuple[CompiledOffPolicyAlgorithm, list[dict[str, Any]], Any]:
    """:return: a trained model, its log, and a random number after training"""
    arguments: dict[str, Any] = {"learning_rate": 1e-3, "target_update_interval": 16, **kwargs}
    model: CompiledOffPolicyAlgorithm = silent(small_model(env(), compiled=compiled, **arguments))
    logs = Logs()
    model.learn(timesteps, callback=logs, log_interval=10**9)
    return model, logs.rows, np.random.rand()


def assert_both_ways_are_alike(timesteps: int = 70, **kwargs: Any) -> None:
    model, rows, following = run(True, timesteps, **kwargs)
    plain, expected_rows, expected_following = run(False, timesteps, **kwargs)
    assert (model.uses_compiled_update, plain.uses_compiled_update) == (True, False)
    assert_alike(model, plain)
    assert following == expected_following
    assert len(rows) == len(expected_rows)
    assert {"train/loss", "train/n_updates", "per/td_error_mean", "per/ess"} <= rows[-1].keys()
    for row, expected in zip(rows, expected_rows, strict=True):
        assert list(row) == list(expected)
        for name, value in row.items():
            assert value == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
            assert isinstance(value, float | int)


def normalized() -> VecNormalize:
    return VecNormalize(DummyVecEnv([TenStepEnv] * 2))


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "double Q": {"double_q": True},
    "n steps": {"n_steps": 3, "gamma": 0.8},
    "ranks": {"prioritization": "rank", "alpha": 0.7},
    "ranks, all at once": {"prioritization": "rank", "n_steps": 2, "double_q": True},
    "weights by the buffer": {"weight_normalization": "buffer"},
    "uniform": {"alpha": 0.0, "beta": 0.0, "beta_final": 0.0},
    "clipped": {"priority": "clipped"},
    # Differences of nearly equal losses are all rounding, which must not decide what is drawn
    "reducible": {"priority": "reducible", "priority_eps": 0.1},
    "reducible, double Q": {"priority": "reducible", "priority_eps": 0.1, "double_q": True},
    "new ones by their errors": {"initial_priority": "td_error", "train_freq": 5},
    "several environments": {
        "env": lambda: side_by_side(3),
        "gradient_steps": -1,
        "n_steps": 2,
    },
    "normalized": {"env": normalized, "gradient_steps": 2},
    "memory saved": SAVING_MEMORY,
    "soft target": {"tau": 0.1, "target_update_interval": 1},
    "small gradients": {"max_grad_norm": 0.01},
    "schedule": {"learning_rate": lambda remaining: 2e-3 * remaining},
    "many steps at once": {"train_freq": (2, "episode"), "gradient_steps": 20, "batch_size": 13},
    "larger than the buffer": {"batch_size": 100},
    "weight decay": {
        "policy_kwargs": {"net_arch": [8], "optimizer_kwargs": {"weight_decay": 0.1}},
    },
    "Adam's numbers": {
        "policy_kwargs": {
            "net_arch": [8],
            "optimizer_kwargs": {"betas": (0.5, 0.9), "eps": 1e-3, "foreach": True},
        },
    },
}


@pytest.mark.parametrize("case", OPTIONS)
def test_perdqn_learns_the_same_both_ways(case: str) -> None:
    assert_both_ways_are_alike(**OPTIONS[case])


@pytest.mark.parametrize("case", ["nothing", "double Q", "reducible", "small gradients"])
def test_so_it_does_on_squared_errors(case: str) -> None:
    assert_both_ways_are_alike(**OPTIONS[case], loss="mse")


@pytest.mark.parametrize("case", OPTIONS)
def test_perqrdqn_learns_the_same_both_ways(case: str) -> None:
    options = dict(OPTIONS[case])
    policy_kwargs = {**QUANTILES, **options.pop("policy_kwargs", {})}
    assert_both_ways_are_alike(algorithm=PERQRDQN, policy_kwargs=policy_kwargs, **options)


@pytest.mark.parametrize("algorithm", [PERDQN, PERQRDQN])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("net_arch", [[], [1], [3, 40], [9, 5, 7], [6, 17, 4, 12]])
def test_layers_of_any_number_and_width(
    net_arch: list[int], activation: type[nn.Module], algorithm: Any
) -> None:
    policy_kwargs = {"net_arch": net_arch, "activation_fn": activation}
    if algorithm is PERQRDQN:
        policy_kwargs["n_quantiles"] = 7
    assert_both_ways_are_alike(40, algorithm=algorithm, policy_kwargs=policy_kwargs)


SPACES: dict[str, spaces.Space[Any]] = {
    "float64": spaces.Box(-2, 2, (2, 3), np.float64),
    "int16": spaces.Box(-9, 9, (4,), np.int16),
    "uint8, no image": spaces.Box(0, 9, (5,), np.uint8),
    "Discrete": spaces.Discrete(6),
    "MultiDiscrete": spaces.MultiDiscrete([3, 2, 4]),
    "MultiBinary": spaces.MultiBinary(5),
}


@pytest.mark.parametrize("algorithm", [PERDQN, PERQRDQN])
@pytest.mark.parametrize("name", SPACES)
def test_observations_of_any_kind(name: str, algorithm: Any) -> None:
    def env() -> Any:
        return side_by_side(2, lambda: TenStepEnv(SPACES[name], spaces.Discrete(5)))

    policy_kwargs = QUANTILES if algorithm is PERQRDQN else {"net_arch": [8]}
    assert_both_ways_are_alike(
        60, env=env, algorithm=algorithm, policy_kwargs=policy_kwargs, n_steps=2
    )


@pytest.mark.parametrize("algorithm", [PERDQN, PERQRDQN])
def test_the_same_seed_gives_the_same_run_to_the_last_bit(algorithm: Any) -> None:
    models = [run(True, 100, algorithm=algorithm, n_steps=2)[0] for _ in range(2)]
    assert_same(*models)
    assert not same(
        parameters_of(models[0]),
        parameters_of(run(True, 100, algorithm=algorithm, n_steps=2, seed=1)[0]),
    )


def test_five_hundred_updates_end_as_in_the_plain_way() -> None:
    model, plain = (
        run(
            compiled,
            510,
            learning_rate=3e-4,
            buffer_size=1_000,
            policy_kwargs={"net_arch": [64, 64]},
        )[0]
        for compiled in (True, False)
    )
    assert model._n_updates == 500
    assert_alike(model, plain)


# --- which way is taken --------------------------------------------------------------------------

TORCH = "torch trains the network: "
COMPILED = "compiled code trains the network\n"


@pytest.fixture(scope="module")
def started() -> PERDQN:
    """A model that compiled code trained for a while; to be copied."""
    model = silent(small_model(policy_kwargs={"net_arch": [8, 8]}, target_update_interval=16))
    return cast(PERDQN, model.learn(30))


@pytest.fixture
def model(started: PERDQN) -> PERDQN:
    """A model that compiled code has trained for a while."""
    return copy.deepcopy(started)


@pytest.fixture
def plain(started: PERDQN) -> PERDQN:
    """The same, to be trained by torch from now on."""
    twin = copy.deepcopy(started)
    twin.compiled = False
    return twin


def layers(model: Any) -> Any:
    """:return: linear layers at 0, 2 and 4, activations in between"""
    return model.q_net.q_net


def group_of(model: Any) -> dict[str, Any]:
    return cast(dict[str, Any], model.policy.optimizer.param_groups[0])


def optimizer(kind: Any, **kwargs: Any) -> Callable[[Any], None]:
    def replace(model: Any) -> None:
        model.policy.optimizer = kind(model.q_net.parameters(), lr=1e-3, **kwargs)

    return replace


def options(**values: Any) -> Callable[[Any], None]:
    return lambda model: group_of(model).update(values)


def count_calls_of_a_layer(model: Any) -> list[int]:
    calls: list[int] = []
    layers(model)[2].register_forward_hook(lambda *_: calls.append(1))
    return calls


def count_calls_of_the_target(model: Any) -> list[int]:
    calls: list[int] = []
    model.q_net_target.features_extractor.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def double_a_gradient(model: Any) -> list[int]:
    calls: list[int] = []

    def hook(gradient: th.Tensor) -> th.Tensor:
        calls.append(1)
        return 2.0 * gradient

    layers(model)[0].weight.register_hook(hook)
    return calls


def watch_all_gradients(model: Any) -> list[int]:
    calls: list[int] = []
    th.autograd.graph.register_multi_grad_hook(
        list(model.q_net.parameters()), lambda _: calls.append(1)
    )
    return calls


def count_steps(model: Any) -> list[int]:
    calls: list[int] = []
    model.policy.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    return calls


def wrap_td_errors(model: Any) -> None:
    model.td_errors = lambda batch: th.ones(len(batch.weights), 1)


def wrap_targets(model: Any) -> list[int]:
    calls: list[int] = []
    own = model._target_q_values

    def targets(batch: Any) -> Any:
        calls.append(1)
        return 0.5 * own(batch)

    model._target_q_values = targets
    return calls


def wrap_forward(model: Any) -> list[int]:
    calls: list[int] = []
    own = model.q_net.forward

    def forward(observations: th.Tensor) -> Any:
        calls.append(1)
        return 0.5 * own(observations)

    model.q_net.forward = forward
    return calls


def count_optimizer_steps_by_a_wrapper(model: Any) -> list[int]:
    calls: list[int] = []
    own = model.policy.optimizer.step

    def step(*args: Any) -> Any:
        calls.append(1)
        return own(*args)

    model.policy.optimizer.step = step
    return calls


def share_a_parameter(model: Any) -> None:
    layers(model)[2].bias = layers(model)[0].bias


def share_memory(model: Any) -> None:
    layers(model)[2].bias.data = layers(model)[0].bias.data


def freeze_a_layer(model: Any) -> None:
    layers(model)[2].requires_grad_(False)


def freeze_the_target(model: Any) -> None:
    model.q_net_target.requires_grad_(False)


def add_group(model: Any) -> None:
    model.policy.optimizer.add_param_group({"params": [nn.Parameter(th.zeros(1))]})


def elu(model: Any) -> None:
    for network in (model.q_net, model.q_net_target):
        network.q_net[1] = network.q_net[3] = nn.ELU()


class OwnExtractor(FlattenExtractor):
    def forward(self, observations: th.Tensor) -> th.Tensor:
        return super().forward(observations).tanh()


def own_extractor(model: Any) -> None:
    model.q_net.features_extractor = OwnExtractor(model.observation_space)


class Wrapper(nn.Module):
    """As ``torch.compile`` wraps a module."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":
            return super().__getattr__(name)
        return getattr(self.wrapped, name)

    def forward(self, *args: Any) -> Any:
        return self.wrapped(*args)


def wrap_the_policy(model: Any) -> None:
    model.policy = Wrapper(model.policy)


def wrap_the_network(model: Any) -> None:
    model.q_net = Wrapper(model.q_net)


def another_network(model: Any) -> None:
    model.q_net = copy.deepcopy(model.q_net)


def another_target(model: Any) -> None:
    model.q_net_target = copy.deepcopy(model.q_net_target)


def another_policy(model: Any) -> None:
    model.policy = copy.deepcopy(model.policy)


def another_policy_in_all_places(model: Any) -> None:
    model.policy = copy.deepcopy(model.policy)
    model._create_aliases()


def new_parameter(model: Any) -> None:
    layer = layers(model)[2]
    layer.weight = nn.Parameter(0.5 * layer.weight.detach())


def new_parameter_in_the_optimizer_too(model: Any) -> None:
    new_parameter(model)
    optimizer(th.optim.Adam)(model)


def new_memory(model: Any) -> None:
    layers(model)[2].weight.data = 0.5 * layers(model)[2].weight.data


def one_memory_for_all_parameters(model: Any) -> None:
    parameters = list(model.q_net.parameters())
    nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(parameters), parameters)


def new_values(model: Any) -> None:
    state = {name: 0.5 * values for name, values in model.q_net.state_dict().items()}
    model.q_net.load_state_dict(state)


def shared_memory_of_processes(model: Any) -> None:
    model.policy.share_memory()


def set_parameters(model: Any) -> None:
    parameters = copy.deepcopy(model.get_parameters())
    parameters["policy.optimizer"]["state"][0]["exp_avg"] *= 3.0
    for values in parameters["policy"].values():
        values *= 0.5
    model.set_parameters(parameters)


def no_state(model: Any) -> None:
    model.policy.optimizer.state.clear()


def there_and_back(model: Any) -> None:
    model.policy.to(th.float64)
    model.policy.to(th.float32)


def soft_update(model: Any) -> None:
    polyak_update(model.q_net.parameters(), model.q_net_target.parameters(), 0.3)


def other_schedule(model: Any) -> None:
    model.lr_schedule = lambda _: 5e-3


def other_options(model: Any) -> None:
    model.double_q, model.loss, model.gamma, model.max_grad_norm = True, "mse", 0.5, 0.1


#: What happens to a model, and what is said of it then: nothing if compiled code goes on
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook of a layer": (count_calls_of_a_layer, "layer 2 of q_net has hooks"),
    "hook of the target": (
        count_calls_of_the_target,
        "the features extractor of q_net_target has hooks",
    ),
    "hook of a parameter": (double_a_gradient, "parameters have hooks"),
    "hook of all parameters": (watch_all_gradients, "parameters have hooks"),
    "hook of the optimizer": (count_steps, "the optimizer has hooks"),
    "own td_errors": (wrap_td_errors, "PERDQN has its own `td_errors`"),
    "own targets": (wrap_targets, "PERDQN has its own `_target_q_values`"),
    "own forward": (wrap_forward, "q_net has 'forward' of its own"),
    "own step": (count_optimizer_steps_by_a_wrapper, "the optimizer has 'step' of its own"),
    "shared parameter": (share_a_parameter, "parameters share memory"),
    "shared memory": (share_memory, "parameters share memory"),
    "frozen layer": (freeze_a_layer, "parameters are frozen"),
    "frozen target": (freeze_the_target, ""),
    "AdamW": (optimizer(th.optim.AdamW), "the optimizer is AdamW, not Adam"),
    "SGD": (optimizer(th.optim.SGD), "the optimizer is SGD, not Adam"),
    "RMSprop": (optimizer(th.optim.RMSprop), "the optimizer is RMSprop, not Adam"),
    "amsgrad": (optimizer(th.optim.Adam, amsgrad=True), "the optimizer has amsgrad=True"),
    "another Adam": (optimizer(th.optim.Adam), ""),
    "fused": (optimizer(th.optim.Adam, fused=True), ""),
    "foreach": (optimizer(th.optim.Adam, foreach=True), ""),
    "weight decay": (optimizer(th.optim.Adam, weight_decay=0.2), ""),
    "another group": (add_group, "the optimizer has several groups of parameters"),
    "betas": (options(betas=(0.5, 0.6)), ""),
    "eps and decay": (options(eps=0.1, weight_decay=0.3), ""),
    "maximize": (options(maximize=True), "the optimizer has maximize=True"),
    "ELU": (elu, "the activation of q_net is ELU, not ReLU or Tanh"),
    "own extractor": (
        own_extractor,
        "the features extractor of q_net is a OwnExtractor, not a FlattenExtractor",
    ),
    "wrapped policy": (wrap_the_policy, "the policy is a Wrapper, not a DQNPolicy"),
    "wrapped network": (wrap_the_network, "`q_net` of the model is not that of its policy"),
    "another network": (another_network, "`q_net` of the model is not that of its policy"),
    "another target": (another_target, "`q_net_target` of the model is not that of its policy"),
    "another policy": (another_policy, "`q_net` of the model is not that of its policy"),
    "another policy in all places": (another_policy_in_all_places, ""),
    "new parameter": (new_parameter, "the optimizer has other parameters than the network"),
    "new parameter, new optimizer": (new_parameter_in_the_optimizer_too, ""),
    "new memory": (new_memory, ""),
    "one memory": (one_memory_for_all_parameters, ""),
    "new values": (new_values, ""),
    "memory of all processes": (shared_memory_of_processes, ""),
    "set_parameters": (set_parameters, ""),
    "no state": (no_state, ""),
    "float64 and back": (there_and_back, ""),
    "soft update": (soft_update, ""),
    "other schedule": (other_schedule, ""),
    "other options": (other_options, ""),
    "evaluation mode": (lambda model: model.policy.set_training_mode(False), ""),
}


@pytest.mark.parametrize("case", CHANGES)
def test_whatever_happens_to_a_model_it_trains_as_in_the_plain_way(
    case: str, model: PERDQN, plain: PERDQN, capsys: pytest.CaptureFixture[str]
) -> None:
    change, reason = CHANGES[case]
    assert told(model, capsys) == COMPILED
    before = parameters_of(model)
    calls, expected_calls = change(model), change(plain)
    assert model.uses_compiled_update == (not reason)
    assert told(model, capsys) == (f"{TORCH}{reason}\n" if reason else "")
    assert told(model, capsys) == ""
    for each in (model, plain):
        train(each)
    if reason:
        assert_same(model, plain)
    else:
        assert_alike(model, plain)
    assert calls == expected_calls
    assert calls is None or len(calls) > 0
    # The same actions, too
    observations = np.random.default_rng(0).uniform(-10, 10, (50, 3)).astype(np.float32)
    np.testing.assert_array_equal(
        model.predict(observations, deterministic=True)[0],
        plain.predict(observations, deterministic=True)[0],
    )
    if case != "another network" and case != "another policy":
        assert not same(parameters_of(model), before)


def test_it_is_decided_again_each_time(model: PERDQN, capsys: pytest.CaptureFixture[str]) -> None:
    def expect(text: str) -> None:
        assert told(model, capsys) == text
        assert model.uses_compiled_update == (text == COMPILED)
        updates = model._n_updates
        before = parameters_of(model)
        train(model, 1)
        assert model._n_updates == updates + 1
        assert not same(parameters_of(model), before)
        assert told(model, capsys) == ""

    expect(COMPILED)
    handle = layers(model)[0].register_forward_hook(lambda *_: None)
    expect(f"{TORCH}layer 0 of q_net has hooks\n")
    handle.remove()
    expect(COMPILED)
    layers(model)[0].bias.requires_grad_(False)
    expect(f"{TORCH}parameters are frozen\n")
    layers(model)[0].bias.requires_grad_(True)
    expect(COMPILED)
    adam = model.policy.optimizer
    optimizer(th.optim.SGD)(model)
    expect(f"{TORCH}the optimizer is SGD, not Adam\n")
    model.policy.optimizer = adam
    expect(COMPILED)
    model.priority = lambda context: context.td_errors
    expect(f"{TORCH}`priority` is a function\n")
    model.priority = "clipped"
    expect(COMPILED)
    model.compiled = False
    expect(f"{TORCH}`compiled` is False\n")
    model.compiled = True
    expect(COMPILED)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        expect(f"{TORCH}hooks are set for all modules\n")
    finally:
        handle.remove()
    expect(COMPILED)


@pytest.mark.parametrize("kind", ["forward", "optimizer"])
def test_hooks_of_the_whole_process_are_called(kind: str, model: PERDQN, plain: PERDQN) -> None:
    register: Any = {
        "forward": nn.modules.module.register_module_forward_hook,
        "optimizer": register_optimizer_step_pre_hook,
    }[kind]
    counts = []
    for each in (model, plain):
        calls: list[str] = []
        handle = register(lambda module, *_, calls=calls: calls.append(type(module).__name__))
        try:
            assert not each.uses_compiled_update
            train(each)
            counts.append(calls)
        finally:
            handle.remove()
    assert counts[0] == counts[1]
    assert len(counts[0]) >= 4
    assert_same(model, plain)
    assert model.uses_compiled_update


def test_a_learning_rate_that_is_a_tensor_is_one_step_of_torchs(
    model: PERDQN, plain: PERDQN
) -> None:
    """Since the schedule puts a number in its place."""
    for each in (model, plain):
        group_of(each)["lr"] = th.tensor(0.5)
    assert not model.uses_compiled_update
    for each in (model, plain):
        train(each)
        assert group_of(each)["lr"] == 0.01
    assert_same(model, plain)
    assert model.uses_compiled_update


def test_without_gradients_torch_says_so_and_training_goes_on_later(
    model: PERDQN, plain: PERDQN, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(model, capsys) == COMPILED
    before = parameters_of(model), adam_state(model)
    for context in (th.no_grad, th.inference_mode):
        with context():
            assert told(model, capsys) == f"{TORCH}gradients are switched off\n"
            for each in (model, plain):
                with pytest.raises(RuntimeError, match="does not require grad"):
                    train(each)
        assert same(parameters_of(model), before[0])
        # What was said before is over
        assert model.uses_compiled_update
        assert told(model, capsys) == COMPILED
    for each in (model, plain):
        train(each)
    assert_alike(model, plain)


def test_under_autocast_torch_trains_and_acts(
    model: PERDQN, plain: PERDQN, capsys: pytest.CaptureFixture[str]
) -> None:
    observations = np.random.default_rng(0).uniform(-10, 10, (300, 3)).astype(np.float32)
    sharp = model.predict(observations, deterministic=True)[0]
    with th.autocast("cpu", th.bfloat16):
        assert told(model, capsys) == f"{TORCH}autocast is switched on\n"
        rounded = model.predict(observations, deterministic=True)[0]
        assert np.array_equal(rounded, plain.predict(observations, deterministic=True)[0])
        for each in (model, plain):
            train(each)
    assert sharp.shape == rounded.shape
    assert_same(model, plain)
    # Acting under autocast leaves training as it is
    with th.autocast("cpu", th.bfloat16):
        model.predict(observations, deterministic=True)
    assert told(model, capsys) == COMPILED


def test_a_policy_in_float64_gives_the_errors_of_torch(model: PERDQN, plain: PERDQN) -> None:
    """SB3 makes float32 of observations."""
    observation = np.zeros(3, np.float32)
    for each in (model, plain):
        each.policy.double()
        with pytest.raises(RuntimeError, match="dtype"):
            each.predict(observation, deterministic=True)
        with pytest.raises(RuntimeError, match="dtype"):
            train(each)
    assert not model.uses_compiled_update


# --- own classes ---------------------------------------------------------------------------------


class OwnTargets(PERDQN):
    def _target_q_values(self, replay_data: PrioritizedReplayBufferSamples) -> th.Tensor:
        return replay_data.rewards


class OwnErrors(PERDQN):
    def td_errors(self, batch: PrioritizedReplayBufferSamples) -> th.Tensor:
        return th.ones(len(batch.weights), 1)


class OwnPriorities(PERDQN):
    def _priorities_of(self, context: PriorityContext) -> th.Tensor:
        return context.td_errors + 5.0


class OwnQuantileTargets(PERQRDQN):
    def _target_quantiles(self, replay_data: PrioritizedReplayBufferSamples) -> th.Tensor:
        return replay_data.rewards.expand(-1, 5)


class Mixin:
    def priority_context(self, batch: PrioritizedReplayBufferSamples) -> PriorityContext:
        context: PriorityContext = super().priority_context(batch)  # type: ignore[misc] # mixed in
        return context


class Mixed(Mixin, PERDQN):
    pass


class OwnPolicy(DQNPolicy):
    pass


class OwnReLU(nn.ReLU):
    pass


IMAGES = spaces.Box(0, 255, (1, 36, 36), np.uint8)
DICTIONARY = spaces.Dict({"a": spaces.Box(-10, 10, (2,)), "b": spaces.Discrete(3)})

OWN: dict[str, tuple[dict[str, Any], str]] = {
    "targets": ({"algorithm": OwnTargets}, "OwnTargets has its own `_target_q_values`"),
    "errors": ({"algorithm": OwnErrors}, "OwnErrors has its own `td_errors`"),
    "priorities": ({"algorithm": OwnPriorities}, "OwnPriorities has its own `_priorities_of`"),
    "quantiles": (
        {"algorithm": OwnQuantileTargets, "policy_kwargs": QUANTILES},
        "OwnQuantileTargets has its own `_target_quantiles`",
    ),
    "mixin": ({"algorithm": Mixed}, "Mixed has its own `priority_context`"),
    "priority function": (
        {"priority": lambda context: context.td_errors},
        "`priority` is a function",
    ),
    "policy": ({"policy": OwnPolicy}, "the policy is a OwnPolicy, not a DQNPolicy"),
    "extractor": (
        {"policy_kwargs": {"features_extractor_class": OwnExtractor, "net_arch": [8]}},
        "the features extractor of q_net is a OwnExtractor, not a FlattenExtractor",
    ),
    "ELU": (
        {"policy_kwargs": {"activation_fn": nn.ELU, "net_arch": [8]}},
        "the activation of q_net is ELU, not ReLU or Tanh",
    ),
    "own activation": (
        {"policy_kwargs": {"activation_fn": OwnReLU, "net_arch": [8]}},
        "the activation of q_net is OwnReLU, not ReLU or Tanh",
    ),
    "optimizer": (
        {"policy_kwargs": {"optimizer_class": th.optim.RMSprop, "net_arch": [8]}},
        "the optimizer is RMSprop, not Adam",
    ),
    "amsgrad": (
        {"policy_kwargs": {"optimizer_kwargs": {"amsgrad": True}, "net_arch": [8]}},
        "the optimizer has amsgrad=True",
    ),
    "images": (
        {"env": lambda: TenStepEnv(IMAGES), "policy": "CnnPolicy", "policy_kwargs": {}},
        "the policy is a CnnPolicy, not a DQNPolicy",
    ),
    "images, flattened": (
        {"env": lambda: TenStepEnv(IMAGES)},
        "observations are images",
    ),
    "Dict": (
        {"env": lambda: TenStepEnv(DICTIONARY)},
        "the policy is a MultiInputPolicy, not a DQNPolicy",
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_own_parts_are_trained_by_torch(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    kwargs, reason = OWN[case]
    timesteps = 16 if case.startswith("images") else 40
    model, rows, following = run(True, timesteps, **kwargs)
    plain, expected_rows, expected_following = run(False, timesteps, **kwargs)
    assert told(model, capsys) == f"{TORCH}{reason}\n"
    assert model._n_updates > 0
    assert_same(model, plain)
    assert rows == expected_rows
    assert following == expected_following


class OwnPredict(PERDQN):
    def predict(self, observation: Any, *args: Any, **kwargs: Any) -> Any:
        actions, state = super().predict(observation, *args, **kwargs)
        return 1 - actions, state


class OwnTrain(PERDQN):
    n_calls = 0

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        self.n_calls += 1
        super().train(gradient_steps, batch_size)


@pytest.mark.parametrize("algorithm", [OwnPredict, OwnTrain])
def test_own_methods_around_those_that_are_compiled_are_used(algorithm: Any) -> None:
    kwargs = {"learning_starts": 0, "exploration_initial_eps": 0.0, "exploration_final_eps": 0.0}
    assert_both_ways_are_alike(40, algorithm=algorithm, **kwargs)
    model = run(True, 40, algorithm=algorithm, **kwargs)[0]
    base = run(True, 40, **kwargs)[0]
    if algorithm is OwnTrain:
        assert cast(OwnTrain, model).n_calls == 40
        assert_same(model, base)
    else:
        assert buffer_of(model).actions[0] == 1 - buffer_of(base).actions[0]


def test_why_not_is_said_once_and_again_when_it_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = small_model(verbose=1, policy_kwargs={"net_arch": [8], "activation_fn": nn.ELU})
    model.set_logger(silent(small_model()).logger)
    reason = f"{TORCH}the activation of q_net is ELU, not ReLU or Tanh\n"
    capsys.readouterr()
    model.learn(30)
    assert capsys.readouterr().out == reason
    model.learn(30, reset_num_timesteps=False)
    assert capsys.readouterr().out == ""
    model.compiled = False
    model.learn(30, reset_num_timesteps=False)
    assert capsys.readouterr().out == f"{TORCH}`compiled` is False\n"
    model.compiled = True
    model.learn(30, reset_num_timesteps=False)
    assert capsys.readouterr().out == reason
    model.verbose = 0
    model.compiled = False
    model.learn(30, reset_num_timesteps=False)
    assert capsys.readouterr().out == ""


# --- actions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [PERDQN, PERQRDQN])
@pytest.mark.parametrize("name", SPACES)
def test_predictions_are_those_of_torch_in_kind_too(name: str, algorithm: Any) -> None:
    space = SPACES[name]
    env = TenStepEnv(space, spaces.Discrete(4))
    model = small_model(env, algorithm, policy_kwargs={"net_arch": [8]})
    with th.no_grad():
        # So that the observation decides
        for parameter in model.policy.parameters():
            parameter *= 4.0 if parameter.ndim == 2 else 0.0
    space.seed(0)
    several = np.stack([space.sample() for _ in range(30)])
    seen = set()
    for observation in (several, several[:1], *several):
        observation = np.asarray(observation)
        action, state = model.predict(observation, deterministic=True)
        expected, _ = model.policy.predict(observation, deterministic=True)
        assert type(action) is type(expected)
        assert (action.shape, action.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(action, expected)
        assert state is None
        seen.update(np.ravel(action).tolist())
    assert len(seen) > 1


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_exploration_is_that_of_dqn(rate: float, model: PERDQN) -> None:
    model.exploration_rate = rate
    observations = np.random.default_rng(0).uniform(-10, 10, (30, 3)).astype(np.float32)
    results = []
    for predict in (model.predict, lambda given: DQN.predict(model, given)):
        np.random.seed(0)
        model.action_space.seed(0)
        actions = [predict(each)[0] for each in (observations, *observations)]
        assert {type(action) for action in actions} == {np.ndarray}
        results.append((np.concatenate([np.ravel(each) for each in actions]), np.random.rand()))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    "observation",
    [
        np.zeros(4, np.float32),
        np.zeros((2, 4), np.float32),
        np.zeros((2, 2, 3), np.float32),
        (np.zeros(3, np.float32), {}),
    ],
    ids=["one", "several", "dimensions", "with info"],
)
def test_observations_of_another_shape_get_the_error_of_sb3(
    observation: Any, model: PERDQN
) -> None:
    with pytest.raises(ValueError) as expected:  # noqa: PT011 # compared below
        model.policy.predict(observation)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        model.predict(observation, deterministic=True)
    assert str(error.value) == str(expected.value)


def test_an_optimizer_that_is_not_known_costs_acting_nothing(
    model: PERDQN, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there is compiled code is looked for in training, not at each action."""
    from sb3_per.common import mlp

    optimizer(th.optim.SGD)(model)
    train(model)
    n_looks = 0
    own = mlp.CompiledUpdate.of

    def count(*args: Any) -> Any:
        nonlocal n_looks
        n_looks += 1
        return own(*args)

    monkeypatch.setattr(mlp.CompiledUpdate, "of", count)
    for _ in range(5):
        model.predict(np.zeros(3, np.float32), deterministic=True)
    assert n_looks == 0
    train(model)
    assert n_looks == 1
    optimizer(th.optim.Adam)(model)
    train(model)
    assert n_looks == 2
    model.predict(np.zeros(3, np.float32), deterministic=True)
    assert n_looks == 2
    assert model.uses_compiled_update


# --- copies and files ----------------------------------------------------------------------------


def test_copies_train_themselves(model: PERDQN) -> None:
    train(model)
    before = parameters_of(model)
    twin, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    policy = copy.deepcopy(model.policy)
    for copied in (twin, unpickled):
        assert copied.uses_compiled_update
        train(copied)
        assert same(parameters_of(model), before)
        assert not same(parameters_of(copied), before)
    assert_same(twin, unpickled)
    train(model)
    assert_same(model, twin)
    assert same(policy.parameters(), before)


def test_both_ways_take_turns(model: PERDQN, plain: PERDQN) -> None:
    for turn in range(6):
        model.compiled = turn % 2 == 0
        for each in (model, plain):
            train(each, seed=turn)
    assert_alike(model, plain)


@pytest.mark.parametrize("algorithm", [PERDQN, PERQRDQN])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_it_goes_on_from_a_file_in_the_other_way(
    compiled_first: bool, algorithm: Any, tmp_path: Path
) -> None:
    start = run(compiled_first, 40, algorithm=algorithm)[0]
    start.save(tmp_path / "model")
    start.save_replay_buffer(tmp_path / "buffer")
    models = []
    for compiled in (True, False):
        model = silent(algorithm.load(tmp_path / "model", compiled=compiled))
        model.load_replay_buffer(tmp_path / "buffer")
        assert_same(model, start)
        assert model.uses_compiled_update == compiled
        train(model, 10)
        models.append(model)
    assert algorithm.load(tmp_path / "model").compiled == compiled_first
    assert_alike(*models)
    # And as if it had never been away
    train(start, 10)
    assert_same(start, models[0] if compiled_first else models[1])


@pytest.mark.parametrize(("ours", "theirs"), [(PERDQN, DQN), (PERQRDQN, QRDQN)])
def test_through_a_model_of_sb3_and_back(ours: Any, theirs: Any, tmp_path: Path) -> None:
    ends = []
    for compiled in (True, False):
        start = run(compiled, 40, algorithm=ours)[0]
        start.save(tmp_path / "ours")
        between = silent(theirs.load(tmp_path / "ours", env=TenStepEnv()))
        assert same(parameters_of(between), parameters_of(start))
        assert all(
            th.equal(values, adam_state(start)[name])
            for name, values in adam_state(between).items()
        )
        between.learn(20)
        between.save(tmp_path / "theirs")
        model = silent(ours.load(tmp_path / "theirs", env=TenStepEnv(), compiled=compiled))
        assert model.uses_compiled_update == compiled
        model.learn(30)
        ends.append(model)
    assert_alike(*ends)


def test_callbacks_see_the_same_and_change_nothing(tmp_path: Path) -> None:
    """Checkpoints, evaluation and soft updates by hand."""

    class Update(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls % 7 == 0:
                polyak_update(
                    self.model.q_net.parameters(), self.model.q_net_target.parameters(), 0.5
                )
            return True

    checkpoints = {}
    for compiled in (True, False):
        folder = tmp_path / str(compiled)
        model = silent(small_model(compiled=compiled, learning_rate=1e-3, target_update_interval=9))
        evaluation = EvalCallback(
            DummyVecEnv([TenStepEnv]), eval_freq=20, n_eval_episodes=2, verbose=0, warn=False
        )
        model.learn(60, callback=[CheckpointCallback(25, str(folder)), evaluation, Update()])
        loaded = [PERDQN.load(folder / f"rl_model_{steps}_steps") for steps in (25, 50)]
        checkpoints[compiled] = [*loaded, model]
        assert evaluation.n_calls == 60
        assert np.isfinite(evaluation.last_mean_reward)
    for ours, theirs in zip(checkpoints[True], checkpoints[False], strict=True):
        assert distance(ours, theirs) < 1e-5
    assert distance(checkpoints[True][0], checkpoints[True][1]) > 1e-3
    assert_alike(checkpoints[True][2], checkpoints[False][2])


def test_parameters_in_callbacks_are_references_as_those_of_dqn(
    model: PERDQN, plain: PERDQN
) -> None:
    for each in (model, plain):
        taken = each.get_parameters()
        kept = copy.deepcopy(taken)
        train(each)
        now = each.get_parameters()
        for name, values in taken["policy"].items():
            assert th.equal(values, now["policy"][name])
        changed = [
            not th.equal(values, kept["policy"][name]) for name, values in taken["policy"].items()
        ]
        assert any(changed)
        assert not all(changed)
        state = taken["policy.optimizer"]["state"]
        assert th.equal(state[0]["exp_avg"], now["policy.optimizer"]["state"][0]["exp_avg"])
        assert state[0]["step"] == now["policy.optimizer"]["state"][0]["step"]
        # And back to what was kept
        each.set_parameters(kept)
        train(each)
    assert_alike(model, plain)


def test_evaluation_between_updates_changes_nothing(model: PERDQN) -> None:
    twin = copy.deepcopy(model)
    train(model)
    evaluate_policy(model, DummyVecEnv([TenStepEnv]), 2, warn=False)
    train(model)
    train(twin)
    train(twin)
    assert_same(model, twin)


# --- errors before anything changes --------------------------------------------------------------


@pytest.fixture(params=[PERDQN, PERQRDQN])
def either(request: pytest.FixtureRequest) -> CompiledOffPolicyAlgorithm:
    return cast(CompiledOffPolicyAlgorithm, run(True, 40, algorithm=request.param)[0])


def make_drawn(model: OffPolicyAlgorithm, index: int) -> None:
    """So large a priority that each batch has the transition."""
    buffer_of(model).update_priorities([index], [1e9])


@pytest.mark.parametrize("priority", ["td_error", "clipped", "reducible"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_leaves_everything_whole(
    value: float, priority: Any, either: CompiledOffPolicyAlgorithm
) -> None:
    model = either
    model.priority = priority
    make_drawn(model, 5)
    twin, plain = copy.deepcopy(model), copy.deepcopy(model)
    plain.compiled = False
    messages = []
    for each in (model, plain):
        good = buffer_of(each).rewards[5, 0].item()
        buffer_of(each).rewards[5, 0] = value
        before = whole_state(each)
        with pytest.raises(ValueError, match=r"transition 5 .*finite") as error:
            train(each)
        messages.append(str(error.value))
        assert whole_state(each) == before
        buffer_of(each).rewards[5, 0] = good
    assert messages[0] == messages[1]
    assert model.uses_compiled_update
    # It goes on as if nothing had been
    for each in (model, twin, plain):
        train(each)
    assert_same(model, twin)
    assert_alike(model, plain)


@pytest.mark.parametrize("action", [-1, 2, 10**9])
def test_an_action_that_does_not_exist_leaves_everything_whole(
    action: int, either: CompiledOffPolicyAlgorithm
) -> None:
    model = either
    make_drawn(model, 5)
    twin = copy.deepcopy(model)
    buffer = buffer_of(model)
    good = buffer.actions[5, 0].item()
    buffer.actions[5, 0] = action
    before = whole_state(model)
    with pytest.raises(RuntimeError, match=f"{action} .*out of bounds"):
        train(model)
    assert whole_state(model) == before
    model.compiled = False
    with pytest.raises(RuntimeError, match=f"{action} .*out of bounds"):
        train(model)
    model.compiled = True
    buffer.actions[5, 0] = good
    for each in (model, twin):
        train(each)
    assert_same(model, twin)


def test_an_interrupt_between_two_steps_leaves_everything_whole(
    either: CompiledOffPolicyAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = either
    twin = copy.deepcopy(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = whole_state(model)
    monkeypatch.setattr(model.replay_buffer, "update_priorities", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(model)
    monkeypatch.undo()
    assert whole_state(model) == before
    for each in (model, twin):
        train(each)
    assert_same(model, twin)


# --- threads and processes -----------------------------------------------------------------------


def give_batches(model: OffPolicyAlgorithm, batches: list[Any]) -> None:
    """Let it train on these, over and over: threads share NumPy's random numbers."""
    following = cycle(batches)
    buffer: Any = buffer_of(model)
    buffer.sample = lambda *_, **__: next(following)


def test_models_in_threads_train_as_if_alone() -> None:
    models, twins = [], []
    for seed, algorithm in enumerate([PERDQN, PERQRDQN, PERDQN]):
        model = run(True, 30, algorithm=algorithm, seed=seed)[0]
        twin = copy.deepcopy(model)
        batches = [buffer_of(model).sample(8) for _ in range(3)]
        for each in (model, twin):
            give_batches(each, batches)
        models.append(model)
        twins.append(twin)
    for twin in twins:
        twin.train(150, 8)
    n_threads = th.get_num_threads()
    threads = [Thread(target=model.train, args=(150, 8)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert th.get_num_threads() == n_threads
    for model, twin in zip(models, twins, strict=True):
        assert model._n_updates == 20 + 150
        assert_same(model, twin)


PROCESSES = """
import multiprocessing, pickle, sys
import numpy as np

def train(model, connection):
    if isinstance(model, bytes):
        model = pickle.loads(model)
    np.random.seed(1)
    model.train(20, 8)
    connection.send([p.tolist() for p in model.policy.parameters()])

if __name__ == "__main__":
    import gymnasium as gym
    import torch as th
    from stable_baselines3.common.logger import Logger
    from sb3_per import PERDQN

    th.set_num_threads(1)
    kwargs = {"policy_kwargs": {"net_arch": [8]}, "seed": 0, "device": "cpu"}
    model = PERDQN("MlpPolicy", "CartPole-v1", **kwargs)
    model.set_logger(Logger(None, []))
    model.learn(120)
    assert model.uses_compiled_update
    before = [p.tolist() for p in model.policy.parameters()]
    ends = []
    # torch would let the two processes share the memory of a model that it hands over itself
    for method, handed_over in (("fork", model), ("spawn", pickle.dumps(model))):
        context = multiprocessing.get_context(method)
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=train, args=(handed_over, sender))
        process.start()
        ends.append(receiver.recv())
        process.join()
        assert process.exitcode == 0
        assert [p.tolist() for p in model.policy.parameters()] == before
    np.random.seed(1)
    model.train(20, 8)
    here = [p.tolist() for p in model.policy.parameters()]
    print(here != before, *(end == here for end in ends))
"""


def test_forked_and_spawned_processes_train_as_this_one(
    run_python: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "processes.py").write_text(PROCESSES)
    assert run_python("processes.py") == "True True True"


CARTPOLE = """
import json
import gymnasium as gym
from sb3_per import PERDQN

model = PERDQN(
    "MlpPolicy", "CartPole-v1", learning_starts=10, train_freq=1, batch_size=8, buffer_size=100,
    learning_rate=1e-3, policy_kwargs={"net_arch": [8]}, seed=0, device="cpu", tensorboard_log=None
)
model.learn(60, log_interval=1000)
numbers = [number for p in model.policy.parameters() for number in p.flatten().tolist()]
"""
SHOW = "\nprint(json.dumps([model.uses_compiled_update, numbers]))"


@pytest.mark.slow
def test_a_package_in_a_folder_that_can_not_be_written_compiles_each_time(
    run_python: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files stand where the folders of a cache would have to be made: that stops root, too."""
    package = tmp_path / "packages" / "sb3_per"
    source = Path(sb3_per.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (package, *package.rglob("*/")):
        (folder / "__pycache__").touch()
    (tmp_path / "file").touch()
    for variable in ("HOME", "LOCALAPPDATA", "USERPROFILE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    shown = run_python("-c", CARTPOLE + SHOW + "\nimport sb3_per; print(sb3_per.__file__)")
    result, place = shown.splitlines()
    assert Path(place).parent == package
    state: dict[str, Any] = {}
    exec(CARTPOLE, state)
    assert json.loads(result) == [True, state["numbers"]]


@pytest.mark.slow
def test_without_numbas_compiler_torch_trains_the_same(
    run_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    uses_compiled_update, numbers = json.loads(run_python("-c", CARTPOLE + SHOW))
    assert uses_compiled_update is False
    state: dict[str, Any] = {}
    exec(CARTPOLE, state)
    assert state["model"].uses_compiled_update
    assert relative_distance(th.tensor(state["numbers"]), th.tensor(numbers)) < 1e-5
