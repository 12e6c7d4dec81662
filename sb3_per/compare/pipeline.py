"""Runs of the commands, and their exit codes."""

import functools
import io
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

from tqdm import tqdm

from sb3_per.compare.backends import PlannedRun, make_all
from sb3_per.compare.settings import SettingsError
from sb3_per.compare.store import RunFolder, writing

__all__ = ["FAILED", "REFUSED", "STOPPED", "command", "make_missing"]

#: Exit codes: some runs failed; the settings can't be used; stopped by Ctrl-C
FAILED, REFUSED, STOPPED = 1, 2, 130

R = TypeVar("R", bound=PlannedRun)
S = TypeVar("S")
T = TypeVar("T")


def command(name: str) -> Callable[[Callable[[S], int]], Callable[[S], int]]:
    """
    Decorator for the function of a command, which takes settings and returns an exit code:
    settings that can't be used end it with one line and exit code 2, Ctrl-C and SIGTERM with
    exit code 130.

    :param name: name of the command, for messages
    :return: the decorator
    """

    def decorate(function: Callable[[S], int]) -> Callable[[S], int]:
        @functools.wraps(function)
        def call(settings: S) -> int:
            try:
                with _printing_anything(), _signals_that_interrupt():
                    return function(settings)
            except SettingsError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return REFUSED
            except KeyboardInterrupt:
                print(f"\n{name}: stopped", file=sys.stderr)
                return STOPPED

        return call

    return decorate


@contextmanager
def _printing_anything() -> Iterator[None]:
    """Characters that the standard output can't encode, as in paths, are printed as numbers."""
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper) or out.errors != "strict":
        yield
        return
    out.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        out.reconfigure(errors="strict")


@contextmanager
def _signals_that_interrupt() -> Iterator[None]:
    """SIGTERM and a closed terminal end the process in the same way as Ctrl-C."""
    changed = []
    # Signals can be handled in the main thread alone
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            # Not where it is ignored, as under nohup
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.default_int_handler)
                changed.append(number)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def make_missing(
    folder: RunFolder[R, T],
    runs: Sequence[R],
    make: Callable[[R], T],
    report: Callable[[], object],
    *,
    jobs: int,
    backend: str = "loky",
    address: str | None = None,
) -> int:
    """
    Make the runs that the folder does not have, keep each when it is finished, then report.

    :param folder: folder of the results, locked by the caller
    :param runs: all runs, including finished ones
    :param make: function that makes one run, in a separate process
    :param report: function that is called at the end, if any of the runs is finished
    :param jobs: number of parallel runs; -1 for the number of cores
    :param backend: joblib backend
    :param address: address of the Ray or Dask cluster; None starts one on this machine
    :return: exit code: 0, 1 if runs failed, 130 if stopped
    """
    to_do = [run for run in runs if not folder.has(run)]
    tasks, agents, seeds = (len(set(values)) for values in zip(*(r.key for r in runs), strict=True))
    print(
        f"{len(runs)} runs: {tasks} task(s), {agents} agent(s), {seeds} seed(s); "
        f"{len(runs) - len(to_do)} finished before. Results go to {folder.folder}."
    )
    n_failed = 0
    try:
        n_failed = _make(folder, to_do, make, len(runs), jobs, backend, address)
    except KeyboardInterrupt:
        _tell_of_end("Stopped", folder, runs)
        return STOPPED
    except SettingsError:
        raise
    except Exception:
        # Not a run, which would have been an outcome: a worker was killed, or the cluster is gone
        traceback.print_exc()
        _tell_of_end("The workers are gone", folder, runs)
        return FAILED
    folder.merge_tables()
    if n_failed < len(runs):
        with writing(folder.folder):
            report()
    if n_failed:
        print(
            f"{n_failed} of {len(runs)} runs failed: {folder.folder / 'failures'} says why. The "
            "same command tries them again.",
            file=sys.stderr,
        )
    return FAILED if n_failed else 0


def _make(
    folder: RunFolder[R, T],
    to_do: Sequence[R],
    make: Callable[[R], T],
    n_runs: int,
    jobs: int,
    backend: str,
    address: str | None,
) -> int:
    """
    :param to_do: runs that are missing
    :param n_runs: number of all runs
    :return: number of runs that failed
    """
    if not to_do:
        return 0
    n_failed = 0
    with (
        tqdm(total=n_runs, initial=n_runs - len(to_do), unit="run") as bar,
        closing(make_all(to_do, make, backend, min(jobs, len(to_do)), address)) as outcomes,
    ):
        for outcome in outcomes:
            if outcome.result is None:
                n_failed += 1
                path = folder.write_failure(outcome.run, outcome.traceback)
                last = outcome.traceback.strip().splitlines()[-1]
                task, agent, seed = outcome.run.key
                bar.write(f"failed: {task}, {agent}, seed {seed}: {last} ({path})")
            else:
                folder.write(outcome.run, outcome.result)
            bar.update()
    return n_failed


def _tell_of_end(why: str, folder: RunFolder[R, T], runs: Sequence[R]) -> None:
    folder.merge_tables()
    n_finished = sum(folder.has(run) for run in runs)
    print(
        f"\n{why}: {n_finished} of {len(runs)} runs are finished and kept. The same command makes "
        "the others.",
        file=sys.stderr,
    )
