"""docs/compare.md says what the code does."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro

from sb3_per.compare.agents import ALGORITHMS, parse_agents
from sb3_per.compare.hyperparams import KEYS, load_hyperparams
from sb3_per.compare.pictures import PICTURES
from sb3_per.compare.settings import CompareSettings, PlotSettings
from sb3_per.compare.store import Store
from sb3_per.compare.training import TABLES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
# `make demo`
COMMANDS += re.findall(r"^\t\$\(BIN\)/(sb3-per .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def first_cells(header: str) -> list[str]:
    """The code in the first column of the table that starts with a header."""
    table = PAGE.split(f"\n| {header} |")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_ones(line: str) -> None:
    program, name, *arguments = shlex.split(line, comments=True)
    assert program == "sb3-per"
    kinds: dict[str, Any] = {"compare": CompareSettings, "plot": PlotSettings}
    settings = tyro.cli(kinds[name], args=arguments)
    settings.check()
    if name == "compare":
        parse_agents(settings.agents)


def test_makefile_has_a_demonstration() -> None:
    assert COMMANDS[-1] == "sb3-per compare --quick --output demo"


def test_tables_name_all_there_is() -> None:
    assert first_cells("key") == sorted(KEYS, key=first_cells("key").index)
    # The studies of the repository add agents of their own
    ours = {name for name, about in ALGORITHMS.items() if not about.module.startswith("studies.")}
    assert set(first_cells("name")) == ours
    assert set(first_cells("picture")) == set(PICTURES)
    assert {f"{name}.parquet" for name in TABLES} <= set(first_cells("file"))


def test_columns_are_those_of_the_tables(finished: Path) -> None:
    described = {
        name: line for name in TABLES for line in PAGE.splitlines() if f"| `{name}.parquet`" in line
    }
    for name, table in Store(finished).read_tables().items():
        for column in table.columns.drop(["env", "agent", "seed"]):
            # Of quantiles, one stands for all; others of the snapshots explain themselves
            if not re.search(r"_q\d+$", column) and column not in ("snapshot", "n_cells"):
                assert f"`{column}`" in described[name], (name, column)


def test_hyperparameters_of_the_page_can_be_used(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "my.yml").write_text(text)
    hyperparams = load_hyperparams(tmp_path / "my.yml", "MountainCar-v0")
    assert (hyperparams["n_timesteps"], hyperparams["threshold"]) == (120_000, -110.0)


def test_numbers_are_those_of_the_code() -> None:
    defaults = CompareSettings()
    for text in (
        f"`--window` ({defaults.window})",
        f"`--eval-episodes` ({defaults.eval_episodes})",
        f"`--n-evals` ({defaults.n_evals})",
        f"`--max-transitions` ({defaults.max_transitions:,})",
        f"{len(CompareSettings(quick=True).seeds)} seeds, {CompareSettings(quick=True).share:.0%}",
        f"{len(defaults.seeds)} seeds",
    ):
        assert text.replace("30%", "30 %") in PAGE, text
