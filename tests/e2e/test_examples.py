import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Runs a script as Python does, in an empty folder, and returns what it printed."""

    def run(script: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_quickstart_walks_to_the_goal(run_example: Callable[..., str]) -> None:
    lines = run_example("quickstart.py").splitlines()
    assert lines[0] == "A........G"
    # The shortest way there, then the reward
    assert lines[-2:] == [".........A", "reward 1.0"]
    assert len(lines) == 11


def test_quickstart_says_so_when_the_budget_was_too_small(run_example: Callable[..., str]) -> None:
    lines = run_example("quickstart.py", "--timesteps", "10").splitlines()
    assert lines[-1] == "out of time: train for longer"


def test_cartpole_reports_its_greedy_return(run_example: Callable[..., str]) -> None:
    arguments = ("--timesteps", "1300", "--episodes", "2", "--seed", "3", "--no-progress-bar")
    out = run_example("cartpole.py", *arguments)
    assert out.startswith("seed 3: ")
    assert out.rstrip().endswith("over 2 greedy episodes")
    assert 1.0 <= float(out.split()[2]) <= 500.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cartpole_is_solved_with_the_settings_in_the_readme(
    seed: int, run_example: Callable[..., str]
) -> None:
    out = run_example("cartpole.py", "--seed", str(seed), "--no-progress-bar")
    assert float(out.split()[2]) >= 475.0
