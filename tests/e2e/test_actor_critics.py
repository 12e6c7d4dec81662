"""PERSAC, PERTD3, PERDDPG and PERTQC in every mode of the buffers, to files and back, and on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from actor_critic_helpers import ALGORITHM, PAIR, PushEnv, differences, make, tensors_of
from buffer_helpers import state_of
from sb3_per import (
    PERTD3,
    PERTQC,
    PrioritizedDictReplayBuffer,
    PrioritizedHerReplayBuffer,
    PrioritizedReplayBuffer,
)

IMAGES: dict[str, Any] = {"net_arch": [8], "features_extractor_kwargs": {"features_dim": 8}}
DICT = spaces.Dict({"one": spaces.Box(-9.0, 9.0, (3,), np.float32), "two": spaces.Discrete(4)})
SAVING: dict[str, Any] = {
    "optimize_memory_usage": True,
    "replay_buffer_kwargs": {"handle_timeout_termination": False},
}


def bits(n_envs: int = 1) -> VecEnv:
    return DummyVecEnv([lambda: BitFlippingEnv(n_bits=3, continuous=True)] * n_envs)


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "n-step, two environments": {"env": lambda: DummyVecEnv([PushEnv] * 2), "n_steps": 3},
    "memory": {**SAVING, "n_steps": 2},
    "rank, own errors first": {"prioritization": "rank", "initial_priority": "td_error"},
    "normalized": {"env": lambda: VecNormalize(DummyVecEnv([PushEnv] * 2))},
    "Dict, LAP": {
        "env": lambda: PushEnv(DICT),
        "policy": "MultiInputPolicy",
        "n_steps": 2,
        "priority": "clipped",
        "alpha": 0.4,
        "beta": 0.0,
        "beta_final": 0.0,
    },
    "hindsight": {
        "env": lambda: bits(2),
        "policy": "MultiInputPolicy",
        "replay_buffer_class": HerReplayBuffer,
        "replay_buffer_kwargs": {"n_sampled_goal": 2},
        "priority": "reducible",
    },
    "images": {
        "env": lambda: PushEnv(spaces.Box(0, 255, (1, 36, 36), np.uint8)),
        "policy": "CnnPolicy",
        "policy_kwargs": IMAGES,
        "batch_size": 3,
    },
}
CLASSES = {"Dict, LAP": PrioritizedDictReplayBuffer, "hindsight": PrioritizedHerReplayBuffer}


def make_in(mode: str, algorithm: Any) -> Any:
    options = dict(MODES[mode])
    env = options.pop("env", PushEnv)()
    if algorithm is PERTQC:
        options["policy_kwargs"] = {"net_arch": [8], "n_quantiles": 5} | options.get(
            "policy_kwargs", {}
        )
    return make(algorithm, env, **options)


def content_of(model: Any) -> dict[str, Any]:
    # Infos are objects, whose addresses differ
    return {
        key: value for key, value in state_of(model.replay_buffer).items() if "infos" not in key
    }


def go_on(model: Any) -> None:
    model.set_random_seed(4)
    model.learn(14, reset_num_timesteps=False)


@ALGORITHM
@pytest.mark.parametrize("mode", list(MODES))
def test_what_was_saved_goes_on_bit_for_bit(algorithm: Any, mode: str, tmp_path: Path) -> None:
    model = make_in(mode, algorithm).learn(30)
    assert type(model.replay_buffer) is CLASSES.get(mode, PrioritizedReplayBuffer)
    assert model._n_updates > 0
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = algorithm.load(tmp_path / "model", env=model.get_env(), device="cpu")
    loaded.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=False)
    assert differences(loaded, model) == []
    assert content_of(loaded) == content_of(model)
    for each in (model, loaded):
        # Both from the start of an episode in the same environment, made again
        env = MODES[mode].get("env", PushEnv)()
        if isinstance(env, VecNormalize):
            env.obs_rms, env.ret_rms = model.get_vec_normalize_env().obs_rms, env.ret_rms
            env.training = False
        each.set_env(env)
        go_on(each)
    assert differences(loaded, model) == []
    assert content_of(loaded) == content_of(model)
    assert model._n_updates > 15


@PAIR
def test_zips_go_to_the_original_and_back(ours: Any, theirs: Any, tmp_path: Path) -> None:
    model = make(ours, alpha=0.3, priority="clipped", n_steps=2).learn(20)
    model.save(tmp_path / "ours")
    plain = theirs.load(tmp_path / "ours", env=PushEnv(), device="cpu")
    assert differences(plain, model) == []
    assert type(plain.replay_buffer) is NStepReplayBuffer
    plain.learn(25)
    assert differences(plain, model)
    plain.save(tmp_path / "theirs")
    back = ours.load(tmp_path / "theirs", env=PushEnv(), device="cpu")
    assert differences(back, plain) == []
    assert (back.alpha, back.priority, back.n_steps) == (0.3, "clipped", 2)
    back.learn(20)

    # What was never ours has the defaults
    make(theirs).learn(20).save(tmp_path / "plain")
    fresh = ours.load(tmp_path / "plain", env=PushEnv(), device="cpu")
    assert (fresh.alpha, fresh.beta, fresh.priority) == (0.6, 0.4, "td_error")
    assert getattr(fresh, "loss", "mse") == "mse"
    assert type(fresh.replay_buffer) is PrioritizedReplayBuffer
    before = tensors_of(fresh)
    fresh.learn(20)
    assert differences(fresh, before)


@ALGORITHM
def test_options_given_to_load_take_effect(algorithm: Any, tmp_path: Path) -> None:
    make(algorithm, alpha=0.3).save(tmp_path / "model")
    loaded = algorithm.load(tmp_path / "model", env=PushEnv(), alpha=0.9, priority="reducible")
    assert (loaded.alpha, loaded.replay_buffer.alpha, loaded.priority) == (0.9, 0.9, "reducible")
    with pytest.raises(ValueError, match=r"`alpha`.*got -1"):
        algorithm.load(tmp_path / "model", alpha=-1)
    if algorithm is not PERTQC:
        with pytest.raises(ValueError, match=r"`loss`.*got 'l1'"):
            algorithm.load(tmp_path / "model", loss="l1")


@ALGORITHM
def test_batches_of_hindsight_reach_the_goals_that_they_were_given(algorithm: Any) -> None:
    model = make_in("hindsight", algorithm).learn(60)
    batch = model.replay_buffer.sample(200)
    goals, achieved = batch.observations["desired_goal"], batch.next_observations["achieved_goal"]
    reached = (goals == achieved).all(1)
    assert 10 < int(reached.sum()) < 199
    assert th.equal(batch.rewards[:, 0] == 0.0, reached)
    with pytest.raises(ValueError, match=r"td_error.*hindsight"):
        make(
            algorithm,
            bits(),
            "MultiInputPolicy",
            replay_buffer_class=HerReplayBuffer,
            initial_priority="td_error",
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pertd3_solves_pendulum(seed: int) -> None:
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.noise import NormalActionNoise

    model = PERTD3(
        "MlpPolicy",
        "Pendulum-v1",
        gamma=0.98,
        learning_starts=1_000,
        action_noise=NormalActionNoise(np.zeros(1), np.full(1, 0.1)),
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
    ).learn(10_000)
    env = model.get_env()
    assert env is not None
    env.seed(1000)
    mean, _ = evaluate_policy(model, env, n_eval_episodes=50)
    assert float(np.mean(mean)) > -200.0
