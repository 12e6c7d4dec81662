"""
Prioritized Experience Replay (Schaul et al. 2016) for Stable-Baselines3.

Importing this package registers the toy environments of ``sb3_per_envs``.
"""

import sb3_per_envs
from sb3_per.common.buffers import (
    PrioritizedDictReplayBuffer,
    PrioritizedHerReplayBuffer,
    PrioritizedReplayBuffer,
)
from sb3_per.common.sum_tree import SumTree
from sb3_per.common.type_aliases import (
    PrioritizedDictReplayBufferSamples,
    PrioritizedReplayBufferSamples,
)
from sb3_per.per_dqn import PERDQN

__version__ = "0.1.0"

__all__ = [
    "PERDQN",
    "PrioritizedDictReplayBuffer",
    "PrioritizedDictReplayBufferSamples",
    "PrioritizedHerReplayBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedReplayBufferSamples",
    "SumTree",
    "__version__",
]

sb3_per_envs.register_envs()
