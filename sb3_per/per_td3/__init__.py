"""TD3 and DDPG with prioritized replay."""

from sb3_per.per_td3.per_ddpg import PERDDPG
from sb3_per.per_td3.per_td3 import PERTD3

__all__ = ["PERDDPG", "PERTD3"]
