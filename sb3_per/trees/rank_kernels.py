"""
The loops under :class:`~sb3_per.trees.rank_tree.RankTree`, compiled by numba.

A leaf above zero is *ranked*: it has an entry, one signed 64-bit integer whose high bits are the
complement of the priority's leading bits and whose low ``shift`` bits are the number of the leaf.
Entries in ascending order are therefore leaves in the order of their ranks, ties by leaf number,
and one comparison of integers decides. Entries lie in a tree of three levels:

* *blocks* of up to ``BLOCK`` entries, sorted, the rest padded with ``LAST``;
* *nodes* of up to ``FANOUT`` children, which are blocks, each child with a separator and a count;
* one *top* list of all nodes, likewise with separators and counts.

A separator is the largest entry that may lie below a child: it is at least the child's last entry
and less than the first one of the next child. That of the last child is ``LAST``.

Blocks split when they are full and are freed when they are empty; they never merge. When no block
is left for a split, everything is laid out again, three quarters full. Many splits lie between two
such layouts, so that they add little to the average cost of an insertion.

In the arrays, ``keys`` has the blocks first, then the separators of the nodes, then those of the
top. A *slot* is a place for a child: ``FANOUT`` in each node, then one for each node in the top.
Indices in the innermost loops are unsigned: numba guards every signed index against being negative.
The tree checks its arguments; the kernels do not, unless they say so.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_per.trees.sum_kernels import (
    FOUND,
    NO_MASS,
    FloatArray,
    IntArray,
    compile_kernel,
    copy_array,
    first_fault,
)

ShortArray = npt.NDArray[np.int32]
Integer = int | np.int64

BLOCK = 64
FANOUT = 64
#: Entries in a line of the cache
LINE = 8
#: Number of leaves from which on a batch is sorted together with all others
FEW = 1024
#: Fill of blocks and nodes after a new layout
FILLED_BLOCK = BLOCK * 3 // 4
FILLED_NODE = FANOUT * 3 // 4
#: Padding of the blocks, larger than every entry
LAST = 2**63 - 1

# Places in `head`
N_RANKED = 0
N_TOP = 1
N_FREE_BLOCKS = 2
N_FREE_NODES = 3
#: Leaves of the first and of the last rank, if there are any
FIRST_LEAF = 4
LAST_LEAF = 5
#: Bits of their priorities: those of 0 and infinity if there are none
LARGEST = 6
SMALLEST = 7
HEAD_SIZE = 8

_U0 = np.uint64(0)
_U1 = np.uint64(1)
_BLOCK = np.uint64(BLOCK)
_FANOUT = np.uint64(FANOUT)
# Bits of a leaf that waits for its new priority: no non-negative number has them
_PENDING = -1
_BITS_OF_INFINITY = 0x7FF0 << 48


class Masses(NamedTuple):
    """Masses of the ranks for one alpha: the mass of rank ``r`` is ``r ** -alpha``."""

    alpha: float
    sums: FloatArray  # [capacity], of :func:`cumulate`
    guide: IntArray  # of :func:`make_guide`
    scale: float  # steps of the guide for a mass of 1


class Ranks(NamedTuple):
    """The arrays of one tree with ``b`` blocks and ``v`` nodes, used and unused ones."""

    leaves: FloatArray  # [capacity], priorities in order
    keys: IntArray  # [b * BLOCK + v * FANOUT + v], entries of blocks, then separators
    kids: ShortArray  # [v * FANOUT + v], by slot: the block or node below it
    counts: ShortArray  # [v * FANOUT + v], by slot: number of entries below it
    sizes: ShortArray  # [v], children of each node
    free_blocks: ShortArray  # [b], the unused ones first
    free_nodes: ShortArray  # [v], the unused ones first
    head: IntArray  # [HEAD_SIZE]


@compile_kernel
def entry_of(bits: Integer, leaf: Integer, shift: Integer) -> Integer:
    """
    :param bits: bits of a priority above zero, as an integer
    :param leaf: number of its leaf
    :param shift: number of bits for a leaf number
    :return: the entry: smaller for a larger priority, and then for a smaller leaf number
    """
    return (((LAST >> shift) - 1 - (bits >> shift)) << shift) | leaf


# --- searching ---


@compile_kernel
def _lower(keys: IntArray, start: Integer, n: Integer, entry: Integer) -> Integer:
    """
    :param start: position of the first separator
    :param n: number of separators; the last one is not below ``entry``
    :return: position of the first one that is not below ``entry``, counted from ``start``
    """
    low = np.uint64(start)
    left = np.uint64(n)
    while left > _U1:
        half = left >> _U1
        low += half * np.uint64(keys[low + half - _U1] < entry)
        left -= half
    return np.int64(low) - start


@compile_kernel
def _count_below(keys: IntArray, start: Integer, entry: Integer) -> Integer:
    """
    :param start: position of the first entry of a block
    :return: number of its entries that are less than ``entry``
    """
    first = np.uint64(start)
    n = _U0
    # Always the whole block: no branch to predict, and the loop compiles to a few instructions
    for i in range(BLOCK):
        n += np.uint64(keys[first + np.uint64(i)] < entry)
    return np.int64(n)


@compile_kernel
def _search(tree: Ranks, entry: Integer) -> tuple[Integer, Integer]:
    """
    Find the place of an entry.

    :return: slot in the top, slot in the node below it
    """
    n_nodes = tree.sizes.shape[0]
    top_slot = n_nodes * FANOUT
    node_keys = tree.free_blocks.shape[0] * BLOCK
    top = top_slot + _lower(tree.keys, node_keys + top_slot, tree.head[N_TOP], entry)
    node = np.int64(tree.kids[top])
    slot = node * FANOUT
    slot += _lower(tree.keys, node_keys + slot, tree.sizes[node], entry)
    return top, slot


@compile_kernel
def _belongs(tree: Ranks, top: Integer, slot: Integer, entry: Integer) -> bool:
    """
    Check whether an entry still belongs where it did before slots changed.

    :param top: slot in the top, which may be another node's by now
    :param slot: slot in the node that was there
    :return: whether it still belongs there
    """
    keys = tree.keys
    first_top = tree.sizes.shape[0] * FANOUT
    node = slot // FANOUT
    if top >= first_top + tree.head[N_TOP] or tree.kids[top] != node:
        return False
    if slot >= node * FANOUT + tree.sizes[node]:
        return False
    node_keys = tree.free_blocks.shape[0] * BLOCK
    if keys[node_keys + slot] < entry:
        return False
    if slot > node * FANOUT:
        return bool(keys[node_keys + slot - 1] < entry)
    return bool(top == first_top or keys[node_keys + top - 1] < entry)


@compile_kernel
def _search_all(tree: Ranks, entries: IntArray, n: int, tops: IntArray, slots: IntArray) -> Integer:
    """
    :func:`_search` for many entries, all one step further at a time, so that their memory accesses
    overlap. Counts and blocks are then read, one number of each cache line, for the same reason:
    what changes them next finds them in the cache.

    :param entries: the first ``n`` are looked for
    :param tops: receives slots in the top
    :param slots: receives slots in nodes
    :return: a number computed from all reads, without which the compiler would remove them
    """
    n_nodes = tree.sizes.shape[0]
    keys = tree.keys
    node_keys = np.uint64(tree.free_blocks.shape[0] * BLOCK)
    top_slot = np.uint64(n_nodes * FANOUT)
    for j in range(n):
        tops[j] = top_slot
    left = np.uint64(tree.head[N_TOP])
    while left > _U1:
        half = left >> _U1
        for j in range(n):
            at = np.uint64(tops[j])
            key = keys[node_keys + at + half - _U1]
            tops[j] = at + half * np.uint64(key < entries[j])
        left -= half
    for j in range(n):
        slots[j] = np.uint64(tree.kids[np.uint64(tops[j])]) * _FANOUT
    # Beyond the children of a node, separators are LAST
    left = _FANOUT
    while left > _U1:
        half = left >> _U1
        for j in range(n):
            at = np.uint64(slots[j])
            key = keys[node_keys + at + half - _U1]
            slots[j] = at + half * np.uint64(key < entries[j])
        left -= half
    touched: Integer = 0
    for j in range(n):
        block = np.int64(tree.kids[np.uint64(slots[j])])
        touched ^= np.int64(tree.counts[np.uint64(slots[j])])
        start = np.uint64(block * BLOCK)
        for i in range(0, BLOCK, LINE):
            touched ^= keys[start + np.uint64(i)]
    return touched


# --- layout ---


@compile_kernel
def _pack(tree: Ranks, entries: IntArray) -> None:
    """
    Make a new layout of all entries, with blocks and nodes that are evenly filled.

    :param entries: all entries, sorted
    """
    keys = tree.keys
    n_nodes = tree.sizes.shape[0]
    node_keys = tree.free_blocks.shape[0] * BLOCK
    n = entries.shape[0]
    n_blocks = max(1, -(-n // FILLED_BLOCK))
    n_top = -(-n_blocks // FILLED_NODE)
    tree.head[N_RANKED] = n
    tree.head[N_TOP] = n_top
    n_free = tree.free_blocks.shape[0] - n_blocks
    for i in range(n_free):
        tree.free_blocks[i] = n_blocks + n_free - 1 - i
    tree.head[N_FREE_BLOCKS] = n_free
    n_free = n_nodes - n_top
    for i in range(n_free):
        tree.free_nodes[i] = n_top + n_free - 1 - i
    tree.head[N_FREE_NODES] = n_free
    for i in range(node_keys, keys.shape[0]):
        keys[i] = LAST
    for node in range(n_top):
        slot = node * FANOUT
        first = n_blocks * node // n_top
        end = n_blocks * (node + 1) // n_top
        for block in range(first, end):
            begin = n * block // n_blocks
            count = n * (block + 1) // n_blocks - begin
            for i in range(BLOCK):
                keys[block * BLOCK + i] = entries[begin + i] if i < count else LAST
            if block < n_blocks - 1:
                keys[node_keys + slot] = entries[begin + count - 1]
            tree.kids[slot] = block
            tree.counts[slot] = count
            slot += 1
        tree.sizes[node] = end - first
        top = n_nodes * FANOUT + node
        tree.kids[top] = node
        tree.counts[top] = n * end // n_blocks - n * first // n_blocks
        keys[node_keys + top] = keys[node_keys + slot - 1]


@compile_kernel
def _entries_in_order(tree: Ranks) -> IntArray:
    """
    Read all blocks.

    :return: all entries, shape ``(n_ranked,)``, ascending
    """
    entries = np.empty(tree.head[N_RANKED], np.int64)
    n = 0
    top = tree.sizes.shape[0] * FANOUT
    for t in range(tree.head[N_TOP]):
        node = np.int64(tree.kids[top + t])
        for slot in range(node * FANOUT, node * FANOUT + tree.sizes[node]):
            start = np.int64(tree.kids[slot]) * BLOCK
            for i in range(start, start + tree.counts[slot]):
                entries[n] = tree.keys[i]
                n += 1
    return entries


# --- removing ---


@compile_kernel
def _drop_slot(tree: Ranks, slot: Integer, end: Integer) -> None:
    """
    Remove a child from its list; its range of entries goes to the next child, or to the one before
    if it is the last.

    :param slot: slot of the child
    :param end: one past the last slot of the list, which has more than one
    """
    node_keys = tree.free_blocks.shape[0] * BLOCK
    if slot == end - 1:
        tree.keys[node_keys + slot - 1] = tree.keys[node_keys + slot]
    for i in range(slot, end - 1):
        tree.keys[node_keys + i] = tree.keys[node_keys + i + 1]
        tree.kids[i] = tree.kids[i + 1]
        tree.counts[i] = tree.counts[i + 1]
    tree.keys[node_keys + end - 1] = LAST


@compile_kernel
def _free_block(tree: Ranks, top: Integer, slot: Integer) -> None:
    """
    Remove an empty block, and its node if that has no other.

    :param top: slot of the node
    :param slot: slot of the block
    """
    head = tree.head
    tree.free_blocks[head[N_FREE_BLOCKS]] = tree.kids[slot]
    head[N_FREE_BLOCKS] += 1
    node = np.int64(tree.kids[top])
    size = np.int64(tree.sizes[node])
    if size > 1:
        _drop_slot(tree, slot, node * FANOUT + size)
        tree.sizes[node] = size - 1
        return
    tree.free_nodes[head[N_FREE_NODES]] = node
    head[N_FREE_NODES] += 1
    end = tree.sizes.shape[0] * FANOUT + head[N_TOP]
    _drop_slot(tree, top, end)
    head[N_TOP] -= 1
    if top == end - 1:
        # The last block of the node before takes over the range of entries
        before = np.int64(tree.kids[top - 1])
        slot = before * FANOUT + tree.sizes[before] - 1
        tree.keys[tree.free_blocks.shape[0] * BLOCK + slot] = LAST


@compile_kernel
def _remove_all(tree: Ranks, entries: IntArray, n: int) -> None:
    """
    Remove entries.

    The loop's body is not a separate function: each call would pass all the arrays.

    :param entries: the first ``n`` are removed; all of them are present
    """
    keys, kids, counts, head = tree.keys, tree.kids, tree.counts, tree.head
    tops = np.empty(n, np.int64)
    slots = np.empty(n, np.int64)
    _search_all(tree, entries, n, tops, slots)
    changed = False
    for j in range(n):
        top, slot = tops[j], slots[j]
        if changed and not _belongs(tree, top, slot, entries[j]):
            top, slot = _search(tree, entries[j])
        start = np.int64(kids[slot]) * BLOCK
        first = np.uint64(start)
        for i in range(_count_below(keys, start, entries[j]), BLOCK - 1):
            at = first + np.uint64(i)
            keys[at] = keys[at + _U1]
        keys[start + BLOCK - 1] = LAST
        counts[slot] -= 1
        counts[top] -= 1
        head[N_RANKED] -= 1
        # The very last block stays, so that there is always one to insert into
        if counts[slot] == 0 and head[N_RANKED] > 0:
            _free_block(tree, top, slot)
            changed = True


# --- inserting ---


@compile_kernel
def _make_room(tree: Ranks, slot: Integer, end: Integer) -> None:
    """
    Move the children behind a slot one further and copy its separator to the place that is then
    free.

    :param slot: slot before the new place
    :param end: one past the last slot of the list, which is not full
    """
    node_keys = tree.free_blocks.shape[0] * BLOCK
    for i in range(end, slot + 1, -1):
        tree.keys[node_keys + i] = tree.keys[node_keys + i - 1]
        tree.kids[i] = tree.kids[i - 1]
        tree.counts[i] = tree.counts[i - 1]
    tree.keys[node_keys + slot + 1] = tree.keys[node_keys + slot]


@compile_kernel
def _split_node(tree: Ranks, top: Integer) -> None:
    """
    Move half of the children of a full node to a new one behind it.

    :param top: slot of the node
    """
    head = tree.head
    node_keys = tree.free_blocks.shape[0] * BLOCK
    node = np.int64(tree.kids[top])
    head[N_FREE_NODES] -= 1
    new = np.int64(tree.free_nodes[head[N_FREE_NODES]])
    half = FANOUT // 2
    moved = 0
    for i in range(FANOUT):
        to = new * FANOUT + i
        if i >= half:
            tree.keys[node_keys + to] = LAST
            continue
        slot = node * FANOUT + half + i
        tree.keys[node_keys + to] = tree.keys[node_keys + slot]
        tree.keys[node_keys + slot] = LAST
        tree.kids[to] = tree.kids[slot]
        tree.counts[to] = tree.counts[slot]
        moved += tree.counts[slot]
    tree.sizes[node] = half
    tree.sizes[new] = half
    _make_room(tree, top, tree.sizes.shape[0] * FANOUT + head[N_TOP])
    head[N_TOP] += 1
    tree.keys[node_keys + top] = tree.keys[node_keys + node * FANOUT + half - 1]
    tree.counts[top] -= moved
    tree.kids[top + 1] = new
    tree.counts[top + 1] = moved


@compile_kernel
def _split_block(tree: Ranks, top: Integer, slot: Integer, place: Integer) -> None:
    """
    Move the end of a full block to a new one behind it. Where entries come in order, one block
    stays full and the other takes the range between the two, so that none is left half empty.

    :param top: slot of its node, which is not full
    :param slot: slot of the block
    :param place: position in the block of the entry that is inserted next
    """
    keys = tree.keys
    head = tree.head
    node = np.int64(tree.kids[top])
    old = np.int64(tree.kids[slot]) * BLOCK
    head[N_FREE_BLOCKS] -= 1
    new_block = tree.free_blocks[head[N_FREE_BLOCKS]]
    new = np.int64(new_block) * BLOCK
    keep = BLOCK // 2
    if place == 0:
        keep = 0
    elif place == BLOCK:
        keep = BLOCK
    for i in range(BLOCK):
        if i < BLOCK - keep:
            keys[new + i] = keys[old + keep + i]
        else:
            keys[new + i] = LAST
    separator = keys[new] - 1 if keep == 0 else keys[old + keep - 1]
    for i in range(keep, BLOCK):
        keys[old + i] = LAST
    _make_room(tree, slot, node * FANOUT + tree.sizes[node])
    tree.sizes[node] += 1
    keys[tree.free_blocks.shape[0] * BLOCK + slot] = separator
    tree.counts[slot] = keep
    tree.kids[slot + 1] = new_block
    tree.counts[slot + 1] = BLOCK - keep


@compile_kernel
def _split(tree: Ranks, top: Integer, slot: Integer, entry: Integer) -> tuple[Integer, Integer]:
    """
    Make room in a full block: split it, its node, or lay out everything again.

    :param top: slot of its node
    :param slot: slot of the block
    :param entry: entry to insert
    :return: place of the entry now: slot in the top, slot in the node below it
    """
    head = tree.head
    node_is_full = tree.sizes[tree.kids[top]] == FANOUT
    if head[N_FREE_BLOCKS] == 0 or (node_is_full and head[N_FREE_NODES] == 0):
        _pack(tree, _entries_in_order(tree))
        return _search(tree, entry)
    if node_is_full:
        _split_node(tree, top)
        top, slot = _search(tree, entry)
    place = _count_below(tree.keys, np.int64(tree.kids[slot]) * BLOCK, entry)
    _split_block(tree, top, slot, place)
    return _search(tree, entry)


@compile_kernel
def _insert_all(tree: Ranks, entries: IntArray, n: int) -> None:
    """
    Insert entries.

    :param entries: the first ``n`` are inserted; none of them is present yet
    """
    keys, kids, counts, head = tree.keys, tree.kids, tree.counts, tree.head
    tops = np.empty(n, np.int64)
    slots = np.empty(n, np.int64)
    _search_all(tree, entries, n, tops, slots)
    changed = False
    for j in range(n):
        top, slot = tops[j], slots[j]
        if changed and not _belongs(tree, top, slot, entries[j]):
            top, slot = _search(tree, entries[j])
        if counts[slot] == BLOCK:
            top, slot = _split(tree, top, slot, entries[j])
            changed = True
        start = np.int64(kids[slot]) * BLOCK
        first = np.uint64(start)
        place = _count_below(keys, start, entries[j])
        for i in range(BLOCK - 1, place, -1):
            at = first + np.uint64(i)
            keys[at] = keys[at - _U1]
        keys[start + place] = entries[j]
        counts[slot] += 1
        counts[top] += 1
        head[N_RANKED] += 1


@compile_kernel
def _note_ends(tree: Ranks, shift: int) -> None:
    """
    Note the leaves of the first and of the last rank, and their priorities.

    :param shift: number of bits for a leaf number
    """
    head = tree.head
    if head[N_RANKED] == 0:
        head[LARGEST] = 0
        head[SMALLEST] = _BITS_OF_INFINITY
        return
    bits = tree.leaves.view(np.int64)
    mask = (1 << shift) - 1
    top = tree.sizes.shape[0] * FANOUT
    node = np.int64(tree.kids[top])
    first = np.int64(tree.kids[node * FANOUT]) * BLOCK
    head[FIRST_LEAF] = tree.keys[first] & mask
    node = np.int64(tree.kids[top + head[N_TOP] - 1])
    slot = node * FANOUT + tree.sizes[node] - 1
    last = np.int64(tree.kids[slot]) * BLOCK + tree.counts[slot] - 1
    head[LAST_LEAF] = tree.keys[last] & mask
    head[LARGEST] = bits[head[FIRST_LEAF]]
    head[SMALLEST] = bits[head[LAST_LEAF]]


@compile_kernel
def _sort(numbers: IntArray) -> IntArray:
    """
    Radix sort by bytes, the least significant one first. numba's sort takes three times as long,
    and seconds more to compile.

    :param numbers: numbers that are not negative; overwritten
    :return: the same numbers, ascending
    """
    n = numbers.shape[0]
    to = np.empty(n, np.int64)
    for byte in range(8):
        ends = np.zeros(256, np.int64)
        for j in range(n):
            ends[(numbers[j] >> 8 * byte) & 255] += 1
        if n == 0 or ends[(numbers[0] >> 8 * byte) & 255] == n:
            # All numbers have the same byte
            continue
        for value in range(1, 256):
            ends[value] += ends[value - 1]
        # From the end, so that numbers with the same byte keep their order
        for j in range(n - 1, -1, -1):
            value = (numbers[j] >> 8 * byte) & 255
            ends[value] -= 1
            to[ends[value]] = numbers[j]
        numbers, to = to, numbers
    return numbers


@compile_kernel
def _arrange(tree: Ranks, shift: int) -> None:
    """
    Make everything from the leaves.

    :param shift: number of bits for a leaf number
    """
    bits = tree.leaves.view(np.int64)
    entries = np.empty(bits.shape[0], np.int64)
    n = 0
    for leaf in range(bits.shape[0]):
        if bits[leaf] > 0:
            entries[n] = entry_of(bits[leaf], leaf, shift)
            n += 1
    _pack(tree, _sort(entries[:n]))
    _note_ends(tree, shift)


# --- called by the tree ---


@compile_kernel
def write(
    leaves: FloatArray,
    keys: IntArray,
    kids: ShortArray,
    counts: ShortArray,
    sizes: ShortArray,
    free_blocks: ShortArray,
    free_nodes: ShortArray,
    head: IntArray,
    shift: int,
    indices: IntArray,
    priorities: FloatArray,
) -> None:
    """
    Set leaves: remove their old entries, then insert the new ones. When there are many, all entries
    are sorted again, which takes less time.

    :param leaves: this and the next ones are the arrays of :class:`Ranks`
    :param shift: number of bits for a leaf number
    :param indices: shape ``(n,)``, numbers of the leaves; the last of repeated ones wins
    :param priorities: shape ``(n,)``, finite and not negative
    """
    tree = Ranks(leaves, keys, kids, counts, sizes, free_blocks, free_nodes, head)
    bits = leaves.view(np.int64)
    n = indices.shape[0]
    if n > max(FEW, leaves.shape[0] // 4):
        for j in range(n):
            # Adding zero turns -0.0 into 0.0
            leaves[np.uint64(indices[j])] = priorities[j] + 0.0
        _arrange(tree, shift)
        return
    entries = np.empty(n, np.int64)
    n_old = 0
    for j in range(n):
        leaf = np.uint64(indices[j])
        old = bits[leaf]
        if old > 0:
            entries[n_old] = entry_of(old, indices[j], shift)
            n_old += 1
        # Marks the leaf, in case it is repeated
        bits[leaf] = _PENDING
    _remove_all(tree, entries, n_old)
    # From the end, so that the last of repeated ones comes first; the entries keep their order
    first_new = n
    for j in range(n - 1, -1, -1):
        leaf = np.uint64(indices[j])
        if bits[leaf] != _PENDING:
            continue
        leaves[leaf] = priorities[j] + 0.0
        if priorities[j] > 0.0:
            first_new -= 1
            entries[first_new] = entry_of(bits[leaf], indices[j], shift)
    _insert_all(tree, entries[first_new:], n - first_new)
    _note_ends(tree, shift)


@compile_kernel
def checked_write(
    leaves: FloatArray,
    keys: IntArray,
    kids: ShortArray,
    counts: ShortArray,
    sizes: ShortArray,
    free_blocks: ShortArray,
    free_nodes: ShortArray,
    head: IntArray,
    shift: int,
    indices: IntArray,
    priorities: FloatArray,
    limit: float,
) -> int:
    """
    :func:`write`, unless :func:`first_fault` finds one: then nothing is written.

    :param leaves: this and the next ones are the arrays of :class:`Ranks`
    :param shift: number of bits for a leaf number
    :param indices: shape ``(n,)``
    :param priorities: shape ``(n,)``
    :param limit: largest priority that is allowed
    :return: position of the fault, or -1
    """
    at = first_fault(indices, priorities, leaves.shape[0], limit)
    if at < 0:
        write(
            leaves,
            keys,
            kids,
            counts,
            sizes,
            free_blocks,
            free_nodes,
            head,
            shift,
            indices,
            priorities,
        )
    return at


@compile_kernel
def fill(
    leaves: FloatArray,
    keys: IntArray,
    kids: ShortArray,
    counts: ShortArray,
    sizes: ShortArray,
    free_blocks: ShortArray,
    free_nodes: ShortArray,
    head: IntArray,
    shift: int,
    start: int,
    stop: int,
    priority: float,
) -> None:
    """
    Set a range of leaves to one priority; those that have it already cost nothing.

    :param leaves: this and the next ones are the arrays of :class:`Ranks`
    :param shift: number of bits for a leaf number
    :param start: first leaf
    :param stop: one past the last leaf, greater than ``start``
    :param priority: finite and not negative
    """
    tree = Ranks(leaves, keys, kids, counts, sizes, free_blocks, free_nodes, head)
    bits = leaves.view(np.int64)
    old_entries = np.empty(stop - start, np.int64)
    entries = np.empty(stop - start, np.int64)
    n_old = 0
    n_new = 0
    for leaf in range(start, stop):
        if leaves[leaf] == priority:
            continue
        if leaves[leaf] > 0.0:
            old_entries[n_old] = entry_of(bits[leaf], leaf, shift)
            n_old += 1
        leaves[leaf] = priority + 0.0
        if priority > 0.0:
            entries[n_new] = entry_of(bits[leaf], leaf, shift)
            n_new += 1
    if n_old > 0:
        _remove_all(tree, old_entries, n_old)
    if n_new > 0:
        _insert_all(tree, entries, n_new)
    _note_ends(tree, shift)


@compile_kernel
def arrange(
    leaves: FloatArray,
    keys: IntArray,
    kids: ShortArray,
    counts: ShortArray,
    sizes: ShortArray,
    free_blocks: ShortArray,
    free_nodes: ShortArray,
    head: IntArray,
    shift: int,
) -> None:
    """
    Make everything from the leaves.

    :param leaves: this and the next ones are the arrays of :class:`Ranks`
    :param shift: number of bits for a leaf number
    """
    _arrange(Ranks(leaves, keys, kids, counts, sizes, free_blocks, free_nodes, head), shift)


@compile_kernel
def copy(
    leaves: FloatArray,
    keys: IntArray,
    kids: ShortArray,
    counts: ShortArray,
    sizes: ShortArray,
    free_blocks: ShortArray,
    free_nodes: ShortArray,
    head: IntArray,
    to_leaves: FloatArray,
    to_keys: IntArray,
    to_kids: ShortArray,
    to_counts: ShortArray,
    to_sizes: ShortArray,
    to_free_blocks: ShortArray,
    to_free_nodes: ShortArray,
    to_head: IntArray,
) -> None:
    """
    Copy a tree as it is at one moment. NumPy would let other threads write meanwhile.

    :param leaves: this and the next ones are the arrays of :class:`Ranks`
    :param to_leaves: this and the next ones receive them, same shapes
    """
    copy_array(leaves, to_leaves)
    copy_array(keys, to_keys)
    copy_array(kids, to_kids)
    copy_array(counts, to_counts)
    copy_array(sizes, to_sizes)
    copy_array(free_blocks, to_free_blocks)
    copy_array(free_nodes, to_free_nodes)
    copy_array(head, to_head)


@compile_kernel
def cumulate(alpha: float, sums: FloatArray) -> None:
    """
    Sum the masses of ranks, with the rounding error of each addition carried on to the next one.

    :param alpha: the mass of rank ``r`` is ``r ** -alpha``
    :param sums: shape ``(n,)``, receives at ``r - 1`` the masses of ranks 1 to ``r``
    """
    total = 0.0
    error = 0.0
    last = 0.0
    for i in range(sums.shape[0]):
        mass = (i + 1.0) ** -alpha
        new = total + mass
        # Rounding error of the addition: the total is never the smaller of the two
        error += (total - new) + mass
        total = new
        # Rounding must not make a sum less than the one before
        last = max(last, total + error)
        sums[i] = last


@compile_kernel
def masses_of(ranks: IntArray, alpha: float, masses: FloatArray) -> None:
    """
    Compute the masses of ranks.

    :param ranks: shape ``(n,)``, counted from 0
    :param alpha: the mass of rank ``r``, counted from 1, is ``r ** -alpha``
    :param masses: shape ``(n,)``, receives the masses
    """
    for j in range(ranks.shape[0]):
        masses[j] = (ranks[j] + 1.0) ** -alpha


@compile_kernel
def make_guide(sums: FloatArray, scale: float, guide: IntArray) -> None:
    """
    For equal steps of mass, note where in the sums they begin.

    :param sums: of :func:`cumulate`
    :param scale: steps for a mass of 1
    :param guide: shape ``(n_steps + 2,)``, receives at ``i`` the first place whose sum belongs to
        step ``i`` or to a later one, the last place if there is none
    """
    place = 0
    last = sums.shape[0] - 1
    for step in range(guide.shape[0] - 1):
        while place < last and np.int64(sums[place] * scale) < step:
            place += 1
        guide[step] = place
    guide[guide.shape[0] - 1] = last


@compile_kernel
def _first_above(sums: FloatArray, low: Integer, high: Integer, value: float) -> Integer:
    """
    Search the sums by halving.

    :param low: first candidate
    :param high: last candidate, whose sum is above the value
    :return: the first place whose sum is above ``value``
    """
    while low < high:
        middle = (low + high) // 2
        if sums[middle] > value:
            high = middle
        else:
            low = middle + 1
    return low


@compile_kernel
def _find_ranks(
    sums: FloatArray, guide: IntArray, scale: float, values: FloatArray, ranks: IntArray
) -> None:
    """
    Find the rank whose interval of mass holds each value: the first one whose sum is above it.

    The guide leaves few candidates for each value, and between them the sums are nearly a straight
    line. The step of a number never decreases when the number grows, whatever the rounding, so that
    the guide never leads past the rank.

    :param sums: of :func:`cumulate`
    :param guide: of :func:`make_guide`
    :param scale: steps for a mass of 1
    :param values: shape ``(n,)``, not negative, below the last sum
    :param ranks: shape ``(n,)``, receives ranks counted from 0
    """
    for j in range(values.shape[0]):
        at = values[j] * scale
        step = np.uint64(at)
        first = guide[step]
        ranks[j] = first + np.int64((at - step) * (guide[step + _U1] - first))
    # In a separate loop, so that these accesses to distant memory overlap
    for j in range(values.shape[0]):
        value = values[j]
        place = np.uint64(ranks[j])
        # Rarely wrong by more than one
        place += np.uint64(sums[place] <= value)
        before = place - np.uint64(place > _U0)
        place -= np.uint64((before < place) & (sums[before] > value))
        before = place - np.uint64(place > _U0)
        ranks[j] = place
        if sums[place] <= value or (before < place and sums[before] > value):
            step = np.uint64(value * scale)
            ranks[j] = _first_above(sums, guide[step], guide[step + _U1], value)


@compile_kernel
def _select(tree: Ranks, shift: int, ranks: IntArray) -> None:
    """
    Find the leaves of some ranks.

    :param shift: number of bits for a leaf number
    :param ranks: shape ``(n,)``, ascending, counted from 0, all in use; replaced by the leaves
    """
    keys, kids, counts = tree.keys, tree.kids, tree.counts
    top = np.uint64(tree.sizes.shape[0] * FANOUT)
    before_node = 0
    before_block = 0
    slot = np.uint64(kids[top]) * _FANOUT
    for j in range(ranks.shape[0]):
        rank = ranks[j]
        if before_node + counts[top] <= rank:
            while before_node + counts[top] <= rank:
                before_node += counts[top]
                top += _U1
            slot = np.uint64(kids[top]) * _FANOUT
            before_block = before_node
        while before_block + counts[slot] <= rank:
            before_block += counts[slot]
            slot += _U1
        ranks[j] = np.int64(kids[slot]) * BLOCK + (rank - before_block)
    # In a separate loop, so that these accesses to distant memory overlap
    mask = (1 << shift) - 1
    for j in range(ranks.shape[0]):
        ranks[j] = keys[np.uint64(ranks[j])] & mask


@compile_kernel
def _locate(
    tree: Ranks,
    shift: int,
    alpha: float,
    sums: FloatArray,
    guide: IntArray,
    scale: float,
    values: FloatArray,
    indices: IntArray,
) -> None:
    """
    Find the leaves whose intervals of mass hold some values.

    :param shift: number of bits for a leaf number
    :param alpha: this and the next ones are :class:`Masses`
    :param values: shape ``(n,)``, ascending, in ``[0, total]``; replaced by the masses found
    :param indices: shape ``(n,)``, receives the numbers of the leaves, in the order of their ranks
    """
    below_total = np.nextafter(sums[tree.head[N_RANKED] - 1], 0.0)
    for j in range(values.shape[0]):
        # The total itself belongs to no rank
        values[j] = min(values[j], below_total)
    _find_ranks(sums, guide, scale, values, indices)
    masses_of(indices, alpha, values)
    _select(tree, shift, indices)


@compile_kernel
def find(
    leaves: FloatArray,
    keys: IntArray,
    kids: ShortArray,
    counts: ShortArray,
    sizes: ShortArray,
    free_blocks: ShortArray,
    free_nodes: ShortArray,
    head: IntArray,
    shift: int,
    alpha: float,
    sums: FloatArray,
    guide: IntArray,
    scale: float,
    values: FloatArray,
    indices: IntArray,
) -> int:
    """
    Find the leaves whose intervals of mass hold some values, if all values are in ``[0, total]``.

    :param leaves: this and the next ones are the arrays of :class:`Ranks`
    :param shift: number of bits for a leaf number
    :param alpha: this and the next ones are :class:`Masses`
    :param values: shape ``(n,)``, ascending; replaced by the masses found
    :param indices: shape ``(n,)``, receives the numbers of the leaves, in the order of their ranks
    :return: ``FOUND``, ``NO_MASS``, or the position of the first value that is outside
    """
    if head[N_RANKED] == 0:
        return NO_MASS
    total = sums[head[N_RANKED] - 1]
    for j in range(values.shape[0]):
        if not 0.0 <= values[j] <= total:
            return j
    tree = Ranks(leaves, keys, kids, counts, sizes, free_blocks, free_nodes, head)
    _locate(tree, shift, alpha, sums, guide, scale, values, indices)
    return FOUND


@compile_kernel
def draw(
    leaves: FloatArray,
    keys: IntArray,
    kids: ShortArray,
    counts: ShortArray,
    sizes: ShortArray,
    free_blocks: ShortArray,
    free_nodes: ShortArray,
    head: IntArray,
    shift: int,
    alpha: float,
    sums: FloatArray,
    guide: IntArray,
    scale: float,
    uniforms: FloatArray,
    indices: IntArray,
) -> bool:
    """
    Stratified draw: cut the total mass into equal parts and take one point in each.

    :param leaves: this and the next ones are the arrays of :class:`Ranks`
    :param shift: number of bits for a leaf number
    :param alpha: this and the next ones are :class:`Masses`
    :param uniforms: shape ``(n,)``, in ``[0, 1)``, the place inside each stratum; replaced by the
        masses drawn
    :param indices: shape ``(n,)``, receives the numbers of the leaves, in the order of their ranks
    :return: whether there was a leaf above zero
    """
    if head[N_RANKED] == 0:
        return False
    n = uniforms.shape[0]
    total = sums[head[N_RANKED] - 1]
    for j in range(n):
        uniforms[j] = (j + uniforms[j]) / n * total
    tree = Ranks(leaves, keys, kids, counts, sizes, free_blocks, free_nodes, head)
    _locate(tree, shift, alpha, sums, guide, scale, uniforms, indices)
    return True


@compile_kernel
def all_ranks(
    leaves: FloatArray,
    keys: IntArray,
    kids: ShortArray,
    counts: ShortArray,
    sizes: ShortArray,
    free_blocks: ShortArray,
    free_nodes: ShortArray,
    head: IntArray,
    shift: int,
    ranks: IntArray,
) -> None:
    """
    Find the ranks of all leaves.

    :param leaves: this and the next ones are the arrays of :class:`Ranks`
    :param shift: number of bits for a leaf number
    :param ranks: shape ``(capacity,)``, receives ranks counted from 1, and 0 for a leaf of zero
    """
    tree = Ranks(leaves, keys, kids, counts, sizes, free_blocks, free_nodes, head)
    entries = _entries_in_order(tree)
    mask = (1 << shift) - 1
    ranks[:] = 0
    for i in range(entries.shape[0]):
        ranks[entries[i] & mask] = i + 1


@compile_kernel
def ranks_of(
    leaves: FloatArray,
    keys: IntArray,
    kids: ShortArray,
    counts: ShortArray,
    sizes: ShortArray,
    free_blocks: ShortArray,
    free_nodes: ShortArray,
    head: IntArray,
    shift: int,
    indices: IntArray,
    ranks: IntArray,
) -> None:
    """
    Find the ranks of leaves.

    :param leaves: this and the next ones are the arrays of :class:`Ranks`
    :param shift: number of bits for a leaf number
    :param indices: shape ``(n,)``, numbers of leaves
    :param ranks: shape ``(n,)``, receives ranks counted from 1, and 0 for a leaf of zero
    """
    tree = Ranks(leaves, keys, kids, counts, sizes, free_blocks, free_nodes, head)
    bits = leaves.view(np.int64)
    first_top = sizes.shape[0] * FANOUT
    before = np.zeros(head[N_TOP], np.int64)
    for t in range(1, head[N_TOP]):
        before[t] = before[t - 1] + counts[first_top + t - 1]
    for j in range(indices.shape[0]):
        leaf = indices[j]
        ranks[j] = 0
        if leaves[leaf] > 0.0:
            entry = entry_of(bits[leaf], leaf, shift)
            top, slot = _search(tree, entry)
            rank = before[top - first_top]
            for i in range(np.int64(kids[top]) * FANOUT, slot):
                rank += counts[i]
            ranks[j] = rank + _count_below(keys, np.int64(kids[slot]) * BLOCK, entry) + 1
