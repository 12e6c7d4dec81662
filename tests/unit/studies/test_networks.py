"""Studies in which networks learn: their runs and measures."""

import numpy as np
import pytest

from sb3_per.compare.hyperparams import KEYS
from sb3_per.compare.training import train
from studies.command import STUDIES, StudySettings, plan
from studies.networks import TASKS, NetworkStudy, corridor

NAMES = [name for name, study in STUDIES.items() if isinstance(study, NetworkStudy)]


@pytest.mark.parametrize("name", NAMES)
def test_every_study_can_be_made(name: str) -> None:
    """All agents take the hyperparameters of all tasks, which are those of rl-zoo's files."""
    study = STUDIES[name]
    runs, agents, base = plan(StudySettings(name, n_seeds=2, first_seed=5))
    assert len(runs) == len({run.key for run in runs}) == 2 * len(study.tasks) * len(study.agents)
    assert (len(agents), base) == (len(study.agents), study.base)
    assert {run.key[2] for run in runs} == {5, 6}
    for run in runs:
        task, agent, seed = run.key
        made = run.details
        assert (made.agent, made.seed, made.env_id) == (agent, seed, TASKS[task].env_id)
        assert made.hyperparams.keys() <= KEYS.keys()
        assert run.cost == made.hyperparams["n_timesteps"]


def test_the_map_varies_what_its_names_say() -> None:
    runs, _, _ = plan(StudySettings("map", n_seeds=1))
    for run in runs:
        _, n, _, freq = run.key[0].split("-")
        given = run.details.hyperparams
        assert given["env_kwargs"] == {"n": int(n)}
        assert given["n_envs"] * given["train_freq"] == int(freq) * given["gradient_steps"]


def test_what_is_kept_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns are means over the episodes of each evaluation."""
    task = corridor(3, n_timesteps=80, n_envs=2, learning_starts=20)
    monkeypatch.setitem(TASKS, "tiny", task._replace(n_evals=4, eval_episodes=3))
    study = NetworkStudy(["tiny"], ["per"], "per")
    run = study.run_of("tiny", "per", 1)
    row = study.make(run)
    assert tuple(row) == study.measures
    assert row["steps"] == 80
    tables = train(run.details)
    assert row["episodes"] == len(tables["episodes"])
    evaluations = tables["evaluations"]["return"].to_numpy().reshape(5, 3)
    kept = [float(text) for text in row["returns"].split()]
    np.testing.assert_allclose(kept, evaluations.mean(axis=1), rtol=1e-4)
