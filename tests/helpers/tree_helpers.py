"""Trees for tests: how they are made, read and drawn from."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import numpy.typing as npt

from sb3_per.trees import PriorityTree, RankTree

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

BELOW_ONE = math.nextafter(1.0, 0.0)
TINY = 5e-324  # the smallest float64 above zero


def tree_of(kind: Any, leaves: Sequence[float] | FloatArray, **options: float) -> Any:
    """A tree with these leaves."""
    tree = kind(len(leaves), **options)
    tree.update(np.arange(len(leaves)), leaves)
    return tree


def random_tree(kind: Any, capacity: int = 70) -> Any:
    return tree_of(kind, np.random.default_rng(0).random(capacity))


def snapshot(tree: PriorityTree) -> tuple[Any, ...]:
    """Everything that can be read of a tree."""
    numbers = (tree.total, tree.max_priority, tree.min_priority, tree.min_mass)
    ranks = tree.ranks(slice(None)).tobytes() if isinstance(tree, RankTree) else b""
    return tree[:].tobytes(), ranks, numbers


def assert_valid(tree: PriorityTree) -> None:
    assert tree.check_valid() == (True, "")


def drawn_at(tree: PriorityTree, place: float, batch_size: int) -> tuple[IntArray, FloatArray]:
    """A draw where every random number is ``place``."""
    with mock.patch.object(np.random, "random_sample", lambda size: np.full(size, place)):
        return tree.sample(batch_size)
