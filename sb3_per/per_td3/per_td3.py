"""Twin Delayed DDPG with prioritized experience replay."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import polyak_update
from stable_baselines3.td3.policies import TD3Policy
from stable_baselines3.td3.td3 import TD3

from sb3_per.buffers.replay import InitialPriority, Prioritization, WeightNormalization
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.common.losses import LOSSES, Loss, check_loss
from sb3_per.common.off_policy import PrioritizedOffPolicyAlgorithm
from sb3_per.common.priorities import Priority, PriorityContext

__all__ = ["PERTD3", "PrioritizedTD3"]

SelfPERTD3 = TypeVar("SelfPERTD3", bound="PERTD3")


class PrioritizedTD3(PrioritizedOffPolicyAlgorithm, TD3):
    """
    Base class of PERTD3 and its special case PERDDPG: everything but the constructor.

    Takes the arguments of SB3's ``TD3``.
    """

    loss: Loss

    def _check_per_options(self) -> None:
        super()._check_per_options()
        check_loss(self.loss)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """
        Draw batches by priority, train the critics with their weights and update the priorities
        (Schaul et al. 2016, algorithm 1, lines 8 to 15); train the actor every ``policy_delay``
        steps.

        The code is that of SB3's ``TD3.train`` (MIT license), with prioritized replay.

        :param gradient_steps: number of gradient steps, each with a batch
        :param batch_size: number of transitions in a batch
        """
        self._prepare_replay()
        # Switch to train mode (this affects batch norm / dropout)
        self.policy.set_training_mode(True)

        # Update learning rate according to lr schedule
        self._update_learning_rate([self.actor.optimizer, self.critic.optimizer])

        actor_losses, critic_losses = [], []
        errors, weights = [], []
        for _ in range(gradient_steps):
            # Sample replay buffer
            replay_data = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            target_q_values = self._target_q_values(replay_data)
            # Get current Q-values estimates for each critic network
            current_q_values = self.critic(replay_data.observations, replay_data.actions)

            # Before any step, so that a TD error that is not finite stops training before the
            # networks change
            context = self._context(replay_data, current_q_values, target_q_values)
            priorities = self._priorities_of(context)
            self.replay_buffer.update_priorities(replay_data.indices, priorities)
            errors.append(context.td_errors)
            weights.append(replay_data.weights)
            self._n_updates += 1

            # Compute critic loss
            losses = self._losses_of(current_q_values, target_q_values)
            critic_loss = (replay_data.weights * losses).mean()
            critic_losses.append(critic_loss.item())

            # Optimize the critics
            self.critic.optimizer.zero_grad()
            critic_loss.backward()  # type: ignore[no-untyped-call]
            self.critic.optimizer.step()

            # Delayed policy updates
            if self._n_updates % self.policy_delay == 0:
                # Compute actor loss
                actions = self.actor(replay_data.observations)
                actor_loss = -self.critic.q1_forward(replay_data.observations, actions).mean()
                actor_losses.append(actor_loss.item())

                # Optimize the actor
                self.actor.optimizer.zero_grad()
                actor_loss.backward()  # type: ignore[no-untyped-call]
                self.actor.optimizer.step()

                polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
                polyak_update(self.actor.parameters(), self.actor_target.parameters(), self.tau)
                # Copy running stats, see GH issue #996
                polyak_update(
                    self.critic_batch_norm_stats, self.critic_batch_norm_stats_target, 1.0
                )
                polyak_update(self.actor_batch_norm_stats, self.actor_batch_norm_stats_target, 1.0)

        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if len(actor_losses) > 0:
            self.logger.record("train/actor_loss", np.mean(actor_losses))
        if errors:
            self.logger.record("train/critic_loss", np.mean(critic_losses))
            self._record_per(errors, weights)

    def _target_q_values(self, replay_data: PrioritizedReplayBufferSamples) -> th.Tensor:
        """
        :param replay_data: a batch
        :return: targets of the Q-values, without gradient, shape ``(batch, 1)``
        """
        # For n-step replay, discount factor is gamma**n_steps (when no early termination)
        discounts = self.gamma if replay_data.discounts is None else replay_data.discounts
        next_observations = replay_data.next_observations
        with th.no_grad():
            # Select action according to policy and add clipped noise
            noise = replay_data.actions.clone().data.normal_(0, self.target_policy_noise)
            noise = noise.clamp(-self.target_noise_clip, self.target_noise_clip)
            next_actions = (self.actor_target(next_observations) + noise).clamp(-1, 1)

            # Compute the next Q-values: min over all critics targets
            next_q_values = th.cat(self.critic_target(next_observations, next_actions), dim=1)
            next_q_values, _ = th.min(next_q_values, dim=1, keepdim=True)
            # The value after a terminal state does not count, even if it is NaN
            future = th.where(replay_data.dones > 0.0, 0.0, discounts * next_q_values)
            return replay_data.rewards + future

    def _losses_of(self, q_values: Sequence[th.Tensor], targets: th.Tensor) -> th.Tensor:
        """
        :param q_values: Q-values of each critic, shape ``(batch, 1)``
        :param targets: shape ``(batch, 1)``
        :return: loss of each transition, shape ``(batch, 1)``
        """
        losses = sum(LOSSES[self.loss](current_q, targets) for current_q in q_values)
        assert isinstance(losses, th.Tensor)  # for type checker
        return losses

    def _context(
        self,
        batch: PrioritizedReplayBufferSamples,
        q_values: Sequence[th.Tensor],
        targets: th.Tensor,
    ) -> PriorityContext:
        return PriorityContext(
            batch,
            th.cat(tuple(q_values), dim=1),
            targets,
            losses_of=lambda estimates, targets: self._losses_of(
                estimates.split(1, dim=1),  # type: ignore[no-untyped-call]
                targets,
            ),
            target_estimates=lambda: th.cat(
                self.critic_target(batch.observations, batch.actions), dim=1
            ),
        )

    def priority_context(self, batch: PrioritizedReplayBufferSamples) -> PriorityContext:
        """
        Context of a batch for a priority function, under the current networks.

        Sampling the noise of the target policy leaves the random state of torch unchanged: training
        is the same with and without this call.

        :param batch: transitions from the replay buffer
        :return: the context
        """
        with th.no_grad(), self._fork_rng():
            targets = self._target_q_values(batch)
            q_values = self.critic(batch.observations, batch.actions)
        return self._context(batch, q_values, targets)


class PERTD3(PrioritizedTD3):
    """
    Twin Delayed DDPG (TD3) with prioritized experience replay.

    Papers: https://arxiv.org/abs/1802.09477 (Fujimoto et al. 2018),
    https://arxiv.org/abs/1511.05952 (Schaul et al. 2016, algorithm 1)

    Takes every argument of SB3's ``TD3``, in the same order and with the same meaning; the options
    of prioritized replay come after them, by name. Transitions are drawn by the size of their last
    TD error, and weighted in the loss of the critics to correct for it; that of the actor is TD3's.

    The options are attributes of the model, and can be set at any time: ``train`` applies them to
    the replay buffer. A TD error that is NaN or infinite stops training with an error, before
    a network has changed.

    :param policy: the policy model to use (MlpPolicy, CnnPolicy, ...)
    :param env: the environment to learn from (if registered in Gym, can be str)
    :param learning_rate: learning rate of all networks, it can be a function of the current
        progress remaining (from 1 to 0)
    :param buffer_size: maximum number of transitions in the replay buffer, over all environments
    :param learning_starts: number of environment steps before learning starts
    :param batch_size: number of transitions for each gradient step
    :param tau: the soft update coefficient ("Polyak update", between 0 and 1)
    :param gamma: the discount factor
    :param train_freq: update the model every ``train_freq`` steps, or a tuple of frequency and
        unit like ``(5, "step")`` or ``(2, "episode")``
    :param gradient_steps: number of gradient steps after each rollout, ``-1`` for the number of
        transitions collected
    :param action_noise: noise added to the actions during training; None for no noise
    :param replay_buffer_class: a prioritized buffer of this package, or a class derived from one.
        One of SB3's classes (``ReplayBuffer``, ``DictReplayBuffer``, ``NStepReplayBuffer``,
        ``HerReplayBuffer``) selects its prioritized counterpart; None selects by the observation
        space.
    :param replay_buffer_kwargs: further keyword arguments for the replay buffer; they can't
        override the options of this class
    :param optimize_memory_usage: store each observation once instead of twice; needs
        ``replay_buffer_kwargs={"handle_timeout_termination": False}``, as in SB3
    :param n_steps: length of the n-step returns, also with ``Dict`` observations
    :param policy_delay: number of gradient steps between updates of the policy and the targets
    :param target_policy_noise: standard deviation of the Gaussian noise added to the target policy
    :param target_noise_clip: limit for the absolute value of that noise
    :param stats_window_size: number of episodes over which the logged rollout values are averaged
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments to be passed to the policy on creation
    :param verbose: 0 for no output, 1 for info messages, 2 for debug messages
    :param seed: seed for the pseudo random generators, also for the draws from the buffer
    :param device: device (cpu, cuda, ...) on which the code should be run
    :param _init_setup_model: whether or not to build the network at the creation of the instance
    :param alpha: strength of the prioritization: 0 draws uniformly, 1 in proportion to the TD
        errors; at least 0
    :param beta: strength of the importance-sampling correction when training starts, in
        ``[0, 1]``; or a schedule, a function of the progress remaining (from 1 to 0), in which case
        ``beta_final`` and ``beta_fraction`` have no effect
    :param beta_final: strength at the end of ``beta_fraction``, in ``[0, 1]``. In between it
        changes linearly; ``beta_final=beta`` keeps it constant.
    :param beta_fraction: fraction of training over which beta changes, in ``[0, 1]``
    :param priority_eps: constant added to every priority before ``alpha`` applies, so that every
        transition can be drawn again; at least 0
    :param weight_normalization: divide the weights by the largest one of the ``"batch"`` or of the
        whole ``"buffer"``
    :param loss: loss of each critic: ``"mse"`` (squared error, as in TD3) or ``"huber"`` (smooth
        L1); their sum over the critics is the loss of a transition, as in TD3
    :param prioritization: ``"proportional"``, draw in proportion to
        ``(|TD error| + eps) ** alpha``; or ``"rank"``, in proportion to ``(1 / rank) ** alpha``,
        where rank 1 has the largest error
    :param initial_priority: priority of new transitions: ``"max"``, the largest stored one, so that
        each is replayed soon; or ``"td_error"``, that of their TD error, which the next ``train``
        computes once for each new transition
    :param priority: priority function, whose value takes the place of the absolute TD error:
        ``"td_error"``, that error, the mean over the critics;
        ``"clipped"``, the largest one of 1 and those of the critics (LAP, Fujimoto et al. 2020,
        with ``loss="huber"``, ``alpha=0.4, beta=0, beta_final=0``);
        ``"reducible"``, the loss minus that of the target network, at least 0
        (ReLo, Sujit et al. 2023); or a function of a
        :class:`~sb3_per.PriorityContext` that returns one number of at least 0 for each
        transition; see ``docs/priorities.md``
    :raises ValueError: if an option is out of its range, ``replay_buffer_class`` can't be used
        with priorities, or ``replay_buffer_kwargs`` contradict an option
    """

    def __init__(
        self,
        policy: str | type[TD3Policy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-3,
        buffer_size: int = 1_000_000,
        learning_starts: int = 100,
        batch_size: int = 256,
        tau: float = 0.005,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 1,
        gradient_steps: int = 1,
        action_noise: ActionNoise | None = None,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        policy_delay: int = 2,
        target_policy_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
        *,
        alpha: float = 0.6,
        beta: float | Schedule = 0.4,
        beta_final: float = 1.0,
        beta_fraction: float = 1.0,
        priority_eps: float = 1e-6,
        weight_normalization: WeightNormalization = "batch",
        loss: Loss = "mse",
        prioritization: Prioritization = "proportional",
        initial_priority: InitialPriority = "max",
        priority: Priority = "td_error",
    ) -> None:
        super().__init__(
            policy,
            env,
            learning_rate,
            buffer_size,
            learning_starts,
            batch_size,
            tau,
            gamma,
            train_freq,
            gradient_steps,
            action_noise,
            replay_buffer_class=replay_buffer_class,
            replay_buffer_kwargs=replay_buffer_kwargs,
            optimize_memory_usage=optimize_memory_usage,
            n_steps=n_steps,
            policy_delay=policy_delay,
            target_policy_noise=target_policy_noise,
            target_noise_clip=target_noise_clip,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
        )
        self.loss = loss
        self._set_per_options(
            alpha=alpha,
            beta=beta,
            beta_final=beta_final,
            beta_fraction=beta_fraction,
            priority_eps=priority_eps,
            weight_normalization=weight_normalization,
            prioritization=prioritization,
            initial_priority=initial_priority,
            priority=priority,
        )
        if _init_setup_model:
            self._setup_model()

    def learn(
        self: SelfPERTD3,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "PERTD3",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfPERTD3:
        """As ``TD3.learn``, with another default name in TensorBoard."""
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )
