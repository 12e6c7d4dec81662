"""SumTree alone: which leaf a value belongs to, exact sums, its nodes and its memory."""

import bisect
import itertools
import math
import re
import sys
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_per import SumTree
from tree_helpers import (
    BELOW_ONE,
    TINY,
    assert_valid,
    drawn_at,
    random_tree,
    snapshot,
    tree_of,
)

CAPACITIES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 128, 129, 300, 520)


# --- which leaf a value belongs to ---


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("share_of_zeros", [0.0, 0.5, 0.95])
def test_get_leaf_agrees_with_a_cumulative_sum(capacity: int, share_of_zeros: float) -> None:
    """Priorities are whole numbers, so that every sum is exact and so must be every answer."""
    rng = np.random.default_rng(0)
    leaves = rng.integers(1, 1000, capacity) * (rng.random(capacity) >= share_of_zeros)
    leaves[rng.integers(capacity)] = 5
    tree = tree_of(SumTree, leaves.astype(float))
    ends = np.array([0.0, *itertools.accumulate(leaves.tolist())])
    values = np.concatenate(
        [ends, np.nextafter(ends, 0.0), np.nextafter(ends[:-1], np.inf), ends[:-1] + 0.5]
    )
    values = values[values <= tree.total]
    last = int(np.flatnonzero(leaves)[-1])
    # The first leaf whose interval ends after the value
    expected = [min(bisect.bisect_right(ends[1:], value), last) for value in values]

    indices, priorities = tree.get_leaf(values)

    assert indices.tolist() == expected
    np.testing.assert_array_equal(priorities, leaves[indices])
    one_by_one = [tree.get_leaf(value) for value in values]
    assert [index for index, _ in one_by_one] == expected
    assert [priority for _, priority in one_by_one] == priorities.tolist()


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_get_leaf_of_the_total_is_the_last_leaf_above_zero(capacity: int) -> None:
    for last in {0, capacity // 2, capacity - 1}:
        tree = SumTree(capacity)
        tree.fill(0, last + 1, 0.1)
        assert tree.get_leaf(tree.total) == (last, 0.1)
        assert tree.get_leaf(0.0) == (0, 0.1)


def test_a_value_on_the_left_edge_of_an_interval_gives_no_leaf_of_zero() -> None:
    tree = tree_of(SumTree, [0.0, 1.0, 0.0, 1.0])
    assert tree.get_leaf([0.0, 0.999, 1.0])[0].tolist() == [1, 1, 3]
    for batch_size, expected in ((1, [1]), (2, [1, 3]), (4, [1, 1, 3, 3])):
        assert drawn_at(tree, 0.0, batch_size)[0].tolist() == expected


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


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    leaves=st.lists(
        st.one_of(st.sampled_from((0.0, TINY, 1e-300, 1.0, 1e300)), st.floats(0.0, 1e300)),
        min_size=1,
        max_size=80,
    ).filter(any),
    place=st.floats(0.0, BELOW_ONE),
    batch_size=st.integers(1, 50),
)
def test_each_draw_lies_in_its_stratum(leaves: list[float], place: float, batch_size: int) -> None:
    tree = tree_of(SumTree, leaves)
    indices, priorities = drawn_at(tree, place, batch_size)
    assert priorities.tolist() == [leaves[i] for i in indices]
    ends = [0.0, *itertools.accumulate(leaves)]
    # Rounding of the sums; of the strata, when the total is among the smallest numbers there are
    slack = 1e-13 * tree.total + batch_size * TINY
    for j, index in enumerate(indices):
        point = (j + place) * (tree.total / batch_size)
        assert ends[index] - slack <= point <= ends[index + 1] + slack


def test_the_total_does_not_drift_away_from_the_leaves() -> None:
    """Sums that are adjusted by differences would, after 100,000 updates."""
    rng = np.random.default_rng(0)
    tree = tree_of(SumTree, rng.random(1024) ** 0.6)
    indices = rng.integers(1024, size=100_000).tolist()
    priorities = (rng.random(100_000) ** 0.6).tolist()
    for index, priority in zip(indices, priorities, strict=True):
        tree.update(index, priority)
    assert abs(tree.total - math.fsum(tree[:])) <= 1e-12 * tree.total
    assert_valid(tree)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_priority_limit_is_as_large_as_a_finite_total_allows(capacity: int) -> None:
    tree = SumTree(capacity)
    assert tree.priority_limit == pytest.approx(sys.float_info.max / capacity, rel=1e-9)
    tree.fill(0, capacity, tree.priority_limit)
    assert sys.float_info.max * 0.999 < tree.total < math.inf


def test_a_priority_above_the_limit_is_refused() -> None:
    tree = random_tree(SumTree)
    before = snapshot(tree)
    message = re.escape("priority 1e+308 for leaf 5 is not a finite number from 0 to 2.568e+306")
    with pytest.raises(ValueError, match=message):
        tree.update([5, 6], 1e308)
    with pytest.raises(ValueError, match=message):
        tree.fill(5, 9, 1e308)
    assert snapshot(tree) == before


def test_masses_are_priorities() -> None:
    tree = tree_of(SumTree, [1.0, 0.0, 3.0])
    assert tree.masses(slice(None)).tolist() == [1.0, 0.0, 3.0]
    assert (tree.total, tree.min_mass) == (4.0, 1.0)
    assert repr(tree) == "SumTree(capacity=3, total=4.0)"


# --- what a tree finds wrong with itself ---


@pytest.mark.parametrize("capacity", [1, 8, 9, 65, 70])
def test_check_valid_finds_any_broken_node(capacity: int) -> None:
    tree = tree_of(SumTree, np.random.default_rng(0).random(capacity) + 0.1)
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
    tree = tree_of(SumTree, [1.0, 2.0])
    tree._extremes[2] = 7.0
    assert tree.check_valid() == (False, "node 1 holds 7.0 as largest leaf, it is 2.0")
    tree._extremes[2] = 2.0
    tree._extremes[3] = 0.5
    assert tree.check_valid() == (False, "node 1 holds 0.5 as smallest leaf, it is 1.0")


@pytest.mark.parametrize("capacity", [1, 9, 70])
def test_check_valid_finds_any_broken_leaf(capacity: int) -> None:
    tree = tree_of(SumTree, np.random.default_rng(0).random(capacity) + 0.1)
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
    for i in range(capacity, len(tree._blocks)):
        tree._blocks[i] = 1.0
        tree._rebuild()
        assert tree.check_valid() == (False, "a leaf beyond the capacity is not zero")
        tree._blocks[i] = 0.0


# --- memory ---


@pytest.mark.parametrize("capacity", [64, 128, 4096, 2**20])
def test_a_power_of_two_needs_no_larger_tree(capacity: int) -> None:
    """10.5 bytes a leaf, and up to 13 for large trees of other sizes."""
    assert SumTree(capacity).nbytes == 10.5 * capacity
    assert 10.5 * (capacity + 1) < SumTree(capacity + 1).nbytes
    assert SumTree(2**20 + 1).nbytes == pytest.approx(13.0 * 2**20, rel=1e-4)


@pytest.mark.parametrize("capacity", [1, 9, 1000])
@pytest.mark.parametrize("place", range(8))
def test_a_block_of_leaves_is_one_cache_line(capacity: int, place: int) -> None:
    """Wherever the memory begins."""
    memory = np.zeros(5000)
    begin = (place - memory.ctypes.data // 8) % 8
    with mock.patch.object(np, "zeros", lambda size: memory[begin : begin + size]):
        blocks = SumTree(capacity)._blocks
    assert blocks.ctypes.data % 64 == 0
    assert blocks.base is memory
    assert len(blocks) == 8 * math.ceil(capacity / 8)
