import numpy as np
import pytest

from sb3_per import SumTree


@pytest.mark.slow
def test_ten_million_updates_over_24_orders_of_magnitude_leave_no_error() -> None:
    size, batch, rounds = 100_000, 1000, 10_000
    tree = SumTree(size)
    leaves = np.zeros(size)
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        indices = rng.integers(0, size, batch)
        priorities = 10.0 ** rng.uniform(-12, 12, batch)
        tree.update(indices, priorities)
        leaves[indices] = priorities
    # Every node is the sum of its children, to the last bit
    assert tree.check_valid() == (True, "")
    np.testing.assert_array_equal(tree[:], leaves)
    assert (tree.max_priority, tree.min_priority) == (leaves.max(), leaves.min())
    # A tree that took the difference of each update to its root would be off by far more
    assert tree.total == pytest.approx(leaves.sum(), rel=1e-14)
    twin = SumTree(size)
    twin.update(np.arange(size), leaves)
    assert twin.total == tree.total
