"""Priorities: those of new transitions, and what `update_priorities` makes of TD errors."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th

from buffer_helpers import (
    SAVING,
    Array,
    add_rows,
    leaves_of,
    make_buffer,
    refused,
    state_of,
)

# --- new transitions


@pytest.mark.parametrize("n_envs", [1, 3])
def test_the_first_transitions_get_1(n_envs: int) -> None:
    buffer = make_buffer(4 * n_envs, n_envs=n_envs)
    assert buffer.priorities.shape == buffer.probabilities.shape == (0,)
    for k in range(1, 4):
        add_rows(buffer)
        np.testing.assert_array_equal(buffer.priorities, np.ones(k * n_envs))
        np.testing.assert_array_equal(leaves_of(buffer)[k * n_envs :], 0.0)
        np.testing.assert_allclose(buffer.probabilities, np.full(k * n_envs, 1 / k / n_envs))


def test_a_new_transition_gets_the_largest_priority() -> None:
    buffer = make_buffer(8, n_adds=4)
    buffer.update_priorities([0, 1, 2, 3], [50.0, 10.0, 10.0, 10.0])
    add_rows(buffer)
    np.testing.assert_array_equal(buffer.priorities, [50, 10, 10, 10, 50])
    np.testing.assert_allclose(buffer.probabilities[4], 50 / 130)


def test_the_largest_priority_counts_also_when_it_is_below_1() -> None:
    buffer = make_buffer(8, n_adds=4)
    buffer.update_priorities([0, 1, 2, 3], [1e-3, 2e-3, 1e-4, 1e-3])
    add_rows(buffer)
    assert buffer.priorities[4] == 2e-3


def test_the_transition_being_overwritten_counts_in_the_largest_priority() -> None:
    buffer = make_buffer(4, n_adds=4)
    buffer.update_priorities([0, 1, 2, 3], [9.0, 1.0, 1.0, 1.0])
    add_rows(buffer)
    np.testing.assert_array_equal(buffer.priorities, [9, 1, 1, 1])
    # Of all envs that are overwritten
    buffer = make_buffer(6, n_adds=3, n_envs=2)
    buffer.update_priorities(range(6), [2.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    add_rows(buffer)
    np.testing.assert_array_equal(buffer.priorities, [9, 9, 1, 1, 1, 1])


def test_the_maximum_falls_when_the_last_heir_of_an_outlier_was_replayed() -> None:
    buffer = make_buffer(4, n_adds=4)
    buffer.update_priorities([0, 1, 2, 3], [1.0, 1000.0, 1.0, 1.0])
    buffer.update_priorities([1], [1.5])
    assert buffer.tree.max_priority == 1.5
    add_rows(buffer, 3)
    np.testing.assert_array_equal(buffer.priorities, [1.5, 1.5, 1.5, 1.0])
    # An overwritten outlier passes its priority on, and the update of the heir is the end of it.
    buffer.update_priorities([3], [1000.0])
    add_rows(buffer)
    assert buffer.priorities[3] == 1000.0
    buffer.update_priorities([3], [0.25])
    assert buffer.tree.max_priority == 1.5


def test_alpha_is_applied_once_to_a_new_transition() -> None:
    buffer = make_buffer(4, n_adds=2, alpha=0.5)
    buffer.update_priorities([0, 1], [16.0, 4.0])
    add_rows(buffer)
    np.testing.assert_array_equal(buffer.priorities, [4.0, 2.0, 4.0])


def test_a_new_transition_gets_1_when_no_other_has_any_mass() -> None:
    buffer = make_buffer(4, n_adds=2)
    buffer.update_priorities([0, 1], [0.0, 0.0])
    add_rows(buffer)
    np.testing.assert_array_equal(buffer.priorities, [0.0, 0.0, 1.0])


def test_priorities_stay_with_their_transitions_when_the_ring_goes_round() -> None:
    buffer = make_buffer(9, n_adds=3, n_envs=3)
    buffer.update_priorities(range(9), np.arange(1.0, 10.0))
    add_rows(buffer, 1, first=3)
    np.testing.assert_array_equal(leaves_of(buffer), [9, 9, 9, 4, 5, 6, 7, 8, 9])
    batch = buffer.sample(300)
    expected = np.array([9, 10, 11, 3, 4, 5, 6, 7, 8])
    np.testing.assert_array_equal(batch.rewards.numpy().ravel(), expected[batch.indices])
    assert set(batch.indices.tolist()) == set(range(9))


def test_add_that_fails_changes_no_priority() -> None:
    buffer = make_buffer(4, n_adds=3)
    before = leaves_of(buffer)
    zeros = np.zeros((1, 2))
    with pytest.raises(ValueError, match="reshape"):
        buffer.add(zeros, zeros, np.zeros(5), np.zeros(1), np.zeros(1), [{}])
    assert buffer.pos == 3
    np.testing.assert_array_equal(leaves_of(buffer), before)


def test_extend_adds_one_after_the_other() -> None:
    buffer = make_buffer(4)
    observations = np.arange(6.0).reshape(3, 1, 2)
    zeros = np.zeros((3, 1))
    buffer.extend(observations, observations, zeros, zeros, zeros, [[{}]] * 3)
    np.testing.assert_array_equal(leaves_of(buffer), [1, 1, 1, 0])
    np.testing.assert_array_equal(buffer.observations[:3], observations)


def test_which_transitions_are_new_through_the_whole_life_of_a_buffer() -> None:
    buffer = make_buffer(6, n_envs=2)

    def new_after(n_adds: int) -> list[int]:
        add_rows(buffer, n_adds)
        return [int(index) for index in buffer.new_transitions()]

    assert new_after(0) == []
    assert new_after(2) == [0, 1, 2, 3]
    buffer.forget_new()
    # Oldest first, over the end of the buffer of three rows
    assert new_after(2) == [4, 5, 0, 1]
    assert new_after(5) == [0, 1, 2, 3, 4, 5]
    buffer.reset()
    assert new_after(0) == []
    assert new_after(1) == [0, 1]


# --- updates


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.01, 10.0])
def test_a_priority_is_error_plus_eps_to_the_power_of_alpha(eps: float, alpha: float) -> None:
    errors = [0.0, -0.0, 1e-9, -3.0, 3.0, 0.5, -1e5]
    buffer = make_buffer(8, n_adds=7, alpha=alpha, eps=eps)
    buffer.update_priorities(range(7), errors)
    expected = [math.pow(abs(error) + eps, alpha) for error in errors]
    np.testing.assert_allclose(buffer.priorities, expected, rtol=1e-14)
    assert buffer.tree.max_priority == buffer.priorities.max()
    assert buffer.tree.check_valid() == (True, "")


def test_eps_is_inside_the_power() -> None:
    buffer = make_buffer(4, n_adds=1, alpha=0.5, eps=0.01)
    buffer.update_priorities([0], [0.0])
    assert buffer.priorities[0] == pytest.approx(0.1)


@pytest.mark.parametrize("form", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("alpha", "eps"), [(55.0, 1e-6), (1e6, 0.5), (1.0, 5e-324)])
def test_no_leaf_underflows_to_zero_while_eps_is_above_it(
    alpha: float, eps: float, form: Any
) -> None:
    """Both ways through: that for arrays of float32, and that for anything else."""
    buffer = make_buffer(4, n_adds=2, alpha=alpha, eps=eps)
    buffer.update_priorities(np.arange(2), np.zeros(2, form))
    assert (buffer.priorities > 0.0).all()
    assert (buffer.priorities < 1e-300).all()
    assert set(buffer.sample(8).indices.tolist()) == {0, 1}
    np.testing.assert_array_equal(buffer.sample(8).weights, 1.0)


@pytest.mark.parametrize("form", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("alpha", [0.5, 55.0])
def test_without_eps_an_error_of_zero_has_no_mass(alpha: float, form: Any) -> None:
    buffer = make_buffer(4, n_adds=2, alpha=alpha)
    buffer.update_priorities(np.arange(2), np.array([0.0, 1e-30], form))
    assert buffer.priorities[0] == 0.0 < buffer.priorities[1]
    assert set(buffer.sample(8).indices.tolist()) == {1}


def test_no_error_is_clipped_rounded_or_tied() -> None:
    buffer = make_buffer(4, n_adds=3)
    buffer.update_priorities([0, 1, 2], [2.7, 20.0, 1e9])
    np.testing.assert_array_equal(buffer.priorities, [2.7, 20.0, 1e9])
    buffer = make_buffer(4, n_adds=2, alpha=0.5)
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
    buffer = make_buffer(8, n_adds=5)
    buffer.update_priorities([4, 0, 2], ERRORS[form])
    np.testing.assert_array_equal(buffer.priorities, [2.0, 1.0, 0.5, 1.0, 1.0])


@pytest.mark.parametrize("form", INDICES)
def test_indices_may_come_in_any_form(form: str) -> None:
    indices = range(4, -1, -2) if form == "range" else INDICES[form]
    errors = [-1.0, 0.5, 2.0] if form == "range" else VALUES
    buffer = make_buffer(8, n_adds=5)
    buffer.update_priorities(indices, errors)
    np.testing.assert_array_equal(buffer.priorities, [2.0, 1.0, 0.5, 1.0, 1.0])


def test_an_error_is_read_in_its_own_precision() -> None:
    buffer = make_buffer(8, n_adds=3)
    buffer.update_priorities([0, 1, 2], np.full(3, 0.1, np.float32))
    assert buffer.priorities[0] == float(np.float32(0.1))
    buffer.update_priorities([0, 1, 2], th.full((3,), 0.1, dtype=th.float64))
    assert buffer.priorities[0] == 0.1
    # What float32 can't hold
    buffer.update_priorities([0, 1, 2], th.full((3,), 1e-300, dtype=th.float64))
    assert buffer.priorities[0] == 1e-300


def test_the_last_error_of_a_repeated_index_counts() -> None:
    buffer = make_buffer(4, n_adds=3)
    buffer.update_priorities([1, 2, 1, 1], [9.0, 5.0, 8.0, 3.0])
    np.testing.assert_array_equal(buffer.priorities, [1.0, 3.0, 5.0])
    assert buffer.tree.max_priority == 5.0


def test_an_update_of_nothing_changes_nothing() -> None:
    buffer = make_buffer(4, n_adds=3)
    before = state_of(buffer)
    buffer.update_priorities([], [])
    buffer.update_priorities(np.empty(0, dtype=np.int64), th.empty(0, 1))
    assert state_of(buffer) == before


@pytest.mark.parametrize("n_envs", [1, 3])
def test_the_indices_of_a_batch_name_its_transitions(n_envs: int) -> None:
    buffer = make_buffer(4 * n_envs, n_adds=5, n_envs=n_envs)
    batch = buffer.sample(8 * n_envs)
    assert (batch.indices.dtype, batch.indices.shape) == (np.dtype(np.int64), (8 * n_envs,))
    buffer.update_priorities(batch.indices, batch.rewards)
    rewards = np.concatenate([np.arange(4 * n_envs, 5 * n_envs), np.arange(n_envs, 4 * n_envs)])
    np.testing.assert_array_equal(buffer.priorities, rewards)


def test_changed_alpha_and_eps_apply_to_later_updates_alone() -> None:
    buffer = make_buffer(4, n_adds=3)
    buffer.update_priorities([0, 1, 2], [4.0, 9.0, 16.0])
    buffer.alpha, buffer.eps = 0.5, 9.0
    np.testing.assert_array_equal(buffer.priorities, [4.0, 9.0, 16.0])
    buffer.update_priorities([0], [16.0])
    np.testing.assert_array_equal(buffer.priorities, [5.0, 9.0, 16.0])


# --- updates that are refused


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(
    "index",
    [-1, -8, 5, 8, 9, 10**6, -(2**63), 2**63 - 1, np.uint64(2**63), np.uint64(2**64 - 1)],
)
def test_indices_outside_the_stored_transitions_are_refused(index: Any, n_envs: int) -> None:
    buffer = make_buffer(8 * n_envs, n_adds=5, n_envs=n_envs)
    if 5 <= index <= 9:
        index = index * n_envs
    message = rf"\b{index}\b" if index >= 0 else re.escape(str(index))
    for indices in (index, [index], np.array([0, index], dtype=np.asarray(index).dtype)):
        with refused(buffer, message, IndexError):
            buffer.update_priorities(indices, np.full(np.size(indices), 7.0))


def test_the_first_index_past_the_stored_transitions_follows_what_is_stored() -> None:
    buffer = make_buffer(8, n_adds=5)
    buffer.update_priorities([4], [7.0])
    add_rows(buffer)
    buffer.update_priorities([5], [7.0])
    add_rows(buffer, 3)
    with refused(buffer, r"\b8\b", IndexError):
        buffer.update_priorities([8], [7.0])


def test_an_empty_buffer_has_no_index() -> None:
    buffer = make_buffer(8)
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
    buffer = make_buffer(8, n_adds=5)
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
    buffer = make_buffer(8, n_adds=5)
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
    buffer = make_buffer(8, n_adds=5, alpha=alpha, eps=eps)
    with refused(buffer, rf"TD error {re.escape(str(error))} of transition 3\b"):
        buffer.update_priorities([0, 3, 1], [0.0, error, 0.0])


def test_the_largest_priorities_allowed_have_a_finite_sum() -> None:
    buffer = make_buffer(8, n_adds=8)
    limit = buffer.tree.priority_limit
    buffer.update_priorities(range(8), np.full(8, limit))
    add_rows(buffer, 9)
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
    buffer = make_buffer(8, n_adds=5)
    shape = re.escape(str(tuple(np.shape(errors))))
    for indices in ([0, 1, 2], np.arange(3), th.arange(3)):
        with refused(buffer, f"3 indices.*{shape}"):
            buffer.update_priorities(indices, errors)


@pytest.mark.parametrize("shape", [(1, 3), (3, 3), (3, 1, 1)])
def test_indices_in_a_table_are_refused(shape: tuple[int, ...]) -> None:
    buffer = make_buffer(8, n_adds=5)
    with refused(buffer, re.escape(str(shape))):
        buffer.update_priorities(np.ones(shape, dtype=np.int64), np.ones(3))


def test_one_wrong_value_among_right_ones_changes_none() -> None:
    buffer = make_buffer(8, n_adds=5)
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
    buffer = make_buffer(8, n_adds=5)
    with refused(buffer, error=(TypeError, ValueError)):
        buffer.update_priorities([0, 1], errors)


@pytest.mark.skipif(
    np.finfo(np.longdouble).max == np.finfo(np.float64).max, reason="no wider float"
)
def test_an_error_beyond_float64_is_refused_without_a_warning_of_numpy() -> None:
    buffer = make_buffer(8, n_adds=5)
    with refused(buffer, "transition 1"):
        buffer.update_priorities([0, 1], np.array([1, np.longdouble("1e400")]))


# --- errors that come late


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("n_adds", [0, 1, 5])
def test_an_index_stands_for_a_place(n_adds: int, n_envs: int) -> None:
    """A late error counts for the transition that is stored there by then."""
    buffer = make_buffer(4 * n_envs, 6, n_envs)
    earlier, latest = buffer.sample(8 * n_envs), buffer.sample(8 * n_envs)
    assert len(np.unique(latest.indices)) == 4 * n_envs
    add_rows(buffer, n_adds)
    for error, indices in enumerate((earlier.indices, latest.indices, latest.indices.copy()), 2):
        buffer.update_priorities(indices, np.full(8 * n_envs, error))
        np.testing.assert_array_equal(buffer.priorities, np.full(4 * n_envs, error))
    assert buffer.tree.check_valid() == (True, "")


def test_late_errors_are_checked_whether_or_not_they_count() -> None:
    buffer = make_buffer(4, n_adds=4)
    batch = buffer.sample(4)
    add_rows(buffer, 4)
    with refused(buffer, "nan"):
        buffer.update_priorities(batch.indices, [1.0, 1.0, math.nan, 1.0])
    with refused(buffer, "1e[+]308"):
        buffer.update_priorities(batch.indices, [1.0, 1.0, 1e308, 1.0])


def test_late_errors_in_a_buffer_that_saves_memory() -> None:
    buffer = make_buffer(5, n_adds=5, **SAVING)
    batch = buffer.sample(8)
    assert set(batch.indices.tolist()) == {1, 2, 3, 4}
    add_rows(buffer, 2)  # rows 0 and 1; row 2 loses its next observation
    buffer.update_priorities(batch.indices, np.full(8, 7.0))
    np.testing.assert_array_equal(buffer.priorities, [1.0, 7.0, 0.0, 7.0, 7.0])


def test_late_errors_of_a_batch_drawn_before_a_reset() -> None:
    buffer = make_buffer(4, n_adds=4)
    batch = buffer.sample(4)
    buffer.reset()
    add_rows(buffer, 3)
    with refused(buffer, r"\b3\b", IndexError):
        buffer.update_priorities(batch.indices, [7.0, 7.0, 7.0, 7.0])
    add_rows(buffer)
    buffer.update_priorities(batch.indices, [7.0, 7.0, 7.0, 7.0])
    np.testing.assert_array_equal(buffer.priorities, 7.0)
