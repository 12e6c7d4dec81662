"""The study ``few-updates``: no more draws than new transitions."""

from studies.networks import NetworkStudy

__all__ = ["STUDY"]

STUDY = NetworkStudy(
    tasks=[
        "cliffwalk-10-every-64",
        "cliffwalk-8-every-64",
        "corridor-20-every-32",
        "cartpole-every-32",
        "acrobot-every-32",
        "lunarlander-every-32",
    ],
    agents=["uniform", "per", "per(initial_priority='td_error')"],
    base="per",
)
