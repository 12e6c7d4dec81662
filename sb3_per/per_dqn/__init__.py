"""DQN with prioritized replay."""

from sb3_per.per_dqn.per_dqn import PERDQN

__all__ = ["PERDQN"]
