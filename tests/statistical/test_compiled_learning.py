"""Compiled code learns a task as well as torch does."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import mannwhitneyu
from stable_baselines3.common.callbacks import BaseCallback

from model_helpers import silent
from sb3_per import PERDQN

pytestmark = pytest.mark.slow

N_SEEDS = 8

#: Chance of a false alarm on a machine whose rounding makes other runs of the same seeds
ALPHA = 0.001

TASKS: dict[str, tuple[int, dict[str, Any]]] = {
    "CartPole-v1": (
        5_000,
        {"learning_rate": 1e-3, "target_update_interval": 100, "learning_starts": 200},
    ),
    "LunarLander-v3": (
        5_000,
        {"learning_rate": 6e-4, "target_update_interval": 250, "learning_starts": 500},
    ),
}


class Returns(BaseCallback):
    """Keeps the returns of all episodes of training."""

    def __init__(self) -> None:
        super().__init__()
        self.returns: list[float] = []

    def _on_step(self) -> bool:
        infos = self.locals["infos"]
        self.returns += [float(info["episode"]["r"]) for info in infos if "episode" in info]
        return True


def mean_returns(task: str, compiled: bool, **options: Any) -> list[float]:
    """:return: mean return of the episodes of training, for each seed"""
    timesteps, arguments = TASKS[task]
    means = []
    for seed in range(N_SEEDS):
        model = silent(
            PERDQN(
                "MlpPolicy",
                task,
                buffer_size=timesteps,
                train_freq=1,
                exploration_fraction=0.3,
                policy_kwargs={"net_arch": [64, 64]},
                seed=seed,
                device="cpu",
                compiled=compiled,
                **{**arguments, **options},
            )
        )
        returns = Returns()
        model.learn(timesteps, callback=returns)
        assert model.uses_compiled_update == compiled
        means.append(float(np.mean(returns.returns)))
    return means


@pytest.mark.parametrize("task", TASKS)
def test_returns_over_training_are_those_of_torch(task: str) -> None:
    """
    Neither way is better: the test of Mann and Whitney on the mean returns of 8 seeds each. That
    a model which hardly learns would be found shows that the test can tell.
    """
    if task.startswith("LunarLander"):
        for package in ("Box2D", "pygame"):
            pytest.importorskip(package, reason="needs the extra `studies`")
    plain = mean_returns(task, compiled=False)
    assert mannwhitneyu(mean_returns(task, compiled=True), plain).pvalue > ALPHA
    if task == "CartPole-v1":
        idle = mean_returns(task, compiled=True, learning_rate=1e-6)
        assert mannwhitneyu(idle, plain).pvalue < ALPHA
