"""
Callbacks inside other callbacks.

SB3 tells a callback inside ``EveryNTimesteps`` or ``EvalCallback`` neither when a rollout begins or
ends nor when training ends, and one for a new best model not even when training starts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import pytest
import torch as th
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    ConvertCallback,
    EvalCallback,
    EventCallback,
    EveryNTimesteps,
)
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_per import PERLoggerCallback, ReplaySnapshotCallback

Make = Callable[..., Any]


class Improving(gym.RewardWrapper[Any, Any]):
    """The reward is the number of steps made: each episode is better than the one before."""

    n_steps = 0

    def reward(self, reward: Any) -> float:
        self.n_steps += 1
        return float(self.n_steps)


class AtEndOfEpisode(EventCallback):
    def _on_step(self) -> bool:
        return self._on_event() if self.locals["dones"].any() else True


class ByHand(BaseCallback):
    """Hands on what it must, at each step."""

    def __init__(self, callback: BaseCallback) -> None:
        super().__init__()
        self.callback = callback

    def _init_callback(self) -> None:
        self.callback.init_callback(self.model)

    def _on_step(self) -> bool:
        return self.callback.on_step()


class Wrapper(NamedTuple):
    wrap: Callable[[BaseCallback, Any], BaseCallback]
    #: Steps stored when the snapshots are taken that are due at 20, 40 and 60
    timesteps: list[int]
    #: And when number 0 is, and number 3, whose last transition is the 22nd
    numbers: list[int]
    #: Steps at which the log is written
    rows: list[int]


def evaluate(env: Any, **options: Any) -> EvalCallback:
    return EvalCallback(env, n_eval_episodes=1, eval_freq=10, verbose=0, warn=False, **options)


# Episodes of 7, 8, 7, 8, ... steps; updates after each step from the 21st on. A callback comes
# before its step is stored.
TENS = [19, 39, 59], [19, 29], [20, 40, 60]
WRAPPERS = {
    "every 10 steps": Wrapper(lambda inner, _: EveryNTimesteps(10, inner), *TENS),
    "after an evaluation": Wrapper(
        lambda inner, env: evaluate(env, callback_after_eval=inner), *TENS
    ),
    "for a new best model": Wrapper(
        lambda inner, env: evaluate(env, callback_on_new_best=inner), *TENS
    ),
    "in a list every 10 steps": Wrapper(
        lambda inner, _: EveryNTimesteps(10, CallbackList([inner])), *TENS
    ),
    "twice": Wrapper(lambda inner, _: EveryNTimesteps(5, EveryNTimesteps(10, inner)), *TENS),
    # Called at 7, 15, 22, 30, 37, 45, 52 and 60
    "at the end of episodes": Wrapper(
        lambda inner, _: AtEndOfEpisode(inner), [21, 44, 59], [14, 29], [22, 45, 60]
    ),
    "by hand": Wrapper(lambda inner, _: ByHand(inner), [19, 39, 59], [19, 22], [20, 40, 60]),
    "in a function": Wrapper(
        lambda inner, _: ConvertCallback(lambda locals_, globals_: inner.on_step()),
        [19, 39, 59],
        [19, 22],
        [20, 40, 60],
    ),
    "in a list of lists": Wrapper(
        lambda inner, _: CallbackList([CallbackList([inner])]), [20, 40, 60], [21, 22], [20, 40, 60]
    ),
}


class Watched(ReplaySnapshotCallback):
    def _take(self, *arguments: Any) -> bool:
        self.n_updates = [*getattr(self, "n_updates", []), self.model._n_updates]
        return super()._take(*arguments)


@pytest.mark.parametrize("name", WRAPPERS)
def test_snapshots(name: str, make_env: Make, make_model: Make) -> None:
    wrapper = WRAPPERS[name]
    model = make_model()
    snapshots = Watched((0, 3), freq=20)
    env = DummyVecEnv([lambda: Improving(make_env().envs[0])])
    # A function is told of nothing but steps
    snapshots.init_callback(model)
    model.learn(60, callback=wrapper.wrap(snapshots, env))

    taken = {
        reason: [s.timesteps for s in snapshots.snapshots if s.reason == reason]
        for reason in ("episode", "freq")
    }
    assert taken == {"episode": wrapper.numbers, "freq": wrapper.timesteps}
    assert [s.episode for s in snapshots.snapshots if s.reason == "episode"] == [0, 3]
    # The networks are still untrained
    number_0 = next(i for i, s in enumerate(snapshots.snapshots) if s.reason == "episode")
    assert snapshots.n_updates[number_0] == 0
    for snapshot in snapshots.snapshots:
        assert snapshot.n_transitions == len(snapshot.td_errors) == snapshot.timesteps


@pytest.mark.parametrize("name", WRAPPERS)
def test_log(name: str, make_env: Make, make_model: Make, logger: Any) -> None:
    wrapper = WRAPPERS[name]
    model = make_model()
    model.set_logger(logger)
    log = PERLoggerCallback(20)
    env = DummyVecEnv([lambda: Improving(make_env().envs[0])])
    log.init_callback(model)
    model.learn(60, callback=wrapper.wrap(log, env), log_interval=None)

    # Evaluations write rows of their own
    rows = [row for row in logger.rows if "per/share_never_replayed" in row]
    assert [row["step"] for row in rows] == wrapper.rows
    assert [("per/replay_age_mean" in row) for row in rows] == [wrapper.rows[0] > 20, True, True]
    # Batches of 8, one for each step after the 20th
    assert model.replay_buffer.draws.n_draws == 8 * 40


@pytest.mark.parametrize("name", WRAPPERS)
def test_training_stays_the_same(name: str, make_env: Make, make_model: Make) -> None:
    without, model = make_model().learn(60), make_model()
    callbacks = [ReplaySnapshotCallback((0, 3), freq=20), PERLoggerCallback(20)]
    env = DummyVecEnv([lambda: Improving(make_env().envs[0])])
    for callback in callbacks:
        callback.init_callback(model)
    model.learn(60, callback=[WRAPPERS[name].wrap(callback, env) for callback in callbacks])

    assert type(model.replay_buffer) is type(without.replay_buffer)
    assert vars(model.replay_buffer).keys() == vars(without.replay_buffer).keys()
    leaves = without.replay_buffer.priorities.tolist()
    assert model.replay_buffer.priorities.tolist() == leaves
    for ours, theirs in zip(model.policy.parameters(), without.policy.parameters(), strict=True):
        assert th.equal(ours, theirs)


def test_number_0_of_a_callback_that_is_called_too_late(make_model: Make) -> None:
    snapshots = ReplaySnapshotCallback((0, 1, 100))
    make_model().learn(60, callback=EveryNTimesteps(50, snapshots))
    assert [(s.episode, s.timesteps) for s in snapshots.snapshots] == [(0, 49), (1, 49)]


def test_what_is_due_stays_due_when_training_goes_on(make_model: Make) -> None:
    model = make_model(learning_starts=3)
    snapshots = ReplaySnapshotCallback((0, 1), freq=9)
    callback = EveryNTimesteps(10, snapshots)
    for _ in range(3):
        model.learn(8, callback=callback, reset_num_timesteps=False)
    taken = [(s.episode, s.timesteps, s.reason) for s in snapshots.snapshots]
    assert taken == [
        (0, 9, "episode"),
        (1, 9, "episode"),
        (1, 9, "freq"),
        (2, 19, "freq"),
    ]
