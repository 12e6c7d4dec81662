from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex
from matplotlib.patches import StepPatch

from sb3_per.compare import pictures
from sb3_per.compare.metrics import interquartile_mean
from sb3_per.compare.pictures import PICTURES, Picture, View, draw, picture_of
from sb3_per.compare.store import Store
from sb3_per.compare.style import COLORS, style
from sb3_per.compare.summary import Comparison

GRID = "sb3_per/GridWorld-v0"


@pytest.fixture(scope="module")
def comparison(finished: Path) -> Comparison:
    store = Store(finished)
    return Comparison(store.read_tables(), store.settings())


def picture(comparison: Comparison, kind: str, env_id: str = GRID) -> Picture:
    with style():
        made = picture_of(View(comparison, env_id), kind)
    assert made is not None
    return made


def kinds_of(comparison: Comparison) -> list[str]:
    return [kind for kind in PICTURES if picture_of(View(comparison, GRID), kind) is not None]


def axes_of(made: Picture) -> list[Axes]:
    return list(made.figure.axes)


def line(axes: Axes, label: str) -> Any:
    (found,) = [line for line in axes.get_lines() if str(line.get_label()).startswith(label)]
    return found


def test_every_kind_is_drawn_where_it_applies(finished: Path) -> None:
    # CartPole has no places
    expected = {f"sb3_per+GridWorld-v0/{kind}.png" for kind in PICTURES}
    expected |= {f"CartPole-v1/{kind}.png" for kind in PICTURES if kind != "places"}
    paths = list((finished / "pictures").glob("*/*"))
    assert {"/".join(path.parts[-2:]) for path in paths} == expected
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_picture_of_before_that_no_longer_applies_goes(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "PICTURES", {"places": PICTURES["places"]})
    (tmp_path / "CartPole-v1").mkdir()
    (tmp_path / "CartPole-v1" / "places.png").write_bytes(b"old")
    drawn = draw(comparison, tmp_path)
    path = tmp_path / "sb3_per+GridWorld-v0" / "places.png"
    assert [(made.kind, made.env_id, where) for made, where in drawn] == [("places", GRID, path)]
    assert list(tmp_path.glob("*/*")) == [path]


@pytest.mark.parametrize("kind", PICTURES)
def test_axes_say_what_they_are(comparison: Comparison, kind: str) -> None:
    made = picture(comparison, kind)
    assert made.alt.endswith(".")
    assert made.reading.endswith(".")
    first = axes_of(made)[0]
    assert first.get_ylabel() or kind == "places"
    title = made.figure._suptitle  # type: ignore[attr-defined]  # get_suptitle: Matplotlib 3.8
    assert "GridWorld-v0" in (title.get_text() if title else first.get_title())
    for axes in axes_of(made):
        if axes.get_xticks().size and kind != "places":
            assert axes.get_xlabel()
    if kind == "places":
        # One label for each column
        assert [axes.get_xlabel() for axes in axes_of(made)[-2:]] == ["cell of the corridor"] * 2


@pytest.mark.parametrize("kind", ["rewards", "td-error", "td-error-stages", "threshold"])
def test_an_agent_has_one_color(comparison: Comparison, kind: str) -> None:
    for axes in axes_of(picture(comparison, kind)):
        artists: list[Any] = [*axes.get_lines(), *axes.patches]
        for artist in artists:
            label = str(artist.get_label())
            color = artist.get_color() if hasattr(artist, "get_color") else artist.get_edgecolor()
            if label.startswith(("uniform", "PER")):
                assert to_hex(color).upper() == COLORS[0 if label.startswith("uniform") else 1]


def test_style_is_gone_afterwards(comparison: Comparison) -> None:
    before = {key: value for key, value in mpl.rcParams.items() if key != "backend"}
    picture(comparison, "td-error")
    assert {key: mpl.rcParams[key] for key in before} == before


def test_greedy_returns_are_interquartile_means_with_their_interval(
    comparison: Comparison,
) -> None:
    _, greedy = axes_of(picture(comparison, "rewards"))
    rows = comparison.of("evaluations", GRID, "per")
    means = rows.groupby(["seed", "steps"])["return"].mean().unstack()
    drawn = line(greedy, "PER (2 runs)")
    assert drawn.get_xdata().tolist() == [0, 100, 200, 300, 400]
    assert drawn.get_ydata() == pytest.approx(interquartile_mean(means.to_numpy()))
    # Of two runs, the interval goes from the one to the other
    band = greedy.collections[1].get_paths()[0].vertices
    at_end = [y for x, y in np.asarray(band) if x == 400]
    assert (min(at_end), max(at_end)) == pytest.approx((means[400].min(), means[400].max()))
    assert line(greedy, "threshold").get_ydata()[0] == 0.8


def test_rewards_are_smoothed_over_the_window(comparison: Comparison) -> None:
    training, _ = axes_of(picture(comparison, "rewards"))
    last = [run["reward"].iloc[-5:].mean() for run in comparison.runs("episodes", GRID, "uniform")]
    drawn = line(training, "uniform")
    assert drawn.get_ydata()[-1] == pytest.approx(np.mean(last))
    assert drawn.get_xdata()[-1] == 400
    assert "last 5" in training.get_ylabel()


def test_td_errors_over_time(comparison: Comparison) -> None:
    (axes,) = axes_of(picture(comparison, "td-error"))
    rows = comparison.of("snapshots", GRID, "per")
    rows = rows[rows["reason"] == "freq"]
    means = rows.groupby("steps")["td_error_mean"].mean()
    assert line(axes, "PER").get_xdata().tolist() == means.index.tolist()
    assert line(axes, "PER").get_ydata() == pytest.approx(means.to_numpy())


def test_distributions_have_a_share_of_one_in_all(comparison: Comparison) -> None:
    for kind in ("td-error-stages", "sampled-priorities"):
        start, after, never = axes_of(picture(comparison, kind))
        for axes in (start, after):
            for patch in axes.patches:
                assert isinstance(patch, StepPatch)
                values, _, _ = patch.get_data()
                assert values.sum() == pytest.approx(1.0)
        assert start.get_title() == "start of learning"
        assert after.get_title() == "20 episodes"
        assert never.get_title().startswith("10000 episodes (0 of ")
        assert [text.get_text() for text in never.texts] == ["no run got this far"]


def test_replayed_priorities_lie_above_stored_ones(comparison: Comparison) -> None:
    _, after, _ = axes_of(picture(comparison, "sampled-priorities"))
    patches: list[Any] = list(after.patches)
    stored, replayed = [patch.get_data() for patch in patches]
    middles = np.sqrt(stored.edges[1:] * stored.edges[:-1])
    assert (replayed.values * middles).sum() > 1.1 * (stored.values * middles).sum()


def test_places_are_shares_of_what_is_replayed_and_stored(comparison: Comparison) -> None:
    made = picture(comparison, "places")
    uniform, per = axes_of(made)[2:4]
    for axes, agent in ((uniform, "uniform"), (per, "per")):
        rows = comparison.of("transitions", GRID, agent)
        rows = rows[rows["stage"] == 20]
        (mesh,) = [found for found in axes.collections if isinstance(found, QuadMesh)]
        stored, replayed = np.asarray(mesh.get_array()).reshape(2, 4)
        drawn = rows.groupby("cell")["n_drawn"].sum().reindex(range(4), fill_value=0)
        assert replayed == pytest.approx(drawn.to_numpy() / drawn.sum())
        counts = rows["cell"].value_counts(normalize=True).reindex(range(4), fill_value=0.0)
        assert stored == pytest.approx(counts.to_numpy())
        assert "goal" in [text.get_text() for text in axes.texts]
    # Nothing starts at the goal
    assert (replayed[3], stored[3]) == (0.0, 0.0)


def test_threshold_curves_end_at_the_share_of_runs_that_got_there(comparison: Comparison) -> None:
    episodes, steps = axes_of(picture(comparison, "threshold"))
    times = comparison.times(GRID, "per")
    n_reached = sum(time.reached for time in times)
    drawn = line(steps, f"PER ({n_reached} of 2 runs got there)")
    assert drawn.get_ydata()[-1] == n_reached / 2
    assert drawn.get_xdata()[-1] == max(time.steps for time in times)
    dots = np.concatenate([np.asarray(found.get_offsets()) for found in episodes.collections])
    all_times = [*comparison.times(GRID, "uniform"), *times]
    assert sorted(dots[:, 0]) == sorted(time.episodes for time in all_times)


def test_bands_are_mean_quantiles(comparison: Comparison) -> None:
    for kind, name in (("weights", "weight"), ("priorities", "priority")):
        (axes,) = axes_of(picture(comparison, kind))
        rows = comparison.of("snapshots", GRID, "per")
        rows = rows[rows["reason"] == "freq"]
        median = rows.groupby("steps")[f"{name}_q50"].mean()
        assert line(axes, "median").get_ydata() == pytest.approx(median.to_numpy())
        assert axes.get_title() == "PER"


def test_comparison_without_looks_and_without_a_threshold(comparison: Comparison) -> None:
    tables = dict(comparison.tables)
    for name in ("snapshots", "transitions"):
        tables[name] = tables[name][:0]
    settings = {
        **comparison.settings,
        "run": {**comparison.settings["run"], "snapshot_episodes": []},
        "analysis": {"window": 5, "thresholds": {}},
    }
    assert kinds_of(Comparison(tables, settings)) == ["rewards"]


def test_looks_at_stages_alone(comparison: Comparison) -> None:
    snapshots = comparison.tables["snapshots"]
    tables = {**comparison.tables, "snapshots": snapshots[snapshots["reason"] == "episode"]}
    made = kinds_of(Comparison(tables, comparison.settings))
    assert made == ["rewards", "threshold", "td-error-stages", "sampled-priorities", "places"]


def test_errors_and_priorities_of_zero(comparison: Comparison, tmp_path: Path) -> None:
    """As with eps = 0, when all values fit."""
    snapshots = comparison.tables["snapshots"].copy()
    names = [name for name in snapshots if name.startswith(("td_error", "priority"))]
    snapshots[names] *= 0.0
    transitions = comparison.tables["transitions"].copy()
    transitions[["td_error", "priority"]] *= 0.0
    tables = {**comparison.tables, "snapshots": snapshots, "transitions": transitions}
    for kind in ("td-error", "td-error-stages", "sampled-priorities", "priorities"):
        made = picture(Comparison(tables, comparison.settings), kind)
        made.figure.savefig(tmp_path / f"{kind}.png")
        scale = axes_of(made)[0].get_yscale()
        assert scale == "linear"


def test_uniform_replay_alone_has_no_pictures_of_priorities(comparison: Comparison) -> None:
    tables = {name: table[table["agent"] == "uniform"] for name, table in comparison.tables.items()}
    made = kinds_of(Comparison(tables, comparison.settings))
    assert made == ["rewards", "threshold", "td-error", "td-error-stages", "places"]


def test_more_agents_than_colors(comparison: Comparison) -> None:
    settings = {**comparison.settings, "agents": [f"per(alpha=0.{n})" for n in range(1, 10)]}
    colors = View(Comparison(comparison.tables, settings), GRID).colors
    assert len(set(colors.values())) == len(COLORS) == 8


# Values that can't be drawn

ODD = [-np.inf, np.nan, 1.7e308]


def with_value(
    comparison: Comparison, table: str, column: str, value: float, agent: str = "uniform"
) -> Comparison:
    """In the fourth row of the agent."""
    rows = comparison.tables[table].astype({column: np.float64})
    rows.loc[rows.index[(rows["env"] == GRID) & (rows["agent"] == agent)][3], column] = value
    return Comparison({**comparison.tables, table: rows}, comparison.settings)


def text_of(made: Picture) -> str:
    return " ".join(text.get_text() for axes in axes_of(made) for text in axes.texts)


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize(
    ("table", "column", "kind", "noun"),
    [
        ("episodes", "reward", "rewards", "an episode reward"),
        ("evaluations", "return", "rewards", "a return"),
        ("snapshots", "td_error_mean", "td-error", "a mean TD error"),
        ("transitions", "td_error", "td-error-stages", "a TD error"),
    ],
)
def test_values_that_fit_on_no_axis_are_told_in_the_place_of_their_picture(
    comparison: Comparison, table: str, column: str, kind: str, noun: str, value: float
) -> None:
    odd = with_value(comparison, table, column, value)
    made = picture(odd, kind)
    problem = f"GridWorld-v0: not drawn, because uniform has {noun} of {value:g} (seed 0)"
    assert (text_of(made), made.alt, made.title) == (problem, problem, PICTURES[kind].title)
    # The other environment is as it was
    assert len(axes_of(picture(odd, kind, "CartPole-v1"))) == len(
        axes_of(picture(comparison, kind, "CartPole-v1"))
    )


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize(
    ("table", "column", "kind"),
    [
        ("snapshots", "priority_q95", "priorities"),
        ("transitions", "priority", "sampled-priorities"),
    ],
)
def test_priorities_that_fit_on_no_axis(
    comparison: Comparison, table: str, column: str, kind: str, value: float
) -> None:
    odd = with_value(comparison, table, column, value, agent="per")
    assert f"not drawn, because PER has a priority of {value:g}" in text_of(picture(odd, kind))


@pytest.mark.parametrize("value", ODD)
def test_all_pictures_are_drawn_whatever_the_rewards(
    comparison: Comparison, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = with_value(comparison, "episodes", "reward", value)
    odd = with_value(odd, "evaluations", "return", value)
    odd = with_value(odd, "snapshots", "td_error_mean", value)
    odd = with_value(odd, "transitions", "td_error", value)
    wanted = ("rewards", "threshold", "td-error", "td-error-stages", "places")
    monkeypatch.setattr(pictures, "PICTURES", {kind: PICTURES[kind] for kind in wanted})
    drawn = draw(odd, tmp_path)
    kinds = [(made.env_id, made.kind) for made, _ in drawn]
    assert kinds == [(GRID, kind) for kind in wanted] + [
        ("CartPole-v1", kind) for kind in wanted if kind != "places"
    ]
    assert all(path.stat().st_size > 0 for _, path in drawn)
