"""TD errors and snapshots of actor-critics, which tell their errors themselves."""

from typing import Any

import numpy as np
import pytest
from stable_baselines3 import SAC

from actor_critic_helpers import ALGORITHM, differences, make
from sb3_per import ReplaySnapshotCallback, td_errors_in_buffer


@ALGORITHM
def test_errors_are_those_of_the_algorithm(algorithm: Any) -> None:
    model = make(algorithm).learn(25)
    model.policy.set_training_mode(False)
    indices = [20, 3, 20]
    expected = model.td_errors(model.replay_buffer.batch_of(np.array(indices)))
    np.testing.assert_array_equal(td_errors_in_buffer(model, indices), expected[:, 0])


@ALGORITHM
def test_snapshots_leave_training_as_it_is(algorithm: Any) -> None:
    callback = ReplaySnapshotCallback(episodes=(0, 3), freq=10, n_draws=5)
    watched, plain = make(algorithm).learn(25, callback=callback), make(algorithm).learn(25)
    assert differences(watched, plain) == []
    assert [snapshot.timesteps for snapshot in callback.snapshots] == [10, 11, 18, 20]
    assert all(bool((snapshot.td_errors > 0.0).all()) for snapshot in callback.snapshots)


def test_sb3s_own_do_not_tell() -> None:
    with pytest.raises(ValueError, match="one of this package or one derived from them, got SAC"):
        td_errors_in_buffer(make(SAC).learn(15))
