"""
The study ``map``: Blind Cliffwalk by the rarity of the reward and the frequency of updates.

The policy is random, so that with the same seed both agents see the same transitions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sb3_per.compare.metrics import (
    Estimate,
    FloatArray,
    bootstrap_interval,
    interquartile_mean,
    probability_of_improvement_interval,
)
from sb3_per.compare.style import figure, style
from studies.networks import CLIFFWALKS, NetworkStudy
from studies.report import read_scores, text_of, write_files

__all__ = ["STUDY"]


class MapStudy(NetworkStudy):
    """Steps until the greedy policy gets the reward, compared seed by seed."""

    def report(self, folder: Path, agents: Sequence[str], base: str | None) -> list[str]:
        """The map, or the report of any study if other agents or tasks have runs."""
        runs = read_scores(folder / "runs.csv")
        others = {*agents, *runs["agent"]} - set(self.agents)
        if others or set(runs["task"]) - CLIFFWALKS.keys():
            return super().report(folder, agents, base)
        lines = map_table(runs)
        write_files(folder, lines, {"map": map_picture(runs)})
        return lines


class Cell(NamedTuple):
    """
    Environment steps until the greedy policy gets the reward, for each seed that both agents have.

    :param n: number of states
    :param freq: number of environment steps per update
    :param uniform: steps with uniform replay, shape ``(seeds,)``
    :param per: steps with prioritized replay, shape ``(seeds,)``
    """

    n: int
    freq: int
    uniform: FloatArray
    per: FloatArray

    @property
    def gain(self) -> Estimate:
        """Mean of uniform - PER, seed by seed."""
        gain = self.uniform - self.per
        low, high = bootstrap_interval([gain], np.mean)
        return Estimate(float(gain.mean()), float(low), float(high))


def map_cells(runs: pd.DataFrame) -> list[Cell]:
    """
    :param runs: result of :func:`~studies.report.read_scores`
    :return: tasks with runs of both agents with the same seed
    """
    cells = []
    for task, (n, freq) in CLIFFWALKS.items():
        chosen = runs[runs["task"] == task]
        pairs = chosen.pivot(index="seed", columns="agent", values="score")
        pairs = pairs.reindex(columns=["uniform", "per"]).dropna()
        if len(pairs):
            # The score is the share of evaluations that got the reward, which is 1
            steps = float(chosen["steps"].iloc[0]) * (1.0 - pairs)
            cells.append(Cell(n, freq, steps["uniform"].to_numpy(), steps["per"].to_numpy()))
    return cells


def map_table(runs: pd.DataFrame) -> list[str]:
    """
    :param runs: result of :func:`~studies.report.read_scores`
    :return: lines of a Markdown table
    """
    lines = [
        "| states | steps for an update | uniform | PER | uniform - PER, same seed | P(better) |",
        "|---|---|---|---|---|---|",
    ]
    for cell in map_cells(runs):
        uniform, per = interquartile_mean(cell.uniform), interquartile_mean(cell.per)
        better = probability_of_improvement_interval(-cell.per, -cell.uniform)
        lines.append(
            f"| {cell.n} | {cell.freq} | {uniform:,.0f} | {per:,.0f} "
            f"| {text_of(cell.gain, 0)} | {text_of(better, 2)} |"
        )
    return lines


def map_picture(runs: pd.DataFrame) -> Figure:
    """
    :param runs: result of :func:`~studies.report.read_scores`
    :return: ratios of the steps until solved with uniform and with prioritized replay, by task
    """
    cells = map_cells(runs)
    sizes = sorted({cell.n for cell in cells})
    freqs = sorted({cell.freq for cell in cells})
    ratios = np.full((len(sizes), len(freqs)), np.nan)
    with style():
        made, rows = figure(1, 1, 6.0, 3.0)
        axes = rows[0][0]
        for cell in cells:
            y, x = sizes.index(cell.n), freqs.index(cell.freq)
            ratios[y, x] = cell.uniform.mean() / cell.per.mean()
            _, low, high = cell.gain
            clear = "*" if round(low, 0) > 0.0 or round(high, 0) < 0.0 else ""
            axes.text(x, y, f"{ratios[y, x]:.2f}{clear}", ha="center", va="center")
        image = axes.imshow(
            np.log2(ratios), cmap="PuOr_r", vmin=-1.0, vmax=1.0, origin="lower", aspect="auto"
        )
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


STUDY = MapStudy(tasks=list(CLIFFWALKS), agents=["uniform", "per"], base="uniform")
