"""Time contestants side by side, in turns, so that a slow moment of the machine hits them all."""

import timeit
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyperf

Contestant = Callable[[], Any]


class Ratio(NamedTuple):
    """
    How many times the time of another contestant is that of ours.

    :param median: over the rounds
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

    :param title: what was timed
    :param seconds: from names to seconds a call, one for each round
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
        :param title: what is timed
        :param contestants: from names to what to call
        :param rounds: how many times each has its turn
        :param seconds: how long a turn lasts, about
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
            # Nobody always comes after the same one
            for name in np.roll(names, turn) if turn % 2 else np.roll(names[::-1], turn):
                times[str(name)].append(timers[name].timeit(loops[name]) / loops[name])
        return cls(title, times)

    def median(self, name: str) -> float:
        """
        :param name: of a contestant
        :return: its median seconds a call
        """
        return float(np.median(self.seconds[name]))

    def ratio(self, name: str, to: str) -> Ratio:
        """
        :param name: of a contestant
        :param to: the one that counts as 1
        :return: how many times as long the first one takes, compared within each round
        """
        ratios = np.divide(self.seconds[name], self.seconds[to])
        low, median, high = np.percentile(ratios, [25, 50, 75])
        return Ratio(float(median), float(low), float(high))

    def benchmarks(self) -> list[pyperf.Benchmark]:
        """:return: the times in pyperf's form, for its files and tools"""
        return [
            pyperf.Benchmark(
                [
                    pyperf.Run(
                        times,
                        metadata={"name": f"{self.title}: {name}", "unit": "second"},
                        # It would hold the folders and the name of this machine
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
