"""A batch holds, bit for bit, what SB3's own buffers hold for the same rows and environments."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from buffer_helpers import IntArray
from parity_helpers import N_ADDS, ROWS, Step, assert_bitwise_equal, normalizer, stream
from sb3_per import PrioritizedReplayBuffer, PrioritizedReplayBufferSamples

FIELDS = ("observations", "actions", "next_observations", "dones", "rewards", "discounts")
N_STEPS = (1, 2, 3, 5, ROWS + 5)

OBSERVATION_SPACES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "float64": spaces.Box(-1.0, 1.0, (2, 3, 1), np.float64),
    "float16": spaces.Box(-1.0, 1.0, (1,), np.float16),
    "integers": spaces.Box(-9, 9, (2, 2), np.int32),
    "image": spaces.Box(0, 255, (3, 7, 7), np.uint8),
    "discrete": spaces.Discrete(25),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-binary": spaces.MultiBinary(5),
}
ACTION_SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "float64": spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-binary": spaces.MultiBinary(5),
}


@functools.cache
def random_steps(
    space: str, n_envs: int, n: int, actions: str = "discrete", seed: int = 0
) -> tuple[Step, ...]:
    return stream(OBSERVATION_SPACES[space], ACTION_SPACES[actions], n_envs, n, seed)


def normalizer_of(space: spaces.Space[Any]) -> VecNormalize:
    return normalizer(space, norm_obs=isinstance(space, spaces.Box))


def assert_same_fields(
    batch: PrioritizedReplayBufferSamples,
    expected: Any,
    context: object,
    fields: tuple[str, ...] = FIELDS,
    where: npt.NDArray[np.bool_] | slice = slice(None),
) -> None:
    for field in fields:
        ours, theirs = getattr(batch, field), getattr(expected, field)
        assert_bitwise_equal(ours, theirs, f"{field}: {context}", where)


def fill(steps: Iterable[Step], *buffers: ReplayBuffer) -> None:
    for step in steps:
        for buffer in buffers:
            buffer.add(*step)


def sample_the_same(
    monkeypatch: pytest.MonkeyPatch,
    buffer: ReplayBuffer,
    rows: IntArray,
    envs: IntArray,
    env: VecNormalize | None,
) -> Any:
    """What ``buffer.sample`` of SB3 returns when its two draws give ``rows`` and ``envs``."""
    if buffer.optimize_memory_usage and buffer.full:
        # It draws how many rows a transition is away from the position, never 0
        rows = (rows - buffer.pos) % buffer.buffer_size
    answers = [rows, envs]

    def randint(low: int, high: int, size: Any) -> IntArray:
        answer = answers.pop(0)
        assert answer.shape == ((size,) if isinstance(size, int) else size)
        assert (answer >= low).all()
        assert (answer < high).all()
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(np.random, "randint", randint)
        batch = buffer.sample(len(rows), env=env)
    assert not answers
    return batch


def rows_and_envs(buffer: PrioritizedReplayBuffer, indices: IntArray) -> tuple[IntArray, IntArray]:
    rows, envs = np.divmod(indices, buffer.n_envs)
    return rows, envs


def draw_every_transition(
    buffer: PrioritizedReplayBuffer, env: VecNormalize | None = None
) -> PrioritizedReplayBufferSamples:
    """All priorities are those of new transitions: equal masses take each of them twice."""
    drawable = np.flatnonzero(buffer.priorities)
    batch = buffer.sample(2 * len(drawable), env=env)
    np.testing.assert_array_equal(np.unique(batch.indices), drawable)
    return batch


def n_step_counterpart(n_steps: int, gamma: float) -> Callable[..., ReplayBuffer]:
    """SB3's class for this number of steps."""
    if n_steps == 1:
        return ReplayBuffer
    return lambda *args, **kwargs: NStepReplayBuffer(*args, n_steps=n_steps, gamma=gamma, **kwargs)


# --- parity ---


@pytest.mark.parametrize("n_steps", N_STEPS)
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("space", OBSERVATION_SPACES)
def test_every_row_is_that_of_sb3(
    monkeypatch: pytest.MonkeyPatch, space: str, n_envs: int, n_steps: int
) -> None:
    observation_space = OBSERVATION_SPACES[space]
    # One more than divides by n_envs: SB3 rounds down
    base = (ROWS * n_envs + n_envs - 1, observation_space, spaces.Discrete(4), "cpu", n_envs)
    normalize = normalizer_of(observation_space)
    for seed, n_adds in enumerate(N_ADDS):
        for timeouts in (True, False):
            ours = PrioritizedReplayBuffer(
                *base, handle_timeout_termination=timeouts, n_steps=n_steps, gamma=0.97
            )
            theirs = n_step_counterpart(n_steps, gamma=0.97)(
                *base, handle_timeout_termination=timeouts
            )
            fill(random_steps(space, n_envs, n_adds, seed=seed), ours, theirs)
            assert (ours.pos, ours.full) == (theirs.pos, theirs.full)
            for env in (None, normalize):
                batch = draw_every_transition(ours, env)
                rows, envs = rows_and_envs(ours, batch.indices)
                expected = sample_the_same(monkeypatch, theirs, rows, envs, env)
                assert_same_fields(batch, expected, (n_adds, timeouts, env is None))


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("space", ACTION_SPACES)
def test_actions_of_every_kind_are_those_of_sb3(
    monkeypatch: pytest.MonkeyPatch, space: str, n_envs: int, n_steps: int
) -> None:
    base = (ROWS * n_envs, OBSERVATION_SPACES["box"], ACTION_SPACES[space], "cpu", n_envs)
    ours = PrioritizedReplayBuffer(*base, n_steps=n_steps)
    theirs = n_step_counterpart(n_steps, gamma=0.99)(*base)
    fill(random_steps("box", n_envs, ROWS + 2, space), ours, theirs)
    batch = draw_every_transition(ours)
    expected = sample_the_same(monkeypatch, theirs, *rows_and_envs(ours, batch.indices), None)
    assert_same_fields(batch, expected, space)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize("n_steps", [2, 50])
def test_returns_and_discounts_are_those_of_sb3_for_any_gamma(
    monkeypatch: pytest.MonkeyPatch, n_steps: int, gamma: float
) -> None:
    space = OBSERVATION_SPACES["box"]
    base = (300, space, spaces.Discrete(4), "cpu", 3)
    ours = PrioritizedReplayBuffer(*base, n_steps=n_steps, gamma=gamma)
    theirs = n_step_counterpart(n_steps, gamma)(*base)
    # Long episodes: sums of many terms, whose order shows in the last bits
    for step in random_steps("box", 3, 140):
        rare = step._replace(done=step.done & (step.reward > 2.0), infos=[{}, {}, {}])
        fill([rare], ours, theirs)
    for env in (None, normalizer_of(space)):
        batch = draw_every_transition(ours, env)
        expected = sample_the_same(monkeypatch, theirs, *rows_and_envs(ours, batch.indices), env)
        assert_same_fields(batch, expected, env)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("space", OBSERVATION_SPACES)
def test_memory_saving_rows_are_those_of_sb3(
    monkeypatch: pytest.MonkeyPatch, space: str, n_envs: int
) -> None:
    observation_space = OBSERVATION_SPACES[space]
    base = (ROWS * n_envs, observation_space, spaces.Discrete(4), "cpu", n_envs, True, False)
    normalize = normalizer_of(observation_space)
    for seed, n_adds in enumerate(N_ADDS):
        ours, theirs = PrioritizedReplayBuffer(*base), ReplayBuffer(*base)
        fill(random_steps(space, n_envs, n_adds, seed=seed), ours, theirs)
        for env in (None, normalize):
            batch = draw_every_transition(ours, env)
            assert len(np.unique(batch.indices)) == n_envs * min(n_adds, ROWS - 1)
            rows, envs = rows_and_envs(ours, batch.indices)
            expected = sample_the_same(monkeypatch, theirs, rows, envs, env)
            assert_same_fields(batch, expected, (n_adds, env is None))


@pytest.mark.parametrize("reference", ["ours", "SB3's"])
@pytest.mark.parametrize("n_steps", N_STEPS[1:])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("space", ["box", "image", "discrete"])
def test_memory_saving_n_step_rows_are_those_of_a_buffer_that_saves_none(
    monkeypatch: pytest.MonkeyPatch, space: str, n_envs: int, n_steps: int, reference: str
) -> None:
    observation_space = OBSERVATION_SPACES[space]
    base = (ROWS * n_envs, observation_space, spaces.Discrete(4), "cpu", n_envs)
    normalize = normalizer_of(observation_space)
    kind: Any = PrioritizedReplayBuffer if reference == "ours" else NStepReplayBuffer
    for seed, n_adds in enumerate(N_ADDS):
        saving = PrioritizedReplayBuffer(*base, True, False, n_steps=n_steps, gamma=0.97)
        plain = kind(*base, handle_timeout_termination=False, n_steps=n_steps, gamma=0.97)
        fill(random_steps(space, n_envs, n_adds, seed=seed), saving, plain)
        for env in (None, normalize):
            batch = draw_every_transition(saving, env)
            if isinstance(plain, PrioritizedReplayBuffer):
                expected = plain.batch_of(batch.indices, env)
            else:
                rows, envs = rows_and_envs(saving, batch.indices)
                expected = sample_the_same(monkeypatch, plain, rows, envs, env)
            context = (n_adds, env is None)
            others = tuple(field for field in FIELDS if field != "next_observations")
            assert_same_fields(batch, expected, context, others)
            # Where an episode ended, its last observation gave way to the first of the next one,
            # as in SB3; nobody reads it there.
            goes_on = batch.dones.numpy().ravel() == 0.0
            assert_same_fields(batch, expected, context, ("next_observations",), goes_on)


@pytest.mark.parametrize(("n_steps", "saving"), [(1, False), (1, True), (3, False)])
def test_any_transitions_can_be_asked_for_with_weights_or_without(
    monkeypatch: pytest.MonkeyPatch, n_steps: int, saving: bool
) -> None:
    space = OBSERVATION_SPACES["box"]
    base = (ROWS * 3, space, spaces.Discrete(4), "cpu", 3, saving, not saving)
    ours = PrioritizedReplayBuffer(*base, n_steps=n_steps)
    theirs = n_step_counterpart(n_steps, gamma=0.99)(*base)
    fill(random_steps("box", 3, ROWS + 2), ours, theirs)
    ours.update_priorities(np.arange(6), np.arange(1.0, 7.0))
    rows, envs = np.array([0, 6, 3, 3, 1, 5]), np.array([2, 0, 1, 1, 0, 2])
    expected = sample_the_same(monkeypatch, theirs, rows, envs, None)
    indices = rows * 3 + envs
    for batch in (ours.batch_of(indices), ours._get_samples(indices)):
        assert_same_fields(batch, expected, n_steps)
        np.testing.assert_array_equal(batch.indices, indices)
    np.testing.assert_array_equal(ours._get_samples(indices).weights, np.ones((6, 1)))
    priorities = ours.priorities[indices]
    np.testing.assert_allclose(
        ours.batch_of(indices).weights[:, 0], (priorities.min() / priorities) ** 0.4, rtol=1e-6
    )


# --- the comparison itself ---


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("twin", ["next row", "previous row", "next env", "rows and envs swapped"])
def test_the_comparison_notices_another_row_or_env(
    monkeypatch: pytest.MonkeyPatch, twin: str, n_steps: int
) -> None:
    space = OBSERVATION_SPACES["box"]
    base = (ROWS * 3, space, spaces.Discrete(4), "cpu", 3)
    ours = PrioritizedReplayBuffer(*base, n_steps=n_steps)
    theirs = n_step_counterpart(n_steps, gamma=0.99)(*base)
    fill(random_steps("box", 3, ROWS + 2), ours, theirs)
    batch = draw_every_transition(ours)
    rows, envs = rows_and_envs(ours, batch.indices)
    rows, envs = {
        "next row": ((rows + 1) % ROWS, envs),
        "previous row": ((rows - 1) % ROWS, envs),
        "next env": (rows, (envs + 1) % 3),
        "rows and envs swapped": (batch.indices % ROWS, batch.indices // ROWS),
    }[twin]
    expected = sample_the_same(monkeypatch, theirs, rows, envs, None)
    for field in FIELDS if n_steps > 1 else FIELDS[:-1]:
        with pytest.raises(AssertionError, match=field):
            assert_same_fields(batch, expected, twin, (field,))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("twin", ["last bit", "dtype", "shape", "one row"])
def test_the_comparison_notices_a_small_change_of_any_field(field: str, twin: str) -> None:
    space = OBSERVATION_SPACES["box"]
    buffer = PrioritizedReplayBuffer(ROWS, space, ACTION_SPACES["box"], "cpu", n_steps=3)
    fill(random_steps("box", 1, ROWS, "box"), buffer)
    batch = draw_every_transition(buffer)
    values: th.Tensor = getattr(batch, field)
    if twin == "last bit":
        changed = th.nextafter(values, th.tensor(9.0))
    elif twin == "dtype":
        changed = values.double()
    elif twin == "shape":
        changed = values.reshape(1, *values.shape)
    else:
        changed = values.clone()
        changed[-1] += 1.0
    twin_batch = PrioritizedReplayBufferSamples(**{**batch._asdict(), field: changed})
    assert_same_fields(batch, batch, "itself")
    with pytest.raises(AssertionError, match=field):
        assert_same_fields(batch, twin_batch, twin)
