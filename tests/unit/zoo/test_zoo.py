"""Registration with rl-zoo3, and the arguments with which its functions are called."""

import importlib
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import sb3_per
from sb3_per import PERDQN, zoo

REASON = "needs the extra `zoo`"


def test_help_and_unknown_commands_need_no_rl_zoo3(capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main([]) == zoo.main(["--help"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("usage: sb3-per zoo {train,enjoy,") == 2
    assert zoo.main(["trian"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("sb3-per zoo: there is no command 'trian'")
    assert captured.out == ""


def test_without_rl_zoo3_the_module_is_there_and_its_commands_name_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "rl_zoo3", None)
    # Imported again, and put back in the end
    monkeypatch.delitem(sys.modules, "sb3_per.zoo")
    monkeypatch.delattr(sb3_per, "zoo")
    module = importlib.import_module("sb3_per.zoo")
    assert module is not zoo
    with pytest.raises(ModuleNotFoundError, match="rl_zoo3"):
        module.main(["train", "--algo", "per_dqn"])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Arguments that rl-zoo3's functions would read, and what they would find registered."""
    pytest.importorskip("rl_zoo3", reason=REASON)
    import rl_zoo3.enjoy
    import rl_zoo3.train

    seen: list[list[str]] = []
    for module, function in ((rl_zoo3.train, "train"), (rl_zoo3.enjoy, "enjoy")):
        monkeypatch.setattr(module, function, lambda: seen.append(list(sys.argv)))
    return seen


@pytest.mark.parametrize("algorithm", list(zoo.ALGORITHMS))
def test_train_gets_our_hyperparameters_before_what_the_user_says(
    algorithm: str, calls: list[list[str]]
) -> None:
    before = list(sys.argv)
    given = ["--algo", algorithm, "-conf", "own.yml"]
    assert zoo.main(["train", *given]) == 0
    file = str(zoo.hyperparameters_of(algorithm))
    assert file.endswith(f"{algorithm}.yml")
    assert calls == [["sb3-per zoo train", "--conf-file", file, *given]]
    assert sys.argv == before


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["train", "--algo", "dqn"], []),
        (["train"], []),
        (["enjoy", "--algo=per_dqn"], ["--folder", "logs"]),
        (["enjoy", "--algo", "ppo"], []),
    ],
    ids=str,
)
def test_other_algorithms_keep_the_defaults_of_rl_zoo3(
    given: list[str], expected: list[str], calls: list[list[str]]
) -> None:
    assert zoo.main(given) == 0
    assert calls == [[f"sb3-per zoo {given[0]}", *expected, *given[1:]]]


def test_arguments_come_back_after_an_error(
    calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import rl_zoo3.enjoy
    from rl_zoo3.utils import ALGOS

    def fail() -> None:
        raise RuntimeError(sys.argv[0])

    monkeypatch.setattr(rl_zoo3.enjoy, "enjoy", fail)
    before = list(sys.argv)
    with pytest.raises(RuntimeError, match="sb3-per zoo enjoy"):
        zoo.main(["enjoy"])
    assert sys.argv == before
    assert ALGOS["per_dqn"] is PERDQN


def test_rl_zoo3_knows_our_algorithms_and_environments_wherever_it_looks() -> None:
    pytest.importorskip("rl_zoo3", reason=REASON)
    import rl_zoo3
    from rl_zoo3 import exp_manager
    from rl_zoo3.utils import ALGOS

    zoo.register()
    zoo.register()
    assert vars(exp_manager)["ALGOS"] is rl_zoo3.ALGOS is ALGOS
    for name, (_, class_name) in zoo.ALGORITHMS.items():
        assert ALGOS[name] is getattr(sb3_per, class_name)
        assert name in vars(exp_manager)["HYPERPARAMS_SAMPLER"]
        assert name in vars(exp_manager)["HYPERPARAMS_CONVERTER"]
    assert {"sb3_per/GridWorld-v0", "sb3_per/BlindCliffwalk-v0"} <= gym.registry.keys()


@pytest.mark.parametrize("name", list(zoo.ALGORITHMS))
def test_tuning_suggests_the_options_of_prioritized_replay_too(name: str) -> None:
    pytest.importorskip("rl_zoo3", reason=REASON)
    import optuna
    from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER

    zoo.register()
    fixed: dict[str, Any] = {"alpha": 0.25, "beta": 0.75, "train_freq": 4, "priority": "reducible"}
    if "dqn" in name:
        fixed["double_q"] = True
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    study.enqueue_trial(fixed)
    trial = study.ask()
    sampled = HYPERPARAMS_SAMPLER[name](
        trial, 2, 1, {"using_her_replay_buffer": False, "her_kwargs": {}}
    )
    assert {option: sampled[option] for option in fixed} == fixed
    assert fixed.keys() | {"learning_rate"} <= trial.params.keys()
    assert ("double_q" in sampled) is ("dqn" in name)
    # What is read back from a study is what was tried; rl-zoo3 has noise in two forms
    noise = {"noise_type", "noise_std", "action_noise"}
    read = HYPERPARAMS_CONVERTER[name](trial.params)
    one, other = (
        {option: values[option] for option in values.keys() - noise} for values in (read, sampled)
    )
    assert one == other
    assert ("n_quantiles" in sampled["policy_kwargs"]) is (name in ("per_qrdqn", "per_tqc"))


@pytest.mark.parametrize("given", [{}, {"buffer_size": 7}])
def test_for_playing_no_memory_is_taken_for_a_buffer(given: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip("rl_zoo3", reason=REASON)
    model = PERDQN(
        "MlpPolicy",
        "CartPole-v1",
        buffer_size=500,
        optimize_memory_usage=True,
        replay_buffer_kwargs={"handle_timeout_termination": False},
    )
    model.save(tmp_path / "model")
    loaded = zoo._for_playing(PERDQN).load(str(tmp_path / "model"), **given)
    assert type(loaded) is PERDQN
    assert loaded.replay_buffer is not None
    assert loaded.replay_buffer.buffer_size == given.get("buffer_size", 1)
    assert not loaded.replay_buffer.optimize_memory_usage
    observation = model.observation_space.sample()
    assert loaded.predict(observation, deterministic=True) == model.predict(
        observation, deterministic=True
    )
