"""Quantile Regression DQN with prioritized experience replay."""

from typing import Any, TypeVar

import numpy as np
import torch as th
from sb3_contrib.qrdqn.policies import QRDQNPolicy, QuantileNetwork
from sb3_contrib.qrdqn.qrdqn import QRDQN
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule

from sb3_per.buffers.replay import (
    InitialPriority,
    Prioritization,
    WeightNormalization,
)
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.common.compiled import CompiledOffPolicyAlgorithm
from sb3_per.common.losses import quantile_huber_loss
from sb3_per.common.mlp import Architecture
from sb3_per.common.priorities import Priority, PriorityContext

__all__ = ["PERQRDQN", "wasserstein_distance"]

SelfPERQRDQN = TypeVar("SelfPERQRDQN", bound="PERQRDQN")


class PERQRDQN(CompiledOffPolicyAlgorithm, QRDQN):
    """
    Quantile Regression DQN with prioritized experience replay.

    Papers: https://arxiv.org/abs/1710.10044 (Dabney et al. 2018),
    https://arxiv.org/abs/1511.05952 (Schaul et al. 2016, algorithm 1)

    Takes every argument of sb3-contrib's ``QRDQN``, in the same order and with the same meaning;
    the options of prioritized replay come after them, by name. They are those of
    :class:`~sb3_per.PERDQN` without ``loss``: the quantile Huber loss is part of this algorithm. As
    there, they can be set on the model at any time, and a TD error that is NaN or infinite stops
    training with an error, before the networks have changed.

    Priorities come from the 1-Wasserstein distance between the predicted and the target
    distribution: the mean absolute TD error over pairs of quantiles of the same rank. Quantile
    regression minimizes this distance (Dabney et al. 2018); it equals the absolute TD error of DQN
    when returns are deterministic, and is zero when both distributions agree. The mean over *all*
    pairs of quantiles is not zero then, unless returns are deterministic. ``docs/per_qrdqn.md``
    compares several priorities.

    :param policy: the policy model to use (MlpPolicy, CnnPolicy, ...)
    :param env: the environment to learn from (if registered in Gym, can be str)
    :param learning_rate: the learning rate, it can be a function of the current progress remaining
        (from 1 to 0)
    :param buffer_size: maximum number of transitions in the replay buffer, over all environments
    :param learning_starts: number of environment steps before learning starts
    :param batch_size: number of transitions for each gradient step
    :param tau: the soft update coefficient ("Polyak update", between 0 and 1), 1 for hard update
    :param gamma: the discount factor
    :param train_freq: update the model every ``train_freq`` steps, or a tuple of frequency and
        unit like ``(5, "step")`` or ``(2, "episode")``
    :param gradient_steps: number of gradient steps after each rollout, ``-1`` for the number of
        transitions collected
    :param replay_buffer_class: a prioritized buffer of this package, or a class derived from one.
        One of SB3's classes (``ReplayBuffer``, ``DictReplayBuffer``, ``NStepReplayBuffer``,
        ``HerReplayBuffer``) selects its prioritized counterpart; None selects by the observation
        space.
    :param replay_buffer_kwargs: further keyword arguments for the replay buffer; they can't
        override the options of this class
    :param optimize_memory_usage: store each observation once instead of twice; needs
        ``replay_buffer_kwargs={"handle_timeout_termination": False}``, as in SB3
    :param n_steps: length of the n-step returns, also with ``Dict`` observations
    :param target_update_interval: number of environment steps between updates of the target network
    :param exploration_fraction: fraction of training over which the exploration rate is reduced
    :param exploration_initial_eps: initial value of random action probability
    :param exploration_final_eps: final value of random action probability
    :param max_grad_norm: the maximum value for the gradient clipping; None for no clipping
    :param stats_window_size: number of episodes over which the logged rollout values are averaged
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments to be passed to the policy on creation;
        ``n_quantiles`` (200 by default) among them
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
    :param priority_eps: constant added to every absolute TD error before ``alpha`` applies, so that
        every transition can be drawn again; at least 0
    :param weight_normalization: divide the weights by the largest one of the ``"batch"`` or of the
        whole ``"buffer"``
    :param double_q: whether to use double Q-learning: select the next action by the online network,
        take its quantiles from the target network (van Hasselt et al. 2016)
    :param prioritization: ``"proportional"``, draw in proportion to
        ``(|TD error| + eps) ** alpha``; or ``"rank"``, in proportion to ``(1 / rank) ** alpha``,
        where rank 1 has the largest error (Schaul et al. use ``alpha=0.7``, ``beta=0.5`` for it)
    :param initial_priority: priority of new transitions: ``"max"``, the largest stored one, so that
        each is replayed soon (Schaul et al. 2016, algorithm 1, line 6); or ``"td_error"``, that of
        their TD error, which the next ``train`` computes once for each new transition. The latter
        can help when there are more new transitions than draws.
    :param priority: priority function, whose value takes the place of that distance: a name or a
        function, as in :class:`~sb3_per.PERDQN`. ``"clipped"`` is the larger one of the distance
        and 1, ``"reducible"`` compares quantile Huber losses. The quantiles and their targets are
        ``estimates`` and ``targets`` of the :class:`~sb3_per.PriorityContext`.
    :param compiled: whether to train small networks by compiled code: on the CPU, if the policy is
        SB3's ``MlpPolicy`` (``nn.Linear`` with ReLU or Tanh, float32) and the optimizer is Adam.
        The results are those of torch up to float32 rounding, several times as fast. Other
        models are trained by torch, and all models with False. :attr:`uses_compiled_update` tells
        which of them is used, ``verbose=1`` prints the reason.
    :raises ValueError: if an option is out of its range, ``replay_buffer_class`` can't be used
        with priorities, ``replay_buffer_kwargs`` contradict an option, or the actions don't start
        at 0
    """

    _architecture = Architecture(QRDQNPolicy, QuantileNetwork, "quantile_net", has_quantiles=True)
    _compiled_methods = (
        "_context",
        "_priorities_of",
        "_quantiles_of",
        "_target_quantiles",
        "priority_context",
        "td_errors",
    )

    def __init__(
        self,
        policy: str | type[QRDQNPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 5e-5,
        buffer_size: int = 1_000_000,
        learning_starts: int = 100,
        batch_size: int = 32,
        tau: float = 1.0,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 4,
        gradient_steps: int = 1,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        target_update_interval: int = 10000,
        exploration_fraction: float = 0.005,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.01,
        max_grad_norm: float | None = None,
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
        double_q: bool = False,
        prioritization: Prioritization = "proportional",
        initial_priority: InitialPriority = "max",
        priority: Priority = "td_error",
        compiled: bool = True,
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
            replay_buffer_class=replay_buffer_class,
            replay_buffer_kwargs=replay_buffer_kwargs,
            optimize_memory_usage=optimize_memory_usage,
            n_steps=n_steps,
            target_update_interval=target_update_interval,
            exploration_fraction=exploration_fraction,
            exploration_initial_eps=exploration_initial_eps,
            exploration_final_eps=exploration_final_eps,
            max_grad_norm=max_grad_norm,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=False,
        )
        self.double_q = double_q
        self.compiled = compiled
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

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """
        Draw batches by priority, fit the quantiles to their targets and update the priorities
        (Dabney et al. 2018, algorithm 1, within Schaul et al. 2016, algorithm 1).

        The code is that of sb3-contrib's ``QRDQN.train`` (MIT license), with prioritized replay.

        :param gradient_steps: number of gradient steps, each with a batch
        :param batch_size: number of transitions in a batch
        """
        self._prepare_replay()
        if self._train_compiled(gradient_steps, batch_size):
            return
        # Switch to train mode (this affects batch norm / dropout)
        self.policy.set_training_mode(True)
        # Update learning rate according to schedule
        self._update_learning_rate(self.policy.optimizer)

        losses, errors, weights = [], [], []
        for _ in range(gradient_steps):
            # Sample replay buffer
            replay_data = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            target_quantiles = self._target_quantiles(replay_data)
            # Get current quantile estimates
            current_quantiles = self._quantiles_of(replay_data)

            # Before the step, so that a TD error that is not finite stops training before the
            # network changes
            context = self._context(replay_data, current_quantiles, target_quantiles)
            priorities = self._priorities_of(context)
            self.replay_buffer.update_priorities(replay_data.indices, priorities)
            errors.append(context.td_errors)
            weights.append(replay_data.weights)

            # Row: transition, column: target quantile
            quantile_losses = quantile_huber_loss(current_quantiles, target_quantiles)
            loss = (replay_data.weights * quantile_losses).mean()
            losses.append(loss.item())

            # Optimize the policy
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            # Clip gradient norm
            if self.max_grad_norm is not None:
                th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()

        # Increase update counter
        self._n_updates += gradient_steps

        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if losses:
            self.logger.record("train/loss", np.mean(losses))
            self._record_per(errors, weights)

    def _target_quantiles(self, replay_data: PrioritizedReplayBufferSamples) -> th.Tensor:
        """
        :param replay_data: a batch
        :return: target quantiles of the returns, without gradient, shape
            ``(batch, n_quantiles)``
        """
        # For n-step replay, discount factor is gamma**n_steps (when no early termination)
        discounts = self.gamma if replay_data.discounts is None else replay_data.discounts
        with th.no_grad():
            # Compute the quantiles of next observation, (batch, n_quantiles, n_actions)
            next_quantiles = self.quantile_net_target(replay_data.next_observations)
            if self.double_q:
                # Follow the policy of the online network (van Hasselt et al. 2016)
                chooser = self.quantile_net(replay_data.next_observations)
            else:
                chooser = next_quantiles
            # Follow greedy policy: the mean of its quantiles is the value of an action
            next_actions = chooser.mean(dim=1).argmax(dim=1, keepdim=True)
            next_quantiles = _of_actions(next_quantiles, next_actions)
            # The value after a terminal state does not count, even if it is NaN
            future = th.where(replay_data.dones > 0.0, 0.0, discounts * next_quantiles)
            return replay_data.rewards + future

    def _quantiles_of(self, replay_data: PrioritizedReplayBufferSamples) -> th.Tensor:
        """
        :param replay_data: a batch
        :return: quantiles of its actions, shape ``(batch, n_quantiles)``
        """
        return _of_actions(self.quantile_net(replay_data.observations), replay_data.actions)

    def _context(
        self, batch: PrioritizedReplayBufferSamples, quantiles: th.Tensor, targets: th.Tensor
    ) -> PriorityContext:
        return PriorityContext(
            batch,
            quantiles,
            targets,
            errors_of=wasserstein_distance,
            losses_of=lambda *pair: quantile_huber_loss(*pair).mean(dim=1, keepdim=True),
            target_estimates=lambda: _of_actions(
                self.quantile_net_target(batch.observations), batch.actions
            ),
        )

    def priority_context(self, batch: PrioritizedReplayBufferSamples) -> PriorityContext:
        """
        Context of a batch for a priority function, under the current networks.

        :param batch: transitions from the replay buffer
        :return: the context
        """
        with th.no_grad():
            return self._context(batch, self._quantiles_of(batch), self._target_quantiles(batch))

    def td_errors(self, batch: PrioritizedReplayBufferSamples) -> th.Tensor:
        """
        TD errors of a batch under the current networks.

        :param batch: transitions from the replay buffer
        :return: :func:`wasserstein_distance` of estimates and targets, shape ``(batch, 1)``
        """
        return wasserstein_distance(self._quantiles_of(batch), self._target_quantiles(batch))

    def learn(
        self: SelfPERQRDQN,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "PERQRDQN",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfPERQRDQN:
        """As ``QRDQN.learn``, with another default name in TensorBoard."""
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )


def wasserstein_distance(quantiles: th.Tensor, targets: th.Tensor) -> th.Tensor:
    """
    1-Wasserstein distance of two distributions with the same number of quantiles (Dabney et al.
    2018, section 3.1).

    :param quantiles: quantiles in any order, shape ``(batch, n_quantiles)``
    :param targets: target quantiles in any order, same shape
    :return: mean absolute difference of quantiles of the same rank, shape ``(batch, 1)``
    """
    differences = targets.sort(dim=1).values - quantiles.sort(dim=1).values
    return differences.abs().mean(dim=1, keepdim=True)


def _of_actions(quantiles: th.Tensor, actions: th.Tensor) -> th.Tensor:
    """
    :param quantiles: quantiles of all actions, shape ``(batch, n_quantiles, n_actions)``
    :param actions: one action for each row, shape ``(batch, 1)``
    :return: quantiles of these actions, shape ``(batch, n_quantiles)``
    """
    index = actions.long()[:, :, None].expand(-1, quantiles.shape[1], 1)
    return quantiles.gather(dim=2, index=index).squeeze(dim=2)
