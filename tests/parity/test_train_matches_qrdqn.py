"""With ``alpha=0, beta=0`` PERQRDQN is sb3-contrib's QRDQN: whole runs agree."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import QRDQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from sb3_per import PERQRDQN, PrioritizedReplayBuffer, PrioritizedReplayBufferSamples

FloatArray = npt.NDArray[np.float32]


class WalkEnv(gym.Env[FloatArray, np.int64]):
    """Walks about at random, ends one episode in three by termination, the rest by time."""

    observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        over = self.n_steps >= 5
        terminated = over and bool(self.np_random.random() < 1 / 3)
        # Large enough now and then for the linear part of the Huber loss
        reward = float(self.np_random.normal(scale=3.0)) + float(action)
        return self._observation(), reward, terminated, over, {}

    def _observation(self) -> FloatArray:
        return self.np_random.normal(size=3).astype(np.float32)


SMALL: dict[str, Any] = {
    "buffer_size": 90,
    "learning_starts": 20,
    # No powers of two: means of means would be rounded otherwise
    "batch_size": 23,
    "train_freq": 4,
    "gradient_steps": 2,
    "gamma": 0.9,
    "tau": 0.7,
    "target_update_interval": 12,
    "exploration_fraction": 0.8,
    "learning_rate": 0.01,
    "seed": 3,
    "device": "cpu",
}


def policy_kwargs(optimizer: type[th.optim.Optimizer] = th.optim.Adam) -> dict[str, Any]:
    # With `foreach` chosen, the optimizer is the same loop in both
    same_kernel = {"optimizer_class": optimizer, "optimizer_kwargs": {"foreach": False}}
    return {"net_arch": [16], "n_quantiles": 7, **same_kernel}


def record_draws(model: PERQRDQN) -> list[npt.NDArray[np.int64]]:
    buffer = model.replay_buffer
    assert isinstance(buffer, PrioritizedReplayBuffer)
    drawn: list[npt.NDArray[np.int64]] = []
    original = buffer.sample

    def sample(batch_size: int, env: VecNormalize | None = None) -> PrioritizedReplayBufferSamples:
        batch = original(batch_size, env=env)
        drawn.append(batch.indices)
        return batch

    buffer.sample = sample  # type: ignore[method-assign]
    return drawn


def replay_draws(model: QRDQN, draws: Iterator[npt.NDArray[np.int64]]) -> None:
    """Let SB3's own buffer make its batches of the transitions that PERQRDQN drew."""
    buffer = model.replay_buffer
    assert isinstance(buffer, ReplayBuffer)
    assert not isinstance(buffer, PrioritizedReplayBuffer)

    def sample(batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        # The global generator moves on as it did there: exploration draws from it, too
        np.random.random_sample(batch_size)
        rows, envs = np.divmod(next(draws), buffer.n_envs)
        with mock.patch("numpy.random.randint", return_value=envs):
            return buffer._get_samples(rows, env)

    buffer.sample = sample  # type: ignore[method-assign]


def run_both(
    env: type[gym.Env[Any, Any]] = WalkEnv,
    n_envs: int = 1,
    total: int = 120,
    options: dict[str, Any] | None = None,
    normalize: bool = False,
    **kwargs: Any,
) -> tuple[PERQRDQN, QRDQN]:
    def make_env() -> VecEnv:
        venv = DummyVecEnv([env] * n_envs)
        return VecNormalize(venv, gamma=0.9) if normalize else venv

    kwargs = {**SMALL, **kwargs}
    options = {"alpha": 0.0, "beta": 0.0, **(options or {})}
    prioritized = PERQRDQN("MlpPolicy", make_env(), **kwargs, **options)
    drawn = record_draws(prioritized)
    prioritized.learn(total)
    plain = QRDQN("MlpPolicy", make_env(), **kwargs)
    replay_draws(plain, iter(drawn))
    plain.learn(total)
    assert prioritized._n_updates == plain._n_updates == len(drawn) > 0
    return prioritized, plain


def largest_difference(ours: QRDQN, theirs: QRDQN) -> float:
    pairs = zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
@pytest.mark.parametrize("optimizer", [th.optim.SGD, th.optim.Adam], ids=lambda cls: cls.__name__)
def test_a_whole_run_equals_that_of_qrdqn_to_the_last_bit(
    optimizer: type[th.optim.Optimizer], max_grad_norm: float | None, n_envs: int, n_steps: int
) -> None:
    prioritized, plain = run_both(
        n_envs=n_envs,
        n_steps=n_steps,
        max_grad_norm=max_grad_norm,
        policy_kwargs=policy_kwargs(optimizer),
    )
    assert prioritized.replay_buffer is not None
    assert prioritized.replay_buffer.full, "the ring should have wrapped around"
    assert largest_difference(prioritized, plain) == 0.0
    assert prioritized.exploration_rate == plain.exploration_rate


def test_a_normalized_environment_gives_the_same_run() -> None:
    prioritized, plain = run_both(n_envs=2, normalize=True, policy_kwargs=policy_kwargs())
    assert largest_difference(prioritized, plain) == 0.0


def test_default_optimizers_agree_up_to_rounding() -> None:
    prioritized, plain = run_both(total=40, policy_kwargs={"net_arch": [16], "n_quantiles": 7})
    settings = [model.policy.optimizer.defaults for model in (prioritized, plain)]
    assert [setting["eps"] for setting in settings] == [0.01 / 23] * 2
    assert largest_difference(prioritized, plain) < 1e-5


@pytest.mark.parametrize("options", [{"alpha": 0.6, "beta": 0.4}, {"double_q": True}], ids=str)
def test_the_comparison_would_show_weights_or_other_targets(options: dict[str, Any]) -> None:
    prioritized, plain = run_both(
        options=options, policy_kwargs=policy_kwargs(), target_update_interval=1000
    )
    assert largest_difference(prioritized, plain) > 1e-4


def test_the_same_seed_makes_the_same_networks() -> None:
    kwargs: dict[str, Any] = {"seed": 11, "buffer_size": 10, "device": "cpu"}
    prioritized = PERQRDQN("MlpPolicy", WalkEnv(), **kwargs)
    plain = QRDQN("MlpPolicy", WalkEnv(), **kwargs)
    assert largest_difference(prioritized, plain) == 0.0
