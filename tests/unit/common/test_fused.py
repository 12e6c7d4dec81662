"""A gradient step in one call of compiled code is the same as one by the buffer's methods."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from model_helpers import (
    SAVING_MEMORY,
    TenStepEnv,
    buffer_of,
    parameters_of,
    same,
    side_by_side,
    silent,
    small_model,
)
from sb3_per import PERDQN, PERQRDQN, PrioritizedReplayBuffer, SumTree
from sb3_per.common import mlp_kernels
from sb3_per.common.compiled import CompiledOffPolicyAlgorithm
from sb3_per.common.mlp import CompiledUpdate

N_STEPS = 90
BATCH_SIZE = 13


def learned(**arguments: Any) -> CompiledOffPolicyAlgorithm:
    """:return: a model that has learned for some steps, the buffer having gone round by then"""
    arguments = {"compiled": True, "batch_size": BATCH_SIZE, **arguments}
    model: Any = silent(small_model(**arguments))
    buffer_of(model).record_draws()
    model.learn(N_STEPS)
    return model  # type: ignore[no-any-return]


def by_methods(model: CompiledOffPolicyAlgorithm) -> None:
    """From now on the model calls the methods of its buffer."""
    buffer: Any = buffer_of(model)
    buffer.sample = buffer.sample


def counting_calls() -> AbstractContextManager[mock.MagicMock]:
    """:return: inside the block, steps in one call are counted"""
    return mock.patch.object(
        CompiledUpdate, "replay", autospec=True, side_effect=CompiledUpdate.replay
    )


def n_joined_steps(model: CompiledOffPolicyAlgorithm, gradient_steps: int = 3) -> int:
    """:return: how many of the gradient steps of a ``train`` are one call"""
    assert model.uses_compiled_update
    with counting_calls() as replay:
        model.train(gradient_steps, BATCH_SIZE)
    return replay.call_count


def moments_of(model: CompiledOffPolicyAlgorithm) -> list[th.Tensor]:
    state = model.policy.optimizer.state
    return [value.clone() for kept in state.values() for value in kept.values()]


def content_of(model: CompiledOffPolicyAlgorithm) -> list[th.Tensor]:
    """:return: everything that a gradient step changes"""
    priorities = th.from_numpy(buffer_of(model).priorities)
    return [*parameters_of(model), *moments_of(model), priorities]


def of_time_limits() -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(TenStepEnv(), 7)


MODES: dict[str, Callable[[], dict[str, Any]]] = {
    "as it comes": dict,
    "another size of batch": lambda: {"batch_size": 256},
    "several layers": lambda: {"policy_kwargs": {"net_arch": [33, 70, 5]}},
    "weights by the buffer": lambda: {"weight_normalization": "buffer"},
    "ranks": lambda: {"prioritization": "rank", "alpha": 0.7},
    "clipped": lambda: {"priority": "clipped", "alpha": 0.4},
    "own errors of new transitions": lambda: {"initial_priority": "td_error"},
    "double_q": lambda: {"double_q": True},
    "mse": lambda: {"loss": "mse", "max_grad_norm": 0.1},
    "several environments": lambda: {"env": side_by_side(3)},
    "time limits": lambda: {"env": of_time_limits()},
    "memory saving": lambda: {**SAVING_MEMORY, "env": side_by_side(2)},
    "3 steps": lambda: {"n_steps": 3, "env": side_by_side(2, of_time_limits)},
    # NumPy adds so many numbers in another order than one after the other
    "9 steps and memory saving": lambda: {"n_steps": 9, **SAVING_MEMORY},
    "alpha and beta of 0": lambda: {"alpha": 0.0, "beta": 0.0, "beta_final": 0.0},
    "quantiles": lambda: {"algorithm": PERQRDQN, "prioritization": "rank"},
    "clipped quantiles of 2 steps": lambda: {
        "algorithm": PERQRDQN,
        "priority": "clipped",
        "max_grad_norm": None,
        "n_steps": 2,
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_in_one_call_is_that_of_the_methods_to_the_last_bit(mode: str) -> None:
    contents, logs, draws, states = [], [], [], []
    for is_joined in (True, False):
        model = learned(**MODES[mode]())
        if not is_joined:
            by_methods(model)
        assert n_joined_steps(model) == (3 if is_joined else 0)
        contents.append(content_of(model))
        logs.append(dict(model.logger.name_to_value))
        record = buffer_of(model).draws
        assert record is not None
        draws.append((record.n_draws, record.sum_of_ages, record.counts.tolist()))
        states.append(str(np.random.get_state(legacy=False)))
    assert same(*contents)
    assert logs[0] == logs[1]
    assert {"train/loss", "per/td_error_mean", "per/weight_mean", "per/ess"} < logs[0].keys()
    assert draws[0] == draws[1]
    assert states[0] == states[1]


def test_a_whole_run_is_the_same_to_the_last_bit() -> None:
    joined = learned()
    model: PERDQN = silent(small_model(compiled=True, batch_size=BATCH_SIZE))
    by_methods(model)
    model.learn(N_STEPS)
    assert same(content_of(joined), content_of(model))


def test_every_step_but_the_first_is_one_call() -> None:
    """Before the first step there is no state of the optimizer to work on."""
    model: PERDQN = silent(small_model(compiled=True))
    with counting_calls() as replay:
        model.learn(N_STEPS)
    assert replay.call_count == model._n_updates - 1 == N_STEPS - model.learning_starts - 1


def write_nan(buffer: PrioritizedReplayBuffer) -> None:
    buffer.rewards[:] = np.nan


def write_large_rewards(buffer: PrioritizedReplayBuffer) -> None:
    buffer.rewards[:] = 1e36


def write_unknown_actions(buffer: PrioritizedReplayBuffer) -> None:
    buffer.actions[:] = 2


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (write_nan, ValueError, "TD errors must be finite, got nan for transition"),
        (write_large_rewards, ValueError, "is too large: its priority"),
        (write_unknown_actions, RuntimeError, "action 2 in the replay buffer is out of bounds"),
    ],
)
@pytest.mark.parametrize("algorithm", [PERDQN, PERQRDQN])
def test_what_is_wrong_is_said_as_by_the_methods_and_nothing_changes(
    algorithm: type[PERDQN], spoil: Callable[[Any], None], error: type[Exception], message: str
) -> None:
    messages = []
    for is_joined in (True, False):
        model = learned(algorithm=algorithm, alpha=9.0)
        spoil(buffer_of(model))
        before = content_of(model)
        n_updates = model._n_updates
        if not is_joined:
            by_methods(model)
        with counting_calls() as replay, pytest.raises(error, match=message) as raised:
            model.train(1, BATCH_SIZE)
        assert replay.called == is_joined
        assert same(before, content_of(model))
        assert model._n_updates == n_updates
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_nothing_to_draw_is_said_as_by_the_methods() -> None:
    model = learned()
    buffer = buffer_of(model)
    buffer.tree.fill(0, buffer.tree.capacity, 0.0)
    with pytest.raises(ValueError, match="have a priority of zero"):
        model.train(1, BATCH_SIZE)


REPLACEABLE = ["sample", "_get_samples", "update_priorities", "_observations_at", "_weights_of"]


@pytest.mark.parametrize("name", REPLACEABLE)
def test_a_method_replaced_in_the_buffer_is_used(name: str) -> None:
    model = learned()
    buffer = buffer_of(model)
    with mock.patch.object(buffer, name, side_effect=getattr(buffer, name)) as replaced:
        assert n_joined_steps(model) == 0
    assert replaced.call_count >= 3
    assert n_joined_steps(model) == 3


@pytest.mark.parametrize("name", REPLACEABLE)
def test_a_method_replaced_in_the_class_is_used(name: str) -> None:
    model = learned()
    right = getattr(PrioritizedReplayBuffer, name)
    with mock.patch.object(
        PrioritizedReplayBuffer, name, autospec=True, side_effect=right
    ) as replaced:
        assert n_joined_steps(model) == 0
    assert replaced.call_count >= 3
    assert n_joined_steps(model) == 3


class HalvingBuffer(PrioritizedReplayBuffer):
    """Gives half of each reward."""

    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        batch = super()._get_samples(batch_inds, env)
        return batch._replace(rewards=batch.rewards / 2.0)


def test_a_derived_buffer_is_used_by_its_methods() -> None:
    model = learned(replay_buffer_class=HalvingBuffer)
    assert n_joined_steps(model) == 0
    assert not same(parameters_of(model), parameters_of(learned()))


class CountingTree(SumTree):
    """Counts the draws and the writes."""

    n_draws = 0
    n_writes = 0

    def sample(self, batch_size: Any) -> Any:
        self.n_draws += 1
        return super().sample(batch_size)

    def write(self, indices: Any, priorities: Any) -> None:
        self.n_writes += 1
        super().write(indices, priorities)


def test_a_tree_put_in_the_place_of_the_buffers_own_is_used() -> None:
    model = learned()
    buffer = buffer_of(model)
    tree = CountingTree(buffer.tree.capacity)
    tree.update(np.arange(buffer.n_transitions), buffer.priorities)
    buffer.tree = tree
    assert n_joined_steps(model) == 3
    assert (tree.n_draws, tree.n_writes) == (3, 3)


LEFT_TO_THE_METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "rewards are normalized": lambda: {"env": VecNormalize(side_by_side(1))},
    "observations of another type": lambda: {
        "env": TenStepEnv(spaces.Box(-1.0, 1.0, (3,), np.float64))
    },
    "one-hot codes": lambda: {"env": TenStepEnv(spaces.Discrete(5))},
    "a priority that sees the batch": lambda: {"priority": "reducible"},
}


@pytest.mark.parametrize("case", LEFT_TO_THE_METHODS)
def test_what_the_call_does_not_know_is_left_to_the_methods(case: str) -> None:
    model = learned(**LEFT_TO_THE_METHODS[case]())
    before = parameters_of(model)
    assert n_joined_steps(model) == 0
    assert not same(before, parameters_of(model))


def test_an_observation_kept_aside_is_seen() -> None:
    """With memory saving, what followed an episode that was broken off is nowhere in the arrays."""
    model = learned(**SAVING_MEMORY)
    buffer = buffer_of(model)
    assert n_joined_steps(model) == 3
    buffer.dones[(buffer.pos - 1) % buffer.buffer_size] = 0.0
    buffer.truncate_last_trajectory()
    assert n_joined_steps(model) == 0


def test_other_options_of_numbers_need_no_other_compiled_form() -> None:
    learned()
    kernel: Any = mlp_kernels.replay
    n_forms = len(kernel.signatures)
    learned(gamma=1, max_grad_norm=5, alpha=1, beta=0, beta_final=1, learning_rate=1)
    learned(env=side_by_side(2), n_steps=2, priority="clipped", double_q=True, loss="mse")
    learned(prioritization="rank", weight_normalization="buffer", **SAVING_MEMORY)
    assert len(kernel.signatures) == n_forms
