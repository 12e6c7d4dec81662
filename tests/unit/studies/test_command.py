"""``python -m studies``: what can be asked, and what a study does from runs to summary."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from sb3_per.compare.settings import SettingsError
from sb3_per.compare.training import Run, Tables, train
from studies import networks
from studies.command import STUDIES, StudySettings, main, plan
from studies.networks import TASKS, NetworkStudy, corridor
from studies.report import read_scores
from studies.study import KEY, RunTable

TINY = {
    "n_timesteps": 160,
    "n_envs": 2,
    "learning_starts": 20,
    "policy_kwargs": "dict(net_arch=[4])",
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Options of a study whose tasks have the same environment, with other hyperparameters."""
    for length in (3, 4):
        task = corridor(length, **TINY)
        monkeypatch.setitem(TASKS, f"tiny-{length}", task._replace(n_evals=4))
    study = NetworkStudy(["tiny-3", "tiny-4"], ["uniform", "per"], "uniform")
    monkeypatch.setitem(STUDIES, "tiny", study)
    return {"study": "tiny", "n_seeds": 2, "output": tmp_path / "out", "jobs": 1}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Runs that are really made."""
    runs: list[Run] = []

    def keep(run: Run) -> Tables:
        runs.append(run)
        return train(run)

    monkeypatch.setattr(networks, "train", keep)
    return runs


def test_settings_that_are_asked_for() -> None:
    settings = tyro.cli(StudySettings, args=["map"])
    assert settings == StudySettings("map")
    assert settings.seeds == tuple(range(20))
    assert settings.folder == Path("results/map")
    text = "confirmation --tasks cartpole --agents uniform per --first-seed 100 --n-seeds 2"
    settings = tyro.cli(StudySettings, args=text.split())
    runs, agents, base = plan(settings)
    assert [run.key for run in runs] == [
        ("cartpole", agent, seed) for seed in (100, 101) for agent in ("uniform", "per")
    ]
    assert (agents, base) == (["uniform", "per"], "uniform")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (StudySettings("maps"), "there is no study 'maps', only blind-cliffwalk, map, "),
        (StudySettings("map", tasks=("corridor",)), "there is no task 'corridor', only corr"),
        (StudySettings("map", n_seeds=0), "--n-seeds must be at least 1, got 0"),
        (StudySettings("map", first_seed=-1), "--first-seed must be at least 0, got -1"),
        (StudySettings("map", jobs=0), "--jobs must be a number of runs, or -1 for all "),
        (StudySettings("map", agents=("pre",)), "there is no 'pre', only uniform"),
        (StudySettings("map", agents=("per(alhpa=1)",)), "alhpa is no option of per"),
        (StudySettings("map", base="per( alpha=.5 )"), r"--base per\(alpha=0.5\) is none of the"),
        (StudySettings("blind-cliffwalk", tasks=("tabular-21",)), "there is no task 'tabular-21'"),
        (StudySettings("blind-cliffwalk", agents=("per",)), "there is no 'per', only uniform, r"),
        (StudySettings("blind-cliffwalk", base="uniform"), "compares with no agent"),
    ],
)
def test_what_is_refused_is_told_in_one_line(
    settings: StudySettings,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=message):
        plan(settings)
    assert main(settings) == 2
    told = capsys.readouterr().err
    assert told.startswith("python -m studies: ")
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "base"),
    [
        ({}, "per"),
        ({"base": "dqn"}, "uniform"),
        ({"agents": ("per(alpha=0.4)", "uniform", "dqn")}, "per(alpha=0.4)"),
    ],
)
def test_what_agents_are_compared_with(options: dict[str, Any], base: str) -> None:
    """The study's own base where it takes part, else the first agent."""
    runs, agents, found = plan(StudySettings("few-updates", n_seeds=1, **options))
    assert found == base
    assert len(agents) == len({run.key[1] for run in runs})


def test_a_study_from_runs_to_summary(
    tiny: dict[str, Any], trained: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny["output"]
    assert main(StudySettings(**tiny)) == 0
    out = capsys.readouterr().out
    assert "8 runs: 2 task(s), 2 agent(s), 2 seed(s); 0 finished before" in out
    lines = (folder / "runs.csv").read_text().splitlines()
    assert lines[0] == ",".join((*KEY, *NetworkStudy.measures))
    assert len(lines) == 9
    runs = read_scores(folder / "runs.csv")
    assert set(zip(runs["task"], runs["agent"], runs["seed"], strict=True)) == {
        (task, agent, seed)
        for task in ("tiny-3", "tiny-4")
        for agent in ("uniform", "per")
        for seed in (0, 1)
    }
    # Before training and at each quarter
    assert {len(returns) for returns in runs["returns"]} == {5}
    # Tasks were not mixed up: nobody gets through the longer corridor in fewer steps
    assert (runs["steps"] / runs["episodes"])[runs["task"] == "tiny-4"].min() >= 3.0
    summary = (folder / "summary.md").read_text()
    assert out.endswith(summary)
    assert summary.startswith("| agent | tiny-3 | P(better)")
    assert [line.split(" | ")[0] for line in summary.splitlines()[2:]] == ["| `uniform`", "| `per`"]

    # The same again makes nothing, one seed more makes four runs, all others stay
    trained.clear()
    assert main(StudySettings(**tiny)) == 0
    assert trained == []
    assert (folder / "runs.csv").read_text().splitlines() == lines
    assert main(StudySettings(**{**tiny, "n_seeds": 3})) == 0
    assert [run.seed for run in trained] == [2] * 4
    after = (folder / "runs.csv").read_text().splitlines()
    assert after[:9] == lines
    assert len(after) == 13


def test_a_study_that_was_stopped_goes_on_and_ends_the_same(
    tiny: dict[str, Any],
    trained: list[Run],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rows(folder: Path) -> Any:
        runs = read_scores(folder / "runs.csv").drop(columns="seconds")
        return runs.sort_values(list(KEY), ignore_index=True).to_dict("list")

    assert main(StudySettings(**tiny)) == 0
    stopped = {**tiny, "output": tiny["output"].with_name("stopped")}
    write = RunTable.write

    def write_three(self: RunTable, *args: Any) -> None:
        if len(trained) > 3:
            raise KeyboardInterrupt
        write(self, *args)

    trained.clear()
    with monkeypatch.context() as patch:
        patch.setattr(RunTable, "write", write_three)
        assert main(StudySettings(**stopped)) == 130
    assert "Stopped: 3 of 8 runs are finished and kept" in capsys.readouterr().err
    assert not (stopped["output"] / "summary.md").exists()
    trained.clear()
    assert main(StudySettings(**stopped)) == 0
    assert len(trained) == 5
    assert rows(stopped["output"]) == rows(tiny["output"])


def test_a_run_that_fails_is_told_and_the_others_are_kept(
    tiny: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: Run) -> Tables:
        if run.agent == "per":
            raise RuntimeError("no luck")
        return train(run)

    settings = StudySettings(**tiny, tasks=("tiny-3",))
    with monkeypatch.context() as patch:
        patch.setattr(networks, "train", fails)
        assert main(settings) == 1
    told = capsys.readouterr()
    assert "failed: tiny-3, per, seed 0: RuntimeError: no luck" in told.out + told.err
    assert "2 of 4 runs failed" in told.err
    table = RunTable(settings.folder)
    assert list(read_scores(table.path)["agent"]) == ["uniform", "uniform"]
    assert [line.split(" | ")[0] for line in told.out.splitlines() if "`" in line] == [
        "| `uniform`"
    ]
    assert table.failures() == ["tiny-3--per--seed-0.txt", "tiny-3--per--seed-1.txt"]
    # The same command tries them again
    assert main(settings) == 0
    assert table.failures() == []
    assert sorted(read_scores(table.path)["agent"]) == ["per", "per", "uniform", "uniform"]


def test_as_a_module_it_ends_with_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["studies", "maps"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("studies", run_name="__main__")
    assert "python -m studies: there is no study 'maps'" in capsys.readouterr().err
