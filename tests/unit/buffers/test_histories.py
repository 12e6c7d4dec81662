"""Random histories of a buffer against a plain model of it."""

import math
import pickle
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from buffer_helpers import (
    ACTIONS,
    Array,
    FloatArray,
    leaves_of,
    refused,
    state_of,
)
from sb3_per import PrioritizedDictReplayBuffer, PrioritizedReplayBuffer


@dataclass
class Transition:
    """What was added."""

    serial: int
    obs: int
    next_obs: int
    reward: float
    done: bool
    timeout: bool


class Model:
    """The same buffer as lists, one entry for each transition, straight from the specification."""

    def __init__(self, rows: int, n_envs: int, n_steps: int, saving: bool) -> None:
        self.rows, self.n_envs, self.n_steps, self.saving = rows, n_envs, n_steps, saving
        self.n_rows_added = 0
        self.stored: list[Transition | None] = [None] * (rows * n_envs)
        self.priorities = [0.0] * (rows * n_envs)

    def row(self, row: int) -> range:
        return range(row * self.n_envs, (row + 1) * self.n_envs)

    @property
    def pos(self) -> int:
        return self.n_rows_added % self.rows

    @property
    def n_stored(self) -> int:
        return min(self.n_rows_added, self.rows) * self.n_envs

    @property
    def without_next(self) -> range:
        """Places that can't be drawn though something is stored there."""
        return self.row(self.pos) if self.saving and self.n_rows_added >= self.rows else range(0)

    def add(self, transitions: list[Transition]) -> None:
        largest = max(self.priorities) or 1.0
        for place, transition in zip(self.row(self.pos), transitions, strict=True):
            self.stored[place] = transition
            self.priorities[place] = largest
        self.n_rows_added += 1
        for place in self.without_next:
            self.priorities[place] = 0.0

    def expected(self, place: int) -> tuple[float, float, float, float, float | None]:
        """Observation, return, next observation (-1: any), done, discount."""
        row, env = divmod(place, self.n_envs)
        first = self.stored[place]
        assert first is not None
        last, total, discount = first, first.reward, 0.5
        for _ in range(self.n_steps - 1):
            if last.done or last.timeout or row == (self.pos - 1) % self.rows:
                break
            row = (row + 1) % self.rows
            following = self.stored[row * self.n_envs + env]
            assert following is not None
            last, total, discount = following, total + discount * following.reward, discount / 2
        terminated = last.done and not last.timeout
        next_obs = -1 if self.saving and terminated else last.next_obs
        discounts = None if self.n_steps == 1 else discount
        return first.obs, total, next_obs, float(terminated), discounts


class History:
    """Does the same to a buffer and to the model."""

    def __init__(
        self,
        rows: int,
        n_envs: int,
        n_steps: int,
        mode: str,
        shape: tuple[int, ...],
        alpha: float,
        eps: float,
        normalization: Any,
    ) -> None:
        saving = mode == "saving"
        self.shape, self.has_dict = shape, mode == "dict"
        box = spaces.Box(-np.inf, np.inf, shape, np.float64)
        kind = PrioritizedDictReplayBuffer if self.has_dict else PrioritizedReplayBuffer
        self.buffer = kind(
            rows * n_envs,
            spaces.Dict({"here": box}) if self.has_dict else box,
            ACTIONS,
            "cpu",
            n_envs,
            saving,
            not saving,
            alpha=alpha,
            eps=eps,
            n_steps=n_steps,
            gamma=0.5,
            weight_normalization=normalization,
        )
        self.model = Model(rows, n_envs, n_steps, saving)
        self.serial = 0
        self.observations = [0] * n_envs
        # Indices of the latest batch
        self.latest: Array | None = None

    def observe(self, values: list[int]) -> Any:
        """Observations of the environments, full of one value each."""
        array = np.multiply.outer(np.array(values, np.float64), np.ones(self.shape))
        return {"here": array} if self.has_dict else array

    def observed(self, observations: Any, at: int) -> float:
        """The value that one observation of a batch is full of."""
        array = (observations["here"] if self.has_dict else observations)[at].numpy()
        assert array.shape == self.shape
        assert (array == array.flat[0]).all()
        return float(array.flat[0])

    def random_errors(self, rng: np.random.Generator, n: int) -> FloatArray:
        errors: FloatArray = rng.lognormal(0.0, 2.0, n) * rng.choice([-1.0, 1.0], n)
        errors[rng.random(n) < 0.2] = 0.0
        return errors

    def expect(self, places: list[int], errors: FloatArray) -> None:
        for place, error in zip(places, errors.tolist(), strict=True):
            if place not in self.model.without_next:
                priority = math.pow(abs(error) + self.buffer.eps, self.buffer.alpha)
                self.model.priorities[place] = priority

    def add(self, rng: np.random.Generator) -> None:
        transitions = []
        for env in range(self.model.n_envs):
            self.serial += 1
            terminated, truncated = (rng.random(2) < 0.3).tolist()
            done = terminated or truncated
            # As in SB3's vectorized envs; a buffer that saves memory takes any end for the end
            timeout = truncated and not terminated and not self.model.saving
            obs, next_obs = self.observations[env], 2 * self.serial
            reward = float(rng.integers(-8, 9))
            transitions.append(Transition(self.serial, obs, next_obs, reward, done, timeout))
            self.observations[env] = next_obs + 1 if done else next_obs
        self.buffer.add(
            self.observe([t.obs for t in transitions]),
            self.observe([t.next_obs for t in transitions]),
            np.zeros(self.model.n_envs, dtype=np.int64),
            np.array([t.reward for t in transitions]),
            np.array([t.done for t in transitions]),
            [{"TimeLimit.truncated": t.timeout} for t in transitions],
        )
        self.model.add(transitions)

    def sample(self, rng: np.random.Generator) -> None:
        model, batch_size = self.model, int(rng.integers(1, 10))
        if not any(model.priorities):
            word = "eps" if model.n_stored > len(model.without_next) else "empty|no next"
            with refused(self.buffer, word):
                self.buffer.sample(batch_size)
            return
        before = state_of(self.buffer)
        batch = self.buffer.sample(batch_size)
        assert state_of(self.buffer) == before
        places = batch.indices.tolist()
        assert len(places) == batch_size
        assert all(model.priorities[place] > 0.0 for place in places)
        discounts = [None] * batch_size if batch.discounts is None else batch.discounts.numpy()
        for at, place in enumerate(places):
            obs, total, next_obs, done, discount = model.expected(place)
            assert self.observed(batch.observations, at) == obs
            assert batch.rewards[at].item() == total
            assert next_obs in (self.observed(batch.next_observations, at), -1)
            assert batch.dones[at].item() == done
            assert discounts[at] == discount
        weights = batch.weights.numpy()
        assert (weights >= 0.0).all()
        assert (weights <= 1.0).all()
        self.latest = batch.indices

    def update_the_latest_batch(self, rng: np.random.Generator) -> None:
        if self.latest is None:
            return
        errors = self.random_errors(rng, len(self.latest))
        self.buffer.update_priorities(self.latest, errors)
        self.expect(self.latest.tolist(), errors)

    def update_anything_stored(self, rng: np.random.Generator) -> None:
        if self.model.n_stored == 0:
            return
        n = int(rng.integers(0, 7))
        indices = rng.integers(0, self.model.n_stored, n).astype(np.int32)
        errors = self.random_errors(rng, n)
        self.buffer.update_priorities(indices, th.tensor(errors[:, None]))
        self.expect(indices.tolist(), errors)

    def update_that_is_refused(self, rng: np.random.Generator) -> None:
        good = rng.integers(0, max(self.model.n_stored, 1), 3)
        bad_errors, bad_places = rng.random(3), good.copy()
        bad_errors[rng.integers(3)] = rng.choice(
            [math.nan, math.inf, -math.inf, sys.float_info.max]
        )
        bad_places[rng.integers(3)] = rng.choice([-1, self.model.n_stored, 99])
        with refused(self.buffer, error=IndexError):
            self.buffer.update_priorities(bad_places, rng.random(3))
        if self.model.n_stored and self.buffer.alpha == 1.0:
            with refused(self.buffer):
                self.buffer.update_priorities(good, bad_errors)

    def change_options(self, rng: np.random.Generator) -> None:
        self.buffer.alpha = rng.choice([0.0, 0.5, 1.0])
        self.buffer.eps = rng.choice([0.0, 0.01])

    def reset(self, rng: np.random.Generator) -> None:
        self.buffer.reset()
        model = self.model
        self.model = Model(model.rows, model.n_envs, model.n_steps, model.saving)
        self.latest = None

    def round_trip(self, rng: np.random.Generator) -> None:
        twin = pickle.loads(pickle.dumps(self.buffer))
        assert state_of(twin) == state_of(self.buffer)
        self.buffer = twin
        self.latest = None

    def check(self) -> None:
        model, buffer, tree = self.model, self.buffer, self.buffer.tree
        assert tree.check_valid() == (True, "")
        n = model.n_stored
        assert (buffer.pos, buffer.n_transitions) == (model.pos, n)
        np.testing.assert_allclose(leaves_of(buffer), model.priorities, rtol=1e-12)
        np.testing.assert_array_equal(buffer.priorities, leaves_of(buffer)[:n])
        assert tree.max_priority == leaves_of(buffer).max()
        if tree.total > 0.0:
            assert buffer.probabilities.sum() == pytest.approx(1.0)
        else:
            np.testing.assert_array_equal(buffer.probabilities, np.zeros(n))


def play(options: dict[str, Any], start: int, operations: list[tuple[str, int]]) -> None:
    """A history; each number seeds the details of an operation."""
    history = History(**options)
    rng = np.random.default_rng(start)
    for _ in range(start):
        history.add(rng)
    history.check()
    for name, seed in operations:
        getattr(history, name)(np.random.default_rng(seed))
        history.check()


HISTORIES: dict[str, st.SearchStrategy[Any]] = {
    "options": st.fixed_dictionaries(
        {
            "rows": st.integers(1, 6),
            "n_envs": st.integers(1, 3),
            "n_steps": st.integers(1, 4),
            "mode": st.sampled_from(["plain", "saving", "dict"]),
            "shape": st.sampled_from([(1,), (2, 3)]),
            "alpha": st.sampled_from([0.0, 0.5, 0.6, 1.0]),
            "eps": st.sampled_from([0.0, 1e-6, 0.1]),
            "normalization": st.sampled_from(["batch", "buffer"]),
        }
    ),
    "start": st.integers(0, 9),
    "operations": st.lists(
        st.tuples(
            st.sampled_from(
                ["add"] * 5
                + ["sample"] * 4
                + ["update_the_latest_batch"] * 3
                + ["update_anything_stored"] * 3
                + ["update_that_is_refused", "change_options", "round_trip", "reset"]
            ),
            st.integers(0, 2**32 - 1),
        ),
        min_size=20,
        max_size=30,
    ),
}


# The same histories in every run, and no files
REPEATABLE = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
)


@REPEATABLE
@given(**HISTORIES)
def test_random_histories_match_a_plain_model(
    options: dict[str, Any], start: int, operations: list[tuple[str, int]]
) -> None:
    play(options, start, operations)


@pytest.mark.slow
@settings(REPEATABLE, max_examples=2000)
@given(**HISTORIES)
def test_thousands_of_random_histories_match_a_plain_model(
    options: dict[str, Any], start: int, operations: list[tuple[str, int]]
) -> None:
    play(options, start, operations)


@pytest.mark.parametrize(
    "fault",
    [
        "forgets the overwritten one",
        "maximum never comes down",
        "row of position before add",
        "errors wake what has no next observation",
        "return past the newest row",
        "zero mass stays",
        "steps to the next env",
    ],
)
def test_the_histories_find_broken_twins_out(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kind = PrioritizedReplayBuffer
    add_right, step_right = kind.add, kind._n_step_returns

    def add_after_clearing(self: PrioritizedReplayBuffer, *args: Any) -> None:
        start = self.pos * self.n_envs
        self.tree.fill(start, start + self.n_envs, 0.0)
        add_right(self, *args)

    def add_at_the_highest_ever(self: Any, *args: Any) -> None:
        start = self.pos * self.n_envs
        self.highest = max(getattr(self, "highest", 0.0), self.tree.max_priority or 1.0)
        add_right(self, *args)
        self.tree.fill(start, start + self.n_envs, self.highest)

    def add_one_row_further(self: PrioritizedReplayBuffer, *args: Any) -> None:
        add_right(self, *args)
        start = self.pos * self.n_envs
        self.tree.fill(start, start + self.n_envs, self.tree.max_priority)

    def add_without_zero(self: PrioritizedReplayBuffer, *args: Any) -> None:
        oldest = (self.pos + 1) % self.buffer_size * self.n_envs
        kept = self.tree[oldest : oldest + self.n_envs]
        add_right(self, *args)
        self.tree.update(np.arange(oldest, oldest + self.n_envs), kept)

    def steps_past_the_newest(self: PrioritizedReplayBuffer, *args: Any) -> Any:
        position, self.pos = self.pos, self.pos + 1
        try:
            return step_right(self, *args)
        finally:
            self.pos = position

    def steps_to_the_next_env(self: Any, indices: Any, env: Any) -> Any:
        # Rewards of the environments mixed up
        rewards = self.rewards
        self.rewards = np.roll(rewards, 1, axis=1)
        try:
            return step_right(self, indices, env)
        finally:
            self.rewards = rewards

    twins: dict[str, tuple[str, Any]] = {
        "forgets the overwritten one": ("add", add_after_clearing),
        "maximum never comes down": ("add", add_at_the_highest_ever),
        "row of position before add": ("add", add_one_row_further),
        "errors wake what has no next observation": ("_is_drawable", lambda *args: None),
        "return past the newest row": ("_n_step_returns", steps_past_the_newest),
        "zero mass stays": ("add", add_without_zero),
        "steps to the next env": ("_n_step_returns", steps_to_the_next_env),
    }
    name, twin = twins[fault]
    monkeypatch.setattr(kind, name, twin)
    # No need to shrink what is found
    quick = settings(REPEATABLE, phases=[Phase.generate], max_examples=300)
    with pytest.raises((AssertionError, IndexError)):
        quick(given(**HISTORIES)(play))()
