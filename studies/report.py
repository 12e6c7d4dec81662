"""Tables and pictures of studies in which networks learn, from the table of runs alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from sb3_per.compare.agents import ALGORITHMS, parse_agent
from sb3_per.compare.metrics import (
    Estimate,
    bootstrap_interval,
    interquartile_mean,
    interquartile_mean_interval,
    probability_of_improvement_interval,
)
from sb3_per.compare.store import writing
from sb3_per.compare.style import COLORS, agent_colors, figure, panels, steps_axis, style
from studies.study import read_runs

__all__ = ["NO_VALUE", "read_scores", "text_of", "write_files", "write_report"]

FloatArray = npt.NDArray[np.float64]

#: Cell of a table for an agent without runs
NO_VALUE = "-"

#: Largest number of curves in one panel
MOST_CURVES = 6


def read_scores(path: Path) -> pd.DataFrame:
    """
    :param path: ``runs.csv`` of a study
    :return: table of :func:`~studies.study.read_runs`, with ``returns`` as a tuple of numbers; and
        ``score``, the mean of the returns except the one before training
    """
    runs = read_runs(path)
    runs["returns"] = [tuple(map(float, str(text).split())) for text in runs["returns"]]
    runs["score"] = [float(np.mean(returns[1:])) for returns in runs["returns"]]
    return runs


def scores(runs: pd.DataFrame, task: str, agent: str) -> FloatArray:
    """
    :param runs: result of :func:`read_scores`
    :param task: task of the runs
    :param agent: agent of the runs
    :return: greedy return over training of each finished run, by seed
    """
    chosen = runs[(runs["task"] == task) & (runs["agent"] == agent)]
    return np.asarray(chosen["score"], dtype=np.float64)


def table(runs: pd.DataFrame, agents: Sequence[str], tasks: Sequence[str], base: str) -> list[str]:
    """
    :param runs: result of :func:`read_scores`
    :param agents: agents in the rows
    :param tasks: tasks, with two columns each
    :param base: agent that the others are compared with
    :return: lines of a Markdown table: for each task the greedy return over training
        (interquartile mean, 95 % interval) and the probability that a run is better than one of
        ``base``; a dash where an agent has no run
    """
    lines = [
        "| agent | " + " | ".join(f"{task} | P(better)" for task in tasks) + " |",
        "|---" * (1 + 2 * len(tasks)) + "|",
    ]
    for agent in agents:
        cells = []
        for task in tasks:
            values, base_values = scores(runs, task, agent), scores(runs, task, base)
            there = len(values) > 0
            cells.append(text_of(interquartile_mean_interval(values)) if there else NO_VALUE)
            if agent == base:
                cells.append("")
            elif there and len(base_values):
                better = probability_of_improvement_interval(values, base_values)
                is_clear = better.low > 0.5 or better.high < 0.5
                cells.append(f"**{text_of(better)}**" if is_clear else text_of(better))
            else:
                cells.append(NO_VALUE)
        lines.append(f"| `{agent}` | " + " | ".join(cells) + " |")
    return lines


def text_of(estimate: Estimate, digits: int | None = None) -> str:
    """
    :param estimate: value and interval
    :param digits: digits after the point; 2 or none by default, by the size of the value
    :return: both as text, or the value alone if there is no interval, as for a single run
    """
    if digits is None:
        digits = 2 if abs(estimate.value) < 10 else 0
    # Means of scores with few digits often end in a 5: machines differ in the last bit, which would
    # decide whether it is rounded up or down. Adding zero turns -0 into 0.
    rounded = (round(round(number, 9), digits) + 0.0 for number in estimate)
    value, low, high = (f"{number:,.{digits}f}" for number in rounded)
    return value if np.isnan(estimate.low) else f"{value} [{low}, {high}]"


def score_picture(
    runs: pd.DataFrame, agents: Sequence[str], tasks: Sequence[str], base: str
) -> Figure:
    """
    :param runs: result of :func:`read_scores`
    :param agents: agents from top to bottom
    :param tasks: tasks, with one panel each
    :param base: agent whose mean is drawn through all panels
    :return: greedy return over training of each agent, interquartile mean with 95 % interval
    """
    with style():
        made, rows = figure(1, len(tasks), 4.6, 0.9 + 0.22 * len(agents))
        places = np.arange(len(agents))[::-1]
        for number, (axes, task) in enumerate(zip(rows[0], tasks, strict=True)):
            for place, agent in zip(places, agents, strict=True):
                values = scores(runs, task, agent)
                if not len(values):
                    continue
                value, low, high = interquartile_mean_interval(values)
                is_prioritized = ALGORITHMS[parse_agent(agent).algorithm].is_prioritized
                color = COLORS[1 if is_prioritized else 0]
                axes.plot([low, high], [place, place], color=color)
                axes.plot(value, place, "o", color=color, markersize=4)
            middle = scores(runs, task, base)
            if len(middle):
                place = interquartile_mean(middle)
                axes.axvline(place, color="black", linewidth=0.8, linestyle=":")
            axes.set_yticks(places, agents if number == 0 else [""] * len(agents))
            axes.tick_params(axis="y", labelsize=7.5)
            axes.set_title(task)
            axes.set_xlabel("greedy return over training")
    return made


def curve_picture(runs: pd.DataFrame, agents: Sequence[str], tasks: Sequence[str]) -> Figure:
    """
    :param runs: result of :func:`read_scores`
    :param agents: agents, with one curve each
    :param tasks: tasks, with one panel each
    :return: greedy return along training, interquartile mean with 95 % interval
    """
    colors = agent_colors(agents)
    with style():
        made, every = panels(len(tasks), 4.6, 3.0)
        for axes, task in zip(every, tasks, strict=True):
            for agent in agents:
                chosen = runs[(runs["task"] == task) & (runs["agent"] == agent)]
                if chosen.empty:
                    continue
                returns = np.array(list(chosen["returns"]))  # [run, evaluation]
                steps = np.linspace(0.0, float(chosen["steps"].iloc[0]), returns.shape[1])
                low, high = bootstrap_interval([returns], interquartile_mean, n_resamples=2000)
                axes.plot(steps, interquartile_mean(returns), color=colors[agent], label=agent)
                axes.fill_between(steps, low, high, color=colors[agent], alpha=0.15, linewidth=0)
            axes.set_title(task)
            axes.set_ylabel("greedy return")
            steps_axis(axes)
        # One legend for all panels: an agent may have no run on some tasks
        handles = {line.get_label(): line for axes in every for line in axes.get_lines()}
        every[0].legend(
            [handles[agent] for agent in agents if agent in handles],
            [agent for agent in agents if agent in handles],
            fontsize=7,
        )
    return made


def write_files(folder: Path, lines: Sequence[str], pictures: Mapping[str, Figure]) -> None:
    """
    :param folder: folder to write to
    :param lines: lines of ``summary.md``
    :param pictures: pictures by the name of the file, without extension
    :raises SettingsError: if they can't be written
    """
    with writing(folder):
        (folder / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for name, picture in pictures.items():
            picture.savefig(folder / f"{name}.png", metadata={"Software": None})


def write_report(folder: Path, agents: Sequence[str], base: str) -> list[str]:
    """
    Write the results of a study: ``summary.md`` and pictures.

    :param folder: folder with ``runs.csv``
    :param agents: agents in the order of the results; others that have runs follow them
    :param base: agent that the others are compared with
    :return: the lines of the summary
    """
    runs = read_scores(folder / "runs.csv")
    tasks = list(dict.fromkeys(runs["task"]))
    finished = set(runs["agent"])
    agents = [agent for agent in dict.fromkeys([*agents, *runs["agent"]]) if agent in finished]
    lines = table(runs, agents, tasks, base)
    pictures = {"scores": score_picture(runs, agents, tasks, base)}
    if len(agents) <= MOST_CURVES:
        pictures["curves"] = curve_picture(runs, agents, tasks)
    write_files(folder, lines, pictures)
    return lines
