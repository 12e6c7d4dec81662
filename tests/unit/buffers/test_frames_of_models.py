"""Algorithms with a buffer of frames: the stack is found, everything else works as ever."""

import io
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnv,
    VecFrameStack,
    VecNormalize,
    VecTransposeImage,
)

from sb3_per import (
    PERDQN,
    PERQRDQN,
    PERLoggerCallback,
    PrioritizedFrameReplayBuffer,
    PrioritizedReplayBuffer,
    ReplaySnapshotCallback,
    td_errors_in_buffer,
)
from sb3_per.buffers.frames import frame_stack_of

#: Under its name before Gymnasium 1.0, and since
STACK: Any = getattr(
    gym.wrappers, "FrameStackObservation", getattr(gym.wrappers, "FrameStack", None)
)

FRAMES: dict[str, Any] = {
    "replay_buffer_class": PrioritizedFrameReplayBuffer,
    "buffer_size": 90,
    "learning_starts": 10,
    "train_freq": 1,
    "batch_size": 8,
    "device": "cpu",
    "seed": 0,
    "policy_kwargs": {"net_arch": [8]},
}


class Pictures(gym.Env[Any, Any]):
    """
    Random pictures; episodes end by themselves or, every other time, for lack of time.

    :param shape: of a picture
    :param length: of an episode
    """

    action_space = spaces.Discrete(3)

    def __init__(self, shape: tuple[int, ...] = (12, 13, 1), length: int = 7) -> None:
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.length = length
        self.n_episodes = self.n_steps = 0

    def _picture(self) -> npt.NDArray[Any]:
        return self.np_random.integers(0, 256, self.observation_space.shape, dtype=np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n_steps = 0
        self.n_episodes += 1
        return self._picture(), {}

    def step(self, action: int) -> Any:
        self.n_steps += 1
        ends, in_time = self.n_steps == self.length, bool(self.n_episodes % 2)
        return self._picture(), float(action), ends and in_time, ends and not in_time, {}


def stacked(n_envs: int = 1, n_stack: int = 4, **options: Any) -> VecEnv:
    venv = DummyVecEnv([lambda: Pictures(**options)] * n_envs)
    return VecFrameStack(venv, n_stack)


def add_to_both(model: Any, plain: ReplayBuffer) -> None:
    """What the model stores from now on goes into ``plain``, too."""
    add = model.replay_buffer.add

    def both(*step: Any) -> None:
        plain.add(*step)
        add(*step)

    model.replay_buffer.add = both


def plain_for(model: Any, n_steps: int = 1) -> ReplayBuffer:
    base = (90, model.observation_space, model.action_space, "cpu", model.n_envs)
    if n_steps == 1:
        return ReplayBuffer(*base)
    return NStepReplayBuffer(*base, n_steps=n_steps, gamma=model.gamma)


def assert_same_rows(ours: Any, theirs: ReplayBuffer, env: VecNormalize | None = None) -> None:
    indices = np.flatnonzero(ours.drawable())
    rows, envs = np.divmod(indices, ours.n_envs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "randint", lambda *args, **kwargs: envs)
        expected = theirs._get_samples(rows, env=env)
    batch = ours.batch_of(indices, env)
    for name in ("observations", "next_observations", "rewards", "dones", "actions"):
        assert getattr(batch, name).equal(getattr(expected, name)), name


GRAY, COLOR = (12, 13, 1), (13, 14, 3)


@pytest.mark.parametrize(
    ("algorithm", "n_envs", "shape", "n_steps", "prioritization", "compression"),
    [
        (PERDQN, 1, GRAY, 1, "proportional", None),
        (PERDQN, 3, COLOR, 1, "rank", "zstd"),
        (PERDQN, 3, GRAY, 3, "proportional", "zstd"),
        (PERQRDQN, 1, COLOR, 3, "rank", None),
        (PERQRDQN, 3, GRAY, 1, "proportional", "zstd"),
    ],
)
def test_training_stores_what_sb3_would(
    algorithm: Any,
    n_envs: int,
    shape: tuple[int, ...],
    n_steps: int,
    prioritization: Any,
    compression: str | None,
) -> None:
    kwargs = {"compression": compression}
    model = algorithm(
        "MlpPolicy",
        stacked(n_envs, shape=shape),
        n_steps=n_steps,
        prioritization=prioritization,
        initial_priority="td_error",
        replay_buffer_kwargs=kwargs,
        **FRAMES,
    )
    assert type(model.replay_buffer) is PrioritizedFrameReplayBuffer
    assert model.replay_buffer.frame_stack == 4
    plain = plain_for(model, n_steps)
    add_to_both(model, plain)
    model.learn(110)
    assert_same_rows(model.replay_buffer, plain)
    # A second run resets the environments in the middle of an episode
    if n_steps == 1:
        model.learn(40)
        # It counts as a time limit, which with one step changes no row
        assert_same_rows(model.replay_buffer, plain)
    priorities = model.replay_buffer.priorities
    assert len(set(priorities)) > 20
    assert model.replay_buffer_kwargs is kwargs


def test_a_convolutional_network_trains_on_it() -> None:
    env = stacked(shape=(36, 36, 1), n_stack=2)
    options = {**FRAMES, "policy_kwargs": {}}
    model = PERDQN("CnnPolicy", env, **options)
    before = [parameter.clone() for parameter in model.q_net.parameters()]
    model.learn(14)
    assert model.replay_buffer.frame_stack == 2  # type: ignore[attr-defined]
    for parameter, old in zip(model.q_net.parameters(), before, strict=True):
        assert not parameter.equal(old)


def test_the_same_training_whatever_the_buffer() -> None:
    """The same draws, the same batches, the same network, to the last bit."""
    networks = []
    # Long episodes: with short ones, a buffer of frames forgets the oldest a bit sooner
    for buffer_class, kwargs in (
        (PrioritizedReplayBuffer, {}),
        (PrioritizedFrameReplayBuffer, {}),
        (PrioritizedFrameReplayBuffer, {"compression": "zstd-1"}),
    ):
        options = {**FRAMES, "replay_buffer_class": buffer_class, "replay_buffer_kwargs": kwargs}
        model = PERDQN("MlpPolicy", stacked(length=40), n_steps=2, **options).learn(200)
        networks.append(model.policy.state_dict())
    for network in networks[1:]:
        for name, value in networks[0].items():
            assert network[name].equal(value)


def test_rewards_are_normalized_as_in_sb3() -> None:
    # SB3 stores what is inside of VecNormalize: channels must be first there
    env = VecNormalize(VecTransposeImage(stacked()), norm_obs=False)
    model = PERDQN("MlpPolicy", env, **FRAMES)
    plain = plain_for(model)
    add_to_both(model, plain)
    model.learn(60)
    assert model.get_vec_normalize_env() is env
    assert_same_rows(model.replay_buffer, plain, env)
    assert set(plain.rewards[:60].ravel()) <= {0.0, 1.0, 2.0}


# --- the stack ---


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (lambda: stacked(n_stack=3), 3),
        (lambda: VecNormalize(stacked(n_stack=3), norm_obs=False), 3),
        # The outermost one: its frames are the inner stacks
        (lambda: VecFrameStack(stacked(n_stack=3), 2), 2),
        (lambda: DummyVecEnv([lambda: STACK(Pictures((12, 13)), 5)] * 2), 5),
        (lambda: STACK(Pictures((12, 13)), 5), 5),
        (lambda: DummyVecEnv([Pictures]), None),
        (Pictures, None),
    ],
)
def test_the_stack_is_read_from_the_wrappers(env: Any, expected: int | None) -> None:
    assert frame_stack_of(env()) == expected


@pytest.mark.parametrize("padding", ["reset", "zero"])
def test_gymnasiums_stacks_are_found_by_the_model(padding: str) -> None:
    # Before Gymnasium 1.0 there is one padding, that of "reset"
    options = {"padding_type": padding} if hasattr(gym.wrappers, "FrameStackObservation") else {}
    env = STACK(Pictures((14, 13)), 4, **options)
    model = PERDQN("MlpPolicy", env, **FRAMES)
    plain = plain_for(model)
    add_to_both(model, plain)
    model.learn(130)
    assert model.replay_buffer.frame_stack == 4  # type: ignore[attr-defined]
    assert_same_rows(model.replay_buffer, plain)


@pytest.mark.parametrize(
    ("env", "kwargs", "message"),
    [
        (lambda: DummyVecEnv([Pictures]), {}, "'auto'` found no stack of frames: wrap the env"),
        (lambda: stacked(n_stack=1), {}, "`frame_stack` is 1"),
        (stacked, {"frame_stack": 3}, "`frame_stack=3` does not divide the 4 channels"),
        (lambda: DummyVecEnv([lambda: gym.make("CartPole-v1")]), {}, "stores stacks of images"),
        (stacked, {"compression": "gzip"}, "got 'gzip'"),
    ],
)
def test_what_does_not_fit_is_said_at_construction(env: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PERDQN("MlpPolicy", env(), replay_buffer_kwargs=kwargs, **FRAMES)


def test_a_number_takes_the_place_of_the_wrapper() -> None:
    env = DummyVecEnv([lambda: Pictures((12, 13, 4))])
    model = PERDQN("MlpPolicy", env, replay_buffer_kwargs={"frame_stack": 2}, **FRAMES)
    assert model.replay_buffer.frame_stack == 2  # type: ignore[attr-defined]
    # Its pictures are no stacks
    with pytest.raises(ValueError, match="shifted by 1 to 1 of its 2 frames"):
        model.learn(60)


def test_memory_saving_is_refused() -> None:
    with pytest.raises(ValueError, match="`optimize_memory_usage=True` is not supported"):
        PERDQN(
            "MlpPolicy",
            stacked(),
            optimize_memory_usage=True,
            replay_buffer_kwargs={"handle_timeout_termination": False},
            **FRAMES,
        )


# --- saving and loading ---


@pytest.mark.parametrize("with_env", [True, False])
def test_a_saved_model_knows_its_stack(with_env: bool, tmp_path: Path) -> None:
    model = PERDQN("MlpPolicy", stacked(n_stack=3), **FRAMES).learn(50)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = PERDQN.load(tmp_path / "model", env=stacked(n_stack=3) if with_env else None)
    assert loaded.replay_buffer.frame_stack == 3  # type: ignore[attr-defined]
    assert loaded.replay_buffer_kwargs == {}
    loaded.load_replay_buffer(tmp_path / "buffer")
    np.testing.assert_array_equal(loaded.replay_buffer.priorities, model.replay_buffer.priorities)
    for one in (model, loaded):
        np.random.seed(3)
        one.batch = one.replay_buffer.sample(20)  # type: ignore[attr-defined]
    assert model.batch.observations.equal(loaded.batch.observations)  # type: ignore[attr-defined]
    assert model.batch.weights.equal(loaded.batch.weights)  # type: ignore[attr-defined]
    if with_env:
        loaded.learn(30, reset_num_timesteps=False)
    # Twice through a file, the stack is still known
    loaded.save(tmp_path / "again")
    assert PERDQN.load(tmp_path / "again").replay_buffer.frame_stack == 3  # type: ignore[attr-defined]


def test_a_plain_pickle_is_converted() -> None:
    options = {**FRAMES, "replay_buffer_kwargs": {"compression": "zstd"}}
    model = PERDQN("MlpPolicy", stacked(), **options)
    plain = plain_for(model)
    add_to_both(model, plain)
    model.learn(60)
    other = PERDQN("MlpPolicy", stacked(), **options)
    with pytest.warns(UserWarning, match="its 60 transitions all start at priority 1"):
        other.load_replay_buffer(io.BytesIO(pickle.dumps(plain)))
    buffer: Any = other.replay_buffer
    assert (buffer.frame_stack, buffer.compression, buffer.beta) == (4, "zstd", 0.4)
    assert_same_rows(buffer, plain)


# --- callbacks ---


def test_snapshots_statistics_and_td_errors_of_a_buffer_that_lost_frames() -> None:
    model = PERDQN("MlpPolicy", stacked(length=1), **FRAMES)
    snapshots = ReplaySnapshotCallback(episodes=(), freq=200)
    model.learn(200, callback=[snapshots, PERLoggerCallback(log_freq=50)])
    lost = int((~model.replay_buffer.drawable()).sum())
    assert lost > 30
    errors = td_errors_in_buffer(model)
    assert len(errors) == 90 - lost
    assert np.isfinite(errors).all()
    last = snapshots.snapshots[-1]
    assert last.timesteps == 200
    assert last.n_transitions == 90
    # Four small pictures: they are kept
    assert last.observations is not None
    assert last.observations.shape == (90 - lost, 4, 12, 13)
