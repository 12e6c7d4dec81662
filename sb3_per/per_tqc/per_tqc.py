"""Truncated Quantile Critics with prioritized experience replay."""

from typing import Any, TypeVar

import numpy as np
import torch as th
from sb3_contrib.tqc.policies import TQCPolicy
from sb3_contrib.tqc.tqc import TQC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import polyak_update

from sb3_per.buffers.replay import InitialPriority, Prioritization, WeightNormalization
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.common.losses import pairwise_quantile_loss
from sb3_per.common.off_policy import PrioritizedOffPolicyAlgorithm
from sb3_per.common.priorities import Priority, PriorityContext

__all__ = ["PERTQC"]

SelfPERTQC = TypeVar("SelfPERTQC", bound="PERTQC")


class PERTQC(PrioritizedOffPolicyAlgorithm, TQC):
    """
    Truncated Quantile Critics with prioritized experience replay.

    Papers: https://arxiv.org/abs/2005.04269 (Kuznetsov et al. 2020),
    https://arxiv.org/abs/1511.05952 (Schaul et al. 2016, algorithm 1)

    Takes every argument of sb3-contrib's ``TQC``, in the same order and with the same meaning; the
    options of prioritized replay come after them, by name. They are those of
    :class:`~sb3_per.PERSAC` without ``loss``: the quantile Huber loss is part of this algorithm.
    Transitions are drawn by the size of their last TD error, and weighted in the loss of the
    critics to correct for it; the losses of the actor and of the entropy coefficient are those of
    TQC.

    The TD error of a critic is the mean of the target quantiles minus the mean of its quantiles,
    which is its value of an action.

    The options are attributes of the model, and can be set at any time: ``train`` applies them to
    the replay buffer. A TD error that is NaN or infinite stops training with an error, before
    a network or the entropy coefficient has changed.

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
    :param ent_coef: entropy coefficient; ``"auto"`` learns it, ``"auto_0.1"`` starts at 0.1
    :param target_update_interval: number of gradient steps between updates of the target network
    :param target_entropy: target entropy when ``ent_coef`` is learned
    :param top_quantiles_to_drop_per_net: number of quantiles to drop per network
    :param use_sde: whether to use generalized State-Dependent Exploration (gSDE)
    :param sde_sample_freq: number of steps between samples of the noise matrix when using gSDE; -1
        to sample only at the beginning of the rollout
    :param use_sde_at_warmup: whether to use gSDE before learning starts, too
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
    :param prioritization: ``"proportional"``, draw in proportion to
        ``(|TD error| + eps) ** alpha``; or ``"rank"``, in proportion to ``(1 / rank) ** alpha``,
        where rank 1 has the largest error
    :param initial_priority: priority of new transitions: ``"max"``, the largest stored one, so that
        each is replayed soon; or ``"td_error"``, that of their TD error, which the next ``train``
        computes once for each new transition
    :param priority: priority function, whose value takes the place of the absolute TD error:
        ``"td_error"``, that error, the mean over the critics;
        ``"clipped"``, the largest one of 1 and those of the critics (LAP, Fujimoto et al. 2020,
        with ``alpha=0.4, beta=0, beta_final=0``);
        ``"reducible"``, the quantile Huber loss minus that of the target network, at least 0
        (ReLo, Sujit et al. 2023); or a function of a
        :class:`~sb3_per.PriorityContext` that returns one number of at least 0 for each
        transition; see ``docs/priorities.md``
    :raises ValueError: if an option is out of its range, ``replay_buffer_class`` can't be used
        with priorities, or ``replay_buffer_kwargs`` contradict an option
    """

    def __init__(
        self,
        policy: str | type[TQCPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
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
        ent_coef: str | float = "auto",
        target_update_interval: int = 1,
        target_entropy: str | float = "auto",
        top_quantiles_to_drop_per_net: int = 2,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        use_sde_at_warmup: bool = False,
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
            ent_coef=ent_coef,
            target_update_interval=target_update_interval,
            target_entropy=target_entropy,
            top_quantiles_to_drop_per_net=top_quantiles_to_drop_per_net,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            use_sde_at_warmup=use_sde_at_warmup,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
        )
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

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """
        Draw batches by priority, train the critics with their weights and update the priorities
        (Schaul et al. 2016, algorithm 1, lines 8 to 15); train the actor and the entropy
        coefficient.

        The code is that of sb3-contrib's ``TQC.train`` (MIT license), with prioritized replay.
        The entropy coefficient is updated after the check of the TD errors, which changes no
        result.

        :param gradient_steps: number of gradient steps, each with a batch
        :param batch_size: number of transitions in a batch
        """
        self._prepare_replay()
        # Switch to train mode (this affects batch norm / dropout)
        self.policy.set_training_mode(True)
        # Update optimizers learning rate
        optimizers = [self.actor.optimizer, self.critic.optimizer]
        if self.ent_coef_optimizer is not None:
            optimizers += [self.ent_coef_optimizer]

        # Update learning rate according to lr schedule
        self._update_learning_rate(optimizers)

        ent_coef_losses, ent_coefs = [], []
        actor_losses, critic_losses = [], []
        errors, weights = [], []

        for gradient_step in range(gradient_steps):
            # Sample replay buffer
            replay_data = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)

            # We need to sample because `log_std` may have changed between two gradient steps
            if self.use_sde:
                self.actor.reset_noise()

            # Action by the current actor for the sampled state
            actions_pi, log_prob = self.actor.action_log_prob(replay_data.observations)
            log_prob = log_prob.reshape(-1, 1)

            ent_coef = self._current_ent_coef()
            ent_coefs.append(ent_coef.item())

            target_quantiles = self._target_quantiles(replay_data, ent_coef)
            # Get current Quantile estimates using action from the replay buffer
            current_quantiles = self.critic(replay_data.observations, replay_data.actions)

            # Before any step, so that a TD error that is not finite stops training before the
            # networks and the entropy coefficient change
            context = self._context(replay_data, current_quantiles, target_quantiles)
            priorities = self._priorities_of(context)
            self.replay_buffer.update_priorities(replay_data.indices, priorities)
            errors.append(context.td_errors)
            weights.append(replay_data.weights)

            # Optimize entropy coefficient, also called
            # entropy temperature or alpha in the paper
            if self.ent_coef_optimizer is not None and self.log_ent_coef is not None:
                # Important: detach the variable from the graph
                # so we don't change it with other losses
                # see https://github.com/rail-berkeley/softlearning/issues/60
                ent_coef_loss = -(
                    self.log_ent_coef * (log_prob + self.target_entropy).detach()  # type: ignore[operator]
                ).mean()
                ent_coef_losses.append(ent_coef_loss.item())
                self.ent_coef_optimizer.zero_grad()
                ent_coef_loss.backward()  # type: ignore[no-untyped-call]
                self.ent_coef_optimizer.step()

            # Compute critic loss, not summing over the quantile dimension as in the paper.
            # (batch, n_critics, n_quantiles, n_target_quantiles)
            losses = pairwise_quantile_loss(current_quantiles, target_quantiles)
            critic_loss = (replay_data.weights[:, :, None, None] * losses).mean()
            critic_losses.append(critic_loss.item())

            # Optimize the critic
            self.critic.optimizer.zero_grad()
            critic_loss.backward()  # type: ignore[no-untyped-call]
            self.critic.optimizer.step()

            # Compute actor loss
            qf_pi = self.critic(replay_data.observations, actions_pi).mean(dim=2)
            qf_pi = qf_pi.mean(dim=1, keepdim=True)
            actor_loss = (ent_coef * log_prob - qf_pi).mean()
            actor_losses.append(actor_loss.item())

            # Optimize the actor
            self.actor.optimizer.zero_grad()
            actor_loss.backward()
            self.actor.optimizer.step()

            # Update target networks
            if gradient_step % self.target_update_interval == 0:
                polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
                # Copy running stats, see https://github.com/DLR-RM/stable-baselines3/issues/996
                polyak_update(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)

        self._n_updates += gradient_steps

        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if errors:
            self.logger.record("train/ent_coef", np.mean(ent_coefs))
            self.logger.record("train/actor_loss", np.mean(actor_losses))
            self.logger.record("train/critic_loss", np.mean(critic_losses))
            self._record_per(errors, weights)
        if len(ent_coef_losses) > 0:
            self.logger.record("train/ent_coef_loss", np.mean(ent_coef_losses))

    def _current_ent_coef(self) -> th.Tensor:
        """
        Current entropy coefficient.

        :return: tensor without gradient, shape ``(1,)`` or ``()``
        """
        if self.ent_coef_optimizer is not None and self.log_ent_coef is not None:
            return th.exp(self.log_ent_coef.detach())
        return self.ent_coef_tensor

    def _target_quantiles(
        self, replay_data: PrioritizedReplayBufferSamples, ent_coef: th.Tensor
    ) -> th.Tensor:
        """
        :param replay_data: a batch
        :param ent_coef: entropy coefficient
        :return: target quantiles of the returns, without gradient, shape
            ``(batch, 1, n_target_quantiles)``
        """
        # For n-step replay, discount factor is gamma**n_steps (when no early termination)
        discounts = self.gamma if replay_data.discounts is None else replay_data.discounts
        next_observations = self._next_observations_of(replay_data)
        with th.no_grad():
            # Select action according to policy
            next_actions, next_log_prob = self.actor.action_log_prob(next_observations)
            # Compute and cut quantiles at the next state
            # batch x nets x quantiles
            next_quantiles = self.critic_target(next_observations, next_actions)

            # Sort and drop top k quantiles to control overestimation.
            n_dropped = self.top_quantiles_to_drop_per_net * self.critic.n_critics
            n_target_quantiles = self.critic.quantiles_total - n_dropped
            next_quantiles, _ = th.sort(next_quantiles.reshape(len(next_quantiles), -1))
            next_quantiles = next_quantiles[:, :n_target_quantiles]

            # td error + entropy term
            target_quantiles = next_quantiles - ent_coef * next_log_prob.reshape(-1, 1)
            # The value after a terminal state does not count, even if it is NaN
            future = th.where(replay_data.dones > 0.0, 0.0, discounts * target_quantiles)
            # Broadcastable to (batch, n_critics, n_target_quantiles)
            return (replay_data.rewards + future).unsqueeze(dim=1)

    def _context(
        self, batch: PrioritizedReplayBufferSamples, quantiles: th.Tensor, targets: th.Tensor
    ) -> PriorityContext:
        return PriorityContext(
            batch,
            quantiles,
            targets,
            errors_of=_errors_of_means,
            losses_of=_mean_losses,
            target_estimates=lambda: self.critic_target(batch.observations, batch.actions),
        )

    def priority_context(self, batch: PrioritizedReplayBufferSamples) -> PriorityContext:
        """
        Context of a batch for a priority function, under the current networks.

        Sampling the next actions leaves the random state of torch unchanged: training is the same
        with and without this call.

        :param batch: transitions from the replay buffer
        :return: the context
        """
        with th.no_grad(), self._fork_rng():
            targets = self._target_quantiles(batch, self._current_ent_coef())
            quantiles = self.critic(batch.observations, batch.actions)
        return self._context(batch, quantiles, targets)

    def learn(
        self: SelfPERTQC,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "PERTQC",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfPERTQC:
        """As ``TQC.learn``, with another default name in TensorBoard."""
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )


def _errors_of_means(quantiles: th.Tensor, targets: th.Tensor) -> th.Tensor:
    """
    :param quantiles: quantiles of each critic, shape ``(batch, n_critics, n_quantiles)``
    :param targets: shape ``(batch, 1, n_target_quantiles)``
    :return: TD error of each critic's mean, shape ``(batch, n_critics)``
    """
    return targets.mean(dim=2) - quantiles.mean(dim=2)


def _mean_losses(quantiles: th.Tensor, targets: th.Tensor) -> th.Tensor:
    """
    :param quantiles: quantiles of each critic, shape ``(batch, n_critics, n_quantiles)``
    :param targets: shape ``(batch, 1, n_target_quantiles)``
    :return: loss of each transition, shape ``(batch, 1)``
    """
    return pairwise_quantile_loss(quantiles, targets).mean(dim=(1, 2, 3))[:, None]
