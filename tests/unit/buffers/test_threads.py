"""Other threads at a buffer, and Ctrl-C at any moment: nothing breaks, nothing else comes out."""

import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from buffer_helpers import SAVING, add_rows, make_buffer
from sb3_per import PrioritizedReplayBuffer

KINDS = pytest.mark.parametrize("prioritization", ["proportional", "rank"])


def read(buffer: PrioritizedReplayBuffer) -> None:
    n = buffer.n_transitions
    for array in (buffer.priorities, buffer.probabilities, buffer.drawable()):
        assert len(array) >= n
        assert np.isfinite(array).all()
    assert buffer.nbytes > 0
    assert (buffer.new_transitions() >= 0).all()
    assert len(buffer.batch_of(np.arange(n))) == 8
    assert pickle.loads(pickle.dumps(buffer)).tree.check_valid() == (True, "")


def draw_and_feed_back(buffer: PrioritizedReplayBuffer, is_over: threading.Event) -> None:
    rng = np.random.default_rng(0)
    for k in range(1_000):
        if is_over.is_set():
            return
        batch = buffer.sample(64)
        assert bool((batch.weights > 0.0).all())
        buffer.update_priorities(batch.indices, rng.standard_normal(64).astype(np.float32))
        if k % 100 == 0:
            buffer.alpha = 0.5 + k / 2_000


@KINDS
def test_one_thread_adds_one_reads_one_draws_and_feeds_back(prioritization: str) -> None:
    """
    No error, no crash, and a valid tree at the end. With compiled code that lets the GIL go, this
    fails at once; with a rank-tree the process aborts.
    """
    buffer = make_buffer(1_000, 200, 2, prioritization=prioritization, n_steps=3)
    errors: list[BaseException] = []
    is_over = threading.Event()

    def repeat(action: Callable[[Any], None]) -> None:
        try:
            while not is_over.is_set():
                action(buffer)
        except BaseException as error:
            errors.append(error)
            is_over.set()

    threads = [threading.Thread(target=repeat, args=(action,)) for action in (add_rows, read)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        draw_and_feed_back(buffer, is_over)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not errors, errors
    assert buffer.full
    assert buffer.tree.check_valid() == (True, "")
    assert (buffer.priorities > 0.0).all()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer of POSIX")
@KINDS
@pytest.mark.parametrize("method", ["sample", "update_priorities", "add", "probabilities"])
def test_ctrl_c_at_any_moment_comes_out_as_keyboard_interrupt(
    method: str, prioritization: str
) -> None:
    memory = SAVING if method == "add" else {"n_steps": 2}
    buffer = make_buffer(64, 80, prioritization=prioritization, **memory)
    indices, errors = np.arange(64), np.random.default_rng(0).random(64).astype(np.float32)
    buffer.update_priorities(indices, errors)
    actions: dict[str, Callable[[], Any]] = {
        "sample": lambda: buffer.sample(16),
        "update_priorities": lambda: buffer.update_priorities(indices, errors),
        "add": lambda: add_rows(buffer),
        "probabilities": lambda: buffer.probabilities,
    }
    # All is compiled by then
    actions[method]()
    n_rung = n_raised = 0

    def ring(*_: Any) -> None:
        nonlocal n_rung
        n_rung += 1
        raise KeyboardInterrupt

    rng = np.random.default_rng(1)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for k in range(1, 301):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 3e-4))
                while n_rung < k:
                    actions[method]()
            except KeyboardInterrupt:
                n_raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert n_rung == n_raised == 300
    assert buffer.tree.check_valid() == (True, "")
    add_rows(buffer, 2)
    assert buffer.sample(64).weights.min() > 0.0
