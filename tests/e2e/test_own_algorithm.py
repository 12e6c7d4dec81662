"""The algorithm of docs/own_algorithm.md: it is what it says, and takes part in everything."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from torch.nn.functional import smooth_l1_loss

from model_helpers import silent, small_model
from sb3_per import PriorityContext

PAGE = Path(__file__).parents[2] / "docs" / "own_algorithm.md"
(CODE,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def algorithm() -> Any:
    namespace: dict[str, Any] = {"__name__": "own_algorithm"}
    exec(CODE, namespace)
    assert namespace["model"].num_timesteps == 500
    return namespace["PERMunchausenDQN"]


def test_it_is_short() -> None:
    *_, body = CODE.partition("class ")
    lines = [line for line in body.partition("\n\n\nmodel =")[0].splitlines() if line]
    assert len(lines) < 60


def test_its_target_is_that_of_the_paper(algorithm: Any) -> None:
    model = small_model(algorithm=algorithm, temperature=0.5, n_steps=2).learn(30)
    batch = model.replay_buffer.sample(9)
    with th.no_grad():
        q_values, following = (
            model.q_net_target(observations).numpy()
            for observations in (batch.observations, batch.next_observations)
        )

    def log_policy(values: Any) -> Any:
        return values / 0.5 - np.log(np.exp(values / 0.5).sum(1, keepdims=True))

    actions = batch.actions.numpy()
    bonus = 0.9 * np.maximum(np.take_along_axis(0.5 * log_policy(q_values), actions, 1), -1.0)
    soft = (np.exp(log_policy(following)) * (following - 0.5 * log_policy(following))).sum(1)
    discounts = batch.discounts.numpy() * (1 - batch.dones.numpy())
    expected = batch.rewards.numpy() + bonus + discounts * soft[:, None]
    targets = model.priority_context(batch).targets
    np.testing.assert_allclose(targets, expected, rtol=1e-4, atol=1e-5)


def test_it_is_saved_goes_on_and_logs(algorithm: Any, tmp_path: Path) -> None:
    model = silent(small_model(algorithm=algorithm, priority="clipped")).learn(30)
    assert {"per/beta", "per/ess"} <= model.logger.name_to_value.keys()
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = algorithm.load(tmp_path / "model", env=model.get_env(), device="cpu")
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert (loaded.priority, loaded.temperature) == ("clipped", 0.03)
    for each in (model, loaded):
        each.set_random_seed(0)
        each.learn(20)
    pairs = zip(model.policy.parameters(), loaded.policy.parameters(), strict=True)
    assert all(th.equal(one, other) for one, other in pairs)
    with pytest.raises(ValueError, match=r"`alpha`.*got -1"):
        algorithm.load(tmp_path / "model", alpha=-1)


def test_priorities_are_those_of_the_option(algorithm: Any) -> None:
    def by_place(context: PriorityContext) -> th.Tensor:
        return th.as_tensor(context.batch.indices) + context.losses[:, 0] * 0.0

    model = small_model(algorithm=algorithm, priority=by_place)
    model.alpha, model.initial_priority = 1.0, "td_error"
    model.learn(20)
    np.testing.assert_allclose(model.replay_buffer.priorities[:19], np.arange(19), atol=1e-5)
    batch = model.replay_buffer.sample(9)
    context = model.priority_context(batch)
    with th.no_grad():
        values = model.q_net_target(batch.observations).gather(1, batch.actions.long())
    assert th.equal(
        context.target_losses, smooth_l1_loss(values, context.targets, reduction="none")
    )
    assert not th.equal(context.target_losses, context.losses)
