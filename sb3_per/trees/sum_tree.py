"""Sum-tree: weighted draws among millions of priorities in logarithmic time."""

from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_per.trees import sum_kernels
from sb3_per.trees.priority_tree import PriorityTree
from sb3_per.trees.sum_kernels import BLOCK, GROUP, FloatArray, IntArray

__all__ = ["SumTree"]


def _zeros_on_cache_lines(size: int) -> FloatArray:
    """
    :param size: number of zeros
    :return: zeros, shape ``(size,)``, that start at the beginning of a cache line (64 bytes), so
        that a block of leaves takes one line and not two
    """
    array = np.zeros(size + BLOCK - 1)
    offset = -(array.ctypes.data // array.itemsize) % BLOCK
    return array[offset : offset + size]


class SumTree(PriorityTree):
    """
    Binary tree whose leaves are priorities and whose nodes hold the sums of the leaves below them
    (Schaul et al. 2016, appendix B.2.1). The mass of a leaf is its priority, and leaves are ordered
    by number.

    Drawing a leaf in proportion to its priority, and changing a priority, take time logarithmic
    in ``capacity``. Sums are float64 and always recomputed from the children, never adjusted by a
    difference, so that no error accumulates: ``total`` depends on the leaves alone, not on their
    history. A leaf of zero can't be drawn. The largest and the smallest priority are exact and
    known at any time.

    :param capacity: number of leaves, at least 1; all are zero at first
    :raises TypeError: if ``capacity`` is not an integer
    :raises ValueError: if ``capacity`` is below 1

    >>> tree = SumTree(3)
    >>> tree.update([0, 1, 2], [1.0, 0.0, 3.0])
    >>> tree.total, tree.max_priority, tree.min_priority
    (4.0, 3.0, 1.0)
    >>> tree.get_leaf([0.5, 1.0, 3.9])
    (array([0, 2, 2]), array([1., 3., 3.]))
    """

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        n_blocks = -(-capacity // BLOCK)
        # Number of the node above block 0: the smallest power of two with room for all blocks
        self._first = 1 << (n_blocks - 1).bit_length()
        self._blocks = _zeros_on_cache_lines(BLOCK * n_blocks)
        # Without the unused rest of the last block
        self._leaves = self._blocks[:capacity]
        self._sums = _zeros_on_cache_lines(2 * self._first)
        self._first_group = max(self._first // (GROUP // BLOCK), 1)
        self._extremes = _zeros_on_cache_lines(4 * self._first_group)
        self._extremes[1::2] = np.inf
        # Below this no sum of leaves can overflow. The margin is for the rounding of the sums.
        self._limit = float(np.finfo(np.float64).max) / capacity * (1.0 - 1e-12)

    def _rebuild(self) -> None:
        self._sums[:], self._extremes[:] = self._nodes_above(self._blocks)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(capacity={self._capacity}, total={self.total})"

    @property
    def draw_arguments(self) -> tuple[FloatArray, FloatArray, int]:
        """First arguments of :func:`sum_kernels.draw`: the arrays."""
        return self._blocks, self._sums, self._first

    @property
    def write_arguments(self) -> tuple[FloatArray, FloatArray, FloatArray, int]:
        """First arguments of :func:`sum_kernels.write`: the arrays."""
        return self._blocks, self._sums, self._extremes, self._first

    @property
    def nbytes(self) -> int:
        """
        Memory in bytes: per leaf of a large tree 10.5 if ``capacity`` is a power of two, up to 13
        otherwise; 10.6 for a million leaves.
        """
        return self._blocks.nbytes + self._sums.nbytes + self._extremes.nbytes

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return self._sums.item(1)

    @property
    def max_priority(self) -> float:
        """Largest priority; 0.0 when no leaf is above zero."""
        return self._extremes.item(2)

    @property
    def min_priority(self) -> float:
        """Smallest priority above zero; infinity when no leaf is above zero."""
        return self._extremes.item(3)

    @property
    def min_mass(self) -> float:
        """Smallest mass above zero, which is here the smallest priority."""
        return self.min_priority

    @property
    def priority_limit(self) -> float:
        """Largest priority that a leaf may get: ``capacity`` of them still have a finite sum."""
        return self._limit

    def masses(self, indices: npt.ArrayLike | slice) -> Any:
        """
        Masses of leaves, which are drawn in proportion to them: here the priorities themselves.

        :param indices: as in ``tree[indices]``
        :return: the same as ``tree[indices]``
        """
        return self[indices]

    def write(self, indices: IntArray, priorities: FloatArray) -> None:
        """
        :meth:`update` without its checks.

        :param indices: int64, shape ``(n,)``, contiguous, in ``[0, capacity)``
        :param priorities: float64, shape ``(n,)``, contiguous, in ``[0, priority_limit]``
        """
        sum_kernels.write(
            self._blocks, self._sums, self._extremes, self._first, indices, priorities
        )

    def _checked_write(self, indices: IntArray, priorities: FloatArray) -> int:
        return sum_kernels.checked_write(
            self._blocks,
            self._sums,
            self._extremes,
            self._first,
            indices,
            priorities,
            self._capacity,
            self._limit,
        )

    def _fill(self, start: int, stop: int, priority: float) -> None:
        sum_kernels.fill(
            self._blocks, self._sums, self._extremes, self._first, start, stop, priority
        )

    def _find(self, values: FloatArray, indices: IntArray) -> int:
        return sum_kernels.find(self._blocks, self._sums, self._first, values, indices)

    def _draw(self, uniforms: FloatArray, indices: IntArray) -> bool:
        return sum_kernels.draw(self._blocks, self._sums, self._first, uniforms, indices)

    def check_valid(self) -> tuple[bool, str]:
        """
        Check the tree against its own rules, from the leaves up.

        :return: whether all of them hold, and a description of the first violation. Every node
            equals the sum of its children bit for bit, the extremes are those of the leaves, the
            leaves are finite and not negative.
        """
        # Copies from one moment, whatever other threads write meanwhile
        blocks, sums, extremes = map(np.empty_like, (self._blocks, self._sums, self._extremes))
        sum_kernels.copy(self._blocks, self._sums, self._extremes, blocks, sums, extremes)
        bad = np.flatnonzero(~((blocks >= 0.0) & (blocks <= self._limit)))
        if bad.size:
            return False, f"leaf {bad[0]} is {blocks[bad[0]]}"
        if blocks[self._capacity :].any():
            return False, "a leaf beyond the capacity is not zero"
        right_sums, right_extremes = self._nodes_above(blocks)
        bad = np.flatnonzero(sums[1:] != right_sums[1:]) + 1
        if bad.size:
            node = int(bad[-1])
            return False, (
                f"node {node} holds {sums[node]}, its children add up to {right_sums[node]}"
            )
        bad = np.flatnonzero(extremes[2:] != right_extremes[2:]) + 2
        if bad.size:
            node, which = divmod(int(bad[-1]), 2)
            return False, (
                f"node {node} holds {extremes[bad[-1]]} as {('largest', 'smallest')[which]} leaf, "
                f"it is {right_extremes[bad[-1]]}"
            )
        return True, ""

    def _nodes_above(self, leaves: FloatArray) -> tuple[FloatArray, FloatArray]:
        """
        Compute all nodes at once: the kernels' computation in plain NumPy.

        :param leaves: leaves including the unused rest of the last block
        :return: contents that ``_sums`` and ``_extremes`` must have
        """
        first = self._first
        n_blocks = len(leaves) // BLOCK
        blocks = leaves.reshape(n_blocks, BLOCK)  # [block, leaf]
        pairs = blocks[:, 0::2] + blocks[:, 1::2]
        quads = pairs[:, 0::2] + pairs[:, 1::2]
        sums = np.zeros(2 * first)
        sums[first : first + n_blocks] = quads[:, 0] + quads[:, 1]
        while first > 1:
            below = sums[first : 2 * first]
            first //= 2
            sums[first : 2 * first] = below[0::2] + below[1::2]
        first = self._first_group
        extremes = np.zeros((2 * first, 2))
        extremes[:, 1] = np.inf
        starts = np.arange(0, len(leaves), GROUP)
        groups = slice(first, first + len(starts))
        above_zero = np.where(leaves > 0.0, leaves, np.inf)
        extremes[groups, 0] = np.maximum.reduceat(leaves, starts)
        extremes[groups, 1] = np.minimum.reduceat(above_zero, starts)
        while first > 1:
            pairs = extremes[first : 2 * first].reshape(first // 2, 2, 2)  # [node, child, which]
            first //= 2
            extremes[first : 2 * first, 0] = pairs[:, :, 0].max(axis=1)
            extremes[first : 2 * first, 1] = pairs[:, :, 1].min(axis=1)
        return sums, extremes.ravel()
