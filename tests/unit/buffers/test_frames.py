"""
Image stacks whose frames are stored once.

The oracle is SB3: its plain buffers are fed with the same stream, and every transition that can be
drawn must equal theirs, bit for bit.
"""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_per import PrioritizedFrameReplayBuffer

Array = npt.NDArray[Any]
FIELDS = ("observations", "actions", "next_observations", "dones", "rewards", "discounts")
HEIGHT, WIDTH = 14, 13


@dataclass
class Stream:
    """
    What a vectorized environment with stacked frames sends: the arguments of ``add``, step by step.

    :param n_envs: number of environments
    :param stack: frames in a stack
    :param channels: of a frame
    :param channels_first: order of an observation's axes
    :param padding: ``"zeros"``, as SB3 begins a stack, or ``"repeat"``, as Gymnasium does
    :param skip: largest number of frames that a step may advance; with 0 among them, none
    :param lengths: shortest and longest episode
    :param resets: probability that the environments are reset without a done
    :param seed: of all that is random
    """

    n_envs: int = 1
    stack: int = 4
    channels: int = 1
    channels_first: bool = True
    padding: str = "zeros"
    skip: tuple[int, ...] = (1,)
    lengths: tuple[int, int] = (1, 30)
    resets: float = 0.0
    seed: int = 0
    #: The frames of each environment's stack
    _frames: list[list[Array]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self._left = [0] * self.n_envs
        self._frames = [[] for _ in range(self.n_envs)]

    @property
    def space(self) -> spaces.Box:
        channels = self.stack * self.channels
        shape = (channels, HEIGHT, WIDTH) if self.channels_first else (HEIGHT, WIDTH, channels)
        return spaces.Box(0, 255, shape, np.uint8)

    def _frame(self) -> Array:
        kind = self.rng.random()
        shape = (HEIGHT, WIDTH, self.channels)
        if kind < 0.15:
            # Black screens and still images look like padding, or like a shift
            return np.full(shape, 0 if kind < 0.1 else 7, np.uint8)
        return self.rng.integers(0, 256, shape, dtype=np.uint8)

    def _reset(self, env: int) -> None:
        first = self._frame()
        pad = np.zeros_like(first) if self.padding == "zeros" else first
        self._frames[env] = [pad] * (self.stack - 1) + [first]
        low, high = self.lengths
        # Both ends often, all lengths in between
        self._left[env] = int(np.exp(self.rng.uniform(np.log(low), np.log(high + 1))))

    def _stack_of(self, env: int) -> Array:
        stacked = np.concatenate(self._frames[env], axis=2)
        return stacked.transpose(2, 0, 1) if self.channels_first else stacked

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for env in range(self.n_envs):
            self._reset(env)
        while True:
            if self.rng.random() < self.resets:
                for env in range(self.n_envs):
                    self._reset(env)
            obs = np.stack([self._stack_of(env) for env in range(self.n_envs)])
            for env in range(self.n_envs):
                new = [self._frame() for _ in range(self.rng.choice(self.skip))]
                self._frames[env] = (self._frames[env] + new)[-self.stack :]
                self._left[env] -= 1
            next_obs = np.stack([self._stack_of(env) for env in range(self.n_envs)])
            dones = np.array([left == 0 for left in self._left])
            timeouts = dones & (self.rng.random(self.n_envs) < 0.4)
            infos: list[dict[str, Any]] = [{"TimeLimit.truncated": bool(t)} for t in timeouts]
            for env in np.flatnonzero(dones):
                self._reset(env)
            actions = self.rng.integers(0, 4, self.n_envs)
            yield obs, next_obs, actions, self.rng.normal(size=self.n_envs), dones, infos


def frame_buffer(stream: Stream, n_rows: int, **options: Any) -> PrioritizedFrameReplayBuffer:
    options = {"frame_stack": stream.stack, "gamma": 0.97, **options}
    return PrioritizedFrameReplayBuffer(
        n_rows * stream.n_envs,
        stream.space,
        spaces.Discrete(4),
        "cpu",
        n_envs=stream.n_envs,
        **options,
    )


def plain_buffer(stream: Stream, n_rows: int, n_steps: int = 1) -> ReplayBuffer:
    base = (n_rows * stream.n_envs, stream.space, spaces.Discrete(4), "cpu", stream.n_envs)
    if n_steps == 1:
        return ReplayBuffer(*base)
    return NStepReplayBuffer(*base, n_steps=n_steps, gamma=0.97)


def assert_same_rows(
    ours: PrioritizedFrameReplayBuffer, theirs: ReplayBuffer, env: VecNormalize | None = None
) -> int:
    """How many transitions have mass; each of them is that of SB3."""
    assert (ours.pos, ours.full) == (theirs.pos, theirs.full)
    indices = np.flatnonzero(ours.priorities)
    np.testing.assert_array_equal(indices, np.flatnonzero(ours.drawable()))
    rows, envs = np.divmod(indices, ours.n_envs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "randint", lambda *args, **kwargs: envs)
        expected: Any = theirs._get_samples(rows, env=env)
    batch = ours.batch_of(indices, env)
    for name in FIELDS:
        one, other = getattr(batch, name), getattr(expected, name)
        if other is None:
            assert one is None
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.numpy().tobytes() == other.numpy().tobytes(), name
    return len(indices)


def run(
    stream: Stream, n_rows: int, n_adds: int, *, n_steps: int = 1, every: int = 7, **options: Any
) -> list[float]:
    """The share of transitions that have mass, at each look."""
    ours = frame_buffer(stream, n_rows, n_steps=n_steps, **options)
    theirs = plain_buffer(stream, n_rows, n_steps)
    shares = []
    for number, step in zip(range(n_adds), stream, strict=False):
        ours.add(*step)
        theirs.add(*step)
        if number % every == 0 or number == n_adds - 1:
            shares.append(assert_same_rows(ours, theirs) / ours.n_transitions)
    return shares


COMPRESSIONS = pytest.mark.parametrize("compression", [None, "zstd-1"])


@COMPRESSIONS
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize("padding", ["zeros", "repeat"])
def test_rows_are_those_of_sb3(
    padding: str,
    channels_first: bool,
    channels: int,
    n_envs: int,
    n_steps: int,
    compression: str | None,
) -> None:
    stream = Stream(
        n_envs=n_envs, channels=channels, channels_first=channels_first, padding=padding, resets=0.02
    )
    shares = run(stream, 19, 3 * 19 + 5, n_steps=n_steps, compression=compression)
    assert min(shares) > 0.5
