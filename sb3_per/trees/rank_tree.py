"""Rank-tree: draws among millions of priorities by their ranks, which are always up to date."""

import math
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from sb3_per.trees import rank_kernels, sum_kernels
from sb3_per.trees.rank_kernels import BLOCK, FANOUT, FILLED_BLOCK, LAST, Ranks
from sb3_per.trees.sum_kernels import FloatArray, IntArray
from sb3_per.trees.sum_tree import _as_integer, _is_plain, as_floats, as_indices

__all__ = ["RankTree"]

#: Leaves for each step of the guide to the sums of masses
_LEAVES_PER_STEP = 64
#: So many leaves are written one by one in any case
_FEW = 1024


class RankTree:
    """
    Leaves with priorities, drawn by rank: leaf ``i`` with probability in proportion to
    ``(1 / rank(i)) ** alpha`` (Schaul et al. 2016, section 3.3, rank-based variant).

    Rank 1 has the largest priority. A leaf of zero has no rank and can't be drawn. Leaves of equal
    priority are ranked by their number, the smaller one first; so ranks depend on the leaves alone
    and on nothing that was before. Priorities count as equal when they agree in their leading bits:
    when one of them is at most ``1 + resolution`` times the other, they may. :attr:`resolution` is
    2.3e-10 for a million leaves and less for fewer; that of float32, in which TD errors come, is
    6e-8. Apart from this, ranks are exact, and they follow each write at once: nothing is sorted
    from time to time, as the paper's heap is.

    How it works: all leaves above zero lie in the order of their ranks in a tree of three floors,
    blocks of up to 64 leaves below nodes of up to 64 blocks below one list. Counts lead from a rank
    to its leaf, the order of the priorities leads from a leaf to its rank. The mass of rank ``r``
    is ``r ** -alpha``. Sums of masses are computed once for each ``alpha``, and a draw looks up in
    them which rank it hits.

    What it costs: a draw of 256 takes 1.3 (10,000 leaves) to 3.7 times (10 million) as long as a
    :class:`~sb3_per.SumTree`'s, a write 2.5 to 3.3 times. Both grow with the logarithm of
    ``capacity``, as long as that is not far beyond ten million. Memory is 24 bytes a leaf, and 8
    more from the first draw on. The first draw after ``alpha`` was set takes 30 ms for a million
    leaves.

    :param capacity: number of leaves, from 1 to ``2**31 - 1``; all are zero at first
    :param alpha: how much ranks count: 0 draws uniformly, larger values favour the first ranks
        more; finite, at least 0. The paper has 0.7. It can be changed at any time.
    :raises TypeError: if ``capacity`` is not an integer
    :raises ValueError: if ``capacity`` or ``alpha`` is out of its range

    >>> tree = RankTree(4, alpha=1.0)
    >>> tree.update([0, 1, 2, 3], [0.5, 0.0, 9.0, 0.1])
    >>> tree.ranks([0, 1, 2, 3])
    array([2, 0, 1, 3])
    >>> tree.masses([0, 1, 2, 3]) * 6
    array([3., 0., 6., 2.])
    >>> tree.max_priority, tree.min_priority
    (9.0, 0.1)
    """

    def __init__(self, capacity: int, alpha: float = 0.7) -> None:
        size = _as_integer("capacity", capacity)
        if not 1 <= size < 2**31:
            raise ValueError(f"`capacity` must be from 1 to 2**31 - 1, got {capacity}")
        self.alpha = alpha
        self._allocate(size)

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        # Bits that the number of a leaf may need
        self._shift = (capacity - 1).bit_length()
        # A third more blocks than a new layout takes, twice as many nodes
        n_blocks = capacity // (FILLED_BLOCK * 3 // 4) + 4
        n_nodes = n_blocks // (FANOUT * 3 // 8) + 4
        n_slots = n_nodes * FANOUT + n_nodes
        self._arrays = Ranks(
            leaves=np.zeros(capacity),
            keys=np.full(n_blocks * BLOCK + n_slots, LAST, dtype=np.int64),
            kids=np.zeros(n_slots, dtype=np.int32),
            counts=np.zeros(n_slots, dtype=np.int32),
            sizes=np.zeros(n_nodes, dtype=np.int32),
            free_blocks=np.zeros(n_blocks, dtype=np.int32),
            free_nodes=np.zeros(n_nodes, dtype=np.int32),
            head=np.zeros(rank_kernels.HEAD_SIZE, dtype=np.int64),
        )
        self._leaves = self._arrays.leaves
        self._head = self._arrays.head
        self._arrange()

    def _arrange(self) -> None:
        """Build all from the leaves."""
        rank_kernels.build(*self._arrays, self._shift, self._sorted_entries())

    def _sorted_entries(self) -> IntArray:
        """
        Compute entries from the leaves, a plain NumPy twin of the kernels.

        :return: what the blocks must hold
        """
        ranked = np.flatnonzero(self._leaves > 0.0)
        bits = self._leaves[ranked].view(np.int64)
        prefixes = (LAST >> self._shift) - 1 - (bits >> self._shift)
        return np.sort((prefixes << self._shift) | ranked)

    def __getstate__(self) -> dict[str, Any]:
        # All else follows from these, to the last bit
        return {"capacity": self._capacity, "alpha": self._alpha, "leaves": self._leaves}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.alpha = state["alpha"]
        self._allocate(state["capacity"])
        self._leaves[:] = state["leaves"]
        self._arrange()

    def __len__(self) -> int:
        return self._capacity

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(capacity={self._capacity}, alpha={self._alpha}, "
            f"n_ranked={self.n_ranked})"
        )

    @property
    def capacity(self) -> int:
        """Number of leaves."""
        return self._capacity

    @property
    def alpha(self) -> float:
        """How much ranks count, at least 0. A change applies to all leaves at once."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        exponent = as_floats("alpha", value)
        if exponent.ndim or not (0.0 <= exponent < math.inf):
            raise ValueError(f"`alpha` must be a finite number of at least 0, got {value!r}")
        self._alpha = float(exponent)
        self._table: tuple[FloatArray, IntArray, float] | None = None

    @property
    def resolution(self) -> float:
        """
        Priorities of which one is at most ``1 + resolution`` times the other may count as equal
        (for normal numbers: those from 2.2e-308 on).
        """
        return float(2.0 ** (self._shift - 52))

    @property
    def nbytes(self) -> int:
        """Memory in bytes: 24 for each leaf of a large tree, 32 once anything was drawn."""
        table = () if self._table is None else self._table[:2]
        return sum(array.nbytes for array in (*self._arrays, *table))

    @property
    def n_ranked(self) -> int:
        """Number of leaves above zero, which is the last rank."""
        return int(self._head[rank_kernels.N_RANKED])

    @property
    def total(self) -> float:
        """Sum of the masses of all ranks; 0.0 when no leaf is above zero."""
        n = self.n_ranked
        return float(self._sums_and_guide()[0][n - 1]) if n else 0.0

    @property
    def min_mass(self) -> float:
        """Mass of the last rank, the smallest one; infinity when no leaf is above zero."""
        n = self.n_ranked
        return float(self._masses_of(np.array([n]))[0]) if n else math.inf

    @property
    def max_priority(self) -> float:
        """Priority of the first rank; 0.0 when no leaf is above zero."""
        return float(self._leaves[self._head[rank_kernels.FIRST_LEAF]]) if self.n_ranked else 0.0

    @property
    def min_priority(self) -> float:
        """Priority of the last rank, above zero; infinity when no leaf is above zero."""
        if self.n_ranked:
            return float(self._leaves[self._head[rank_kernels.LAST_LEAF]])
        return math.inf

    @property
    def priority_limit(self) -> float:
        """Largest priority that a leaf may get: any finite one, since priorities are not added."""
        return float(np.finfo(np.float64).max)

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

    def ranks(self, indices: npt.ArrayLike | slice) -> Any:
        """
        Ranks of leaves: 1 for the largest priority, 0 for a leaf of zero, which has no rank.

        :param indices: number of a leaf, or an array of them of any shape, in ``[0, capacity)``,
            or a slice
        :return: an integer, or an array of them (int64) of the same shape
        :raises IndexError: if an index is outside ``[0, capacity)``
        :raises TypeError: if the indices are not integers
        """
        if isinstance(indices, slice):
            entries = rank_kernels.entries_in_order(self._arrays)
            ranks = np.zeros(self._capacity, dtype=np.int64)
            ranks[entries & ((1 << self._shift) - 1)] = np.arange(1, len(entries) + 1)
            return ranks[indices].copy()
        places = self._checked(indices)
        ranks = np.empty(places.size, dtype=np.int64)
        rank_kernels.ranks_of(*self._arrays, self._shift, places.ravel(), ranks)
        return ranks.reshape(places.shape) if places.ndim else int(ranks[0])

    def masses(self, indices: npt.ArrayLike | slice) -> Any:
        """
        Masses of leaves, ``(1 / rank) ** alpha``. A mass over :attr:`total` is the probability to
        be drawn.

        :param indices: number of a leaf, or an array of them of any shape, in ``[0, capacity)``,
            or a slice
        :return: a float, or an array of the same shape; 0 for a leaf of zero
        :raises IndexError: if an index is outside ``[0, capacity)``
        :raises TypeError: if the indices are not integers
        """
        ranks = np.asarray(self.ranks(indices))
        masses = np.where(ranks > 0, self._masses_of(np.maximum(ranks, 1)), 0.0)
        return masses if masses.ndim else float(masses)

    def update(self, indices: npt.ArrayLike, priorities: npt.ArrayLike) -> None:
        """
        Set priorities.

        :param indices: number of a leaf, or an array of them, in ``[0, capacity)``; where one is
            repeated, its last priority counts
        :param priorities: as many numbers, or a single one for all; finite, not negative
        :raises IndexError: if an index is outside ``[0, capacity)``
        :raises TypeError: if the indices are not integers
        :raises ValueError: if a priority is NaN, infinite or negative, or the lengths differ. After
            any of the errors the tree is as it was.
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
        at = sum_kernels.first_fault(places, values, self._capacity, self.priority_limit)
        if at >= 0:
            if not 0 <= places[at] < self._capacity:
                raise self._index_error(places[at])
            raise self._priority_error(values[at], places[at])
        self.write(places, values)

    def write(self, indices: IntArray, priorities: FloatArray) -> None:
        """
        What :meth:`update` does once all is checked.

        :param indices: int64, shape ``(n,)``, contiguous, in ``[0, capacity)``
        :param priorities: float64, shape ``(n,)``, contiguous, finite, not negative
        """
        if len(indices) > max(_FEW, self._capacity // 4):
            # Sorting everything takes less time than putting in so many one by one. Of repeated
            # indices, NumPy assigns the last one, too; adding zero makes 0.0 of -0.0.
            self._leaves[indices] = priorities + 0.0
            self._arrange()
        else:
            rank_kernels.write(*self._arrays, self._shift, indices, priorities)

    def fill(self, start: int, stop: int, priority: float) -> None:
        """
        Set the leaves ``start`` to ``stop - 1`` to the same priority; faster than :meth:`update`.

        :param start: number of the first leaf
        :param stop: one past the number of the last leaf
        :param priority: finite, not negative
        :raises IndexError: if the run is empty or leaves ``[0, capacity)``
        :raises TypeError: if its ends are not integers, or the priority is no number
        :raises ValueError: if the priority is NaN, infinite or negative. After any of the errors
            the tree is as it was.
        """
        first, last = _as_integer("start", start), _as_integer("stop", stop)
        if not 0 <= first < last <= self._capacity:
            raise IndexError(
                f"leaves {start} to {stop} (exclusive) are not a run inside [0, {self._capacity})"
            )
        # Plain floats are what comes at every step of an environment
        value = priority if type(priority) is float else float(as_floats("priority", priority))
        if not 0.0 <= value < math.inf:
            raise self._priority_error(priority, start)
        rank_kernels.fill(*self._arrays, self._shift, first, last, value)

    def get_leaf(self, values: npt.ArrayLike) -> tuple[Any, Any]:
        """
        Find leaves by cumulative mass.

        Rank ``r`` owns the half-open interval from the sum of the masses before it to that sum plus
        its own mass. The end of the last interval, ``total`` itself, counts as inside it.

        :param values: a number, or an array of any shape, in ``[0, total]``
        :return: numbers of the leaves (int64) and their masses, each of the shape of ``values``
        :raises TypeError: if a value is no number
        :raises ValueError: if a value is NaN or outside ``[0, total]``, or no leaf is above zero
        """
        targets = as_floats("values", values)
        self._require_mass()
        total = self.total
        outside = ~((targets >= 0.0) & (targets <= total))
        if outside.any():
            raise ValueError(f"value {targets[outside][0]} is outside [0, total] = [0, {total}]")
        inside = np.minimum(targets.ravel(), math.nextafter(total, 0.0))
        places = np.empty(inside.shape, dtype=np.int64)
        rank_kernels.find_ranks(*self._sums_and_guide(), inside, places)
        masses = self._masses_of(places + 1)
        order = np.argsort(places)
        found = places[order]
        rank_kernels.select(*self._arrays, self._shift, found)
        indices = np.empty_like(found)
        indices[order] = found
        # [()] makes scalars of 0-d arrays and leaves the others as they are
        return indices.reshape(targets.shape)[()], masses.reshape(targets.shape)[()]

    def sample(self, batch_size: SupportsIndex) -> tuple[IntArray, FloatArray]:
        """
        Stratified draw: the total mass is cut into ``batch_size`` equal parts, and each gives one
        leaf (Schaul et al. 2016, section 3.3 and appendix B.2.1). Uniform numbers come from the
        global state of ``np.random``.

        :param batch_size: how many leaves to draw, at least 1; the same leaf can come repeatedly
        :return: numbers of the leaves (int64, in the order of their ranks) and their masses
            ``(1 / rank) ** alpha``, shape ``(batch_size,)`` each
        :raises TypeError: if ``batch_size`` is not an integer
        :raises ValueError: if ``batch_size`` is below 1, or no leaf is above zero
        """
        n = batch_size if type(batch_size) is int else _as_integer("batch_size", batch_size)
        if n < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}")
        self._require_mass()
        # Becomes the masses to look for, then the masses found, all in the same memory
        masses = np.random.random_sample(n)
        indices = np.empty(n, dtype=np.int64)
        rank_kernels.draw(
            *self._arrays, self._shift, self._alpha, *self._sums_and_guide(), masses, indices
        )
        return indices, masses

    def check_valid(self) -> tuple[bool, str]:
        """
        Check the tree against its own rules, from the leaves up.

        :return: whether all holds, and if not what doesn't: the blocks hold each leaf above zero
            once, in the order of the ranks; counts, separators and the lists of unused places fit;
            the leaves are finite and not negative
        """
        bad = np.flatnonzero(~((self._leaves >= 0.0) & (self._leaves <= self.priority_limit)))
        if bad.size:
            return False, f"leaf {bad[0]} is {self._leaves[bad[0]]}"
        message = self._fault_in_slots() or self._fault_in_entries()
        return not message, message

    def _used_slots(self) -> tuple[IntArray, IntArray]:
        """
        List the slots in use.

        :return: those in the top, and those in nodes, in the order of the ranks
        """
        kids, sizes = self._arrays.kids, self._arrays.sizes
        top = len(sizes) * FANOUT + np.arange(self._head[rank_kernels.N_TOP])
        return top, np.concatenate([node * FANOUT + np.arange(sizes[node]) for node in kids[top]])

    def _fault_in_slots(self) -> str:
        """
        Check which blocks and nodes are used, and what is noted of them.

        :return: what is wrong, or nothing
        """
        _, keys, kids, counts, sizes, free_blocks, free_nodes, head = self._arrays
        top, slots = self._used_slots()
        nodes, blocks = kids[top], kids[slots]
        for name, used, free, n_free in (
            ("node", nodes, free_nodes, head[rank_kernels.N_FREE_NODES]),
            ("block", blocks, free_blocks, head[rank_kernels.N_FREE_BLOCKS]),
        ):
            times = np.bincount(np.concatenate([used, free[:n_free]]), minlength=len(free))
            if (times != 1).any():
                number = int((times != 1).argmax())
                return f"{name} {number} is {times[number]} times in use or free, it must be once"
        ends = np.cumsum(sizes[nodes])
        sums = np.add.reduceat(counts[slots], ends - sizes[nodes])
        if (counts[top] != sums).any():
            return "the count of a node is not the sum of those of its blocks"
        separators = keys[len(free_blocks) * BLOCK :]
        if (separators[top] != separators[slots[ends - 1]]).any():
            return "the separator of a node is not that of its last block"
        at_top = separators[len(sizes) * FANOUT :]
        by_node = separators[: len(sizes) * FANOUT].reshape(-1, FANOUT)[nodes]
        beyond = np.arange(FANOUT) >= sizes[nodes][:, None]
        if at_top[len(top) - 1] != LAST or (by_node[beyond] != LAST).any():
            return "a separator is not above all entries that must be"
        return ""

    def _fault_in_entries(self) -> str:
        """
        Check the blocks.

        :return: what is wrong, or nothing
        """
        keys, kids, counts = self._arrays.keys, self._arrays.kids, self._arrays.counts
        n_blocks = len(self._arrays.free_blocks)
        _, slots = self._used_slots()
        entries = keys[: n_blocks * BLOCK].reshape(-1, BLOCK)[kids[slots]]  # [slot, entry]
        taken = np.arange(BLOCK) < counts[slots][:, None]
        if ((entries < LAST) != taken).any():
            return "the count of a block is not that of its entries"
        expected = self._sorted_entries()
        if not np.array_equal(entries[taken], expected) or self.n_ranked != len(expected):
            return "the entries are not those of the leaves in the order of their ranks"
        if not len(expected):
            return ""
        if not counts[slots].all():
            return "a block is empty"
        separators = keys[n_blocks * BLOCK :][slots]
        lasts = entries[np.arange(len(slots)), counts[slots] - 1]
        if (lasts > separators).any() or (entries[1:, 0] <= separators[:-1]).any():
            return "a separator is not between the entries of two blocks"
        ends = self._head[[rank_kernels.FIRST_LEAF, rank_kernels.LAST_LEAF]]
        if (ends != expected[[0, -1]] & ((1 << self._shift) - 1)).any():
            return f"leaves {ends.tolist()} are not those of the first and the last rank"
        return ""

    def _sums_and_guide(self) -> tuple[FloatArray, IntArray, float]:
        """
        Give the tables for draws, which are computed when they are first needed.

        :return: sums of the masses of ranks, guide to them, and its steps for a mass of 1
        """
        if self._table is None:
            sums = np.empty(self._capacity)
            rank_kernels.cumulate(self._alpha, sums)
            n_steps = self._capacity // _LEAVES_PER_STEP + 1
            guide = np.empty(n_steps + 2, dtype=np.int64)
            scale = n_steps / float(sums[-1])
            rank_kernels.make_guide(sums, scale, guide)
            self._table = (sums, guide, scale)
        return self._table

    def _masses_of(self, ranks: IntArray) -> FloatArray:
        """
        :param ranks: counted from 1, of any shape
        :return: their masses, of the same shape, to the last bit as :meth:`sample` gives them
        """
        masses = np.empty(ranks.size)
        rank_kernels.masses_of(ranks.ravel() - 1, self._alpha, masses)
        return masses.reshape(ranks.shape)

    def _checked(self, indices: npt.ArrayLike) -> IntArray:
        places = as_indices(indices)
        outside = (places < 0) | (places >= self._capacity)
        if outside.any():
            raise self._index_error(places[outside][0])
        return places

    def _require_mass(self) -> None:
        if not self._head[rank_kernels.N_RANKED] > 0:
            raise ValueError("no leaf has a priority above zero: there is nothing to draw")

    def _index_error(self, index: Any) -> IndexError:
        return IndexError(f"index {index} is outside [0, {self._capacity})")

    def _priority_error(self, priority: Any, index: Any) -> ValueError:
        return ValueError(
            f"priority {priority} for leaf {index} is not a finite number of at least 0"
        )
