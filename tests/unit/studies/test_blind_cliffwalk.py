"""The Blind Cliffwalk experiment against plain twins, and what its command writes."""

import itertools
import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import tyro
from matplotlib import image

from sb3_per.compare.settings import SettingsError
from sb3_per_envs import BlindCliffwalkEnv
from studies import blind_cliffwalk
from studies.blind_cliffwalk import (
    BlindCliffwalkSettings,
    Run,
    draw,
    learn,
    main,
    markdown,
    plan,
    replay_memory,
    run_all,
    summarize,
    true_values,
)

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


def table_of(**updates: list[int | None]) -> pd.DataFrame:
    """Runs of 8 states, tabular."""
    rows = [
        {"approximation": "tabular", "replay": replay, "n": 8, "transitions": 510, "seed": seed}
        | {"updates": number}
        for replay, numbers in updates.items()
        for seed, number in enumerate(numbers)
    ]
    return pd.DataFrame(rows).astype({"updates": "Int64"})


def test_summary_counts_runs_that_did_not_learn_as_the_longest() -> None:
    table = table_of(
        uniform=[5, 1, None, 3], rank=[2, None, None, 1], oracle=[None] * 3, greedy=[4, 4, 10]
    )
    summary = summarize(table).set_index("replay")
    assert summary.loc["uniform", ["median", "low", "high"]].tolist() == [4.0, 1.0, math.inf]
    assert summary.loc["rank", ["median", "low", "high"]].tolist() == [math.inf, 1.0, math.inf]
    assert summary.loc["oracle", "median"] == math.inf
    assert summary.loc["greedy", ["median", "low", "high"]].tolist() == [4.0, 4.0, 10.0]
    assert summary["n_runs"].to_dict() == {"uniform": 4, "rank": 4, "oracle": 3, "greedy": 3}
    assert summary["n_learned"].to_dict() == {"uniform": 3, "rank": 2, "oracle": 0, "greedy": 3}


def test_table_of_medians() -> None:
    table = table_of(oracle=[None, None], uniform=[7_000, 9_009], proportional=[1_000, None])
    lines = markdown(summarize(table), "tabular").splitlines()
    assert lines == [
        "| n | transitions | uniform | proportional | oracle |",
        "|---|---|---|---|---|",
        "| 8 | 510 | 8,005 (7,000 to 9,009) | never (1,000 to never) | never |",
    ]
    # 8004.5 / 7277 is 1.0999...
    compared = markdown(summarize(table_of(uniform=[7_000, 9_009], rank=[1])), "tabular", True)
    assert compared.splitlines()[2] == "| 8 | 510 | 8,005 (7,000 to 9,009), +10% | 1 (1 to 1) |"


def test_the_picture_shows_medians_and_ranges() -> None:
    sizes = [
        table_of(uniform=[5, 7, 9], oracle=[1, 2, None], greedy=[None] * 3),
        table_of(uniform=[50, 70, None], oracle=[None, None, 3], greedy=[None] * 3).assign(
            n=9, transitions=1022
        ),
        table_of(uniform=[5, 5, 5]).assign(approximation="linear"),
    ]
    picture = draw(summarize(pd.concat(sizes)), "some title")
    tabular, linear = picture.axes
    assert picture.get_suptitle() == "some title"
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


# --- the command ---


def test_settings_that_are_asked_for() -> None:
    settings = tyro.cli(BlindCliffwalkSettings, args=[])
    assert settings == BlindCliffwalkSettings()
    assert settings.sizes == tuple(range(2, 17))
    assert settings.seeds == tuple(range(20))
    assert settings.folder == Path("blind-cliffwalk")
    assert len(plan(settings)) == 2 * 5 * 15 * 20
    options = ["--quick", "--initial-priority", "eps", "--first-seed", "5"]
    settings = tyro.cli(BlindCliffwalkSettings, args=[*options, "--replays", "rank", "greedy"])
    assert settings.replays == ("rank", "greedy")
    assert settings.sizes == tuple(range(2, 11))
    assert settings.seeds == (5, 6, 7)
    assert settings.folder == Path("blind-cliffwalk-eps")
    assert replace(settings, largest=4, n_seeds=1).sizes == (2, 3, 4)
    assert replace(settings, n_seeds=2).seeds == (5, 6)
    settings.check()


def test_each_run_gets_its_options() -> None:
    settings = BlindCliffwalkSettings(
        replays=("proportional", "rank"),
        largest=2,
        n_seeds=1,
        alpha=0.5,
        rank_alpha=0.9,
        eps=0.01,
        approximations=("linear",),
    )
    assert plan(settings) == [
        Run("linear", "proportional", 2, 0, 0.5, 0.01, 1.0),
        Run("linear", "rank", 2, 0, 0.9, 0.01, 1.0),
    ]
    starved = plan(replace(settings, initial_priority="eps"))
    assert [run.initial_priority for run in starved] == [0.01, 0.01]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smallest": 1}, "--smallest must be from 2 to 20, got 1"),
        ({"largest": 21}, "--largest must be from 2 to 20, got 21"),
        ({"smallest": 9, "largest": 8}, "--largest must be from 9 to 20, got 8"),
        ({"n_seeds": 0}, "--n-seeds must be from 1 to inf, got 0"),
        ({"first_seed": -1}, "--first-seed must be from 0 to inf, got -1"),
        ({"alpha": -0.1}, "--alpha must be a finite number of at least 0, got -0.1"),
        ({"rank_alpha": math.nan}, "--rank-alpha must be a finite number of at least 0, got nan"),
        ({"eps": 0.0}, "--eps must be above 0 and at most 1, got 0.0"),
        ({"jobs": 0}, "--jobs must be a number of runs, or -1 for all cores, got 0"),
        ({"replays": ()}, "--replays needs each at most once, at least one, got ()"),
        ({"approximations": ("linear",) * 2}, "--approximations needs each at most once"),
    ],
)
def test_settings_that_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = BlindCliffwalkSettings(**options, output=tmp_path / "new")
    with pytest.raises(SettingsError, match=re.escape(message)):
        settings.check()
    assert main(settings) == 2
    assert f"sb3-per blind-cliffwalk: {message}" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(BlindCliffwalkSettings(output=tmp_path / "file")) == 2
    assert f"can't make the folder --output {tmp_path / 'file'}" in capsys.readouterr().err


def test_the_command_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = BlindCliffwalkSettings(
        largest=4, n_seeds=3, first_seed=2, jobs=1, output=tmp_path / "new" / "folder"
    )
    assert main(settings) == 0
    out = capsys.readouterr().out
    assert out.startswith("90 runs: 3 sizes, 5 ways of replay, 3 seed(s).")
    table = pd.read_csv(settings.folder / "runs.csv")
    assert len(table) == 90
    for row in table.sample(8, random_state=0).itertuples():
        alpha = 0.7 if row.replay == "rank" else 0.6
        run = Run(row.approximation, row.replay, row.n, row.seed, alpha)
        assert row.updates == learn(run)
        assert row.transitions == 2 ** (row.n + 1) - 2
    assert set(table["seed"]) == {2, 3, 4}
    medians = (settings.folder / "medians.md").read_text()
    for approximation in ("tabular", "linear"):
        part = markdown(summarize(table), approximation)
        assert f"## {approximation}\n\n{part}\n" in medians
        assert part in out
    assert "median (smallest to largest) of 3 runs" in medians
    written = json.loads((settings.folder / "settings.json").read_text())
    assert written["settings"]["n_seeds"] == 3
    assert written["settings"]["alpha"] == 0.6
    assert written["seeds"] == [2, 3, 4]
    assert "numba" in written["versions"]
    pixels = image.imread(settings.folder / "blind_cliffwalk.png")
    assert pixels.shape[1] > pixels.shape[0] > 300
    assert pixels[..., :3].std() > 0.05


@pytest.mark.slow
def test_the_same_numbers_with_any_number_of_workers() -> None:
    runs = plan(BlindCliffwalkSettings(largest=4, n_seeds=2))
    pd.testing.assert_frame_equal(run_all(runs, 1), run_all(runs, 2))


def test_runs_that_did_not_learn_are_missing_in_the_table(tmp_path: Path) -> None:
    settings = BlindCliffwalkSettings(
        smallest=4,
        largest=4,
        n_seeds=1,
        replays=("greedy", "uniform"),
        initial_priority="eps",
        approximations=("tabular",),
        output=tmp_path,
        jobs=1,
    )
    assert main(settings) == 0
    rows = (tmp_path / "runs.csv").read_text().splitlines()
    assert rows[0] == "approximation,replay,n,transitions,seed,updates"
    assert rows[1] == "tabular,greedy,4,30,0,"
    assert re.fullmatch(r"tabular,uniform,4,30,0,\d+", rows[2])
