"""
TD3 with prioritized replay, on Pendulum-v1: a custom algorithm with PER (docs/own_algorithm.md).

    python examples/per_td3.py --seed 1 --replay per
"""

import argparse
from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import TD3
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.utils import polyak_update
from torch.nn import functional as F

from sb3_per import PrioritizedOffPolicyAlgorithm


class PERTD3(PrioritizedOffPolicyAlgorithm, TD3):
    """
    TD3 with prioritized replay.

    :param lap: the loss and the priorities of LAP (Fujimoto et al. 2020) in place of weights
    """

    def __init__(
        self, *args: Any, alpha: float = 0.6, beta: float = 0.4, lap: bool = False, **kwargs: Any
    ) -> None:
        set_up = kwargs.pop("_init_setup_model", True)
        super().__init__(*args, **{**kwargs, "_init_setup_model": False})
        self._set_per_options(alpha=alpha, beta=beta)
        self.lap = lap
        if set_up:
            self._setup_model()

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """As TD3, with a weight for each transition, whose TD error goes back to the buffer."""
        self.policy.set_training_mode(True)
        self._update_learning_rate([self.actor.optimizer, self.critic.optimizer])
        self._prepare_replay()

        errors, weights, losses = [], [], []
        for _ in range(gradient_steps):
            self._n_updates += 1
            batch = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            discounts = self.gamma if batch.discounts is None else batch.discounts
            with th.no_grad():
                noise = batch.actions.clone().normal_(0, self.target_policy_noise)
                noise = noise.clamp(-self.target_noise_clip, self.target_noise_clip)
                next_actions = (self.actor_target(batch.next_observations) + noise).clamp(-1, 1)
                next_values = self.critic_target(batch.next_observations, next_actions)
                next_values = th.cat(next_values, dim=1).min(dim=1, keepdim=True).values
                targets = batch.rewards + (1 - batch.dones) * discounts * next_values

            # Both critics side by side, (batch, n_critics)
            values = th.cat(self.critic(batch.observations, batch.actions), dim=1)
            td_errors = (targets - values.detach()).abs().mean(dim=1, keepdim=True)
            # In LAP errors below 1 share one priority, where Huber's slope shrinks with the error
            priorities = td_errors.clamp(min=1.0) if self.lap else td_errors
            self.replay_buffer.update_priorities(batch.indices, priorities)

            loss_of = F.smooth_l1_loss if self.lap else F.mse_loss
            sample_losses = loss_of(values, targets.expand_as(values), reduction="none").sum(dim=1)
            sample_weights = 1.0 if self.lap else batch.weights.squeeze(1)
            critic_loss = (sample_weights * sample_losses).mean()
            self.critic.optimizer.zero_grad()
            critic_loss.backward()  # type: ignore[no-untyped-call]
            self.critic.optimizer.step()

            if self._n_updates % self.policy_delay == 0:
                actions = self.actor(batch.observations)
                actor_loss = -self.critic.q1_forward(batch.observations, actions).mean()
                self.actor.optimizer.zero_grad()
                actor_loss.backward()  # type: ignore[no-untyped-call]
                self.actor.optimizer.step()
                for name, net, target in (
                    ("actor", self.actor, self.actor_target),
                    ("critic", self.critic, self.critic_target),
                ):
                    polyak_update(net.parameters(), target.parameters(), self.tau)
                    stats = f"{name}_batch_norm_stats"
                    polyak_update(getattr(self, stats), getattr(self, f"{stats}_target"), 1.0)
            errors.append(td_errors)
            weights.append(batch.weights)
            losses.append(critic_loss.detach())

        if errors:
            self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
            self.logger.record("train/critic_loss", th.stack(losses).mean().item())
            self._record_per(errors, weights)


#: Options by the kind of replay
REPLAY: dict[str, dict[str, Any]] = {
    "per": {},
    "lap": {"lap": True, "alpha": 0.4},
    "uniform": {"alpha": 0.0, "beta": 0.0},
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timesteps", type=int, default=10_000, help="environment steps")
    parser.add_argument("--episodes", type=int, default=50, help="greedy episodes at the end")
    parser.add_argument("--replay", choices=REPLAY, default="per", help="LAP, or plain TD3")
    options = parser.parse_args(arguments)

    model = PERTD3(
        "MlpPolicy",
        "Pendulum-v1",
        gamma=0.98,
        learning_starts=1_000,
        action_noise=NormalActionNoise(np.zeros(1), np.full(1, 0.1)),
        policy_kwargs={"net_arch": [64, 64]},
        seed=options.seed,
        **REPLAY[options.replay],
    )
    model.learn(options.timesteps)

    env = model.get_env()
    assert env is not None
    # The same states to start from for all: some are much harder than others
    env.seed(1000)
    mean, std = evaluate_policy(model, env, n_eval_episodes=options.episodes)
    print(f"{options.replay}, seed {options.seed}: {mean:.1f} +- {std:.1f}")


if __name__ == "__main__":
    main()
