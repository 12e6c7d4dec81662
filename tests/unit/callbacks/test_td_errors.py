"""TD errors of the transitions in a replay buffer."""

import functools
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_per import PERDQN, PrioritizedReplayBuffer
from sb3_per.callbacks import (
    PERLoggerCallback,
    ReplaySnapshotCallback,
    drawable_indices,
    td_errors_in_buffer,
)

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float64]
Make = Callable[..., Any]


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
    algorithm: Any, options: dict[str, Any], n_envs: int, make_env: Make, make_model: Make
) -> None:
    model = make_model(algorithm, make_env(n_envs), train_freq=16, **options).learn(100)
    indices = drawable_indices(model.replay_buffer)
    assert len(indices) == (60 - n_envs if "optimize_memory_usage" in options else 60)
    errors = td_errors_in_buffer(model)
    assert errors.dtype == np.float64
    np.testing.assert_allclose(errors, reference_td_errors(model, indices), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dict", "goal"])
@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_td_errors_with_dict_observations_and_hindsight(
    algorithm: Any, kind: str, make_env: Make, make_model: Make
) -> None:
    kwargs: dict[str, Any] = {"learning_starts": 30, "train_freq": 8}
    if kind == "goal":
        kwargs["replay_buffer_class"] = HerReplayBuffer
    model = make_model(algorithm, make_env(2, kind), **kwargs).learn(130)
    indices = drawable_indices(model.replay_buffer)
    # Unfinished episodes, and the rest of those whose beginning was overwritten
    assert (len(indices) < 60) == (kind == "goal")
    expected = reference_td_errors(model, indices)
    np.testing.assert_allclose(td_errors_in_buffer(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"n_steps": 3}], ids=["one step", "three steps"])
@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_td_errors_are_of_normalized_values(
    algorithm: Any, options: dict[str, Any], make_env: Make, make_model: Make
) -> None:
    model = make_model(algorithm, make_env(2, normalize=True), train_freq=8, **options).learn(100)
    indices = drawable_indices(model.replay_buffer)
    expected = reference_td_errors(model, indices)
    np.testing.assert_allclose(td_errors_in_buffer(model), expected, rtol=1e-4, atol=1e-4)


def agent_of(name: str) -> Any:
    """The algorithm of that name; the test is skipped if it needs an extra that is missing."""
    if name.endswith("QRDQN"):
        pytest.importorskip("sb3_contrib", reason="extra: contrib")
    module = importlib.import_module("sb3_per" if name.startswith("PER") else "sb3_contrib")
    return getattr(module, name)


@pytest.mark.parametrize(
    ("agent", "options"),
    [("QRDQN", {}), ("PERQRDQN", {}), ("PERQRDQN", {"double_q": True})],
    ids=["QRDQN", "PER", "double"],
)
def test_td_errors_of_quantile_networks_are_of_means(
    agent: str, options: dict[str, Any], make_env: Make, make_model: Make
) -> None:
    algorithm = agent_of(agent)
    policy = {"net_arch": [8], "n_quantiles": 5}
    model = make_model(algorithm, make_env(2), train_freq=8, policy_kwargs=policy, **options)
    model.learn(100)
    expected = reference_td_errors(model, range(60))
    np.testing.assert_allclose(td_errors_in_buffer(model), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"double_q": True}, {"n_steps": 3}], ids=["plain", "double", "three steps"]
)
def test_td_errors_are_those_that_training_feeds_back(
    options: dict[str, Any], make_env: Make, make_model: Make
) -> None:
    model = make_model(PERDQN, make_env(2, normalize=True), **options).learn(60)
    before = td_errors_in_buffer(model)
    fed_back: list[tuple[Array, Array]] = []
    model.replay_buffer.update_priorities = lambda indices, errors: fed_back.append(
        (indices, errors.detach().numpy().ravel())
    )
    model.train(gradient_steps=1, batch_size=32)
    ((indices, errors),) = fed_back
    np.testing.assert_allclose(np.abs(before[indices]), np.abs(errors), rtol=1e-5, atol=1e-6)


def add(model: Any, next_observation: float, reward: float, done: bool) -> None:
    """Store a transition that starts at an observation of zeros."""
    observations = np.zeros((1, 2)), np.full((1, 2), next_observation)
    model.replay_buffer.add(
        *observations, np.array([1]), np.array([reward]), np.array([done]), [{}]
    )


def test_td_error_has_the_sign_of_target_minus_value(make_model: Make) -> None:
    model = make_model()
    for parameter in model.policy.parameters():
        parameter.data.zero_()
    add(model, next_observation=0.0, reward=5.0, done=True)
    assert td_errors_in_buffer(model).tolist() == [5.0]


@pytest.mark.parametrize(
    ("agent", "options"),
    [
        ("QRDQN", {}),
        ("PERDQN", {}),
        ("PERDQN", {"double_q": True}),
        ("PERQRDQN", {"double_q": True}),
    ],
)
def test_the_target_of_a_terminal_transition_is_its_reward(
    agent: str, options: dict[str, Any], make_model: Make
) -> None:
    """Even where the networks say NaN of the observation after the end of the episode."""
    model = make_model(agent_of(agent), **options)
    for parameter in model.policy.parameters():
        parameter.data.zero_()
    add(model, next_observation=np.nan, reward=-3.0, done=True)
    add(model, next_observation=np.nan, reward=-3.0, done=False)
    np.testing.assert_equal(td_errors_in_buffer(model), [-3.0, np.nan])


def test_chosen_transitions_in_the_order_asked_for(make_env: Make, make_model: Make) -> None:
    model = make_model(DQN, make_env(3)).learn(90)
    everything = td_errors_in_buffer(model)
    chosen = np.array([44, 2, 2, 17, 0, 59])
    np.testing.assert_allclose(td_errors_in_buffer(model, chosen), everything[chosen], rtol=1e-6)
    assert td_errors_in_buffer(model, []).shape == (0,)


def test_more_transitions_than_go_through_the_networks_at_once(
    monkeypatch: pytest.MonkeyPatch, make_env: Make, make_model: Make
) -> None:
    model = make_model(DQN, make_env(2)).learn(90)
    everything = td_errors_in_buffer(model)
    monkeypatch.setattr("sb3_per.callbacks.td_errors.CHUNK", 7)
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
def test_looking_changes_nothing(
    algorithm: Any, options: dict[str, Any], make_env: Make, make_model: Make
) -> None:
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


class FrozenNorm(th.nn.BatchNorm1d):
    """Has a ``train`` of its own: it never leaves evaluation mode, but knows what was asked for."""

    def train(self, mode: bool = True) -> "FrozenNorm":
        self.asked_for = mode
        return super().train(False)


class Switch(th.nn.Dropout):
    """Has ``training`` as a property."""

    @property
    def training(self) -> bool:
        return self.is_on

    @training.setter
    def training(self, mode: bool) -> None:
        self.is_on = mode


class UnusualModules(BaseFeaturesExtractor):
    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space, 4)
        scripted = th.jit.script(th.nn.Sequential(th.nn.Linear(2, 4), th.nn.Dropout(0.5)))
        # Its method is replaced
        fixed = th.nn.BatchNorm1d(4).eval()
        fixed.train = lambda mode=True: fixed  # type: ignore[method-assign]
        self.layers = th.nn.Sequential(scripted, FrozenNorm(4), fixed, Switch(0.5))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        out: th.Tensor = self.layers(observations)
        return out


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_every_module_is_switched_by_its_own_method(
    algorithm: Any, mode: bool, make_model: Make
) -> None:
    model = make_model(algorithm, policy_kwargs={"features_extractor_class": UnusualModules}).learn(
        40
    )
    model.policy.set_training_mode(mode)
    layers = model.q_net.features_extractor.layers
    assert [layer.training for layer in layers] == [mode, False, False, mode]
    layers[0][1].train(not mode)
    modes = [module.training for module in model.policy.modules()]

    errors = td_errors_in_buffer(model)
    assert [module.training for module in model.policy.modules()] == modes
    assert layers[0][1].training is not mode
    assert layers[1].asked_for == mode
    # Nothing is dropped
    assert td_errors_in_buffer(model).tolist() == errors.tolist()
    assert np.unique(errors).size == errors.size


@pytest.mark.parametrize("algorithm", [DQN, PERDQN])
def test_what_a_batch_may_contain(algorithm: Any, make_env: Make, make_model: Make) -> None:
    def drawable(timesteps: int, kind: str = "box", **options: Any) -> list[int]:
        model = make_model(algorithm, make_env(2, kind), learning_starts=1000, **options)
        buffer = model.learn(timesteps).replay_buffer
        indices = drawable_indices(buffer)
        if algorithm is PERDQN:
            everything = np.zeros(buffer.size() * 2, dtype=bool)
            everything[indices] = True
            assert buffer.drawable().tolist() == everything.tolist()
        return [*indices]

    assert drawable(40) == list(range(40))
    # Full, 30 rows, and row 7 is written next
    memory_saving = BUFFERS["memory saving"]
    assert drawable(74) == list(range(60))
    assert drawable(40, **memory_saving) == list(range(40))
    assert drawable(74, **memory_saving) == [i for i in range(60) if i not in (14, 15)]
    # 20 rows, of which the last 5 are of an episode that still runs
    assert drawable(40, "goal", replay_buffer_class=HerReplayBuffer) == list(range(30))


def test_indices_are_checked(make_env: Make, make_model: Make) -> None:
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


def test_algorithms_without_q_values_are_refused(make_env: Make) -> None:
    sac = SAC("MlpPolicy", make_env(kind="continuous"), buffer_size=100)
    with pytest.raises(ValueError, match=r"discrete actions.*got SAC"):
        td_errors_in_buffer(sac)
    with pytest.raises(ValueError, match=r"discrete actions.*got SAC"):
        sac.learn(10, callback=ReplaySnapshotCallback())
    ppo = PPO("MlpPolicy", make_env(), n_steps=8, batch_size=8)
    for callback in (ReplaySnapshotCallback(), PERLoggerCallback()):
        with pytest.raises(ValueError, match="PPO has none"):
            ppo.learn(8, callback=callback)
    assert sac.num_timesteps == ppo.num_timesteps == 0


def test_buffers_that_cannot_be_read_are_refused_before_training(make_model: Make) -> None:
    class Custom(ReplayBuffer):
        pass

    model = make_model(DQN, replay_buffer_class=Custom)
    with pytest.raises(ValueError, match=r"one of SB3's ReplayBuffer, .*, got a Custom"):
        model.learn(10, callback=ReplaySnapshotCallback())
    assert model.num_timesteps == 0
    # There is nothing to compute for the log
    model.learn(10, callback=PERLoggerCallback(5))
    with pytest.raises(ValueError, match="got a Custom"):
        td_errors_in_buffer(model)


def test_custom_prioritized_buffers_are_read(make_model: Make) -> None:
    class Doubling(PrioritizedReplayBuffer):
        def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
            batch = super()._get_samples(batch_inds, env)
            return batch._replace(rewards=batch.rewards * 2)

    model = make_model()
    for parameter in model.policy.parameters():
        parameter.data.zero_()
    model.replay_buffer = Doubling(10, model.observation_space, model.action_space, device="cpu")
    add(model, next_observation=0.0, reward=5.0, done=True)
    assert td_errors_in_buffer(model).tolist() == [10.0]
