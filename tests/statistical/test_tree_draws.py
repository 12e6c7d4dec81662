"""
Draws from a SumTree follow the priorities, in each stratum.

Every check is also run on a tree that is wrong in one way, which it must find. A right tree fails
a check with probability 0.001 (the seeds are fixed: it passes once and for all), a wrong one has
to fail far beyond that.
"""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chisquare

from draw_helpers import (
    RIGHT,
    WRONG,
    FloatArray,
    IntArray,
    batches,
    has_one_draw_in_each_stratum,
    p_value_of_each_stratum,
    strata,
)
from sb3_per import SumTree

#: Draws a number of leaves in proportion to the given priorities
Draw = Callable[[FloatArray, int], Callable[[], IntArray]]


# --- a right tree and wrong ones ---


def sum_tree(leaves: FloatArray, batch_size: int) -> Callable[[], IntArray]:
    tree = SumTree(len(leaves))
    tree.update(np.arange(len(leaves)), leaves)
    return lambda: tree.sample(batch_size)[0]


def after_a_history(leaves: FloatArray, batch_size: int) -> Callable[[], IntArray]:
    """The same tree, after other leaves were in it: larger ones, smaller ones and none."""
    n = len(leaves)
    tree = SumTree(n)
    tree.fill(0, n, 1e12)
    rng = np.random.default_rng(0)
    for _ in range(200):
        tree.update(rng.integers(n, size=9), rng.choice([0.0, 1e-9, 1.0, 1e9], 9))
    tree.update(rng.permutation(n), 0.0)
    for index in rng.permutation(n):
        tree.update(index, leaves[index])
    return lambda: tree.sample(batch_size)[0]


def search(leaves: FloatArray, values: Callable[[], FloatArray]) -> Callable[[], IntArray]:
    """Leaves at some shares of the total."""
    ends = np.cumsum(leaves)
    return lambda: np.minimum(
        np.searchsorted(ends, values() * ends[-1], side="right"), len(leaves) - 1
    )


def without_the_last_leaf(leaves: FloatArray, batch_size: int) -> Callable[[], IntArray]:
    """An exclusive end taken for an inclusive one."""
    return search(leaves[:-1], lambda: strata(batch_size))


def alpha_applied_twice(leaves: FloatArray, batch_size: int) -> Callable[[], IntArray]:
    return search(leaves**0.6, lambda: strata(batch_size))


def one_leaf_further(leaves: FloatArray, batch_size: int) -> Callable[[], IntArray]:
    """The left sum is kept where it ought to be taken off."""
    draw = search(leaves, lambda: strata(batch_size))
    return lambda: (draw() + 1) % len(leaves)


def differences_in_float32(leaves: FloatArray, batch_size: int) -> Callable[[], IntArray]:
    """Sums that remember a large priority which is gone."""
    sums = np.cumsum(leaves, dtype=np.float32)
    sums += np.float32(1e7)
    sums -= np.float32(1e7)
    return search(np.diff(sums, prepend=np.float32(0)), lambda: strata(batch_size))


def independent(leaves: FloatArray, batch_size: int) -> Callable[[], IntArray]:
    return search(leaves, lambda: np.sort(np.random.random_sample(batch_size)))


def one_number_for_the_batch(leaves: FloatArray, batch_size: int) -> Callable[[], IntArray]:
    """The same place in each stratum."""
    return search(leaves, lambda: (np.arange(batch_size) + np.random.random_sample()) / batch_size)


def middle_of_the_stratum(leaves: FloatArray, batch_size: int) -> Callable[[], IntArray]:
    return search(leaves, lambda: (np.arange(batch_size) + 0.5) / batch_size)


# --- checks ---


def p_value_of_independence(drawn: IntArray) -> float:
    """
    Of the halves of the first stratum and of the second one, for four equal leaves in batches of
    two.
    """
    table = np.bincount(2 * (drawn[:, 0] % 2) + drawn[:, 1] % 2, minlength=4)
    return float(chisquare(table).pvalue)


LEAVES = {
    "few": np.array([1.0, 2.0, 3.0, 4.0]),
    "with zeros": np.array([0.0, 3.0, 0.0, 0.0, 1.0, 0.5, 0.0, 2.5, 4.0, 0.0, 0.0]),
    "equal": np.ones(50),
    "heavy tail": np.random.default_rng(0).pareto(1.0, 100),
    "last one large": np.append(np.ones(64), 30.0),
}


@pytest.mark.parametrize("draw", [sum_tree, after_a_history])
@pytest.mark.parametrize("batch_size", [1, 8, 32])
@pytest.mark.parametrize("name", LEAVES)
def test_draws_follow_the_priorities_in_each_stratum(
    draw: Draw, batch_size: int, name: str
) -> None:
    leaves = LEAVES[name]
    drawn = batches(draw(leaves, batch_size), 10_000)
    assert p_value_of_each_stratum(drawn, leaves) > RIGHT


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize(
    "draw", [without_the_last_leaf, alpha_applied_twice, one_leaf_further, differences_in_float32]
)
def test_wrong_priorities_are_found(draw: Draw, batch_size: int) -> None:
    for leaves in (LEAVES["few"] / 10, LEAVES["last one large"] / 10):
        drawn = batches(draw(leaves, batch_size), 10_000)
        assert p_value_of_each_stratum(drawn, leaves) < WRONG


@pytest.mark.parametrize("draw", [independent, middle_of_the_stratum])
def test_wrong_strata_are_found(draw: Draw) -> None:
    leaves = LEAVES["few"]
    drawn = batches(draw(leaves, 8), 10_000)
    assert p_value_of_each_stratum(drawn, leaves) < WRONG


def test_places_inside_the_strata_are_independent() -> None:
    leaves = np.ones(4)
    assert p_value_of_independence(batches(sum_tree(leaves, 2), 10_000)) > RIGHT
    wrong = batches(one_number_for_the_batch(leaves, 2), 10_000)
    assert p_value_of_independence(wrong) < WRONG


def test_frequencies_of_leaves_1_2_3_4() -> None:
    """20,000 batches of 8: within 0.005, as far as four standard deviations reach."""
    drawn = batches(sum_tree(LEAVES["few"], 8), 20_000)
    frequencies = np.bincount(drawn.ravel(), minlength=4) / drawn.size
    np.testing.assert_allclose(frequencies, [0.1, 0.2, 0.3, 0.4], rtol=0.0, atol=0.005)


@pytest.mark.parametrize("at", [0, 1, 3, 5])
def test_a_leaf_of_half_the_mass_is_half_of_every_batch(at: int) -> None:
    """4 of 8, one more or less where strata lie across its ends; independent draws: 0 to 8."""
    leaves = np.insert(np.array([1.0, 3.0, 2.0, 5.0, 4.0]), at, 15.0)
    counts = (batches(sum_tree(leaves, 8), 2_000) == at).sum(axis=1)
    assert set(counts) <= {3, 4, 5}
    if at in (0, 5):
        assert set(counts) == {4}
    wrong = (batches(independent(leaves, 8), 2_000) == at).sum(axis=1)
    assert wrong.min() < 3
    assert wrong.max() > 5


@pytest.mark.parametrize("batch_size", [1, 7, 64, 256])
def test_every_batch_has_one_draw_in_each_mass(batch_size: int) -> None:
    leaves = np.random.default_rng(1).pareto(1.2, 1000)
    for draw, right in ((sum_tree, True), (independent, False)):
        drawn = batches(draw(leaves, batch_size), 300)
        assert has_one_draw_in_each_stratum(drawn, leaves) == (right or batch_size == 1)


def test_a_million_leaves() -> None:
    """As many draws as leaves: each tenth of the leaves gets its share, to one draw."""
    rng = np.random.default_rng(2)
    leaves = rng.random(1_000_000) ** 3
    drawn = batches(sum_tree(leaves, 1_000_000), 1)[0]
    shares = leaves.reshape(10, -1).sum(axis=1) / leaves.sum() * len(drawn)
    counts = np.bincount(drawn // 100_000, minlength=10)
    # A stratum across each end of a tenth may go either way
    np.testing.assert_allclose(counts, shares, rtol=0.0, atol=2.0)
    # Inside: the count of a leaf has mean P(i) * n, over leaves grouped by priority
    order = np.argsort(leaves).reshape(100, -1)
    expected = leaves[order].sum(axis=1) / leaves.sum() * len(drawn)
    by_group = np.bincount(drawn, minlength=len(leaves))[order].sum(axis=1)
    assert chisquare(by_group, expected * by_group.sum() / expected.sum()).pvalue > RIGHT
