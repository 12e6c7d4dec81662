"""Settings of the commands. Imports neither torch nor SB3, since ``--help`` needs it."""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["CompareSettings", "PlotSettings", "RunSettings", "Settings", "SettingsError"]

#: Seeds and share of each environment's budget, of a full comparison and with ``--quick``
FULL, QUICK = (10, 1.0), (3, 0.3)

#: The smallest value of each number, by the name of its option
SMALLEST = {
    "n_seeds": 1,
    "first_seed": 0,
    "timesteps": 1,
    "window": 1,
    "n_evals": 1,
    "eval_episodes": 1,
    "n_snapshots": 0,
    "max_transitions": 1,
}


class SettingsError(ValueError):
    """Settings that can't be used; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of a command, checked before anything is done."""

    def check(self) -> None:
        """:raises SettingsError: if an option is out of its range"""
        for field in fields(self):
            low, value = SMALLEST.get(field.name), getattr(self, field.name)
            if low is not None and value is not None and value < low:
                raise SettingsError(f"{option(field.name)} must be at least {low}, got {value}")
            if field.name == "threshold" and value is not None and not math.isfinite(value):
                raise SettingsError(f"--threshold must be a finite number, got {value}")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """
    Options of a command that makes runs.

    :param n_seeds: number of runs of each agent on each task
    :param first_seed: first seed; the others follow it
    :param output: folder for the results
    :param jobs: runs at the same time; -1 for as many as there are cores
    """

    n_seeds: int | None = None
    first_seed: int = 0
    output: Path | None = None
    jobs: int = -1

    @property
    def default_n_seeds(self) -> int:
        """Default number of seeds."""
        raise NotImplementedError

    @property
    def default_output(self) -> Path:
        """Default folder for the results."""
        raise NotImplementedError

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the runs."""
        n_seeds = self.default_n_seeds if self.n_seeds is None else self.n_seeds
        return tuple(range(self.first_seed, self.first_seed + n_seeds))

    @property
    def folder(self) -> Path:
        """Folder for the results."""
        return self.output or self.default_output

    def check(self) -> None:
        """:raises SettingsError: if an option is out of its range"""
        super().check()
        if self.jobs == 0:
            raise SettingsError("--jobs must be a number of runs, or -1 for all cores, got 0")

    def check_list(self, name: str) -> None:
        """
        :param name: name of an option that takes a list
        :raises SettingsError: if the list is empty, or has something more than once
        """
        values = getattr(self, name)
        if not values:
            raise SettingsError(f"{option(name)} needs at least one")
        repeated = {value for value in values if values.count(value) > 1}
        if repeated:
            raise SettingsError(f"{option(name)} has {sorted(repeated)} more than once")


@dataclass(frozen=True, kw_only=True)
class CompareSettings(RunSettings):
    """
    Train agents with uniform and with prioritized replay side by side, measure them, draw pictures
    of their replay buffers, and write everything to a folder. The same command again makes the
    missing runs.

    :param envs: Gymnasium ids; `module:Id` imports the module first
    :param agents: `uniform` (DQN), `per` (PERDQN), `qrdqn`, `per_qrdqn`; for continuous actions
        `sac`, `per_sac`, `td3`, `per_td3`, `ddpg`, `per_ddpg`, `tqc`, `per_tqc`; with options of
        the algorithm in parentheses: "per(alpha=0.8, double_q=True)". The others are compared
        with the first.
    :param n_seeds: number of runs of each agent on each environment; 10, or 3 with --quick
    :param quick: a short comparison that takes minutes: 3 seeds, and 30 % of each budget
    :param budget: share of each environment's n_timesteps to train for; 1, or 0.3 with --quick
    :param timesteps: number of environment steps of each run, in place of n_timesteps
    :param hyperparams: YAML file in rl-zoo's format; that of the package by default
    :param threshold: mean episode reward that counts as solved, for all environments; by default
        the YAML file's `threshold`, else the environment's own
    :param window: number of episodes over which rewards are averaged
    :param n_evals: number of greedy evaluations along each run, besides the one before it
    :param eval_episodes: number of episodes of each evaluation, always the same ones
    :param snapshot_episodes: numbers of episodes after which to take a snapshot of the replay
        buffer; 0 is the start of learning
    :param n_snapshots: number of snapshots of the replay buffer along each run, at equal distances
    :param max_transitions: largest number of transitions in a snapshot, a random subset if there
        are more
    :param device: PyTorch device of the agents
    :param output: folder for the results; `comparison`, or `comparison-quick` with --quick
    :param backend: joblib's backend: `loky` on this machine, `ray` or `dask` on a cluster
    :param address: address of the Ray or Dask cluster; without it, one is started on this machine
    """

    envs: tuple[str, ...] = ("GridWorld-v0", "CartPole-v1")
    agents: tuple[str, ...] = ("uniform", "per")
    quick: bool = False
    budget: float | None = None
    timesteps: int | None = None
    hyperparams: Path | None = None
    threshold: float | None = None
    window: int = 20
    n_evals: int = 20
    eval_episodes: int = 10
    snapshot_episodes: tuple[int, ...] = (0, 50, 100, 200)
    n_snapshots: int = 20
    max_transitions: int = 2048
    device: str = "cpu"
    backend: Literal["loky", "ray", "dask"] = "loky"
    address: str | None = None

    @property
    def default_n_seeds(self) -> int:
        """10, or 3 with ``--quick``."""
        return (QUICK if self.quick else FULL)[0]

    @property
    def default_output(self) -> Path:
        """``comparison``, or ``comparison-quick`` with ``--quick``."""
        return Path("comparison-quick" if self.quick else "comparison")

    @property
    def share(self) -> float:
        """Share of each environment's budget."""
        return (QUICK if self.quick else FULL)[1] if self.budget is None else self.budget

    def check(self) -> None:
        """:raises SettingsError: if an option is out of its range"""
        self.check_list("envs")
        self.check_list("agents")
        super().check()
        for wrong, message in (
            (
                self.budget is not None and not 0.0 < self.budget < math.inf,
                f"--budget must be above 0 and finite, got {self.budget}",
            ),
            (
                self.budget is not None and self.timesteps is not None,
                "give --budget or --timesteps, not both",
            ),
            (
                min(self.snapshot_episodes, default=0) < 0,
                f"--snapshot-episodes must be at least 0, got {self.snapshot_episodes}",
            ),
            (
                self.address is not None and self.backend == "loky",
                "--address belongs to --backend ray or --backend dask",
            ),
        ):
            if wrong:
                raise SettingsError(message)


@dataclass(frozen=True)
class PlotSettings(Settings):
    """
    Draw the pictures and the report again, from the tables of a comparison alone.

    :param folder: folder that `sb3-per compare` has written
    :param threshold: mean episode reward that counts as solved, for all environments; as in the
        comparison by default
    :param window: number of episodes over which rewards are averaged; as in the comparison by
        default
    """

    folder: Annotated[Path, tyro.conf.Positional]
    threshold: float | None = None
    window: int | None = None


def option(name: str) -> str:
    """
    :param name: name of a setting
    :return: its name on the command line
    """
    return "--" + name.replace("_", "-")
