"""The report of a comparison: one HTML file that contains everything."""

import base64
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from sb3_per.compare.agents import parse_agent
from sb3_per.compare.metrics import Estimate
from sb3_per.compare.pictures import Picture
from sb3_per.compare.style import agent_colors
from sb3_per.compare.summary import MEASURES, Comparison, format_estimate

__all__ = ["render_report", "summary_rows"]

NO_VALUE = "-"


def summary_rows(summary: pd.DataFrame, env_id: str, agents: Sequence[str]) -> list[dict[str, Any]]:
    """
    :param summary: measures from :func:`~sb3_per.compare.summary.summarize`
    :param env_id: id of the environment
    :param agents: columns of the table
    :return: its rows: ``title``, and one text for each agent, a dash where there is no value
    """
    there = summary[summary["env"] == env_id].set_index(["measure", "agent"])
    rows = []
    for measure, about in MEASURES.items():
        cells = []
        for agent in agents:
            if (measure, agent) not in there.index:
                cells.append(NO_VALUE)
                continue
            row = there.loc[(measure, agent)]
            estimate = Estimate(float(row["value"]), float(row["low"]), float(row["high"]))
            cells.append(format_estimate(measure, estimate, int(row["n_runs"])))
        if set(cells) != {NO_VALUE}:
            rows.append({"title": about.title, "cells": cells})
    return rows


def render_report(
    comparison: Comparison,
    summary: pd.DataFrame,
    pictures: Sequence[tuple[Picture, Path]],
    failures: Sequence[str],
) -> str:
    """
    :param comparison: comparison with at least one finished run
    :param summary: its measures
    :param pictures: pictures with their files
    :param failures: files about runs that failed
    :return: the page
    """
    settings = comparison.settings
    agents = settings["agents"]
    colors = agent_colors(agents)
    sections = []
    for env_id in comparison.env_ids:
        there = comparison.agents(env_id)
        sections.append(
            {
                "name": env_id,
                "about": _about(comparison, env_id),
                "agents": [{"label": parse_agent(a).label, "color": colors[a]} for a in there],
                "rows": summary_rows(summary, env_id, there),
                "pictures": [
                    _embedded(picture, path)
                    for picture, path in pictures
                    if picture.env_id == env_id
                ],
            }
        )
    n_asked = len(settings["environments"]) * len(agents) * len(settings["seeds"])
    runs = comparison.tables["runs"]
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    ).get_template("report.html")
    return template.render(
        title="Uniform and prioritized replay compared",
        subtitle=(
            f"{len(runs)} runs: {len(comparison.env_ids)} environment(s), {len(agents)} agent(s), "
            f"{len(settings['seeds'])} seed(s); {runs['steps'].sum():,} environment steps in "
            f"{runs['seconds'].sum() / 60:.1f} minutes of run time, all runs added up."
        ),
        failures=list(failures),
        missing=max(n_asked - len(runs), 0),
        n_asked=n_asked,
        sections=sections,
        measures=list(MEASURES.values()),
        agents=[{"label": parse_agent(agent).label, "name": agent} for agent in agents],
        settings=json.dumps(
            {key: value for key, value in settings.items() if key not in ("versions", "format")},
            indent=2,
        ),
        versions=list(settings["versions"].items()),
    )


def _about(comparison: Comparison, env_id: str) -> str:
    threshold = comparison.threshold(env_id)
    solved = (
        "There is no threshold for this environment: --threshold sets one."
        if threshold is None
        else f"The threshold is a mean reward of {threshold:g} over {comparison.window} episodes."
    )
    return f"{comparison.budget(env_id):,} environment steps a run. {solved}"


def _embedded(picture: Picture, path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    # From the header of the PNG
    width, height = struct.unpack(">II", data[16:24])
    return {
        "title": picture.title,
        "reading": picture.reading,
        "alt": picture.alt,
        "width": width,
        "height": height,
        "data": base64.b64encode(data).decode("ascii"),
    }
