"""Time contestants in turns, so that a slow moment of the machine affects all of them."""

import timeit
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyperf

Contestant = Callable[[], Any]


class Ratio(NamedTuple):
    """
    Ratio of the times of two contestants.

    :param median: median over the rounds
    :param low: first quartile
    :param high: third quartile
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


class Race:
    """
    Times of some contestants in the same rounds.

    :param title: title of the race
    :param seconds: seconds per call by the name of the contestant, one for each round
    """

    def __init__(self, title: str, seconds: dict[str, list[float]]) -> None:
        self.title = title
        self.seconds = seconds

    @classmethod
    def run(
        cls,
        title: str,
        contestants: Mapping[str, Contestant],
        rounds: int = 15,
        seconds: float = 0.05,
    ) -> "Race":
        """
        :param title: title of the race
        :param contestants: functions to call, by name
        :param rounds: number of turns of each contestant
        :param seconds: approximate length of a turn
        :return: all times
        """
        timers = {
            name: timeit.Timer(contestant, timer=pyperf.perf_counter)
            for name, contestant in contestants.items()
        }
        loops = {name: _loops_for(timer, seconds) for name, timer in timers.items()}
        times: dict[str, list[float]] = {name: [] for name in timers}
        names = list(timers)
        for turn in range(rounds):
            # Another order in each round, so that none always follows the same one
            for name in np.roll(names, turn) if turn % 2 else np.roll(names[::-1], turn):
                times[str(name)].append(timers[name].timeit(loops[name]) / loops[name])
        return cls(title, times)

    def median(self, name: str) -> float:
        """
        :param name: name of a contestant
        :return: its median seconds per call
        """
        return float(np.median(self.seconds[name]))

    def ratio(self, name: str, to: str) -> Ratio:
        """
        :param name: name of a contestant
        :param to: name of the contestant that counts as 1
        :return: ratio of their times, within each round
        """
        ratios = np.divide(self.seconds[name], self.seconds[to])
        low, median, high = np.percentile(ratios, [25, 50, 75])
        return Ratio(float(median), float(low), float(high))

    def benchmarks(self) -> list[pyperf.Benchmark]:
        """:return: the times in pyperf's format, for its files and tools"""
        return [
            pyperf.Benchmark(
                [
                    pyperf.Run(
                        times,
                        metadata={"name": f"{self.title}: {name}", "unit": "second"},
                        # It would contain the folders and the name of this machine
                        collect_metadata=False,
                    )
                ]
            )
            for name, times in self.seconds.items()
        ]


def _loops_for(timer: timeit.Timer, seconds: float) -> int:
    loops, spent = 1, timer.timeit(1)
    while spent < seconds / 4:
        loops *= 2
        spent = timer.timeit(loops)
    return max(1, round(loops * seconds / spent))
