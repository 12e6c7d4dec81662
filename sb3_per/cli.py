"""The command ``sb3-per``."""

import difflib
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["COMMANDS", "main"]


class Command(NamedTuple):
    """
    A subcommand. Its modules are imported when it is called.

    :param summary: one line for ``sb3-per --help``
    :param function: ``module:name`` of the function to call; returns an exit code or None
    :param settings: ``module:name`` of a dataclass, the argument of the function, which tyro
        creates from the arguments; None passes the list of arguments
    :param extra: extra of this package that installs the dependencies of the command
    """

    summary: str
    function: str
    settings: str | None
    extra: str


COMMANDS = {
    "compare": Command(
        "train agents with uniform and with prioritized replay side by side",
        "sb3_per.compare.main:main",
        "sb3_per.compare.settings:CompareSettings",
        "experiments",
    ),
    "plot": Command(
        "draw the pictures and the report of a comparison again",
        "sb3_per.compare.main:plot",
        "sb3_per.compare.settings:PlotSettings",
        "experiments",
    ),
    "zoo": Command(
        "rl-zoo3 with the algorithms of this package; all arguments go to it",
        "sb3_per.zoo:main",
        None,
        "zoo",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: arguments of the command line, without the name of the program; by default
        those that the program was called with
    :return: exit code
    """
    if arguments is not None:
        return _main(list(arguments))
    code = _main(sys.argv[1:])
    if "ray" in sys.modules:
        # Threads of Ray kept one process in twenty from ending, after everything was written and
        # Ray was shut down (Ray 2.60)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _main(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help"):
        print(_help())
        return 0
    if given[0] == "--version":
        from sb3_per import __version__

        print(__version__)
        return 0
    name, *rest = given
    command = COMMANDS.get(name)
    if command is None:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
        print(f"sb3-per: there is no command {name!r}: {hint}", file=sys.stderr)
        return 2
    try:
        return _call(name, command, rest)
    except KeyboardInterrupt:
        # Ctrl-C while the command was imported
        print(f"\nsb3-per {name}: stopped", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "sb3_per", "sb3_per_envs"):
            raise
        print(
            f"sb3-per {name} needs {missing}, which is not installed: "
            f"pip install 'sb3-per[{command.extra}]'",
            file=sys.stderr,
        )
        return 1


def _call(name: str, command: Command, arguments: list[str]) -> int:
    if command.settings is None:
        return _named(command.function)(arguments) or 0
    # First, because it is fast: errors in arguments are reported at once
    import tyro

    settings = tyro.cli(_named(command.settings), prog=f"sb3-per {name}", args=arguments)
    return _named(command.function)(settings) or 0


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: sb3-per COMMAND [ARGUMENTS]",
            "",
            "Prioritized Experience Replay for Stable-Baselines3.",
            "",
            *lines,
            "",
            "sb3-per COMMAND --help shows the arguments of a command.",
        ]
    )
