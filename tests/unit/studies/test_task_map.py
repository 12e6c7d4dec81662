"""The map: uniform and prioritized replay compared seed by seed."""

from math import nan
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from studies.report import read_scores
from studies.task_map import STUDY, map_cells, map_picture


def report(folder: Any) -> list[list[str]]:
    """Cells of the table."""
    lines = STUDY.report(folder, ["uniform", "per"], "uniform")
    assert (folder / "summary.md").read_text() == "\n".join(lines) + "\n"
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def texts(picture: Figure) -> list[str]:
    return [text.get_text() for text in picture.axes[0].texts]


def test_the_map_recomputed(scored: Any) -> None:
    """By pairs of the same seed, in steps: the budget times what the score lacks of 1."""
    uniform, per = [0.5, 0.2, 0.9], [0.7, 0.5, 0.9]
    folder = scored(
        {
            ("cliffwalk-6-every-16", "uniform"): uniform,
            ("cliffwalk-6-every-16", "per"): per,
            ("cliffwalk-6-every-4", "uniform"): per,
            ("cliffwalk-6-every-4", "per"): per,
        }
    )
    level, better = report(folder)
    assert level[:5] == ["6", "4", "30", "30", "0 [0, 0]"]
    assert better[:4] == ["6", "16", "47", "30"]
    gain = np.mean(np.subtract(per, uniform)) * 100
    assert better[4].startswith(f"{gain:.0f} [0, 30]")
    assert [row[5][:4] for row in (level, better)] == ["0.50", "0.67"]
    assert [path.name for path in folder.glob("*.png")] == ["map.png"]
    # 140 steps of uniform replay over 90
    assert texts(map_picture(read_scores(folder / "runs.csv"))) == ["1.00", "1.56"]


def test_seeds_that_one_agent_lacks_are_left_out(scored: Any) -> None:
    folder = scored(
        {
            # Seeds 0 and 3 alone have both
            ("cliffwalk-6-every-16", "uniform"): [0.5, nan, 0.1, 0.2],
            ("cliffwalk-6-every-16", "per"): [0.7, 0.3, nan, 0.5],
            # Two of the other three cells can't be compared
            ("cliffwalk-8-every-1", "uniform"): [0.5],
            ("cliffwalk-8-every-4", "per"): [0.5],
            # And one has a single pair, which has no interval
            ("cliffwalk-8-every-16", "uniform"): [0.4],
            ("cliffwalk-8-every-16", "per"): [0.5],
        }
    )
    both, single = report(folder)
    assert both[:5] == ["6", "16", "65", "40", "25 [20, 30]"]
    assert single == ["8", "16", "60", "50", "10", "1.00"]
    (cell, _) = map_cells(read_scores(folder / "runs.csv"))
    np.testing.assert_allclose(cell.uniform, [50.0, 80.0], rtol=1e-12)
    np.testing.assert_allclose(cell.per, [30.0, 50.0], rtol=1e-12)
    # The star says that the interval leaves out zero; there is none of a single pair
    assert texts(map_picture(read_scores(folder / "runs.csv"))) == ["1.62*", "1.20"]


@pytest.mark.parametrize(
    ("task", "agent"), [("cliffwalk-6-every-1", "per(alpha=0.5)"), ("corridor-10", "per")]
)
def test_other_agents_or_tasks_get_the_table_of_all_studies(
    scored: Any, task: str, agent: str
) -> None:
    folder = scored({(task, "uniform"): [0.5, 0.6], (task, agent): [0.5, 0.7]})
    lines = STUDY.report(folder, ["uniform", agent], "uniform")
    assert lines[0] == f"| agent | {task} | P(better) |"
