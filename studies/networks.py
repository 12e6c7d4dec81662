"""Studies in which networks learn: their tasks, and the measures of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sb3_per.compare.agents import parse_agent
from sb3_per.compare.settings import SettingsError
from sb3_per.compare.training import Run, train
from studies.report import write_report
from studies.study import Row, Study, StudyRun

__all__ = ["CLIFFWALKS", "TASKS", "NetworkStudy", "Task", "corridor"]


#: Default hyperparameters of the tasks. Eight parallel environments and two updates for eight
#: steps: one for four, at less cost than with a single environment.
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

#: Default hyperparameters of the tasks with continuous actions: those of rl-zoo's files for MuJoCo
#: that SAC and TD3 have in common. For the rest, the defaults of each algorithm apply.
CONTINUOUS: dict[str, Any] = {
    "policy": "MlpPolicy",
    "learning_starts": 10_000,
    "batch_size": 256,
    "train_freq": 1,
    "gradient_steps": 1,
}


class Task(NamedTuple):
    """
    An environment with the hyperparameters that all agents share.

    :param env_id: id of Gymnasium
    :param eval_episodes: number of episodes of each evaluation; one if the environment is
        deterministic
    :param hyperparams: hyperparameters in the format of rl-zoo's files, which replace those of
        ``shared``
    :param n_evals: number of greedy evaluations along each run, besides the one before it
    :param shared: default hyperparameters, in the same format
    """

    env_id: str
    eval_episodes: int
    hyperparams: Mapping[str, Any]
    n_evals: int = 20
    shared: Mapping[str, Any] = SHARED


def corridor(length: int, **hyperparams: Any) -> Task:
    """
    :param length: number of cells
    :param hyperparams: hyperparameters that replace the default ones
    :return: GridWorld with a time limit of 5 steps per cell
    """
    env_kwargs = {"length": length, "max_episode_steps": 5 * length}
    return Task("sb3_per/GridWorld-v0", 1, {"env_kwargs": env_kwargs, "gamma": 0.97, **hyperparams})


def _cliffwalk(n: int, **hyperparams: Any) -> Task:
    return Task(
        "sb3_per/BlindCliffwalk-v0",
        1,
        {
            "env_kwargs": {"n": n},
            # A random policy, so that all agents with the same seed see the same transitions
            "exploration_initial_eps": 1.0,
            "exploration_final_eps": 1.0,
            **hyperparams,
        },
    )


#: Hyperparameters of Gymnasium's classic tasks
_CONTROL: dict[str, Any] = {"exploration_fraction": 0.2}


def _every(steps: int) -> dict[str, int]:
    """
    :param steps: number of environment steps per update
    :return: hyperparameters for 16 parallel environments
    """
    together = 16
    return {
        "n_envs": together,
        "train_freq": max(steps // together, 1),
        "gradient_steps": max(together // steps, 1),
    }


#: Numbers of states and of environment steps per update of each Blind Cliffwalk
CLIFFWALKS = {
    f"cliffwalk-{n}-every-{freq}": (n, freq) for n in (6, 8, 10) for freq in (1, 4, 16, 64)
}
#: Numbers of environment steps by the number of states
CLIFFWALK_STEPS = {6: 3_000, 8: 8_000, 10: 20_000}

TASKS: dict[str, Task] = {
    "corridor-10": corridor(10, n_timesteps=8_000),
    "corridor-20": corridor(20, n_timesteps=16_000),
    "cartpole": Task("CartPole-v1", 5, {"n_timesteps": 25_000, **_CONTROL}),
    "acrobot": Task("Acrobot-v1", 5, {"n_timesteps": 25_000, **_CONTROL}, n_evals=10),
    "corridor-20-every-32": corridor(20, n_timesteps=16_000, **_every(32)),
    "cartpole-every-32": Task("CartPole-v1", 5, {"n_timesteps": 25_000, **_CONTROL, **_every(32)}),
    "acrobot-every-32": Task(
        "Acrobot-v1", 5, {"n_timesteps": 25_000, **_CONTROL, **_every(32)}, n_evals=10
    ),
    "lunarlander-every-32": Task(
        "LunarLander-v3", 5, {"n_timesteps": 40_000, **_CONTROL, **_every(32)}, n_evals=10
    ),
    "pendulum": Task(
        "Pendulum-v1",
        10,
        {
            "n_timesteps": 20_000,
            "learning_rate": 1e-3,
            "gamma": 0.98,
            "buffer_size": 200_000,
            "learning_starts": 1_000,
        },
        shared=CONTINUOUS,
    ),
    "hopper": Task("Hopper-v5", 10, {"n_timesteps": 50_000}, n_evals=10, shared=CONTINUOUS),
    **{
        name: _cliffwalk(n, n_timesteps=CLIFFWALK_STEPS[n], **_every(freq))
        for name, (n, freq) in CLIFFWALKS.items()
    },
}


class NetworkStudy(Study):
    """
    Agents of ``sb3-per compare`` on :data:`TASKS`. Of each run, ``returns`` is the mean greedy
    return of each evaluation, the one before training first.
    """

    measures = ("steps", "episodes", "seconds", "returns")

    def agent_name(self, text: str) -> str:
        """Name in the form of :func:`~sb3_per.compare.agents.parse_agent`."""
        return str(parse_agent(text))

    def run_of(self, task: str, agent: str, seed: int) -> StudyRun:
        """Run without snapshots of the buffer."""
        if task not in TASKS:
            raise SettingsError(f"there is no task {task!r}, only {', '.join(TASKS)}")
        about = TASKS[task]
        hyperparams = {**about.shared, **about.hyperparams}
        parse_agent(agent).check(hyperparams)
        run = Run(
            about.env_id,
            agent,
            seed,
            hyperparams,
            n_evals=about.n_evals,
            eval_episodes=about.eval_episodes,
            snapshot_episodes=(),
            n_snapshots=0,
        )
        return StudyRun((task, agent, seed), run.cost, run)

    @staticmethod
    def make(run: StudyRun) -> Row:
        """Train the agent."""
        tables = train(run.details)
        about = tables["runs"].iloc[0]
        returns = tables["evaluations"].groupby("steps")["return"].mean()
        return {
            "steps": int(about["steps"]),
            "episodes": int(about["episodes"]),
            "seconds": round(float(about["seconds"]), 1),
            "returns": " ".join(f"{value:.5g}" for value in returns),
        }

    def report(self, folder: Path, agents: Sequence[str], base: str | None) -> list[str]:
        """Greedy returns, and the probability of being better than the base."""
        assert base is not None
        return write_report(folder, agents, base)
