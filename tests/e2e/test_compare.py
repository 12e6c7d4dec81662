"""``sb3-per compare`` and ``sb3-per plot`` as users call them: stopped, resumed, on a cluster."""

import contextlib
import os
import re
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
#: Seconds after which a command tells where it hangs, and ends
TIMEOUT = 240
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


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "own.yml").write_text(YAML)
    text = "compare --envs GridWorld-v0 --hyperparams own.yml --n-seeds 2 --n-evals 3"
    return [*text.split(), "--eval-episodes", "2", "--threshold", "0.7", "--output", "out"]


def command(*arguments: str, strict: bool = True) -> list[str]:
    return [sys.executable, *(WARNINGS if strict else ()), "-c", CALL, *arguments]


def call(folder: Path, *arguments: str, strict: bool = True) -> "subprocess.CompletedProcess[str]":
    # Files instead of pipes, and a session of its own: what a cluster leaves running could hold
    # a pipe open for ever
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


def stop_after(folder: Path, n_runs: int, *arguments: str) -> "tuple[int, str]":
    """Send Ctrl-C as a terminal does: to all processes of the command."""
    process = subprocess.Popen(
        command(*arguments),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        end = time.monotonic() + 200
        while len(finished(folder)) < n_runs and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
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


def test_stopped_and_resumed(tmp_path: Path, arguments: list[str]) -> None:
    # Without looks into buffers, there are few pictures to wait for
    arguments = [*arguments, "--n-snapshots", "0", "--snapshot-episodes"]
    code, out = stop_after(tmp_path, 2, *arguments, "--jobs", "1")
    assert code == 130, out
    (n_kept,) = re.findall(r"Stopped: (\d) of 4 runs are finished and kept", out)
    kept = finished(tmp_path)
    assert len(kept) == int(n_kept) < 4
    assert "Traceback" not in out

    result = call(tmp_path, *arguments, "--jobs", "1")
    assert result.returncode == 0, result.stderr
    assert f"{n_kept} finished before" in result.stdout
    assert "4/4" in result.stderr
    now = finished(tmp_path)
    assert len(now) == 4
    assert kept.items() <= now.items()
    assert "final greedy return" in result.stdout
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2


@pytest.mark.slow
def test_what_is_drawn_again_from_the_tables_alone_is_the_same(
    tmp_path: Path, arguments: list[str]
) -> None:
    assert call(tmp_path, *arguments, "--jobs", "1").returncode == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    for path in (tmp_path / "out" / "pictures").iterdir():
        path.unlink()
    (tmp_path / "out" / "runs").rename(tmp_path / "elsewhere")
    result = call(tmp_path, "plot", "out")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8") == page
    assert len(list((tmp_path / "out" / "pictures").iterdir())) == 8


@pytest.mark.slow
def test_stopped_with_workers_ends_with_the_same_numbers(
    tmp_path: Path, arguments: list[str]
) -> None:
    more = [*arguments, "--n-seeds", "4"]
    code, out = stop_after(tmp_path, 2, *more, "--jobs", "2")
    assert code == 130, out
    kept = finished(tmp_path)
    assert 2 <= len(kept) < 8
    assert call(tmp_path, *more, "--jobs", "2").returncode == 0
    assert kept.items() <= finished(tmp_path).items()
    assert call(tmp_path, *more[:-3], "other", *more[-2:], "--jobs", "1").returncode == 0
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
