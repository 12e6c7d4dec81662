"""Replay buffers that draw transitions by priority."""

from sb3_per.buffers.dictionary import PrioritizedDictReplayBuffer
from sb3_per.buffers.frames import PrioritizedFrameReplayBuffer
from sb3_per.buffers.her import PrioritizedHerReplayBuffer
from sb3_per.buffers.replay import PrioritizedReplayBuffer
from sb3_per.buffers.samples import (
    PrioritizedDictReplayBufferSamples,
    PrioritizedReplayBufferSamples,
)

__all__ = [
    "PrioritizedDictReplayBuffer",
    "PrioritizedDictReplayBufferSamples",
    "PrioritizedFrameReplayBuffer",
    "PrioritizedHerReplayBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
]
