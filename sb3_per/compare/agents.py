"""The agents that can be compared, and their names."""

import ast
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.noise import (
    ActionNoise,
    NormalActionNoise,
    OrnsteinUhlenbeckActionNoise,
)
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import VecEnv

from sb3_per.buffers.frames import PrioritizedFrameReplayBuffer, frame_stack_of
from sb3_per.compare.hyperparams import (
    REFUSED,
    SHARED,
    Hyperparams,
    check_option,
    keyword_options,
    model_arguments,
    parse_expression,
    shortened,
)
from sb3_per.compare.settings import SettingsError

__all__ = ["ALGORITHMS", "Agent", "parse_agent", "parse_agents"]


class Algorithm(NamedTuple):
    """
    Location of an algorithm.

    :param module: module of the class
    :param name: name of the class
    :param label: name in pictures
    :param is_prioritized: whether it replays by priority
    :param extra: extra of this package that installs its dependencies
    :param policy_options: options that it takes in ``policy_kwargs``
    :param is_actor_critic: whether its actions are continuous; its replay buffer is not looked into
    :param needs_noise: whether it explores by noise alone: normal noise, where none was given
    """

    module: str
    name: str
    label: str
    is_prioritized: bool
    extra: str | None = None
    policy_options: tuple[str, ...] = ()
    is_actor_critic: bool = False
    needs_noise: bool = False


ALGORITHMS = {
    "uniform": Algorithm("stable_baselines3", "DQN", "uniform", False),
    "per": Algorithm("sb3_per", "PERDQN", "PER", True),
    "qrdqn": Algorithm(
        "sb3_contrib", "QRDQN", "QR-DQN uniform", False, "contrib", ("n_quantiles",)
    ),
    "per_qrdqn": Algorithm(
        "sb3_per.per_qrdqn", "PERQRDQN", "QR-DQN PER", True, "contrib", ("n_quantiles",)
    ),
    "sac": Algorithm("stable_baselines3", "SAC", "SAC uniform", False, is_actor_critic=True),
    "per_sac": Algorithm("sb3_per", "PERSAC", "SAC PER", True, is_actor_critic=True),
    "td3": Algorithm(
        "stable_baselines3", "TD3", "TD3 uniform", False, is_actor_critic=True, needs_noise=True
    ),
    "per_td3": Algorithm(
        "sb3_per", "PERTD3", "TD3 PER", True, is_actor_critic=True, needs_noise=True
    ),
    "ddpg": Algorithm(
        "stable_baselines3", "DDPG", "DDPG uniform", False, is_actor_critic=True, needs_noise=True
    ),
    "per_ddpg": Algorithm(
        "sb3_per", "PERDDPG", "DDPG PER", True, is_actor_critic=True, needs_noise=True
    ),
    "tqc": Algorithm("sb3_contrib", "TQC", "TQC uniform", False, "contrib", ("n_quantiles",), True),
    "per_tqc": Algorithm(
        "sb3_per.per_tqc", "PERTQC", "TQC PER", True, "contrib", ("n_quantiles",), True
    ),
}

#: Standard deviation where a file has a ``noise_type`` alone
DEFAULT_NOISE = 0.1

#: By their names in rl-zoo's files
NOISES: dict[str, type[ActionNoise]] = {
    "normal": NormalActionNoise,
    "ornstein-uhlenbeck": OrnsteinUhlenbeckActionNoise,
}

#: Buffer size of an agent that is only created for a check
SMALL_BUFFER = 1000

#: Other names for them
ALIASES = {
    "dqn": "uniform",
    "perdqn": "per",
    "per_dqn": "per",
    **{name.replace("_", ""): name for name in ALGORITHMS if name.startswith("per_")},
}


@dataclass(frozen=True)
class Agent:
    """
    An algorithm with options.

    :param algorithm: key of :data:`ALGORITHMS`
    :param options: names and values, by name
    """

    algorithm: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        """Name of the agent in tables, which :func:`parse_agent` reads."""
        return self.algorithm + self._arguments()

    @property
    def label(self) -> str:
        """Name of the agent in pictures."""
        name = ALGORITHMS[self.algorithm].label
        return f"{name} {self._arguments()}" if self.options else name

    def _arguments(self) -> str:
        return f"({', '.join(f'{k}={v!r}' for k, v in self.options)})" if self.options else ""

    @property
    def is_actor_critic(self) -> bool:
        """Whether its actions are continuous; its replay buffer is not looked into."""
        return ALGORITHMS[self.algorithm].is_actor_critic

    def algorithm_class(self) -> type[OffPolicyAlgorithm]:
        """
        :return: the class
        :raises SettingsError: if what it needs is not installed
        """
        where = ALGORITHMS[self.algorithm]
        try:
            found = getattr(importlib.import_module(where.module), where.name)
        except ImportError as error:
            raise SettingsError(
                f"agent {self.algorithm} needs {error.name}: pip install 'sb3-per[{where.extra}]'"
            ) from None
        return found  # type: ignore[no-any-return]

    def make(
        self, env: VecEnv, hyperparams: Hyperparams, seed: int, device: str
    ) -> OffPolicyAlgorithm:
        """
        :param env: training environments
        :param hyperparams: shared by all agents
        :param seed: seed of the run
        :param device: PyTorch device
        :return: the untrained agent
        """
        arguments = model_arguments({**hyperparams, **dict(self.options)})
        for name in ALGORITHMS[self.algorithm].policy_options:
            if name in arguments:
                value = arguments.pop(name)
                arguments["policy_kwargs"] = {**arguments.get("policy_kwargs", {}), name: value}
        if (
            ALGORITHMS[self.algorithm].is_prioritized
            and not arguments.get("optimize_memory_usage", False)
            and is_image_space(env.observation_space)
            and (frame_stack_of(env) or 1) > 1
        ):
            # The same batches, in an eighth of the memory
            arguments["replay_buffer_class"] = PrioritizedFrameReplayBuffer
        if ALGORITHMS[self.algorithm].needs_noise:
            # As in rl-zoo's files
            arguments.setdefault("noise_type", "normal")
        if "noise_type" in arguments:
            shape = env.action_space.shape
            scale = np.full(shape or (), arguments.pop("noise_std", DEFAULT_NOISE))
            noise: Any = NOISES[arguments.pop("noise_type")]
            arguments["action_noise"] = noise(np.zeros_like(scale), scale)
        return self.algorithm_class()(env=env, seed=seed, device=device, **arguments)

    def try_out(self, env: VecEnv, hyperparams: Hyperparams, seed: int, device: str) -> None:
        """
        Create the agent as for a run, with a small buffer, so that options that the algorithm
        refuses are reported before the first run.

        :param env: training environments
        :param hyperparams: shared by all agents
        :param seed: seed of a run
        :param device: PyTorch device
        :raises SettingsError: if the agent can't be made
        """
        options = dict(self.options)
        wanted = options.pop("buffer_size", hyperparams.get("buffer_size", SMALL_BUFFER))
        small = {**hyperparams, "buffer_size": min(wanted, SMALL_BUFFER * env.num_envs)}
        try:
            Agent(self.algorithm, tuple(options.items())).make(env, small, seed, device)
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise SettingsError(f"agent {self}: {kind}{error}") from None

    def check(self, hyperparams: Hyperparams) -> None:
        """
        :param hyperparams: shared by all agents
        :raises SettingsError: if the algorithm does not take an option or a hyperparameter
        """
        parameters = set(inspect.signature(self.algorithm_class()).parameters)
        parameters.update(ALGORITHMS[self.algorithm].policy_options)
        if "action_noise" in parameters:
            parameters.update(("noise_type", "noise_std"))
        for name, _ in self.options:
            if name in SHARED:
                raise SettingsError(
                    f"agent {self}: {name} must be the same for all agents: it belongs into the "
                    "hyperparameters"
                )
            if name not in parameters or name in REFUSED:
                raise SettingsError(f"agent {self}: {name} is no option of {self.algorithm}")
        unknown = set(model_arguments(hyperparams)) - parameters
        if unknown:
            raise SettingsError(f"agent {self} does not take {', '.join(sorted(unknown))}")


def parse_agent(text: str) -> Agent:
    """
    :param text: a name, or one with options: ``per(alpha=0.8, double_q=True)``
    :return: the agent
    :raises SettingsError: if there is no agent of that name, or its options can't be read

    >>> str(parse_agent("per( alpha = .8 )"))
    'per(alpha=0.8)'
    """
    try:
        match parse_expression(text):
            case ast.Name(id=name):
                options: dict[str, Any] = {}
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
                options = keyword_options(keywords)
            case _:
                raise ValueError('an agent is a name, or one with options: "per(alpha=0.8)"')
    except (ValueError, TypeError) as error:
        raise SettingsError(f"--agents: can't read {shortened(text)}: {error}") from None
    name = ALIASES.get(name.lower(), name.lower())
    if name not in ALGORITHMS:
        raise SettingsError(f"--agents: there is no {name!r}, only {', '.join(ALGORITHMS)}")
    for option, value in options.items():
        try:
            options[option] = check_option(option, value)
        except (ValueError, TypeError) as error:
            raise SettingsError(
                f"agent {shortened(text)}: {option} is {shortened(value)}: {error}"
            ) from None
    return Agent(name, tuple(sorted(options.items())))


def parse_agents(texts: Sequence[str]) -> list[Agent]:
    """
    :param texts: one for each agent
    :return: the agents
    :raises SettingsError: as :func:`parse_agent`, or if two are the same
    """
    agents = [parse_agent(text) for text in texts]
    names = [str(agent) for agent in agents]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"--agents has {name} more than once")
    return agents
