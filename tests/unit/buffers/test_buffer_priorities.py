"""Which transition has which priority: the ring, its edges, indices and errors of any form."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch as th

from buffer_helpers import add_rows, leaves_of, make_buffer, refused
from sb3_per import PERDQN, PrioritizedReplayBuffer


@pytest.mark.parametrize(("buffer_size", "n_envs"), [(5, 1), (6, 1), (7, 1), (1000, 1), (10, 3)])
def test_weights_belong_to_the_indices_that_are_returned(buffer_size: int, n_envs: int) -> None:
    """w_i / w_j = (leaf_j / leaf_i) ** beta, also where the ring is no power of two."""
    buffer = make_buffer(buffer_size, n_adds=buffer_size // n_envs - 1, n_envs=n_envs, alpha=0.6)
    rng = np.random.default_rng(0)
    for _ in range(20):
        batch = buffer.sample(64)
        leaves = buffer.tree[batch.indices]
        assert leaves.min() > 0.0
        expected = (leaves.min() / leaves) ** buffer.beta
        np.testing.assert_allclose(batch.weights.numpy().ravel(), expected, rtol=1e-6)
        n = buffer.n_transitions
        buffer.update_priorities(np.arange(n), rng.standard_cauchy(n))


@pytest.mark.parametrize("size", [1, 2, 4, 4096])
def test_every_transition_of_a_full_ring_of_a_power_of_two_is_drawn(size: int) -> None:
    buffer = make_buffer(size, n_adds=size)
    assert set(buffer.sample(4 * size).indices.tolist()) == set(range(size))
    buffer.tree.fill(0, size, 0.0)
    buffer.tree.update(size - 1, 3.0)
    assert set(buffer.sample(512).indices.tolist()) == {size - 1}
    add_rows(buffer, reward=np.array([-1.0]))
    assert buffer.n_transitions == size
    assert buffer.rewards[0, 0] == -1.0
    assert buffer.tree[0] == 3.0


def test_the_newest_transition_is_drawn_by_its_priority() -> None:
    buffer = make_buffer(10, n_adds=2)
    buffer.update_priorities([0, 1], [1.0, 1.0])
    drawn = np.bincount([buffer.sample(1).indices[0] for _ in range(1000)])
    assert drawn.sum() == 1000
    assert 400 < drawn[1] < 600
    add_rows(buffer)
    buffer.update_priorities([2], [1e6])
    assert np.mean([buffer.sample(1).indices[0] == 2 for _ in range(1000)]) > 0.99


def test_a_ring_of_one_and_a_single_transition(tmp_path: Path) -> None:
    """RL Zoo loads agents with ``buffer_size=1``."""
    buffer, roomy = make_buffer(1, n_adds=3), make_buffer(8)
    add_rows(roomy, first=2)
    for one, batch_size in ((buffer, 4), (roomy, 32)):
        batch = one.sample(batch_size)
        assert batch.rewards.tolist() == [[2.0]] * batch_size
        assert batch.indices.tolist() == [0] * batch_size
        assert batch.weights.tolist() == [[1.0]] * batch_size

    PERDQN("MlpPolicy", "CartPole-v1", buffer_size=100, device="cpu").save(tmp_path / "model")
    model = PERDQN.load(tmp_path / "model", buffer_size=1)
    assert isinstance(model.replay_buffer, PrioritizedReplayBuffer)
    assert model.replay_buffer.tree.capacity == 1
    assert model.predict(np.zeros(4, np.float32), deterministic=True)[0] in (0, 1)


def test_a_batch_larger_than_the_content() -> None:
    batch = make_buffer(100, n_adds=3).sample(32)
    assert batch.observations.shape == (32, 2)
    assert batch.rewards.shape == batch.weights.shape == (32, 1)
    assert set(batch.indices.tolist()) == {0, 1, 2}


def test_an_empty_buffer_refuses_to_be_sampled() -> None:
    emptied = make_buffer(8, n_adds=1)
    emptied.reset()
    for buffer in (make_buffer(8), emptied):
        with refused(buffer, "the replay buffer is empty"):
            buffer.sample(4)


def test_priorities_that_are_all_zero() -> None:
    """With ``eps=0`` there is nothing to draw from; a new transition brings mass again."""
    buffer = make_buffer(8, n_adds=4)
    buffer.update_priorities(np.arange(4), np.zeros(4))
    with refused(buffer, r"all 4 stored .* priority of zero.* `eps` is 0\.0"):
        buffer.sample(4)
    np.testing.assert_array_equal(buffer.probabilities, np.zeros(4))
    add_rows(buffer)
    assert set(buffer.sample(32).indices.tolist()) == {4}

    buffer = make_buffer(8, n_adds=4, eps=1e-6)
    buffer.update_priorities(np.arange(4), np.zeros(4))
    batch = buffer.sample(400)
    assert np.bincount(batch.indices).tolist() == [100] * 4
    assert batch.weights.tolist() == [[1.0]] * 400


def test_priorities_stay_with_their_transitions_over_many_laps() -> None:
    buffer = make_buffer(4)
    for k in range(4):
        np.testing.assert_array_equal(np.flatnonzero(buffer.tree[:]), np.arange(k))
        add_rows(buffer, first=k)
    buffer.update_priorities([0, 1, 2, 3], [9.0, 1.0, 1.0, 1.0])
    add_rows(buffer, first=4)
    assert buffer.rewards.ravel().tolist() == [4.0, 1.0, 2.0, 3.0]
    np.testing.assert_allclose(leaves_of(buffer), [9.0, 1.0, 1.0, 1.0], rtol=1e-12)
    for k in range(5, 30):
        add_rows(buffer, first=k)
        batch = buffer.sample(16)
        rewards = batch.rewards.numpy().ravel()
        np.testing.assert_array_equal(rewards, buffer.rewards[batch.indices, 0])
        # The error is the reward: so is the priority of whatever is stored
        buffer.update_priorities(np.arange(4), buffer.rewards.ravel())
        np.testing.assert_allclose(leaves_of(buffer), buffer.rewards.ravel(), rtol=1e-12)


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
    """Neither does -1 write to the last leaf, nor 5 make an empty place drawable."""
    buffer = make_buffer(8, n_adds=5)
    buffer.update_priorities(np.arange(5), np.arange(5.0))
    with refused(buffer, f"index {wrong} is not that of a stored transition", IndexError):
        buffer.update_priorities(indices, errors)
    with refused(buffer, "one TD error for each index"):
        buffer.update_priorities([0, 1], [5.0, 6.0, 7.0])


def test_errors_have_a_sign_and_priorities_have_none() -> None:
    buffer = make_buffer(4, n_adds=3, alpha=0.5, eps=1e-6)
    buffer.update_priorities([0, 1, 2], [-3.0, 3.0, -1e-9])
    assert buffer.tree[0] == buffer.tree[1] == pytest.approx(math.sqrt(3.0), rel=1e-6)
    assert buffer.tree[2] == pytest.approx(1.0005e-3, rel=1e-6)


def test_eps_is_added_before_the_exponent() -> None:
    """(|d| + eps) ** alpha, not |d| ** alpha + eps."""
    buffer = make_buffer(4, n_adds=2, alpha=0.5, eps=0.01)
    buffer.update_priorities([0, 1], [0.0, 0.48])
    assert buffer.tree[:2].tolist() == pytest.approx([0.1, 0.7])


def test_a_new_transition_gets_the_maximum() -> None:
    """A constant 1 would hide new data behind errors of 50."""
    buffer = make_buffer(8, n_adds=4)
    assert buffer.tree[:4].tolist() == [1.0] * 4
    buffer.update_priorities([0, 1, 2, 3], [50.0, 10.0, 10.0, 10.0])
    add_rows(buffer)
    assert buffer.tree[4] == pytest.approx(50.0, rel=1e-12)
    assert buffer.probabilities[4] == pytest.approx(50.0 / 130.0)


def test_the_maximum_comes_down_again() -> None:
    """It is the largest stored one: neither an outlier nor a first value of 1 stays forever."""
    buffer = make_buffer(4, n_adds=4)
    buffer.update_priorities([0, 1, 2, 3], [1000.0, 1.0, 1.0, 1.0])
    add_rows(buffer)
    # The one that is overwritten counts
    assert buffer.tree[0] == pytest.approx(1000.0, rel=1e-12)
    buffer.update_priorities([0, 1, 2, 3], [1.0] * 4)
    loaded = pickle.loads(pickle.dumps(buffer))
    for each in (buffer, loaded):
        add_rows(each)
        assert each.tree[1] == 1.0
        each.update_priorities([0, 1, 2, 3], [1e-3] * 4)
        add_rows(each)
        assert each.tree[2] == pytest.approx(1e-3, rel=1e-7)


def test_the_maximum_is_no_integer() -> None:
    buffer = make_buffer(8, n_adds=2)
    buffer.update_priorities([0, 1], [2.7, 1.0])
    add_rows(buffer)
    assert buffer.tree[2] == pytest.approx(2.7, rel=1e-12)
    buffer.alpha = 0.5
    buffer.update_priorities(np.array([0, 1]), np.array([2, 3]))
    assert buffer.tree[:2].tolist() == pytest.approx([math.sqrt(2.0), math.sqrt(3.0)])


def test_large_errors_differ() -> None:
    """Also above 1, where the Huber loss is a straight line."""
    buffer = make_buffer(4, n_adds=3, eps=1e-6)
    buffer.update_priorities([0, 1, 2], [2.0, 20.0, 2e6])
    assert buffer.tree[1] / buffer.tree[0] == pytest.approx(10.0, rel=1e-5)
    assert buffer.tree[2] / buffer.tree[0] == pytest.approx(1e6, rel=1e-5)


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
    """Each error goes to its index: a column is not broadcast to a matrix."""
    buffer = make_buffer(8, n_adds=4)
    given: Any = FORMS_OF_INDICES[indices]
    buffer.update_priorities(given, FORMS_OF_ERRORS[errors])
    expected = [1.0, 2.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(leaves_of(buffer), expected, rtol=1e-12)
    for shape in ((1,), (2,), (3, 3), (1, 3), (), (3, 1, 1), (0,)):
        for wrong in (np.full(shape, 7.0), th.full(shape, 7.0, requires_grad=True)):
            with refused(buffer, "one TD error for each index is needed: 3 ind"):
                buffer.update_priorities(given, wrong)
