"""The study ``hypotheses``: why prioritized replay might not help, each reason tested alone."""

from studies.networks import NetworkStudy

__all__ = ["STUDY"]

STUDY = NetworkStudy(
    tasks=["corridor-10", "cliffwalk-10-every-16"],
    agents=[
        "uniform",
        "per",
        "per(alpha=0.4)",
        "per(alpha=0.8)",
        "per(beta=0.5, beta_final=0.5)",
        "per(beta=1.0)",
        "per(priority_eps=0.01)",
        "per(priority_eps=0.1)",
        "per(prioritization='rank', alpha=0.7, beta=0.5)",
        "per_trial(new_priority='measured')",
        "per(initial_priority='td_error')",
        "per_trial(refresh=True)",
        "per_trial(uniform_share=0.25)",
        "per_trial(weight_divisor='mean')",
        "per_trial(weight_divisor='none', learning_rate=0.00025)",
        "uniform(target_update_interval=50)",
        "per(target_update_interval=50)",
        "uniform(target_update_interval=1000)",
        "per(target_update_interval=1000)",
        "uniform(target_update_interval=8, tau=0.02)",
        "per(target_update_interval=8, tau=0.02)",
        # The best together
        "per_trial(new_priority='measured', uniform_share=0.25, target_update_interval=8, "
        "tau=0.02)",
    ],
    base="per",
)
