"""Sum-tree: weighted draws among millions of priorities in logarithmic time."""

import operator
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from sb3_per.trees import sum_kernels
from sb3_per.trees.sum_kernels import BLOCK, GROUP, FloatArray, IntArray

__all__ = ["SumTree"]

#: NumPy takes longer to find out what a type's name means than to make a small array
_INT64 = np.dtype(np.int64)


def _zeros_on_cache_lines(size: int) -> FloatArray:
    """
    :param size: how many numbers
    :return: zeros, shape ``(size,)``, that start at the beginning of a cache line (64 bytes), so
        that a block of leaves is one line and not two
    """
    array = np.zeros(size + BLOCK - 1)
    offset = -(array.ctypes.data // array.itemsize) % BLOCK
    return array[offset : offset + size]


class SumTree:
    """
    Binary tree whose leaves are priorities and whose every node holds the sum below it
    (Schaul et al. 2016, appendix B.2.1).

    Drawing a leaf in proportion to its priority, and changing a priority, take time logarithmic
    in ``capacity``. Sums are float64 and always recomputed from the children, never adjusted by a
    difference, so that no error builds up: ``total`` after any history depends on the leaves
    alone. A leaf of zero can't be drawn. The largest and the smallest priority are exact and
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

    def __init__(self, capacity: int) -> None:
        size = _as_integer("capacity", capacity)
        if size < 1:
            raise ValueError(f"`capacity` must be at least 1, got {capacity}")
        self._allocate(size)

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        n_blocks = -(-capacity // BLOCK)
        # Number of the node above block 0: the smallest power of two with room for all blocks
        self._first = 1 << (n_blocks - 1).bit_length()
        self._leaves = _zeros_on_cache_lines(BLOCK * n_blocks)
        self._sums = _zeros_on_cache_lines(2 * self._first)
        self._first_group = max(self._first // (GROUP // BLOCK), 1)
        self._extremes = _zeros_on_cache_lines(4 * self._first_group)
        self._extremes[1::2] = np.inf
        # Below this no sum of leaves can overflow. The margin is for the rounding of the sums.
        self._limit = float(np.finfo(np.float64).max) / capacity * (1.0 - 1e-12)

    def __getstate__(self) -> dict[str, Any]:
        # The nodes follow from the leaves, to the last bit: no need to store them
        return {"capacity": self._capacity, "leaves": self._leaves[: self._capacity]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._allocate(state["capacity"])
        self._leaves[: self._capacity] = state["leaves"]
        self._sums[:], self._extremes[:] = self._nodes_from_leaves()

    def __len__(self) -> int:
        return self._capacity

    def __repr__(self) -> str:
        return f"{type(self).__name__}(capacity={self._capacity}, total={self.total})"

    @property
    def capacity(self) -> int:
        """Number of leaves."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Memory of leaves and nodes in bytes (11 to 13 for each leaf of a large tree)."""
        return self._leaves.nbytes + self._sums.nbytes + self._extremes.nbytes

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

    def __getitem__(self, indices: npt.ArrayLike | slice) -> Any:
        """
        Read leaves.

        :param indices: number of a leaf, or an array of them of any shape, in ``[0, capacity)``,
            or a slice
        :return: their priorities: a float, or a new array of the same shape
        :raises IndexError: if an index is outside ``[0, capacity)``
        :raises TypeError: if the indices are not integers
        """
        if isinstance(indices, slice):
            return self._leaves[: self._capacity][indices].copy()
        places = as_indices(indices)
        outside = (places < 0) | (places >= self._capacity)
        if outside.any():
            raise self._index_error(places[outside][0])
        leaves = self._leaves[places]
        return leaves if places.ndim else float(leaves)

    def masses(self, indices: npt.ArrayLike | slice) -> Any:
        """
        What leaves are drawn in proportion to, which is here the priorities themselves.

        :param indices: as in ``tree[indices]``
        :return: the same as ``tree[indices]``
        """
        return self[indices]

    def update(self, indices: npt.ArrayLike, priorities: npt.ArrayLike) -> None:
        """
        Set priorities.

        :param indices: number of a leaf, or an array of them, in ``[0, capacity)``; where one is
            repeated, its last priority counts
        :param priorities: as many numbers, or a single one for all; finite, not negative, at most
            :attr:`priority_limit`
        :raises IndexError: if an index is outside ``[0, capacity)``
        :raises TypeError: if the indices are not integers
        :raises ValueError: if a priority is NaN, infinite, negative or too large, or the lengths
            differ. After any of the errors the tree is as it was.
        """
        places: IntArray
        values: FloatArray
        if _is_plain(indices, np.int64) and _is_plain(priorities, np.float64):
            places, values = indices, priorities  # type: ignore[assignment]
        else:
            places = as_indices(indices).ravel()
            values = as_floats("priorities", priorities)
            if values.ndim == 0:
                values = np.full(places.shape, values)
            values = np.ascontiguousarray(values.ravel())
        if len(values) != len(places):
            raise ValueError(
                f"as many priorities as indices are needed: {len(places)} indices, "
                f"{len(values)} priorities"
            )
        at = sum_kernels.checked_write(
            self._leaves,
            self._sums,
            self._extremes,
            self._first,
            places,
            values,
            self._capacity,
            self._limit,
        )
        if at >= 0:
            if not 0 <= places[at] < self._capacity:
                raise self._index_error(places[at])
            raise self._priority_error(values[at], places[at])

    def write(self, indices: IntArray, priorities: FloatArray) -> None:
        """
        What :meth:`update` does once all is checked.

        :param indices: int64, shape ``(n,)``, contiguous, in ``[0, capacity)``
        :param priorities: float64, shape ``(n,)``, contiguous, in ``[0, priority_limit]``
        """
        sum_kernels.write(
            self._leaves, self._sums, self._extremes, self._first, indices, priorities
        )

    def fill(self, start: int, stop: int, priority: float) -> None:
        """
        Set the leaves ``start`` to ``stop - 1`` to the same priority; faster than :meth:`update`.

        :param start: number of the first leaf
        :param stop: one past the number of the last leaf
        :param priority: finite, not negative, at most :attr:`priority_limit`
        :raises IndexError: if the run is empty or leaves ``[0, capacity)``
        :raises TypeError: if its ends are not integers, or the priority is no number
        :raises ValueError: if the priority is NaN, infinite, negative or too large. After any of
            the errors the tree is as it was.
        """
        first, last = _as_integer("start", start), _as_integer("stop", stop)
        if not 0 <= first < last <= self._capacity:
            raise IndexError(
                f"leaves {start} to {stop} (exclusive) are not a run inside [0, {self._capacity})"
            )
        # Plain floats are what comes at every step of an environment
        value = priority if type(priority) is float else float(as_floats("priority", priority))
        if not 0.0 <= value <= self._limit:
            raise self._priority_error(priority, start)
        sum_kernels.fill(self._leaves, self._sums, self._extremes, self._first, first, last, value)

    def get_leaf(self, values: npt.ArrayLike) -> tuple[Any, Any]:
        """
        Find leaves by cumulative priority.

        Leaf ``i`` owns the half-open interval from the sum of the leaves before it to that sum
        plus its own priority. The end of the last interval, ``total`` itself, counts as inside
        it, since rounding can lead there.

        :param values: a number, or an array of any shape, in ``[0, total]``
        :return: numbers of the leaves (int64) and their priorities, each of the shape of
            ``values``
        :raises TypeError: if a value is no number
        :raises ValueError: if a value is NaN or outside ``[0, total]``, or no leaf is above zero
        """
        targets = as_floats("values", values).copy()
        self._require_mass()
        total = self.total
        outside = ~((targets >= 0.0) & (targets <= total))
        if outside.any():
            raise ValueError(f"value {targets[outside][0]} is outside [0, total] = [0, {total}]")
        found = targets.ravel()
        indices = np.empty(found.shape, dtype=np.int64)
        sum_kernels.descend(self._leaves, self._sums, self._first, found, indices)
        # [()] makes scalars of 0-d arrays and leaves the others as they are
        return indices.reshape(targets.shape)[()], found.reshape(targets.shape)[()]

    def sample(self, batch_size: SupportsIndex) -> tuple[IntArray, FloatArray]:
        """
        Stratified draw: the total is cut into ``batch_size`` equal masses, and each gives one leaf
        (Schaul et al. 2016, section 3.3). Uniform numbers come from the global state of
        ``np.random``.

        :param batch_size: how many leaves to draw, at least 1; the same leaf can come repeatedly
        :return: numbers of the leaves (int64, ascending) and their priorities (all above zero),
            shape ``(batch_size,)`` each
        :raises TypeError: if ``batch_size`` is not an integer
        :raises ValueError: if ``batch_size`` is below 1, or no leaf is above zero
        """
        n = batch_size if type(batch_size) is int else _as_integer("batch_size", batch_size)
        if n < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}")
        if self._sums.item(1) == 0.0:
            self._require_mass()
        # Becomes the masses to look for, then the priorities found, all in the same memory
        priorities = np.random.random_sample(n)
        indices = np.empty(n, _INT64)
        sum_kernels.draw(self._leaves, self._sums, self._first, priorities, indices)
        return indices, priorities

    def check_valid(self) -> tuple[bool, str]:
        """
        Check the tree against its own rules, from the leaves up.

        :return: whether all holds, and if not what doesn't: every node equals the sum of its
            children to the last bit, the extremes are those of the leaves, the leaves are finite
            and not negative
        """
        leaves = self._leaves
        bad = np.flatnonzero(~((leaves >= 0.0) & (leaves <= self._limit)))
        if bad.size:
            return False, f"leaf {bad[0]} is {leaves[bad[0]]}"
        if leaves[self._capacity :].any():
            return False, "a leaf beyond the capacity is not zero"
        sums, extremes = self._nodes_from_leaves()
        bad = np.flatnonzero(self._sums[1:] != sums[1:]) + 1
        if bad.size:
            node = int(bad[-1])
            return False, (
                f"node {node} holds {self._sums[node]}, its children add up to {sums[node]}"
            )
        bad = np.flatnonzero(self._extremes[2:] != extremes[2:]) + 2
        if bad.size:
            node, which = divmod(int(bad[-1]), 2)
            return False, (
                f"node {node} holds {self._extremes[2 * node + which]} as "
                f"{('largest', 'smallest')[which]} leaf, it is {extremes[2 * node + which]}"
            )
        return True, ""

    def _nodes_from_leaves(self) -> tuple[FloatArray, FloatArray]:
        """
        Compute all nodes at once, a plain NumPy twin of the kernels.

        :return: what ``_sums`` and ``_extremes`` must hold
        """
        first = self._first
        n_blocks = len(self._leaves) // BLOCK
        blocks = self._leaves.reshape(n_blocks, BLOCK)  # [block, leaf]
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
        starts = np.arange(0, len(self._leaves), GROUP)
        groups = slice(first, first + len(starts))
        above_zero = np.where(self._leaves > 0.0, self._leaves, np.inf)
        extremes[groups, 0] = np.maximum.reduceat(self._leaves, starts)
        extremes[groups, 1] = np.minimum.reduceat(above_zero, starts)
        while first > 1:
            pairs = extremes[first : 2 * first].reshape(first // 2, 2, 2)  # [node, child, which]
            first //= 2
            extremes[first : 2 * first, 0] = pairs[:, :, 0].max(axis=1)
            extremes[first : 2 * first, 1] = pairs[:, :, 1].min(axis=1)
        return sums, extremes.ravel()

    def _require_mass(self) -> None:
        if not self._sums[1] > 0.0:
            raise ValueError("no leaf has a priority above zero: there is nothing to draw")

    def _index_error(self, index: Any) -> IndexError:
        return IndexError(f"index {index} is outside [0, {self._capacity})")

    def _priority_error(self, priority: Any, index: Any) -> ValueError:
        return ValueError(
            f"priority {priority} for leaf {index} is not a finite number from 0 to "
            f"{self._limit:.4g} (largest float64 / capacity, so that the total stays finite)"
        )


def _is_plain(array: Any, dtype: type[np.generic]) -> bool:
    """:return: whether it can go to a kernel as it is"""
    return (
        type(array) is np.ndarray
        and array.dtype == dtype
        and array.ndim == 1
        and array.flags.c_contiguous
    )


def _as_integer(name: str, value: Any) -> int:
    """
    :param name: of the argument, for the message
    :param value: what the user gave
    :return: as a plain int
    :raises TypeError: if it is no integer
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer, got {value!r}") from None


def as_indices(indices: npt.ArrayLike) -> IntArray:
    """
    :param indices: integer or array of integers
    :return: as int64
    :raises TypeError: if they are something else; an empty list counts as integers
    :raises IndexError: if one does not fit into 64 bits with a sign
    """
    places = np.asarray(indices)
    if places.dtype.kind not in "iu":
        if places.dtype == object and all(isinstance(place, int) for place in places.flat):
            # What NumPy makes of Python integers that fit into none of its types
            largest = max(places.flat, key=abs, default=0)
            if not -(2**63) <= largest < 2**63:
                raise IndexError(f"index {largest} does not fit into 64 bits")
        if places.size:
            raise TypeError(f"indices must be integers, got {places.dtype} ({indices!r:.60})")
    elif places.dtype == np.uint64 and places.size and int(places.max()) >= 2**63:
        raise IndexError(f"index {places.max()} does not fit into 64 bits with a sign")
    return places.astype(np.int64, order="C", copy=False)


def as_floats(name: str, values: npt.ArrayLike) -> FloatArray:
    """
    :param name: of the values, for the message
    :param values: number or array of numbers
    :return: as float64; what is too large for that is infinite
    :raises TypeError: if they are something else: text, None, complex numbers
    :raises ValueError: if one is an integer too large for a float
    """
    numbers = np.asarray(values)
    if numbers.dtype == object and all(isinstance(number, int | float) for number in numbers.flat):
        try:
            return numbers.astype(np.float64)
        except OverflowError:
            largest = max(numbers.flat, key=abs)
            raise ValueError(f"{name} must fit into a float64, got {largest!r:.60}") from None
    if numbers.dtype.kind not in "fiu" and numbers.size:
        raise TypeError(f"{name} must be real numbers, got {numbers.dtype} ({values!r:.60})")
    with np.errstate(over="ignore"):
        return numbers.astype(np.float64, copy=False)
