"""rl-zoo3 with PERDQN and PERQRDQN from training to enjoying, on tiny budgets."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from sb3_per import PERDQN, PERQRDQN, PrioritizedReplayBuffer, zoo

pytestmark = [
    pytest.mark.slow,
    # Of rl-zoo3, optuna and matplotlib, which are used here as their users do
    pytest.mark.filterwarnings("default"),
]
pytest.importorskip("rl_zoo3", reason="needs the extra `zoo`")

ENV = "CartPole-v1"
CLASSES: dict[str, Any] = {"per_dqn": PERDQN, "per_qrdqn": PERQRDQN}
ALGORITHM = pytest.mark.parametrize("algorithm", ["per_dqn", "per_qrdqn"])
SMALL = ("-params", "learning_starts:100", "train_freq:8", "gradient_steps:2")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rl-zoo3 writes to the folder it is in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")


def run(command: str, *arguments: Any) -> None:
    assert zoo.main([command, *map(str, arguments)]) == 0


def train(algorithm: str, *arguments: Any, env: str = ENV, timesteps: int = 304) -> None:
    common = ("--algo", algorithm, "--env", env, "-n", timesteps, "--seed", 1, "--verbose", 0)
    run("train", *common, *arguments)


def stored(path: Path) -> PrioritizedReplayBuffer:
    with path.open("rb") as file:
        buffer = pickle.load(file)
    assert isinstance(buffer, PrioritizedReplayBuffer)
    return buffer


@ALGORITHM
def test_train_resume_and_enjoy(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs" / algorithm
    train(algorithm, "--eval-freq", 150, "--save-replay-buffer", *SMALL, "alpha:0.3")
    first = logs / f"{ENV}_1"
    before = stored(first / "replay_buffer.pkl")
    assert (before.n_transitions, before.alpha) == (304, 0.3)
    assert len(set(before.priorities)) > 10
    assert (first / "evaluations.npz").exists()
    model = CLASSES[algorithm].load(first / f"{ENV}.zip")
    assert model.alpha == 0.3
    assert model._n_updates == 2 * len(range(104, 305, 8))

    agent = ("--trained-agent", first / f"{ENV}.zip")
    train(algorithm, *agent, "--eval-freq", -1, "--save-replay-buffer", *SMALL, timesteps=200)
    after = stored(logs / f"{ENV}_2" / "replay_buffer.pkl")
    assert after.n_transitions == 504
    assert (after.observations[:304] == before.observations[:304]).all()
    assert "Loading replay buffer" in capsys.readouterr().out

    run("enjoy", "--algo", algorithm, "--env", ENV, "--no-render", "-n", 100)
    out = capsys.readouterr().out
    assert f"logs/{algorithm}/{ENV}_2/{ENV}.zip" in out
    assert "Mean reward: " in out


@ALGORITHM
def test_a_toy_environment_is_found_by_its_id(
    algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(algorithm, "--eval-freq", 150, *SMALL, env="sb3_per/GridWorld-v0")
    assert "Success rate: " in capsys.readouterr().out
    run("enjoy", "--algo", algorithm, "--env", "sb3_per/GridWorld-v0", "--no-render", "-n", 200)
    assert "Success rate: " in capsys.readouterr().out


@ALGORITHM
def test_atari_trains_and_plays_from_saved_images(
    algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ale_py", reason="needs the extra `atari`")
    pytest.importorskip("cv2", reason="needs the extra `atari`")
    game = "PongNoFrameskip-v4"
    params = ("-params", "learning_starts:24", "buffer_size:40")
    train(algorithm, "--eval-freq", -1, *params, env=game, timesteps=32)
    agent = CLASSES[algorithm].load(f"logs/{algorithm}/{game}_1/{game}.zip", buffer_size=1)
    assert (agent._n_updates, agent.double_q) == (2, True)
    assert agent.optimize_memory_usage
    assert agent.observation_space.shape == (4, 84, 84)
    run("enjoy", "--algo", algorithm, "--env", game, "--no-render", "-n", 8)
    assert "Stacking 4 frames" in capsys.readouterr().out


@ALGORITHM
def test_optimize_and_train_with_what_was_found(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = ("--storage", f"sqlite:///{tmp_path}/study.db", "--study-name", algorithm)
    trials = ("-optimize", "--n-trials", 3, "--n-evaluations", 2, "--eval-episodes", 1)
    # The networks that get tried are large: few updates will do
    train(algorithm, *trials, *study, "-params", "learning_starts:290")
    out = capsys.readouterr().out
    assert "Number of finished trials:  3" in out
    assert "    alpha: " in out
    (report,) = (tmp_path / "logs" / algorithm).glob("report_*.csv")
    header, *rows = report.read_text().splitlines()
    assert len(rows) == 3
    columns = header.split(",")
    assert {"params_alpha", "params_beta", "params_double_q"} <= set(columns)

    train(algorithm, *study, "--trial-id", 1, "--eval-freq", -1)
    path = tmp_path / "logs" / algorithm / f"{ENV}_2" / f"{ENV}.zip"
    model = CLASSES[algorithm].load(path)
    tried = dict(zip(columns, rows[1].split(","), strict=True))
    assert model.alpha == float(tried["params_alpha"])
    assert str(model.double_q) == tried["params_double_q"]


def test_plots_show_our_algorithm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("seaborn", reason="needs the extra `zoo`")
    train("per_dqn", "--eval-freq", 150, *SMALL)
    run("plot_train", "-a", "per_dqn", "-e", "CartPole", "-f", "logs", "-w", 2)
    capsys.readouterr()
    run("all_plots", "-a", "per_dqn", "-e", "CartPole", "-f", "logs", "--no-display", "-o", "out")
    assert "|PER_DQN" in capsys.readouterr().out
    with (tmp_path / "out.pkl").open("rb") as file:
        results = pickle.load(file)["CartPole"]["PER_DQN-logs"]
    assert results["timesteps"].tolist() == [150, 300]
