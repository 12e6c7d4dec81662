"""The Blind Cliffwalk experiment against plain twins, and what the study says of its runs."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from sb3_per_envs import BlindCliffwalkEnv
from studies import blind_cliffwalk
from studies.blind_cliffwalk import (
    AGENTS,
    STUDY,
    Run,
    draw,
    learn,
    markdown,
    pictures_of,
    replay_memory,
    summarize,
    true_values,
)
from studies.command import StudySettings, main, plan
from studies.study import read_runs

FloatArray = npt.NDArray[np.float64]


class Twin:
    """
    The paper's appendix B.1, written down plainly: parameters and features, priorities in a list,
    ranks by sorting.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.n = run, run.n
        start, draws = np.random.SeedSequence((run.seed, run.n)).spawn(2)
        rng = np.random.default_rng(start)
        # Feature s * 2 + a for each state and action, then one constant feature for each action
        self.theta = [*rng.normal(0.0, 0.1, 2 * run.n).tolist(), 0.0, 0.0]
        if run.approximation == "linear":
            self.theta[-2:] = rng.normal(0.0, 0.1, 2).tolist()
        self.memory = [divmod(int(pair), 2) for pair in replay_memory(run.n, rng)]
        self.rng = np.random.default_rng(draws)
        self.priorities = [run.initial_priority] * len(self.memory)

    def features(self, state: int, action: int) -> list[int]:
        active = [2 * state + action]
        return active + [2 * self.n + action] * (self.run.approximation == "linear")

    def value(self, state: int, action: int) -> float:
        return float(sum(self.theta[i] for i in self.features(state, action)))

    def td_error(self, state: int, action: int) -> float:
        target = 0.0
        if action == state % 2:
            gamma = 1.0 - 1.0 / self.n
            following = (
                gamma * max(self.value(state + 1, 0), self.value(state + 1, 1))
                if state < self.n - 1
                else 1.0
            )
            target = following
        return target - self.value(state, action)

    def update(self, state: int, action: int) -> float:
        error = self.td_error(state, action)
        for i in self.features(state, action):
            self.theta[i] += 0.25 * error
        return error

    def mean_squared_error(self) -> float:
        errors = []
        for state in range(self.n):
            right = (1.0 - 1.0 / self.n) ** (self.n - 1 - state)
            for action in range(2):
                truth = right if action == state % 2 else 0.0
                errors.append((self.value(state, action) - truth) ** 2)
        return sum(errors) / len(errors)

    def choose(self) -> int:
        run = self.run
        if run.replay == "oracle":
            before, after = self.theta.copy(), []
            for state, action in itertools.product(range(self.n), range(2)):
                self.update(state, action)
                after.append((self.mean_squared_error(), state, action))
                self.theta = before.copy()
            return self.memory.index(min(after)[1:])
        order = sorted(range(len(self.memory)), key=lambda i: (-self.priorities[i], i))
        if run.replay == "greedy":
            return order[0]
        if run.replay == "rank":
            shares = {leaf: rank**-run.alpha for rank, leaf in enumerate(order, start=1)}
        elif run.replay == "proportional":
            shares = {leaf: p**run.alpha for leaf, p in enumerate(self.priorities)}
        else:
            shares = dict.fromkeys(range(len(self.memory)), 1.0)
        point = self.rng.random() * math.fsum(shares.values())
        for leaf, share in shares.items():
            point -= share
            if point < 0.0:
                return leaf
        raise AssertionError

    def learn(self, most: int) -> int | None:
        for n_updates in range(1, most + 1):
            leaf = self.choose()
            error = self.update(*self.memory[leaf])
            self.priorities[leaf] = abs(error) + self.run.eps
            if self.mean_squared_error() < 1e-3:
                return n_updates
        return None


REPLAYS = ("uniform", "oracle", "greedy", "proportional", "rank")


@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("approximation", ["tabular", "linear"])
def test_the_number_of_updates_is_that_of_a_plain_twin(approximation: Any, replay: Any) -> None:
    for n, seed, alpha, eps, initial_priority in (
        (2, 0, 0.6, 1e-6, 1.0),
        (3, 1, 0.7, 1e-6, 1.0),
        (4, 2, 1.1, 0.01, 1.0),
        (4, 3, 0.6, 1e-3, 1e-3),
        (5, 4, 0.0, 1e-6, 0.5),
    ):
        run = Run(approximation, replay, n, seed, alpha, eps, initial_priority)
        if replay == "greedy" and initial_priority < 0.01:
            continue  # see the test of starvation
        n_updates = learn(run)
        assert n_updates is not None
        assert n_updates == Twin(run).learn(10_000)


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("replay", ["uniform", "proportional", "rank"])
def test_random_numbers_may_come_in_any_portions(
    replay: Any, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("tabular", replay, 4, 0)
    expected = learn(run)
    monkeypatch.setattr(blind_cliffwalk, "CHUNK", chunk)
    assert learn(run) == expected


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_the_memory_is_what_all_sequences_of_actions_meet(n: int) -> None:
    """Each once, in the environment of this package, whole episodes in random order."""
    env = BlindCliffwalkEnv(n)
    episodes: Counter[tuple[int, ...]] = Counter()
    for actions in itertools.product(range(2), repeat=n):
        state = env.reset()[1]["state"]
        pairs = []
        for action in actions:
            _, reward, terminated, _, info = env.step(action)
            pairs.append(2 * state + action)
            # What the pair alone says of reward and end
            right = action == state % 2
            assert reward == float(right and state == n - 1)
            assert terminated == (not right or state == n - 1)
            state = info["state"]
            if terminated:
                break
        episodes[tuple(pairs)] += 1
    memory = replay_memory(n, np.random.default_rng(0)).tolist()
    assert len(memory) == Run("tabular", "uniform", n, 0).n_transitions
    starts = [i for i, pair in enumerate(memory) if pair < 2]
    pieces = [tuple(memory[i:j]) for i, j in itertools.pairwise([*starts, len(memory)])]
    assert Counter(pieces) == episodes
    assert memory.count(2 * (n - 1) + (n - 1) % 2) == 1
    if n > 2:
        assert memory != replay_memory(n, np.random.default_rng(1)).tolist()


@pytest.mark.parametrize("n", [2, 3, 10])
def test_true_values_are_those_of_value_iteration(n: int) -> None:
    values = np.zeros((n + 1, 2))
    for _ in range(n + 1):
        for state in range(n):
            gain = 1.0 if state == n - 1 else (1.0 - 1.0 / n) * values[state + 1].max()
            values[state] = [gain * (action == state % 2) for action in range(2)]
    np.testing.assert_allclose(true_values(n), values[:n].ravel(), rtol=1e-14)


def test_the_largest_td_error_starves_what_was_never_replayed() -> None:
    """With an initial priority of eps, greedy replay never leaves the first transition."""
    for run in (Run("tabular", "greedy", 4, 0), Run("linear", "greedy", 4, 0)):
        assert learn(run) is not None
        assert learn(run._replace(initial_priority=1e-6)) is None


def test_the_oracle_gets_stuck_with_a_constant_feature() -> None:
    """From 8 states on there is a point where no update makes the values better."""
    assert learn(Run("tabular", "oracle", 8, 0)) is not None
    assert learn(Run("linear", "oracle", 8, 0)) is None


@pytest.mark.parametrize("replay", REPLAYS)
def test_a_run_is_given_up_after_so_many_updates(
    replay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("tabular", replay, 3, 0)
    n_updates = learn(run)
    assert n_updates is not None
    assert run.n_transitions == 14
    monkeypatch.setattr(blind_cliffwalk, "MOST_UPDATES", (n_updates - 14, 1))
    assert learn(run) == n_updates
    monkeypatch.setattr(blind_cliffwalk, "MOST_UPDATES", (n_updates - 15, 1))
    assert learn(run) is None


def test_seeds_differ_and_replays_share_the_start() -> None:
    runs = [Run("tabular", "uniform", 5, seed) for seed in range(8)]
    assert len({learn(run) for run in runs}) > 4
    # Of the oracle, which draws nothing, the start alone decides
    assert Twin(runs[0]).theta == Twin(runs[0]._replace(replay="rank")).theta
    assert Twin(runs[0]).memory == Twin(runs[0]._replace(replay="rank")).memory


# --- tables ---


def table_of(task: str, **updates: Sequence[int | None]) -> pd.DataFrame:
    """Runs of a task, by agent; an underscore stands for a hyphen."""
    n = int(task.split("-")[1])
    rows = [
        (task, agent.replace("_", "-"), seed, 2 ** (n + 1) - 2, number)
        for agent, numbers in updates.items()
        for seed, number in enumerate(numbers)
    ]
    table = pd.DataFrame(rows, columns=["task", "agent", "seed", "transitions", "updates"])
    return table.astype({"updates": "Int64"})


def test_summary_counts_runs_that_did_not_learn_as_the_longest() -> None:
    table = table_of(
        "tabular-8",
        uniform=[5, 1, None, 3],
        rank=[2, None, None, 1],
        oracle=[None] * 3,
        greedy=[4, 4, 10],
    )
    summary = summarize(table).set_index("agent")
    assert summary.loc["uniform", ["median", "low", "high"]].tolist() == [4.0, 1.0, math.inf]
    assert summary.loc["rank", ["median", "low", "high"]].tolist() == [math.inf, 1.0, math.inf]
    assert summary.loc["oracle", "median"] == math.inf
    assert summary.loc["greedy", ["median", "low", "high"]].tolist() == [4.0, 4.0, 10.0]
    assert summary["n_runs"].to_dict() == {"uniform": 4, "rank": 4, "oracle": 3, "greedy": 3}
    assert summary["n_learned"].to_dict() == {"uniform": 3, "rank": 2, "oracle": 0, "greedy": 3}


def test_table_of_medians() -> None:
    """Compared with the independent implementation where it has a number, tabular alone."""
    updates: dict[str, Sequence[int | None]] = {
        "uniform": [7_000, 9_009],
        "proportional": [1_000, None],
        "proportional_from_eps": [1],
        "oracle": [None, None],
    }
    tasks = [table_of(task, **updates) for task in ("tabular-8", "linear-8")]
    summary = summarize(pd.concat([*tasks, table_of("tabular-9", uniform=[3])]))
    agents = ["uniform", "proportional", "oracle", "proportional-from-eps"]
    assert markdown(summary, "tabular", agents) == [
        "| n | transitions | uniform | proportional | oracle | proportional from eps |",
        "|---|---|---|---|---|---|",
        # 8004.5 / 7277 is 1.0999...
        "| 8 | 510 | 8,005 (7,000 to 9,009), +10% | never (1,000 to never) | never | 1 (1 to 1) |",
        "| 9 | 1,022 | 3 (3 to 3) | - | - | - |",
    ]
    assert markdown(summary, "linear", agents[:1])[2] == "| 8 | 510 | 8,005 (7,000 to 9,009) |"


def test_the_picture_shows_medians_and_ranges() -> None:
    sizes = [
        table_of("tabular-8", uniform=[5, 7, 9], oracle=[1, 2, None], greedy=[None] * 3),
        table_of("tabular-9", uniform=[50, 70, None], oracle=[None, None, 3], greedy=[None] * 3),
        table_of("linear-8", uniform=[5, 5, 5]),
    ]
    summary = summarize(pd.concat(sizes))
    picture = draw(summary, ["uniform", "oracle", "greedy", "rank"], "some title")
    tabular, linear = picture.axes
    assert [text.get_text() for text in picture.texts] == ["some title"]
    assert [axes.get_xscale() + axes.get_yscale() for axes in picture.axes] == ["loglog"] * 2
    lines = {str(line.get_label()): line for line in tabular.get_lines()}
    # A median that is "never" has no place, but is told of
    assert set(lines) == {"uniform", "greedy TD error: never", "oracle: not beyond 510"}
    np.testing.assert_array_equal(lines["uniform"].get_xydata(), [[510, 7], [1022, 70]])
    np.testing.assert_array_equal(lines["oracle: not beyond 510"].get_xydata(), [[510, 2]])
    assert [str(line.get_label()) for line in linear.get_lines()] == ["uniform"]
    band = tabular.collections[0].get_paths()[0].vertices
    assert isinstance(band, np.ndarray)
    assert band[:, 1].min() == 5.0
    assert tabular.get_ylim() == linear.get_ylim()


def test_one_picture_for_each_priority_at_the_start() -> None:
    def shown(*agents: str) -> dict[str, list[str]]:
        summary = summarize(table_of("tabular-4", **dict.fromkeys(agents, (1, 2))))
        names = [agent.replace("_", "-") for agent in agents]
        return {
            name: [str(line.get_label()) for line in picture.axes[0].get_lines()]
            for name, picture in pictures_of(summary, names).items()
        }

    assert shown("uniform", "rank", "oracle", "rank_from_eps") == {
        "from_max": ["uniform", "rank-based", "oracle"],
        "from_eps": ["uniform", "oracle", "rank-based from eps"],
    }
    assert shown("uniform", "greedy") == {"from_max": ["uniform", "greedy TD error"]}


# --- the study ---


def test_all_runs_of_the_study() -> None:
    """The settings of the paper, and the same with priorities of eps at the start."""
    runs, agents, base = plan(StudySettings("blind-cliffwalk", n_seeds=2))
    assert len({run.key for run in runs}) == len(runs) == 2 * 15 * 8 * 2
    assert {run.details.n for run in runs} == set(range(2, 17))
    assert (agents, base) == (list(AGENTS), None)
    by_agent = {
        run.key[1]: run.details for run in runs if (run.key[0], run.key[2]) == ("linear-5", 1)
    }
    run = Run("linear", "uniform", 5, 1)
    assert by_agent == {
        "uniform": run,
        "oracle": run._replace(replay="oracle"),
        "rank": run._replace(replay="rank", alpha=0.7),
        "proportional": run._replace(replay="proportional"),
        "greedy": run._replace(replay="greedy"),
        "rank-from-eps": run._replace(replay="rank", alpha=0.7, initial_priority=1e-6),
        "proportional-from-eps": run._replace(replay="proportional", initial_priority=1e-6),
        "greedy-from-eps": run._replace(replay="greedy", initial_priority=1e-6),
    }


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_study_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: int
) -> None:
    """The same numbers with any number of workers; runs that did not learn have none."""
    settings = StudySettings(
        "blind-cliffwalk",
        tasks=("tabular-3", "linear-4"),
        agents=("greedy-from-eps", "uniform", "rank"),
        n_seeds=2,
        first_seed=2,
        output=tmp_path / "new" / "folder",
        jobs=jobs,
    )
    assert main(settings) == 0
    out = capsys.readouterr().out
    runs = read_runs(settings.folder / "runs.csv")
    assert list(runs.columns) == ["task", "agent", "seed", *STUDY.measures]
    assert len(runs) == 12
    for row in runs.itertuples():
        run = STUDY.run_of(row.task, row.agent, row.seed).details
        assert row.transitions == run.n_transitions
        n_updates = learn(run)
        assert math.isnan(row.updates) if n_updates is None else row.updates == n_updates
    assert set(runs["seed"]) == {2, 3}
    assert runs["updates"].isna().sum() == 4
    summary = (settings.folder / "summary.md").read_text()
    assert summary.startswith("# Updates until learned: median (smallest to largest) of 2 runs\n")
    for approximation in ("tabular", "linear"):
        lines = markdown(summarize(runs), approximation, settings.agents)
        assert f"## {approximation}\n\n" + "\n".join(lines) + "\n" in summary
    assert out.endswith(summary)
    assert {path.name for path in settings.folder.glob("*.png")} == {"from_max.png", "from_eps.png"}
