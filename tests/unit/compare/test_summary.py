import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sb3_per.compare.metrics import Estimate, interquartile_mean_interval
from sb3_per.compare.summary import MEASURES, Comparison, format_estimate, summarize

NAN, INF = math.nan, math.inf


def comparison(threshold: float | None = 0.5, window: int = 2) -> Comparison:
    """
    Two agents, three seeds, made by hand. Rewards go from 0 to 1 after some episodes of 10 steps;
    one run of each agent never gets there.
    """
    firsts = {"uniform": [3, 5, None], "per": [2, 3, None]}
    runs, episodes, evaluations, snapshots = [], [], [], []
    for agent, starts in firsts.items():
        for seed, first in enumerate(starts):
            key = ("A-v0", agent, seed)
            runs.append((*key, 80, 7, 1.5))
            for episode in range(1, 8):
                reward = float(first is not None and episode >= first)
                episodes.append((*key, episode, 10 * episode, reward, 10))
            for steps, value in ((0, 9.0), (40, 1.0), (80, 2.0 + seed + (agent == "per"))):
                evaluations += [(*key, steps, 0, value - 1, 5), (*key, steps, 1, value + 1, 5)]
            for steps, error in ((40, 5.0), (80, 1.0 + seed)):
                snapshots.append((*key, "freq", steps, error))
    key_names = ["env", "agent", "seed"]
    tables = {
        "runs": pd.DataFrame(runs, columns=[*key_names, "steps", "episodes", "seconds"]),
        "episodes": pd.DataFrame(
            episodes, columns=[*key_names, "episode", "steps", "reward", "length"]
        ),
        "evaluations": pd.DataFrame(
            evaluations, columns=[*key_names, "steps", "eval_episode", "return", "length"]
        ),
        "snapshots": pd.DataFrame(
            snapshots, columns=[*key_names, "reason", "steps", "td_error_mean"]
        ),
    }
    settings: dict[str, Any] = {
        "environments": {"A-v0": {"n_timesteps": 75}, "B-v0": {"n_timesteps": 75}},
        "agents": ["uniform", "qrdqn", "per"],
        "seeds": [0, 1, 2],
        "analysis": {"window": window, "thresholds": {"A-v0": threshold}},
    }
    return Comparison(tables, settings)


def values(summary: pd.DataFrame, agent: str) -> dict[str, Estimate]:
    rows = summary[summary["agent"] == agent]
    return {
        row.measure: Estimate(row.value, row.low, row.high) for row in rows.itertuples(index=False)
    }


def test_only_what_has_finished_runs_is_there() -> None:
    found = comparison()
    assert found.env_ids == ["A-v0"]
    assert found.agents("A-v0") == ["uniform", "per"]
    # What the runs made, not what was asked for
    assert found.budget("A-v0") == 80


def test_times_to_threshold_of_each_run() -> None:
    # A mean of 0.5 over two episodes: at the first one that has the reward
    assert [tuple(time) for time in comparison().times("A-v0", "per")] == [
        (True, 2, 20),
        (True, 3, 30),
        (False, 7, 80),
    ]
    assert [tuple(time) for time in comparison(1.0).times("A-v0", "per")] == [
        (True, 3, 30),
        (True, 4, 40),
        (False, 7, 80),
    ]


def test_summary_by_hand() -> None:
    summary = summarize(comparison())
    assert set(summary["env"]) == {"A-v0"}
    assert (summary["n_runs"] == 3).all()
    uniform, per = values(summary, "uniform"), values(summary, "per")
    assert uniform["final_return"].value == pytest.approx(3.0)
    assert per["final_return"] == interquartile_mean_interval([3.0, 4.0, 5.0])
    # Without the one before training: (1 + 3) / 2, (1 + 4) / 2, (1 + 5) / 2
    assert per["mean_return"] == interquartile_mean_interval([2.0, 2.5, 3.0])
    assert uniform["n_reached"].value == per["n_reached"].value == 2
    assert (uniform["episodes_to_threshold"].value, uniform["steps_to_threshold"].value) == (5, 50)
    assert (per["episodes_to_threshold"].value, per["steps_to_threshold"].value) == (3, 30)
    assert uniform["restricted_steps"].value == pytest.approx((30 + 50 + 80) / 3)
    assert uniform["td_error"].value == pytest.approx(2.0)
    # Finals of PER are 3, 4, 5, of uniform replay 2, 3, 4: six pairs won, two ties
    assert per["better_final_return"].value == pytest.approx(7 / 9)
    # Steps of PER are 20, 30, never, of uniform replay 30, 50, never: 5 won, 2 ties
    assert per["better_steps"].value == pytest.approx(6 / 9)
    assert not any(name.startswith("better") for name in uniform)
    assert set(uniform) | set(per) == set(MEASURES)


def test_without_a_threshold_nothing_is_said_about_it() -> None:
    summary = summarize(comparison(threshold=None))
    assert not summary["measure"].str.contains("reached|steps|episodes").any()
    assert "final_return" in set(summary["measure"])


def test_single_run_has_no_intervals() -> None:
    full = comparison()
    one = {name: table[table["seed"] == 0] for name, table in full.tables.items()}
    summary = summarize(Comparison(one, full.settings))
    assert summary[["low", "high"]].isna().all(axis=None)
    assert np.isfinite(summary["value"]).all()


def test_runs_without_an_episode_or_a_snapshot() -> None:
    full = comparison()
    tables = dict(full.tables)
    for name in ("episodes", "snapshots"):
        tables[name] = tables[name][:0]
    found = Comparison(tables, full.settings)
    assert [tuple(time) for time in found.times("A-v0", "per")] == [(False, 0, 80)] * 3
    per = values(summarize(found), "per")
    assert per["episodes_to_threshold"].value == INF
    assert per["better_steps"].value == 0.5
    assert "td_error" not in per


@pytest.mark.parametrize(
    ("measure", "estimate", "text"),
    [
        ("n_reached", Estimate(7.0, NAN, NAN), "7 of 10"),
        ("final_return", Estimate(498.26, 450.0, 500.0), "498 [450, 500]"),
        ("final_return", Estimate(-110.4, NAN, NAN), "-110"),
        ("final_return", Estimate(-INF, NAN, NAN), "-inf"),
        ("final_return", Estimate(0.12345, 0.1, 0.2), "0.123 [0.1, 0.2]"),
        ("episodes_to_threshold", Estimate(62.0, 55.0, INF), "62 [55, not reached]"),
        ("steps_to_threshold", Estimate(12345.0, 900.0, 20000.0), "12,345 [900, 20,000]"),
        ("steps_to_threshold", Estimate(INF, INF, INF), "not reached"),
        ("steps_to_threshold", Estimate(INF, 900.0, INF), "not reached [900, …]"),
        ("steps_to_threshold", Estimate(INF, NAN, NAN), "not reached"),
        ("restricted_steps", Estimate(1234.5, 1000.0, 1500.0), "1,234 [1,000, 1,500]"),
        ("better_steps", Estimate(0.875, 0.5, 1.0), "0.88 [0.50, 1.00]"),
    ],
)
def test_estimates_for_people(measure: str, estimate: Estimate, text: str) -> None:
    assert format_estimate(measure, estimate, 10) == text
