"""Callbacks that inspect the replay buffer during training."""

from sb3_per.callbacks.snapshots import ReplaySnapshot, ReplaySnapshotCallback
from sb3_per.callbacks.statistics import PERLoggerCallback
from sb3_per.callbacks.td_errors import drawable_indices, td_errors_in_buffer

__all__ = [
    "PERLoggerCallback",
    "ReplaySnapshot",
    "ReplaySnapshotCallback",
    "drawable_indices",
    "td_errors_in_buffer",
]
