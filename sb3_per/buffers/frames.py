"""Replay buffer for stacked images that stores each frame once and draws by priority."""

import math
from typing import Any, Literal, TypeVar, cast

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvWrapper

from sb3_per.buffers.frame_rings import Frames, make_frame_ring
from sb3_per.buffers.replay import PrioritizedReplayBuffer, Steps, check_size
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples

__all__ = ["PrioritizedFrameReplayBuffer", "frame_stack_of"]

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
SelfFrames = TypeVar("SelfFrames", bound="PrioritizedFrameReplayBuffer")

#: Number of transitions with room for one additional frame: an episode of ``n`` steps has
#: ``n + 1`` frames. With shorter episodes, the oldest transitions lose their frames.
SLACK = 16

#: Number of transitions without a shifted stack after which an error is raised
N_WITHOUT_SHIFT = 16


class PrioritizedFrameReplayBuffer(PrioritizedReplayBuffer):
    """
    Prioritized replay buffer for stacks of images, such as those of ``VecFrameStack``, that stores
    each frame once: an eighth of the memory of :class:`PrioritizedReplayBuffer`, a quarter of that
    with ``optimize_memory_usage``. A million transitions of four frames of 84 by 84 take 7.6 GB;
    with ``compression="zstd"``, 0.1 to 0.4 GB in the games that were measured.

    Batches are those of SB3's ``ReplayBuffer`` (``NStepReplayBuffer``), bit for bit, for all
    episodes: terminations and time limits, stacks that begin with zeros or with repetitions, resets
    in the middle, skipped frames. Frames that a stack doesn't share with the one before are stored
    again. A transition whose frames were overwritten has zero mass: if episodes are shorter than 16
    steps, these are some of the oldest.

    :param buffer_size: maximum number of transitions, over all environments
    :param observation_space: space of images (SB3's ``is_image_space``), channels first or last,
        whose channels are those of several frames, the newest last
    :param action_space: action space
    :param device: PyTorch device of the batches
    :param n_envs: number of parallel environments
    :param optimize_memory_usage: not supported, as frames are stored once anyway
    :param handle_timeout_termination: whether to bootstrap at the time limit of an episode
    :param frame_stack: number of frames in a stack, at least 2; ``"auto"`` reads it from the
        wrappers of ``env`` (SB3's ``VecFrameStack``, Gymnasium's ``FrameStackObservation``)
    :param env: training environment, for ``frame_stack="auto"``; not kept. Algorithms of this
        package pass it.
    :param compression: None; or ``"zstd"``, ``"zstd-LEVEL"`` with a level from 1 to 22: frames are
        compressed, which costs time (needs the extra ``compression``)
    :param options: the keyword-only options of :class:`PrioritizedReplayBuffer`
    :raises ValueError: if an option is out of its range, or observations are not stacks of images
    :raises ImportError: if ``compression`` needs a package that is missing
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        frame_stack: int | Literal["auto"] = "auto",
        env: VecEnv | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> None:
        n_rows = max(check_size("buffer_size", buffer_size) // check_size("n_envs", n_envs), 1)
        # One row of SB3's arrays, because images are stored separately
        super().__init__(
            n_envs,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            **options,
        )
        del self.observations, self.next_observations
        shape = tuple(self.observation_space.shape or ())
        self._channels_first = is_image_space_channels_first(cast(spaces.Box, observation_space))
        n_channels = shape[0] if self._channels_first else shape[-1]
        self._frame_stack = _check_frame_stack(frame_stack, env, n_channels, shape)
        self._n_channels = n_channels // self._frame_stack
        self._compression = compression

        self.buffer_size = n_rows
        for name in ("actions", "rewards", "dones", "timeouts"):
            array = getattr(self, name)
            setattr(self, name, np.zeros((n_rows, *array.shape[1:]), dtype=array.dtype))
        self._start_tree()

        # A stack of `k` frames is stored as the number of its newest one, and the number of its
        # stored frames: the others, before the episode's first, are zeros (a number below zero) or
        # repeat the oldest one.
        rows_and_envs = (n_rows, n_envs)
        self._newest = np.zeros(rows_and_envs, dtype=np.int64)
        self._depths = np.zeros(rows_and_envs, dtype=np.int16)
        self._next_depths = np.zeros(rows_and_envs, dtype=np.int16)
        # Number of frames by which the next observation is ahead
        self._shifts = np.zeros(rows_and_envs, dtype=np.int16)
        self._ring = make_frame_ring(
            compression,
            n_envs,
            # At least the two stacks of the newest transition
            n_rows + n_rows // SLACK + 3 * self._frame_stack,
            math.prod(shape) // self._frame_stack,
        )
        self._start_stream()

    @classmethod
    def _check_storage(
        cls, observation_space: spaces.Space[Any], optimize_memory_usage: bool
    ) -> None:
        if not is_image_space(observation_space):
            other = "Dict" if isinstance(observation_space, spaces.Dict) else ""
            raise ValueError(
                f"{cls.__name__} stores stacks of images (type uint8, from 0 to 255, three axes), "
                f"got the observation space {observation_space}; use "
                f"Prioritized{other}ReplayBuffer"
            )
        if optimize_memory_usage:
            raise ValueError(
                f"`optimize_memory_usage=True` is not supported by {cls.__name__}, which stores "
                "each frame once anyway; leave it out"
            )

    def _start_stream(self) -> None:
        n_envs, size = self.n_envs, self._ring.frame_size
        # The newest stack of each environment: its depth as above (0 before the first one), its
        # frames, and its origin
        self._current_depths = [0] * n_envs
        self._current_frames = np.zeros((n_envs, self._frame_stack, size), dtype=np.uint8)
        self._current_observations: list[Array | None] = [None] * n_envs
        #: Number of the oldest rows of each environment whose frames are overwritten
        self._n_lost = np.zeros(n_envs, dtype=np.int64)
        self._n_shifted = 0
        self._n_unshifted = 0

    @property
    def frame_stack(self) -> int:
        """Number of frames in a stack."""
        return self._frame_stack

    @property
    def compression(self) -> str | None:
        """Compression of the frames: None, ``"zstd"`` or ``"zstd-LEVEL"``."""
        return self._compression

    @property
    def nbytes(self) -> int:
        """Memory of all arrays, of the frames and of the tree, in bytes."""
        return super().nbytes + self._ring.nbytes

    def reset(self) -> None:
        """Remove all transitions and their priorities."""
        super().reset()
        self._ring.clear()
        self._start_stream()

    def add(
        self,
        obs: Array,
        next_obs: Array,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Store one transition of each environment, with the largest stored priority.

        :param obs: shape ``(n_envs, *observation)``
        :param next_obs: the observation after the step (of the same episode), same shape
        :param action: shape ``(n_envs, *action)``
        :param reward: shape ``(n_envs,)``
        :param done: whether the episode ended, shape ``(n_envs,)``
        :param infos: one dict for each environment; ``"TimeLimit.truncated"`` is read
        :raises ValueError: if stacks never shift by a frame from one step to the next
        """
        shape = (self.n_envs, *(self.observation_space.shape or ()))
        for name, array in (("obs", obs), ("next_obs", next_obs)):
            if array.shape != shape:
                raise ValueError(f"`{name}` must have the shape {shape}, got {array.shape}")
        ends = [[info.get("TimeLimit.truncated", False) for info in infos]]
        steps = Steps(
            observations=obs[None],
            next_observations=next_obs[None],
            actions=np.reshape(action, (1, self.n_envs, self.action_dim)),
            rewards=np.asarray(reward)[None],
            dones=np.asarray(done)[None],
            timeouts=np.asarray(ends),
            infos=None,
        )
        self._store_run(steps, 0, 1)

    def _observation_steps(self, name: str, obs: Any, n: int) -> Any:
        return super()._observation_steps(name, obs, n).astype(np.uint8, copy=False)

    def _store_run(self, steps: Steps, start: int, stop: int) -> int:
        if self._n_shifted == 0:
            if self._n_unshifted >= N_WITHOUT_SHIFT:
                raise ValueError(self._why_nothing_is_shared())
            stop = min(stop, start + N_WITHOUT_SHIFT)
        if self.full:
            self._n_lost = np.maximum(self._n_lost - (stop - start), 0)
        return super()._store_run(steps, start, stop)

    def _why_nothing_is_shared(self) -> str:
        axis = "first" if self._channels_first else "last"
        n_channels = self._frame_stack * self._n_channels
        return (
            f"in {self._n_unshifted} transitions, no next observation was the observation shifted "
            f"by 1 to {self._frame_stack - 1} of its {self._frame_stack} frames (`frame_stack`), "
            f"so that nothing can be stored once: the {n_channels} channels on the {axis} axis of "
            f"{self.observation_space.shape} should be those of {self._frame_stack} frames, the "
            "newest last. If `frame_stack` is right, the observations are no stacks: use "
            "PrioritizedReplayBuffer."
        )

    def _store_observations(self, first: int, steps: Steps, start: int, stop: int) -> None:
        for step in range(start, stop):
            row = first + step - start
            for env in range(self.n_envs):
                obs, next_obs = steps.observations[step, env], steps.next_observations[step, env]
                current = self._current_observations[env]
                if current is None or not (obs == current).all():
                    self._store_stack(env, self._frames_of(obs))
                newest = int(self._ring.counts[env]) - 1
                self._newest[row, env] = newest
                self._depths[row, env] = self._current_depths[env]
                is_shifted = self._store_stack(env, self._frames_of(next_obs))
                self._n_shifted += is_shifted
                self._n_unshifted += not is_shifted
                self._shifts[row, env] = int(self._ring.counts[env]) - 1 - newest
                self._next_depths[row, env] = self._current_depths[env]
                # In the order of its memory, so that the comparison is fast
                self._current_observations[env] = next_obs.copy(order="K")

    def _store_stack(self, env: int, frames: Frames) -> bool:
        """
        Store the frames that a stack does not share with the newest one of its environment.

        :param env: number of the environment
        :param frames: frames of the stack, shape ``(frame_stack, frame_size)``
        :return: whether it is the newest stack shifted by less than ``frame_stack`` frames
        """
        k, depth, current = self._frame_stack, self._current_depths[env], self._current_frames[env]
        for shift in (1, 0, *range(2, k)) if depth else ():
            if (frames[: k - shift] == current[shift:]).all():
                new, sign = frames[k - shift :], int(np.sign(depth))
                depth = sign * min(abs(depth) + shift, k)
                break
        else:
            shift = k
            blank = np.asarray(~frames.any(axis=1))
            # Number of the oldest frames that are zero, or equal; the newest is always stored
            n_zeros = int(np.argmin([*blank[:-1], False]))
            n_alike = int(np.argmin([*(frames[1:] == frames[0]).all(axis=1), False]))
            depth = n_zeros - k if n_zeros else k - n_alike
            new = frames[k - abs(depth) :]
        self._ring.append(env, new)
        self._current_depths[env] = depth
        self._current_frames[env] = frames
        return bool(shift < k)

    def _admit(self, start: int, stop: int, priority: float) -> None:
        super()._admit(start, stop, priority)
        # If frames were overwritten, the oldest transitions lose their mass
        n_rows = self.size()
        for env in range(self.n_envs):
            first = self._ring.first(env)
            while first:
                row = (self.pos - n_rows + int(self._n_lost[env])) % self.buffer_size
                if self._newest[row, env] - abs(int(self._depths[row, env])) + 1 >= first:
                    break
                leaf = row * self.n_envs + env
                self.tree.fill(leaf, leaf + 1, 0.0)
                self._n_lost[env] += 1

    def _is_drawable(self, indices: IntArray) -> npt.NDArray[np.bool_] | None:
        if not self._n_lost.any():
            return None
        rows, envs = np.divmod(indices, self.n_envs)
        ages = (rows - self.pos + self.size()) % self.buffer_size
        drawable: npt.NDArray[np.bool_] = ages >= self._n_lost[envs]
        return drawable

    def batch_of(
        self, indices: IntArray, env: VecNormalize | None = None
    ) -> PrioritizedReplayBufferSamples:
        """
        Return the batch for given transitions, without a draw.

        :param indices: stored transitions that can be drawn, int64, shape ``(batch,)``:
            ``row * n_envs + env``
        :param env: environment that normalizes the observations and rewards of the batch, if given
        :return: the batch, with weights as if these transitions had been drawn
        :raises ValueError: if the frames of one were overwritten
        """
        drawable = self._is_drawable(np.asarray(indices))
        if drawable is not None and not drawable.all():
            raise ValueError(
                f"transition {np.asarray(indices)[~drawable][0]} can't be drawn: its frames were "
                "overwritten (see `drawable()`)"
            )
        return super().batch_of(indices, env)

    def _observations_of(
        self, indices: IntArray, last: IntArray, env: VecNormalize | None
    ) -> tuple[th.Tensor, th.Tensor]:
        newest = self._flat(self._newest)
        ends = np.stack([newest[indices], newest[last] + self._flat(self._shifts)[last]])
        depths = np.stack([self._flat(self._depths)[indices], self._flat(self._next_depths)[last]])
        # Both observations of all transitions at once, so that frames are read once
        numbers = ends[:, :, None] + np.arange(1 - self._frame_stack, 1)
        oldest = (ends + 1 - np.abs(depths))[:, :, None]
        envs = (indices % self.n_envs)[:, None]
        frames = self._ring.gather(envs, np.maximum(numbers, oldest))
        blank = (numbers < oldest) & (depths < 0)[:, :, None]
        if blank.any():
            frames[blank] = 0
        before, after = (
            self._to_tensor(self._normalize_obs(self._stacks_of(part), env)) for part in frames
        )
        return before, after

    def _frames_of(self, stack: Array) -> Frames:
        """
        :param stack: an observation
        :return: its frames, the oldest first, shape ``(frame_stack, frame_size)``
        """
        if not self._channels_first:
            stack = stack.reshape(-1, self._frame_stack, self._n_channels).swapaxes(0, 1)
        # A copy of transposed images makes all further operations several times faster
        return np.ascontiguousarray(stack.reshape(self._frame_stack, -1))

    def _stacks_of(self, frames: Frames) -> Array:
        """
        :param frames: shape ``(batch, frame_stack, frame_size)``
        :return: observations, shape ``(batch, *observation)``
        """
        if not self._channels_first:
            shape = (len(frames), self._frame_stack, -1, self._n_channels)
            frames = frames.reshape(shape).swapaxes(1, 2)
        return frames.reshape(len(frames), *(self.observation_space.shape or ()))

    @classmethod
    def from_replay_buffer(
        cls: type[SelfFrames], buffer: ReplayBuffer, **options: Any
    ) -> SelfFrames:
        """
        Take over the content of one of SB3's buffers, each transition with a priority of 1.

        :param buffer: SB3's counterpart of this class, without ``optimize_memory_usage``; its
            content is copied
        :param options: the keyword-only options of this class; ``n_steps`` and ``gamma`` default
            to those of an ``NStepReplayBuffer``
        :return: a prioritized buffer with the same transitions, which draws them uniformly until
            priorities are updated
        :raises ValueError: if an option is out of its range, or the buffer is of another kind
        """
        options = cls._options_for(buffer, options)
        prioritized = cls(
            buffer.buffer_size * buffer.n_envs,
            buffer.observation_space,
            buffer.action_space,
            device=buffer.device,
            n_envs=buffer.n_envs,
            optimize_memory_usage=buffer.optimize_memory_usage,
            handle_timeout_termination=buffer.handle_timeout_termination,
            **options,
        )
        parts = [slice(0, buffer.pos)]
        if buffer.full:
            # As if other transitions had been stored before, so that each row keeps its position
            prioritized.pos, prioritized.full = buffer.pos, True
            prioritized._n_lost[:] = buffer.buffer_size
            parts = [slice(buffer.pos, buffer.buffer_size), *parts]
        for rows in parts:
            prioritized.extend(
                buffer.observations[rows],
                buffer.next_observations[rows],
                buffer.actions[rows],
                buffer.rewards[rows],
                buffer.dones[rows],
                timeouts=buffer.timeouts[rows],
            )
        prioritized.forget_new()
        return prioritized


def _check_frame_stack(
    frame_stack: Any, env: VecEnv | None, n_channels: int, shape: tuple[int, ...]
) -> int:
    """
    :param frame_stack: value given by the user
    :param env: training environment, if there is one
    :param n_channels: number of channels of an observation
    :param shape: shape of an observation, for error messages
    :return: number of frames in a stack
    :raises ValueError: if it can't be determined, or does not fit the observations
    """
    if isinstance(frame_stack, str) and frame_stack == "auto":
        frame_stack = None if env is None else frame_stack_of(env)
        if frame_stack is None:
            found = "has no environment to ask" if env is None else "found no stack of frames"
            raise ValueError(
                f"`frame_stack='auto'` {found}: wrap the environment in SB3's VecFrameStack (or in "
                "Gymnasium's FrameStackObservation), or give the number of frames in a stack, such "
                "as `frame_stack=4`"
            )
    number = check_size("frame_stack", frame_stack)
    if number == 1:
        raise ValueError(
            "`frame_stack` is 1: there is nothing to store once in observations of a single frame; "
            "use PrioritizedReplayBuffer, or stack frames by SB3's VecFrameStack"
        )
    if n_channels % number:
        raise ValueError(
            f"`frame_stack={number}` does not divide the {n_channels} channels of observations of "
            f"shape {shape}"
        )
    return number


def frame_stack_of(env: VecEnv | gym.Env[Any, Any]) -> int | None:
    """
    :param env: environment with its wrappers
    :return: number of frames in a stack of the outermost wrapper that stacks them: SB3's
        ``VecFrameStack`` or Gymnasium's ``FrameStackObservation``; None if there is neither
    """
    # By this name since Gymnasium 1.0
    name = (
        "FrameStackObservation" if hasattr(gym.wrappers, "FrameStackObservation") else "FrameStack"
    )
    wrapper = getattr(gym.wrappers, name)
    attribute = "stack_size" if name == "FrameStackObservation" else "num_stack"
    while isinstance(env, VecEnvWrapper | gym.Wrapper):
        if isinstance(env, VecFrameStack):
            return env.stacked_obs.n_stack
        if isinstance(env, wrapper):
            return int(getattr(env, attribute))
        env = env.venv if isinstance(env, VecEnvWrapper) else env.env
    if isinstance(env, VecEnv) and all(env.env_is_wrapped(wrapper)):
        return int(env.get_attr(attribute)[0])
    return None
