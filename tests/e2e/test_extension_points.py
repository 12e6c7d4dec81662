"""What users put in place of parts of a model does what it does under DQN and QRDQN."""

from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib import QRDQN
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from model_helpers import TenStepEnv, buffer_of, silent, small_model
from sb3_per import PERDQN, PERQRDQN, PrioritizedHerReplayBuffer, PrioritizedReplayBuffer

ALGORITHMS = pytest.mark.parametrize("algorithm", [PERDQN, PERQRDQN])
PAIRS = pytest.mark.parametrize(
    ("algorithm", "original"), [(PERDQN, DQN), (PERQRDQN, QRDQN)], ids=["PERDQN", "PERQRDQN"]
)
OBSERVATION = np.array([[0.1, -2.0, 3.0]], dtype=np.float32)


def network_of(model: Any) -> nn.Module:
    network: nn.Module = model.q_net if isinstance(model, DQN) else model.quantile_net
    return network


# --- modules that depend on the mode


class Layers(BaseFeaturesExtractor):
    """A linear layer, then others; scripted if asked for."""

    def __init__(self, observation_space: Any, layers: list[Any], scripted: bool = False) -> None:
        super().__init__(observation_space, 16)
        modules = nn.Sequential(nn.Linear(3, 16), *[layer() for layer in layers])
        self.layers: Any = th.jit.script(modules) if scripted else modules

    def forward(self, observations: th.Tensor) -> th.Tensor:
        features: th.Tensor = self.layers(observations)
        return features


class Resting(nn.Dropout):
    """Frozen: drops nothing whatever it is told."""

    def train(self, mode: bool = True) -> "Resting":
        return super().train(False)


class Mode(nn.Module):
    """Notes the mode in each pass; what it is told goes through a property."""

    def __init__(self) -> None:
        self.seen: list[bool] = []
        super().__init__()

    @property
    def training(self) -> bool:
        return self._mode

    @training.setter
    def training(self, mode: bool) -> None:
        self._mode = mode

    def forward(self, features: th.Tensor) -> th.Tensor:
        self.seen.append(self.training)
        return features


def with_layers(algorithm: type[Any], *layers: Any, scripted: bool = False) -> Any:
    policy_kwargs = {
        "net_arch": [8],
        "features_extractor_class": Layers,
        "features_extractor_kwargs": {"layers": list(layers), "scripted": scripted},
    }
    return small_model(algorithm=algorithm, policy_kwargs=policy_kwargs)


@ALGORITHMS
@pytest.mark.parametrize("scripted", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_dropout_is_off_while_acting_and_on_in_training(
    algorithm: type[Any], scripted: bool
) -> None:
    model = with_layers(algorithm, lambda: nn.Dropout(0.5), scripted=scripted).learn(40)
    model.policy.set_training_mode(True)
    model.predict(OBSERVATION)
    network = network_of(model)
    observation = th.as_tensor(OBSERVATION)
    assert th.equal(network(observation), network(observation))
    model.train(1, 4)
    assert not th.equal(network(observation), network(observation))


@ALGORITHMS
@pytest.mark.parametrize("scripted", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_batch_norm_learns_in_training_and_acts_on_single_observations(
    algorithm: type[Any], scripted: bool
) -> None:
    # In training mode, a batch of one has no variance: acting would raise
    model = with_layers(algorithm, lambda: nn.BatchNorm1d(16), scripted=scripted).learn(40)
    counts = [
        int(value)
        for name, value in network_of(model).state_dict().items()
        if name.endswith("num_batches_tracked")
    ]
    assert counts == [model._n_updates] == [30]
    model.predict(OBSERVATION[0])


@PAIRS
def test_a_module_put_in_after_construction_is_switched_as_any_other(
    algorithm: type[Any], original: type[Any]
) -> None:
    seen: list[list[bool]] = []
    for kind in (algorithm, original):
        model = with_layers(kind)
        network: Any = network_of(model)
        layers = network.features_extractor.layers
        mode, resting = Mode(), Resting(0.5)
        layers.extend([mode, resting])
        model.learn(30, log_interval=10**6)
        model.predict(OBSERVATION)
        assert mode.training is resting.training is False
        model.train(1, 4)
        assert mode.training
        # Its own `train` has the last word
        assert not resting.training
        seen.append(mode.seen)
    # Random actions are others, so that the number of predictions may be, too
    ours, theirs = (set(each) for each in seen)
    assert ours == theirs == {True, False}


@PAIRS
def test_a_policy_with_a_training_mode_of_its_own_is_asked_as_often(
    algorithm: type[Any], original: type[Any]
) -> None:
    modes: list[bool] = []

    policy: Any = original.policy_aliases["MlpPolicy"]

    class Counting(policy):  # type: ignore[misc]  # mypy wants classes known before the run
        def set_training_mode(self, mode: bool) -> None:
            modes.append(mode)
            super().set_training_mode(mode)

    seen = []
    for kind in (algorithm, original):
        model: Any = silent(small_model(algorithm=kind, policy=Counting))
        zero = np.zeros(1)
        model.replay_buffer.add(OBSERVATION, OBSERVATION, zero, zero, zero, [{}])
        modes.clear()
        model.predict(OBSERVATION)
        model.train(3, 4)
        seen.append(list(modes))
    assert seen[0] == seen[1] == [False, True]


# --- the buffer


class FarSighted:
    """Ends each transition with a reward of 1000: an augmentation that can't be overlooked."""

    n_calls = 0

    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        batch: Any = super()._get_samples(batch_inds, env)  # type: ignore[misc]  # of the class after it
        self.n_calls += 1
        ones = th.ones_like(batch.rewards)
        return batch._replace(rewards=1000.0 * ones, dones=ones)


class FarSightedBuffer(FarSighted, ReplayBuffer):
    pass


class FarSightedPrioritizedBuffer(FarSighted, PrioritizedReplayBuffer):
    pass


@PAIRS
@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_buffer_that_augments_its_batches_is_used_as_often_as_in_sb3(
    algorithm: type[Any], original: type[Any], n_steps: int
) -> None:
    buffers: list[Any] = []
    for kind, buffer_class in (
        (algorithm, FarSightedPrioritizedBuffer),
        (original, FarSightedBuffer),
    ):
        options: dict[str, Any] = {"n_steps": n_steps} if kind is algorithm else {}
        model: Any = small_model(
            algorithm=kind, replay_buffer_class=buffer_class, train_freq=4, **options
        )
        buffers.append(model.learn(60).replay_buffer)
    ours, theirs = buffers
    assert ours.n_calls == theirs.n_calls == 13
    # Those that were replayed have the errors of augmented transitions
    assert ours.priorities.max() == pytest.approx(1000.0**0.6, rel=0.1)


class GoalsOfItsOwn(PrioritizedHerReplayBuffer):
    """Rewards of 1000 for all that is relabeled."""

    n_relabeled = 0

    def _get_virtual_samples(self, batch_indices: Any, env_indices: Any, env: Any = None) -> Any:
        batch = super()._get_virtual_samples(batch_indices, env_indices, env)
        self.n_relabeled += len(batch_indices)
        return batch._replace(rewards=th.full_like(batch.rewards, 1000.0))


@ALGORITHMS
def test_a_buffer_with_a_way_of_its_own_to_relabel_is_used(algorithm: type[Any]) -> None:
    model: Any = small_model(
        BitFlippingEnv(n_bits=3),
        algorithm,
        replay_buffer_class=GoalsOfItsOwn,
        replay_buffer_kwargs={"n_sampled_goal": 3},
    ).learn(40)
    buffer = model.replay_buffer
    assert buffer.n_relabeled == model._n_updates * 6 == 180
    batch = buffer.sample(8)
    assert int((batch.rewards == 1000.0).sum()) == 6
    assert buffer.priorities.max() > 100.0**0.6


@ALGORITHMS
def test_wrapped_methods_of_the_buffer_are_called_once_in_each_gradient_step(
    algorithm: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = small_model(algorithm=algorithm, train_freq=4, gradient_steps=3)
    buffer = buffer_of(model)
    sample, update_priorities = buffer.sample, buffer.update_priorities
    events: list[Any] = []

    # As the algorithm calls them: whatever users put in their place has to take this much
    def wrapped_sample(batch_size: int, *, env: Any) -> Any:
        batch = sample(batch_size, env=env)
        events.append(batch.indices)
        return batch

    def wrapped_update(indices: Any, td_errors: Any) -> None:
        events.append(indices)
        update_priorities(indices, td_errors)

    monkeypatch.setattr(buffer, "sample", wrapped_sample)
    monkeypatch.setattr(buffer, "update_priorities", wrapped_update)
    model.learn(40)
    assert len(events) == 2 * model._n_updates == 48
    assert all(drawn is updated for drawn, updated in zip(events[::2], events[1::2], strict=True))


# --- the optimizer and the parameters


class EmbeddedNumber(BaseFeaturesExtractor):
    """An embedding whose gradients are sparse, as large vocabularies have it."""

    def __init__(self, observation_space: spaces.Discrete) -> None:
        super().__init__(observation_space, 4)
        self.embedding = nn.Embedding(int(observation_space.n), 4, sparse=True)

    def forward(self, one_hot: th.Tensor) -> th.Tensor:
        features: th.Tensor = self.embedding(one_hot.flatten(1).argmax(dim=1))
        return features


@pytest.mark.parametrize("algorithm", [PERQRDQN, QRDQN])
def test_sparse_gradients_train_where_they_are_not_clipped(algorithm: type[Any]) -> None:
    """DQN always clips, which torch can't do with sparse gradients."""
    policy_kwargs = {
        "net_arch": [8],
        "features_extractor_class": EmbeddedNumber,
        "optimizer_class": th.optim.SGD,
    }
    model: Any = small_model(TenStepEnv(spaces.Discrete(7)), algorithm, policy_kwargs=policy_kwargs)
    (embedding, _) = (m for m in model.policy.modules() if isinstance(m, nn.Embedding))
    before = embedding.weight.detach().clone()
    model.learn(30)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.is_sparse
    assert not th.equal(embedding.weight, before)
