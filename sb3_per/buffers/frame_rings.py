"""Where the frames of image stacks are kept: the newest ones of each environment."""

import math
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CompressedFrameRing", "FrameRing", "make_frame_ring"]

Frames = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]

#: Frames that are compressed together. Neighbours are nearly alike: eight of them take less than
#: two that stand alone, and a batch is decompressed no slower.
FRAMES_IN_BLOCK = 8

DEFAULT_LEVEL = 3


class FrameRing:
    """
    The newest frames of each environment. A frame's number says how many its environment had
    stored before; it never changes, and never comes again.

    :param n_envs: number of environments
    :param length: how many frames of each are kept
    :param frame_size: bytes of a frame
    """

    def __init__(self, n_envs: int, length: int, frame_size: int) -> None:
        self.frame_size = frame_size
        #: How many frames each environment ever stored, shape ``(n_envs,)``
        self.counts = np.zeros(n_envs, dtype=np.int64)
        self._length = length
        self._allocate()

    def _allocate(self) -> None:
        self._frames = np.zeros((len(self.counts), self._length, self.frame_size), dtype=np.uint8)

    @property
    def nbytes(self) -> int:
        """Memory of the frames in bytes."""
        return self._frames.nbytes

    def first(self, env: int) -> int:
        """
        :param env: number of the environment
        :return: number of its oldest frame that is kept
        """
        return max(int(self.counts[env]) - self._length, 0)

    def append(self, env: int, frames: Frames) -> None:
        """
        :param env: number of the environment
        :param frames: to be stored, the oldest first, shape ``(n, frame_size)``
        """
        count = int(self.counts[env])
        for number, frame in enumerate(frames, count):
            self._frames[env, number % self._length] = frame
        self.counts[env] = count + len(frames)

    def gather(self, envs: IntArray, numbers: IntArray) -> Frames:
        """
        :param envs: numbers of environments, to be broadcast against ``numbers``
        :param numbers: of frames that are kept
        :return: copies of the frames, shape ``(*numbers.shape, frame_size)``
        """
        places = envs * self._length + numbers % self._length
        return self._frames.reshape(-1, self.frame_size).take(places, axis=0)

    def clear(self) -> None:
        """Forget all frames, and count from 0 again."""
        self.counts[:] = 0


class CompressedFrameRing(FrameRing):
    """
    The same, with frames compressed by Zstandard, eight neighbours together. A few more frames
    than ``length`` are kept, as a block is dropped as a whole.

    :param n_envs: number of environments
    :param length: how many frames of each are kept at least
    :param frame_size: bytes of a frame
    :param level: of compression, from 1 (fast) to 22 (small)
    """

    def __init__(self, n_envs: int, length: int, frame_size: int, level: int) -> None:
        self._level = level
        self._lock = threading.Lock()
        super().__init__(n_envs, math.ceil(length / FRAMES_IN_BLOCK), frame_size)

    def _allocate(self) -> None:
        n_envs = len(self.counts)
        #: Whole blocks, a ring for each environment
        self._blocks: list[list[bytes]] = [[b""] * self._length for _ in range(n_envs)]
        #: The block that is being filled
        self._newest = np.zeros((n_envs, FRAMES_IN_BLOCK, self.frame_size), dtype=np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory of the frames in bytes."""
        # Of each block, a pointer and an object
        sizes = (8 + sys.getsizeof(block) for ring in self._blocks for block in ring)
        return sum(sizes) + self._newest.nbytes

    def first(self, env: int) -> int:
        """
        :param env: number of the environment
        :return: number of its oldest frame that is kept
        """
        n_blocks = int(self.counts[env]) // FRAMES_IN_BLOCK
        return max(n_blocks - self._length, 0) * FRAMES_IN_BLOCK

    def append(self, env: int, frames: Frames) -> None:
        """
        :param env: number of the environment
        :param frames: to be stored, the oldest first, shape ``(n, frame_size)``
        """
        compressor = _zstandard().ZstdCompressor(level=self._level, write_content_size=False)
        for frame in frames:
            number = int(self.counts[env])
            block, place = divmod(number, FRAMES_IN_BLOCK)
            # Another thread that draws a batch meanwhile finds a block whole, or not at all
            with self._lock:
                self._newest[env, place] = frame
                if place == FRAMES_IN_BLOCK - 1:
                    compressed = compressor.compress(self._newest[env])
                    # A copy: what the library returns keeps the memory of what it compressed
                    self._blocks[env][block % self._length] = bytes(memoryview(compressed))
                self.counts[env] = number + 1

    def gather(self, envs: IntArray, numbers: IntArray) -> Frames:
        """
        :param envs: numbers of environments, to be broadcast against ``numbers``
        :param numbers: of frames that are kept
        :return: the frames, shape ``(*numbers.shape, frame_size)``
        """
        frames = np.empty((*numbers.shape, self.frame_size), dtype=np.uint8)
        size, target = self.frame_size, frames.reshape(-1).data
        decompressor = _zstandard().ZstdDecompressor()
        with self._lock:
            # What was dropped since the draw, by another thread, gives way to what is there
            firsts = np.array([self.first(env) for env in range(len(self.counts))])
            numbers = np.clip(numbers, firsts[envs], np.maximum(self.counts[envs] - 1, 0))
            # One number for environment, block and place
            n_blocks = int(self.counts.max()) // FRAMES_IN_BLOCK + 1
            places = (numbers + envs * n_blocks * FRAMES_IN_BLOCK).ravel()
            # Neighbours of one block are copied together, block by block, so that each is
            # decompressed once
            is_start = (np.diff(places, prepend=-2) != 1) | (places % FRAMES_IN_BLOCK == 0)
            starts = np.flatnonzero(is_start)
            stops = np.append(starts[1:], len(places))
            order = np.argsort(places[starts])
            starts, stops = starts[order], stops[order]
            blocks, firsts_in_block = np.divmod(places[starts], FRAMES_IN_BLOCK)
            envs, blocks = np.divmod(blocks, n_blocks)
            is_new = (np.diff(blocks, prepend=-1) != 0) | (np.diff(envs, prepend=-1) != 0)
            is_whole = blocks != self.counts[envs] // FRAMES_IN_BLOCK
            # Plain numbers: in the loop, those of NumPy would take as long as all the rest
            parts = (starts, stops, firsts_in_block, envs, blocks % self._length, is_new, is_whole)
            content = memoryview(b"")
            for start, stop, first, env, block, new, whole in zip(
                *(part.tolist() for part in parts), strict=True
            ):
                if new and whole:
                    decompressed = decompressor.decompress(
                        self._blocks[env][block], max_output_size=FRAMES_IN_BLOCK * size
                    )
                    content = memoryview(decompressed)
                elif new:
                    content = self._newest[env].reshape(-1).data
                target[start * size : stop * size] = content[
                    first * size : (first + stop - start) * size
                ]
        return frames

    def clear(self) -> None:
        """Forget all frames, and count from 0 again."""
        with self._lock:
            super().clear()
            self._allocate()


def make_frame_ring(
    compression: str | None, n_envs: int, length: int, frame_size: int
) -> FrameRing:
    """
    :param compression: None, ``"zstd"``, or ``"zstd-LEVEL"`` with a level from 1 to 22
    :param n_envs: number of environments
    :param length: how many frames of each are kept at least
    :param frame_size: bytes of a frame
    :return: an empty ring
    :raises ValueError: if ``compression`` is none of these
    :raises ImportError: if the library is missing
    """
    if compression is None:
        return FrameRing(n_envs, length, frame_size)
    level = compression_level(compression)
    _zstandard()
    return CompressedFrameRing(n_envs, length, frame_size, level)


def compression_level(compression: Any) -> int:
    """
    :param compression: ``"zstd"`` or ``"zstd-LEVEL"``
    :return: its level
    :raises ValueError: if it is neither, or the level is not from 1 to 22
    """
    name, _, level = str(compression).partition("-")
    if compression == "zstd":
        return DEFAULT_LEVEL
    if name == "zstd" and level.isdecimal() and 1 <= int(level) <= 22:
        return int(level)
    raise ValueError(
        "`compression` must be None, 'zstd', or 'zstd-LEVEL' with a level from 1 (fast) to 22 "
        f"(small), got {compression!r}"
    )


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ImportError(
            "`compression='zstd'` needs the package zstandard: pip install \"sb3-per[compression]\""
        ) from None
    return zstandard
