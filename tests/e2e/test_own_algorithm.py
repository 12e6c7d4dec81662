"""Algorithms made with the mixin: PERTD3 of the examples, SAC and TQC by docs/own_algorithm.md."""

import inspect
import re
import sys
import textwrap
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from sb3_contrib import TQC
from sb3_contrib.tqc import tqc
from stable_baselines3 import DDPG, SAC, TD3
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from stable_baselines3.sac import sac

from model_helpers import Prioritized, silent, small_model
from sb3_per import PrioritizedReplayBuffer, PrioritizedReplayBufferSamples
from sb3_per.common.losses import quantile_huber_loss

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_algorithm.md").read_text(encoding="utf-8")
SAC_DIFF, TQC_DIFF = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

sys.path.insert(0, str(ROOT / "examples"))
try:
    import per_td3
    from per_td3 import PERTD3
finally:
    sys.path.pop(0)


def patched_train(algorithm: type[OffPolicyAlgorithm], module: Any, *diffs: str) -> Any:
    """What a user gets who copies `train` from the installed version and follows the page."""
    source = textwrap.dedent(inspect.getsource(algorithm.train))
    lines = source.splitlines()
    for diff in diffs:
        # The page shows lines with the indentation of a method
        for change in re.split(r"\n\n", diff.rstrip()):
            rows = change.splitlines()
            old = [row[5:] for row in rows if row[0] in " -" and len(row) > 5]
            new = [row[5:] for row in rows if row[0] in " +" and len(row) > 5]
            if rows[0].startswith("+from "):
                continue
            (start,) = [n for n in range(len(lines)) if lines[n : n + len(old)] == old] or [-1]
            if start < 0 and "TQC" in algorithm.__name__ and diff is SAC_DIFF:
                # What is special to SAC's critics has its own lines for TQC
                continue
            assert start >= 0, f"{algorithm.__name__}.train has no lines {old}"
            lines[start : start + len(old)] = new
    namespace: dict[str, Any] = {**vars(module), "loss_rows": quantile_huber_loss}
    exec("\n".join(lines), namespace)
    return namespace["train"]


class PERSAC(Prioritized, SAC):
    train = patched_train(SAC, sac, SAC_DIFF)


class PERTQC(Prioritized, TQC):
    train = patched_train(TQC, tqc, SAC_DIFF, TQC_DIFF)


class PERDDPG(PERTD3, DDPG):
    """DDPG is TD3 with other settings."""


PAIRS: list[tuple[Any, Any]] = [(PERTD3, TD3), (PERDDPG, DDPG), (PERSAC, SAC), (PERTQC, TQC)]
PAIR = pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda cls: str(cls.__name__))
ALGORITHM = pytest.mark.parametrize("ours", [pair[0] for pair in PAIRS])


def make_model(algorithm: type[Any], **kwargs: Any) -> Any:
    options = {"buffer_size": 200, "learning_starts": 20, "batch_size": 7, "seed": 3, **kwargs}
    return silent(small_model("Pendulum-v1", algorithm, **options))


def share_batches(ours: Any, theirs: Any) -> None:
    """Fill ours, then let theirs see the batches that ours draws."""
    ours.learn(40)
    theirs.learn(20)
    theirs.replay_buffer.pos = ours.replay_buffer.pos
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        getattr(theirs.replay_buffer, name)[...] = getattr(ours.replay_buffer, name)
    original = ours.replay_buffer.sample
    drawn: list[ReplayBufferSamples] = []

    def sample(batch_size: int, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        batch: PrioritizedReplayBufferSamples = original(batch_size, env=env)
        drawn.append(theirs.replay_buffer._get_samples(batch.indices))
        return batch

    ours.replay_buffer.sample = sample
    theirs.replay_buffer.sample = lambda batch_size, env: drawn.pop(0)


@PAIR
@pytest.mark.parametrize("n_steps", [1, 3])
def test_uniform_draws_give_the_update_of_the_original(
    ours: Any, theirs: Any, n_steps: int
) -> None:
    prioritized = make_model(ours, alpha=0.0, beta=0.0, n_steps=n_steps)
    plain = make_model(theirs, n_steps=n_steps)
    share_batches(prioritized, plain)
    # The optimizer would keep the very tensors
    plain.set_parameters(deepcopy(prioritized.get_parameters()))
    if hasattr(plain, "log_ent_coef"):
        with th.no_grad():
            plain.log_ent_coef.copy_(prioritized.log_ent_coef)
    plain._n_updates = prioritized._n_updates
    for model in (prioritized, plain):
        th.manual_seed(5)
        model.train(3, batch_size=7)
    pairs = zip(prioritized.policy.parameters(), plain.policy.parameters(), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one.detach().numpy(), other.detach().numpy(), atol=1e-6)


@ALGORITHM
def test_priorities_are_the_mean_errors_of_the_critics(ours: Any) -> None:
    model = make_model(ours, alpha=1.0).learn(30)
    buffer: Any = model.replay_buffer
    assert type(buffer) is PrioritizedReplayBuffer
    seen: dict[int, float] = {}
    update_priorities = buffer.update_priorities

    def recording(indices: Any, td_errors: th.Tensor) -> None:
        assert td_errors.shape == (7, 1)
        seen.update(zip(indices.tolist(), td_errors[:, 0].tolist(), strict=True))
        update_priorities(indices, td_errors)

    buffer.update_priorities = recording  # type: ignore[method-assign]
    with th.no_grad():
        old_values = critic_values(model, range(30))
    model.train(1, batch_size=7)
    for index, error in seen.items():
        assert buffer.priorities[index] == pytest.approx(error + 1e-6)
        # Each critic is off by this much on average, whatever the target
        assert error >= np.ptp(old_values[index]) / 2 - 1e-6
    statistics = [key for key in model.logger.name_to_value if key.startswith("per/")]
    assert len(statistics) == 6


def critic_values(model: Any, indices: Any) -> Any:
    """Values of stored actions, shape ``(n, n_critics)``."""
    buffer = model.replay_buffer
    observations = th.as_tensor(buffer.observations[indices, 0])
    actions = th.as_tensor(buffer.actions[indices, 0])
    values = model.critic(observations, actions)
    if isinstance(values, tuple):
        return th.cat(values, dim=1).numpy()
    return values.mean(dim=2).numpy()


@ALGORITHM
def test_weights_of_zero_leave_the_critics_alone(ours: Any) -> None:
    model = make_model(ours).learn(30)
    sample = model.replay_buffer.sample

    def weightless(batch_size: int, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        batch: PrioritizedReplayBufferSamples = sample(batch_size, env=env)
        return batch._replace(weights=th.zeros(batch_size, 1))

    # Adam's momentum would move them all the same
    model.critic.optimizer.state.clear()
    before = [parameter.clone() for parameter in model.critic.parameters()]
    model.replay_buffer.sample = weightless
    model.train(2, batch_size=7)
    assert all(map(th.equal, before, model.critic.parameters()))
    model.replay_buffer.sample = sample
    model.train(1, batch_size=7)
    assert not all(map(th.equal, before, model.critic.parameters()))


@ALGORITHM
def test_a_saved_model_goes_on_with_its_options(ours: Any, tmp_path: Path) -> None:
    model = make_model(ours, alpha=0.3, n_steps=2).learn(30)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = ours.load(tmp_path / "model", env=model.get_env(), device="cpu")
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert (loaded.alpha, loaded.n_steps, loaded.replay_buffer.n_steps) == (0.3, 2, 2)
    np.testing.assert_array_equal(loaded.replay_buffer.priorities, model.replay_buffer.priorities)
    for each in (model, loaded):
        each.set_random_seed(0)
        each.learn(25)
    assert all(map(th.equal, model.policy.parameters(), loaded.policy.parameters()))
    again = ours.load(tmp_path / "model", env=model.get_env(), alpha=0.9)
    assert again.replay_buffer.alpha == 0.9
    with pytest.raises(ValueError, match=r"`alpha`.*got -1"):
        ours.load(tmp_path / "model", alpha=-1)


# --- PERTD3 alone


def test_pertd3_is_short() -> None:
    assert len(inspect.getsource(PERTD3).splitlines()) < 80


def test_lap_has_a_smallest_priority_and_no_weights() -> None:
    model = make_model(PERTD3, lap=True, alpha=0.5).learn(25)
    buffer = model.replay_buffer
    buffer.update_priorities(np.arange(25), np.arange(1.0, 26.0))
    sample = buffer.sample
    weights = []

    def recording(batch_size: int, env: VecNormalize | None) -> PrioritizedReplayBufferSamples:
        batch: PrioritizedReplayBufferSamples = sample(batch_size, env=env)
        weights.append(batch.weights)
        return batch._replace(weights=th.full_like(batch.weights, 1e9), rewards=batch.rewards * 0.1)

    buffer.sample = recording
    update_priorities = buffer.update_priorities
    errors: list[th.Tensor] = []

    def recording_update(indices: Any, td_errors: th.Tensor) -> None:
        errors.append(td_errors)
        update_priorities(indices, td_errors)

    buffer.update_priorities = recording_update
    model.train(1, batch_size=25)
    assert bool((weights[0] < 1.0).any())
    assert float(errors[0].min()) == 1.0
    # The mean error in the log is of the raw ones
    assert 0.0 < model.logger.name_to_value["per/td_error_mean"] < float(errors[0].mean())
    assert model.logger.name_to_value["train/critic_loss"] < 100.0


def test_no_gradient_steps_record_nothing() -> None:
    model = make_model(PERTD3)
    model.train(0)
    assert [key for key in model.logger.name_to_value if key.startswith("per/")] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pertd3_solves_pendulum(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    per_td3.main(["--seed", str(seed)])
    name, mean = capsys.readouterr().out.split(": ")
    assert name == f"per, seed {seed}"
    assert float(mean.split()[0]) > -200.0


@pytest.mark.parametrize("replay", list(per_td3.REPLAY))
def test_the_example_runs_with_each_kind_of_replay(
    replay: str, capsys: pytest.CaptureFixture[str]
) -> None:
    per_td3.main(["--timesteps", "1010", "--episodes", "1", "--replay", replay])
    assert re.fullmatch(rf"{replay}, seed 1: -\d+\.\d \+- 0\.0\n", capsys.readouterr().out)
