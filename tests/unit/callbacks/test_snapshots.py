"""Snapshots of a replay buffer: their times and their content."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import DQN
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_per import PERDQN
from sb3_per.callbacks import ReplaySnapshot, ReplaySnapshotCallback, td_errors_in_buffer

Make = Callable[..., Any]

NO_TIMEOUTS = {"handle_timeout_termination": False}


def take(model: Any, timesteps: int, **options: Any) -> list[ReplaySnapshot]:
    callback = ReplaySnapshotCallback(**{"episodes": (), **options})
    model.learn(timesteps, callback=callback)
    return callback.snapshots


def moments(snapshots: list[ReplaySnapshot]) -> list[tuple[int, int, str, int]]:
    return [(s.episode, s.timesteps, s.reason, s.n_transitions) for s in snapshots]


def test_snapshots_after_the_last_transition_of_an_episode(make_model: Make) -> None:
    # Episodes of 7, 8, 7, 8, ... steps
    model = make_model(learning_starts=9)
    snapshots = take(model, 37, episodes=(5, 1, 3, 3, 9))
    assert moments(snapshots) == [
        (1, 7, "episode", 7),
        (3, 22, "episode", 22),
        (5, 37, "episode", 37),  # the very last step of training
    ]


def test_number_0_is_just_before_the_first_update(make_model: Make) -> None:
    model = make_model(learning_starts=9, train_freq=4)
    updates: list[int] = []

    class Watching(ReplaySnapshotCallback):
        def _take(self, *arguments: Any) -> bool:
            updates.append(model._n_updates)
            return super()._take(*arguments)

    callback = Watching((0, 2))
    model.learn(40, callback=callback)
    assert moments(callback.snapshots) == [(0, 12, "episode", 12), (2, 15, "episode", 15)]
    assert updates == [0, 1]


def test_number_0_comes_at_the_end_if_there_is_no_update(make_model: Make) -> None:
    model = make_model(learning_starts=1000)
    assert moments(take(model, 12, episodes=(0, 1))) == [
        (1, 7, "episode", 7),
        (0, 12, "episode", 12),
    ]


def test_snapshots_along_time(make_env: Make, make_model: Make) -> None:
    model = make_model(PERDQN, make_env(4), train_freq=2)
    snapshots = take(model, 48, freq=10)
    # Multiples of 10 are reached by steps of 4
    assert [s.timesteps for s in snapshots] == [12, 20, 32, 40]
    assert [s.n_transitions for s in snapshots] == [12, 20, 32, 40]
    # Each env has finished one episode after 7 steps
    assert [s.episode for s in snapshots] == [0, 0, 4, 4]
    assert {s.reason for s in snapshots} == {"freq"}


def test_several_episodes_that_end_at_once(make_env: Make, make_model: Make) -> None:
    model = make_model(PERDQN, make_env(3))
    snapshots = take(model, 30, episodes=(1, 2, 3, 4))
    assert moments(snapshots) == [(n, 21, "episode", 21) for n in (1, 2, 3)]


def test_training_goes_on_where_it_was(make_model: Make) -> None:
    model = make_model()
    callback = ReplaySnapshotCallback((0, 1, 2, 3), freq=10)
    for _ in range(3):
        model.learn(8, callback=callback, reset_num_timesteps=False)
    assert moments(callback.snapshots) == [
        (1, 7, "episode", 7),
        # The start of learning has not come when the first call ends
        (0, 8, "episode", 8),
        (1, 10, "freq", 10),
        (2, 15, "episode", 15),
        (2, 20, "freq", 20),
        (3, 22, "episode", 22),
    ]
    # Counted from 0 again, with what is in the buffer
    model.learn(8, callback=callback)
    assert moments(callback.snapshots[6:]) == [(1, 7, "episode", 31), (0, 8, "episode", 32)]


def test_number_0_is_not_repeated_when_training_goes_on(make_model: Make) -> None:
    model = make_model(learning_starts=3)
    callback = ReplaySnapshotCallback((0,))
    model.learn(10, callback=callback)
    model.learn(10, callback=callback, reset_num_timesteps=False)
    assert moments(callback.snapshots) == [(0, 4, "episode", 4)]


@pytest.mark.parametrize("prioritization", ["proportional", "rank"])
def test_contents_of_a_prioritized_buffer(
    prioritization: str, make_env: Make, make_model: Make
) -> None:
    model = make_model(PERDQN, make_env(2), alpha=0.7, prioritization=prioritization)
    (snapshot,) = take(model, 100, freq=100)
    buffer = model.replay_buffer
    assert snapshot.indices.tolist() == list(range(60))
    assert snapshot.priorities is not None
    assert snapshot.priorities.tolist() == buffer.priorities.tolist()
    assert snapshot.probabilities.tolist() == buffer.probabilities.tolist()
    assert snapshot.td_errors.tolist() == td_errors_in_buffer(model).tolist()
    assert snapshot.observations is not None
    assert snapshot.observations.tolist() == buffer.observations.reshape(60, 2).tolist()
    # 50 rows were added, 30 are kept: row 19 is the newest, row 20 the oldest
    rows = snapshot.indices // 2
    assert snapshot.ages.tolist() == (np.where(rows < 20, 19 - rows, 49 - rows) * 2).tolist()
    assert [snapshot.ages[i] for i in (38, 39, 36, 40)] == [0, 0, 2, 58]


def test_contents_of_a_plain_buffer(make_env: Make, make_model: Make) -> None:
    model = make_model(DQN, make_env(2))
    (snapshot,) = take(model, 40, freq=40)
    assert snapshot.priorities is None
    assert snapshot.weights is None
    assert snapshot.probabilities.tolist() == [1 / 40] * 40
    # One from each of eight equal masses, as in training
    assert snapshot.sampled.shape == (4096,)
    assert (snapshot.sampled.reshape(-1, 8) // 5 == np.arange(8)).all()


@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_what_cannot_be_drawn_is_left_out(algorithm: Any, make_env: Make, make_model: Make) -> None:
    options = {"optimize_memory_usage": True, "replay_buffer_kwargs": NO_TIMEOUTS}
    model = make_model(algorithm, make_env(2), **options)
    (snapshot,) = take(model, 74, freq=74)
    assert snapshot.n_transitions == 60
    assert snapshot.indices.tolist() == [i for i in range(60) if i not in (14, 15)]
    assert snapshot.probabilities.sum() == pytest.approx(1.0)
    assert snapshot.probabilities.min() > 0.0


def test_with_hindsight_running_episodes_are_left_out(make_env: Make, make_model: Make) -> None:
    options = {"replay_buffer_class": HerReplayBuffer, "learning_starts": 10}
    model = make_model(PERDQN, make_env(kind="goal"), **options)
    # Before an episode is over there is nothing to look at
    snapshots = take(model, 20, freq=5, episodes=(0,))
    assert [(s.timesteps, len(s.indices)) for s in snapshots] == [
        (7, 7),
        (10, 7),
        (11, 7),
        (15, 15),
        (20, 15),
    ]
    assert snapshots[0].observations is None


def test_large_observations_are_not_kept(make_env: Make, make_model: Make) -> None:
    model = make_model(DQN, make_env(kind="image"), policy_kwargs={"net_arch": [2]})
    (snapshot,) = take(model, 10, freq=10)
    assert snapshot.observations is None
    assert snapshot.td_errors.shape == (10,)


@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_of_many_transitions_a_random_choice(
    algorithm: Any, make_env: Make, make_model: Make
) -> None:
    model = make_model(algorithm, make_env(2))
    snapshots = take(model, 60, freq=20, max_transitions=16)
    for snapshot in snapshots:
        assert snapshot.indices.shape == snapshot.td_errors.shape == snapshot.ages.shape == (16,)
        assert (np.diff(snapshot.indices) > 0).all()
        assert snapshot.indices.max() < snapshot.n_transitions
        assert snapshot.sampled.min() >= 0
        assert snapshot.sampled.max() == 15
    first, _, last = snapshots
    assert first.indices.tolist() != last.indices.tolist()
    everything = td_errors_in_buffer(model)
    np.testing.assert_allclose(last.td_errors, everything[last.indices], rtol=1e-5)
    # Of the whole buffer, not of the choice
    if algorithm is PERDQN:
        expected = model.replay_buffer.probabilities[last.indices]
    else:
        expected = np.full(16, 1 / 60)
    assert last.probabilities.tolist() == expected.tolist()


def test_draws_follow_the_probabilities(make_model: Make) -> None:
    model = make_model(alpha=1.0)
    (snapshot,) = take(model, 60, freq=60, n_draws=200_000)
    frequencies = np.bincount(snapshot.sampled, minlength=60) / 200_000
    # Stratified draws vary less than independent ones
    spread = np.sqrt(snapshot.probabilities * (1 - snapshot.probabilities) / 200_000)
    assert (np.abs(frequencies - snapshot.probabilities) < 5 * spread + 1e-4).all()
    assert snapshot.probabilities.max() > 3 * snapshot.probabilities.min()


def test_a_transition_without_mass_is_never_among_the_draws(make_model: Make) -> None:
    model = make_model(priority_eps=0.0, learning_starts=1000)
    model.learn(20)
    model.replay_buffer.update_priorities([0, 3, 19], [0.0, 0.0, 0.0])
    snapshots = ReplaySnapshotCallback((0,))
    snapshots.init_callback(model)
    assert snapshots._take(0, 20, "episode")
    assert not np.isin(snapshots.snapshots[0].sampled, [0, 3, 19]).any()
    # The end of the range belongs to the last that has mass
    random: Any = type("Random", (), {"random": lambda self, n: np.full(n, np.nextafter(1.0, 0))})
    snapshots._rng = random()
    assert snapshots._draw(np.array([0.0, 0.1, 0.3, 0.0]) / 3).max() == 2
    model.replay_buffer.update_priorities(np.arange(20), np.zeros(20))
    assert not snapshots._take(0, 20, "episode")


@pytest.mark.parametrize("prioritization", ["proportional", "rank"])
@pytest.mark.parametrize("n_draws", [64, 61])
def test_weights_are_those_of_batches(n_draws: int, prioritization: str, make_model: Make) -> None:
    model = make_model(beta=0.5, beta_final=0.5, prioritization=prioritization)
    (snapshot,) = take(model, 60, freq=60, n_draws=n_draws)
    assert snapshot.weights is not None
    assert snapshot.weights.shape == (n_draws,)
    for start in range(0, n_draws, 8):
        probabilities = snapshot.probabilities[snapshot.sampled[start : start + 8]]
        expected = (probabilities.min() / probabilities) ** 0.5
        np.testing.assert_allclose(snapshot.weights[start : start + 8], expected, rtol=1e-12)


@pytest.mark.parametrize("prioritization", ["proportional", "rank"])
def test_weights_over_the_largest_of_the_buffer(prioritization: str, make_model: Make) -> None:
    options = {"weight_normalization": "buffer", "prioritization": prioritization}
    model = make_model(beta=0.5, beta_final=0.5, **options)
    (snapshot,) = take(model, 60, freq=60)
    probabilities = model.replay_buffer.probabilities
    assert snapshot.weights is not None
    expected = (probabilities.min() / probabilities[snapshot.sampled]) ** 0.5
    np.testing.assert_allclose(snapshot.weights, expected, rtol=1e-12)


def test_the_same_seed_gives_the_same_snapshots(make_model: Make) -> None:
    def one(seed: int | None) -> ReplaySnapshot:
        return take(make_model(seed=seed), 60, freq=60, max_transitions=20)[0]

    first, second, other = one(3), one(3), one(4)
    assert pickle.dumps(first) == pickle.dumps(second)
    assert first.indices.tolist() != other.indices.tolist()


def test_a_line_for_each_snapshot_on_request(
    capsys: pytest.CaptureFixture[str], make_model: Make
) -> None:
    take(make_model(), 8, episodes=(1,), verbose=1)
    assert capsys.readouterr().out == "Replay snapshot at 7 steps (episode, 1 episodes)\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": (3, -1)}, r"`episodes` .* got -1"),
        ({"episodes": (1.5,)}, r"`episodes` .* got 1\.5"),
        ({"freq": 0}, "`freq` .* got 0"),
        ({"max_transitions": 0}, "`max_transitions` .* got 0"),
        ({"n_draws": -2}, "`n_draws` .* got -2"),
    ],
)
def test_snapshot_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplaySnapshotCallback(**options)
