"""SumTree against a plain list, at its edges, in what it takes and in what it refuses."""

import bisect
import copy
import itertools
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sb3_per import SumTree
from sb3_per.trees import sum_tree

FloatArray = npt.NDArray[np.float64]

BELOW_ONE = math.nextafter(1.0, 0.0)
TINY = 5e-324  # the smallest float64 above zero
CAPACITIES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 128, 129, 300, 520)
# Sums of 300 of these stay finite, and no two neighbours in size matter beside each other
MAGNITUDES = (0.0, TINY, 3e-310, 1e-300, 1e-16, 1.0, 1.5, 1e16, 1e300)


class NaiveSumTree:
    """What a SumTree does, as a plain list: slow, and too short to be wrong."""

    def __init__(self, capacity: int) -> None:
        self.leaves = [0.0] * capacity

    def update(self, indices: Sequence[int], priorities: Sequence[float]) -> None:
        for index, priority in zip(indices, priorities, strict=True):
            self.leaves[index] = priority

    @property
    def total(self) -> float:
        return math.fsum(self.leaves)

    @property
    def max_priority(self) -> float:
        return max(self.leaves)

    @property
    def min_priority(self) -> float:
        return min((leaf for leaf in self.leaves if leaf > 0.0), default=math.inf)

    def ends(self) -> list[float]:
        """Where the interval of each leaf ends, and the next one begins."""
        return list(itertools.accumulate(self.leaves))

    def get_leaf(self, value: float) -> int:
        """The first leaf whose interval ends after ``value``; exact if the sums are."""
        index = bisect.bisect_right(self.ends(), value)
        if index == len(self.leaves):
            return max(i for i, leaf in enumerate(self.leaves) if leaf > 0.0)
        return index


def tree_of(leaves: Sequence[float] | FloatArray) -> SumTree:
    tree = SumTree(len(leaves))
    tree.update(np.arange(len(leaves)), leaves)
    return tree


def snapshot(tree: SumTree) -> tuple[bytes, float, float, float]:
    return tree[:].tobytes(), tree.total, tree.max_priority, tree.min_priority


def assert_valid(tree: SumTree) -> None:
    valid, message = tree.check_valid()
    assert valid, message
    assert message == ""


def assert_same(tree: SumTree, naive: NaiveSumTree) -> None:
    """The tree holds the leaves of the list, and nothing of the history that led to them."""
    assert_valid(tree)
    assert tree[:].tolist() == naive.leaves
    assert tree.max_priority == naive.max_priority
    assert tree.min_priority == naive.min_priority
    assert tree.total == pytest.approx(naive.total, rel=1e-14, abs=0.0)
    assert tree.total == tree_of(naive.leaves).total


def drawn_at(tree: SumTree, place: float, batch_size: int) -> tuple[Any, FloatArray]:
    """A draw where every random number is ``place``."""
    with mock.patch.object(np.random, "random_sample", lambda size: np.full(size, place)):
        return tree.sample(batch_size)


# --- random operations ---

priorities_ = st.one_of(
    st.sampled_from(MAGNITUDES),
    st.floats(0.0, 1e300),
    st.integers(0, 9).map(float),
)
places_ = st.integers(0, 10**6)  # modulo the capacity
entries_ = st.lists(st.tuples(places_, priorities_), max_size=20)


class TreeAgainstList(RuleBasedStateMachine):
    """The same random operations on a SumTree and on a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = SumTree(1)
        self.naive = NaiveSumTree(1)

    def has_mass(self) -> bool:
        return self.naive.max_priority > 0.0

    @property
    def capacity(self) -> int:
        return len(self.naive.leaves)

    @initialize(
        capacity=st.one_of(st.sampled_from(CAPACITIES), st.integers(1, 300)),
        full=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def create(self, capacity: int, full: bool, seed: int) -> None:
        self.tree = SumTree(capacity)
        self.naive = NaiveSumTree(capacity)
        if full:
            rng = np.random.default_rng(seed)
            leaves = np.abs(rng.standard_cauchy(capacity)) * rng.integers(0, 2, capacity)
            self.tree.update(range(capacity), leaves)
            self.naive.update(range(capacity), leaves.tolist())

    @rule(entries=entries_)
    def update(self, entries: list[tuple[int, float]]) -> None:
        indices = [place % self.capacity for place, _ in entries]
        priorities = [priority for _, priority in entries]
        self.tree.update(indices, priorities)
        self.naive.update(indices, priorities)

    @rule(place=places_, priority=priorities_)
    def update_one(self, place: int, priority: float) -> None:
        self.tree.update(place % self.capacity, priority)
        self.naive.update([place % self.capacity], [priority])

    @rule(places=st.lists(places_, max_size=20), priority=priorities_)
    def update_with_one_priority_for_all(self, places: list[int], priority: float) -> None:
        indices = [place % self.capacity for place in places]
        self.tree.update(np.array(indices), priority)
        self.naive.update(indices, [priority] * len(indices))

    @rule(ends=st.tuples(places_, places_), priority=priorities_)
    def fill(self, ends: tuple[int, int], priority: float) -> None:
        start, last = sorted(end % self.capacity for end in ends)
        self.tree.fill(start, last + 1, priority)
        self.naive.update(range(start, last + 1), [priority] * (last + 1 - start))

    @precondition(has_mass)
    @rule(
        place=st.one_of(st.sampled_from((0.0, BELOW_ONE)), st.floats(0.0, BELOW_ONE)),
        batch_size=st.integers(1, 40),
        priority=priorities_,
    )
    def sample_and_update(self, place: float, batch_size: int, priority: float) -> None:
        indices, priorities = drawn_at(self.tree, place, batch_size)
        assert indices.tolist() == sorted(indices.tolist())
        assert priorities.tolist() == [self.naive.leaves[i] for i in indices]
        assert min(priorities) > 0.0
        self.tree.update(indices, priority)
        self.naive.update(indices, [priority] * batch_size)

    @precondition(has_mass)
    @rule(place=places_)
    def get_leaf_near_the_ends_of_an_interval(self, place: int) -> None:
        leaves, ends, total = self.naive.leaves, [0.0, *self.naive.ends()], self.tree.total
        end = min(ends[place % (self.capacity + 1)], total)
        values = [0.0, math.nextafter(end, 0.0), end, math.nextafter(end, math.inf), total]
        values = [min(value, total) for value in values]
        indices, priorities = self.tree.get_leaf(values)
        assert priorities.tolist() == [leaves[i] for i in indices]
        assert min(priorities) > 0.0
        # Only as near as the order of the additions allows
        slack = 1e-13 * total
        for value, index in zip(values, indices, strict=True):
            assert ends[index] - slack <= value <= ends[index + 1] + slack

    @rule(
        copied=st.sampled_from((copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))))
    )
    def go_on_with_a_copy(self, copied: Callable[[SumTree], SumTree]) -> None:
        original, before = self.tree, snapshot(self.tree)
        self.tree = copied(original)
        assert snapshot(self.tree) == before
        original.fill(0, self.capacity, 7.0)
        assert snapshot(self.tree) == before

    @rule(
        entries=entries_,
        bad=st.sampled_from((math.nan, math.inf, -math.inf, -1.0, -TINY, 1.7e308)),
        bad_index=st.one_of(st.none(), st.integers(-(2**63), -1), st.integers(0, 2**62)),
        place=places_,
    )
    def refuse(
        self,
        entries: list[tuple[int, float]],
        bad: float,
        bad_index: int | None,
        place: int,
    ) -> None:
        if self.capacity == 1 and bad == 1.7e308:
            bad = math.nan  # as the only leaf, the other one is allowed
        before = snapshot(self.tree)
        wrong = (place % self.capacity, bad)
        if bad_index is not None:
            wrong = (bad_index if bad_index < 0 else bad_index + self.capacity, 1.0)
        entries = [(i % self.capacity, priority) for i, priority in entries]
        entries.insert(place % (len(entries) + 1), wrong)
        indices, priorities = zip(*entries, strict=True)
        value = str(bad) if bad_index is None else str(wrong[0])
        with pytest.raises((IndexError, ValueError), match=re.escape(value)):
            self.tree.update(indices, priorities)
        assert snapshot(self.tree) == before

    @invariant()
    def the_same(self) -> None:
        assert_same(self.tree, self.naive)


def test_random_operations_as_on_a_plain_list() -> None:
    """About 3,000 operations, the same ones in every run."""
    run_state_machine_as_test(
        TreeAgainstList,
        settings=settings(max_examples=75, stateful_step_count=40, derandomize=True, deadline=None),
    )


@pytest.mark.parametrize("capacity", [1, 8, 9, 65, 300])
@pytest.mark.parametrize("magnitude", [1.0, 1e-310, 1e-200, 1e200])
def test_long_random_histories(capacity: int, magnitude: float) -> None:
    """A thousand writes and draws of batches as large as the tree, heavy tails included."""
    rng = np.random.default_rng(capacity)
    np.random.seed(capacity)
    tree, naive = SumTree(capacity), NaiveSumTree(capacity)
    for _ in range(50):
        for _ in range(20):
            n = int(rng.integers(1, capacity + 1))
            indices = rng.integers(capacity, size=n)
            priorities = np.abs(rng.standard_cauchy(n)) * magnitude * rng.integers(0, 2, n)
            tree.update(indices, priorities)
            naive.update(indices.tolist(), priorities.tolist())
            if tree.total > 0.0:
                drawn, masses = tree.sample(n)
                assert masses.tolist() == [naive.leaves[i] for i in drawn]
                assert masses.min() > 0.0
        assert_same(tree, naive)


# --- which leaf a value belongs to ---


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("share_of_zeros", [0.0, 0.5, 0.95])
def test_get_leaf_agrees_with_a_cumulative_sum(capacity: int, share_of_zeros: float) -> None:
    """Priorities are whole numbers, so that every sum is exact and so must be every answer."""
    rng = np.random.default_rng(0)
    leaves = rng.integers(1, 1000, capacity) * (rng.random(capacity) >= share_of_zeros)
    leaves[rng.integers(capacity)] = 5
    tree, naive = SumTree(capacity), NaiveSumTree(capacity)
    tree.update(range(capacity), leaves)
    naive.update(range(capacity), leaves.astype(float).tolist())
    ends = np.array([0.0, *naive.ends()])
    values = np.concatenate(
        [ends, np.nextafter(ends, 0.0), np.nextafter(ends[:-1], np.inf), ends[:-1] + 0.5]
    )
    values = values[values <= tree.total]

    indices, priorities = tree.get_leaf(values)

    assert indices.tolist() == [naive.get_leaf(value) for value in values]
    np.testing.assert_array_equal(priorities, leaves[indices])
    one_by_one = [tree.get_leaf(value) for value in values]
    assert [index for index, _ in one_by_one] == indices.tolist()
    assert [priority for _, priority in one_by_one] == priorities.tolist()


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_get_leaf_of_the_total_is_the_last_leaf_above_zero(capacity: int) -> None:
    for last in {0, capacity // 2, capacity - 1}:
        tree = SumTree(capacity)
        tree.fill(0, last + 1, 0.1)
        assert tree.get_leaf(tree.total) == (last, 0.1)
        assert tree.get_leaf(0.0) == (0, 0.1)


def test_get_leaf_keeps_the_shape() -> None:
    tree = tree_of([1.0, 0.0, 3.0])
    indices, priorities = tree.get_leaf([[0.5, 1.0], [3.9, 0.0]])
    np.testing.assert_array_equal(indices, [[0, 2], [2, 0]])
    np.testing.assert_array_equal(priorities, [[1.0, 3.0], [3.0, 1.0]])
    assert indices.dtype == np.int64
    assert priorities.dtype == np.float64
    assert tree.get_leaf(np.zeros((2, 0)))[0].shape == (2, 0)
    index, priority = tree.get_leaf(2)
    assert isinstance(index, np.int64)
    assert isinstance(priority, np.float64)


def test_values_in_strided_and_read_only_arrays() -> None:
    tree = tree_of([1.0, 2.0, 3.0, 4.0])
    values = np.array([[0.5, 9.5], [1.5, 0.0], [3.5, 1.0]])
    values.setflags(write=False)
    for given_, expected in (
        (values[:, 0], [0, 1, 2]),
        (values[::-1, 1], [1, 0, 3]),
        (values.T, [[0, 1, 2], [3, 0, 1]]),
        (values.astype(np.float32), [[0, 3], [1, 0], [2, 1]]),
    ):
        before = given_.copy()
        assert tree.get_leaf(given_)[0].tolist() == expected
        np.testing.assert_array_equal(given_, before)


@pytest.mark.parametrize("value", [-1e-300, -1.0, 4.000000000000001, math.inf, -math.inf, math.nan])
def test_get_leaf_refuses_values_outside_the_total(value: float) -> None:
    tree = tree_of([1.0, 0.0, 3.0])
    for values in (value, [0.5, value]):
        with pytest.raises(ValueError, match=rf"value {value} is outside .* = \[0, 4\.0\]"):
            tree.get_leaf(values)


# --- draws ---


@pytest.mark.parametrize("place", [0.0, BELOW_ONE])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_no_draw_reaches_a_leaf_of_zero(capacity: int, place: float) -> None:
    """Neither at the first nor at the last point of a stratum, wherever the zeros are."""
    rng = np.random.default_rng(1)
    for share_of_zeros in (0.1, 0.5, 0.9):
        for _ in range(10):
            leaves = rng.choice([0.1, 0.3, 0.7, 1e-9], capacity)
            leaves *= rng.random(capacity) >= share_of_zeros
            leaves[rng.integers(capacity)] = 0.1
            tree = tree_of(leaves)
            for batch_size in (1, 2, 3, 7, 32, 100):
                indices, priorities = drawn_at(tree, place, batch_size)
                assert leaves[indices].min() > 0.0
                np.testing.assert_array_equal(priorities, leaves[indices])
            everything = np.flatnonzero(leaves)
            # More strata than the smallest leaf needs: each leaf that is not tiny gets one
            many = set(drawn_at(tree, place, 20_000)[0].tolist())
            assert set(everything[leaves[everything] > 1e-3].tolist()) <= many


def test_the_smallest_of_totals_is_cut_into_strata_too() -> None:
    """A hundredth of it is zero, a hundred hundredths of it are not."""
    tree = SumTree(40)
    tree.fill(10, 14, TINY)
    assert tree.total == 4 * TINY
    indices, _ = drawn_at(tree, 0.5, 100)
    counts = np.bincount(indices, minlength=14)[10:]
    assert counts.sum() == 100
    assert (counts > 10).all()
    assert drawn_at(tree, BELOW_ONE, 100)[0][-1] == 13


def test_a_draw_rounded_up_to_the_total_ends_at_the_last_leaf_above_zero() -> None:
    tree = SumTree(40)
    tree.fill(10, 13, 1.0)
    # (2 + the largest float below 1) / 3 is 1
    assert drawn_at(tree, BELOW_ONE, 3)[0][-1] == 12
    assert tree.get_leaf(tree.total)[0] == 12


def test_zero_has_no_sign() -> None:
    tree = filled_tree()
    tree.update(range(70), -0.0)
    assert str(tree.total) == "0.0"
    tree.fill(0, 70, 1.0)
    tree.fill(0, 70, -0.0)
    assert str(tree.total) == str(tree[3]) == "0.0"


def test_a_draw_takes_one_point_of_each_stratum() -> None:
    rng = np.random.default_rng(2)
    tree = tree_of(rng.random(100) ** 3)
    np.random.seed(3)
    for batch_size in (1, 2, 17, 256):
        state = np.random.get_state()
        indices, priorities = tree.sample(batch_size)
        after = np.random.random_sample()
        np.random.set_state(state)
        points = (np.arange(batch_size) + np.random.random_sample(batch_size)) / batch_size
        # The global state gave one number for each draw, and nothing else was taken from it
        assert np.random.random_sample() == after
        expected, masses = tree.get_leaf(points * tree.total)
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(priorities, masses)


def test_the_batch_of_a_draw() -> None:
    tree = tree_of([1.0, 2.0, 3.0])
    np.random.seed(0)
    for batch_size in (5, np.int32(5)):
        indices, priorities = tree.sample(batch_size)
        assert indices.shape == priorities.shape == (5,)
        assert indices.dtype == np.int64
        assert priorities.dtype == np.float64
    # Nobody else has the two arrays
    before = snapshot(tree)
    priorities[:] = 99.0
    indices[:] = 0
    assert snapshot(tree) == before


def test_the_same_seed_draws_the_same_batches() -> None:
    tree = tree_of(np.random.default_rng(0).random(1000))
    batches = []
    for seed in (5, 5, 6):
        np.random.seed(seed)
        batches.append(tree.sample(64)[0].tolist())
    assert batches[0] == batches[1] != batches[2]


@pytest.mark.parametrize("batch_size", [0, -1])
def test_sample_refuses_an_empty_batch(batch_size: int) -> None:
    tree = tree_of([1.0])
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    with pytest.raises(ValueError, match=f"`batch_size` must be at least 1, got {batch_size}"):
        tree.sample(batch_size)
    with pytest.raises(TypeError, match=r"`batch_size` must be an integer, got 2\.0"):
        tree.sample(2.0)  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # type: ignore[index]


@pytest.mark.parametrize("capacity", [1, 9])
def test_a_tree_without_mass_refuses_to_draw(capacity: int) -> None:
    emptied = SumTree(capacity)
    emptied.fill(0, capacity, 1.0)
    emptied.update(range(capacity), 0.0)
    for tree in (SumTree(capacity), emptied):
        assert (tree.total, tree.max_priority, tree.min_priority) == (0.0, 0.0, math.inf)
        with pytest.raises(ValueError, match="no leaf has a priority above zero"):
            tree.sample(1)
        with pytest.raises(ValueError, match="no leaf has a priority above zero"):
            tree.get_leaf(0.0)


# --- writing ---


@pytest.mark.parametrize(
    ("indices", "last"),
    [
        ([2, 2, 2], {2: 3.0}),
        ([1, 0, 1], {1: 3.0, 0: 2.0}),
        ([9, 1, 9], {9: 3.0, 1: 2.0}),
        ([1, 9, 2], {1: 1.0, 9: 2.0, 2: 3.0}),
        ([70, 1, 70], {70: 3.0, 1: 2.0}),
        ([1, 70, 2], {1: 1.0, 70: 2.0, 2: 3.0}),
    ],
)
def test_the_last_of_repeated_indices_wins(indices: list[int], last: dict[int, float]) -> None:
    """Next to each other or not, in one block of leaves or in several."""
    tree, naive = SumTree(100), NaiveSumTree(100)
    tree.update(indices, [1.0, 2.0, 3.0])
    naive.update(list(last), list(last.values()))
    assert_same(tree, naive)


def test_extremes_follow_what_is_stored() -> None:
    """Up and down, with ties, over several blocks; the minimum leaves out zeros."""
    tree = SumTree(20)
    for index, priority, largest, smallest in (
        (3, 5.0, 5.0, 5.0),
        (17, 2.0, 5.0, 2.0),
        (12, 9.0, 9.0, 2.0),
        (4, 9.0, 9.0, 2.0),
        (12, 1.0, 9.0, 1.0),
        (4, 0.0, 5.0, 1.0),
        (12, 0.0, 5.0, 2.0),
        (17, 0.0, 5.0, 5.0),
        (3, TINY, TINY, TINY),
        (3, 0.0, 0.0, math.inf),
    ):
        tree.update(index, priority)
        assert (tree.max_priority, tree.min_priority) == (largest, smallest)
        assert_valid(tree)


@pytest.mark.parametrize("capacity", [64, 200, 1000])
@pytest.mark.parametrize("n_values", [2, 3, 50])
def test_extremes_among_ties_and_zeros(capacity: int, n_values: int) -> None:
    """
    The largest and the smallest go and come in every order, alone in their group or not: with two
    values, almost every write takes one away.
    """
    rng = np.random.default_rng(n_values)
    tree, leaves = SumTree(capacity), np.zeros(capacity)
    for _ in range(400):
        indices = rng.integers(capacity, size=int(rng.integers(1, 30)))
        values = rng.integers(n_values, size=len(indices)) / 7.0
        tree.update(indices, values)
        leaves[indices] = values
        above_zero = leaves[leaves > 0.0]
        assert tree.max_priority == leaves.max()
        assert tree.min_priority == above_zero.min(initial=math.inf)
        assert_valid(tree)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_fill_is_an_update_of_a_run(capacity: int) -> None:
    rng = np.random.default_rng(4)
    tree, naive = SumTree(capacity), NaiveSumTree(capacity)
    runs = [(0, capacity), (0, 1), (capacity - 1, capacity), (capacity // 2, capacity)]
    runs += [tuple(sorted(rng.choice(capacity + 1, 2, replace=False))) for _ in range(10)]
    for start, stop in runs:
        for priority in (float(rng.random()), 0.0, 1, 2.5, 2.5):
            tree.fill(start, stop, priority)
            naive.update(range(start, stop), [float(priority)] * (stop - start))
            assert_same(tree, naive)


@pytest.mark.parametrize("there", [0, 3, 20, 39])
def test_fill_where_a_leaf_has_that_priority_already(there: int) -> None:
    """Nothing is to be done only if all have it."""
    tree, naive = SumTree(40), NaiveSumTree(40)
    tree.update(there, 2.0)
    for _ in range(2):
        tree.fill(0, 40, 2.0)
        naive.update(range(40), [2.0] * 40)
        assert_same(tree, naive)


def test_scalars_and_broadcasting() -> None:
    tree = SumTree(4)
    tree.update(1, 2.5)
    tree.update([0, 3], 1.5)
    tree.update([2], [7])
    tree.update(np.array([[0], [1]]), [[4.0], [5.0]])
    assert tree[:].tolist() == [4.0, 5.0, 7.0, 1.5]
    before = snapshot(tree)
    tree.update([], [])
    tree.update(np.array([], dtype=np.int64), 3.0)
    assert snapshot(tree) == before


def off_its_boundary(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same numbers, one byte away from where such numbers begin."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    unaligned = memory[1:].view(array.dtype)
    unaligned[:] = array
    return unaligned


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


INDEX_FORMS: dict[str, Any] = {
    "list": [6, 1, 4],
    "tuple": (6, 1, 4),
    "list of NumPy numbers": [np.int32(6), np.uint8(1), np.int64(4)],
    "range": range(6, 3, -1),
    **{
        dtype.__name__: np.array([6, 1, 4], dtype)
        for dtype in (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64)
    },
    "big-endian": np.array([6, 1, 4], ">i4"),
    "column": np.array([[6], [1], [4]]),
    "strided": np.array([6, 0, 1, 0, 4, 0])[::2],
    "reversed": np.array([4, 1, 6])[::-1],
    "column of a matrix": np.array([[6, 0], [1, 0], [4, 0]])[:, 0],
    "read-only": read_only(np.array([6, 1, 4])),
    "unaligned": off_its_boundary(np.array([6, 1, 4])),
}
PRIORITY_FORMS: dict[str, Any] = {
    "list": [0.5, 2.0, 0.0],
    "tuple": (0.5, 2, 0),
    "list of NumPy numbers": [np.float32(0.5), np.int64(2), np.float64(0.0)],
    **{dtype.__name__: np.array([0.5, 2.0, 0.0], dtype) for dtype in (np.float16, np.float32)},
    "big-endian": np.array([0.5, 2.0, 0.0], ">f8"),
    "column": np.array([[0.5], [2.0], [0.0]]),
    "strided": np.array([0.5, 9.0, 2.0, 9.0, 0.0, 9.0])[::2],
    "reversed": np.array([0.0, 2.0, 0.5])[::-1],
    "column of a matrix": np.array([[0.5, 9.0], [2.0, 9.0], [0.0, 9.0]])[:, 0],
    "read-only": read_only(np.array([0.5, 2.0, 0.0])),
    "unaligned": off_its_boundary(np.array([0.5, 2.0, 0.0])),
}


@pytest.mark.parametrize("form", INDEX_FORMS)
def test_forms_of_indices(form: str) -> None:
    indices = INDEX_FORMS[form]
    places = list(np.asarray(indices).ravel())
    before = copy.deepcopy(indices)
    tree, naive = SumTree(10), NaiveSumTree(10)
    tree.update(indices, [1.0, 2.0, 3.0])
    naive.update(places, [1.0, 2.0, 3.0])
    assert_same(tree, naive)
    np.testing.assert_array_equal(tree[indices].ravel(), [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(indices, before)


@pytest.mark.parametrize("form", PRIORITY_FORMS)
def test_forms_of_priorities(form: str) -> None:
    priorities = PRIORITY_FORMS[form]
    before = copy.deepcopy(priorities)
    tree, naive = SumTree(10), NaiveSumTree(10)
    tree.update([6, 1, 4], priorities)
    naive.update([6, 1, 4], [0.5, 2.0, 0.0])
    assert_same(tree, naive)
    np.testing.assert_array_equal(priorities, before)


def test_priorities_are_not_rounded_to_float32() -> None:
    tree = SumTree(2)
    tree.update([0, 1], [0.1, 1e-60])
    assert tree[:].tolist() == [0.1, 1e-60]
    tree.update(0, np.float32(0.1))
    assert tree[0] == float(np.float32(0.1)) != 0.1


# --- reading ---


def test_reading_leaves() -> None:
    tree = tree_of([1.0, 0.0, 3.0])
    one = tree[2]
    assert type(one) is float
    assert one == 3.0
    np.testing.assert_array_equal(tree[[2, 0, 2]], [3.0, 1.0, 3.0])
    np.testing.assert_array_equal(tree[np.array([[1], [2]])], [[0.0], [3.0]])
    np.testing.assert_array_equal(tree[:], [1.0, 0.0, 3.0])
    np.testing.assert_array_equal(tree[1:100], [0.0, 3.0])  # not what lies behind the last leaf
    np.testing.assert_array_equal(tree[-1:], [3.0])
    assert tree[[]].shape == (0,)


def test_what_is_read_is_a_copy() -> None:
    tree = tree_of([1.0, 0.0, 3.0])
    before = snapshot(tree)
    for read in (tree[:], tree[0:2], tree[[0, 1]]):
        read[:] = 9.0
    assert snapshot(tree) == before


@pytest.mark.parametrize("capacity", [1, 5, 8, 9])
def test_reading_outside_the_leaves_is_refused(capacity: int) -> None:
    """Also in the unused rest of the last block."""
    tree = SumTree(capacity)
    for index in (-1, capacity, capacity + 1, 10**9, -(2**63)):
        for indices in (index, [0, index]):
            with pytest.raises(IndexError, match=rf"index {index} is outside \[0, {capacity}\)"):
                tree[indices]


@pytest.mark.parametrize("indices", [0.0, [0.0, 1.0], True, [True, False], None, "0", [0, None]])
def test_indices_that_are_no_integers(indices: Any) -> None:
    tree = tree_of([1.0, 2.0])
    before = snapshot(tree)
    with pytest.raises(TypeError, match="indices must be integers, got "):
        tree[indices]
    with pytest.raises(TypeError, match="indices must be integers, got "):
        tree.update(indices, 3.0)
    assert snapshot(tree) == before


# --- refusals ---


def filled_tree(capacity: int = 70) -> SumTree:
    return tree_of(np.random.default_rng(0).random(capacity))


@pytest.mark.parametrize("index", [-1, -(2**63), 70, 71, 72, 2**62, 2**63 - 1])
def test_update_refuses_an_index_outside_the_leaves(index: int) -> None:
    tree = filled_tree()
    before = snapshot(tree)
    for indices in ([index], [0, index], [index, 3, 3], [*range(70), index]):
        with pytest.raises(IndexError, match=rf"index {index} is outside \[0, 70\)"):
            tree.update(indices, np.arange(len(indices)))
    with pytest.raises(IndexError, match=rf"index {index} is outside \[0, 70\)"):
        tree.update(index, 1.0)
    assert snapshot(tree) == before
    assert_valid(tree)


@pytest.mark.parametrize("index", [2**63, 2**64 - 1, 2**64, 2**70, -(2**63) - 1])
def test_indices_beyond_64_bits_are_outside_too(index: int) -> None:
    tree = filled_tree()
    before = snapshot(tree)
    for indices in (index, [index]):
        with pytest.raises(IndexError, match=f"index {index} "):
            tree.update(indices, 1.0)
        with pytest.raises(IndexError, match=f"index {index} "):
            tree[indices]
    assert snapshot(tree) == before


WRONG_PRIORITIES = [
    *(dtype(x) for dtype in (float, np.float32) for x in (math.nan, math.inf, -math.inf, -1.0)),
    -TINY,
    1e308,
]


def refusal_of(priority: Any, leaf: int) -> str:
    return re.escape(f"priority {float(priority)} for leaf {leaf} is not a finite number")


@pytest.mark.parametrize("priority", WRONG_PRIORITIES, ids=repr)
def test_update_refuses_priorities(priority: Any) -> None:
    tree = filled_tree()
    before = snapshot(tree)
    for at in (0, 1, 69):
        priorities = np.arange(1, 71, dtype=np.asarray(priority).dtype)
        priorities[at] = priority
        with pytest.raises(ValueError, match=refusal_of(priority, at)):
            tree.update(range(70), priorities)
    for indices in (5, [5], [5, 7]):
        with pytest.raises(ValueError, match=refusal_of(priority, 5)):
            tree.update(indices, priority)
    assert snapshot(tree) == before
    assert_valid(tree)


@pytest.mark.parametrize("priority", WRONG_PRIORITIES, ids=repr)
def test_fill_refuses_priorities(priority: Any) -> None:
    tree = filled_tree()
    before = snapshot(tree)
    with pytest.raises(ValueError, match=refusal_of(priority, 5)):
        tree.fill(5, 9, priority)
    assert snapshot(tree) == before
    assert_valid(tree)


@pytest.mark.parametrize("priority", [np.float16(0.25), np.float32(0.25), np.int64(3), 3])
def test_fill_takes_priorities_of_any_number_type(priority: Any) -> None:
    tree, naive = SumTree(10), NaiveSumTree(10)
    tree.fill(2, 9, priority)
    naive.update(range(2, 9), [float(priority)] * 7)
    assert_same(tree, naive)


@pytest.mark.parametrize("priority", ["1.5", "one", b"2", None, 1j, [None], ["1.5"]], ids=repr)
def test_priorities_that_are_no_numbers(priority: Any) -> None:
    tree = filled_tree()
    before = snapshot(tree)
    with pytest.raises(TypeError):
        tree.update([0], priority)
    with pytest.raises(TypeError):
        tree.fill(0, 1, priority)
    assert snapshot(tree) == before


def test_integers_beyond_64_bits_are_priorities_if_they_fit_into_a_float() -> None:
    """NumPy has no integers for them and makes objects of them."""
    tree = SumTree(6)
    tree.update(0, 2**70)
    tree.update([1, 2], [2**70, 0.5])
    tree.update([3, 4], np.array([1.5, 2], dtype=object))
    tree.fill(5, 6, 2**70)
    assert tree[:].tolist() == [2.0**70, 2.0**70, 0.5, 1.5, 2.0, 2.0**70]


def test_arrays_of_objects() -> None:
    """An empty one says nothing of what it would hold."""
    tree = filled_tree()
    before = snapshot(tree)
    nothing = np.array([], dtype=object)
    tree.update(nothing, 3.0)
    tree.update([], nothing)
    tree.update(nothing, nothing)
    assert tree[nothing].shape == (0,)
    with pytest.raises(TypeError, match="indices must be integers, got object"):
        tree.update(np.array([0, 1], dtype=object), 3.0)
    assert snapshot(tree) == before


def test_integers_too_large_for_a_float_are_too_large() -> None:
    tree = filled_tree()
    before = snapshot(tree)
    with pytest.raises(ValueError, match="1000000"):
        tree.fill(0, 1, 10**400)
    with pytest.raises(ValueError, match="1000000"):
        tree.update(0, 10**400)
    with pytest.raises(ValueError, match="1000000"):
        tree.update([0, 1], [0.5, 10**400])
    with pytest.raises(ValueError, match="1000000"):
        tree.get_leaf(10**400)
    assert snapshot(tree) == before


def test_a_longdouble_too_large_for_a_float_is_infinite() -> None:
    tree = filled_tree()
    before = snapshot(tree)
    huge: Any = np.longdouble("1e400")
    with pytest.raises(ValueError, match="priority inf for leaf 0"):
        tree.update(0, huge)
    with pytest.raises(ValueError, match=r"priority (inf|1e\+400) for leaf 0"):
        tree.fill(0, 1, huge)
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    ("indices", "priorities", "counts"),
    [
        ([0, 1], [1.0], "2 indices, 1 priorities"),
        ([0], [1.0, 2.0], "1 indices, 2 priorities"),
        (0, [1.0, 2.0], "1 indices, 2 priorities"),
        ([], [1.0], "0 indices, 1 priorities"),
        ([0, 1], [], "2 indices, 0 priorities"),
        ([0, 1, 2], [[1.0, 2.0, 3.0]] * 3, "3 indices, 9 priorities"),
    ],
)
def test_update_refuses_lengths_that_differ(indices: Any, priorities: Any, counts: str) -> None:
    tree = filled_tree()
    before = snapshot(tree)
    with pytest.raises(ValueError, match=counts):
        tree.update(indices, priorities)
    assert snapshot(tree) == before


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (4, 3), (0, 71), (70, 71), (-5, -2)])
def test_fill_refuses_what_is_no_run_of_leaves(start: int, stop: int) -> None:
    tree = filled_tree()
    before = snapshot(tree)
    with pytest.raises(IndexError, match=rf"leaves {start} to {stop} .* \[0, 70\)"):
        tree.fill(start, stop, 1.0)
    assert snapshot(tree) == before


@pytest.mark.parametrize(("start", "stop"), [(0.5, 5.5), (0, 5.0), (0.0, 5), ("0", 5)])
def test_fill_refuses_ends_that_are_no_integers(start: Any, stop: Any) -> None:
    tree = filled_tree()
    before = snapshot(tree)
    wrong = start if isinstance(start, float | str) else stop
    with pytest.raises(TypeError, match=re.escape(f"must be an integer, got {wrong!r}")):
        tree.fill(start, stop, 1.0)
    assert snapshot(tree) == before


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_fill_takes_ends_of_any_integer_type(dtype: type[np.integer[Any]]) -> None:
    tree, naive = SumTree(20), NaiveSumTree(20)
    tree.fill(dtype(0), dtype(17), 2.0)  # type: ignore[arg-type]
    naive.update(range(17), [2.0] * 17)
    assert_same(tree, naive)


@pytest.mark.parametrize("capacity", [0, -1, -(10**12)])
def test_a_tree_has_at_least_one_leaf(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"`capacity` must be at least 1, got {capacity}"):
        SumTree(capacity)


@pytest.mark.parametrize("capacity", [2.0, "2", None, [2]])
def test_capacity_must_be_an_integer(capacity: Any) -> None:
    with pytest.raises(TypeError, match="`capacity` must be an integer, got ") as refusal:
        SumTree(capacity)
    assert repr(capacity) in str(refusal.value)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_largest_priority_allowed_keeps_the_total_finite(capacity: int) -> None:
    tree = SumTree(capacity)
    limit = tree.priority_limit
    assert limit == pytest.approx(sys.float_info.max / capacity, rel=1e-9)
    tree.fill(0, capacity, limit)
    assert_valid(tree)
    assert sys.float_info.max * 0.999 < tree.total < math.inf
    for place in (0.0, BELOW_ONE):
        assert drawn_at(tree, place, 1)[0] == (0 if place == 0.0 else capacity - 1)
    before = snapshot(tree)
    above = math.nextafter(limit, math.inf)
    with pytest.raises(ValueError, match=re.escape(str(above))):
        tree.update(0, above)
    assert snapshot(tree) == before


# --- what a tree says of itself ---


@pytest.mark.parametrize("capacity", [1, 8, 9, np.int64(12), np.uint8(200)])
def test_a_new_tree(capacity: int) -> None:
    tree = SumTree(capacity)
    assert type(tree.capacity) is int
    assert tree.capacity == len(tree) == capacity
    assert repr(tree) == f"SumTree(capacity={capacity}, total=0.0)"
    np.testing.assert_array_equal(tree[:], np.zeros(capacity))
    assert [type(x) for x in (tree.total, tree.max_priority, tree.min_priority)] == [float] * 3
    assert_valid(tree)


@pytest.mark.parametrize("capacity", [1, 8, 9, 65, 70])
def test_check_valid_finds_any_broken_node(capacity: int) -> None:
    rng = np.random.default_rng(0)
    tree = tree_of(rng.random(capacity) + 0.1)
    for array, begin, numbers_per_node in ((tree._sums, 1, 1), (tree._extremes, 2, 2)):
        for i in range(begin, len(array)):
            right = array[i]
            for wrong in (math.nextafter(right, 9.0) if right < 9.0 else 9.0, -1.0, math.nan):
                array[i] = wrong
                valid, message = tree.check_valid()
                assert not valid
                assert message.startswith(f"node {i // numbers_per_node} ")
                assert str(wrong) in message
                assert str(right) in message
            array[i] = right
            assert_valid(tree)


def test_check_valid_says_which_extreme_is_wrong() -> None:
    tree = tree_of([1.0, 2.0])
    tree._extremes[2] = 7.0
    assert tree.check_valid() == (False, "node 1 holds 7.0 as largest leaf, it is 2.0")
    tree._extremes[2] = 2.0
    tree._extremes[3] = 0.5
    assert tree.check_valid() == (False, "node 1 holds 0.5 as smallest leaf, it is 1.0")


@pytest.mark.parametrize("capacity", [1, 9, 70])
def test_check_valid_finds_any_broken_leaf(capacity: int) -> None:
    tree = tree_of(np.random.default_rng(0).random(capacity) + 0.1)
    for i in range(capacity):
        right = tree._leaves[i]
        for wrong in (-1.0, math.nan, math.inf, math.nextafter(tree.priority_limit, math.inf)):
            tree._leaves[i] = wrong
            assert tree.check_valid() == (False, f"leaf {i} is {wrong}")
        tree._leaves[i] = 2.0
        valid, message = tree.check_valid()
        assert not valid
        assert message.startswith("node ")
        tree._leaves[i] = right
        assert_valid(tree)
    for i in range(capacity, len(tree._leaves)):
        tree._leaves[i] = 1.0
        tree._sums[:], tree._extremes[:] = tree._nodes_from_leaves()
        assert tree.check_valid() == (False, "a leaf beyond the capacity is not zero")
        tree._leaves[i] = 0.0


# --- copies ---


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_brings_back_every_bit(capacity: int, protocol: int) -> None:
    rng = np.random.default_rng(capacity)
    tree = SumTree(capacity)
    for _ in range(20):
        tree.update(rng.integers(capacity, size=9), rng.random(9))
    loaded = pickle.loads(pickle.dumps(tree, protocol=protocol))
    assert type(loaded) is SumTree
    assert (loaded.capacity, loaded.priority_limit) == (capacity, tree.priority_limit)
    assert snapshot(loaded) == snapshot(tree)
    assert_valid(loaded)
    np.random.seed(0)
    drawn = tree.sample(64)
    np.random.seed(0)
    np.testing.assert_array_equal(loaded.sample(64), drawn)


# --- size ---


def test_a_tree_of_a_million_leaves_is_small_and_quick_to_make() -> None:
    tracemalloc.start()
    try:
        begin = time.perf_counter()
        tree = SumTree(1_000_000)
        seconds = time.perf_counter() - begin
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 1.0
    assert tree.nbytes == pytest.approx(allocated, rel=1e-3)
    assert tree.nbytes <= 50 * 1_000_000
    assert 10 <= tree.nbytes / 1_000_000 <= 13  # what the docstring says
    tree.fill(0, 1_000_000, 0.1)
    assert 8_000_000 <= len(pickle.dumps(tree)) <= 8_010_000
    assert_valid(tree)
    assert tree.total == pytest.approx(100_000.0, rel=1e-14)
    assert tree.get_leaf([0.0, 50_000.05, tree.total])[0].tolist() == [0, 500_000, 999_999]


@pytest.mark.parametrize("capacity", [64, 128, 4096, 2**20])
def test_a_power_of_two_needs_no_larger_tree(capacity: int) -> None:
    """10.5 bytes a leaf, and more than that for the next one."""
    assert SumTree(capacity).nbytes == 10.5 * capacity
    assert SumTree(capacity + 1).nbytes > 10.5 * (capacity + 1)


@pytest.mark.parametrize("capacity", [1, 9, 1000])
@pytest.mark.parametrize("place", range(8))
def test_a_block_of_leaves_is_one_cache_line(capacity: int, place: int) -> None:
    """Wherever the memory begins."""
    memory = np.zeros(5000)
    begin = (place - memory.ctypes.data // 8) % 8
    with mock.patch.object(np, "zeros", lambda size: memory[begin : begin + size]):
        leaves = SumTree(capacity)._leaves
    assert leaves.ctypes.data % 64 == 0
    assert leaves.base is memory
    assert len(leaves) == 8 * math.ceil(capacity / 8)


# --- without numba's compiler, and without its cache ---

SCENARIO = """
import json
import numba
import numpy as np
from sb3_per.trees import sum_kernels
from sb3_per.trees.sum_tree import SumTree

rng = np.random.default_rng(0)
np.random.seed(0)
trace = []
for capacity in (1, 2, 8, 9, 65, 300):
    tree = SumTree(capacity)
    for step in range(12):
        n = int(rng.integers(1, 20))
        priorities = np.abs(rng.standard_cauchy(n)) * rng.integers(0, 2, n)
        tree.update(rng.integers(capacity, size=n), priorities)
        start = int(rng.integers(capacity))
        tree.fill(start, int(rng.integers(start, capacity)) + 1, float(rng.integers(0, 3)))
        tree.update(capacity // 2, 0.5)
        assert tree.check_valid() == (True, ""), tree.check_valid()
        indices, masses = tree.sample(8)
        found = tree.get_leaf([0.0, tree.total / 3, tree.total])[0]
        for index, priority in ((capacity, 1.0), (0, np.nan)):
            try:
                tree.update([0, index], [9.0, priority])
            except (IndexError, ValueError) as error:
                trace.append(str(error))
        extremes = [tree.total, tree.max_priority, tree.min_priority]
        trace.append([x.hex() for x in [*tree[:].tolist(), *masses.tolist(), *extremes]])
        trace.append([*indices.tolist(), *found.tolist()])
"""


def run_copy(folder: Path, code: str, **variables: str) -> Any:
    """
    Run code in a process of its own, on a copy of the tree's modules alone, which spares it the
    import of torch.

    :param folder: where to put the copy
    :param code: prints one line of JSON
    :param variables: environment variables to set
    :return: what it printed
    """
    package = folder / "sb3_per" / "common"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "sb3_per" / "__init__.py").touch()
    (package / "__init__.py").touch()
    for name in ("sum_kernels.py", "sum_tree.py"):
        shutil.copy(Path(sum_tree.__file__).with_name(name), package)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    environment |= {"PYTHONPATH": str(folder), **variables}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pure_python_gives_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """NUMBA_DISABLE_JIT=1 is how to debug the kernels."""
    code = SCENARIO + "print(json.dumps([hasattr(sum_kernels.write, 'py_func'), trace]))"
    compiled, slow = run_copy(tmp_path, code, NUMBA_DISABLE_JIT="1")
    assert compiled is False
    state: dict[str, Any] = {}
    exec(SCENARIO, state)
    assert slow == json.loads(json.dumps(state["trace"]))
    assert len(slow) == 6 * 12 * 4


def test_no_place_for_the_compilers_cache(tmp_path: Path) -> None:
    """Files stand where the folders would have to be made: that stops root, too."""
    (tmp_path / "a_file").touch()
    blocked = str(tmp_path / "a_file" / "cache")
    package = tmp_path / "sb3_per" / "common"
    package.mkdir(parents=True)
    (package / "__pycache__").touch()
    code = """
import json
import numba
from sb3_per.trees import sum_kernels
from sb3_per.trees.sum_tree import SumTree

try:
    numba.njit(cache=True)(sum_kernels.write.py_func)
    refusal = ""
except RuntimeError as error:
    refusal = str(error)
tree = SumTree(20)
tree.fill(3, 5, 1.0)
indices, priorities = tree.get_leaf([0.5, 1.0, 2.0])
print(json.dumps([refusal, tree.check_valid(), indices.tolist(), priorities.tolist()]))
"""
    refusal, valid, indices, priorities = run_copy(
        tmp_path,
        code,
        HOME=blocked,
        LOCALAPPDATA=blocked,
        NUMBA_CACHE_DIR=blocked,
        XDG_CACHE_HOME=blocked,
    )
    assert "cannot cache function" in refusal
    assert valid == [True, ""]
    assert (indices, priorities) == ([3, 4, 4], [1.0, 1.0, 1.0])


# --- properties of draws for any leaves ---


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    leaves=st.lists(priorities_, min_size=1, max_size=80).filter(any),
    place=st.floats(0.0, BELOW_ONE),
    batch_size=st.integers(1, 50),
)
def test_each_draw_lies_in_its_stratum(leaves: list[float], place: float, batch_size: int) -> None:
    tree = tree_of(leaves)
    indices, _ = drawn_at(tree, place, batch_size)
    ends = [0.0, *itertools.accumulate(leaves)]
    # Rounding of the sums; of the strata, when the total is among the smallest numbers there are
    slack = 1e-13 * tree.total + batch_size * TINY
    for j, index in enumerate(indices):
        point = (j + place) * (tree.total / batch_size)
        assert ends[index] - slack <= point <= ends[index + 1] + slack
