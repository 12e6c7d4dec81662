"""PERTD3's and PERDDPG's own: the delayed actor, the noise of the target, the single critic."""

from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import DDPG, TD3

from actor_critic_helpers import differences, make, tensors_of
from sb3_per import PERDDPG, PERTD3


def test_the_actor_and_the_targets_learn_at_every_third_step_of_all() -> None:
    model = make(PERTD3, policy_delay=3, learning_starts=100).learn(20)
    # The optimizers have a state from then on
    model.train(3, batch_size=7)
    for n_updates in range(4, 10):
        before = tensors_of(model)
        model.train(1, batch_size=7)
        assert model._n_updates == n_updates
        networks = {name.split(".")[0] for name in differences(model, before)}
        delayed = {"actor", "actor_target", "critic_target"}
        assert networks & delayed == (delayed if n_updates % 3 == 0 else set())
        assert "critic" in networks


def test_the_noise_of_the_target_is_clipped() -> None:
    model = make(PERTD3, target_policy_noise=50.0, target_noise_clip=0.1).learn(20)
    batch = model.replay_buffer.sample(7)
    policy = model.actor_target(batch.next_observations)
    seen: list[th.Tensor] = []
    model.critic_target.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    model.priority_context(batch)
    distances = (seen[0] - policy).detach().abs()
    np.testing.assert_allclose(distances.max(), 0.1, rtol=1e-5)
    assert bool((distances <= 0.1 + 1e-6).all())


def test_ddpg_is_td3_with_one_critic_and_neither_noise_nor_delay() -> None:
    assert issubclass(PERDDPG, DDPG)
    assert issubclass(PERDDPG, TD3)
    model = make(PERDDPG)
    assert (model.policy_delay, model.target_noise_clip) == (1, 0.0)
    assert len(model.critic.q_networks) == 1
    model.learn(20)
    context = model.priority_context(model.replay_buffer.sample(7))
    assert context.estimates.shape == (7, 1)


def test_both_learn_under_names_of_their_own(tmp_path: Any) -> None:
    for algorithm in (PERTD3, PERDDPG):
        model = make(algorithm, tensorboard_log=str(tmp_path))
        del model._custom_logger
        model._custom_logger = False
        model.learn(5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["PERDDPG_1", "PERTD3_1"]
