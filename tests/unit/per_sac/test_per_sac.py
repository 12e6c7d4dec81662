"""PERSAC's own: the entropy coefficient, in the target and in the order of its update."""

from typing import Any

import pytest
import torch as th

from actor_critic_helpers import differences, make, tensors_of
from sb3_per import PERSAC, PERTQC


@pytest.mark.parametrize("ent_coef", ["auto_0.5", 0.5])
def test_the_target_has_the_entropy_of_the_next_action(ent_coef: Any) -> None:
    model = make(PERSAC, ent_coef=ent_coef, learning_starts=100).learn(20)
    batch = model.replay_buffer.sample(7)
    with th.no_grad(), th.random.fork_rng([]):
        actions, log_prob = model.actor.action_log_prob(batch.next_observations)
        values = th.cat(model.critic_target(batch.next_observations, actions), dim=1)
    expected = values.min(dim=1, keepdim=True).values - 0.5 * log_prob[:, None]
    expected = batch.rewards + (1 - batch.dones) * 0.99 * expected
    th.testing.assert_close(model.priority_context(batch).targets, expected)


@pytest.mark.parametrize("algorithm", [PERSAC, PERTQC])
def test_the_entropy_coefficient_is_whole_when_training_stops_and_learned_otherwise(
    algorithm: Any,
) -> None:
    model = make(algorithm).learn(20)
    before = tensors_of(model)
    model.replay_buffer.rewards[:] = th.nan
    with pytest.raises(ValueError, match="TD errors must be finite"):
        model.train(1, batch_size=7)
    assert differences(model, before) == []
    model.replay_buffer.rewards[:] = 1.0
    model.train(1, batch_size=7)
    changed = differences(model, before)
    assert "log_ent_coef" in changed
    assert any(name.startswith("ent_coef_optimizer") for name in changed)
