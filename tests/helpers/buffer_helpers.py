"""Buffers for tests: how they are made, filled, compared and watched."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_per import PrioritizedReplayBuffer

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

OBSERVATIONS = spaces.Box(-np.inf, np.inf, (2,), np.float64)
ACTIONS = spaces.Discrete(4)
SAVING: dict[str, Any] = {"optimize_memory_usage": True, "handle_timeout_termination": False}
MEMORY_MODES = pytest.mark.parametrize("memory", [{}, SAVING], ids=["plain", "saving"])
OPTIONS = (
    "alpha",
    "beta",
    "beta_increment",
    "eps",
    "gamma",
    "n_steps",
    "weight_normalization",
    "prioritization",
)


def make_buffer(
    buffer_size: int, n_adds: int = 0, n_envs: int = 1, **options: Any
) -> PrioritizedReplayBuffer:
    """With alpha = 1 and eps = 0 a priority is the absolute error."""
    base = {"alpha": 1.0, "eps": 0.0, **options}
    buffer = PrioritizedReplayBuffer(buffer_size, OBSERVATIONS, ACTIONS, "cpu", n_envs, **base)
    add_rows(buffer, n_adds)
    return buffer


def add_rows(buffer: ReplayBuffer, n_adds: int = 1, first: int = 0, **values: Any) -> None:
    """
    Row ``k``: observations full of ``k``, then ``k + 1``, rewards ``k * n_envs + env``, no end of
    an episode; ``values`` replaces arguments of ``add``.
    """
    n = buffer.n_envs
    shape = (n, *buffer.obs_shape)
    for k in range(first, first + n_adds):
        row: dict[str, Any] = {
            "obs": np.full(shape, k),
            "next_obs": np.full(shape, k + 1),
            "action": np.zeros(n, dtype=np.int64),
            "reward": np.arange(k * n, k * n + n),
            "done": np.zeros(n, dtype=bool),
            "infos": [{}] * n,
        }
        buffer.add(**{**row, **values})


def leaves_of(buffer: PrioritizedReplayBuffer) -> FloatArray:
    array: FloatArray = buffer.tree[:]
    return array


def arrays_of(buffer: ReplayBuffer) -> dict[str, bytes]:
    """Content of all arrays; those for Dict observations one by one."""
    return {
        f"{name} {key}": array.tobytes()
        for name, value in vars(buffer).items()
        for key, array in (value if isinstance(value, dict) else {"": value}).items()
        if isinstance(array, np.ndarray)
    }


def state_of(buffer: PrioritizedReplayBuffer) -> dict[str, Any]:
    """All that decides what the buffer holds and how it draws."""
    return {
        **{name: getattr(buffer, name) for name in (*OPTIONS, "pos", "full")},
        **arrays_of(buffer),
        "leaves": leaves_of(buffer).tobytes(),
        "extremes": (buffer.tree.total, buffer.tree.max_priority, buffer.tree.min_priority),
    }


def random_state() -> bytes:
    return pickle.dumps(np.random.get_state())


@contextmanager
def refused(
    buffer: PrioritizedReplayBuffer,
    message: str | None = None,
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> Iterator[None]:
    """The block raises ``error`` with ``message``, and has changed nothing by then."""
    before, random_before = state_of(buffer), random_state()
    with pytest.raises(error, match=message):
        yield
    assert state_of(buffer) == before
    assert random_state() == random_before
    assert buffer.tree.check_valid() == (True, "")


@contextmanager
def uniform_numbers(monkeypatch: pytest.MonkeyPatch, value: float) -> Iterator[None]:
    """Every uniform random number is ``value``."""
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "random_sample", lambda n: np.full(n, value))
        yield


def values_of(batch: Any) -> list[Any]:
    """All the fields of a batch as arrays, the keys of its dicts one by one."""
    values: list[Any] = []
    for value in batch:
        values.extend(value.values() if isinstance(value, dict) else [value])
    return [None if value is None else np.asarray(value) for value in values]


def by_index(batch: Any, field: str) -> dict[int, Any]:
    """The values that a batch gives for each transition."""
    return dict(zip(batch.indices.tolist(), getattr(batch, field).numpy().tolist(), strict=True))


def assert_same_batches(
    one: PrioritizedReplayBuffer, other: PrioritizedReplayBuffer, n_batches: int = 5
) -> None:
    """The same global seed gives the same batches, bit for bit."""
    drawn = []
    for buffer in (one, other):
        np.random.seed(12)
        drawn.append([values_of(buffer.sample(16)) for _ in range(n_batches)])
    for batch, twin in zip(*drawn, strict=True):
        for value, expected in zip(batch, twin, strict=True):
            np.testing.assert_array_equal(value, expected)
