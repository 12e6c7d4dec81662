"""RankTree against a plain sorted list, at its edges, in what it takes and in what it refuses."""

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
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sb3_per.trees import rank_kernels, rank_tree
from sb3_per.trees.rank_kernels import BLOCK, FANOUT, FILLED_BLOCK, LAST
from sb3_per.trees.rank_tree import RankTree

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BELOW_ONE = math.nextafter(1.0, 0.0)
TINY = 5e-324  # the smallest float64 above zero
CAPACITIES = (1, 2, 3, 63, 64, 65, 128, 129, 300)
ALPHAS = (0.0, 0.3, 0.7, 1.0, 2.5)
MAGNITUDES = (0.0, 3e-310, 1e-300, 1e-16, 1.0, 1.5, 1e16, sys.float_info.max)


class NaiveRankTree:
    """What a RankTree does, as a plain list: slow, and too short to be wrong."""

    def __init__(self, capacity: int, alpha: float) -> None:
        self.leaves = [0.0] * capacity
        self.alpha = alpha

    def update(self, indices: Sequence[int], priorities: Sequence[float]) -> None:
        for index, priority in zip(indices, priorities, strict=True):
            self.leaves[index] = priority

    def order(self) -> list[int]:
        """Leaves above zero from rank 1 on; equal ones by number."""
        ranked = [i for i, leaf in enumerate(self.leaves) if leaf > 0.0]
        return sorted(ranked, key=lambda i: (-self.leaves[i], i))

    def ranks(self) -> list[int]:
        ranks = [0] * len(self.leaves)
        for rank, leaf in enumerate(self.order(), start=1):
            ranks[leaf] = rank
        return ranks

    def masses(self) -> list[float]:
        return [rank**-self.alpha if rank else 0.0 for rank in self.ranks()]


def tree_of(leaves: Sequence[float] | FloatArray, alpha: float = 0.7) -> RankTree:
    tree = RankTree(len(leaves), alpha)
    tree.update(np.arange(len(leaves)), leaves)
    return tree


def sorted_ranks(leaves: FloatArray) -> IntArray:
    """The naive ranks, for many leaves."""
    ranks = np.zeros(len(leaves), dtype=np.int64)
    order = np.argsort(-leaves, kind="stable")[: np.count_nonzero(leaves)]
    ranks[order] = np.arange(1, len(order) + 1)
    return ranks


def snapshot(tree: RankTree) -> tuple[bytes, bytes, float, float, float]:
    ranks = tree.ranks(slice(None))
    return (
        tree[:].tobytes(),
        ranks.tobytes(),
        tree.total,
        tree.max_priority,
        tree.min_priority,
    )


def assert_valid(tree: RankTree) -> None:
    assert tree.check_valid() == (True, "")


def assert_same(tree: RankTree, naive: NaiveRankTree) -> None:
    assert_valid(tree)
    order = naive.order()
    assert tree[:].tolist() == naive.leaves
    assert tree.n_ranked == len(order)
    assert tree.ranks(slice(None)).tolist() == naive.ranks()
    assert tree.ranks(range(len(naive.leaves))).tolist() == naive.ranks()
    assert tree.masses(slice(None)) == pytest.approx(naive.masses(), rel=1e-14, abs=0.0)
    assert tree.total == pytest.approx(math.fsum(naive.masses()), rel=1e-14, abs=0.0)
    assert tree.max_priority == (naive.leaves[order[0]] if order else 0.0)
    assert tree.min_priority == (naive.leaves[order[-1]] if order else math.inf)
    smallest = len(order) ** -naive.alpha if order else math.inf
    assert tree.min_mass == pytest.approx(smallest, rel=1e-14)


def drawn_at(tree: RankTree, place: float, batch_size: int) -> tuple[IntArray, FloatArray]:
    """A draw where every random number is ``place``."""
    with mock.patch.object(np.random, "random_sample", lambda size: np.full(size, place)):
        return tree.sample(batch_size)


def used_blocks(tree: RankTree) -> int:
    return len(tree._arrays.free_blocks) - int(tree._head[rank_kernels.N_FREE_BLOCKS])


# --- random operations ---

priorities_ = st.one_of(
    st.sampled_from(MAGNITUDES),
    # Either equal or further apart than the resolution
    st.floats(1e-300, 1e300).map(lambda number: float(f"{number:.6g}")),
    st.integers(0, 9).map(float),
)
places_ = st.integers(0, 10**6)  # modulo the capacity
entries_ = st.lists(st.tuples(places_, priorities_), max_size=20)


class TreeAgainstList(RuleBasedStateMachine):
    """The same random operations on a RankTree and on a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RankTree(1)
        self.naive = NaiveRankTree(1, 0.7)

    def has_mass(self) -> bool:
        return any(self.naive.leaves)

    @property
    def capacity(self) -> int:
        return len(self.naive.leaves)

    @initialize(
        capacity=st.one_of(st.sampled_from(CAPACITIES), st.integers(1, 300)),
        alpha=st.sampled_from(ALPHAS),
        full=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def create(self, capacity: int, alpha: float, full: bool, seed: int) -> None:
        self.tree = RankTree(capacity, alpha)
        self.naive = NaiveRankTree(capacity, alpha)
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
        ranks, masses = self.naive.ranks(), self.naive.masses()
        indices, drawn = drawn_at(self.tree, place, batch_size)
        assert [ranks[i] for i in indices] == sorted(ranks[i] for i in indices)
        assert drawn.tolist() == pytest.approx([masses[i] for i in indices], rel=1e-14, abs=0.0)
        assert min(drawn) > 0.0
        self.tree.update(indices, priority)
        self.naive.update(indices.tolist(), [priority] * batch_size)

    @precondition(has_mass)
    @rule(place=places_)
    def get_leaf_near_the_ends_of_an_interval(self, place: int) -> None:
        masses, order = self.naive.masses(), self.naive.order()
        ends = [0.0, *itertools.accumulate(masses[i] for i in order)]
        total = self.tree.total
        end = min(ends[place % len(ends)], total)
        values = [0.0, math.nextafter(end, 0.0), end, math.nextafter(end, math.inf), total]
        values = [min(value, total) for value in values]
        indices, found = self.tree.get_leaf(values)
        slack = 1e-13 * total
        for value, index, mass in zip(values, indices, found, strict=True):
            rank = order.index(index)
            assert mass == pytest.approx(masses[index], rel=1e-14, abs=0.0)
            assert ends[rank] - slack <= value <= ends[rank + 1] + slack

    @rule(alpha=st.sampled_from(ALPHAS))
    def set_alpha(self, alpha: float) -> None:
        self.tree.alpha = alpha
        self.naive.alpha = alpha

    @rule(
        copied=st.sampled_from((copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))))
    )
    def go_on_with_a_copy(self, copied: Callable[[RankTree], RankTree]) -> None:
        original, before = self.tree, snapshot(self.tree)
        self.tree = copied(original)
        assert snapshot(self.tree) == before
        original.fill(0, self.capacity, 7.0)
        assert snapshot(self.tree) == before

    @rule(
        entries=entries_,
        bad=st.sampled_from((math.nan, math.inf, -math.inf, -1.0, -TINY)),
        bad_index=st.one_of(st.none(), st.integers(-(2**63), -1), st.integers(0, 2**62)),
        place=places_,
    )
    def refuse(
        self, entries: list[tuple[int, float]], bad: float, bad_index: int | None, place: int
    ) -> None:
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
    """About 1,200 operations, the same ones in every run."""
    run_state_machine_as_test(
        TreeAgainstList,
        settings=settings(max_examples=30, stateful_step_count=40, derandomize=True, deadline=None),
    )


@pytest.mark.parametrize("capacity", [1, 64, 1_000, 20_011])
@pytest.mark.parametrize("kind", ["heavy tail", "many ties", "falling", "rising"])
def test_long_random_histories(capacity: int, kind: str) -> None:
    """Blocks and nodes split, empty and are laid out anew; repeated indices are among them."""
    rng = np.random.default_rng(capacity)
    np.random.seed(capacity)
    tree, leaves = RankTree(capacity), np.zeros(capacity)
    for round_ in range(60):
        n = int(rng.integers(1, min(capacity, 1_000) + 1))
        by_rank = round_ % 3 and tree.n_ranked
        indices = tree.sample(n)[0] if by_rank else rng.integers(capacity, size=n)
        priorities: FloatArray = np.abs(rng.standard_cauchy(n)) * rng.integers(0, 4, n)
        if kind == "many ties":
            priorities = np.round(priorities)
        elif kind != "heavy tail":
            priorities = rng.random(n) + (round_ if kind == "rising" else -round_ + 60)
        tree.update(indices, priorities)
        for index, priority in zip(indices, priorities, strict=True):
            leaves[index] = priority
        if round_ % 10 == 0:
            start = int(rng.integers(capacity))
            stop = min(capacity, start + 2_000)
            tree.fill(start, stop, tree.max_priority)
            leaves[start:stop] = leaves.max()
        assert_valid(tree)
        np.testing.assert_array_equal(tree[:], leaves)
        expected = sorted_ranks(leaves)
        np.testing.assert_array_equal(tree.ranks(slice(None)), expected)
        some = rng.integers(capacity, size=50)
        np.testing.assert_array_equal(tree.ranks(some), expected[some])


# --- blocks ---


def in_order(kind: str, n: int) -> FloatArray:
    """
    Priorities as they come.

    :return: shape ``(n,)``
    """
    rising = np.arange(1.0, n + 1)
    return {
        "rising": rising,
        "falling": rising[::-1],
        "equal": np.ones(n),
        "from both ends": np.where(np.arange(n) % 2, rising, -rising) + 2 * n,
        "towards the middle": np.where(np.arange(n) % 2, rising, 3 * n - rising),
        "at random": np.random.default_rng(0).permutation(rising),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["rising", "falling", "equal", "from both ends", "towards the middle", "at random"]
)
def test_blocks_are_well_filled_in_whatever_order_leaves_come(kind: str) -> None:
    """No block is left half empty where entries come in order, at random half of them at most."""
    n = 20_000
    tree = RankTree(n)
    priorities = in_order(kind, n)
    # Few at a time, one by one for a while
    for start, stop in itertools.pairwise([*range(200), *range(200, n, 90), n]):
        tree.update(range(start, stop), priorities[start:stop])
    assert_valid(tree)
    np.testing.assert_array_equal(tree.ranks(slice(None)), sorted_ranks(priorities))
    # Where they come next to each other from two sides, blocks split in the middle, too
    spread = kind in ("towards the middle", "at random")
    most = n / BLOCK * (1.6 if spread else 1.02) + 2
    assert used_blocks(tree) <= most


@pytest.mark.parametrize("sign", [1, -1])
def test_leaves_that_come_in_order_between_two_full_blocks(sign: int) -> None:
    """Each takes a place of its own in a new block, not a new block of its own."""
    n = 4 * BLOCK
    tree = RankTree(n)
    tree.update(range(BLOCK), np.arange(3_000.0, 3_000.0 + BLOCK))
    tree.update(range(BLOCK, 2 * BLOCK), np.arange(1_000.0, 1_000.0 + BLOCK))
    assert used_blocks(tree) == 2
    for i in range(BLOCK):
        tree.update(2 * BLOCK + i, 2_000.0 + sign * i)
        assert_valid(tree)
    assert used_blocks(tree) == 3


def test_blocks_that_get_empty_are_used_again() -> None:
    n = 10_000
    tree = tree_of(np.arange(1.0, n + 1))
    for level in range(1, 30):
        # All leaves move on to a region where none was
        for start in range(0, n, 500):
            tree.update(range(start, start + 500), np.arange(start, start + 500) + level * 1e6)
        assert_valid(tree)
        assert used_blocks(tree) < 1.1 * n / BLOCK + 2
    for start in range(0, n, 500):
        tree.fill(start, start + 500, 0.0)
        assert_valid(tree)
    assert used_blocks(tree) == 1
    tree.update(5, 1.0)
    assert tree.ranks(5) == 1


def test_when_no_block_is_left_all_is_laid_out_anew() -> None:
    """Leaves go out of full blocks until there are as many blocks as the tree has."""
    n = 20_000
    rng = np.random.default_rng(0)
    tree, leaves = RankTree(n), np.zeros(n)
    layouts, used = 0, used_blocks(tree)
    for _ in range(200):
        indices = rng.integers(n, size=500)
        priorities = rng.random(500) * 10.0 ** rng.integers(-3, 3)
        tree.update(indices, priorities)
        leaves[indices] = priorities  # the last of repeated ones stays here, too
        # One layout can't come soon after another: each frees a third of the blocks
        layouts += used_blocks(tree) < used - 50
        used = used_blocks(tree)
        np.testing.assert_array_equal(tree.ranks(slice(None)), sorted_ranks(leaves))
    assert_valid(tree)
    assert 1 <= layouts <= 10


def test_an_entry_belongs_to_one_place_only() -> None:
    """Where it was found earlier is checked before it is taken for granted."""
    tree = tree_of(np.random.default_rng(0).random(5_000))
    top, slots = tree._used_slots()
    assert len(top) >= 3
    beyond = [top[-1] + 1, slots.max() + 1]
    places = [*itertools.product(top, slots), (beyond[0], slots[0]), (top[-1], beyond[1])]
    find, belongs = rank_kernels._find, rank_kernels._belongs
    for entry in tree._sorted_entries()[::50]:
        for value in (int(entry), int(entry) + 1):
            found = find(tree._arrays, value)
            right = [place for place in places if belongs(tree._arrays, *place, value)]
            assert right == [found]


@pytest.mark.parametrize("n", [0, 1, FILLED_BLOCK, FILLED_BLOCK + 1, 5_000, 20_000])
def test_a_new_layout_is_even(n: int) -> None:
    tree = RankTree(20_000)
    tree.update(range(20_000), 1.0)
    tree.update(range(20_000), [1.0] * n + [0.0] * (20_000 - n))
    assert_valid(tree)
    top, slots = tree._used_slots()
    counts = tree._arrays.counts[slots]
    assert len(counts) == max(1, math.ceil(n / FILLED_BLOCK))
    assert counts.max() - counts.min() <= 1
    sizes = tree._arrays.sizes[tree._arrays.kids[top]]
    assert sizes.max() - sizes.min() <= 1
    assert sizes.max() <= FANOUT * 3 // 4


# --- ties ---


def test_equal_priorities_are_ranked_by_leaf_number() -> None:
    """Whatever the order in which they came."""
    for order in itertools.permutations(range(4)):
        tree = RankTree(5)
        for leaf in order:
            tree.update(leaf, 2.0)
        tree.update(4, 3.0)
        assert tree.ranks(slice(None)).tolist() == [2, 3, 4, 5, 1]


@pytest.mark.parametrize("capacity", [1, 2, 1000, 1024, 1025, 2**20])
def test_resolution(capacity: int) -> None:
    """Twice as far apart, priorities are ranked by size; a thousandth of it apart, they are not."""
    tree = RankTree(capacity)
    assert tree.resolution == 2.0 ** (math.ceil(math.log2(capacity)) - 52)
    if capacity == 1:
        return
    for priority in (1.0, 1.7, 3e-300, 1e300, 0.999):
        tree.update([0, 1], [priority, priority * (1.0 + 2.0 * tree.resolution)])
        assert tree.ranks([0, 1]).tolist() == [2, 1]
        tree.update([0, 1], [priority * (1.0 + 2.0 * tree.resolution), priority])
        assert tree.ranks([0, 1]).tolist() == [1, 2]
    if capacity >= 1000:
        tree.update([0, 1], [1.0, 1.0 + 1e-3 * tree.resolution])
        assert tree[1] > tree[0]
        assert tree.ranks([0, 1]).tolist() == [1, 2]
        assert_valid(tree)


def test_float32_errors_are_all_told_apart() -> None:
    """Neighbouring float32 numbers, in a tree of a million leaves, at any magnitude."""
    tree = RankTree(1_000_000)
    for magnitude in (1e-30, 1e-6, 1.0, 1e6, 1e30):
        errors = np.full(64, magnitude, dtype=np.float32)
        for i in range(1, 64):
            errors[i] = np.nextafter(errors[i - 1], np.float32(np.inf))
        tree.update(range(64), errors)
        assert tree.ranks(range(64)).tolist() == list(range(64, 0, -1))


def test_the_smallest_and_the_largest_numbers_have_ranks() -> None:
    for capacity in (5, 2**20):
        tree = RankTree(capacity)
        priorities = [TINY, sys.float_info.max, sys.float_info.min, 0.0, 1.0]
        tree.update(range(capacity - 5, capacity), priorities)
        assert tree.ranks(range(capacity - 5, capacity)).tolist() == [4, 1, 3, 0, 2]
        assert (tree.max_priority, tree.min_priority) == (sys.float_info.max, TINY)
        assert_valid(tree)


# --- masses and draws ---


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_get_leaf_agrees_with_a_cumulative_sum(capacity: int, alpha: float) -> None:
    rng = np.random.default_rng(capacity)
    tree, naive = RankTree(capacity, alpha), NaiveRankTree(capacity, alpha)
    leaves = rng.random(capacity) * rng.integers(0, 2, capacity)
    leaves[rng.integers(capacity)] = 0.5
    tree.update(range(capacity), leaves)
    naive.update(range(capacity), leaves.tolist())
    order = naive.order()
    ends = np.cumsum([0.0, *(naive.masses()[i] for i in order)])
    middles = (ends[1:] + ends[:-1]) / 2
    shuffled = rng.permutation(len(order))

    indices, masses = tree.get_leaf(middles[shuffled])

    assert indices.tolist() == [order[i] for i in shuffled]
    assert masses.tolist() == [tree.masses(i) for i in indices]
    assert tree.get_leaf(0.0)[0] == order[0]
    assert tree.get_leaf(tree.total)[0] == order[-1]


def test_get_leaf_keeps_the_shape() -> None:
    tree = tree_of([1.0, 0.0, 3.0], alpha=1.0)
    indices, masses = tree.get_leaf([[0.5, 1.2], [1.5, 0.0]])
    np.testing.assert_array_equal(indices, [[2, 0], [0, 2]])
    np.testing.assert_array_equal(masses, [[1.0, 0.5], [0.5, 1.0]])
    assert indices.dtype == np.int64
    assert tree.get_leaf(np.zeros((2, 0)))[0].shape == (2, 0)
    index, mass = tree.get_leaf(1)
    assert isinstance(index, np.int64)
    assert isinstance(mass, np.float64)


@pytest.mark.parametrize("value", [-1e-300, -1.0, 1.5000000000000002, math.inf, math.nan])
def test_get_leaf_refuses_values_outside_the_total(value: float) -> None:
    tree = tree_of([1.0, 0.0, 3.0], alpha=1.0)
    for values in (value, [0.5, value]):
        with pytest.raises(ValueError, match=rf"value {value} is outside .* = \[0, 1\.5\]"):
            tree.get_leaf(values)


def test_probabilities_of_the_paper() -> None:
    """P(i) = (1 / rank(i)) ** alpha / sum_k (1 / rank(k)) ** alpha, by hand for four leaves."""
    tree = tree_of([0.2, 5.0, 0.0, 1.0, 0.3], alpha=0.7)
    weights = [4**-0.7, 1.0, 0.0, 2**-0.7, 3**-0.7]
    expected = [weight / sum(weights) for weight in weights]
    assert (tree.masses(slice(None)) / tree.total).tolist() == pytest.approx(expected, rel=1e-14)


def test_sums_of_masses_are_those_of_exact_arithmetic() -> None:
    """To the last bits, also after a million additions."""
    tree = RankTree(1_000_000)
    sums = tree._sums_and_guide()[0]
    masses = np.arange(1, 1_000_001) ** -0.7
    for n in (1, 2, 10, 1_000, 54_321, 1_000_000):
        assert sums[n - 1] == pytest.approx(math.fsum(masses[:n]), rel=5e-16, abs=0.0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 3.0, 30.0, 700.0])
@pytest.mark.parametrize("capacity", [1, 64, 65, 3_000])
def test_the_guide_leads_to_the_first_sum_above_a_value(capacity: int, alpha: float) -> None:
    tree = RankTree(capacity, alpha)
    tree.fill(0, capacity, 1.0)
    sums = tree._sums_and_guide()[0]
    assert (np.diff(sums) >= 0.0).all()
    values = np.concatenate([[0.0], sums, np.nextafter(sums, 0.0), np.nextafter(sums, np.inf)])
    values = np.append(values, np.random.default_rng(0).random(1000) * sums[-1])
    values = values[values < sums[-1]]
    # Equal priorities: the leaf is the rank
    expected = np.searchsorted(sums, values, side="right")
    np.testing.assert_array_equal(tree.get_leaf(values)[0], expected)


@pytest.mark.parametrize("place", [0.0, BELOW_ONE])
@pytest.mark.parametrize("alpha", [0.0, 0.7, 3.0, 700.0])
def test_no_draw_leaves_the_ranks(alpha: float, place: float) -> None:
    """Neither at the first nor at the last point of a stratum, however small the last masses."""
    rng = np.random.default_rng(1)
    for capacity in (1, 3, 100):
        for _ in range(10):
            leaves = rng.random(capacity) * (rng.random(capacity) < 0.3)
            leaves[rng.integers(capacity)] = 0.5
            tree = tree_of(leaves, alpha)
            for batch_size in (1, 2, 3, 7, 32, 100):
                indices, masses = drawn_at(tree, place, batch_size)
                assert leaves[indices].min() > 0.0
                assert masses.min() > 0.0
                assert masses.tolist() == tree.masses(indices).tolist()


def test_a_draw_rounded_up_to_the_total_ends_at_the_last_rank() -> None:
    tree = RankTree(40)
    tree.fill(10, 13, 1.0)
    # (2 + the largest float below 1) / 3 is 1
    assert drawn_at(tree, BELOW_ONE, 3)[0][-1] == 12


def test_a_draw_takes_one_point_of_each_stratum() -> None:
    rng = np.random.default_rng(2)
    tree = tree_of(rng.random(5_000) ** 3)
    np.random.seed(3)
    for batch_size in (1, 2, 17, 256):
        state = np.random.get_state()
        indices, masses = tree.sample(batch_size)
        after = np.random.random_sample()
        np.random.set_state(state)
        points = (np.arange(batch_size) + np.random.random_sample(batch_size)) / batch_size
        # The global state gave one number for each draw, and nothing else was taken from it
        assert np.random.random_sample() == after
        expected, found = tree.get_leaf(points * tree.total)
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(masses, found)


def test_the_batch_of_a_draw() -> None:
    tree = tree_of([1.0, 2.0, 3.0])
    for batch_size in (5, np.int32(5)):
        indices, masses = tree.sample(batch_size)
        assert indices.shape == masses.shape == (5,)
        assert indices.dtype == np.int64
        assert masses.dtype == np.float64
    # Nobody else has the two arrays
    before = snapshot(tree)
    masses[:] = 99.0
    indices[:] = 0
    assert snapshot(tree) == before


def test_the_same_seed_draws_the_same_batches() -> None:
    tree = tree_of(np.random.default_rng(0).random(1000))
    batches = []
    for seed in (5, 5, 6):
        np.random.seed(seed)
        batches.append(tree.sample(64)[0].tolist())
    assert batches[0] == batches[1] != batches[2]


def test_a_new_alpha_applies_to_all_leaves_at_once() -> None:
    tree = tree_of([1.0, 3.0, 2.0], alpha=1.0)
    assert tree.masses(slice(None)) == pytest.approx([1 / 3, 1.0, 1 / 2])
    assert drawn_at(tree, 0.5, 4)[0].tolist() == [1, 1, 2, 0]
    tree.alpha = 0
    assert type(tree.alpha) is float
    assert tree.masses(slice(None)).tolist() == [1.0, 1.0, 1.0]
    assert tree.total == 3.0
    assert drawn_at(tree, 0.5, 3)[0].tolist() == [1, 2, 0]
    tree.alpha = 80.0
    assert set(drawn_at(tree, BELOW_ONE, 20)[0].tolist()) == {1}


@pytest.mark.parametrize("alpha", [-0.1, -TINY, math.nan, math.inf, [0.5], np.array([1.0, 2.0])])
def test_alpha_must_be_finite_and_not_negative(alpha: Any) -> None:
    message = re.escape(f"`alpha` must be a finite number of at least 0, got {alpha!r}")
    with pytest.raises(ValueError, match=message):
        RankTree(4, alpha)
    tree = tree_of([1.0, 2.0])
    before = snapshot(tree)
    with pytest.raises(ValueError, match=message):
        tree.alpha = alpha
    assert snapshot(tree) == before


@pytest.mark.parametrize("alpha", ["0.7", None, 1j])
def test_alpha_must_be_a_number(alpha: Any) -> None:
    with pytest.raises(TypeError, match="alpha must be real numbers, got "):
        RankTree(4, alpha)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_sample_refuses_an_empty_batch(batch_size: int) -> None:
    tree = tree_of([1.0])
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    with pytest.raises(ValueError, match=f"`batch_size` must be at least 1, got {batch_size}"):
        tree.sample(batch_size)
    with pytest.raises(TypeError, match=r"`batch_size` must be an integer, got 2\.0"):
        tree.sample(2.0)  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # type: ignore[index]


@pytest.mark.parametrize("capacity", [1, 9, 200])
def test_a_tree_without_ranks_refuses_to_draw(capacity: int) -> None:
    emptied = RankTree(capacity)
    emptied.fill(0, capacity, 1.0)
    emptied.update(range(capacity), 0.0)
    for tree in (RankTree(capacity), emptied):
        assert (tree.total, tree.max_priority, tree.min_priority) == (0.0, 0.0, math.inf)
        assert (tree.n_ranked, tree.min_mass) == (0, math.inf)
        assert tree.ranks(slice(None)).tolist() == [0] * capacity
        assert tree.masses(slice(None)).tolist() == [0.0] * capacity
        with pytest.raises(ValueError, match="no leaf has a priority above zero"):
            tree.sample(1)
        with pytest.raises(ValueError, match="no leaf has a priority above zero"):
            tree.get_leaf(0.0)


# --- writing ---


@pytest.mark.parametrize("n", [100, 2_000])
@pytest.mark.parametrize(
    ("indices", "last"),
    [
        ([2, 2, 2], {2: 3.0}),
        ([1, 0, 1], {1: 3.0, 0: 2.0}),
        ([9, 1, 9], {9: 3.0, 1: 2.0}),
        ([1, 70, 2], {1: 1.0, 70: 2.0, 2: 3.0}),
    ],
)
def test_the_last_of_repeated_indices_wins(
    indices: list[int], last: dict[int, float], n: int
) -> None:
    """In a batch of three, and in one that is sorted as a whole."""
    tree, naive = RankTree(100), NaiveRankTree(100, 0.7)
    tree.update(50, 2.5)
    naive.update([50], [2.5])
    more = [60] * (n - 100)
    tree.update(more + indices, [7.0] * len(more) + [1.0, 2.0, 3.0])
    naive.update(more + list(last), [7.0] * len(more) + list(last.values()))
    assert_same(tree, naive)


def test_ends_follow_what_is_stored() -> None:
    tree = RankTree(20)
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


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_fill_is_an_update_of_a_run(capacity: int) -> None:
    rng = np.random.default_rng(4)
    tree, naive = RankTree(capacity), NaiveRankTree(capacity, 0.7)
    runs = [(0, capacity), (0, 1), (capacity - 1, capacity), (capacity // 2, capacity)]
    runs += [tuple(sorted(rng.choice(capacity + 1, 2, replace=False))) for _ in range(10)]
    for start, stop in runs:
        for priority in (float(rng.random()), 0.0, 1, 2.5, 2.5):
            tree.fill(start, stop, priority)
            naive.update(range(start, stop), [float(priority)] * (stop - start))
            assert_same(tree, naive)


def test_zero_has_no_sign() -> None:
    tree = tree_of([1.0, 2.0])
    tree.update([0, 1], -0.0)
    assert str(tree[0]) == "0.0"
    tree.fill(0, 2, 1.0)
    tree.fill(0, 2, -0.0)
    tree.update([0] * 2_000, -0.0)
    assert str(tree[:].tolist()) == "[0.0, 0.0]"
    assert tree.n_ranked == 0


def test_forms_of_what_is_given() -> None:
    """They go through the same functions as a SumTree's."""
    tree = RankTree(10)
    tree.update(1, 2.5)
    tree.update((0, 3), 1.5)
    tree.update(np.array([[6], [1]], np.uint8), [[4.0], [5.0]])
    strided = np.array([2.0, 9.0, 3.0])[::2]
    strided.setflags(write=False)
    tree.update(np.array([9, 0, 8])[::2], strided)
    tree.fill(np.uint8(4), np.int64(6), np.float16(0.25))  # type: ignore[arg-type]
    expected = [1.5, 5.0, 0.0, 1.5, 0.25, 0.25, 4.0, 0.0, 3.0, 2.0]
    assert tree[:].tolist() == expected
    np.testing.assert_array_equal(tree.ranks(slice(None)), sorted_ranks(np.array(expected)))
    before = snapshot(tree)
    tree.update([], [])
    tree.update(np.array([], dtype=np.int64), 3.0)
    assert snapshot(tree) == before


def test_reading() -> None:
    tree = tree_of([1.0, 0.0, 3.0], alpha=1.0)
    assert [type(x) for x in (tree[2], tree.ranks(2), tree.masses(2))] == [float, int, float]
    assert (tree[2], tree.ranks(2), tree.masses(0), tree.masses(1)) == (3.0, 1, 0.5, 0.0)
    for read, expected in (
        (tree.__getitem__, [1.0, 0.0, 3.0]),
        (tree.ranks, [2, 0, 1]),
        (tree.masses, [0.5, 0.0, 1.0]),
    ):
        assert read([2, 0, 2]).tolist() == [expected[2], expected[0], expected[2]]
        assert read(np.array([[1], [2]])).tolist() == [[expected[1]], [expected[2]]]
        assert read(slice(None)).tolist() == expected
        assert read(slice(1, 100)).tolist() == expected[1:]
        assert read(slice(-1, None)).tolist() == expected[-1:]
        assert read([]).shape == (0,)
        before = snapshot(tree)
        read(slice(None))[:] = 9
        assert snapshot(tree) == before


# --- refusals ---


@pytest.mark.parametrize("index", [-1, -(2**63), 70, 71, 2**62, 2**63 - 1])
def test_indices_outside_the_leaves_are_refused(index: int) -> None:
    tree = tree_of(np.random.default_rng(0).random(70))
    before = snapshot(tree)
    message = rf"index {index} is outside \[0, 70\)"
    for indices in (index, [index], [0, index], [index, 3, 3], [*range(70), index]):
        with pytest.raises(IndexError, match=message):
            tree.update(indices, 1.0)
        for read in (tree.__getitem__, tree.ranks, tree.masses):
            with pytest.raises(IndexError, match=message):
                read(indices)
    assert snapshot(tree) == before
    assert_valid(tree)


@pytest.mark.parametrize("indices", [0.0, [0.0, 1.0], True, None, "0", [0, None]])
def test_indices_that_are_no_integers(indices: Any) -> None:
    tree = tree_of([1.0, 2.0])
    before = snapshot(tree)
    for refused in (
        lambda: tree[indices],
        lambda: tree.ranks(indices),
        lambda: tree.update(indices, 1.0),
    ):
        with pytest.raises(TypeError, match="indices must be integers, got "):
            refused()
    assert snapshot(tree) == before


@pytest.mark.parametrize("priority", [math.nan, math.inf, -math.inf, -1.0, -TINY], ids=repr)
def test_priorities_that_are_refused(priority: float) -> None:
    tree = tree_of(np.random.default_rng(0).random(70))
    before = snapshot(tree)
    for at in (0, 1, 69):
        priorities = np.arange(1.0, 71.0)
        priorities[at] = priority
        message = re.escape(f"priority {priority} for leaf {at} is not a finite number")
        with pytest.raises(ValueError, match=message):
            tree.update(range(70), priorities)
        with pytest.raises(ValueError, match=message):
            tree.fill(at, 70, priority)
    assert snapshot(tree) == before
    assert_valid(tree)


@pytest.mark.parametrize("priority", ["1.5", None, 1j, [None]], ids=repr)
def test_priorities_that_are_no_numbers(priority: Any) -> None:
    tree = tree_of([1.0, 2.0])
    before = snapshot(tree)
    with pytest.raises(TypeError):
        tree.update([0], priority)
    with pytest.raises(TypeError):
        tree.fill(0, 1, priority)
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    ("indices", "priorities", "counts"),
    [
        ([0, 1], [1.0], "2 indices, 1 priorities"),
        (0, [1.0, 2.0], "1 indices, 2 priorities"),
        ([], [1.0], "0 indices, 1 priorities"),
        ([0, 1], [], "2 indices, 0 priorities"),
    ],
)
def test_update_refuses_lengths_that_differ(indices: Any, priorities: Any, counts: str) -> None:
    tree = tree_of([1.0, 2.0])
    before = snapshot(tree)
    with pytest.raises(ValueError, match=counts):
        tree.update(indices, priorities)
    assert snapshot(tree) == before


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (4, 3), (0, 71), (70, 71)])
def test_fill_refuses_what_is_no_run_of_leaves(start: int, stop: int) -> None:
    tree = tree_of(np.random.default_rng(0).random(70))
    before = snapshot(tree)
    with pytest.raises(IndexError, match=rf"leaves {start} to {stop} .* \[0, 70\)"):
        tree.fill(start, stop, 1.0)
    with pytest.raises(TypeError, match=r"`start` must be an integer, got 0\.5"):
        tree.fill(0.5, 3, 1.0)  # type: ignore[arg-type]
    assert snapshot(tree) == before


@pytest.mark.parametrize("capacity", [0, -1, 2**31, 10**12])
def test_capacities_that_are_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"`capacity` must be from 1 to .*, got {capacity}"):
        RankTree(capacity)


@pytest.mark.parametrize("capacity", [2.0, "2", None])
def test_capacity_must_be_an_integer(capacity: Any) -> None:
    with pytest.raises(TypeError, match="`capacity` must be an integer, got "):
        RankTree(capacity)


# --- what a tree says of itself ---


@pytest.mark.parametrize("capacity", [1, 8, 65, np.int64(12), np.uint8(200)])
def test_a_new_tree(capacity: int) -> None:
    tree = RankTree(capacity)
    assert type(tree.capacity) is int
    assert tree.capacity == len(tree) == capacity
    assert tree.alpha == 0.7
    assert repr(tree) == f"RankTree(capacity={capacity}, alpha=0.7, n_ranked=0)"
    np.testing.assert_array_equal(tree[:], np.zeros(capacity))
    numbers = (tree.total, tree.max_priority, tree.min_priority, tree.priority_limit)
    assert [type(x) for x in numbers] == [float] * 4
    assert tree.priority_limit == sys.float_info.max
    assert_valid(tree)


def broken(field: str, index: int, value: float) -> Callable[[RankTree], None]:
    def break_it(tree: RankTree) -> None:
        getattr(tree._arrays, field)[index] = value

    return break_it


def swap_entries(tree: RankTree) -> None:
    start = int(tree._arrays.kids[0]) * BLOCK
    tree._arrays.keys[[start, start + 1]] = tree._arrays.keys[[start + 1, start]]


def break_separator(at_top: bool, last: bool, add: int) -> Callable[[RankTree], None]:
    def break_it(tree: RankTree) -> None:
        top, slots = tree._used_slots()
        chosen = top if at_top else slots
        at = len(tree._arrays.free_blocks) * BLOCK + chosen[-1 if last else 0]
        if at_top or last:
            tree._arrays.keys[at] = LAST - 1
        else:
            count = tree._arrays.counts[slots[0]]
            entries = int(tree._arrays.kids[slots[0]]) * BLOCK + count - 1
            tree._arrays.keys[at] = tree._arrays.keys[entries] + add

    return break_it


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (broken("leaves", 3, -1.0), r"leaf 3 is -1\.0"),
        (broken("leaves", 3, math.nan), "leaf 3 is nan"),
        (broken("leaves", 3, math.inf), "leaf 3 is inf"),
        (broken("leaves", 3, 7.0), "the entries are not those of the leaves"),
        (broken("leaves", 3, 0.0), "the entries are not those of the leaves"),
        (swap_entries, "the entries are not those of the leaves"),
        (broken("counts", 0, 5), "the count of a node is not the sum"),
        (broken("kids", 1, 0), "block 0 is 2 times in use or free"),
        (broken("free_blocks", 0, 0), "block 0 is 2 times in use or free"),
        (broken("free_nodes", 0, 0), "node 0 is 2 times in use or free"),
        (broken("head", rank_kernels.N_RANKED, 17), "the entries are not those of the leaves"),
        (broken("head", rank_kernels.N_FREE_BLOCKS, 0), "block [0-9]+ is 0 times in use or free"),
        (
            broken("head", rank_kernels.FIRST_LEAF, 0),
            r"leaves \[0, .*\] are not those of the first",
        ),
        (broken("head", rank_kernels.LAST_LEAF, 1), r"leaves .* are not those of the first"),
        (break_separator(False, False, -1), "a separator is not between the entries"),
        (break_separator(False, False, 2**50), "a separator is not between the entries"),
        (break_separator(False, True, 0), "the separator of a node is not that of its last block"),
        (break_separator(True, True, 0), "the separator of a node is not that of its last block"),
    ],
)
def test_check_valid_finds_what_is_broken(
    break_it: Callable[[RankTree], None], message: str
) -> None:
    tree = tree_of(np.random.default_rng(0).random(10_000) + 0.1)
    assert_valid(tree)
    break_it(tree)
    valid, found = tree.check_valid()
    assert not valid
    assert re.match(message, found), found


def test_check_valid_finds_counts_that_only_add_up() -> None:
    tree = tree_of(np.random.default_rng(0).random(10_000) + 0.1)
    tree._arrays.counts[0] += 1
    tree._arrays.counts[1] -= 1
    assert tree.check_valid() == (False, "the count of a block is not that of its entries")


# --- copies and size ---


@pytest.mark.parametrize("capacity", [1, 9, 65, 5_000])
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_brings_back_every_bit(capacity: int, protocol: int) -> None:
    rng = np.random.default_rng(capacity)
    tree = RankTree(capacity, alpha=0.55)
    for _ in range(20):
        tree.update(
            rng.integers(capacity, size=9), np.round(rng.random(9) * 4) + rng.random(9) // 1
        )
    loaded = pickle.loads(pickle.dumps(tree, protocol=protocol))
    assert type(loaded) is RankTree
    assert (loaded.capacity, loaded.alpha) == (capacity, 0.55)
    assert snapshot(loaded) == snapshot(tree)
    assert_valid(loaded)
    np.random.seed(0)
    drawn = tree.sample(64)
    np.random.seed(0)
    np.testing.assert_array_equal(loaded.sample(64), drawn)
    loaded.update(0, 9.0)
    assert loaded.ranks(0) == 1
    assert tree[0] != 9.0


def test_a_tree_of_a_million_leaves_is_small_and_quick_to_make() -> None:
    tracemalloc.start()
    try:
        begin = time.perf_counter()
        tree = RankTree(1_000_000)
        seconds = time.perf_counter() - begin
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < 1.0
    assert tree.nbytes == pytest.approx(allocated, rel=1e-2)
    assert 20 <= tree.nbytes / 1_000_000 <= 24  # what the docstring says
    leaves = np.abs(np.random.default_rng(0).standard_cauchy(1_000_000)).astype(np.float32)
    tree.update(np.arange(1_000_000), leaves)
    np.random.seed(0)
    indices, _ = tree.sample(1_000)
    assert 28 <= tree.nbytes / 1_000_000 <= 32
    assert 8_000_000 <= len(pickle.dumps(tree)) <= 8_010_000
    expected = sorted_ranks(leaves.astype(np.float64))
    np.testing.assert_array_equal(tree.ranks(slice(None)), expected)
    np.testing.assert_array_equal(tree.ranks(indices), expected[indices])
    assert_valid(tree)


def test_new_rows_at_the_maximum_cost_the_same_however_many_are_there() -> None:
    """The kernel does not walk through ties: the blocks it fills are full, one after the other."""
    tree = RankTree(200_000)
    for row in range(0, 200_000, 8):
        tree.fill(row, row + 8, tree.max_priority or 1.0)
    assert_valid(tree)
    assert used_blocks(tree) == 200_000 // BLOCK
    assert tree.ranks([0, 7, 100_000, 199_999]).tolist() == [1, 8, 100_001, 200_000]


# --- without numba's compiler ---

SCENARIO = """
import json
import numpy as np
from sb3_per.trees import rank_kernels
from sb3_per.trees.rank_tree import RankTree

rng = np.random.default_rng(0)
np.random.seed(0)
trace = []
for capacity in (1, 2, 65, 300):
    tree = RankTree(capacity)
    for step in range(6):
        n = int(rng.integers(1, 40))
        priorities = np.abs(rng.standard_cauchy(n)) * rng.integers(0, 2, n)
        tree.update(rng.integers(capacity, size=n), np.round(priorities, step % 2))
        start = int(rng.integers(capacity))
        tree.fill(start, int(rng.integers(start, capacity)) + 1, float(rng.integers(0, 3)))
        tree.update(capacity // 2, 0.5)
        assert tree.check_valid() == (True, ""), tree.check_valid()
        indices, masses = tree.sample(8)
        found = tree.get_leaf([tree.total / 3, 0.0, tree.total])[0]
        numbers = [tree.total, tree.max_priority, tree.min_priority, tree.min_mass]
        trace.append([x.hex() for x in [*tree[:].tolist(), *numbers]])
        # The power function of Python may differ in the last bit
        trace.append([round(x, 12) for x in masses.tolist()])
        trace.append([*indices.tolist(), *found.tolist(), *tree.ranks(range(capacity)).tolist()])
        trace.append(tree.ranks(slice(None)).tolist())
        tree.alpha = rng.random() * 2
"""


def test_pure_python_gives_the_same(tmp_path: Path) -> None:
    """NUMBA_DISABLE_JIT=1 is how to debug the kernels; of the modules, only those are needed."""
    package = tmp_path / "sb3_per" / "common"
    package.mkdir(parents=True)
    (tmp_path / "sb3_per" / "__init__.py").touch()
    (package / "__init__.py").touch()
    for name in ("sum_kernels.py", "sum_tree.py", "rank_kernels.py", "rank_tree.py"):
        shutil.copy(Path(rank_tree.__file__).with_name(name), package)
    code = SCENARIO + "print(json.dumps([hasattr(rank_kernels.write, 'py_func'), trace]))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment | {"PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled, slow = json.loads(done.stdout)
    assert compiled is False
    state: dict[str, Any] = {}
    exec(SCENARIO, state)
    assert slow == json.loads(json.dumps(state["trace"]))
    assert len(slow) == 4 * 6 * 4
