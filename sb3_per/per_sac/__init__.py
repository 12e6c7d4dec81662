"""SAC with prioritized replay."""

from sb3_per.per_sac.per_sac import PERSAC

__all__ = ["PERSAC"]
