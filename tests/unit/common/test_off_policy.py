"""What the prioritized algorithms share: options, their buffer, beta, the log, loaded buffers."""

import csv
import io
import math
import pickle
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import (
    DictReplayBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
    RolloutBuffer,
)
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger, configure
from stable_baselines3.common.utils import ConstantSchedule, LinearSchedule
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from buffer_helpers import SAVING
from model_helpers import (
    SAVING_MEMORY,
    SMALL,
    Prioritized,
    TenStepEnv,
    buffer_of,
    side_by_side,
    small_model,
)
from sb3_per import (
    PERDQN,
    PrioritizedDictReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)


class OwnPrioritizedBuffer(PrioritizedReplayBuffer):
    """What a user derives from the class of this package."""


class OwnPlainBuffer(ReplayBuffer):
    """What a user derived from SB3's class, for DQN."""


class OwnNStepBuffer(NStepReplayBuffer):
    """The same, for n-step returns."""


class OwnHerBuffer(HerReplayBuffer):
    """And for hindsight."""


# Learns from the first step on
make_model = partial(small_model, learning_starts=0, batch_size=4)


# --- options


BAD_OPTIONS: list[tuple[str, Any]] = [
    ("alpha", -1),
    ("alpha", -1e-9),
    ("alpha", math.nan),
    ("alpha", math.inf),
    ("alpha", None),
    ("alpha", "much"),
    ("alpha", [0.5, 0.6]),
    ("beta", -0.1),
    ("beta", 1.001),
    ("beta", math.nan),
    ("beta", None),
    ("beta_final", -0.1),
    ("beta_final", 1.5),
    ("beta_final", math.nan),
    ("beta_fraction", -0.1),
    ("beta_fraction", 2),
    ("beta_fraction", math.nan),
    ("priority_eps", -1e-6),
    ("priority_eps", math.nan),
    ("priority_eps", math.inf),
    ("weight_normalization", "max"),
    ("weight_normalization", None),
    ("prioritization", "greedy"),
    ("prioritization", None),
    ("initial_priority", "min"),
    ("initial_priority", None),
    ("double_q", "yes"),
    ("double_q", 1),
    ("double_q", None),
    ("loss", "l1"),
    ("loss", None),
    ("loss", ["huber"]),
    ("n_steps", 0),
    ("n_steps", -3),
    ("n_steps", 2.5),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "perdqn.zip"
    make_model().save(path)
    return path


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS, ids=str)
def test_a_bad_option_is_refused_with_its_value_at_construction_and_at_load(
    name: str, value: Any, saved: Path
) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be ") as error:
        make_model(**{name: value})
    assert str(error.value).endswith(f"got {value!r}")
    with pytest.raises(ValueError, match=f"`{name}` must be ") as error:
        PERDQN.load(saved, **{name: value})
    assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0, "beta": 0, "beta_final": 0, "beta_fraction": 0, "priority_eps": 0},
        {"alpha": 3.5, "beta": 1, "beta_final": 1, "beta_fraction": 1, "priority_eps": 100},
        {"alpha": np.float32(0.5), "beta": np.float64(0.25), "beta_final": th.tensor(0.75)},
        {"double_q": np.True_, "weight_normalization": "buffer", "loss": "mse"},
    ],
    ids=str,
)
def test_options_at_the_ends_of_their_ranges_are_accepted(options: dict[str, Any]) -> None:
    model = make_model(**options)
    for name, value in options.items():
        assert getattr(model, name) == value
    for name in ("alpha", "beta", "beta_final", "beta_fraction", "priority_eps"):
        assert type(getattr(model, name)) is float
    assert buffer_of(model).alpha == model.alpha
    assert buffer_of(model).eps == model.priority_eps
    assert buffer_of(model).weight_normalization == model.weight_normalization


@pytest.mark.parametrize(
    "space", [spaces.Discrete(3, start=1), spaces.Discrete(2, start=-1)], ids=str
)
def test_actions_that_do_not_start_at_zero_are_refused_with_a_way_out(
    space: spaces.Discrete,
) -> None:
    with pytest.raises(ValueError, match=f"start at {space.start}") as error:
        make_model(TenStepEnv(action_space=space))
    assert str(space) in str(error.value)
    assert f"Discrete({space.n}) that adds {space.start} to each action" in str(error.value)


SHIFTED = [spaces.Discrete(3, start=1), spaces.MultiDiscrete([3, 4], start=[0, -2])]


@pytest.mark.parametrize("in_dict", [False, True])
@pytest.mark.parametrize("space", SHIFTED, ids=str)
def test_observations_that_do_not_start_at_zero_are_refused_with_a_way_out(
    space: Any, in_dict: bool
) -> None:
    """As one-hot vectors they would fail when the network first acts."""
    whole = spaces.Dict({"other": spaces.Discrete(2), "room": space}) if in_dict else space
    with pytest.raises(ValueError, match=re.escape(f"{space} start at {space.start}")) as error:
        make_model(TenStepEnv(whole))
    assert "gymnasium.ObservationWrapper that subtracts the start" in str(error.value)


def test_observations_that_say_that_they_start_at_zero_are_taken() -> None:
    space = spaces.MultiDiscrete([3, 4], start=[0, 0])
    assert make_model(TenStepEnv(space)).learn(12)._n_updates == 12


def test_the_way_out_for_actions_that_do_not_start_at_zero_works() -> None:
    class Strict(TenStepEnv):
        def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            assert self.action_space.contains(action)
            return super().step(action)

    class StartAtZero(gym.ActionWrapper[Any, np.int64, np.int64]):
        def __init__(self, env: gym.Env[Any, np.int64]) -> None:
            super().__init__(env)
            self.action_space = spaces.Discrete(3)

        def action(self, action: np.int64) -> np.int64:
            return action + 1

    env = StartAtZero(Strict(action_space=spaces.Discrete(3, start=1)))
    model = make_model(env, exploration_fraction=1.0, exploration_final_eps=1.0).learn(30)
    assert set(buffer_of(model).actions[:30].ravel()) == {0, 1, 2}


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize(
    "buffer_class", [None, DictReplayBuffer, NStepReplayBuffer, PrioritizedDictReplayBuffer]
)
def test_dict_observations_get_their_buffer(
    buffer_class: type[ReplayBuffer] | None, n_steps: int
) -> None:
    space = spaces.Dict({"camera": spaces.Box(0.0, 1.0, (2,), np.float32)})
    env = TenStepEnv(space)
    asked_for = {"replay_buffer_class": buffer_class, "n_steps": n_steps}
    model = make_model(env, **asked_for)
    buffer = buffer_of(model)
    assert type(buffer) is PrioritizedDictReplayBuffer
    assert issubclass(type(buffer), DictReplayBuffer)
    assert buffer.n_steps == (3 if buffer_class is NStepReplayBuffer else n_steps)


@pytest.mark.parametrize(
    "buffer_class", [ReplayBuffer, PrioritizedReplayBuffer, OwnPrioritizedBuffer]
)
def test_dict_observations_do_not_go_into_a_buffer_of_another_kind(
    buffer_class: type[ReplayBuffer],
) -> None:
    space = spaces.Dict({"camera": spaces.Box(0.0, 1.0, (2,), np.float32)})
    with pytest.raises(ValueError, match=r"camera.*use PrioritizedDictReplayBuffer"):
        make_model(TenStepEnv(space), replay_buffer_class=buffer_class)


@pytest.mark.parametrize("buffer_class", [DictReplayBuffer, HerReplayBuffer])
def test_other_observations_do_not_go_into_a_buffer_for_dicts(
    buffer_class: type[ReplayBuffer],
) -> None:
    with pytest.raises(ValueError, match=r"Box.*use PrioritizedReplayBuffer"):
        make_model(replay_buffer_class=buffer_class)


class Unmeasured(Prioritized, DQN):
    """What a user makes of the base class, without TD errors of new transitions."""


def test_the_base_class_names_options_that_it_does_not_know() -> None:
    model = Unmeasured("MlpPolicy", TenStepEnv(), _init_setup_model=False)
    # The second is one that PERDQN adds
    options: list[tuple[str, Any]] = [("alhpa", 0.5), ("loss", "mse")]
    for name, value in options:
        with pytest.raises(TypeError, match=f"'{name}'"):
            model._set_per_options(**{name: value})
    assert not hasattr(model, "alhpa")


def test_priorities_of_their_own_for_new_transitions_need_td_errors() -> None:
    message = r"Unmeasured has no method `td_errors\(batch\)`: define it, or use 'max'"
    model = Unmeasured("MlpPolicy", TenStepEnv(), _init_setup_model=False)
    model._set_per_options(initial_priority="td_error")
    with pytest.raises(ValueError, match=message):
        model._setup_model()
    model = Unmeasured("MlpPolicy", TenStepEnv(), buffer_size=10)
    model.initial_priority = "td_error"
    with pytest.raises(ValueError, match=message):
        model._prepare_replay()


# --- the buffer


@pytest.mark.parametrize(
    ("kwargs", "n_steps"),
    [
        ({}, 1),
        ({"n_steps": 3}, 3),
        ({"n_steps": np.int64(3)}, 3),
        ({"replay_buffer_class": ReplayBuffer}, 1),
        ({"replay_buffer_class": ReplayBuffer, "n_steps": 3}, 3),
        ({"replay_buffer_class": NStepReplayBuffer}, 3),
        ({"replay_buffer_class": NStepReplayBuffer, "n_steps": 2}, 2),
        ({"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 5}}, 5),
        ({"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 1}}, 1),
        (
            {
                "replay_buffer_class": NStepReplayBuffer,
                "replay_buffer_kwargs": {"n_steps": 5, "gamma": 0.75},
                "n_steps": 5,
            },
            5,
        ),
        ({"replay_buffer_class": PrioritizedReplayBuffer}, 1),
        ({"replay_buffer_class": PrioritizedReplayBuffer, "n_steps": 3}, 3),
        ({"replay_buffer_class": OwnPrioritizedBuffer}, 1),
        ({"replay_buffer_class": OwnPrioritizedBuffer, "n_steps": 3}, 3),
    ],
    ids=str,
)
def test_a_class_of_sb3_stands_for_its_prioritized_counterpart(
    kwargs: dict[str, Any], n_steps: int
) -> None:
    asked_for = kwargs.get("replay_buffer_class")
    # Warnings are errors here: neither SB3 nor this package has a reason to warn
    model = make_model(gamma=0.75, **kwargs)
    buffer = buffer_of(model)
    assert type(buffer) is (
        OwnPrioritizedBuffer if asked_for is OwnPrioritizedBuffer else PrioritizedReplayBuffer
    )
    assert (buffer.n_steps, buffer.gamma) == (n_steps, 0.75)
    assert (buffer.alpha, buffer.eps, buffer.beta) == (0.6, 1e-6, 0.4)
    # What the user asked for stays: this is what gets saved
    assert model.replay_buffer_class is asked_for
    assert model.n_steps == kwargs.get("n_steps", 1)
    assert model.replay_buffer_kwargs == kwargs.get("replay_buffer_kwargs", {})

    model.learn(12)
    batch = buffer.sample(4)
    assert (batch.discounts is None) is (n_steps == 1)
    assert model._n_updates == 12


@pytest.mark.parametrize(
    "buffer_class",
    [
        OwnHerBuffer,
        OwnPlainBuffer,
        OwnNStepBuffer,
        RolloutBuffer,
        int,
        "ReplayBuffer",
        42,
    ],
    ids=str,
)
def test_any_other_class_is_refused_with_a_way_out(buffer_class: Any) -> None:
    with pytest.raises(ValueError, match="ReplayBuffer") as error:
        make_model(replay_buffer_class=buffer_class)
    message = str(error.value)
    assert getattr(buffer_class, "__name__", str(buffer_class)) in message
    assert "sb3_per.PrioritizedReplayBuffer" in message


@pytest.mark.parametrize(
    ("kwargs", "option"),
    [
        ({"alpha": 0.5}, "alpha"),
        ({"eps": 1e-3}, "priority_eps"),
        ({"beta": 0.5}, "beta"),
        ({"gamma": 0.5}, "gamma"),
        ({"n_steps": 2}, "n_steps"),
        ({"weight_normalization": "buffer"}, "weight_normalization"),
        ({"prioritization": "rank"}, "prioritization"),
        ({"optimize_memory_usage": True}, "optimize_memory_usage"),
        ({"n_envs": 2}, "n_envs"),
    ],
    ids=str,
)
@pytest.mark.parametrize("buffer_class", [None, ReplayBuffer, OwnPrioritizedBuffer])
def test_buffer_arguments_that_contradict_an_option_are_refused(
    kwargs: dict[str, Any], option: str, buffer_class: type[ReplayBuffer] | None
) -> None:
    ((name, value),) = kwargs.items()
    model = make_model()
    ours = model.n_envs if name == "n_envs" else getattr(model, option)
    with pytest.raises(ValueError, match="`replay_buffer_kwargs` has") as error:
        make_model(replay_buffer_class=buffer_class, replay_buffer_kwargs=kwargs)
    message = str(error.value)
    assert f"{name}={value!r}" in message
    assert f"`{option}` of PERDQN is {ours!r}" in message


def test_a_contradiction_is_refused_with_the_n_step_class_too() -> None:
    for kwargs in ({"n_steps": 5}, {"gamma": 0.5}):
        with pytest.raises(ValueError, match="`replay_buffer_kwargs` has"):
            make_model(
                replay_buffer_class=NStepReplayBuffer, replay_buffer_kwargs=kwargs, n_steps=2
            )


def test_the_increment_of_hand_written_loops_is_refused() -> None:
    with pytest.raises(ValueError, match=r"beta_increment=0\.1.*`beta_final`"):
        make_model(replay_buffer_kwargs={"beta_increment": 0.1})


def test_an_unknown_buffer_argument_is_named() -> None:
    with pytest.raises(TypeError, match="'colour'"):
        make_model(replay_buffer_kwargs={"colour": 1})


def test_buffer_arguments_that_agree_are_accepted_and_the_callers_dict_stays() -> None:
    agreeing = {
        "alpha": 0.5,
        "eps": 0.01,
        "beta": 0.3,
        "n_steps": 2,
        "gamma": 0.8,
        "weight_normalization": "buffer",
        "optimize_memory_usage": False,
        "handle_timeout_termination": False,
    }
    given = dict(agreeing)
    model = make_model(
        alpha=0.5,
        priority_eps=0.01,
        beta=0.3,
        n_steps=2,
        gamma=0.8,
        weight_normalization="buffer",
        replay_buffer_kwargs=given,
    )
    assert given == agreeing
    buffer = buffer_of(model)
    assert {name: getattr(buffer, name) for name in agreeing} == agreeing


def test_the_beta_of_the_buffer_may_be_given_twice_if_it_agrees() -> None:
    # Agreeing with `beta` is all that can be asked for, whatever `beta_fraction` makes of it
    model = make_model(beta=0.4, beta_fraction=0.0, replay_buffer_kwargs={"beta": 0.4})
    assert model.beta == 0.4


def test_timeouts_are_handled_unless_told_otherwise() -> None:
    assert buffer_of(make_model()).handle_timeout_termination
    kwargs = {"handle_timeout_termination": False}
    assert not buffer_of(make_model(replay_buffer_kwargs=kwargs)).handle_timeout_termination


def test_saving_memory_along_with_timeouts_is_refused_by_sb3() -> None:
    with pytest.raises(ValueError, match="optimize_memory_usage = True and handle_timeout_termi"):
        make_model(optimize_memory_usage=True)


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_envs", [1, 2])
def test_saving_memory_trains_over_two_learns(n_steps: int, n_envs: int) -> None:
    model = make_model(
        side_by_side(n_envs),
        **SAVING_MEMORY,
        n_steps=n_steps,
        target_update_interval=10,
    )
    model.learn(40, reset_num_timesteps=False)
    model.learn(40, reset_num_timesteps=False)
    # SB3 says that the episode is cut off; the last transition keeps its next observation
    with pytest.warns(UserWarning, match="The last trajectory in the replay buffer"):
        model.learn(40)
    buffer = buffer_of(model)
    assert buffer.full
    assert model._n_updates == 120 / n_envs
    assert buffer.tree.check_valid() == (True, "")
    # Only the write position can't be drawn
    undrawable = np.flatnonzero(buffer.priorities == 0.0)
    np.testing.assert_array_equal(undrawable, buffer.pos * n_envs + np.arange(n_envs))


@pytest.mark.parametrize("n_envs", [1, 3, 4])
def test_the_buffer_has_a_leaf_for_each_transition_of_each_environment(n_envs: int) -> None:
    model = make_model(side_by_side(n_envs), buffer_size=50)
    buffer = buffer_of(model)
    assert buffer.n_envs == n_envs
    assert buffer.buffer_size == 50 // n_envs
    assert buffer.tree.capacity == 50 // n_envs * n_envs
    assert buffer.device == model.device


def test_a_failed_setup_leaves_what_was_asked_for() -> None:
    model = make_model(
        train_freq=(1, "moon"),
        replay_buffer_class=NStepReplayBuffer,
        n_steps=4,
        _init_setup_model=False,
    )
    with pytest.raises(ValueError, match="moon"):
        model._setup_model()
    assert model.replay_buffer_class is NStepReplayBuffer
    assert model.n_steps == 4


# --- beta


class Betas(BaseCallback):
    """Notes beta after each training, by the number of steps so far."""

    def __init__(self) -> None:
        super().__init__()
        self.after: dict[int, float] = {}
        self.n_updates = 0

    def _on_step(self) -> bool:
        return True

    def _on_training_start(self) -> None:
        assert isinstance(self.model, PERDQN)
        self.n_updates = self.model._n_updates

    def _on_rollout_start(self) -> None:
        self._note()

    def _on_training_end(self) -> None:
        self._note()

    def _note(self) -> None:
        assert isinstance(self.model, PERDQN)
        if self.model._n_updates > self.n_updates:
            self.after[self.num_timesteps] = buffer_of(self.model).beta


def betas_of(model: PERDQN, total: int, *, reset_num_timesteps: bool = True) -> dict[int, float]:
    betas = Betas()
    model.learn(total, callback=betas, reset_num_timesteps=reset_num_timesteps)
    return betas.after


def test_beta_goes_from_its_start_to_its_end_with_the_training() -> None:
    betas = betas_of(make_model(train_freq=10), 1000)
    assert list(betas) == list(range(10, 1001, 10))
    assert betas[10] == pytest.approx(0.406)
    assert betas[500] == pytest.approx(0.70, abs=0.01)
    assert betas[1000] == 1.0
    assert all(np.diff(list(betas.values())) > 0.0)


def test_beta_reaches_its_end_after_its_fraction_of_the_training() -> None:
    betas = betas_of(make_model(beta=0.5, beta_final=0.9, beta_fraction=0.5), 40)
    assert betas[10] == pytest.approx(0.7)
    assert [betas[step] for step in (20, 21, 30, 40)] == pytest.approx([0.9] * 4)
    assert betas[40] == 0.9


def test_beta_goes_down_if_asked_to() -> None:
    betas = betas_of(make_model(beta=0.8, beta_final=0.2), 40)
    assert betas[20] == pytest.approx(0.5)
    assert betas[40] == pytest.approx(0.2)
    assert all(np.diff(list(betas.values())) < 0.0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.4, 1.0])
@pytest.mark.parametrize("beta_fraction", [0.0, 0.3, 1.0])
def test_beta_stays_constant_if_its_end_is_its_start(beta: float, beta_fraction: float) -> None:
    model = make_model(beta=beta, beta_final=beta, beta_fraction=beta_fraction)
    assert set(betas_of(model, 30).values()) == {beta}


def test_beta_is_at_its_end_at_once_with_a_fraction_of_zero() -> None:
    model = make_model(beta=0.4, beta_final=0.9, beta_fraction=0.0)
    assert buffer_of(model).beta == 0.9
    assert set(betas_of(model, 5).values()) == {0.9}


@pytest.mark.parametrize("total", [1, 3])
@pytest.mark.parametrize("beta_fraction", [0.0, 0.1, 1.0])
def test_very_short_runs_have_a_beta_too(total: int, beta_fraction: float) -> None:
    betas = betas_of(make_model(beta_fraction=beta_fraction), total)
    assert list(betas) == list(range(1, total + 1))
    assert all(0.4 <= beta <= 1.0 for beta in betas.values())
    assert betas[total] == 1.0


@pytest.mark.parametrize(("beta", "beta_final"), [(0.4, 1.0), (0.4, 0.9), (0.9, 0.0), (0.6, 0.6)])
@pytest.mark.parametrize("beta_fraction", [0.5, 1.0])
def test_beta_stays_in_its_range_when_training_overruns(
    beta: float, beta_final: float, beta_fraction: float
) -> None:
    model = make_model(
        side_by_side(4), beta=beta, beta_final=beta_final, beta_fraction=beta_fraction
    )
    betas = betas_of(model, 10)
    assert list(betas) == [4, 8, 12]
    assert all(min(beta, beta_final) <= value <= max(beta, beta_final) for value in betas.values())
    assert betas[12] == beta_final


@pytest.mark.parametrize(
    ("beta", "beta_final", "beta_fraction"),
    [
        (0.2, 1.0, 0.8),
        (0.1, 1.0, 0.6),
        (0.4, 0.0, 0.4),
        (0.9, 0.0, 0.6),
        (0.0, 0.2, 0.8),
        (0.1, 0.4, 0.9),
    ],
)
def test_rounding_takes_no_beta_out_of_its_range(
    beta: float, beta_final: float, beta_fraction: float
) -> None:
    # With these, start + progress * (end - start) / fraction ends one rounding beyond the end
    assert not (
        min(beta, beta_final)
        <= LinearSchedule(beta, beta_final, beta_fraction)(1.0 - 10 * beta_fraction / 10)
        <= max(beta, beta_final)
    )
    model = make_model(beta=beta, beta_final=beta_final, beta_fraction=beta_fraction)
    betas = betas_of(model, 10)
    assert list(betas) == list(range(1, 11))
    assert all(min(beta, beta_final) <= value <= max(beta, beta_final) for value in betas.values())
    assert betas[10] == beta_final


def test_beta_follows_the_progress_of_sb3_over_several_learns() -> None:
    model = make_model()
    assert betas_of(model, 20)[20] == 1.0
    # The second 20 of 40 steps: halfway on
    betas = betas_of(model, 20, reset_num_timesteps=False)
    assert betas[21] == pytest.approx(0.4 + 0.6 * 21 / 40)
    assert betas[40] == 1.0
    # A new start
    betas = betas_of(model, 20)
    assert betas[1] == pytest.approx(0.43)
    assert betas[20] == 1.0


def test_draws_of_others_move_neither_beta_nor_priorities() -> None:
    model = make_model().learn(20)
    buffer = buffer_of(model)
    beta, leaves = buffer.beta, buffer.priorities
    for _ in range(100):
        buffer.sample(4)
    assert buffer.beta == beta
    np.testing.assert_array_equal(buffer.priorities, leaves)


def quadratic(progress_remaining: float) -> float:
    return 0.5 + 0.5 * (1.0 - progress_remaining) ** 2


def test_a_schedule_of_the_users_is_followed_and_survives_save_and_load(tmp_path: Path) -> None:
    model = make_model(beta=quadratic, beta_final=0.0, beta_fraction=0.1)
    assert buffer_of(model).beta == 0.5
    betas = betas_of(model, 10)
    assert betas == {step: quadratic(1.0 - step / 10) for step in range(1, 11)}

    model.save(tmp_path / "model")
    loaded = PERDQN.load(tmp_path / "model", env=TenStepEnv())
    assert callable(loaded.beta)
    assert betas_of(loaded, 10) == betas


def test_a_schedule_made_on_the_spot_survives_save_and_load(tmp_path: Path) -> None:
    floor = 0.25
    make_model(beta=lambda progress: floor + 0.5 * progress).save(tmp_path / "model")
    loaded = PERDQN.load(tmp_path / "model", env=TenStepEnv())
    assert betas_of(loaded, 4) == {step: 0.25 + 0.5 * (1.0 - step / 4) for step in range(1, 5)}


def test_a_schedule_of_the_users_sees_no_progress_beyond_the_end() -> None:
    # As documented, the progress remaining goes from 1 to 0, even if 12 steps are made of 10
    model = make_model(side_by_side(4), beta=lambda progress: 1.0 - 0.6 * progress)
    assert betas_of(model, 10)[12] == 1.0


@pytest.mark.parametrize("value", [2.0, -0.5, math.nan, None])
def test_a_schedule_that_returns_what_is_no_beta_is_refused_before_anything_is_drawn(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[Any] = [0.5]
    model = make_model(beta=lambda progress: returned[0])
    model.learn(3)
    buffer = buffer_of(model)
    before = [parameter.clone() for parameter in model.policy.parameters()]
    leaves = buffer.priorities
    returned[0] = value
    with pytest.raises(ValueError, match=r"`beta` must be .* got") as error:
        model.train(1, batch_size=2)
    assert str(error.value).endswith(f"got {value!r}")
    assert buffer.beta == 0.5
    np.testing.assert_array_equal(buffer.priorities, leaves)
    assert all(
        th.equal(one, other) for one, other in zip(before, model.policy.parameters(), strict=True)
    )


@pytest.mark.parametrize("value", [2.0, math.nan, None])
def test_a_schedule_that_starts_with_what_is_no_beta_is_refused_at_construction(
    value: Any,
) -> None:
    with pytest.raises(ValueError, match=r"`beta` must be .* got") as error:
        make_model(beta=lambda progress: value)
    assert str(error.value).endswith(f"got {value!r}")


@pytest.mark.parametrize("beta_fraction", [0.0, 0.5, 1.0])
def test_the_schedule_is_no_closure(beta_fraction: float) -> None:
    model = make_model(beta_fraction=beta_fraction)
    copy = pickle.loads(pickle.dumps(model.beta_schedule))
    for progress in (1.0, 0.7, 0.25, 0.0, -0.2):
        value = copy(progress)
        assert type(value) is float
        assert value == model.beta_schedule(progress)


@pytest.mark.parametrize(
    "beta",
    [0.4, np.float64(0.4), ConstantSchedule(0.4), lambda progress: np.float32(0.5)],
    ids=["float", "numpy", "schedule", "numpy schedule"],
)
def test_the_logged_beta_is_a_plain_float(beta: Any) -> None:
    model = make_model(beta=beta)
    model.set_logger(Logger(None, []))
    model.learn(2, log_interval=1000)
    assert type(model.logger.name_to_value["per/beta"]) is float
    assert type(buffer_of(model).beta) is float


# --- log


class Trained:
    """What the log should say after each ``train``, worked out from what passed the buffer."""

    def __init__(self, model: PERDQN, monkeypatch: pytest.MonkeyPatch) -> None:
        self.expected: list[dict[str, float]] = []
        buffer = buffer_of(model)
        sample, update_priorities, train = buffer.sample, buffer.update_priorities, model.train
        batches: list[PrioritizedReplayBufferSamples] = []
        errors: list[npt.NDArray[np.float64]] = []

        def recording_sample(batch_size: int, env: Any = None) -> PrioritizedReplayBufferSamples:
            batches.append(sample(batch_size, env=env))
            return batches[-1]

        def recording_update(indices: Any, td_errors: Any) -> None:
            errors.append(td_errors.double().numpy().ravel())
            update_priorities(indices, td_errors)

        def recording_train(gradient_steps: int, batch_size: int = 100) -> None:
            batches.clear()
            errors.clear()
            train(gradient_steps, batch_size)
            weights = [batch.weights.double().numpy().ravel() for batch in batches]
            huber = [np.where(abs(x) < 1.0, 0.5 * x**2, abs(x) - 0.5) for x in errors]
            leaves = [float(buffer.tree[i]) for i in range(buffer.size() * buffer.n_envs)]
            self.expected.append(
                {
                    "per/beta": 0.4 + 0.6 * (1.0 - model._current_progress_remaining),
                    "per/td_error_mean": float(np.mean([abs(x).mean() for x in errors])),
                    "per/weight_mean": float(np.mean([w.mean() for w in weights])),
                    "per/ess": float(
                        np.mean([w.sum() ** 2 / (w**2).sum() / w.size for w in weights])
                    ),
                    "per/priority_max": max(leaves),
                    "per/priority_mean": sum(leaves) / len(leaves),
                    "train/loss": float(
                        np.mean([(w * x).mean() for w, x in zip(weights, huber, strict=True)])
                    ),
                    "train/n_updates": float(gradient_steps * (len(self.expected) + 1)),
                }
            )

        monkeypatch.setattr(buffer, "sample", recording_sample)
        monkeypatch.setattr(buffer, "update_priorities", recording_update)
        monkeypatch.setattr(model, "train", recording_train)


@pytest.mark.parametrize("n_envs", [1, 2])
def test_the_log_has_one_row_an_episode_with_the_values_of_the_latest_training(
    n_envs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = make_model(
        side_by_side(n_envs),
        buffer_size=40,
        train_freq=10,
        gradient_steps=3,
        learning_rate=0.01,
        alpha=0.9,
        batch_size=8,
    )
    model.set_logger(configure(str(tmp_path), ["csv"]))
    trained = Trained(model, monkeypatch)
    model.learn(60 * n_envs, log_interval=1)
    model.logger.close()

    with open(tmp_path / "progress.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * n_envs
    assert len(trained.expected) == 6
    keys = sorted(key for key in rows[0] if key.startswith("per/"))
    assert keys == [
        "per/beta",
        "per/ess",
        "per/priority_max",
        "per/priority_mean",
        "per/td_error_mean",
        "per/weight_mean",
    ]
    # An episode ends before the training that its last step leads to
    assert {rows[0][key] for key in keys} == {""}
    for row, expected in zip(rows[n_envs::n_envs], trained.expected, strict=False):
        assert {key: float(row[key]) for key in expected} == pytest.approx(expected, rel=1e-5)
    # The values tell means over the steps from the latest step's, and priorities from their mean
    assert any(0.0 < expected["per/ess"] < 0.999 for expected in trained.expected)
    assert all(
        expected["per/priority_mean"] < expected["per/priority_max"]
        for expected in trained.expected
    )
    # Two environments end their episodes together: the second row has nothing new to say
    if n_envs == 2:
        assert {rows[n_envs + 1][key] for key in keys} == {""}


def test_priorities_in_the_log_are_those_of_stored_transitions_alone() -> None:
    model = make_model(buffer_size=1000, learning_starts=100, alpha=1.0, priority_eps=0.0)
    model.set_logger(Logger(None, []))
    model.learn(4)
    buffer_of(model).update_priorities([0, 1, 2, 3], [1.0, 2.0, 3.0, 4.0])
    model.train(1, batch_size=1)
    leaves = buffer_of(model).priorities
    assert leaves.shape == (4,)
    values = model.logger.name_to_value
    assert values["per/priority_max"] == leaves.max()
    assert values["per/priority_mean"] == pytest.approx(leaves.mean())


def test_all_statistics_are_plain_numbers_in_their_ranges() -> None:
    model = make_model(buffer_size=20)
    model.set_logger(Logger(None, []))
    model.learn(30, log_interval=1000)
    values = model.logger.name_to_value
    statistics = {key: value for key, value in values.items() if key.startswith("per/")}
    assert len(statistics) == 6
    for key, value in statistics.items():
        assert type(value) is float, key
        assert math.isfinite(value), key
    assert 0.0 < statistics["per/ess"] <= 1.0
    assert 0.0 < statistics["per/weight_mean"] <= 1.0


# --- buffers from files


def as_file(buffer: Any) -> io.BytesIO:
    return io.BytesIO(pickle.dumps(buffer))


def filled(
    buffer_class: Callable[..., Any],
    n_adds: int,
    n_envs: int = 1,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """A buffer of 6 rows with transitions that can be told from each other."""
    space = observation_space or TenStepEnv().observation_space
    actions = action_space or TenStepEnv().action_space
    buffer = buffer_class(6 * n_envs, space, actions, "cpu", n_envs=n_envs, **kwargs)
    for i in range(n_adds):
        obs = np.full((n_envs, *(space.shape or ())), i, dtype=space.dtype)
        rewards = 10.0 * i + np.arange(n_envs)
        # A time limit is no end: SB3 reads it from the infos
        infos = [{"TimeLimit.truncated": i % 4 == 3}] * n_envs
        done = np.full(n_envs, i % 4 == 3)
        buffer.add(obs, obs + 1, np.full(n_envs, i % 2), rewards, done, infos)
    return buffer


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("n_adds", [0, 4, 6, 9])
def test_a_prioritized_buffer_comes_back_as_it_was(n_envs: int, n_adds: int) -> None:
    stored = filled(PrioritizedReplayBuffer, n_adds, n_envs)
    n = stored.n_transitions
    stored.update_priorities(np.arange(n), np.linspace(0.1, 5.0, n) ** 3)
    stored.beta = 0.625
    model = make_model(side_by_side(n_envs))
    # Without a warning: nothing differs
    model.load_replay_buffer(as_file(stored))

    buffer = buffer_of(model)
    assert buffer is not stored
    np.testing.assert_array_equal(buffer.priorities, stored.priorities)
    assert buffer.tree.max_priority == stored.tree.max_priority
    assert buffer.tree.total == stored.tree.total
    assert (buffer.pos, buffer.full, buffer.beta) == (stored.pos, stored.full, 0.625)
    assert buffer.device == model.device
    if n:
        np.random.seed(3)
        ours = buffer.sample(16)
        np.random.seed(3)
        theirs = stored.sample(16)
        np.testing.assert_array_equal(ours.indices, theirs.indices)
        for mine, other in zip(ours, theirs, strict=True):
            if isinstance(mine, th.Tensor):
                assert th.equal(mine, other)


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("n_adds", [0, 4, 6, 9])
@pytest.mark.parametrize("buffer_class", [ReplayBuffer, NStepReplayBuffer])
@pytest.mark.parametrize("n_steps", [1, 2])
def test_a_plain_buffer_is_converted_with_a_warning(
    buffer_class: type[ReplayBuffer], n_adds: int, n_envs: int, n_steps: int
) -> None:
    stored = filled(buffer_class, n_adds, n_envs)
    model = make_model(
        side_by_side(n_envs),
        alpha=0.5,
        priority_eps=0.125,
        n_steps=n_steps,
        gamma=0.5,
        weight_normalization="buffer",
        replay_buffer_class=OwnPrioritizedBuffer,
    )
    n = min(n_adds, 6) * n_envs
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_replay_buffer(as_file(stored))
    messages = [str(warning.message) for warning in caught]
    for name, ours in (("n_steps", n_steps), ("gamma", 0.5)):
        if getattr(stored, name, ours) != ours:
            assert (
                f"with {name}={getattr(stored, name)!r}, this model has {ours!r}" in messages.pop(0)
            )
    (message,) = messages
    assert re.search(rf"is a {buffer_class.__name__} .* {n} tr.* priority 1", message)

    buffer = buffer_of(model)
    assert type(buffer) is OwnPrioritizedBuffer
    np.testing.assert_array_equal(buffer.priorities, np.ones(n))
    assert buffer.tree.total == n
    assert (buffer.pos, buffer.full, buffer.size()) == (stored.pos, stored.full, stored.size())
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        np.testing.assert_array_equal(getattr(buffer, name), getattr(stored, name))
    # The model's options, not those of the file
    assert (buffer.alpha, buffer.eps, buffer.weight_normalization) == (0.5, 0.125, "buffer")
    assert (buffer.n_steps, buffer.gamma) == (n_steps, 0.5)
    if n:
        buffer.update_priorities([0], [0.875])
        assert buffer.priorities[0] == 1.0
        buffer.update_priorities([0], [3.875])
        assert buffer.priorities[0] == 2.0
        model.learn(8)
        assert buffer.tree.check_valid() == (True, "")


@pytest.mark.parametrize("n_adds", [4, 9])
def test_conversion_leaves_out_what_saved_memory_has_no_next_observation(n_adds: int) -> None:
    stored = filled(ReplayBuffer, n_adds, **SAVING)
    model = make_model(**SAVING_MEMORY)
    with pytest.warns(UserWarning, match="priority 1"):
        model.load_replay_buffer(as_file(stored))
    expected = np.ones(stored.size())
    if stored.full:
        expected[stored.pos] = 0.0
    np.testing.assert_array_equal(buffer_of(model).priorities, expected)


@pytest.mark.parametrize(
    ("option", "in_file", "in_model", "model_option"),
    [
        ("alpha", 0.25, 0.5, "alpha"),
        ("eps", 0.5, 0.25, "priority_eps"),
        ("n_steps", 3, 2, "n_steps"),
        ("n_steps", 1, 2, "n_steps"),
        ("gamma", 0.5, 0.75, "gamma"),
        ("weight_normalization", "batch", "buffer", "weight_normalization"),
    ],
)
def test_options_that_differ_give_a_warning_and_those_of_the_model_apply(
    option: str, in_file: Any, in_model: Any, model_option: str
) -> None:
    stored = filled(PrioritizedReplayBuffer, 5, **{option: in_file})
    stored.update_priorities(np.arange(5), np.arange(5.0))
    model = make_model(**{model_option: in_model})
    with pytest.warns(UserWarning, match="which applies from now on") as caught:
        model.load_replay_buffer(as_file(stored))
    (warning,) = caught
    message = str(warning.message)
    assert f"{option}={in_file!r}" in message
    assert repr(in_model) in message
    assert warning.filename == __file__

    buffer = buffer_of(model)
    assert getattr(buffer, option) == in_model
    np.testing.assert_array_equal(buffer.priorities, stored.priorities)
    buffer.update_priorities([1], [8.0])
    assert buffer.priorities[1] == pytest.approx(
        (8.0 + model.priority_eps) ** model.alpha, rel=1e-14
    )


def test_each_option_that_differs_has_its_own_warning() -> None:
    stored = filled(PrioritizedReplayBuffer, 5, alpha=0.1, eps=0.2)
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.load_replay_buffer(as_file(stored))
    assert len(caught) == 2
    assert "alpha=0.1" in str(caught[0].message)
    assert "eps=0.2" in str(caught[1].message)


def test_another_way_of_storing_gives_a_warning_and_stays() -> None:
    stored = filled(PrioritizedReplayBuffer, 9, **SAVING)
    model = make_model()
    with pytest.warns(UserWarning, match=r"optimize_memory_usage=True, this model has False"):
        model.load_replay_buffer(as_file(stored))
    assert buffer_of(model).optimize_memory_usage
    np.testing.assert_array_equal(buffer_of(model).priorities, stored.priorities)


OTHER_BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)
OTHER_TYPE = spaces.Box(-10.0, 10.0, (3,), np.float64)


@pytest.mark.parametrize("buffer_class", [PrioritizedReplayBuffer, ReplayBuffer])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n_envs": 2}, r"number of environments there 2, here 1"),
        ({"observation_space": OTHER_BOX}, r"observations there .*\(4,\).*, here .*\(3,\)"),
        ({"observation_space": OTHER_TYPE}, r"observations there .*float64, here .*float32"),
        ({"action_space": spaces.Discrete(3)}, r"actions there Discrete\(3\), here Discrete\(2\)"),
    ],
    ids=["n_envs", "shape", "type", "actions"],
)
def test_a_buffer_that_does_not_fit_is_refused_and_the_models_own_kept(
    buffer_class: type[ReplayBuffer], kwargs: dict[str, Any], message: str
) -> None:
    model = make_model().learn(8)
    before = model.replay_buffer
    leaves = buffer_of(model).priorities
    with pytest.raises(ValueError, match=message):
        model.load_replay_buffer(as_file(filled(buffer_class, 5, **kwargs)))
    assert model.replay_buffer is before
    np.testing.assert_array_equal(buffer_of(model).priorities, leaves)
    model.learn(4)


@pytest.mark.parametrize("in_dict", [False, True])
def test_other_bounds_of_the_observations_do_not_matter(in_dict: bool) -> None:
    def space(bound: float) -> spaces.Space[Any]:
        box = spaces.Box(-bound, bound, (3,), np.float32)
        return spaces.Dict({"place": box, "room": spaces.Discrete(4)}) if in_dict else box

    stored = make_model(TenStepEnv(space(50.0))).learn(5)
    model = make_model(TenStepEnv(space(10.0)))
    model.load_replay_buffer(as_file(stored.replay_buffer))
    assert buffer_of(model).n_transitions == 5


def test_other_keys_of_the_observations_do_matter() -> None:
    def model_of(**keys: spaces.Space[Any]) -> Any:
        return make_model(TenStepEnv(spaces.Dict(keys)))

    stored = model_of(place=spaces.Discrete(3), room=spaces.Discrete(4)).replay_buffer
    for keys in ({"place": spaces.Discrete(3)}, {"place": spaces.Discrete(3), "room": OTHER_BOX}):
        with pytest.raises(ValueError, match=r"observations there .*'room': 'Discrete"):
            model_of(**keys).load_replay_buffer(as_file(stored))


def test_the_beta_of_the_model_applies_to_a_converted_buffer_at_once() -> None:
    model = make_model(beta=0.5)
    with pytest.warns(UserWarning, match="priority 1"):
        model.load_replay_buffer(as_file(filled(ReplayBuffer, 5)))
    assert buffer_of(model).beta == 0.5


def test_stored_priorities_are_said_to_be_converted_where_they_are() -> None:
    stored = filled(PrioritizedReplayBuffer, 5)
    stored.update_priorities(np.arange(5), np.arange(1.0, 6.0))
    model = make_model(prioritization="rank")
    with pytest.warns(UserWarning, match="prioritization='prop.*has 'rank', .* are converted$"):
        model.load_replay_buffer(as_file(stored))
    np.testing.assert_allclose(buffer_of(model).priorities, np.arange(1.0, 6.0), rtol=1e-5)
    # Elsewhere they stay, and that is what is said
    with pytest.warns(UserWarning, match="eps=1e-06, .* stored priorities stay$"):
        make_model(priority_eps=0.5).load_replay_buffer(as_file(stored))


# --- plain DQN


def test_plain_dqn_on_a_prioritized_buffer_gets_one_warning_that_names_perdqn() -> None:
    model = DQN(
        "MlpPolicy",
        TenStepEnv(),
        replay_buffer_class=PrioritizedReplayBuffer,
        **{**SMALL, "learning_starts": 0, "batch_size": 1, "gradient_steps": 250},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.learn(3)
        assert not caught
        model.learn(2, reset_num_timesteps=False)
    assert model._n_updates == 1250
    (warning,) = caught
    assert warning.category is UserWarning
    assert "PERDQN" in str(warning.message)


def test_perdqn_gets_no_such_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first draw comes before the first update: it takes a second one to tell
    monkeypatch.setattr("sb3_per.buffers.replay.DRAWS_BEFORE_WARNING", 2)
    model = make_model(replay_buffer_class=PrioritizedReplayBuffer).learn(10)
    assert model._n_updates == 10
    plain = small_model(
        algorithm=DQN, replay_buffer_class=PrioritizedReplayBuffer, learning_starts=0
    )
    with pytest.warns(UserWarning, match="PERDQN"):
        plain.learn(10)


# --- options that change later


def test_options_set_on_the_model_apply_from_the_next_training_on() -> None:
    model = make_model().learn(10)
    buffer = buffer_of(model)
    model.alpha, model.priority_eps, model.weight_normalization = 0.25, 0.5, "buffer"
    model.gamma, model.beta, model.beta_final = 0.5, 0.125, 0.125
    assert (buffer.alpha, buffer.eps) == (0.6, 1e-6)
    model.train(1, batch_size=4)
    assert (buffer.alpha, buffer.eps, buffer.weight_normalization) == (0.25, 0.5, "buffer")
    assert (buffer.gamma, buffer.beta) == (0.5, 0.125)


@pytest.mark.parametrize(
    ("name", "value"), [("alpha", -3), ("beta_final", 1.5), ("loss", "foo"), ("priority_eps", None)]
)
def test_an_option_set_to_what_it_can_not_be_is_refused_by_the_next_training(
    name: str, value: Any
) -> None:
    model = make_model().learn(10)
    leaves = buffer_of(model).priorities
    setattr(model, name, value)
    with pytest.raises(ValueError, match=f"`{name}`.*got {value!r}"):
        model.train(1, batch_size=4)
    np.testing.assert_array_equal(buffer_of(model).priorities, leaves)


def test_a_buffer_of_another_model_follows_the_one_that_trains_on_it() -> None:
    lender, borrower = make_model(alpha=0.6).learn(10), make_model(alpha=0.1).learn(10)
    borrower.replay_buffer = lender.replay_buffer
    borrower.train(1, batch_size=4)
    assert buffer_of(lender).alpha == 0.1


def test_a_buffer_without_priorities_is_told_from_one_with() -> None:
    model = make_model()
    plain = ReplayBuffer(20, model.observation_space, model.action_space)
    model.replay_buffer = plain
    with pytest.raises(ValueError, match=r"a ReplayBuffer, which has no.*from_replay_buffer"):
        model.learn(10)
    model.replay_buffer = PrioritizedReplayBuffer.from_replay_buffer(plain)
    assert model.learn(10)._n_updates > 0


def test_a_schedule_of_sb3_is_not_refused_for_its_rounding() -> None:
    schedule = LinearSchedule(0.2, 1.0, 0.8)
    assert max(schedule(1.0 - step / 10) for step in range(11)) > 1.0
    betas = betas_of(make_model(beta=schedule), 10)
    assert max(betas.values()) == betas[10] == 1.0
    with pytest.raises(ValueError, match=r"`beta`.*got 1\.001"):
        make_model(beta=lambda _: 1.001)


@pytest.mark.parametrize("value", [None, "3", 2.5, 0])
def test_the_n_step_class_has_its_number_checked(value: Any) -> None:
    kwargs = {"n_steps": value}
    with pytest.raises(ValueError, match=f"`n_steps` must be .*, got {value!r}"):
        make_model(replay_buffer_class=NStepReplayBuffer, replay_buffer_kwargs=kwargs)
