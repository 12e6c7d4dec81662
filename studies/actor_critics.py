"""
The studies ``td3-pendulum``, ``td3-hopper``, ``sac-pendulum`` and ``sac-hopper``: does prioritized
replay help actor-critics, and does it do so as LAP or ReLo?

The plan, written before any run was made:

- Tasks: Pendulum-v1, 20,000 steps, 10 seeds (0 to 9); MuJoCo's Hopper-v5, 50,000 steps, 5 seeds
  (0 to 4). Hyperparameters are those of rl-zoo3 for the originals, not tuned again.
- Agents: TD3 uniform, with PER (the defaults of PERTD3), LAP and ReLo; SAC uniform and with LAP.
- Measure: the greedy return over training, the mean of all evaluations but the one before
  training. Final returns and curves are shown beside it, and decide nothing.
- Comparisons: each agent with the uniform one of its algorithm on the same task, eight in all, by
  the probability to be better, with its 95 % interval, and Mann and Whitney's test; Holm's
  correction over the eight at 5 %. What is worse than uniform is shown like what is better.
- No claim beyond these tasks, budgets and settings. With five seeds, only large differences can be
  told from chance.
- About eight core-hours: 60 runs of 20,000 steps, 30 of 50,000. Hopper needs
  ``pip install "gymnasium[mujoco]"``.

Nothing of it has been run yet.
"""

from studies.networks import NetworkStudy

__all__ = ["STUDIES"]

LAP = "alpha=0.4, beta=0, beta_final=0, loss='huber', priority='clipped'"
TD3 = ["td3", "per_td3", f"per_td3({LAP})", "per_td3(priority='reducible')"]
SAC = ["sac", f"per_sac({LAP})"]

STUDIES = {
    "td3-pendulum": NetworkStudy(tasks=["pendulum"], agents=TD3, base="td3", n_seeds=10),
    "td3-hopper": NetworkStudy(tasks=["hopper"], agents=TD3, base="td3", n_seeds=5),
    "sac-pendulum": NetworkStudy(tasks=["pendulum"], agents=SAC, base="sac", n_seeds=10),
    "sac-hopper": NetworkStudy(tasks=["hopper"], agents=SAC, base="sac", n_seeds=5),
}
