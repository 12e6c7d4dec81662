"""BlindCliffwalkEnv: its rules, the numbers of the paper, its pictures and what it refuses."""

import itertools
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest

from sb3_per_envs import BlindCliffwalkEnv

GRAY, GREEN, BLUE, RED = (245, 245, 245), (120, 200, 120), (40, 90, 200), (200, 40, 40)


def cell_centers(image: npt.NDArray[np.uint8]) -> list[tuple[int, ...]]:
    return [tuple(int(c) for c in image[16, x]) for x in range(16, image.shape[1], 32)]


def rendered(actions: list[int], mode: str, n: int = 3) -> Any:
    env = BlindCliffwalkEnv(n=n, render_mode=mode)
    env.reset()
    for action in actions:
        env.step(action)
    return env.render()


# --- rules ---


def test_the_way_to_the_reward_step_by_step() -> None:
    env = BlindCliffwalkEnv(n=3)
    observation, info = env.reset()
    np.testing.assert_array_equal(observation, [1, 0, 0])
    assert info == {"state": 0, "is_success": False}

    trace = [env.step(action) for action in (0, 1, 0)]

    np.testing.assert_array_equal([step[0] for step in trace], [[0, 1, 0], [0, 0, 1], [0, 0, 1]])
    assert [step[1:] for step in trace] == [
        (0.0, False, False, {"state": 1, "is_success": False}),
        (0.0, False, False, {"state": 2, "is_success": False}),
        (1.0, True, False, {"state": 2, "is_success": True}),
    ]


@pytest.mark.parametrize("state", range(4))
def test_a_wrong_action_ends_the_episode_where_it_is(state: int) -> None:
    env = BlindCliffwalkEnv(n=4)
    env.reset()
    for i in range(state):
        env.step(i % 2)
    observation, reward, terminated, truncated, info = env.step(1 - state % 2)
    np.testing.assert_array_equal(observation, np.eye(4)[state])
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info == {"state": state, "is_success": False}


@pytest.mark.parametrize("n", [2, 3, 10, 17])
def test_the_right_action_is_the_parity_of_the_state(n: int) -> None:
    env = BlindCliffwalkEnv(n=n)
    env.reset()
    trace = [env.step(i % 2) for i in range(n)]
    assert [step[1] for step in trace] == [0.0] * (n - 1) + [1.0]
    assert [step[2] for step in trace] == [False] * (n - 1) + [True]


@pytest.mark.parametrize("n", [2, 5, 8])
def test_all_action_sequences_give_the_numbers_of_the_paper(n: int) -> None:
    """Of 2^n sequences one is rewarded, and together they make 2^(n+1) - 2 transitions."""
    env = BlindCliffwalkEnv(n=n)
    rewarded, transitions = [], 0
    for actions in itertools.product((0, 1), repeat=n):
        env.reset()
        for action in actions:
            _, reward, terminated, _, _ = env.step(action)
            transitions += 1
            if reward == 1.0:
                rewarded.append(actions)
            if terminated:
                break
    assert rewarded == [tuple(i % 2 for i in range(n))]
    assert transitions == 2 ** (n + 1) - 2


def test_step_returns_plain_python_types() -> None:
    env = BlindCliffwalkEnv(n=2)
    env.reset()
    _, reward, terminated, truncated, info = env.step(np.int64(0))
    assert type(reward) is float
    assert type(terminated) is bool
    assert type(truncated) is bool
    assert {key: type(value) for key, value in info.items()} == {"state": int, "is_success": bool}


@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, np.array])
def test_every_kind_of_integer_is_the_same_action(kind: Any) -> None:
    env = BlindCliffwalkEnv(n=4)
    env.reset()
    assert [env.step(kind(i % 2))[1] for i in range(4)] == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("action", [7, -1, 2, np.int64(-1), np.array(2), 0.0, np.array([0])])
def test_another_action_is_refused_and_changes_nothing(action: Any) -> None:
    env = BlindCliffwalkEnv(n=3)
    env.reset()
    env.step(0)
    with pytest.raises(ValueError, match="action must be 0 or 1, got ") as caught:
        env.step(action)
    assert repr(action) in str(caught.value)
    assert [env.step(a)[1] for a in (1, 0)] == [0.0, 1.0]


def test_step_before_reset_is_refused() -> None:
    with pytest.raises(gym.error.ResetNeeded, match=r"has not started: call reset\(\)"):
        BlindCliffwalkEnv().step(0)


@pytest.mark.parametrize("actions", [[1], [0, 0], [0, 1]])
def test_step_after_the_end_is_refused_until_reset(actions: list[int]) -> None:
    env = BlindCliffwalkEnv(n=2)
    env.reset()
    assert [env.step(action)[2] for action in actions][-1]
    with pytest.raises(gym.error.ResetNeeded, match=r"is over: call reset\(\)"):
        env.step(0)
    observation, info = env.reset()
    np.testing.assert_array_equal(observation, [1, 0])
    assert info == {"state": 0, "is_success": False}
    assert [env.step(a)[1] for a in (0, 1)] == [0.0, 1.0]


# --- spaces, seeds, arguments ---


def test_spaces() -> None:
    env = BlindCliffwalkEnv(n=6)
    assert env.observation_space == gym.spaces.Box(0.0, 1.0, (6,), np.float32)
    assert env.action_space == gym.spaces.Discrete(2)
    assert env.reset()[0].dtype == np.float32


@pytest.mark.parametrize("actions", [[1], [0, 1, 0, 0], [0, 1, 0, 1]])
def test_every_observation_lies_in_the_space(actions: list[int]) -> None:
    env = BlindCliffwalkEnv(n=4)
    observations = [env.reset()[0]] + [env.step(action)[0] for action in actions]
    assert all(observation in env.observation_space for observation in observations)


def test_observations_and_infos_are_not_reused() -> None:
    env = BlindCliffwalkEnv(n=2)
    observation, info = env.reset()
    env.step(0)
    np.testing.assert_array_equal(observation, [1, 0])
    assert info["state"] == 0


def test_neither_seed_nor_options_change_the_start_and_no_random_state_is_touched() -> None:
    np.random.seed(3)
    env = BlindCliffwalkEnv(n=3)
    for seed in (None, 0, 1):
        assert env.reset(seed=seed, options={"start": 2})[1] == {"state": 0, "is_success": False}
        env.step(0)
    state = env.np_random.bit_generator.state
    env.reset()
    env.step(0)
    assert env.np_random.bit_generator.state == state
    untouched = np.random.RandomState(3).random_sample()
    assert np.random.random_sample() == untouched


def test_a_seed_reaches_np_random() -> None:
    env = BlindCliffwalkEnv()
    env.reset(seed=11)
    assert env.np_random.random() == np.random.default_rng(11).random()


def test_pickle_keeps_the_episode() -> None:
    env = BlindCliffwalkEnv(n=3, render_mode="ansi")
    env.reset(seed=0)
    env.step(0)
    twin = pickle.loads(pickle.dumps(env))
    assert twin.render() == ".A.G"
    assert [twin.step(a)[1] for a in (1, 0)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n": 1}, "n must be at least 2, got 1"),
        ({"n": -4}, "n must be at least 2, got -4"),
        ({"n": 2.5}, r"n must be an integer, got 2\.5"),
        ({"n": True}, "n must be an integer, got True"),
        ({"n": "8"}, "n must be an integer, got '8'"),
        ({"render_mode": "human"}, "render_mode must be .*'ansi', 'rgb_array'.*got 'human'"),
    ],
)
def test_a_bad_argument_is_refused_by_its_value(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlindCliffwalkEnv(**kwargs)


def test_defaults() -> None:
    env = BlindCliffwalkEnv()
    assert (env.n, env.render_mode) == (10, None)
    assert BlindCliffwalkEnv(np.int64(4)).n == 4  # type: ignore[arg-type]


# --- pictures ---


@pytest.mark.parametrize(
    ("actions", "row"),
    [
        ([], "A..G"),
        ([0], ".A.G"),
        ([0, 1], "..AG"),
        ([0, 1, 0], "...A"),
        ([1], "x..G"),
        ([0, 0], ".x.G"),
        ([0, 1, 1], "..xG"),
    ],
)
def test_ansi_shows_agent_fall_and_success(actions: list[int], row: str) -> None:
    assert rendered(actions, "ansi") == row


@pytest.mark.parametrize(
    ("actions", "colors"),
    [
        ([], [BLUE, GRAY, GRAY, GREEN]),
        ([0], [GRAY, BLUE, GRAY, GREEN]),
        ([0, 1, 0], [GRAY, GRAY, GRAY, BLUE]),
        ([0, 0], [GRAY, RED, GRAY, GREEN]),
    ],
)
def test_rgb_array_shows_agent_fall_and_success(
    actions: list[int], colors: list[tuple[int, ...]]
) -> None:
    image = rendered(actions, "rgb_array")
    assert image.dtype == np.uint8
    assert image.shape == (32, 128, 3)
    assert cell_centers(image) == colors


@pytest.mark.parametrize("mode", ["ansi", "rgb_array", None])
def test_render_before_reset_is_refused(mode: str | None) -> None:
    with pytest.raises(gym.error.ResetNeeded, match="nothing to render yet"):
        BlindCliffwalkEnv(render_mode=mode).render()


def test_a_reset_wipes_the_fall_from_the_picture() -> None:
    env = BlindCliffwalkEnv(n=2, render_mode="ansi")
    env.reset()
    env.step(1)
    env.reset()
    assert env.render() == "A.G"


def test_render_without_a_mode_warns_and_returns_nothing() -> None:
    env = BlindCliffwalkEnv()
    env.reset()
    with pytest.warns(UserWarning, match="draws nothing without a render mode"):
        assert env.render() is None
