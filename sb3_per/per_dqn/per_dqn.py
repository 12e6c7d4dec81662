"""Deep Q-Network with prioritized experience replay."""

from typing import Any, TypeVar

import numpy as np
import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.dqn.dqn import DQN
from stable_baselines3.dqn.policies import DQNPolicy

from sb3_per.buffers.replay import (
    InitialPriority,
    Prioritization,
    WeightNormalization,
)
from sb3_per.buffers.samples import PrioritizedReplayBufferSamples
from sb3_per.common.compiled import CompiledOffPolicyAlgorithm
from sb3_per.common.losses import LOSSES, Loss, check_loss
from sb3_per.common.mlp import DQN_ARCHITECTURE
from sb3_per.common.priorities import Priority, PriorityContext

__all__ = ["PERDQN"]

SelfPERDQN = TypeVar("SelfPERDQN", bound="PERDQN")


class PERDQN(CompiledOffPolicyAlgorithm, DQN):
    """
    DQN with prioritized experience replay.

    Paper: https://arxiv.org/abs/1511.05952 (Schaul et al. 2016, algorithm 1)

    Takes every argument of SB3's ``DQN``, in the same order and with the same meaning; the options
    of prioritized replay come after them, by name. The difference to ``DQN``: transitions are
    drawn by the size of their last TD error, and weighted in the loss to correct for it.

    The options are attributes of the model, and can be set at any time: ``train`` applies them to
    the replay buffer. A TD error that is NaN or infinite stops training with an error, before the
    networks have changed.

    :param policy: the policy model to use (MlpPolicy, CnnPolicy, ...)
    :param env: the environment to learn from (if registered in Gym, can be str)
    :param learning_rate: the learning rate, it can be a function of the current progress remaining
        (from 1 to 0). The paper uses a quarter of DQN's on Atari.
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
    :param max_grad_norm: the maximum value for the gradient clipping
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
    :param priority_eps: constant added to every absolute TD error before ``alpha`` applies, so that
        every transition can be drawn again; at least 0
    :param weight_normalization: divide the weights by the largest one of the ``"batch"`` or of the
        whole ``"buffer"``. With the latter, one very small priority among a million makes every
        update small, as if the learning rate were lower; ``per/weight_mean`` shows by how much.
    :param double_q: whether to use double Q-learning: select the next action by the online network,
        evaluate it by the target network (van Hasselt et al. 2016)
    :param loss: ``"huber"`` (smooth L1, as in DQN) or ``"mse"`` (squared error, not halved)
    :param prioritization: ``"proportional"``, draw in proportion to
        ``(|TD error| + eps) ** alpha``; or ``"rank"``, in proportion to ``(1 / rank) ** alpha``,
        where rank 1 has the largest error (the paper uses ``alpha=0.7``, ``beta=0.5`` for it)
    :param initial_priority: priority of new transitions: ``"max"``, the largest stored one, so that
        each is replayed soon (Schaul et al. 2016, algorithm 1, line 6); or ``"td_error"``, that of
        their TD error, which the next ``train`` computes once for each new transition. The latter
        can help when there are more new transitions than draws.
    :param priority: priority function, whose value takes the place of the absolute TD error:
        ``"td_error"``, that error itself; ``"clipped"``, the larger one of it and 1 (LAP, Fujimoto
        et al. 2020, with ``loss="huber", alpha=0.4, beta=0, beta_final=0``); ``"reducible"``, the
        loss minus that of the target network, at least 0 (ReLo, Sujit et al. 2023); or a function
        of a :class:`~sb3_per.PriorityContext` that returns one number of at least 0 for each
        transition; see ``docs/priorities.md``
    :param compiled: whether to train small networks by compiled code: on the CPU, if the policy is
        SB3's ``MlpPolicy`` (``nn.Linear`` with ReLU or Tanh, float32) and the optimizer is Adam.
        The results are those of torch up to float32 rounding, several times as fast. Other
        models are trained by torch, and all models with False. :attr:`uses_compiled_update` tells
        which of them is used, ``verbose=1`` prints the reason.
    :raises ValueError: if an option is out of its range, ``replay_buffer_class`` can't be used
        with priorities, ``replay_buffer_kwargs`` contradict an option, or the actions don't start
        at 0
    """

    _architecture = DQN_ARCHITECTURE
    _compiled_methods = (
        "_context",
        "_priorities_of",
        "_q_values_of",
        "_target_q_values",
        "priority_context",
        "td_errors",
    )

    def __init__(
        self,
        policy: str | type[DQNPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-4,
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
        exploration_fraction: float = 0.1,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.05,
        max_grad_norm: float = 10,
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
        loss: Loss = "huber",
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

    def _check_per_options(self) -> None:
        super()._check_per_options()
        check_loss(self.loss)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """
        Draw batches by priority, fit the Q-values to their targets and update the priorities
        (Schaul et al. 2016, algorithm 1, lines 8 to 15).

        The code is that of SB3's ``DQN.train`` (MIT license), with prioritized replay.

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
            target_q_values = self._target_q_values(replay_data)
            # Get current Q-values estimates
            current_q_values = self._q_values_of(replay_data)

            # Before the step, so that a TD error that is not finite stops training before the
            # network changes
            context = self._context(replay_data, current_q_values, target_q_values)
            priorities = self._priorities_of(context)
            self.replay_buffer.update_priorities(replay_data.indices, priorities)
            errors.append(context.td_errors)
            weights.append(replay_data.weights)

            # The weight is outside of the Huber loss: it scales large errors, too
            elementwise_loss = LOSSES[self.loss](current_q_values, target_q_values)
            loss = (replay_data.weights * elementwise_loss).mean()
            losses.append(loss.item())

            # Optimize the policy
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            # Clip gradient norm
            th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()

        # Increase update counter
        self._n_updates += gradient_steps

        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if losses:
            self.logger.record("train/loss", np.mean(losses))
            self._record_per(errors, weights)

    def _target_q_values(self, replay_data: PrioritizedReplayBufferSamples) -> th.Tensor:
        """
        :param replay_data: a batch
        :return: targets of the Q-values, without gradient, shape ``(batch, 1)``
        """
        # For n-step replay, discount factor is gamma**n_steps (when no early termination)
        discounts = self.gamma if replay_data.discounts is None else replay_data.discounts
        with th.no_grad():
            # Compute the next Q-values using the target network
            next_q_values = self.q_net_target(replay_data.next_observations)  # (batch, n_actions)
            if self.double_q:
                # Follow the policy of the online network (van Hasselt et al. 2016)
                next_actions = self.q_net(replay_data.next_observations).argmax(dim=1, keepdim=True)
                next_q_values = next_q_values.gather(dim=1, index=next_actions)
            else:
                # Follow greedy policy: use the one with the highest value
                next_q_values = next_q_values.max(dim=1, keepdim=True).values
            # The value after a terminal state does not count, even if it is NaN
            future = th.where(replay_data.dones > 0.0, 0.0, discounts * next_q_values)
            return replay_data.rewards + future

    def _q_values_of(self, replay_data: PrioritizedReplayBufferSamples) -> th.Tensor:
        """
        :param replay_data: a batch
        :return: Q-values of its actions, shape ``(batch, 1)``
        """
        q_values: th.Tensor = self.q_net(replay_data.observations)  # (batch, n_actions)
        # Retrieve the q-values for the actions from the replay buffer
        return th.gather(q_values, dim=1, index=replay_data.actions.long())

    def _context(
        self, batch: PrioritizedReplayBufferSamples, q_values: th.Tensor, targets: th.Tensor
    ) -> PriorityContext:
        return PriorityContext(
            batch,
            q_values,
            targets,
            losses_of=LOSSES[self.loss],
            target_estimates=lambda: th.gather(
                self.q_net_target(batch.observations), dim=1, index=batch.actions.long()
            ),
        )

    def priority_context(self, batch: PrioritizedReplayBufferSamples) -> PriorityContext:
        """
        Context of a batch for a priority function, under the current networks.

        :param batch: transitions from the replay buffer
        :return: the context
        """
        with th.no_grad():
            return self._context(batch, self._q_values_of(batch), self._target_q_values(batch))

    def td_errors(self, batch: PrioritizedReplayBufferSamples) -> th.Tensor:
        """
        TD errors of a batch under the current networks.

        :param batch: transitions from the replay buffer
        :return: targets minus Q-values, shape ``(batch, 1)``
        """
        return self._target_q_values(batch) - self._q_values_of(batch)

    def learn(
        self: SelfPERDQN,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "PERDQN",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfPERDQN:
        """As ``DQN.learn``, with another default name in TensorBoard."""
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )
