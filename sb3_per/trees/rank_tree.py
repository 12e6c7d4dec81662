"""Rank-tree: draws among millions of priorities by their ranks, which are always up to date."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_per.trees import rank_kernels
from sb3_per.trees.priority_tree import PriorityTree, as_floats
from sb3_per.trees.rank_kernels import BLOCK, FANOUT, FILLED_BLOCK, LAST, Masses, Ranks
from sb3_per.trees.sum_kernels import FloatArray, IntArray

__all__ = ["RankTree"]

#: Leaves for each step of the guide to the sums of masses
_LEAVES_PER_STEP = 64


class RankTree(PriorityTree):
    """
    Leaves with priorities, drawn by rank: leaf ``i`` with probability in proportion to
    ``(1 / rank(i)) ** alpha`` (Schaul et al. 2016, section 3.3, rank-based variant).

    Rank 1 has the largest priority. A leaf of zero has no rank and can't be drawn. Leaves of equal
    priority are ranked by their number, the smaller one first; so ranks depend on the leaves alone,
    not on their history. Priorities count as equal when they agree in their leading bits, which can
    happen when one of them is at most ``1 + resolution`` times the other. :attr:`resolution` is
    2.3e-10 for a million leaves and less for fewer; that of float32, the type of TD errors, is
    6e-8. Apart from this, ranks are exact, and they follow each write at once, while the
    paper's heap is sorted from time to time.

    How it works: all leaves above zero lie in the order of their ranks in a tree of three levels,
    blocks of up to 64 leaves below nodes of up to 64 blocks below one list. Counts lead from a rank
    to its leaf, the order of the priorities leads from a leaf to its rank. The mass of rank ``r``
    is ``r ** -alpha``. Sums of masses are computed once for each ``alpha``, and a draw looks up its
    rank in them. :meth:`get_leaf` and :meth:`sample` return leaves in the order of their ranks.

    Cost, measured against a :class:`~sb3_per.SumTree` with 10,000 to 10 million leaves: a
    draw of 32 takes 1.3 to 1.8 times as long, one of 256 0.9 to 1.2 times; a write of 32 takes 2.7
    to 3.2 times as long, one of 256 5 to 8 times. Both grow with the logarithm of ``capacity``, as
    long as that is not far beyond ten million. Memory is 24 bytes a leaf, and 8 more from the first
    draw on. The first draw after ``alpha`` was set takes 15 ms for a million leaves.

    :param capacity: number of leaves, from 1 to ``2**31 - 1``; all are zero at first
    :param alpha: strength of the prioritization: 0 draws uniformly, larger values favor the first
        ranks more; finite, at least 0. The paper uses 0.7. It can be changed at any time.
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
        self.alpha = alpha
        super().__init__(capacity)

    def _allocate(self, capacity: int) -> None:
        if capacity >= 2**31:
            raise ValueError(f"`capacity` must be at most 2**31 - 1, got {capacity}")
        self._capacity = capacity
        # Any finite one: priorities are not added
        self._limit = float(np.finfo(np.float64).max)
        # Number of bits for the number of a leaf
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
        # A view of the same memory, for the numbers in it that are priorities
        self._ends = self._head.view(np.float64)
        self._rebuild()

    def _rebuild(self) -> None:
        rank_kernels.arrange(*self._arrays, self._shift)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "alpha": self._alpha}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.alpha = state["alpha"]
        super().__setstate__(state)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(capacity={self._capacity}, alpha={self._alpha}, "
            f"n_ranked={self.n_ranked})"
        )

    @property
    def alpha(self) -> float:
        """Strength of the prioritization, at least 0. A change applies to all leaves at once."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        exponent = as_floats("alpha", value)
        if exponent.ndim or not (0.0 <= exponent < math.inf):
            raise ValueError(f"`alpha` must be a finite number of at least 0, got {value!r}")
        self._alpha = float(exponent)
        self._masses: Masses | None = None

    @property
    def resolution(self) -> float:
        """
        Relative precision of the order: two priorities may count as equal when one is at most
        ``1 + resolution`` times the other (for normal numbers: those from 2.2e-308 on).
        """
        return float(2.0 ** (self._shift - 52))

    @property
    def draw_arguments(self) -> tuple[Any, ...]:
        """First arguments of :func:`rank_kernels.draw`: the arrays, the masses of this alpha."""
        return (*self._arrays, self._shift, *self._masses_of_ranks())

    @property
    def write_arguments(self) -> tuple[Any, ...]:
        """First arguments of :func:`rank_kernels.write`: the arrays."""
        return (*self._arrays, self._shift)

    @property
    def nbytes(self) -> int:
        """Memory in bytes: 24 per leaf of a large tree, 32 after the first draw."""
        masses = self._masses
        tables = () if masses is None else (masses.sums, masses.guide)
        return sum(array.nbytes for array in (*self._arrays, *tables))

    @property
    def n_ranked(self) -> int:
        """Number of leaves above zero, which is the last rank."""
        return self._head.item(rank_kernels.N_RANKED)

    @property
    def total(self) -> float:
        """Sum of the masses of all ranks; 0.0 when no leaf is above zero."""
        n = self.n_ranked
        return self._masses_of_ranks().sums.item(n - 1) if n else 0.0

    @property
    def min_mass(self) -> float:
        """Mass of the last rank, the smallest one; infinity when no leaf is above zero."""
        n = self.n_ranked
        return self._masses_at(np.array([n])).item() if n else math.inf

    @property
    def max_priority(self) -> float:
        """Priority of the first rank; 0.0 when no leaf is above zero."""
        return self._ends.item(rank_kernels.LARGEST)

    @property
    def min_priority(self) -> float:
        """Priority of the last rank, above zero; infinity when no leaf is above zero."""
        return self._ends.item(rank_kernels.SMALLEST)

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
            ranks = np.empty(self._capacity, dtype=np.int64)
            rank_kernels.all_ranks(*self._arrays, self._shift, ranks)
            return ranks[indices].copy()
        places = self._checked(indices)
        ranks = np.empty(places.size, dtype=np.int64)
        rank_kernels.ranks_of(*self._arrays, self._shift, places.ravel(), ranks)
        return ranks.reshape(places.shape) if places.ndim else int(ranks[0])

    def masses(self, indices: npt.ArrayLike | slice) -> Any:
        """
        Masses of leaves, ``(1 / rank) ** alpha``. A mass divided by :attr:`total` is the
        probability that the leaf is drawn.

        :param indices: number of a leaf, or an array of them of any shape, in ``[0, capacity)``,
            or a slice
        :return: a float, or an array of the same shape; 0 for a leaf of zero
        :raises IndexError: if an index is outside ``[0, capacity)``
        :raises TypeError: if the indices are not integers
        """
        ranks = np.asarray(self.ranks(indices))
        masses = np.where(ranks > 0, self._masses_at(np.maximum(ranks, 1)), 0.0)
        return masses if masses.ndim else float(masses)

    def write(self, indices: IntArray, priorities: FloatArray) -> None:
        """
        :meth:`update` without its checks.

        :param indices: int64, shape ``(n,)``, contiguous, in ``[0, capacity)``
        :param priorities: float64, shape ``(n,)``, contiguous, finite, not negative
        """
        rank_kernels.write(*self._arrays, self._shift, indices, priorities)

    def _checked_write(self, indices: IntArray, priorities: FloatArray) -> int:
        return rank_kernels.checked_write(
            *self._arrays, self._shift, indices, priorities, self._limit
        )

    def _fill(self, start: int, stop: int, priority: float) -> None:
        rank_kernels.fill(*self._arrays, self._shift, start, stop, priority)

    def _find(self, values: FloatArray, indices: IntArray) -> int:
        order = np.argsort(values)
        ascending, found = values[order], np.empty_like(indices)
        at = rank_kernels.find(
            *self._arrays, self._shift, *self._masses_of_ranks(), ascending, found
        )
        values[order], indices[order] = ascending, found
        return int(order[at]) if at >= 0 else at

    def _draw(self, uniforms: FloatArray, indices: IntArray) -> bool:
        return rank_kernels.draw(
            *self._arrays, self._shift, *self._masses_of_ranks(), uniforms, indices
        )

    def check_valid(self) -> tuple[bool, str]:
        """
        Check the tree against its own rules, from the leaves up.

        :return: whether all of them hold, and a description of the first violation. The blocks hold
            each leaf above zero once, in the order of the ranks; counts, separators and the lists
            of unused places are consistent; the leaves are finite and not negative.
        """
        # A copy from one moment, whatever other threads write meanwhile
        tree = Ranks(*map(np.empty_like, self._arrays))
        rank_kernels.copy(*self._arrays, *tree)
        bad = np.flatnonzero(~((tree.leaves >= 0.0) & (tree.leaves <= self._limit)))
        if bad.size:
            return False, f"leaf {bad[0]} is {tree.leaves[bad[0]]}"
        message = _fault_in_slots(tree) or _fault_in_entries(tree, self._shift)
        return not message, message

    def _masses_of_ranks(self) -> Masses:
        """
        Tables for draws, computed when they are first needed.

        :return: those of the current alpha
        """
        masses, alpha = self._masses, self._alpha
        # Another thread may have set alpha while this one computed the tables, or the reverse
        if masses is None or masses.alpha != alpha:
            sums = np.empty(self._capacity)
            rank_kernels.cumulate(alpha, sums)
            n_steps = self._capacity // _LEAVES_PER_STEP + 1
            guide = np.empty(n_steps + 2, dtype=np.int64)
            scale = n_steps / sums.item(-1)
            rank_kernels.make_guide(sums, scale, guide)
            masses = self._masses = Masses(alpha, sums, guide, scale)
        return masses

    def _masses_at(self, ranks: IntArray) -> FloatArray:
        """
        :param ranks: counted from 1, of any shape
        :return: their masses, of the same shape, bit for bit those that :meth:`sample` returns
        """
        masses = np.empty(ranks.size)
        rank_kernels.masses_of(ranks.ravel() - 1, self._alpha, masses)
        return masses.reshape(ranks.shape)


def _sorted_entries(leaves: FloatArray, shift: int) -> IntArray:
    """
    Compute entries from the leaves: the kernels' computation in plain NumPy.

    :param leaves: priorities
    :param shift: number of bits for a leaf number
    :return: entries that the blocks must hold
    """
    ranked = np.flatnonzero(leaves > 0.0)
    bits = leaves[ranked].view(np.int64)
    prefixes = (LAST >> shift) - 1 - (bits >> shift)
    return np.sort((prefixes << shift) | ranked)


def _used_slots(tree: Ranks) -> tuple[IntArray, IntArray]:
    """
    List the slots in use.

    :return: those in the top, and those in nodes, in the order of the ranks
    """
    kids, sizes = tree.kids, tree.sizes
    top = len(sizes) * FANOUT + np.arange(tree.head[rank_kernels.N_TOP])
    return top, np.concatenate([node * FANOUT + np.arange(sizes[node]) for node in kids[top]])


def _fault_in_slots(tree: Ranks) -> str:
    """
    Check which blocks and nodes are in use, and their counts and separators.

    :return: description of the first fault, or an empty string
    """
    _, keys, kids, counts, sizes, free_blocks, free_nodes, head = tree
    top, slots = _used_slots(tree)
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


def _fault_in_entries(tree: Ranks, shift: int) -> str:
    """
    Check the blocks, and the records of the first and the last rank.

    :param shift: number of bits for a leaf number
    :return: description of the first fault, or an empty string
    """
    keys, kids, counts, head = tree.keys, tree.kids, tree.counts, tree.head
    n_blocks = len(tree.free_blocks)
    _, slots = _used_slots(tree)
    entries = keys[: n_blocks * BLOCK].reshape(-1, BLOCK)[kids[slots]]  # [slot, entry]
    taken = np.arange(BLOCK) < counts[slots][:, None]
    if ((entries < LAST) != taken).any():
        return "the count of a block is not that of its entries"
    expected = _sorted_entries(tree.leaves, shift)
    n_ranked = head[rank_kernels.N_RANKED]
    if not np.array_equal(entries[taken], expected) or n_ranked != len(expected):
        return "the entries are not those of the leaves in the order of their ranks"
    noted = head.view(np.float64)[[rank_kernels.LARGEST, rank_kernels.SMALLEST]].tolist()
    if not len(expected):
        return "" if noted == [0.0, math.inf] else f"priorities {noted} are noted of no leaf"
    if not counts[slots].all():
        return "a block is empty"
    separators = keys[n_blocks * BLOCK :][slots]
    lasts = entries[np.arange(len(slots)), counts[slots] - 1]
    if (lasts > separators).any() or (entries[1:, 0] <= separators[:-1]).any():
        return "a separator is not between the entries of two blocks"
    ends = head[[rank_kernels.FIRST_LEAF, rank_kernels.LAST_LEAF]]
    if (ends != expected[[0, -1]] & ((1 << shift) - 1)).any():
        return f"leaves {ends.tolist()} are not those of the first and the last rank"
    if noted != tree.leaves[ends].tolist():
        return f"priorities {noted} are not those of the first and the last rank"
    return ""
