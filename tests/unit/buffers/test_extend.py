"""``extend`` stores what as many calls of ``add`` would store, and gives it the same priorities."""

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_per import (
    PrioritizedDictReplayBuffer,
    PrioritizedFrameReplayBuffer,
    PrioritizedHerReplayBuffer,
    PrioritizedReplayBuffer,
)

Array = npt.NDArray[Any]

BOX = spaces.Box(-10.0, 10.0, (3,), np.float32)
GOALS = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), BOX))
IMAGES = spaces.Box(0, 255, (4, 14, 13), np.uint8)
SAVING = {"optimize_memory_usage": True, "handle_timeout_termination": False}
N_ROWS = 13


class Goals(gym.Env[Any, Any]):
    """Never stepped; it computes rewards."""

    observation_space = GOALS
    action_space = spaces.Discrete(4)

    def compute_reward(self, achieved: Array, desired: Array, infos: Any) -> Array:
        distances: Array = np.linalg.norm(achieved - desired, axis=-1)
        return -distances


def box_buffer(n_envs: int, **options: Any) -> PrioritizedReplayBuffer:
    return PrioritizedReplayBuffer(
        N_ROWS * n_envs, BOX, spaces.Discrete(4), "cpu", n_envs, **options
    )


def discrete_buffer(n_envs: int) -> PrioritizedReplayBuffer:
    actions = spaces.Box(-1.0, 1.0, (2, 2), np.float32)
    return PrioritizedReplayBuffer(N_ROWS * n_envs, spaces.Discrete(9), actions, "cpu", n_envs)


def dict_buffer(n_envs: int) -> PrioritizedReplayBuffer:
    return PrioritizedDictReplayBuffer(N_ROWS * n_envs, GOALS, spaces.Discrete(4), "cpu", n_envs)


def her_buffer(n_envs: int, copy_info_dict: bool = False) -> PrioritizedReplayBuffer:
    return PrioritizedHerReplayBuffer(
        N_ROWS * n_envs,
        GOALS,
        spaces.Discrete(4),
        DummyVecEnv([Goals] * n_envs),
        "cpu",
        n_envs,
        copy_info_dict=copy_info_dict,
    )


def frame_buffer(n_envs: int, compression: str | None = None) -> PrioritizedReplayBuffer:
    return PrioritizedFrameReplayBuffer(
        N_ROWS * n_envs,
        IMAGES,
        spaces.Discrete(4),
        "cpu",
        n_envs,
        frame_stack=4,
        compression=compression,
    )


BUFFERS: dict[str, Any] = {
    "box": box_buffer,
    "n-step by rank": lambda n: box_buffer(n, n_steps=3, prioritization="rank"),
    "memory saving": lambda n: box_buffer(n, **SAVING),
    "no timeouts": lambda n: box_buffer(n, handle_timeout_termination=False),
    "discrete": discrete_buffer,
    "dict": dict_buffer,
    "hindsight": her_buffer,
    "hindsight with infos": lambda n: her_buffer(n, copy_info_dict=True),
    "frames": frame_buffer,
    "frames, compressed": lambda n: frame_buffer(n, "zstd"),
}


def random_steps(space: Any, actions: Any, n: int, n_envs: int, seed: int) -> list[Any]:
    """Arguments of ``add``: observations follow on each other, stacks shift by a frame."""
    rng = np.random.default_rng(seed)

    def one(space: Any) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: one(part) for key, part in space.items()}
        if isinstance(space, spaces.Discrete):
            return rng.integers(0, space.n, n_envs)
        if space is IMAGES:
            stack = np.zeros((n_envs, *space.shape), np.uint8)
            stack[:, -1] = rng.integers(1, 256, stack[:, -1].shape)
            return stack
        return rng.uniform(-1, 1, (n_envs, *space.shape)).astype(space.dtype)

    def after(obs: Any) -> Any:
        new = one(space)
        return np.concatenate([obs[:, 1:], new[:, -1:]], axis=1) if space is IMAGES else new

    def chosen(dones: Array, first: Any, following: Any) -> Any:
        if isinstance(first, dict):
            return {key: chosen(dones, first[key], following[key]) for key in first}
        return np.where(dones.reshape(-1, *[1] * (first.ndim - 1)), first, following)

    steps, obs = [], one(space)
    for number in range(n):
        next_obs = after(obs)
        dones = rng.random(n_envs) < 0.2
        timeouts = dones & (rng.random(n_envs) < 0.5)
        infos = [{"TimeLimit.truncated": bool(t), "number": number} for t in timeouts]
        steps.append((obs, next_obs, one(actions), rng.normal(size=n_envs), dones, infos))
        obs = chosen(dones, one(space), next_obs)
    return steps


def together(parts: Any) -> Any:
    """With an axis of time."""
    if isinstance(parts[0], dict):
        return {key: np.stack([part[key] for part in parts]) for key in parts[0]}
    return list(parts) if isinstance(parts[0], list) else np.stack(parts)


def state_of(value: Any) -> Any:
    """All that is in a buffer, for comparison: arrays as bytes."""
    if isinstance(value, np.ndarray):
        content = value.tolist() if value.dtype == object else value.tobytes()
        return (value.shape, value.dtype.str, content)
    if isinstance(value, dict):
        return {key: state_of(part) for key, part in value.items() if key not in ("env", "_lock")}
    if isinstance(value, list):
        return [state_of(part) for part in value]
    if type(value).__module__.startswith("sb3_per"):
        return state_of(vars(value))
    return value


def tree_and_arrays(buffer: Any) -> Any:
    state = {**vars(buffer), "tree": buffer.tree[:]}
    return state_of(state)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("kind", BUFFERS)
def test_all_is_as_if_added_one_by_one(kind: str, n_envs: int) -> None:
    for seed, sizes in enumerate(
        # Up to the end and beyond; several laps at once; one, none, one lap, and one
        ([5, 8, 9, 2], [60], [1, 0, N_ROWS, 1, 2 * N_ROWS, 40])
    ):
        one, other = BUFFERS[kind](n_envs), BUFFERS[kind](n_envs)
        space, actions = one.observation_space, one.action_space
        steps = random_steps(space, actions, sum(sizes), n_envs, seed)
        rng = np.random.default_rng(seed)
        start = 0
        for number, size in enumerate(sizes):
            chunk = steps[start : start + size]
            start += size
            for step in chunk:
                one.add(*step)
            if chunk:
                arrays = [together(part) for part in zip(*chunk, strict=True)]
                if number % 2 and kind != "hindsight with infos":
                    timeouts = [[info["TimeLimit.truncated"] for info in i] for i in arrays[-1]]
                    other.extend(*arrays[:5], timeouts=np.array(timeouts))
                else:
                    other.extend(*arrays)
            assert tree_and_arrays(one) == tree_and_arrays(other)
            # Leaves that differ, some of them larger than those of new transitions
            errors = rng.normal(size=one.n_transitions)
            for buffer in (one, other):
                buffer.update_priorities(np.arange(len(errors)), errors)
            if number == 1:
                for buffer in (one, other):
                    buffer.truncate_last_trajectory()
        assert one.priorities.any()
        np.testing.assert_array_equal(one.new_transitions(), other.new_transitions())


def test_with_one_environment_its_axis_may_be_left_out() -> None:
    for kind in ("box", "discrete", "dict"):
        one, other = BUFFERS[kind](1), BUFFERS[kind](1)
        steps = random_steps(one.observation_space, one.action_space, 9, 1, 0)
        arrays = [together(part) for part in zip(*steps, strict=True)]
        one.extend(*arrays)
        flat = [
            {key: part[:, 0] for key, part in array.items()}
            if isinstance(array, dict)
            else [infos[0] for infos in array]
            if isinstance(array, list)
            else array[:, 0]
            for array in arrays
        ]
        other.extend(*flat)
        assert tree_and_arrays(one) == tree_and_arrays(other)


def test_lists_will_do_and_draws_are_counted_anew() -> None:
    buffer = box_buffer(1)
    observations = [[float(n)] * 3 for n in range(4)]
    buffer.extend(observations[:3], observations[1:], [0, 1, 2], [1, 2, 3], [False, False, True])
    assert buffer.rewards[:3].ravel().tolist() == [1.0, 2.0, 3.0]
    assert buffer.dones[:3].ravel().tolist() == [0.0, 0.0, 1.0]
    assert buffer.timeouts[:3].ravel().tolist() == [0.0, 0.0, 0.0]
    record = buffer.record_draws()
    buffer.sample(30)
    assert record.counts[:3].min() > 0
    buffer.extend(*[np.zeros((N_ROWS, 3))] * 2, *[np.zeros(N_ROWS)] * 3)
    assert record.counts.tolist() == [0] * N_ROWS


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"obs": np.zeros((5, 2, 3))},
            r"`obs` has the shape \(5, 2, 3\), but 6 steps of 2 environ",
        ),
        ({"next_obs": np.zeros((6, 2, 4))}, r"`next_obs` .* need \(6, 2, 3\)"),
        ({"obs": np.zeros((6, 6))}, r"`obs` has the shape \(6, 6\)"),
        ({"action": np.zeros((6, 3))}, r"`action` .* need \(6, 2, 1\)"),
        ({"reward": np.zeros(6)}, r"`reward` has the shape \(6,\), .* need \(6, 2\)"),
        ({"reward": 1.0}, r"`reward` has the shape \(\)"),
        ({"done": np.zeros((6, 2, 2))}, r"`done` has the shape \(6, 2, 2\)"),
        ({"infos": [[{}, {}]] * 5}, r"`timeouts` has the shape \(5, 2\)"),
        ({"infos": [[{}]] * 6}, r"`timeouts` has the shape \(6, 1\)"),
        ({"timeouts": np.zeros((6, 2)), "infos": [[{}, {}]] * 6}, "give one of them"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_stored(
    changed: dict[str, Any], message: str
) -> None:
    buffer = box_buffer(2)
    arguments: dict[str, Any] = {
        "obs": np.ones((6, 2, 3)),
        "next_obs": np.ones((6, 2, 3)),
        "action": np.ones((6, 2)),
        "reward": np.ones((6, 2)),
        "done": np.ones((6, 2)),
        **changed,
    }
    before = tree_and_arrays(buffer)
    with pytest.raises(ValueError, match=message):
        buffer.extend(**arguments)
    assert tree_and_arrays(buffer) == before


def test_keys_that_do_not_fit_are_refused() -> None:
    buffer = dict_buffer(1)
    obs = {key: np.zeros((2, 1, 3)) for key in GOALS}
    for wrong, given in ((obs | {"more": obs["observation"]}, "'more'"), (np.zeros(2), "ndarray")):
        with pytest.raises(ValueError, match=f"`next_obs` must map .*desired_goal.* got .*{given}"):
            buffer.extend(obs, wrong, np.zeros(2), np.zeros(2), np.zeros(2))
    obs["observation"] = np.zeros((2, 1, 4))
    with pytest.raises(ValueError, match=r"`obs\['observation'\]` has the shape \(2, 1, 4\)"):
        buffer.extend(obs, obs, np.zeros(2), np.zeros(2), np.zeros(2))
    assert buffer.size() == 0


def test_sb3s_own_way_to_call_it_still_works() -> None:
    """SB3's ``extend`` takes the arguments of ``add`` with an axis of time, and loops."""
    ours, theirs = box_buffer(2), ReplayBuffer(2 * N_ROWS, BOX, spaces.Discrete(4), "cpu", 2)
    steps = random_steps(BOX, spaces.Discrete(4), 20, 2, 0)
    arrays = [together(part) for part in zip(*steps, strict=True)]
    ours.extend(*arrays)
    theirs.extend(*arrays)
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()
    assert (ours.pos, ours.full) == (theirs.pos, theirs.full)
