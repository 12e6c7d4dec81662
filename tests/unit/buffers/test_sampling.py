"""Batches: draws, weights, random numbers and devices."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.buffers import (
    ReplayBuffer,
)

from buffer_helpers import (
    ACTIONS,
    MEMORY_MODES,
    OBSERVATIONS,
    add_rows,
    assert_same_batches,
    make_buffer,
    random_state,
    refused,
    state_of,
    uniform_numbers,
)
from sb3_per import PrioritizedReplayBuffer


def test_a_batch_has_sb3s_fields_then_weights_and_indices() -> None:
    batch = make_buffer(8, n_adds=5).sample(3)
    assert batch._fields == (
        "observations",
        "actions",
        "next_observations",
        "dones",
        "rewards",
        "discounts",
        "weights",
        "indices",
    )
    assert batch.discounts is None
    assert {(t.dtype, t.shape) for t in (batch.dones, batch.rewards, batch.weights)} == {
        (th.float32, th.Size([3, 1]))
    }
    discounts = make_buffer(8, n_adds=5, n_steps=2).sample(3).discounts
    assert discounts is not None
    assert (discounts.dtype, discounts.shape) == (th.float32, th.Size([3, 1]))


def test_the_buffer_hands_on_what_the_tree_draws() -> None:
    buffer = make_buffer(4, n_adds=4)
    buffer.update_priorities(range(4), [1.0, 2.0, 3.0, 4.0])
    np.random.seed(0)
    drawn = [buffer.tree.sample(8)[0] for _ in range(50)]
    np.random.seed(0)
    np.testing.assert_array_equal([buffer.sample(8).indices for _ in range(50)], drawn)


def test_a_batch_may_be_larger_than_the_content() -> None:
    batch = make_buffer(8, n_adds=3).sample(32)
    assert len(batch.rewards) == 32
    assert set(batch.indices.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("n_envs", [1, 4])
def test_one_row_is_enough_for_any_batch(n_envs: int) -> None:
    for buffer in (make_buffer(8 * n_envs, 1, n_envs), make_buffer(n_envs, 3, n_envs)):
        batch = buffer.sample(32)
        assert set(batch.indices.tolist()) == set(range(n_envs))
        np.testing.assert_array_equal(batch.weights, 1.0)


def test_the_newest_transition_can_be_drawn() -> None:
    buffer = make_buffer(10, n_adds=3)
    buffer.update_priorities([0, 1, 2], [1e-6, 1e-6, 1.0])
    indices = np.concatenate([buffer.sample(1).indices for _ in range(200)])
    assert (indices == 2).mean() > 0.98


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, 2.0, "2", None])
def test_a_batch_size_that_is_no_positive_integer_is_refused(batch_size: Any) -> None:
    buffer = make_buffer(8, n_adds=5)
    with refused(buffer, error=(TypeError, ValueError)):
        buffer.sample(batch_size)


def test_a_refused_batch_size_is_named() -> None:
    buffer = make_buffer(8, n_adds=5)
    with refused(buffer, "`batch_size`.*-3"):
        buffer.sample(-3)


@MEMORY_MODES
@pytest.mark.parametrize("n_envs", [1, 3])
def test_an_empty_buffer_has_nothing_to_sample(n_envs: int, memory: dict[str, Any]) -> None:
    buffer = make_buffer(8, n_envs=n_envs, **memory)
    with refused(buffer, "empty"):
        buffer.sample(4)
    add_rows(buffer)
    buffer.sample(4)
    buffer.reset()
    with refused(buffer, "empty"):
        buffer.sample(4)


@MEMORY_MODES
@pytest.mark.parametrize("n_adds", [1, 2, 4, 6])
def test_a_buffer_without_any_mass_names_eps(n_adds: int, memory: dict[str, Any]) -> None:
    buffer = make_buffer(4, n_adds, **memory)
    n_stored = min(n_adds, 4)
    buffer.update_priorities(range(n_stored), np.zeros(n_stored))
    with refused(buffer, r"`eps` is 0\.0"):
        buffer.sample(4)
    add_rows(buffer)
    assert set(buffer.sample(9).indices.tolist()) == {n_adds % 4}


def test_arrays_filled_by_hand_get_the_advice_to_use_add() -> None:
    buffer = make_buffer(4)
    buffer.rewards[:3] = 1.0
    buffer.pos = 3
    with refused(buffer, r"by hand. Store transitions by `add`, .*from_replay_buffer"):
        buffer.sample(2)
    # Also over a whole ring
    buffer.full = True
    with refused(buffer, "none of the 4 transitions .*by hand"):
        buffer.sample(2)


def test_with_eps_errors_of_zero_are_drawn_uniformly() -> None:
    buffer = make_buffer(8, n_adds=4, eps=1e-6, alpha=0.6)
    buffer.update_priorities(range(4), np.zeros(4))
    batch = buffer.sample(8)
    np.testing.assert_array_equal(batch.indices, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(batch.weights, 1.0)


@pytest.mark.parametrize("value", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_a_priority_of_zero_is_never_drawn_even_on_an_edge(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    buffer = make_buffer(8, n_adds=6)
    buffer.update_priorities(range(6), [0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    with uniform_numbers(monkeypatch, value):
        for batch_size in (1, 2, 3, 30):
            assert set(buffer.sample(batch_size).indices.tolist()) <= {1, 3, 4}


@MEMORY_MODES
@pytest.mark.parametrize("n_steps", [1, 3])
def test_sample_changes_nothing(n_steps: int, memory: dict[str, Any]) -> None:
    buffer = make_buffer(6, n_adds=8, beta_increment=0.1, n_steps=n_steps, **memory)
    buffer.update_priorities(range(6), SPREAD)
    before = state_of(buffer)
    for batch_size in (1, 7, 32):
        buffer.sample(batch_size)
    assert state_of(buffer) == before


@pytest.mark.parametrize("normalization", ["batch", "buffer"])
def test_weights_are_on_the_device_of_the_buffer(normalization: Any) -> None:
    buffer = make_buffer(4, n_adds=4, weight_normalization=normalization)
    buffer.device = th.device("meta")
    batch = buffer.sample(3)
    tensors = [value for value in batch if isinstance(value, th.Tensor)]
    assert len(tensors) == 6
    assert {tensor.device for tensor in tensors} == {th.device("meta")}
    assert isinstance(batch.indices, np.ndarray)


@pytest.mark.skipif(not th.cuda.is_available(), reason="needs a GPU")
def test_a_buffer_on_a_gpu_gives_and_takes_gpu_tensors() -> None:
    buffer = PrioritizedReplayBuffer(4, OBSERVATIONS, ACTIONS, "cuda", alpha=1.0, eps=0.0)
    for number in range(4):
        add_rows(buffer, 1, number)
    batch = buffer.sample(3)
    assert batch.weights.device.type == batch.rewards.device.type == "cuda"
    errors = th.tensor([[5.0], [6.0], [7.0]], device="cuda", requires_grad=True)
    buffer.update_priorities(th.arange(3, device="cuda"), errors)
    np.testing.assert_array_equal(buffer.priorities, [5.0, 6.0, 7.0, 1.0])


# --- weights


SPREAD = np.array([0.1, 3.0, 0.5, 7.0, 1.0, 0.2])


@pytest.mark.parametrize("normalization", ["batch", "buffer"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_weights_are_to_each_other_as_priorities_to_the_power_of_minus_beta(
    n_envs: int, beta: float, normalization: Any
) -> None:
    buffer = make_buffer(
        6 * n_envs, 6, n_envs, alpha=0.6, beta=beta, weight_normalization=normalization
    )
    buffer.update_priorities(range(6 * n_envs), np.tile(SPREAD, n_envs))
    batch = buffer.sample(64)
    # Read at the indices that came back
    drawn = buffer.priorities[batch.indices]
    weights = batch.weights.numpy().ravel().astype(np.float64)
    ratios = (drawn[None, :] / drawn[:, None]) ** beta
    np.testing.assert_allclose(weights[:, None] / weights[None, :], ratios, rtol=1e-6)
    assert batch.weights.dtype == th.float32


@pytest.mark.parametrize("n_rows", [6, 60])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("normalization", ["batch", "buffer"])
def test_weights_are_those_of_the_paper_whatever_the_number_of_transitions(
    normalization: Any, n_envs: int, n_rows: int
) -> None:
    n = n_rows * n_envs
    buffer = make_buffer(2 * n, n_rows, n_envs, beta=0.7, weight_normalization=normalization)
    buffer.update_priorities(range(n), np.tile(SPREAD, n // 6))
    batch = buffer.sample(8)
    every = (n * buffer.probabilities) ** -0.7
    drawn = every[batch.indices]
    largest = every.max() if normalization == "buffer" else drawn.max()
    np.testing.assert_allclose(batch.weights.numpy().ravel(), drawn / largest, rtol=1e-6)


def test_the_largest_weight_of_a_batch_is_exactly_1() -> None:
    buffer = make_buffer(6, n_adds=6, beta=0.3)
    buffer.update_priorities(range(6), SPREAD)
    for batch_size in (1, 2, 50):
        assert buffer.sample(batch_size).weights.max() == 1.0


def test_weights_over_the_buffer_are_divided_by_one_that_need_not_be_drawn() -> None:
    buffer = make_buffer(8, n_adds=4, beta=0.5, weight_normalization="buffer")
    buffer.update_priorities(range(4), [1e-12, 1.0, 4.0, 4.0])
    batch = buffer.sample(50)
    assert 0 not in batch.indices
    expected = np.array([1.0, 1e-6, 0.5e-6, 0.5e-6])[batch.indices]
    np.testing.assert_allclose(batch.weights.numpy().ravel(), expected, rtol=1e-6)
    # A priority of zero has no weight: it is not the smallest.
    buffer.update_priorities([0], [0.0])
    batch = buffer.sample(50)
    expected = np.array([0.0, 1.0, 0.5, 0.5])[batch.indices]
    np.testing.assert_array_equal(batch.weights.numpy().ravel(), expected)


@pytest.mark.parametrize("normalization", ["batch", "buffer"])
@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.4, 1.0])
@pytest.mark.parametrize(
    "errors", [(1e-300, 1e300), (1e300, 1e-300), (5e-324, 1e307), (5e-324, 5e-324), (1e307, 1e307)]
)
def test_weights_of_extreme_priorities_are_numbers_from_0_to_1(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[float, float], beta: float, normalization: Any
) -> None:
    buffer = make_buffer(2, n_adds=2, beta=beta, weight_normalization=normalization)
    buffer.update_priorities([0, 1], errors)
    drawn = set()
    # The ends of the masses: however unlikely a transition, one of them belongs to it.
    for value in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        with uniform_numbers(monkeypatch, value):
            for batch_size in (1, 2, 5):
                batch = buffer.sample(batch_size)
                drawn |= set(batch.indices.tolist())
                weights = batch.weights.numpy()
                assert np.isfinite(weights).all()
                assert (weights >= 0.0).all()
                assert (weights <= 1.0).all()
                if normalization == "batch" or beta == 0.0:
                    assert weights.max() == 1.0
    assert drawn == {0, 1} or errors[0] > errors[1]
    assert np.isfinite(buffer.probabilities).all()
    assert buffer.probabilities.sum() == pytest.approx(1.0)


def test_alpha_0_and_beta_0_are_uniform_replay() -> None:
    buffer = make_buffer(12, n_adds=4, n_envs=3, alpha=0.0, beta=0.0)
    for eps in (0.0, 1e-6):
        buffer.eps = eps
        buffer.update_priorities(range(12), np.append(SPREAD * 1e9, np.zeros(6)))
        np.testing.assert_array_equal(buffer.priorities, 1.0)
        batch = buffer.sample(24)
        # Two of each: equal masses
        np.testing.assert_array_equal(batch.indices, np.repeat(np.arange(12), 2))
        np.testing.assert_array_equal(batch.weights, np.ones((24, 1)))


# --- beta


def test_anneal_beta_goes_up_to_1_and_stays() -> None:
    buffer = make_buffer(4, n_adds=4, beta=0.4, beta_increment=0.25)
    seen = []
    for _ in range(4):
        buffer.anneal_beta()
        seen.append(buffer.beta)
    assert seen == [0.65, 0.9, 1.0, 1.0]
    constant = make_buffer(4, beta=0.4)
    constant.anneal_beta()
    assert constant.beta == 0.4


def test_beta_takes_effect_in_the_next_batch() -> None:
    buffer = make_buffer(2, n_adds=2, beta=0.0, beta_increment=0.5)
    buffer.update_priorities([0, 1], [1.0, 4.0])
    expected = {0.0: [1.0], 0.5: [0.5, 1.0], 1.0: [0.25, 1.0]}
    for beta, weights in expected.items():
        assert buffer.beta == beta
        assert np.unique(buffer.sample(10).weights).tolist() == weights
        buffer.anneal_beta()


# --- random numbers


def test_the_global_numpy_seed_decides_what_is_drawn() -> None:
    buffer = make_buffer(60, n_adds=20, n_envs=3)
    buffer.update_priorities(range(60), np.tile(SPREAD, 10))
    assert_same_batches(buffer, buffer)
    np.random.seed(1)
    one = buffer.sample(32).indices
    assert (buffer.sample(32).indices != one).any()
    np.random.seed(2)
    assert (buffer.sample(32).indices != one).any()


def test_nothing_but_a_draw_touches_the_global_random_numbers() -> None:
    np.random.seed(5)
    before = random_state()
    torch_before = th.get_rng_state()
    buffer = make_buffer(12, n_adds=6, n_envs=3, beta_increment=0.1)
    buffer.update_priorities(range(12), np.append(SPREAD, SPREAD))
    buffer.anneal_beta()
    assert buffer.priorities.sum() > buffer.probabilities.sum()
    pickle.loads(pickle.dumps(buffer))
    copy.deepcopy(buffer).reset()
    plain = ReplayBuffer(12, OBSERVATIONS, ACTIONS, "cpu", 3)
    add_rows(plain, 2)
    PrioritizedReplayBuffer.from_replay_buffer(plain)
    assert random_state() == before
    buffer.sample(4)
    assert random_state() != before
    assert th.equal(th.get_rng_state(), torch_before)


# --- the warning that nothing feeds priorities back


def test_one_warning_that_names_perdqn_when_priorities_are_never_updated() -> None:
    buffer = make_buffer(8, n_adds=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3500):
            buffer.sample(1)
            add_rows(buffer)
    assert [warning.category for warning in caught] == [UserWarning]
    assert "PERDQN" in str(caught[0].message)
    # It points at the caller.
    assert caught[0].filename == __file__


def draw(buffer: PrioritizedReplayBuffer, n_batches: int) -> None:
    for _ in range(n_batches):
        buffer.sample(1)


def test_the_warning_comes_after_at_most_1000_draws_and_not_at_once() -> None:
    buffer = make_buffer(8, n_adds=5)
    draw(buffer, 500)
    with pytest.warns(UserWarning, match="update_priorities"):
        draw(buffer, 500)


def test_an_update_silences_the_warning_for_good() -> None:
    buffer = make_buffer(8, n_adds=5)
    draw(buffer, 900)
    buffer.update_priorities([0], [1.0])
    # Warnings are errors here.
    draw(buffer, 2100)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_the_warning_is_not_repeated_by_a_copy(copied: Callable[[Any], Any]) -> None:
    buffer = make_buffer(8, n_adds=5)
    with pytest.warns(UserWarning, match="PERDQN"):
        draw(buffer, 1000)
    twin = copied(buffer)
    draw(pickle.loads(twin) if isinstance(twin, bytes) else twin, 1001)


@pytest.mark.parametrize("is_updated", [False, True])
def test_the_warning_does_not_come_again_after_a_reset(is_updated: bool) -> None:
    buffer = make_buffer(8, n_adds=5)
    if is_updated:
        buffer.update_priorities([0], [1.0])
    else:
        with pytest.warns(UserWarning, match="PERDQN"):
            draw(buffer, 1000)
    buffer.reset()
    add_rows(buffer)
    draw(buffer, 1001)
