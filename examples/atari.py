"""
PERDQN on an Atari game, with the settings of the paper and a replay buffer that fits on a laptop.

    pip install "sb3-per[atari]"
    python examples/atari.py --game Pong

Each frame is stored once: a buffer of 100,000 takes 0.8 GB, the paper's million 7.6, and with
``--compression zstd`` (``pip install "sb3-per[atari,compression]"``) a small part of that.
20,000 steps take about six minutes of one core. They teach it nothing yet, as the paper trains for
50 million: what they show is that it runs.
"""

import argparse
import sys
from typing import Any

import ale_py
import gymnasium as gym
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack

from sb3_per import PERDQN, PrioritizedFrameReplayBuffer

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
    # It finds by itself how many frames there are in a stack
    "replay_buffer_class": PrioritizedFrameReplayBuffer,
}
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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--game", default="Pong")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timesteps", type=int, default=20_000, help="environment steps")
    parser.add_argument("--buffer-size", type=int, default=100_000, help="the paper has 1,000,000")
    parser.add_argument("--compression", help="zstd, or zstd-LEVEL")
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
        replay_buffer_kwargs={"compression": options.compression},
        **SETTINGS,
    )
    model.learn(options.timesteps, progress_bar=not options.no_progress_bar)
    stored = f"{model.replay_buffer.n_transitions:,} of {options.buffer_size:,} transitions"
    print(f"replay buffer: {stored}, {model.replay_buffer.nbytes / 1e6:,.1f} MB")
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
