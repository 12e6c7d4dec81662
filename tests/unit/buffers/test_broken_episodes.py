"""Episodes that are broken off without a done: nothing reaches over the break."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

from buffer_helpers import ACTIONS, OBSERVATIONS, SAVING, add_rows, by_index, make_buffer
from sb3_per import PrioritizedDictReplayBuffer, PrioritizedReplayBuffer

ROWS = 7


def observe(numbers: Any, has_dict: bool) -> Any:
    array = np.repeat(np.asarray(numbers, np.float64)[:, None], 2, axis=1)
    return {"here": array} if has_dict else array


def fields_of(batch: Any, has_dict: bool) -> Any:
    """Fields of a batch; the number that each observation is full of in place of it."""
    fields = batch._asdict()
    for name in ("observations", "next_observations"):
        fields[name] = (fields[name]["here"] if has_dict else fields[name])[:, 0]
    return fields


@pytest.mark.parametrize("n_steps", [1, 2, 3, 9])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("mode", ["plain", "saving", "dict", "without timeouts"])
def test_a_break_is_a_time_limit_of_whatever_still_ran(
    mode: str, n_envs: int, n_steps: int
) -> None:
    """
    The twin got the break as time limits of the last steps; it stores each observation twice.
    """
    has_dict = mode == "dict"
    space = spaces.Dict({"here": OBSERVATIONS}) if has_dict else OBSERVATIONS
    kind: Any = PrioritizedDictReplayBuffer if has_dict else PrioritizedReplayBuffer
    arguments: Any = (ROWS * n_envs, space, ACTIONS, "cpu", n_envs)
    options: dict[str, Any] = {"n_steps": n_steps, "gamma": 0.5}
    storage: dict[str, Any] = {
        "saving": SAVING,
        "without timeouts": {"handle_timeout_termination": False},
    }
    ours = kind(*arguments, **options, **storage.get(mode, {}))
    twin = kind(*arguments, **options)
    rng = np.random.default_rng(0)
    serial = 0
    numbers = np.zeros(n_envs)
    n_breaks = 0
    for _ in range(8 * ROWS):
        following = serial + 1 + np.arange(n_envs)
        serial += n_envs
        ends = rng.random(n_envs) < 0.2
        breaks = rng.random() < 0.25
        n_breaks += breaks
        for buffer, done in ((ours, ends), (twin, ends | breaks)):
            buffer.add(
                observe(numbers, has_dict),
                observe(following, has_dict),
                np.zeros(n_envs),
                following.astype(np.float64),
                done,
                [{"TimeLimit.truncated": bool(late)} for late in done & ~ends],
            )
        # Elsewhere, the first observation of the next episode
        numbers = np.where(ends | breaks, following + 0.5, following)
        for _ in range(breaks * rng.integers(1, 3)):
            ours.truncate_last_trajectory()
        if rng.random() < 0.2:
            ours = pickle.loads(pickle.dumps(ours))

        assert ours.tree.check_valid() == (True, "")
        drawable = np.flatnonzero(ours.drawable())
        np.testing.assert_array_equal(drawable, np.flatnonzero(ours.priorities))
        if not len(drawable):
            continue
        batch, expected = (
            fields_of(buffer.batch_of(drawable), has_dict) for buffer in (ours, twin)
        )
        # With memory saving, as in SB3, the last observation of an episode that ended is gone
        gone = expected["dones"][:, 0] > 0.0 if mode == "saving" else th.zeros(len(drawable)) > 0.0
        for name in ("observations", "rewards", "dones", "next_observations", "discounts"):
            mine, its = batch[name], expected[name]
            if mine is None or its is None:
                assert mine is its
                continue
            seen = ~gone if name == "next_observations" else slice(None)
            np.testing.assert_array_equal(mine[seen], its[seen], name)
    assert n_breaks > 5


def test_without_the_call_a_return_reaches_over_the_break() -> None:
    """So that the comparison above tells something."""
    buffer = make_buffer(6, n_adds=2, n_steps=2, gamma=0.5)
    add_rows(buffer, first=50)
    assert by_index(buffer.sample(9), "rewards") == {0: [0.5], 1: [26.0], 2: [50.0]}


def test_an_empty_buffer_has_nothing_to_break_off() -> None:
    buffer = make_buffer(4, **SAVING)
    buffer.truncate_last_trajectory()
    assert not buffer.dones.any()
    add_rows(buffer)
    assert by_index(buffer.sample(2), "next_observations") == {0: [1.0, 1.0]}


def test_kept_observations_count_in_the_memory_of_the_buffer_until_a_reset() -> None:
    buffer = make_buffer(4, n_adds=2, **SAVING)
    before = buffer.nbytes
    buffer.truncate_last_trajectory()
    assert buffer.nbytes == before + 2 * 8
    buffer.reset()
    assert buffer.nbytes == before
