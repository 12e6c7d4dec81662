"""Faults of other prioritized buffers, reported in public: sum-tree, priorities and indices."""

import math
import pickle
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces

from sb3_per import PERDQN, PrioritizedReplayBuffer, SumTree


def make_buffer(buffer_size: int, **options: Any) -> PrioritizedReplayBuffer:
    return PrioritizedReplayBuffer(
        buffer_size, spaces.Box(-1e9, 1e9, (1,)), spaces.Discrete(2), "cpu", **options
    )


def add(buffer: PrioritizedReplayBuffer, *rewards: float) -> None:
    """One transition for each reward, which is its observation, too."""
    for reward in rewards:
        row = np.full((buffer.n_envs, 1), reward)
        buffer.add(
            row, row + 0.5, np.zeros_like(row), row[:, 0], np.zeros(buffer.n_envs), [{}] * len(row)
        )


def state(buffer: PrioritizedReplayBuffer) -> tuple[bytes, float]:
    return buffer.tree[:].tobytes(), buffer.tree.total


def assert_ratios(buffer: PrioritizedReplayBuffer, batch_size: int) -> None:
    """w_i / w_j = (leaf_j / leaf_i) ** beta, with the leaves at the indices that are returned."""
    batch = buffer.sample(batch_size)
    leaves = buffer.tree[batch.indices]
    assert leaves.min() > 0.0
    weights = batch.weights.numpy().ravel()
    np.testing.assert_allclose(weights, (leaves.min() / leaves) ** buffer.beta, rtol=1e-6)


def test_the_total_does_not_drift_away_from_the_leaves() -> None:
    """Fault 1: float32 sums, changed by differences, were off by 3e-3 after 100,000 updates."""
    rng = np.random.default_rng(0)
    tree = SumTree(1024)
    tree.update(np.arange(1024), rng.random(1024) ** 0.6)
    indices = rng.integers(1024, size=100_000).tolist()
    priorities = (rng.random(100_000) ** 0.6).tolist()
    for index, priority in zip(indices, priorities, strict=True):
        tree.update(index, priority)
    assert abs(tree.total - math.fsum(tree[:])) <= 1e-12 * tree.total
    assert tree.check_valid() == (True, "")


def test_a_value_on_the_left_edge_gives_no_leaf_of_zero() -> None:
    """Fault 4: with ``<=`` a draw of 0, or on a border, went into an empty left leaf."""
    tree = SumTree(4)
    tree.update([0, 1, 2, 3], [0.0, 1.0, 0.0, 1.0])
    assert tree.get_leaf([0.0, 0.999, 1.0])[0].tolist() == [1, 1, 3]
    with mock.patch.object(np.random, "random_sample", np.zeros):
        for batch_size, expected in ((1, [1]), (2, [1, 3]), (4, [1, 1, 3, 3])):
            assert tree.sample(batch_size)[0].tolist() == expected


@pytest.mark.parametrize(("buffer_size", "n_envs"), [(5, 1), (6, 1), (7, 1), (1000, 1), (10, 3)])
def test_weights_belong_to_the_indices_that_are_returned(buffer_size: int, n_envs: int) -> None:
    """Fault 5: an index was moved into range, its weight computed from another leaf."""
    np.random.seed(0)
    buffer = make_buffer(buffer_size, n_envs=n_envs)
    add(buffer, *range(buffer.buffer_size - 1))
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert_ratios(buffer, 64)
        n = buffer.n_transitions
        buffer.update_priorities(np.arange(n), rng.standard_cauchy(n))


@pytest.mark.parametrize("size", [1, 2, 4, 4096])
def test_a_capacity_that_is_a_power_of_two(size: int) -> None:
    """Fault 7: an index out of range at the first sample of a full buffer of 4096."""
    np.random.seed(0)
    buffer = make_buffer(size)
    add(buffer, *range(size))
    indices = buffer.sample(4 * size).indices
    assert set(indices.tolist()) == set(range(size))
    buffer.tree.fill(0, size, 0.0)
    buffer.tree.update(size - 1, 3.0)
    assert set(buffer.sample(512).indices.tolist()) == {size - 1}
    add(buffer, -1.0)
    assert buffer.n_transitions == size
    assert buffer.rewards[0, 0] == -1.0
    assert buffer.tree[0] == 3.0


def test_the_newest_transition_is_drawn() -> None:
    """Fault 8: an end taken for exclusive, so that the last transition never came."""
    np.random.seed(0)
    buffer = make_buffer(10, alpha=1.0)
    add(buffer, 0.0, 1.0)
    buffer.update_priorities([0, 1], [1.0, 1.0])
    drawn = np.bincount([buffer.sample(1).indices[0] for _ in range(1000)])
    assert drawn.sum() == 1000
    assert 400 < drawn[1] < 600
    add(buffer, 2.0)
    buffer.update_priorities([2], [1e6])
    assert np.mean([buffer.sample(1).indices[0] == 2 for _ in range(1000)]) > 0.99


def test_a_single_slot_and_a_single_transition(tmp_path: Path) -> None:
    """Fault 9: endless recursion with one element; RL Zoo loads agents with ``buffer_size=1``."""
    buffer = make_buffer(1)
    add(buffer, 1.0, 2.0, 3.0)
    roomy = make_buffer(8)
    add(roomy, 3.0)
    for one, batch_size in ((buffer, 4), (roomy, 32)):
        batch = one.sample(batch_size)
        assert batch.rewards.tolist() == [[3.0]] * batch_size
        assert batch.indices.tolist() == [0] * batch_size
        assert batch.weights.tolist() == [[1.0]] * batch_size

    PERDQN("MlpPolicy", "CartPole-v1", buffer_size=100, device="cpu").save(tmp_path / "model")
    model = PERDQN.load(tmp_path / "model", buffer_size=1)
    assert isinstance(model.replay_buffer, PrioritizedReplayBuffer)
    assert model.replay_buffer.tree.capacity == 1
    assert model.predict(np.zeros(4, np.float32), deterministic=True)[0] in (0, 1)


def test_a_batch_larger_than_the_content() -> None:
    """Fault 10: drawing without replacement failed, or looped for ever."""
    np.random.seed(0)
    buffer = make_buffer(100)
    add(buffer, 0.0, 1.0, 2.0)
    begin = time.perf_counter()
    batch = buffer.sample(32)
    assert time.perf_counter() - begin < 1.0
    assert batch.observations.shape == (32, 1)
    assert batch.rewards.shape == batch.weights.shape == (32, 1)
    assert set(batch.indices.tolist()) == {0, 1, 2}


def test_an_empty_buffer_refuses_to_be_sampled() -> None:
    """Fault 11: a division by a zero total, weights of NaN, or a batch of zeros."""
    buffer = make_buffer(8)
    with pytest.raises(ValueError, match="the replay buffer is empty"):
        buffer.sample(4)
    add(buffer, 1.0)
    buffer.reset()
    with pytest.raises(ValueError, match="the replay buffer is empty"):
        buffer.sample(4)


def test_priorities_that_are_all_zero() -> None:
    """Fault 13: NaN from 0/0. Here ``eps=0`` is allowed, and a draw from nothing refused."""
    np.random.seed(0)
    buffer = make_buffer(8, eps=0.0)
    add(buffer, 0.0, 1.0, 2.0, 3.0)
    buffer.update_priorities(np.arange(4), np.zeros(4))
    with pytest.raises(ValueError, match=r"all 4 stored .* priority of zero.* `eps` is 0\.0"):
        buffer.sample(4)
    np.testing.assert_array_equal(buffer.probabilities, np.zeros(4))
    # A new transition brings mass again
    add(buffer, 4.0)
    assert set(buffer.sample(32).indices.tolist()) == {4}

    buffer = make_buffer(8, eps=1e-6)
    add(buffer, 0.0, 1.0, 2.0, 3.0)
    buffer.update_priorities(np.arange(4), np.zeros(4))
    batch = buffer.sample(400)
    assert np.bincount(batch.indices).tolist() == [100] * 4
    assert batch.weights.tolist() == [[1.0]] * 400


def test_priorities_stay_with_their_transitions() -> None:
    """Fault 15: the tree's position ran apart from the ring's, and nothing crashed."""
    np.random.seed(0)
    buffer = make_buffer(4, alpha=1.0, eps=0.0)
    for k in range(4):
        np.testing.assert_array_equal(np.flatnonzero(buffer.tree[:]), np.arange(k))
        add(buffer, k)
    buffer.update_priorities([0, 1, 2, 3], [9.0, 1.0, 1.0, 1.0])
    add(buffer, 4.0)
    assert buffer.rewards.ravel().tolist() == [4.0, 1.0, 2.0, 3.0]
    assert buffer.tree[:].tolist() == [9.0, 1.0, 1.0, 1.0]
    for k in range(5, 30):
        add(buffer, k)
        batch = buffer.sample(16)
        rewards = batch.rewards.numpy().ravel()
        np.testing.assert_array_equal(rewards, buffer.rewards[batch.indices, 0])
        # The error is the reward: so is the priority of whatever is stored
        buffer.update_priorities(np.arange(4), buffer.rewards.ravel())
        np.testing.assert_array_equal(buffer.tree[:], buffer.rewards.ravel())


@pytest.mark.parametrize(
    ("indices", "errors", "wrong"),
    [
        ([-1], [1.0], "-1"),
        ([8], [1.0], "8"),
        ([5], [1.0], "5"),
        ([0, 99], [1.0, 1.0], "99"),
        ([0, -9], [1.0, 1.0], "-9"),
    ],
)
def test_an_index_outside_what_is_stored_is_refused(
    indices: list[int], errors: list[float], wrong: str
) -> None:
    """Fault 16: -1 wrote into the last leaf, 5 made an empty slot drawable."""
    buffer = make_buffer(8)
    add(buffer, 0.0, 1.0, 2.0, 3.0, 4.0)
    buffer.update_priorities(np.arange(5), np.arange(5.0))
    before = state(buffer)
    with pytest.raises(IndexError, match=f"index {wrong} is not that of a stored transition"):
        buffer.update_priorities(indices, errors)
    with pytest.raises(ValueError, match="one TD error for each index"):
        buffer.update_priorities([0, 1], [5.0, 6.0, 7.0])
    assert state(buffer) == before


def test_errors_have_a_sign_and_priorities_have_none() -> None:
    """Fault 19: a negative leaf, or a root of a negative number."""
    buffer = make_buffer(4, alpha=0.5, eps=1e-6)
    add(buffer, 0.0, 1.0, 2.0)
    buffer.update_priorities([0, 1, 2], [-3.0, 3.0, -1e-9])
    assert buffer.tree[0] == buffer.tree[1] == pytest.approx(math.sqrt(3.0), rel=1e-6)
    assert buffer.tree[2] == pytest.approx(1.0005e-3, rel=1e-6)


def test_eps_is_added_before_the_exponent() -> None:
    """Fault 21: (|d| + eps) ** alpha, not |d| ** alpha + eps."""
    buffer = make_buffer(4, alpha=0.5, eps=0.01)
    add(buffer, 0.0, 1.0)
    buffer.update_priorities([0, 1], [0.0, 0.48])
    assert buffer.tree[:2].tolist() == pytest.approx([0.1, 0.7])


def test_a_new_transition_gets_the_maximum() -> None:
    """Fault 22: a constant 1 hides new data behind errors of 50."""
    buffer = make_buffer(8, alpha=1.0, eps=0.0)
    add(buffer, 0.0, 1.0, 2.0, 3.0)
    assert buffer.tree[:4].tolist() == [1.0] * 4
    buffer.update_priorities([0, 1, 2, 3], [50.0, 10.0, 10.0, 10.0])
    add(buffer, 4.0)
    assert buffer.tree[4] == 50.0
    assert buffer.probabilities[4] == pytest.approx(50.0 / 130.0)


def test_the_maximum_comes_down_again() -> None:
    """Fault 23: an outlier that is gone, or a first value of 1, stayed the maximum for ever."""
    buffer = make_buffer(4, alpha=1.0, eps=0.0)
    add(buffer, 0.0, 1.0, 2.0, 3.0)
    buffer.update_priorities([0, 1, 2, 3], [1000.0, 1.0, 1.0, 1.0])
    add(buffer, 4.0)
    assert buffer.tree[0] == 1000.0  # the one being overwritten counts
    buffer.update_priorities([0, 1, 2, 3], [1.0] * 4)
    loaded = pickle.loads(pickle.dumps(buffer))
    for each in (buffer, loaded):
        add(each, 5.0)
        assert each.tree[1] == 1.0
        each.update_priorities([0, 1, 2, 3], [1e-3] * 4)
        add(each, 6.0)
        assert each.tree[2] == 1e-3


def test_the_maximum_is_no_integer() -> None:
    """Fault 24: a maximum of 2.7 was held in an integer array; errors may be integers."""
    buffer = make_buffer(8, alpha=1.0, eps=0.0)
    add(buffer, 0.0, 1.0)
    buffer.update_priorities([0, 1], [2.7, 1.0])
    add(buffer, 2.0)
    assert buffer.tree[2] == 2.7
    buffer.alpha = 0.5
    buffer.update_priorities(np.array([0, 1]), np.array([2, 3]))
    assert buffer.tree[:2].tolist() == pytest.approx([math.sqrt(2.0), math.sqrt(3.0)])


def test_large_errors_differ() -> None:
    """Fault 25: all errors above the cap of the Huber loss were equally likely."""
    buffer = make_buffer(4, alpha=1.0)
    add(buffer, 0.0, 1.0, 2.0)
    buffer.update_priorities([0, 1, 2], [2.0, 20.0, 2e6])
    assert buffer.tree[1] / buffer.tree[0] == pytest.approx(10.0, rel=1e-5)
    assert buffer.tree[2] / buffer.tree[0] == pytest.approx(1e6, rel=1e-5)


def test_an_old_error_is_not_written_on_a_new_transition() -> None:
    """Fault 26: an index kept across ``add`` belongs to another transition by then."""
    np.random.seed(0)
    buffer = make_buffer(4, alpha=1.0, eps=0.5)
    add(buffer, 0.0, 1.0, 2.0, 3.0)
    indices = buffer.sample(4).indices
    assert indices.tolist() == [0, 1, 2, 3]
    add(buffer, 4.0, 5.0)
    buffer.update_priorities(indices, np.zeros(4))
    assert buffer.tree[:].tolist() == [1.0, 1.0, 0.5, 0.5]
    indices = buffer.sample(4).indices
    add(buffer, 6.0, 7.0, 8.0, 9.0, 10.0)
    buffer.update_priorities(indices, np.zeros(4))
    assert buffer.tree[:].tolist() == [1.0] * 4


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


FORMS_OF_ERRORS = {
    "list": [1.0, 2.0, 3.0],
    "float64": np.array([1.0, 2.0, 3.0]),
    "float32 column": np.array([[1.0], [2.0], [3.0]], np.float32),
    "float16": np.array([1.0, 2.0, 3.0], np.float16),
    "read-only": read_only(np.array([1.0, 2.0, 3.0])),
    "strided": np.array([1.0, 9.0, 2.0, 9.0, 3.0, 9.0])[::2],
    "tensor with gradient": th.tensor([[1.0], [2.0], [3.0]], requires_grad=True),
    "tensor inside a graph": th.tensor([1.0, 2.0, 3.0], requires_grad=True) * 1.0,
    "bfloat16 tensor": th.tensor([1.0, 2.0, 3.0], dtype=th.bfloat16),
    "integer tensor": th.tensor([1, 2, 3]),
}
FORMS_OF_INDICES = {
    "list": [0, 1, 2],
    "int32": np.array([0, 1, 2], np.int32),
    "int64": np.array([0, 1, 2], np.int64),
    "uint8": np.array([0, 1, 2], np.uint8),
    "read-only": read_only(np.array([0, 1, 2])),
    "column": np.array([[0], [1], [2]]),
    "tensor": th.tensor([0, 1, 2]),
}


@pytest.mark.parametrize("indices", FORMS_OF_INDICES)
@pytest.mark.parametrize("errors", FORMS_OF_ERRORS)
def test_forms_of_errors_and_indices(indices: str, errors: str) -> None:
    """Fault 27: a column was broadcast; tensors with a gradient or read-only arrays failed."""
    buffer = make_buffer(8, alpha=1.0, eps=0.0)
    add(buffer, 0.0, 1.0, 2.0, 3.0)
    given: Any = FORMS_OF_INDICES[indices]
    buffer.update_priorities(given, FORMS_OF_ERRORS[errors])
    assert buffer.tree[:].tolist() == [1.0, 2.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    before = state(buffer)
    for shape in ((1,), (2,), (3, 3), (1, 3), (), (3, 1, 1), (0,)):
        for wrong in (np.full(shape, 7.0), th.full(shape, 7.0, requires_grad=True)):
            with pytest.raises(ValueError, match="one TD error for each index is needed: 3 ind"):
                buffer.update_priorities(given, wrong)
    assert state(buffer) == before
