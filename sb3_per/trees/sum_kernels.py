"""
The loops under :class:`~sb3_per.trees.sum_tree.SumTree`, compiled by numba.

The arrays of a tree (a block is 8 leaves, one cache line; a group is 64 leaves; ``first`` is a
power of two, the number of the node above block 0):

* ``leaves``: priorities in order, ``8 * n_blocks`` of them, unused ones are zero;
* ``sums``: binary tree over the blocks, root at 1, the children of node ``i`` side by side at
  ``2 * i`` and ``2 * i + 1``, block ``k`` at ``first + k``;
* ``extremes``: binary tree over the groups with two numbers per node: at ``2 * i`` the largest leaf
  below node ``i``, at ``2 * i + 1`` the smallest leaf above zero (infinity if there is none).
  Group ``k`` is node ``max(first // 8, 1) + k``.

A batch moves down (or up) one level at a time, so that the memory accesses of its members overlap.
Node numbers are unsigned: numba guards every signed index against being negative. The tree checks
its arguments; the kernels do not, unless they say so.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core.caching import NullCache
from numba.core.registry import CPUDispatcher

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
NodeArray = npt.NDArray[np.uint64]
_F = TypeVar("_F", bound=Callable[..., object])
_T = TypeVar("_T", bound=np.generic)

BLOCK = 8
GROUP = 64

_U0 = np.uint64(0)
_U1 = np.uint64(1)
_U2 = np.uint64(2)
_U3 = np.uint64(3)
_U4 = np.uint64(4)
_U5 = np.uint64(5)
_U6 = np.uint64(6)
_U7 = np.uint64(7)
_U8 = np.uint64(8)
_U64 = np.uint64(64)
_NOWHERE = np.uint64(2**64 - 1)


#: Results of :func:`find`: all values were found, or no leaf is above zero
FOUND = -1
NO_MASS = -2


class Kernel(CPUDispatcher):
    """
    A function compiled by numba that works without numba's cache on disk when that fails: a full
    disk, a folder that can't be written, a damaged file. numba itself raises such errors from the
    call, although it could compile the function without the cache.
    """

    _cache: Any  # of the base class, which gives it no type

    def compile(self, sig: Any) -> Any:
        """
        :param sig: types of the arguments
        :return: compiled function for them
        """
        try:
            return super().compile(sig)
        except Exception:
            # Unpickling a damaged file can raise any exception
            if isinstance(self._cache, NullCache):
                raise
        with contextlib.suppress(Exception):
            # A later process can then store its result
            self._cache.flush()
        self._cache = NullCache()
        return super().compile(sig)


def compile_kernel(function: _F, fastmath: frozenset[str] = frozenset()) -> _F:
    """
    Compile a function on its first call and keep the result on disk. Two rules hold for every
    kernel:

    * It holds the GIL (no ``nogil``). Without it, a kernel that writes would show other threads
      half-changed arrays, and one that reads sizes, counts or places in one array to access another
      would read outside of it when they change meanwhile. That concerns all kernels of the trees
      and of the buffers, so that none releases the GIL. As nothing interrupts a kernel, a tree
      changes from one valid state to the next, whatever threads or signals do.
    * A kernel that is called from Python takes the arrays that it fills as arguments, and returns
      numbers or nothing. numba runs Python code to turn an array into an object; when a signal
      handler raises there (Ctrl-C), numba continues with the exception set, and the caller gets a
      ``SystemError`` instead of a ``KeyboardInterrupt``.

    :param function: function in numba's subset of Python
    :param fastmath: LLVM flags for float arithmetic beyond IEEE 754; none by default, because the
        trees promise that a node equals the sum of its children bit for bit
    :return: the compiled function; the function itself if ``NUMBA_DISABLE_JIT`` is set
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # made by numba's import
        return function
    options = {"nopython": True, "error_model": "numpy", "fastmath": set(fastmath)}
    kernel = Kernel(function, targetoptions=options)
    # RuntimeError: neither the package's folder nor the user's cache folder can be written
    with contextlib.suppress(OSError, RuntimeError):
        kernel.enable_caching()
    return cast(_F, kernel)


@compile_kernel
def _sum_block(leaves: FloatArray, start: np.uint64) -> float:
    left = (leaves[start] + leaves[start + _U1]) + (leaves[start + _U2] + leaves[start + _U3])
    right = (leaves[start + _U4] + leaves[start + _U5]) + (
        leaves[start + _U6] + leaves[start + _U7]
    )
    return float(left + right)


@compile_kernel
def _largest_in_group(leaves: FloatArray, leaf: np.uint64, known: float) -> float:
    """
    :param leaf: any leaf of the group
    :param known: upper bound for the leaves of the group: the search ends at a leaf equal to it
    :return: the largest leaf of the group
    """
    start = (leaf >> _U6) << _U6
    stop = min(start + _U64, np.uint64(leaves.shape[0]))
    largest = 0.0
    while start < stop:
        left = max(
            max(leaves[start], leaves[start + _U1]), max(leaves[start + _U2], leaves[start + _U3])
        )
        right = max(
            max(leaves[start + _U4], leaves[start + _U5]),
            max(leaves[start + _U6], leaves[start + _U7]),
        )
        largest = max(largest, max(left, right))
        if largest == known:
            break
        start += _U8
    return largest


@compile_kernel
def _smallest_in_group(leaves: FloatArray, leaf: np.uint64, known: float) -> float:
    """
    :param leaf: any leaf of the group
    :param known: lower bound for the leaves above zero: the search ends at a leaf equal to it
    :return: the smallest leaf of the group that is above zero; infinity if there is none
    """
    start = (leaf >> _U6) << _U6
    stop = min(start + _U64, np.uint64(leaves.shape[0]))
    smallest = np.inf
    while start < stop:
        for i in range(8):
            value = leaves[start + np.uint64(i)]
            smallest = min(smallest, value if value > 0.0 else np.inf)
        if smallest == known:
            break
        start += _U8
    return smallest


@compile_kernel
def _raise_largest(extremes: FloatArray, at: np.uint64, largest: float) -> None:
    """
    Set the largest leaf of a node, and of the nodes above it as far as they change.

    :param at: position of the node in ``extremes``
    """
    while extremes[at] != largest:
        extremes[at] = largest
        node = at >> _U2
        # Node 0, above the root, does not exist
        if node == _U0:
            break
        at = node << _U1
        largest = max(extremes[at << _U1], extremes[(at << _U1) + _U2])


@compile_kernel
def _raise_smallest(extremes: FloatArray, at: np.uint64, smallest: float) -> None:
    """
    Set the smallest leaf of a node, and of the nodes above it as far as they change.

    :param at: position of the node in ``extremes``
    """
    while extremes[at] != smallest:
        extremes[at] = smallest
        node = at >> _U2
        if node == _U0:
            break
        child = node << _U2
        at = (node << _U1) + _U1
        smallest = min(extremes[child + _U1], extremes[child + _U3])


@compile_kernel
def _follow_extremes(
    leaves: FloatArray, extremes: FloatArray, at: np.uint64, leaf: np.uint64, before: float
) -> None:
    """
    Update the extremes above a leaf that was just set. Its group is searched only if the leaf was
    the largest or the smallest one and no longer is.

    :param at: position of its group in ``extremes``
    :param before: previous priority of the leaf
    """
    value = leaves[leaf]
    largest = extremes[at]
    if value > largest:
        _raise_largest(extremes, at, value)
    elif before == largest and value < largest:
        _raise_largest(extremes, at, _largest_in_group(leaves, leaf, largest))
    at += _U1
    smallest = extremes[at]
    if value > 0.0 and value < smallest:
        _raise_smallest(extremes, at, value)
    elif before == smallest and value != smallest:
        _raise_smallest(extremes, at, _smallest_in_group(leaves, leaf, smallest))


@compile_kernel
def _descend(
    leaves: FloatArray, sums: FloatArray, first: int, values: FloatArray, indices: IntArray
) -> None:
    """
    Find the leaf whose cumulative interval holds each value.

    The search goes right where the value reaches the left sum *and* there is mass on the right. So
    a leaf of zero is never found, even when rounding carries a value past the end of an interval.

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
def find(
    leaves: FloatArray, sums: FloatArray, first: int, values: FloatArray, indices: IntArray
) -> int:
    """
    Find the leaf whose cumulative interval holds each value, if all values are in ``[0, total]``.

    :param first: number of the node above block 0
    :param values: shape ``(n,)``; replaced by the leaves found
    :param indices: shape ``(n,)``, receives the numbers of the leaves
    :return: ``FOUND``, ``NO_MASS``, or the position of the first value that is outside
    """
    total = sums[1]
    if total == 0.0:
        return NO_MASS
    for j in range(values.shape[0]):
        if not 0.0 <= values[j] <= total:
            return j
    _descend(leaves, sums, first, values, indices)
    return FOUND


@compile_kernel
def draw(
    leaves: FloatArray, sums: FloatArray, first: int, uniforms: FloatArray, indices: IntArray
) -> bool:
    """
    Stratified draw: cut the total into equal masses and take one point in each.

    :param first: number of the node above block 0
    :param uniforms: shape ``(n,)``, in ``[0, 1)``, the place inside each stratum; replaced by the
        leaves drawn
    :param indices: shape ``(n,)``, receives the numbers of the leaves, in ascending order
    :return: whether there was a leaf above zero
    """
    n = uniforms.shape[0]
    total = sums[1]
    if total == 0.0:
        return False
    for j in range(n):
        # Not times total / n, which is zero for the smallest totals
        uniforms[j] = (j + uniforms[j]) / n * total
    _descend(leaves, sums, first, uniforms, indices)
    return True


@compile_kernel
def first_fault(indices: IntArray, priorities: FloatArray, size: int, limit: float) -> int:
    """
    Look for an entry that must not be written.

    :param size: number of leaves that may be written to
    :param limit: largest priority that is allowed
    :return: position of the first index outside ``[0, size)`` or priority outside ``[0, limit]``
        (NaN included), -1 if there is none
    """
    for j in range(indices.shape[0]):
        if not (0 <= indices[j] < size and 0.0 <= priorities[j] <= limit):
            return j
    return -1


@compile_kernel
def _raise_sums(sums: FloatArray, nodes: NodeArray, n: int, level: np.uint64) -> None:
    """
    Recompute all sums above some nodes, three levels at once as long as there are three: that
    reads eight neighbors, one cache line, and is faster than following each node by itself.

    :param nodes: ``n`` nodes of one level; overwritten
    :param level: the first node of that level
    """
    while level >= _U8:
        level >>= _U3
        n_above = 0
        last = _NOWHERE
        for j in range(n):
            node = nodes[j] >> _U3
            if node == last:
                continue
            last = node
            child = node << _U3
            pair_0 = sums[child] + sums[child + _U1]
            pair_1 = sums[child + _U2] + sums[child + _U3]
            pair_2 = sums[child + _U4] + sums[child + _U5]
            pair_3 = sums[child + _U6] + sums[child + _U7]
            child = node << _U2
            sums[child] = pair_0
            sums[child + _U1] = pair_1
            sums[child + _U2] = pair_2
            sums[child + _U3] = pair_3
            left = pair_0 + pair_1
            right = pair_2 + pair_3
            child = node << _U1
            sums[child] = left
            sums[child + _U1] = right
            sums[node] = left + right
            nodes[n_above] = node
            n_above += 1
        n = n_above
    while level > _U1:
        level >>= _U1
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

    Neighbors in the batch that share a parent recompute it once: a stratified draw is in ascending
    order, so that the upper levels cost next to nothing.

    :param first: number of the node above block 0
    :param indices: shape ``(n,)``, numbers of the leaves; the last of repeated ones wins
    :param priorities: shape ``(n,)``, finite and not negative
    """
    first_node = np.uint64(first)
    first_group = max(first_node >> _U3, _U1)
    n = indices.shape[0]
    nodes = np.empty(n, np.uint64)
    looked_at = np.empty(n, np.float64)
    for j in range(n):
        # Only loads into the cache what is needed next, all of it at once: later on, a branch
        # depends on it
        leaf = np.uint64(indices[j])
        looked_at[j] = leaves[leaf] + extremes[(first_group + (leaf >> _U6)) << _U1]
        nodes[j] = first_node + (leaf >> _U3)
    for j in range(n):
        leaf = np.uint64(indices[j])
        before = leaves[leaf]
        # Adding zero turns -0.0 into 0.0
        value = priorities[j] + 0.0
        leaves[leaf] = value
        at = (first_group + (leaf >> _U6)) << _U1
        largest = extremes[at]
        smallest = extremes[at + _U1]
        # Checked here, since the call costs more than the work that it rarely has to do
        if max(before, value) >= largest or min(before, value) <= smallest:
            _follow_extremes(leaves, extremes, at, leaf, before)
    n_nodes = 0
    last = _NOWHERE
    for j in range(n):
        node = nodes[j]
        if node == last:
            continue
        last = node
        sums[node] = _sum_block(leaves, (node - first_node) << _U3)
        nodes[n_nodes] = node
        n_nodes += 1
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
    Set a range of leaves to one priority and recompute the nodes above them.

    :param first: number of the node above block 0
    :param start: first leaf
    :param stop: one past the last leaf, greater than ``start``
    :param priority: finite and not negative
    """
    first_node = np.uint64(first)
    first_group = max(first_node >> _U3, _U1)
    value = priority + 0.0
    same = True
    for i in range(start, stop):
        leaf = np.uint64(i)
        before = leaves[leaf]
        if before != value:
            same = False
            leaves[leaf] = value
            at = (first_group + (leaf >> _U6)) << _U1
            _follow_extremes(leaves, extremes, at, leaf, before)
    if same:
        return
    low = np.uint64(start) >> _U3
    high = np.uint64(stop - 1) >> _U3
    for k in range(low, high + _U1):
        block = np.uint64(k)
        sums[first_node + block] = _sum_block(leaves, block << _U3)
    low += first_node
    high += first_node
    while low > _U1:
        low >>= _U1
        high >>= _U1
        for k in range(low, high + _U1):
            node = np.uint64(k)
            sums[node] = sums[node << _U1] + sums[(node << _U1) + _U1]


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
    :param size: number of leaves that may be written to
    :param limit: largest priority that is allowed
    :return: position of the fault, or -1
    """
    at = first_fault(indices, priorities, size, limit)
    if at < 0:
        write(leaves, sums, extremes, first, indices, priorities)
    return at


@compile_kernel
def copy_array(array: npt.NDArray[_T], to: npt.NDArray[_T]) -> None:
    """
    :param array: shape ``(n,)``
    :param to: same shape, receives the content of the array
    """
    for i in range(array.shape[0]):
        to[i] = array[i]


@compile_kernel
def copy(
    leaves: FloatArray,
    sums: FloatArray,
    extremes: FloatArray,
    to_leaves: FloatArray,
    to_sums: FloatArray,
    to_extremes: FloatArray,
) -> None:
    """
    Copy a tree as it is at one moment. NumPy would let other threads write meanwhile.

    :param leaves: this and the next two are the arrays of the tree
    :param to_leaves: this and the next two receive them, same shapes
    """
    copy_array(leaves, to_leaves)
    copy_array(sums, to_sums)
    copy_array(extremes, to_extremes)
