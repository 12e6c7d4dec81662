"""
PERDQN in place of DQN: train on the gridworld, save, load, walk to the goal.

    python examples/quickstart.py
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import gymnasium as gym

from sb3_per import PERDQN


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--timesteps", type=int, default=5_000, help="environment steps to train")
    timesteps = parser.parse_args(arguments).timesteps

    env = gym.make("sb3_per/GridWorld-v0", render_mode="ansi")
    model = PERDQN(
        "MlpPolicy",
        env,
        learning_rate=1e-3,
        learning_starts=500,
        train_freq=1,
        gamma=0.95,
        target_update_interval=100,
        exploration_fraction=0.5,
        seed=1,
        alpha=0.6,  # strength of the prioritization
        beta=0.4,  # strength of the importance-sampling correction, rising to 1
    )
    model.learn(timesteps)

    with TemporaryDirectory() as folder:
        path = Path(folder) / "per_dqn_gridworld"
        model.save(path)
        model = PERDQN.load(path, env=env)

    observation, _ = env.reset()
    print(env.render())
    over = False
    while not over:
        action, _ = model.predict(observation, deterministic=True)
        observation, reward, terminated, truncated, _ = env.step(action)
        print(env.render())
        over = terminated or truncated
    print(f"reward {reward}" if terminated else "out of time: train for longer")


if __name__ == "__main__":
    main()
