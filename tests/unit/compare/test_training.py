from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch as th
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecNormalize

from sb3_per import PERDQN
from sb3_per.compare import training
from sb3_per.compare.agents import Agent
from sb3_per.compare.training import (
    TABLES,
    Cells,
    GreedyEvaluation,
    Run,
    make_env,
    train,
)

GRID: dict[str, Any] = {
    "n_timesteps": 300,
    "env_kwargs": {"length": 4, "max_episode_steps": 12},
    "policy": "MlpPolicy",
    "policy_kwargs": {"net_arch": [16]},
    "learning_rate": 0.01,
    "learning_starts": 60,
    "buffer_size": 250,
    "batch_size": 16,
    "train_freq": 2,
    "target_update_interval": 20,
}


def run(agent: str = "per", env_id: str = "sb3_per/GridWorld-v0", **changes: Any) -> Run:
    options: dict[str, Any] = {
        "hyperparams": GRID,
        "n_evals": 3,
        "eval_episodes": 2,
        "snapshot_episodes": (0, 10, 10_000),
        "n_snapshots": 5,
    }
    return Run(env_id, agent, 7, **{**options, **changes})


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `train` makes, in order."""
    made: list[Any] = []
    make = Agent.make

    def keep(self: Agent, *args: Any, **kwargs: Any) -> Any:
        made.append(make(self, *args, **kwargs))
        return made[-1]

    monkeypatch.setattr(Agent, "make", keep)
    return made


def equal(first: dict[str, pd.DataFrame], second: dict[str, pd.DataFrame]) -> bool:
    for name in TABLES:
        ours, theirs = first[name], second[name]
        if name == "runs":
            ours, theirs = ours.drop(columns="seconds"), theirs.drop(columns="seconds")
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    return True


def test_the_same_run_gives_the_same_numbers_whatever_ran_before() -> None:
    first = train(run())
    train(run("uniform"))
    np.random.rand(5)
    th.rand(3)
    assert equal(first, train(run()))


@pytest.mark.parametrize("agent", ["uniform", "per"])
def test_looking_changes_nothing_in_training(agent: str, models: list[Any]) -> None:
    """Against SB3 alone: no evaluations, no snapshots, no recorder."""
    train(run(agent))
    env = make_env("sb3_per/GridWorld-v0", GRID, 1, 7)
    cls = DQN if agent == "uniform" else PERDQN
    arguments = {k: v for k, v in GRID.items() if k not in ("n_timesteps", "env_kwargs")}
    alone = cls(env=env, seed=7, device="cpu", **arguments).learn(300)
    for ours, theirs in zip(models[0].policy.parameters(), alone.policy.parameters(), strict=True):
        assert th.equal(ours, theirs)
    assert (models[0].replay_buffer.actions == alone.replay_buffer.actions).all()  # type: ignore[union-attr]


def test_number_of_threads_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(_: Run) -> None:
        seen.append(th.get_num_threads())
        raise RuntimeError("enough")

    monkeypatch.setattr(training, "_train", look)
    before = th.get_num_threads()
    try:
        th.set_num_threads(2)
        with pytest.raises(RuntimeError, match="enough"):
            train(run())
        assert (seen, th.get_num_threads()) == ([1], 2)
    finally:
        th.set_num_threads(before)


def test_tables_of_a_run(models: list[Any]) -> None:
    tables = train(run())
    assert set(tables) == set(TABLES)
    for table in tables.values():
        assert table.columns[:3].tolist() == ["env", "agent", "seed"]
        keys = table[["env", "agent", "seed"]].drop_duplicates().to_numpy().tolist()
        assert keys == [["sb3_per/GridWorld-v0", "per", 7]]

    episodes = tables["episodes"]
    assert episodes["episode"].tolist() == list(range(1, len(episodes) + 1))
    assert episodes["steps"].tolist() == np.cumsum(episodes["length"]).tolist()
    assert episodes["steps"].iloc[-1] <= 300
    assert set(episodes["reward"]) == {0.0, 1.0}
    assert (episodes["length"][episodes["reward"] == 0.0] == 12).all()
    assert tables["runs"][["steps", "episodes"]].to_numpy().tolist() == [[300, len(episodes)]]
    assert tables["runs"]["seconds"].item() > 0.0

    evaluations = tables["evaluations"]
    assert evaluations["steps"].tolist() == [0, 0, 100, 100, 200, 200, 300, 300]
    assert evaluations["eval_episode"].tolist() == [0, 1] * 4

    snapshots = tables["snapshots"]
    along = snapshots[snapshots["reason"] == "freq"]
    assert along["steps"].tolist() == [60, 120, 180, 240, 300]
    # The buffer holds 250
    assert along["n_transitions"].tolist() == [60, 120, 180, 240, 250]
    stages = snapshots[snapshots["reason"] == "episode"]
    assert stages["episode"].tolist() == [0, 10]
    assert stages["steps"].iloc[1] == episodes["steps"].iloc[9]
    assert (snapshots["n_cells"] == 4).all()


def test_snapshots_are_of_the_buffer_that_there_is(models: list[Any]) -> None:
    from sb3_per.callbacks import td_errors_in_buffer

    tables = train(run())
    last = tables["snapshots"].iloc[-1]
    errors = np.abs(td_errors_in_buffer(models[0]))
    assert last["td_error_mean"] == pytest.approx(errors.mean())
    assert last["td_error_q95"] == pytest.approx(np.quantile(errors, 0.95))
    priorities = models[0].replay_buffer.priorities
    assert last["priority_q00"] == priorities.min()
    assert last["priority_q50"] == pytest.approx(np.quantile(priorities, 0.5))
    assert last["weight_q100"] == 1.0
    assert 0.0 < last["weight_q05"] < last["weight_q95"] <= 1.0


def test_transitions_of_the_stages() -> None:
    tables = train(run())
    transitions = tables["transitions"]
    assert set(transitions["stage"]) == {0, 10}
    at_start = transitions[transitions["stage"] == 0]
    assert len(at_start) == tables["snapshots"]["n_looked_at"][at_start["snapshot"].iloc[0]]
    # Nothing is learned yet: all have the priority 1 and the same weight
    assert (at_start["priority"] == 1.0).all()
    assert (at_start["weight_mean"].dropna() == 1.0).all()
    for _, stage in transitions.groupby("stage"):
        assert stage["n_drawn"].sum() == 4096
        assert stage["weight_mean"].isna().tolist() == (stage["n_drawn"] == 0).tolist()
        assert stage["probability"].sum() == pytest.approx(1.0, abs=1e-5)
        # Nothing starts at the goal
        assert set(stage["cell"]) <= {0, 1, 2}
        assert (stage["cell"] == 0).any()
        # Drawn in proportion to the priority: 4096 draws, within five standard deviations
        expected = stage["probability"] * 4096
        assert (np.abs(stage["n_drawn"] - expected) < 5 * np.sqrt(expected) + 1).all()


def test_uniform_replay_has_no_priorities() -> None:
    tables = train(run("uniform"))
    snapshots, transitions = tables["snapshots"], tables["transitions"]
    for name in ("priority_q50", "weight_q50"):
        assert snapshots[name].isna().all()
    assert transitions["priority"].isna().all()
    assert transitions["weight_mean"].isna().all()
    assert transitions["probability"].nunique() == 2  # two stages
    assert snapshots["td_error_mean"].notna().all()


def test_run_in_which_nothing_is_ever_asked() -> None:
    tables = train(run(n_snapshots=0, snapshot_episodes=()))
    assert len(tables["snapshots"]) == 0
    assert len(tables["transitions"]) == 0
    looked_at = train(run())
    for name in ("snapshots", "transitions"):
        assert tables[name].columns.tolist() == looked_at[name].columns.tolist()
    assert equal(
        {**tables, "snapshots": looked_at["snapshots"], "transitions": looked_at["transitions"]},
        looked_at,
    )


def test_run_without_a_single_finished_episode() -> None:
    hyperparams = {**GRID, "n_timesteps": 8, "learning_starts": 2}
    tables = train(run(hyperparams=hyperparams, n_snapshots=0))
    assert len(tables["episodes"]) == 0
    assert tables["episodes"].dtypes["steps"] == np.int64
    assert tables["evaluations"]["steps"].max() == 8
    assert tables["snapshots"]["episode"].tolist() == [0]


def test_several_environments_with_normalized_observations_and_rewards(models: list[Any]) -> None:
    hyperparams = {
        **GRID,
        "n_timesteps": 400,
        "env_kwargs": {},
        "n_envs": 2,
        "gamma": 0.5,
        "normalize": "dict(norm_obs=True, norm_reward=True)",
    }
    tables = train(run("per", "CartPole-v1", hyperparams=hyperparams))
    vec_normalize = models[0].get_vec_normalize_env()
    assert isinstance(vec_normalize, VecNormalize)
    assert (vec_normalize.gamma, vec_normalize.num_envs) == (0.5, 2)
    # Raw ones: a step of CartPole gives 1
    assert (tables["episodes"]["reward"] == tables["episodes"]["length"]).all()
    assert (tables["evaluations"]["return"] == tables["evaluations"]["length"]).all()
    assert tables["snapshots"]["n_transitions"].max() == 250
    assert (tables["transitions"]["cell"] == -1).all()
    assert (tables["snapshots"]["n_cells"] == 0).all()


class Images(gym.Env[Any, Any]):
    """Channels last, of 36 by 36 pixels; ends after five steps."""

    observation_space = gym.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self._observation(), {}

    def step(self, _: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        return self._observation(), 1.0, self.n_steps == 5, False, {}

    def _observation(self) -> Any:
        return np.full((36, 36, 1), self.n_steps, np.uint8)


@pytest.fixture
def images() -> Iterator[str]:
    gym.register("Images-v0", lambda **_: Images())
    yield "Images-v0"
    del gym.registry["Images-v0"]


STACKED = {**GRID, "n_timesteps": 200, "env_kwargs": {}, "frame_stack": 3}


@pytest.mark.parametrize("normalize", [True, "dict(norm_obs=True, norm_reward=False)"])
@pytest.mark.parametrize("n_envs", [1, 2])
def test_stacked_frames_are_normalized(models: list[Any], normalize: Any, n_envs: int) -> None:
    hyperparams = {**STACKED, "n_envs": n_envs, "normalize": normalize}
    tables = train(run("per", "CartPole-v1", hyperparams=hyperparams))
    env = models[0].get_vec_normalize_env()
    assert env.obs_rms.mean.shape == (12,)
    # Stored as they are, normalized where they are used
    buffer = models[0].replay_buffer
    assert buffer.observations.shape[2:] == (12,)
    batch = buffer.sample(64, env=env)
    assert np.abs(buffer.observations).max() != pytest.approx(float(batch.observations.abs().max()))
    assert tables["evaluations"]["steps"].max() == 200
    assert (tables["episodes"]["reward"] == tables["episodes"]["length"]).all()


def test_rewards_beside_images_are_normalized(models: list[Any], images: str) -> None:
    hyperparams = {
        **STACKED,
        "n_timesteps": 80,
        "policy": "CnnPolicy",
        "policy_kwargs": {},
        "normalize": "dict(norm_obs=False, norm_reward=True)",
    }
    tables = train(run("per", images, hyperparams=hyperparams, n_evals=1))
    # Channels go first, the latest frame last, as SB3 has it without VecNormalize
    stored = models[0].replay_buffer.batch_of(np.arange(5)).observations
    assert stored.shape[1:] == (3, 36, 36)
    assert stored[:, :, 0, 0].tolist() == [
        [0, 0, 0],
        [0, 0, 1],
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
    ]
    assert (tables["episodes"]["reward"] == 5.0).all()
    assert (tables["evaluations"]["return"] == 5.0).all()


# Evaluations


class AlwaysRight(BaseCallback):
    """A policy that knows the way, from a certain step on."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.since = since

    def _on_step(self) -> bool:
        if self.num_timesteps == self.since:
            net: Any = self.model.policy.q_net
            with th.no_grad():
                for parameter in net.parameters():
                    parameter.zero_()
                net.q_net[-1].bias[1] = 1.0
        return True


def test_evaluations_are_greedy_and_at_their_time() -> None:
    env = make_env("sb3_per/GridWorld-v0", GRID, 1, 0)
    # Random actions only, and never an update
    model = DQN(
        "MlpPolicy", env, learning_starts=1000, exploration_final_eps=1.0, train_freq=1, seed=0
    )
    evaluation = GreedyEvaluation(make_env("sb3_per/GridWorld-v0", GRID, 3, 1), freq=20)
    model.learn(50, callback=[AlwaysRight(20), evaluation])
    table = pd.DataFrame(evaluation.episodes, columns=["steps", "number", "return", "length"])
    assert table["steps"].unique().tolist() == [0, 20, 40, 50]
    assert table["number"].tolist() == [0, 1, 2] * 4
    later = table[table["steps"] >= 20]
    assert (later["return"] == 1.0).all()
    assert (later["length"] == 3).all()


def test_every_evaluation_plays_the_same_episodes() -> None:
    env = make_env("CartPole-v1", {}, 1, 0)
    evaluation = GreedyEvaluation(make_env("CartPole-v1", {}, 4, 1), freq=10)
    # Nothing is learned in between
    DQN("MlpPolicy", env, learning_starts=1000, train_freq=1, seed=0).learn(30, evaluation)
    table = pd.DataFrame(evaluation.episodes, columns=["steps", "number", "return", "length"])
    returns = [group["return"].tolist() for _, group in table.groupby("steps")]
    assert len(returns) == 4
    assert returns.count(returns[0]) == 4
    assert len(set(returns[0])) > 1


# Places


@pytest.mark.parametrize(
    ("env_id", "env_kwargs", "n", "observations", "places"),
    [
        ("sb3_per/GridWorld-v0", {"length": 3}, 3, [[[0, 1, 0]], [[0, 0, 1]]], [1, 2]),
        (
            "sb3_per/GridWorld-v0",
            {"length": 11, "observation": "position"},
            11,
            [[0.0], [0.3], [1.0]],
            [0, 3, 10],
        ),
        (
            "sb3_per/GridWorld-v0",
            {"length": 5, "observation": "discrete"},
            5,
            [[4], [0]],
            [4, 0],
        ),
        ("sb3_per/BlindCliffwalk-v0", {"n": 4}, 4, [[0, 0, 1, 0]], [2]),
        ("FrozenLake-v1", {}, 16, [[15], [3]], [15, 3]),
        ("CartPole-v1", {}, 0, [[0.0, 1.0, 2.0, 3.0]], [-1]),
    ],
)
def test_places(
    env_id: str, env_kwargs: dict[str, Any], n: int, observations: Any, places: list[int]
) -> None:
    cells = Cells.of(make_env(env_id, {"env_kwargs": env_kwargs}, 1, 0))
    assert cells.n == n
    stored = np.array(observations)
    assert cells.where(stored, len(stored)).tolist() == places
    assert cells.where(None, 3).tolist() == [-1, -1, -1]


def test_wrapped_observations_are_no_places() -> None:
    hyperparams = {"env_wrapper": [{"gymnasium.wrappers.FrameStackObservation": {"stack_size": 2}}]}
    if not hasattr(gym.wrappers, "FrameStackObservation"):
        pytest.skip("Gymnasium before 1.0")
    assert Cells.of(make_env("sb3_per/GridWorld-v0", hyperparams, 1, 0)).n == 0


def test_stacked_frames() -> None:
    env = make_env("CartPole-v1", {"frame_stack": 3}, 2, 0)
    assert env.observation_space.shape == (12,)
