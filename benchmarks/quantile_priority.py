"""
Which error should be PERQRDQN's priority? Gradient steps until the values are right, by rule.

    python benchmarks/quantile_priority.py

The memory is that of the Blind Cliffwalk (Schaul et al. 2016, figure 1): one transition for each
step of all ``2 ** n`` sequences of actions, a single one with a reward. As a variant, the wrong
action leads, by some steps, to a lottery of 1 or -1 at equal odds: returns that stay uncertain
however much is learned. The quantiles are linear in one-hot states. A run ends when the mean
squared error of the values of the right actions is below 1e-3.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch as th
from gymnasium import spaces
from stable_baselines3.common.logger import Logger

from sb3_per import PERQRDQN, PrioritizedReplayBuffer, PriorityContext

N_STATES = 8
TARGET_UPDATE_INTERVAL = 20
LIMIT = 20_000
TERMINAL = -1

FloatArray = npt.NDArray[np.float32]


def all_pairs(context: PriorityContext) -> th.Tensor:
    """Mean absolute TD error over all pairs of a quantile and a target quantile."""
    quantiles, targets = context.estimates, context.targets
    return (targets[:, None, :] - quantiles[:, :, None]).abs().mean(dim=(1, 2))


def of_means(context: PriorityContext) -> th.Tensor:
    """TD error of the expected returns, as in DQN."""
    return (context.targets - context.estimates).mean(dim=1).abs()


#: Options of PERQRDQN
RULES: dict[str, dict[str, Any]] = {
    "same rank (the default)": {},
    "all pairs": {"priority": all_pairs},
    "of the means": {"priority": of_means},
    "none (uniform)": {"alpha": 0.0},
}


class SpacesOnly(gym.Env[FloatArray, np.int64]):
    """What the model asks of an environment that it never steps in."""

    def __init__(self, n_states: int) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (n_states,), np.float32)
        self.action_space = spaces.Discrete(2)


def transitions(lottery: int) -> Iterator[tuple[int, int, float, int]]:
    """
    All transitions of all sequences.

    :param lottery: steps of the lottery, 0 for none
    :return: state, action, reward and next state of each
    """
    prize = 1.0
    for sequence in range(2**N_STATES):
        for state in range(N_STATES):
            action, is_last = sequence >> state & 1, state == N_STATES - 1
            if action == state % 2:
                yield state, action, float(is_last), TERMINAL if is_last else state + 1
                continue
            yield state, action, 0.0, N_STATES if lottery else TERMINAL
            for step in range(1, lottery + 1):
                drawn = step == lottery
                next_state = TERMINAL if drawn else N_STATES + step
                yield N_STATES + step - 1, 0, prize if drawn else 0.0, next_state
            prize = -prize
            break


def run(options: dict[str, Any], lottery: int, seed: int) -> int:
    """
    Train on the memory.

    :param options: of prioritized replay, the rule among them
    :param lottery: steps of the lottery, 0 for none
    :param seed: of networks and draws
    :return: gradient steps needed, at most ``LIMIT``
    """
    memory = list(transitions(lottery))
    one_hot = np.eye(N_STATES + lottery, dtype=np.float32)
    model = PERQRDQN(
        "MlpPolicy",
        SpacesOnly(len(one_hot)),
        learning_rate=1e-2,
        buffer_size=len(memory),
        gamma=1 - 1 / N_STATES,
        policy_kwargs={"net_arch": [], "n_quantiles": 16},
        seed=seed,
        device="cpu",
        **options,
    )
    model.set_logger(Logger(None, []))
    assert isinstance(model.replay_buffer, PrioritizedReplayBuffer)
    for state, action, reward, next_state in memory:
        model.replay_buffer.add(
            one_hot[[state]],
            # That of a terminal state has no effect
            one_hot[[max(next_state, 0)]],
            np.array([action]),
            np.array([reward]),
            np.array([next_state == TERMINAL]),
            [{}],
        )

    states = np.arange(N_STATES)
    true_values = model.gamma ** (N_STATES - 1.0 - states)
    for n_steps in range(0, LIMIT, TARGET_UPDATE_INTERVAL):
        model.train(TARGET_UPDATE_INTERVAL, batch_size=32)
        model.quantile_net_target.load_state_dict(model.quantile_net.state_dict())
        with th.no_grad():
            values = model.quantile_net(th.as_tensor(one_hot[states])).mean(dim=1).numpy()
        if np.square(values[states, states % 2] - true_values).mean() < 1e-3:
            return n_steps + TARGET_UPDATE_INTERVAL
    return LIMIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs of each, from seed 0 on")
    n_seeds = parser.parse_args().seeds
    th.set_num_threads(1)

    print("| lottery | transitions | priority | median | quartiles |\n|---|---|---|---|---|")
    for lottery in (0, 2):
        n_transitions = sum(1 for _ in transitions(lottery))
        for rule, options in RULES.items():
            needed = [run(options, lottery, seed) for seed in range(n_seeds)]
            low, median, high = np.percentile(needed, [25, 50, 75])
            shown = f"{median:.0f} | {low:.0f} to {high:.0f}"
            print(f"| {lottery} | {n_transitions} | {rule} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
