"""Backends for runs: the cores of this machine, or a Ray or Dask cluster, by joblib."""

import importlib
import logging
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import joblib

from sb3_per.compare.settings import SettingsError

__all__ = ["Outcome", "PlannedRun", "make_all"]


class PlannedRun(Protocol):
    """Description of a run before it is made. It can be pickled."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Task, agent and seed, which identify a run in a folder."""

    @property
    def cost(self) -> float:
        """Roughly proportional to the time that the run takes."""


R = TypeVar("R", bound=PlannedRun)
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[R, T]):
    """
    Outcome of a run.

    :param run: the run
    :param result: its result; None if it failed
    :param traceback: traceback of the failure, empty if there was none
    """

    run: R
    result: T | None
    traceback: str = ""


def make_all(
    runs: Sequence[R], make: Callable[[R], T], backend: str, jobs: int, address: str | None
) -> Generator[Outcome[R, T], None, None]:
    """
    Make runs in parallel. A run that raises an error is an outcome like any other. Closing the
    iterator stops the runs that are not finished.

    :param runs: runs to make
    :param make: function that makes one run
    :param backend: joblib backend: ``"loky"``, ``"ray"`` or ``"dask"``
    :param jobs: number of parallel runs; -1 for the number of cores
    :param address: address of the cluster; None starts one on this machine
    :return: the outcomes, as they come
    """
    with _started(backend, jobs, address):
        # Few runs wait inside: those that are more than joblib's queue holds can't be given up
        # without a traceback (KeyError in a thread of its executor, joblib 1.6)
        parallel = joblib.Parallel(
            n_jobs=jobs, return_as="generator_unordered", batch_size=1, pre_dispatch="2*n_jobs"
        )
        # Longest first, so that no worker waits at the end
        ordered = sorted(runs, key=lambda run: -run.cost)
        with _interrupts_kept_from_workers():
            outcomes = parallel(joblib.delayed(_attempt)(run, make) for run in ordered)
        try:
            # Not `yield from`: closing would then start inside, with the warning
            for outcome in outcomes:  # noqa: UP028
                yield outcome
        finally:
            with warnings.catch_warnings():
                # The warning about stopped runs: they are stopped on purpose
                warnings.simplefilter("ignore", UserWarning)
                outcomes.close()


@contextmanager
def _interrupts_kept_from_workers() -> Iterator[None]:
    """
    Processes started inside the ``with`` block ignore Ctrl-C, which a terminal sends to all of
    them: they would print tracebacks. This process stops them. Ctrl-C is lost during the block,
    which is short.
    """
    # Signals can be handled in the main thread alone
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Children inherit this, as they do not inherit functions that handle a signal
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _attempt(run: R, make: Callable[[R], T]) -> Outcome[R, T]:
    try:
        return Outcome(run, make(run))
    except Exception:
        return Outcome(run, None, traceback.format_exc())


@contextmanager
def _started(backend: str, jobs: int, address: str | None) -> Iterator[None]:
    """
    :param backend: joblib backend
    :param jobs: number of parallel runs
    :param address: address of the cluster
    :return: context manager in which joblib uses that backend
    :raises SettingsError: if a dependency is missing
    """
    try:
        if backend == "ray":
            with _ray(jobs, address), joblib.parallel_config("ray"):
                yield
        elif backend == "dask":
            with _dask(jobs, address), joblib.parallel_config("dask"):
                yield
        else:
            with joblib.parallel_config(backend, inner_max_num_threads=1):
                yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("ray", "dask", "distributed"):
            raise SettingsError(
                f"--backend {backend} needs {error.name}: pip install 'sb3-per[{backend}]'"
            ) from None
        raise


@contextmanager
def _ray(jobs: int, address: str | None) -> Iterator[None]:
    # Neither Ray nor Dask is installed by default
    ray: Any = importlib.import_module("ray")
    importlib.import_module("ray.util.joblib").register_ray()
    ray_backend: Any = importlib.import_module("ray.util.joblib.ray_backend").RayBackend
    # joblib returns results as they are ready only if the backend says that it can. Ray's backend
    # inherits the answer of multiprocessing, while its pool reports each result when it is ready.
    as_they_come = type("RayBackend", (ray_backend,), {"supports_return_generator": True})
    joblib.register_parallel_backend("ray", as_they_come)
    is_ours = not ray.is_initialized()
    if is_ours:
        options: dict[str, Any] = {"address": address or os.environ.get("RAY_ADDRESS")}
        if not options["address"]:
            # A new one, even if another one is running
            options = {"address": "local", "include_dashboard": False}
            if jobs > 0:
                options["num_cpus"] = jobs
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    try:
        yield
    finally:
        if is_ours:
            ray.shutdown()


@contextmanager
def _dask(jobs: int, address: str | None) -> Iterator[None]:
    distributed: Any = importlib.import_module("distributed")
    if address:
        with distributed.Client(address):
            yield
        return
    workers = joblib.effective_n_jobs(jobs)
    with (
        distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            dashboard_address=None,
            silence_logs=logging.ERROR,
        ) as cluster,
        distributed.Client(cluster),
    ):
        yield
