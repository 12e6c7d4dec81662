"""The Atari example: its settings, its memory, and a short run."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_per import PERDQN, PrioritizedFrameReplayBuffer, zoo

pytest.importorskip("ale_py", reason="needs the extra `atari`")
pytest.importorskip("cv2", reason="needs the extra `atari`")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
try:
    import atari
finally:
    sys.path.pop(0)


def test_the_settings_are_those_for_rl_zoo3() -> None:
    entry: dict[str, Any] = yaml.safe_load(zoo.hyperparameters_of("per_dqn").read_text())["atari"]
    entry["replay_buffer_class"] = eval(entry["replay_buffer_class"])
    assert {name: entry[name] for name in atari.SETTINGS} == atari.SETTINGS
    assert entry["learning_starts"] == atari.LEARNING_STARTS_OF_THE_PAPER
    steps = entry["exploration_fraction"] * entry["n_timesteps"]
    assert steps == atari.EXPLORATION_STEPS_OF_THE_PAPER


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_million_takes_what_the_documentation_says(compression: str | None) -> None:
    n = 1_000_000
    images = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = PrioritizedFrameReplayBuffer(
        n, images, spaces.Discrete(6), "cpu", frame_stack=4, compression=compression
    )
    # Not written to yet, so that the system has not given any of it
    assert buffer.nbytes / 1e9 == pytest.approx(0.05 if compression else 7.55, abs=0.01)


@pytest.mark.parametrize(
    ("episodes", "compression"), [(0, "zstd"), pytest.param(1, "zstd", marks=pytest.mark.slow)]
)
def test_a_short_run_says_what_it_takes_and_scores(
    episodes: int, compression: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--timesteps", "60", "--buffer-size", "50", "--no-progress-bar"]
    atari.main([*arguments, "--episodes", str(episodes), "--compression", compression])
    out = capsys.readouterr().out
    memory = out.split("replay buffer: 50 of 50 transitions, ")[1].split(" MB")[0]
    assert 0.05 < float(memory) < 0.5
    if sys.platform == "linux":
        assert 50.0 < float(out.split("of the process: ")[1].split()[0].replace(",", "")) < 20_000.0
    assert ("score" in out) is (episodes > 0)
    if episodes:
        assert -21.0 <= float(out.split("score ")[1].split()[0]) <= 21.0


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_pong_is_stored_as_sb3_stores_it(compression: str | None) -> None:
    env = atari.make_env("Pong", seed=0)
    options = {**atari.SETTINGS, "replay_buffer_kwargs": {"compression": compression}}
    model = PERDQN("CnnPolicy", env, buffer_size=150, learning_starts=10**6, seed=0, **options)
    plain = ReplayBuffer(150, model.observation_space, model.action_space, "cpu")
    ours: Any = model.replay_buffer
    add = ours.add

    def both(*step: Any) -> None:
        plain.add(*step)
        add(*step)

    ours.add = both
    model.learn(400)
    assert ours.frame_stack == 4
    assert (ours.priorities > 0.0).all()
    batch = ours.batch_of(np.arange(150))
    np.testing.assert_array_equal(batch.observations, plain.observations[:, 0])
    np.testing.assert_array_equal(batch.next_observations, plain.next_observations[:, 0])
