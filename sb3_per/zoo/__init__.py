"""
rl-zoo3 with the algorithms and environments of this package.

``sb3-per zoo train --algo per_dqn --env CartPole-v1`` is rl-zoo3's ``train`` with everything
registered; so are ``enjoy``, ``plot_train``, ``plot_from_file`` and ``all_plots``.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sb3_per_envs
from sb3_per.common.priorities import PRIORITIES

if TYPE_CHECKING:
    import optuna

__all__ = ["ALGORITHMS", "COMMANDS", "hyperparameters_of", "main", "register"]

#: Names for ``--algo``, and the locations of the classes
ALGORITHMS = {
    "per_dqn": ("sb3_per.per_dqn", "PERDQN"),
    "per_qrdqn": ("sb3_per.per_qrdqn", "PERQRDQN"),
    "per_sac": ("sb3_per.per_sac", "PERSAC"),
    "per_td3": ("sb3_per.per_td3", "PERTD3"),
    "per_ddpg": ("sb3_per.per_td3", "PERDDPG"),
    "per_tqc": ("sb3_per.per_tqc", "PERTQC"),
}

#: Subcommands, and the functions of rl-zoo3 that they call
COMMANDS = {
    "train": ("rl_zoo3.train", "train"),
    "enjoy": ("rl_zoo3.enjoy", "enjoy"),
    "plot_train": ("rl_zoo3.plots.plot_train", "plot_train"),
    "plot_from_file": ("rl_zoo3.plots.plot_from_file", "plot_from_file"),
    "all_plots": ("rl_zoo3.plots.all_plots", "all_plots"),
}

USAGE = f"""usage: sb3-per zoo {{{",".join(COMMANDS)}}} ...

rl-zoo3 with {", ".join(ALGORITHMS)}, and with the environments of sb3_per_envs:

  sb3-per zoo train --algo per_dqn --env CartPole-v1 -P
  sb3-per zoo enjoy --algo per_dqn --env CartPole-v1

Arguments are rl-zoo3's: sb3-per zoo train --help
Hyperparameters: {Path(__file__).parent}"""


def hyperparameters_of(algorithm: str) -> Path:
    """
    :param algorithm: one of :data:`ALGORITHMS`
    :return: file with its hyperparameters
    """
    return Path(__file__).with_name(f"{algorithm}.yml")


def register() -> None:
    """
    Register our algorithms, their samplers of hyperparameters and our environments with rl-zoo3, in
    this process.

    :raises ModuleNotFoundError: if rl-zoo3 is not installed (extra ``zoo``)
    """
    from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
    from rl_zoo3.utils import ALGOS

    sb3_per_envs.register_envs()
    for name in ALGORITHMS:
        original = name.removeprefix("per_")
        ALGOS[name] = _class_of(name)
        sample: Any = HYPERPARAMS_SAMPLER[original]
        HYPERPARAMS_SAMPLER[name] = _with_per_options(sample, "dqn" in name)  # type: ignore[assignment]
        # Passes on parameters that it doesn't know
        HYPERPARAMS_CONVERTER[name] = HYPERPARAMS_CONVERTER[original]


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run a command of rl-zoo3.

    :param arguments: arguments of the command line, the command first; those of this process by
        default
    :return: exit code
    :raises ModuleNotFoundError: if rl-zoo3 (or seaborn, for the plots) is not installed
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    command, *rest = given
    if command not in COMMANDS:
        print(f"sb3-per zoo: there is no command {command!r}\n\n{USAGE}", file=sys.stderr)
        return 2

    register()
    from rl_zoo3.utils import ALGOS

    module, function = COMMANDS[command]
    run = getattr(importlib.import_module(module), function)
    argv, algorithms = sys.argv, dict(ALGOS)
    # rl-zoo3 reads the arguments from here
    sys.argv = [f"sb3-per zoo {command}", *_defaults(command, rest), *rest]
    if command == "enjoy":
        ALGOS.update({name: _for_playing(ALGOS[name]) for name in ALGORITHMS})
    try:
        run()
    finally:
        sys.argv = argv
        ALGOS.update(algorithms)
    return 0


def _class_of(name: str) -> type[Any]:
    module, class_name = ALGORITHMS[name]
    found: type[Any] = getattr(importlib.import_module(module), class_name)
    return found


def _defaults(command: str, arguments: list[str]) -> list[str]:
    """
    :param command: one of :data:`COMMANDS`
    :param arguments: arguments given by the user
    :return: arguments to put before them: of a repeated argument, the last one counts
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--algo")
    algorithm = parser.parse_known_args(arguments)[0].algo
    if algorithm not in ALGORITHMS:
        return []
    if command == "train":
        return ["--conf-file", str(hyperparameters_of(algorithm))]
    if command == "enjoy":
        # Where `train` writes to. rl-zoo3 would look among the agents that it offers for download.
        return ["--folder", "logs"]
    return []


def _for_playing(algorithm: type[Any]) -> type[Any]:
    """
    :param algorithm: class of a saved model
    :return: class that loads it without memory for a replay buffer, for models that don't learn.
        rl-zoo3 does that for the algorithms in its list.
    """

    class Player(algorithm):  # type: ignore[misc]
        @classmethod
        def load(cls, path: str, **kwargs: Any) -> Any:
            without_memory = {"buffer_size": 1, "optimize_memory_usage": False}
            return algorithm.load(path, **{**without_memory, **kwargs})

    return Player


Sampler = Callable[["optuna.Trial", int, int, dict[str, Any]], dict[str, Any]]


def _with_per_options(sample: Sampler, has_double_q: bool) -> Sampler:
    """
    :param sample: sampler of rl-zoo3 for the hyperparameters of the original algorithm
    :param has_double_q: whether ``double_q`` is an option of the algorithm
    :return: the same, with the options of prioritized replay
    """

    def sample_with_per_options(
        trial: "optuna.Trial", n_actions: int, n_envs: int, additional_args: dict[str, Any]
    ) -> dict[str, Any]:
        options = {
            "alpha": trial.suggest_float("alpha", 0.0, 1.0),
            "beta": trial.suggest_float("beta", 0.0, 1.0),
            "priority": trial.suggest_categorical("priority", list(PRIORITIES)),
        }
        if has_double_q:
            options["double_q"] = trial.suggest_categorical("double_q", [False, True])
        return {**sample(trial, n_actions, n_envs, additional_args), **options}

    return sample_with_per_options
