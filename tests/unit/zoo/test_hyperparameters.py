"""The YAML files that rl-zoo3 gets: every name is an argument, every value is accepted."""

import inspect
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium import spaces
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack

from sb3_per import (
    PERDDPG,
    PERDQN,
    PERQRDQN,
    PERSAC,
    PERTD3,
    PERTQC,
    PrioritizedFrameReplayBuffer,
    zoo,
)

CLASSES: dict[str, type[OffPolicyAlgorithm]] = {
    "per_dqn": PERDQN,
    "per_qrdqn": PERQRDQN,
    "per_sac": PERSAC,
    "per_td3": PERTD3,
    "per_ddpg": PERDDPG,
    "per_tqc": PERTQC,
}
ACTOR_CRITICS = [name for name in CLASSES if "dqn" not in name]
FILES: dict[str, dict[str, dict[str, Any]]] = {
    name: yaml.safe_load(zoo.hyperparameters_of(name).read_text(encoding="utf-8"))
    for name in zoo.ALGORITHMS
}
ENTRIES = [(name, env) for name, entries in FILES.items() for env in entries]
# What rl-zoo3 takes out before it makes the model
OF_RL_ZOO3 = {"n_timesteps", "env_wrapper", "frame_stack", "noise_type", "noise_std"}


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
    def __init__(
        self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space


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
    arguments = arguments_of(entry)
    actions: spaces.Space[Any] = spaces.Discrete(2)
    if name in ACTOR_CRITICS:
        actions = spaces.Box(-1.0, 1.0, (2,), np.float32)
    venv: VecEnv = DummyVecEnv([lambda: Space(space, actions)])
    if images:
        venv = VecFrameStack(venv, entry["frame_stack"])
    assert arguments.keys() <= inspect.signature(CLASSES[name]).parameters.keys()
    model = CLASSES[name](env=venv, **{**arguments, "buffer_size": 10, "device": "cpu"})
    assert isinstance(model.replay_buffer, PrioritizedFrameReplayBuffer) is images
    kept_otherwise = {"policy", "buffer_size", "train_freq", "policy_kwargs"}
    for option in arguments.keys() - kept_otherwise:
        assert getattr(model, option) == arguments[option], option
    # Reached within the run
    assert arguments.get("learning_starts", 100) < entry["n_timesteps"]


@pytest.mark.parametrize("name", ACTOR_CRITICS)
def test_actor_critics_have_rl_zoos_values_and_lap(name: str) -> None:
    rl_zoo3 = pytest.importorskip("rl_zoo3", reason="needs the extra `zoo`")
    folder = Path(rl_zoo3.__file__).parent / "hyperparams"
    file = folder / f"{name.removeprefix('per_')}.yml"
    theirs = yaml.safe_load(file.read_text(encoding="utf-8"))
    lap = {"alpha": 0.4, "beta": 0.0, "beta_final": 0.0, "priority": "clipped"}
    if name != "per_tqc":
        lap["loss"] = "huber"
    assert list(FILES[name]) == list(FILES["per_sac"])
    assert len(FILES[name]) == 17
    for env, entry in FILES[name].items():
        assert entry == {**theirs[env.replace("-v5", "-v4")], **lap}, env


@pytest.mark.parametrize(("name", "of_the_original"), [("per_dqn", 2.5e-4), ("per_qrdqn", 5e-5)])
def test_atari_has_the_settings_of_the_paper(name: str, of_the_original: float) -> None:
    entry = FILES[name]["atari"]
    assert entry["learning_rate"] == of_the_original / 4
    assert (entry["alpha"], entry["beta"], entry["beta_final"]) == (0.6, 0.4, 1.0)
    assert entry["double_q"] is True
    assert entry["exploration_fraction"] * entry["n_timesteps"] == 250_000


def test_cartpole_is_that_of_the_example() -> None:
    import sys

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
