"""Buffers that draw by rank: the same transitions, other probabilities."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from scipy import stats
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from buffer_helpers import (
    ACTIONS,
    OBSERVATIONS,
    Array,
    add_rows,
    assert_same_batches,
    make_buffer,
)
from model_helpers import SAVING_MEMORY, TenStepEnv, buffer_of, small_model
from sb3_per import PERDQN, PrioritizedReplayBuffer
from sb3_per.trees.rank_tree import RankTree
from sb3_per.trees.sum_tree import SumTree


def make_ranked(rows: int, n_adds: int, n_envs: int = 1, **options: Any) -> PrioritizedReplayBuffer:
    base = {"prioritization": "rank", "alpha": 0.6, "eps": 1e-6, **options}
    return make_buffer(rows * n_envs, n_adds, n_envs, **base)


def probabilities_by_sorting(errors: Array, eps: float, alpha: float) -> Array:
    """P(i) as in the paper, by sorting; among equal errors the smaller number comes first."""
    sizes = np.abs(errors) + eps
    ranks = np.empty(len(sizes))
    ranks[np.argsort(-sizes, kind="stable")] = np.arange(1, len(sizes) + 1)
    masses: Array = np.where(sizes > 0.0, ranks**-alpha, 0.0)
    total: float = masses.sum()
    return masses / total


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0, 2.5])
@pytest.mark.parametrize(("rows", "n_envs"), [(7, 1), (50, 3), (333, 1)])
def test_probabilities_are_powers_of_one_over_the_rank(
    rows: int, n_envs: int, alpha: float
) -> None:
    buffer = make_ranked(rows, rows, n_envs, alpha=alpha)
    errors = np.random.default_rng(rows).standard_cauchy(rows * n_envs)
    buffer.update_priorities(np.arange(rows * n_envs), errors)
    np.testing.assert_allclose(
        buffer.probabilities, probabilities_by_sorting(errors, buffer.eps, alpha), rtol=1e-12
    )
    np.testing.assert_allclose(buffer.priorities, np.abs(errors) + buffer.eps, rtol=1e-15)


def draws(buffer: PrioritizedReplayBuffer, n: int) -> Array:
    drawn = [buffer.sample(16).indices for _ in range(n // 16)]
    return np.bincount(np.concatenate(drawn), minlength=buffer.n_transitions)


@pytest.mark.filterwarnings("ignore:1000 batches were sampled")
@pytest.mark.parametrize("broken", [False, True])
def test_drawn_frequencies_follow_the_ranks(broken: bool) -> None:
    """Chi-square at 1e-4, seed fixed; the twin draws in proportion to the errors."""
    np.random.seed(0)
    buffer = make_ranked(40, 40, alpha=0.7)
    errors = np.arange(1.0, 41.0)[::-1]
    buffer.update_priorities(np.arange(40), errors)
    expected = probabilities_by_sorting(errors, buffer.eps, 0.7)
    if broken:
        buffer.prioritization = "proportional"
    counts = draws(buffer, 32_000)
    p_value = stats.chisquare(counts, expected * counts.sum()).pvalue
    assert bool(p_value < 1e-4) is broken


@pytest.mark.parametrize("normalization", ["batch", "buffer"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_weights_are_those_of_the_probabilities(beta: float, normalization: str) -> None:
    buffer = make_ranked(30, 30, alpha=0.8, beta=beta, weight_normalization=normalization)
    buffer.update_priorities(np.arange(30), np.random.default_rng(1).standard_normal(30))
    batch = buffer.sample(8)
    probabilities = buffer.probabilities
    weights = (30 * probabilities[batch.indices]) ** -beta
    largest = weights.max() if normalization == "batch" else (30 * probabilities.min()) ** -beta
    np.testing.assert_allclose(batch.weights[:, 0], weights / largest, rtol=1e-6)
    assert batch.weights.dtype == th.float32


def test_an_outlier_counts_as_the_first_rank_and_no_more() -> None:
    buffer = make_ranked(10, 10, alpha=0.7)
    buffer.update_priorities(np.arange(10), np.arange(10.0))
    before = buffer.probabilities
    buffer.update_priorities([9], [1e30])
    np.testing.assert_array_equal(buffer.probabilities, before)


def test_new_transitions_share_the_first_ranks() -> None:
    buffer = make_ranked(10, 6, alpha=1.0)
    assert buffer.priorities.tolist() == [1.0] * 6
    buffer.update_priorities(np.arange(6), [3.0, 0.5, 0.4, 0.3, 0.2, 0.1])
    add_rows(buffer)
    assert buffer.priorities[6] == buffer.priorities.max() == 3.0 + buffer.eps
    np.testing.assert_allclose(
        buffer.probabilities[[0, 6, 1]] * buffer.tree.total, [1, 1 / 2, 1 / 3]
    )


def test_a_change_of_alpha_applies_to_all_at_once() -> None:
    buffer = make_ranked(8, 8, alpha=0.5)
    errors = np.arange(8.0)
    buffer.update_priorities(np.arange(8), errors)
    buffer.alpha = 2.0
    np.testing.assert_allclose(
        buffer.probabilities, probabilities_by_sorting(errors, buffer.eps, 2.0)
    )
    with pytest.raises(ValueError, match="`alpha` must be a finite number of at least 0, got -1"):
        buffer.alpha = -1.0
    assert buffer.alpha == 2.0


def test_without_eps_an_error_of_zero_is_never_drawn() -> None:
    buffer = make_ranked(5, 5, eps=0.0)
    buffer.update_priorities(np.arange(5), [0.0, 2.0, 0.0, 1.0, 0.0])
    assert set(buffer.sample(64).indices) == {1, 3}
    buffer.update_priorities(np.arange(5), np.zeros(5))
    with pytest.raises(ValueError, match="all 5 stored transitions have a priority of zero"):
        buffer.sample(2)


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_batches_hold_what_a_proportional_buffer_gives(n_steps: int, n_envs: int) -> None:
    """Which transitions come is all that differs."""
    by_rank, plain = (
        make_ranked(12, 17, n_envs, n_steps=n_steps, gamma=0.9, prioritization=kind)
        for kind in ("rank", "proportional")
    )
    batch = by_rank.sample(20)
    twin = plain.batch_of(batch.indices)
    for name in ("observations", "actions", "next_observations", "dones", "rewards", "discounts"):
        ours, theirs = getattr(batch, name), getattr(twin, name)
        assert (ours is None and theirs is None) or th.equal(ours, theirs), name


@pytest.mark.parametrize("n_envs", [1, 3])
def test_with_memory_saving_the_row_without_next_observation_has_no_rank(n_envs: int) -> None:
    buffer = make_ranked(
        6, 20, n_envs, optimize_memory_usage=True, handle_timeout_termination=False, alpha=0.0
    )
    hidden = np.arange(n_envs) + buffer.pos * n_envs
    assert (buffer.probabilities[hidden] == 0.0).all()
    buffer.update_priorities(hidden, np.full(n_envs, 9.0))
    assert (buffer.probabilities[hidden] == 0.0).all()
    assert np.count_nonzero(buffer.probabilities) == 5 * n_envs
    assert not set(hidden) & set(buffer.sample(200).indices)


def test_a_pickle_brings_the_same_draws() -> None:
    buffer = make_ranked(50, 70)
    buffer.update_priorities(np.arange(50), np.random.default_rng(2).standard_normal(50))
    twin = pickle.loads(pickle.dumps(buffer))
    assert twin.tree.check_valid() == (True, "")
    assert_same_batches(buffer, twin)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_stored_errors_survive_a_change_of_kind(alpha: float) -> None:
    buffer = make_ranked(6, 6, alpha=alpha, eps=0.0)
    errors = np.array([0.5, 2.0, 0.0, 1.5, 1e-200, 1e200])
    buffer.update_priorities(np.arange(6), errors)
    buffer.prioritization = "proportional"
    assert isinstance(buffer.tree, SumTree)
    # A leaf of zero stays one, also where 0 ** 0 would be 1
    expected = np.where(errors > 0.0, errors**alpha, 0.0)
    np.testing.assert_allclose(buffer.priorities, expected)
    buffer.prioritization = "rank"
    assert isinstance(buffer.tree, RankTree)
    assert buffer.tree.alpha == alpha
    if alpha:
        np.testing.assert_allclose(buffer.priorities, errors, rtol=1e-12)
    assert (buffer.priorities > 0.0).tolist() == (errors > 0.0).tolist()
    with pytest.raises(ValueError, match=r"`prioritization` must be one of \['prop.*got 'best'"):
        buffer.prioritization = "best"  # type: ignore[assignment]
    assert buffer.prioritization == "rank"


def test_errors_are_refused_as_in_a_proportional_buffer() -> None:
    buffer = make_ranked(4, 4)
    before = buffer.priorities
    for errors in ([np.nan], [np.inf], th.tensor([[-np.inf]])):
        with pytest.raises(ValueError, match="TD errors must be finite"):
            buffer.update_priorities([2], errors)
    with pytest.raises(IndexError, match="index 4 is not that of a stored transition"):
        buffer.update_priorities([4], [1.0])
    np.testing.assert_array_equal(buffer.priorities, before)
    # There is no sum that could overflow
    buffer.update_priorities([2], [np.finfo(np.float64).max])
    assert buffer.priorities[2] == np.finfo(np.float64).max


def test_a_plain_buffer_is_taken_over() -> None:
    plain = ReplayBuffer(5, OBSERVATIONS, ACTIONS, device="cpu")
    add_rows(plain, 3)
    buffer = PrioritizedReplayBuffer.from_replay_buffer(plain, prioritization="rank", alpha=0.0)
    assert isinstance(buffer.tree, RankTree)
    np.testing.assert_allclose(buffer.probabilities, 1 / 3)


# --- in a model


def tree_of(model: PERDQN) -> RankTree:
    tree = buffer_of(model).tree
    assert isinstance(tree, RankTree)
    assert tree.check_valid() == (True, "")
    return tree


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_steps": 3},
        {"double_q": True, "weight_normalization": "buffer"},
        SAVING_MEMORY,
    ],
    ids=str,
)
def test_the_algorithm_trains_by_ranks_and_goes_on_after_loading(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = small_model(prioritization="rank", **options).learn(90)
    tree_of(model)
    priorities = buffer_of(model).priorities
    assert len(np.unique(priorities)) > 30
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = PERDQN.load(tmp_path / "model", env=model.get_env())
    assert loaded.prioritization == "rank"
    loaded.load_replay_buffer(tmp_path / "buffer")
    tree_of(loaded)
    np.testing.assert_array_equal(buffer_of(loaded).priorities, priorities)


def test_a_loaded_buffer_becomes_one_of_the_models_kind(tmp_path: Path) -> None:
    """The sizes of the errors are kept; with the file's alpha they are taken from their powers."""
    stored = small_model(alpha=0.5).learn(60)
    stored.save_replay_buffer(tmp_path / "buffer")
    model = small_model(prioritization="rank")
    with pytest.warns(UserWarning, match="applies from now on") as caught:
        model.load_replay_buffer(tmp_path / "buffer")
    messages = [str(warning.message) for warning in caught]
    assert [("alpha=0.5" in one, "prioritization='prop" in one) for one in messages] == [
        (False, True),
        (True, False),
    ]
    assert buffer_of(model).alpha == model.alpha == 0.6
    np.testing.assert_allclose(buffer_of(model).priorities, buffer_of(stored).priorities ** 2)


def test_dict_observations_go_by_ranks() -> None:
    space = spaces.Dict({"place": spaces.Box(-1.0, 1.0, (2,)), "room": spaces.Discrete(3)})
    model = small_model(TenStepEnv(space), prioritization="rank").learn(60)
    assert sorted(tree_of(model).ranks(np.arange(60))) == list(range(1, 61))


def test_hindsight_goes_by_ranks() -> None:
    model = small_model(
        BitFlippingEnv(n_bits=4),
        replay_buffer_class=HerReplayBuffer,
        learning_starts=20,
        prioritization="rank",
    ).learn(100)
    buffer = buffer_of(model)
    assert isinstance(buffer, HerReplayBuffer)
    over = buffer.ep_length.ravel() > 0
    np.testing.assert_array_equal(tree_of(model).ranks(np.arange(60)) > 0, over)
