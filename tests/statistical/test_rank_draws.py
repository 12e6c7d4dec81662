"""
Draws from a RankTree follow the ranks, in each stratum.

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
    strata,
)
from draw_helpers import p_value_of_each_stratum as p_value_of_masses
from sb3_per.trees import RankTree

#: Draws a number of leaves by the ranks of the given priorities, with some alpha
Draw = Callable[[FloatArray, float, int], Callable[[], IntArray]]


def probabilities(leaves: FloatArray, alpha: float) -> FloatArray:
    """
    The paper's formula, with ties by leaf number.

    :return: of each leaf, shape ``(n,)``
    """
    order = np.argsort(-leaves, kind="stable")[: np.count_nonzero(leaves)]
    masses = np.zeros(len(leaves))
    masses[order] = (1.0 / np.arange(1, len(order) + 1)) ** alpha
    shares: FloatArray = masses / masses.sum()
    return shares


# --- a right tree and wrong ones ---


def rank_tree(leaves: FloatArray, alpha: float, batch_size: int) -> Callable[[], IntArray]:
    tree = RankTree(len(leaves), alpha)
    tree.update(np.arange(len(leaves)), leaves)
    return lambda: tree.sample(batch_size)[0]


def after_a_history(leaves: FloatArray, alpha: float, batch_size: int) -> Callable[[], IntArray]:
    """The same tree, after other leaves and another alpha were in it."""
    n = len(leaves)
    tree = RankTree(n, 3.0)
    tree.fill(0, n, 1e12)
    rng = np.random.default_rng(0)
    for _ in range(200):
        tree.update(rng.integers(n, size=9), rng.choice([0.0, 1e-9, 1.0, 1e9], 9))
    tree.update(rng.permutation(n), 0.0)
    for index in rng.permutation(n):
        tree.update(index, leaves[index])
    tree.alpha = alpha
    return lambda: tree.sample(batch_size)[0]


def by_shares(
    shares: FloatArray, leaves: FloatArray, points: Callable[[], FloatArray]
) -> Callable[[], IntArray]:
    """Leaves in the order of their ranks, each with a share of the mass of its own."""
    order = np.argsort(-leaves, kind="stable")[: np.count_nonzero(leaves)]
    ends = np.cumsum(shares[order])
    last = len(order) - 1
    return lambda: order[np.minimum(np.searchsorted(ends, points() * ends[-1], "right"), last)]


def by_priority(leaves: FloatArray, alpha: float, batch_size: int) -> Callable[[], IntArray]:
    """The proportional variant."""
    return by_shares(leaves**alpha, leaves, lambda: strata(batch_size))


def another_alpha(leaves: FloatArray, alpha: float, batch_size: int) -> Callable[[], IntArray]:
    shares = probabilities(leaves, alpha + 0.15)
    return by_shares(shares, leaves, lambda: strata(batch_size))


def ranks_from_zero(leaves: FloatArray, alpha: float, batch_size: int) -> Callable[[], IntArray]:
    """One too many for each rank."""
    ranks = 2.0 + np.argsort(np.argsort(-leaves, kind="stable"))
    shares: FloatArray = ranks.astype(np.float64) ** -alpha
    return by_shares(shares, leaves, lambda: strata(batch_size))


def zeros_are_ranked(leaves: FloatArray, alpha: float, batch_size: int) -> Callable[[], IntArray]:
    return rank_tree(leaves + 1e-12, alpha, batch_size)


def ranks_of_yesterday(leaves: FloatArray, alpha: float, batch_size: int) -> Callable[[], IntArray]:
    """A heap that is sorted from time to time: the first leaves have changed places since."""
    before = leaves.copy()
    first, second = np.argsort(-leaves, kind="stable")[:2]
    before[[first, second]] = before[[second, first]]
    return rank_tree(before, alpha, batch_size)


def independent(leaves: FloatArray, alpha: float, batch_size: int) -> Callable[[], IntArray]:
    shares = probabilities(leaves, alpha)
    return by_shares(shares, leaves, lambda: np.sort(np.random.random_sample(batch_size)))


def middle_of_the_stratum(
    leaves: FloatArray, alpha: float, batch_size: int
) -> Callable[[], IntArray]:
    shares = probabilities(leaves, alpha)
    return by_shares(shares, leaves, lambda: (np.arange(batch_size) + 0.5) / batch_size)


# --- checks ---


def in_order(drawn: IntArray, leaves: FloatArray, alpha: float) -> tuple[IntArray, FloatArray]:
    """
    :return: ranks of what was drawn, counted from 0, and probabilities of all ranks
    """
    order = np.argsort(-leaves, kind="stable")
    return np.argsort(order)[drawn], probabilities(leaves, alpha)[order]


def p_value_of_each_stratum(drawn: IntArray, leaves: FloatArray, alpha: float) -> float:
    return p_value_of_masses(*in_order(drawn, leaves, alpha))


LEAVES = {
    "few": np.array([1.0, 2.0, 3.0, 4.0]),
    "with zeros": np.array([0.0, 3.0, 0.0, 0.0, 1.0, 0.5, 0.0, 2.5, 4.0, 0.0, 0.0]),
    "equal": np.ones(50),
    "ties": np.random.default_rng(0).integers(0, 4, 67).astype(np.float64),
    "heavy tail": np.random.default_rng(0).pareto(1.0, 101),
    "hardly different": 1.0 + 1e-9 * np.random.default_rng(0).permutation(130),
}


@pytest.mark.parametrize("draw", [rank_tree, after_a_history])
@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("batch_size", [1, 8, 32])
@pytest.mark.parametrize("name", LEAVES)
def test_draws_follow_the_ranks_in_each_stratum(
    draw: Draw, alpha: float, batch_size: int, name: str
) -> None:
    leaves = LEAVES[name]
    drawn = batches(draw(leaves, alpha, batch_size), 4_000)
    assert p_value_of_each_stratum(drawn, leaves, alpha) > RIGHT


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize(
    "draw",
    [by_priority, another_alpha, ranks_from_zero, zeros_are_ranked, ranks_of_yesterday],
)
def test_wrong_masses_are_found(draw: Draw, batch_size: int) -> None:
    leaves = LEAVES["with zeros"]
    drawn = batches(draw(leaves, 0.7, batch_size), 20_000)
    assert p_value_of_each_stratum(drawn, leaves, 0.7) < WRONG


@pytest.mark.parametrize("draw", [independent, middle_of_the_stratum])
def test_wrong_strata_are_found(draw: Draw) -> None:
    leaves = LEAVES["few"]
    drawn = batches(draw(leaves, 0.7, 8), 10_000)
    assert p_value_of_each_stratum(drawn, leaves, 0.7) < WRONG


def test_places_inside_the_strata_are_independent() -> None:
    """Four equal masses in batches of two: the halves of one stratum and of the other one."""
    drawn = batches(rank_tree(np.ones(4), 0.0, 2), 10_000)
    table = np.bincount(2 * (drawn[:, 0] % 2) + drawn[:, 1] % 2, minlength=4)
    assert chisquare(table).pvalue > RIGHT


def test_draws_and_writes_in_turn() -> None:
    """
    The ranks of every draw are those of its moment: the priorities change before each of them, and
    one table of ranks still counts all draws.
    """
    rng = np.random.default_rng(0)
    np.random.seed(0)
    n, batch_size, rounds = 211, 16, 5_000
    tree, leaves = RankTree(n, 0.7), np.zeros(n)
    counts, stale_counts = np.zeros(n), np.zeros(n)
    indices, stale = np.arange(n), np.arange(n)
    for _ in range(rounds):
        leaves[indices] = np.abs(rng.standard_cauchy(len(indices)))
        tree.update(indices, leaves[indices])
        ranks = np.empty(n, dtype=np.int64)
        ranks[np.argsort(-leaves, kind="stable")] = np.arange(n)
        indices = tree.sample(batch_size)[0]
        counts += np.bincount(ranks[indices], minlength=n)
        stale_counts += np.bincount(stale[indices], minlength=n)
        stale = ranks
        indices = np.unique(indices)
    expected = probabilities(np.arange(n, 0.0, -1.0), 0.7) * rounds * batch_size
    # Strata make the counts vary less than those of independent draws would: too high a p-value
    # is no fault
    assert chisquare(counts, expected).pvalue > RIGHT
    # Ranks of one write before
    assert chisquare(stale_counts, expected).pvalue < WRONG


@pytest.mark.parametrize("batch_size", [1, 7, 64, 256])
def test_every_batch_has_one_draw_in_each_mass(batch_size: int) -> None:
    leaves = np.random.default_rng(1).pareto(1.2, 1001)
    for draw, right in ((rank_tree, True), (independent, False)):
        drawn = batches(draw(leaves, 0.7, batch_size), 300)
        found = has_one_draw_in_each_stratum(*in_order(drawn, leaves, 0.7))
        assert found == (right or batch_size == 1)


def test_a_million_leaves() -> None:
    """As many draws as leaves: the counts of ranks, grouped, are right to one draw or two."""
    n = 1_000_003
    leaves = np.random.default_rng(2).random(n)
    drawn = batches(rank_tree(leaves, 0.7, n), 1)[0]
    ranks = np.empty(n, dtype=np.int64)
    ranks[np.argsort(-leaves, kind="stable")] = np.arange(n)
    edges = np.unique(np.geomspace(1, n, 60).astype(np.int64))
    counts = np.diff(np.searchsorted(ranks[drawn], edges))
    ends = np.cumsum(np.arange(1, n + 1.0) ** -0.7)
    expected = np.diff(ends[edges - 1]) / ends[-1] * n
    # A stratum across an end may go either way
    np.testing.assert_allclose(counts, expected, rtol=0.0, atol=2.0)
