"""
Run Stable-Baselines3's or sb3-contrib's tests of their algorithms against ours.

Usage, with a checkout of SB3 (or of sb3-contrib) of the installed version, or near it::

    git clone --branch v2.9.2 https://github.com/DLR-RM/stable-baselines3 somewhere
    python scripts/run_sb3_tests.py somewhere
    python scripts/run_sb3_tests.py somewhere --algorithms SAC TD3

The tests are copied from the checkout, so that they test the installed package. For each algorithm
they run twice: as they are, then with the algorithm (``stable_baselines3.DQN`` and
``stable_baselines3.dqn.DQN``, say) replaced by ours before any test is imported. Test files that
can't be imported (SB3's own extras are needed for some) are left out and named. The exit status is
1 if a test passes for theirs but not for ours, and 2 if there was nothing to compare.
"""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

import sb3_per

#: Packages with the modules of the algorithm, by its name
ORIGINS = {
    "DQN": ("stable_baselines3", "stable_baselines3.dqn"),
    "SAC": ("stable_baselines3", "stable_baselines3.sac"),
    "TD3": ("stable_baselines3", "stable_baselines3.td3"),
    "DDPG": ("stable_baselines3", "stable_baselines3.ddpg"),
    "QRDQN": ("sb3_contrib", "sb3_contrib.qrdqn"),
    "TQC": ("sb3_contrib", "sb3_contrib.tqc"),
}

#: What is another way here on purpose, by a part of the test's name
BY_DESIGN = {
    "test_tensorboard.py::test_tensorboard": "the folder of the log has the name of our algorithm",
}

#: Environment variables for the plugin, which runs in another process
REPORT_VARIABLE = "SB3_TESTS_REPORT"
ALGORITHM_VARIABLE = "SB3_TESTS_ALGORITHM"

OUTCOMES = ("passed", "failed", "skipped")


class Report(NamedTuple):
    """
    Outcome of one run of the tests.

    :param outcomes: outcomes by the id of the test for the original
    :param reasons: reasons of the failures, by the id of the test
    :param left_out: reasons by the names of the files that can't be imported
    """

    outcomes: dict[str, str]
    reasons: dict[str, str]
    left_out: dict[str, str]


class Reporter:
    """
    Plugin of pytest that writes a report.

    :param path: path of the file to write
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = Report({}, {}, {})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that can't be imported."""
        if report.failed:
            self.report.left_out[report.nodeid] = _reason(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome of a test; a failure in its setup or teardown counts, too."""
        name = report.nodeid
        for original in ORIGINS:
            name = name.replace(f"PER{original}", original)
        if report.failed:
            self.report.outcomes[name] = "failed"
            self.report.reasons[name] = _reason(report.longreprtext)
        elif report.when == "call" or report.skipped:
            self.report.outcomes.setdefault(name, report.outcome)

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        self.path.write_text(json.dumps(self.report._asdict()), encoding="utf-8")


def _reason(text: str) -> str:
    """
    :param text: exception printed by pytest
    :return: its first line that names an error, otherwise its last line
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    errors = [line[2:].strip() for line in lines if line.startswith("E ")]
    return errors[0] if errors else lines[-1]


def pytest_configure(config: pytest.Config) -> None:
    """Replace the original; pytest calls this before it imports any test."""
    name = os.environ[ALGORITHM_VARIABLE]
    original = name.removeprefix("PER")
    if name != original:
        for module in ORIGINS[original]:
            setattr(importlib.import_module(module), original, getattr(sb3_per, name))
    config.pluginmanager.register(Reporter(Path(os.environ[REPORT_VARIABLE])))


def run_tests(tests: Path, algorithm: str, keyword: str) -> Report:
    """
    :param tests: folder with a copy of the tests
    :param algorithm: name of the original or of ours
    :param keyword: expression that selects tests, as in ``pytest -k``
    :return: outcome of the tests
    :raises RuntimeError: if pytest ended without a report
    """
    folder = tests.parent
    # A separate configuration, so that none from a parent folder is used
    config = folder / "pytest.ini"
    config.write_text("[pytest]\nmarkers =\n  expensive\n  slow\n", encoding="utf-8")
    path = folder / f"{algorithm}.json"
    environment = {
        **os.environ,
        # For the plugin, this very file; and nothing else, above all no checkout of SB3
        "PYTHONPATH": str(Path(__file__).resolve().parent),
        ALGORITHM_VARIABLE: algorithm,
        REPORT_VARIABLE: str(path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", Path(__file__).stem, "-c", str(config), "--continue-on-collection-errors"]
    subprocess.run(
        [*command, "-k", keyword, str(tests)],
        cwd=folder,
        env=environment,
        check=False,
    )
    if not path.exists():
        raise RuntimeError(f"pytest gave no report of the tests with {algorithm}")
    return Report(**json.loads(path.read_text(encoding="utf-8")))


def print_comparison(name: str, theirs: Report, ours: Report) -> list[str]:
    """
    :param name: name of the original algorithm
    :param theirs: outcome of the unchanged tests
    :param ours: outcome of the same tests with the algorithm replaced
    :return: the tests that pass for theirs but not for ours, those of :data:`BY_DESIGN` left out
    """
    counts = [Counter(report.outcomes.values()) for report in (theirs, ours)]
    print(f"\n{'tests':<10}{name:>10}{'PER' + name:>10}")
    for outcome in OUTCOMES:
        print(f"{outcome:<10}{counts[0][outcome]:>10}{counts[1][outcome]:>10}")
    for file, reason in {**theirs.left_out, **ours.left_out}.items():
        print(f"left out, can't be imported: {file} ({reason})")
    for test, outcome in theirs.outcomes.items():
        if outcome == "failed":
            print(f"fails for {name} itself: {test} ({theirs.reasons[test]})")
    lost = [
        test
        for test, outcome in theirs.outcomes.items()
        if outcome == "passed" and ours.outcomes.get(test) != "passed"
    ]
    for test in list(lost):
        reasons = [reason for part, reason in BY_DESIGN.items() if part in test]
        if reasons:
            lost.remove(test)
            print(f"another way on purpose: {test} ({reasons[0]})")
    print(f"pass for {name} but not for PER{name}: {len(lost)}")
    for test in lost:
        print(f"  {test} ({ours.reasons.get(test, ours.outcomes.get(test, 'not run'))})")
    return lost


def main() -> int:
    """
    Run the tests twice and compare.

    :return: the exit status
    """
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkout", type=Path, help="folder of a checkout of Stable-Baselines3 or sb3-contrib"
    )
    parser.add_argument(
        "--algorithms", nargs="+", metavar="NAME", help="SB3's names (default: all of the checkout)"
    )
    parser.add_argument(
        "-k", metavar="EXPRESSION", help="which tests, as in pytest (default: the algorithm's name)"
    )
    arguments = parser.parse_args()
    source = arguments.checkout / "tests"
    if not source.is_dir():
        parser.error(f"{source} is no folder")

    package = next(
        (package for package, _ in ORIGINS.values() if (arguments.checkout / package).is_dir()),
        None,
    )
    if package is None:
        parser.error(f"{arguments.checkout} is no checkout of SB3 or sb3-contrib")
    there = [name for name, origin in ORIGINS.items() if origin[0] == package]
    names = arguments.algorithms or there
    if unknown := set(names) - set(there):
        parser.error(f"of {package} there are {', '.join(there)}, not {', '.join(unknown)}")
    version = arguments.checkout / package / "version.txt"
    origin = version.read_text(encoding="utf-8").strip() if version.exists() else "unknown"
    installed = importlib.import_module(package).__version__
    status = 0
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            tests = Path(shutil.copytree(source, Path(folder) / "tests"))
            reports = []
            for algorithm in (name, f"PER{name}"):
                print(f"--- {algorithm} ---", flush=True)
                reports.append(run_tests(tests, algorithm, arguments.k or name))
        print(f"\n{package} {installed}, tests of version {origin}")
        lost = print_comparison(name, *reports)
        if lost:
            status = 1
        if "passed" not in reports[0].outcomes.values():
            print(f"no test passed for {name}: there is nothing to compare")
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main())
