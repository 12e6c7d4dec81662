"""Times of an import and of the first call, each in a new process."""

import os
import subprocess
import sys
import tempfile
from functools import partial

from benchmarks.race import Contestant, Race

IMPORTS = ["gymnasium", "sb3_per_envs", "stable_baselines3", "sb3_per"]

#: A draw and a write of the tree, which are compiled first
FIRST_CALLS = (
    "import numpy as np; from sb3_per import SumTree; tree = SumTree(10); "
    "tree.update(np.arange(10), np.ones(10)); tree.sample(4)"
)


def race_imports(rounds: int) -> Race:
    """
    :param rounds: of the race
    :return: seconds for a process that imports one package, the start of Python included
    """
    return Race.run(
        "import", {name: partial(_python, f"import {name}") for name in IMPORTS}, rounds, 0.0
    )


def race_first_calls(rounds: int) -> Race:
    """
    :param rounds: of the race
    :return: seconds for a process that uses the tree, with an empty cache and with a full one
    """
    with tempfile.TemporaryDirectory() as full:

        def compile_all() -> None:
            with tempfile.TemporaryDirectory() as empty:
                _python(FIRST_CALLS, empty)

        _python(FIRST_CALLS, full)
        contestants: dict[str, Contestant] = {
            "import only": partial(_python, "import sb3_per", full),
            "first use, compiled before": partial(_python, FIRST_CALLS, full),
            "first use, nothing compiled": compile_all,
        }
        return Race.run("first use", contestants, rounds, 0.0)


def _python(code: str, cache: str | None = None) -> None:
    environment = {**os.environ, **({"NUMBA_CACHE_DIR": cache} if cache else {})}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
