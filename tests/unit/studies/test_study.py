"""The table of a study: a line for each finished run, whatever happened before."""

from pathlib import Path

import pytest

from sb3_per.compare.settings import SettingsError
from studies.study import RunTable, StudyRun, read_runs


def run_of(seed: int, agent: str = "per(alpha=0.5, beta=1.0)") -> StudyRun:
    return StudyRun(("task", agent, seed), 1.0, None)


def test_what_is_written_is_known_to_the_next_who_looks(tmp_path: Path) -> None:
    table = RunTable(tmp_path / "new" / "folder")
    assert not table.has(run_of(0))
    table.write(run_of(0), {"updates": 7, "other": None})
    table.write(run_of(2), {"updates": 8, "other": "1 2"})
    for one in (table, RunTable(table.folder)):
        assert [one.has(run_of(seed)) for seed in range(3)] == [True, False, True]
        assert not one.has(run_of(0, "per"))
    assert (table.folder / "runs.csv").read_text() == (
        "task,agent,seed,updates,other\n"
        'task,"per(alpha=0.5, beta=1.0)",0,7,\n'
        'task,"per(alpha=0.5, beta=1.0)",2,8,1 2\n'
    )


@pytest.mark.parametrize("cut", [3, 20, 31])
def test_a_line_that_was_not_finished_is_made_again(tmp_path: Path, cut: int) -> None:
    """In the header, in the first line and in the second one: no finished run is lost."""
    lines = ["task,agent,seed,n\n", "task,per,0,7\n", "task,per,1,8\n"]
    text = "".join(lines)
    (tmp_path / "runs.csv").write_text(text[:cut])
    table = RunTable(tmp_path)
    n_whole = text[:cut].count("\n")
    finished = [table.has(run_of(seed, "per")) for seed in (0, 1)]
    assert finished == [n_whole > 1, n_whole > 2]
    for seed, n in ((0, 7), (1, 8)):
        if not finished[seed]:
            table.write(run_of(seed, "per"), {"n": n})
    assert (tmp_path / "runs.csv").read_text() == text


@pytest.mark.parametrize(
    "data",
    [b"a,b\n1,2\n", b"task,agent,seed\nx,per,one\n", b"\n", b"task,agent,seed\nx,\xff,1\n"],
)
def test_another_file_of_that_name_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "runs.csv").write_bytes(data)
    with pytest.raises(SettingsError, match=r"can't read .*runs\.csv"):
        RunTable(tmp_path).has(run_of(0))
    assert (tmp_path / "runs.csv").read_bytes() == data


def test_rows_come_by_seed(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("task,agent,seed\nb,x,1\na,x,0\na,y,1\n")
    runs = read_runs(tmp_path / "runs.csv")
    assert list(zip(runs["task"], runs["agent"], runs["seed"], strict=True)) == [
        ("a", "x", 0),
        ("b", "x", 1),
        ("a", "y", 1),
    ]


def test_a_failure_is_forgotten_when_the_run_is_finished(tmp_path: Path) -> None:
    table = RunTable(tmp_path)
    path = table.write_failure(run_of(0), "Traceback: no luck")
    assert path.read_text() == "Traceback: no luck"
    assert table.failures() == [path.name]
    table.write(run_of(0), {"n": 1})
    assert table.failures() == []
