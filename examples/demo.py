"""
Train DQN and PERDQN side by side on GridWorld and CartPole-v1: a table and a picture at the end.

    python examples/demo.py
"""

import argparse
import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple

# One thread a process: networks of this size are slower on two
os.environ["OMP_NUM_THREADS"] = "1"

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from cartpole import SETTINGS as CARTPOLE_SETTINGS
from cartpole import TIMESTEPS as CARTPOLE_TIMESTEPS
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from tqdm import tqdm

from sb3_per import PERDQN

mpl.use("Agg")
import matplotlib.pyplot as plt

ALGORITHMS: dict[str, type[DQN]] = {"DQN": DQN, "PERDQN": PERDQN}
#: Of the Okabe-Ito palette, which colour-blind readers can tell apart
COLORS = {"DQN": "#0072B2", "PERDQN": "#D55E00"}


class Task(NamedTuple):
    """
    What to train on.

    :param env_id: Gymnasium id, with its module so that worker processes find it
    :param timesteps: environment steps of one run
    :param settings: arguments of both algorithms
    :param smoothing: number of episodes in the moving average of the picture
    """

    env_id: str
    timesteps: int
    settings: dict[str, Any]
    smoothing: int


TASKS = {
    "GridWorld-v0": Task(
        "sb3_per_envs:sb3_per/GridWorld-v0",
        5_000,
        {
            "policy": "MlpPolicy",
            "learning_rate": 1e-3,
            "learning_starts": 500,
            "train_freq": 1,
            "gamma": 0.95,
            "target_update_interval": 100,
            "exploration_fraction": 0.5,
        },
        smoothing=20,
    ),
    "CartPole-v1": Task("CartPole-v1", CARTPOLE_TIMESTEPS, CARTPOLE_SETTINGS, smoothing=20),
}


class Run(NamedTuple):
    """
    One algorithm trained once on one task.

    :param task: name of the task
    :param algorithm: name of the algorithm
    :param seed: of the run
    """

    task: str
    algorithm: str
    seed: int


class Outcome(NamedTuple):
    """
    What came of a run.

    :param steps: environment steps at the end of each episode, shape ``(episodes,)``
    :param returns: of these episodes, shape ``(episodes,)``
    :param lengths: of these episodes, shape ``(episodes,)``
    :param greedy_return: mean return of 20 greedy episodes after training
    """

    steps: npt.NDArray[np.int64]
    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    greedy_return: float


class EpisodeRecorder(BaseCallback):
    """
    Keep the return of each episode, and report progress.

    :param report_every: environment steps between two reports
    """

    def __init__(self, report_every: int = 100) -> None:
        super().__init__()
        self.report_every = report_every
        self.episodes: list[tuple[int, float, int]] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                episode = info["episode"]
                self.episodes.append((self.num_timesteps, episode["r"], episode["l"]))
        if self.n_calls % self.report_every == 0:
            _report(self.report_every)
        return True


_progress: "Synchronized[int] | None" = None


def _keep(progress: "Synchronized[int]") -> None:
    global _progress
    _progress = progress


def _report(steps: int) -> None:
    if _progress is not None:
        with _progress.get_lock():
            _progress.value += steps


def train(run: Run, timesteps: int) -> Outcome:
    """
    :param run: what to train
    :param timesteps: environment steps
    :return: its episodes and its greedy return
    """
    import torch as th

    th.set_num_threads(1)
    task = TASKS[run.task]
    recorder = EpisodeRecorder()
    model = ALGORITHMS[run.algorithm](env=task.env_id, seed=run.seed, **task.settings)
    model.learn(timesteps, callback=recorder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mean, _ = evaluate_policy(
            model, make_vec_env(task.env_id, seed=run.seed + 1000), n_eval_episodes=20
        )
    steps, returns, lengths = (np.array(column) for column in zip(*recorder.episodes, strict=True))
    return Outcome(steps, returns, lengths, float(np.mean(mean)))


def train_all(runs: Sequence[Run], share: float, workers: int) -> dict[Run, Outcome]:
    """
    :param runs: what to train
    :param share: of each task's environment steps
    :param workers: number of processes
    :return: the outcome of each run
    """
    timesteps = {run: max(int(TASKS[run.task].timesteps * share), 300) for run in runs}
    context = multiprocessing.get_context("spawn")
    progress = context.Value("q", 0)
    outcomes: dict[Run, Outcome] = {}
    with (
        ProcessPoolExecutor(workers, context, initializer=_keep, initargs=(progress,)) as pool,
        _bar(sum(timesteps.values()), progress) as refresh,
    ):
        # The longest runs first, so that no worker waits at the end
        longest_first = sorted(runs, key=lambda run: -timesteps[run])
        futures = {pool.submit(train, run, timesteps[run]): run for run in longest_first}
        waiting = set(futures)
        while waiting:
            with contextlib.suppress(TimeoutError):
                for future in as_completed(waiting, timeout=0.5):
                    waiting.discard(future)
                    outcomes[futures[future]] = future.result()
            refresh()
    return outcomes


@contextlib.contextmanager
def _bar(total: int, progress: "Synchronized[int]") -> Iterator[Any]:
    with tqdm(total=total, unit=" steps", unit_scale=True, desc="training") as bar:
        yield lambda: bar.update(progress.value - bar.n)
        bar.update(total - bar.n)


def moving_average(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """
    :param values: shape ``(n,)``
    :param window: how many values, up to and with each, are averaged; fewer at the beginning
    :return: shape ``(n,)``
    """
    sums = np.cumsum(values)
    sums[window:] -= sums[:-window].copy()
    averages: npt.NDArray[np.float64] = sums / np.minimum(np.arange(len(values)) + 1, window)
    return averages


def draw(outcomes: dict[Run, Outcome], path: Path) -> None:
    """
    Draw the learning curves of all runs.

    :param outcomes: of the runs
    :param path: where the picture goes
    """
    tasks = list(dict.fromkeys(run.task for run in outcomes))
    figure, axes = plt.subplots(1, len(tasks), figsize=(11, 4), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], tasks, strict=True):
        for run, outcome in sorted(outcomes.items()):
            if run.task != name:
                continue
            # Every episode of GridWorld that ends in time returns 1: its length tells more
            values = outcome.lengths.astype(float) if "Grid" in name else outcome.returns
            axis.plot(
                outcome.steps,
                moving_average(values, TASKS[name].smoothing),
                color=COLORS[run.algorithm],
                label=f"{run.algorithm}, seed {run.seed}",
                linestyle="-" if run.seed % 2 else "--",
            )
        axis.set_title(name)
        axis.set_xlabel("environment steps")
        what = "episode length in steps" if "Grid" in name else "episode return"
        axis.set_ylabel(f"{what} (mean of {TASKS[name].smoothing})")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def print_table(outcomes: dict[Run, Outcome]) -> None:
    """
    Print a row for each run.

    :param outcomes: of the runs
    """
    print(f"\n{'task':<14}{'algorithm':<11}{'seed':>4}{'episodes':>10}{'greedy return':>15}")
    for run, outcome in sorted(outcomes.items(), key=lambda item: item[0]):
        print(
            f"{run.task:<14}{run.algorithm:<11}{run.seed:>4}{len(outcome.returns):>10}"
            f"{outcome.greedy_return:>15.2f}"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--picture", type=Path, default=Path("demo.png"), help="where it goes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--share", type=float, default=1.0, help="of the steps of a full run")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)

    runs = [
        Run(task, algorithm, seed)
        for task in TASKS
        for algorithm in ALGORITHMS
        for seed in options.seeds
    ]
    outcomes = train_all(runs, options.share, options.workers)
    print_table(outcomes)
    draw(outcomes, options.picture)
    print(f"\nlearning curves: {options.picture}")
    if len(options.seeds) == 1:
        print("One seed shows how it runs, not which one is better: --seeds 1 2 3 trains more.")


if __name__ == "__main__":
    main()
