"""A small finished comparison that several test files look at."""

import time
from pathlib import Path
from typing import Any

import pytest

from sb3_per.compare.main import main
from sb3_per.compare.settings import CompareSettings

#: Small enough for seconds, large enough to get to the goal
YAML = """
sb3_per/GridWorld-v0:
  n_timesteps: 400
  env_kwargs: {length: 4, max_episode_steps: 12}
  threshold: 0.8
  policy: MlpPolicy
  policy_kwargs: "dict(net_arch=[16])"
  learning_rate: 0.01
  buffer_size: 400
  learning_starts: 60
  batch_size: 16
  gamma: 0.9
  train_freq: 2
  target_update_interval: 20
  exploration_fraction: 0.4
CartPole-v1:
  n_timesteps: 400
  policy: MlpPolicy
  policy_kwargs: "dict(net_arch=[16])"
  learning_starts: 60
  train_freq: 4
"""


@pytest.fixture(scope="session")
def hyperparams_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hyperparams") / "small.yml"
    path.write_text(YAML)
    return path


@pytest.fixture(scope="session")
def small(hyperparams_file: Path) -> dict[str, Any]:
    """Options of a comparison of seconds, without a folder."""
    return {
        "envs": ("GridWorld-v0",),
        "n_seeds": 2,
        "hyperparams": hyperparams_file,
        "window": 5,
        "n_evals": 4,
        "eval_episodes": 3,
        "snapshot_episodes": (0, 20, 10_000),
        "n_snapshots": 5,
        "jobs": 1,
    }


@pytest.fixture(scope="session")
def finished(
    small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """Folder of a finished comparison: not to be changed."""
    base = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        # One for all test processes
        base = base.parent
    folder, is_done = base / "finished-comparison", base / "finished-comparison-is-done"
    try:
        folder.mkdir()
    except FileExistsError:
        while not is_done.exists():
            time.sleep(0.1)
        assert is_done.read_text() == "0"
        return folder
    code: int | None = None
    try:
        options = {**small, "envs": ("GridWorld-v0", "CartPole-v1")}
        code = main(CompareSettings(output=folder, **options))
    finally:
        (base / "code").write_text(str(code))
        (base / "code").rename(is_done)
    assert code == 0
    return folder
