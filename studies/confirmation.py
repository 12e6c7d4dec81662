"""The study ``confirmation``: hard and soft target updates, on tasks that nothing was tuned on."""

from studies.networks import NetworkStudy

__all__ = ["STUDY"]

STUDY = NetworkStudy(
    tasks=["corridor-20", "cartpole", "acrobot"],
    agents=[
        "uniform",
        "per",
        "uniform(target_update_interval=8, tau=0.02)",
        "per(target_update_interval=8, tau=0.02)",
    ],
    base="uniform",
)
