"""One run of a comparison: train an agent, and collect the data of tables and pictures."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import (
    VecEnv,
    VecFrameStack,
    VecNormalize,
    VecTransposeImage,
    sync_envs_normalization,
)

from sb3_per.callbacks import ReplaySnapshot, ReplaySnapshotCallback
from sb3_per.compare.agents import Agent, parse_agent
from sb3_per.compare.hyperparams import Hyperparams, options_of, wrapper_of
from sb3_per.compare.settings import SettingsError
from sb3_per_envs.blind_cliffwalk import BlindCliffwalkEnv
from sb3_per_envs.grid_world import GridWorldEnv

__all__ = [
    "QUANTILES",
    "TABLES",
    "EpisodeRecorder",
    "GreedyEvaluation",
    "Run",
    "Tables",
    "make_env",
    "train",
    "try_out",
]

#: Seed of the evaluation environments, different from the seeds of runs. All agents and all
#: evaluations have the same episodes.
EVALUATION_SEED = 1_000_000

#: Quantiles of every snapshot, in percent
QUANTILES = (0, 5, 25, 50, 75, 95, 100)

#: Tables of a run, each of which is a file
TABLES = ("runs", "episodes", "evaluations", "snapshots", "transitions")

#: Single precision where there are very many numbers, and pictures are made of them
TRANSITION_COLUMNS: dict[str, Any] = {
    "snapshot": np.int64,
    "stage": np.int64,
    "td_error": np.float32,
    "priority": np.float32,
    "probability": np.float32,
    "age": np.int64,
    "cell": np.int64,
    "n_drawn": np.int64,
    "weight_mean": np.float32,
}

#: By the names in :data:`TABLES`
Tables = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class Run:
    """
    Description of a run.

    :param env_id: full Gymnasium id
    :param agent: name of the agent, as :func:`~sb3_per.compare.agents.parse_agent` reads it
    :param seed: seed of the training environments and of the agent
    :param hyperparams: checked hyperparameters, the same for all agents
    :param n_evals: number of greedy evaluations along the run, besides the one before it
    :param eval_episodes: number of episodes of each evaluation
    :param snapshot_episodes: numbers of finished episodes with a snapshot of the buffer
    :param n_snapshots: number of snapshots along the run
    :param max_transitions: largest number of transitions in each snapshot
    :param device: PyTorch device
    """

    env_id: str
    agent: str
    seed: int
    hyperparams: Hyperparams = field(hash=False)
    n_evals: int = 20
    eval_episodes: int = 10
    snapshot_episodes: tuple[int, ...] = (0, 50, 100, 200)
    n_snapshots: int = 20
    max_transitions: int = 2048
    device: str = "cpu"

    @property
    def key(self) -> tuple[str, str, int]:
        """Environment, agent and seed, which identify a run of a comparison."""
        return self.env_id, self.agent, self.seed

    @property
    def cost(self) -> float:
        """Environment steps."""
        return float(self.hyperparams["n_timesteps"])


def make_env(env_id: str, hyperparams: Hyperparams, n_envs: int, seed: int) -> VecEnv:
    """
    :param env_id: full Gymnasium id
    :param hyperparams: hyperparameters; those of the environment apply
    :param n_envs: number of parallel environments
    :param seed: seed of the first environment; the others count up from it
    :return: the environments, each with SB3's Monitor, with all wrappers that SB3 would add
    """
    env_kwargs = options_of(hyperparams.get("env_kwargs", {}))
    env = make_vec_env(
        # Not the id itself: then SB3 would render images that are not used
        lambda: gym.make(env_id, **env_kwargs),
        n_envs,
        seed,
        wrapper_class=wrapper_of(hyperparams.get("env_wrapper")),
    )
    if "frame_stack" in hyperparams:
        env = VecFrameStack(env, hyperparams["frame_stack"])
    if _has_channels_last(env.observation_space):
        env = VecTransposeImage(env)
    # Outside of all others: SB3 stores the observation that VecNormalize gets
    normalize = hyperparams.get("normalize", False)
    if normalize:
        options = {} if normalize is True else options_of(normalize)
        if "gamma" in hyperparams:
            options["gamma"] = hyperparams["gamma"]
        env = VecNormalize(env, **options)
    return env


def _has_channels_last(space: spaces.Space[Any]) -> bool:
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    return any(
        isinstance(part, spaces.Box)
        and is_image_space(part)
        and not is_image_space_channels_first(part)
        for part in parts
    )


def try_out(
    env_id: str, hyperparams: Hyperparams, agents: Sequence[Agent], seed: int, device: str
) -> None:
    """
    Create the environments and the agents of some runs once, so that errors are reported before the
    first run.

    :param env_id: full Gymnasium id
    :param hyperparams: checked ones, the same for all agents
    :param agents: agents of the runs
    :param seed: seed of one of the runs
    :param device: PyTorch device
    :raises SettingsError: if one of them can't be made
    """
    try:
        env = make_env(env_id, hyperparams, hyperparams.get("n_envs", 1), seed)
    except Exception as error:
        raise SettingsError(f"can't make {env_id}: {type(error).__name__}: {error}") from None
    try:
        for agent in agents:
            agent.try_out(env, hyperparams, seed, device)
    finally:
        env.close()


class EpisodeRecorder(BaseCallback):
    """Keep the end, the reward and the length of each episode."""

    def __init__(self) -> None:
        super().__init__()
        #: Environment steps at the end of each episode, its reward, its length
        self.episodes: list[tuple[int, float, int]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            episode = info.get("episode")
            if episode is not None:
                self.episodes.append((self.num_timesteps, float(episode["r"]), int(episode["l"])))
        return True


class GreedyEvaluation(BaseCallback):
    """
    Evaluate greedily before, along and after training, always on the same episodes.

    Training is not affected: greedy actions draw no random number, and the evaluation environments
    have separate generators.

    :param env: one environment per episode, normalized like those of training
    :param freq: number of environment steps between two evaluations
    """

    def __init__(self, env: VecEnv, freq: int) -> None:
        super().__init__()
        self.env = env
        self.freq = freq
        #: Environment steps, number in the evaluation, return, length
        self.episodes: list[tuple[int, int, float, int]] = []
        self._next_time = 0

    def _on_training_start(self) -> None:
        self._evaluate_if_due()

    def _on_step(self) -> bool:
        self._evaluate_if_due()
        return True

    def _on_training_end(self) -> None:
        if self.episodes[-1][0] != self.num_timesteps:
            self._evaluate()

    def _evaluate_if_due(self) -> None:
        if self.num_timesteps >= self._next_time:
            self._next_time = (self.num_timesteps // self.freq + 1) * self.freq
            self._evaluate()

    def _evaluate(self) -> None:
        if isinstance(self.model.get_vec_normalize_env(), VecNormalize):
            sync_envs_normalization(self.training_env, self.env)
        self.env.seed(EVALUATION_SEED)
        returns, lengths = evaluate_policy(
            self.model, self.env, self.env.num_envs, return_episode_rewards=True
        )
        assert isinstance(returns, list)
        assert isinstance(lengths, list)
        for number, (value, length) in enumerate(zip(returns, lengths, strict=True)):
            self.episodes.append((self.num_timesteps, number, float(value), int(length)))


def _evaluation_env(run: Run) -> VecEnv:
    env = make_env(run.env_id, run.hyperparams, run.eval_episodes, EVALUATION_SEED)
    if isinstance(env, VecNormalize):
        env.training = env.norm_reward = False
    return env


def train(run: Run) -> Tables:
    """
    Train one agent once. The same run gives the same numbers, in any process.

    :param run: run to make
    :return: its tables
    """
    threads = th.get_num_threads()
    # Networks of this size are slower with several threads, above all beside other runs
    th.set_num_threads(1)
    try:
        return _train(run)
    finally:
        th.set_num_threads(threads)


def _train(run: Run) -> Tables:
    hyperparams = run.hyperparams
    n_timesteps = hyperparams["n_timesteps"]
    env = make_env(run.env_id, hyperparams, hyperparams.get("n_envs", 1), run.seed)
    evaluation_env = _evaluation_env(run)
    try:
        agent = parse_agent(run.agent)
        model = agent.make(env, hyperparams, run.seed, run.device)
        recorder = EpisodeRecorder()
        evaluation = GreedyEvaluation(evaluation_env, max(n_timesteps // run.n_evals, 1))
        snapshots = ReplaySnapshotCallback(
            run.snapshot_episodes,
            max(n_timesteps // run.n_snapshots, 1) if run.n_snapshots else None,
            run.max_transitions,
        )
        callbacks: list[BaseCallback] = [recorder, evaluation]
        if not agent.is_actor_critic:
            # SB3's actor-critics don't tell the TD errors of given transitions
            callbacks.append(snapshots)
        start = time.perf_counter()
        model.learn(n_timesteps, callback=callbacks, log_interval=None)  # type: ignore[arg-type]
        seconds = time.perf_counter() - start
        cells = Cells.of(env)
    finally:
        env.close()
        evaluation_env.close()
    tables = {
        "runs": pd.DataFrame(
            {
                "steps": [model.num_timesteps],
                "episodes": [len(recorder.episodes)],
                "seconds": [seconds],
            }
        ),
        "episodes": _episode_table(recorder),
        "evaluations": pd.DataFrame(
            evaluation.episodes, columns=["steps", "eval_episode", "return", "length"]
        ),
        "snapshots": _snapshot_table(snapshots.snapshots, cells),
        "transitions": _transition_table(snapshots.snapshots, cells),
    }
    for table in tables.values():
        for position, (name, value) in enumerate(
            zip(("env", "agent", "seed"), run.key, strict=True)
        ):
            table.insert(position, name, value)
    return tables


def _episode_table(recorder: EpisodeRecorder) -> pd.DataFrame:
    table = pd.DataFrame(recorder.episodes, columns=["steps", "reward", "length"])
    table.insert(0, "episode", np.arange(1, len(table) + 1))
    return table.astype({"steps": np.int64, "reward": np.float64, "length": np.int64})


@dataclass(frozen=True)
class Cells:
    """
    Places of environments whose observation is one of a few places.

    :param n: number of places, 0 if the environment has none
    :param form: form of the observation: ``"discrete"``, ``"one_hot"``, ``"position"``
    """

    n: int = 0
    form: str = ""

    @classmethod
    def of(cls, env: VecEnv) -> "Cells":
        """
        :param env: the training environments
        :return: their places
        """
        space = env.observation_space
        if isinstance(space, spaces.Discrete):
            return cls(int(space.n), "discrete")
        inner = env.get_attr("unwrapped")[0]
        if isinstance(inner, GridWorldEnv) and inner.observation_space.shape == space.shape:
            return cls(inner.length, inner.observation)
        if isinstance(inner, BlindCliffwalkEnv) and inner.observation_space.shape == space.shape:
            return cls(inner.n, "one_hot")
        return cls()

    def where(self, observations: npt.NDArray[Any] | None, n: int) -> npt.NDArray[np.int64]:
        """
        :param observations: observations as stored in the buffer, shape ``(n, *observation)``
        :param n: number of observations
        :return: the place of each, -1 where there are none, shape ``(n,)``
        """
        if not self.n or observations is None:
            return np.full(n, -1)
        flat = observations.reshape(n, -1)
        if self.form == "one_hot":
            places = flat.argmax(axis=1)
        elif self.form == "position":
            places = np.rint(flat[:, 0] * (self.n - 1))
        else:
            places = flat[:, 0]
        return np.asarray(places, dtype=np.int64)


def _snapshot_table(snapshots: list[ReplaySnapshot], cells: Cells) -> pd.DataFrame:
    columns: dict[str, list[Any]] = {
        "snapshot": list(range(len(snapshots))),
        "reason": [snapshot.reason for snapshot in snapshots],
        "episode": [snapshot.episode for snapshot in snapshots],
        "steps": [snapshot.timesteps for snapshot in snapshots],
        "n_transitions": [snapshot.n_transitions for snapshot in snapshots],
        "n_looked_at": [len(snapshot.indices) for snapshot in snapshots],
        "n_cells": [cells.n] * len(snapshots),
        "td_error_mean": [float(np.abs(snapshot.td_errors).mean()) for snapshot in snapshots],
    }
    for name, values in (
        ("td_error", [np.abs(snapshot.td_errors) for snapshot in snapshots]),
        ("priority", [snapshot.priorities for snapshot in snapshots]),
        ("weight", [snapshot.weights for snapshot in snapshots]),
    ):
        quantiles = np.array([_quantiles(value) for value in values]).reshape(-1, len(QUANTILES))
        for percent, column in zip(QUANTILES, quantiles.T, strict=True):
            columns[f"{name}_q{percent:02}"] = column.tolist()
    return pd.DataFrame(columns)


def _quantiles(values: npt.NDArray[np.float64] | None) -> npt.NDArray[np.float64]:
    if values is None:
        return np.full(len(QUANTILES), np.nan)
    return np.quantile(values, np.divide(QUANTILES, 100))


def _transition_table(snapshots: list[ReplaySnapshot], cells: Cells) -> pd.DataFrame:
    """
    :param snapshots: snapshots; those for numbers of episodes are kept in full
    :param cells: places of the environment
    :return: one row for each transition of the snapshots
    """
    parts = []
    for number, snapshot in enumerate(snapshots):
        if snapshot.reason != "episode":
            continue
        n = len(snapshot.indices)
        none = np.full(n, np.nan)
        n_drawn = np.bincount(snapshot.sampled, minlength=n)
        weights = none
        if snapshot.weights is not None:
            sums = np.bincount(snapshot.sampled, snapshot.weights, minlength=n)
            weights = np.divide(sums, n_drawn, out=none.copy(), where=n_drawn > 0)
        columns = (
            np.full(n, number),
            np.full(n, snapshot.episode),
            snapshot.td_errors,
            none if snapshot.priorities is None else snapshot.priorities,
            snapshot.probabilities,
            snapshot.ages,
            cells.where(snapshot.observations, n),
            n_drawn,
            weights,
        )
        part = pd.DataFrame(dict(zip(TRANSITION_COLUMNS, columns, strict=True)))
        with np.errstate(over="ignore"):
            parts.append(part.astype(TRANSITION_COLUMNS))
    if parts:
        return pd.concat(parts, ignore_index=True)
    return pd.DataFrame({name: np.empty(0, kind) for name, kind in TRANSITION_COLUMNS.items()})
