import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from sb3_per.compare import pictures
from sb3_per.compare.main import plot, write_results
from sb3_per.compare.metrics import Estimate
from sb3_per.compare.report import NO_VALUE, render_report, summary_rows
from sb3_per.compare.settings import PlotSettings, SettingsError
from sb3_per.compare.store import Store
from sb3_per.compare.summary import MEASURES, Comparison, format_estimate, summarize

VOID = {"meta", "img", "br", "link", "hr"}


class Page(HTMLParser):
    """Checks that tags close, and keeps images, tables and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.ids: list[str | None] = []
        self.links: list[str | None] = []
        self.outside: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "a":
            self.links.append(attributes["href"])
        if tag == "img":
            self.images.append(attributes)
        for name in ("src", "href"):
            value = attributes.get(name) or ""
            if not value.startswith(("data:", "#")) and name in attributes:
                self.outside.append(value)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def text(finished: Path) -> str:
    return (finished / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


@pytest.fixture(scope="module")
def comparison(finished: Path) -> Comparison:
    store = Store(finished)
    return Comparison(store.read_tables(), store.settings())


def test_page_is_whole_and_needs_nothing_from_outside(text: str, page: Page) -> None:
    assert text.startswith("<!DOCTYPE html>")
    assert '<meta charset="utf-8">' in text
    assert page.outside == []
    assert "<script" not in text
    assert not re.search(r"url\(|@import|https?:", text)
    assert len(set(page.ids)) == len(page.ids)
    assert page.links == [f"#{name}" for name in page.ids]


def test_page_contains_every_picture(finished: Path, page: Page) -> None:
    embedded = []
    for image in page.images:
        kind, _, data = str(image["src"]).partition(",")
        assert kind == "data:image/png;base64"
        embedded.append(base64.b64decode(data))
        assert image["alt"]
        width, height = int(str(image["width"])), int(str(image["height"]))
        assert (width > 300, height > 200) == (True, True)
    files = {path.read_bytes() for path in (finished / "pictures").glob("*/*.png")}
    assert len(embedded) == 15
    assert set(embedded) == files


def test_numbers_are_those_that_the_tables_give(page: Page, comparison: Comparison) -> None:
    summary = summarize(comparison)
    for env_id in comparison.env_ids:
        for measure, about in MEASURES.items():
            rows = summary[(summary["env"] == env_id) & (summary["measure"] == measure)]
            if rows.empty:
                continue
            cells = [
                format_estimate(measure, Estimate(row.value, row.low, row.high), row.n_runs)
                for row in rows.itertuples(index=False)
            ]
            if measure.startswith("better"):
                cells = [NO_VALUE, *cells]
            assert [about.title, *cells] in page.rows


def test_greedy_return_recomputed_from_the_table_alone(
    page: Page, finished: Path, comparison: Comparison
) -> None:
    evaluations = pd.read_parquet(finished / "evaluations.parquet")
    last = evaluations[evaluations["steps"] == evaluations["steps"].max()]
    means = last.groupby(["env", "agent", "seed"])["return"].mean()
    # Of two runs, the interquartile mean is the mean
    shown = {row[0]: row[1:] for row in page.rows[:5]}["final greedy return"]
    for agent, cell in zip(("uniform", "per"), shown, strict=True):
        value = means["sb3_per/GridWorld-v0"][agent].mean()
        assert cell.split(" ")[0] == f"{value:.3g}"


def test_summary_is_written_as_a_table(finished: Path, comparison: Comparison) -> None:
    written = pd.read_csv(finished / "summary.csv")
    pd.testing.assert_frame_equal(written, summarize(comparison), check_dtype=False)


def test_settings_and_versions_are_there(text: str, page: Page, finished: Path) -> None:
    settings = json.loads((finished / "settings.json").read_text())
    for package, version in settings["versions"].items():
        assert [package, version] in page.rows
    for value in ("max_episode_steps: 12", "dict(net_arch=[16])", "learning_starts"):
        assert value.split(":")[0] in text
    assert "8 runs: 2 environment(s), 2 agent(s), 2 seed(s); 3,200 environment steps" in text


def test_failed_and_missing_runs_are_told_of(comparison: Comparison) -> None:
    settings = {**comparison.settings, "seeds": [0, 1, 2]}
    name = "A--per(<b>)--seed-1.txt"
    more = render_report(Comparison(comparison.tables, settings), summarize(comparison), [], [name])
    Page(more)
    assert "1 run failed and is not in the numbers" in more
    # Nothing that comes from outside is taken for HTML
    assert "A--per(&lt;b&gt;)--seed-1.txt" in more
    assert "4 of 12 runs are missing" in more


def test_agent_without_a_value_gets_a_dash(comparison: Comparison) -> None:
    rows = summary_rows(summarize(comparison), "CartPole-v1", ["uniform", "per", "qrdqn"])
    assert all(row["cells"][2] == NO_VALUE for row in rows)


@pytest.fixture
def tables_alone(finished: Path, tmp_path: Path) -> Path:
    for name in ("settings.json", *(path.name for path in finished.glob("*.parquet"))):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    return tmp_path


def only(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Some pictures take as little time as needed."""
    monkeypatch.setattr(pictures, "PICTURES", {kind: pictures.PICTURES[kind] for kind in kinds})


def test_plot_needs_the_tables_and_settings_alone(
    finished: Path,
    tables_alone: Path,
    page: Page,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    only(monkeypatch, "td-error", "places")
    assert plot(PlotSettings(tables_alone)) == 0
    again = Page((tables_alone / "report.html").read_text(encoding="utf-8"))
    assert again.rows == page.rows
    assert len(again.images) == 3
    assert all(image in page.images for image in again.images)
    assert (tables_alone / "summary.csv").read_bytes() == (finished / "summary.csv").read_bytes()
    out = capsys.readouterr().out
    assert "final greedy return" in out
    first = tables_alone / "pictures" / "sb3_per+GridWorld-v0" / "td-error.png"
    assert out.splitlines()[-2:] == [
        f"3 pictures, the first of them: {first}",
        f"The page with all of them: {tables_alone / 'report.html'}",
    ]
    assert first.is_file()


def test_plot_with_another_threshold_and_window(
    tables_alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "weights")
    before = (tables_alone / "settings.json").read_bytes()
    comparison = write_results(Store(tables_alone), threshold=5.0, window=3)
    assert (comparison.threshold("CartPole-v1"), comparison.window) == (5.0, 3)
    # CartPole lasts for longer than 5 steps from the beginning
    summary = pd.read_csv(tables_alone / "summary.csv")
    values = summary.set_index(["env", "agent", "measure"])["value"]
    assert values["CartPole-v1", "per", "n_reached"] == 2
    assert values["CartPole-v1", "per", "episodes_to_threshold"] == 3
    assert values["sb3_per/GridWorld-v0", "per", "n_reached"] == 0
    # The comparison keeps its own
    assert (tables_alone / "settings.json").read_bytes() == before


def test_plot_without_a_comparison(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no comparison: .*settings.json is missing"):
        write_results(Store(tmp_path))
