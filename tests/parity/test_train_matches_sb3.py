"""
With ``alpha=0, beta=0`` PERDQN is DQN and PERQRDQN QRDQN: whole runs in the plain way agree to
the last bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import QRDQN
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from model_helpers import buffer_of, parameters_of, same, side_by_side
from sb3_per import PERDQN, PERQRDQN, PrioritizedReplayBuffer, PrioritizedReplayBufferSamples

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

ORIGINALS: dict[Any, Any] = {PERDQN: DQN, PERQRDQN: QRDQN}
ALGORITHMS = pytest.mark.parametrize("algorithm", ORIGINALS)
ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


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


class Accumulating(th.optim.SGD):
    """Steps on the sum of four gradients, by a ``zero_grad`` and a ``step`` of its own."""

    n_calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.n_calls % 4 == 0:
            super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.n_calls += 1
        if self.n_calls % 4 == 0:
            super().step(closure)


def walks(n_envs: int = 1) -> VecEnv:
    return side_by_side(n_envs, WalkEnv)


def linear(progress_remaining: float) -> float:
    return 1e-3 + 1e-2 * progress_remaining


SMALL: dict[str, Any] = {
    "buffer_size": 90,
    "learning_starts": 20,
    # No power of two: means of means would be rounded otherwise
    "batch_size": 23,
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
UNIFORM = {"alpha": 0.0, "beta": 0.0}


def arguments_of(algorithm: type[Any], policy_kwargs: dict[str, Any], **kwargs: Any) -> Any:
    """New dictionaries for each model, since SB3 writes into ``policy_kwargs``."""
    n_quantiles = {"n_quantiles": 7} if issubclass(algorithm, QRDQN) else {}
    return {**SMALL, **kwargs, "policy_kwargs": {"net_arch": [16], **n_quantiles, **policy_kwargs}}


class Frozen(NamedTuple):
    """What a run drew: the transitions of each batch, and their weights."""

    indices: list[IntArray]
    weights: list[th.Tensor]


def record_draws(model: Any, monkeypatch: pytest.MonkeyPatch) -> Frozen:
    drawn = Frozen([], [])
    original = buffer_of(model).sample

    def sample(batch_size: int, env: VecNormalize | None = None) -> PrioritizedReplayBufferSamples:
        batch = original(batch_size, env=env)
        drawn.indices.append(batch.indices)
        drawn.weights.append(batch.weights)
        return batch

    monkeypatch.setattr(model.replay_buffer, "sample", sample)
    return drawn


def replay_draws(model: Any, drawn: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SB3's own buffer make its batches of the transitions that the other run drew."""
    buffer = model.replay_buffer
    assert not isinstance(buffer, PrioritizedReplayBuffer)
    draws = iter(drawn.indices)

    def sample(batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        # The global generator moves on as it did there: exploration draws from it, too
        np.random.random_sample(batch_size)
        rows, envs = np.divmod(next(draws), buffer.n_envs)
        # In place of random ones
        with mock.patch("numpy.random.randint", return_value=envs):
            batch: ReplayBufferSamples = buffer._get_samples(rows, env)
        return batch

    monkeypatch.setattr(buffer, "sample", sample)


def run_both(
    monkeypatch: pytest.MonkeyPatch,
    algorithm: type[Any],
    make_env: Callable[[], VecEnv] = walks,
    total: int = 60,
    policy: str = "MlpPolicy",
    options: dict[str, Any] = UNIFORM,
    policy_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Any, Any, Frozen]:
    """:return: a prioritized model, SB3's one that trained on its batches, and what was drawn"""
    prioritized = algorithm(
        policy,
        make_env(),
        **arguments_of(algorithm, policy_kwargs or {}, **kwargs),
        **options,
        # Compiled code sums in another order
        compiled=False,
    )
    drawn = record_draws(prioritized, monkeypatch)
    prioritized.learn(total)
    original = ORIGINALS[algorithm]
    plain = original(policy, make_env(), **arguments_of(original, policy_kwargs or {}, **kwargs))
    if "fused" in prioritized.policy.optimizer.defaults:
        # The same kernel for both: another one rounds differently
        ours, theirs = (m.policy.optimizer.param_groups for m in (prioritized, plain))
        for our_group, their_group in zip(ours, theirs, strict=True):
            their_group["fused"] = our_group["fused"]
    replay_draws(plain, drawn, monkeypatch)
    plain.learn(total)
    assert prioritized._n_updates == plain._n_updates == len(drawn.indices) > 0
    return prioritized, plain, drawn


def assert_same_tensors(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert th.equal(ours[name], theirs[name]), name


def optimizer_tensors(model: Any) -> dict[str, th.Tensor]:
    state: dict[int, dict[str, Any]] = model.policy.optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": value
        for number, values in state.items()
        for name, value in values.items()
        if isinstance(value, th.Tensor)
    }


def assert_same_run(prioritized: Any, plain: Any) -> None:
    ours, theirs = prioritized.replay_buffer, plain.replay_buffer
    assert (ours.pos, ours.full) == (theirs.pos, theirs.full)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert prioritized.exploration_rate == plain.exploration_rate
    assert_same_tensors(prioritized.policy.state_dict(), plain.policy.state_dict())
    assert_same_tensors(optimizer_tensors(prioritized), optimizer_tensors(plain))


@ALGORITHMS
@pytest.mark.parametrize(
    "optimizer",
    [th.optim.SGD, th.optim.Adam, th.optim.RMSprop, Accumulating],
    ids=lambda cls: cls.__name__,
)
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_whole_run_equals_that_of_sb3_to_the_last_bit(
    n_envs: int,
    n_steps: int,
    optimizer: type[th.optim.Optimizer],
    algorithm: type[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prioritized, plain, drawn = run_both(
        monkeypatch,
        algorithm,
        lambda: walks(n_envs),
        total=120,
        n_steps=n_steps,
        policy_kwargs={"optimizer_class": optimizer},
    )
    assert isinstance(plain.replay_buffer, NStepReplayBuffer) is (n_steps == 3)
    assert {len(batch) for batch in drawn.indices} == {23}
    assert all(bool((weights == 1.0).all()) for weights in drawn.weights)
    assert plain.replay_buffer.full, "the ring should have wrapped around"
    assert_same_run(prioritized, plain)


def test_without_clipping_a_run_equals_that_of_qrdqn(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped, plain, _ = run_both(monkeypatch, PERQRDQN)
    free, plain_free, _ = run_both(monkeypatch, PERQRDQN, max_grad_norm=None)
    assert_same_run(clipped, plain)
    assert_same_run(free, plain_free)
    assert not same(parameters_of(clipped), parameters_of(free))


@pytest.mark.parametrize(
    "choice", [{"fused": False}, {"foreach": True}, {"foreach": False}], ids=str
)
def test_a_chosen_implementation_of_the_optimizer_is_used(
    choice: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_kwargs = {"optimizer_kwargs": choice}
    prioritized, plain, _ = run_both(monkeypatch, PERDQN, policy_kwargs=policy_kwargs)
    for model in (prioritized, plain):
        (group,) = model.policy.optimizer.param_groups
        assert {name: group[name] for name in choice} == choice
    assert_same_run(prioritized, plain)


@pytest.mark.parametrize(("algorithm", "eps"), [(PERDQN, 1e-8), (PERQRDQN, 0.01 / 23)])
def test_the_faster_kernel_differs_from_the_loop_over_parameters_by_rounding_alone(
    algorithm: type[Any], eps: float
) -> None:
    # sb3-contrib looks at the options only along with a class
    loop_kwargs = {
        "optimizer_class": th.optim.Adam,
        "optimizer_kwargs": {"fused": False, "eps": eps},
    }
    fused, loop = (
        algorithm(
            "MlpPolicy", walks(), **arguments_of(algorithm, policy_kwargs), compiled=False
        ).learn(60)
        for policy_kwargs in ({}, loop_kwargs)
    )
    settings = [model.policy.optimizer.param_groups[0] for model in (fused, loop)]
    assert [(group["fused"], group["eps"]) for group in settings] == [(True, eps), (False, eps)]
    for name, value in fused.policy.state_dict().items():
        th.testing.assert_close(value, loop.policy.state_dict()[name], rtol=1e-4, atol=1e-6)


@ALGORITHMS
def test_other_options_than_alpha_and_beta_change_nothing(
    algorithm: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # All priorities are equal, whatever eps; so are all weights, whatever beta
    options = {
        "alpha": 0.0,
        "beta": 0.7,
        "priority_eps": 5.0,
        "weight_normalization": "buffer",
    }
    prioritized, plain, _ = run_both(monkeypatch, algorithm, options=options, gradient_steps=-1)
    assert prioritized._n_updates == 40
    assert_same_run(prioritized, plain)


@ALGORITHMS
def test_a_normalized_environment_gives_the_same_run(
    algorithm: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prioritized, plain, _ = run_both(
        monkeypatch, algorithm, lambda: VecNormalize(walks(2), gamma=0.9), total=80, n_steps=3
    )
    assert_same_run(prioritized, plain)


def test_images_give_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def images() -> VecEnv:
        env = FakeImageEnv(screen_height=36, screen_width=36, n_channels=1, discrete=True)
        env.observation_space.seed(0)
        return DummyVecEnv([lambda: env])

    prioritized, plain, drawn = run_both(
        monkeypatch,
        PERDQN,
        images,
        total=24,
        policy="CnnPolicy",
        policy_kwargs={"features_extractor_kwargs": {"features_dim": 16}},
        batch_size=4,
        learning_starts=8,
    )
    assert len(drawn.indices) == 8
    assert prioritized.replay_buffer.observations.dtype == np.uint8
    assert_same_run(prioritized, plain)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (PERDQN, {"alpha": 0.6, "beta": 0.4}),
        (PERDQN, {**UNIFORM, "loss": "mse"}),
        (PERDQN, {**UNIFORM, "double_q": True}),
        (PERQRDQN, {"alpha": 0.6, "beta": 0.4}),
        (PERQRDQN, {**UNIFORM, "double_q": True}),
    ],
    ids=str,
)
def test_the_comparison_would_show_weights_another_loss_or_other_targets(
    algorithm: type[Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prioritized, plain, drawn = run_both(
        monkeypatch, algorithm, total=120, options=options, target_update_interval=1000
    )
    weighted = any(bool((weights < 1.0).any()) for weights in drawn.weights)
    assert weighted is (options["alpha"] > 0.0)
    assert not same(parameters_of(prioritized), parameters_of(plain))


@ALGORITHMS
def test_the_comparison_would_show_a_single_bit_of_a_single_weight(
    algorithm: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, off = (
        algorithm("MlpPolicy", walks(), **arguments_of(algorithm, {}), **UNIFORM) for _ in range(2)
    )
    original = buffer_of(off).sample

    def sample(batch_size: int, env: VecNormalize | None = None) -> PrioritizedReplayBufferSamples:
        batch = original(batch_size, env=env)
        batch.weights[0] = float(np.nextafter(np.float32(1.0), np.float32(0.0)))
        return batch

    exact.learn(60)
    monkeypatch.setattr(off.replay_buffer, "sample", sample)
    off.learn(60)
    assert not same(parameters_of(exact), parameters_of(off))


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
    kwargs = arguments_of(DQN, {}, learning_starts=40)
    ours, theirs = Steps(), Steps()
    prioritized = PERDQN("MlpPolicy", walks(n_envs), **kwargs).learn(100, callback=ours)
    plain = DQN("MlpPolicy", walks(n_envs), **kwargs).learn(100, callback=theirs)

    assert len(set(theirs.actions[:40])) == 4
    assert ours.actions[:40] == theirs.actions[:40]
    assert ours.exploration_rates == theirs.exploration_rates
    assert len(set(theirs.exploration_rates)) > 20
    assert prioritized.num_timesteps == plain.num_timesteps
    assert prioritized._n_updates == plain._n_updates


@ALGORITHMS
def test_the_same_seed_makes_the_same_networks(algorithm: type[Any]) -> None:
    ours, theirs = (
        kind("MlpPolicy", walks(), seed=11, buffer_size=10)
        for kind in (algorithm, ORIGINALS[algorithm])
    )
    # The target networks are part of the policies
    assert_same_tensors(ours.policy.state_dict(), theirs.policy.state_dict())
