"""Buffers that are copied, pickled, reset, or taken over from SB3."""

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from buffer_helpers import (
    ACTIONS,
    MEMORY_MODES,
    OBSERVATIONS,
    add_rows,
    arrays_of,
    assert_same_batches,
    leaves_of,
    make_buffer,
    state_of,
)
from sb3_per import PrioritizedReplayBuffer


@dataclass
class Trip:
    """A way there and back."""

    name: str

    def __call__(self, buffer: PrioritizedReplayBuffer, folder: Path) -> PrioritizedReplayBuffer:
        twin: Any
        if self.name == "deepcopy":
            twin = copy.deepcopy(buffer)
        elif self.name == "SB3's functions":
            save_to_pkl(folder / "replay", buffer)
            twin = load_from_pkl(folder / "replay")
        else:
            twin = pickle.loads(pickle.dumps(buffer, int(self.name)))
        assert type(twin) is type(buffer)
        return twin


@pytest.mark.parametrize("trip", ["2", "5", "deepcopy", "SB3's functions"])
@pytest.mark.parametrize("n_adds", [0, 3, 8, 13])
@pytest.mark.parametrize("n_envs", [1, 3])
@MEMORY_MODES
def test_a_round_trip_brings_everything_back_bit_for_bit(
    tmp_path: Path, memory: dict[str, Any], n_envs: int, n_adds: int, trip: str
) -> None:
    buffer = make_buffer(8 * n_envs, n_adds, n_envs, alpha=0.7, eps=1e-3, n_steps=2, **memory)
    buffer.beta_increment, buffer.beta = 0.1, 0.45
    n = buffer.n_transitions
    buffer.update_priorities(range(n), np.random.default_rng(0).exponential(size=n))
    twin = Trip(trip)(buffer, tmp_path)
    assert state_of(twin) == state_of(buffer)
    assert twin.tree.check_valid() == (True, "")
    if n:
        assert_same_batches(buffer, twin)
    # And both go on alike.
    for both in (buffer, twin):
        add_rows(both, 3, first=20)
        both.update_priorities([0, 1], [3.0, 0.5])
        both.anneal_beta()
    assert state_of(twin) == state_of(buffer)
    assert_same_batches(buffer, twin)


def test_a_copy_has_a_tree_of_its_own() -> None:
    buffer = make_buffer(4, n_adds=4)
    twin = copy.deepcopy(buffer)
    twin.update_priorities(range(4), [5.0, 6.0, 7.0, 8.0])
    np.testing.assert_array_equal(buffer.priorities, 1.0)


def test_the_pickle_of_a_large_buffer_adds_at_most_9_bytes_a_transition() -> None:
    n = 1_000_000
    arguments = (n, spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2), "cpu")
    sizes = []
    for kind in (PrioritizedReplayBuffer, ReplayBuffer):
        buffer = kind(*arguments)
        buffer.full = True
        if isinstance(buffer, PrioritizedReplayBuffer):
            buffer.update_priorities(np.arange(n), np.random.default_rng(0).random(n))
        sizes.append(len(pickle.dumps(buffer, pickle.HIGHEST_PROTOCOL)))
    assert sizes[0] <= sizes[1] + 9 * n
    # The measure is of all the arrays.
    assert sizes[1] >= n * (2 * 16 + 8 + 3 * 4)


@MEMORY_MODES
def test_a_reset_buffer_is_as_a_new_one(memory: dict[str, Any]) -> None:
    buffer = make_buffer(6, n_adds=9, beta=0.7, **memory)
    buffer.update_priorities(range(6), [0.1, 3.0, 0.5, 7.0, 1.0, 0.2])
    buffer.reset()
    assert (buffer.n_transitions, buffer.tree.total, buffer.tree.max_priority) == (0, 0.0, 0.0)
    assert buffer.beta == 0.7
    add_rows(buffer, 2, first=50)
    np.testing.assert_array_equal(leaves_of(buffer), [1, 1, 0, 0, 0, 0])
    batch = buffer.sample(8)
    assert set(batch.rewards.numpy().ravel()) == {50.0, 51.0}


# --- from_replay_buffer


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_adds", [0, 1, 4, 5, 8])
@pytest.mark.parametrize("saving", [False, True])
def test_a_plain_buffer_is_taken_over_with_all_drawable_at_1(
    saving: bool, n_adds: int, n_envs: int
) -> None:
    plain = ReplayBuffer(5 * n_envs, OBSERVATIONS, ACTIONS, "cpu", n_envs, saving, not saving)
    add_rows(plain, n_adds)
    before = arrays_of(plain)
    ours = PrioritizedReplayBuffer.from_replay_buffer(plain, alpha=0.3, beta=0.8)
    assert type(ours) is PrioritizedReplayBuffer
    assert arrays_of(ours) == before
    assert (ours.pos, ours.full, ours.n_envs) == (plain.pos, plain.full, n_envs)
    assert (ours.alpha, ours.beta, ours.eps, ours.n_steps) == (0.3, 0.8, 1e-6, 1)
    assert ours.handle_timeout_termination is not saving
    expected = np.zeros((5, n_envs))
    expected[: min(n_adds, 5)] = 1.0
    if saving and n_adds >= 5:
        expected[n_adds % 5] = 0.0
    np.testing.assert_array_equal(leaves_of(ours), expected.ravel())
    assert ours.tree.check_valid() == (True, "")

    # It goes on like any other.
    add_rows(ours, 2, first=n_adds)
    batch = ours.sample(10 * n_envs)
    np.testing.assert_array_equal(batch.next_observations, batch.observations + 1)
    newest = (ours.pos - 1) % 5 * n_envs
    ours.update_priorities([newest], [1000.0])
    assert ours.priorities[newest] > 7.0


@pytest.mark.parametrize("options", [{}, {"n_steps": 3}, {"n_steps": 3, "gamma": 0.5}], ids=str)
def test_a_plain_n_step_buffer_is_taken_over_with_its_options(options: dict[str, Any]) -> None:
    plain = NStepReplayBuffer(6, OBSERVATIONS, ACTIONS, "cpu", n_steps=3, gamma=0.5)
    add_rows(plain, 8)
    ours = PrioritizedReplayBuffer.from_replay_buffer(plain, **options)
    assert (ours.n_steps, ours.gamma) == (3, 0.5)
    np.testing.assert_array_equal(leaves_of(ours), 1.0)
    batch = ours.sample(12)
    expected = plain._get_samples(batch.indices)
    for field in expected._fields:
        np.testing.assert_array_equal(getattr(batch, field), getattr(expected, field))


def test_wrong_options_are_refused_when_a_buffer_is_taken_over() -> None:
    plain = ReplayBuffer(6, OBSERVATIONS, ACTIONS, "cpu")
    with pytest.raises(ValueError, match=r"alpha.*-1"):
        PrioritizedReplayBuffer.from_replay_buffer(plain, alpha=-1)
    with pytest.raises(TypeError, match="alhpa"):
        PrioritizedReplayBuffer.from_replay_buffer(plain, alhpa=1.0)


def test_buffers_of_another_kind_are_not_taken_over() -> None:
    space = spaces.Dict({"a": OBSERVATIONS})
    with pytest.raises(ValueError, match="Dict"):
        PrioritizedReplayBuffer.from_replay_buffer(DictReplayBuffer(6, space, ACTIONS, "cpu"))
    other: Any
    # Of its own kind, neither: a copy of that is what `copy.deepcopy` makes
    for other in (RolloutBuffer(6, OBSERVATIONS, ACTIONS, "cpu"), make_buffer(6)):
        with pytest.raises(ValueError, match=f"got a {type(other).__name__}"):
            PrioritizedReplayBuffer.from_replay_buffer(other)
