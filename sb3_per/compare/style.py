"""Style of all pictures: one color per agent, readable by color-blind readers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

__all__ = [
    "COLORS",
    "STORED",
    "agent_colors",
    "agent_map",
    "figure",
    "luminance",
    "panels",
    "steps_axis",
    "style",
]

#: Okabe and Ito's palette for color-blind readers, blue and vermillion first
COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#F0E442",
)

#: Color of stored transitions, beside replayed ones
STORED = "#8A8A8A"

STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10.5,
    "figure.dpi": 120,
    "figure.titlesize": 12,
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.dpi": 120,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}


@contextmanager
def style() -> Iterator[None]:
    """Use the style of this package inside the ``with`` block."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def agent_colors(agents: Sequence[str]) -> dict[str, str]:
    """
    :param agents: all agents of the comparison
    :return: the color of each, the same in every picture
    """
    return {agent: COLORS[number % len(COLORS)] for number, agent in enumerate(agents)}


def agent_map(color: str) -> Colormap:
    """
    :param color: color of an agent
    :return: shades of the color, from white for zero
    """
    return LinearSegmentedColormap.from_list("agent", ["#FFFFFF", color])


def luminance(color: Sequence[float]) -> float:
    """
    :param color: red, green, blue, each in ``[0, 1]``; further values are ignored
    :return: perceived brightness in ``[0, 1]`` (ITU-R BT.601)
    """
    red, green, blue = color[:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, Any]:
    """
    :param rows: number of rows of axes
    :param columns: number of columns of axes
    :param width: width of each, in inches
    :param height: height of each, in inches
    :return: a figure that belongs to no window, and its axes, shape ``(rows, columns)``
    """
    made = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return made, made.subplots(rows, columns, squeeze=False)


def panels(n: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """
    :param n: number of axes, two in a row
    :param width: width of each, in inches
    :param height: height of each, in inches
    :return: a figure, and its axes
    """
    made, rows = figure((n + 1) // 2, min(n, 2), width, height)
    every: list[Axes] = list(rows.ravel())
    for axes in every[n:]:
        axes.set_visible(False)
    return made, every[:n]


def steps_axis(axes: Axes, label: str = "environment steps") -> None:
    """
    :param axes: axes with steps on the x axis
    :param label: label of that axis
    """
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.set_xlim(left=0)


def _thousands(value: float, _: int) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"
