"""The environments under Stable-Baselines3: its checker, its workers, its success rate."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import DQN
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import SubprocVecEnv

import sb3_per_envs

IDS = sorted(spec.id for spec in gym.registry.values() if spec.namespace == "sb3_per")
VARIANTS: list[tuple[str, dict[str, Any]]] = [(env_id, {}) for env_id in IDS] + [
    ("sb3_per/GridWorld-v0", {"observation": "position"}),
    ("sb3_per/GridWorld-v0", {"observation": "discrete"}),
    ("sb3_per/GridWorld-v0", {"length": 2, "start": None}),
    ("sb3_per/BlindCliffwalk-v0", {"n": 2}),
]


@pytest.mark.parametrize(("env_id", "kwargs"), VARIANTS, ids=str)
@pytest.mark.parametrize("mode", [None, "ansi", "rgb_array"])
@pytest.mark.filterwarnings("error")
def test_sb3_finds_no_fault(env_id: str, kwargs: dict[str, Any], mode: str | None) -> None:
    check_env(gym.make(env_id, render_mode=mode, **kwargs), skip_render_check=False)
    check_env(gym.make(env_id, render_mode=mode, **kwargs).unwrapped, skip_render_check=False)


def test_spawned_workers_need_no_import() -> None:
    env = make_vec_env(
        "sb3_per_envs:sb3_per/GridWorld-v0",
        n_envs=2,
        seed=0,
        env_kwargs={"length": 3},
        vec_env_cls=SubprocVecEnv,
        vec_env_kwargs={"start_method": "spawn"},
    )
    try:
        np.testing.assert_array_equal(env.reset(), [[1, 0, 0], [1, 0, 0]])
        env.step(np.array([1, 0]))
        observations, rewards, dones, infos = env.step(np.array([1, 1]))
    finally:
        env.close()
    np.testing.assert_array_equal(observations, [[1, 0, 0], [0, 1, 0]])
    assert rewards.tolist() == [1.0, 0.0]
    assert dones.tolist() == [True, False]
    np.testing.assert_array_equal(infos[0]["terminal_observation"], [0, 0, 1])
    assert [info["position"] for info in infos] == [2, 1]


def test_predicted_actions_go_straight_into_step_and_sb3_counts_the_successes() -> None:
    model = DQN("MlpPolicy", sb3_per_envs.GridWorldEnv(length=2), seed=0, buffer_size=100)
    model.learn(40)
    assert model.ep_success_buffer is not None
    assert set(model.ep_success_buffer) == {True}

    env = sb3_per_envs.GridWorldEnv(length=5)
    model = DQN("MlpPolicy", env, seed=0, buffer_size=100)
    observation, _ = env.reset()
    assert isinstance(observation, np.ndarray)
    action, _ = model.predict(observation)
    assert env.step(action)[4]["position"] == int(action)


def test_the_known_policy_scores_its_known_length() -> None:
    class Parity:
        """The policy of the Blind Cliffwalk, in the form that evaluate_policy asks for."""

        def predict(
            self, observation: Any, state: Any = None, **_: Any
        ) -> tuple[np.ndarray[Any, Any], Any]:
            return np.argmax(observation, axis=1) % 2, state

    env = make_vec_env("sb3_per_envs:sb3_per/BlindCliffwalk-v0", n_envs=1, env_kwargs={"n": 7})
    returns, lengths = evaluate_policy(
        Parity(),  # type: ignore[arg-type]
        env,
        n_eval_episodes=3,
        return_episode_rewards=True,
    )
    assert returns == [1.0] * 3
    assert lengths == [7] * 3
