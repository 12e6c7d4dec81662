"""TD errors of what is stored, snapshots of a buffer, and the record of what is replayed."""

import copy
import functools
import gc
import importlib
import pickle
from collections.abc import Callable
from typing import Any, cast

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_per import PERDQN, PrioritizedReplayBuffer
from sb3_per.callbacks.statistics import (
    PERLoggerCallback,
    ReplaySnapshot,
    ReplaySnapshotCallback,
    drawable_indices,
    td_errors_in_buffer,
)

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]

SMALL: dict[str, Any] = {
    "buffer_size": 60,
    "learning_starts": 20,
    "train_freq": 1,
    "batch_size": 8,
    "target_update_interval": 16,
    "learning_rate": 0.01,
    "policy_kwargs": {"net_arch": [8]},
    "seed": 0,
    "device": "cpu",
}


class TagEnv(gym.Env[Any, Any]):
    """
    Observes its number and how many steps it made: no observation is ever made twice. Ends after
    seven steps, after eight by time limit, and so on in turn; the reward is the number of steps.
    """

    action_space: spaces.Space[Any] = spaces.Discrete(3)

    def __init__(self, number: int = 0, kind: str = "box") -> None:
        self.number = number
        self.kind = kind
        self.n_steps = 0
        self.n_episodes = 0
        box = spaces.Box(-1e6, 1e6, (2,), np.float32)
        goal = spaces.Box(-1e6, 1e6, (1,), np.float32)
        self.observation_space = {
            "box": box,
            "dict": spaces.Dict({"a": box, "b": goal}),
            "goal": spaces.Dict({"observation": box, "achieved_goal": goal, "desired_goal": goal}),
            "image": spaces.Box(0, 255, (1, 36, 36), np.uint8),
        }[kind]

    def observe(self) -> Any:
        box = np.array([self.number, self.n_steps], dtype=np.float32)
        tag = np.array([self.n_steps % 5], dtype=np.float32)
        return {
            "box": box,
            "dict": {"a": box, "b": tag},
            "goal": {"observation": box, "achieved_goal": tag, "desired_goal": tag * 0},
            "image": np.full((1, 36, 36), self.n_steps % 256, dtype=np.uint8),
        }[self.kind]

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.n_steps += 1
        self.length = 7 + self.n_episodes % 2
        self.n_episodes += 1
        self.age = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        self.age += 1
        over = self.age == self.length
        reward = float(self.n_steps % 11)
        return self.observe(), reward, over and self.length == 7, over and self.length == 8, {}

    def compute_reward(self, achieved: Array, desired: Array, infos: Any) -> Array:
        rewards: Array = -np.abs(achieved - desired).sum(axis=-1)
        return rewards


def make_env(n_envs: int = 1, kind: str = "box", normalize: bool = False) -> Any:
    makers: list[Callable[[], Any]] = [lambda i=i: TagEnv(i, kind) for i in range(n_envs)]  # type: ignore[misc]
    env = DummyVecEnv(makers)
    return VecNormalize(env) if normalize else env


def make_model(algorithm: Any = PERDQN, env: Any = None, **options: Any) -> Any:
    env = make_env() if env is None else env
    is_dict = isinstance(env.observation_space, spaces.Dict)
    options = {**SMALL, **options}
    return algorithm("MultiInputPolicy" if is_dict else "MlpPolicy", env, **options)


# TD errors


class Reference:
    """TD errors one transition after the other, from what the arrays of the buffer hold."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.buffer = model.replay_buffer
        self.vec_normalize = model.get_vec_normalize_env()

    def values(self, net: str, stored: Any, row: int, env: int) -> Array:
        """Q-values of a stored observation, shape (n_actions,)."""
        if isinstance(stored, dict):
            raw: Any = {key: array[[row], env] for key, array in stored.items()}
        else:
            raw = stored[[row], env]
        if self.vec_normalize is not None:
            raw = self.vec_normalize.normalize_obs(raw)
        is_quantile = hasattr(self.model, "quantile_net")
        network = getattr(self.model, net.replace("q_net", "quantile_net") if is_quantile else net)
        with th.no_grad():
            found = network(self.model.policy.obs_to_tensor(raw)[0]).numpy()[0]
        return np.asarray(found.mean(axis=0) if is_quantile else found)

    def look_ahead(self, row: int, env: int) -> tuple[float, float, int]:
        """Discounted rewards, discount of what follows, and the row of the last step."""
        buffer, total, discount, last = self.buffer, 0.0, 1.0, row
        for step in range(getattr(buffer, "n_steps", 1)):
            last = (row + step) % buffer.buffer_size
            reward = buffer.rewards[last, env]
            if self.vec_normalize is not None:
                reward = self.vec_normalize.normalize_reward(np.array([reward]))[0]
            total += discount * float(reward)
            discount *= self.model.gamma
            over = buffer.dones[last, env] or buffer.timeouts[last, env]
            if over or last == (buffer.pos - 1) % buffer.buffer_size:
                break
        return total, discount, last

    def td_error(self, row: int, env: int) -> float:
        buffer = self.buffer
        total, discount, last = self.look_ahead(row, env)
        stored, next_row = buffer.observations, (last + 1) % buffer.buffer_size
        if not buffer.optimize_memory_usage:
            stored, next_row = buffer.next_observations, last
        next_values = self.values("q_net_target", stored, next_row, env)
        best = next_values.argmax()
        if getattr(self.model, "double_q", False):
            best = self.values("q_net", stored, next_row, env).argmax()
        value = float(next_values[best])
        if buffer.dones[last, env] and not buffer.timeouts[last, env]:
            value = 0.0
        action = int(buffer.actions[row, env, 0])
        here = self.values("q_net", buffer.observations, row, env)[action]
        return total + discount * value - float(here)


def reference_td_errors(model: Any, indices: Any) -> FloatArray:
    reference = Reference(model)
    n_envs = model.replay_buffer.n_envs
    return np.array([reference.td_error(*divmod(int(index), n_envs)) for index in indices])


NO_TIMEOUTS = {"handle_timeout_termination": False}
BUFFERS: dict[str, dict[str, Any]] = {
    "one step": {},
    "three steps": {"n_steps": 3},
    "memory saving": {"optimize_memory_usage": True, "replay_buffer_kwargs": NO_TIMEOUTS},
}


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("options", BUFFERS.values(), ids=BUFFERS)
@pytest.mark.parametrize(
    "algorithm",
    [DQN, PERDQN, functools.partial(PERDQN, double_q=True)],
    ids=["DQN", "PER", "double"],
)
def test_td_errors_of_every_stored_transition(
    algorithm: Any, options: dict[str, Any], n_envs: int
) -> None:
    model = make_model(algorithm, make_env(n_envs), train_freq=16, **options).learn(100)
    indices = drawable_indices(model.replay_buffer)
    assert len(indices) == (60 - n_envs if "optimize_memory_usage" in options else 60)
    errors = td_errors_in_buffer(model)
    assert errors.dtype == np.float64
    np.testing.assert_allclose(errors, reference_td_errors(model, indices), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dict", "goal"])
@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_td_errors_with_dict_observations_and_hindsight(algorithm: Any, kind: str) -> None:
    kwargs: dict[str, Any] = {"learning_starts": 30, "train_freq": 8}
    if kind == "goal":
        kwargs["replay_buffer_class"] = HerReplayBuffer
    model = make_model(algorithm, make_env(2, kind), **kwargs).learn(130)
    indices = drawable_indices(model.replay_buffer)
    # The episodes that still run, and what is left of those whose beginning was overwritten
    assert (len(indices) < 60) == (kind == "goal")
    expected = reference_td_errors(model, indices)
    np.testing.assert_allclose(td_errors_in_buffer(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"n_steps": 3}], ids=["one step", "three steps"])
@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_td_errors_are_of_normalized_values(algorithm: Any, options: dict[str, Any]) -> None:
    model = make_model(algorithm, make_env(2, normalize=True), train_freq=8, **options).learn(100)
    indices = drawable_indices(model.replay_buffer)
    expected = reference_td_errors(model, indices)
    np.testing.assert_allclose(td_errors_in_buffer(model), expected, rtol=1e-4, atol=1e-4)


QUANTILE_AGENTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "QRDQN": ("sb3_contrib", "QRDQN", {}),
    "PER": ("sb3_per.per_qrdqn", "PERQRDQN", {}),
    "double": ("sb3_per.per_qrdqn", "PERQRDQN", {"double_q": True}),
}


@pytest.mark.parametrize("agent", QUANTILE_AGENTS)
def test_td_errors_of_quantile_networks_are_of_means(agent: str) -> None:
    pytest.importorskip("sb3_contrib", reason="extra: contrib")
    module, name, options = QUANTILE_AGENTS[agent]
    algorithm = getattr(importlib.import_module(module), name)
    policy = {"net_arch": [8], "n_quantiles": 5}
    model = make_model(algorithm, make_env(2), train_freq=8, policy_kwargs=policy, **options)
    model.learn(100)
    expected = reference_td_errors(model, range(60))
    np.testing.assert_allclose(td_errors_in_buffer(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"double_q": True}, {"n_steps": 3}], ids=["plain", "double", "three steps"]
)
def test_td_errors_are_those_that_training_feeds_back(options: dict[str, Any]) -> None:
    model = make_model(PERDQN, make_env(2, normalize=True), **options).learn(60)
    before = td_errors_in_buffer(model)
    fed_back: list[tuple[Array, Array]] = []
    model.replay_buffer.update_priorities = lambda indices, errors: fed_back.append(
        (indices, errors.detach().numpy().ravel())
    )
    model.train(gradient_steps=1, batch_size=32)
    ((indices, errors),) = fed_back
    np.testing.assert_allclose(np.abs(before[indices]), np.abs(errors), rtol=1e-5, atol=1e-6)


def test_td_error_has_the_sign_of_target_minus_value() -> None:
    model = make_model()
    for parameter in model.policy.parameters():
        parameter.data.zero_()
    model.replay_buffer.add(
        *(np.zeros((1, 2)),) * 2, np.array([1]), np.array([5.0]), np.array([True]), [{}]
    )
    assert td_errors_in_buffer(model).tolist() == [5.0]


def test_chosen_transitions_in_the_order_asked_for() -> None:
    model = make_model(DQN, make_env(3)).learn(90)
    everything = td_errors_in_buffer(model)
    chosen = np.array([44, 2, 2, 17, 0, 59])
    np.testing.assert_allclose(td_errors_in_buffer(model, chosen), everything[chosen], rtol=1e-6)
    assert td_errors_in_buffer(model, []).shape == (0,)


def test_more_transitions_than_go_through_the_networks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(DQN, make_env(2)).learn(90)
    everything = td_errors_in_buffer(model)
    monkeypatch.setattr("sb3_per.callbacks.statistics.CHUNK", 7)
    np.testing.assert_allclose(td_errors_in_buffer(model), everything, rtol=1e-5)


class Dropout(BaseFeaturesExtractor):
    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space, 2)
        self.layers = th.nn.Sequential(th.nn.BatchNorm1d(2), th.nn.Dropout(0.5))
        # An odd one out, for the modes must come back one by one
        self.layers[1].train(False)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        out: th.Tensor = self.layers(observations)
        return out


@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
@pytest.mark.parametrize("options", [{}, {"n_steps": 3}], ids=["one step", "three steps"])
def test_looking_changes_nothing(algorithm: Any, options: dict[str, Any]) -> None:
    policy = {"features_extractor_class": Dropout}
    model = make_model(algorithm, make_env(3), policy_kwargs=policy, **options).learn(60)
    model.policy.q_net.features_extractor.layers[1].training = False
    modules = list(model.policy.modules())
    modes = [module.training for module in modules]
    assert set(modes) == {True, False}

    def state() -> bytes:
        return pickle.dumps(
            (
                np.random.get_state(),
                th.get_rng_state().numpy(),
                model.replay_buffer.__dict__,
                {name: value.numpy() for name, value in model.policy.state_dict().items()},
                [None if p.grad is None else p.grad.numpy() for p in model.policy.parameters()],
            )
        )

    before = state()
    errors = td_errors_in_buffer(model)
    assert state() == before
    assert [module.training for module in modules] == modes
    # Dropout is off, and statistics of batches are not taken
    assert td_errors_in_buffer(model).tolist() == errors.tolist()


def test_indices_are_checked() -> None:
    options = {"optimize_memory_usage": True, "replay_buffer_kwargs": NO_TIMEOUTS}
    model = make_model(DQN, make_env(2), **options).learn(74)  # full, position 7 of 30
    with pytest.raises(IndexError, match="index 60 is not that of a stored transition"):
        td_errors_in_buffer(model, [60])
    with pytest.raises(IndexError, match="index -1 "):
        td_errors_in_buffer(model, [0, -1])
    with pytest.raises(ValueError, match="transition 15 can't be drawn"):
        td_errors_in_buffer(model, [13, 15])
    with pytest.raises(ValueError, match="integers of shape"):
        td_errors_in_buffer(model, [0.5])
    with pytest.raises(ValueError, match="integers of shape"):
        td_errors_in_buffer(model, [[1, 2]])


class ContinuousEnv(TagEnv):
    action_space = spaces.Box(-1, 1, (1,), np.float32)


def test_algorithms_without_q_values_are_refused() -> None:
    sac = SAC("MlpPolicy", ContinuousEnv(), buffer_size=100)
    with pytest.raises(ValueError, match=r"discrete actions.*got SAC"):
        td_errors_in_buffer(sac)
    with pytest.raises(ValueError, match=r"discrete actions.*got SAC"):
        sac.learn(10, callback=ReplaySnapshotCallback())
    ppo = PPO("MlpPolicy", TagEnv(), n_steps=8, batch_size=8)
    for callback in (ReplaySnapshotCallback(), PERLoggerCallback()):
        with pytest.raises(ValueError, match="PPO has none"):
            ppo.learn(8, callback=callback)
    assert sac.num_timesteps == ppo.num_timesteps == 0


# Snapshots


def take(model: Any, timesteps: int, **options: Any) -> list[ReplaySnapshot]:
    callback = ReplaySnapshotCallback(**{"episodes": (), **options})
    model.learn(timesteps, callback=callback)
    return callback.snapshots


def moments(snapshots: list[ReplaySnapshot]) -> list[tuple[int, int, str, int]]:
    return [(s.episode, s.timesteps, s.reason, s.n_transitions) for s in snapshots]


def test_snapshots_after_the_last_transition_of_an_episode() -> None:
    # Episodes of 7, 8, 7, 8, ... steps
    model = make_model(learning_starts=9)
    snapshots = take(model, 37, episodes=(5, 1, 3, 3, 9))
    assert moments(snapshots) == [
        (1, 7, "episode", 7),
        (3, 22, "episode", 22),
        (5, 37, "episode", 37),  # the very last step of training
    ]


def test_number_0_is_just_before_the_first_update() -> None:
    model = make_model(learning_starts=9, train_freq=4)
    updates: list[int] = []

    class Watching(ReplaySnapshotCallback):
        def _take(self, *arguments: Any) -> bool:
            updates.append(model._n_updates)
            return super()._take(*arguments)

    callback = Watching((0, 2))
    model.learn(40, callback=callback)
    assert moments(callback.snapshots) == [(0, 12, "episode", 12), (2, 15, "episode", 15)]
    assert updates == [0, 1]


def test_number_0_comes_at_the_end_if_there_is_no_update() -> None:
    model = make_model(learning_starts=1000)
    assert moments(take(model, 12, episodes=(0, 1))) == [
        (1, 7, "episode", 7),
        (0, 12, "episode", 12),
    ]


def test_snapshots_along_time() -> None:
    model = make_model(PERDQN, make_env(4), train_freq=2)
    snapshots = take(model, 48, freq=10)
    # Multiples of 10 are reached by steps of 4
    assert [s.timesteps for s in snapshots] == [12, 20, 32, 40]
    assert [s.n_transitions for s in snapshots] == [12, 20, 32, 40]
    # Each env has finished one episode after 7 steps
    assert [s.episode for s in snapshots] == [0, 0, 4, 4]
    assert {s.reason for s in snapshots} == {"freq"}


def test_several_episodes_that_end_at_once() -> None:
    model = make_model(PERDQN, make_env(3))
    snapshots = take(model, 30, episodes=(1, 2, 3, 4))
    assert moments(snapshots) == [(n, 21, "episode", 21) for n in (1, 2, 3)]


def test_training_goes_on_where_it_was() -> None:
    model = make_model()
    callback = ReplaySnapshotCallback((0, 1, 2, 3), freq=10)
    for _ in range(3):
        model.learn(8, callback=callback, reset_num_timesteps=False)
    assert moments(callback.snapshots) == [
        (1, 7, "episode", 7),
        # The start of learning has not come when the first call ends
        (0, 8, "episode", 8),
        (1, 10, "freq", 10),
        (2, 15, "episode", 15),
        (2, 20, "freq", 20),
        (3, 22, "episode", 22),
    ]
    # Counted anew, with what is in the buffer
    model.learn(8, callback=callback)
    assert moments(callback.snapshots[6:]) == [(1, 7, "episode", 31), (0, 8, "episode", 32)]


def test_number_0_is_not_repeated_when_training_goes_on() -> None:
    model = make_model(learning_starts=3)
    callback = ReplaySnapshotCallback((0,))
    model.learn(10, callback=callback)
    model.learn(10, callback=callback, reset_num_timesteps=False)
    assert moments(callback.snapshots) == [(0, 4, "episode", 4)]


@pytest.mark.parametrize("prioritization", ["proportional", "rank"])
def test_contents_of_a_prioritized_buffer(prioritization: str) -> None:
    model = make_model(PERDQN, make_env(2), alpha=0.7, prioritization=prioritization)
    (snapshot,) = take(model, 100, freq=100)
    buffer = model.replay_buffer
    assert snapshot.indices.tolist() == list(range(60))
    assert snapshot.priorities is not None
    assert snapshot.priorities.tolist() == buffer.priorities.tolist()
    assert snapshot.probabilities.tolist() == buffer.probabilities.tolist()
    assert snapshot.td_errors.tolist() == td_errors_in_buffer(model).tolist()
    assert snapshot.observations is not None
    assert snapshot.observations.tolist() == buffer.observations.reshape(60, 2).tolist()
    # 50 rows were added, 30 are kept: row 19 is the newest, row 20 the oldest
    rows = snapshot.indices // 2
    assert snapshot.ages.tolist() == (np.where(rows < 20, 19 - rows, 49 - rows) * 2).tolist()
    assert [snapshot.ages[i] for i in (38, 39, 36, 40)] == [0, 0, 2, 58]


def test_contents_of_a_plain_buffer() -> None:
    model = make_model(DQN, make_env(2))
    (snapshot,) = take(model, 40, freq=40)
    assert snapshot.priorities is None
    assert snapshot.weights is None
    assert snapshot.probabilities.tolist() == [1 / 40] * 40
    # One from each of eight equal masses, as in training
    assert snapshot.sampled.shape == (4096,)
    assert (snapshot.sampled.reshape(-1, 8) // 5 == np.arange(8)).all()


@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_what_cannot_be_drawn_is_left_out(algorithm: Any) -> None:
    options = {"optimize_memory_usage": True, "replay_buffer_kwargs": NO_TIMEOUTS}
    model = make_model(algorithm, make_env(2), **options)
    (snapshot,) = take(model, 74, freq=74)
    assert snapshot.n_transitions == 60
    assert snapshot.indices.tolist() == [i for i in range(60) if i not in (14, 15)]
    assert snapshot.probabilities.sum() == pytest.approx(1.0)
    assert snapshot.probabilities.min() > 0.0


def test_with_hindsight_running_episodes_are_left_out() -> None:
    options = {"replay_buffer_class": HerReplayBuffer, "learning_starts": 10}
    model = make_model(PERDQN, make_env(kind="goal"), **options)
    # Before an episode is over there is nothing to look at
    snapshots = take(model, 20, freq=5, episodes=(0,))
    assert [(s.timesteps, len(s.indices)) for s in snapshots] == [
        (7, 7),
        (10, 7),
        (11, 7),
        (15, 15),
        (20, 15),
    ]
    assert snapshots[0].observations is None


def test_large_observations_are_not_kept() -> None:
    model = make_model(DQN, make_env(kind="image"), policy_kwargs={"net_arch": [2]})
    (snapshot,) = take(model, 10, freq=10)
    assert snapshot.observations is None
    assert snapshot.td_errors.shape == (10,)


@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_of_many_transitions_a_random_choice(algorithm: Any) -> None:
    model = make_model(algorithm, make_env(2))
    snapshots = take(model, 60, freq=20, max_transitions=16)
    for snapshot in snapshots:
        assert snapshot.indices.shape == snapshot.td_errors.shape == snapshot.ages.shape == (16,)
        assert (np.diff(snapshot.indices) > 0).all()
        assert snapshot.indices.max() < snapshot.n_transitions
        assert snapshot.sampled.min() >= 0
        assert snapshot.sampled.max() == 15
    first, _, last = snapshots
    assert first.indices.tolist() != last.indices.tolist()
    everything = td_errors_in_buffer(model)
    np.testing.assert_allclose(last.td_errors, everything[last.indices], rtol=1e-5)
    # Of the whole buffer, not of the choice
    if algorithm is PERDQN:
        expected = model.replay_buffer.probabilities[last.indices]
    else:
        expected = np.full(16, 1 / 60)
    assert last.probabilities.tolist() == expected.tolist()


def test_draws_follow_the_probabilities() -> None:
    model = make_model(alpha=1.0)
    (snapshot,) = take(model, 60, freq=60, n_draws=200_000)
    frequencies = np.bincount(snapshot.sampled, minlength=60) / 200_000
    # Stratified draws vary less than independent ones
    spread = np.sqrt(snapshot.probabilities * (1 - snapshot.probabilities) / 200_000)
    assert (np.abs(frequencies - snapshot.probabilities) < 5 * spread + 1e-4).all()
    assert snapshot.probabilities.max() > 3 * snapshot.probabilities.min()


def test_a_transition_without_mass_is_never_among_the_draws() -> None:
    model = make_model(priority_eps=0.0, learning_starts=1000)
    model.learn(20)
    model.replay_buffer.update_priorities([0, 3, 19], [0.0, 0.0, 0.0])
    snapshots = ReplaySnapshotCallback((0,))
    snapshots.init_callback(model)
    assert snapshots._take(0, 20, "episode")
    assert not np.isin(snapshots.snapshots[0].sampled, [0, 3, 19]).any()
    # The end of the range belongs to the last that has mass
    random: Any = type("Random", (), {"random": lambda self, n: np.full(n, np.nextafter(1.0, 0))})
    snapshots._rng = random()
    assert snapshots._draw(np.array([0.0, 0.1, 0.3, 0.0]) / 3).max() == 2
    model.replay_buffer.update_priorities(np.arange(20), np.zeros(20))
    assert not snapshots._take(0, 20, "episode")


@pytest.mark.parametrize("prioritization", ["proportional", "rank"])
@pytest.mark.parametrize("n_draws", [64, 61])
def test_weights_are_those_of_batches(n_draws: int, prioritization: str) -> None:
    model = make_model(beta=0.5, beta_final=0.5, prioritization=prioritization)
    (snapshot,) = take(model, 60, freq=60, n_draws=n_draws)
    assert snapshot.weights is not None
    assert snapshot.weights.shape == (n_draws,)
    for start in range(0, n_draws, 8):
        probabilities = snapshot.probabilities[snapshot.sampled[start : start + 8]]
        expected = (probabilities.min() / probabilities) ** 0.5
        np.testing.assert_allclose(snapshot.weights[start : start + 8], expected, rtol=1e-12)


@pytest.mark.parametrize("prioritization", ["proportional", "rank"])
def test_weights_over_the_largest_of_the_buffer(prioritization: str) -> None:
    options = {"weight_normalization": "buffer", "prioritization": prioritization}
    model = make_model(beta=0.5, beta_final=0.5, **options)
    (snapshot,) = take(model, 60, freq=60)
    probabilities = model.replay_buffer.probabilities
    assert snapshot.weights is not None
    expected = (probabilities.min() / probabilities[snapshot.sampled]) ** 0.5
    np.testing.assert_allclose(snapshot.weights, expected, rtol=1e-12)


def test_the_same_seed_gives_the_same_snapshots() -> None:
    def one(seed: int | None) -> ReplaySnapshot:
        return take(make_model(seed=seed), 60, freq=60, max_transitions=20)[0]

    first, second, other = one(3), one(3), one(4)
    assert pickle.dumps(first) == pickle.dumps(second)
    assert first.indices.tolist() != other.indices.tolist()


def test_a_line_for_each_snapshot_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    take(make_model(), 8, episodes=(1,), verbose=1)
    assert capsys.readouterr().out == "Replay snapshot at 7 steps (episode, 1 episodes)\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": (3, -1)}, r"`episodes` .* got -1"),
        ({"episodes": (1.5,)}, r"`episodes` .* got 1\.5"),
        ({"freq": 0}, "`freq` .* got 0"),
        ({"max_transitions": 0}, "`max_transitions` .* got 0"),
        ({"n_draws": -2}, "`n_draws` .* got -2"),
    ],
)
def test_snapshot_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplaySnapshotCallback(**options)


# The log


class Rows(Logger):
    """Keeps what is written, a dict for each row."""

    def __init__(self) -> None:
        super().__init__(None, [])
        self.rows: list[dict[str, Any]] = []

    def dump(self, step: int = 0) -> None:
        self.rows.append({**self.name_to_value, "step": step})
        super().dump(step)
        for values in (self.name_to_value, self.name_to_count, self.name_to_excluded):
            values.clear()


def log(model: Any, timesteps: int, log_freq: int, **options: Any) -> list[dict[str, Any]]:
    logger = Rows()
    model.set_logger(logger)
    callback = PERLoggerCallback(log_freq)
    model.learn(timesteps, callback=callback, log_interval=10**9, **options)
    return logger.rows


def test_statistics_are_of_what_is_stored() -> None:
    """Known fault 73: statistics include the unfilled region."""
    model = make_model(buffer_size=1000, alpha=1.0, priority_eps=1e-12, learning_starts=1000)
    model.learn(4)
    model.replay_buffer.update_priorities(np.arange(4), [1.0, -2.0, 3.0, 4.0])
    logger = Rows()
    model.set_logger(logger)
    # Written before the step is stored
    model.learn(1, callback=PERLoggerCallback(1), log_interval=10**9, reset_num_timesteps=False)
    (row,) = logger.rows
    assert {key: round(value, 6) for key, value in row.items() if key.startswith("per/")} == {
        "per/priority_min": 1.0,
        "per/priority_quantile_05": 1.15,
        "per/priority_quantile_25": 1.75,
        "per/priority_quantile_50": 2.5,
        "per/priority_quantile_75": 3.25,
        "per/priority_quantile_95": 3.85,
        "per/share_never_replayed": 1.0,
    }


def test_log_before_anything_was_stored() -> None:
    """Known fault 73: statistics of nothing crash before the first add."""
    rows = log(make_model(learning_starts=10), 14, 1)
    # Nothing is stored at the first step, nothing replayed until the twelfth
    assert [row["step"] for row in rows] == list(range(2, 15))
    ages = [row.get("per/replay_age_mean") for row in rows]
    assert ages[:10] == [None] * 10
    assert all(age is not None and 0 <= age <= 13 for age in ages[10:])
    shares = [row["per/share_never_replayed"] for row in rows]
    assert shares[:10] == [1.0] * 10
    assert 0.0 <= shares[-1] < 1.0
    assert all(np.isfinite(value) for row in rows for value in row.values())


def test_what_does_not_apply_to_a_plain_buffer_is_left_out() -> None:
    (row,) = log(make_model(DQN), 40, 40)
    assert sorted(key for key in row if key.startswith("per/")) == [
        "per/replay_age_mean",
        "per/share_never_replayed",
    ]


def test_interval_counts_environment_steps() -> None:
    assert [row["step"] for row in log(make_model(PERDQN, make_env(4)), 44, 10)] == [12, 20, 32, 40]


def test_interval_goes_on_over_several_calls() -> None:
    model = make_model()
    callback = PERLoggerCallback(10)
    logger = Rows()
    model.set_logger(logger)
    for reset in (True, False, False, True):
        model.learn(8, callback=callback, log_interval=10**9, reset_num_timesteps=reset)
    model.learn(12, callback=callback, log_interval=10**9)
    assert [row["step"] for row in logger.rows] == [10, 20, 10]


class Tags:
    """What was replayed, known by the observations in the batches themselves."""

    def __init__(self, model: Any) -> None:
        self.batches: list[list[tuple[float, float]]] = []
        sample = model.replay_buffer.sample

        def noting(*args: Any, **kwargs: Any) -> Any:
            batch = sample(*args, **kwargs)
            observations = batch.observations
            if isinstance(observations, dict):
                observations = observations["observation" if "observation" in observations else "a"]
            self.batches.append([tuple(tag) for tag in observations.tolist()])
            return batch

        model.replay_buffer.sample = noting

    @property
    def replayed(self) -> set[tuple[float, float]]:
        return {tag for batch in self.batches for tag in batch}


def stored_tags(buffer: Any) -> list[tuple[float, float]]:
    stored = buffer.observations
    if isinstance(stored, dict):
        stored = stored["observation" if "observation" in stored else "a"]
    return [tuple(tag) for tag in stored[: buffer.size()].reshape(-1, 2).tolist()]


HER = {"replay_buffer_class": HerReplayBuffer}


@pytest.mark.parametrize(
    ("kind", "options", "n_envs"),
    [
        ("box", {}, 1),
        ("box", {}, 3),
        ("box", BUFFERS["three steps"], 3),
        ("box", BUFFERS["memory saving"], 3),
        ("dict", {}, 3),
        ("goal", HER, 1),
        ("goal", HER, 3),
    ],
    ids=[
        "one env",
        "box",
        "three steps",
        "memory saving",
        "dict",
        "hindsight, one env",
        "hindsight",
    ],
)
@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_share_never_replayed_and_ages(
    algorithm: Any, kind: str, options: dict[str, Any], n_envs: int
) -> None:
    options = {"learning_starts": 30, "batch_size": 2, **options}
    model = make_model(algorithm, make_env(n_envs, kind), **options)
    logger = Rows()
    model.set_logger(logger)
    callback = PERLoggerCallback(150)
    tags = Tags(model)
    # Stops just where the row is written: nothing is stored or replayed afterwards
    stop = type("Stop", (BaseCallback,), {"_on_step": lambda self: self.num_timesteps < 150})()
    model.learn(1000, callback=[callback, stop], log_interval=10**9)
    (row,) = logger.rows

    buffer = model.replay_buffer
    stored = stored_tags(buffer)
    drawable = [stored[index] for index in drawable_indices(buffer)]
    share = np.mean([tag not in tags.replayed for tag in drawable])
    assert 0.05 < share < 0.95
    assert row["per/share_never_replayed"] == pytest.approx(share)
    record = callback._record
    assert record is not None
    counts = [sum(tag == drawn for batch in tags.batches for drawn in batch) for tag in stored]
    indices = drawable_indices(buffer)
    assert record.counts[indices].tolist() == np.array(counts)[indices].tolist()

    # The first batch is drawn when more than 30 steps are stored, then one after each step
    first = 31 if n_envs == 1 else 33
    rows_then = [first // n_envs + number for number in range(len(tags.batches))]
    row_of = first_rows(n_envs, kind)
    ages = [
        (n_rows - 1 - row_of[tag]) * n_envs
        for n_rows, batch in zip(rows_then, tags.batches, strict=True)
        for tag in batch
    ]
    assert min(ages) >= 0
    assert row["per/replay_age_mean"] == pytest.approx(np.mean(ages))


def first_rows(n_envs: int, kind: str) -> dict[tuple[float, float], int]:
    """How many rows were stored before the transition that starts with a tag."""
    found = {}
    for number in range(n_envs):
        env = TagEnv(number, kind)
        env.reset()
        for row in range(200):
            found[(float(number), float(env.n_steps))] = row
            _, _, terminated, truncated, _ = env.step(0)
            if terminated or truncated:
                env.reset()
    return found


def test_an_overwritten_row_counts_anew() -> None:
    model = make_model(buffer_size=10, learning_starts=5, batch_size=64)
    callback = PERLoggerCallback(1000)
    model.learn(30, callback=callback)
    record = callback._record
    assert record is not None
    # Batches of 64 out of 10: all but surely, each was replayed since it was stored
    assert (record.counts > 0).all()
    callback._on_training_start()
    model.replay_buffer.add(
        *(np.zeros((1, 2)),) * 2, np.array([1]), np.array([5.0]), np.array([False]), [{}]
    )
    assert np.flatnonzero(record.counts == 0).tolist() == [0]
    model.train(1, 64)
    model.replay_buffer.reset()
    model.replay_buffer.add(
        *(np.zeros((1, 2)),) * 2, np.array([1]), np.array([5.0]), np.array([False]), [{}]
    )
    # Drawn before, but another is stored there now
    assert not record.counts.any()
    callback._on_training_end()
    # Added while nobody looked: what is known of the others is given up
    model.replay_buffer.add(
        *(np.zeros((1, 2)),) * 2, np.array([1]), np.array([5.0]), np.array([False]), [{}]
    )
    callback._on_training_start()
    assert callback._record is not record
    callback._on_training_end()


def test_replays_are_remembered_when_training_goes_on() -> None:
    model = make_model(learning_starts=5)
    callback = PERLoggerCallback(1000)
    model.learn(30, callback=callback)
    record = callback._record
    assert record is not None
    n_replays = record.counts.sum()
    assert n_replays == 8 * 25
    model.learn(3, callback=callback, reset_num_timesteps=False)
    assert callback._record is record
    assert record.counts.sum() == n_replays + 8 * 3


def test_draws_of_others_are_no_replays() -> None:
    model = make_model(DQN, learning_starts=5)

    class Drawing(BaseCallback):
        def _on_step(self) -> bool:
            if model.replay_buffer.size():
                model.replay_buffer.sample(100)
            return True

    callback = PERLoggerCallback(1000)
    model.learn(20, callback=[callback, Drawing()])
    record = callback._record
    assert record is not None
    assert record.counts.sum() == record.n_ages == 8 * 15


def test_two_callbacks_at_once() -> None:
    model = make_model(learning_starts=5)
    logger = Rows()
    model.set_logger(logger)
    first, second = PERLoggerCallback(10), PERLoggerCallback(15)
    model.learn(30, callback=[first, second], log_interval=10**9)
    assert [row["step"] for row in logger.rows] == [10, 15, 20, 30, 30]
    assert first._record is not None
    assert second._record is not None
    assert first._record.counts.tolist() == second._record.counts.tolist()
    assert first._record.counts.sum() == 8 * 25
    assert type(model.replay_buffer) is PrioritizedReplayBuffer
    # One goes, the other stays
    first._on_training_start()
    second._on_training_start()
    first._on_training_end()
    model.train(1, 8)
    assert first._record.counts.sum() == 8 * 25
    assert second._record.counts.sum() == 8 * 26
    second._on_training_end()
    second._on_training_end()
    assert type(model.replay_buffer) is PrioritizedReplayBuffer


@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_a_watched_buffer_is_saved_and_copied_as_what_it_is(algorithm: Any) -> None:
    model = make_model(algorithm).learn(30)
    buffer = model.replay_buffer
    cls = type(buffer)
    callback = PERLoggerCallback()
    callback.init_callback(model)
    callback.on_training_start({}, {})
    assert isinstance(buffer, cls)
    assert type(buffer).__name__ == cls.__name__
    # Watched, yet nothing shows in the attributes
    assert type(buffer) is not cls
    for saved in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer), copy.copy(buffer)):
        assert type(saved) is cls
        assert saved.observations.tolist() == buffer.observations.tolist()
        assert saved.__dict__.keys() == buffer.__dict__.keys()
    callback.on_training_end()
    assert type(buffer) is cls


@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_functions_that_users_put_in_place_of_sample(algorithm: Any) -> None:
    model = make_model(algorithm, learning_starts=5)
    buffer = model.replay_buffer
    calls: list[str] = []

    def wrap(name: str) -> None:
        sample = buffer.sample

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return sample(*args, **kwargs)

        buffer.sample = wrapper

    class Wrapping(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 10:
                wrap("during")
            if self.num_timesteps == 15:
                del buffer.sample
            return True

    wrap("before")
    callback = PERLoggerCallback(1000)
    model.learn(20, callback=[callback, Wrapping()])
    # Batches after the steps 6 to 20
    assert calls == ["before"] * 4 + ["during", "before"] * 5
    record = callback._record
    assert record is not None
    assert record.counts.sum() == 8 * 15
    # What was got hold of meanwhile still works
    sample = buffer.sample
    assert sample(3).observations.shape == (3, 2)


def test_an_error_in_training_leaves_a_buffer_that_works() -> None:
    model = make_model(learning_starts=5)
    callback = PERLoggerCallback(1000)

    class Poison(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 15:
                model.gamma = float("nan")
            return True

    with pytest.raises(ValueError, match=r"gamma|finite"):
        model.learn(20, callback=[callback, Poison()])
    model.gamma = 0.9
    assert type(pickle.loads(pickle.dumps(model.replay_buffer))) is PrioritizedReplayBuffer
    # The record goes with its callback, once the frames of the error are gone
    del callback
    gc.collect()
    model.learn(10)
    again = PERLoggerCallback(1000)
    model.learn(20, callback=again)
    assert again._record is not None
    assert again._record.counts.sum() == 8 * 15
    assert type(model.replay_buffer) is PrioritizedReplayBuffer


def test_a_batch_of_unknown_contents() -> None:
    class Own(ReplayBuffer):
        def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
            actions = self.actions[:, 0]
            batch = super()._get_samples(batch_inds, env)
            return batch._replace(actions=self.to_torch(actions[batch_inds]))

    (row,) = log(make_model(DQN, replay_buffer_class=Own), 40, 40)
    assert [key for key in row if key.startswith("per/")] == []


def test_a_buffer_loaded_meanwhile(tmp_path: Any) -> None:
    other = make_model().learn(40)
    other.save_replay_buffer(tmp_path / "buffer.pkl")
    model = make_model(learning_starts=5)
    before = model.replay_buffer

    class Loading(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 10:
                self.model.load_replay_buffer(tmp_path / "buffer.pkl")  # type: ignore[attr-defined]
            return True

    callback = PERLoggerCallback(1000)
    # SB3 goes on storing into the buffer that the rollout began with
    model.learn(20, callback=[Loading(), callback])
    assert type(before) is type(model.replay_buffer) is PrioritizedReplayBuffer
    assert callback._record is not None
    assert callback._record.buffer is model.replay_buffer
    assert callback._record.counts.sum() == 8 * 11


def test_histograms_only_for_tensorboard() -> None:
    (row,) = log(make_model(), 40, 40)
    assert not [key for key in row if "histogram" in key]


def test_keys_are_not_those_of_training() -> None:
    model = make_model()
    own: set[str] = set()
    record = PERLoggerCallback._record_statistics

    class Keys(PERLoggerCallback):
        def _record_statistics(self, *arguments: Any) -> None:
            before = dict(self.logger.name_to_value)
            self.logger.name_to_value.clear()
            record(self, *arguments)
            own.update(self.logger.name_to_value)
            assert not own & before.keys()
            self.logger.name_to_value.update(before)

    model.set_logger(Rows())
    model.learn(60, callback=Keys(10), log_interval=10**9)
    assert len(own) == 8


def test_log_freq_is_checked() -> None:
    with pytest.raises(ValueError, match="`log_freq` must be an integer of at least 1, got 0"):
        PERLoggerCallback(0)


def test_every_off_policy_algorithm_can_be_logged() -> None:
    sac = SAC("MlpPolicy", ContinuousEnv(), buffer_size=100, learning_starts=5, seed=0)
    (row,) = log(sac, 30, 30)
    assert row["per/share_never_replayed"] < 0.1
    assert cast(Any, sac.replay_buffer).size() == 30
