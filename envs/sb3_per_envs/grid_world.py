"""A one-dimensional corridor with a reward at its end."""

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from sb3_per_envs._row import Action, RowEnv, checked_integer


class GridWorldEnv(RowEnv[npt.NDArray[np.float32] | np.int64]):
    """
    A corridor of cells: walk to its right end, where the only reward is.

    ## Description
    Cells are numbered from 0 at the left to `length - 1`, the goal, at the right. With the reward
    at the goal alone, a random walk from cell 0 needs `length * (length - 1)` steps on average
    before there is anything to learn from; the shortest path takes `length - 1`.

    ## Action Space
    `Discrete(2)`: 0 moves one cell to the left, 1 one cell to the right. At the left wall, moving
    left has no effect. An action that is neither 0 nor 1 raises a `ValueError`.

    ## Observation Space
    The agent's cell, in the form chosen by `observation`:

    | `observation` | space                              | value                               |
    |---------------|------------------------------------|-------------------------------------|
    | `"one_hot"`   | `Box(0, 1, (length,), np.float32)` | 1 at the cell, 0 elsewhere          |
    | `"position"`  | `Box(0, 1, (1,), np.float32)`      | the cell divided by `length - 1`    |
    | `"discrete"`  | `Discrete(length)`                 | the number of the cell, an np.int64 |

    The last observation of an episode is that of the cell reached, as after any other step.

    ## Starting State
    Cell `start`, or with `start=None` any cell but the goal, all equally likely.
    `reset(options={"start": 3})` sets it for one episode; other options are ignored.

    ## Reward
    1.0 for the step onto the goal, 0.0 for every other step.

    ## Episode End
    - Termination: the goal is reached.
    - Truncation: never by this class. Made by id, the environment has a time limit of 100 steps,
      enough for the default length. A longer corridor needs more, for example its length squared:
      `gym.make("sb3_per/GridWorld-v0", length=30, max_episode_steps=900)`.

    A `step` after termination, or before the first `reset`, raises `gymnasium.error.ResetNeeded`.

    ## Information
    `reset` and `step` return these keys, and no others:

    - `"position"`: the agent's cell, an int.
    - `"is_success"`: whether the goal is reached, a bool. By this name, Stable-Baselines3 logs a
      success rate.

    ## Rendering
    - `"ansi"`: one character per cell, `A` for the agent and `G` for the goal: `"..A......G"`. On
      the goal, the agent hides it: `".........A"`.
    - `"rgb_array"`: 32 x 32 pixels per cell; the agent is a blue disc, the goal is green.

    ## Arguments
    - `length`: number of cells, at least 2.
    - `start`: cell where an episode starts, from 0 to `length - 2`, or None for a random one.
    - `observation`: `"one_hot"`, `"position"` or `"discrete"`.
    - `render_mode`: None, `"ansi"` or `"rgb_array"`.

    Anything else raises a `ValueError`.

    ## Version History
    - v0: first version.
    """

    def __init__(
        self,
        length: int = 10,
        start: int | None = 0,
        observation: str = "one_hot",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode)
        self.length = checked_integer("length", length, low=2)
        self.start = self._checked_start(start)
        self.observation = observation
        if observation == "one_hot":
            self.observation_space = spaces.Box(0.0, 1.0, (self.length,), np.float32)
        elif observation == "position":
            self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        elif observation == "discrete":
            self.observation_space = spaces.Discrete(self.length)
        else:
            raise ValueError(
                f"observation must be 'one_hot', 'position' or 'discrete', got {observation!r}"
            )
        self._position = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32] | np.int64, dict[str, Any]]:
        """
        Start an episode.

        :param seed: seed for the random starts from here on; None continues with them
        :param options: ``{"start": cell}`` or ``{"start": None}`` replaces ``start`` for this
            episode
        :return: observation and info
        """
        start = self._checked_start((options or {}).get("start", self.start))
        super().reset(seed=seed)
        if start is None:
            start = int(self.np_random.integers(self.length - 1))
        self._position = start
        self._episode = "running"
        return self._observation(), self._info()

    def step(
        self, action: Action
    ) -> tuple[npt.NDArray[np.float32] | np.int64, float, bool, bool, dict[str, Any]]:
        """
        Move one cell to the left or to the right.

        :param action: 0 or 1, as a Python or NumPy integer or an array of shape ``()``
        :return: observation, reward, terminated, truncated (always False), info
        """
        move = 1 if self._checked(action) == 1 else -1
        self._position = max(0, self._position + move)
        terminated = self._at_goal()
        if terminated:
            self._episode = "over"
        return self._observation(), float(terminated), terminated, False, self._info()

    def _checked_start(self, start: int | None) -> int | None:
        if start is None:
            return None
        return checked_integer("start", start, low=0, high=self.length - 2)

    def _at_goal(self) -> bool:
        return self._position == self.length - 1

    def _observation(self) -> npt.NDArray[np.float32] | np.int64:
        if self.observation == "discrete":
            return np.int64(self._position)
        if self.observation == "position":
            return np.array([self._position / (self.length - 1)], dtype=np.float32)
        one_hot = np.zeros(self.length, dtype=np.float32)
        one_hot[self._position] = 1.0
        return one_hot

    def _info(self) -> dict[str, Any]:
        return {"position": self._position, "is_success": self._at_goal()}

    def _row(self) -> str:
        cells = ["."] * (self.length - 1) + ["G"]
        cells[self._position] = "A"
        return "".join(cells)
