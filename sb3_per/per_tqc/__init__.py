"""Truncated Quantile Critics with prioritized experience replay; needs sb3-contrib."""

try:
    import sb3_contrib  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "sb3_contrib":
        raise
    raise ImportError(
        'PERTQC builds on sb3-contrib, which is not installed: pip install "sb3-per[contrib]"'
    ) from error

from sb3_per.per_tqc.per_tqc import PERTQC

__all__ = ["PERTQC"]
