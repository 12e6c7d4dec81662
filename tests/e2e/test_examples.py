import subprocess
import sys
from pathlib import Path

import pytest

# Old releases of other packages use what newer ones of theirs deprecate
WARNINGS = ("-W", "error", "-W", "default::DeprecationWarning")
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, *WARNINGS, str(EXAMPLES / script), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_quickstart_walks_to_the_goal(tmp_path: Path) -> None:
    lines = run("quickstart.py", folder=tmp_path).splitlines()
    assert lines[0] == "A........G"
    # The shortest way there, then the reward
    assert lines[-2:] == [".........A", "reward 1.0"]
    assert len(lines) == 11


def test_quickstart_says_so_when_the_budget_was_too_small(tmp_path: Path) -> None:
    lines = run("quickstart.py", "--timesteps", "10", folder=tmp_path).splitlines()
    assert lines[-1] == "out of time: train for longer"


def test_cartpole_reports_its_greedy_return(tmp_path: Path) -> None:
    arguments = ("--timesteps", "1300", "--episodes", "2", "--seed", "3", "--no-progress-bar")
    out = run("cartpole.py", *arguments, folder=tmp_path)
    assert out.startswith("seed 3: ")
    assert out.rstrip().endswith("over 2 greedy episodes")
    assert 1.0 <= float(out.split()[2]) <= 500.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cartpole_is_solved_with_the_settings_in_the_readme(seed: int, tmp_path: Path) -> None:
    out = run("cartpole.py", "--seed", str(seed), "--no-progress-bar", folder=tmp_path)
    assert float(out.split()[2]) >= 475.0
