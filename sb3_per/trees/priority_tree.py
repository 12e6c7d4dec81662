"""Base class of the trees of priorities: checks of arguments, reads and errors."""

import operator
from abc import ABC, abstractmethod
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from sb3_per.trees.sum_kernels import NO_MASS, FloatArray, IntArray

__all__ = ["PriorityTree", "as_floats", "as_indices"]

_T = TypeVar("_T", bound=np.generic)

#: NumPy takes longer to find out what a type's name means than to make a small array
_INT64 = np.dtype(np.int64)


class PriorityTree(ABC):
    """
    Base class of :class:`~sb3_per.SumTree` and :class:`~sb3_per.RankTree`: a fixed number of
    leaves, each with a priority, that are drawn in proportion to their *masses*. A subclass defines
    the mass of a leaf; a leaf of zero has a mass of zero, so that it can't be drawn.

    Every change is one call of a compiled function, which neither threads nor signals interrupt
    (see :func:`~sb3_per.trees.sum_kernels.compile_kernel`). So one thread may read while another
    one writes: a value that was read may be outdated a moment later, but the tree stays valid.

    :param capacity: number of leaves, at least 1; all are zero at first
    :raises TypeError: if ``capacity`` is not an integer
    :raises ValueError: if ``capacity`` is out of its range
    """

    _capacity: int
    #: Priorities in order, shape ``(capacity,)``
    _leaves: FloatArray
    #: Largest priority that is allowed
    _limit: float

    def __init__(self, capacity: int) -> None:
        size = _as_integer("capacity", capacity)
        if size < 1:
            raise ValueError(f"`capacity` must be at least 1, got {capacity}")
        self._allocate(size)

    # --- specific to each kind of tree ---

    @abstractmethod
    def _allocate(self, capacity: int) -> None:
        """
        Make all arrays, for leaves of zero.

        :param capacity: number of leaves, at least 1
        """

    @abstractmethod
    def _rebuild(self) -> None:
        """Compute everything else from the leaves."""

    @abstractmethod
    def _checked_write(self, indices: IntArray, priorities: FloatArray) -> int:
        """
        :meth:`write`, unless an index or a priority is not allowed: then nothing is written.

        :param indices: int64, shape ``(n,)``, contiguous
        :param priorities: float64, shape ``(n,)``, contiguous
        :return: position of the first pair that is not allowed, -1 if there is none
        """

    @abstractmethod
    def _fill(self, start: int, stop: int, priority: float) -> None:
        """:meth:`fill` without its checks."""

    @abstractmethod
    def _find(self, values: FloatArray, indices: IntArray) -> int:
        """
        Find the leaves whose intervals of mass hold some values, if all of these are in
        ``[0, total]``.

        :param values: shape ``(n,)``; replaced by the masses of the leaves
        :param indices: shape ``(n,)``, receives the numbers of the leaves
        :return: ``FOUND`` or ``NO_MASS`` of :mod:`~sb3_per.trees.sum_kernels`, or the position of
            a value that is outside
        """

    @abstractmethod
    def _draw(self, uniforms: FloatArray, indices: IntArray) -> bool:
        """
        Draw one leaf from each of ``n`` equal masses.

        :param uniforms: shape ``(n,)``, in ``[0, 1)``, the place inside each of them; replaced by
            the masses of the leaves
        :param indices: shape ``(n,)``, receives the numbers of the leaves
        :return: whether there was a leaf above zero
        """

    @property
    @abstractmethod
    def draw_arguments(self) -> tuple[Any, ...]:
        """
        First arguments of the kernel ``draw``, for compiled code that calls it itself; ``uniforms``
        and ``indices`` follow.
        """

    @property
    @abstractmethod
    def write_arguments(self) -> tuple[Any, ...]:
        """
        First arguments of the kernel ``write``, for compiled code that calls it itself; ``indices``
        and ``priorities`` follow.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory in bytes."""

    @property
    @abstractmethod
    def total(self) -> float:
        """Sum of the masses of all leaves; 0.0 when no leaf is above zero."""

    @property
    @abstractmethod
    def min_mass(self) -> float:
        """Smallest mass above zero; infinity when no leaf is above zero."""

    @property
    @abstractmethod
    def max_priority(self) -> float:
        """Largest priority; 0.0 when no leaf is above zero."""

    @property
    @abstractmethod
    def min_priority(self) -> float:
        """Smallest priority above zero; infinity when no leaf is above zero."""

    @abstractmethod
    def masses(self, indices: npt.ArrayLike | slice) -> Any:
        """
        Masses of leaves, which are drawn in proportion to them. A mass divided by :attr:`total` is
        the probability that the leaf is drawn.

        :param indices: as in ``tree[indices]``
        :return: a float, or a new array of the same shape; 0 for a leaf of zero
        :raises IndexError: if an index is outside ``[0, capacity)``
        :raises TypeError: if the indices are not integers
        """

    @abstractmethod
    def write(self, indices: IntArray, priorities: FloatArray) -> None:
        """
        :meth:`update` without its checks.

        :param indices: int64, shape ``(n,)``, contiguous, in ``[0, capacity)``
        :param priorities: float64, shape ``(n,)``, contiguous, in ``[0, priority_limit]``
        """

    @abstractmethod
    def check_valid(self) -> tuple[bool, str]:
        """
        Check the tree against its own rules, from the leaves up.

        :return: whether all of them hold, and a description of the first violation
        """

    # --- shared ---

    def __getstate__(self) -> dict[str, Any]:
        # Everything else follows from the leaves, bit for bit: no need to store it
        return {"capacity": self._capacity, "leaves": self._leaves}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._allocate(state["capacity"])
        self._leaves[:] = state["leaves"]
        self._rebuild()

    def __len__(self) -> int:
        return self._capacity

    @property
    def capacity(self) -> int:
        """Number of leaves."""
        return self._capacity

    @property
    def priority_limit(self) -> float:
        """Largest priority that a leaf may get."""
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
            return self._leaves[indices].copy()
        places = self._checked(indices)
        leaves = self._leaves[places]
        return leaves if places.ndim else float(leaves)

    def update(self, indices: npt.ArrayLike, priorities: npt.ArrayLike) -> None:
        """
        Set priorities.

        :param indices: number of a leaf, or an array of them, in ``[0, capacity)``; where one is
            repeated, its last priority counts
        :param priorities: as many numbers, or a single one for all; finite, not negative, at most
            :attr:`priority_limit`
        :raises IndexError: if an index is outside ``[0, capacity)``
        :raises TypeError: if the indices are not integers, or the priorities are not numbers
        :raises ValueError: if a priority is NaN, infinite, negative or too large, or the lengths
            differ. After any of these errors the tree is unchanged.
        """
        places: IntArray
        values: FloatArray
        if _is_plain(indices, np.int64) and _is_plain(priorities, np.float64):
            places, values = indices, priorities  # type: ignore[assignment]  # checked just now
        else:
            places = as_indices(indices).ravel()
            values = as_floats("priorities", priorities)
            values = values.ravel() if values.ndim else np.full(places.shape, values)
        if len(values) != len(places):
            raise ValueError(
                f"as many priorities as indices are needed: {len(places)} indices, "
                f"{len(values)} priorities"
            )
        at = self._checked_write(places, values)
        if at >= 0:
            if not 0 <= places[at] < self._capacity:
                raise self._index_error(places[at])
            raise self._priority_error(values[at], places[at])

    def fill(self, start: int, stop: int, priority: float) -> None:
        """
        Set the leaves ``start`` to ``stop - 1`` to the same priority; faster than :meth:`update`.

        :param start: number of the first leaf
        :param stop: one past the number of the last leaf
        :param priority: finite, not negative, at most :attr:`priority_limit`
        :raises IndexError: if the range is empty or not inside ``[0, capacity)``
        :raises TypeError: if its ends are not integers, or the priority is not a number
        :raises ValueError: if the priority is NaN, infinite, negative or too large. After any of
            these errors the tree is unchanged.
        """
        first, last = _as_integer("start", start), _as_integer("stop", stop)
        if not 0 <= first < last <= self._capacity:
            raise IndexError(
                f"leaves {start} to {stop} (exclusive) are not a run inside [0, {self._capacity})"
            )
        # The buffer passes a plain float at every step of an environment
        value = priority if type(priority) is float else float(as_floats("priority", priority))
        if not 0.0 <= value <= self._limit:
            raise self._priority_error(priority, start)
        self._fill(first, last, value)

    def get_leaf(self, values: npt.ArrayLike) -> tuple[Any, Any]:
        """
        Find leaves by cumulative mass.

        Each leaf has the half-open interval from the sum of the masses before it to that sum plus
        its mass. The end of the last interval, ``total`` itself, counts as inside it, since
        rounding can lead there. The subclass defines the order of the leaves.

        :param values: a number, or an array of any shape, in ``[0, total]``
        :return: numbers of the leaves (int64) and their masses, each of the shape of ``values``
        :raises TypeError: if a value is not a number
        :raises ValueError: if a value is NaN or outside ``[0, total]``, or no leaf is above zero
        """
        targets = as_floats("values", values)
        found = targets.flatten()
        indices = np.empty(found.shape, dtype=np.int64)
        at = self._find(found, indices)
        if at == NO_MASS:
            raise self._mass_error()
        if at >= 0:
            raise ValueError(f"value {found[at]} is outside [0, total] = [0, {self.total}]")
        # [()] turns 0-d arrays into scalars and leaves other arrays unchanged
        return indices.reshape(targets.shape)[()], found.reshape(targets.shape)[()]

    def sample(self, batch_size: SupportsIndex) -> tuple[IntArray, FloatArray]:
        """
        Stratified draw: the total mass is cut into ``batch_size`` equal parts, and each gives one
        leaf (Schaul et al. 2016, section 3.3 and appendix B.2.1). Uniform numbers come from the
        global state of ``np.random``.

        :param batch_size: number of leaves to draw, at least 1; the same leaf can be drawn
            repeatedly
        :return: numbers of the leaves (int64, in the order of :meth:`get_leaf`) and their masses
            (all above zero), shape ``(batch_size,)`` each
        :raises TypeError: if ``batch_size`` is not an integer
        :raises ValueError: if ``batch_size`` is below 1, or no leaf is above zero
        """
        n = batch_size if type(batch_size) is int else _as_integer("batch_size", batch_size)
        if n < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}")
        # Before random numbers are drawn; `_draw` checks again, since other threads may write
        if self.max_priority == 0.0:
            raise self._mass_error()
        # Becomes the values to look for, then the masses found, all in the same memory
        masses = np.random.random_sample(n)
        indices = np.empty(n, _INT64)
        if not self._draw(masses, indices):
            raise self._mass_error()
        return indices, masses

    def _checked(self, indices: npt.ArrayLike) -> IntArray:
        """
        :param indices: numbers of leaves, of any shape
        :return: the same numbers as int64
        :raises IndexError: if an index is outside ``[0, capacity)``
        :raises TypeError: if they are not integers
        """
        places = as_indices(indices)
        outside = (places < 0) | (places >= self._capacity)
        if outside.any():
            raise self._index_error(places[outside][0])
        return places

    def _mass_error(self) -> ValueError:
        return ValueError("no leaf has a priority above zero: there is nothing to draw")

    def _index_error(self, index: Any) -> IndexError:
        return IndexError(f"index {index} is outside [0, {self._capacity})")

    def _priority_error(self, priority: Any, index: Any) -> ValueError:
        return ValueError(
            f"priority {priority} for leaf {index} is not a finite number from 0 to "
            f"{self._limit:.4g}, the tree's `priority_limit`"
        )


def _is_plain(array: Any, dtype: type[np.generic]) -> bool:
    """
    :param array: value given by the user
    :param dtype: type that a kernel takes
    :return: whether a kernel can take it without a conversion, see :func:`_as_kernels_take_it`
    """
    return (
        type(array) is np.ndarray
        and array.dtype == dtype
        and array.ndim == 1
        and array.flags.carray
    )


def _as_integer(name: str, value: Any) -> int:
    """
    :param name: name of the argument, for error messages
    :param value: value given by the user
    :return: the value as a plain int
    :raises TypeError: if it is not an integer
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer, got {value!r}") from None


def as_indices(indices: npt.ArrayLike) -> IntArray:
    """
    :param indices: integer or array of integers
    :return: the same numbers as int64, contiguous
    :raises TypeError: if they are not integers; an empty list counts as integers
    :raises IndexError: if one does not fit into a signed 64-bit integer
    """
    places = np.asarray(indices)
    if places.dtype.kind not in "iu":
        if places.dtype == object and all(isinstance(place, int) for place in places.flat):
            # NumPy's dtype for Python integers that fit into none of its integer types
            largest = max(places.flat, key=abs, default=0)
            if not -(2**63) <= largest < 2**63:
                raise IndexError(f"index {largest} does not fit into 64 bits")
        if places.size:
            raise TypeError(f"indices must be integers, got {places.dtype} ({indices!r:.60})")
    elif places.dtype == np.uint64 and places.size and int(places.max()) >= 2**63:
        raise IndexError(f"index {places.max()} does not fit into 64 bits with a sign")
    return _as_kernels_take_it(places.astype(np.int64, copy=False))


def as_floats(name: str, values: npt.ArrayLike) -> FloatArray:
    """
    :param name: name of the values, for error messages
    :param values: number or array of numbers
    :return: the same numbers as float64, contiguous; those too large for it are infinite
    :raises TypeError: if they are not real numbers: text, None, complex numbers
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
        return _as_kernels_take_it(numbers.astype(np.float64, copy=False))


def _as_kernels_take_it(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """
    :param array: any array
    :return: the array or a copy of it, contiguous, aligned and writable: numba would take seconds
        to compile each kernel for another layout
    """
    return array if array.flags.carray else array.copy(order="C")
