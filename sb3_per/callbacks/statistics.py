"""A callback that logs statistics of the replay buffer and of the replayed transitions."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import TensorBoardOutputFormat

from sb3_per.buffers.draws import DrawRecord
from sb3_per.buffers.replay import PrioritizedReplayBuffer, check_size
from sb3_per.callbacks.td_errors import drawable_indices, replay_buffer_of

__all__ = ["PERLoggerCallback"]

#: Logged quantiles of the priorities, in percent
QUANTILES = (5, 25, 50, 75, 95)

#: All formats of SB3's logger except TensorBoard
NO_HISTOGRAMS = ("stdout", "log", "json", "csv")


class PERLoggerCallback(BaseCallback):
    """
    Log statistics of the replay buffer and of the replayed transitions at an interval.

    Each time, the values go to the model's logger together with SB3's own (reward, length, frames
    per second), and are written at once, in all of its formats. Works with every off-policy
    algorithm of SB3. Without a prioritized buffer the keys below are left out, since SB3's buffers
    don't report their draws; ``PERDQN(alpha=0, beta=0, beta_final=0)`` is uniform replay with all
    of them.

    ================================== ========================================================
    ``per/priority_min``               smallest priority that can be drawn
    ``per/priority_quantile_05``       quantiles of the priorities that can be drawn: 5, 25, 50,
    to ``per/priority_quantile_95``    75 and 95 %
    ``per/share_never_replayed``       share of the transitions that can be drawn that were in no
                                       batch since they were stored
    ``per/replay_age_mean``            mean age in environment steps of the transitions replayed
                                       since the last time
    ``per/priority_histogram``         TensorBoard: priorities that can be drawn
    ``per/replay_age_histogram``       TensorBoard: ages, of the latest 32,768 draws at most
    ``per/replay_count_histogram``     TensorBoard: number of times each was replayed
    ================================== ========================================================

    The buffer counts its draws from the first training with this callback on: transitions replayed
    only before then count as never replayed. Every batch drawn by ``sample`` counts, also one drawn
    outside of training.

    :param log_freq: number of environment steps (over all environments) between two logs
    :param histograms: whether to write histograms, too, if TensorBoard is among the formats
    :param verbose: as in SB3; has no effect
    :raises ValueError: if ``log_freq`` is below 1, or, when training starts, the algorithm has no
        replay buffer
    """

    def __init__(self, log_freq: int = 1000, histograms: bool = True, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.log_freq = check_size("log_freq", log_freq)
        self.histograms = histograms
        self._next_time = 0
        self._draws: DrawRecord | None = None
        # Totals of the record at the last log
        self._n_draws = self._sum_of_ages = 0

    # Not in `_on_training_start`, which SB3 doesn't call for every callback inside another
    def _init_callback(self) -> None:
        self._set_next_time(self.model.num_timesteps)
        self._follow_draws()

    def _set_next_time(self, timesteps: int) -> None:
        self._next_time = (timesteps // self.log_freq + 1) * self.log_freq

    def _follow_draws(self) -> None:
        """Let the current buffer of the model count its draws."""
        buffer = replay_buffer_of(self.model)
        draws = buffer.record_draws() if isinstance(buffer, PrioritizedReplayBuffer) else None
        if draws is not self._draws:
            self._draws = draws
            self._start_interval()

    def _start_interval(self) -> None:
        if self._draws is not None:
            self._n_draws, self._sum_of_ages = self._draws.n_draws, self._draws.sum_of_ages

    def _on_step(self) -> bool:
        # Each time, because another buffer may have been loaded meanwhile
        self._follow_draws()
        if self.num_timesteps >= self._next_time:
            self._set_next_time(self.num_timesteps)
            buffer = replay_buffer_of(self.model)
            if len(indices := drawable_indices(buffer)):
                if isinstance(buffer, PrioritizedReplayBuffer):
                    self._record_statistics(buffer, indices)
                self.model.dump_logs()
        return True

    def _record_statistics(
        self, buffer: PrioritizedReplayBuffer, indices: npt.NDArray[np.int64]
    ) -> None:
        """
        :param buffer: replay buffer of the model
        :param indices: its transitions that can be drawn, at least one
        """
        histograms: dict[str, npt.NDArray[Any]] = {}
        priorities = buffer.priorities
        priorities = priorities[priorities > 0.0]
        if len(priorities):
            self.logger.record("per/priority_min", float(priorities.min()))
            quantiles = np.quantile(priorities, np.divide(QUANTILES, 100))
            for percent, quantile in zip(QUANTILES, quantiles.tolist(), strict=True):
                self.logger.record(f"per/priority_quantile_{percent:02}", quantile)
            histograms["per/priority_histogram"] = priorities

        draws = buffer.record_draws()
        counts = draws.counts[indices]
        self.logger.record("per/share_never_replayed", np.count_nonzero(counts == 0) / len(counts))
        histograms["per/replay_count_histogram"] = counts
        n_draws = draws.n_draws - self._n_draws
        if n_draws:
            mean_age = (draws.sum_of_ages - self._sum_of_ages) / n_draws
            self.logger.record("per/replay_age_mean", mean_age)
            histograms["per/replay_age_histogram"] = draws.latest_ages(n_draws)
        self._start_interval()

        formats = self.logger.output_formats
        if self.histograms and any(isinstance(form, TensorBoardOutputFormat) for form in formats):
            for key, values in histograms.items():
                self.logger.record(key, th.as_tensor(values), exclude=NO_HISTOGRAMS)
