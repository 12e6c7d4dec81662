"""Actor-critics as agents of a comparison, with what rl-zoo's files say of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise

from sb3_per.compare.agents import ALGORITHMS, parse_agent
from sb3_per.compare.hyperparams import DEFAULT_FILE, load_hyperparams
from sb3_per.compare.settings import CompareSettings, SettingsError
from sb3_per.compare.training import Run, train

SMALL: dict[str, Any] = {
    "n_timesteps": 60,
    "policy": "MlpPolicy",
    "buffer_size": 100,
    "learning_starts": 20,
    "batch_size": 8,
    "policy_kwargs": "dict(net_arch=[8])",
}
NAMES = [name for name, algorithm in ALGORITHMS.items() if algorithm.is_actor_critic]
LAP = "per_sac(priority='clipped', loss='huber', alpha=0.4, beta=0, beta_final=0)"


def test_each_has_its_baseline_and_all_are_told_in_the_help() -> None:
    ours = {name for name in NAMES if ALGORITHMS[name].is_prioritized}
    assert ours == {f"per_{name}" for name in ("sac", "td3", "ddpg", "tqc")}
    for name in ours:
        baseline = ALGORITHMS[name.removeprefix("per_")]
        assert not baseline.is_prioritized
        assert ALGORITHMS[name].name == f"PER{baseline.name}"
        assert issubclass(
            parse_agent(name).algorithm_class(),
            parse_agent(name.removeprefix("per_")).algorithm_class(),
        )
        assert str(parse_agent(ALGORITHMS[name].name)) == name
    text = CompareSettings.__doc__ or ""
    assert [name for name in NAMES if f"`{name}`" not in text] == []


@pytest.mark.parametrize("text", ["td3", LAP, "per_tqc(n_quantiles=5, priority='reducible')"])
def test_a_run_has_everything_but_looks_into_the_buffer(text: str) -> None:
    agent = parse_agent(text)
    agent.check(SMALL)
    tables = train(Run("Pendulum-v1", str(agent), 0, SMALL, n_evals=1, eval_episodes=1))
    assert tables["snapshots"].empty
    assert tables["transitions"].empty
    assert tables["evaluations"]["steps"].tolist() == [0, 60]
    assert tables["runs"]["steps"].tolist() == [60]


def test_lap_arrives() -> None:
    model: Any = parse_agent(LAP).make(make_vec_env("Pendulum-v1"), SMALL, 0, "cpu")
    assert (model.priority, model.loss, model.alpha, model.beta, model.beta_final) == (
        "clipped",
        "huber",
        0.4,
        0,
        0,
    )


@pytest.mark.parametrize(
    ("agent", "given", "expected"),
    [
        ("sac", {}, None),
        ("sac", {"noise_type": "normal"}, (NormalActionNoise, 0.1)),
        ("per_td3", {}, (NormalActionNoise, 0.1)),
        ("ddpg", {"noise_std": 0.3}, (NormalActionNoise, 0.3)),
        (
            "per_ddpg(noise_std=0.2)",
            {"noise_type": "ornstein-uhlenbeck", "noise_std": 0.5},
            (OrnsteinUhlenbeckActionNoise, 0.2),
        ),
    ],
    ids=str,
)
def test_noise_is_that_of_rl_zoos_files(agent: str, given: dict[str, Any], expected: Any) -> None:
    hyperparams = {**SMALL, **given}
    parse_agent(agent).check(hyperparams)
    model: Any = parse_agent(agent).make(make_vec_env("Pendulum-v1"), hyperparams, 0, "cpu")
    if expected is None:
        assert model.action_noise is None
        return
    kind, scale = expected
    assert type(model.action_noise) is kind
    np.testing.assert_array_equal(model.action_noise._sigma, [scale])
    np.testing.assert_array_equal(model.action_noise._mu, [0.0])


def test_files_of_rl_zoo_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "own.yml"
    file.write_text(
        """
Pendulum-v1:
  n_timesteps: !!float 2e4
  policy: MlpPolicy
  ent_coef: auto_0.1
  target_entropy: -2
  use_sde: True
  sde_sample_freq: -1
default: {n_timesteps: 3, policy: MlpPolicy}
continuous: {n_timesteps: 4, policy: MlpPolicy, policy_delay: 3, target_noise_clip: 0.1}
"""
    )
    hyperparams = load_hyperparams(file, "Pendulum-v1", is_continuous=True)
    model: Any = parse_agent("per_sac").make(
        make_vec_env("Pendulum-v1"), {**hyperparams, "buffer_size": 10}, 0, "cpu"
    )
    assert (model.ent_coef, model.target_entropy, model.use_sde) == ("auto_0.1", -2.0, True)
    other = "MountainCarContinuous-v0"
    assert load_hyperparams(file, other)["n_timesteps"] == 3
    assert load_hyperparams(file, other, is_continuous=True)["policy_delay"] == 3
    # Our own file: any of them can be trained anywhere
    for env_id in ("Pendulum-v1", other):
        for name in NAMES:
            parse_agent(name).check(load_hyperparams(DEFAULT_FILE, env_id, is_continuous=True))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("noise_type", "adaptive-param", '"normal" or "ornstein-uhlenbeck" is needed'),
        ("ent_coef", "automatic", "ent_coef is 'automatic'"),
        ("ent_coef", "auto_much", "ent_coef is 'auto_much'"),
        ("policy_delay", 0, "an integer of at least 1"),
        ("action_noise", "normal", "it is `noise_type` and `noise_std`"),
    ],
)
def test_values_that_are_none(key: str, value: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yml"
    file.write_text(f"default: {{n_timesteps: 3, policy: MlpPolicy, {key}: {value}}}")
    with pytest.raises(SettingsError, match=message):
        load_hyperparams(file, "Pendulum-v1")


def test_what_an_algorithm_does_not_take_is_refused() -> None:
    with pytest.raises(SettingsError, match="agent per_sac does not take policy_delay"):
        parse_agent("per_sac").check({**SMALL, "policy_delay": 2})
    with pytest.raises(SettingsError, match="agent per does not take noise_type"):
        parse_agent("per").check({**SMALL, "noise_type": "normal"})
    with pytest.raises(SettingsError, match="double_q is no option of per_sac"):
        parse_agent("per_sac(double_q=True)").check(SMALL)
