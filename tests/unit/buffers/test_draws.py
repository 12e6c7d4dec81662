"""The record of what was drawn from a buffer."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_per import PrioritizedReplayBuffer
from sb3_per.buffers.draws import N_LATEST, DrawRecord


@pytest.mark.parametrize(("n_rows", "n_envs"), [(7, 1), (5, 3), (1, 2)])
def test_counts_and_ages(n_rows: int, n_envs: int) -> None:
    """Against a list of stored transitions, while rows are overwritten and batches drawn."""
    rng = np.random.default_rng(0)
    record = DrawRecord(n_rows, n_envs)
    stored = [[-1, 0] for _ in range(n_rows * n_envs)]  # when, and how often drawn since
    all_ages: list[int] = []
    for step in range(4 * n_rows + 2):
        row = step % n_rows
        record.forget(row)
        for index in range(row * n_envs, (row + 1) * n_envs):
            stored[index] = [step, 0]
        n_stored = min(step + 1, n_rows) * n_envs
        indices = rng.integers(n_stored, size=6)
        record.note(indices, (row + 1) % n_rows)
        for index in indices:
            stored[index][1] += 1
            all_ages.append((step - stored[index][0]) * n_envs)
    assert record.counts.tolist() == [count for _, count in stored]
    assert record.n_draws == len(all_ages)
    assert record.sum_of_ages == sum(all_ages)
    assert max(all_ages) == (n_rows - 1) * n_envs
    for n in (0, 1, 10, len(all_ages), 10**6):
        assert record.latest_ages(n).tolist() == all_ages[len(all_ages) - n if n < 10**6 else 0 :]


def test_the_latest_ages_are_kept() -> None:
    record = DrawRecord(100, 1)
    # Row 0 is written next: transition 99 is the newest
    ages = np.arange(N_LATEST + 1000) % 100
    for chunk in np.array_split(99 - ages, 7):
        record.note(chunk, 0)
    assert record.latest_ages(500).tolist() == ages[-500:].tolist()
    assert record.latest_ages(N_LATEST + 1000).tolist() == ages[1000:].tolist()
    assert record.n_draws == N_LATEST + 1000
    assert record.sum_of_ages == ages.sum()


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_index_outside_the_buffer_is_refused_before_anything_is_counted(wrong: int) -> None:
    record = DrawRecord(3, 2)
    with pytest.raises(IndexError, match=f"index {wrong} is outside the buffer of 6 transitions"):
        record.note(np.array([0, 5, wrong]), 0)
    assert not record.counts.any()
    assert record.n_draws == record.sum_of_ages == len(record.latest_ages(3)) == 0


def make_buffer(n_rows: int = 4, n_envs: int = 2) -> Any:
    space = spaces.Box(-1.0, 1.0, (3,), np.float32)
    return PrioritizedReplayBuffer(n_rows * n_envs, space, spaces.Discrete(2), n_envs=n_envs)


def add(buffer: Any, n_rows: int) -> None:
    n = buffer.n_envs
    for _ in range(n_rows):
        observations = np.zeros((n, 3))
        buffer.add(observations, observations, np.zeros((n, 1)), np.zeros(n), np.zeros(n), [{}] * n)


def test_a_buffer_counts_when_asked_to() -> None:
    buffer = make_buffer()
    add(buffer, 3)
    buffer.sample(10)
    before = buffer.draws
    assert before is None
    record = buffer.record_draws()
    assert buffer.draws is record is buffer.record_draws()
    indices = buffer.sample(5).indices
    assert record.counts.tolist() == np.bincount(indices, minlength=8).tolist()
    # Three rows: the ages are 4, 2 and 0
    assert record.sum_of_ages == (4 - indices // 2 * 2).sum()
    # No draws
    buffer.batch_of(indices)
    assert record.n_draws == 5


def test_what_is_overwritten_counts_from_0() -> None:
    buffer = make_buffer()
    add(buffer, 4)
    record = buffer.record_draws()
    buffer.sample(1000)
    assert record.counts.min() > 0
    add(buffer, 1)
    assert np.flatnonzero(record.counts == 0).tolist() == [0, 1]


def test_an_emptied_buffer_goes_on_counting() -> None:
    buffer = make_buffer()
    add(buffer, 4)
    record = buffer.record_draws()
    buffer.sample(1000)
    buffer.reset()
    assert buffer.draws is record
    assert not record.counts.any()
    # What happened stays true
    assert record.n_draws == 1000
    add(buffer, 1)
    buffer.sample(10)
    assert record.counts.sum() == record.counts[:2].sum() == 10


def test_copies_and_what_is_saved_do_not_count() -> None:
    buffer = make_buffer()
    add(buffer, 2)
    record = buffer.record_draws()
    for other in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer), copy.copy(buffer)):
        assert other.draws is None
        other.sample(5)
        assert other.record_draws() is not record
    assert buffer.draws is record
    assert record.n_draws == 0
