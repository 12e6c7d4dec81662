"""Tables and pictures of ``sb3-per evidence``, from the files of its runs alone."""

import re
from collections.abc import Iterator, Sequence
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
from sb3_per.compare.style import COLORS, agent_colors, figure, panels, steps_axis, style

__all__ = ["read_runs", "write_report"]

FloatArray = npt.NDArray[np.float64]

#: A task of the map: number of states, environment steps for one update
MAP_TASK = re.compile(r"cliffwalk-(\d+)-every-(\d+)")

#: In one panel
MOST_CURVES = 6


def read_runs(path: Path) -> pd.DataFrame:
    """
    :param path: ``runs.csv`` of a study
    :return: its rows, with ``returns`` as a tuple of numbers, in the order of tasks and agents in
        the file, by seed; and ``score``, the mean of the returns but the one before training
    """
    runs = pd.read_csv(path)
    runs["returns"] = [tuple(map(float, text.split())) for text in runs["returns"]]
    runs["score"] = [float(np.mean(returns[1:])) for returns in runs["returns"]]
    return runs.sort_values("seed", kind="stable", ignore_index=True)


def scores(runs: pd.DataFrame, task: str, agent: str) -> FloatArray:
    """
    :param runs: as :func:`read_runs` gives them
    :param task: whose runs
    :param agent: whose runs
    :return: greedy return over training of each run, by seed
    """
    chosen = runs[(runs["task"] == task) & (runs["agent"] == agent)]
    return np.asarray(chosen["score"], dtype=np.float64)


def table(runs: pd.DataFrame, agents: Sequence[str], tasks: Sequence[str], base: str) -> list[str]:
    """
    :param runs: as :func:`read_runs` gives them
    :param agents: the rows
    :param tasks: two columns for each
    :param base: agent that the others are compared with
    :return: lines of a Markdown table: for each task the greedy return over training
        (interquartile mean, 95 % interval) and the probability that a run is better than one of
        ``base``
    """
    lines = [
        "| agent | " + " | ".join(f"{task} | P(better)" for task in tasks) + " |",
        "|---" * (1 + 2 * len(tasks)) + "|",
    ]
    for agent in agents:
        cells = []
        for task in tasks:
            values = scores(runs, task, agent)
            cells.append(_cell(interquartile_mean_interval(values)))
            if agent == base:
                cells.append("")
                continue
            better = probability_of_improvement_interval(values, scores(runs, task, base))
            text = _cell(better)
            cells.append(f"**{text}**" if better.low > 0.5 or better.high < 0.5 else text)
        lines.append(f"| `{agent}` | " + " | ".join(cells) + " |")
    return lines


def _cell(estimate: Estimate) -> str:
    digits = 2 if abs(estimate.value) < 10 else 0
    value, low, high = (f"{number:,.{digits}f}" for number in estimate)
    return f"{value} [{low}, {high}]"


def map_cells(runs: pd.DataFrame) -> Iterator[tuple[int, int, FloatArray, FloatArray]]:
    """
    :param runs: of the study ``map``
    :return: number of states, steps for one update, and for each seed the steps until the greedy
        policy gets the reward, with uniform and with prioritized replay
    """
    for task in dict.fromkeys(runs["task"]):
        found = MAP_TASK.fullmatch(task)
        assert found is not None
        n, freq = found.groups()
        # The same for both: behaviour is random, and a seed decides it
        budget = float(runs[runs["task"] == task]["steps"].iloc[0])
        yield (
            int(n),
            int(freq),
            budget * (1.0 - scores(runs, task, "uniform")),
            budget * (1.0 - scores(runs, task, "per")),
        )


def map_table(runs: pd.DataFrame) -> list[str]:
    """
    :param runs: of the study ``map``
    :return: lines of a Markdown table
    """
    lines = [
        "| states | steps for an update | uniform | PER | uniform - PER, same seed | P(better) |",
        "|---|---|---|---|---|---|",
    ]
    for n, freq, uniform, per in sorted(map_cells(runs), key=lambda cell: cell[:2]):
        gain = uniform - per
        low, high = bootstrap_interval([gain], np.mean)
        better = probability_of_improvement_interval(-per, -uniform)
        lines.append(
            f"| {n} | {freq} | {interquartile_mean(uniform):,.0f} | {interquartile_mean(per):,.0f} "
            # As integers, which have no -0
            f"| {round(gain.mean()):,} [{round(low):,}, {round(high):,}] | {_cell(better)} |"
        )
    return lines


def map_picture(runs: pd.DataFrame) -> Figure:
    """
    :param runs: of the study ``map``
    :return: steps until solved with uniform over prioritized replay, by task
    """
    cells = {(n, freq): (uniform, per) for n, freq, uniform, per in map_cells(runs)}
    sizes = sorted({n for n, _ in cells})
    freqs = sorted({freq for _, freq in cells})
    with style():
        made, rows = figure(1, 1, 6.0, 3.0)
        axes = rows[0][0]
        ratios = np.array(
            [[np.divide(*(v.mean() for v in cells[n, freq])) for freq in freqs] for n in sizes]
        )
        image = axes.imshow(
            np.log2(ratios), cmap="PuOr_r", vmin=-1.0, vmax=1.0, origin="lower", aspect="auto"
        )
        for y, n in enumerate(sizes):
            for x, freq in enumerate(freqs):
                uniform, per = cells[n, freq]
                low, high = bootstrap_interval([uniform - per], np.mean)
                clear = "" if round(low) <= 0 <= round(high) else "*"
                axes.text(x, y, f"{ratios[y, x]:.2f}{clear}", ha="center", va="center")
        axes.set_xticks(range(len(freqs)), [str(freq) for freq in freqs])
        axes.set_yticks(range(len(sizes)), [f"{n} (1 in {2**n:,})" for n in sizes])
        axes.grid(visible=False)
        axes.set_xlabel("environment steps for one update of 32 transitions")
        axes.set_ylabel("states (episodes with reward)")
        axes.set_title("Blind Cliffwalk: steps until solved, uniform over prioritized")
        bar = made.colorbar(image, ax=axes, ticks=[-1.0, 0.0, 1.0])
        bar.ax.set_yticklabels(["0.5", "1", "2"])
        bar.ax.set_ylabel("above 1: PER is faster")
    return made


def score_picture(
    runs: pd.DataFrame, agents: Sequence[str], tasks: Sequence[str], base: str
) -> Figure:
    """
    :param runs: as :func:`read_runs` gives them
    :param agents: from top to bottom
    :param tasks: one panel each
    :param base: agent whose mean is drawn through all of them
    :return: greedy return over training of each agent, interquartile mean with 95 % interval
    """
    with style():
        made, rows = figure(1, len(tasks), 4.6, 0.9 + 0.22 * len(agents))
        places = np.arange(len(agents))[::-1]
        for number, (axes, task) in enumerate(zip(rows[0], tasks, strict=True)):
            for place, agent in zip(places, agents, strict=True):
                value, low, high = interquartile_mean_interval(scores(runs, task, agent))
                is_prioritized = ALGORITHMS[parse_agent(agent).algorithm].is_prioritized
                color = COLORS[1 if is_prioritized else 0]
                axes.plot([low, high], [place, place], color=color)
                axes.plot(value, place, "o", color=color, markersize=4)
            middle = interquartile_mean(scores(runs, task, base))
            axes.axvline(middle, color="black", linewidth=0.8, linestyle=":")
            axes.set_yticks(places, agents if number == 0 else [""] * len(agents))
            axes.tick_params(axis="y", labelsize=7.5)
            axes.set_title(task)
            axes.set_xlabel("greedy return over training")
    return made


def curve_picture(runs: pd.DataFrame, agents: Sequence[str], tasks: Sequence[str]) -> Figure:
    """
    :param runs: as :func:`read_runs` gives them
    :param agents: one curve each
    :param tasks: one panel each
    :return: greedy return along training, interquartile mean with 95 % interval
    """
    colors = agent_colors(agents)
    with style():
        made, every = panels(len(tasks), 4.6, 3.0)
        for axes, task in zip(every, tasks, strict=True):
            for agent in agents:
                chosen = runs[(runs["task"] == task) & (runs["agent"] == agent)]
                returns = np.array(list(chosen["returns"]))  # [run, evaluation]
                steps = np.linspace(0.0, float(chosen["steps"].iloc[0]), returns.shape[1])
                low, high = bootstrap_interval([returns], interquartile_mean, n_resamples=2000)
                axes.plot(steps, interquartile_mean(returns), color=colors[agent], label=agent)
                axes.fill_between(steps, low, high, color=colors[agent], alpha=0.15, linewidth=0)
            axes.set_title(task)
            axes.set_ylabel("greedy return")
            steps_axis(axes)
        every[0].legend(fontsize=7)
    return made


def write_report(folder: Path, agents: Sequence[str], base: str) -> list[str]:
    """
    Write what the runs of a study say: ``summary.md`` and pictures.

    :param folder: with ``runs.csv``
    :param agents: in this order; others that have runs follow them
    :param base: agent that the others are compared with
    :return: the lines of the summary
    """
    runs = read_runs(folder / "runs.csv")
    tasks = list(dict.fromkeys(runs["task"]))
    there = dict.fromkeys([*agents, *runs["agent"]])
    agents = [agent for agent in there if agent in set(runs["agent"])]
    pictures = {}
    if set(agents) == {"uniform", "per"} and all(MAP_TASK.fullmatch(task) for task in tasks):
        lines = map_table(runs)
        pictures["map"] = map_picture(runs)
    else:
        lines = table(runs, agents, tasks, base)
        pictures["scores"] = score_picture(runs, agents, tasks, base)
        if len(agents) <= MOST_CURVES:
            pictures["curves"] = curve_picture(runs, agents, tasks)
    (folder / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, made in pictures.items():
        made.savefig(folder / f"{name}.png", metadata={"Software": None})
    return lines
