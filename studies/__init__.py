"""The evidence behind docs/results.md: studies that can be rerun."""

from sb3_per.compare.agents import ALGORITHMS, Algorithm

# An agent of the studies alone, which worker processes know as soon as they import this package
ALGORITHMS["per_trial"] = Algorithm("studies.trials", "PERDQNTrial", "PER trial", True)
