"""Reports of studies, recomputed, also with missing runs."""

from typing import Any

import pytest

from sb3_per.compare.metrics import (
    Estimate,
    interquartile_mean_interval,
    probability_of_improvement_interval,
)
from studies.report import (
    curve_picture,
    read_scores,
    score_picture,
    text_of,
    write_report,
)


def test_the_table_recomputed(scored: Any) -> None:
    per, uniform = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 3.5]
    folder = scored({("t", "uniform"): uniform, ("t", "per"): per})
    lines = write_report(folder, ["per", "uniform"], "per")
    mean = interquartile_mean_interval(uniform)
    better = probability_of_improvement_interval(uniform, per)
    assert (mean.value, better.value) == (5.5, 15 / 16)
    assert lines == [
        "| agent | t | P(better) |",
        "|---|---|---|",
        "| `per` | 2.50 [1.00, 4.00] |  |",
        f"| `uniform` | 5.50 [{mean.low:.2f}, {mean.high:.2f}] | "
        f"**0.94 [{better.low:.2f}, {better.high:.2f}]** |",
    ]
    assert (folder / "summary.md").read_text() == "\n".join(lines) + "\n"
    assert {path.name for path in folder.glob("*.png")} == {"scores.png", "curves.png"}


def test_agents_without_a_finished_run_on_a_task_have_dashes_there(scored: Any) -> None:
    """The base without one, too: then nothing there can be compared with it."""
    folder = scored(
        {
            ("first", "uniform"): [1.0, 2.0],
            ("first", "per(alpha=0.5)"): [3.0, 3.0],
            ("second", "per"): [4.0, 5.0],
            ("second", "per(alpha=0.5)"): [6.0],
        }
    )
    lines = write_report(folder, ["uniform", "per", "qrdqn"], "uniform")
    assert lines == [
        "| agent | first | P(better) | second | P(better) |",
        "|---|---|---|---|---|",
        "| `uniform` | 1.50 [1.00, 2.00] |  | - |  |",
        "| `per` | - | - | 4.50 [4.00, 5.00] | - |",
        # Of a single run, there is no interval
        "| `per(alpha=0.5)` | 3.00 [3.00, 3.00] | **1.00 [1.00, 1.00]** | 6.00 | - |",
    ]


def test_pictures_leave_out_what_is_missing_and_color_by_replay(scored: Any) -> None:
    runs = read_scores(
        scored({("first", "uniform"): [1.0, 2.0], ("second", "per(alpha=0.5)"): [3.0, 4.0]})
        / "runs.csv"
    )
    agents, tasks = ["uniform", "per(alpha=0.5)"], ["first", "second"]
    blue, vermillion = "#0072B2", "#D55E00"
    left, right = score_picture(runs, agents, tasks, "uniform").axes
    points = [[line.get_xdata()[0] for line in axes.get_lines()] for axes in (left, right)]  # type: ignore[index]
    # Interval and mean of the one, and where the base is
    assert points == [[1.0, 1.5, 1.5], [3.0, 3.5]]
    assert [axes.get_lines()[0].get_color() for axes in (left, right)] == [blue, vermillion]
    left, right = curve_picture(runs, agents, tasks).axes
    assert [[line.get_label() for line in axes.get_lines()] for axes in (left, right)] == [
        ["uniform"],
        ["per(alpha=0.5)"],
    ]
    legend = left.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == agents


@pytest.mark.parametrize(
    ("estimate", "digits", "text"),
    [
        (Estimate(0.125, -0.001, 9.0), None, "0.12 [0.00, 9.00]"),
        (Estimate(-1234.5, -2000.0, 0.2), None, "-1,234 [-2,000, 0]"),
        (Estimate(3.0, float("nan"), float("nan")), 0, "3"),
        (Estimate(-0.4, -0.5, 0.4), 0, "0 [0, 0]"),
        # The last bit, which is another one on another machine, decides nothing
        (Estimate(0.745, 0.7450000000000001, 0.7449999999999999), None, "0.74 [0.74, 0.74]"),
    ],
)
def test_numbers_of_the_tables(estimate: Estimate, digits: int | None, text: str) -> None:
    assert text_of(estimate, digits) == text
