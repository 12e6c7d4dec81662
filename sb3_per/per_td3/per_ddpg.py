"""Deep Deterministic Policy Gradient with prioritized experience replay."""

from typing import Any, TypeVar

import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.ddpg.ddpg import DDPG
from stable_baselines3.td3.policies import TD3Policy

from sb3_per.buffers.replay import InitialPriority, Prioritization, WeightNormalization
from sb3_per.common.losses import Loss
from sb3_per.common.priorities import Priority
from sb3_per.per_td3.per_td3 import PrioritizedTD3

__all__ = ["PERDDPG"]

SelfPERDDPG = TypeVar("SelfPERDDPG", bound="PERDDPG")


class PERDDPG(PrioritizedTD3, DDPG):
    """
    Deep Deterministic Policy Gradient (DDPG) with prioritized experience replay.

    Papers: https://arxiv.org/abs/1509.02971 (Lillicrap et al. 2016),
    https://arxiv.org/abs/1511.05952 (Schaul et al. 2016, algorithm 1)

    Takes every argument of SB3's ``DDPG``, in the same order and with the same meaning; the options
    of prioritized replay come after them, by name. As in SB3, it is :class:`~sb3_per.PERTD3` with
    one critic, without delayed updates of the actor and without noise in the target.

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
    :param loss: ``"mse"`` (squared error, as in DDPG) or ``"huber"`` (smooth L1)
    :param prioritization: ``"proportional"``, draw in proportion to
        ``(|TD error| + eps) ** alpha``; or ``"rank"``, in proportion to ``(1 / rank) ** alpha``,
        where rank 1 has the largest error
    :param initial_priority: priority of new transitions: ``"max"``, the largest stored one, so that
        each is replayed soon; or ``"td_error"``, that of their TD error, which the next ``train``
        computes once for each new transition
    :param priority: priority function, whose value takes the place of the absolute TD error:
        ``"td_error"``, that error itself;
        ``"clipped"``, the larger one of 1 and that error (LAP, Fujimoto et al. 2020,
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
        self: SelfPERDDPG,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "PERDDPG",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfPERDDPG:
        """As ``DDPG.learn``, with another default name in TensorBoard."""
        return super().learn(
            total_timesteps=total_timesteps,
            callback=callback,
            log_interval=log_interval,
            tb_log_name=tb_log_name,
            reset_num_timesteps=reset_num_timesteps,
            progress_bar=progress_bar,
        )
