"""
Prioritized Experience Replay (Schaul et al. 2016) for Stable-Baselines3.

Importing this package registers the toy environments of ``sb3_per_envs``.
"""

from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

import sb3_per_envs
from sb3_per.buffers import (
    PrioritizedDictReplayBuffer,
    PrioritizedDictReplayBufferSamples,
    PrioritizedFrameReplayBuffer,
    PrioritizedHerReplayBuffer,
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)
from sb3_per.callbacks import (
    PERLoggerCallback,
    ReplaySnapshot,
    ReplaySnapshotCallback,
    drawable_indices,
    td_errors_in_buffer,
)
from sb3_per.common.off_policy import PrioritizedOffPolicyAlgorithm
from sb3_per.per_dqn import PERDQN
from sb3_per.trees import RankTree, SumTree

if _TYPE_CHECKING:
    from sb3_per.per_qrdqn import PERQRDQN

__version__ = "0.1.0"

__all__ = [
    "PERDQN",
    "PERLoggerCallback",
    "PrioritizedDictReplayBuffer",
    "PrioritizedDictReplayBufferSamples",
    "PrioritizedFrameReplayBuffer",
    "PrioritizedHerReplayBuffer",
    "PrioritizedOffPolicyAlgorithm",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "RankTree",
    "ReplaySnapshot",
    "ReplaySnapshotCallback",
    "SumTree",
    "__version__",
    "drawable_indices",
    "td_errors_in_buffer",
]
if _find_spec("sb3_contrib"):
    __all__ += ["PERQRDQN"]


def __getattr__(name: str) -> _Any:
    # Not before it is asked for: it needs sb3-contrib, and says so where that is missing
    if name == "PERQRDQN":
        from sb3_per.per_qrdqn import PERQRDQN

        return PERQRDQN
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sb3_per_envs.register_envs()
