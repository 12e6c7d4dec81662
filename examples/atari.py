"""
PERDQN on an Atari game, with the settings of the paper and a replay buffer that fits on a laptop.

    pip install "sb3-per[atari]"
    python examples/atari.py --game Pong

20,000 steps take about six minutes of one core and less than 1 GB, of which the replay buffer takes
0.3. The agent learns nothing yet, as the paper trains for 50 million: the example shows the setup.
"""

import argparse
import sys
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from sb3_per import PERDQN, PrioritizedReplayBuffer, SumTree

#: Schaul et al. 2016, proportional variant, with the settings that it takes from Mnih et al. 2015
#: and from the tuned Double DQN of van Hasselt et al. 2016. A step is four frames.
SETTINGS: dict[str, Any] = {
    "learning_rate": 2.5e-4 / 4,  # a quarter of DQN's
    "batch_size": 32,
    "train_freq": 4,
    "gamma": 0.99,
    "target_update_interval": 10_000,
    "exploration_final_eps": 0.01,
    "alpha": 0.6,
    "beta": 0.4,
    "beta_final": 1.0,
    "double_q": True,
    # Each image once: half the memory
    "optimize_memory_usage": True,
    "replay_buffer_kwargs": {"handle_timeout_termination": False},
}
BUFFER_SIZE_OF_THE_PAPER = 1_000_000
LEARNING_STARTS_OF_THE_PAPER = 50_000
EXPLORATION_STEPS_OF_THE_PAPER = 250_000


def make_env(game: str, seed: int) -> VecEnv:
    """
    :param game: name of the game, such as ``"Pong"``
    :param seed: seed of the environment
    :return: the game with grayscale images of 84 by 84, in stacks of four
    """
    gym.register_envs(ale_py)
    return VecFrameStack(make_atari_env(f"{game}NoFrameskip-v4", seed=seed), n_stack=4)


def memory_of(buffer: PrioritizedReplayBuffer, size: int) -> int:
    """
    :param buffer: replay buffer of any size
    :param size: number of transitions
    :return: bytes of a buffer of that size, including priorities
    """
    arrays = [array for array in vars(buffer).values() if isinstance(array, np.ndarray)]
    per_transition = sum(array.nbytes for array in arrays) / buffer.buffer_size
    return round(per_transition * size) + SumTree(size).nbytes


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timesteps", type=int, default=20_000, help="environment steps")
    parser.add_argument("--buffer-size", type=int, default=10_000, help="the paper has 1,000,000")
    parser.add_argument("--episodes", type=int, default=1, help="to play at the end, or 0")
    parser.add_argument("--no-progress-bar", action="store_true")
    options = parser.parse_args(arguments)

    model = PERDQN(
        "CnnPolicy",
        make_env(options.game, options.seed),
        buffer_size=options.buffer_size,
        # Short runs have proportionally shorter exploration and `learning_starts`
        learning_starts=min(LEARNING_STARTS_OF_THE_PAPER, options.timesteps // 20),
        exploration_fraction=min(EXPLORATION_STEPS_OF_THE_PAPER / options.timesteps, 0.5),
        seed=options.seed,
        **SETTINGS,
    )
    assert isinstance(model.replay_buffer, PrioritizedReplayBuffer)
    for size in (options.buffer_size, BUFFER_SIZE_OF_THE_PAPER):
        print(f"buffer of {size:,}: {memory_of(model.replay_buffer, size) / 1e6:,.0f} MB")

    model.learn(options.timesteps, progress_bar=not options.no_progress_bar)
    if sys.platform == "linux":
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"largest memory of the process: {peak * 1024 / 1e6:,.0f} MB")

    if options.episodes:
        env = make_env(options.game, options.seed + 1000)
        # A greedy policy can wait forever instead of launching the ball
        scores = evaluate_policy(model, env, n_eval_episodes=options.episodes, deterministic=False)
        print(f"seed {options.seed}: score {scores[0]:.1f} over {options.episodes} episodes")


if __name__ == "__main__":
    main()
