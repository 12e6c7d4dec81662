"""Models and buffers to files and back, between PERDQN and DQN, and training that goes on."""

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.save_util import load_from_zip_file

from buffer_helpers import assert_same_batches
from model_helpers import (
    SAVING_MEMORY,
    TenStepEnv,
    buffer_of,
    parameters_of,
    same,
    side_by_side,
    silent,
    small_model,
)
from sb3_per import PERDQN, PrioritizedReplayBuffer, PrioritizedReplayBufferSamples

FloatArray = npt.NDArray[np.float32]

ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


class OwnPrioritizedBuffer(PrioritizedReplayBuffer):
    """What a user derives from the class of this package."""


def falling(progress_remaining: float) -> float:
    return 0.25 + 0.5 * progress_remaining


def observations(n: int = 50) -> FloatArray:
    return np.random.default_rng(0).normal(scale=3.0, size=(n, 3)).astype(np.float32)


def greedy_actions(model: DQN) -> list[int]:
    actions, _ = model.predict(observations(), deterministic=True)
    return [int(action) for action in actions]


def q_values(model: DQN) -> th.Tensor:
    with th.no_grad():
        values: th.Tensor = model.q_net(th.as_tensor(observations()))
    return values


def assert_same_buffers(one: PrioritizedReplayBuffer, other: PrioritizedReplayBuffer) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    np.testing.assert_array_equal(one.priorities, other.priorities)
    assert one.tree.total == other.tree.total
    assert one.tree.max_priority == other.tree.max_priority
    for name in ("pos", "full", "beta", "alpha", "eps", "n_steps", "gamma", "n_transitions"):
        assert getattr(one, name) == getattr(other, name), name


def hyperparameters(model: PERDQN) -> dict[str, Any]:
    """Everything public that the model was told, in a form that can be compared."""
    # Attributes of the process, and those that are created again
    other = {
        "policy", "q_net", "q_net_target", "env", "replay_buffer", "ep_info_buffer",
        "ep_success_buffer", "start_time", "action_noise", "batch_norm_stats",
        "batch_norm_stats_target",
    }  # fmt: skip
    values: dict[str, Any] = {}
    for name, value in vars(model).items():
        if name.startswith("_") or name in other:
            continue
        if callable(value) and not isinstance(value, type):
            # Schedules: by what they return
            value = [value(progress) for progress in (1.0, 0.75, 0.5, 0.0)]
        values[name] = value
    return values


# --- models


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {
            "alpha": 0.3, "beta": 0.1, "beta_final": 0.7, "beta_fraction": 0.6,
            "priority_eps": 0.125, "weight_normalization": "buffer", "double_q": True,
            "loss": "mse", "n_steps": 3, "gamma": 0.75,
        },
        {"replay_buffer_class": NStepReplayBuffer},
        {"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 5}},
        {"replay_buffer_class": ReplayBuffer, "n_steps": 3},
        {"replay_buffer_class": OwnPrioritizedBuffer, "replay_buffer_kwargs": {"alpha": 0.6}},
        {"beta": falling},
        SAVING_MEMORY,
    ],
    ids=lambda kwargs: "-".join(kwargs) or "defaults",
)  # fmt: skip
def test_saving_and_loading_three_times_changes_nothing(
    kwargs: dict[str, Any], tmp_path: Path
) -> None:
    first = small_model(**kwargs).learn(20)
    expected = hyperparameters(first)
    assert {"alpha", "beta", "n_steps", "gamma", "replay_buffer_kwargs"} <= set(expected)
    model = first
    stored: list[dict[str, Any]] = []
    for generation in range(3):
        path = tmp_path / f"{generation}.zip"
        model.save(path)
        data = load_from_zip_file(path)[0]
        assert data is not None
        stored.append(data)
        model = PERDQN.load(path, env=TenStepEnv(), device="cpu")
        assert hyperparameters(model) == expected
        assert same(parameters_of(model), parameters_of(first))
        assert buffer_of(model).n_transitions == 0
        assert type(buffer_of(model)) is type(buffer_of(first))
        for name in ("alpha", "eps", "n_steps", "gamma", "weight_normalization"):
            assert getattr(buffer_of(model), name) == getattr(buffer_of(first), name)
    assert stored[0].keys() == stored[1].keys() == stored[2].keys()
    assert "beta_schedule" not in stored[0]
    model.learn(12)


def test_the_zip_never_contains_the_buffer(tmp_path: Path) -> None:
    sizes = []
    for buffer_size in (60, 200_000):
        model = small_model(buffer_size=buffer_size).learn(20)
        path = tmp_path / f"{buffer_size}.zip"
        model.save(path)
        sizes.append(path.stat().st_size)
        with zipfile.ZipFile(path) as archive:
            assert sorted(archive.namelist()) == [
                "_stable_baselines3_version",
                "data",
                "policy.optimizer.pth",
                "policy.pth",
                "pytorch_variables.pth",
                "system_info.txt",
            ]
        data = load_from_zip_file(path)[0]
        assert data is not None
        assert "replay_buffer" not in data
        assert not any(isinstance(value, ReplayBuffer) for value in data.values())
    assert abs(sizes[1] - sizes[0]) < 1000


def test_options_given_at_load_take_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_model().learn(30).save(tmp_path / "model")
    changed: dict[str, Any] = {
        "alpha": 0.3,
        "beta": 0.9,
        "beta_final": 0.8,
        "beta_fraction": 0.5,
        "priority_eps": 0.25,
        "weight_normalization": "buffer",
        "double_q": True,
        "loss": "mse",
        "n_steps": 3,
        "gamma": 0.5,
    }
    model = PERDQN.load(tmp_path / "model", env=TenStepEnv(), **changed)
    for name, value in changed.items():
        assert getattr(model, name) == value
    buffer = buffer_of(model)
    assert (buffer.alpha, buffer.eps, buffer.beta) == (0.3, 0.25, 0.9)
    assert (buffer.n_steps, buffer.gamma, buffer.weight_normalization) == (3, 0.5, "buffer")

    model.learning_starts = 1000
    silent(model.learn(20))
    update_priorities = buffer.update_priorities
    fed_back: list[Any] = []

    def recording_update(indices: Any, td_errors: Any) -> None:
        fed_back.append((indices, td_errors.double().numpy().ravel()))
        update_priorities(indices, td_errors)

    monkeypatch.setattr(buffer, "update_priorities", recording_update)
    model._current_progress_remaining = 0.75
    model.train(1, batch_size=8)
    ((indices, errors),) = fed_back
    np.testing.assert_allclose(buffer.priorities[indices], (abs(errors) + 0.25) ** 0.3)
    # Halfway through the half of training in which it changes
    assert buffer.beta == pytest.approx(0.85)
    assert model.logger.name_to_value["per/beta"] == buffer.beta
    # With all priorities equal, as in the first step, the loss is the plain mean of squares
    assert model.logger.name_to_value["train/loss"] == pytest.approx((errors**2).mean(), rel=1e-5)


def run_python(code: str, *arguments: Any, cwd: Path) -> Any:
    """
    :return: what the last line that a fresh interpreter prints says in JSON
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        # For a hang only
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_fresh_process_needs_nothing_but_the_import(tmp_path: Path) -> None:
    model = small_model(double_q=True, n_steps=3).learn(60)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    np.save(tmp_path / "observations", observations())
    code = """
        import sys, json
        import sb3_per

        model = sb3_per.PERDQN.load(sys.argv[1])
        model.load_replay_buffer(sys.argv[2])

        import numpy as np

        actions, _ = model.predict(np.load(sys.argv[3]), deterministic=True)
        np.random.seed(5)
        indices = [model.replay_buffer.sample(16).indices.tolist() for _ in range(3)]
        print(json.dumps([actions.tolist(), indices, model.replay_buffer.priorities.tolist()]))
    """
    actions, indices, priorities = run_python(
        code,
        tmp_path / "model",
        tmp_path / "buffer.pkl",
        tmp_path / "observations.npy",
        cwd=tmp_path,
    )
    assert actions == greedy_actions(model)
    assert len(set(actions)) == 2
    np.random.seed(5)
    assert indices == [buffer_of(model).sample(16).indices.tolist() for _ in range(3)]
    assert priorities == buffer_of(model).priorities.tolist()


# --- between DQN and PERDQN


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_model_of_dqn_goes_on_as_perdqn(n_steps: int, tmp_path: Path) -> None:
    plain = small_model(algorithm=DQN, n_steps=n_steps, gamma=0.75).learn(40)
    plain.save(tmp_path / "dqn")
    model = PERDQN.load(tmp_path / "dqn", env=TenStepEnv())
    assert same(parameters_of(model), parameters_of(plain))
    assert greedy_actions(model) == greedy_actions(plain)
    assert (model.alpha, model.beta, model.beta_final, model.priority_eps) == (0.6, 0.4, 1.0, 1e-6)
    buffer = buffer_of(model)
    assert (buffer.n_steps, buffer.gamma, buffer.alpha) == (n_steps, 0.75, 0.6)

    model.learn(50)
    # 40 of 50 at least are feedback of training, at various priorities
    assert model._n_updates == plain._n_updates + 40
    assert buffer.n_transitions == 50
    assert len(np.unique(buffer.priorities)) > 20
    # And from there on it is a model of PERDQN
    model.save(tmp_path / "perdqn")
    again = PERDQN.load(tmp_path / "perdqn", env=TenStepEnv())
    assert hyperparameters(again) == hyperparameters(model)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_the_buffer_of_dqn_goes_along(n_steps: int, tmp_path: Path) -> None:
    plain = small_model(algorithm=DQN, n_steps=n_steps).learn(75)
    plain.save(tmp_path / "dqn")
    plain.save_replay_buffer(tmp_path / "buffer")
    model = PERDQN.load(tmp_path / "dqn", env=TenStepEnv())
    with pytest.warns(UserWarning, match="60 transitions all start at priority 1"):
        model.load_replay_buffer(tmp_path / "buffer")
    theirs = plain.replay_buffer
    assert theirs is not None
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(buffer_of(model), name), getattr(theirs, name))
    np.testing.assert_array_equal(buffer_of(model).priorities, np.ones(60))
    model.learn(10, reset_num_timesteps=False)
    assert buffer_of(model).pos == 25
    assert len(np.unique(buffer_of(model).priorities)) > 5


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_model_of_perdqn_goes_on_as_dqn(n_steps: int, tmp_path: Path) -> None:
    model = small_model(n_steps=n_steps, gamma=0.75).learn(60)
    model.save(tmp_path / "perdqn")
    plain = DQN.load(tmp_path / "perdqn", env=TenStepEnv())
    assert same(parameters_of(plain), parameters_of(model))
    assert th.equal(q_values(plain), q_values(model))
    assert greedy_actions(plain) == greedy_actions(model)
    assert len(set(greedy_actions(plain))) == 2
    assert type(plain.replay_buffer) is (NStepReplayBuffer if n_steps == 3 else ReplayBuffer)
    plain.learn(30)
    assert plain._n_updates == model._n_updates + 20
    assert not same(parameters_of(plain), parameters_of(model))


# --- other environments, other sizes


def test_a_model_goes_on_with_another_number_of_environments(tmp_path: Path) -> None:
    model = small_model().learn(20)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    wide = PERDQN.load(tmp_path / "model", env=side_by_side(4))
    own = buffer_of(wide)
    assert (wide.n_envs, own.n_envs, own.buffer_size, own.tree.capacity) == (4, 4, 15, 60)
    with pytest.raises(ValueError, match="number of environments there 1, here 4"):
        wide.load_replay_buffer(tmp_path / "buffer")
    assert wide.replay_buffer is own

    wide.learn(100)
    assert own.full
    assert own.n_transitions == 60
    assert (own.priorities > 0.0).all()
    assert own.tree.check_valid() == (True, "")

    wide.save(tmp_path / "wide")
    narrow = PERDQN.load(tmp_path / "wide", env=TenStepEnv())
    assert (buffer_of(narrow).n_envs, buffer_of(narrow).buffer_size) == (1, 60)
    narrow.learn(20)


def test_a_model_loads_with_room_for_one_transition_as_rl_zoo_does_for_playing(
    tmp_path: Path,
) -> None:
    model = small_model().learn(60)
    model.save(tmp_path / "model")
    small = PERDQN.load(tmp_path / "model", env=TenStepEnv(), buffer_size=1)
    assert buffer_of(small).tree.capacity == 1
    assert greedy_actions(small) == greedy_actions(model)
    small.learn(20)
    assert small._n_updates == model._n_updates + 10
    batch = buffer_of(small).sample(4)
    np.testing.assert_array_equal(batch.indices, 0)
    assert th.equal(batch.weights, th.ones(4, 1))


def test_a_model_loads_without_an_environment(tmp_path: Path) -> None:
    model = small_model().learn(30)
    model.save(tmp_path / "model")
    loaded = PERDQN.load(tmp_path / "model")
    assert greedy_actions(loaded) == greedy_actions(model)
    loaded.set_env(TenStepEnv())
    loaded.learn(20)


# --- buffers


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("total", [42, 90])
def test_a_buffer_comes_back_bit_for_bit_and_draws_the_same_batches(
    n_envs: int, n_steps: int, total: int, tmp_path: Path
) -> None:
    model = small_model(side_by_side(n_envs), n_steps=n_steps).learn(total)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = PERDQN.load(tmp_path / "model", env=side_by_side(n_envs))
    # No warning: the options are the same
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert buffer_of(model).full is (total == 90)
    assert_same_buffers(buffer_of(loaded), buffer_of(model))
    assert_same_batches(buffer_of(loaded), buffer_of(model))
    assert len(np.unique(buffer_of(loaded).priorities)) > 10


def test_the_heir_of_an_outlier_has_its_priority_after_loading_until_it_is_replayed(
    tmp_path: Path,
) -> None:
    model = small_model(alpha=1.0, priority_eps=0.0, buffer_size=4, learning_starts=1000).learn(4)
    buffer_of(model).update_priorities([0, 1, 2, 3], [1000.0, 1.0, 1.0, 1.0])
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = small_model(alpha=1.0, priority_eps=0.0, buffer_size=4, learning_starts=1000)
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert buffer_of(loaded).tree.max_priority == 1000.0
    # The place of the outlier is the next to be written; what is new is as likely as it was
    loaded.learn(1)
    np.testing.assert_array_equal(buffer_of(loaded).priorities, [1000.0, 1.0, 1.0, 1.0])
    buffer_of(loaded).update_priorities([0], [1.0])
    loaded.learn(1, reset_num_timesteps=False)
    np.testing.assert_array_equal(buffer_of(loaded).priorities, np.ones(4))


# --- going on


@pytest.mark.parametrize(("n_envs", "total", "sizes"), [(1, 3, [1, 2, 3]), (4, 12, [4, 8, 12])])
def test_going_on_without_the_buffer_starts_from_the_first_transition(
    n_envs: int, total: int, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = side_by_side(n_envs)
    small_model(env, batch_size=32).learn(20).save(tmp_path / "model")
    model = PERDQN.load(tmp_path / "model", env=side_by_side(n_envs))
    buffer = buffer_of(model)
    sample = buffer.sample
    seen: list[tuple[int, PrioritizedReplayBufferSamples]] = []

    def recording_sample(batch_size: int, env: Any = None) -> PrioritizedReplayBufferSamples:
        batch = sample(batch_size, env=env)
        seen.append((buffer.n_transitions, batch))
        return batch

    monkeypatch.setattr(buffer, "sample", recording_sample)
    model.learn(total, reset_num_timesteps=False)
    assert [n for n, _ in seen] == sizes
    for n, batch in seen:
        assert batch.weights.shape == (32, 1)
        assert set(batch.indices) <= set(range(n))
    assert th.equal(seen[0][1].weights, th.ones(32, 1))
    assert np.isfinite(model.logger.name_to_value["train/loss"])
    assert all(bool(parameter.isfinite().all()) for parameter in model.policy.parameters())


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_model_and_its_buffer_train_on_as_if_they_had_never_been_away(
    n_steps: int, tmp_path: Path
) -> None:
    model = small_model(side_by_side(2), n_steps=n_steps, double_q=True, alpha=0.7).learn(70)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = PERDQN.load(tmp_path / "model", env=side_by_side(2))
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert same(parameters_of(loaded), parameters_of(model))

    for each in (model, loaded):
        silent(each)
        np.random.seed(9)
        each.train(5, batch_size=8)
    # Equal optimizer states, too: Adam's moments came along
    assert same(parameters_of(loaded), parameters_of(model))
    assert_same_buffers(buffer_of(loaded), buffer_of(model))
    assert loaded._n_updates == model._n_updates
    for key in ("per/beta", "per/ess", "per/td_error_mean", "train/loss", "train/n_updates"):
        assert loaded.logger.name_to_value[key] == model.logger.name_to_value[key]


def test_two_continuations_from_the_same_files_agree(tmp_path: Path) -> None:
    model = small_model().learn(70)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    continued = []
    for _ in range(2):
        loaded = PERDQN.load(tmp_path / "model", env=TenStepEnv())
        loaded.load_replay_buffer(tmp_path / "buffer")
        loaded.set_random_seed(4)
        continued.append(loaded.learn(40, reset_num_timesteps=False))
    one, other = continued
    assert one.num_timesteps == other.num_timesteps == 110
    assert one._n_updates == model._n_updates + 40
    assert same(parameters_of(one), parameters_of(other))
    assert_same_buffers(buffer_of(one), buffer_of(other))


def test_beta_goes_on_by_the_progress_of_the_whole_training(tmp_path: Path) -> None:
    model = small_model(learning_starts=0).learn(20)
    assert buffer_of(model).beta == 1.0
    model.save(tmp_path / "model")

    def first_beta(reset_num_timesteps: bool) -> float:
        loaded = PERDQN.load(tmp_path / "model", env=TenStepEnv())
        # Not what the last training ended with: none has begun
        assert buffer_of(loaded).beta == 0.4
        betas = []

        def note(*_: Any) -> bool:
            betas.append(buffer_of(loaded).beta)
            return True

        loaded.learn(20, callback=note, reset_num_timesteps=reset_num_timesteps)
        assert buffer_of(loaded).beta == 1.0
        # Called before the training that a step leads to
        return betas[1]

    assert first_beta(reset_num_timesteps=True) == pytest.approx(0.4 + 0.6 * 1 / 20)
    assert first_beta(reset_num_timesteps=False) == pytest.approx(0.4 + 0.6 * 21 / 40)
