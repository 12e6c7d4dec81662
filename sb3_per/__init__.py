"""
Prioritized Experience Replay (Schaul et al. 2016) for Stable-Baselines3.

Importing this package registers the toy environments of ``sb3_per_envs``.
"""

from importlib import import_module as _import_module
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
from sb3_per.common.priorities import PriorityContext
from sb3_per.per_dqn import PERDQN
from sb3_per.per_sac import PERSAC
from sb3_per.per_td3 import PERDDPG, PERTD3
from sb3_per.trees import RankTree, SumTree

if _TYPE_CHECKING:
    from sb3_per.per_qrdqn import PERQRDQN
    from sb3_per.per_tqc import PERTQC

__version__ = "0.1.0"

__all__ = [
    "PERDDPG",
    "PERDQN",
    "PERSAC",
    "PERTD3",
    "PERLoggerCallback",
    "PrioritizedDictReplayBuffer",
    "PrioritizedDictReplayBufferSamples",
    "PrioritizedFrameReplayBuffer",
    "PrioritizedHerReplayBuffer",
    "PrioritizedOffPolicyAlgorithm",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "PriorityContext",
    "RankTree",
    "ReplaySnapshot",
    "ReplaySnapshotCallback",
    "SumTree",
    "__version__",
    "drawable_indices",
    "td_errors_in_buffer",
]
# Classes that need sb3-contrib, and the modules that define them
_CONTRIB = {"PERQRDQN": "sb3_per.per_qrdqn", "PERTQC": "sb3_per.per_tqc"}
if _find_spec("sb3_contrib"):
    __all__ += ["PERQRDQN", "PERTQC"]


def __getattr__(name: str) -> _Any:
    # Imported on first use: without sb3-contrib, that module raises an error that names it
    if name in _CONTRIB:
        return getattr(_import_module(_CONTRIB[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sb3_per_envs.register_envs()
