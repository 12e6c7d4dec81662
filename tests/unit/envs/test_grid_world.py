"""GridWorldEnv: its rules, its forms of observation, its pictures and what it refuses."""

import pickle
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest

from sb3_per_envs import GridWorldEnv

LEFT, RIGHT = 0, 1
GRAY, GREEN, BLUE = (245, 245, 245), (120, 200, 120), (40, 90, 200)


def positions(env: GridWorldEnv, actions: list[int]) -> list[int]:
    return [env.step(action)[4]["position"] for action in actions]


def cell_centers(image: npt.NDArray[np.uint8]) -> list[tuple[int, ...]]:
    return [tuple(int(c) for c in image[16, x]) for x in range(16, image.shape[1], 32)]


# --- rules ---


def test_an_episode_step_by_step() -> None:
    env = GridWorldEnv(length=3)
    observation, info = env.reset()
    np.testing.assert_array_equal(observation, [1, 0, 0])
    assert info == {"position": 0, "is_success": False}

    trace = [env.step(action) for action in (LEFT, RIGHT, LEFT, RIGHT, RIGHT)]

    np.testing.assert_array_equal(
        [step[0] for step in trace], [[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    )
    assert [step[1:] for step in trace] == [
        (0.0, False, False, {"position": 0, "is_success": False}),
        (0.0, False, False, {"position": 1, "is_success": False}),
        (0.0, False, False, {"position": 0, "is_success": False}),
        (0.0, False, False, {"position": 1, "is_success": False}),
        (1.0, True, False, {"position": 2, "is_success": True}),
    ]


def test_step_returns_plain_python_types() -> None:
    env = GridWorldEnv(length=2, start=None)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(RIGHT)
    assert type(reward) is float
    assert type(terminated) is bool
    assert type(truncated) is bool
    assert {key: type(value) for key, value in info.items()} == {
        "position": int,
        "is_success": bool,
    }


@pytest.mark.parametrize("length", [2, 3, 10, 25])
def test_the_shortest_way_takes_length_minus_one_steps(length: int) -> None:
    env = GridWorldEnv(length=length)
    env.reset()
    trace = [env.step(RIGHT) for _ in range(length - 1)]
    assert [step[1] for step in trace] == [0.0] * (length - 2) + [1.0]
    assert [step[2] for step in trace] == [False] * (length - 2) + [True]


def test_the_left_wall_holds_from_any_cell() -> None:
    env = GridWorldEnv(length=5, start=2)
    env.reset()
    assert positions(env, [LEFT, LEFT, LEFT, LEFT, RIGHT]) == [1, 0, 0, 0, 1]


def test_a_random_walk_takes_as_long_as_documented() -> None:
    length, episodes = 4, 2000
    env = GridWorldEnv(length=length)
    rng = np.random.default_rng(1)
    steps = 0
    for _ in range(episodes):
        env.reset()
        terminated = False
        while not terminated:
            terminated = env.step(rng.integers(2))[2]
            steps += 1
    # The mean over 2000 episodes spreads by about 0.2 around length * (length - 1) = 12.
    assert steps / episodes == pytest.approx(length * (length - 1), abs=0.8)


@pytest.mark.parametrize(
    "right", [1, True, np.int64(1), np.int32(1), np.uint8(1), np.array(1), np.array([0, 1])[1]]
)
@pytest.mark.parametrize("left", [0, np.int64(0), np.array(0)])
def test_every_kind_of_integer_is_the_same_action(left: Any, right: Any) -> None:
    env = GridWorldEnv(length=5)
    env.reset()
    assert positions(env, [right, right, left, right]) == [1, 2, 1, 2]


@pytest.mark.parametrize(
    "action",
    [
        7,
        -1,
        2,
        np.int64(-1),
        np.array(2),
        1.0,
        np.array([1]),
        np.array(1.0),
        np.bool_(True),
        "1",
        None,
    ],
)
def test_another_action_is_refused_and_changes_nothing(action: Any) -> None:
    env = GridWorldEnv(length=5, render_mode="ansi")
    env.reset()
    env.step(RIGHT)
    with pytest.raises(ValueError, match="action must be 0 or 1, got ") as caught:
        env.step(action)
    assert repr(action) in str(caught.value)
    assert env.render() == ".A..G"
    assert positions(env, [RIGHT]) == [2]


def test_step_before_reset_is_refused() -> None:
    with pytest.raises(gym.error.ResetNeeded, match=r"has not started: call reset\(\)"):
        GridWorldEnv().step(RIGHT)


def test_step_after_the_goal_is_refused_until_reset() -> None:
    env = GridWorldEnv(length=2)
    env.reset()
    env.step(RIGHT)
    with pytest.raises(gym.error.ResetNeeded, match=r"is over: call reset\(\)"):
        env.step(LEFT)
    assert env.reset()[1] == {"position": 0, "is_success": False}
    assert env.step(RIGHT)[1] == 1.0


def test_the_class_itself_has_no_time_limit() -> None:
    env = GridWorldEnv()
    env.reset()
    assert not any(env.step(LEFT)[3] for _ in range(300))


# --- observations ---


def test_one_hot_observation() -> None:
    env = GridWorldEnv(length=4, start=1)
    assert env.observation_space == gym.spaces.Box(0.0, 1.0, (4,), np.float32)
    observation, _ = env.reset()
    assert isinstance(observation, np.ndarray)
    assert observation.dtype == np.float32
    np.testing.assert_array_equal(observation, [0, 1, 0, 0])


def test_position_observation() -> None:
    env = GridWorldEnv(length=5, observation="position")
    assert env.observation_space == gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    observations = [env.reset()[0]] + [env.step(RIGHT)[0] for _ in range(4)]
    assert all(isinstance(o, np.ndarray) and o.dtype == np.float32 for o in observations)
    np.testing.assert_array_equal(observations, [[0], [0.25], [0.5], [0.75], [1]])


def test_discrete_observation() -> None:
    env = GridWorldEnv(length=4, observation="discrete")
    assert env.observation_space == gym.spaces.Discrete(4)
    observations = [env.reset()[0]] + [env.step(RIGHT)[0] for _ in range(3)]
    assert all(type(o) is np.int64 for o in observations)
    assert observations == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["one_hot", "position", "discrete"])
def test_every_observation_lies_in_the_space(kind: str) -> None:
    env = GridWorldEnv(length=7, observation=kind)
    observations = [env.reset()[0]] + [env.step(RIGHT)[0] for _ in range(6)]
    assert [o in env.observation_space for o in observations] == [True] * 7
    assert len({str(o) for o in observations}) == 7


def test_observations_and_infos_are_not_reused() -> None:
    env = GridWorldEnv(length=4)
    observation, info = env.reset()
    env.step(RIGHT)
    np.testing.assert_array_equal(observation, [1, 0, 0, 0])
    assert info["position"] == 0


# --- starts and seeds ---


def test_random_starts_are_uniform_over_all_cells_but_the_goal() -> None:
    env = GridWorldEnv(length=5, start=None)
    env.reset(seed=0)
    counts = Counter(env.reset()[1]["position"] for _ in range(4000))
    assert sorted(counts) == [0, 1, 2, 3]
    # 1000 expected in each, with a standard deviation of 27.
    assert all(890 < count < 1110 for count in counts.values())


def test_a_seed_decides_the_starts_that_follow() -> None:

    def starts(env: GridWorldEnv, seed: int) -> list[int]:
        return [env.reset(seed=seed)[1]["position"]] + [
            env.reset()[1]["position"] for _ in range(5)
        ]

    first, second = GridWorldEnv(length=50, start=None), GridWorldEnv(length=50, start=None)
    expected = starts(first, 5)
    assert len(set(expected)) > 1
    assert starts(second, 5) == expected
    assert starts(first, 5) == expected
    assert starts(first, 6) != expected


def test_two_instances_do_not_influence_each_other() -> None:
    alone = GridWorldEnv(length=50, start=None)
    expected = [alone.reset(seed=5)[1]] + [alone.reset()[1] for _ in range(2)]

    one, other = GridWorldEnv(length=50, start=None), GridWorldEnv(length=50, start=None)
    mixed = [one.reset(seed=5)[1]]
    for _ in range(2):
        other.reset(seed=9)
        mixed.append(one.reset()[1])
    assert mixed == expected


def test_the_global_random_state_is_neither_used_nor_touched() -> None:
    def starts(global_seed: int) -> list[int]:
        np.random.seed(global_seed)
        env = GridWorldEnv(length=50, start=None)
        found = [env.reset(seed=5)[1]["position"]] + [env.reset()[1]["position"] for _ in range(4)]
        env.step(LEFT)
        untouched = np.random.RandomState(global_seed).random_sample()
        assert np.random.random_sample() == untouched
        return found

    assert starts(1) == starts(2)


def test_a_reset_option_sets_the_start_of_one_episode() -> None:
    env = GridWorldEnv(length=9, start=2)
    assert env.reset(options={"start": 7})[1]["position"] == 7
    assert env.reset()[1]["position"] == 2
    assert env.reset(options={"unknown": 7})[1]["position"] == 2
    env.reset(seed=0)
    drawn = {env.reset(options={"start": None})[1]["position"] for _ in range(200)}
    assert drawn == set(range(8))


@pytest.mark.parametrize("start", [8, -1, 2.0])
def test_a_bad_reset_option_is_refused_and_changes_nothing(start: Any) -> None:
    env = GridWorldEnv(length=9, start=None, render_mode="ansi")
    expected = [env.reset(seed=3)[1], env.reset()[1]]
    env.reset(seed=3)
    picture = env.render()
    with pytest.raises(ValueError, match=f"start must be .*got {start}"):
        env.reset(seed=4, options={"start": start})
    assert env.render() == picture
    assert env.reset()[1] == expected[1]


@pytest.mark.parametrize("start", [0, 3, 8, np.int64(3)])
def test_any_cell_but_the_goal_can_be_the_start(start: int) -> None:
    assert GridWorldEnv(length=10, start=start).reset()[1]["position"] == start


def test_pickle_keeps_the_episode_and_the_random_state() -> None:
    env = GridWorldEnv(length=50, start=None, observation="discrete")
    env.reset(seed=5)
    env.step(RIGHT)
    twin = pickle.loads(pickle.dumps(env))
    assert twin.step(LEFT) == env.step(LEFT)
    assert [twin.reset() for _ in range(4)] == [env.reset() for _ in range(4)]


# --- arguments ---


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"length": 1}, "length must be at least 2, got 1"),
        ({"length": -3}, "length must be at least 2, got -3"),
        ({"length": 2.5}, r"length must be an integer, got 2\.5"),
        ({"length": 10.0}, r"length must be an integer, got 10\.0"),
        ({"length": True}, "length must be an integer, got True"),
        ({"length": "10"}, "length must be an integer, got '10'"),
        ({"length": None}, "length must be an integer, got None"),
        ({"start": 9}, "start must be between 0 and 8, got 9"),
        ({"start": -1}, "start must be between 0 and 8, got -1"),
        ({"start": False}, "start must be an integer, got False"),
        ({"start": 0.5}, r"start must be an integer, got 0\.5"),
        ({"length": 2, "start": 1}, "start must be between 0 and 0, got 1"),
        ({"observation": "onehot"}, "observation must be .*got 'onehot'"),
        ({"observation": None}, "observation must be .*got None"),
        ({"render_mode": "human"}, "render_mode must be .*'ansi', 'rgb_array'.*got 'human'"),
    ],
)
def test_a_bad_argument_is_refused_by_its_value(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GridWorldEnv(**kwargs)


def test_defaults() -> None:
    env = GridWorldEnv()
    assert (env.length, env.start, env.observation, env.render_mode) == (10, 0, "one_hot", None)
    assert env.action_space == gym.spaces.Discrete(2)
    assert GridWorldEnv(np.int64(4)).observation_space.shape == (4,)  # type: ignore[arg-type]


# --- pictures ---


def test_ansi_shows_agent_and_goal() -> None:
    env = GridWorldEnv(length=4, render_mode="ansi")
    env.reset()
    rows = [env.render()]
    for action in (RIGHT, RIGHT, LEFT, RIGHT, RIGHT):
        env.step(action)
        rows.append(env.render())
    assert rows == ["A..G", ".A.G", "..AG", ".A.G", "..AG", "...A"]


def test_rgb_array_shows_agent_and_goal() -> None:
    env = GridWorldEnv(length=4, render_mode="rgb_array")
    env.reset()
    env.step(RIGHT)
    image = env.render()
    assert isinstance(image, np.ndarray)
    assert image.dtype == np.uint8
    assert image.shape == (32, 128, 3)
    assert cell_centers(image) == [GRAY, BLUE, GRAY, GREEN]
    assert tuple(image[4, 36]) == GRAY, "the agent is a disc, not the whole cell"
    np.testing.assert_array_equal(image[:, 32:64], image[::-1, 32:64])

    env.step(RIGHT)
    env.step(RIGHT)
    image = env.render()
    assert isinstance(image, np.ndarray)
    assert cell_centers(image) == [GRAY, GRAY, GRAY, BLUE]
    assert tuple(image[4, 100]) == GREEN, "the goal stays visible around the agent"


def test_lines_separate_the_cells() -> None:
    env = GridWorldEnv(length=3, render_mode="rgb_array")
    env.reset()
    image = env.render()
    assert isinstance(image, np.ndarray)
    border = (150, 150, 150)
    columns = [x for x in range(96) if (image[:, x] == border).all()]
    rows = [y for y in range(32) if (image[y] == border).all()]
    assert columns == [0, 32, 64, 95]
    assert rows == [0, 31]


@pytest.mark.parametrize("mode", ["ansi", "rgb_array", None])
def test_render_before_reset_is_refused(mode: str | None) -> None:
    with pytest.raises(gym.error.ResetNeeded, match="nothing to render yet"):
        GridWorldEnv(render_mode=mode).render()


def test_render_without_a_mode_warns_and_returns_nothing() -> None:
    env = GridWorldEnv()
    env.reset()
    with pytest.warns(UserWarning, match="draws nothing without a render mode"):
        assert env.render() is None
