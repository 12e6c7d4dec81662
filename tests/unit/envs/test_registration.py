"""The ids: how they are made, their time limits, and every checker over every one of them."""

import importlib.metadata
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import sb3_per_envs
from sb3_per_envs import BlindCliffwalkEnv, GridWorldEnv, register_envs

GRID_WORLD, BLIND_CLIFFWALK = "sb3_per/GridWorld-v0", "sb3_per/BlindCliffwalk-v0"
IDS = sorted(spec.id for spec in gym.registry.values() if spec.namespace == "sb3_per")
VARIANTS: list[tuple[str, dict[str, Any]]] = [(env_id, {}) for env_id in IDS] + [
    (GRID_WORLD, {"observation": "position"}),
    (GRID_WORLD, {"observation": "discrete"}),
    (GRID_WORLD, {"length": 2, "start": None}),
    (GRID_WORLD, {"length": 25, "start": None}),
    (BLIND_CLIFFWALK, {"n": 2}),
    (BLIND_CLIFFWALK, {"n": 16}),
]
GYMNASIUM_LOADS_PLUGINS = int(importlib.metadata.version("gymnasium").split(".")[0]) < 1
every_variant = pytest.mark.parametrize(("env_id", "kwargs"), VARIANTS, ids=str)


# --- names and ids ---


def test_public_names() -> None:
    assert sb3_per_envs.__all__ == ["BlindCliffwalkEnv", "GridWorldEnv", "register_envs"]


def test_the_ids_are_the_documented_ones() -> None:
    assert IDS == [BLIND_CLIFFWALK, GRID_WORLD]


def test_an_id_makes_its_class_and_hands_over_the_arguments() -> None:
    grid_world = gym.make(GRID_WORLD, length=4, start=1, observation="discrete").unwrapped
    assert isinstance(grid_world, GridWorldEnv)
    assert (grid_world.length, grid_world.start, grid_world.observation) == (4, 1, "discrete")
    blind_cliffwalk = gym.make(BLIND_CLIFFWALK, n=4).unwrapped
    assert isinstance(blind_cliffwalk, BlindCliffwalkEnv)
    assert blind_cliffwalk.n == 4


def test_a_bad_argument_is_refused_through_make() -> None:
    with pytest.raises(ValueError, match="length must be at least 2, got 1"):
        gym.make(GRID_WORLD, length=1)


def test_registering_again_changes_nothing_and_is_quiet() -> None:
    before = {env_id: gym.registry[env_id] for env_id in IDS}
    register_envs()
    register_envs()
    assert all(gym.registry[env_id] is before[env_id] for env_id in IDS)


def test_registering_brings_back_a_missing_id_alone() -> None:
    kept = gym.registry[BLIND_CLIFFWALK]
    removed = gym.registry.pop(GRID_WORLD)
    register_envs()
    assert gym.registry[GRID_WORLD] == removed
    assert gym.registry[BLIND_CLIFFWALK] is kept


# --- time limits ---


def test_the_time_limit_truncates_and_does_not_terminate() -> None:
    env = gym.make(GRID_WORLD)
    env.reset()
    trace = [env.step(0) for _ in range(100)]
    assert [step[3] for step in trace] == [False] * 99 + [True]
    assert not any(step[2] for step in trace)
    assert not trace[-1][4]["is_success"]


def test_the_time_limit_can_be_changed() -> None:
    env = gym.make(GRID_WORLD, length=30, max_episode_steps=900)
    env.reset()
    assert [env.step(0)[3] for _ in range(900)] == [False] * 899 + [True]


def test_the_goal_in_the_last_step_terminates() -> None:
    env = gym.make(GRID_WORLD, length=4, max_episode_steps=3)
    env.reset()
    _, reward, terminated, _, _ = [env.step(1) for _ in range(3)][-1]
    assert (reward, terminated) == (1.0, True)


def test_the_cliffwalk_needs_no_time_limit() -> None:
    assert gym.spec(BLIND_CLIFFWALK).max_episode_steps is None
    env = gym.make(BLIND_CLIFFWALK, n=150)
    env.reset()
    trace = [env.step(i % 2) for i in range(150)]
    assert [step[2] for step in trace] == [False] * 149 + [True]
    assert not any(step[3] for step in trace)


# --- checkers ---


@every_variant
@pytest.mark.filterwarnings("error")
def test_gymnasium_finds_no_fault(env_id: str, kwargs: dict[str, Any]) -> None:
    """A render in each mode included, as the environment has a spec."""
    check_env(gym.make(env_id, disable_env_checker=True, **kwargs).unwrapped)


@every_variant
@pytest.mark.parametrize("mode", [None, "ansi", "rgb_array"])
@pytest.mark.filterwarnings("error")
def test_the_wrappers_of_make_find_no_fault(
    env_id: str, kwargs: dict[str, Any], mode: str | None
) -> None:
    env = gym.make(env_id, render_mode=mode, **kwargs)
    env.action_space.seed(0)
    env.reset(seed=0)
    for _ in range(60):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if mode is not None:
            assert env.render() is not None
        if terminated or truncated:
            env.reset()
    env.close()


@every_variant
def test_the_same_seed_gives_the_same_rollout(env_id: str, kwargs: dict[str, Any]) -> None:
    def rollout() -> list[tuple[Any, ...]]:
        env = gym.make(env_id, **kwargs)
        env.action_space.seed(3)
        observation, info = env.reset(seed=3)
        trace: list[tuple[Any, ...]] = [(np.array(observation).tolist(), info)]
        for _ in range(200):
            observation, *rest = env.step(env.action_space.sample())
            trace.append((np.array(observation).tolist(), *rest))
            if rest[1] or rest[2]:
                observation, info = env.reset()
                trace.append((np.array(observation).tolist(), info))
        return trace

    assert rollout() == rollout()


@every_variant
def test_a_made_environment_survives_pickle(env_id: str, kwargs: dict[str, Any]) -> None:
    env = gym.make(env_id, **kwargs)
    env.reset(seed=3)
    twin = pickle.loads(pickle.dumps(env))
    stepped, twin_stepped = env.step(1), twin.step(1)
    np.testing.assert_array_equal(stepped[0], twin_stepped[0])
    assert stepped[1:] == twin_stepped[1:]
    restarted, twin_restarted = env.reset(), twin.reset()
    np.testing.assert_array_equal(restarted[0], twin_restarted[0])
    assert restarted[1] == twin_restarted[1]


def test_step_before_reset_is_refused_through_make() -> None:
    with pytest.raises(gym.error.ResetNeeded):
        gym.make(GRID_WORLD).step(1)


# --- fresh interpreters ---


def test_importing_the_package_registers_the_ids(run_python: Callable[..., str]) -> None:
    code = (
        "import sb3_per_envs, gymnasium\n"
        "print(gymnasium.make('sb3_per/GridWorld-v0', render_mode='ansi').unwrapped)\n"
        "print(sorted(i for i in gymnasium.registry if i.startswith('sb3_per/')))"
    )
    first, second = run_python("-c", code).splitlines()
    assert "GridWorldEnv" in first
    assert second == str([BLIND_CLIFFWALK, GRID_WORLD])


def test_the_order_of_the_imports_does_not_matter(run_python: Callable[..., str]) -> None:
    code = (
        "import gymnasium, sb3_per_envs\n"
        "print(gymnasium.make('sb3_per/BlindCliffwalk-v0').unwrapped)"
    )
    assert "BlindCliffwalkEnv" in run_python("-c", code)


@pytest.mark.parametrize("env_id", IDS)
def test_an_id_with_its_module_needs_no_import(env_id: str, run_python: Callable[..., str]) -> None:
    code = (
        "import sys, gymnasium\n"
        f"env = gymnasium.make('sb3_per_envs:{env_id}')\n"
        "env.reset(seed=0)\n"
        "print(env.step(0)[4], 'torch' in sys.modules)"
    )
    expected = {
        GRID_WORLD: "{'position': 0, 'is_success': False} False",
        BLIND_CLIFFWALK: "{'state': 1, 'is_success': False} False",
    }
    assert run_python("-c", code) == expected[env_id]


def test_importing_the_package_costs_next_to_nothing_on_top_of_gymnasium(
    run_python: Callable[..., str],
) -> None:
    """No torch, no Stable-Baselines3, nothing at all but the modules of the package."""
    code = (
        "import sys, gymnasium\n"
        "before = set(sys.modules)\n"
        "import sb3_per_envs\n"
        "print(sorted(set(sys.modules) - before - {'sb3_per_envs'}))\n"
        "print('torch' in sys.modules, 'stable_baselines3' in sys.modules)"
    )
    added, heavy = run_python("-c", code).splitlines()
    assert all(name.startswith("'sb3_per_envs.") for name in added.strip("[]").split(", ") if name)
    assert heavy == "False False"


def test_the_registration_module_imports_nothing_at_its_top() -> None:
    """Gymnasium < 1.0 asks it for its function while itself half imported."""
    source = Path(sb3_per_envs.registration.__file__).read_text(encoding="utf-8")
    top_level = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert top_level == []


@pytest.mark.parametrize("first", ["gymnasium", "sb3_per_envs"])
@pytest.mark.skipif(not GYMNASIUM_LOADS_PLUGINS, reason="Gymnasium 1.0 dropped plugins")
def test_the_entry_point_registers_without_an_import(
    first: str, run_python: Callable[..., str], tmp_path: Path
) -> None:
    """The metadata stands on the path beside the package, as after an installation."""
    metadata = tmp_path / "toy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[gymnasium.envs]\n__root__ = sb3_per_envs.registration:register_envs\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import {first}, gymnasium\n"
        "print(gymnasium.make('sb3_per/GridWorld-v0').reset()[1])"
    )
    assert run_python("-c", code) == "{'position': 0, 'is_success': False}"
