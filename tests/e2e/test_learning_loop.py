"""PERDQN in SB3's training loop: seeds, environments of all kinds, callbacks, learning."""

import json
import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CheckpointCallback,
    EvalCallback,
    LogEveryNTimesteps,
    StopTrainingOnMaxEpisodes,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from model_helpers import SAVING_MEMORY, buffer_of, silent, small_model
from sb3_per import PERDQN, PrioritizedReplayBufferSamples
from sb3_per_envs import GridWorldEnv

GRID_WORLD = "sb3_per_envs:sb3_per/GridWorld-v0"


class CountingEnv(gym.Env[Any, Any]):
    """Observes and rewards the number of steps so far; ends after ``length`` of them, or never."""

    observation_space = spaces.Box(0.0, 1e6, (1,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self, length: int | None = 10) -> None:
        self.length = length

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        observation = np.full(1, self.n_steps, dtype=np.float32)
        return observation, float(self.n_steps), self.n_steps == self.length, False, {}


make_model = partial(small_model, buffer_size=80, learning_starts=8)


class Trace(NamedTuple):
    """What a run did, step by step."""

    actions: list[int]
    losses: list[float]
    indices: list[list[int]]
    parameters: list[float]
    priorities: list[float]


class Tracer(BaseCallback):
    def __init__(self) -> None:
        super().__init__()
        self.actions: list[int] = []
        self.losses: list[float] = []

    def _on_step(self) -> bool:
        self.actions.extend(int(action) for action in self.locals["actions"])
        self.losses.append(self.model.logger.name_to_value["train/loss"])
        return True


def trace(monkeypatch: pytest.MonkeyPatch, env: Any, total: int, **kwargs: Any) -> Trace:
    model = make_model(env, **kwargs)
    # One whose log is never written out, since that would clear it
    silent(model)
    buffer = buffer_of(model)
    sample = buffer.sample
    indices: list[list[int]] = []

    def recording_sample(batch_size: int, env: Any = None) -> PrioritizedReplayBufferSamples:
        batch = sample(batch_size, env=env)
        indices.append(batch.indices.tolist())
        return batch

    monkeypatch.setattr(buffer, "sample", recording_sample)
    tracer = Tracer()
    model.learn(total, callback=tracer, log_interval=10**6)
    parameters = [
        value for parameter in model.policy.parameters() for value in parameter.flatten().tolist()
    ]
    return Trace(tracer.actions, tracer.losses, indices, parameters, buffer.priorities.tolist())


# --- seeds


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    n_envs: int, n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(seed: int) -> Trace:
        env = DummyVecEnv([lambda: GridWorldEnv(length=4, start=None)] * n_envs)
        return trace(monkeypatch, env, 80, seed=seed, n_steps=n_steps, exploration_fraction=1.0)

    one = run(seed=1)
    np.random.random(3)
    same = run(seed=1)
    assert same == one
    assert len(set(one.losses)) > 10
    other = run(seed=2)
    for name in Trace._fields:
        assert getattr(other, name) != getattr(one, name), name


# Runs here and in a process of its own
FINGERPRINT = textwrap.dedent(
    """
    import hashlib
    import json

    from stable_baselines3.common.vec_env import DummyVecEnv

    from sb3_per import PERDQN
    from sb3_per_envs import GridWorldEnv

    model = PERDQN(
        "MlpPolicy",
        DummyVecEnv([lambda: GridWorldEnv(length=4, start=None)] * 2),
        buffer_size=80,
        learning_starts=8,
        train_freq=1,
        batch_size=8,
        n_steps=3,
        double_q=True,
        seed=7,
        device="cpu",
        policy_kwargs={"net_arch": [8]},
    ).learn(120)
    digest = hashlib.sha256()
    for tensor in model.policy.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    buffer = model.replay_buffer
    digest.update(buffer.observations.tobytes() + buffer.actions.tobytes())
    digest.update(buffer.priorities.tobytes())
    digest.update(buffer.sample(16).indices.tobytes())
    fingerprint = digest.hexdigest()
    """
)


def test_another_process_with_the_same_seed_agrees_to_the_last_bit(tmp_path: Path) -> None:
    here: dict[str, Any] = {}
    exec(FINGERPRINT, here)
    result = subprocess.run(
        [sys.executable, "-c", FINGERPRINT + "print(json.dumps(fingerprint))"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        # For a hang only
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == here["fingerprint"]


# --- environments


@pytest.mark.parametrize("n_envs", [1, 4])
def test_each_environment_has_its_own_leaves(n_envs: int) -> None:
    model = make_model(DummyVecEnv([CountingEnv] * n_envs), train_freq=4).learn(72)
    buffer = buffer_of(model)
    n = 72 if n_envs == 1 else 80
    assert buffer.n_transitions == model.num_timesteps == n
    # Steps by fours: 18 trainings of one env, 5 of four, the first of one before learning starts
    assert model._n_updates == (16 if n_envs == 1 else 5)
    assert buffer.tree.check_valid() == (True, "")
    assert (buffer.priorities > 0.0).all()
    assert buffer.tree[:].sum() == pytest.approx(buffer.priorities.sum())
    # Rows of n_envs, in the order of the environments, which all count alike
    batch = buffer.sample(40)
    expected = batch.indices // n_envs % 10 + 1
    np.testing.assert_array_equal(batch.rewards[:, 0], expected)
    np.testing.assert_array_equal(batch.observations[:, 0], expected - 1)


def test_discrete_observations_of_several_environments() -> None:
    env = make_vec_env(GRID_WORLD, n_envs=3, env_kwargs={"observation": "discrete"})
    model = make_model(env, buffer_size=240)
    buffer = buffer_of(model)
    cells = []

    def note(values: dict[str, Any], _: Any) -> bool:
        cells.append([info["position"] for info in values["infos"]])
        return True

    model.learn(200, callback=note)
    assert model.num_timesteps == 201
    np.testing.assert_array_equal(buffer.next_observations[:67, :, 0], cells)
    assert buffer.observations.dtype == np.int64
    assert buffer.observations.max() > 2
    # From one step to the next, within an episode
    goes_on = buffer.dones[:66] == 0.0
    np.testing.assert_array_equal(
        buffer.observations[1:67, :, 0][goes_on], buffer.next_observations[:66, :, 0][goes_on]
    )


def test_an_environment_by_its_id() -> None:
    model = make_model(GRID_WORLD).learn(30)
    assert buffer_of(model).observations.shape == (80, 1, 10)
    assert model._n_updates == 22


def test_spawned_workers() -> None:
    env = make_vec_env(
        GRID_WORLD,
        n_envs=2,
        seed=0,
        env_kwargs={"length": 3},
        vec_env_cls=SubprocVecEnv,
        vec_env_kwargs={"start_method": "spawn"},
    )
    try:
        model = make_model(env, learning_starts=0).learn(40)
    finally:
        env.close()
    assert model._n_updates == 20
    assert buffer_of(model).n_transitions == 40
    # Only the way onto the goal is rewarded
    batch = buffer_of(model).sample(32)
    at_goal = batch.next_observations[:, 2] == 1.0
    assert bool(at_goal.any())
    assert th.equal(batch.rewards[:, 0] == 1.0, at_goal)
    assert th.equal(batch.dones[:, 0] == 1.0, at_goal)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_normalized_environment_is_stored_raw_and_replayed_normalized(
    n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = VecNormalize(DummyVecEnv([CountingEnv] * 2), gamma=0.9)
    model = make_model(env, n_steps=n_steps, gamma=0.9)
    buffer = buffer_of(model)
    sample = buffer.sample
    n_draws = 0

    def checking_sample(
        batch_size: int, env: VecNormalize | None = None
    ) -> PrioritizedReplayBufferSamples:
        nonlocal n_draws
        assert env is not None
        assert env is model.get_vec_normalize_env()
        batch = sample(batch_size, env=env)
        n_draws += 1
        raw = buffer.observations.reshape(-1, 1)[batch.indices]
        np.testing.assert_array_equal(batch.observations, env.normalize_obs(raw))
        if n_steps == 1:
            rewards = buffer.rewards.reshape(-1, 1)[batch.indices]
            np.testing.assert_array_equal(batch.rewards, env.normalize_reward(rewards))
        return batch

    monkeypatch.setattr(buffer, "sample", checking_sample)
    model.learn(60)
    assert n_draws == model._n_updates == 26
    np.testing.assert_array_equal(buffer.rewards[:30, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 3)


def test_training_by_episodes() -> None:
    model = make_model(CountingEnv(), train_freq=(2, "episode"), gradient_steps=-1).learn(60)
    assert model._n_updates == 60
    assert model._episode_num == 6


# --- callbacks


def test_stopping_by_a_callback_leaves_out_the_last_transition_and_no_gap_behind() -> None:
    model = make_model(CountingEnv())
    model.learn(100, callback=StopTrainingOnMaxEpisodes(1))
    buffer = buffer_of(model)
    # SB3 stops before it stores the step at which the callback stopped it
    assert model.num_timesteps == 10
    assert buffer.n_transitions == 9
    assert np.flatnonzero(buffer.tree[:]).tolist() == list(range(9))
    np.testing.assert_array_equal(buffer.rewards[:9, 0], np.arange(1, 10))

    model.learn(20, reset_num_timesteps=False)
    assert buffer.n_transitions == 29
    assert np.flatnonzero(buffer.tree[:]).tolist() == list(range(29))
    assert buffer.tree.check_valid() == (True, "")
    # SB3 resets at the start of a second learn only if asked to: the episode was over
    np.testing.assert_array_equal(buffer.rewards[9:29, 0], [*range(1, 11), *range(1, 11)])


def test_endless_episodes_are_logged_by_steps(tmp_path: Path) -> None:
    model = make_model(CountingEnv(length=None))
    model.set_logger(configure(str(tmp_path), ["json"]))
    model.learn(40, callback=LogEveryNTimesteps(10))
    model.logger.close()
    lines = (tmp_path / "progress.json").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["time/total_timesteps"] for row in rows] == [10, 20, 30, 40]
    # The callback is called before the training that its step leads to
    assert [row["per/beta"] for row in rows] == pytest.approx(
        [0.4 + 0.6 * step / 40 for step in (9, 19, 29, 39)]
    )


def test_evaluation_and_checkpoints_on_the_way(tmp_path: Path) -> None:
    model = make_model(GridWorldEnv(length=3))
    evaluation = EvalCallback(
        Monitor(gym.make(GRID_WORLD, length=3)),
        eval_freq=20,
        n_eval_episodes=2,
        best_model_save_path=str(tmp_path / "best"),
        verbose=0,
    )
    checkpoints = CheckpointCallback(30, str(tmp_path), "per", save_replay_buffer=True)
    model.learn(60, callback=[evaluation, checkpoints])
    assert evaluation.n_calls == 60

    restored = PERDQN.load(tmp_path / "per_30_steps", env=GridWorldEnv(length=3))
    restored.load_replay_buffer(tmp_path / "per_replay_buffer_30_steps.pkl")
    # SB3 calls before it stores: the 30th step comes after the checkpoint at 30
    assert buffer_of(restored).n_transitions == 29
    np.testing.assert_array_equal(
        buffer_of(restored).observations[:29], buffer_of(model).observations[:29]
    )
    assert isinstance(PERDQN.load(tmp_path / "best" / "best_model"), PERDQN)


# --- learning


def shortest_way(model: PERDQN, env: VecEnv | gym.Env[Any, Any]) -> float:
    _, lengths = evaluate_policy(model, env, n_eval_episodes=1, return_episode_rewards=True)
    assert isinstance(lengths, list)
    return lengths[0]


LEARNING: dict[str, Any] = {
    "buffer_size": 1000,
    "learning_starts": 50,
    "train_freq": 1,
    "learning_rate": 0.01,
    "gamma": 0.9,
    "target_update_interval": 25,
    "exploration_fraction": 1.0,
    "policy_kwargs": {"net_arch": [16]},
    "seed": 0,
    "device": "cpu",
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"n_steps": 3}, id="n_steps"),
        pytest.param({"double_q": True, "loss": "mse"}, id="double_q", marks=pytest.mark.slow),
        pytest.param(
            {"weight_normalization": "buffer", "alpha": 1.0}, id="buffer", marks=pytest.mark.slow
        ),
        pytest.param(SAVING_MEMORY, id="memory", marks=pytest.mark.slow),
    ],
)
def test_it_learns_the_shortest_way_through_a_corridor(options: dict[str, Any]) -> None:
    env = gym.make(GRID_WORLD, length=5)
    model = PERDQN("MlpPolicy", env, **LEARNING, **options).learn(500)
    with th.no_grad():
        values = model.q_net(th.eye(5)[:4]).max(dim=1).values.numpy()
    assert shortest_way(model, Monitor(gym.make(GRID_WORLD, length=5))) == 4
    # gamma to the power of the steps that are left after the next one. Looking ahead over three
    # steps of behavior at random, an agent values the way a little less.
    np.testing.assert_allclose(values, [0.9**3, 0.9**2, 0.9, 1.0], atol=0.2)
