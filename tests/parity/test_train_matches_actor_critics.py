"""
With ``alpha=0, beta=0`` PERSAC, PERTD3, PERDDPG and PERTQC are SAC, TD3, DDPG and TQC: whole runs
agree to the last bit, the entropy coefficient, target networks and optimizers included.
"""

from copy import deepcopy
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import TQC
from stable_baselines3 import DDPG, SAC, TD3
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.save_util import recursive_getattr
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from actor_critic_helpers import differences, tensors_of
from sb3_per import (
    PERDDPG,
    PERSAC,
    PERTD3,
    PERTQC,
    PrioritizedReplayBuffer,
    PrioritizedReplayBufferSamples,
)

FloatArray = npt.NDArray[np.float32]


class WalkEnv(gym.Env[FloatArray, FloatArray]):
    """Walks about at random, ends one episode in three by termination, the rest by time."""

    observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
    action_space = spaces.Box(-2.0, 3.0, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[FloatArray, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self._observation(), {}

    def step(self, action: FloatArray) -> tuple[FloatArray, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        over = self.n_steps >= 5
        terminated = over and bool(self.np_random.random() < 1 / 3)
        # Large enough now and then for the linear part of the Huber loss
        reward = float(self.np_random.normal(scale=3.0)) + float(action.sum())
        return self._observation(), reward, terminated, over, {}

    def _observation(self) -> FloatArray:
        return self.np_random.normal(size=3).astype(np.float32)


class NormalizedFeatures(BaseFeaturesExtractor):
    """With running statistics, which target networks copy."""

    def __init__(self, observation_space: spaces.Box) -> None:
        super().__init__(observation_space, 3)
        self.layer = th.nn.BatchNorm1d(3)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        normalized: th.Tensor = self.layer(observations)
        return normalized


SMALL: dict[str, Any] = {
    "buffer_size": 64,
    "learning_starts": 20,
    # No powers of two: means of means would be rounded otherwise
    "batch_size": 23,
    "train_freq": 4,
    "gradient_steps": 3,
    "gamma": 0.9,
    "tau": 0.3,
    "learning_rate": 0.01,
    "seed": 3,
    "device": "cpu",
}
ALGORITHMS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "SAC": (PERSAC, SAC, {}, {}),
    "SAC, fixed entropy": (PERSAC, SAC, {"ent_coef": 0.3, "target_update_interval": 2}, {}),
    "SAC, gSDE": (PERSAC, SAC, {"use_sde": True, "ent_coef": "auto_0.1"}, {"n_critics": 3}),
    "TD3": (PERTD3, TD3, {"policy_delay": 2}, {}),
    "TD3, one critic": (PERTD3, TD3, {"policy_delay": 3}, {"n_critics": 1}),
    "DDPG": (PERDDPG, DDPG, {}, {}),
    "TQC": (PERTQC, TQC, {}, {"n_quantiles": 7}),
    "TQC, three critics": (
        PERTQC,
        TQC,
        {"top_quantiles_to_drop_per_net": 3, "ent_coef": 0.1},
        {"n_quantiles": 5, "n_critics": 3},
    ),
}
NAMES = pytest.mark.parametrize("name", list(ALGORITHMS))


def walks(n_envs: int, normalize: bool = False) -> VecEnv:
    env = DummyVecEnv([WalkEnv] * n_envs)
    return VecNormalize(env, gamma=0.9) if normalize else env


def share_draws(ours: Any) -> list[npt.NDArray[np.int64]]:
    drawn: list[npt.NDArray[np.int64]] = []
    original = ours.replay_buffer.sample

    def sample(batch_size: int, env: VecNormalize | None = None) -> PrioritizedReplayBufferSamples:
        batch: PrioritizedReplayBufferSamples = original(batch_size, env=env)
        drawn.append(batch.indices)
        assert ours.alpha > 0.0 or bool((batch.weights == 1.0).all())
        return batch

    ours.replay_buffer.sample = sample
    return drawn


def replay_draws(theirs: Any, drawn: list[npt.NDArray[np.int64]]) -> None:
    """Let SB3's own buffer make its batches of the transitions that ours drew."""
    buffer = theirs.replay_buffer
    assert not isinstance(buffer, PrioritizedReplayBuffer)
    draws = iter(drawn)

    def sample(batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        np.random.random_sample(batch_size)
        rows, envs = np.divmod(next(draws), buffer.n_envs)
        with mock.patch("numpy.random.randint", return_value=envs):
            batch: ReplayBufferSamples = buffer._get_samples(rows, env)
            return batch

    buffer.sample = sample


def run_both(
    name: str,
    n_envs: int = 1,
    normalize: bool = False,
    total: int = 80,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    ours, theirs, own, policy_kwargs = ALGORITHMS[name]
    kwargs = {**SMALL, **own, **kwargs}
    kwargs["policy_kwargs"] = {"net_arch": [8], **policy_kwargs, **kwargs.get("policy_kwargs", {})}
    if theirs in (TD3, DDPG):
        kwargs["action_noise"] = NormalActionNoise(np.zeros(2), np.full(2, 0.1))
    options = {"alpha": 0.0, "beta": 0.0, "beta_final": 0.0, **(options or {})}
    # SB3 writes into `policy_kwargs`
    prioritized = ours("MlpPolicy", walks(n_envs, normalize), **deepcopy(kwargs), **options)
    drawn = share_draws(prioritized)
    prioritized.learn(total)
    plain = theirs("MlpPolicy", walks(n_envs, normalize), **deepcopy(kwargs))
    for optimizer in prioritized._fused:
        # The same kernel for both: the loop over parameters rounds differently
        for group in recursive_getattr(plain, optimizer).param_groups:
            group["fused"] = True
    replay_draws(plain, drawn)
    plain.learn(total)
    assert prioritized._n_updates == plain._n_updates == len(drawn) > 0
    return prioritized, plain


@NAMES
@pytest.mark.parametrize(("n_envs", "n_steps"), [(1, 1), (2, 3)])
def test_a_whole_run_equals_that_of_the_original_to_the_last_bit(
    name: str, n_envs: int, n_steps: int
) -> None:
    prioritized, plain = run_both(name, n_envs, n_steps=n_steps)
    assert prioritized.replay_buffer.full, "the ring should have wrapped around"
    assert len(prioritized._fused) == len(prioritized._get_torch_save_params()[0]) - 1
    assert differences(prioritized, plain) == []
    for array in ("observations", "actions", "rewards", "dones", "timeouts"):
        ours, theirs = (getattr(model.replay_buffer, array) for model in (prioritized, plain))
        np.testing.assert_array_equal(ours, theirs, err_msg=array)


@pytest.mark.parametrize("name", ["SAC", "TD3", "TQC"])
def test_batch_normalization_a_normalized_environment_and_other_optimizers_agree(name: str) -> None:
    policy_kwargs = {
        "features_extractor_class": NormalizedFeatures,
        "optimizer_class": th.optim.RMSprop,
    }
    prioritized, plain = run_both(
        name, 2, normalize=True, total=60, policy_kwargs=policy_kwargs, gradient_steps=-1
    )
    assert differences(prioritized, plain) == []
    # Otherwise their equality would say nothing
    stats = [key for key in tensors_of(plain) if "critic_target" in key and "running_var" in key]
    assert stats
    assert not any(bool((tensors_of(plain)[key] == 1.0).any()) for key in stats)


@pytest.mark.parametrize("name", ["SAC", "TD3", "DDPG", "TQC"])
def test_the_comparison_would_show_weights_and_another_loss(name: str) -> None:
    weighted, plain = run_both(name, total=40, options={"alpha": 0.6, "beta": 0.4})
    assert len(differences(weighted, plain)) > 4
    if name != "TQC":
        huber, plain = run_both(name, total=40, options={"loss": "huber"})
        assert len(differences(huber, plain)) > 4
