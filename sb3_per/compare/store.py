"""Folders of runs, and that of a comparison: each file is written as a whole or not."""

import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any, Generic, TypeVar

import pandas as pd
from filelock import FileLock, Timeout

from sb3_per.compare.agents import parse_agent
from sb3_per.compare.backends import PlannedRun
from sb3_per.compare.settings import SettingsError
from sb3_per.compare.training import TABLES, Run, Tables

__all__ = ["RunFolder", "Store", "file_name", "package_versions", "writing"]

R = TypeVar("R", bound=PlannedRun)
T = TypeVar("T")

#: Version of the format, increased when a folder of an older version can no longer be read
FORMAT = 1

#: Form of ``settings.json``: types, and with ``{str: ...}`` and ``[...]`` those of all values
FORM: dict[str, Any] = {
    "environments": {str: {str: object}},
    "agents": [str],
    "seeds": [int],
    "run": {"eval_episodes": int, "snapshot_episodes": [int]},
    "analysis": {"window": int, "thresholds": {str: int | float | None}},
    "versions": {str: str},
}

#: Lock held by the command that works in a folder
LOCK = ".lock"

#: Files that a killed command may leave behind
LEFTOVERS = (".*.unfinished", "runs/*/*/.unfinished-*")

#: Largest number of characters of the name of an environment or an agent in the name of a file
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


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """
    :param folder: folder or file that is written inside the ``with`` block
    :raises SettingsError: if that fails, as in a folder without permission or on a full disk
    """
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        raise SettingsError(f"can't write {where}: {error.strerror or error}") from None


@dataclass(frozen=True)
class RunFolder(ABC, Generic[R, T]):
    """
    A folder that keeps the results of runs, and the tracebacks of those that failed.

    :param folder: the folder
    """

    folder: Path

    @contextmanager
    def lock(self) -> Iterator[None]:
        """
        Lock the folder for other commands inside the ``with`` block, and remove files left by a
        killed command. The operating system releases the lock of a killed process.

        :raises SettingsError: if another command is at work there, or the folder can't be written
        """
        lock = FileLock(self.folder / LOCK)
        with writing(self.folder):
            self.check_is_ours()
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise SettingsError(
                    f"another command is at work in {self.folder}: wait for its end, or choose "
                    "another --output"
                ) from None
        try:
            with writing(self.folder):
                for pattern in LEFTOVERS:
                    for path in self.folder.glob(pattern):
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield
        finally:
            lock.release()

    def check_is_ours(self) -> None:
        """:raises SettingsError: if the folder has other files than results"""
        if self.folder.is_file():
            raise SettingsError(f"--output {self.folder} is a file")

    @abstractmethod
    def has(self, run: R) -> bool:
        """
        :param run: planned run
        :return: whether it is finished
        """

    @abstractmethod
    def write(self, run: R, result: T) -> None:
        """
        Store a finished run, and remove its record of an earlier failure.

        :param run: finished run
        :param result: its result
        """

    def merge_tables(self) -> None:
        """Merge the results of all finished runs, if they were written separately."""

    def write_failure(self, run: R, traceback: str) -> Path:
        """
        :param run: run that failed
        :param traceback: traceback of the failure
        :return: file that keeps it
        """
        path = self._failure_file(run)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(traceback, encoding="utf-8", errors="backslashreplace")
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
        with self.replacing(name) as path:
            path.write_text(text, encoding="utf-8")

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """
        :param name: name of a file in the folder
        :return: path to write to inside the ``with`` block; the file gets its name when it is
            complete
        :raises SettingsError: if it can't be written
        """
        path = self.folder / f".{name}.unfinished"
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                yield path
                os.replace(path, self.folder / name)
            finally:
                path.unlink(missing_ok=True)


class Store(RunFolder[Run, Tables]):
    """
    Reads and writes the folder of one comparison.

    ======================================== ==================================================
    ``settings.json``                        settings of the comparison, and package versions
    ``episodes.parquet`` and four others     the tables, of all runs
    ``summary.csv``                          the measures
    ``pictures/``, ``report.html``           output of ``sb3-per plot``, from the tables
    ``runs/ENV/AGENT/seed-N/``               the tables of one finished run, and ``run.json``
    ``failures/``                            tracebacks of runs that failed
    ======================================== ==================================================
    """

    # Settings

    def settings(self) -> dict[str, Any]:
        """
        :return: settings of the comparison in the folder
        :raises SettingsError: if there is no comparison, or they can't be read
        """
        path = self.folder / "settings.json"
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise SettingsError(f"{self.folder} has no comparison: {path} is missing") from None
        except (OSError, ValueError, RecursionError) as error:
            raise SettingsError(f"can't read {path}: {error}") from None
        found = settings.get("format") if isinstance(settings, dict) else None
        if found != FORMAT:
            raise SettingsError(f"{path} has the format {found!r}, this version reads {FORMAT}")
        problem = _misfit(settings, FORM)
        if problem:
            raise SettingsError(f"can't read {path}: {problem}")
        for agent in settings["agents"]:
            try:
                parse_agent(agent)
            except SettingsError as error:
                raise SettingsError(f"can't read {path}: {error}") from None
        return dict(settings)

    def agree_on(self, settings: dict[str, Any]) -> dict[str, Any]:
        """
        Write the settings, or add environments, agents and seeds to the existing ones. Settings
        that change the numbers of a run must be the same.

        :param settings: ``environments`` (id to hyperparameters), ``agents``, ``seeds``, ``run``
            (shared by all runs), ``analysis``, ``versions``
        :return: merged settings of the folder
        :raises SettingsError: if some differ, with their names
        """
        if not (self.folder / "settings.json").exists():
            self.check_is_ours()
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

    def check_is_ours(self) -> None:
        """:raises SettingsError: if the folder has files, and they are not those of a comparison"""
        super().check_is_ours()
        if not self.folder.is_dir() or (self.folder / "settings.json").exists():
            return
        # A command may have been killed before it wrote its settings
        others = {path.name for path in self.folder.iterdir()} - {LOCK, ".settings.json.unfinished"}
        if others:
            raise SettingsError(
                f"--output {self.folder} has other files than those of a comparison, as "
                f"{min(others)}: choose an empty or a new folder"
            )

    # Runs

    def run_folder(self, run: Run) -> Path:
        """
        :param run: run of the comparison
        :return: folder of its tables
        """
        return self._run_folder(*run.key)

    def _run_folder(self, env_id: str, agent: str, seed: int) -> Path:
        return self.folder / "runs" / file_name(env_id) / file_name(agent) / f"seed-{seed}"

    def has(self, run: Run) -> bool:
        """
        :param run: run of the comparison
        :return: whether it is finished
        """
        return self.run_folder(run).is_dir()

    def write(self, run: Run, result: Tables) -> None:
        """
        Store a finished run. Its folder gets its name when it is complete.

        :param run: run of the comparison
        :param result: its tables
        """
        place = self.run_folder(run)
        with writing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=place.parent))
            try:
                for name in TABLES:
                    result[name].to_parquet(unfinished / f"{name}.parquet", index=False)
                env_id, agent, seed = run.key
                about = {
                    "env": env_id,
                    "agent": agent,
                    "seed": seed,
                    "versions": package_versions(),
                    "checksums": {path.name: _checksum(path) for path in unfinished.iterdir()},
                }
                (unfinished / "run.json").write_text(json.dumps(about, indent=2), encoding="utf-8")
                # mkdtemp makes it readable only for the owner
                unfinished.chmod(0o755)
                unfinished.rename(place)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            self._failure_file(run).unlink(missing_ok=True)

    def remove_damaged(self) -> None:
        """
        Remove runs with a file that is missing or can't be read, so that they are made again, and
        name the file on the standard error stream.
        """
        for folder in sorted(self.folder.glob("runs/*/*/seed-*")):
            problem = self._damage(folder)
            if problem:
                print(f"{problem}: the run is made again when it is asked for", file=sys.stderr)
                with writing(folder):
                    shutil.rmtree(folder) if folder.is_dir() else folder.unlink()

    def _damage(self, folder: Path) -> str | None:
        """
        :param folder: folder of a run
        :return: description of the damage, with the name of the file; None if there is none
        """
        path = folder / "run.json"
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
            where = file_name(about["env"]), file_name(about["agent"]), f"seed-{about['seed']}"
            if where != folder.parts[-3:]:
                return f"{path} is of another run"
            for name in TABLES:
                path = folder / f"{name}.parquet"
                if _checksum(path) != about["checksums"][path.name]:
                    return f"{path} is damaged"
        except FileNotFoundError:
            return f"{path} is missing"
        except Exception as error:
            # Damaged files raise errors of all kinds
            return f"can't read {path}: {type(error).__name__}: {error}".splitlines()[0]
        return None

    # Tables

    def merge_tables(self) -> None:
        """
        Write the tables of all finished runs in the settings, one file per kind, by environment,
        agent, seed.
        """
        settings = self.settings()
        finished = [
            folder
            for env_id in settings["environments"]
            for agent in settings["agents"]
            for seed in sorted(settings["seeds"])
            if (folder := self._run_folder(env_id, agent, seed)).is_dir()
        ]
        for name in TABLES:
            parts = [pd.read_parquet(folder / f"{name}.parquet") for folder in finished]
            parts = [part for part in parts if len(part)] or parts[:1]
            if parts:
                with self.replacing(f"{name}.parquet") as path:
                    pd.concat(parts, ignore_index=True).to_parquet(path, index=False)

    def read_tables(self) -> Tables:
        """
        :return: the tables by name
        :raises SettingsError: if there are none yet, or one can't be read
        """
        tables = {}
        for name in TABLES:
            path = self.folder / f"{name}.parquet"
            try:
                tables[name] = pd.read_parquet(path)
            except FileNotFoundError:
                raise SettingsError(
                    f"{self.folder} has no {path.name}: no run of the comparison is finished"
                ) from None
            except Exception as error:
                raise SettingsError(
                    f"can't read {path}, which sb3-per compare writes again: {error}"
                ) from None
        return tables

    def _write_json(self, name: str, content: Any) -> None:
        self.write_text(name, json.dumps(content, indent=2) + "\n")


def _checksum(path: Path) -> int:
    return zlib.crc32(path.read_bytes())


def _misfit(value: Any, form: Any, where: str = "") -> str | None:
    """
    :param value: value read from a file
    :param form: form that it should have, as :data:`FORM`
    :param where: its place in the file
    :return: description of the first mismatch; None if there is none
    """
    kind = type(form) if isinstance(form, dict | list) else form
    if not isinstance(value, kind) or (isinstance(value, bool) and form is not object):
        return f"{where or 'the whole'} is {json.dumps(value)[:80]}"
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(form, list):
        parts = [(f"{where}[{n}]", part, form[0]) for n, part in enumerate(value)]
    elif isinstance(form, dict):
        its = dict.fromkeys(value, form[str]) if str in form else form
        missing = [key for key in its if key not in value]
        if missing:
            return f"{where or 'it'} has no {missing[0]!r}"
        parts = [(f"{where} {key}".strip(), value[key], its[key]) for key in its]
    problems = (_misfit(part, its_form, place) for place, part, its_form in parts)
    return next((problem for problem in problems if problem), None)


def file_name(name: str) -> str:
    """
    :param name: name of an environment or an agent
    :return: name for files, different for each name. A plus replaces a slash, since no id of
        Gymnasium contains one; if other characters are replaced, a checksum keeps names distinct.
    """
    wanted = name.replace("/", "+")
    plain = re.sub(r"[^A-Za-z0-9._=+-]+", "-", wanted).strip("-.")[:LONGEST_NAME]
    if plain == wanted and "+" not in name:
        return plain
    return f"{plain}-{zlib.crc32(name.encode()):08x}"


def _differences(where: str, there: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    # By JSON, which has no tuples
    there, now = json.loads(json.dumps(there)), json.loads(json.dumps(now))
    return [
        f"{where}: {key} {there.get(key, 'not given')!r} there, {now.get(key, 'not given')!r} now"
        for key in [*there, *(key for key in now if key not in there)]
        if there.get(key) != now.get(key)
    ]
