"""Trees of priorities: weighted draws among millions of them. They need neither torch nor SB3."""

from sb3_per.trees.priority_tree import PriorityTree
from sb3_per.trees.rank_tree import RankTree
from sb3_per.trees.sum_tree import SumTree

__all__ = ["PriorityTree", "RankTree", "SumTree"]
