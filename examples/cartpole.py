"""
Train PERDQN on CartPole-v1 and evaluate it greedily.

    python examples/cartpole.py --seed 1
"""

import argparse
from typing import Any

from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import LinearSchedule

from sb3_per import PERDQN

#: Arguments of DQN; the options of prioritized replay keep their defaults
SETTINGS: dict[str, Any] = {
    "policy": "MlpPolicy",
    # Falls to 0, so that training ends with a stable policy
    "learning_rate": LinearSchedule(2.3e-3, 0.0, 1.0),
    "buffer_size": 100_000,
    "learning_starts": 1_000,
    "batch_size": 64,
    "gamma": 0.99,
    "train_freq": 256,
    "gradient_steps": 128,
    "target_update_interval": 10,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}
TIMESTEPS = 50_000


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timesteps", type=int, default=TIMESTEPS, help="environment steps")
    parser.add_argument("--episodes", type=int, default=20, help="greedy episodes at the end")
    parser.add_argument("--no-progress-bar", action="store_true")
    options = parser.parse_args(arguments)

    model = PERDQN(env="CartPole-v1", seed=options.seed, **SETTINGS)
    model.learn(options.timesteps, progress_bar=not options.no_progress_bar)

    env = make_vec_env("CartPole-v1", seed=options.seed + 1000)
    mean, std = evaluate_policy(model, env, n_eval_episodes=options.episodes)
    print(f"seed {options.seed}: {mean:.1f} +- {std:.1f} over {options.episodes} greedy episodes")


if __name__ == "__main__":
    main()
