"""Every Python snippet of README and docs runs, and does what the page says of it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: What must hold after each snippet of a page, in the snippet's names; ``printed`` is what it wrote
PROMISES = {
    "README": [
        # trains, saves and loads
        """
assert model.num_timesteps == 2000
assert model.replay_buffer is None or model.replay_buffer.n_transitions == 0  # loaded without
assert Path("per_dqn_cartpole.zip").is_file()
assert env.action_space.contains(action)
""",
        # one batch by hand
        """
assert buffer.n_transitions == 100
assert batch.rewards.shape == td_errors.shape == batch.weights.shape == (32, 1)
assert batch.discounts is None
assert loss.item() == 0.25  # no priorities yet: weights of 1
assert buffer.beta == 0.401
drawn = np.unique(batch.indices)
np.testing.assert_allclose(buffer.priorities[drawn], (0.5 + 1e-6) ** 0.6, rtol=1e-12)
assert (np.delete(buffer.priorities, drawn) == 1.0).all()
""",
        # a quarter, none, three quarters
        """
import numpy as np

assert np.bincount(indices).tolist() == [64, 0, 192]
assert (priorities == tree[indices]).all()
""",
        # errors of the whole buffer, at two episodes
        """
assert [float(word) for word in printed.split()] == pytest.approx(
    [abs(each.td_errors).mean() for each in (first, last)], rel=1e-6
)
assert (first.episode, last.episode) == (0, 20)
assert len(last.td_errors) == last.timesteps
""",
        # an environment of another length, with a time limit to match
        """
assert env.observation_space.shape == (20,)
env.action_space.seed(0)
assert len({env.reset(seed=seed)[1]["position"] for seed in range(20)}) > 5
steps = 1
while not any(env.step(0)[2:4]):
    steps += 1
assert steps == 400
""",
        "assert env.observation_space.shape == (12,)",
    ],
    "atari": [
        """
buffer = model.replay_buffer
assert type(buffer) is PrioritizedFrameReplayBuffer
assert (buffer.buffer_size, buffer.compression) == (1_000_000, "zstd")
model.learn(8)
assert buffer.n_transitions == 8
assert buffer.sample(4).observations.shape == (4, 4, 84, 84)
""",
    ],
    "buffers": [
        """
buffer = model.replay_buffer
assert (buffer.prioritization, buffer.alpha, buffer.beta) == ("rank", 0.7, 0.5)
""",
        # steps stored beforehand, then 100 of training with an update every 4
        """
buffer = model.replay_buffer
assert buffer.n_transitions == 600
assert model._n_updates == 25
np.testing.assert_array_equal(buffer.observations[:500, 0], observations[:-1].astype(np.float32))
np.testing.assert_array_equal(buffer.timeouts[:500, 0], dones)
""",
        # such transitions are left as they are
        """
buffer = model.replay_buffer
for reward in (1.0, float("nan")):
    observation = np.zeros((1, 4), dtype=np.float32)
    buffer.add(observation, observation, np.array([0]), np.array([reward]), np.array([False]), [{}])
buffer.update_priorities(np.array([0, 1]), th.tensor([[3.0], [float("nan")]]))
np.testing.assert_allclose(buffer.priorities, [(3.0 + 1e-6) ** 0.6, 1.0], rtol=1e-12)
""",
        # batches are augmented, stored transitions are not
        """
model.learn(20)
batch = model.replay_buffer.sample(64)
stored = th.as_tensor(model.replay_buffer.observations[batch.indices, 0])
noise = batch.observations - stored
assert 0.005 < noise.std() < 0.02
""",
    ],
    "callbacks": [
        # a row every 200 steps, with the buffer's values, in each format
        """
import pandas as pd

rows = pd.read_csv("logs/progress.csv")
rows = rows[rows["per/priority_quantile_50"].notna()]
assert rows["time/total_timesteps"].tolist() == [200, 400, 600]
assert rows["rollout/ep_rew_mean"].notna().all()
assert [path for path in Path("logs").iterdir() if "tfevents" in path.name]
""",
        # each draw counted, with the age of what was drawn
        """
words = [line.rsplit(": ", 1) for line in printed.splitlines()]
assert words == [
    ["draws of the most replayed transition", str(draws.counts.max())],
    ["mean age", str(draws.sum_of_ages / draws.n_draws)],
]
assert draws.counts.max() > 32 * 200 / 300
assert 0.0 < draws.sum_of_ages / draws.n_draws < 300.0
""",
        # one at the start, then by steps and by episodes
        """
kept = snapshots.snapshots
errors = [np.abs(each.td_errors).mean() for each in kept]
assert printed.splitlines() == [
    f"{each.reason} {each.episode}, {each.timesteps} steps: {error:.3f}"
    for each, error in zip(kept, errors, strict=True)
]
assert [each.episode for each in kept if each.reason == "episode"] == [0, 10, 20]
assert [each.timesteps for each in kept if each.reason == "freq"] == [200, 400, 600]
""",
        # the transition with the largest error
        """
assert len(errors) == 200
assert abs(td_errors_in_buffer(model, [worst])[0]) == pytest.approx(np.abs(errors).max(), rel=1e-5)
""",
    ],
    "compare": [
        # a mean for each agent
        """
means = episodes.groupby("agent")["reward"].mean()
assert len(means) == 2
assert ((0.0 <= means) & (means <= 1.0)).all()
for agent in means.index:
    assert agent in printed
""",
    ],
    "how_per_works": ["assert (index, priority) == (2, 3.0)"],
    "own_algorithm": [
        # the target of Munchausen DQN (Vieillard et al. 2020, equation 3), computed again
        """
import numpy as np

assert model.replay_buffer.n_steps == 3
assert model._n_updates == (500 - 100) / 4
batch = model.replay_buffer.sample(64)
context = model.priority_context(batch)
with th.no_grad():
    q, following = (
        model.q_net_target(each).double().numpy()
        for each in (batch.observations, batch.next_observations)
    )
log_policy, next_log_policy = (
    each / 0.03 - np.log(np.exp((each - each.max(1, keepdims=True)) / 0.03).sum(1, keepdims=True))
    - each.max(1, keepdims=True) / 0.03
    for each in (q, following)
)
actions = batch.actions.numpy()
bonus = 0.9 * np.maximum(0.03 * np.take_along_axis(log_policy, actions, axis=1), -1.0)
soft = np.exp(next_log_policy) * (following - 0.03 * next_log_policy)
value = soft.sum(axis=1, keepdims=True) * (1.0 - batch.dones.numpy())
expected = batch.rewards.numpy() + bonus + batch.discounts.numpy() * value
np.testing.assert_allclose(context.targets.numpy(), expected, rtol=1e-3, atol=1e-3)
""",
    ],
    "per_dqn": [
        """
assert model.num_timesteps == 1000
assert model.double_q
assert over
""",
    ],
    "per_qrdqn": [
        # the mean over all pairs of a quantile and a target
        """
context = model.priority_context(model.replay_buffer.sample(4))
expected = [
    sum(abs(target - quantile) for target in targets for quantile in quantiles) / 100
    for quantiles, targets in zip(context.estimates.tolist(), context.targets.tolist())
]
assert all_pairs(context).tolist() == pytest.approx(expected, rel=1e-4)
assert len(set(model.replay_buffer.priorities)) > 10
""",
        """
assert model.num_timesteps == 1000
assert model.n_quantiles == 50
assert over
""",
    ],
    **{
        page: [f"assert (type(model), model.num_timesteps, over) == ({name}, 400, True)"]
        for page, name in (("per_sac", "PERSAC"), ("per_td3", "PERTD3"), ("per_tqc", "PERTQC"))
    },
    "priorities": [
        """
for model in (td3, sac, tqc):
    assert (model.priority, model.alpha, model.beta, model.beta_final) == ("clipped", 0.4, 0.0, 0.0)
assert td3.loss == sac.loss == "huber"
""",
        # one number for each of the eight transitions
        """
expected = context.td_errors + 0.1 * context.batch.rewards.abs()
assert printed.strip() == str(expected.squeeze(1))
assert expected.shape == (8, 1)
""",
    ],
}

#: What the extra `tests` doesn't bring
NEEDS = {"atari": ("ale_py", "cv2", "zstandard")}

# One process a page: most of the time of each goes into its imports
RUN = """
import contextlib, io, json, os, sys
from pathlib import Path

import pytest

for number, (snippet, promise) in enumerate(json.load(sys.stdin)):
    os.mkdir(str(number))
    os.chdir(str(number))
    names, out = {"__name__": "__main__"}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(snippet, f"<snippet {number}>", "exec"), names)
    names.update(Path=Path, pytest=pytest, printed=out.getvalue())
    exec(compile(promise, f"<what snippet {number} promises>", "exec"), names)
    os.chdir("..")
"""


def snippets_of(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    # Not one that is indented, or that never ends
    assert text.count("```python") == len(found)
    return found


def test_every_snippet_has_its_promise() -> None:
    numbers = {page.stem: len(snippets_of(page)) for page in PAGES}
    promised = {name: len(promises) for name, promises in PROMISES.items()}
    assert {name: number for name, number in numbers.items() if number} == promised


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem in PROMISES], ids=lambda p: str(p.stem)
)
def test_snippets_do_what_the_page_says(page: Path, run_python: Callable[..., str]) -> None:
    for package in NEEDS.get(page.stem, ()):
        pytest.importorskip(package)
    # Each by itself: in a folder of its own, with no name of the others
    pairs = list(zip(snippets_of(page), PROMISES[page.stem], strict=True))
    run_python("-c", RUN, text=json.dumps(pairs))
