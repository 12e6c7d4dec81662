"""docs/results.md: every number in its tables follows from the runs that are kept beside it."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from sb3_per.compare.agents import parse_agents
from studies.evidence import STUDIES, base_of
from studies.report import write_report

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", STUDIES)
def test_the_tables_follow_from_the_runs(name: str, tmp_path: Path) -> None:
    shutil.copy(DOCS / "results" / name / "runs.csv", tmp_path)
    agents = [str(agent) for agent in parse_agents(STUDIES[name].agents)]
    lines = write_report(tmp_path, agents, base_of(name))
    table = PAGE.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]
    assert table.splitlines() == lines
    kept = (DOCS / "results" / name / "summary.md").read_text(encoding="utf-8")
    assert kept == "\n".join(lines) + "\n"
    for picture in tmp_path.glob("*.png"):
        assert (DOCS / "results" / name / picture.name).is_file()


@pytest.mark.parametrize("name", STUDIES)
def test_each_row_has_twenty_seeds(name: str) -> None:
    runs = pd.read_csv(DOCS / "results" / name / "runs.csv")
    study = STUDIES[name]
    assert set(runs["task"]) == set(study.tasks)
    assert set(runs["agent"]) == {str(agent) for agent in parse_agents(study.agents)}
    for _, group in runs.groupby(["task", "agent"]):
        assert sorted(group["seed"]) == list(range(20))


def test_pictures_of_the_page_are_there() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", PAGE)
    assert pictures
    for picture in pictures:
        assert (DOCS / picture).is_file()
