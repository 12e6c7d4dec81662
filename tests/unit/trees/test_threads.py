"""Other threads may read and write a tree while one draws from it and writes to it."""

import copy
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sb3_per.trees import RankTree, SumTree
from tree_helpers import assert_valid, snapshot, tree_of

CAPACITY = 2_000


def read(tree: Any) -> None:
    masses = tree.masses(slice(None))
    assert (masses >= 0.0).all()
    assert np.isfinite(masses).all()
    assert np.isfinite(tree.masses(np.arange(0, CAPACITY, 3))).all()
    assert np.isfinite(tree[:]).all()
    assert min(tree.total, tree.min_mass, tree.max_priority, tree.min_priority) > 0.0
    assert tree.nbytes > 8 * CAPACITY
    tree.get_leaf(np.linspace(0.0, 0.5, 5))
    assert_valid(tree)
    assert_valid(copy.copy(tree))


def read_ranks(tree: RankTree) -> None:
    ranks = tree.ranks(slice(None))
    # Those of one moment: none is missing and none is there twice
    assert sorted(ranks[ranks > 0]) == list(range(1, np.count_nonzero(ranks) + 1))
    assert tree.ranks(np.arange(CAPACITY)).max() <= CAPACITY


def set_alpha(tree: RankTree) -> None:
    tree.alpha = 1.0 if tree.alpha == 0.5 else 0.5


def adder() -> Callable[[Any], None]:
    starts = itertools.cycle(range(0, CAPACITY, 8))

    def add(tree: Any) -> None:
        """New transitions at the maximum, and some that may not be drawn any longer."""
        start = next(starts)
        tree.fill(start, start + 8, tree.max_priority)
        start = (start + 96) % CAPACITY
        tree.fill(start, start + 8, 0.0)

    return add


def draw_and_write(tree: Any, is_over: threading.Event) -> None:
    rng = np.random.default_rng(0)
    for i in range(1_000):
        if is_over.is_set():
            return
        indices, masses = tree.sample(64)
        assert masses.min() > 0.0
        tree.update(indices, rng.random(64) + 1e-3)
        if i % 50 == 0:
            # More than a rank-tree puts in one by one
            tree.update(rng.integers(CAPACITY, size=1_500), rng.random(1_500) + 1e-3)


@pytest.mark.parametrize(
    ("kind", "actions"),
    [(SumTree, [read]), (RankTree, [read, read_ranks, set_alpha])],
    ids=["SumTree", "RankTree"],
)
def test_no_thread_sees_or_makes_a_broken_tree(
    kind: Any, actions: list[Callable[[Any], None]]
) -> None:
    """
    No error, no crash, and a tree that is valid at every moment. With kernels that let the GIL go,
    both trees fail, or the process crashes.
    """
    tree = kind(CAPACITY)
    tree.fill(0, CAPACITY, 1.0)
    errors: list[BaseException] = []
    is_over = threading.Event()

    def repeat(action: Callable[[Any], None]) -> None:
        try:
            while not is_over.is_set():
                action(tree)
        except BaseException as error:
            errors.append(error)
            is_over.set()

    threads = [threading.Thread(target=repeat, args=(action,)) for action in (*actions, adder())]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        draw_and_write(tree, is_over)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not errors, errors
    options = {"alpha": tree.alpha} if kind is RankTree else {}
    assert_valid(tree)
    assert snapshot(tree) == snapshot(tree_of(kind, tree[:], **options))
