"""The command, in this process; tests/e2e has it as a whole."""

import errno
import io
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest

from sb3_per.compare import backends, pictures, pipeline
from sb3_per.compare import main as compare
from sb3_per.compare.main import main, plan, plot
from sb3_per.compare.settings import CompareSettings, PlotSettings, SettingsError
from sb3_per.compare.store import Store
from sb3_per.compare.training import Run, train


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, int]]]:
    """Keys of the runs that are really made; most pictures are left out."""
    keys: list[tuple[str, str, int]] = []

    def keep(run: Run) -> Any:
        keys.append(run.key)
        return train(run)

    monkeypatch.setattr(compare, "train", keep)
    monkeypatch.setattr(pictures, "PICTURES", {"places": pictures.PICTURES["places"]})
    return keys  # type: ignore[return-value]


def settings(small: dict[str, Any], folder: Path, **changes: Any) -> CompareSettings:
    return CompareSettings(**{**small, "output": folder, "timesteps": 120, **changes})


def content(folder: Path) -> dict[str, pd.DataFrame]:
    tables = Store(folder).read_tables()
    tables["runs"] = tables["runs"].drop(columns="seconds")
    return tables


def assert_same(first: Path, second: Path) -> None:
    ours, theirs = content(first), content(second)
    for name, table in ours.items():
        pd.testing.assert_frame_equal(table, theirs[name], check_exact=True)


def test_all_runs_are_planned_with_the_same_hyperparameters(
    small: dict[str, Any], tmp_path: Path
) -> None:
    runs, written = plan(
        settings(small, tmp_path, envs=("GridWorld-v0", "CartPole-v1"), first_seed=4)
    )
    assert [run.key for run in runs] == [
        (env_id, agent, seed)
        for env_id in ("sb3_per/GridWorld-v0", "CartPole-v1")
        for seed in (4, 5)
        for agent in ("uniform", "per")
    ]
    for run in runs:
        assert run.hyperparams["n_timesteps"] == 120
        assert run.hyperparams["learning_starts"] == 60
        assert "threshold" not in run.hyperparams
        assert (run.n_evals, run.eval_episodes, run.snapshot_episodes) == (4, 3, (0, 20, 10_000))
    assert written["seeds"] == [4, 5]
    # From the file, and from the environment itself
    assert written["analysis"]["thresholds"] == {"sb3_per/GridWorld-v0": 0.8, "CartPole-v1": 475.0}


@pytest.mark.parametrize(
    ("changes", "n_timesteps"),
    [({}, 400), ({"budget": 0.25}, 100), ({"timesteps": 7}, 7), ({"quick": True}, 120)],
)
def test_budgets(
    small: dict[str, Any], tmp_path: Path, changes: dict[str, Any], n_timesteps: int
) -> None:
    runs, _ = plan(settings(small, tmp_path, **{"timesteps": None, **changes}))
    assert {run.hyperparams["n_timesteps"] for run in runs} == {n_timesteps}


def test_threshold_of_the_command_line_comes_first(small: dict[str, Any], tmp_path: Path) -> None:
    _, written = plan(settings(small, tmp_path, threshold=0.3))
    assert written["analysis"]["thresholds"] == {"sb3_per/GridWorld-v0": 0.3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agents": ("uniform", "per(alhpa=1)")}, "alhpa is no option of per"),
        ({"agents": ("dqn", "uniform")}, "uniform more than once"),
        ({"envs": ("Acrobot-v1",)}, "no hyperparameters for Acrobot-v1"),
        ({"eval_episodes": 0}, "--eval-episodes"),
        ({"envs": ("../evil:Foo-v0",)}, "--envs ../evil:Foo-v0: can't import"),
        # What the algorithms themselves find
        ({"agents": ("uniform", "per(alpha=-1)")}, r"agent per\(alpha=-1\): `alpha` must be"),
        ({"agents": ("uniform", "per(alpha=1e999)")}, "can't read"),
        ({"device": "abacus"}, "agent uniform: .*abacus"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    small: dict[str, Any],
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(settings(small, tmp_path / "x", **changes)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"sb3-per compare: .*{message}", line)
    assert not (tmp_path / "x").exists()


def test_environment_that_can_not_be_made_is_found_before_the_first_run(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A corridor has two cells at least
    text = small["hyperparams"].read_text().replace("length: 4", "length: 1")
    (tmp_path / "bad.yml").write_text(text)
    assert main(settings(small, tmp_path / "a", hyperparams=tmp_path / "bad.yml")) == 2
    assert "can't make sb3_per/GridWorld-v0: " in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "agents",
    [("per(learning_rate='lin_1e-3')",), ("uniform(train_freq=(1, 'episode'))", "per(alpha=0.5)")],
)
def test_what_is_written_can_be_read_again(
    small: dict[str, Any], tmp_path: Path, trained: list[Any], agents: tuple[str, ...]
) -> None:
    for n_seeds in (1, 2):
        assert main(settings(small, tmp_path / "a", agents=agents, n_seeds=n_seeds)) == 0
    assert len(trained) == 2 * len(agents)
    assert plot(PlotSettings(tmp_path / "a")) == 0


def test_finished_runs_are_never_repeated(
    small: dict[str, Any], tmp_path: Path, trained: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(settings(small, tmp_path / "a")) == 0
    assert len(trained) == 4
    before = content(tmp_path / "a")
    trained.clear()
    assert main(settings(small, tmp_path / "a")) == 0
    assert trained == []
    assert "4 runs: 1 task(s), 2 agent(s), 2 seed(s); 4 finished before" in (
        capsys.readouterr().out
    )
    for name, table in content(tmp_path / "a").items():
        pd.testing.assert_frame_equal(table, before[name])
    # More seeds: only those
    assert main(settings(small, tmp_path / "a", n_seeds=3)) == 0
    assert [key[2] for key in trained] == [2, 2]
    assert content(tmp_path / "a")["runs"]["seed"].tolist() == [0, 1, 2] * 2


def test_stopped_comparison_goes_on_with_the_rest_and_ends_the_same(
    small: dict[str, Any],
    tmp_path: Path,
    trained: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(settings(small, tmp_path / "whole")) == 0
    trained.clear()
    write = Store.write

    def write_two(self: Store, run: Run, tables: Any) -> None:
        if len(trained) > 2:
            raise KeyboardInterrupt
        write(self, run, tables)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", write_two)
        assert main(settings(small, tmp_path / "stopped")) == 130
    assert "Stopped: 2 of 4 runs are finished and kept" in capsys.readouterr().err
    assert len(content(tmp_path / "stopped")["runs"]) == 2
    done = set(trained[:2])
    trained.clear()
    assert main(settings(small, tmp_path / "stopped")) == 0
    assert len(trained) == 2
    assert not done & set(trained)
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_other_settings_for_the_same_folder_are_refused(
    small: dict[str, Any], tmp_path: Path, trained: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(settings(small, tmp_path / "a", n_seeds=1, agents=("uniform",))) == 0
    trained.clear()
    assert main(settings(small, tmp_path / "a", timesteps=130, n_evals=7)) == 2
    message = capsys.readouterr().err
    assert "run: n_evals 4 there, 7 now" in message
    assert "sb3_per/GridWorld-v0: n_timesteps 120 there, 130 now" in message
    assert trained == []


def test_other_versions_are_told_of(
    small: dict[str, Any], tmp_path: Path, trained: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(settings(small, tmp_path / "a", n_seeds=1, agents=("uniform",))) == 0
    path = tmp_path / "a" / "settings.json"
    there = json.loads(path.read_text())
    now, there["versions"]["torch"] = there["versions"]["torch"], "0.4.1"
    path.write_text(json.dumps(there))
    capsys.readouterr()
    assert main(settings(small, tmp_path / "a", n_seeds=1, agents=("uniform",))) == 0
    assert f"has runs made with torch 0.4.1, now {now}" in capsys.readouterr().err


def test_one_failed_run_loses_no_other(
    small: dict[str, Any],
    tmp_path: Path,
    trained: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail_once(run: Run) -> Any:
        if run.key[1:] == ("per", 0):
            raise ValueError("an exploded network")
        return train(run)

    with monkeypatch.context() as patch:
        patch.setattr(compare, "train", fail_once)
        assert main(settings(small, tmp_path / "a")) == 1
    captured = capsys.readouterr()
    assert "failed: sb3_per/GridWorld-v0, per, seed 0: ValueError: an exploded network" in (
        captured.out + captured.err
    )
    assert "1 of 4 runs failed" in captured.err
    (file,) = (tmp_path / "a" / "failures").iterdir()
    assert "in fail_once" in file.read_text()
    assert len(content(tmp_path / "a")["runs"]) == 3
    assert "1 run failed" in (tmp_path / "a" / "report.html").read_text()
    # The next time, only that one
    assert main(settings(small, tmp_path / "a")) == 0
    assert [key[1:] for key in trained] == [("per", 0)]
    assert "failed" not in (tmp_path / "a" / "report.html").read_text()


def test_killed_worker_loses_no_finished_run(
    small: dict[str, Any],
    tmp_path: Path,
    trained: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def two_then_none(runs: list[Run], *_: Any) -> Any:
        for run in runs[:2]:
            yield backends.Outcome(run, train(run))
        raise RuntimeError("a worker process was terminated")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "make_all", two_then_none)
        assert main(settings(small, tmp_path / "a")) == 1
    message = capsys.readouterr().err
    assert "RuntimeError: a worker process was terminated" in message
    assert "The workers are gone: 2 of 4 runs are finished and kept" in message
    assert len(content(tmp_path / "a")["runs"]) == 2
    assert main(settings(small, tmp_path / "a")) == 0
    assert len(trained) == 2


def test_all_runs_failing_is_a_failure_without_a_report(
    small: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: Run) -> Any:
        raise ValueError("an exploded network")

    monkeypatch.setattr(compare, "train", fail)
    assert main(settings(small, tmp_path / "a", n_seeds=1)) == 1
    assert "2 of 2 runs failed" in capsys.readouterr().err
    assert not (tmp_path / "a" / "report.html").exists()


@pytest.mark.parametrize("damage", ["no run.json", "cut table", "one other byte", "no table"])
def test_damaged_run_is_named_and_made_again(
    small: dict[str, Any],
    tmp_path: Path,
    trained: list[Any],
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(settings(small, tmp_path / "a")) == 0
    before = content(tmp_path / "a")
    trained.clear()
    folder = tmp_path / "a" / "runs" / "sb3_per+GridWorld-v0" / "per" / "seed-1"
    path = folder / ("run.json" if damage == "no run.json" else "episodes.parquet")
    data = bytearray(path.read_bytes())
    if damage in ("no run.json", "no table"):
        path.unlink()
    elif damage == "cut table":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    capsys.readouterr()
    # One of the other runs is damaged, too, and not asked for
    (folder.parent / "seed-0" / "run.json").write_text("{")
    assert main(settings(small, tmp_path / "a", first_seed=1, n_seeds=1)) == 0
    captured = capsys.readouterr()
    assert f"{path} is {'missing' if damage.startswith('no') else 'damaged'}: the run is made" in (
        captured.err
    )
    assert f"can't read {folder.parent / 'seed-0' / 'run.json'}" in captured.err
    assert trained == [("sb3_per/GridWorld-v0", "per", 1)]
    assert main(settings(small, tmp_path / "a")) == 0
    for name, table in content(tmp_path / "a").items():
        pd.testing.assert_frame_equal(table, before[name], check_exact=True)


def test_two_commands_do_not_work_in_one_folder(
    small: dict[str, Any], tmp_path: Path, trained: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = settings(small, tmp_path / "a", n_seeds=1)
    with Store(tmp_path / "a").lock():
        assert main(options) == 2
        message = f"another command is at work in {tmp_path / 'a'}: wait for its end, or choose"
        assert capsys.readouterr().err.startswith(f"sb3-per compare: {message}")
    assert trained == []
    assert main(options) == 0
    with Store(tmp_path / "a").lock():
        assert plot(PlotSettings(tmp_path / "a")) == 2


@pytest.mark.parametrize(
    ("encoding", "name"), [("cp1252", "результат"), ("gbk", "mañana"), ("ascii", "è")]
)
def test_output_folder_with_letters_that_the_terminal_lacks(
    small: dict[str, Any],
    tmp_path: Path,
    trained: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    encoding: str,
    name: str,
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", out)
    options = settings(small, tmp_path / name, n_seeds=1, agents=("uniform",))
    assert main(options) == 0
    assert plot(PlotSettings(tmp_path / name)) == 0
    out.flush()
    out.buffer.seek(0)
    assert name.encode("ascii", "backslashreplace") in out.buffer.read()
    # The stream of the caller is unchanged
    assert out.errors == "strict"
    assert len(trained) == 1


@pytest.mark.parametrize("name", ["a-file", "a-file/below", "x" * 300])
def test_output_that_can_not_be_written(
    small: dict[str, Any],
    tmp_path: Path,
    trained: list[Any],
    name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a-file").touch()
    assert main(settings(small, tmp_path / name)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sb3-per compare: ")
    assert name.partition("/")[0] in line
    assert trained == []


def test_finished_comparison_in_a_folder_that_is_read_only_now(
    small: dict[str, Any],
    tmp_path: Path,
    trained: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = settings(small, tmp_path / "a", n_seeds=1)
    assert main(options) == 0

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path / "a"))

    # Not by chmod: nothing is read-only for root
    monkeypatch.setattr("os.open", refuse)
    monkeypatch.setattr("os.replace", refuse)
    again: list[Callable[[], int]] = [
        lambda: main(options),
        lambda: plot(PlotSettings(tmp_path / "a")),
    ]
    for call in again:
        capsys.readouterr()
        assert call() == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"can't write {tmp_path / 'a'}: Read-only file system")


@pytest.mark.parametrize("at", ["plan", "write_results"])
def test_stopped_before_and_after_the_runs(
    small: dict[str, Any],
    tmp_path: Path,
    trained: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    at: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, at, stop)
    assert main(settings(small, tmp_path / "a", n_seeds=1)) == 130
    assert "sb3-per compare: stopped" in capsys.readouterr().err


def test_signals_that_end_a_process_are_as_before_afterwards(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(_: CompareSettings) -> Any:
        seen.append([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)])
        raise SettingsError("enough")

    monkeypatch.setattr(compare, "plan", look)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(settings(small, tmp_path / "a")) == 2
        # As under nohup
        assert seen == [[signal.default_int_handler, signal.SIG_IGN]]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_environments_whose_ids_differ_by_a_slash_share_nothing(
    small: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pictures, "PICTURES", {"places": pictures.PICTURES["places"]})
    names = ("ns/Grid-v0", "ns-Grid-v0")
    for name in names:
        gym.register(name, "sb3_per_envs.grid_world:GridWorldEnv")
    try:
        text = small["hyperparams"].read_text().replace("sb3_per/GridWorld-v0", "default")
        (tmp_path / "all.yml").write_text(text)
        options = settings(
            small, tmp_path / "a", hyperparams=tmp_path / "all.yml", envs=names, n_seeds=1
        )
        assert main(options) == 0
    finally:
        for name in names:
            del gym.registry[name]
    assert set(content(tmp_path / "a")["runs"]["env"]) == set(names)
    assert len(list((tmp_path / "a" / "runs").iterdir())) == 2
    assert len(list((tmp_path / "a" / "pictures").glob("*/places.png"))) == 2


class OddReward(gym.RewardWrapper[Any, Any]):
    """One reward in the middle of the first episode."""

    def __init__(self, env: Any, value: float) -> None:
        super().__init__(env)
        self.value = value
        self.n_steps = 0

    def reward(self, reward: Any) -> float:
        self.n_steps += 1
        return self.value if self.n_steps == 3 else float(reward)


@pytest.mark.parametrize("value", [-np.inf, 1e300])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_reward_that_can_not_be_drawn_leaves_the_page_and_the_other_environment(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    text = small["hyperparams"].read_text()
    (tmp_path / "odd.yml").write_text(text)
    wanted = ("rewards", "threshold", "td-error")
    monkeypatch.setattr(pictures, "PICTURES", {k: pictures.PICTURES[k] for k in wanted})
    gym.register(
        "Odd-v0",
        lambda **options: OddReward(gym.make("sb3_per/GridWorld-v0", **options), value),
    )
    try:
        (tmp_path / "odd.yml").write_text(text.replace("CartPole-v1", "Odd-v0"))
        options = settings(
            small,
            tmp_path / "a",
            hyperparams=tmp_path / "odd.yml",
            envs=("Odd-v0", "GridWorld-v0"),
            agents=("uniform",),
            n_seeds=2,
            threshold=0.5,
        )
        assert main(options) == 0
        assert main(options) == 0
    finally:
        del gym.registry["Odd-v0"]
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert f"Odd-v0: not drawn, because uniform has an episode reward of {value:g}" in page
    assert page.count("data:image/png;base64,") == 2 * len(wanted)
    assert "GridWorld-v0: not drawn" not in page


def test_two_workers_give_the_numbers_of_one(small: dict[str, Any], tmp_path: Path) -> None:
    """In processes of their own, which have other random states."""
    for jobs in (1, 2):
        options = settings(small, tmp_path / str(jobs), jobs=jobs)
        store = Store(options.folder)
        runs, agreed = plan(options)
        store.agree_on(agreed)
        outcomes = list(backends.make_all(runs, train, "loky", jobs, None))
        assert {outcome.run.key for outcome in outcomes} == {run.key for run in runs}
        for outcome in outcomes:
            assert outcome.result is not None
            store.write(outcome.run, outcome.result)
        store.merge_tables()
    assert_same(tmp_path / "1", tmp_path / "2")


def ignores_interrupts(_: Run) -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_workers_leave_ctrl_c_to_the_process_that_stops_them(
    small: dict[str, Any], tmp_path: Path
) -> None:
    runs, _ = plan(settings(small, tmp_path))
    before = signal.getsignal(signal.SIGINT)
    outcomes = backends.make_all(runs, ignores_interrupts, "loky", 2, None)
    assert [outcome.result for outcome in outcomes] == [True] * len(runs)
    assert signal.getsignal(signal.SIGINT) == before
    # In this process, Ctrl-C stops the run
    alone = backends.make_all(runs, ignores_interrupts, "loky", 1, None)
    assert [outcome.result for outcome in alone] == [False] * len(runs)


def test_backend_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for backend, package in (("ray", "ray"), ("dask", "distributed")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(SettingsError, match=rf"needs {package}: pip .*sb3-per\[{backend}\]"):
            list(backends.make_all([], train, backend, 1, None))
