"""
The loops under :class:`~sb3_per.common.sum_tree.SumTree`, compiled by numba.

The arrays of a tree (``block`` is 8 leaves, one cache line; ``first`` is a power of two, the
number of the node above block 0):

* ``leaves``: priorities in order, ``8 * n_blocks`` of them, unused ones are zero;
* ``sums``: binary tree over the blocks, root at 1, the children of node ``i`` side by side at
  ``2 * i`` and ``2 * i + 1``, block ``k`` at ``first + k``;
* ``extremes``: the same tree with two numbers a node: at ``2 * i`` the largest leaf below node
  ``i``, at ``2 * i + 1`` the smallest leaf above zero (infinity when there is none).

A batch goes down (or up) one level at a time, so that the memory accesses of its members overlap.
Node numbers are unsigned: numba guards every signed index against being negative. No input is
checked here; that is the tree's part.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
NodeArray = npt.NDArray[np.uint64]
_F = TypeVar("_F", bound=Callable[..., object])

BLOCK = 8

_U0 = np.uint64(0)
_U1 = np.uint64(1)
_U2 = np.uint64(2)
_U3 = np.uint64(3)
_U4 = np.uint64(4)
_U5 = np.uint64(5)
_U6 = np.uint64(6)
_U7 = np.uint64(7)
_NOWHERE = np.uint64(2**64 - 1)


def compile_kernel(function: _F) -> _F:
    """
    Compile on the first call and keep the result on disk.

    :param function: function in numba's subset of Python
    :return: its compiled form; strict IEEE arithmetic (no ``fastmath``), because the tree promises
        that a node equals the sum of its children to the last bit
    """
    try:
        compiled = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:
        # Neither the folder of the package nor a cache folder of the user can be written:
        # compile again in every process rather than fail.
        compiled = numba.njit(nogil=True, error_model="numpy")(function)
    return cast(_F, compiled)


@compile_kernel
def _sum_block(leaves: FloatArray, start: np.uint64) -> float:
    left = (leaves[start] + leaves[start + _U1]) + (leaves[start + _U2] + leaves[start + _U3])
    right = (leaves[start + _U4] + leaves[start + _U5]) + (
        leaves[start + _U6] + leaves[start + _U7]
    )
    return float(left + right)


@compile_kernel
def _refresh_block(
    leaves: FloatArray, sums: FloatArray, extremes: FloatArray, first: np.uint64, block: np.uint64
) -> bool:
    """
    Recompute the node above one block.

    :return: whether its largest or smallest leaf changed
    """
    start = block << _U3
    sums[first + block] = _sum_block(leaves, start)
    largest = 0.0
    smallest = np.inf
    for i in range(8):
        leaf = leaves[start + np.uint64(i)]
        largest = max(largest, leaf)
        smallest = min(smallest, leaf if leaf > 0.0 else np.inf)
    at = (first + block) << _U1
    changed = extremes[at] != largest or extremes[at + _U1] != smallest
    extremes[at] = largest
    extremes[at + _U1] = smallest
    return bool(changed)


@compile_kernel
def _refresh_extremes(extremes: FloatArray, node: np.uint64) -> bool:
    """
    Recompute the largest and smallest leaf below one inner node.

    :return: whether one of the two changed
    """
    child = node << _U2
    largest = max(extremes[child], extremes[child + _U2])
    smallest = min(extremes[child + _U1], extremes[child + _U3])
    at = node << _U1
    changed = extremes[at] != largest or extremes[at + _U1] != smallest
    extremes[at] = largest
    extremes[at + _U1] = smallest
    return bool(changed)


@compile_kernel
def descend(
    leaves: FloatArray, sums: FloatArray, first: int, values: FloatArray, indices: IntArray
) -> None:
    """
    Find the leaf whose cumulative interval holds each value.

    It goes right where the value reaches the left sum *and* there is mass on the right. So a leaf
    of zero is never reached, also where rounding carries a value past the end of an interval.

    :param first: number of the node above block 0
    :param values: shape ``(n,)``, in ``[0, total]``; replaced by the leaves found
    :param indices: shape ``(n,)``, receives the numbers of the leaves
    """
    n = values.shape[0]
    first_node = np.uint64(first)
    for j in range(n):
        indices[j] = 1
    level = _U1
    while level < first_node:
        for j in range(n):
            left = np.uint64(indices[j]) << _U1
            value = values[j]
            left_sum = sums[left]
            right = np.uint64((value >= left_sum) & (sums[left + _U1] > 0.0))
            values[j] = value - left_sum * right
            indices[j] = left + right
        level <<= _U1
    for j in range(n):
        leaf = (np.uint64(indices[j]) - first_node) << _U3
        value = values[j]
        left_sum = (leaves[leaf] + leaves[leaf + _U1]) + (leaves[leaf + _U2] + leaves[leaf + _U3])
        right_sum = (leaves[leaf + _U4] + leaves[leaf + _U5]) + (
            leaves[leaf + _U6] + leaves[leaf + _U7]
        )
        right = np.uint64((value >= left_sum) & (right_sum > 0.0))
        value = value - left_sum * right
        leaf += right << _U2
        left_sum = leaves[leaf] + leaves[leaf + _U1]
        right_sum = leaves[leaf + _U2] + leaves[leaf + _U3]
        right = np.uint64((value >= left_sum) & (right_sum > 0.0))
        value = value - left_sum * right
        leaf += right << _U1
        leaf += np.uint64((value >= leaves[leaf]) & (leaves[leaf + _U1] > 0.0))
        indices[j] = leaf
        values[j] = leaves[leaf]


@compile_kernel
def draw(
    leaves: FloatArray, sums: FloatArray, first: int, uniforms: FloatArray, indices: IntArray
) -> None:
    """
    Stratified draw: cut the total into equal masses and take one point in each.

    :param first: number of the node above block 0
    :param uniforms: shape ``(n,)``, in ``[0, 1)``, the place inside each stratum; replaced by the
        leaves drawn
    :param indices: shape ``(n,)``, receives the numbers of the leaves, in ascending order
    """
    n = uniforms.shape[0]
    total = sums[1]
    for j in range(n):
        # Not times total / n, which is zero for the smallest of totals
        uniforms[j] = (j + uniforms[j]) / n * total
    descend(leaves, sums, first, uniforms, indices)


@compile_kernel
def first_fault(indices: IntArray, priorities: FloatArray, size: int, limit: float) -> int:
    """
    Look for an entry that must not be written.

    :param size: how many leaves may be written to
    :param limit: largest priority that is allowed
    :return: position of the first index outside ``[0, size)`` or priority outside ``[0, limit]``
        (NaN included), -1 when there is none
    """
    for j in range(indices.shape[0]):
        if not (0 <= indices[j] < size and 0.0 <= priorities[j] <= limit):
            return j
    return -1


@compile_kernel
def _raise_extremes(extremes: FloatArray, nodes: NodeArray, n: int) -> None:
    """
    Recompute largest and smallest leaves from some nodes up, as far as anything changes, which is
    seldom far.

    :param nodes: the ``n`` nodes to begin with, on one level; overwritten
    """
    while n > 0:
        n_above = 0
        last = _U0
        for j in range(n):
            node = nodes[j]
            # Above the root is node 0, which is none
            if node in (last, _U0):
                continue
            last = node
            if _refresh_extremes(extremes, node):
                nodes[n_above] = node >> _U1
                n_above += 1
        n = n_above


@compile_kernel
def _raise_sums(sums: FloatArray, nodes: NodeArray, n: int, level: np.uint64) -> None:
    """
    Recompute all sums above some nodes.

    :param nodes: ``n`` nodes of one level; overwritten
    :param level: the first node of that level
    """
    while level > _U1:
        n_above = 0
        last = _NOWHERE
        for j in range(n):
            node = nodes[j] >> _U1
            if node == last:
                continue
            last = node
            sums[node] = sums[node << _U1] + sums[(node << _U1) + _U1]
            nodes[n_above] = node
            n_above += 1
        n = n_above
        level >>= _U1


@compile_kernel
def write(
    leaves: FloatArray,
    sums: FloatArray,
    extremes: FloatArray,
    first: int,
    indices: IntArray,
    priorities: FloatArray,
) -> None:
    """
    Set leaves, then recompute every node above them from its children.

    Neighbours in the batch that share a parent recompute it once: a stratified draw comes back in
    ascending order, so that the upper levels cost next to nothing.

    :param first: number of the node above block 0
    :param indices: shape ``(n,)``, numbers of the leaves; the last of repeated ones wins
    :param priorities: shape ``(n,)``, finite and not negative
    """
    first_node = np.uint64(first)
    n = indices.shape[0]
    for j in range(n):
        # Adding zero makes 0.0 of -0.0
        leaves[np.uint64(indices[j])] = priorities[j] + 0.0
    nodes = np.empty(n, np.uint64)
    changed = np.empty(n, np.uint64)
    n_nodes = 0
    n_changed = 0
    last = _NOWHERE
    for j in range(n):
        block = np.uint64(indices[j]) >> _U3
        if block == last:
            continue
        last = block
        node = first_node + block
        if _refresh_block(leaves, sums, extremes, first_node, block):
            changed[n_changed] = node >> _U1
            n_changed += 1
        nodes[n_nodes] = node
        n_nodes += 1
    _raise_extremes(extremes, changed, n_changed)
    _raise_sums(sums, nodes, n_nodes, first_node)


@compile_kernel
def fill(
    leaves: FloatArray,
    sums: FloatArray,
    extremes: FloatArray,
    first: int,
    start: int,
    stop: int,
    priority: float,
) -> None:
    """
    Set a run of neighbouring leaves to one priority and recompute the nodes above them.

    :param first: number of the node above block 0
    :param start: first leaf
    :param stop: one past the last leaf, greater than ``start``
    :param priority: finite and not negative
    """
    same = True
    for i in range(start, stop):
        leaf = np.uint64(i)
        same = same and leaves[leaf] == priority
        leaves[leaf] = priority + 0.0
    if same:
        return
    first_node = np.uint64(first)
    low = np.uint64(start) >> _U3
    high = np.uint64(stop - 1) >> _U3
    changed = False
    for k in range(low, high + _U1):
        if _refresh_block(leaves, sums, extremes, first_node, np.uint64(k)):
            changed = True
    low += first_node
    high += first_node
    while low > _U1:
        low >>= _U1
        high >>= _U1
        any_above = False
        for k in range(low, high + _U1):
            node = np.uint64(k)
            sums[node] = sums[node << _U1] + sums[(node << _U1) + _U1]
            if changed and _refresh_extremes(extremes, node):
                any_above = True
        changed = any_above


@compile_kernel
def checked_write(
    leaves: FloatArray,
    sums: FloatArray,
    extremes: FloatArray,
    first: int,
    indices: IntArray,
    priorities: FloatArray,
    size: int,
    limit: float,
) -> int:
    """
    :func:`write`, unless :func:`first_fault` finds one: then nothing is written.

    :param first: number of the node above block 0
    :param indices: shape ``(n,)``
    :param priorities: shape ``(n,)``
    :param size: how many leaves may be written to
    :param limit: largest priority that is allowed
    :return: position of the fault, or -1
    """
    at = first_fault(indices, priorities, size, limit)
    if at < 0:
        write(leaves, sums, extremes, first, indices, priorities)
    return at
