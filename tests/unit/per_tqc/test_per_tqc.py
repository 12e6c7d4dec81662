"""PERTQC's own: truncated targets, and how it is missed without sb3-contrib."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch as th

from actor_critic_helpers import make
from sb3_per import PERTQC


def test_the_targets_are_the_smallest_quantiles_of_all_critics() -> None:
    policy_kwargs = {"net_arch": [8], "n_quantiles": 5, "n_critics": 2}
    model = make(
        PERTQC, policy_kwargs=policy_kwargs, top_quantiles_to_drop_per_net=3, ent_coef=0.5
    ).learn(20)
    batch = model.replay_buffer.sample(7)
    with th.no_grad(), th.random.fork_rng([]):
        actions, log_prob = model.actor.action_log_prob(batch.next_observations)
        quantiles = model.critic_target(batch.next_observations, actions)
    kept = quantiles.flatten(1).sort(dim=1).values[:, :4] - 0.5 * log_prob[:, None]
    expected = batch.rewards + (1 - batch.dones) * 0.99 * kept
    th.testing.assert_close(model.priority_context(batch).targets[:, 0], expected)


def test_there_is_no_choice_of_a_loss() -> None:
    with pytest.raises(TypeError, match="loss"):
        make(PERTQC, loss="mse")


def test_without_sb3_contrib_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["sb3_contrib"] = None
import sb3_per
try:
    sb3_per.PERTQC
except ImportError as error:
    print(error)
"""
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert printed == (
        'PERTQC builds on sb3-contrib, which is not installed: pip install "sb3-per[contrib]"\n'
    )
