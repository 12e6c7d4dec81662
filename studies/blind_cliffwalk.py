"""
The study ``blind-cliffwalk``: number of updates that Q-learning needs, by replay strategy.

The experiment of Schaul et al. 2016 (figures 1 and 2, appendix B.1). A memory contains all
transitions that a random policy sees on a Blind Cliffwalk, where one transition in exponentially
many has a reward. Q-learning replays it, one transition at a time, until it has learned the value
of each action.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import numba
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from sb3_per.compare.settings import SettingsError
from sb3_per.compare.style import COLORS, figure, style
from sb3_per.trees import rank_kernels, sum_kernels
from sb3_per.trees.rank_tree import RankTree
from sb3_per.trees.sum_tree import SumTree
from studies.report import NO_VALUE, write_files
from studies.study import Row, Study, StudyRun, read_runs

__all__ = [
    "AGENTS",
    "INDEPENDENT",
    "STUDY",
    "TASKS",
    "Run",
    "draw",
    "learn",
    "markdown",
    "replay_memory",
    "summarize",
    "true_values",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_F = TypeVar("_F", bound=Callable[..., object])

Approximation = Literal["tabular", "linear"]
Replay = Literal["uniform", "oracle", "greedy", "proportional", "rank"]

#: Step size, and mean squared error at which learning ends, in the paper
STEP_SIZE, THRESHOLD = 0.25, 1e-3
#: Standard deviation of the parameters at the start
SPREAD = 0.1
#: Updates after which a run is stopped: a constant, and a number per transition of the memory
MOST_UPDATES = (10_000, 50)
#: Number of random numbers that a kernel gets at a time
CHUNK = 2**16

#: Results of a kernel after its updates: continue, learned, or no further change
GOING_ON, LEARNED, STUCK = 0, 1, 2

#: Constant added to each absolute TD error, and in some of the runs the initial priority
EPS = 1e-6

#: Approximation and number of states of each task. With more states, a memory would have more than
#: 2 million transitions.
TASKS: dict[str, tuple[Approximation, int]] = {
    f"{approximation}-{n}": (approximation, n)
    for approximation in get_args(Approximation)
    for n in range(2, 21)
}

#: Largest number of states in the study
LARGEST = 16

#: Median updates of an independent implementation, tabular, 5 seeds, by number of states
INDEPENDENT = {
    8: {"uniform": 7_277, "proportional": 1_078, "oracle": 312},
    10: {"uniform": 25_872, "proportional": 3_392, "oracle": 480},
    12: {"uniform": 137_008, "proportional": 10_880, "oracle": 688},
    14: {"uniform": 441_088, "proportional": 38_144, "oracle": 912},
}


class Way(NamedTuple):
    """
    A replay strategy.

    :param replay: choice of the transitions
    :param label: its name in tables and pictures
    :param color: its color in pictures
    :param marker: its marker in pictures
    :param alpha: exponent of priorities or ranks
    :param initial_priority: priority of transitions that were not replayed yet, before the
        exponent; None without priorities
    """

    replay: Replay
    label: str
    color: str
    marker: str
    alpha: float = 0.6
    initial_priority: float | None = None


def _ways() -> dict[str, Way]:
    rank = Way("rank", "rank-based", COLORS[2], "^", alpha=0.7, initial_priority=1.0)
    proportional = Way("proportional", "proportional", COLORS[1], "s", initial_priority=1.0)
    greedy = Way("greedy", "greedy TD error", COLORS[4], "v", initial_priority=1.0)
    ways = {
        "uniform": Way("uniform", "uniform", COLORS[0], "o"),
        "rank": rank,
        "proportional": proportional,
        "greedy": greedy,
        "oracle": Way("oracle", "oracle", COLORS[6], "D"),
    }
    for way in (rank, proportional, greedy):
        ways[f"{way.replay}-from-eps"] = way._replace(
            label=f"{way.label} from eps", initial_priority=EPS
        )
    return ways


#: The agents of the study
AGENTS = _ways()


class Run(NamedTuple):
    """
    One run of Q-learning.

    :param approximation: ``"tabular"`` or ``"linear"``
    :param replay: choice of the transitions
    :param n: number of states, at least 2
    :param seed: seed of the initial parameters, the order of the memory and the draws; runs that
        differ in ``replay`` alone begin with the same parameters and the same memory
    :param alpha: exponent of priorities or ranks
    :param eps: constant added to each absolute TD error
    :param initial_priority: priority of transitions that were not replayed yet, before the exponent
    """

    approximation: Approximation
    replay: Replay
    n: int
    seed: int
    alpha: float = 0.6
    eps: float = 1e-6
    initial_priority: float = 1.0

    @property
    def n_transitions(self) -> int:
        """Size of the memory."""
        return int(2 ** (self.n + 1)) - 2


# --- the task ---


def true_values(n: int) -> FloatArray:
    """
    Values of state-action pairs under the optimal policy.

    :param n: number of states
    :return: shape ``(2 * n,)``; the value of action ``a`` in state ``s`` is at ``2 * s + a``
    """
    gamma = 1.0 - 1.0 / n
    states = np.arange(n)
    values = np.zeros(2 * n)
    values[2 * states + states % 2] = gamma ** (n - 1 - states)
    return values


def replay_memory(n: int, rng: np.random.Generator) -> IntArray:
    """
    All transitions: each sequence of ``n`` actions, executed to the end of its episode, in random
    order (appendix B.1). The same sequences in :class:`~sb3_per_envs.BlindCliffwalkEnv` give the
    same transitions.

    :param n: number of states
    :param rng: random generator for the order
    :return: the state-action pair ``2 * s + a`` of each transition, shape ``(2 ** (n + 1) - 2,)``.
        Nothing else is needed: next state and reward of a pair are deterministic.
    """
    sequences = rng.permutation(2**n)
    actions = (sequences[:, None] >> np.arange(n)) & 1  # [sequence, state]
    wrong = actions != np.arange(n) % 2
    lengths = np.where(wrong.any(axis=1), wrong.argmax(axis=1) + 1, n)
    states = np.arange(n) * np.ones((2**n, 1), dtype=np.int64)
    pairs: IntArray = (2 * states + actions)[states < lengths[:, None]]
    return pairs


# --- Q-learning ---


def _compile(function: _F) -> _F:
    """
    Compile on the first call.

    :param function: function in numba's subset of Python
    :return: the compiled function, which isn't kept on disk: numba would not notice a change in a
        kernel of the trees, which it contains
    """
    return cast(_F, numba.njit(nogil=True, error_model="numpy")(function))


@_compile
def _td_error(values: FloatArray, pair: int) -> float:
    """
    :param values: values of all pairs
    :param pair: state and action of the transition
    :return: target minus value
    """
    n_states = values.shape[0] // 2
    state = pair // 2
    target = 0.0
    if pair % 2 == state % 2:
        target = 1.0
        if state < n_states - 1:
            gamma = 1.0 - 1.0 / n_states
            target = gamma * max(values[2 * state + 2], values[2 * state + 3])
    return float(target - values[pair])


@_compile
def _update(values: FloatArray, pair: int, is_linear: bool) -> float:
    """
    One update of Q-learning. The values of the pairs take the place of the parameters: a step on
    the constant feature of an action moves the values of all states for it, a step on the feature
    of a state moves that state's.

    :param values: values of all pairs, changed
    :param pair: state and action of the transition
    :param is_linear: whether there is a constant feature
    :return: the TD error before the update
    """
    error = _td_error(values, pair)
    if is_linear:
        for i in range(pair % 2, values.shape[0], 2):
            values[i] += STEP_SIZE * error
    values[pair] += STEP_SIZE * error
    return error


@_compile
def _is_learned(values: FloatArray, truth: FloatArray) -> bool:
    total = 0.0
    for i in range(values.shape[0]):
        total += (values[i] - truth[i]) ** 2
    return bool(total < THRESHOLD * values.shape[0])


@_compile
def _replay_given(
    values: FloatArray, truth: FloatArray, is_linear: bool, pairs: IntArray
) -> tuple[int, int]:
    """
    Replay transitions in a given order.

    :param values: values of all pairs, changed
    :param truth: true values
    :param is_linear: whether there is a constant feature
    :param pairs: pairs of the transitions, in order
    :return: number of updates, result
    """
    for j in range(pairs.shape[0]):
        _update(values, pairs[j], is_linear)
        if _is_learned(values, truth):
            return j + 1, LEARNED
    return pairs.shape[0], GOING_ON


@_compile
def _replay_in_proportion(
    values: FloatArray,
    truth: FloatArray,
    is_linear: bool,
    memory: IntArray,
    numbers: FloatArray,
    indices: IntArray,
    drawing: Any,
    writing: Any,
    alpha: float,
    eps: float,
    uniforms: FloatArray,
) -> tuple[int, int]:
    """
    Draw from a SumTree and write the new priority back, alternately.

    :param memory: pairs of all transitions
    :param numbers: place for one random number, then for one priority, shape ``(1,)``
    :param indices: place for one transition, shape ``(1,)``
    :param drawing: arguments of ``sum_kernels.draw``, the two places among them
    :param writing: arguments of ``sum_kernels.write``, likewise
    :param alpha: exponent of priorities
    :param eps: constant added to each absolute TD error
    :param uniforms: random numbers, one for each draw
    :return: number of updates, result
    """
    for j in range(uniforms.shape[0]):
        numbers[0] = uniforms[j]
        sum_kernels.draw(*drawing)
        error = _update(values, memory[indices[0]], is_linear)
        if _is_learned(values, truth):
            return j + 1, LEARNED
        numbers[0] = (abs(error) + eps) ** alpha
        sum_kernels.write(*writing)
    return uniforms.shape[0], GOING_ON


@_compile
def _replay_by_rank(
    values: FloatArray,
    truth: FloatArray,
    is_linear: bool,
    memory: IntArray,
    numbers: FloatArray,
    indices: IntArray,
    drawing: Any,
    writing: Any,
    head: IntArray,
    is_greedy: bool,
    eps: float,
    uniforms: FloatArray,
) -> tuple[int, int]:
    """
    Draw from a RankTree, or take its first rank, and write the new priority back, alternately.

    :param memory: pairs of all transitions
    :param numbers: place for one random number, then for one priority, shape ``(1,)``
    :param indices: place for one transition, shape ``(1,)``
    :param drawing: arguments of ``rank_kernels.draw``, the two places among them
    :param writing: arguments of ``rank_kernels.write``, likewise
    :param head: array ``head`` of the tree, which contains the leaf of the first rank
    :param is_greedy: whether to take the first rank
    :param eps: constant added to each absolute TD error
    :param uniforms: random numbers, one for each draw
    :return: number of updates, result
    """
    before = np.empty_like(values)
    for j in range(uniforms.shape[0]):
        if is_greedy:
            indices[0] = head[rank_kernels.FIRST_LEAF]
        else:
            numbers[0] = uniforms[j]
            rank_kernels.draw(*drawing)
        before[:] = values
        error = _update(values, memory[indices[0]], is_linear)
        if _is_learned(values, truth):
            return j + 1, LEARNED
        numbers[0] = abs(error) + eps
        rank_kernels.write(*writing)
        is_same = is_greedy and indices[0] == head[rank_kernels.FIRST_LEAF]
        if is_same and (values == before).all():
            # The same transition again: there will be no further change
            return j + 1, STUCK
    return uniforms.shape[0], GOING_ON


@_compile
def _replay_best(
    values: FloatArray, truth: FloatArray, is_linear: bool, most: int
) -> tuple[int, int]:
    """
    The oracle: replay the transition after which the squared error of all values is smallest.

    :param values: values of all pairs, changed
    :param truth: true values
    :param is_linear: whether there is a constant feature
    :param most: largest number of updates
    :return: number of updates, result
    """
    n_pairs = values.shape[0]
    sums = np.empty(2)
    before = np.empty(n_pairs)
    for j in range(most):
        for action in range(2):
            sums[action] = 0.0
            for i in range(action, n_pairs, 2):
                sums[action] += values[i] - truth[i]
        best, best_change = 0, np.inf
        for pair in range(n_pairs):
            step = STEP_SIZE * _td_error(values, pair)
            excess = values[pair] - truth[pair]
            # Change of the sum of squared errors: one value moves by `step`, or with the constant
            # feature all values of the action do, and the one value twice as far
            change = 2.0 * step * excess + step * step
            if is_linear:
                change = 2.0 * step * (sums[pair % 2] + excess)
                change += (n_pairs // 2 + 3) * step * step
            if change < best_change:
                best, best_change = pair, change
        before[:] = values
        _update(values, best, is_linear)
        if _is_learned(values, truth):
            return j + 1, LEARNED
        if (values == before).all():
            # No update improves the values, and the best one changes nothing
            return j + 1, STUCK
    return most, GOING_ON


def learn(run: Run) -> int | None:
    """
    Learn until the mean squared error of all values is below 1e-3, which is checked after every
    update.

    :param run: the run
    :return: number of updates; None if 10,000 updates and 50 per transition are not enough, or if
        the values stop changing
    """
    start, draws = np.random.SeedSequence((run.seed, run.n)).spawn(2)
    rng = np.random.default_rng(start)
    values = rng.normal(0.0, SPREAD, 2 * run.n)
    is_linear = run.approximation == "linear"
    if is_linear:
        values += np.tile(rng.normal(0.0, SPREAD, 2), run.n)
    truth = true_values(run.n)
    memory = replay_memory(run.n, rng)
    most = MOST_UPDATES[0] + MOST_UPDATES[1] * run.n_transitions
    if run.replay == "oracle":
        n_updates, outcome = _replay_best(values, truth, is_linear, most)
        return int(n_updates) if outcome == LEARNED else None
    done = 0
    replay = _replays(run, values, truth, memory)
    rng = np.random.default_rng(draws)
    outcome = GOING_ON
    while outcome == GOING_ON and done < most:
        n_updates, outcome = replay(rng.random(min(CHUNK, most - done)))
        done += int(n_updates)
    return done if outcome == LEARNED else None


def _replays(
    run: Run, values: FloatArray, truth: FloatArray, memory: IntArray
) -> Callable[[FloatArray], tuple[int, int]]:
    """
    Prepare the tree from which the transitions are drawn.

    :param run: the run
    :param values: values of all pairs, changed by the returned function
    :param truth: true values
    :param memory: pairs of all transitions
    :return: a function that replays one transition for each random number it gets
    """
    common = (values, truth, run.approximation == "linear")
    numbers, indices = np.empty(1), np.empty(1, dtype=np.int64)
    drawing: tuple[Any, ...]
    writing: tuple[Any, ...]
    if run.replay in ("rank", "greedy"):
        ranks = RankTree(len(memory), run.alpha)
        ranks.fill(0, len(memory), run.initial_priority)
        drawing = (*ranks.draw_arguments, numbers, indices)
        writing = (*ranks.write_arguments, indices, numbers)
        head = rank_kernels.Ranks(*ranks.write_arguments[:-1]).head
        is_greedy = run.replay == "greedy"
        return lambda uniforms: _replay_by_rank(
            *common, memory, numbers, indices, drawing, writing, head, is_greedy, run.eps, uniforms
        )
    tree = SumTree(len(memory))
    if run.replay == "uniform":
        # Nothing is written to the tree, so that many draws can be made at a time
        tree.fill(0, len(memory), 1.0)
        return lambda uniforms: _replay_given(
            *common, memory[tree.get_leaf(uniforms * tree.total)[0]]
        )
    tree.fill(0, len(memory), run.initial_priority**run.alpha)
    drawing = (*tree.draw_arguments, numbers, indices)
    writing = (*tree.write_arguments, indices, numbers)
    return lambda uniforms: _replay_in_proportion(
        *common, memory, numbers, indices, drawing, writing, run.alpha, run.eps, uniforms
    )


# --- the study ---


@dataclass(frozen=True)
class CliffwalkStudy(Study):
    """Replay strategies with tabular and linear values, by the number of states."""

    measures = ("transitions", "updates")

    def agent_name(self, text: str) -> str:
        """Its key in :data:`AGENTS`."""
        if text not in AGENTS:
            raise SettingsError(f"--agents: there is no {text!r}, only {', '.join(AGENTS)}")
        return text

    def run_of(self, task: str, agent: str, seed: int) -> StudyRun:
        """Run of a task and an agent by their names."""
        if task not in TASKS:
            raise SettingsError(f"there is no task {task!r}, only {', '.join(TASKS)}")
        approximation, n = TASKS[task]
        way = AGENTS[agent]
        # Without priorities, the value is not used
        priority = 1.0 if way.initial_priority is None else way.initial_priority
        run = Run(approximation, way.replay, n, seed, way.alpha, EPS, priority)
        return StudyRun((task, agent, seed), n, run)

    @staticmethod
    def make(run: StudyRun) -> Row:
        """Learn; ``updates`` is missing if the run did not learn."""
        return {"transitions": run.details.n_transitions, "updates": learn(run.details)}

    def report(self, folder: Path, agents: Sequence[str], base: str | None) -> list[str]:
        """Medians, and updates by the size of the memory."""
        runs = read_runs(folder / "runs.csv")
        finished = set(runs["agent"])
        agents = [agent for agent in dict.fromkeys([*agents, *AGENTS]) if agent in finished]
        summary = summarize(runs)
        n_runs = summary["n_runs"]
        most, least = n_runs.max(), n_runs.min()
        lines = [
            "# Updates until learned: median (smallest to largest) of "
            f"{most if most == least else f'{least} to {most}'} runs"
        ]
        for approximation in dict.fromkeys(summary["approximation"]):
            lines += ["", f"## {approximation}", ""]
            lines += markdown(summary, approximation, agents)
        if any("%" in line for line in lines):
            lines += ["", "In percent: difference to the median of an independent implementation."]
        write_files(folder, lines, pictures_of(summary, agents))
        return lines


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
    """
    :param runs: runs of the study
    :return: one row for each task and agent: ``approximation``, ``n``, ``agent``,
        ``transitions``, ``median``, ``low`` and ``high`` of the updates, ``n_runs``, ``n_learned``.
        Runs that did not learn count as longer than all others, with infinite updates.
    """
    approximations, sizes = zip(*(TASKS[task] for task in runs["task"]), strict=True)
    updates = runs["updates"].astype("float64").fillna(math.inf)
    keys = ["approximation", "n", "agent", "transitions"]
    runs = runs.assign(approximation=approximations, n=sizes, updates=updates)
    grouped = runs.sort_values("n", kind="stable").groupby(keys, sort=False)["updates"]
    return grouped.agg(
        median="median",
        low="min",
        high="max",
        n_runs="size",
        n_learned=lambda values: int(np.isfinite(values).sum()),
    ).reset_index()


def markdown(summary: pd.DataFrame, approximation: str, agents: Sequence[str]) -> list[str]:
    """
    :param summary: result of :func:`summarize`
    :param approximation: approximation whose rows are shown
    :param agents: agents in the columns
    :return: lines of a table of medians in Markdown, with smallest and largest number in brackets
    """
    part = summary[summary["approximation"] == approximation]
    labels = [AGENTS[agent].label for agent in agents]
    lines = [
        "| n | transitions | " + " | ".join(labels) + " |",
        "|" + "---|" * (len(agents) + 2),
    ]
    for (n, transitions), rows in part.groupby(["n", "transitions"], sort=True):
        by_agent = {row.agent: row for row in rows.itertuples()}
        cells = [_cell(by_agent.get(agent)) for agent in agents]
        lines.append(f"| {n} | {transitions:,} | " + " | ".join(cells) + " |")
    return lines


def _cell(row: Any) -> str:
    if row is None:
        return NO_VALUE
    if not row.n_learned:
        return "never"
    cell = f"{_count(row.median)} ({_count(row.low)} to {_count(row.high)})"
    independent = INDEPENDENT.get(row.n, {}).get(row.agent)
    if row.approximation == "tabular" and independent and math.isfinite(row.median):
        cell += f", {row.median / independent - 1.0:+.0%}"
    return cell


def _count(number: float) -> str:
    return f"{math.floor(number + 0.5):,}" if math.isfinite(number) else "never"


def pictures_of(summary: pd.DataFrame, agents: Sequence[str]) -> dict[str, Figure]:
    """
    :param summary: result of :func:`summarize`
    :param agents: agents with runs
    :return: a picture for each initial priority; agents without priorities are in each of them
    """
    pictures = {}
    title = "Blind Cliffwalk: updates by way of replay"
    for name, priority, ending in (
        ("from_max", 1.0, ""),
        ("from_eps", EPS, f", initial priority {EPS:g}"),
    ):
        shown = [agent for agent in agents if AGENTS[agent].initial_priority in (None, priority)]
        if any(AGENTS[agent].initial_priority == priority for agent in shown):
            pictures[name] = draw(summary, shown, title + ending)
    return pictures


def draw(summary: pd.DataFrame, agents: Sequence[str], title: str) -> Figure:
    """
    Draw median updates against the size of the memory, both logarithmic, from the smallest to the
    largest number.

    :param summary: result of :func:`summarize`
    :param agents: agents to draw
    :param title: title of the picture
    :return: one plot for each approximation
    """
    approximations = list(dict.fromkeys(summary["approximation"]))
    names = {"tabular": "tabular", "linear": "linear: one-hot and constant"}
    with style():
        made, plots = figure(1, len(approximations), 4.6, 4.2)
        for axes, approximation in zip(plots[0], approximations, strict=True):
            part = summary[summary["approximation"] == approximation]
            for agent in agents:
                rows = part[part["agent"] == agent]
                if rows.empty:
                    continue
                way = AGENTS[agent]
                label = way.label
                learned = np.isfinite(rows["median"])
                if not learned.any():
                    label += ": never"
                elif not learned.iloc[-1]:
                    label += f": not beyond {rows['transitions'][learned].max():,}"
                rows = rows[learned]
                high = rows["high"].where(np.isfinite(rows["high"]))
                axes.fill_between(
                    rows["transitions"], rows["low"], high, color=way.color, alpha=0.18, linewidth=0
                )
                axes.plot(
                    rows["transitions"],
                    rows["median"],
                    color=way.color,
                    marker=way.marker,
                    markersize=4,
                    label=label,
                )
            axes.set(xscale="log", yscale="log", title=names[approximation])
            axes.set_xlabel("transitions in the memory, one of them with a reward")
            axes.set_ylabel("updates until the mean squared error is below 0.001")
            axes.legend(loc="upper left")
        for axes in plots[0][1:]:
            axes.sharey(plots[0][0])
            axes.set_ylabel("")
        made.suptitle(title)
    return made


STUDY = CliffwalkStudy(
    tasks=[task for task, (_, n) in TASKS.items() if n <= LARGEST], agents=list(AGENTS)
)
