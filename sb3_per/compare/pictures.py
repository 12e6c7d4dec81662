"""The pictures of a comparison, drawn from its tables alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from sb3_per.compare.agents import parse_agent
from sb3_per.compare.metrics import (
    RESAMPLES_OF_CURVES,
    at_steps,
    bootstrap_interval,
    interquartile_mean,
    moving_average,
    share_reached,
)
from sb3_per.compare.store import file_name
from sb3_per.compare.style import (
    STORED,
    agent_colors,
    agent_map,
    figure,
    luminance,
    panels,
    steps_axis,
    style,
)
from sb3_per.compare.summary import Comparison

__all__ = ["PICTURES", "Picture", "draw", "picture_of"]

FloatArray = npt.NDArray[np.float64]

#: Label of an axis of priorities, for proportional prioritization
PRIORITY = r"priority $(|\mathrm{TD\ error}| + \epsilon)^\alpha$"

#: Number of points of a curve
POINTS = 150

#: Largest value that is drawn: beside a larger one, nothing else could be seen
LARGEST = 1e100

#: Quantiles of the bands, in percent
BANDS = (5, 25, 50, 75, 95)

#: Largest number of places of an environment with a picture of them
MOST_CELLS = 64

#: Largest number of places with their shares written into them
MOST_WRITTEN_CELLS = 20


@dataclass(frozen=True)
class Picture:
    """
    A picture with its title and description.

    :param kind: key of :data:`PICTURES`
    :param env_id: id of the environment
    :param title: title, in the report
    :param reading: how to read the picture
    :param alt: text for readers who can't see the picture
    :param figure: the picture itself
    """

    kind: str
    env_id: str
    title: str
    reading: str
    alt: str
    figure: Figure


class Drawing(NamedTuple):
    """
    Result of the drawing functions.

    :param figure: the picture itself
    :param reading: how to read the picture
    :param alt: text for readers who can't see the picture
    """

    figure: Figure
    reading: str
    alt: str


@dataclass(frozen=True)
class View:
    """
    Data of one environment for the drawing functions.

    :param comparison: the comparison
    :param env_id: id of the environment
    """

    comparison: Comparison
    env_id: str

    @property
    def agents(self) -> list[str]:
        """Agents with a finished run."""
        return self.comparison.agents(self.env_id)

    @property
    def colors(self) -> dict[str, str]:
        """Colors by agent."""
        return agent_colors(self.comparison.settings["agents"])

    @property
    def name(self) -> str:
        """Name of the environment, without module and namespace."""
        return self.env_id.rpartition(":")[2].rpartition("/")[2]

    @property
    def budget(self) -> int:
        """Number of environment steps of each run."""
        return self.comparison.budget(self.env_id)

    @property
    def stages(self) -> list[int]:
        """Numbers of episodes with a snapshot of the buffer."""
        return sorted(self.comparison.settings["run"]["snapshot_episodes"])

    def n_runs(self, agent: str) -> int:
        """
        :param agent: name of the agent
        :return: number of its finished runs
        """
        return len(self.comparison.of("runs", self.env_id, agent))

    def label(self, agent: str) -> str:
        """
        :param agent: name of the agent
        :return: its name in pictures
        """
        return parse_agent(agent).label

    def at_stage(self, agent: str, stage: int) -> pd.DataFrame:
        """
        :param agent: name of the agent
        :param stage: number of episodes
        :return: transitions of the snapshots at that stage, of all runs
        """
        rows = self.comparison.of("transitions", self.env_id, agent)
        return rows[rows["stage"] == stage]

    def priority_label(self) -> str:
        """:return: label of an axis of priorities, with the formula if all agents use it"""
        options = (parse_agent(agent).options for agent in self.prioritized())
        is_by_rank = any(("prioritization", "rank") in of_one for of_one in options)
        return "priority" if is_by_rank else PRIORITY

    def prioritized(self) -> list[str]:
        """:return: agents whose buffer has priorities"""
        found = []
        for agent in self.agents:
            snapshots = self.comparison.of("snapshots", self.env_id, agent)
            if snapshots["priority_q50"].notna().any():
                found.append(agent)
        return found


# Curves with intervals


def _curves(
    view: View, table: pd.DataFrame, values: Callable[[pd.DataFrame], Any], points: int | None
) -> Iterator[tuple[str, FloatArray, FloatArray, Any, Any]]:
    """
    :param view: one environment of the comparison
    :param table: table with the columns ``agent``, ``seed`` and ``steps``
    :param values: function that computes the values of the rows of a run
    :param points: number of points of each curve; None for one at each of the steps, if all runs
        have the same steps
    :return: for each agent: its name, points, interquartile mean, lower and upper end of its
        interval there
    """
    for agent in view.agents:
        runs = [run for _, run in table[table["agent"] == agent].groupby("seed")]
        if not runs:
            continue
        start = max(float(run["steps"].iloc[0]) for run in runs)
        if points is None:
            grid = np.unique(np.concatenate([run["steps"].to_numpy() for run in runs]))
            grid = grid[grid >= start]
        else:
            grid = np.unique(np.linspace(start, max(view.budget, start), points).round())
        curves = np.array([at_steps(run["steps"], values(run), grid) for run in runs])
        low, high = bootstrap_interval(
            [curves], interquartile_mean, n_resamples=RESAMPLES_OF_CURVES
        )
        yield agent, grid, interquartile_mean(curves), low, high


def _draw_curve(
    axes: Axes, view: View, agent: str, grid: FloatArray, middle: Any, low: Any, high: Any
) -> None:
    n_runs = view.n_runs(agent)
    label = f"{view.label(agent)} ({n_runs} run{'s' if n_runs > 1 else ''})"
    axes.plot(grid, middle, color=view.colors[agent], label=label)
    axes.fill_between(grid, low, high, color=view.colors[agent], alpha=0.2, linewidth=0)


def _reward_curves(view: View) -> Drawing:
    window = view.comparison.window
    made, ((left, right),) = figure(1, 2, 5.2, 4.0)
    episodes = view.comparison.of("episodes", view.env_id)
    for curve in _curves(view, episodes, lambda run: moving_average(run["reward"], window), POINTS):
        _draw_curve(left, view, *curve)
    evaluations = view.comparison.of("evaluations", view.env_id)
    means = evaluations.groupby(["agent", "seed", "steps"], as_index=False)["return"].mean()
    for curve in _curves(view, means, lambda run: run["return"], None):
        _draw_curve(right, view, *curve)
    left.set_title("while training, with exploration")
    left.set_ylabel(f"episode reward (mean of the last {window})")
    right.set_title("greedy evaluation")
    n_episodes = view.comparison.settings["run"]["eval_episodes"]
    right.set_ylabel(f"return (mean of {n_episodes} episodes)")
    threshold = view.comparison.threshold(view.env_id)
    for axes in (left, right):
        steps_axis(axes)
        if threshold is not None:
            axes.axhline(threshold, color="black", linestyle=":", linewidth=1.2, label="threshold")
    low = min(axes.get_ylim()[0] for axes in (left, right))
    high = max(axes.get_ylim()[1] for axes in (left, right))
    for axes in (left, right):
        axes.set_ylim(low, high)
    _legend_below(made, right)
    made.suptitle(f"{view.name}: reward while learning")
    return Drawing(
        made,
        "Lines: interquartile mean over the runs. Bands: its 95 % bootstrap interval; where they "
        "overlap widely, the runs don't tell the agents apart.",
        f"Episode reward and greedy return of {_listed(view)} on {view.name} by environment steps.",
    )


def _td_error_curve(view: View) -> Drawing | None:
    snapshots = view.comparison.of("snapshots", view.env_id)
    snapshots = snapshots[snapshots["reason"] == "freq"]
    if snapshots.empty:
        return None
    made, ((axes,),) = figure(1, 1, 6.4, 4.0)
    for curve in _curves(view, snapshots, lambda run: run["td_error_mean"], None):
        _draw_curve(axes, view, *curve)
    _log_scale(axes)
    axes.set_ylabel("mean |TD error| (units of return)")
    axes.set_title(f"{view.name}: TD error of stored transitions")
    steps_axis(axes)
    _legend_below(made, axes)
    return Drawing(
        made,
        "Mean absolute TD error over the transitions in the replay buffer, under the networks of "
        "that moment. Errors are in units of return and grow with it: lower means that the values "
        "fit the stored transitions, not that the agent acts better.",
        f"Mean absolute TD error in the replay buffer of {_listed(view)} on {view.name} by steps.",
    )


# Distributions at stages


def _stage_title(view: View, stage: int, agents: Sequence[str]) -> str:
    if stage == 0:
        return "start of learning"
    name = f"{stage} episodes"
    counts = [view.at_stage(agent, stage)["seed"].nunique() for agent in agents]
    n_runs = [view.n_runs(agent) for agent in agents]
    if counts != n_runs:
        name += f" ({sum(counts)} of {sum(n_runs)} runs)"
    return name


def _nothing(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, "no run got this far", ha="center", va="center", transform=axes.transAxes)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _log_bins(values: FloatArray, n: int = 40) -> FloatArray:
    """
    :param values: values; only those above 0 count
    :param n: number of bins
    :return: edges at equal ratios, shape ``(n + 1,)``
    """
    positive = values[values > 0]
    if not positive.size:
        positive = np.ones(1)
    low, high = np.quantile(positive, [0.001, 1.0])
    if high < 2 * low:
        # Nearly equal values
        low, high = low / 2, high * 2
    edges: FloatArray = np.geomspace(low, high * 1.0001, n + 1)
    return edges


def _shares(axes: Axes, values: Any, edges: FloatArray, counts: Any = None, **look: Any) -> None:
    """
    Draw a histogram of shares; values outside the edges count in the first or last bin.

    :param axes: axes to draw on
    :param values: shape ``(n,)``
    :param edges: edges of the bins
    :param counts: weight of each value, shape ``(n,)``; 1 by default
    :param look: keywords of ``Axes.stairs``
    """
    values = np.clip(np.asarray(values, dtype=np.float64), edges[0], edges[-1])
    heights, _ = np.histogram(values, edges, weights=counts)
    axes.stairs(heights / max(heights.sum(), 1), edges, **look)


def _td_error_stages(view: View) -> Drawing | None:
    stages = view.stages
    if not stages:
        return None
    made, (row,) = figure(1, len(stages), 3.1, 3.6)
    pooled = view.comparison.of("transitions", view.env_id)["td_error"]
    if pooled.empty:
        return None
    edges = _log_bins(np.abs(pooled.to_numpy()))
    for axes, stage in zip(row, stages, strict=True):
        drawn = 0
        for agent in view.agents:
            rows = view.at_stage(agent, stage)
            if len(rows):
                color, label = view.colors[agent], view.label(agent)
                errors = rows["td_error"].abs()
                if len(view.agents) <= 2:
                    _shares(axes, errors, edges, color=color, fill=True, alpha=0.2)
                _shares(axes, errors, edges, color=color, label=label, linewidth=1.6)
                drawn += 1
        axes.set_title(_stage_title(view, stage, view.agents))
        if not drawn:
            _nothing(axes)
            continue
        axes.set_xscale("log")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("|TD error| (units of return)")
    row[0].set_ylabel("share of stored transitions")
    _legend_below(made, row[0])
    made.suptitle(f"{view.name}: TD errors of stored transitions")
    return Drawing(
        made,
        "Absolute TD errors of the stored transitions of all runs on a logarithmic axis: one mark "
        "to the left is ten times smaller. The few below the axis count in its first bin.",
        f"Distributions of TD errors in the buffer of {_listed(view)} on {view.name} after "
        f"{_numbers(stages)} episodes.",
    )


def _sampled_priorities(view: View) -> Drawing | None:
    agents, stages = view.prioritized(), view.stages
    if not agents or not stages:
        return None
    made, rows = figure(len(agents), len(stages), 3.1, 3.1)
    for row, agent in zip(rows, agents, strict=True):
        all_stages = view.comparison.of("transitions", view.env_id, agent)["priority"].to_numpy()
        edges = _log_bins(all_stages)
        for axes, stage in zip(row, stages, strict=True):
            found = view.at_stage(agent, stage)
            title = _stage_title(view, stage, [agent])
            axes.set_title(f"{view.label(agent)}\n{title}" if len(agents) > 1 else title)
            if found.empty:
                _nothing(axes)
                continue
            _shares(axes, found["priority"], edges, color=STORED, label="stored", linewidth=1.6)
            _shares(
                axes,
                found["priority"],
                edges,
                counts=found["n_drawn"],
                color=view.colors[agent],
                fill=True,
                alpha=0.55,
                label="replayed",
            )
            axes.set_xscale("log")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_xlabel(view.priority_label())
        row[0].set_ylabel("share of transitions")
        row[0].legend(loc="upper left")
    made.suptitle(f"{view.name}: priorities of replayed transitions")
    return Drawing(
        made,
        "Filled: priorities of drawn transitions. Line: those of all stored transitions. A "
        "transition is drawn in proportion to its priority, so the filled ones lie further right. "
        "At the start of learning, all priorities are 1.",
        f"Histograms of replayed and stored priorities on {view.name} after {_numbers(stages)} "
        "episodes.",
    )


# Distributions along training


def _bands(view: View, prefix: str, label: str, title: str, is_log: bool) -> Figure | None:
    """
    :param view: one environment of the comparison
    :param prefix: prefix of the columns of quantiles
    :param label: label of the y axis
    :param title: title of the figure
    :param is_log: whether the y axis is logarithmic
    :return: median and bands of each prioritized agent by steps; None without one
    """
    agents = view.prioritized()
    along = view.comparison.of("snapshots", view.env_id)
    along = along[along["reason"] == "freq"]
    if not agents or along.empty:
        return None
    made, every = panels(len(agents), 5.6, 3.7)
    for axes, agent in zip(every, agents, strict=True):
        snapshots = along[along["agent"] == agent]
        names = [f"{prefix}_q{percent:02}" for percent in BANDS]
        means = snapshots.groupby("steps")[names].mean()
        steps, color = means.index.to_numpy(), view.colors[agent]
        for low, high, alpha, text in (
            (0, 4, 0.15, "90 % of transitions"),
            (1, 3, 0.35, "50 % of transitions"),
        ):
            axes.fill_between(
                steps,
                means[names[low]].to_numpy(),
                means[names[high]].to_numpy(),
                color=color,
                alpha=alpha,
                linewidth=0,
                label=text,
            )
        axes.plot(steps, means[names[2]].to_numpy(), color=color, label="median")
        if is_log:
            _log_scale(axes)
        else:
            axes.set_ylim(0, 1.05)
        axes.set_ylabel(label)
        axes.set_title(view.label(agent))
        steps_axis(axes)
        axes.legend(loc="best")
    made.suptitle(f"{view.name}: {title}")
    return made


def _stored_priorities(view: View) -> Drawing | None:
    made = _bands(view, "priority", view.priority_label(), "stored priorities", is_log=True)
    if made is None:
        return None
    return Drawing(
        made,
        "Quantiles of the priorities in the buffer, each averaged over the runs. New transitions "
        "get the largest stored priority, which usually falls when they are replayed.",
        f"Bands of the stored priorities on {view.name} by environment steps.",
    )


def _weights(view: View) -> Drawing | None:
    made = _bands(
        view,
        "weight",
        "importance-sampling weight",
        "weights of replayed transitions in the loss",
        is_log=False,
    )
    if made is None:
        return None
    return Drawing(
        made,
        "Quantiles of the weights of replayed transitions in the loss, each averaged over the "
        "runs; 1 is the largest of its batch. The lower they are, the more of the bias is "
        "corrected, and the smaller the effective batch. As beta goes to 1, the spread grows.",
        f"Bands of the importance-sampling weights on {view.name} by environment steps.",
    )


# Threshold


def _threshold(view: View) -> Drawing | None:
    threshold = view.comparison.threshold(view.env_id)
    if threshold is None:
        return None
    made, ((left, right),) = figure(1, 2, 5.2, 3.9)
    n_agents = len(view.agents)
    for number, agent in enumerate(view.agents):
        times = view.comparison.times(view.env_id, agent)
        reached = np.array([time.reached for time in times])
        color = view.colors[agent]
        label = f"{view.label(agent)} ({reached.sum()} of {len(times)} runs got there)"
        for axes, unit in ((left, "episodes"), (right, "steps")):
            values = np.array([getattr(time, unit) for time in times], dtype=np.float64)
            when, share, _, _ = share_reached(values, reached)
            axes.step(
                [0, *when],
                [0, *share],
                where="post",
                color=color,
                label=label,
                # Later curves lie on top and are thinner, so that equal curves are both visible
                linewidth=1.6 + min(1.2, 2.4 / n_agents) * (n_agents - 1 - number),
            )
            # Runs lie below the axis, so that none is hidden by a curve
            height = -0.06 - 0.07 * number
            axes.scatter(values[reached], np.full(reached.sum(), height), s=22, color=color)
            axes.scatter(
                values[~reached],
                np.full((~reached).sum(), height),
                s=24,
                marker="x",
                color=color,
                linewidths=1.3,
            )
    for axes, label in (
        (left, "episodes until the threshold"),
        (right, "environment steps until the threshold"),
    ):
        steps_axis(axes, label)
        axes.set_ylim(-0.06 - 0.07 * n_agents, 1.05)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.axhline(0, color="black", linewidth=0.8)
        axes.axhline(0.5, color="black", linestyle=":", linewidth=1.0)
    right.set_xlim(0, view.budget * 1.03)
    left.set_ylabel("share of runs that got there")
    _legend_below(made, left)
    made.suptitle(
        f"{view.name}: mean reward of {view.comparison.window} episodes at {threshold:g} or more"
    )
    return Drawing(
        made,
        "Kaplan-Meier curves: the further left, the sooner. Below them, dots are runs that got "
        "there, crosses runs that ended without, at their end. The dotted line is the median.",
        f"Share of the runs of {_listed(view)} on {view.name} that got to the threshold, by "
        "episodes and by environment steps.",
    )


# The gridworld itself


def _places(view: View) -> Drawing | None:
    snapshots = view.comparison.of("snapshots", view.env_id)
    n_cells = int(snapshots["n_cells"].max()) if len(snapshots) else 0
    stages = view.stages
    if not 0 < n_cells <= MOST_CELLS or not stages:
        return None
    shares = {
        (agent, stage): _place_shares(view.at_stage(agent, stage), n_cells)
        for agent in view.agents
        for stage in stages
    }
    top = max((found.max() for found in shares.values() if found is not None), default=1.0)
    is_corridor = view.name.startswith("GridWorld")
    # Two agents in a row
    pairs = [view.agents[at : at + 2] for at in range(0, len(view.agents), 2)]
    places = [(stage, pair) for pair in pairs for stage in stages]
    made, rows = figure(len(places), len(pairs[0]), min(0.5 * n_cells + 1.0, 9.0), 1.55)
    for row, (stage, pair) in zip(rows, places, strict=True):
        for axes in row[len(pair) :]:
            axes.set_visible(False)
        for axes, agent in zip(row, pair, strict=False):
            title = _stage_title(view, stage, [agent])
            axes.set_title(f"{view.label(agent)}: {title}", color=view.colors[agent])
            if stage == stages[-1]:
                axes.set_xlabel("cell of the corridor" if is_corridor else "state")
            found = shares[agent, stage]
            if found is None:
                _nothing(axes)
                continue
            _draw_strip(axes, found, agent_map(view.colors[agent]), top)
            if is_corridor:
                # The goal ends the episode: nothing is ever stored from there
                goal = Rectangle((n_cells - 1, 0), 1, 2, facecolor="#EEEEEE", edgecolor="#555555")
                axes.add_patch(goal)
                axes.text(n_cells - 0.5, 1.0, "goal", ha="center", va="center", fontsize=8.5)
    made.suptitle(f"{view.name}: where replayed transitions start")
    return Drawing(
        made,
        "Each row of cells is the environment, the darker the larger the share of the "
        "transitions that start there: above those of replayed, below those of stored ones. "
        "Uniform replay draws from all alike; prioritized replay draws where the errors are.",
        f"Shares of replayed and of stored transitions by place in {view.name}, for "
        f"{_listed(view)}.",
    )


def _place_shares(rows: pd.DataFrame, n_cells: int) -> FloatArray | None:
    """
    :param rows: transitions of the snapshots
    :param n_cells: number of places
    :return: shares of the draws and of the stored transitions by place, shape ``(2, n_cells)``;
        None without transitions
    """
    if rows.empty:
        return None
    cells = rows["cell"].to_numpy()
    drawn = np.bincount(cells, rows["n_drawn"].to_numpy(), minlength=n_cells)
    stored = np.bincount(cells, minlength=n_cells)
    return np.array([drawn / max(drawn.sum(), 1), stored / stored.sum()])


def _draw_strip(axes: Axes, shares: FloatArray, colors: Any, top: float) -> None:
    n_cells = shares.shape[1]
    axes.grid(visible=False)
    axes.pcolormesh(
        np.arange(n_cells + 1),
        np.arange(3),
        shares[::-1],
        cmap=colors,
        vmin=0.0,
        vmax=top,
        edgecolors="#555555",
        linewidth=0.6,
    )
    axes.set_yticks([0.5, 1.5], ["stored", "replayed"])
    axes.tick_params(length=0)
    every = max(1, n_cells // 16)
    axes.set_xticks(np.arange(0, n_cells, every) + 0.5, [str(n) for n in range(0, n_cells, every)])
    axes.spines[:].set_visible(False)
    if n_cells > MOST_WRITTEN_CELLS:
        return
    for (row, cell), share in np.ndenumerate(shares[::-1]):
        if share > 0.0:
            axes.text(
                cell + 0.5,
                row + 0.5,
                f"{share:.0%}" if share >= 0.005 else "<1%",
                ha="center",
                va="center",
                fontsize=8,
                color="black" if luminance(colors(share / top)) > 0.55 else "white",
            )


# All of them


def _log_scale(axes: Axes) -> None:
    """:param axes: axes with all curves; without values above 0, they stay linear"""
    if not np.isfinite(axes.dataLim.minposy):
        return
    axes.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    low, high = axes.get_ylim()
    # Within one power of ten, only the minor marks get labels
    axes.yaxis.set_minor_formatter(plain if high < 10 * low else NullFormatter())


def _legend_below(made: Figure, axes: Axes) -> None:
    """
    :param made: figure that gets a legend below its axes
    :param axes: axes with the labels of the legend
    """
    handles, labels = axes.get_legend_handles_labels()
    # About 12 letters per inch, plus the handle
    letters = max(len(label) for label in labels) + 7
    n_columns = max(1, min(len(labels), int(made.get_figwidth() * 12) // letters))
    made.legend(handles, labels, loc="outside lower center", ncols=n_columns)


def _numbers(values: Sequence[int]) -> str:
    *first, last = [str(value) for value in values]
    return f"{', '.join(first)} and {last}" if first else last


def _listed(view: View) -> str:
    *first, last = [view.label(agent) for agent in view.agents]
    return f"{', '.join(first)} and {last}" if first else last


class Kind(NamedTuple):
    """
    A kind of picture.

    :param title: title, in the report
    :param draw: function that draws it; returns None if it does not apply
    :param values: numbers on its axes: a noun, the table and the columns
    :param is_of_priorities: whether it leaves out agents without priorities
    """

    title: str
    draw: Callable[[View], Drawing | None]
    values: Sequence[tuple[str, str, Sequence[str]]] = ()
    is_of_priorities: bool = False


#: Kinds of pictures by name, in the order of the report
PICTURES = {
    "rewards": Kind(
        "Reward while learning",
        _reward_curves,
        [("an episode reward", "episodes", ["reward"]), ("a return", "evaluations", ["return"])],
    ),
    "threshold": Kind("Episodes and steps to threshold", _threshold),
    "td-error": Kind(
        "Average TD error in the buffer",
        _td_error_curve,
        [("a mean TD error", "snapshots", ["td_error_mean"])],
    ),
    "td-error-stages": Kind(
        "TD errors in the buffer at several stages",
        _td_error_stages,
        [("a TD error", "transitions", ["td_error"])],
    ),
    "sampled-priorities": Kind(
        "Priorities of replayed transitions",
        _sampled_priorities,
        [("a priority", "transitions", ["priority"])],
        is_of_priorities=True,
    ),
    "priorities": Kind(
        "Stored priorities as learning goes on",
        _stored_priorities,
        [("a priority", "snapshots", [f"priority_q{percent:02}" for percent in BANDS])],
        is_of_priorities=True,
    ),
    "weights": Kind(
        "Importance-sampling weights over training",
        _weights,
        [("a weight", "snapshots", [f"weight_q{percent:02}" for percent in BANDS])],
        is_of_priorities=True,
    ),
    "places": Kind("Where replayed transitions come from", _places),
}


def picture_of(view: View, name: str) -> Picture | None:
    """
    :param view: one environment of the comparison
    :param name: key of :data:`PICTURES`
    :return: the picture; if values are infinite, too large or not a number, one that says so; None
        if it does not apply
    """
    kind = PICTURES[name]
    problem = _problem_of(view, kind)
    drawing = kind.draw(view) if problem is None else _message(f"{view.name}: {problem}")
    if drawing is None:
        return None
    return Picture(name, view.env_id, kind.title, drawing.reading, drawing.alt, drawing.figure)


def _problem_of(view: View, kind: Kind) -> str | None:
    for agent in view.prioritized() if kind.is_of_priorities else view.agents:
        for noun, table, columns in kind.values:
            rows = view.comparison.of(table, view.env_id, agent)
            values = rows[columns].to_numpy(dtype=np.float64)
            odd = ~(np.abs(values) <= LARGEST)
            if odd.any():
                seed = rows["seed"].to_numpy()[odd.any(axis=1)][0]
                return (
                    f"not drawn, because {view.label(agent)} has {noun} of {values[odd][0]:g} "
                    f"(seed {seed})"
                )
    return None


def _message(text: str) -> Drawing:
    made, ((axes,),) = figure(1, 1, 7.0, 1.2)
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", wrap=True, transform=axes.transAxes)
    return Drawing(made, text, text)


def draw(comparison: Comparison, folder: Path) -> list[tuple[Picture, Path]]:
    """
    Draw all pictures of a comparison.

    :param comparison: comparison with at least one finished run
    :param folder: folder that gets a folder for each environment; existing pictures are replaced
    :return: the pictures, by environment, with their files
    """
    drawn = []
    with style():
        for env_id in comparison.env_ids:
            view = View(comparison, env_id)
            of_env = folder / file_name(env_id)
            of_env.mkdir(parents=True, exist_ok=True)
            for name in PICTURES:
                path = of_env / f"{name}.png"
                picture = picture_of(view, name)
                if picture is None:
                    # From an earlier call
                    path.unlink(missing_ok=True)
                    continue
                picture.figure.savefig(path)
                drawn.append((picture, path))
    return drawn
