"""Logged statistics of a replay buffer and of replayed transitions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_per import PERDQN, PERLoggerCallback, drawable_indices

Make = Callable[..., Any]


def log(model: Any, logger: Any, timesteps: int, log_freq: int) -> list[dict[str, Any]]:
    """Rows of the log of a training, a dict for each."""
    model.set_logger(logger)
    model.learn(timesteps, callback=PERLoggerCallback(log_freq), log_interval=None)
    rows: list[dict[str, Any]] = logger.rows
    return rows


def own_keys(row: dict[str, Any]) -> list[str]:
    return [key for key in row if key.startswith("per/")]


def test_statistics_are_of_what_is_stored(make_model: Make, logger: Any) -> None:
    """The places that are not filled yet don't count."""
    model = make_model(buffer_size=1000, alpha=1.0, priority_eps=1e-12, learning_starts=1000)
    model.learn(4)
    model.replay_buffer.update_priorities(np.arange(4), [1.0, -2.0, 3.0, 4.0])
    model.set_logger(logger)
    # Written before the step is stored
    model.learn(1, callback=PERLoggerCallback(1), log_interval=None, reset_num_timesteps=False)
    (row,) = logger.rows
    assert {key: round(row[key], 6) for key in own_keys(row)} == {
        "per/priority_min": 1.0,
        "per/priority_quantile_05": 1.15,
        "per/priority_quantile_25": 1.75,
        "per/priority_quantile_50": 2.5,
        "per/priority_quantile_75": 3.25,
        "per/priority_quantile_95": 3.85,
        "per/share_never_replayed": 1.0,
    }


def test_log_before_anything_was_stored(make_model: Make, logger: Any) -> None:
    rows = log(make_model(learning_starts=10), logger, 14, 1)
    # Nothing is stored at the first step, nothing replayed until the twelfth
    assert [row["step"] for row in rows] == list(range(2, 15))
    ages = [row.get("per/replay_age_mean") for row in rows]
    assert ages[:10] == [None] * 10
    assert all(age is not None and 0 <= age <= 13 for age in ages[10:])
    shares = [row["per/share_never_replayed"] for row in rows]
    assert shares[:10] == [1.0] * 10
    assert 0.0 <= shares[-1] < 1.0
    assert all(np.isfinite(value) for row in rows for value in row.values())


@pytest.mark.parametrize("algorithm", [DQN, SAC])
def test_buffers_of_sb3_do_not_tell_what_is_replayed(
    algorithm: Any, make_env: Make, make_model: Make, logger: Any
) -> None:
    if algorithm is SAC:
        env = make_env(kind="continuous")
        model = SAC("MlpPolicy", env, buffer_size=100, learning_starts=5, seed=0)
    else:
        model = make_model(DQN)
    (row,) = log(model, logger, 30, 30)
    assert own_keys(row) == []
    assert row["train/learning_rate"] > 0.0


def test_uniform_replay_has_all_keys(make_model: Make, logger: Any) -> None:
    (row,) = log(make_model(alpha=0.0, beta=0.0, beta_final=0.0), logger, 60, 60)
    assert row["per/priority_min"] == row["per/priority_quantile_95"] == 1.0
    assert 0.0 < row["per/share_never_replayed"] < 1.0
    assert 0.0 < row["per/replay_age_mean"] < 60.0


def test_interval_counts_environment_steps(make_env: Make, make_model: Make, logger: Any) -> None:
    rows = log(make_model(PERDQN, make_env(4)), logger, 44, 10)
    assert [row["step"] for row in rows] == [12, 20, 32, 40]


def test_interval_goes_on_over_several_calls(make_model: Make, logger: Any) -> None:
    model = make_model()
    callback = PERLoggerCallback(10)
    model.set_logger(logger)
    for reset in (True, False, False, True):
        model.learn(8, callback=callback, log_interval=None, reset_num_timesteps=reset)
    model.learn(12, callback=callback, log_interval=None)
    assert [row["step"] for row in logger.rows] == [10, 20, 10]


class Tags:
    """What was replayed, known by the observations in the batches themselves."""

    def __init__(self, model: Any) -> None:
        self.batches: list[list[tuple[float, float]]] = []
        sample = model.replay_buffer.sample

        def noting(*args: Any, **kwargs: Any) -> Any:
            batch = sample(*args, **kwargs)
            self.batches.append(tags_of(batch.observations))
            return batch

        model.replay_buffer.sample = noting


def tags_of(observations: Any) -> list[tuple[float, float]]:
    if isinstance(observations, dict):
        observations = observations["observation" if "observation" in observations else "a"]
    return [tuple(tag) for tag in observations.reshape(-1, 2).tolist()]


def first_rows(env: Any) -> dict[tuple[float, float], int]:
    """How many rows were stored before the transition that starts with a tag."""
    found = {}
    for number, single in enumerate(env.envs):
        single.reset()
        for row in range(200):
            found[(float(number), float(single.n_steps))] = row
            _, _, terminated, truncated, _ = single.step(0)
            if terminated or truncated:
                single.reset()
    return found


class StopAt(BaseCallback):
    """Stops just where a row is written: nothing is stored or replayed afterwards."""

    def __init__(self, timesteps: int) -> None:
        super().__init__()
        self.timesteps = timesteps

    def _on_step(self) -> bool:
        return self.num_timesteps < self.timesteps


HER = {"replay_buffer_class": HerReplayBuffer}
NO_TIMEOUTS = {"handle_timeout_termination": False}
MEMORY_SAVING = {"optimize_memory_usage": True, "replay_buffer_kwargs": NO_TIMEOUTS}


@pytest.mark.parametrize(
    ("kind", "options", "n_envs"),
    [
        pytest.param("box", {}, 1, id="one env"),
        pytest.param("box", {}, 3, id="box"),
        pytest.param("box", {"prioritization": "rank"}, 3, id="rank"),
        pytest.param("box", {"n_steps": 3}, 3, id="three steps"),
        pytest.param("box", MEMORY_SAVING, 3, id="memory saving"),
        pytest.param("dict", {}, 3, id="dict"),
        pytest.param("goal", HER, 1, id="hindsight, one env"),
        pytest.param("goal", HER, 3, id="hindsight"),
    ],
)
def test_share_never_replayed_and_ages(
    kind: str,
    options: dict[str, Any],
    n_envs: int,
    make_env: Make,
    make_model: Make,
    logger: Any,
) -> None:
    options = {"learning_starts": 30, "batch_size": 2, **options}
    model = make_model(PERDQN, make_env(n_envs, kind), **options)
    model.set_logger(logger)
    tags = Tags(model)
    model.learn(1000, callback=[PERLoggerCallback(150), StopAt(150)], log_interval=None)
    (row,) = logger.rows

    buffer = model.replay_buffer
    stored = buffer.observations
    if isinstance(stored, dict):
        stored = {key: array[: buffer.size()] for key, array in stored.items()}
    replayed = [tag for batch in tags.batches for tag in batch]
    indices = drawable_indices(buffer)
    counts = np.array([replayed.count(tag) for tag in tags_of(stored)])[indices]
    assert 0.05 < (counts == 0).mean() < 0.95
    assert row["per/share_never_replayed"] == pytest.approx((counts == 0).mean())
    assert buffer.draws.counts[indices].tolist() == counts.tolist()

    # The first batch is drawn when more than 30 steps are stored, then one after each step
    first = 31 if n_envs == 1 else 33
    rows_then = [first // n_envs + number for number in range(len(tags.batches))]
    row_of = first_rows(make_env(n_envs, kind))
    ages = [
        (n_rows - 1 - row_of[tag]) * n_envs
        for n_rows, batch in zip(rows_then, tags.batches, strict=True)
        for tag in batch
    ]
    assert min(ages) >= 0
    assert row["per/replay_age_mean"] == pytest.approx(np.mean(ages))


def test_each_callback_has_an_interval_of_its_own(make_model: Make, logger: Any) -> None:
    """And both read one record, which counts each draw once."""
    model = make_model(learning_starts=5)
    model.set_logger(logger)
    buffer, ages = model.replay_buffer, []
    sample = buffer.sample

    def noting(*args: Any, **kwargs: Any) -> Any:
        batch = sample(*args, **kwargs)
        ages.append((buffer.pos - 1 - batch.indices) % buffer.buffer_size)
        return batch

    buffer.sample = noting
    callbacks = [PERLoggerCallback(10), PERLoggerCallback(15), StopAt(30)]
    model.learn(100, callback=callbacks, log_interval=None)
    assert [row["step"] for row in logger.rows] == [10, 15, 20, 30, 30]
    # A batch for each step after the fifth; each row is written before the batch of its step
    intervals = [(5, 9), (5, 14), (9, 19), (19, 29), (14, 29)]
    for row, (start, end) in zip(logger.rows, intervals, strict=True):
        expected = np.mean(ages[start - 5 : end - 5])
        assert row["per/replay_age_mean"] == pytest.approx(expected)
    assert buffer.draws.n_draws == 8 * 24


def test_counting_goes_on_with_training(make_model: Make, logger: Any) -> None:
    model = make_model(learning_starts=5)
    model.set_logger(logger)
    callback = PERLoggerCallback(20)
    model.learn(15, callback=callback, log_interval=None)
    draws = model.replay_buffer.draws
    model.learn(10, callback=callback, log_interval=None, reset_num_timesteps=False)
    assert model.replay_buffer.draws is draws
    assert draws.n_draws == 8 * 20
    # What was stored and replayed in the first call still counts
    (row,) = logger.rows
    assert row["step"] == 20
    assert row["per/share_never_replayed"] < 0.5


def test_every_draw_counts(make_model: Make) -> None:
    model = make_model(learning_starts=5)

    class Drawing(BaseCallback):
        def _on_step(self) -> bool:
            if model.replay_buffer.size():
                model.replay_buffer.sample(100)
            return True

    model.learn(20, callback=[PERLoggerCallback(1000), Drawing()])
    assert model.replay_buffer.draws.n_draws == 8 * 15 + 100 * 19


def test_a_buffer_loaded_meanwhile(make_model: Make, tmp_path: Path, logger: Any) -> None:
    other = make_model().learn(40)
    other.save_replay_buffer(tmp_path / "buffer.pkl")
    model = make_model(learning_starts=5)
    model.set_logger(logger)

    class Loading(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 10:
                model.load_replay_buffer(tmp_path / "buffer.pkl")
            return True

    # SB3 goes on storing into the buffer that the rollout began with
    model.learn(15, callback=[Loading(), PERLoggerCallback(15)], log_interval=None)
    draws = model.replay_buffer.draws
    assert draws.n_draws == 8 * 6
    (row,) = logger.rows
    # The totals of the other record don't come in
    assert 0.0 < row["per/replay_age_mean"] < 60.0
    share = np.count_nonzero(draws.counts[:40] == 0) / 40
    assert row["per/share_never_replayed"] >= share


def test_histograms_only_for_tensorboard(make_model: Make, logger: Any) -> None:
    (row,) = log(make_model(), logger, 40, 40)
    assert not [key for key in row if "histogram" in key]


def test_keys_are_not_those_of_training(make_model: Make, logger: Any) -> None:
    model = make_model()
    (row,) = log(model, logger, 60, 60)
    logger.rows.clear()
    model.train(gradient_steps=1, batch_size=8)
    of_training = own_keys(logger.name_to_value)
    assert len(of_training) == 6
    # Those of training, and eight that it doesn't have
    assert len(own_keys(row)) == 6 + 8
    assert set(of_training) < set(own_keys(row))


def test_log_freq_is_checked() -> None:
    with pytest.raises(ValueError, match="`log_freq` must be an integer of at least 1, got 0"):
        PERLoggerCallback(0)
