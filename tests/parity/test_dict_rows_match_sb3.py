"""A batch of Dict observations holds, bit for bit, what SB3's own buffers hold."""

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from buffer_helpers import IntArray
from parity_helpers import N_ADDS, ROWS, Step, assert_bitwise_equal, normalizer, stream
from sb3_per import PrioritizedDictReplayBuffer, PrioritizedDictReplayBufferSamples

OTHER_FIELDS = ("actions", "dones", "rewards", "discounts")
GAMMA = 0.97

KEYS: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "camera": spaces.Box(0, 255, (3, 6, 6), np.uint8),
    "room": spaces.Discrete(25),
    "map": spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    "flags": spaces.MultiBinary(5),
    "pair": spaces.MultiDiscrete([3, 4]),
}
NORMALIZED = ("vector", "map")
SPACE = spaces.Dict(KEYS)
ACTION_SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
}


@functools.cache
def random_steps(n_envs: int, n: int, actions: str = "discrete", seed: int = 0) -> tuple[Step, ...]:
    return stream(SPACE, ACTION_SPACES[actions], n_envs, n, seed)


def normalizers(key: str | None = None) -> tuple[VecNormalize, VecNormalize]:
    """Of the keys that are not images; the same for one key alone."""
    whole = normalizer(SPACE, norm_obs_keys=list(NORMALIZED))
    alone = normalizer(KEYS[key or "room"], norm_obs=key in NORMALIZED)
    if key in NORMALIZED:
        statistics: Any = whole.obs_rms
        alone.obs_rms = statistics[key]
    return whole, alone


def fill(steps: tuple[Step, ...], *buffers: ReplayBuffer, key: str | None = None) -> None:
    """With ``key``, its observations alone."""
    for step in steps:
        for buffer in buffers:
            # SB3 writes into the dicts that it gets
            obs: Any = dict(step.obs) if key is None else step.obs[key]
            next_obs: Any = dict(step.next_obs) if key is None else step.next_obs[key]
            buffer.add(obs, next_obs, *step[2:])


def sb3s_batch(
    monkeypatch: pytest.MonkeyPatch,
    buffer: ReplayBuffer,
    indices: IntArray,
    env: VecNormalize | None,
) -> Any:
    """What SB3 returns when it draws the rows and the environments of ``indices``."""
    rows, envs = np.divmod(indices, buffer.n_envs)
    with monkeypatch.context() as patch:
        patch.setattr(np.random, "randint", lambda *args, **kwargs: envs)
        return buffer._get_samples(rows, env=env)


def draw_every_transition(
    buffer: PrioritizedDictReplayBuffer, env: VecNormalize | None = None
) -> Any:
    """All priorities are those of new transitions: equal masses take each of them twice."""
    batch = buffer.sample(2 * buffer.n_transitions, env=env)
    np.testing.assert_array_equal(np.unique(batch.indices), np.arange(buffer.n_transitions))
    return batch


def assert_same_observations(ours: Any, theirs: Any, context: object) -> None:
    assert list(ours) == list(theirs), context
    for key in ours:
        assert_bitwise_equal(ours[key], theirs[key], (key, context))


# --- one step ---


@pytest.mark.parametrize("timeouts", [True, False])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_every_row_is_that_of_sb3(
    monkeypatch: pytest.MonkeyPatch, n_envs: int, timeouts: bool
) -> None:
    # One more than divides by n_envs: SB3 rounds down
    base = (ROWS * n_envs + n_envs - 1, SPACE, ACTION_SPACES["discrete"], "cpu", n_envs)
    normalize, _ = normalizers()
    for seed, n_adds in enumerate(N_ADDS):
        ours = PrioritizedDictReplayBuffer(*base, handle_timeout_termination=timeouts)
        theirs = DictReplayBuffer(*base, handle_timeout_termination=timeouts)
        fill(random_steps(n_envs, n_adds, seed=seed), ours, theirs)
        assert (ours.pos, ours.full) == (theirs.pos, theirs.full)
        for env in (None, normalize):
            batch = draw_every_transition(ours, env)
            assert type(batch) is PrioritizedDictReplayBufferSamples
            expected = sb3s_batch(monkeypatch, theirs, batch.indices, env)
            context = (n_adds, env is None)
            for field in ("observations", "next_observations"):
                assert_same_observations(
                    getattr(batch, field), getattr(expected, field), (field, context)
                )
            for field in ("actions", "dones", "rewards"):
                assert_bitwise_equal(
                    getattr(batch, field), getattr(expected, field), (field, context)
                )
            assert batch.discounts is None


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("actions", ACTION_SPACES)
def test_actions_of_every_kind_are_those_of_sb3(
    monkeypatch: pytest.MonkeyPatch, actions: str, n_envs: int
) -> None:
    base = (ROWS * n_envs, SPACE, ACTION_SPACES[actions], "cpu", n_envs)
    ours, theirs = PrioritizedDictReplayBuffer(*base), DictReplayBuffer(*base)
    fill(random_steps(n_envs, ROWS + 2, actions), ours, theirs)
    batch = draw_every_transition(ours)
    expected = sb3s_batch(monkeypatch, theirs, batch.indices, None)
    assert_bitwise_equal(batch.actions, expected.actions, actions)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_all_arrays_are_those_of_sb3(n_envs: int) -> None:
    base = (ROWS * n_envs, SPACE, ACTION_SPACES["discrete"], "cpu", n_envs)
    ours, theirs = PrioritizedDictReplayBuffer(*base), DictReplayBuffer(*base)
    fill(random_steps(n_envs, ROWS + 2), ours, theirs)
    for name in ("actions", "rewards", "dones", "timeouts"):
        mine, its = getattr(ours, name), getattr(theirs, name)
        assert (mine.dtype, mine.shape, mine.tobytes()) == (its.dtype, its.shape, its.tobytes())
    for mine, its in (
        (ours.observations, theirs.observations),
        (ours.next_observations, theirs.next_observations),
    ):
        assert list(mine) == list(its)
        for key in mine:
            assert (mine[key].dtype, mine[key].shape) == (its[key].dtype, its[key].shape)
            assert mine[key].tobytes() == its[key].tobytes()


def test_any_transitions_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    base = (ROWS * 3, SPACE, ACTION_SPACES["discrete"], "cpu", 3)
    ours, theirs = PrioritizedDictReplayBuffer(*base), DictReplayBuffer(*base)
    fill(random_steps(3, ROWS + 2), ours, theirs)
    indices = np.array([2, 18, 10, 10, 3, 17])
    batch: Any = ours.batch_of(indices)
    expected = sb3s_batch(monkeypatch, theirs, indices, None)
    assert_same_observations(batch.observations, expected.observations, "observations")
    assert_bitwise_equal(batch.rewards, expected.rewards, "rewards")
    np.testing.assert_array_equal(batch.indices, indices)


# --- several steps: SB3 has them for other observations only, so each key is compared by itself ---


@pytest.mark.parametrize("n_steps", [2, 3, ROWS + 5])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("key", KEYS)
def test_n_step_rows_are_those_of_sb3s_buffer_for_the_key_alone(
    monkeypatch: pytest.MonkeyPatch, key: str, n_envs: int, n_steps: int
) -> None:
    rest = (ACTION_SPACES["discrete"], "cpu", n_envs)
    pairs = [(None, None), normalizers(key)]
    for seed, n_adds in enumerate(N_ADDS):
        ours = PrioritizedDictReplayBuffer(
            ROWS * n_envs, SPACE, *rest, n_steps=n_steps, gamma=GAMMA
        )
        theirs = NStepReplayBuffer(ROWS * n_envs, KEYS[key], *rest, n_steps=n_steps, gamma=GAMMA)
        steps = random_steps(n_envs, n_adds, seed=seed)
        fill(steps, ours)
        fill(steps, theirs, key=key)
        for env, env_of_key in pairs:
            batch = draw_every_transition(ours, env)
            expected = sb3s_batch(monkeypatch, theirs, batch.indices, env_of_key)
            context = (n_adds, env is None)
            assert_bitwise_equal(batch.observations[key], expected.observations, context)
            assert_bitwise_equal(batch.next_observations[key], expected.next_observations, context)
            for field in OTHER_FIELDS:
                assert_bitwise_equal(
                    getattr(batch, field), getattr(expected, field), (field, context)
                )


# --- the comparison itself ---


@pytest.mark.parametrize("twin", ["next row", "next env"])
def test_the_comparison_notices_another_row_or_env(
    monkeypatch: pytest.MonkeyPatch, twin: str
) -> None:
    base = (ROWS * 3, SPACE, ACTION_SPACES["discrete"], "cpu", 3)
    ours, theirs = PrioritizedDictReplayBuffer(*base), DictReplayBuffer(*base)
    fill(random_steps(3, ROWS + 2), ours, theirs)
    batch = draw_every_transition(ours)
    other = (batch.indices + (3 if twin == "next row" else 1)) % (ROWS * 3)
    expected = sb3s_batch(monkeypatch, theirs, other, None)
    for field in ("observations", "next_observations"):
        for key in KEYS:
            with pytest.raises(AssertionError, match=twin):
                assert_bitwise_equal(
                    getattr(batch, field)[key], getattr(expected, field)[key], twin
                )
    for field in ("actions", "dones", "rewards"):
        with pytest.raises(AssertionError, match=twin):
            assert_bitwise_equal(getattr(batch, field), getattr(expected, field), twin)
