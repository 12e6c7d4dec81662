"""
Side-by-side comparison of agents with uniform and with prioritized replay.

Needs the extra ``experiments``. The command is ``sb3-per compare``; docs/compare.md describes it.
"""
