"""Options of a buffer: names, defaults, allowed and refused values."""

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import (
    ReplayBuffer,
)

from buffer_helpers import (
    ACTIONS,
    OBSERVATIONS,
    add_rows,
    by_index,
    make_buffer,
    refused,
)
from sb3_per import PrioritizedReplayBuffer

WRONG_OPTIONS: dict[str, list[Any]] = {
    "alpha": [-0.1, math.nan, math.inf, -math.inf, None, "high", "0.5", [0.5], 1j, 10**400],
    "beta": [-0.1, 1.1, math.nan, math.inf, None, "high", "0.5"],
    "beta_increment": [-0.1, math.nan, math.inf, None, "high"],
    "eps": [-1e-9, math.nan, math.inf, None, "small"],
    "gamma": [-0.1, 1.1, math.nan, None, "high"],
    "n_steps": [0, -1, 2.0, math.nan, None, "3"],
    "weight_normalization": ["mean", "BATCH", "", None, 0, ["batch"]],
    "prioritization": ["ranks", "RANK", "", None, 0, ["rank"]],
}


def test_names_order_and_defaults_of_the_arguments() -> None:
    ours = inspect.signature(PrioritizedReplayBuffer).parameters
    theirs = inspect.signature(ReplayBuffer).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].default for name in theirs] == [p.default for p in theirs.values()]
    *options, sb3_options = list(ours.values())[len(theirs) :]
    # Further options go to the SB3 buffer of a derived class
    assert sb3_options.kind is inspect.Parameter.VAR_KEYWORD
    assert {option.kind for option in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert {option.name: option.default for option in options} == {
        "alpha": 0.6,
        "beta": 0.4,
        "beta_increment": 0.0,
        "eps": 1e-6,
        "n_steps": 1,
        "gamma": 0.99,
        "weight_normalization": "batch",
        "prioritization": "proportional",
    }


def test_sample_and_add_take_what_sb3_gives_them() -> None:
    for name in ("add", "sample"):
        ours = inspect.signature(getattr(PrioritizedReplayBuffer, name)).parameters
        theirs = inspect.signature(getattr(ReplayBuffer, name)).parameters
        assert list(ours) == list(theirs)
        assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


EACH_WRONG_OPTION = [
    pytest.param(name, value, id=f"{name} {value!r:.20}")
    for name, values in WRONG_OPTIONS.items()
    for value in values
]


@pytest.mark.parametrize(("name", "value"), EACH_WRONG_OPTION)
def test_wrong_options_are_refused_with_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}`.*{re.escape(repr(value))}"):
        make_buffer(4, **{name: value})


@pytest.mark.parametrize(("name", "value"), EACH_WRONG_OPTION)
def test_wrong_options_are_refused_when_assigned_too(name: str, value: Any) -> None:
    buffer = make_buffer(4, n_adds=3)
    with refused(buffer, f"`{name}`.*{re.escape(repr(value))}"):
        setattr(buffer, name, value)


@pytest.mark.parametrize("value", [0, -5, 10.0, 1e6, math.nan, None, "10"])
@pytest.mark.parametrize("name", ["buffer_size", "n_envs"])
def test_wrong_sizes_are_refused_with_name_and_value(name: str, value: Any) -> None:
    sizes = {"buffer_size": 4, "n_envs": 1, name: value}
    with pytest.raises((TypeError, ValueError), match=f"`{name}`.*{re.escape(str(value))}"):
        PrioritizedReplayBuffer(
            observation_space=OBSERVATIONS, action_space=ACTIONS, device="cpu", **sizes
        )


def test_a_wrong_option_is_found_before_memory_is_asked_for() -> None:
    with pytest.raises(ValueError, match="alpha"):
        make_buffer(10**15, alpha=-1.0)
    with pytest.raises(ValueError, match="Dict"):
        PrioritizedReplayBuffer(10**15, spaces.Dict({"a": OBSERVATIONS}), ACTIONS)


def test_dict_observations_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("Dict('a': Box")):
        PrioritizedReplayBuffer(4, spaces.Dict({"a": OBSERVATIONS}), ACTIONS)


def test_saving_memory_with_timeout_handling_is_refused_as_in_sb3() -> None:
    arguments = (4, OBSERVATIONS, ACTIONS, "cpu", 1)
    with pytest.raises(ValueError, match="optimize_memory_usage") as theirs:
        ReplayBuffer(*arguments, optimize_memory_usage=True)
    with pytest.raises(ValueError, match="handle_timeout_termination") as ours:
        PrioritizedReplayBuffer(*arguments, optimize_memory_usage=True, n_steps=2)
    assert str(ours.value) == str(theirs.value)


def test_options_at_the_ends_of_their_ranges_and_of_other_number_types_are_taken() -> None:
    for beta in (0, 1, np.float32(0.5), th.tensor(0.25)):
        assert make_buffer(4, beta=beta).beta == float(beta)
    for alpha in (0, 25.0, np.float64(0.5), np.array(0.5)):
        assert make_buffer(4, alpha=alpha).alpha == float(alpha)
    buffer = make_buffer(4, gamma=0, n_steps=np.int32(3), eps=0, beta_increment=7)
    options = (buffer.gamma, buffer.n_steps, buffer.eps, buffer.beta_increment)
    assert options == (0.0, 3, 0.0, 7.0)
    assert [type(option) for option in options] == [float, int, float, float]


def test_capacity_and_content_are_counted_over_all_envs() -> None:
    buffer = make_buffer(10, n_envs=3)
    assert (buffer.buffer_size, buffer.tree.capacity) == (3, 9)
    for number in range(2):
        add_rows(buffer, 1, number)
    np.testing.assert_array_equal(np.flatnonzero(buffer.tree[:]), range(6))
    assert buffer.priorities.shape == buffer.probabilities.shape == (6,)
    np.testing.assert_array_equal(np.unique(buffer.sample(60).indices), range(6))
    for number in range(2, 9):
        add_rows(buffer, 1, number)
    np.testing.assert_array_equal(np.unique(buffer.sample(90).indices), range(9))


def test_more_envs_than_transitions_asked_for_make_one_row() -> None:
    buffer = make_buffer(2, n_adds=3, n_envs=4)
    assert (buffer.buffer_size, buffer.tree.capacity) == (1, 4)
    assert by_index(buffer.sample(8), "rewards") == {0: [8.0], 1: [9.0], 2: [10.0], 3: [11.0]}
