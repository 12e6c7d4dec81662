"""
Toy environments on which prioritized replay can be checked: Gymnasium and NumPy, no torch.

Importing this package registers ``sb3_per/GridWorld-v0`` and ``sb3_per/BlindCliffwalk-v0``.
"""

from sb3_per_envs.blind_cliffwalk import BlindCliffwalkEnv
from sb3_per_envs.grid_world import GridWorldEnv
from sb3_per_envs.registration import register_envs

__all__ = ["BlindCliffwalkEnv", "GridWorldEnv", "register_envs"]

register_envs()
