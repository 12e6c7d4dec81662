"""Folders of runs, and that of a comparison: each file is written as a whole or not."""

import json
import os
import re
import shutil
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any, Generic, TypeVar

import pandas as pd

from sb3_per.compare.backends import PlannedRun
from sb3_per.compare.settings import SettingsError
from sb3_per.compare.training import TABLES, Run, Tables

__all__ = ["RunFolder", "Store", "file_name", "package_versions"]

R = TypeVar("R", bound=PlannedRun)
T = TypeVar("T")

#: Raised when a folder of an older version could no longer be read
FORMAT = 1

#: Characters that the name of a file keeps of that of an environment or an agent
LONGEST_NAME = 100

PACKAGES = (
    "sb3-per",
    "stable-baselines3",
    "sb3-contrib",
    "gymnasium",
    "torch",
    "numpy",
    "numba",
    "scipy",
    "pandas",
    "joblib",
)


def package_versions() -> dict[str, str]:
    """:return: Python and the installed packages that the numbers depend on"""
    versions = {"python": python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


@dataclass(frozen=True)
class RunFolder(ABC, Generic[R, T]):
    """
    A folder that keeps the results of runs, and the tracebacks of those that failed.

    :param folder: the folder
    """

    folder: Path

    @abstractmethod
    def has(self, run: R) -> bool:
        """
        :param run: planned run
        :return: whether it is finished
        """

    @abstractmethod
    def write(self, run: R, result: T) -> None:
        """
        Keep a finished run, and forget that it failed before.

        :param run: finished run
        :param result: its result
        """

    def merge_tables(self) -> None:
        """Bring the results of all finished runs together, where they were written apart."""

    def write_failure(self, run: R, traceback: str) -> Path:
        """
        :param run: run that failed
        :param traceback: what happened
        :return: file that keeps it
        """
        path = self._failure_file(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback, encoding="utf-8")
        return path

    def failures(self) -> list[str]:
        """:return: names of the files about runs that failed and were not repeated since"""
        return sorted(path.name for path in (self.folder / "failures").glob("*.txt"))

    def _failure_file(self, run: R) -> Path:
        task, agent, seed = run.key
        name = f"{file_name(task)}--{file_name(agent)}--seed-{seed}.txt"
        return self.folder / "failures" / name

    def write_text(self, name: str, text: str) -> None:
        """
        :param name: name of the file in the folder
        :param text: its content
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f".{name}.unfinished"
        path.write_text(text, encoding="utf-8")
        os.replace(path, self.folder / name)


class Store(RunFolder[Run, Tables]):
    """
    Reads and writes the folder of one comparison.

    ======================================== ==================================================
    ``settings.json``                        what was asked for, and package versions
    ``episodes.parquet`` and four others     the tables, of all runs
    ``summary.csv``                          the measures
    ``pictures/``, ``report.html``           what ``sb3-per plot`` makes of the tables
    ``runs/ENV/AGENT/seed-N/``               the tables of one finished run, and ``run.json``
    ``failures/``                            tracebacks of runs that failed
    ======================================== ==================================================
    """

    # Settings

    def settings(self) -> dict[str, Any]:
        """
        :return: those of the comparison in the folder
        :raises SettingsError: if there is none
        """
        path = self.folder / "settings.json"
        try:
            settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            raise SettingsError(f"{self.folder} has no comparison: {path} is missing") from None
        except ValueError as error:
            raise SettingsError(f"can't read {path}: {error}") from None
        if settings.get("format") != FORMAT:
            raise SettingsError(
                f"{path} has the format {settings.get('format')!r}, this version reads {FORMAT}"
            )
        return settings

    def agree_on(self, settings: dict[str, Any]) -> dict[str, Any]:
        """
        Write down the settings, or add to those that are there: more environments, agents and
        seeds. What decides the numbers of a run must be the same.

        :param settings: ``environments`` (id to hyperparameters), ``agents``, ``seeds``, ``run``
            (what all runs have in common), ``analysis``, ``versions``
        :return: the settings of all that is in the folder from now on
        :raises SettingsError: if some differ, with their names
        """
        if not (self.folder / "settings.json").exists():
            self._refuse_foreign_folder()
            self._write_json("settings.json", {"format": FORMAT, **settings})
            return self.settings()
        there = self.settings()
        differences = [
            *_differences("run", there["run"], settings["run"]),
            *(
                difference
                for env_id in settings["environments"]
                if env_id in there["environments"]
                for difference in _differences(
                    env_id, there["environments"][env_id], settings["environments"][env_id]
                )
            ),
        ]
        if differences:
            raise SettingsError(
                f"{self.folder} has runs with other settings: {'; '.join(differences)}. Choose "
                "another --output, or the settings of before."
            )
        merged = {
            **there,
            **settings,
            "environments": {**there["environments"], **settings["environments"]},
            "agents": list(dict.fromkeys([*there["agents"], *settings["agents"]])),
            "seeds": sorted({*there["seeds"], *settings["seeds"]}),
            "analysis": {
                **settings["analysis"],
                "thresholds": {
                    **there["analysis"]["thresholds"],
                    **settings["analysis"]["thresholds"],
                },
            },
        }
        self._write_json("settings.json", merged)
        return self.settings()

    def _refuse_foreign_folder(self) -> None:
        if self.folder.is_file():
            raise SettingsError(f"--output {self.folder} is a file")
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise SettingsError(
                f"--output {self.folder} has other files than those of a comparison: choose an "
                "empty or a new folder"
            )

    # Runs

    def run_folder(self, run: Run) -> Path:
        """
        :param run: of the comparison
        :return: where its tables go
        """
        folder = self.folder / "runs" / file_name(run.env_id) / file_name(run.agent)
        return folder / f"seed-{run.seed}"

    def has(self, run: Run) -> bool:
        """
        :param run: of the comparison
        :return: whether it is finished
        """
        return self.run_folder(run).is_dir()

    def write(self, run: Run, result: Tables) -> None:
        """
        Keep a finished run. Its folder gets its name when it is complete.

        :param run: of the comparison
        :param result: its tables
        """
        place = self.run_folder(run)
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=place.parent))
        try:
            for name in TABLES:
                result[name].to_parquet(unfinished / f"{name}.parquet", index=False)
            env_id, agent, seed = run.key
            about = {"env": env_id, "agent": agent, "seed": seed, "versions": package_versions()}
            (unfinished / "run.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
            # mkdtemp makes it readable for nobody else
            unfinished.chmod(0o755)
            unfinished.rename(place)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._failure_file(run).unlink(missing_ok=True)

    # Tables

    def merge_tables(self) -> None:
        """Write the tables of all finished runs, one file a kind, by environment, agent, seed."""
        settings = self.settings()
        ranks = [list(settings["environments"]), settings["agents"], sorted(settings["seeds"])]

        def order(about: Mapping[str, Any]) -> list[int]:
            values = zip(ranks, (about[key] for key in ("env", "agent", "seed")), strict=True)
            return [rank.index(value) for rank, value in values]

        finished = sorted(self._finished(), key=lambda entry: order(entry[1]))
        for name in TABLES:
            parts = [pd.read_parquet(folder / f"{name}.parquet") for folder, _ in finished]
            parts = [part for part in parts if len(part)] or parts[:1]
            if parts:
                self._write_table(name, pd.concat(parts, ignore_index=True))

    def _finished(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for path in self.folder.glob("runs/*/*/seed-*/run.json"):
            yield path.parent, json.loads(path.read_text(encoding="utf-8"))

    def read_tables(self) -> Tables:
        """
        :return: the tables by name
        :raises SettingsError: if there are none yet
        """
        missing = [name for name in TABLES if not (self.folder / f"{name}.parquet").is_file()]
        if missing:
            raise SettingsError(
                f"{self.folder} has no {missing[0]}.parquet: no run of the comparison is finished"
            )
        return {name: pd.read_parquet(self.folder / f"{name}.parquet") for name in TABLES}

    def _write_table(self, name: str, table: pd.DataFrame) -> None:
        path = self.folder / f".{name}.unfinished"
        table.to_parquet(path, index=False)
        os.replace(path, self.folder / f"{name}.parquet")

    def _write_json(self, name: str, content: Any) -> None:
        self.write_text(name, json.dumps(content, indent=2) + "\n")


def file_name(name: str) -> str:
    """
    :param name: of an environment or an agent
    :return: one for files, another for each name. A plus stands for a slash, since no id of
        Gymnasium has one; where other characters had to go, a checksum keeps names apart.
    """
    wanted = name.replace("/", "+")
    plain = re.sub(r"[^A-Za-z0-9._=+-]+", "-", wanted).strip("-.")[:LONGEST_NAME]
    if plain == wanted and "+" not in name:
        return plain
    return f"{plain}-{zlib.crc32(name.encode()):08x}"


def _differences(where: str, there: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    # Through JSON, which has no tuples
    there, now = json.loads(json.dumps(there)), json.loads(json.dumps(now))
    return [
        f"{where}: {key} {there.get(key, 'not given')!r} there, {now.get(key, 'not given')!r} now"
        for key in [*there, *(key for key in now if key not in there)]
        if there.get(key) != now.get(key)
    ]
