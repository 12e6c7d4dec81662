"""The exploration problem with which the paper on prioritized replay makes its case."""

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from sb3_per_envs._row import Action, RowEnv, checked_integer


class BlindCliffwalkEnv(RowEnv[npt.NDArray[np.float32]]):
    """
    A row of states where one wrong action ends the episode, and only the far end gives a reward.

    ## Description
    The Blind Cliffwalk of Schaul et al., "Prioritized Experience Replay" (ICLR 2016), figure 1 and
    appendix B.1. In each of the `n` states one action is right and leads to the next state; the
    other one ends the episode without a reward. The right action alternates: in state `i` it is
    `i % 2`. A random policy sees the reward once in `2 ** n` episodes, so among the transitions
    of a replay buffer those that matter are exponentially rare.

    ## Action Space
    `Discrete(2)`. In state `i`, action `i % 2` moves on and the other one falls. An action that is
    neither 0 nor 1 raises a `ValueError`.

    ## Observation Space
    `Box(0, 1, (n,), np.float32)`: 1 at the number of the state, 0 elsewhere.

    Both ends of an episode happen *in* a state: after a fall the observation is still that of
    the state where it happened, after a success that of the last state, `n - 1`. As both are
    terminations, no target bootstraps from it.

    ## Starting State
    State 0, always. Nothing here is random, and `reset` ignores its options.

    ## Reward
    1.0 for the right action in the last state, 0.0 for every other step.

    ## Episode End
    - Termination: a wrong action, or the right one in the last state.
    - Truncation: never. The id has no time limit, as no episode is longer than `n` steps.

    A `step` after termination, or before the first `reset`, raises `gymnasium.error.ResetNeeded`.

    ## Information
    `reset` and `step` return these keys, and no others:

    - `"state"`: the number of the state that is observed, an int.
    - `"is_success"`: whether the reward is reached, a bool. By this name, Stable-Baselines3 logs a
      success rate.

    ## Rendering
    - `"ansi"`: one character per state and `G` for the reward after them, `A` for the agent:
      `".A........G"` with 10 states. `x` is where it fell, and after a success the agent
      hides the `G`.
    - `"rgb_array"`: 32 x 32 pixels for each of these; the agent is a blue disc, red when it fell,
      the goal is green.

    ## Arguments
    - `n`: number of states, at least 2.
    - `render_mode`: None, `"ansi"` or `"rgb_array"`.

    Anything else raises a `ValueError`.

    ## Version History
    - v0: first version.
    """

    def __init__(self, n: int = 10, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.n = checked_integer("n", n, low=2)
        self.observation_space = spaces.Box(0.0, 1.0, (self.n,), np.float32)
        self._state = 0
        self._success = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """
        Start an episode in state 0.

        :param seed: seeds ``np_random``, from which this environment draws nothing
        :param options: ignored
        :return: observation and info
        """
        super().reset(seed=seed)
        self._state = 0
        self._success = False
        self._episode = "running"
        return self._observation(), self._info()

    def step(
        self, action: Action
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """
        Move on to the next state, or fall.

        :param action: 0 or 1, as a Python or NumPy integer or an array of shape ``()``
        :return: observation, reward, terminated, truncated (always False), info
        """
        right = self._checked(action) == self._state % 2
        last = self._state == self.n - 1
        self._success = right and last
        terminated = last or not right
        if terminated:
            self._episode = "over"
        else:
            self._state += 1
        return self._observation(), float(self._success), terminated, False, self._info()

    def _observation(self) -> npt.NDArray[np.float32]:
        one_hot = np.zeros(self.n, dtype=np.float32)
        one_hot[self._state] = 1.0
        return one_hot

    def _info(self) -> dict[str, Any]:
        return {"state": self._state, "is_success": self._success}

    def _row(self) -> str:
        cells = ["."] * self.n + ["G"]
        fallen = self._episode == "over" and not self._success
        cells[self.n if self._success else self._state] = "x" if fallen else "A"
        return "".join(cells)
