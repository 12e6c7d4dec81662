"""Replay buffers: a prioritized batch against a uniform one of SB3."""

from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

from benchmarks.race import Race
from sb3_per import PrioritizedDictReplayBuffer, PrioritizedReplayBuffer

ACTIONS = spaces.Discrete(2)
VECTOR = spaces.Box(-1.0, 1.0, (4,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
DICT = spaces.Dict({"camera": spaces.Box(0, 255, (1, 36, 36), np.uint8), "speed": VECTOR})


class Case(NamedTuple):
    """
    One kind of buffer.

    :param observations: observation space
    :param capacity: number of transitions, over all environments
    :param n_envs: number of environments
    :param n_steps: length of the n-step returns
    """

    observations: spaces.Space[Any]
    capacity: int
    n_envs: int = 1
    n_steps: int = 1


CASES = {
    "vectors of 4, 1 env": Case(VECTOR, 1_000_000),
    "vectors of 4, 4 envs": Case(VECTOR, 1_000_000, n_envs=4),
    "vectors of 4, 32 envs": Case(VECTOR, 1_000_000, n_envs=32),
    "vectors of 4, n_steps=3": Case(VECTOR, 1_000_000, n_steps=3),
    "Dict of image and vector": Case(DICT, 20_000),
    "images of 4 x 84 x 84": Case(IMAGE, 10_000),
}


def race(case: Case, title: str, batch_size: int, rounds: int, seconds: float) -> Race:
    """
    :param case: kind of buffer
    :param title: title of the race
    :param batch_size: size of each batch
    :param rounds: number of rounds
    :param seconds: length of a turn
    :return: times of SB3's ``sample``, ours, and ours with ``update_priorities``
    """
    has_dict = isinstance(case.observations, spaces.Dict)
    theirs_class: type[ReplayBuffer] = DictReplayBuffer if has_dict else ReplayBuffer
    options: dict[str, Any] = {}
    if case.n_steps > 1:
        theirs_class, options = NStepReplayBuffer, {"n_steps": case.n_steps}
    ours_class = PrioritizedDictReplayBuffer if has_dict else PrioritizedReplayBuffer
    arguments = (case.capacity, case.observations, ACTIONS, "cpu", case.n_envs)
    theirs = _filled(theirs_class(*arguments, **options))
    ours = _filled(ours_class(*arguments, **options))
    assert isinstance(ours, PrioritizedReplayBuffer)
    rng = np.random.default_rng(0)
    everything = np.arange(ours.n_transitions)
    ours.tree.update(everything, rng.exponential(size=len(everything)) + 1e-3)
    td_errors = rng.normal(size=(batch_size, 1)).astype(np.float32)

    def sample_and_update() -> None:
        ours.update_priorities(ours.sample(batch_size).indices, td_errors)

    return Race.run(
        title,
        {
            "SB3, sample": lambda: theirs.sample(batch_size),
            "ours, sample": lambda: ours.sample(batch_size),
            "ours, sample and update_priorities": sample_and_update,
        },
        rounds,
        seconds,
    )


def _filled(buffer: ReplayBuffer) -> ReplayBuffer:
    """Fill a buffer with random numbers, as after a long run."""
    rng = np.random.default_rng(1)
    arrays: list[Any] = [buffer.rewards]
    for storage in (buffer.observations, buffer.next_observations):
        arrays += storage.values() if isinstance(storage, dict) else [storage]
    for array in arrays:
        if array.dtype == np.uint8:
            array[:] = rng.integers(0, 255, size=array.shape[1:], dtype=np.uint8)
        else:
            array[:] = rng.random(array.shape, dtype=np.float32)
    buffer.dones[:] = rng.random(buffer.dones.shape) < 0.01
    buffer.full, buffer.pos = True, 5
    return buffer
