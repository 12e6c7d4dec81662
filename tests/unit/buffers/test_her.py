"""PrioritizedHerReplayBuffer: which rows may be drawn, at which priority, with which goals."""

import copy
import math
import pickle
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize
from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from buffer_helpers import ACTIONS, Array, FloatArray, assert_same_batches, random_state
from sb3_per import PrioritizedDictReplayBuffer, PrioritizedHerReplayBuffer

GOAL = spaces.Box(-np.inf, np.inf, (1,), np.float32)
SPACE = spaces.Dict(
    {
        "observation": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "achieved_goal": GOAL,
        "desired_goal": GOAL,
    }
)
STRATEGIES = ("future", "final", "episode")
TRUNCATION = "The last trajectory in the replay buffer will be truncated"


class GoalEnv(gym.Env[Any, Any]):
    """Never stepped: it lends its spaces and computes rewards, all of which are negative."""

    observation_space = SPACE
    action_space = ACTIONS

    def compute_reward(self, achieved: Array, desired: Array, infos: Sequence[Any]) -> Array:
        bonuses = np.array([info.get("bonus", 0.0) for info in infos])
        # An environment that leaves its mark
        for info in infos:
            info.clear()
        rewards: Array = -1.0 - np.abs(achieved - desired).sum(axis=-1) - bonuses
        return rewards


def side_by_side(n_envs: int) -> VecEnv:
    return DummyVecEnv([GoalEnv] * n_envs)


def make_her(rows: int, n_envs: int = 1, **options: Any) -> PrioritizedHerReplayBuffer:
    """With alpha = 1 and eps = 0 a priority is the absolute error."""
    return PrioritizedHerReplayBuffer(
        rows * n_envs,
        SPACE,
        ACTIONS,
        side_by_side(n_envs),
        "cpu",
        n_envs,
        **{"alpha": 1.0, "eps": 0.0, **options},
    )


def make_plain(rows: int, n_envs: int = 1, **options: Any) -> HerReplayBuffer:
    """The same of SB3."""
    env = side_by_side(n_envs)
    return HerReplayBuffer(rows * n_envs, SPACE, ACTIONS, env, "cpu", n_envs, **options)


class Transition(NamedTuple):
    """
    What was added. No number of an observation comes twice; it is also the goal achieved there.
    The goal wanted is negative, so that it can be told from any goal achieved.
    """

    number: int
    next_number: int
    wanted: int
    action: int
    reward: float
    done: bool
    timeout: bool


class History:
    """
    Adds the same to all buffers and knows, straight from the specification, what is stored and
    which leaves that means.
    """

    def __init__(self, rows: int, n_envs: int, *buffers: Any) -> None:
        self.rows, self.n_envs, self.buffers = rows, n_envs, list(buffers)
        self.n_rows_added = 0
        self.count = 0
        self.episode = [self._new() for _ in range(n_envs)]
        self.number = [self._new() for _ in range(n_envs)]
        self.stored: dict[int, Transition] = {}
        self.running: list[list[int]] = [[] for _ in range(n_envs)]
        self.over: list[list[list[int]]] = [[] for _ in range(n_envs)]
        self.leaves = np.zeros(rows * n_envs)

    def _new(self) -> int:
        self.count += 1
        return self.count

    @property
    def pos(self) -> int:
        return self.n_rows_added % self.rows

    def place(self, row: int, env: int) -> int:
        return row * self.n_envs + env

    def add(self, *ends: bool | str) -> None:
        """
        One row; for each environment whether its episode goes on (False), terminates (True) or
        runs out of time ("timeout").
        """
        assert len(ends) == self.n_envs
        row, largest = self.pos, self.leaves.max() or 1.0
        added = []
        for env, end in enumerate(ends):
            number, following = self.number[env], self._new()
            action, reward = number % 4, 1000.0 + number
            added.append(
                Transition(
                    number,
                    following,
                    -self.episode[env],
                    action,
                    reward,
                    bool(end),
                    end == "timeout",
                )
            )
            for episode in [rows for rows in self.over[env] if row in rows]:
                self.over[env].remove(episode)
                self.leaves[[self.place(at, env) for at in episode]] = 0.0
            self.stored[self.place(row, env)] = added[-1]
            self.running[env].append(row)
            self.number[env] = following
        for buffer in self.buffers:
            self.add_to(buffer, added)
        self.n_rows_added += 1
        for env, end in enumerate(ends):
            if end:
                self.end(env, largest)

    def end(self, env: int, priority: float) -> None:
        rows = self.running[env]
        # Of an episode longer than the buffer SB3 keeps what came since it last was at its start
        rows = rows[len(rows) - len(rows) % self.rows :]
        if rows:
            self.over[env].append(rows)
            self.leaves[[self.place(row, env) for row in rows]] = priority
        self.running[env] = []
        self.number[env], self.episode[env] = self._new(), self._new()

    def add_to(self, buffer: Any, added: list[Transition]) -> None:
        def observe(numbers: list[int]) -> dict[str, Array]:
            goals = np.array(numbers, dtype=np.float32)[:, None]
            wanted = np.array([t.wanted for t in added], dtype=np.float32)[:, None]
            envs = np.arange(self.n_envs, dtype=np.float32)[:, None]
            return {
                "observation": np.hstack([goals, envs]),
                "achieved_goal": goals,
                "desired_goal": wanted,
            }

        buffer.add(
            observe([t.number for t in added]),
            observe([t.next_number for t in added]),
            np.array([t.action for t in added]),
            np.array([t.reward for t in added]),
            np.array([t.done for t in added]),
            [{"TimeLimit.truncated": t.timeout, "bonus": float(t.number)} for t in added],
        )

    def truncate(self) -> None:
        """The episodes that run are taken as over."""
        newest = (self.pos - 1) % self.rows
        for buffer in self.buffers:
            with warnings.catch_warnings():
                if not isinstance(buffer, PrioritizedHerReplayBuffer):
                    warnings.filterwarnings("ignore", TRUNCATION)
                buffer.truncate_last_trajectory()
            if not isinstance(buffer, PrioritizedHerReplayBuffer):
                # SB3 passes by an episode that just filled the whole ring
                for env, rows in enumerate(self.running):
                    if rows:
                        buffer.dones[newest, env] = buffer.timeouts[newest, env] = 1.0
        largest = self.leaves.max() or 1.0
        for env, rows in enumerate(self.running):
            if len(rows) % self.rows:
                last = self.place(rows[-1], env)
                self.stored[last] = self.stored[last]._replace(done=True, timeout=True)
                self.end(env, largest)

    def add_episodes(self, *lengths: int, last: bool | str = True) -> None:
        """For a single environment: episodes that terminate, one after the other."""
        for length in lengths:
            for step in range(length):
                self.add(last if step == length - 1 else False)

    def expect(self, indices: Sequence[int], errors: Sequence[float]) -> None:
        for index, error in zip(indices, errors, strict=True):
            if self.episode_of(index):
                self.leaves[index] = abs(error)

    def episode_of(self, index: int) -> list[int]:
        """Places of its episode, from the first step on; none if it is not over or is broken."""
        row, env = divmod(index, self.n_envs)
        for rows in self.over[env]:
            if row in rows:
                return [self.place(at, env) for at in rows]
        return []

    def check(self, buffer: PrioritizedHerReplayBuffer) -> None:
        assert buffer.tree.check_valid() == (True, "")
        np.testing.assert_array_equal(buffer.tree[:], self.leaves)
        np.testing.assert_array_equal(buffer.tree[:] > 0.0, buffer.ep_length.ravel() > 0)
        assert buffer.n_transitions == min(self.n_rows_added, self.rows) * self.n_envs
        np.testing.assert_array_equal(buffer.priorities, self.leaves[: buffer.n_transitions])

    def goals(self, index: int, strategy: str) -> list[int]:
        """What a transition may be relabeled with."""
        episode = self.episode_of(index)
        if strategy == "future":
            episode = episode[episode.index(index) :]
        elif strategy == "final":
            episode = episode[-1:]
        return [self.stored[place].next_number for place in episode]

    def check_batch(
        self, batch: Any, strategy: str, n_relabeled: int, bonus: bool = False
    ) -> npt.NDArray[np.bool_]:
        """:return: which ones are relabeled"""
        relabeled = batch.observations["desired_goal"].numpy()[:, 0] > 0
        assert relabeled.sum() == n_relabeled
        for at, index in enumerate(batch.indices.tolist()):
            stored, env = self.stored[index], index % self.n_envs
            assert self.leaves[index] > 0.0
            goal, reward = stored.wanted, stored.reward
            if relabeled[at]:
                goal = int(batch.observations["desired_goal"][at].item())
                assert goal in self.goals(index, strategy)
                reward = -1.0 - abs(stored.next_number - goal) - bonus * stored.number
            for values, number in (
                (batch.observations, stored.number),
                (batch.next_observations, stored.next_number),
            ):
                assert values["observation"][at].tolist() == [number, env]
                assert values["achieved_goal"][at].tolist() == [number]
                assert values["desired_goal"][at].tolist() == [goal]
            assert batch.rewards[at].tolist() == [reward]
            assert batch.actions[at].tolist() == [stored.action]
            assert batch.dones[at].tolist() == [float(stored.done and not stored.timeout)]
        return np.asarray(relabeled)


def sample(buffer: PrioritizedHerReplayBuffer, batch_size: int, env: Any = None) -> Any:
    return buffer.sample(batch_size, env)


# --- which transitions have mass ---


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ending", [0.05, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_random_histories_match_the_specification_and_sb3(
    n_envs: int, ending: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 14))
    strategy = STRATEGIES[seed % 3]
    ours = make_her(rows, n_envs, goal_selection_strategy=strategy)
    theirs = make_plain(rows, n_envs)
    history = History(rows, n_envs, ours, theirs)
    for step in range(8 * rows + 20):
        history.add(*[bool(end) for end in rng.random(n_envs) < ending])
        if rng.random() < 0.04:
            history.truncate()
        history.check(ours)
        for name in ("ep_start", "ep_length", "_current_ep_start", "dones", "timeouts", "rewards"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), name)
        if rng.random() < 0.5:
            indices = rng.integers(0, ours.n_transitions, 4).tolist()
            errors = rng.normal(size=4).tolist()
            ours.update_priorities(indices, errors)
            history.expect(indices, errors)
            history.check(ours)
        if step % 5 == 0 and history.leaves.any():
            history.check_batch(ours.sample(10), strategy, 8)
        if step % 23 == 0:
            twin = pickle.loads(pickle.dumps(ours))
            twin.set_env(ours.env)
            ours = history.buffers[0] = twin


def test_an_episode_has_no_mass_until_it_is_over() -> None:
    buffer = make_her(8)
    history = History(8, 1, buffer)
    for _ in range(3):
        history.add(False)
        np.testing.assert_array_equal(buffer.tree[:], np.zeros(8))
    history.add(True)
    np.testing.assert_array_equal(buffer.tree[:], [1, 1, 1, 1, 0, 0, 0, 0])
    history.add(False)
    np.testing.assert_array_equal(buffer.tree[:], [1, 1, 1, 1, 0, 0, 0, 0])
    assert buffer.priorities.shape == (5,)
    np.testing.assert_array_equal(buffer.probabilities, [0.25, 0.25, 0.25, 0.25, 0.0])


def test_each_env_has_its_own_episodes() -> None:
    buffer = make_her(4, 3)
    history = History(4, 3, buffer)
    history.add(False, True, False)
    np.testing.assert_array_equal(buffer.tree[:3], [0, 1, 0])
    history.add(True, False, False)
    np.testing.assert_array_equal(buffer.tree[:6], [1, 1, 0, 1, 0, 0])
    history.add(False, True, True)
    np.testing.assert_array_equal(buffer.tree[:9], [1, 1, 1, 1, 1, 1, 0, 1, 1])
    history.check(buffer)


def test_an_episode_enters_at_the_largest_priority_of_the_moment_it_ends() -> None:
    buffer = make_her(12)
    history = History(12, 1, buffer)
    history.add_episodes(2)
    buffer.update_priorities([0, 1], [7.0, 2.0])
    history.add(False)
    # What counts is the moment of the end
    buffer.update_priorities([0, 1], [0.25, 0.5])
    history.add(True)
    np.testing.assert_array_equal(buffer.priorities, [0.25, 0.5, 0.5, 0.5])
    buffer.update_priorities([2], [30.0])
    history.add_episodes(1)
    np.testing.assert_array_equal(buffer.priorities, [0.25, 0.5, 30.0, 0.5, 30.0])


def test_an_episode_enters_at_1_when_no_other_has_mass() -> None:
    buffer = make_her(6)
    history = History(6, 1, buffer)
    history.add_episodes(2)
    buffer.update_priorities([0, 1], [0.0, 0.0])
    history.add_episodes(2)
    np.testing.assert_array_equal(buffer.priorities, [0, 0, 1, 1])


def test_what_is_being_overwritten_counts_in_the_largest_priority() -> None:
    buffer = make_her(4)
    history = History(4, 1, buffer)
    history.add_episodes(2, 2)
    buffer.update_priorities(range(4), [2.0, 9.0, 1.0, 1.0])
    history.add(True)
    # The episode of rows 0 and 1 is broken: row 1, which is still there, can't be drawn
    np.testing.assert_array_equal(buffer.tree[:], [9, 0, 1, 1])


def test_the_maximum_falls_with_the_episode_that_held_it() -> None:
    buffer = make_her(4)
    history = History(4, 1, buffer)
    history.add_episodes(2, 2)
    buffer.update_priorities(range(4), [1000.0, 1.0, 1.0, 1.5])
    history.add(False)
    assert buffer.tree.max_priority == 1.5
    history.add(True)
    np.testing.assert_array_equal(buffer.tree[:], [1.5, 1.5, 1.0, 1.5])


@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_broken_episode_loses_its_mass_at_once(n_envs: int) -> None:
    buffer = make_her(6, n_envs)
    history = History(6, n_envs, buffer)
    others = [False] * (n_envs - 1)
    for step in range(6):
        # In the last env two episodes of three steps
        history.add(*others, step in (2, 5))
    expected = np.zeros((6, n_envs))
    expected[:, -1] = 1.0
    np.testing.assert_array_equal(buffer.tree[:], expected.ravel())
    history.add(*others, False)
    expected[:3, -1] = 0.0
    np.testing.assert_array_equal(buffer.tree[:], expected.ravel())
    history.check(buffer)


def test_an_episode_across_the_end_of_the_ring() -> None:
    buffer = make_her(7, n_sampled_goal=1)
    history = History(7, 1, buffer)
    history.add_episodes(3, 2, 4)
    # Rows 5, 6, 0, 1; the first episode is broken, its row 2 is left over
    np.testing.assert_array_equal(buffer.tree[:], [1, 1, 0, 1, 1, 1, 1])
    assert history.goals(0, "future") == [history.stored[0].next_number, history.stored[1][1]]
    for _ in range(20):
        history.check_batch(buffer.sample(12), "future", 6)
    history.add_episodes(1)
    np.testing.assert_array_equal(buffer.tree[:], [1, 1, 1, 1, 1, 1, 1])
    history.add_episodes(3)
    # Row 5 was overwritten, and with it the episode that went on in rows 0 and 1
    np.testing.assert_array_equal(buffer.tree[:], [0, 0, 1, 1, 1, 1, 0])
    history.check(buffer)


@pytest.mark.parametrize("length", [5, 6, 7, 11, 13])
def test_episodes_longer_than_the_buffer_are_as_in_sb3(length: int) -> None:
    ours, theirs = make_her(6), make_plain(6)
    history = History(6, 1, ours, theirs)
    history.add_episodes(2, length)
    np.testing.assert_array_equal(ours.tree[:] > 0, theirs.ep_length[:, 0] > 0)
    history.check(ours)
    history.add_episodes(2, 1)
    np.testing.assert_array_equal(ours.tree[:] > 0, theirs.ep_length[:, 0] > 0)
    history.check(ours)
    history.check_batch(ours.sample(20), "future", 16)


# --- what a batch holds ---


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_batch_has_stored_transitions_with_goals_of_their_own_episode(
    n_envs: int, strategy: str
) -> None:
    buffer = make_her(20, n_envs, goal_selection_strategy=strategy)
    history = History(20, n_envs, buffer)
    rng = np.random.default_rng(0)
    for _ in range(33):
        history.add(*rng.choice([0, 0, 0, 1], n_envs).astype(bool).tolist())
    seen: dict[int, set[int]] = {}
    for _ in range(60):
        batch = sample(buffer, 50)
        relabeled = history.check_batch(batch, strategy, 40)
        for at in np.flatnonzero(relabeled):
            goal = int(batch.observations["desired_goal"][at].item())
            seen.setdefault(int(batch.indices[at]), set()).add(goal)
    # All that may be drawn was drawn, with every goal that it may get
    assert set(seen) == set(np.flatnonzero(history.leaves).tolist())
    for index, goals in seen.items():
        assert goals == set(history.goals(index, strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_are_drawn_uniformly(strategy: str) -> None:
    buffer = make_her(8, goal_selection_strategy=strategy, n_sampled_goal=math.inf)
    history = History(8, 1, buffer)
    history.add_episodes(4)
    n = 4000
    batch = sample(buffer, n)
    for index in range(4):
        goals = batch.observations["desired_goal"].numpy()[batch.indices == index, 0]
        possible = history.goals(index, strategy)
        assert len(goals) == n / 4
        for goal in possible:
            share = 1.0 / len(possible)
            # Four standard deviations
            bound = 4.0 * math.sqrt(share * (1.0 - share) / len(goals))
            assert np.mean(goals == goal) == pytest.approx(share, abs=bound + 1e-9)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 64])
@pytest.mark.parametrize("n_sampled_goal", [0, 1, 2, 4, 9])
def test_how_many_are_relabeled(n_sampled_goal: int, batch_size: int) -> None:
    buffer = make_her(10, n_sampled_goal=n_sampled_goal)
    history = History(10, 1, buffer)
    history.add_episodes(3, 4)
    # As SB3 rounds
    expected = int((1 - 1.0 / (n_sampled_goal + 1)) * batch_size)
    for _ in range(5):
        history.check_batch(buffer.sample(batch_size), "future", expected)


def relabeled_shares(buffer: PrioritizedHerReplayBuffer, history: History, n: int) -> FloatArray:
    """How often each place in a batch of 10 is relabeled; four of five are."""
    counts = np.zeros(10)
    for _ in range(n):
        batch = sample(buffer, 10)
        assert (np.diff(batch.indices) >= 0).all()
        counts += history.check_batch(batch, "future", 8)
    return counts / n


def assert_relabeled_at_random(shares: FloatArray) -> None:
    # Five standard deviations of 400 draws
    np.testing.assert_allclose(shares, 0.8, atol=5.0 * math.sqrt(0.8 * 0.2 / 400))


def test_which_ones_are_relabeled_is_random() -> None:
    # The draw comes in the order of the rows: the first ones would always be the oldest.
    buffer = make_her(10)
    history = History(10, 1, buffer)
    history.add_episodes(3, 2, 4, 1)
    assert_relabeled_at_random(relabeled_shares(buffer, history, 400))


def test_the_check_finds_the_first_ones_of_a_draw_out(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make_her(10)
    history = History(10, 1, buffer)
    history.add_episodes(3, 2, 4, 1)
    monkeypatch.setattr(np.random, "permutation", np.arange)
    with pytest.raises(AssertionError):
        assert_relabeled_at_random(relabeled_shares(buffer, history, 400))


def test_relabelling_leaves_the_stored_transitions_alone() -> None:
    buffer = make_her(10, 2)
    history = History(10, 2, buffer)
    for step in range(13):
        history.add(step % 3 == 2, step % 4 == 3)
    stored = copy.deepcopy((buffer.observations, buffer.next_observations, buffer.rewards))
    for _ in range(5):
        batch = sample(buffer, 20)
        for values in (batch.observations, batch.next_observations):
            for value in values.values():
                value.zero_()
    for mine, its in zip((buffer.observations, buffer.next_observations), stored[:2], strict=True):
        for key in mine:
            np.testing.assert_array_equal(mine[key], its[key])
    np.testing.assert_array_equal(buffer.rewards, stored[2])


@pytest.mark.parametrize("end", [True, "timeout"])
@pytest.mark.parametrize("handled", [True, False])
def test_timeouts_are_no_end_unless_told_otherwise(handled: bool, end: bool | str) -> None:
    buffer = make_her(4, handle_timeout_termination=handled)
    history = History(4, 1, buffer)
    history.add_episodes(3, last=end)
    batch = sample(buffer, 9)
    last = batch.indices == 2
    assert last.any()
    expected = last & (end is True or not handled)
    np.testing.assert_array_equal(batch.dones.numpy()[:, 0], expected)


def normalizer(n_envs: int) -> VecNormalize:
    env = VecNormalize(side_by_side(n_envs), norm_obs_keys=["observation", "desired_goal"])
    rng = np.random.default_rng(0)
    for statistics in env.obs_rms.values():
        assert isinstance(statistics, RunningMeanStd)
        statistics.mean = rng.normal(20.0, size=statistics.mean.shape)
        statistics.var = rng.uniform(100.0, 900.0, statistics.var.shape)
    env.ret_rms.var = np.array(250_000.0)
    return env


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("relabeled", [False, True])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_rows_are_those_of_sb3_to_the_last_bit(
    n_envs: int, relabeled: bool, normalized: bool
) -> None:
    # None or all of them relabeled; the goal of the strategy "final" is no matter of chance.
    options: dict[str, Any] = {
        "n_sampled_goal": math.inf if relabeled else 0,
        "goal_selection_strategy": "final",
    }
    ours, theirs = make_her(9, n_envs, **options), make_plain(9, n_envs, **options)
    history = History(9, n_envs, ours, theirs)
    for step in range(14):
        ends = [(step + env) % 4 == 3 for env in range(n_envs)]
        history.add(*["timeout" if end and step % 3 == 0 else end for end in ends])
    env = normalizer(n_envs) if normalized else None
    batch = sample(ours, 40, env)
    rows, envs = np.divmod(batch.indices, n_envs)
    get = theirs._get_virtual_samples if relabeled else theirs._get_real_samples
    expected: Any = get(rows, envs, env)
    pairs = [(getattr(batch, name), getattr(expected, name)) for name in ("actions", "dones")]
    pairs.append((batch.rewards, expected.rewards))
    for name in ("observations", "next_observations"):
        mine, its = getattr(batch, name), getattr(expected, name)
        assert set(mine) == set(its)
        pairs.extend((mine[key], its[key]) for key in mine)
    for value, twin in pairs:
        assert (value.dtype, value.shape) == (twin.dtype, twin.shape)
        assert value.numpy().tobytes() == twin.numpy().tobytes()


@pytest.mark.parametrize("n_envs", [1, 3])
def test_infos_are_handed_to_compute_reward_if_asked_for(n_envs: int) -> None:
    buffer = make_her(9, n_envs, copy_info_dict=True)
    history = History(9, n_envs, buffer)
    for step in range(14):
        history.add(*[(step + env) % 4 == 3 for env in range(n_envs)])
    # Repeatedly: the environment changes the infos that it gets
    for _ in range(3):
        history.check_batch(buffer.sample(20), "future", 16, bonus=True)


def test_infos_are_not_kept_otherwise() -> None:
    buffer = make_her(9)
    History(9, 1, buffer).add_episodes(4)
    assert not any(buffer.infos.ravel())


# --- priorities, weights, indices ---


@pytest.mark.parametrize("normalization", ["batch", "buffer"])
def test_weights_and_indices_agree_with_the_leaves(normalization: str) -> None:
    buffer = make_her(12, 2, beta=0.5, weight_normalization=normalization)
    history = History(12, 2, buffer)
    for step in range(15):
        history.add(step % 3 == 2, step % 5 == 4)
    indices = np.flatnonzero(history.leaves)
    errors = np.linspace(0.5, 4.0, len(indices))
    buffer.update_priorities(indices, errors)
    history.expect(indices.tolist(), errors.tolist())
    history.check(buffer)
    counts = np.zeros(24)
    for _ in range(20):
        batch = sample(buffer, 100)
        history.check_batch(batch, "future", 80)
        masses = history.leaves[batch.indices]
        smallest = masses.min() if normalization == "batch" else errors.min()
        expected = (smallest / masses) ** 0.5
        np.testing.assert_allclose(batch.weights.numpy()[:, 0], expected, rtol=1e-6)
        counts += np.bincount(batch.indices, minlength=24)
    # A stratified draw takes each as often as its mass says, give or take one a batch
    np.testing.assert_allclose(counts / 20, 100 * history.leaves / history.leaves.sum(), atol=1.0)


def test_an_update_on_unfinished_rows_changes_nothing() -> None:
    buffer = make_her(8, 2)
    history = History(8, 2, buffer)
    for step in range(5):
        history.add(step == 2, False)
    np.testing.assert_array_equal(buffer.priorities, [1, 0, 1, 0, 1, 0, 0, 0, 0, 0])
    buffer.update_priorities(np.arange(10), np.full(10, 3.0))
    np.testing.assert_array_equal(buffer.priorities, [3, 0, 3, 0, 3, 0, 0, 0, 0, 0])
    assert buffer.tree.check_valid() == (True, "")


def test_an_update_on_broken_rows_changes_nothing() -> None:
    buffer = make_her(6)
    history = History(6, 1, buffer)
    history.add_episodes(3, 3)
    batch = buffer.sample(12)
    history.add(False)
    # Whether the errors are those of the latest batch or of rows that somebody names
    for indices in (batch.indices, np.arange(6)):
        buffer.update_priorities(indices, np.full(len(indices), 3.0))
        np.testing.assert_array_equal(buffer.tree[:], [0, 0, 0, 3, 3, 3])


def test_late_errors_count_for_the_episode_that_is_there_by_then() -> None:
    buffer = make_her(4)
    history = History(4, 1, buffer)
    history.add_episodes(2, 2)
    batch = buffer.sample(8)
    history.add_episodes(2)
    history.add(False)
    buffer.update_priorities(batch.indices, np.full(8, 5.0))
    # The episode of rows 2 and 3 gave way to one that still runs
    np.testing.assert_array_equal(buffer.tree[:], [5, 5, 0, 0])


@pytest.mark.parametrize("n_envs", [1, 3])
def test_sampling_before_the_first_end_is_refused_with_a_hint(n_envs: int) -> None:
    buffer = make_her(6, n_envs)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(2)
    history = History(6, n_envs, buffer)
    for _ in range(3):
        history.add(*[False] * n_envs)
    before = random_state()
    with pytest.raises(ValueError, match=rf"none of the {3 * n_envs} .*`learning_starts`"):
        buffer.sample(2)
    assert random_state() == before
    history.check(buffer)


def test_no_error_left_is_refused_naming_eps() -> None:
    buffer = make_her(6)
    history = History(6, 1, buffer)
    history.add_episodes(3)
    buffer.update_priorities([0, 1, 2], [0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="`eps` is 0"):
        buffer.sample(2)


# --- episodes that are cut off ---


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_adds", [4, 11])
def test_truncation_lets_running_episodes_in(n_adds: int, n_envs: int) -> None:
    buffer = make_her(6, n_envs)
    history = History(6, n_envs, buffer)
    for step in range(n_adds):
        # Env 0 ends with the last row, so that there is nothing to cut off
        history.add(step == n_adds - 1, *[step == n_adds - 3] * (n_envs - 1))
        drawable = np.flatnonzero(history.leaves)
        buffer.update_priorities(drawable, np.full(len(drawable), 0.5))
        history.expect(drawable.tolist(), [0.5] * len(drawable))
    history.add(*[False] * n_envs)
    history.truncate()
    history.check(buffer)
    newest_row = n_adds % 6
    assert (buffer.tree[:].reshape(6, n_envs)[newest_row] > 0.0).all()
    batch = sample(buffer, 30)
    history.check_batch(batch, "future", 24)
    # The cut is no end of the task
    newest = batch.indices // n_envs == newest_row
    assert newest.any()
    assert not batch.dones.numpy()[newest].any()
    # Once is enough
    buffer.truncate_last_trajectory()
    history.check(buffer)
    for _ in range(7):
        history.add(*[True] * n_envs)
        history.check(buffer)


def test_truncation_enters_at_the_largest_priority_of_the_moment() -> None:
    buffer = make_her(6)
    history = History(6, 1, buffer)
    history.add_episodes(2)
    history.add(False)
    buffer.update_priorities([0, 1], [5.0, 0.5])
    buffer.truncate_last_trajectory()
    np.testing.assert_array_equal(buffer.priorities, [5.0, 0.5, 5.0])


# --- pickles, reset, buffers of SB3 ---


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_adds", [0, 5, 14])
def test_a_pickle_brings_everything_back_but_the_env(n_adds: int, n_envs: int) -> None:
    buffer = make_her(8, n_envs, beta=0.25, n_sampled_goal=2, goal_selection_strategy="episode")
    history = History(8, n_envs, buffer)
    for step in range(n_adds):
        history.add(*[(step + env) % 3 == 2 for env in range(n_envs)])
    n = buffer.n_transitions
    buffer.update_priorities(np.arange(n), np.linspace(0.1, 5.0, n))
    content = pickle.dumps(buffer)
    assert b"GoalEnv" not in content
    assert buffer.env is not None
    twin = pickle.loads(content)
    assert twin.env is None
    if n:
        with pytest.raises(AssertionError, match="VecEnv"):
            twin.sample(4)
    twin.set_env(buffer.env)
    np.testing.assert_array_equal(twin.tree[:], buffer.tree[:])
    for name in ("pos", "full", "alpha", "beta", "eps", "her_ratio", "goal_selection_strategy"):
        assert getattr(twin, name) == getattr(buffer, name)
    if n:
        assert_same_batches(twin, buffer)
    history.buffers.append(twin)
    for _ in range(5):
        history.add(*[True] * n_envs)
        np.testing.assert_array_equal(twin.tree[:], buffer.tree[:])
    assert_same_batches(twin, buffer)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_adds", [2, 5, 14])
def test_after_a_reset_it_is_as_new(n_adds: int, n_envs: int) -> None:
    buffer, new = make_her(8, n_envs), make_her(8, n_envs)
    old = History(8, n_envs, buffer)
    for step in range(n_adds):
        old.add(*[(step + env) % 4 == 3 for env in range(n_envs)])
    buffer.reset()
    assert buffer.n_transitions == 0
    np.testing.assert_array_equal(buffer.tree[:], np.zeros(8 * n_envs))
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(2)
    history = History(8, n_envs, buffer, new)
    for step in range(13):
        history.add(*[(step + env) % 3 == 2 for env in range(n_envs)])
        history.check(buffer)
        history.check(new)
    assert_same_batches(buffer, new)
    for name in ("ep_start", "ep_length", "_current_ep_start"):
        np.testing.assert_array_equal(getattr(buffer, name), getattr(new, name))


@pytest.mark.parametrize("unpickled", [False, True])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_adds", [0, 2, 5, 14])
def test_a_buffer_of_sb3_is_taken_over(n_adds: int, n_envs: int, unpickled: bool) -> None:
    goals: dict[str, Any] = {"n_sampled_goal": 3, "goal_selection_strategy": "episode"}
    options: dict[str, Any] = {"alpha": 1.0, "eps": 0.0, "beta": 0.75}
    plain, twin = make_plain(8, n_envs, **goals), make_her(8, n_envs, **goals, **options)
    history = History(8, n_envs, plain, twin)
    for step in range(n_adds):
        history.add(*[(step + env) % 4 == 3 for env in range(n_envs)])
    if unpickled:
        plain = pickle.loads(pickle.dumps(plain))
    buffer = PrioritizedHerReplayBuffer.from_replay_buffer(plain, **options)
    assert type(buffer) is PrioritizedHerReplayBuffer
    if unpickled:
        assert buffer.env is None
        buffer.set_env(side_by_side(n_envs))
    history.buffers = [buffer, twin]
    history.check(buffer)
    assert {name: getattr(buffer, name) for name in options} == options
    assert (buffer.n_sampled_goal, buffer.her_ratio) == (3, 0.75)
    assert buffer.goal_selection_strategy is GoalSelectionStrategy.EPISODE
    # Episodes that run go on
    for step in range(6):
        history.add(*[step % 2 == 1] * n_envs)
        history.check(buffer)
    assert_same_batches(buffer, twin)
    history.check_batch(buffer.sample(20), "episode", 15)


def test_buffers_of_another_kind_are_not_taken_over() -> None:
    plain = DictReplayBuffer(6, SPACE, ACTIONS, "cpu")
    with pytest.raises(ValueError, match="DictReplayBuffer"):
        PrioritizedHerReplayBuffer.from_replay_buffer(plain)
    with pytest.raises(ValueError, match="alpha"):
        PrioritizedHerReplayBuffer.from_replay_buffer(make_plain(4), alpha=-1.0)
    with pytest.raises(ValueError, match="PrioritizedHerReplayBuffer"):
        PrioritizedHerReplayBuffer.from_replay_buffer(make_her(4))


# --- construction ---


def test_it_is_a_buffer_of_both_families() -> None:
    buffer = make_her(4)
    assert isinstance(buffer, PrioritizedDictReplayBuffer)
    assert isinstance(buffer, HerReplayBuffer)
    for name in ("n_sampled_goal", "goal_selection_strategy", "copy_info_dict", "her_ratio"):
        assert getattr(buffer, name) == getattr(make_plain(4), name)
    by_enum = make_her(4, goal_selection_strategy=GoalSelectionStrategy.FINAL)
    assert (
        by_enum.goal_selection_strategy
        == make_her(4, goal_selection_strategy="final").goal_selection_strategy
    )


@pytest.mark.parametrize("n_steps", [2, 3])
def test_n_step_returns_are_refused_wherever_they_come_in(n_steps: int) -> None:
    with pytest.raises(ValueError, match=f"`n_steps={n_steps}`"):
        make_her(4, n_steps=n_steps)
    with pytest.raises(ValueError, match=f"`n_steps={n_steps}`"):
        PrioritizedHerReplayBuffer.from_replay_buffer(make_plain(4), n_steps=n_steps)
    buffer = make_her(4, n_steps=1)
    assert buffer.n_steps == 1
    with pytest.raises(ValueError, match=f"{n_steps}"):
        buffer.n_steps = n_steps
    assert buffer.n_steps == 1


def test_saving_memory_is_refused_and_both_are_named() -> None:
    with pytest.raises(ValueError, match=r"`optimize_memory_usage=True`.*Dict"):
        make_her(4, optimize_memory_usage=True, handle_timeout_termination=False)


def test_other_spaces_and_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="Box"):
        PrioritizedHerReplayBuffer(10**15, GOAL, ACTIONS, side_by_side(1))
    with pytest.raises(ValueError, match=r"`alpha`.*-1"):
        make_her(10**15, alpha=-1)
    with pytest.raises(TypeError, match="color"):
        make_her(4, color=1)


def test_batches_are_on_the_buffers_device_and_of_the_types_of_sb3() -> None:
    buffer = make_her(6)
    History(6, 1, buffer).add_episodes(4)
    batch = sample(buffer, 10)
    for value in (*batch.observations.values(), batch.rewards, batch.dones, batch.weights):
        assert value.dtype == th.float32
        assert value.device == buffer.device
    assert batch.discounts is None
    assert batch.indices.dtype == np.int64


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, None, "4"])
def test_a_number_of_goals_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"`n_sampled_goal` must be at least 0, got {value!r}"):
        make_her(4, n_sampled_goal=value)


@pytest.mark.parametrize("value", ["x", "", None, 3])
def test_an_unknown_way_to_choose_goals_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"`goal_selection_strategy`.*'future'.*got {value!r}"):
        make_her(4, goal_selection_strategy=value)
