"""Base of the two environments: states in a row, two actions, rendering."""

from abc import abstractmethod
from numbers import Integral
from typing import Any, Literal, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import error, logger, spaces

Action: TypeAlias = int | np.integer[Any] | npt.NDArray[np.integer[Any]]
Observation = TypeVar("Observation")

CELL_SIZE = 32  # pixels, even as video encoders ask for
CELL_COLOR = (245, 245, 245)
GOAL_COLOR = (120, 200, 120)
LINE_COLOR = (150, 150, 150)
MARK_COLORS = {"A": (40, 90, 200), "x": (200, 40, 40)}


class RowEnv(gym.Env[Observation, Action]):
    """
    Base class for states in a row with two actions; a subclass defines their effect, and renders
    itself as text.

    :param render_mode: ``None`` or one of ``metadata["render_modes"]``
    :raises ValueError: if ``render_mode`` is anything else
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}

    def __init__(self, render_mode: str | None) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(
                f"render_mode must be None or one of {self.metadata['render_modes']}, "
                f"got {render_mode!r}"
            )
        self.render_mode = render_mode
        self.action_space = spaces.Discrete(2)
        self._episode: Literal["none", "running", "over"] = "none"

    def render(self) -> str | npt.NDArray[np.uint8] | None:
        """
        Draw the current state.

        :return: one line of text for ``"ansi"``, an image of shape ``(32, 32 * cells, 3)`` for
            ``"rgb_array"``; None and a warning without a render mode
        :raises gymnasium.error.ResetNeeded: if there was no ``reset`` yet
        """
        if self._episode == "none":
            raise error.ResetNeeded("nothing to render yet: call reset() first")
        if self.render_mode == "ansi":
            return self._row()
        if self.render_mode == "rgb_array":
            return paint(self._row())
        logger.warn(
            "render() draws nothing without a render mode: make the environment with "
            'render_mode="ansi" or render_mode="rgb_array"'
        )
        return None

    @abstractmethod
    def _row(self) -> str:
        """
        Render the state as text.

        :return: one character per cell: ``.`` empty, ``A`` agent, ``x`` fallen agent, ``G`` goal
        """

    def _checked(self, action: Action) -> int:
        """
        Refuse a step that can't be taken, before anything has changed.

        :return: the action as a plain integer
        """
        if self._episode != "running":
            state = "has not started" if self._episode == "none" else "is over"
            raise error.ResetNeeded(f"the episode {state}: call reset() before step()")
        # By hand, as Discrete.contains takes longer than the rest of a step.
        number = action[()] if isinstance(action, np.ndarray) else action
        if not isinstance(number, int | np.integer) or number not in (0, 1):
            raise ValueError(f"action must be 0 or 1, got {action!r}")
        return int(number)


def checked_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """
    Refuse a value that is not an integer (a bool does not count as one) or outside ``[low, high]``.

    :param name: name of the value, for error messages
    :param value: value given by the user
    :param low: smallest value allowed
    :param high: largest value allowed; None for no upper bound
    :return: the value as a plain integer
    :raises ValueError: with the value in its message
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if high is None:
        if number < low:
            raise ValueError(f"{name} must be at least {low}, got {number}")
    elif not low <= number <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {number}")
    return number


def paint(row: str) -> npt.NDArray[np.uint8]:
    """
    Paint a row of cells, the last of which is the goal.

    :param row: one character per cell; ``A`` and ``x`` become a blue and a red disc
    :return: image of shape ``(CELL_SIZE, CELL_SIZE * len(row), 3)``
    """
    image = np.full((CELL_SIZE, CELL_SIZE * len(row), 3), CELL_COLOR, dtype=np.uint8)
    image[:, -CELL_SIZE:] = GOAL_COLOR
    image[[0, -1]] = LINE_COLOR
    image[:, ::CELL_SIZE] = LINE_COLOR
    image[:, -1] = LINE_COLOR

    offsets = np.arange(CELL_SIZE) - (CELL_SIZE - 1) / 2
    disc = offsets[:, None] ** 2 + offsets**2 <= (0.3 * CELL_SIZE) ** 2
    for index, mark in enumerate(row):
        if mark in MARK_COLORS:
            image[:, index * CELL_SIZE : (index + 1) * CELL_SIZE][disc] = MARK_COLORS[mark]
    return image
