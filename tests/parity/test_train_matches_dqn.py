"""With ``alpha=0, beta=0`` PERDQN is SB3's DQN: whole runs agree to the last bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from sb3_per import PERDQN, PrioritizedReplayBuffer, PrioritizedReplayBufferSamples

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class WalkEnv(gym.Env[FloatArray, np.int64]):
    """Walks about at random, ends one episode in three by termination, the rest by time."""

    observation_space = spaces.Box(-10.0, 10.0, (3,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(4)

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


class Frozen(NamedTuple):
    """What a run of PERDQN drew: the transitions of each batch, and their weights."""

    indices: list[IntArray]
    weights: list[th.Tensor]


def walks(n_envs: int) -> VecEnv:
    return DummyVecEnv([WalkEnv] * n_envs)


def record_draws(model: PERDQN, monkeypatch: pytest.MonkeyPatch) -> Frozen:
    buffer = model.replay_buffer
    assert isinstance(buffer, PrioritizedReplayBuffer)
    drawn = Frozen([], [])
    original = buffer.sample

    def sample(batch_size: int, env: VecNormalize | None = None) -> PrioritizedReplayBufferSamples:
        batch = original(batch_size, env=env)
        drawn.indices.append(batch.indices)
        drawn.weights.append(batch.weights)
        return batch

    monkeypatch.setattr(buffer, "sample", sample)
    return drawn


@contextmanager
def env_choice(envs: IntArray) -> Iterator[None]:
    """Make SB3's buffer take these environments instead of random ones."""
    with mock.patch("numpy.random.randint", return_value=envs):
        yield


def replay_draws(model: DQN, drawn: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SB3's own buffer make its batches of the transitions that PERDQN drew."""
    buffer = model.replay_buffer
    assert isinstance(buffer, ReplayBuffer)
    assert not isinstance(buffer, PrioritizedReplayBuffer)
    draws = iter(drawn.indices)

    def sample(batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        # The global generator moves on as it did there: exploration draws from it, too
        np.random.random_sample(batch_size)
        rows, envs = np.divmod(next(draws), buffer.n_envs)
        with env_choice(envs):
            return buffer._get_samples(rows, env)

    monkeypatch.setattr(buffer, "sample", sample)


def assert_same_tensors(ours: dict[str, th.Tensor], theirs: dict[str, th.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert th.equal(ours[name], theirs[name]), name


def differs(ours: DQN, theirs: DQN) -> bool:
    pairs = zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True)
    return not all(th.equal(one, other) for one, other in pairs)


def optimizer_tensors(model: DQN) -> dict[str, th.Tensor]:
    state: dict[int, dict[str, Any]] = model.policy.optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, th.Tensor)
    }


def linear(progress_remaining: float) -> float:
    return 1e-3 + 1e-2 * progress_remaining


SMALL: dict[str, Any] = {
    "buffer_size": 90,
    "learning_starts": 20,
    "batch_size": 24,
    "train_freq": 4,
    "gradient_steps": 2,
    "gamma": 0.9,
    "tau": 0.7,
    "target_update_interval": 12,
    "exploration_fraction": 0.8,
    "learning_rate": linear,
    "max_grad_norm": 0.3,
    "seed": 3,
    "device": "cpu",
}
OPTIMIZERS = [th.optim.SGD, th.optim.Adam, th.optim.RMSprop]


def run_both(
    monkeypatch: pytest.MonkeyPatch,
    make_env: Callable[[], VecEnv],
    n_steps: int,
    total: int,
    policy: str = "MlpPolicy",
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[PERDQN, DQN, Frozen]:
    kwargs = {**SMALL, "n_steps": n_steps, **kwargs}
    prioritized = PERDQN(policy, make_env(), **kwargs, **(options or {"alpha": 0.0, "beta": 0.0}))
    drawn = record_draws(prioritized, monkeypatch)
    prioritized.learn(total)
    plain = DQN(policy, make_env(), **kwargs)
    if prioritized._fused:
        # The same kernel for both: the loop over parameters rounds differently
        for group in plain.policy.optimizer.param_groups:
            group["fused"] = True
    replay_draws(plain, drawn, monkeypatch)
    plain.learn(total)
    return prioritized, plain, drawn


def assert_same_run(prioritized: PERDQN, plain: DQN) -> None:
    ours, theirs = prioritized.replay_buffer, plain.replay_buffer
    assert ours is not None
    assert theirs is not None
    assert ours.pos == theirs.pos
    assert ours.full == theirs.full
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert prioritized._n_updates == plain._n_updates > 0
    assert prioritized.exploration_rate == plain.exploration_rate
    assert_same_tensors(prioritized.policy.state_dict(), plain.policy.state_dict())
    assert_same_tensors(optimizer_tensors(prioritized), optimizer_tensors(plain))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_whole_run_equals_that_of_dqn_to_the_last_bit(
    optimizer: type[th.optim.Optimizer],
    n_steps: int,
    n_envs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prioritized, plain, drawn = run_both(
        monkeypatch,
        lambda: walks(n_envs),
        n_steps,
        total=120,
        policy_kwargs={"net_arch": [16], "optimizer_class": optimizer},
    )

    assert isinstance(plain.replay_buffer, NStepReplayBuffer) is (n_steps == 3)
    assert {len(batch) for batch in drawn.indices} == {24}
    assert all(bool((weights == 1.0).all()) for weights in drawn.weights)
    assert plain.replay_buffer is not None
    assert plain.replay_buffer.full, "the ring should have wrapped around"
    assert_same_run(prioritized, plain)


@pytest.mark.parametrize(
    "choice", [{"fused": False}, {"foreach": True}, {"foreach": False}], ids=str
)
def test_a_chosen_implementation_of_the_optimizer_is_that_of_dqn(
    choice: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    prioritized, plain, _ = run_both(
        monkeypatch,
        lambda: walks(1),
        1,
        total=60,
        policy_kwargs={"net_arch": [16], "optimizer_kwargs": choice},
    )
    assert not prioritized._fused
    assert_same_run(prioritized, plain)


def test_the_faster_kernel_differs_from_the_loop_over_parameters_by_rounding_alone() -> None:
    models = [
        PERDQN(
            "MlpPolicy",
            walks(1),
            **SMALL,
            policy_kwargs={"net_arch": [16], "optimizer_kwargs": optimizer_kwargs},
        ).learn(60)
        for optimizer_kwargs in ({}, {"fused": False})
    ]
    fused, loop = (model.policy.state_dict() for model in models)
    for name in fused:
        th.testing.assert_close(fused[name], loop[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_other_options_than_alpha_and_beta_change_nothing(
    optimizer: type[th.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    # All priorities are equal, whatever eps; so are all weights, whatever beta
    options = {
        "alpha": 0.0,
        "beta": 0.7,
        "priority_eps": 5.0,
        "weight_normalization": "buffer",
    }
    prioritized, plain, _ = run_both(
        monkeypatch,
        lambda: walks(1),
        1,
        total=60,
        options=options,
        policy_kwargs={"net_arch": [16], "optimizer_class": optimizer},
        gradient_steps=-1,
    )
    assert prioritized._n_updates == 40
    assert_same_run(prioritized, plain)


def test_a_normalized_environment_gives_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    prioritized, plain, _ = run_both(
        monkeypatch,
        lambda: VecNormalize(walks(2), gamma=0.9),
        3,
        total=80,
        policy_kwargs={"net_arch": [16]},
    )
    assert_same_run(prioritized, plain)


def test_images_give_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def images() -> VecEnv:
        env = FakeImageEnv(screen_height=36, screen_width=36, n_channels=1, discrete=True)
        env.observation_space.seed(0)
        return DummyVecEnv([lambda: env])

    prioritized, plain, drawn = run_both(
        monkeypatch,
        images,
        1,
        total=24,
        policy="CnnPolicy",
        policy_kwargs={"features_extractor_kwargs": {"features_dim": 16}},
        batch_size=4,
        learning_starts=8,
    )
    assert len(drawn.indices) == 8
    assert prioritized.replay_buffer is not None
    assert prioritized.replay_buffer.observations.dtype == np.uint8
    assert_same_run(prioritized, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0.6, "beta": 0.4},
        {"alpha": 0.0, "beta": 0.0, "loss": "mse"},
        {"alpha": 0.0, "beta": 0.0, "double_q": True},
    ],
    ids=str,
)
def test_the_comparison_would_show_weights_another_loss_or_other_targets(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prioritized, plain, drawn = run_both(
        monkeypatch,
        lambda: walks(1),
        1,
        total=60,
        options=options,
        policy_kwargs={"net_arch": [16]},
    )
    weighted = any(bool((weights < 1.0).any()) for weights in drawn.weights)
    assert weighted is (options["alpha"] > 0.0)
    assert differs(prioritized, plain)


def test_the_comparison_would_show_a_single_bit_of_a_single_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kwargs = {**SMALL, "policy_kwargs": {"net_arch": [16]}, "alpha": 0.0, "beta": 0.0}
    exact, off = (PERDQN("MlpPolicy", walks(1), **kwargs) for _ in range(2))
    buffer = off.replay_buffer
    assert isinstance(buffer, PrioritizedReplayBuffer)
    original = buffer.sample

    def sample(batch_size: int, env: VecNormalize | None = None) -> PrioritizedReplayBufferSamples:
        batch = original(batch_size, env=env)
        batch.weights[0] = float(np.nextafter(np.float32(1.0), np.float32(0.0)))
        return batch

    exact.learn(60)
    monkeypatch.setattr(buffer, "sample", sample)
    off.learn(60)
    assert differs(exact, off)


class Steps(BaseCallback):
    """Notes what the model did at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[int] = []
        self.exploration_rates: list[float] = []

    def _on_step(self) -> bool:
        assert isinstance(self.model, DQN)
        self.actions.extend(int(action) for action in self.locals["actions"])
        self.exploration_rates.append(self.model.exploration_rate)
        return True


@pytest.mark.parametrize("n_envs", [1, 2])
def test_until_learning_starts_the_default_options_act_as_dqn_and_explore_alike_to_the_end(
    n_envs: int,
) -> None:
    kwargs = {**SMALL, "learning_starts": 40, "policy_kwargs": {"net_arch": [16]}}
    ours, theirs = Steps(), Steps()
    prioritized = PERDQN("MlpPolicy", walks(n_envs), **kwargs).learn(100, callback=ours)
    plain = DQN("MlpPolicy", walks(n_envs), **kwargs).learn(100, callback=theirs)

    assert len(set(theirs.actions[:40])) == 4
    assert ours.actions[:40] == theirs.actions[:40]
    assert ours.exploration_rates == theirs.exploration_rates
    assert len(set(theirs.exploration_rates)) > 20
    assert prioritized.num_timesteps == plain.num_timesteps
    assert prioritized._n_updates == plain._n_updates


def test_the_same_seed_makes_the_same_networks() -> None:
    prioritized = PERDQN("MlpPolicy", walks(1), seed=11, buffer_size=10)
    plain = DQN("MlpPolicy", walks(1), seed=11, buffer_size=10)
    assert_same_tensors(prioritized.policy.state_dict(), plain.policy.state_dict())
    assert_same_tensors(prioritized.q_net_target.state_dict(), plain.q_net_target.state_dict())
