"""
Image stacks whose frames are stored once.

The oracle is SB3: its plain buffers are fed with the same stream, and every transition that can be
drawn must equal theirs, bit for bit.
"""

import pickle
import sys
import threading
import tracemalloc
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
        self._left: list[int] = [0] * self.n_envs
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
            for env in np.flatnonzero(dones).tolist():
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


# --- rows ---


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
        n_envs=n_envs,
        channels=channels,
        channels_first=channels_first,
        padding=padding,
        resets=0.02,
    )
    shares = run(stream, 19, 3 * 19 + 5, n_steps=n_steps, compression=compression)
    assert min(shares) > 0.5


@pytest.mark.slow
@COMPRESSIONS
@pytest.mark.parametrize("seed", range(60))
def test_rows_of_any_stream_are_those_of_sb3(seed: int, compression: str | None) -> None:
    rng = np.random.default_rng(seed)
    n_rows = int(rng.choice([1, 2, 5, 19, 64, 150]))
    longest = int(rng.choice([1, 3, n_rows, 3 * n_rows]))
    # Two frames of two would never shift
    skip, stack = [((1,), 2), ((2,), 3), ((1, 2), 4), ((0, 1, 2, 3, 4, 5), 4)][rng.integers(4)]
    stream = Stream(
        n_envs=int(rng.choice([1, 3])),
        stack=stack,
        channels=int(rng.choice([1, 3])),
        channels_first=bool(rng.random() < 0.5),
        padding=str(rng.choice(["zeros", "repeat"])),
        skip=skip,
        lengths=(1, longest),
        resets=float(rng.choice([0.0, 0.05])),
        seed=seed,
    )
    n_steps = int(rng.choice([1, 3, n_rows + 5]))
    run(stream, n_rows, 3 * n_rows + 30, n_steps=n_steps, every=5, compression=compression)


@pytest.mark.parametrize(
    ("lengths", "skip", "lost"),
    # Frames of a transition: one and a bit; two; two and a bit; between one and four, and a bit
    [((60, 60), (1,), 0.0), ((1, 1), (1,), 0.47), ((30, 30), (2,), 0.5), ((9, 9), (1, 4), 0.6)],
)
def test_where_frames_run_out_the_oldest_transitions_lose_their_mass(
    lengths: tuple[int, int], skip: tuple[int, ...], lost: float
) -> None:
    stream = Stream(lengths=lengths, skip=skip)
    buffer, plain = frame_buffer(stream, 200), plain_buffer(stream, 200)
    for _, step in zip(range(500), stream, strict=False):
        buffer.add(*step)
        plain.add(*step)
    n = assert_same_rows(buffer, plain)
    assert 1.0 - n / 200 == pytest.approx(lost, abs=0.08)
    # Those without mass are the oldest
    ages = (buffer.pos - 1 - np.arange(200)) % 200
    assert ages[buffer.priorities > 0.0].max() == n - 1
    # Probabilities are exact all the same
    np.testing.assert_array_equal(buffer.probabilities, (buffer.priorities > 0.0) / n)
    assert set(buffer.sample(400).indices) == set(np.flatnonzero(buffer.priorities))
    # Late errors don't bring them back, and they can't be had otherwise
    gone = np.flatnonzero(buffer.priorities == 0.0)
    buffer.update_priorities(np.arange(200), np.ones(200))
    np.testing.assert_array_equal(np.flatnonzero(buffer.priorities == 0.0), gone)
    if len(gone):
        with pytest.raises(ValueError, match=f"transition {gone[0]} can't be drawn: its frames"):
            buffer.batch_of(gone)
    assert len(buffer.new_transitions()) == n


def test_the_stacks_around_an_episodes_end() -> None:
    """Episodes of two steps, frames full of their numbers: 1, 2, 3, then 4, 5, 6."""
    space = spaces.Box(0, 255, (4, 14, 13), np.uint8)
    buffer = PrioritizedFrameReplayBuffer(20, space, spaces.Discrete(2), "cpu", frame_stack=4)

    def stack(*numbers: int) -> Array:
        return np.stack([np.full((14, 13), number, np.uint8) for number in numbers])[None]

    steps = [
        (stack(0, 0, 0, 1), stack(0, 0, 1, 2), False, False),
        (stack(0, 0, 1, 2), stack(0, 1, 2, 3), True, False),
        (stack(0, 0, 0, 4), stack(0, 0, 4, 5), False, False),
        (stack(0, 0, 4, 5), stack(0, 4, 5, 6), True, True),
    ]
    for obs, next_obs, done, timeout in steps:
        infos = [{"TimeLimit.truncated": timeout}]
        buffer.add(obs, next_obs, np.zeros(1), np.zeros(1), np.array([done]), infos)
    batch = buffer.batch_of(np.arange(4))
    for row, (obs, next_obs, _, _) in enumerate(steps):
        np.testing.assert_array_equal(batch.observations[row], obs[0])
        np.testing.assert_array_equal(batch.next_observations[row], next_obs[0])
    assert batch.dones.ravel().tolist() == [0.0, 1.0, 0.0, 0.0]
    # Three frames for two steps, none for what comes before the first
    assert buffer._ring.counts.tolist() == [6]


@COMPRESSIONS
def test_a_batch_shares_no_memory_with_the_buffer_or_within_itself(compression: str | None) -> None:
    stream = Stream()
    buffer = frame_buffer(stream, 30, compression=compression)
    for _, step in zip(range(30), stream, strict=False):
        buffer.add(*step)
    batch, again = buffer.batch_of(np.arange(30)), buffer.batch_of(np.arange(30))
    next_observations = batch.next_observations.clone()
    # An augmentation in place
    batch.observations.zero_()
    assert batch.next_observations.equal(next_observations)
    assert buffer.batch_of(np.arange(30)).observations.equal(again.observations)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_rewards_and_images_are_normalized_as_in_sb3(n_steps: int) -> None:
    class Idle(gym.Env[Any, Any]):
        observation_space = Stream().space
        action_space = spaces.Discrete(4)

    env = VecNormalize(DummyVecEnv([Idle]), norm_obs=False, clip_reward=0.7)
    env.ret_rms.var = np.array(2.7)
    stream = Stream(n_envs=2)
    ours, theirs = frame_buffer(stream, 20, n_steps=n_steps), plain_buffer(stream, 20, n_steps)
    for _, step in zip(range(33), stream, strict=False):
        ours.add(*step)
        theirs.add(*step)
    assert assert_same_rows(ours, theirs, env) > 20
    assert ours.sample(200, env).rewards.max() <= 0.7 * 3


# --- what the other buffers do ---


@COMPRESSIONS
@pytest.mark.parametrize("prioritization", ["proportional", "rank"])
def test_a_pickle_goes_on_bit_for_bit(prioritization: str, compression: str | None) -> None:
    stream = Stream(n_envs=2, lengths=(1, 9))
    options: dict[str, Any] = {"prioritization": prioritization, "compression": compression}
    buffer, plain = frame_buffer(stream, 60, **options), plain_buffer(stream, 60)
    steps = [step for _, step in zip(range(200), stream, strict=False)]
    for step in steps[:103]:
        buffer.add(*step)
        plain.add(*step)
    buffer.update_priorities(np.arange(120), np.random.default_rng(0).normal(size=120))
    copy = pickle.loads(pickle.dumps(buffer))
    assert copy.nbytes == buffer.nbytes
    drawn = []
    for one in (buffer, copy):
        np.random.seed(1)
        drawn.append([one.sample(16) for _ in range(3)])
        for step in steps[103:]:
            one.add(*step)
    for name in ("observations", "next_observations", "weights", "rewards"):
        for ours, theirs in zip(*drawn, strict=True):
            assert getattr(ours, name).equal(getattr(theirs, name))
    np.testing.assert_array_equal(copy.priorities, buffer.priorities)
    for step in steps[103:]:
        plain.add(*step)
    assert_same_rows(copy, plain)


@COMPRESSIONS
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_adds", [0, 4, 20, 33])
def test_a_buffer_of_sb3s_is_taken_over(n_adds: int, n_steps: int, compression: str | None) -> None:
    stream = Stream(n_envs=2, lengths=(1, 9))
    plain = plain_buffer(stream, 20, n_steps)
    iterator = iter(stream)
    for _ in range(n_adds):
        plain.add(*next(iterator))
    buffer = PrioritizedFrameReplayBuffer.from_replay_buffer(
        plain, frame_stack=4, compression=compression, alpha=0.7
    )
    n = assert_same_rows(buffer, plain)
    assert n >= plain.size()
    assert buffer.priorities.sum() == n
    assert (buffer.n_steps, buffer.alpha) == (n_steps, 0.7)
    assert len(buffer.new_transitions()) == 0
    for _ in range(25):
        step = next(iterator)
        buffer.add(*step)
        plain.add(*step)
        assert_same_rows(buffer, plain)


def test_an_episode_that_is_broken_off_ends_there() -> None:
    stream = Stream(lengths=(50, 50))
    buffer, plain = frame_buffer(stream, 20, n_steps=3), plain_buffer(stream, 20, 3)
    for number, step in zip(range(30), stream, strict=False):
        if number == 25:
            buffer.truncate_last_trajectory()
            stream._reset(0)
            # As at a time limit
            plain.dones[4] = plain.timeouts[4] = 1.0
        buffer.add(*step)
        plain.add(*step)
    assert_same_rows(buffer, plain)
    discounts = buffer.batch_of(np.array([3])).discounts
    assert discounts is not None
    assert discounts.item() == pytest.approx(0.97**2)


def test_reset_forgets_everything() -> None:
    stream = Stream(lengths=(1, 3))
    for compression in (None, "zstd"):
        buffer, plain = frame_buffer(stream, 20, compression=compression), plain_buffer(stream, 20)
        for _, step in zip(range(70), stream, strict=False):
            buffer.add(*step)
        buffer.reset()
        assert buffer.n_transitions == 0
        for _, step in zip(range(50), stream, strict=False):
            buffer.add(*step)
            plain.add(*step)
        assert_same_rows(buffer, plain)


def test_the_memory_is_that_of_one_frame_for_each_transition() -> None:
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = PrioritizedFrameReplayBuffer(2000, space, spaces.Discrete(6), "cpu", frame_stack=4)
    n_frames = 2000 + 2000 // 16 + 12
    # An action of 64 bits; reward, done and timeout in 32; a stack's number, two depths, a shift
    others = 2000 * (8 + 3 * 4 + 8 + 3 * 2)
    current = 4 * 84 * 84
    assert buffer.nbytes - buffer.tree.nbytes == pytest.approx(
        n_frames * 84 * 84 + others + current, abs=100
    )
    # A million in less than 8 GB, as the documentation says
    assert (buffer.nbytes - 13 * 84 * 84) * 500 < 7.6e9
    compressed = PrioritizedFrameReplayBuffer(
        2000, space, spaces.Discrete(6), "cpu", frame_stack=4, compression="zstd"
    )
    assert compressed.nbytes < 250_000
    assert (buffer.frame_stack, buffer.compression) == (4, None)
    assert compressed.compression == "zstd"


def test_compressed_frames_are_forgotten_with_their_transitions() -> None:
    stream = Stream(lengths=(50, 50))
    buffer = frame_buffer(stream, 300, compression="zstd")
    sizes = []
    for _ in range(5):
        for _, step in zip(range(300), stream, strict=False):
            buffer.add(*step)
        sizes.append(buffer.nbytes)
    # The memory of the second lap is that of all later ones
    assert sizes[0] > 300 * HEIGHT * WIDTH * 0.7
    assert max(sizes[1:]) - min(sizes[1:]) < 30 * HEIGHT * WIDTH
    # Frames that are all alike take next to nothing
    stream._frame = lambda: np.full((HEIGHT, WIDTH, 1), 9, np.uint8)  # type: ignore[method-assign]
    for _, step in zip(range(500), stream, strict=False):
        buffer.add(*step)
    assert buffer.nbytes < sizes[0] - 300 * HEIGHT * WIDTH * 0.6


def test_compressed_frames_keep_no_memory_of_what_they_were() -> None:
    """What `ZstdCompressor.compress` returns is an object as large as what it compressed."""
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = PrioritizedFrameReplayBuffer(
        2000, space, spaces.Discrete(2), "cpu", frame_stack=4, compression="zstd"
    )
    stack = np.zeros((1, 4, 84, 84), np.uint8)
    others: Any = (np.zeros(1), np.zeros(1), np.zeros(1), [{}])
    tracemalloc.start()
    try:
        for number in range(800):
            before, stack = stack, np.roll(stack, -1, axis=1)
            stack[0, -1, :8] = number % 251
            buffer.add(before, stack, *others)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 800 * 84 * 84 / 10


def test_another_thread_may_draw_while_transitions_are_added() -> None:
    stream = Stream(lengths=(1, 3))
    for compression in (None, "zstd-1"):
        buffer = frame_buffer(stream, 9, compression=compression)
        iterator = iter(stream)
        buffer.add(*next(iterator))
        # On a fast machine it is drawn from often enough to warn that nothing is ever updated
        buffer.update_priorities([0], [1.0])
        errors: list[BaseException] = []
        stop = threading.Event()

        def draw(buffer: Any = buffer, errors: Any = errors, stop: Any = stop) -> None:
            try:
                while not stop.is_set():
                    buffer.sample(8)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=draw)
        thread.start()
        for _ in range(400):
            buffer.add(*next(iterator))
        stop.set()
        thread.join()
        assert errors == []


# --- errors ---


IMAGES = spaces.Box(0, 255, (4, 14, 13), np.uint8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_stack": "auto"}, "'auto'` has no environment to ask"),
        ({"frame_stack": 1}, "`frame_stack` is 1: there is nothing to store once"),
        ({"frame_stack": 0}, "`frame_stack` must be an integer of at least 1, got 0"),
        ({"frame_stack": 2.0}, "`frame_stack` must be an integer of at least 1, got 2.0"),
        ({"frame_stack": "four"}, "`frame_stack` must be an integer of at least 1, got 'four'"),
        ({"frame_stack": 3}, "`frame_stack=3` does not divide the 4 channels .*4, 14, 13"),
        ({"compression": "lz4"}, "None, 'zstd', or 'zstd-LEVEL' .*, got 'lz4'"),
        ({"compression": "zstd-0"}, "from 1 .fast. to 22 .small., got 'zstd-0'"),
        ({"compression": "zstd-23"}, "got 'zstd-23'"),
        ({"compression": "zstd-"}, "got 'zstd-'"),
        ({"compression": 3}, "got 3"),
        ({"optimize_memory_usage": True}, "`optimize_memory_usage=True` is not supported by"),
        ({"observation_space": spaces.Box(0, 1, (4, 14, 13))}, "stacks of images .*, got"),
        ({"observation_space": spaces.Box(0, 255, (4, 14), np.uint8)}, "got the observation space"),
        ({"observation_space": spaces.Dict({"a": IMAGES})}, "use PrioritizedDictReplayBuffer"),
        ({"alpha": -1}, "`alpha`"),
        ({"buffer_size": 0}, "`buffer_size`"),
    ],
)
def test_bad_options_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "buffer_size": 9,
        "observation_space": IMAGES,
        "action_space": spaces.Discrete(4),
        "device": "cpu",
        "frame_stack": 4,
        **options,
    }
    with pytest.raises(ValueError, match=message):
        PrioritizedFrameReplayBuffer(**arguments)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match=r'pip install "sb3-per\[compression\]"'):
        frame_buffer(Stream(), 9, compression="zstd")


@pytest.mark.parametrize("how", ["add", "extend"])
@pytest.mark.parametrize("what", ["no stacks", "newest first"])
def test_a_stream_that_never_shifts_is_refused_with_the_reason(what: str, how: str) -> None:
    stream = Stream(lengths=(100, 100))
    buffer = frame_buffer(stream, 50)
    rng = np.random.default_rng(0)
    steps = []
    for _, (obs, next_obs, *others) in zip(range(40), stream, strict=False):
        if what == "no stacks":
            obs, next_obs = (rng.integers(0, 256, obs.shape, np.uint8) for _ in range(2))
        else:
            obs, next_obs = obs[:, ::-1], next_obs[:, ::-1]
        steps.append((obs, next_obs, *others))
    message = (
        "in 16 transitions, no next observation was the observation shifted by 1 to 3 of its 4 "
        "frames .*"
        "the 4 channels on the first axis of .4, 14, 13. should be those of 4 frames"
    )
    if how == "add":
        for step in steps[:16]:
            buffer.add(*step)
        with pytest.raises(ValueError, match=message):
            buffer.add(*steps[16])
    else:
        arrays = [np.stack(part) for part in list(zip(*steps, strict=True))[:5]]
        with pytest.raises(ValueError, match=message):
            buffer.extend(*arrays)
    assert buffer.size() == 16


def test_observations_of_another_shape_are_refused_before_anything_is_stored() -> None:
    stream = Stream(n_envs=2)
    buffer = frame_buffer(stream, 9)
    obs, next_obs, *others = next(iter(stream))
    for step in ((obs, next_obs[:1]), (obs[:, 1:], next_obs), (obs, next_obs[..., None])):
        with pytest.raises(ValueError, match=r"obs` must have the shape \(2, 4, 14, 13\), got"):
            buffer.add(*step, *others)
    assert (buffer.size(), buffer.tree.total, buffer._ring.counts.tolist()) == (0, 0.0, [0, 0])


def test_a_memory_saving_buffer_is_not_taken_over() -> None:
    plain = ReplayBuffer(9, IMAGES, spaces.Discrete(4), "cpu", 1, True, False)
    with pytest.raises(ValueError, match="`optimize_memory_usage=True` is not supported"):
        PrioritizedFrameReplayBuffer.from_replay_buffer(plain, frame_stack=4)
