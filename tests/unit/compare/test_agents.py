from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack

from sb3_per import PERDQN, PrioritizedFrameReplayBuffer
from sb3_per.compare.agents import Agent, parse_agent, parse_agents
from sb3_per.compare.settings import SettingsError

HYPERPARAMS: dict[str, Any] = {
    "n_timesteps": 100,
    "policy": "MlpPolicy",
    "learning_rate": 0.01,
    "buffer_size": 500,
    "policy_kwargs": "dict(net_arch=[8])",
}


@pytest.mark.parametrize(
    ("text", "name", "label"),
    [
        ("uniform", "uniform", "uniform"),
        ("DQN", "uniform", "uniform"),
        (" per ", "per", "PER"),
        ("per()", "per", "PER"),
        ("PERDQN( alpha = .8 )", "per(alpha=0.8)", "PER (alpha=0.8)"),
        (
            "per(double_q=True, alpha=0.5)",
            "per(alpha=0.5, double_q=True)",
            "PER (alpha=0.5, double_q=True)",
        ),
        ("per(loss='mse')", "per(loss='mse')", "PER (loss='mse')"),
        # As in a YAML file
        (
            "per(learning_rate='lin_1e-3')",
            "per(learning_rate='lin_1e-3')",
            "PER (learning_rate='lin_1e-3')",
        ),
        ("per(learning_rate='1e-3')", "per(learning_rate=0.001)", "PER (learning_rate=0.001)"),
        (
            "uniform(train_freq=(2, 'episode'))",
            "uniform(train_freq=[2, 'episode'])",
            "uniform (train_freq=[2, 'episode'])",
        ),
        ("qrdqn(n_quantiles=25)", "qrdqn(n_quantiles=25)", "QR-DQN uniform (n_quantiles=25)"),
        ("per_qrdqn", "per_qrdqn", "QR-DQN PER"),
    ],
)
def test_names_and_labels(text: str, name: str, label: str) -> None:
    agent = parse_agent(text)
    assert (str(agent), agent.label) == (name, label)
    assert parse_agent(name) == agent


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ppo", "there is no 'ppo', only uniform, per, "),
        ("per(alpha)", "can't read"),
        ("per(0.8)", "an agent is a name"),
        ("per(alpha=x)", "can't read"),
        ("per(**{'alpha': 1})", "can't read"),
        ("per alpha=1", "can't read"),
        ("", "can't read"),
        ("per(alpha=1e999)", "can't read .* 1e309 is too large for a number"),
        ("per(beta=-1e999)", "can't read"),
        ("per(alpha=1j)", "can't read"),
        ("per(loss=nn.ReLU)", "loss is <class .*only numbers, texts, lists and dicts"),
        ("per(learning_rate='cos_1')", "learning_rate is 'cos_1'"),
        ("per(batch_size=0)", "batch_size is 0: an integer of at least 1"),
        ("per(train_freq=[1])", r"train_freq is \[1\]: a number of steps is needed, or a pair"),
        ("per(" + "(" * 500 + ")" * 500 + ")", "can't read"),
        ("per.x", "an agent is a name"),
    ],
)
def test_names_that_are_none(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_agent(text)


def test_the_same_agent_twice() -> None:
    with pytest.raises(SettingsError, match=r"per\(alpha=0.5\) more than once"):
        parse_agents(["per(alpha=.5)", "uniform", "per(alpha=0.50)"])


def test_agents_have_their_class_and_options_and_the_hyperparameters_of_all() -> None:
    env = make_vec_env("CartPole-v1")
    uniform = parse_agent("uniform").make(env, HYPERPARAMS, seed=3, device="cpu")
    per = parse_agent("per(alpha=0.3, learning_rate=0.002)").make(env, HYPERPARAMS, 3, "cpu")
    assert (type(uniform), type(per)) == (DQN, PERDQN)
    assert isinstance(per, PERDQN)
    assert (uniform.learning_rate, per.learning_rate, per.alpha, per.beta) == (
        0.01,
        0.002,
        0.3,
        0.4,
    )
    assert uniform.buffer_size == per.buffer_size == 500
    # The same network with the same first weights
    for ours, theirs in zip(uniform.policy.parameters(), per.policy.parameters(), strict=True):
        assert ours.shape == theirs.shape
        assert (ours == theirs).all()


@pytest.mark.parametrize("n_stack", [1, 4])
@pytest.mark.parametrize("saving", [False, True])
def test_prioritized_agents_store_the_frames_of_stacked_images_once(
    saving: bool, n_stack: int
) -> None:
    class Images(gym.Env[Any, Any]):
        observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
        action_space = spaces.Discrete(2)

    env = VecFrameStack(make_vec_env(Images), n_stack)
    hyperparams = {"policy": "CnnPolicy", "buffer_size": 20}
    if saving:
        no_timeouts = "dict(handle_timeout_termination=False)"
        hyperparams |= {"optimize_memory_usage": True, "replay_buffer_kwargs": no_timeouts}
    uniform = parse_agent("uniform").make(env, hyperparams, seed=3, device="cpu")
    per = parse_agent("per").make(env, hyperparams, seed=3, device="cpu")
    assert type(uniform.replay_buffer) is ReplayBuffer
    stores_frames = n_stack == 4 and not saving
    assert isinstance(per.replay_buffer, PrioritizedFrameReplayBuffer) is stores_frames


def test_quantiles_are_an_option_of_the_policy() -> None:
    pytest.importorskip("sb3_contrib", reason="extra contrib")
    agent = parse_agent("qrdqn(n_quantiles=7)")
    agent.check(HYPERPARAMS)
    model = agent.make(make_vec_env("CartPole-v1"), HYPERPARAMS, seed=0, device="cpu")
    assert model.policy_kwargs["n_quantiles"] == 7
    assert model.policy_kwargs["net_arch"] == [8]
    parse_agent("per").check(HYPERPARAMS)
    with pytest.raises(SettingsError, match="n_quantiles is no option of per"):
        parse_agent("per(n_quantiles=7)").check(HYPERPARAMS)


def test_learning_rate_of_an_agent_falls_like_one_of_a_file() -> None:
    env = make_vec_env("CartPole-v1")
    model = parse_agent("per(learning_rate='lin_1e-3')").make(env, HYPERPARAMS, 0, "cpu")
    rates = [model.lr_schedule(remaining) for remaining in (1.0, 0.5, 0.0)]
    assert rates == pytest.approx([1e-3, 5e-4, 0.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("per(alpha=-1)", r"agent per\(alpha=-1\): `alpha` must be .*-1"),
        ("per(beta=1.5)", r"agent per\(beta=1.5\): `beta` must be .*1.5"),
        ("per(loss='mae')", "agent .*: `loss` must be .*'mae'"),
        ("per(double_q='maybe')", "agent .*: `double_q` must be .*'maybe'"),
        ("per_qrdqn(prioritization='magic')", "agent .*: `prioritization` must be .*'magic'"),
        ("qrdqn(n_quantiles='many')", "agent .*: "),
        ("per(alpha='high')", r"agent per\(alpha='high'\): "),
    ],
)
def test_options_meet_the_checks_of_the_algorithm(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_agent(text).try_out(make_vec_env("CartPole-v1"), HYPERPARAMS, 0, "cpu")


@pytest.mark.parametrize("text", ["per", "per(buffer_size=1000000000)"])
def test_trying_out_takes_no_memory(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        Agent, "make", lambda self, env, hyperparams, *_: sizes.append(hyperparams["buffer_size"])
    )
    large = {**HYPERPARAMS, "buffer_size": 10**12}
    parse_agent(text).try_out(make_vec_env("CartPole-v1", 2), large, 0, "cpu")
    assert sizes == [2000]
    parse_agent(text).try_out(make_vec_env("CartPole-v1"), {"buffer_size": 7}, 0, "cpu")
    assert sizes[1] == (7 if text == "per" else 1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("uniform(alpha=0.5)", "alpha is no option of uniform"),
        ("per(alhpa=0.5)", "alhpa is no option of per"),
        ("per(policy_kwargs={})", "policy_kwargs must be the same for all agents"),
        ("per(seed=1)", "seed is no option"),
        ("per(env='CartPole-v1')", "env is no option"),
        ("per(tensorboard_log='x')", "tensorboard_log is no option"),
    ],
)
def test_options_that_an_agent_does_not_have(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        parse_agent(text).check(HYPERPARAMS)


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    with pytest.raises(SettingsError, match=r"needs sb3_contrib: pip install 'sb3-per\[contrib\]'"):
        parse_agent("qrdqn").check(HYPERPARAMS)
