import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch as th

# Small networks run slower on several threads, above all beside other test workers
th.set_num_threads(1)

#: Seconds after which a process hangs, on the slowest and busiest of machines too
HANGS = 900

# Old releases of other packages use what newer ones of theirs deprecate
WARNINGS = (
    *("-W", "error", "-W", "default::DeprecationWarning"),
    # pyparsing, which Matplotlib uses, turns on warnings of its own when it sees such options
    *("-W", "ignore:warn_:UserWarning"),
)


@pytest.fixture(autouse=True)
def _same_random_numbers_whatever_ran_before() -> None:
    np.random.seed(0)
    th.manual_seed(0)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """
    Runs a fresh interpreter in an empty folder, warnings as errors, with given arguments and
    standard input, and returns what it printed. It has to end well.
    """

    def run(*arguments: str, text: str | None = None) -> str:
        result = subprocess.run(
            [sys.executable, *WARNINGS, *arguments],
            input=text,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HANGS,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    return run
