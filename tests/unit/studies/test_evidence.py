"""``sb3-per evidence``: which runs are made, what is kept of them and what is said of it."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sb3_per import cli
from sb3_per.compare.hyperparams import KEYS
from sb3_per.compare.metrics import (
    interquartile_mean_interval,
    probability_of_improvement_interval,
)
from sb3_per.compare.settings import SettingsError
from sb3_per.compare.training import Run, Tables, train
from studies import evidence
from studies import report as evidence_report
from studies.evidence import COLUMNS, STUDIES, TASKS, EvidenceSettings, runs_of

TINY = {
    "n_timesteps": 160,
    "n_envs": 2,
    "learning_starts": 20,
    "policy_kwargs": "dict(net_arch=[4])",
}


@pytest.fixture
def tiny_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks in the same environment, which only their hyperparameters tell apart."""
    for length in (3, 4):
        task = evidence._corridor(length, **TINY)
        monkeypatch.setitem(TASKS, f"tiny-{length}", task._replace(n_evals=4))
    study = evidence.Study(["tiny-3", "tiny-4"], ["uniform", "per"])
    monkeypatch.setitem(STUDIES, "tiny", study)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_made(name: str) -> None:
    """All agents take the hyperparameters of all tasks, which are those of rl-zoo's files."""
    study = STUDIES[name]
    runs = runs_of(EvidenceSettings(name, n_seeds=2, first_seed=5))
    assert len(runs) == 2 * len(study.tasks) * len(study.agents)
    assert {seed for _, _, seed in runs} == {5, 6}
    for (task, agent, seed), run in runs.items():
        assert (run.agent, run.seed, run.env_id) == (agent, seed, TASKS[task].env_id)
        assert run.hyperparams.keys() <= KEYS.keys()


def test_the_map_varies_what_its_names_say() -> None:
    for (task, _, _), run in runs_of(EvidenceSettings("map", n_seeds=1)).items():
        _, n, _, freq = task.split("-")
        given = run.hyperparams
        assert given["env_kwargs"] == {"n": int(n)}
        assert given["n_envs"] * given["train_freq"] == int(freq) * given["gradient_steps"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (EvidenceSettings("maps"), "there is no study 'maps', only hypotheses, "),
        (EvidenceSettings("map", tasks=("corridor",)), "there is no task 'corridor', only corr"),
        (EvidenceSettings("map", n_seeds=0), "--n-seeds must be at least 1, got 0"),
        (EvidenceSettings("map", first_seed=-1), "--first-seed must be at least 0, got -1"),
        (EvidenceSettings("map", jobs=0), "--jobs must be a number of runs, or -1 for all "),
        (EvidenceSettings("map", agents=("pre",)), "there is no 'pre', only uniform"),
    ],
)
def test_what_is_refused(settings: EvidenceSettings, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        runs_of(settings)


def test_the_base_must_be_one_of_the_agents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = EvidenceSettings("map", base="per( alpha=.5 )", output=tmp_path / "out")
    assert evidence.main(settings) == 2
    assert "--base per(alpha=0.5) is none of the agents: uniform, per" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_refusal_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evidence", "maps", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("sb3-per evidence: there is no study 'maps'")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("tiny_study")
def test_a_study_from_runs_to_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = EvidenceSettings("tiny", n_seeds=2, output=tmp_path, jobs=1)
    assert evidence.main(settings) == 0
    out = capsys.readouterr().out
    assert "8 runs, 0 of them made before" in out
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert len(lines) == 9
    runs = evidence_report.read_runs(tmp_path / "runs.csv")
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
    summary = (tmp_path / "summary.md").read_text()
    assert out.endswith(summary)
    assert summary.startswith("| agent | tiny-3 | P(better)")
    assert [line.split(" | ")[0] for line in summary.splitlines()[2:]] == ["| `uniform`", "| `per`"]
    assert {path.name for path in tmp_path.glob("*.png")} == {"scores.png", "curves.png"}

    # The same again makes nothing, one seed more makes four runs, all others stay
    assert evidence.main(settings) == 0
    assert "8 runs, 8 of them made before" in capsys.readouterr().out
    assert (tmp_path / "runs.csv").read_text().splitlines() == lines
    more = EvidenceSettings("tiny", n_seeds=3, output=tmp_path, jobs=1)
    assert evidence.main(more) == 0
    after = (tmp_path / "runs.csv").read_text().splitlines()
    assert after[:9] == lines
    assert len(after) == 13


@pytest.mark.usefixtures("tiny_study")
def test_a_run_that_fails_is_told_and_the_others_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_once(run: Run) -> Tables:
        if run.agent == "per":
            raise RuntimeError("no luck")
        return train(run)

    monkeypatch.setattr("studies.evidence.train", fails_once)
    settings = EvidenceSettings("tiny", tasks=("tiny-3",), n_seeds=2, output=tmp_path, jobs=1)
    assert evidence.main(settings) == 1
    told = capsys.readouterr()
    assert "failed: sb3_per/GridWorld-v0, per, seed 0" in told.out + told.err
    assert "no luck" in told.out + told.err
    assert list(pd.read_csv(tmp_path / "runs.csv")["agent"]) == ["uniform", "uniform"]


def write_runs(folder: Path, scores: dict[tuple[str, str], list[float]]) -> None:
    rows = [
        (task, agent, seed, 100, 10, 1.0, f"-7 {score - 1} {score + 1}")
        for (task, agent), values in scores.items()
        for seed, score in enumerate(values)
    ]
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(folder / "runs.csv", index=False)


def test_the_table_recomputed(tmp_path: Path) -> None:
    per, other = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 3.5]
    write_runs(tmp_path, {("t", "uniform"): other, ("t", "per"): per})
    lines = evidence_report.write_report(tmp_path, ["per", "uniform"], "per")
    mean = interquartile_mean_interval(other)
    better = probability_of_improvement_interval(other, per)
    assert (mean.value, better.value) == (5.5, 15 / 16)
    assert lines == [
        "| agent | t | P(better) |",
        "|---|---|---|",
        "| `per` | 2.50 [1.00, 4.00] |  |",
        f"| `uniform` | 5.50 [{mean.low:.2f}, {mean.high:.2f}] | "
        f"**0.94 [{better.low:.2f}, {better.high:.2f}]** |",
    ]
    assert (tmp_path / "summary.md").read_text() == "\n".join(lines) + "\n"


def test_the_map_recomputed(tmp_path: Path) -> None:
    """By pairs of the same seed, in steps: the budget times what the score lacks of 1."""
    uniform, per = [0.5, 0.2, 0.9], [0.7, 0.5, 0.9]
    write_runs(
        tmp_path,
        {
            ("cliffwalk-6-every-16", "uniform"): uniform,
            ("cliffwalk-6-every-16", "per"): per,
            ("cliffwalk-6-every-4", "uniform"): per,
            ("cliffwalk-6-every-4", "per"): per,
        },
    )
    lines = evidence_report.write_report(tmp_path, ["uniform", "per"], "uniform")
    assert [line.split(" | ")[:4] for line in lines[2:]] == [
        ["| 6", "4", "30", "30"],
        ["| 6", "16", "47", "30"],
    ]
    gain = np.mean(np.subtract(per, uniform)) * 100
    assert lines[3].split(" | ")[4].startswith(f"{gain:.0f} [0, 30]")
    assert lines[2].split(" | ")[4] == "0 [0, 0]"
    assert [line.split(" | ")[5][:5] for line in lines[2:]] == ["0.50 ", "0.67 "]
    assert [path.name for path in tmp_path.glob("*.png")] == ["map.png"]
