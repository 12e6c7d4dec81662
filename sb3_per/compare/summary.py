"""The numbers of a comparison: one row for each environment, agent and measure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sb3_per.compare.metrics import (
    Estimate,
    TimeToThreshold,
    first_reaching,
    interquartile_mean_interval,
    median_time,
    probability_of_improvement_interval,
    restricted_mean_time,
)
from sb3_per.compare.training import Tables

__all__ = ["MEASURES", "Comparison", "format_estimate", "summarize"]


class Measure(NamedTuple):
    """
    A column of the summary.

    :param title: title with the unit
    :param explanation: its meaning
    :param form: form of a value, for ``str.format``, which gets the number of runs, too
    :param is_time: whether infinity stands for a threshold that was not reached
    """

    title: str
    explanation: str
    form: str = "{:.3g}"
    is_time: bool = False


MEASURES = {
    "final_return": Measure(
        "final greedy return", "of the last evaluation; interquartile mean over runs"
    ),
    "mean_return": Measure(
        "greedy return over training",
        "mean of all evaluations but the one before training; interquartile mean over runs",
    ),
    "n_reached": Measure("runs that got to the threshold", "of all runs", "{:.0f} of {}"),
    "episodes_to_threshold": Measure(
        "episodes to threshold",
        "by which half of the runs got there (Kaplan and Meier; runs that did not are censored)",
        "{:.0f}",
        is_time=True,
    ),
    "steps_to_threshold": Measure(
        "steps to threshold", "the same, in environment steps", "{:,.0f}", is_time=True
    ),
    "restricted_steps": Measure(
        "mean steps to threshold, within the budget",
        "a run that did not get there counts with its whole budget",
        "{:,.0f}",
    ),
    "td_error": Measure("mean |TD error| in the buffer at the end", "interquartile mean over runs"),
    "better_final_return": Measure(
        "P(better), final greedy return",
        "probability that a run scores higher than one of the first agent, ties one half",
        "{:.2f}",
    ),
    "better_mean_return": Measure(
        "P(better), greedy return over training", "the same, of the return over training", "{:.2f}"
    ),
    "better_steps": Measure(
        "P(better), steps to threshold",
        "the same, fewer steps being better; runs that did not get there tie with each other",
        "{:.2f}",
    ),
}


@dataclass(frozen=True)
class Comparison:
    """
    The tables of a comparison with its settings.

    :param tables: tables of all finished runs
    :param settings: content of ``settings.json``
    """

    tables: Tables
    settings: Mapping[str, Any]

    @property
    def env_ids(self) -> list[str]:
        """Environments that have a finished run."""
        there = set(self.tables["runs"]["env"])
        return [env_id for env_id in self.settings["environments"] if env_id in there]

    def agents(self, env_id: str) -> list[str]:
        """
        :param env_id: id of the environment
        :return: agents that have a finished run there
        """
        there = set(self.of("runs", env_id)["agent"])
        return [agent for agent in self.settings["agents"] if agent in there]

    def of(self, table: str, env_id: str, agent: str | None = None) -> pd.DataFrame:
        """
        :param table: name of a table
        :param env_id: id of the environment
        :param agent: name of an agent, to select its rows; all agents by default
        :return: its rows
        """
        rows = self.tables[table]
        rows = rows[rows["env"] == env_id]
        return rows if agent is None else rows[rows["agent"] == agent]

    def runs(self, table: str, env_id: str, agent: str) -> Iterator[pd.DataFrame]:
        """
        :param table: name of a table
        :param env_id: id of the environment
        :param agent: name of the agent
        :return: the rows of each finished run, by seed; none where a run has no rows
        """
        rows = self.of(table, env_id, agent)
        for seed in self.of("runs", env_id, agent)["seed"]:
            yield rows[rows["seed"] == seed]

    @property
    def window(self) -> int:
        """Episodes over which rewards are averaged."""
        return int(self.settings["analysis"]["window"])

    def threshold(self, env_id: str) -> float | None:
        """
        :param env_id: id of the environment
        :return: mean episode reward that counts as solved; None if there is none
        """
        threshold: float | None = self.settings["analysis"]["thresholds"].get(env_id)
        return threshold

    def budget(self, env_id: str) -> int:
        """
        :param env_id: id of the environment
        :return: number of environment steps of each run: ``n_timesteps``, rounded up to a multiple
            of the steps between two updates
        """
        return int(self.of("runs", env_id)["steps"].max())

    def times(self, env_id: str, agent: str) -> list[TimeToThreshold]:
        """
        :param env_id: id of an environment that has a threshold
        :param agent: name of the agent
        :return: time to the threshold of each run, by seed
        """
        threshold = self.threshold(env_id)
        assert threshold is not None
        budget = self.budget(env_id)
        return [
            first_reaching(run["reward"], run["steps"], budget, threshold, self.window)
            for run in self.runs("episodes", env_id, agent)
        ]

    def _evaluation_means(self, env_id: str, agent: str) -> Iterator["pd.Series[float]"]:
        for run in self.runs("evaluations", env_id, agent):
            yield run.groupby("steps")["return"].mean()

    def final_returns(self, env_id: str, agent: str) -> list[float]:
        """
        :param env_id: id of the environment
        :param agent: name of the agent
        :return: mean return of each run's last evaluation, by seed
        """
        return [float(means.iloc[-1]) for means in self._evaluation_means(env_id, agent)]

    def mean_returns(self, env_id: str, agent: str) -> list[float]:
        """
        :param env_id: id of the environment
        :param agent: name of the agent
        :return: mean return of each run's evaluations after the one before training, by seed
        """
        return [float(means.iloc[1:].mean()) for means in self._evaluation_means(env_id, agent)]

    def final_td_errors(self, env_id: str, agent: str) -> list[float]:
        """
        :param env_id: id of the environment
        :param agent: name of the agent
        :return: mean absolute TD error in the last snapshot of each run that has one
        """
        runs = self.runs("snapshots", env_id, agent)
        return [float(run["td_error_mean"].iloc[-1]) for run in runs if len(run)]


def summarize(comparison: Comparison) -> pd.DataFrame:
    """
    :param comparison: comparison with at least one finished run
    :return: columns ``env``, ``agent``, ``measure`` (a key of :data:`MEASURES`), ``value``,
        ``low``, ``high`` (the 95 % interval) and ``n_runs``
    """
    rows = []
    for env_id in comparison.env_ids:
        agents = comparison.agents(env_id)
        for agent in agents:
            n_runs = len(comparison.of("runs", env_id, agent))
            measures = _measures_of(comparison, env_id, agent)
            if agent != agents[0]:
                measures |= _improvement(comparison, env_id, agents[0], agent)
            for name, estimate in measures.items():
                rows.append((env_id, agent, name, *estimate, n_runs))
    return pd.DataFrame(rows, columns=["env", "agent", "measure", "value", "low", "high", "n_runs"])


def _measures_of(comparison: Comparison, env_id: str, agent: str) -> dict[str, Estimate]:
    measures = {
        "final_return": interquartile_mean_interval(comparison.final_returns(env_id, agent)),
        "mean_return": interquartile_mean_interval(comparison.mean_returns(env_id, agent)),
    }
    if comparison.threshold(env_id) is not None:
        times = comparison.times(env_id, agent)
        reached = [time.reached for time in times]
        measures |= {
            "n_reached": Estimate(float(sum(reached)), np.nan, np.nan),
            "episodes_to_threshold": median_time([time.episodes for time in times], reached),
            "steps_to_threshold": median_time([time.steps for time in times], reached),
            "restricted_steps": restricted_mean_time(
                [time.steps for time in times], comparison.budget(env_id)
            ),
        }
    td_errors = comparison.final_td_errors(env_id, agent)
    if td_errors:
        measures["td_error"] = interquartile_mean_interval(td_errors)
    return measures


def _improvement(
    comparison: Comparison, env_id: str, first: str, other: str
) -> dict[str, Estimate]:
    scores = {
        "better_final_return": comparison.final_returns,
        "better_mean_return": comparison.mean_returns,
    }
    if comparison.threshold(env_id) is not None:
        scores["better_steps"] = lambda env_id, agent: [
            -time.steps if time.reached else -np.inf for time in comparison.times(env_id, agent)
        ]
    return {
        name: probability_of_improvement_interval(score(env_id, other), score(env_id, first))
        for name, score in scores.items()
    }


def format_estimate(measure: str, estimate: Estimate, n_runs: int) -> str:
    """
    :param measure: key of :data:`MEASURES`
    :param estimate: its value
    :param n_runs: number of runs behind it
    :return: value and interval as text; infinity is "not reached"

    >>> format_estimate("steps_to_threshold", Estimate(1500.0, 1200.0, float("inf")), 10)
    '1,500 [1,200, not reached]'
    >>> format_estimate("n_reached", Estimate(7.0, float("nan"), float("nan")), 10)
    '7 of 10'
    """
    about = MEASURES[measure]

    def text(value: float) -> str:
        if about.is_time and np.isinf(value):
            return "not reached"
        return about.form.format(value, n_runs)

    if np.isnan(estimate.low):
        return text(estimate.value)
    if about.is_time and np.isinf(estimate.value):
        # Then the upper end is infinite, too
        return "not reached" if np.isinf(estimate.low) else f"not reached [{text(estimate.low)}, …]"
    return f"{text(estimate.value)} [{text(estimate.low)}, {text(estimate.high)}]"
