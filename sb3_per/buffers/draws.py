"""A record of the draws from a replay buffer."""

import numpy as np
import numpy.typing as npt

from sb3_per.buffers.kernels import note_draws

__all__ = ["DrawRecord"]

#: Number of latest draws whose ages are kept
N_LATEST = 32_768

IntArray = npt.NDArray[np.int64]


class DrawRecord:
    """
    Number of draws of each stored transition, and its age at each draw.

    A buffer with a record calls :meth:`note` for each batch that it draws and :meth:`forget` for
    each row that it stores. The totals only ever grow: the draws between two moments are the
    difference of their totals.

    :param n_rows: number of rows in the buffer, one for each step of all environments
    :param n_envs: number of transitions in each row
    """

    def __init__(self, n_rows: int, n_envs: int) -> None:
        self.n_rows = n_rows
        self.n_envs = n_envs
        #: Number of draws of each transition since it was stored or since counting began, by
        #: ``row * n_envs + env``
        self.counts: npt.NDArray[np.int32] = np.zeros(n_rows * n_envs, dtype=np.int32)
        # Number of draws, and sum of their ages
        self._totals: IntArray = np.zeros(2, dtype=np.int64)
        # Ages of the latest draws: draw i is at i % N_LATEST
        self._ages: IntArray = np.zeros(N_LATEST, dtype=np.int64)

    @property
    def n_draws(self) -> int:
        """Number of all draws; a batch of 32 counts as 32."""
        return int(self._totals[0])

    @property
    def sum_of_ages(self) -> int:
        """
        Sum of the ages of all draws. The age of a transition is the number of environment steps
        since it was stored, over all environments: 0 in the newest row.
        """
        return int(self._totals[1])

    def latest_ages(self, n: int) -> IntArray:
        """
        :param n: number of draws, at least 0
        :return: ages of the latest ``n`` draws, oldest draw first, or of those that are kept (at
            most 32,768), shape ``(n_kept,)``
        """
        n_kept = min(n, self.n_draws, N_LATEST)
        latest: IntArray = self._ages[(self.n_draws - n_kept + np.arange(n_kept)) % N_LATEST]
        return latest

    def note(self, indices: IntArray, pos: int) -> None:
        """
        Count the transitions of a batch.

        :param indices: drawn transitions, ``row * n_envs + env``, int64, shape ``(batch,)``
        :param pos: number of the row that the buffer writes next
        :raises IndexError: if an index is outside the buffer; nothing is counted then
        """
        faulty = note_draws(indices, pos, self.n_envs, self.counts, self._totals, self._ages)
        if faulty >= 0:
            raise IndexError(
                f"index {indices[faulty]} is outside the buffer of {len(self.counts)} transitions"
            )

    def forget(self, rows: int | slice) -> None:
        """
        Reset the counts of rows to 0, because other transitions are stored there from now on.

        :param rows: number of the row, or a slice of rows
        """
        self.counts.reshape(self.n_rows, self.n_envs)[rows] = 0
