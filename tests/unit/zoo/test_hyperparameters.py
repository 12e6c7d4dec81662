"""The YAML files that rl-zoo3 gets: every name is an argument, every value is accepted."""

import inspect
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack

from sb3_per import PERDQN, PERQRDQN, PrioritizedFrameReplayBuffer, zoo

CLASSES: dict[str, type[OffPolicyAlgorithm]] = {"per_dqn": PERDQN, "per_qrdqn": PERQRDQN}
FILES: dict[str, dict[str, dict[str, Any]]] = {
    name: yaml.safe_load(zoo.hyperparameters_of(name).read_text(encoding="utf-8"))
    for name in zoo.ALGORITHMS
}
ENTRIES = [(name, env) for name, entries in FILES.items() for env in entries]
# What rl-zoo3 takes out before it makes the model
OF_RL_ZOO3 = {"n_timesteps", "env_wrapper", "frame_stack"}


def arguments_of(entry: dict[str, Any]) -> dict[str, Any]:
    """As rl-zoo3 prepares them."""
    arguments = {name: value for name, value in entry.items() if name not in OF_RL_ZOO3}
    for name in ("policy_kwargs", "replay_buffer_class", "replay_buffer_kwargs"):
        if name in arguments:
            arguments[name] = eval(arguments[name])
    if isinstance(arguments.get("learning_rate"), str):
        kind, value = arguments["learning_rate"].split("_")
        assert kind == "lin"
        arguments["learning_rate"] = float(value)
    return arguments


class Space(gym.Env[Any, Any]):
    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(2)


def test_both_files_have_the_same_environments() -> None:
    assert CLASSES.keys() == zoo.ALGORITHMS.keys()
    assert list(FILES["per_dqn"]) == list(FILES["per_qrdqn"])
    assert set(FILES["per_dqn"]) == {
        "default",
        "atari",
        "CartPole-v1",
        "MountainCar-v0",
        "LunarLander-v3",
        "Acrobot-v1",
        # The toy environments, which an import of sb3_per registers
        *(env for env in gym.registry if env.startswith("sb3_per/")),
    }


@pytest.mark.parametrize(("name", "env"), ENTRIES)
def test_a_model_can_be_made_of_each_entry(name: str, env: str) -> None:
    entry = FILES[name][env]
    assert entry["n_timesteps"] == int(entry["n_timesteps"]) > 0
    images = entry["policy"] == "CnnPolicy"
    space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (3,), np.float32)
    if images:
        space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
    env: Any = DummyVecEnv([lambda: Space(space)])
    if images:
        env = VecFrameStack(env, entry["frame_stack"])
    arguments = arguments_of(entry)
    assert arguments.keys() <= inspect.signature(CLASSES[name]).parameters.keys()
    model = CLASSES[name](env=env, **{**arguments, "buffer_size": 10, "device": "cpu"})
    assert isinstance(model.replay_buffer, PrioritizedFrameReplayBuffer) is images
    for option in arguments.keys() - {"policy", "buffer_size", "train_freq", "policy_kwargs"}:
        assert getattr(model, option) == arguments[option], option
    # Reached within the run
    assert arguments.get("learning_starts", 100) < entry["n_timesteps"]


@pytest.mark.parametrize(("name", "of_the_original"), [("per_dqn", 2.5e-4), ("per_qrdqn", 5e-5)])
def test_atari_has_the_settings_of_the_paper(name: str, of_the_original: float) -> None:
    entry = FILES[name]["atari"]
    assert entry["learning_rate"] == of_the_original / 4
    assert (entry["alpha"], entry["beta"], entry["beta_final"]) == (0.6, 0.4, 1.0)
    assert entry["double_q"] is True
    assert entry["exploration_fraction"] * entry["n_timesteps"] == 250_000


def test_cartpole_is_that_of_the_example() -> None:
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    try:
        from cartpole import SETTINGS, TIMESTEPS
    finally:
        sys.path.pop(0)
    entry = FILES["per_dqn"]["CartPole-v1"]
    assert entry["n_timesteps"] == TIMESTEPS
    settings = dict(SETTINGS)
    schedule = settings.pop("learning_rate")
    assert entry["learning_rate"] == "lin_2.3e-3"
    assert (schedule(1.0), schedule(0.0)) == (2.3e-3, 0.0)
    arguments = arguments_of(entry)
    assert {name: arguments[name] for name in settings} == settings
