"""The callbacks inside whole trainings: nothing changes, and what they write can be read back."""

import csv
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    LogEveryNTimesteps,
    StopTrainingOnMaxEpisodes,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import Logger, configure
from stable_baselines3.common.save_util import load_from_pkl

from sb3_per import PERDQN, PERLoggerCallback, ReplaySnapshotCallback

SMALL: dict[str, Any] = {
    "buffer_size": 200,
    "learning_starts": 50,
    "train_freq": 1,
    "batch_size": 8,
    "target_update_interval": 16,
    "learning_rate": 0.01,
    "policy_kwargs": {"net_arch": [8]},
    "seed": 0,
    "device": "cpu",
}
QUANTILES = [f"per/priority_quantile_{percent}" for percent in ("05", "25", "50", "75", "95")]
REPLAYS = ["per/replay_age_mean", "per/share_never_replayed"]
HISTOGRAMS = [f"per/{what}_histogram" for what in ("priority", "replay_age", "replay_count")]


class EndlessEnv(gym.Env[npt.NDArray[np.float32], Any]):
    """Ends after ``length`` steps, or never; the reward is the number of steps."""

    observation_space = spaces.Box(0.0, 1e6, (1,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def reset(self, **_: Any) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        self.n_steps = 0
        return np.zeros(1, dtype=np.float32), {}

    def step(
        self, action: Any
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        observation = np.full(1, self.n_steps, dtype=np.float32)
        return observation, float(self.n_steps), self.n_steps == self.length, False, {}


def make_model(algorithm: Any = PERDQN, env: Any = "CartPole-v1", **options: Any) -> Any:
    return algorithm("MlpPolicy", env, **{**SMALL, **options})


MakeLogger = Callable[..., Logger]


@pytest.fixture
def make_logger(tmp_path: Path) -> Iterator[MakeLogger]:
    """Loggers whose files are closed in the end."""
    made = []

    def make(*formats: str) -> Logger:
        made.append(configure(str(tmp_path), list(formats)))
        return made[-1]

    yield make
    for logger in made:
        logger.close()


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "progress.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("options", "n_envs"), [({}, 1), ({"n_steps": 3}, 3)], ids=["one step", "three steps"]
)
@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_training_is_the_same_with_and_without(
    algorithm: Any, options: dict[str, Any], n_envs: int
) -> None:
    def train(callbacks: list[BaseCallback]) -> Any:
        env = make_vec_env("CartPole-v1", n_envs, seed=0)
        return make_model(algorithm, env, **options).learn(180, callback=callbacks)

    snapshots = ReplaySnapshotCallback((0, 2), freq=18, max_transitions=20)
    without, watched = train([]), train([snapshots, PERLoggerCallback(20)])
    assert len(snapshots.snapshots) == 12
    assert type(watched.replay_buffer) is type(without.replay_buffer)
    assert vars(watched.replay_buffer).keys() == vars(without.replay_buffer).keys()
    assert (
        watched.replay_buffer.observations.tolist() == without.replay_buffer.observations.tolist()
    )
    if algorithm is PERDQN:
        leaves = without.replay_buffer.priorities.tolist()
        assert watched.replay_buffer.priorities.tolist() == leaves
    for ours, theirs in zip(
        watched.policy.state_dict().values(), without.policy.state_dict().values(), strict=True
    ):
        assert th.equal(ours, theirs)


def test_every_format_at_once_and_tensorboard_read_back(
    make_logger: MakeLogger, tmp_path: Path
) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="extra: experiments"
    )
    model = make_model()
    model.set_logger(make_logger("stdout", "log", "json", "csv", "tensorboard"))
    callbacks = CallbackList([PERLoggerCallback(60), ReplaySnapshotCallback((0,))])
    model.learn(180, callback=callbacks, log_interval=10**9)

    keys = [*QUANTILES, *REPLAYS]
    rows = rows_of(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "progress.json").read_text().splitlines()]
    assert [float(row["time/total_timesteps"]) for row in rows] == [60, 120, 180]
    for row, line in zip(rows, lines, strict=True):
        for key in keys:
            assert float(row[key]) == line[key]
        assert not {*row, *line} & set(HISTOGRAMS)
        # SB3's own values stand beside them
        assert float(row["rollout/ep_rew_mean"]) > 0.0
    text = (tmp_path / "log.txt").read_text()
    assert text.count("share_never_replayed") == 3
    assert "histogram" not in text

    events = event_accumulator.EventAccumulator(str(tmp_path), {"histograms": 0, "scalars": 0})
    events.Reload()
    for key in keys:
        scalars = events.Scalars(key)
        assert [scalar.step for scalar in scalars] == [60, 120, 180]
        expected = [line[key] for line in lines]
        np.testing.assert_allclose([scalar.value for scalar in scalars], expected, rtol=1e-6)
    assert sorted(events.Tags()["histograms"]) == HISTOGRAMS
    *_, counts = events.Histograms("per/replay_count_histogram")
    # Written before step 180 is stored. The batches of 8 began after step 51.
    assert counts.step == 180
    assert counts.histogram_value.num == 179
    assert counts.histogram_value.sum == 8 * (179 - 50)
    *_, ages = events.Histograms("per/replay_age_histogram")
    assert ages.histogram_value.num == 8 * 60
    mean = ages.histogram_value.sum / ages.histogram_value.num
    assert mean == pytest.approx(lines[-1]["per/replay_age_mean"])
    *_, priorities = events.Histograms("per/priority_histogram")
    assert priorities.histogram_value.num == 179
    assert priorities.histogram_value.min == pytest.approx(lines[-1]["per/priority_min"])


def test_histograms_can_be_left_out(make_logger: MakeLogger, tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="extra: experiments"
    )
    model = make_model()
    model.set_logger(make_logger("tensorboard"))
    model.learn(60, callback=PERLoggerCallback(60, histograms=False), log_interval=10**9)
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["histograms"] == []
    assert "per/share_never_replayed" in events.Tags()["scalars"]


def test_endless_episodes_are_logged(make_logger: MakeLogger, tmp_path: Path) -> None:
    """SB3 writes the log of an off-policy algorithm at the end of episodes only."""
    model = make_model(env=EndlessEnv())
    model.set_logger(make_logger("csv"))
    model.learn(200, callback=PERLoggerCallback(40), log_interval=1)
    rows = rows_of(tmp_path)
    assert [row["time/total_timesteps"] for row in rows] == ["40", "80", "120", "160", "200"]
    assert all(row[key] for row in rows for key in [*QUANTILES, "per/share_never_replayed"])
    # Learning starts after 50 steps: values recorded in training are written, too
    assert [bool(row["per/td_error_mean"]) for row in rows] == [False, True, True, True, True]
    assert [bool(row["per/replay_age_mean"]) for row in rows] == [False, True, True, True, True]


@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_row_for_each_episode_stays(n_envs: int, make_logger: MakeLogger, tmp_path: Path) -> None:
    env = make_vec_env(EndlessEnv, n_envs, env_kwargs={"length": 10})
    model = make_model(env=env, learning_starts=0)
    model.set_logger(make_logger("csv"))
    model.learn(100, callback=[PERLoggerCallback(30)], log_interval=1)
    rows = rows_of(tmp_path)
    own = [row for row in rows if row["per/share_never_replayed"]]
    others = [row for row in rows if not row["per/share_never_replayed"]]
    # Steps of two environments: 30, 60 and 90 are reached exactly
    assert [row["time/total_timesteps"] for row in own] == ["30", "60", "90"]
    assert [row["time/episodes"] for row in others] == [str(n) for n in range(1, 11)]


def test_with_sb3s_own_callback_for_logging(make_logger: MakeLogger, tmp_path: Path) -> None:
    model = make_model(env=EndlessEnv())
    model.set_logger(make_logger("csv"))
    callbacks = [LogEveryNTimesteps(25), PERLoggerCallback(50)]
    model.learn(100, callback=callbacks, log_interval=10**9)
    steps = [
        (row["time/total_timesteps"], bool(row["per/priority_min"])) for row in rows_of(tmp_path)
    ]
    assert steps == [
        ("25", False),
        ("50", False),
        ("50", True),
        ("75", False),
        ("100", False),
        ("100", True),
    ]


@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_stopped_by_a_callback(algorithm: Any) -> None:
    """SB3 doesn't store the last transition then."""
    model = make_model(algorithm, EndlessEnv(length=10), learning_starts=4)
    snapshots, log = ReplaySnapshotCallback((0, 1, 2), freq=5), PERLoggerCallback(1)
    stop = StopTrainingOnMaxEpisodes(1)
    model.learn(1000, callback=[stop, snapshots, log])
    assert model.replay_buffer.size() == 9
    if algorithm is PERDQN:
        assert np.count_nonzero(model.replay_buffer.tree[:]) == 9
    taken = [(s.episode, s.timesteps, s.n_transitions) for s in snapshots.snapshots]
    # The episode does not count: its end is not in the buffer
    assert taken == [(0, 5, 5), (0, 5, 5)]
    assert [s.reason for s in snapshots.snapshots] == ["episode", "freq"]
    if algorithm is PERDQN:
        assert not model.replay_buffer.draws.counts[9:].any()

    # A second call goes on without a gap
    model.learn(25, callback=[snapshots, log], reset_num_timesteps=False)
    assert model.replay_buffer.size() == 9 + 25
    if algorithm is PERDQN:
        leaves = model.replay_buffer.tree[:]
        assert np.flatnonzero(leaves).tolist() == list(range(9 + 25))
        assert model.replay_buffer.tree.check_valid() == (True, "")


@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_checkpoints_with_the_buffer(algorithm: Any, tmp_path: Path) -> None:
    model = make_model(algorithm)
    checkpoints = CheckpointCallback(60, str(tmp_path), save_replay_buffer=True)
    model.learn(130, callback=[PERLoggerCallback(20), checkpoints, PERLoggerCallback(30)])
    for steps in (60, 120):
        buffer = load_from_pkl(tmp_path / f"rl_model_replay_buffer_{steps}_steps.pkl")
        assert type(buffer) is type(model.replay_buffer)
        assert vars(buffer).keys() == vars(model.replay_buffer).keys()
        if algorithm is PERDQN:
            assert buffer.draws is None
        # Saved before the step is stored
        assert buffer.size() == steps - 1
        stored = model.replay_buffer.observations[: steps - 1].tolist()
        assert buffer.observations[: steps - 1].tolist() == stored
    resumed = algorithm.load(tmp_path / "rl_model_120_steps.zip", env=model.get_env())
    resumed.load_replay_buffer(tmp_path / "rl_model_replay_buffer_120_steps.pkl")
    resumed.learn(30, callback=PERLoggerCallback(1000), reset_num_timesteps=False)
    assert resumed.replay_buffer.size() == 119 + 30
    if algorithm is PERDQN:
        assert resumed.replay_buffer.draws.n_draws == 8 * 30


@pytest.mark.parametrize("name", ["QRDQN", "PERQRDQN"])
def test_quantile_networks(name: str) -> None:
    pytest.importorskip("sb3_contrib", reason="extra: contrib")
    module = importlib.import_module("sb3_per" if name == "PERQRDQN" else "sb3_contrib")
    policy_kwargs = {"net_arch": [8], "n_quantiles": 5}
    snapshots = ReplaySnapshotCallback((0, 3))
    model = make_model(getattr(module, name), policy_kwargs=policy_kwargs)
    model.learn(150, callback=[snapshots, PERLoggerCallback(50)])
    assert sorted(s.episode for s in snapshots.snapshots) == [0, 3]
    for snapshot in snapshots.snapshots:
        assert np.isfinite(snapshot.td_errors).all()
        assert (snapshot.weights is None) == (name == "QRDQN")
    if name == "PERQRDQN":
        assert model.replay_buffer.draws.n_draws == 8 * 100
