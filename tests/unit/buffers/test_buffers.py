"""PrioritizedReplayBuffer: priorities, weights, what it refuses, its life from add to pickle."""

import copy
import inspect
import math
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from sb3_per import PrioritizedDictReplayBuffer, PrioritizedReplayBuffer
from sb3_per_envs import GridWorldEnv

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

OBSERVATIONS = spaces.Box(-np.inf, np.inf, (2,), np.float64)
ACTIONS = spaces.Discrete(4)
SAVING: dict[str, Any] = {"optimize_memory_usage": True, "handle_timeout_termination": False}
MEMORY_MODES = pytest.mark.parametrize("memory", [{}, SAVING], ids=["plain", "saving"])


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


def make(
    buffer_size: int, n_adds: int = 0, n_envs: int = 1, **options: Any
) -> PrioritizedReplayBuffer:
    """With alpha = 1 and eps = 0 a priority is the absolute error."""
    base = {"alpha": 1.0, "eps": 0.0, **options}
    buffer = PrioritizedReplayBuffer(buffer_size, OBSERVATIONS, ACTIONS, "cpu", n_envs, **base)
    add(buffer, n_adds)
    return buffer


def add(buffer: ReplayBuffer, n_adds: int = 1, first: int = 0) -> None:
    """Row ``k``: observations ``k``, then ``k + 1``, rewards ``k * n_envs + env``."""
    n = buffer.n_envs
    for k in range(first, first + n_adds):
        buffer.add(
            np.full((n, 2), k),
            np.full((n, 2), k + 1),
            np.zeros(n, dtype=np.int64),
            np.arange(k * n, k * n + n),
            np.zeros(n, dtype=bool),
            [{}] * n,
        )


def leaves(buffer: PrioritizedReplayBuffer) -> FloatArray:
    array: FloatArray = buffer.tree[:]
    return array


def arrays_of(buffer: ReplayBuffer) -> dict[str, bytes]:
    return {
        f"{name} {key}": array.tobytes()
        for name, value in vars(buffer).items()
        # Of a buffer for Dict observations, these are dicts themselves
        for key, array in (value if isinstance(value, dict) else {"": value}).items()
        if isinstance(array, np.ndarray)
    }


def state_of(buffer: PrioritizedReplayBuffer) -> dict[str, Any]:
    """All that decides what the buffer holds and how it draws."""
    return {
        **{name: getattr(buffer, name) for name in (*WRONG_OPTIONS, "pos", "full")},
        **arrays_of(buffer),
        "leaves": leaves(buffer).tobytes(),
        "extremes": (buffer.tree.total, buffer.tree.max_priority, buffer.tree.min_priority),
    }


def random_state() -> bytes:
    return pickle.dumps(np.random.get_state())


@contextmanager
def refused(
    buffer: PrioritizedReplayBuffer,
    message: str | None = None,
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> Iterator[None]:
    """The block raises ``error`` with ``message``, and has changed nothing by then."""
    before, random_before = state_of(buffer), random_state()
    with pytest.raises(error, match=message):
        yield
    assert state_of(buffer) == before
    assert random_state() == random_before
    assert buffer.tree.check_valid() == (True, "")


@contextmanager
def uniform_numbers(monkeypatch: pytest.MonkeyPatch, value: float) -> Iterator[None]:
    """Every uniform random number is ``value``."""
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "random_sample", lambda n: np.full(n, value))
        yield


def assert_same_batches(
    one: PrioritizedReplayBuffer, other: PrioritizedReplayBuffer, n_batches: int = 5
) -> None:
    """The same global seed gives the same batches, bit for bit."""
    drawn = []
    for buffer in (one, other):
        np.random.seed(12)
        batches = [buffer.sample(16) for _ in range(n_batches)]
        drawn.append([[None if v is None else np.asarray(v) for v in batch] for batch in batches])
    for batch, twin in zip(*drawn, strict=True):
        for value, expected in zip(batch, twin, strict=True):
            np.testing.assert_array_equal(value, expected)


# --- construction ---


def test_names_order_and_defaults_of_the_arguments() -> None:
    ours = inspect.signature(PrioritizedReplayBuffer).parameters
    theirs = inspect.signature(ReplayBuffer).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].default for name in theirs] == [p.default for p in theirs.values()]
    *options, sb3_options = list(ours.values())[len(theirs) :]
    # What is left goes to the SB3 buffer that a derived class builds on
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


EACH_WRONG_OPTION = [
    pytest.param(name, value, id=f"{name} {value!r:.20}")
    for name, values in WRONG_OPTIONS.items()
    for value in values
]


@pytest.mark.parametrize(("name", "value"), EACH_WRONG_OPTION)
def test_wrong_options_are_refused_with_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}`.*{re.escape(repr(value))}"):
        make(4, **{name: value})


@pytest.mark.parametrize(("name", "value"), EACH_WRONG_OPTION)
def test_wrong_options_are_refused_when_assigned_too(name: str, value: Any) -> None:
    buffer = make(4, n_adds=3)
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
        make(10**15, alpha=-1.0)
    with pytest.raises(ValueError, match="Dict"):
        PrioritizedReplayBuffer(10**15, spaces.Dict({"a": OBSERVATIONS}), ACTIONS)


def test_dict_observations_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("Dict('a': Box")):
        PrioritizedReplayBuffer(4, spaces.Dict({"a": OBSERVATIONS}), ACTIONS)


def test_options_at_the_ends_of_their_ranges_and_of_other_number_types_are_taken() -> None:
    for beta in (0, 1, np.float32(0.5), th.tensor(0.25)):
        assert make(4, beta=beta).beta == float(beta)
    for alpha in (0, 25.0, np.float64(0.5), np.array(0.5)):
        assert make(4, alpha=alpha).alpha == float(alpha)
    buffer = make(4, gamma=0, n_steps=np.int32(3), eps=0, beta_increment=7)
    options = (buffer.gamma, buffer.n_steps, buffer.eps, buffer.beta_increment)
    assert options == (0.0, 3, 0.0, 7.0)
    assert [type(option) for option in options] == [float, int, float, float]


# --- priorities of new transitions ---


@pytest.mark.parametrize("n_envs", [1, 3])
def test_the_first_transitions_get_1(n_envs: int) -> None:
    buffer = make(4 * n_envs, n_envs=n_envs)
    assert buffer.priorities.shape == buffer.probabilities.shape == (0,)
    for k in range(1, 4):
        add(buffer)
        np.testing.assert_array_equal(buffer.priorities, np.ones(k * n_envs))
        np.testing.assert_array_equal(leaves(buffer)[k * n_envs :], 0.0)
        np.testing.assert_allclose(buffer.probabilities, np.full(k * n_envs, 1 / k / n_envs))


def test_a_new_transition_gets_the_largest_priority() -> None:
    buffer = make(8, n_adds=4)
    buffer.update_priorities([0, 1, 2, 3], [50.0, 10.0, 10.0, 10.0])
    add(buffer)
    np.testing.assert_array_equal(buffer.priorities, [50, 10, 10, 10, 50])
    np.testing.assert_allclose(buffer.probabilities[4], 50 / 130)


def test_the_largest_priority_counts_also_when_it_is_below_1() -> None:
    buffer = make(8, n_adds=4)
    buffer.update_priorities([0, 1, 2, 3], [1e-3, 2e-3, 1e-4, 1e-3])
    add(buffer)
    assert buffer.priorities[4] == 2e-3


def test_the_transition_being_overwritten_counts_in_the_largest_priority() -> None:
    buffer = make(4, n_adds=4)
    buffer.update_priorities([0, 1, 2, 3], [9.0, 1.0, 1.0, 1.0])
    add(buffer)
    np.testing.assert_array_equal(buffer.priorities, [9, 1, 1, 1])
    # Of all envs that are overwritten
    buffer = make(6, n_adds=3, n_envs=2)
    buffer.update_priorities(range(6), [2.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    add(buffer)
    np.testing.assert_array_equal(buffer.priorities, [9, 9, 1, 1, 1, 1])


def test_an_outlier_that_has_gone_leaves_no_trace() -> None:
    buffer = make(4, n_adds=4)
    buffer.update_priorities([0, 1, 2, 3], [1.0, 1000.0, 1.0, 1.0])
    buffer.update_priorities([1], [1.5])
    assert buffer.tree.max_priority == 1.5
    add(buffer, 3)
    np.testing.assert_array_equal(buffer.priorities, [1.5, 1.5, 1.5, 1.0])
    # An overwritten outlier passes its priority on, and the update of the heir is the end of it.
    buffer.update_priorities([3], [1000.0])
    add(buffer)
    assert buffer.priorities[3] == 1000.0
    buffer.update_priorities([3], [0.25])
    assert buffer.tree.max_priority == 1.5


def test_alpha_is_applied_once_to_a_new_transition() -> None:
    buffer = make(4, n_adds=2, alpha=0.5)
    buffer.update_priorities([0, 1], [16.0, 4.0])
    add(buffer)
    np.testing.assert_array_equal(buffer.priorities, [4.0, 2.0, 4.0])


def test_a_new_transition_gets_1_when_no_other_has_any_mass() -> None:
    buffer = make(4, n_adds=2)
    buffer.update_priorities([0, 1], [0.0, 0.0])
    add(buffer)
    np.testing.assert_array_equal(buffer.priorities, [0.0, 0.0, 1.0])


def test_priorities_stay_with_their_transitions_when_the_ring_goes_round() -> None:
    buffer = make(9, n_adds=3, n_envs=3)
    buffer.update_priorities(range(9), np.arange(1.0, 10.0))
    add(buffer, 1, first=3)
    np.testing.assert_array_equal(leaves(buffer), [9, 9, 9, 4, 5, 6, 7, 8, 9])
    batch = buffer.sample(300)
    expected = np.array([9, 10, 11, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(batch.rewards.numpy().ravel(), expected[batch.indices])
    assert set(batch.indices.tolist()) == set(range(9))


def test_add_that_fails_changes_no_priority() -> None:
    buffer = make(4, n_adds=3)
    before = leaves(buffer)
    zeros = np.zeros((1, 2))
    with pytest.raises(ValueError, match="reshape"):
        buffer.add(zeros, zeros, np.zeros(5), np.zeros(1), np.zeros(1), [{}])
    assert buffer.pos == 3
    np.testing.assert_array_equal(leaves(buffer), before)


def test_extend_adds_one_after_the_other() -> None:
    buffer = make(4)
    observations = np.arange(6.0).reshape(3, 1, 2)
    zeros = np.zeros((3, 1))
    buffer.extend(observations, observations, zeros, zeros, zeros, [[{}]] * 3)
    np.testing.assert_array_equal(leaves(buffer), [1, 1, 1, 0])
    np.testing.assert_array_equal(buffer.observations[:3], observations)


# --- update_priorities ---


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.01, 10.0])
def test_a_priority_is_error_plus_eps_to_the_power_of_alpha(eps: float, alpha: float) -> None:
    errors = [0.0, -0.0, 1e-9, -3.0, 3.0, 0.5, -1e5]
    buffer = make(8, n_adds=7, alpha=alpha, eps=eps)
    buffer.update_priorities(range(7), errors)
    expected = [math.pow(abs(error) + eps, alpha) for error in errors]
    np.testing.assert_allclose(buffer.priorities, expected, rtol=1e-14)
    assert buffer.tree.max_priority == buffer.priorities.max()
    assert buffer.tree.check_valid() == (True, "")


def test_eps_is_inside_the_power() -> None:
    buffer = make(4, n_adds=1, alpha=0.5, eps=0.01)
    buffer.update_priorities([0], [0.0])
    assert buffer.priorities[0] == pytest.approx(0.1)


@pytest.mark.parametrize("form", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("alpha", "eps"), [(55.0, 1e-6), (1e6, 0.5), (1.0, 5e-324)])
def test_no_leaf_underflows_to_zero_while_eps_is_above_it(
    alpha: float, eps: float, form: Any
) -> None:
    """Both ways through: that for arrays of float32, and that for anything else."""
    buffer = make(4, n_adds=2, alpha=alpha, eps=eps)
    buffer.update_priorities(np.arange(2), np.zeros(2, form))
    assert (buffer.priorities > 0.0).all()
    assert (buffer.priorities < 1e-300).all()
    assert set(buffer.sample(8).indices.tolist()) == {0, 1}
    np.testing.assert_array_equal(buffer.sample(8).weights, 1.0)


@pytest.mark.parametrize("form", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("alpha", [0.5, 55.0])
def test_without_eps_an_error_of_zero_has_no_mass(alpha: float, form: Any) -> None:
    buffer = make(4, n_adds=2, alpha=alpha)
    buffer.update_priorities(np.arange(2), np.array([0.0, 1e-30], form))
    assert buffer.priorities[0] == 0.0 < buffer.priorities[1]
    assert set(buffer.sample(8).indices.tolist()) == {1}


def test_no_error_is_clipped_rounded_or_tied() -> None:
    buffer = make(4, n_adds=3)
    buffer.update_priorities([0, 1, 2], [2.7, 20.0, 1e9])
    np.testing.assert_array_equal(buffer.priorities, [2.7, 20.0, 1e9])
    buffer = make(4, n_adds=2, alpha=0.5)
    buffer.update_priorities([0, 1], np.array([2, 3]))
    np.testing.assert_allclose(buffer.priorities, [2**0.5, 3**0.5])


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


VALUES = [-1.0, 2.0, -0.5]
ERRORS: dict[str, Any] = {
    "list": VALUES,
    "tuple": tuple(VALUES),
    "column list": [[value] for value in VALUES],
    "NumPy scalars": [np.float32(value) for value in VALUES],
    "float16": np.array(VALUES, np.float16),
    "float32": np.array(VALUES, np.float32),
    "float64": np.array(VALUES),
    "longdouble": np.array(VALUES, np.longdouble),
    "other byte order": np.array(VALUES, ">f8"),
    "column": np.array(VALUES, np.float32)[:, None],
    "strided": np.array([*VALUES, *VALUES])[::-1][:3][::-1].repeat(2)[::2],
    "read-only": read_only(np.array(VALUES)),
    "bfloat16 tensor": th.tensor(VALUES, dtype=th.bfloat16),
    "float16 tensor": th.tensor(VALUES, dtype=th.float16),
    "float32 tensor": th.tensor(VALUES),
    "float64 tensor": th.tensor(VALUES, dtype=th.float64),
    "column tensor": th.tensor(VALUES)[:, None],
    "strided tensor": th.tensor(VALUES).repeat_interleave(2)[::2],
    "tensor with gradient": th.tensor(VALUES, requires_grad=True),
    "tensor in a graph": th.tensor(VALUES, requires_grad=True, dtype=th.bfloat16)[:, None] * 1.0,
}
INDICES: dict[str, Any] = {
    "list": [4, 0, 2],
    "tuple": (4, 0, 2),
    "range": range(4, -2, -2),
    "int32": np.array([4, 0, 2], np.int32),
    "int64": np.array([4, 0, 2]),
    "uint8": np.array([4, 0, 2], np.uint8),
    "uint64": np.array([4, 0, 2], np.uint64),
    "other byte order": np.array([4, 0, 2], ">i4"),
    "strided": np.array([4, 9, 0, 9, 2])[::2],
    "read-only": read_only(np.array([4, 0, 2])),
    "tensor": th.tensor([4, 0, 2]),
    "int32 tensor": th.tensor([4, 0, 2], dtype=th.int32),
    "uint8 tensor": th.tensor([4, 0, 2], dtype=th.uint8),
}


@pytest.mark.parametrize("form", ERRORS)
def test_errors_may_come_in_any_form(form: str) -> None:
    buffer = make(8, n_adds=5)
    buffer.update_priorities([4, 0, 2], ERRORS[form])
    np.testing.assert_array_equal(buffer.priorities, [2.0, 1.0, 0.5, 1.0, 1.0])


@pytest.mark.parametrize("form", INDICES)
def test_indices_may_come_in_any_form(form: str) -> None:
    indices = range(4, -1, -2) if form == "range" else INDICES[form]
    errors = [-1.0, 0.5, 2.0] if form == "range" else VALUES
    buffer = make(8, n_adds=5)
    buffer.update_priorities(indices, errors)
    np.testing.assert_array_equal(buffer.priorities, [2.0, 1.0, 0.5, 1.0, 1.0])


def test_an_error_is_read_in_its_own_precision() -> None:
    buffer = make(8, n_adds=3)
    buffer.update_priorities([0, 1, 2], np.full(3, 0.1, np.float32))
    assert buffer.priorities[0] == float(np.float32(0.1))
    buffer.update_priorities([0, 1, 2], th.full((3,), 0.1, dtype=th.float64))
    assert buffer.priorities[0] == 0.1
    # What float32 can't hold
    buffer.update_priorities([0, 1, 2], th.full((3,), 1e-300, dtype=th.float64))
    assert buffer.priorities[0] == 1e-300


def test_the_last_error_of_a_repeated_index_counts() -> None:
    buffer = make(4, n_adds=3)
    buffer.update_priorities([1, 2, 1, 1], [9.0, 5.0, 8.0, 3.0])
    np.testing.assert_array_equal(buffer.priorities, [1.0, 3.0, 5.0])
    assert buffer.tree.max_priority == 5.0


def test_an_update_of_nothing_changes_nothing() -> None:
    buffer = make(4, n_adds=3)
    before = state_of(buffer)
    buffer.update_priorities([], [])
    buffer.update_priorities(np.empty(0, dtype=np.int64), th.empty(0, 1))
    assert state_of(buffer) == before


@pytest.mark.parametrize("n_envs", [1, 3])
def test_the_indices_of_a_batch_name_its_transitions(n_envs: int) -> None:
    buffer = make(4 * n_envs, n_adds=5, n_envs=n_envs)
    batch = buffer.sample(8 * n_envs)
    assert (batch.indices.dtype, batch.indices.shape) == (np.dtype(np.int64), (8 * n_envs,))
    buffer.update_priorities(batch.indices, batch.rewards)
    rewards = np.concatenate([np.arange(4 * n_envs, 5 * n_envs), np.arange(n_envs, 4 * n_envs)])
    np.testing.assert_array_equal(buffer.priorities, rewards)


def test_changed_alpha_and_eps_apply_to_later_updates_alone() -> None:
    buffer = make(4, n_adds=3)
    buffer.update_priorities([0, 1, 2], [4.0, 9.0, 16.0])
    buffer.alpha, buffer.eps = 0.5, 9.0
    np.testing.assert_array_equal(buffer.priorities, [4.0, 9.0, 16.0])
    buffer.update_priorities([0], [16.0])
    np.testing.assert_array_equal(buffer.priorities, [5.0, 9.0, 16.0])


# --- update_priorities refuses ---


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(
    "index",
    [-1, -8, 5, 8, 9, 10**6, -(2**63), 2**63 - 1, np.uint64(2**63), np.uint64(2**64 - 1)],
)
def test_indices_outside_the_stored_transitions_are_refused(index: Any, n_envs: int) -> None:
    buffer = make(8 * n_envs, n_adds=5, n_envs=n_envs)
    if 5 <= index <= 9:
        index = index * n_envs
    message = rf"\b{index}\b" if index >= 0 else re.escape(str(index))
    for indices in (index, [index], np.array([0, index], dtype=np.asarray(index).dtype)):
        with refused(buffer, message, IndexError):
            buffer.update_priorities(indices, np.full(np.size(indices), 7.0))


def test_the_first_index_past_the_stored_transitions_follows_what_is_stored() -> None:
    buffer = make(8, n_adds=5)
    buffer.update_priorities([4], [7.0])
    add(buffer)
    buffer.update_priorities([5], [7.0])
    add(buffer, 3)
    with refused(buffer, r"\b8\b", IndexError):
        buffer.update_priorities([8], [7.0])


def test_an_empty_buffer_has_no_index() -> None:
    buffer = make(8)
    with refused(buffer, r"\b0\b", IndexError):
        buffer.update_priorities([0], [7.0])


@pytest.mark.parametrize(
    "indices",
    [
        [0.0],
        np.array([1.0], np.float32),
        th.tensor([1.0]),
        th.tensor([1.0], dtype=th.bfloat16),
        [True],
        ["1"],
        [None],
        None,
        [1j],
    ],
    ids=str,
)
def test_indices_that_are_no_integers_are_refused(indices: Any) -> None:
    buffer = make(8, n_adds=5)
    with refused(buffer, error=TypeError):
        buffer.update_priorities(indices, [7.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "form",
    [
        list,
        np.array,
        lambda values: np.array(values, np.float16),
        lambda values: np.array(values, np.longdouble)[:, None],
        th.tensor,
        lambda values: th.tensor(values, requires_grad=True, dtype=th.bfloat16),
    ],
    ids=["list", "float64", "float16", "longdouble", "float32 tensor", "bfloat16 tensor"],
)
def test_errors_that_are_not_finite_are_refused(form: Callable[[Any], Any], value: float) -> None:
    buffer = make(8, n_adds=5)
    buffer.update_priorities(range(5), [1.0, 2.0, 3.0, 4.0, 5.0])
    with refused(buffer, rf"{value} for transition 3\b"):
        buffer.update_priorities([0, 3, 1], form([9.0, value, 9.0]))


@pytest.mark.parametrize(
    ("alpha", "eps", "error"),
    [
        (1.0, 0.0, 1e308),
        (1.0, 0.0, -1e308),
        (1.0, 1e306, 1e308),
        (2.0, 0.0, 1e160),
        (400.0, 0.0, 10.0),
    ],
)
def test_errors_whose_priority_is_too_large_for_a_sum_are_refused(
    alpha: float, eps: float, error: float
) -> None:
    buffer = make(8, n_adds=5, alpha=alpha, eps=eps)
    with refused(buffer, rf"TD error {re.escape(str(error))} of transition 3\b"):
        buffer.update_priorities([0, 3, 1], [0.0, error, 0.0])


def test_the_largest_priorities_allowed_have_a_finite_sum() -> None:
    buffer = make(8, n_adds=8)
    limit = buffer.tree.priority_limit
    buffer.update_priorities(range(8), np.full(8, limit))
    add(buffer, 9)
    assert math.isfinite(buffer.tree.total)
    np.testing.assert_allclose(buffer.probabilities, 1 / 8)
    np.testing.assert_array_equal(buffer.sample(8).weights, 1.0)
    with refused(buffer, "too large"):
        buffer.update_priorities([0], [np.nextafter(limit, np.inf)])
    # eps alone can be too much.
    buffer.eps = 1.5e308
    with refused(buffer, r"TD error 0\.0.*too large"):
        buffer.update_priorities([0], [0.0])
    with refused(buffer, r"TD error 1\.5e\+308.*too large"):
        buffer.update_priorities([0], [1.5e308])


@pytest.mark.parametrize(
    "errors",
    [
        [1.0],
        [1.0, 2.0],
        [1.0, 2.0, 3.0, 4.0],
        np.ones((3, 3)),
        np.ones((1, 3)),
        np.ones((3, 1, 1)),
        1.0,
        [],
        th.ones(1),
        th.ones(2, 1),
        th.ones(3, 3),
        th.ones(()),
    ],
    ids=lambda errors: f"{type(errors).__name__} {np.shape(errors)}",
)
def test_errors_of_another_number_than_the_indices_are_refused(errors: Any) -> None:
    buffer = make(8, n_adds=5)
    shape = re.escape(str(tuple(np.shape(errors))))
    for indices in ([0, 1, 2], np.arange(3), th.arange(3)):
        with refused(buffer, f"3 indices.*{shape}"):
            buffer.update_priorities(indices, errors)


@pytest.mark.parametrize("shape", [(1, 3), (3, 3), (3, 1, 1)])
def test_indices_in_a_table_are_refused(shape: tuple[int, ...]) -> None:
    buffer = make(8, n_adds=5)
    with refused(buffer, re.escape(str(shape))):
        buffer.update_priorities(np.ones(shape, dtype=np.int64), np.ones(3))


def test_one_wrong_value_among_right_ones_changes_none() -> None:
    buffer = make(8, n_adds=5)
    buffer.update_priorities(range(5), [1.0, 2.0, 3.0, 4.0, 5.0])
    with refused(buffer, r"\b99\b", IndexError):
        buffer.update_priorities([0, 99], [9.0, 9.0])
    with refused(buffer, "nan"):
        buffer.update_priorities([0, 1], [9.0, math.nan])
    with refused(buffer, "1e[+]308"):
        buffer.update_priorities([0, 1], [9.0, 1e308])


@pytest.mark.parametrize(
    "errors",
    [
        np.array([1.0, 2.0 + 1.0j]),
        [1.0, 2j],
        th.tensor([1.0, 2.0j]),
        ["1.0", "2.0"],
        [1.0, None],
        None,
        [1.0, 10**400],
    ],
    ids=["complex", "complex list", "complex tensor", "text", "None inside", "None", "huge int"],
)
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_errors_that_are_no_real_numbers_are_refused(errors: Any) -> None:
    buffer = make(8, n_adds=5)
    with refused(buffer, error=(TypeError, ValueError)):
        buffer.update_priorities([0, 1], errors)


@pytest.mark.skipif(
    np.finfo(np.longdouble).max == np.finfo(np.float64).max, reason="no wider float"
)
def test_an_error_beyond_float64_is_refused_without_a_warning_of_numpy() -> None:
    buffer = make(8, n_adds=5)
    with refused(buffer, "transition 1"):
        buffer.update_priorities([0, 1], np.array([1, np.longdouble("1e400")]))


# --- sample ---


def test_a_batch_has_sb3s_fields_then_weights_and_indices() -> None:
    batch = make(8, n_adds=5).sample(3)
    assert batch._fields == (
        "observations",
        "actions",
        "next_observations",
        "dones",
        "rewards",
        "discounts",
        "weights",
        "indices",
    )
    assert batch.discounts is None
    assert {(t.dtype, t.shape) for t in (batch.dones, batch.rewards, batch.weights)} == {
        (th.float32, th.Size([3, 1]))
    }
    discounts = make(8, n_adds=5, n_steps=2).sample(3).discounts
    assert discounts is not None
    assert (discounts.dtype, discounts.shape) == (th.float32, th.Size([3, 1]))


def test_a_batch_may_be_larger_than_the_content() -> None:
    batch = make(8, n_adds=3).sample(32)
    assert len(batch.rewards) == 32
    assert set(batch.indices.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("n_envs", [1, 4])
def test_one_row_is_enough_for_any_batch(n_envs: int) -> None:
    for buffer in (make(8 * n_envs, 1, n_envs), make(n_envs, 3, n_envs)):
        batch = buffer.sample(32)
        assert set(batch.indices.tolist()) == set(range(n_envs))
        np.testing.assert_array_equal(batch.weights, 1.0)


def test_the_newest_transition_can_be_drawn() -> None:
    buffer = make(10, n_adds=3)
    buffer.update_priorities([0, 1, 2], [1e-6, 1e-6, 1.0])
    indices = np.concatenate([buffer.sample(1).indices for _ in range(200)])
    assert (indices == 2).mean() > 0.98


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, 2.0, "2", None])
def test_a_batch_size_that_is_no_positive_integer_is_refused(batch_size: Any) -> None:
    buffer = make(8, n_adds=5)
    with refused(buffer, error=(TypeError, ValueError)):
        buffer.sample(batch_size)


def test_a_refused_batch_size_is_named() -> None:
    buffer = make(8, n_adds=5)
    with refused(buffer, "`batch_size`.*-3"):
        buffer.sample(-3)


@MEMORY_MODES
@pytest.mark.parametrize("n_envs", [1, 3])
def test_an_empty_buffer_has_nothing_to_sample(n_envs: int, memory: dict[str, Any]) -> None:
    buffer = make(8, n_envs=n_envs, **memory)
    with refused(buffer, "empty"):
        buffer.sample(4)
    add(buffer)
    buffer.sample(4)
    buffer.reset()
    with refused(buffer, "empty"):
        buffer.sample(4)


@MEMORY_MODES
@pytest.mark.parametrize("n_adds", [1, 2, 4, 6])
def test_a_buffer_without_any_mass_names_eps(n_adds: int, memory: dict[str, Any]) -> None:
    buffer = make(4, n_adds, **memory)
    n_stored = min(n_adds, 4)
    buffer.update_priorities(range(n_stored), np.zeros(n_stored))
    with refused(buffer, r"`eps` is 0\.0"):
        buffer.sample(4)
    add(buffer)
    assert set(buffer.sample(9).indices.tolist()) == {n_adds % 4}


def test_arrays_filled_by_hand_get_the_advice_to_use_add() -> None:
    buffer = make(4)
    buffer.rewards[:3] = 1.0
    buffer.pos = 3
    with refused(buffer, r"by hand. Store transitions by `add`, .*from_replay_buffer"):
        buffer.sample(2)
    # Also over a whole ring
    buffer.full = True
    with refused(buffer, "none of the 4 transitions .*by hand"):
        buffer.sample(2)


def test_with_eps_errors_of_zero_are_drawn_uniformly() -> None:
    buffer = make(8, n_adds=4, eps=1e-6, alpha=0.6)
    buffer.update_priorities(range(4), np.zeros(4))
    batch = buffer.sample(8)
    np.testing.assert_array_equal(batch.indices, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(batch.weights, 1.0)


@pytest.mark.parametrize("value", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_a_priority_of_zero_is_never_drawn_even_on_an_edge(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    buffer = make(8, n_adds=6)
    buffer.update_priorities(range(6), [0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    with uniform_numbers(monkeypatch, value):
        for batch_size in (1, 2, 3, 30):
            assert set(buffer.sample(batch_size).indices.tolist()) <= {1, 3, 4}


# --- weights ---

SPREAD = np.array([0.1, 3.0, 0.5, 7.0, 1.0, 0.2])


@pytest.mark.parametrize("normalization", ["batch", "buffer"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_weights_are_to_each_other_as_priorities_to_the_power_of_minus_beta(
    n_envs: int, beta: float, normalization: Any
) -> None:
    buffer = make(6 * n_envs, 6, n_envs, alpha=0.6, beta=beta, weight_normalization=normalization)
    buffer.update_priorities(range(6 * n_envs), np.tile(SPREAD, n_envs))
    batch = buffer.sample(64)
    # Read at the indices that came back
    drawn = buffer.priorities[batch.indices]
    weights = batch.weights.numpy().ravel().astype(np.float64)
    ratios = (drawn[None, :] / drawn[:, None]) ** beta
    np.testing.assert_allclose(weights[:, None] / weights[None, :], ratios, rtol=1e-6)
    assert batch.weights.dtype == th.float32


@pytest.mark.parametrize("n_rows", [6, 60])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("normalization", ["batch", "buffer"])
def test_weights_are_those_of_the_paper_whatever_the_number_of_transitions(
    normalization: Any, n_envs: int, n_rows: int
) -> None:
    n = n_rows * n_envs
    buffer = make(2 * n, n_rows, n_envs, beta=0.7, weight_normalization=normalization)
    buffer.update_priorities(range(n), np.tile(SPREAD, n // 6))
    batch = buffer.sample(8)
    every = (n * buffer.probabilities) ** -0.7
    drawn = every[batch.indices]
    largest = every.max() if normalization == "buffer" else drawn.max()
    np.testing.assert_allclose(batch.weights.numpy().ravel(), drawn / largest, rtol=1e-6)


def test_the_largest_weight_of_a_batch_is_exactly_1() -> None:
    buffer = make(6, n_adds=6, beta=0.3)
    buffer.update_priorities(range(6), SPREAD)
    for batch_size in (1, 2, 50):
        assert buffer.sample(batch_size).weights.max() == 1.0


def test_weights_over_the_buffer_are_divided_by_one_that_need_not_be_drawn() -> None:
    buffer = make(8, n_adds=4, beta=0.5, weight_normalization="buffer")
    buffer.update_priorities(range(4), [1e-12, 1.0, 4.0, 4.0])
    batch = buffer.sample(50)
    assert 0 not in batch.indices
    expected = np.array([1.0, 1e-6, 0.5e-6, 0.5e-6])[batch.indices]
    np.testing.assert_allclose(batch.weights.numpy().ravel(), expected, rtol=1e-6)
    # A priority of zero has no weight: it is not the smallest.
    buffer.update_priorities([0], [0.0])
    batch = buffer.sample(50)
    expected = np.array([0.0, 1.0, 0.5, 0.5])[batch.indices]
    np.testing.assert_array_equal(batch.weights.numpy().ravel(), expected)


@pytest.mark.parametrize("normalization", ["batch", "buffer"])
@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.4, 1.0])
@pytest.mark.parametrize(
    "errors", [(1e-300, 1e300), (1e300, 1e-300), (5e-324, 1e307), (5e-324, 5e-324), (1e307, 1e307)]
)
def test_weights_of_extreme_priorities_are_numbers_from_0_to_1(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[float, float], beta: float, normalization: Any
) -> None:
    buffer = make(2, n_adds=2, beta=beta, weight_normalization=normalization)
    buffer.update_priorities([0, 1], errors)
    drawn = set()
    # The ends of the masses: however unlikely a transition, one of them belongs to it.
    for value in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        with uniform_numbers(monkeypatch, value):
            for batch_size in (1, 2, 5):
                batch = buffer.sample(batch_size)
                drawn |= set(batch.indices.tolist())
                weights = batch.weights.numpy()
                assert np.isfinite(weights).all()
                assert (weights >= 0.0).all()
                assert (weights <= 1.0).all()
                if normalization == "batch" or beta == 0.0:
                    assert weights.max() == 1.0
    assert drawn == {0, 1} or errors[0] > errors[1]
    assert np.isfinite(buffer.probabilities).all()
    assert buffer.probabilities.sum() == pytest.approx(1.0)


def test_alpha_0_and_beta_0_are_uniform_replay() -> None:
    buffer = make(12, n_adds=4, n_envs=3, alpha=0.0, beta=0.0)
    for eps in (0.0, 1e-6):
        buffer.eps = eps
        buffer.update_priorities(range(12), np.append(SPREAD * 1e9, np.zeros(6)))
        np.testing.assert_array_equal(buffer.priorities, 1.0)
        batch = buffer.sample(24)
        # Two of each: equal masses
        np.testing.assert_array_equal(batch.indices, np.repeat(np.arange(12), 2))
        np.testing.assert_array_equal(batch.weights, np.ones((24, 1)))


# --- one observation array instead of two ---


@pytest.mark.parametrize("n_envs", [1, 3])
def test_the_row_without_a_next_observation_has_no_mass(n_envs: int) -> None:
    buffer = make(4 * n_envs, n_envs=n_envs, **SAVING)
    for k in range(1, 11):
        add(buffer, 1, first=k)
        expected = np.ones((4, n_envs))
        expected[k:] = 0.0
        if k >= 4:
            expected[k % 4] = 0.0
        np.testing.assert_array_equal(leaves(buffer), expected.ravel())
        batch = buffer.sample(8 * n_envs)
        np.testing.assert_array_equal(batch.next_observations, batch.observations + 1)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_an_update_of_the_row_without_a_next_observation_changes_nothing(n_envs: int) -> None:
    buffer = make(4 * n_envs, 6, n_envs, **SAVING)
    n = 4 * n_envs
    buffer.update_priorities(range(n), np.arange(1.0, n + 1))
    expected = np.arange(1.0, n + 1)
    expected[2 * n_envs : 3 * n_envs] = 0.0
    np.testing.assert_array_equal(buffer.priorities, expected)
    before = state_of(buffer)
    buffer.update_priorities([2 * n_envs], [99.0])
    assert state_of(buffer) == before
    # It takes errors that can't be, like any other.
    with refused(buffer, "nan"):
        buffer.update_priorities([2 * n_envs], [math.nan])
    # The next add makes it a new transition, and the row after it the one without.
    add(buffer)
    expected[2 * n_envs : 3 * n_envs] = n
    expected[3 * n_envs :] = 0.0
    np.testing.assert_array_equal(buffer.priorities, expected)


def test_the_position_of_a_buffer_that_is_not_full_is_no_stored_transition() -> None:
    buffer = make(4, n_adds=2, **SAVING)
    buffer.update_priorities([0, 1], [5.0, 6.0])
    np.testing.assert_array_equal(leaves(buffer), [5.0, 6.0, 0.0, 0.0])
    with refused(buffer, r"\b2\b", IndexError):
        buffer.update_priorities([2], [7.0])


@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_single_row_without_a_next_observation_can_not_be_sampled(n_envs: int) -> None:
    buffer = make(n_envs, 2, n_envs, **SAVING)
    np.testing.assert_array_equal(buffer.probabilities, np.zeros(n_envs))
    with refused(buffer, "optimize_memory_usage"):
        buffer.sample(2)


# --- errors that come late ---


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("n_adds", [0, 1, 5])
def test_an_index_stands_for_a_place(n_adds: int, n_envs: int) -> None:
    """An error that comes late counts for what is stored there by then, whoever kept the index."""
    buffer = make(4 * n_envs, 6, n_envs)
    earlier, latest = buffer.sample(8 * n_envs), buffer.sample(8 * n_envs)
    assert len(np.unique(latest.indices)) == 4 * n_envs
    add(buffer, n_adds)
    for error, indices in enumerate((earlier.indices, latest.indices, latest.indices.copy()), 2):
        buffer.update_priorities(indices, np.full(8 * n_envs, error))
        np.testing.assert_array_equal(buffer.priorities, np.full(4 * n_envs, error))
    assert buffer.tree.check_valid() == (True, "")


def test_late_errors_are_checked_whether_or_not_they_count() -> None:
    buffer = make(4, n_adds=4)
    batch = buffer.sample(4)
    add(buffer, 4)
    with refused(buffer, "nan"):
        buffer.update_priorities(batch.indices, [1.0, 1.0, math.nan, 1.0])
    with refused(buffer, "1e[+]308"):
        buffer.update_priorities(batch.indices, [1.0, 1.0, 1e308, 1.0])


def test_late_errors_in_a_buffer_that_saves_memory() -> None:
    buffer = make(5, n_adds=5, **SAVING)
    batch = buffer.sample(8)
    assert set(batch.indices.tolist()) == {1, 2, 3, 4}
    add(buffer, 2)  # rows 0 and 1; row 2 loses its next observation
    buffer.update_priorities(batch.indices, np.full(8, 7.0))
    np.testing.assert_array_equal(buffer.priorities, [1.0, 7.0, 0.0, 7.0, 7.0])


def test_late_errors_of_a_batch_drawn_before_a_reset() -> None:
    buffer = make(4, n_adds=4)
    batch = buffer.sample(4)
    buffer.reset()
    add(buffer, 3)
    with refused(buffer, r"\b3\b", IndexError):
        buffer.update_priorities(batch.indices, [7.0, 7.0, 7.0, 7.0])
    add(buffer)
    buffer.update_priorities(batch.indices, [7.0, 7.0, 7.0, 7.0])
    np.testing.assert_array_equal(buffer.priorities, 7.0)


# --- the warning that nothing feeds priorities back ---


def test_one_warning_that_names_perdqn_when_priorities_are_never_updated() -> None:
    buffer = make(8, n_adds=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3500):
            buffer.sample(1)
            add(buffer)
    assert [warning.category for warning in caught] == [UserWarning]
    assert "PERDQN" in str(caught[0].message)
    # It points at the caller.
    assert caught[0].filename == __file__


def draw(buffer: PrioritizedReplayBuffer, n_batches: int) -> None:
    for _ in range(n_batches):
        buffer.sample(1)


def test_the_warning_comes_after_at_most_1000_draws_and_not_at_once() -> None:
    buffer = make(8, n_adds=5)
    draw(buffer, 500)
    with pytest.warns(UserWarning, match="update_priorities"):
        draw(buffer, 500)


def test_an_update_silences_the_warning_for_good() -> None:
    buffer = make(8, n_adds=5)
    draw(buffer, 900)
    buffer.update_priorities([0], [1.0])
    # Warnings are errors here.
    draw(buffer, 2100)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_the_warning_is_not_repeated_by_a_copy(copied: Callable[[Any], Any]) -> None:
    buffer = make(8, n_adds=5)
    with pytest.warns(UserWarning, match="PERDQN"):
        draw(buffer, 1000)
    twin = copied(buffer)
    draw(pickle.loads(twin) if isinstance(twin, bytes) else twin, 1001)


@pytest.mark.parametrize("is_updated", [False, True])
def test_the_warning_does_not_come_again_after_a_reset(is_updated: bool) -> None:
    buffer = make(8, n_adds=5)
    if is_updated:
        buffer.update_priorities([0], [1.0])
    else:
        with pytest.warns(UserWarning, match="PERDQN"):
            draw(buffer, 1000)
    buffer.reset()
    add(buffer)
    draw(buffer, 1001)


@pytest.mark.slow
def test_plain_dqn_with_this_buffer_is_told_to_use_perdqn() -> None:
    model = DQN(
        "MlpPolicy",
        GridWorldEnv(length=3),
        replay_buffer_class=PrioritizedReplayBuffer,
        buffer_size=50,
        learning_starts=0,
        train_freq=1,
        batch_size=1,
        policy_kwargs={"net_arch": [2]},
        seed=0,
        device="cpu",
    )
    with pytest.warns(UserWarning, match="PERDQN") as caught:
        model.learn(1010)
    assert len(caught) == 1


# --- beta ---


def test_anneal_beta_goes_up_to_1_and_stays() -> None:
    buffer = make(4, n_adds=4, beta=0.4, beta_increment=0.25)
    seen = []
    for _ in range(4):
        buffer.anneal_beta()
        seen.append(buffer.beta)
    assert seen == [0.65, 0.9, 1.0, 1.0]
    constant = make(4, beta=0.4)
    constant.anneal_beta()
    assert constant.beta == 0.4


def test_beta_takes_effect_in_the_next_batch() -> None:
    buffer = make(2, n_adds=2, beta=0.0, beta_increment=0.5)
    buffer.update_priorities([0, 1], [1.0, 4.0])
    expected = {0.0: [1.0], 0.5: [0.5, 1.0], 1.0: [0.25, 1.0]}
    for beta, weights in expected.items():
        assert buffer.beta == beta
        assert np.unique(buffer.sample(10).weights).tolist() == weights
        buffer.anneal_beta()


@MEMORY_MODES
@pytest.mark.parametrize("n_steps", [1, 3])
def test_sample_changes_nothing(n_steps: int, memory: dict[str, Any]) -> None:
    buffer = make(6, n_adds=8, beta_increment=0.1, n_steps=n_steps, **memory)
    buffer.update_priorities(range(6), SPREAD)
    before = state_of(buffer)
    for batch_size in (1, 7, 32):
        buffer.sample(batch_size)
    assert state_of(buffer) == before


# --- random numbers ---


def test_the_global_numpy_seed_decides_what_is_drawn() -> None:
    buffer = make(60, n_adds=20, n_envs=3)
    buffer.update_priorities(range(60), np.tile(SPREAD, 10))
    assert_same_batches(buffer, buffer)
    np.random.seed(1)
    one = buffer.sample(32).indices
    assert (buffer.sample(32).indices != one).any()
    np.random.seed(2)
    assert (buffer.sample(32).indices != one).any()


def test_nothing_but_a_draw_touches_the_global_random_numbers() -> None:
    np.random.seed(5)
    before = random_state()
    torch_before = th.get_rng_state()
    buffer = make(12, n_adds=6, n_envs=3, beta_increment=0.1)
    buffer.update_priorities(range(12), np.append(SPREAD, SPREAD))
    buffer.anneal_beta()
    assert buffer.priorities.sum() > buffer.probabilities.sum()
    pickle.loads(pickle.dumps(buffer))
    copy.deepcopy(buffer).reset()
    plain = ReplayBuffer(12, OBSERVATIONS, ACTIONS, "cpu", 3)
    add(plain, 2)
    PrioritizedReplayBuffer.from_replay_buffer(plain)
    assert random_state() == before
    buffer.sample(4)
    assert random_state() != before
    assert th.equal(th.get_rng_state(), torch_before)


# --- pickle ---


@dataclass
class Trip:
    """A way there and back."""

    name: str

    def __call__(self, buffer: PrioritizedReplayBuffer, folder: Path) -> PrioritizedReplayBuffer:
        twin: Any
        if self.name == "deepcopy":
            twin = copy.deepcopy(buffer)
        elif self.name == "SB3's functions":
            save_to_pkl(folder / "replay", buffer)
            twin = load_from_pkl(folder / "replay")
        else:
            twin = pickle.loads(pickle.dumps(buffer, int(self.name)))
        assert type(twin) is type(buffer)
        return twin


@pytest.mark.parametrize("trip", ["2", "5", "deepcopy", "SB3's functions"])
@pytest.mark.parametrize("n_adds", [0, 3, 8, 13])
@pytest.mark.parametrize("n_envs", [1, 3])
@MEMORY_MODES
def test_a_round_trip_brings_everything_back_bit_for_bit(
    tmp_path: Path, memory: dict[str, Any], n_envs: int, n_adds: int, trip: str
) -> None:
    buffer = make(8 * n_envs, n_adds, n_envs, alpha=0.7, eps=1e-3, n_steps=2, **memory)
    buffer.beta_increment, buffer.beta = 0.1, 0.45
    n = buffer.n_transitions
    buffer.update_priorities(range(n), np.random.default_rng(0).exponential(size=n))
    twin = Trip(trip)(buffer, tmp_path)
    assert state_of(twin) == state_of(buffer)
    assert twin.tree.check_valid() == (True, "")
    if n:
        assert_same_batches(buffer, twin)
    # And both go on alike.
    for both in (buffer, twin):
        add(both, 3, first=20)
        both.update_priorities([0, 1], [3.0, 0.5])
        both.anneal_beta()
    assert state_of(twin) == state_of(buffer)
    assert_same_batches(buffer, twin)


def test_a_copy_has_a_tree_of_its_own() -> None:
    buffer = make(4, n_adds=4)
    twin = copy.deepcopy(buffer)
    twin.update_priorities(range(4), [5.0, 6.0, 7.0, 8.0])
    np.testing.assert_array_equal(buffer.priorities, 1.0)


def test_the_pickle_of_a_large_buffer_adds_at_most_9_bytes_a_transition() -> None:
    """Fault 68."""
    n = 1_000_000
    arguments = (n, spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2), "cpu")
    sizes = []
    for kind in (PrioritizedReplayBuffer, ReplayBuffer):
        buffer = kind(*arguments)
        buffer.full = True
        if isinstance(buffer, PrioritizedReplayBuffer):
            buffer.update_priorities(np.arange(n), np.random.default_rng(0).random(n))
        sizes.append(len(pickle.dumps(buffer, pickle.HIGHEST_PROTOCOL)))
    assert sizes[0] <= sizes[1] + 9 * n
    # The measure is of all the arrays.
    assert sizes[1] >= n * (2 * 16 + 8 + 3 * 4)


# --- reset ---


@MEMORY_MODES
def test_a_reset_buffer_is_as_a_new_one(memory: dict[str, Any]) -> None:
    buffer = make(6, n_adds=9, beta=0.7, **memory)
    buffer.update_priorities(range(6), SPREAD)
    buffer.reset()
    assert (buffer.n_transitions, buffer.tree.total, buffer.tree.max_priority) == (0, 0.0, 0.0)
    assert buffer.beta == 0.7
    add(buffer, 2, first=50)
    np.testing.assert_array_equal(leaves(buffer), [1, 1, 0, 0, 0, 0])
    batch = buffer.sample(8)
    assert set(batch.rewards.numpy().ravel()) == {50.0, 51.0}


# --- from_replay_buffer ---


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_adds", [0, 1, 4, 5, 8])
@pytest.mark.parametrize("saving", [False, True])
def test_a_plain_buffer_is_taken_over_with_all_drawable_at_1(
    saving: bool, n_adds: int, n_envs: int
) -> None:
    plain = ReplayBuffer(5 * n_envs, OBSERVATIONS, ACTIONS, "cpu", n_envs, saving, not saving)
    add(plain, n_adds)
    before = arrays_of(plain)
    ours = PrioritizedReplayBuffer.from_replay_buffer(plain, alpha=0.3, beta=0.8)
    assert type(ours) is PrioritizedReplayBuffer
    assert arrays_of(ours) == before
    assert (ours.pos, ours.full, ours.n_envs) == (plain.pos, plain.full, n_envs)
    assert (ours.alpha, ours.beta, ours.eps, ours.n_steps) == (0.3, 0.8, 1e-6, 1)
    assert ours.handle_timeout_termination is not saving
    expected = np.zeros((5, n_envs))
    expected[: min(n_adds, 5)] = 1.0
    if saving and n_adds >= 5:
        expected[n_adds % 5] = 0.0
    np.testing.assert_array_equal(leaves(ours), expected.ravel())
    assert ours.tree.check_valid() == (True, "")

    # It goes on like any other.
    add(ours, 2, first=n_adds)
    batch = ours.sample(10 * n_envs)
    np.testing.assert_array_equal(batch.next_observations, batch.observations + 1)
    newest = (ours.pos - 1) % 5 * n_envs
    ours.update_priorities([newest], [1000.0])
    assert ours.priorities[newest] > 7.0


@pytest.mark.parametrize("options", [{}, {"n_steps": 3}, {"n_steps": 3, "gamma": 0.5}], ids=str)
def test_a_plain_n_step_buffer_is_taken_over_with_its_options(options: dict[str, Any]) -> None:
    plain = NStepReplayBuffer(6, OBSERVATIONS, ACTIONS, "cpu", n_steps=3, gamma=0.5)
    add(plain, 8)
    ours = PrioritizedReplayBuffer.from_replay_buffer(plain, **options)
    assert (ours.n_steps, ours.gamma) == (3, 0.5)
    np.testing.assert_array_equal(leaves(ours), 1.0)
    batch = ours.sample(12)
    expected = plain._get_samples(batch.indices)
    for field in expected._fields:
        np.testing.assert_array_equal(getattr(batch, field), getattr(expected, field))


def test_wrong_options_are_refused_when_a_buffer_is_taken_over() -> None:
    plain = ReplayBuffer(6, OBSERVATIONS, ACTIONS, "cpu")
    with pytest.raises(ValueError, match=r"alpha.*-1"):
        PrioritizedReplayBuffer.from_replay_buffer(plain, alpha=-1)
    with pytest.raises(TypeError, match="alhpa"):
        PrioritizedReplayBuffer.from_replay_buffer(plain, alhpa=1.0)


def test_buffers_of_another_kind_are_not_taken_over() -> None:
    space = spaces.Dict({"a": OBSERVATIONS})
    with pytest.raises(ValueError, match="Dict"):
        PrioritizedReplayBuffer.from_replay_buffer(DictReplayBuffer(6, space, ACTIONS, "cpu"))
    rollout: Any = RolloutBuffer(6, OBSERVATIONS, ACTIONS, "cpu")
    with pytest.raises(ValueError, match="RolloutBuffer"):
        PrioritizedReplayBuffer.from_replay_buffer(rollout)


def test_options_count_also_when_a_prioritized_buffer_is_taken_over() -> None:
    # Or the buffer is refused, as one of another kind.
    buffer = make(6, n_adds=3, alpha=0.9, n_steps=3)
    try:
        twin = PrioritizedReplayBuffer.from_replay_buffer(buffer, alpha=0.1, n_steps=2)
    except ValueError:
        return
    assert (twin.alpha, twin.n_steps) == (0.1, 2)


# --- random histories against a plain model ---


@dataclass
class Transition:
    """What was added."""

    serial: int
    obs: int
    next_obs: int
    reward: float
    done: bool
    timeout: bool


class Model:
    """The same buffer as lists, one entry for each transition, straight from the specification."""

    def __init__(self, rows: int, n_envs: int, n_steps: int, saving: bool) -> None:
        self.rows, self.n_envs, self.n_steps, self.saving = rows, n_envs, n_steps, saving
        self.n_rows_added = 0
        self.stored: list[Transition | None] = [None] * (rows * n_envs)
        self.priorities = [0.0] * (rows * n_envs)

    def row(self, row: int) -> range:
        return range(row * self.n_envs, (row + 1) * self.n_envs)

    @property
    def pos(self) -> int:
        return self.n_rows_added % self.rows

    @property
    def n_stored(self) -> int:
        return min(self.n_rows_added, self.rows) * self.n_envs

    @property
    def without_next(self) -> range:
        """Places that can't be drawn though something is stored there."""
        return self.row(self.pos) if self.saving and self.n_rows_added >= self.rows else range(0)

    def add(self, transitions: list[Transition]) -> None:
        largest = max(self.priorities) or 1.0
        for place, transition in zip(self.row(self.pos), transitions, strict=True):
            self.stored[place] = transition
            self.priorities[place] = largest
        self.n_rows_added += 1
        for place in self.without_next:
            self.priorities[place] = 0.0

    def expected(self, place: int) -> tuple[float, float, float, float, float | None]:
        """Observation, return, next observation (-1: any), done, discount."""
        row, env = divmod(place, self.n_envs)
        first = self.stored[place]
        assert first is not None
        last, total, discount = first, first.reward, 0.5
        for _ in range(self.n_steps - 1):
            if last.done or last.timeout or row == (self.pos - 1) % self.rows:
                break
            row = (row + 1) % self.rows
            following = self.stored[row * self.n_envs + env]
            assert following is not None
            last, total, discount = following, total + discount * following.reward, discount / 2
        terminated = last.done and not last.timeout
        next_obs = -1 if self.saving and terminated else last.next_obs
        discounts = None if self.n_steps == 1 else discount
        return first.obs, total, next_obs, float(terminated), discounts


class History:
    """Does the same to a buffer and to the model."""

    def __init__(
        self,
        rows: int,
        n_envs: int,
        n_steps: int,
        mode: str,
        shape: tuple[int, ...],
        alpha: float,
        eps: float,
        normalization: Any,
    ) -> None:
        saving = mode == "saving"
        self.shape, self.has_dict = shape, mode == "dict"
        box = spaces.Box(-np.inf, np.inf, shape, np.float64)
        kind = PrioritizedDictReplayBuffer if self.has_dict else PrioritizedReplayBuffer
        self.buffer = kind(
            rows * n_envs,
            spaces.Dict({"here": box}) if self.has_dict else box,
            ACTIONS,
            "cpu",
            n_envs,
            saving,
            not saving,
            alpha=alpha,
            eps=eps,
            n_steps=n_steps,
            gamma=0.5,
            weight_normalization=normalization,
        )
        self.model = Model(rows, n_envs, n_steps, saving)
        self.serial = 0
        self.observations = [0] * n_envs
        # Indices of the latest batch
        self.latest: Array | None = None

    def observe(self, values: list[int]) -> Any:
        """Observations of the environments, full of one value each."""
        array = np.multiply.outer(np.array(values, np.float64), np.ones(self.shape))
        return {"here": array} if self.has_dict else array

    def observed(self, observations: Any, at: int) -> float:
        """The value that one observation of a batch is full of."""
        array = (observations["here"] if self.has_dict else observations)[at].numpy()
        assert array.shape == self.shape
        assert (array == array.flat[0]).all()
        return float(array.flat[0])

    def random_errors(self, rng: np.random.Generator, n: int) -> FloatArray:
        errors: FloatArray = rng.lognormal(0.0, 2.0, n) * rng.choice([-1.0, 1.0], n)
        errors[rng.random(n) < 0.2] = 0.0
        return errors

    def expect(self, places: list[int], errors: FloatArray) -> None:
        for place, error in zip(places, errors.tolist(), strict=True):
            if place not in self.model.without_next:
                priority = math.pow(abs(error) + self.buffer.eps, self.buffer.alpha)
                self.model.priorities[place] = priority

    def add(self, rng: np.random.Generator) -> None:
        transitions = []
        for env in range(self.model.n_envs):
            self.serial += 1
            terminated, truncated = (rng.random(2) < 0.3).tolist()
            done = terminated or truncated
            # As in SB3's vectorized envs; a buffer that saves memory takes any end for the end
            timeout = truncated and not terminated and not self.model.saving
            obs, next_obs = self.observations[env], 2 * self.serial
            reward = float(rng.integers(-8, 9))
            transitions.append(Transition(self.serial, obs, next_obs, reward, done, timeout))
            self.observations[env] = next_obs + 1 if done else next_obs
        self.buffer.add(
            self.observe([t.obs for t in transitions]),
            self.observe([t.next_obs for t in transitions]),
            np.zeros(self.model.n_envs, dtype=np.int64),
            np.array([t.reward for t in transitions]),
            np.array([t.done for t in transitions]),
            [{"TimeLimit.truncated": t.timeout} for t in transitions],
        )
        self.model.add(transitions)

    def sample(self, rng: np.random.Generator) -> None:
        model, batch_size = self.model, int(rng.integers(1, 10))
        if not any(model.priorities):
            word = "eps" if model.n_stored > len(model.without_next) else "empty|no next"
            with refused(self.buffer, word):
                self.buffer.sample(batch_size)
            return
        before = state_of(self.buffer)
        batch = self.buffer.sample(batch_size)
        assert state_of(self.buffer) == before
        places = batch.indices.tolist()
        assert len(places) == batch_size
        assert all(model.priorities[place] > 0.0 for place in places)
        discounts = [None] * batch_size if batch.discounts is None else batch.discounts.numpy()
        for at, place in enumerate(places):
            obs, total, next_obs, done, discount = model.expected(place)
            assert self.observed(batch.observations, at) == obs
            assert batch.rewards[at].item() == total
            assert next_obs in (self.observed(batch.next_observations, at), -1)
            assert batch.dones[at].item() == done
            assert discounts[at] == discount
        weights = batch.weights.numpy()
        assert (weights >= 0.0).all()
        assert (weights <= 1.0).all()
        self.latest = batch.indices

    def update_the_latest_batch(self, rng: np.random.Generator) -> None:
        if self.latest is None:
            return
        errors = self.random_errors(rng, len(self.latest))
        self.buffer.update_priorities(self.latest, errors)
        self.expect(self.latest.tolist(), errors)

    def update_anything_stored(self, rng: np.random.Generator) -> None:
        if self.model.n_stored == 0:
            return
        n = int(rng.integers(0, 7))
        indices = rng.integers(0, self.model.n_stored, n).astype(np.int32)
        errors = self.random_errors(rng, n)
        self.buffer.update_priorities(indices, th.tensor(errors[:, None]))
        self.expect(indices.tolist(), errors)

    def update_that_is_refused(self, rng: np.random.Generator) -> None:
        good = rng.integers(0, max(self.model.n_stored, 1), 3)
        bad_errors, bad_places = rng.random(3), good.copy()
        bad_errors[rng.integers(3)] = rng.choice(
            [math.nan, math.inf, -math.inf, sys.float_info.max]
        )
        bad_places[rng.integers(3)] = rng.choice([-1, self.model.n_stored, 99])
        with refused(self.buffer, error=IndexError):
            self.buffer.update_priorities(bad_places, rng.random(3))
        if self.model.n_stored and self.buffer.alpha == 1.0:
            with refused(self.buffer):
                self.buffer.update_priorities(good, bad_errors)

    def change_options(self, rng: np.random.Generator) -> None:
        self.buffer.alpha = rng.choice([0.0, 0.5, 1.0])
        self.buffer.eps = rng.choice([0.0, 0.01])

    def reset(self, rng: np.random.Generator) -> None:
        self.buffer.reset()
        model = self.model
        self.model = Model(model.rows, model.n_envs, model.n_steps, model.saving)
        self.latest = None

    def round_trip(self, rng: np.random.Generator) -> None:
        twin = pickle.loads(pickle.dumps(self.buffer))
        assert state_of(twin) == state_of(self.buffer)
        self.buffer = twin
        self.latest = None

    def check(self) -> None:
        model, buffer, tree = self.model, self.buffer, self.buffer.tree
        assert tree.check_valid() == (True, "")
        n = model.n_stored
        assert (buffer.pos, buffer.n_transitions) == (model.pos, n)
        np.testing.assert_allclose(leaves(buffer), model.priorities, rtol=1e-12)
        np.testing.assert_array_equal(buffer.priorities, leaves(buffer)[:n])
        assert tree.max_priority == leaves(buffer).max()
        if tree.total > 0.0:
            assert buffer.probabilities.sum() == pytest.approx(1.0)
        else:
            np.testing.assert_array_equal(buffer.probabilities, np.zeros(n))


def play(options: dict[str, Any], start: int, operations: list[tuple[str, int]]) -> None:
    """A history; each number seeds the details of an operation."""
    history = History(**options)
    rng = np.random.default_rng(start)
    for _ in range(start):
        history.add(rng)
    history.check()
    for name, seed in operations:
        getattr(history, name)(np.random.default_rng(seed))
        history.check()


HISTORIES: dict[str, st.SearchStrategy[Any]] = {
    "options": st.fixed_dictionaries(
        {
            "rows": st.integers(1, 6),
            "n_envs": st.integers(1, 3),
            "n_steps": st.integers(1, 4),
            "mode": st.sampled_from(["plain", "saving", "dict"]),
            "shape": st.sampled_from([(1,), (2, 3)]),
            "alpha": st.sampled_from([0.0, 0.5, 0.6, 1.0]),
            "eps": st.sampled_from([0.0, 1e-6, 0.1]),
            "normalization": st.sampled_from(["batch", "buffer"]),
        }
    ),
    "start": st.integers(0, 9),
    "operations": st.lists(
        st.tuples(
            st.sampled_from(
                ["add"] * 5
                + ["sample"] * 4
                + ["update_the_latest_batch"] * 3
                + ["update_anything_stored"] * 3
                + ["update_that_is_refused", "change_options", "round_trip", "reset"]
            ),
            st.integers(0, 2**32 - 1),
        ),
        min_size=20,
        max_size=30,
    ),
}
# The same histories in every run, and no files
REPEATABLE = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
)


@REPEATABLE
@given(**HISTORIES)
def test_random_histories_match_a_plain_model(
    options: dict[str, Any], start: int, operations: list[tuple[str, int]]
) -> None:
    play(options, start, operations)


@pytest.mark.slow
@settings(REPEATABLE, max_examples=2000)
@given(**HISTORIES)
def test_thousands_of_random_histories_match_a_plain_model(
    options: dict[str, Any], start: int, operations: list[tuple[str, int]]
) -> None:
    play(options, start, operations)


@pytest.mark.parametrize(
    "fault",
    [
        "forgets the overwritten one",
        "maximum never comes down",
        "row of position before add",
        "errors wake what has no next observation",
        "return past the newest row",
        "zero mass stays",
        "steps to the next env",
    ],
)
def test_the_histories_find_broken_twins_out(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kind = PrioritizedReplayBuffer
    add_right, step_right = kind.add, kind._n_step_returns

    def add_after_clearing(self: PrioritizedReplayBuffer, *args: Any) -> None:
        start = self.pos * self.n_envs
        self.tree.fill(start, start + self.n_envs, 0.0)
        add_right(self, *args)

    def add_at_the_highest_ever(self: Any, *args: Any) -> None:
        start = self.pos * self.n_envs
        self.highest = max(getattr(self, "highest", 0.0), self.tree.max_priority or 1.0)
        add_right(self, *args)
        self.tree.fill(start, start + self.n_envs, self.highest)

    def add_one_row_further(self: PrioritizedReplayBuffer, *args: Any) -> None:
        add_right(self, *args)
        start = self.pos * self.n_envs
        self.tree.fill(start, start + self.n_envs, self.tree.max_priority)

    def add_without_zero(self: PrioritizedReplayBuffer, *args: Any) -> None:
        oldest = (self.pos + 1) % self.buffer_size * self.n_envs
        kept = self.tree[oldest : oldest + self.n_envs]
        add_right(self, *args)
        self.tree.update(np.arange(oldest, oldest + self.n_envs), kept)

    def steps_past_the_newest(self: PrioritizedReplayBuffer, *args: Any) -> Any:
        position, self.pos = self.pos, self.pos + 1
        try:
            return step_right(self, *args)
        finally:
            self.pos = position

    def steps_to_the_next_env(self: Any, indices: Any, env: Any) -> Any:
        # Rewards of the environments mixed up
        rewards = self.rewards
        self.rewards = np.roll(rewards, 1, axis=1)
        try:
            return step_right(self, indices, env)
        finally:
            self.rewards = rewards

    twins: dict[str, tuple[str, Any]] = {
        "forgets the overwritten one": ("add", add_after_clearing),
        "maximum never comes down": ("add", add_at_the_highest_ever),
        "row of position before add": ("add", add_one_row_further),
        "errors wake what has no next observation": ("_is_drawable", lambda *args: None),
        "return past the newest row": ("_n_step_returns", steps_past_the_newest),
        "zero mass stays": ("add", add_without_zero),
        "steps to the next env": ("_n_step_returns", steps_to_the_next_env),
    }
    name, twin = twins[fault]
    monkeypatch.setattr(kind, name, twin)
    # No need to shrink what is found
    quick = settings(REPEATABLE, phases=[Phase.generate], max_examples=300)
    with pytest.raises((AssertionError, IndexError)):
        quick(given(**HISTORIES)(play))()
