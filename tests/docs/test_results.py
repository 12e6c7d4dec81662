"""docs/results.md, docs/blind_cliffwalk.md: the numbers in tables follow from the runs there."""

import re
import shlex
import shutil
from pathlib import Path

import pandas as pd
import pytest
import tyro

from studies import actor_critics
from studies.blind_cliffwalk import AGENTS, INDEPENDENT
from studies.command import STUDIES, StudySettings, plan

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text("utf-8") for name in ("results", "blind_cliffwalk")}
#: The others are planned, and not run yet
MADE = [name for name in STUDIES if name not in actor_critics.STUDIES]


def test_all_kept_runs_are_those_of_a_study() -> None:
    assert {path.name for path in (DOCS / "results").iterdir() if path.is_dir()} == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_the_tables_follow_from_the_runs(name: str, tmp_path: Path) -> None:
    kept = DOCS / "results" / name
    shutil.copy(kept / "runs.csv", tmp_path)
    _, agents, base = plan(StudySettings(name))
    lines = STUDIES[name].report(tmp_path, agents, base)
    assert (kept / "summary.md").read_text("utf-8") == "\n".join(lines) + "\n"
    assert {path.name for path in tmp_path.glob("[!.]*")} == {
        path.name for path in kept.glob("[!.]*")
    }
    if name != "blind-cliffwalk":
        page = PAGES["results"].split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]
        assert page.splitlines() == lines


@pytest.mark.parametrize("name", MADE)
def test_each_row_has_all_seeds_of_the_study(name: str) -> None:
    table = pd.read_csv(DOCS / "results" / name / "runs.csv")
    kept = list(table[["task", "agent", "seed"]].itertuples(index=False, name=None))
    planned = {run.key for run in plan(StudySettings(name))[0]}
    assert len(kept) == len(planned)
    assert set(kept) == planned


def rows_of(text: str, header: str) -> list[dict[str, str]]:
    """The rows of the first table that begins with a header, by column."""
    table = (header + text.split(f"\n{header}", 1)[1]).split("\n\n")[0]
    names, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("page", "heading", "header", "values"),
    [
        ("blind_cliffwalk", "## Results", "| n |", "tabular"),
        ("blind_cliffwalk", "With the constant feature", "| n |", "linear"),
        # Both kinds of values, in a column
        ("blind_cliffwalk", "## Why new", "| values | n |", ""),
        ("results", "## The paper's own", "| n |", "tabular"),
    ],
)
def test_medians_of_blind_cliffwalk(page: str, heading: str, header: str, values: str) -> None:
    """Rows that were chosen from the whole tables: with range and difference, or without."""
    summary = (DOCS / "results" / "blind-cliffwalk" / "summary.md").read_text("utf-8")
    whole = {
        (name, row["n"]): row
        for name in ("tabular", "linear")
        for row in rows_of(summary.split(f"## {name}")[1], "| n |")
    }
    labels = {way.label for way in AGENTS.values()}
    rows = rows_of(PAGES[page].split(heading)[1], header)
    assert len(labels & rows[0].keys()) >= 5
    for row in rows:
        expected = whole[row.get("values", values), row["n"]]
        for label in labels & row.keys():
            cell = expected[label]
            median, without_difference = cell.split(" ")[0], re.sub(r", [+-]\d+%$", "", cell)
            assert row[label] in (cell, without_difference, median)
        if "independent" in row:
            numbers = INDEPENDENT[int(row["n"])]
            assert row["independent"] == ", ".join(f"{number:,}" for number in numbers.values())


def test_pictures_of_the_pages_are_there() -> None:
    for page in PAGES.values():
        pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
        assert pictures
        for picture in pictures:
            assert (DOCS / picture).is_file()


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_pages_can_be_called(page: str) -> None:
    commands = re.findall(r"^python -m studies (.+)$", PAGES[page], re.MULTILINE)
    assert commands
    for command in commands:
        plan(tyro.cli(StudySettings, args=shlex.split(command, comments=True)))
