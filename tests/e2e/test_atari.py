"""The Atari example: its settings, its memory, and a short run."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from gymnasium import spaces

from sb3_per import PrioritizedReplayBuffer, zoo

pytest.importorskip("ale_py", reason="needs the extra `atari`")
pytest.importorskip("cv2", reason="needs the extra `atari`")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
try:
    import atari
finally:
    sys.path.pop(0)


def test_the_settings_are_those_for_rl_zoo3() -> None:
    entry: dict[str, Any] = yaml.safe_load(zoo.hyperparameters_of("per_dqn").read_text())["atari"]
    entry["replay_buffer_kwargs"] = eval(entry["replay_buffer_kwargs"])
    assert {name: entry[name] for name in atari.SETTINGS} == atari.SETTINGS
    assert entry["learning_starts"] == atari.LEARNING_STARTS_OF_THE_PAPER
    steps = entry["exploration_fraction"] * entry["n_timesteps"]
    assert steps == atari.EXPLORATION_STEPS_OF_THE_PAPER


@pytest.mark.parametrize("saving", [True, False])
def test_the_memory_is_that_of_all_arrays(saving: bool) -> None:
    images = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = PrioritizedReplayBuffer(
        500,
        images,
        spaces.Discrete(6),
        optimize_memory_usage=saving,
        handle_timeout_termination=not saving,
    )
    n_images = 1 if saving else 2
    # Images; a 64-bit action; reward, end and timeout in 32 bits
    assert atari.memory_of(buffer, 500) == 500 * (n_images * 4 * 84 * 84 + 20) + buffer.tree.nbytes
    # As the example and the documentation say
    gigabytes = atari.memory_of(buffer, 1_000_000) / 1e9
    assert gigabytes == pytest.approx(28.3 if saving else 56.5, abs=0.05)


@pytest.mark.parametrize("episodes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_short_run_says_what_it_takes_and_scores(
    episodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--timesteps", "60", "--buffer-size", "50", "--no-progress-bar"]
    atari.main([*arguments, "--episodes", str(episodes)])
    out = capsys.readouterr().out
    assert "buffer of 50: 1 MB\nbuffer of 1,000,000: 28,255 MB\n" in out
    if sys.platform == "linux":
        assert 50.0 < float(out.split("of the process: ")[1].split()[0].replace(",", "")) < 20_000.0
    assert ("score" in out) is (episodes > 0)
    if episodes:
        assert -21.0 <= float(out.split("score ")[1].split()[0]) <= 21.0
