"""The studies behind docs/results.md, which can be run again."""

from sb3_per.compare.agents import ALGORITHMS, Algorithm

# An agent for the studies only, registered here so that worker processes know it, too
ALGORITHMS["per_trial"] = Algorithm("studies.trials", "PERDQNTrial", "PER trial", True)
