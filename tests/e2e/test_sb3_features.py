"""What users of SB3 combine with their DQN, combined with PERDQN."""

import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecTransposeImage

from model_helpers import SAVING_MEMORY, buffer_of, small_model

make_model = partial(small_model, buffer_size=200)


class Counter(gym.Env[npt.NDArray[Any], np.int64]):
    """Ten steps that show their number, in the form of a given space."""

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(2)
        self.count = 0

    def _observation(self) -> npt.NDArray[Any]:
        space = self.observation_space
        assert space.shape is not None
        form = np.zeros(int(np.prod(space.shape)), space.dtype)
        form[self.count % form.size] = 1
        return form.reshape(space.shape)

    def reset(self, **_: Any) -> tuple[npt.NDArray[Any], dict[str, Any]]:
        self.count = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[Any], float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._observation(), 1.0, self.count == 10, False, {}


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2, 3), np.float32),
        spaces.Box(-1, 1, (3,), np.float64),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(5),
    ],
    ids=lambda space: type(space).__name__ + str(space.dtype),
)
def test_observations_of_every_kind(space: spaces.Space[Any], n_envs: int, n_steps: int) -> None:
    env = DummyVecEnv([lambda: Counter(space)] * n_envs)
    model = make_model(env, n_steps=n_steps).learn(60)
    buffer = buffer_of(model)
    assert buffer.observations.dtype == space.dtype
    assert buffer.n_transitions == 60
    batch = buffer.sample(20)
    assert batch.observations.shape == (20, *(space.shape or ()))
    # Each step of an episode stands where the ring says it does
    step = batch.indices // n_envs % 10
    stored = batch.observations.numpy().reshape(20, -1)
    np.testing.assert_array_equal(stored.argmax(axis=1), step % stored.shape[1])
    # Up to the end of the episode, or to the newest step
    ahead = np.minimum.reduce(
        [np.full(20, n_steps), 10 - step, 60 // n_envs - batch.indices // n_envs]
    )
    returns = [sum(0.99**k for k in range(n)) for n in ahead]
    np.testing.assert_allclose(batch.rewards[:, 0], returns, rtol=1e-6)
    assert buffer.tree.check_valid() == (True, "")


@pytest.mark.parametrize("saving", [False, True])
def test_stacked_images_stay_bytes(saving: bool) -> None:
    env = VecTransposeImage(
        VecFrameStack(
            DummyVecEnv([lambda: FakeImageEnv(screen_height=36, screen_width=36, n_channels=1)]), 4
        )
    )
    model = make_model(
        env,
        policy="CnnPolicy",
        policy_kwargs={"features_extractor_kwargs": {"features_dim": 8}},
        buffer_size=30,
        train_freq=4,
        **(SAVING_MEMORY if saving else {}),
    ).learn(60)
    buffer = buffer_of(model)
    assert buffer.observations.shape == (30, 1, 4, 36, 36)
    assert buffer.observations.dtype == np.uint8
    assert hasattr(buffer, "next_observations") is not saving
    batch = buffer.sample(16)
    assert str(batch.observations.dtype) == "torch.uint8"
    # The newest three frames of a stack are the oldest three of the next one, inside an episode
    inside = batch.dones.numpy().ravel() == 0
    assert inside.any()
    np.testing.assert_array_equal(
        batch.next_observations[inside][:, :3], batch.observations[inside][:, 1:]
    )
    assert (buffer.priorities == 0).sum() == (1 if saving else 0)


def test_training_stops_at_a_reward_threshold() -> None:
    stop = StopTrainingOnRewardThreshold(reward_threshold=5.0)
    evaluation = EvalCallback(
        make_vec_env("CartPole-v1"), callback_on_new_best=stop, n_eval_episodes=2, eval_freq=50
    )
    with warnings.catch_warnings():
        # SB3's remark that the training environment is not of the same type
        warnings.simplefilter("ignore", UserWarning)
        model = make_model("CartPole-v1").learn(500, callback=evaluation)
    assert model.num_timesteps == 50


def test_a_progress_bar_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        # tqdm's remark that its rich form is experimental
        warnings.simplefilter("ignore")
        make_model("CartPole-v1").learn(60, progress_bar=True)
    assert "60/60" in capsys.readouterr().out


def test_another_environment_can_take_over() -> None:
    model = make_model("CartPole-v1").learn(40)
    before = buffer_of(model).priorities
    model.set_env(make_vec_env("CartPole-v1"))
    model.learn(20, reset_num_timesteps=False)
    assert model.num_timesteps == 60
    assert buffer_of(model).n_transitions == 60
    assert len(before) == 40
    with pytest.raises((AssertionError, ValueError), match="number of environments"):
        model.set_env(make_vec_env("CartPole-v1", n_envs=2))
