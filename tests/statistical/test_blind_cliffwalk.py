"""
The results of the paper's figures 1 and 2, and of an independent implementation.

Learning times spread: the smallest and the largest of 30 uniform runs differ by a factor of two or
three. Medians of 30 of them are within some 10 % of their limit, those of 5, which the independent
numbers are, within 25 %.
"""

from typing import Any

import numpy as np
import pytest

from studies.blind_cliffwalk import INDEPENDENT, Run, learn

pytestmark = pytest.mark.slow


def all_updates(
    approximation: Any, replay: Any, n: int, n_seeds: int, **options: Any
) -> list[float]:
    """:return: updates of each run, infinitely many for one that did not learn"""
    seeds = range(100, 100 + n_seeds)
    updates = [learn(Run(approximation, replay, n, seed, **options)) for seed in seeds]
    return [np.inf if number is None else float(number) for number in updates]


def median(approximation: Any, replay: Any, n: int, n_seeds: int, **options: Any) -> float:
    """:return: median of their updates"""
    return float(np.median(all_updates(approximation, replay, n, n_seeds, **options)))


@pytest.mark.parametrize("n", INDEPENDENT)
def test_medians_are_those_of_an_independent_implementation(n: int) -> None:
    """Within 25 %, with seeds of their own."""
    for replay, expected in INDEPENDENT[n].items():
        n_seeds = 12 if (n, replay) == (14, "uniform") else 30
        assert median("tabular", replay, n, n_seeds) == pytest.approx(expected, rel=0.25)


def test_mistakes_would_be_seen() -> None:
    """The exponent applied twice, an eps that hides small errors, draws of a uniform buffer."""
    expected = INDEPENDENT[10]["proportional"]
    for options in ({"alpha": 0.36}, {"eps": 0.1}, {"alpha": 0.0}):
        assert median("tabular", "proportional", 10, 20, **options) > 1.25 * expected


@pytest.mark.parametrize("approximation", ["tabular", "linear"])
def test_both_variants_beat_uniform_replay_by_more_the_larger_the_task(approximation: str) -> None:
    gains = []
    for n in (6, 9, 12):
        uniform = median(approximation, "uniform", n, 10)
        proportional = median(approximation, "proportional", n, 10)
        ranked = median(approximation, "rank", n, 10, alpha=0.7)
        gains.append((uniform / proportional, uniform / ranked))
    assert np.min(gains[0]) > 1.5
    assert np.min(gains[-1]) > 4.0
    assert (np.diff(gains, axis=0) > 0.0).all()


def test_the_oracle_shows_what_the_order_of_replay_is_worth() -> None:
    """Tabular, it needs a handful of updates for each state, whatever the size of the memory."""
    for n in (8, 16):
        assert 3 * n < median("tabular", "oracle", n, 5) < 6 * n**2
    assert median("tabular", "uniform", 12, 5) > 100 * median("tabular", "oracle", 12, 5)


@pytest.mark.parametrize("approximation", ["tabular", "linear"])
def test_an_initial_priority_of_eps_starves_what_was_never_replayed(approximation: str) -> None:
    """Replayed transitions hide the others behind their TD errors, for a shorter or longer time."""
    right = all_updates(approximation, "proportional", 8, 30)
    starved = all_updates(approximation, "proportional", 8, 30, initial_priority=1e-6)
    assert np.median(starved) > 1.3 * np.median(right)
    assert np.ptp(starved) > 5.0 * np.ptp(right)
    if approximation == "linear":
        assert np.median(starved) > median(approximation, "uniform", 8, 30)
    assert median(approximation, "greedy", 8, 3, initial_priority=1e-6) == np.inf
