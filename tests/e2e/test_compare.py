"""``sb3-per compare`` and ``sb3-per plot`` as users call them: stopped, resumed, on a cluster."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import distribution
from pathlib import Path

import pandas as pd
import pytest

# Old releases of other packages use what newer ones of theirs deprecate
WARNINGS = ("-W", "error", "-W", "default::DeprecationWarning")
#: Seconds after which a command that hangs tells where, and ends
TIMEOUT = 900
CALL = (
    "import faulthandler, sys; from sb3_per.cli import main; "
    f"faulthandler.dump_traceback_later({TIMEOUT}, exit=True); sys.exit(main())"
)

YAML = """
sb3_per/GridWorld-v0:
  n_timesteps: !!float 600
  env_kwargs: {length: 4, max_episode_steps: 12}
  policy: 'MlpPolicy'
  policy_kwargs: "dict(net_arch=[16])"
  learning_rate: lin_1e-2
  buffer_size: 400
  learning_starts: 60
  train_freq: 2
"""

#: An environment whose runs with seed 1 and higher wait, at their first step, for a file
GATE = """
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
from sb3_per_envs.grid_world import GridWorldEnv


class Gate(GridWorldEnv):
    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None and 1 <= seed < 100:
            Path(f"waiting-{seed}").touch()
            while not Path("open").exists():
                time.sleep(0.05)
        return super().reset(seed=seed, options=options)


gym.register("Gate-v0", Gate, max_episode_steps=12)
"""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a comparison of which two runs are finished, and the others wait."""
    (tmp_path / "gate.py").write_text(GATE)
    yaml = YAML.replace("sb3_per/GridWorld-v0", "Gate-v0").replace(", max_episode_steps: 12", "")
    (tmp_path / "own.yml").write_text(yaml)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    # Without looks into buffers, there are few pictures to wait for
    text = (
        "compare --envs gate:Gate-v0 --hyperparams own.yml --n-evals 3 --eval-episodes 2 "
        "--n-snapshots 0 --snapshot-episodes --output out"
    )
    return text.split()


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "own.yml").write_text(YAML)
    text = "compare --envs GridWorld-v0 --hyperparams own.yml --n-seeds 2 --n-evals 3"
    return [*text.split(), "--eval-episodes", "2", "--threshold", "0.7", "--output", "out"]


def command(*arguments: str, strict: bool = True) -> list[str]:
    return [sys.executable, *(WARNINGS if strict else ()), "-c", CALL, *arguments]


def call(folder: Path, *arguments: str, strict: bool = True) -> "subprocess.CompletedProcess[str]":
    # Files instead of pipes, and a session of its own: what a cluster leaves running could hold
    # a pipe open forever
    with (folder / "stdout").open("w+") as out, (folder / "stderr").open("w+") as err:
        process = subprocess.Popen(
            command(*arguments, strict=strict),
            cwd=folder,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT + 30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def finished(folder: Path) -> dict[str, int]:
    """Runs on disk, and when they were written."""
    found = folder.glob("out/runs/*/*/seed-*/run.json")
    return {path.parent.as_posix(): path.stat().st_mtime_ns for path in found}


def stop(folder: Path, number: signal.Signals, to_all: bool, *arguments: str) -> "tuple[int, str]":
    """
    :param number: sent when two runs are finished and another one waits
    :param to_all: whether all processes of the command get it, as from a terminal
    :return: exit code, and output up to the end of the last process that has it open
    """
    # Its pipe is closed in any case
    with subprocess.Popen(
        command(*arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            end = time.monotonic() + TIMEOUT
            while len(finished(folder)) < 2 or not list(folder.glob("waiting-*")):
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < end
                time.sleep(0.01)
            (os.killpg if to_all else os.kill)(process.pid, number)
            out, _ = process.communicate(timeout=TIMEOUT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out


def tables(folder: Path) -> dict[str, pd.DataFrame]:
    names = ("episodes", "evaluations", "snapshots", "transitions")
    return {name: pd.read_parquet(folder / f"{name}.parquet") for name in names}


def assert_same(first: Path, second: Path) -> None:
    ours, theirs = tables(first), tables(second)
    for name, table in ours.items():
        pd.testing.assert_frame_equal(table, theirs[name], check_exact=True)


def test_command_is_installed() -> None:
    (script,) = distribution("sb3-per").entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("sb3-per", "sb3_per.cli:main")
    assert callable(script.load())


@pytest.mark.parametrize(
    ("jobs", "number", "to_all"),
    [(1, signal.SIGINT, True), (2, signal.SIGINT, True), (2, signal.SIGTERM, False)],
)
def test_stopped_comparison_ends_its_workers_and_resumes_with_the_rest(
    tmp_path: Path, gate: list[str], jobs: int, number: signal.Signals, to_all: bool
) -> None:
    # For two workers, many more than their queue holds
    n_seeds = 2 if jobs == 1 else 8
    arguments = [*gate, "--n-seeds", str(n_seeds), "--jobs", str(jobs)]
    code, out = stop(tmp_path, number, to_all, *arguments)
    assert code == 130, out
    message = f"Stopped: 2 of {2 * n_seeds} runs are finished and kept. The same command makes the"
    assert message in out
    assert "Traceback" not in out
    kept = finished(tmp_path)
    assert len(kept) == 2
    if jobs > 1:
        # A slow test resumes these
        return

    (tmp_path / "open").touch()
    result = call(tmp_path, *arguments)
    assert result.returncode == 0, result.stderr
    assert "2 finished before" in result.stdout
    assert "4/4" in result.stderr
    now = finished(tmp_path)
    assert len(now) == 4
    assert kept.items() <= now.items()
    assert "final greedy return" in result.stdout
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 1


@pytest.mark.slow
def test_what_is_drawn_again_from_the_tables_alone_is_the_same(
    tmp_path: Path, arguments: list[str]
) -> None:
    assert call(tmp_path, *arguments, "--jobs", "1").returncode == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for path in (tmp_path / "out" / "pictures").glob("*/*.png"):
        path.unlink()
    (tmp_path / "out" / "runs").rename(tmp_path / "elsewhere")
    result = call(tmp_path, "plot", "out")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8") == page
    assert len(list((tmp_path / "out" / "pictures").glob("*/*.png"))) == 8


@pytest.mark.slow
def test_stopped_with_workers_ends_with_the_same_numbers(tmp_path: Path, gate: list[str]) -> None:
    more = [*gate, "--n-seeds", "4", "--jobs", "2"]
    code, out = stop(tmp_path, signal.SIGINT, True, *more)
    assert code == 130, out
    (tmp_path / "open").touch()
    assert call(tmp_path, *more).returncode == 0
    alone = ["other" if argument == "out" else argument for argument in more[:-1]] + ["1"]
    assert call(tmp_path, *alone).returncode == 0
    assert_same(tmp_path / "out", tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ray", "dask"])
def test_local_cluster_gives_the_numbers_of_this_process(
    backend: str, tmp_path: Path, arguments: list[str]
) -> None:
    package = {"ray": "ray", "dask": "distributed"}[backend]
    pytest.importorskip(package, reason=f"needs the extra {backend}")
    # Warnings of those packages are theirs
    options = ("--backend", backend, "--jobs", "2")
    result = call(tmp_path, *arguments, *options, strict=False)
    assert result.returncode == 0, result.stderr
    assert "4/4" in result.stderr
    alone = [*arguments[:-1], "alone"]
    assert call(tmp_path, *alone, "--jobs", "1").returncode == 0
    assert_same(tmp_path / "out", tmp_path / "alone")


@pytest.mark.slow
def test_both_agents_learn_the_gridworld_in_a_quick_comparison(tmp_path: Path) -> None:
    result = call(tmp_path, "compare", "--quick", "--envs", "GridWorld-v0", "--jobs", "1")
    assert result.returncode == 0, result.stderr
    summary = pd.read_csv(tmp_path / "comparison-quick" / "summary.csv")
    values = summary.set_index(["agent", "measure"])["value"]
    for agent in ("uniform", "per"):
        assert values[agent, "n_reached"] == 3
        assert values[agent, "final_return"] >= 0.6
        # Later than a random walk could be lucky, and long before the end
        assert 500 < values[agent, "steps_to_threshold"] < 2500
    transitions = tables(tmp_path / "comparison-quick")["transitions"]
    assert {0, 50, 100} <= set(transitions["stage"])
