"""``sb3-per evidence``: when prioritized replay helps, and which of its options matter."""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import tyro
from tqdm import tqdm

from sb3_per.compare.agents import parse_agent, parse_agents
from sb3_per.compare.backends import make_all
from sb3_per.compare.settings import SettingsError
from sb3_per.compare.training import Run, Tables, train
from studies.report import write_report

__all__ = ["STUDIES", "TASKS", "EvidenceSettings", "Study", "Task", "main", "runs_of"]


class Task(NamedTuple):
    """
    An environment with the hyperparameters that all agents share.

    :param env_id: of Gymnasium
    :param eval_episodes: of each evaluation; one where environment and start are always the same
    :param hyperparams: in the form of rl-zoo's files, in place of those of :data:`SHARED`
    :param n_evals: greedy evaluations along each run, besides the one before it
    """

    env_id: str
    eval_episodes: int
    hyperparams: Mapping[str, Any]
    n_evals: int = 20


#: What tasks have in common where they don't say otherwise. Eight environments side by side and
#: two updates for eight steps: one for four, at less cost than one environment alone.
SHARED: dict[str, Any] = {
    "policy": "MlpPolicy",
    "n_envs": 8,
    "learning_rate": 1e-3,
    "buffer_size": 100_000,
    "learning_starts": 500,
    "batch_size": 32,
    "gamma": 0.99,
    "train_freq": 1,
    "gradient_steps": 2,
    "target_update_interval": 200,
    "exploration_fraction": 0.5,
    "exploration_final_eps": 0.05,
}


def _corridor(length: int, **hyperparams: Any) -> Task:
    env_kwargs = {"length": length, "max_episode_steps": 5 * length}
    return Task("sb3_per/GridWorld-v0", 1, {"env_kwargs": env_kwargs, "gamma": 0.97, **hyperparams})


def _cliffwalk(n: int, **hyperparams: Any) -> Task:
    return Task(
        "sb3_per/BlindCliffwalk-v0",
        1,
        {
            "env_kwargs": {"n": n},
            # Random behaviour, so that every agent gets to see the same: the seed decides
            "exploration_initial_eps": 1.0,
            "exploration_final_eps": 1.0,
            **hyperparams,
        },
    )


#: Of Gymnasium's classic tasks
_CONTROL: dict[str, Any] = {"exploration_fraction": 0.2}


def _every(steps: int) -> dict[str, int]:
    """
    :param steps: of environments for one update
    :return: hyperparameters, for 16 environments side by side
    """
    together = 16
    return {
        "n_envs": together,
        "train_freq": max(steps // together, 1),
        "gradient_steps": max(together // steps, 1),
    }


#: Steps of the map's runs by the number of states, and for one update
MAP_STEPS = {6: 3_000, 8: 8_000, 10: 20_000}
MAP_FREQS = (1, 4, 16, 64)

TASKS: dict[str, Task] = {
    "corridor-10": _corridor(10, n_timesteps=8_000),
    "corridor-20": _corridor(20, n_timesteps=16_000),
    "cartpole": Task("CartPole-v1", 5, {"n_timesteps": 25_000, **_CONTROL}),
    "acrobot": Task("Acrobot-v1", 5, {"n_timesteps": 25_000, **_CONTROL}, n_evals=10),
    "corridor-20-every-32": _corridor(20, n_timesteps=16_000, **_every(32)),
    "cartpole-every-32": Task("CartPole-v1", 5, {"n_timesteps": 25_000, **_CONTROL, **_every(32)}),
    "acrobot-every-32": Task(
        "Acrobot-v1", 5, {"n_timesteps": 25_000, **_CONTROL, **_every(32)}, n_evals=10
    ),
    "lunarlander-every-32": Task(
        "LunarLander-v3", 5, {"n_timesteps": 40_000, **_CONTROL, **_every(32)}, n_evals=10
    ),
    **{
        f"cliffwalk-{n}-every-{freq}": _cliffwalk(n, n_timesteps=n_timesteps, **_every(freq))
        for n, n_timesteps in MAP_STEPS.items()
        for freq in MAP_FREQS
    },
}


class Study(NamedTuple):
    """
    Agents on tasks.

    :param tasks: keys of :data:`TASKS`
    :param agents: as :func:`~sb3_per.compare.agents.parse_agents` reads them
    """

    tasks: Sequence[str]
    agents: Sequence[str]


STUDIES: dict[str, Study] = {
    "hypotheses": Study(
        ["corridor-10", "cliffwalk-10-every-16"],
        [
            "uniform",
            "per",
            "per(alpha=0.4)",
            "per(alpha=0.8)",
            "per(beta=0.5, beta_final=0.5)",
            "per(beta=1.0)",
            "per(priority_eps=0.01)",
            "per(priority_eps=0.1)",
            "per(prioritization='rank', alpha=0.7, beta=0.5)",
            "per_trial(new_priority='measured')",
            "per(initial_priority='td_error')",
            "per_trial(refresh=True)",
            "per_trial(uniform_share=0.25)",
            "per_trial(weight_divisor='mean')",
            "per_trial(weight_divisor='none', learning_rate=0.00025)",
            "uniform(target_update_interval=50)",
            "per(target_update_interval=50)",
            "uniform(target_update_interval=1000)",
            "per(target_update_interval=1000)",
            "uniform(target_update_interval=8, tau=0.02)",
            "per(target_update_interval=8, tau=0.02)",
            # The best together
            "per_trial(new_priority='measured', uniform_share=0.25, target_update_interval=8, "
            "tau=0.02)",
        ],
    ),
    "map": Study(
        [f"cliffwalk-{n}-every-{freq}" for n in MAP_STEPS for freq in MAP_FREQS],
        ["uniform", "per"],
    ),
    "few-updates": Study(
        [
            "cliffwalk-10-every-64",
            "cliffwalk-8-every-64",
            "corridor-20-every-32",
            "cartpole-every-32",
            "acrobot-every-32",
            "lunarlander-every-32",
        ],
        ["uniform", "per", "per(initial_priority='td_error')"],
    ),
    "confirmation": Study(
        ["corridor-20", "cartpole", "acrobot"],
        [
            "uniform",
            "per",
            "uniform(target_update_interval=8, tau=0.02)",
            "per(target_update_interval=8, tau=0.02)",
        ],
    ),
}


#: What is kept of a run: ``returns`` is the mean greedy return of each evaluation, the one before
#: training first
COLUMNS = ("task", "agent", "seed", "steps", "episodes", "seconds", "returns")


@dataclass(frozen=True)
class EvidenceSettings:
    """
    Make the runs behind docs/results.md, or the same with other seeds, and write what comes out:
    one line for each run, a table, pictures. The same command again goes on with what is missing.

    :param study: `hypotheses`, `map`, `few-updates` or `confirmation`
    :param tasks: of the study; all by default
    :param agents: in place of those of the study, as `sb3-per compare` takes them
    :param n_seeds: runs of each agent on each task
    :param first_seed: the first of these seeds; the others follow it
    :param base: agent that the others are compared with; by default that of docs/results.md
    :param output: folder for the results; `evidence/STUDY` by default
    :param jobs: runs at the same time; -1 for as many as there are cores
    """

    study: Annotated[str, tyro.conf.Positional]
    tasks: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    n_seeds: int = 20
    first_seed: int = 0
    base: str | None = None
    output: Path | None = None
    jobs: int = -1

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return self.output or Path("evidence") / self.study

    def check(self) -> None:
        """:raises SettingsError: if an option is out of its range"""
        if self.study not in STUDIES:
            raise SettingsError(f"there is no study {self.study!r}, only {', '.join(STUDIES)}")
        for task in self.tasks:
            if task not in TASKS:
                raise SettingsError(f"there is no task {task!r}, only {', '.join(TASKS)}")
        for name, low in (("n_seeds", 1), ("first_seed", 0)):
            if getattr(self, name) < low:
                value = getattr(self, name)
                raise SettingsError(
                    f"--{name.replace('_', '-')} must be at least {low}, got {value}"
                )
        if self.jobs == 0:
            raise SettingsError("--jobs must be a number of runs, or -1 for all cores, got 0")


def base_of(study: str) -> str:
    """
    :param study: key of :data:`STUDIES`
    :return: the agent that others are compared with by default
    """
    return "per" if study in ("hypotheses", "few-updates") else "uniform"


def runs_of(settings: EvidenceSettings) -> dict[tuple[str, str, int], Run]:
    """
    :param settings: what was asked for
    :return: runs by task, agent and seed
    :raises SettingsError: if something that was asked for does not exist
    """
    settings.check()
    study = STUDIES[settings.study]
    agents = parse_agents(settings.agents or study.agents)
    runs = {}
    for seed in range(settings.first_seed, settings.first_seed + settings.n_seeds):
        for name in settings.tasks or study.tasks:
            task = TASKS[name]
            hyperparams = {**SHARED, **task.hyperparams}
            for agent in agents:
                agent.check(hyperparams)
                runs[name, str(agent), seed] = Run(
                    task.env_id,
                    str(agent),
                    seed,
                    hyperparams,
                    n_evals=task.n_evals,
                    eval_episodes=task.eval_episodes,
                    snapshot_episodes=(),
                    n_snapshots=0,
                )
    return runs


def row_of(task: str, run: Run, tables: Tables) -> dict[str, Any]:
    """
    :param task: key of :data:`TASKS`
    :param run: that was made
    :param tables: what came of it
    :return: what is kept, by :data:`COLUMNS`
    """
    about = tables["runs"].iloc[0]
    returns = tables["evaluations"].groupby("steps")["return"].mean()
    return {
        "task": task,
        "agent": run.agent,
        "seed": run.seed,
        "steps": int(about["steps"]),
        "episodes": int(about["episodes"]),
        "seconds": round(float(about["seconds"]), 1),
        "returns": " ".join(f"{value:.5g}" for value in returns),
    }


def main(settings: EvidenceSettings) -> int:
    """
    :param settings: which study
    :return: exit code: 0, 1 if runs failed, 2 if the settings can't be used, 130 if stopped
    """
    try:
        runs = runs_of(settings)
        agents = list(dict.fromkeys(agent for _, agent, _ in runs))
        base = _checked_base(settings, agents)
    except SettingsError as error:
        print(f"sb3-per evidence: {error}", file=sys.stderr)
        return 2
    path = settings.folder / "runs.csv"
    there = _made_before(path)
    to_do = {key: run for key, run in runs.items() if key not in there}
    print(f"{len(runs)} runs, {len(runs) - len(to_do)} of them made before; they go to {path}.")
    try:
        n_failed = _make(path, to_do, settings.jobs)
    except KeyboardInterrupt:
        print("\nStopped: the same command makes the runs that are missing.", file=sys.stderr)
        return 130
    if n_failed < len(to_do) or there:
        print("\n".join(write_report(settings.folder, agents, base)))
    return 1 if n_failed else 0


def _checked_base(settings: EvidenceSettings, agents: Sequence[str]) -> str:
    if settings.base is None:
        base = base_of(settings.study)
        return base if base in agents else agents[0]
    base = str(parse_agent(settings.base))
    if base not in agents:
        raise SettingsError(f"--base {base} is none of the agents: {', '.join(agents)}")
    return base


def _made_before(path: Path) -> set[tuple[str, str, int]]:
    if not path.exists():
        return set()
    table = pd.read_csv(path, usecols=["task", "agent", "seed"])
    return set(table.itertuples(index=False, name=None))


def _make(path: Path, to_do: Mapping[tuple[str, str, int], Run], jobs: int) -> int:
    """
    :param path: of the table that gets a line for each run
    :param to_do: runs by task, agent and seed
    :param jobs: at the same time
    :return: how many failed
    """
    if not to_do:
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    n_failed = 0
    with (
        path.open("a", newline="", encoding="utf-8") as file,
        tqdm(total=len(to_do), unit="run") as bar,
        closing(make_all(list(to_do.values()), train, "loky", jobs, None)) as outcomes,
    ):
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        # Runs come back as copies, from other processes
        tasks = {_identity(run): task for (task, _, _), run in to_do.items()}
        for outcome in outcomes:
            run, tables, error = outcome.run, outcome.result, outcome.traceback
            if tables is None:
                n_failed += 1
                bar.write(f"failed: {run.env_id}, {run.agent}, seed {run.seed}:\n{error}")
            else:
                writer.writerow(row_of(tasks[_identity(run)], run, tables))
                file.flush()
            bar.update()
    return n_failed


def _identity(run: Run) -> tuple[Any, ...]:
    # Two tasks can have the same environment
    return *run.key, json.dumps(run.hyperparams, sort_keys=True)
