"""``initial_priority="td_error"``: new transitions begin with the priority of their own error."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer
from torch import nn

from model_helpers import SAVING_MEMORY, TenStepEnv, silent, small_model
from sb3_per import PERDQN, PrioritizedReplayBuffer
from sb3_per.callbacks import td_errors_in_buffer
from sb3_per.per_qrdqn import PERQRDQN

ALGORITHMS = (PERDQN, PERQRDQN)


def make_model(algorithm: Any = PERDQN, env: Any = "CartPole-v1", **options: Any) -> Any:
    """A model whose first 40 steps are behind it, 30 of them without updates."""
    base = {
        "learning_starts": 30,
        "buffer_size": 100,
        "train_freq": 4,
        "batch_size": 32,
        "initial_priority": "td_error",
    }
    model = small_model(env, algorithm, **{**base, **options}).learn(40)
    return silent(model)


def collect(model: Any, n_steps: int) -> None:
    """Steps without an update."""
    freq, model.train_freq = model.train_freq, (n_steps, "step")
    model._convert_train_freq()
    _, callback = model._setup_learn(n_steps, reset_num_timesteps=False)
    model.collect_rollouts(
        model.env, callback, model.train_freq, model.replay_buffer, learning_starts=0
    )
    model.train_freq = freq


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that new transitions need several."""
    monkeypatch.setattr("sb3_per.common.off_policy.CHUNK", 3)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_steps": 3},
        {"prioritization": "rank"},
        SAVING_MEMORY,
        {"env": make_vec_env("CartPole-v1", 3)},
        {"env": TenStepEnv(spaces.Dict({"room": spaces.Discrete(5), "door": spaces.Box(-1, 1)}))},
        # Fewer places than new transitions
        {"buffer_size": 9, "learning_starts": 5},
    ],
    ids=["plain", "n-step", "rank", "memory", "envs", "dict", "small"],
)
def test_new_transitions_get_their_own_priority_and_others_keep_theirs(
    algorithm: Any, options: dict[str, Any]
) -> None:
    model = make_model(algorithm, **options)
    buffer: PrioritizedReplayBuffer = model.replay_buffer
    model.train(0)
    assert len(buffer.new_transitions()) == 0
    before = buffer.priorities
    collect(model, 11)
    new = buffer.new_transitions()
    n_expected = min(11 * buffer.n_envs, buffer.tree.capacity - buffer.optimize_memory_usage)
    assert len(set(new)) == len(new) == n_expected
    at_largest = buffer.priorities
    assert set(at_largest[new]) == {at_largest.max()}

    np.random.seed(5)
    model.train(0)
    assert np.random.random_sample() == np.random.RandomState(5).random_sample()
    priorities = buffer.priorities
    errors = model.td_errors(buffer.batch_of(new)).detach().numpy().ravel()
    if algorithm is PERDQN:
        np.testing.assert_allclose(errors, td_errors_in_buffer(model, new), rtol=1e-5, atol=1e-7)
    exponent = 1.0 if model.prioritization == "rank" else model.alpha
    expected = (np.abs(errors.astype(np.float64)) + model.priority_eps) ** exponent
    np.testing.assert_allclose(priorities[new], expected, rtol=1e-4)
    assert (priorities[new] != at_largest[new]).any()
    others = np.setdiff1d(np.arange(len(before)), new)
    np.testing.assert_array_equal(priorities[others], at_largest[others])
    # Known by now
    model.train(0)
    np.testing.assert_array_equal(buffer.priorities, priorities)


def test_without_the_option_they_keep_the_largest() -> None:
    model = make_model(initial_priority="max")
    collect(model, 7)
    before = model.replay_buffer.priorities
    model.train(0)
    np.testing.assert_array_equal(model.replay_buffer.priorities, before)
    # Turned on later, it takes all that came since the beginning
    model.initial_priority = "td_error"
    model.train(0)
    errors = np.abs(td_errors_in_buffer(model))
    np.testing.assert_allclose(
        model.replay_buffer.priorities, (errors + model.priority_eps) ** model.alpha, rtol=1e-4
    )


def test_training_draws_by_these_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before the first batch of the same call is drawn."""
    model = make_model()
    collect(model, 7)
    buffer = model.replay_buffer
    expected = model.td_errors(buffer.batch_of(buffer.new_transitions()))
    seen = []
    sample = buffer.sample

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(buffer.priorities)
        return sample(*args, **kwargs)

    new = buffer.new_transitions()
    monkeypatch.setattr(buffer, "sample", spy)
    model.train(2)
    np.testing.assert_allclose(
        seen[0][new],
        (np.abs(expected.detach().numpy().ravel()) + model.priority_eps) ** model.alpha,
        rtol=1e-4,
    )
    assert len(seen) == 2


def test_dropout_and_batch_norm_do_not_notice() -> None:
    model = make_model()
    modules = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model.q_net.q_net = modules
    collect(model, 7)
    before = {name: value.clone() for name, value in modules.state_dict().items()}
    state = th.get_rng_state()
    model.train(0)
    assert th.equal(th.get_rng_state(), state)
    after = modules.state_dict()
    assert all(th.equal(after[name], value) for name, value in before.items())
    assert modules.training


def test_a_pickle_knows_which_are_new(tmp_path: Path) -> None:
    model = make_model()
    model.train(0)
    collect(model, 5)
    new = model.replay_buffer.new_transitions()
    assert len(new) == 5
    model.save_replay_buffer(tmp_path / "buffer")
    other = make_model(seed=1)
    other.load_replay_buffer(tmp_path / "buffer")
    before = other.replay_buffer.priorities
    np.testing.assert_array_equal(other.replay_buffer.new_transitions(), new)
    other.train(0)
    changed = np.flatnonzero(other.replay_buffer.priorities != before)
    assert set(changed) <= set(new)
    assert len(changed) >= 4
    assert len(pickle.loads(pickle.dumps(other.replay_buffer)).new_transitions()) == 0


def test_the_option_is_saved_and_can_be_replaced(tmp_path: Path) -> None:
    model = make_model()
    model.save(tmp_path / "model")
    assert PERDQN.load(tmp_path / "model").initial_priority == "td_error"
    loaded = PERDQN.load(tmp_path / "model", initial_priority="max")
    assert loaded.initial_priority == "max"


def test_an_error_that_is_not_finite_leaves_all_as_it_was() -> None:
    model = make_model()
    model.train(0)
    collect(model, 4)
    with th.no_grad():
        next(iter(model.q_net.parameters())).fill_(np.nan)
    before = model.replay_buffer.priorities
    with pytest.raises(ValueError, match="TD errors must be finite, got nan for transition 40"):
        model.train(1)
    np.testing.assert_array_equal(model.replay_buffer.priorities, before)
    assert len(model.replay_buffer.new_transitions()) == 4


def test_hindsight_is_refused_when_made_and_when_set() -> None:
    env = BitFlippingEnv(4)
    options: dict[str, Any] = {"replay_buffer_class": HerReplayBuffer, "learning_starts": 20}
    message = "`initial_priority='td_error'` is not supported with hindsight"
    with pytest.raises(ValueError, match=message):
        PERDQN("MultiInputPolicy", env, initial_priority="td_error", **options)
    model = PERDQN("MultiInputPolicy", env, **options).learn(30)
    model.initial_priority = "td_error"
    with pytest.raises(ValueError, match=message):
        model.train(1)
