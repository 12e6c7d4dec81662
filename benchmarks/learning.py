"""Whole training runs: environment steps per second of PERDQN against SB3's DQN."""

from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch as th
from sb3_contrib import QRDQN
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv, SimpleMultiObsEnv

from benchmarks.race import Contestant, Race
from sb3_per import PERDQN, PERQRDQN

#: SB3's (sb3-contrib's) algorithm; ours by default, in the plain way, and by rank
ORIGINAL, OURS, PLAIN, BY_RANK = "original", "compiled", "plain", "by rank"
OPTIONS: dict[str, dict[str, Any]] = {
    OURS: {},
    PLAIN: {"compiled": False},
    BY_RANK: {"prioritization": "rank"},
}


class Case(NamedTuple):
    """
    One training run.

    :param train_freq: number of steps of each environment per gradient step
    :param n_envs: number of environments
    :param batch_size: number of transitions per gradient step
    :param width: width of the two layers
    :param has_quantiles: whether to train PERQRDQN (with 200 quantiles) instead of PERDQN
    """

    train_freq: int
    n_envs: int
    batch_size: int
    width: int = 64
    has_quantiles: bool = False

    def __str__(self) -> str:
        name = "PERQRDQN" if self.has_quantiles else "PERDQN"
        envs = f"{self.n_envs} env{'s' * (self.n_envs > 1)}"
        layers = f"{self.width}-{self.width}"
        return f"{name}, {layers}, batch {self.batch_size}, train_freq={self.train_freq}, {envs}"


CASES = [
    Case(train_freq=1, n_envs=1, batch_size=32),
    Case(train_freq=4, n_envs=1, batch_size=32),
    Case(train_freq=1, n_envs=8, batch_size=32),
    Case(train_freq=4, n_envs=8, batch_size=32),
    Case(train_freq=1, n_envs=1, batch_size=256),
    Case(train_freq=1, n_envs=1, batch_size=64, width=256),
    Case(train_freq=1, n_envs=1, batch_size=32, has_quantiles=True),
]


def race(case: Case, rounds: int, steps: int) -> Race:
    """
    CartPole-v1, ``MlpPolicy`` with two layers, otherwise SB3's defaults.

    :param case: settings of the training run
    :param rounds: number of rounds
    :param steps: number of gradient steps in each turn
    :return: seconds for a turn of each algorithm
    """
    original, ours = (QRDQN, PERQRDQN) if case.has_quantiles else (DQN, PERDQN)
    models: dict[str, Any] = {}
    for name in (ORIGINAL, *OPTIONS):
        algorithm: Any = original if name == ORIGINAL else ours
        model = algorithm(
            "MlpPolicy",
            make_vec_env("CartPole-v1", n_envs=case.n_envs, seed=0),
            **OPTIONS.get(name, {}),
            policy_kwargs={"net_arch": [case.width, case.width]},
            train_freq=case.train_freq,
            batch_size=case.batch_size,
            buffer_size=100_000,
            learning_starts=200,
            seed=0,
            device="cpu",
        )
        # Compiled, warm, and after `learning_starts`
        models[name] = model.learn(400)
    total = steps * case.train_freq * case.n_envs
    contestants: dict[str, Contestant] = {
        name: partial(model.learn, total, reset_num_timesteps=False)
        for name, model in models.items()
    }
    if case == CASES[0]:
        with suppress(Exception):  # where it doesn't run, it doesn't take part
            contestants["tianshou"] = tianshou_loop(steps)
    return Race.run(f"learn, {case}", contestants, rounds, seconds=0.0)


def tianshou_loop(steps: int) -> Contestant:
    """
    The DQN of tianshou with its prioritized buffer, one gradient step with a batch of 32 for each
    step of CartPole.

    :param steps: number of steps in each turn
    :return: function that runs a turn
    """
    import gymnasium as gym
    from tianshou.data import Collector, PrioritizedVectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.policy import DQNPolicy
    from tianshou.utils.net.common import Net

    network = Net((4,), 2, hidden_sizes=[64, 64], device="cpu")
    optimizer = th.optim.Adam(network.parameters(), lr=1e-4)
    policy = DQNPolicy(network, optimizer, 0.99, 1, target_update_freq=10_000)
    policy.set_eps(0.1)
    buffer = PrioritizedVectorReplayBuffer(100_000, buffer_num=1, alpha=0.6, beta=0.4)
    envs = DummyVectorEnv([lambda: gym.make("CartPole-v1")])
    collector = Collector(policy, envs, buffer, exploration_noise=True)
    collector.collect(n_step=200)

    def turn() -> None:
        for _ in range(steps):
            collector.collect(n_step=1)
            policy.update(32, buffer)

    return turn


def race_train(policy: str, rounds: int) -> Race:
    """
    ``train`` alone, for policies whose environments would take too long.

    :param policy: ``"MlpPolicy"``, ``"CnnPolicy"`` or ``"MultiInputPolicy"``
    :param rounds: number of rounds
    :return: seconds for a gradient step of each algorithm
    """
    envs: dict[str, Any] = {
        "MlpPolicy": "CartPole-v1",
        "CnnPolicy": FakeImageEnv(
            screen_height=84, screen_width=84, n_channels=4, discrete=True, channel_first=True
        ),
        "MultiInputPolicy": SimpleMultiObsEnv(random_start=False),
    }
    arguments: dict[str, Any] = {"buffer_size": 1000, "learning_starts": 200, "seed": 0}
    models = {
        ORIGINAL: DQN(policy, envs[policy], **arguments, device="cpu").learn(220),
        OURS: PERDQN(policy, envs[policy], **arguments, device="cpu").learn(220),
        PLAIN: PERDQN(policy, envs[policy], **arguments, device="cpu", compiled=False).learn(220),
    }
    return Race.run(
        f"train, {policy}",
        {name: partial(model.train, 4, 32) for name, model in models.items()},
        rounds,
        seconds=0.2,
    )


def one_thread() -> None:
    """Use one thread: more make small networks slower, and times less stable."""
    th.set_num_threads(1)
