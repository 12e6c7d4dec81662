"""RankTree alone: ranks, ties, blocks, masses and their sums."""

import itertools
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sb3_per.trees import RankTree, rank_kernels, rank_tree
from sb3_per.trees.rank_kernels import BLOCK, FANOUT, FILLED_BLOCK, LAST
from tree_helpers import (
    BELOW_ONE,
    TINY,
    FloatArray,
    IntArray,
    assert_valid,
    drawn_at,
    snapshot,
    tree_of,
)

ALPHAS = (0.0, 0.3, 0.7, 1.0, 2.5)
CAPACITIES = (1, 2, 3, 63, 64, 65, 128, 129, 300)


def sorted_ranks(leaves: FloatArray) -> IntArray:
    """The naive ranks, for many leaves."""
    ranks = np.zeros(len(leaves), dtype=np.int64)
    order = np.argsort(-leaves, kind="stable")[: np.count_nonzero(leaves)]
    ranks[order] = np.arange(1, len(order) + 1)
    return ranks


def used_blocks(tree: RankTree) -> int:
    return len(tree._arrays.free_blocks) - int(tree._head[rank_kernels.N_FREE_BLOCKS])


@pytest.mark.parametrize("capacity", [1, 64, 1_000, 20_011])
@pytest.mark.parametrize("kind", ["heavy tail", "many ties", "falling", "rising"])
def test_long_random_histories(capacity: int, kind: str) -> None:
    """Blocks and nodes split, get empty and get a new layout; repeated indices are among them."""
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
    tree = tree_of(RankTree, np.arange(1.0, n + 1))
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


def test_when_no_block_is_left_everything_gets_a_new_layout() -> None:
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
    tree = tree_of(RankTree, np.random.default_rng(0).random(5_000))
    top, slots = rank_tree._used_slots(tree._arrays)
    assert len(top) >= 3
    beyond = [top[-1] + 1, slots.max() + 1]
    places = [*itertools.product(top, slots), (beyond[0], slots[0]), (top[-1], beyond[1])]
    find, belongs = rank_kernels._search, rank_kernels._belongs
    for entry in rank_tree._sorted_entries(tree._leaves, tree._shift)[::50]:
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
    top, slots = rank_tree._used_slots(tree._arrays)
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
    """Neighboring float32 numbers, in a tree of a million leaves, at any magnitude."""
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
    leaves = rng.random(capacity) * rng.integers(0, 2, capacity)
    leaves[rng.integers(capacity)] = 0.5
    tree = tree_of(RankTree, leaves, alpha=alpha)
    order = np.argsort(-leaves, kind="stable")[: np.count_nonzero(leaves)]
    expected = np.arange(1.0, len(order) + 1) ** -alpha
    ends = np.cumsum([0.0, *expected])
    shuffled = rng.permutation(len(order))

    indices, masses = tree.get_leaf(((ends[1:] + ends[:-1]) / 2)[shuffled])

    np.testing.assert_array_equal(indices, order[shuffled])
    np.testing.assert_allclose(masses, expected[shuffled], rtol=1e-14)
    np.testing.assert_allclose(masses, tree.masses(indices), rtol=1e-14)
    assert tree.get_leaf(0.0)[0] == order[0]
    assert tree.get_leaf(tree.total)[0] == order[-1]


def test_probabilities_of_the_paper() -> None:
    """P(i) = (1 / rank(i)) ** alpha / sum_k (1 / rank(k)) ** alpha, by hand for four leaves."""
    tree = tree_of(RankTree, [0.2, 5.0, 0.0, 1.0, 0.3], alpha=0.7)
    weights = [4**-0.7, 1.0, 0.0, 2**-0.7, 3**-0.7]
    expected = [weight / sum(weights) for weight in weights]
    assert (tree.masses(slice(None)) / tree.total).tolist() == pytest.approx(expected, rel=1e-14)


def test_sums_of_masses_are_those_of_exact_arithmetic() -> None:
    """Within a few units in the last place, also after a million additions."""
    tree = RankTree(1_000_000)
    tree.fill(0, 1_000_000, 1.0)
    masses, sums = tree.masses(slice(None)), tree._masses_of_ranks().sums
    np.testing.assert_allclose(masses, np.arange(1, 1_000_001) ** -0.7, rtol=1e-14)
    for n in (1, 2, 10, 1_000, 54_321, 1_000_000):
        assert sums[n - 1] == pytest.approx(math.fsum(masses[:n]), rel=2e-15, abs=0.0)
    # What plain additions in turn would give is further away
    assert np.cumsum(masses)[-1] != pytest.approx(math.fsum(masses), rel=2e-15, abs=0.0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 3.0, 30.0, 700.0])
@pytest.mark.parametrize("capacity", [1, 64, 65, 3_000])
def test_the_guide_leads_to_the_first_sum_above_a_value(capacity: int, alpha: float) -> None:
    tree = RankTree(capacity, alpha)
    tree.fill(0, capacity, 1.0)
    sums = tree._masses_of_ranks().sums
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
            tree = tree_of(RankTree, leaves, alpha=alpha)
            for batch_size in (1, 2, 3, 7, 32, 100):
                indices, masses = drawn_at(tree, place, batch_size)
                assert leaves[indices].min() > 0.0
                assert masses.min() > 0.0
                np.testing.assert_allclose(masses, tree.masses(indices), rtol=1e-14)


def test_a_new_alpha_applies_to_all_leaves_at_once() -> None:
    tree = tree_of(RankTree, [1.0, 3.0, 2.0], alpha=1.0)
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
    tree = tree_of(RankTree, [1.0, 2.0])
    before = snapshot(tree)
    with pytest.raises(ValueError, match=message):
        tree.alpha = alpha
    assert snapshot(tree) == before


@pytest.mark.parametrize("alpha", ["0.7", None, 1j])
def test_alpha_must_be_a_number(alpha: Any) -> None:
    with pytest.raises(TypeError, match="alpha must be real numbers, got "):
        RankTree(4, alpha)


# --- ranks, and errors ---


def test_reading_ranks() -> None:
    tree = tree_of(RankTree, [1.0, 0.0, 3.0], alpha=1.0)
    assert type(tree.ranks(2)) is int
    assert [tree.ranks(i) for i in range(3)] == [2, 0, 1]
    assert [tree.masses(i) for i in range(3)] == [0.5, 0.0, 1.0]
    assert tree.ranks([2, 0, 2]).tolist() == [1, 2, 1]
    assert tree.ranks(np.array([[1], [2]], np.uint8)).tolist() == [[0], [1]]
    assert tree.ranks(slice(None)).tolist() == [2, 0, 1]
    assert tree.ranks(slice(1, 100)).tolist() == [0, 1]
    assert tree.ranks(slice(-1, None)).tolist() == [1]
    assert tree.ranks([]).shape == (0,)
    assert tree.n_ranked == 2
    assert repr(tree) == "RankTree(capacity=3, alpha=1.0, n_ranked=2)"
    for index in (-1, 3, 2**63, -(2**63)):
        with pytest.raises(IndexError, match=f"index {index} "):
            tree.ranks([index])
    for no_integer in (0.0, None, "0", True):
        with pytest.raises(TypeError, match="indices must be integers, got "):
            tree.ranks(no_integer)


@pytest.mark.parametrize("capacity", [2**31, 10**12])
def test_capacities_that_are_too_large(capacity: int) -> None:
    message = rf"`capacity` must be at most 2\*\*31 - 1, got {capacity}"
    with pytest.raises(ValueError, match=message):
        RankTree(capacity)


def test_any_finite_priority_is_allowed() -> None:
    assert RankTree(1_000).priority_limit == sys.float_info.max


# --- what a tree finds wrong with itself ---


def broken(field: str, index: int, value: float) -> Callable[[RankTree], None]:
    def break_it(tree: RankTree) -> None:
        getattr(tree._arrays, field)[index] = value

    return break_it


def swap_entries(tree: RankTree) -> None:
    start = int(tree._arrays.kids[0]) * BLOCK
    tree._arrays.keys[[start, start + 1]] = tree._arrays.keys[[start + 1, start]]


def break_separator(at_top: bool, last: bool, add: int) -> Callable[[RankTree], None]:
    def break_it(tree: RankTree) -> None:
        top, slots = rank_tree._used_slots(tree._arrays)
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
        (broken("head", rank_kernels.LARGEST, 1), r"priorities \[5e-324, .*\] are not those of"),
        (broken("head", rank_kernels.SMALLEST, 0), r"priorities \[.*, 0\.0\] are not those of"),
        (break_separator(False, False, -1), "a separator is not between the entries"),
        (break_separator(False, False, 2**50), "a separator is not between the entries"),
        (break_separator(False, True, 0), "the separator of a node is not that of its last block"),
        (break_separator(True, True, 0), "the separator of a node is not that of its last block"),
    ],
)
def test_check_valid_finds_what_is_broken(
    break_it: Callable[[RankTree], None], message: str
) -> None:
    tree = tree_of(RankTree, np.random.default_rng(0).random(10_000) + 0.1)
    assert_valid(tree)
    break_it(tree)
    valid, found = tree.check_valid()
    assert not valid
    assert re.match(message, found), found


def test_check_valid_finds_counts_that_only_add_up() -> None:
    tree = tree_of(RankTree, np.random.default_rng(0).random(10_000) + 0.1)
    tree._arrays.counts[0] += 1
    tree._arrays.counts[1] -= 1
    assert tree.check_valid() == (False, "the count of a block is not that of its entries")


def test_check_valid_finds_priorities_noted_without_a_leaf() -> None:
    tree = RankTree(5)
    tree._ends[rank_kernels.LARGEST] = 3.0
    assert tree.check_valid() == (False, "priorities [3.0, inf] are noted of no leaf")


# --- many leaves ---


def test_ranks_among_a_million_leaves() -> None:
    leaves = np.abs(np.random.default_rng(0).standard_cauchy(1_000_000)).astype(np.float32)
    tree = tree_of(RankTree, leaves.astype(np.float64))
    without_sums = tree.nbytes
    indices, _ = tree.sample(1_000)
    assert 8.0 <= (tree.nbytes - without_sums) / 1_000_000 <= 8.2  # as the docstring says
    expected = sorted_ranks(leaves.astype(np.float64))
    np.testing.assert_array_equal(tree.ranks(slice(None)), expected)
    np.testing.assert_array_equal(tree.ranks(indices), expected[indices])


def test_new_rows_at_the_maximum_cost_the_same_however_many_are_there() -> None:
    """The kernel does not walk through ties: the blocks it fills are full, one after the other."""
    tree = RankTree(200_000)
    for row in range(0, 200_000, 8):
        tree.fill(row, row + 8, tree.max_priority or 1.0)
    assert_valid(tree)
    assert used_blocks(tree) == 200_000 // BLOCK
    assert tree.ranks([0, 7, 100_000, 199_999]).tolist() == [1, 8, 100_001, 200_000]
