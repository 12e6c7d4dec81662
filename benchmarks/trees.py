"""Sum-trees: draws and writes of whole batches, against trees of other packages."""

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.race import Contestant, Race
from sb3_per import SumTree
from sb3_per.trees.rank_tree import RankTree

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

OURS = "sb3_per"
BY_RANK = "sb3_per, by rank"
#: Number of batches of indices that a write goes through before it starts again
N_BATCHES = 64


class Tree(NamedTuple):
    """
    A full tree with two functions.

    :param draw: draws a batch of the given size
    :param write: sets the given leaves to the given priorities
    """

    draw: Callable[[int], Any]
    write: Callable[[IntArray, FloatArray], Any]


def ours(priorities: FloatArray) -> Tree:
    """Our sum-tree."""
    tree = SumTree(len(priorities))
    tree.update(np.arange(len(priorities)), priorities)
    return Tree(tree.sample, tree.update)


def by_rank(priorities: FloatArray) -> Tree:
    """Our rank-tree."""
    tree = RankTree(len(priorities), alpha=0.7)
    tree.update(np.arange(len(priorities)), priorities)
    # Computes the masses of all ranks, which happens once and is not part of a draw
    tree.sample(1)
    return Tree(tree.sample, tree.update)


def rust_sumtree(priorities: FloatArray) -> Tree:
    """``sumtree``, written in Rust: stratified draws, as in ours."""
    from sumtree import SumTree as RustTree

    tree: Any = RustTree(len(priorities))
    tree.update_batched(np.arange(len(priorities)), priorities)
    return Tree(tree.sample_batched, tree.update_batched)


def tianshou_tree(priorities: FloatArray) -> Tree:
    """The segment tree of tianshou, numba: draws as its prioritized buffer makes them."""
    from tianshou.data.utils.segtree import SegmentTree

    tree = SegmentTree(len(priorities))
    tree[np.arange(len(priorities))] = priorities

    def draw(batch_size: int) -> Any:
        return tree.get_prefix_sum_idx(np.random.rand(batch_size) * tree.reduce())

    return Tree(draw, tree.__setitem__)


def cpprb_buffer(priorities: FloatArray) -> Tree:
    """The buffer of cpprb, C++, with one number per transition: its tree can't be used alone."""
    from cpprb import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(len(priorities), {"number": {}}, alpha=1.0)
    for start in range(0, len(priorities), 100_000):
        part = priorities[start : start + 100_000]
        buffer.add(number=part, priorities=part)
    return Tree(buffer.sample, buffer.update_priorities)


def torchrl_tree(priorities: FloatArray) -> Tree:
    """The segment tree of torchrl, C++."""
    import torch as th
    from torchrl._torchrl import SumSegmentTreeFp64

    tree = SumSegmentTreeFp64(len(priorities))
    tree[th.arange(len(priorities))] = th.from_numpy(priorities)

    def draw(batch_size: int) -> Any:
        total = tree.query(0, len(priorities))
        return tree.scan_lower_bound(np.random.uniform(0.0, total, batch_size))

    return Tree(draw, tree.__setitem__)


MAKERS: dict[str, Callable[[FloatArray], Tree]] = {
    OURS: ours,
    BY_RANK: by_rank,
    "sumtree": rust_sumtree,
    "tianshou": tianshou_tree,
    "cpprb": cpprb_buffer,
    "torchrl": torchrl_tree,
}


def available() -> dict[str, str]:
    """:return: reasons by the names of the contestants that can't run"""
    missing = {}
    for name, make in MAKERS.items():
        try:
            make(np.ones(8)).draw(2)
        except ImportError:
            missing[name] = "it can't be imported with the versions installed here"
        except Exception as error:  # other packages may fail in any way
            missing[name] = f"it fails with {type(error).__name__}"
    return missing


def race(
    capacity: int, batch_size: int, names: list[str], rounds: int, seconds: float
) -> dict[str, Race]:
    """
    :param capacity: number of leaves, all of them filled
    :param batch_size: size of each draw and each write
    :param names: names of the contestants
    :param rounds: number of rounds
    :param seconds: length of a turn
    :return: the races ``"draw"`` and ``"write"``
    """
    rng = np.random.default_rng(0)
    priorities = rng.exponential(size=capacity) + 1e-3
    # Indices as from a draw: one leaf from each of equal masses, in ascending order
    reference = SumTree(capacity)
    reference.update(np.arange(capacity), priorities)
    batches = [
        (reference.sample(batch_size)[0], rng.exponential(size=batch_size) + 1e-3)
        for _ in range(N_BATCHES)
    ]
    trees = {name: MAKERS[name](priorities) for name in names}
    draws = {name: _draw(tree, batch_size) for name, tree in trees.items()}
    writes = {name: _write(tree, cycle(batches)) for name, tree in trees.items()}
    label = f"{capacity:,} leaves, batch {batch_size}"
    return {
        "draw": Race.run(f"draw, {label}", draws, rounds, seconds),
        "write": Race.run(f"write, {label}", writes, rounds, seconds),
    }


def _draw(tree: Tree, batch_size: int) -> Contestant:
    return lambda: tree.draw(batch_size)


def _write(tree: Tree, batches: Iterator[tuple[IntArray, FloatArray]]) -> Contestant:
    return lambda: tree.write(*next(batches))
