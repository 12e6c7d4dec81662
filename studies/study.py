"""Base class of the studies, and the table of their runs."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pandas as pd

from sb3_per.compare.settings import SettingsError
from sb3_per.compare.store import RunFolder, writing

__all__ = ["KEY", "Row", "RunTable", "Study", "StudyRun", "read_runs"]

#: Columns of ``runs.csv`` that identify a run; the measures of the study follow them
KEY = ("task", "agent", "seed")

#: Measures of a run, by column
Row = dict[str, Any]


class StudyRun(NamedTuple):
    """
    One agent on one task.

    :param key: task, agent and seed
    :param cost: roughly proportional to the time that the run takes
    :param details: description of the run, specific to the study
    """

    key: tuple[str, str, int]
    cost: float
    details: Any


@dataclass(frozen=True)
class Study(ABC):
    """
    Runs of agents on tasks, with their measures and a report.

    :param tasks: names of the tasks
    :param agents: names of the agents
    :param base: agent that the others are compared with; None if there is no comparison
    :param n_seeds: number of runs of each agent on each task, with seeds from 0 on
    """

    #: Columns of the measures in ``runs.csv``
    measures: ClassVar[tuple[str, ...]]

    tasks: Sequence[str]
    agents: Sequence[str]
    base: str | None = None
    n_seeds: int = 20

    @abstractmethod
    def agent_name(self, text: str) -> str:
        """
        :param text: agent on the command line
        :return: its name in ``runs.csv``
        :raises SettingsError: if there is no such agent
        """

    @abstractmethod
    def run_of(self, task: str, agent: str, seed: int) -> StudyRun:
        """
        :param task: name of a task
        :param agent: name of an agent
        :param seed: seed of the run
        :return: the run
        :raises SettingsError: if there is no such task, or the agent does not fit it
        """

    @staticmethod
    @abstractmethod
    def make(run: StudyRun) -> Row:
        """
        :param run: planned run
        :return: its measures
        """

    @abstractmethod
    def report(self, folder: Path, agents: Sequence[str], base: str | None) -> list[str]:
        """
        Write ``summary.md`` and pictures.

        :param folder: folder with ``runs.csv``
        :param agents: names of agents, in the order to show them; others with runs follow them
        :param base: agent that the others are compared with
        :return: the lines of the summary
        """


class RunTable(RunFolder[StudyRun, Row]):
    """A folder whose ``runs.csv`` has one line for each finished run."""

    @property
    def path(self) -> Path:
        """Path of the table."""
        return self.folder / "runs.csv"

    @cached_property
    def _finished(self) -> set[tuple[str, str, int]]:
        if not self.path.exists():
            return set()
        text = self.path.read_text(encoding="utf-8", errors="replace")
        end = text.rfind("\n") + 1
        if end < len(text):
            # Stopped in the middle of a line: the run is made again
            self.write_text(self.path.name, text[:end])
        if not end:
            return set()
        return set(read_runs(self.path)[list(KEY)].itertuples(index=False, name=None))

    def has(self, run: StudyRun) -> bool:
        """
        :param run: planned run
        :return: whether the table has it
        :raises SettingsError: if the table can't be read
        """
        return run.key in self._finished

    def write(self, run: StudyRun, result: Row) -> None:
        """
        :param run: finished run
        :param result: its measures
        """
        row = {**dict(zip(KEY, run.key, strict=True)), **result}
        with writing(self.path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerow(row)
        self._finished.add(run.key)
        self._failure_file(run).unlink(missing_ok=True)


def read_runs(path: Path) -> pd.DataFrame:
    """
    :param path: ``runs.csv`` of a study
    :return: its rows by seed, otherwise in the order of the file
    :raises SettingsError: if it is not such a table
    """
    try:
        runs = pd.read_csv(path).astype({"task": str, "agent": str, "seed": int})
    except (OSError, ValueError, KeyError) as error:
        raise SettingsError(f"can't read {path}: {error}") from None
    return runs.sort_values("seed", kind="stable", ignore_index=True)
