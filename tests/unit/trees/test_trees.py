"""What SumTree and RankTree have in common: against a plain list, at the edges, in refusals."""

import copy
import itertools
import math
import pickle
import re
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sb3_per.trees import PriorityTree, RankTree, SumTree
from tree_helpers import (
    BELOW_ONE,
    TINY,
    assert_valid,
    drawn_at,
    random_tree,
    snapshot,
    tree_of,
)

CAPACITIES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 100, 128, 129, 300, 520)
# Sums of 520 of these stay finite, and no two neighbors in size matter beside each other
MAGNITUDES = (0.0, TINY, 3e-310, 1e-300, 1e-16, 1.0, 1.5, 1e16, 1e300)


class NaiveTree:
    """What a tree does, as a plain list: slow, and too short to be wrong."""

    def __init__(self, kind: type[PriorityTree], capacity: int, alpha: float = 0.7) -> None:
        self.by_rank = kind is RankTree
        self.leaves = [0.0] * capacity
        self.alpha = alpha

    def update(self, indices: Sequence[int], priorities: Sequence[float]) -> None:
        for index, priority in zip(indices, priorities, strict=True):
            self.leaves[index] = priority

    def order(self) -> list[int]:
        """Leaves above zero as they follow each other: by number, or from rank 1 on."""
        above_zero = [i for i, leaf in enumerate(self.leaves) if leaf > 0.0]
        if not self.by_rank:
            return above_zero
        return sorted(above_zero, key=lambda i: (-self.leaves[i], i))

    def masses(self) -> list[float]:
        if not self.by_rank:
            return self.leaves
        masses = [0.0] * len(self.leaves)
        for rank, leaf in enumerate(self.order(), start=1):
            masses[leaf] = rank**-self.alpha
        return masses

    def ends(self) -> list[float]:
        """Where the interval of each leaf above zero begins, and at last the total."""
        masses = self.masses()
        return list(itertools.accumulate((masses[i] for i in self.order()), initial=0.0))


def near(numbers: Any) -> Any:
    """Equal but for the rounding of powers and sums."""
    return pytest.approx(numbers, rel=1e-14, abs=0.0)


def assert_same(tree: Any, naive: NaiveTree) -> None:
    """The tree holds the leaves of the list, and nothing of the history that led to them."""
    assert_valid(tree)
    above_zero = [leaf for leaf in naive.leaves if leaf > 0.0]
    masses = naive.masses()
    assert tree[:].tolist() == naive.leaves
    assert tree.max_priority == max(above_zero, default=0.0)
    assert tree.min_priority == min(above_zero, default=math.inf)
    assert tree.masses(slice(None)) == near(masses)
    places = np.arange(len(masses))
    np.testing.assert_array_equal(tree.masses(places), tree.masses(slice(None)))
    assert tree.min_mass == near(min((mass for mass in masses if mass > 0.0), default=math.inf))
    assert tree.total == near(math.fsum(masses))
    options = {"alpha": naive.alpha} if naive.by_rank else {}
    assert snapshot(tree) == snapshot(tree_of(type(tree), naive.leaves, **options))


# --- random operations ---

priorities_ = st.one_of(
    st.sampled_from(MAGNITUDES),
    # Either equal or further apart than the resolution of ranks
    st.floats(1e-300, 1e300).map(lambda number: float(f"{number:.6g}")),
    st.integers(0, 9).map(float),
)
places_ = st.integers(0, 10**6)  # modulo the capacity
entries_ = st.lists(st.tuples(places_, priorities_), max_size=20)


class TreeAgainstList(RuleBasedStateMachine):
    """The same random operations on a tree and on a plain list."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.tree: Any = kind(1)
        self.naive = NaiveTree(kind, 1)

    def has_mass(self) -> bool:
        return any(self.naive.leaves)

    def has_alpha(self) -> bool:
        return self.naive.by_rank

    @property
    def capacity(self) -> int:
        return len(self.naive.leaves)

    @initialize(
        capacity=st.one_of(st.sampled_from(CAPACITIES), st.integers(1, 300)),
        full=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def create(self, capacity: int, full: bool, seed: int) -> None:
        self.tree = self.kind(capacity)
        self.naive = NaiveTree(self.kind, capacity)
        if full:
            rng = np.random.default_rng(seed)
            leaves = np.abs(rng.standard_cauchy(capacity)) * rng.integers(0, 2, capacity)
            self.tree.update(range(capacity), leaves)
            self.naive.update(range(capacity), leaves.tolist())

    @rule(entries=entries_)
    def update(self, entries: list[tuple[int, float]]) -> None:
        indices = [place % self.capacity for place, _ in entries]
        priorities = [priority for _, priority in entries]
        self.tree.update(indices, priorities)
        self.naive.update(indices, priorities)

    @rule(place=places_, priority=priorities_)
    def update_one(self, place: int, priority: float) -> None:
        self.tree.update(place % self.capacity, priority)
        self.naive.update([place % self.capacity], [priority])

    @rule(places=st.lists(places_, max_size=20), priority=priorities_)
    def update_with_one_priority_for_all(self, places: list[int], priority: float) -> None:
        indices = [place % self.capacity for place in places]
        self.tree.update(np.array(indices), priority)
        self.naive.update(indices, [priority] * len(indices))

    @rule(ends=st.tuples(places_, places_), priority=priorities_)
    def fill(self, ends: tuple[int, int], priority: float) -> None:
        start, last = sorted(end % self.capacity for end in ends)
        self.tree.fill(start, last + 1, priority)
        self.naive.update(range(start, last + 1), [priority] * (last + 1 - start))

    @precondition(has_mass)
    @rule(
        place=st.one_of(st.sampled_from((0.0, BELOW_ONE)), st.floats(0.0, BELOW_ONE)),
        batch_size=st.integers(1, 40),
        priority=priorities_,
    )
    def sample_and_update(self, place: float, batch_size: int, priority: float) -> None:
        order, masses = self.naive.order(), self.naive.masses()
        indices, drawn = drawn_at(self.tree, place, batch_size)
        positions = [order.index(i) for i in indices]
        assert positions == sorted(positions)
        assert drawn.tolist() == near([masses[i] for i in indices])
        assert min(drawn) > 0.0
        self.tree.update(indices, priority)
        self.naive.update(indices.tolist(), [priority] * batch_size)

    @precondition(has_mass)
    @rule(place=places_)
    def get_leaf_near_the_ends_of_an_interval(self, place: int) -> None:
        order, masses, ends = self.naive.order(), self.naive.masses(), self.naive.ends()
        total = self.tree.total
        end = min(ends[place % len(ends)], total)
        values = [0.0, math.nextafter(end, 0.0), end, math.nextafter(end, math.inf), total]
        values = [min(value, total) for value in values]
        indices, found = self.tree.get_leaf(values)
        assert found.tolist() == near([masses[i] for i in indices])
        assert min(found) > 0.0
        # Only as near as the order of the additions allows
        slack = 1e-13 * total
        for value, index in zip(values, indices, strict=True):
            position = order.index(index)
            assert ends[position] - slack <= value <= ends[position + 1] + slack

    @precondition(has_alpha)
    @rule(alpha=st.sampled_from((0.0, 0.3, 0.7, 1.0, 2.5)))
    def set_alpha(self, alpha: float) -> None:
        self.tree.alpha = self.naive.alpha = alpha

    @rule(
        copied=st.sampled_from((copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))))
    )
    def go_on_with_a_copy(self, copied: Callable[[Any], Any]) -> None:
        original, before = self.tree, snapshot(self.tree)
        self.tree = copied(original)
        assert snapshot(self.tree) == before
        original.fill(0, self.capacity, 7.0)
        assert snapshot(self.tree) == before

    @rule(
        entries=entries_,
        bad=st.sampled_from((math.nan, math.inf, -math.inf, -1.0, -TINY)),
        bad_index=st.one_of(st.none(), st.integers(-(2**63), -1), st.integers(0, 2**62)),
        place=places_,
    )
    def refuse(
        self, entries: list[tuple[int, float]], bad: float, bad_index: int | None, place: int
    ) -> None:
        before = snapshot(self.tree)
        wrong = (place % self.capacity, bad)
        if bad_index is not None:
            wrong = (bad_index if bad_index < 0 else bad_index + self.capacity, 1.0)
        entries = [(i % self.capacity, priority) for i, priority in entries]
        entries.insert(place % (len(entries) + 1), wrong)
        indices, priorities = zip(*entries, strict=True)
        value = str(bad) if bad_index is None else str(wrong[0])
        with pytest.raises((IndexError, ValueError), match=re.escape(value)):
            self.tree.update(indices, priorities)
        assert snapshot(self.tree) == before

    @invariant()
    def the_same(self) -> None:
        assert_same(self.tree, self.naive)


def test_random_operations_as_on_a_plain_list(kind: Any) -> None:
    """About 1,600 operations, the same ones in every run."""
    run_state_machine_as_test(
        lambda: TreeAgainstList(kind),  # type: ignore[arg-type]  # a factory is as good as a class
        settings=settings(max_examples=40, stateful_step_count=40, derandomize=True, deadline=None),
    )


@pytest.mark.parametrize("capacity", [1, 8, 9, 65, 300])
@pytest.mark.parametrize("magnitude", [1.0, 1e-310, 1e-200, 1e200])
def test_long_random_histories(kind: Any, capacity: int, magnitude: float) -> None:
    """A thousand writes and draws of batches as large as the tree, heavy tails included."""
    rng = np.random.default_rng(capacity)
    tree, naive = kind(capacity), NaiveTree(kind, capacity)
    for _ in range(20):
        for _ in range(50):
            n = int(rng.integers(1, capacity + 1))
            indices = rng.integers(capacity, size=n)
            priorities = np.abs(rng.standard_cauchy(n)) * magnitude * rng.integers(0, 2, n)
            tree.update(indices, priorities)
            naive.update(indices.tolist(), priorities.tolist())
            if tree.total > 0.0:
                drawn, masses = tree.sample(n)
                assert masses.tolist() == near(tree.masses(drawn).tolist())
                assert masses.min() > 0.0
                assert min(naive.leaves[i] for i in drawn) > 0.0
        assert_same(tree, naive)


# --- draws ---


def test_get_leaf_keeps_the_shape(kind: Any) -> None:
    tree = tree_of(kind, [1.0, 0.0, 3.0])
    indices, masses = tree.get_leaf([[0.5, 1.2], [1.5, 0.0]])
    flat_indices, flat_masses = tree.get_leaf([0.5, 1.2, 1.5, 0.0])
    np.testing.assert_array_equal(indices, flat_indices.reshape(2, 2))
    np.testing.assert_array_equal(masses, flat_masses.reshape(2, 2))
    assert indices.dtype == np.int64
    assert masses.dtype == np.float64
    assert [tree.get_leaf(value) for value in (0.5, 1.2, 1.5, 0.0)] == list(
        zip(flat_indices, flat_masses, strict=True)
    )
    assert tree.get_leaf(np.zeros((2, 0)))[0].shape == (2, 0)
    index, mass = tree.get_leaf(1)
    assert isinstance(index, np.int64)
    assert isinstance(mass, np.float64)


def test_values_in_strided_and_read_only_arrays(kind: Any) -> None:
    tree = tree_of(kind, [1.0, 2.0, 3.0, 4.0])
    values = np.array([[0.5, 2.3], [1.5, 0.0], [2.1, 1.0]])
    values.setflags(write=False)
    for given_ in (values[:, 0], values[::-1, 1], values.T, values.astype(np.float32)):
        before = given_.copy()
        expected = [tree.get_leaf(float(value))[0] for value in given_.flat]
        assert tree.get_leaf(given_)[0].ravel().tolist() == expected
        np.testing.assert_array_equal(given_, before)


@pytest.mark.parametrize("value", [-1e-300, -1.0, "above", math.inf, -math.inf, math.nan])
def test_get_leaf_refuses_values_outside_the_total(kind: Any, value: Any) -> None:
    tree = tree_of(kind, [1.0, 0.0, 3.0])
    total = tree.total
    if value == "above":
        value = math.nextafter(total, math.inf)
    message = re.escape(f"value {value} is outside [0, total] = [0, {total}]")
    for values in (value, [0.5, value], [0.5, value, 0.0]):
        with pytest.raises(ValueError, match=message):
            tree.get_leaf(values)


@pytest.mark.parametrize("place", [0.0, BELOW_ONE])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_no_draw_reaches_a_leaf_of_zero(kind: Any, capacity: int, place: float) -> None:
    """Neither at the first nor at the last point of a stratum, wherever the zeros are."""
    rng = np.random.default_rng(1)
    for share_of_zeros in (0.1, 0.5, 0.9):
        for _ in range(10):
            leaves = rng.choice([0.1, 0.3, 0.7, 1e-9], capacity)
            leaves *= rng.random(capacity) >= share_of_zeros
            leaves[rng.integers(capacity)] = 0.1
            tree = tree_of(kind, leaves)
            for batch_size in (1, 2, 3, 7, 32, 100):
                indices, masses = drawn_at(tree, place, batch_size)
                assert leaves[indices].min() > 0.0
                assert masses.min() > 0.0
                np.testing.assert_allclose(masses, tree.masses(indices), rtol=1e-14)
            all_masses = tree.masses(slice(None))
            # More strata than the smallest mass needs: each that is not tiny gets one
            many = set(drawn_at(tree, place, 20_000)[0].tolist())
            assert set(np.flatnonzero(all_masses > 1e-3 * tree.total).tolist()) <= many


def test_a_draw_rounded_up_to_the_total_ends_at_the_last_leaf_above_zero(kind: Any) -> None:
    tree = kind(40)
    tree.fill(10, 13, 1.0)
    # (2 + the largest float below 1) / 3 is 1
    assert drawn_at(tree, BELOW_ONE, 3)[0][-1] == 12
    assert tree.get_leaf(tree.total)[0] == 12
    assert tree.get_leaf(0.0)[0] == 10


def test_a_draw_takes_one_point_of_each_stratum(kind: Any) -> None:
    tree = tree_of(kind, np.random.default_rng(2).random(5_000) ** 3)
    for batch_size in (1, 2, 17, 256):
        state = np.random.get_state()
        indices, masses = tree.sample(batch_size)
        after = np.random.random_sample()
        np.random.set_state(state)
        points = (np.arange(batch_size) + np.random.random_sample(batch_size)) / batch_size
        # The global state gave one number for each draw, and nothing else was taken from it
        assert np.random.random_sample() == after
        expected, found = tree.get_leaf(points * tree.total)
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_allclose(masses, found, rtol=1e-14)


def test_the_batch_of_a_draw(kind: Any) -> None:
    tree = tree_of(kind, [1.0, 2.0, 3.0])
    for batch_size in (5, np.int32(5)):
        indices, masses = tree.sample(batch_size)
        assert indices.shape == masses.shape == (5,)
        assert indices.dtype == np.int64
        assert masses.dtype == np.float64
    # Nobody else has the two arrays
    before = snapshot(tree)
    masses[:] = 99.0
    indices[:] = 0
    assert snapshot(tree) == before


def test_the_same_seed_draws_the_same_batches(kind: Any) -> None:
    tree = random_tree(kind, 1000)
    batches = []
    for seed in (5, 5, 6):
        np.random.seed(seed)
        batches.append(tree.sample(64)[0].tolist())
    assert batches[0] == batches[1] != batches[2]


@pytest.mark.parametrize("batch_size", [0, -1])
def test_sample_refuses_an_empty_batch(kind: Any, batch_size: int) -> None:
    tree = tree_of(kind, [1.0])
    state = np.random.get_state()[1].copy()  # type: ignore[index]  # a tuple by default
    with pytest.raises(ValueError, match=f"`batch_size` must be at least 1, got {batch_size}"):
        tree.sample(batch_size)
    with pytest.raises(TypeError, match=r"`batch_size` must be an integer, got 2\.0"):
        tree.sample(2.0)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # type: ignore[index]


@pytest.mark.parametrize("capacity", [1, 9, 200])
def test_a_tree_without_mass_refuses_to_draw(kind: Any, capacity: int) -> None:
    emptied = kind(capacity)
    emptied.fill(0, capacity, 1.0)
    emptied.update(range(capacity), 0.0)
    state = np.random.get_state()[1].copy()  # type: ignore[index]  # a tuple by default
    for tree in (kind(capacity), emptied):
        assert (tree.total, tree.max_priority) == (0.0, 0.0)
        assert (tree.min_priority, tree.min_mass) == (math.inf, math.inf)
        assert tree.masses(slice(None)).tolist() == [0.0] * capacity
        with pytest.raises(ValueError, match="no leaf has a priority above zero"):
            tree.sample(1)
        for values in (0.0, 1.0, np.array([])):
            with pytest.raises(ValueError, match="no leaf has a priority above zero"):
                tree.get_leaf(values)
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # type: ignore[index]


# --- writing ---


@pytest.mark.parametrize("n_more", [0, 2_000])
@pytest.mark.parametrize(
    ("indices", "last"),
    [
        ([2, 2, 2], {2: 3.0}),
        ([1, 0, 1], {1: 3.0, 0: 2.0}),
        ([9, 1, 9], {9: 3.0, 1: 2.0}),
        ([1, 9, 2], {1: 1.0, 9: 2.0, 2: 3.0}),
        ([70, 1, 70], {70: 3.0, 1: 2.0}),
        ([1, 70, 2], {1: 1.0, 70: 2.0, 2: 3.0}),
    ],
)
def test_the_last_of_repeated_indices_wins(
    kind: Any, indices: list[int], last: dict[int, float], n_more: int
) -> None:
    """Next to each other or not, in a small batch or in one of more entries than leaves."""
    tree, naive = kind(100), NaiveTree(kind, 100)
    more = [60] * n_more
    tree.update(more + indices, [7.0] * n_more + [1.0, 2.0, 3.0])
    naive.update(more + list(last), [7.0] * n_more + list(last.values()))
    assert_same(tree, naive)


def test_largest_and_smallest_follow_what_is_stored(kind: Any) -> None:
    """Up and down, with ties, over several blocks; the minimum leaves out zeros."""
    tree = kind(20)
    for index, priority, largest, smallest in (
        (3, 5.0, 5.0, 5.0),
        (17, 2.0, 5.0, 2.0),
        (12, 9.0, 9.0, 2.0),
        (4, 9.0, 9.0, 2.0),
        (12, 1.0, 9.0, 1.0),
        (4, 0.0, 5.0, 1.0),
        (12, 0.0, 5.0, 2.0),
        (17, 0.0, 5.0, 5.0),
        (3, TINY, TINY, TINY),
        (3, 0.0, 0.0, math.inf),
    ):
        tree.update(index, priority)
        assert (tree.max_priority, tree.min_priority) == (largest, smallest)
        assert_valid(tree)


@pytest.mark.parametrize("capacity", [64, 200, 1000])
@pytest.mark.parametrize("n_values", [2, 3, 50])
def test_largest_and_smallest_among_ties_and_zeros(kind: Any, capacity: int, n_values: int) -> None:
    """
    The largest and the smallest go and come in every order, alone in their group or not: with two
    values, almost every write takes one away.
    """
    rng = np.random.default_rng(n_values)
    tree, leaves = kind(capacity), np.zeros(capacity)
    for _ in range(400):
        indices = rng.integers(capacity, size=int(rng.integers(1, 30)))
        values = rng.integers(n_values, size=len(indices)) / 7.0
        tree.update(indices, values)
        leaves[indices] = values
        above_zero = leaves[leaves > 0.0]
        assert tree.max_priority == leaves.max()
        assert tree.min_priority == above_zero.min(initial=math.inf)
        assert_valid(tree)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_fill_is_an_update_of_a_run(kind: Any, capacity: int) -> None:
    rng = np.random.default_rng(4)
    tree, naive = kind(capacity), NaiveTree(kind, capacity)
    runs = [(0, capacity), (0, 1), (capacity - 1, capacity), (capacity // 2, capacity)]
    runs += [tuple(sorted(rng.choice(capacity + 1, 2, replace=False))) for _ in range(10)]
    for start, stop in runs:
        for priority in (float(rng.random()), 0.0, 1, 2.5, 2.5):
            tree.fill(start, stop, priority)
            naive.update(range(start, stop), [float(priority)] * (stop - start))
            assert_same(tree, naive)


@pytest.mark.parametrize("there", [0, 3, 20, 39])
def test_fill_where_a_leaf_has_that_priority_already(kind: Any, there: int) -> None:
    """Nothing is to be done only if all have it."""
    tree, naive = kind(40), NaiveTree(kind, 40)
    tree.update(there, 2.0)
    for _ in range(2):
        tree.fill(0, 40, 2.0)
        naive.update(range(40), [2.0] * 40)
        assert_same(tree, naive)


def test_zero_has_no_sign(kind: Any) -> None:
    tree = random_tree(kind)
    tree.update(range(70), -0.0)
    assert str(tree.total) == "0.0"
    tree.fill(0, 70, 1.0)
    tree.fill(0, 70, -0.0)
    tree.update([0] * 2_000, -0.0)
    assert str(tree[:].tolist()) == str([0.0] * 70)
    assert str(tree.total) == str(tree.max_priority) == str(tree[3]) == "0.0"


def test_scalars_and_broadcasting(kind: Any) -> None:
    tree = kind(4)
    tree.update(1, 2.5)
    tree.update([0, 3], 1.5)
    tree.update([2], [7])
    tree.update(np.array([[0], [1]]), [[4.0], [5.0]])
    assert tree[:].tolist() == [4.0, 5.0, 7.0, 1.5]
    before = snapshot(tree)
    tree.update([], [])
    tree.update(np.array([], dtype=np.int64), 3.0)
    assert snapshot(tree) == before


def off_its_boundary(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same numbers, one byte away from where such numbers begin."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    unaligned = memory[1:].view(array.dtype)
    unaligned[:] = array
    return unaligned


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


INDEX_FORMS: dict[str, Any] = {
    "list": [6, 1, 4],
    "tuple": (6, 1, 4),
    "list of NumPy numbers": [np.int32(6), np.uint8(1), np.int64(4)],
    "range": range(6, 3, -1),
    **{
        dtype.__name__: np.array([6, 1, 4], dtype)
        for dtype in (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64)
    },
    "big-endian": np.array([6, 1, 4], ">i4"),
    "column": np.array([[6], [1], [4]]),
    "strided": np.array([6, 0, 1, 0, 4, 0])[::2],
    "reversed": np.array([4, 1, 6])[::-1],
    "column of a matrix": np.array([[6, 0], [1, 0], [4, 0]])[:, 0],
    "read-only": read_only(np.array([6, 1, 4])),
    "unaligned": off_its_boundary(np.array([6, 1, 4])),
}
PRIORITY_FORMS: dict[str, Any] = {
    "list": [0.5, 2.0, 0.0],
    "tuple": (0.5, 2, 0),
    "list of NumPy numbers": [np.float32(0.5), np.int64(2), np.float64(0.0)],
    **{dtype.__name__: np.array([0.5, 2.0, 0.0], dtype) for dtype in (np.float16, np.float32)},
    "big-endian": np.array([0.5, 2.0, 0.0], ">f8"),
    "column": np.array([[0.5], [2.0], [0.0]]),
    "strided": np.array([0.5, 9.0, 2.0, 9.0, 0.0, 9.0])[::2],
    "reversed": np.array([0.0, 2.0, 0.5])[::-1],
    "column of a matrix": np.array([[0.5, 9.0], [2.0, 9.0], [0.0, 9.0]])[:, 0],
    "read-only": read_only(np.array([0.5, 2.0, 0.0])),
    "unaligned": off_its_boundary(np.array([0.5, 2.0, 0.0])),
}


@pytest.mark.parametrize("form", INDEX_FORMS)
def test_forms_of_indices(kind: Any, form: str) -> None:
    indices = INDEX_FORMS[form]
    places = list(np.asarray(indices).ravel())
    before = copy.deepcopy(indices)
    tree, naive = kind(10), NaiveTree(kind, 10)
    tree.update(indices, [1.0, 2.0, 3.0])
    naive.update(places, [1.0, 2.0, 3.0])
    assert_same(tree, naive)
    np.testing.assert_array_equal(tree[indices].ravel(), [1.0, 2.0, 3.0])
    masses = tree.masses(slice(None))
    np.testing.assert_array_equal(tree.masses(indices).ravel(), [masses[i] for i in places])
    np.testing.assert_array_equal(indices, before)


@pytest.mark.parametrize("form", PRIORITY_FORMS)
def test_forms_of_priorities(kind: Any, form: str) -> None:
    priorities = PRIORITY_FORMS[form]
    before = copy.deepcopy(priorities)
    tree, naive = kind(10), NaiveTree(kind, 10)
    tree.update([6, 1, 4], priorities)
    naive.update([6, 1, 4], [0.5, 2.0, 0.0])
    assert_same(tree, naive)
    np.testing.assert_array_equal(priorities, before)


def test_priorities_are_not_rounded_to_float32(kind: Any) -> None:
    tree = kind(2)
    tree.update([0, 1], [0.1, 1e-60])
    assert tree[:].tolist() == [0.1, 1e-60]
    tree.update(0, np.float32(0.1))
    assert tree[0] == float(np.float32(0.1)) != 0.1


def test_integers_beyond_64_bits_are_priorities_if_they_fit_into_a_float(kind: Any) -> None:
    """NumPy has no integers for them and makes objects of them."""
    tree = kind(6)
    tree.update(0, 2**70)
    tree.update([1, 2], [2**70, 0.5])
    tree.update([3, 4], np.array([1.5, 2], dtype=object))
    tree.fill(5, 6, 2**70)
    assert tree[:].tolist() == [2.0**70, 2.0**70, 0.5, 1.5, 2.0, 2.0**70]


# --- reading ---


def test_reading(kind: Any) -> None:
    tree = tree_of(kind, [1.0, 0.0, 3.0])
    priorities, masses = [1.0, 0.0, 3.0], tree.masses(slice(None)).tolist()
    assert masses[1] == 0.0
    for read, expected in ((tree.__getitem__, priorities), (tree.masses, masses)):
        assert type(read(2)) is float
        assert read(2) == expected[2]
        assert read([2, 0, 2]).tolist() == [expected[2], expected[0], expected[2]]
        assert read(np.array([[1], [2]])).tolist() == [[expected[1]], [expected[2]]]
        assert read(slice(None)).tolist() == expected
        assert read(slice(1, 100)).tolist() == expected[1:]  # not what is behind the last leaf
        assert read(slice(-1, None)).tolist() == expected[-1:]
        assert read([]).shape == (0,)
        before = snapshot(tree)
        for copied in (read(slice(None)), read(slice(0, 2)), read([0, 1])):
            copied[:] = 9.0
        assert snapshot(tree) == before


@pytest.mark.parametrize("capacity", [1, 5, 8, 9])
def test_reading_outside_the_leaves_is_refused(kind: Any, capacity: int) -> None:
    """Also in memory beyond the last leaf that a tree has for its own reasons."""
    tree = kind(capacity)
    for index in (-1, capacity, capacity + 1, 10**9, -(2**63)):
        for indices in (index, [0, index]):
            for read in (tree.__getitem__, tree.masses):
                with pytest.raises(
                    IndexError, match=rf"index {index} is outside \[0, {capacity}\)"
                ):
                    read(indices)


# --- refusals ---


@pytest.mark.parametrize("index", [-1, -(2**63), 70, 71, 72, 2**62, 2**63 - 1])
def test_update_refuses_an_index_outside_the_leaves(kind: Any, index: int) -> None:
    tree = random_tree(kind)
    before = snapshot(tree)
    for indices in ([index], [0, index], [index, 3, 3], [*range(70), index]):
        with pytest.raises(IndexError, match=rf"index {index} is outside \[0, 70\)"):
            tree.update(indices, np.arange(len(indices)))
    with pytest.raises(IndexError, match=rf"index {index} is outside \[0, 70\)"):
        tree.update(index, 1.0)
    assert snapshot(tree) == before
    assert_valid(tree)


@pytest.mark.parametrize("index", [2**63, 2**64 - 1, 2**64, 2**70, -(2**63) - 1])
def test_indices_beyond_64_bits_are_outside_too(kind: Any, index: int) -> None:
    tree = random_tree(kind)
    before = snapshot(tree)
    for indices in (index, [index]):
        with pytest.raises(IndexError, match=f"index {index} "):
            tree.update(indices, 1.0)
        for read in (tree.__getitem__, tree.masses):
            with pytest.raises(IndexError, match=f"index {index} "):
                read(indices)
    assert snapshot(tree) == before


@pytest.mark.parametrize("indices", [0.0, [0.0, 1.0], True, [True, False], None, "0", [0, None]])
def test_indices_that_are_no_integers(kind: Any, indices: Any) -> None:
    tree = tree_of(kind, [1.0, 2.0])
    before = snapshot(tree)
    for refused in (tree.__getitem__, tree.masses, lambda indices: tree.update(indices, 3.0)):
        with pytest.raises(TypeError, match="indices must be integers, got "):
            refused(indices)
    assert snapshot(tree) == before


def test_arrays_of_objects(kind: Any) -> None:
    """An empty one says nothing of what it would hold."""
    tree = random_tree(kind)
    before = snapshot(tree)
    nothing = np.array([], dtype=object)
    tree.update(nothing, 3.0)
    tree.update([], nothing)
    tree.update(nothing, nothing)
    assert tree[nothing].shape == (0,)
    with pytest.raises(TypeError, match="indices must be integers, got object"):
        tree.update(np.array([0, 1], dtype=object), 3.0)
    assert snapshot(tree) == before


WRONG_PRIORITIES = [
    *(dtype(x) for dtype in (float, np.float32) for x in (math.nan, math.inf, -math.inf, -1.0)),
    -TINY,
]


@pytest.mark.parametrize("priority", WRONG_PRIORITIES, ids=repr)
def test_priorities_that_are_refused(kind: Any, priority: Any) -> None:
    tree = random_tree(kind)
    before = snapshot(tree)
    for at in (0, 1, 69):
        priorities = np.arange(1, 71, dtype=np.asarray(priority).dtype)
        priorities[at] = priority
        message = re.escape(f"priority {float(priority)} for leaf {at} is not a finite number")
        with pytest.raises(ValueError, match=message):
            tree.update(range(70), priorities)
        for indices in (at, [at], [at, 7]):
            with pytest.raises(ValueError, match=message):
                tree.update(indices, priority)
        with pytest.raises(ValueError, match=message):
            tree.fill(at, 70, priority)
    assert snapshot(tree) == before
    assert_valid(tree)


@pytest.mark.parametrize("priority", ["1.5", "one", b"2", None, 1j, [None], ["1.5"]], ids=repr)
def test_priorities_that_are_no_numbers(kind: Any, priority: Any) -> None:
    tree = random_tree(kind)
    before = snapshot(tree)
    with pytest.raises(TypeError):
        tree.update([0], priority)
    with pytest.raises(TypeError):
        tree.fill(0, 1, priority)
    assert snapshot(tree) == before


def test_integers_too_large_for_a_float_are_too_large(kind: Any) -> None:
    tree = random_tree(kind)
    before = snapshot(tree)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: tree.fill(0, 1, 10**400),
        lambda: tree.update(0, 10**400),
        lambda: tree.update([0, 1], [0.5, 10**400]),
        lambda: tree.get_leaf(10**400),
    )
    for refused in calls:
        with pytest.raises(ValueError, match="1000000"):
            refused()
    assert snapshot(tree) == before


def test_a_longdouble_too_large_for_a_float_is_infinite(kind: Any) -> None:
    tree = random_tree(kind)
    before = snapshot(tree)
    huge: Any = np.longdouble("1e400")
    with pytest.raises(ValueError, match="priority inf for leaf 0"):
        tree.update(0, huge)
    with pytest.raises(ValueError, match=r"priority (inf|1e\+400) for leaf 0"):
        tree.fill(0, 1, huge)
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    ("indices", "priorities", "counts"),
    [
        ([0, 1], [1.0], "2 indices, 1 priorities"),
        ([0], [1.0, 2.0], "1 indices, 2 priorities"),
        (0, [1.0, 2.0], "1 indices, 2 priorities"),
        ([], [1.0], "0 indices, 1 priorities"),
        ([0, 1], [], "2 indices, 0 priorities"),
        ([0, 1, 2], [[1.0, 2.0, 3.0]] * 3, "3 indices, 9 priorities"),
    ],
)
def test_update_refuses_lengths_that_differ(
    kind: Any, indices: Any, priorities: Any, counts: str
) -> None:
    tree = random_tree(kind)
    before = snapshot(tree)
    with pytest.raises(ValueError, match=counts):
        tree.update(indices, priorities)
    assert snapshot(tree) == before


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (4, 3), (0, 71), (70, 71), (-5, -2)])
def test_fill_refuses_what_is_no_run_of_leaves(kind: Any, start: int, stop: int) -> None:
    tree = random_tree(kind)
    before = snapshot(tree)
    with pytest.raises(IndexError, match=rf"leaves {start} to {stop} .* \[0, 70\)"):
        tree.fill(start, stop, 1.0)
    assert snapshot(tree) == before


@pytest.mark.parametrize(("start", "stop"), [(0.5, 5.5), (0, 5.0), (0.0, 5), ("0", 5)])
def test_fill_refuses_ends_that_are_no_integers(kind: Any, start: Any, stop: Any) -> None:
    tree = random_tree(kind)
    before = snapshot(tree)
    wrong = start if isinstance(start, float | str) else stop
    with pytest.raises(TypeError, match=re.escape(f"must be an integer, got {wrong!r}")):
        tree.fill(start, stop, 1.0)
    assert snapshot(tree) == before


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
def test_fill_takes_ends_of_any_integer_type(kind: Any, dtype: Any) -> None:
    tree, naive = kind(20), NaiveTree(kind, 20)
    tree.fill(dtype(0), dtype(17), 2.0)
    naive.update(range(17), [2.0] * 17)
    assert_same(tree, naive)


@pytest.mark.parametrize("priority", [np.float16(0.25), np.float32(0.25), np.int64(3), 3])
def test_fill_takes_priorities_of_any_number_type(kind: Any, priority: Any) -> None:
    tree, naive = kind(10), NaiveTree(kind, 10)
    tree.fill(2, 9, priority)
    naive.update(range(2, 9), [float(priority)] * 7)
    assert_same(tree, naive)


@pytest.mark.parametrize("capacity", [0, -1, -(10**12)])
def test_a_tree_has_at_least_one_leaf(kind: Any, capacity: int) -> None:
    with pytest.raises(ValueError, match=f"`capacity` must be at least 1, got {capacity}"):
        kind(capacity)


@pytest.mark.parametrize("capacity", [2.0, "2", None, [2]])
def test_capacity_must_be_an_integer(kind: Any, capacity: Any) -> None:
    message = re.escape(f"`capacity` must be an integer, got {capacity!r}")
    with pytest.raises(TypeError, match=message):
        kind(capacity)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_largest_priority_allowed_keeps_the_total_finite(kind: Any, capacity: int) -> None:
    tree = kind(capacity)
    limit = tree.priority_limit
    tree.fill(0, capacity, limit)
    assert_valid(tree)
    assert 0.0 < tree.total < math.inf
    for place in (0.0, BELOW_ONE):
        assert drawn_at(tree, place, 1)[0] == (0 if place == 0.0 else capacity - 1)
    before = snapshot(tree)
    above = math.nextafter(limit, math.inf)
    with pytest.raises(ValueError, match=re.escape(f"priority {above} for leaf 0")):
        tree.update(0, above)
    with pytest.raises(ValueError, match=re.escape(f"priority {above} for leaf 0")):
        tree.fill(0, 1, above)
    assert snapshot(tree) == before


# --- what a tree says of itself, and its copies ---


@pytest.mark.parametrize("capacity", [1, 8, 9, 65, np.int64(12), np.uint8(200)])
def test_a_new_tree(kind: Any, capacity: int) -> None:
    tree = kind(capacity)
    assert isinstance(tree, PriorityTree)
    assert type(tree.capacity) is int
    assert tree.capacity == len(tree) == capacity
    np.testing.assert_array_equal(tree[:], np.zeros(capacity))
    names = ("total", "max_priority", "min_priority", "min_mass", "priority_limit")
    assert [type(getattr(tree, name)) for name in names] == [float] * 5
    assert_valid(tree)


@pytest.mark.parametrize("capacity", [1, 2, 8, 9, 65, 300, 5_000])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_brings_back_every_bit(kind: Any, capacity: int, protocol: int) -> None:
    rng = np.random.default_rng(capacity)
    tree = kind(capacity)
    for _ in range(20):
        tree.update(rng.integers(capacity, size=9), np.round(rng.random(9) * 4) + rng.random(9))
    loaded = pickle.loads(pickle.dumps(tree, protocol=protocol))
    assert type(loaded) is kind
    assert (loaded.capacity, loaded.priority_limit) == (capacity, tree.priority_limit)
    assert snapshot(loaded) == snapshot(tree)
    assert_valid(loaded)
    np.random.seed(0)
    drawn = tree.sample(64)
    np.random.seed(0)
    np.testing.assert_array_equal(loaded.sample(64), drawn)
    loaded.update(0, 9.0)
    assert loaded.max_priority == 9.0
    assert tree[0] != 9.0


@pytest.mark.parametrize(
    ("kind", "low", "high"), [(SumTree, 10.6, 10.7), (RankTree, 23.5, 24.0)], ids=["sum", "rank"]
)
def test_a_tree_of_a_million_leaves_is_small(kind: Any, low: float, high: float) -> None:
    """As many bytes a leaf as the docstrings say, and 8 in a file."""
    tracemalloc.start()
    try:
        tree = kind(1_000_000)
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tree.nbytes == pytest.approx(allocated, rel=1e-2)
    assert low <= tree.nbytes / 1_000_000 <= high
    leaves = np.abs(np.random.default_rng(0).standard_cauchy(1_000_000)).astype(np.float32)
    tree.update(np.arange(1_000_000), leaves)
    np.testing.assert_array_equal(tree[:], leaves)
    assert 8_000_000 <= len(pickle.dumps(tree)) <= 8_010_000
    assert_valid(tree)
