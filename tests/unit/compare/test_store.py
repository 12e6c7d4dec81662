import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sb3_per.compare.settings import SettingsError
from sb3_per.compare.store import Store, file_name, package_versions
from sb3_per.compare.training import TABLES, Run

SETTINGS: dict[str, Any] = {
    "environments": {"A-v0": {"n_timesteps": 10, "batch_size": 32}},
    "agents": ["uniform"],
    "seeds": [0, 1],
    "run": {"n_evals": 2, "snapshot_episodes": (0, 50)},
    "analysis": {"window": 20, "thresholds": {"A-v0": 1.0}},
    "versions": {"torch": "1"},
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**SETTINGS, **changes}


def run(seed: int = 0, agent: str = "uniform", env_id: str = "A-v0") -> Run:
    return Run(env_id, agent, seed, {"n_timesteps": 10})


def tables(run: Run, value: float = 1.0) -> dict[str, pd.DataFrame]:
    env_id, agent, seed = run.key
    row = {"env": [env_id], "agent": [agent], "seed": [seed], "value": [value]}
    return {name: pd.DataFrame(row) for name in TABLES}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_settings_are_written_once_and_read_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder")
    written = store.agree_on(SETTINGS)
    assert written == store.settings()
    assert written["format"] == 1
    assert written["run"] == {"n_evals": 2, "snapshot_episodes": [0, 50]}
    # Tuples and lists are the same
    assert store.agree_on(SETTINGS) == written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {"n_evals": 3, "snapshot_episodes": [0, 50]}}, "run: n_evals 2 there, 3 now"),
        ({"run": {"n_evals": 2}}, r"snapshot_episodes \[0, 50\] there, 'not given' now"),
        (
            {"environments": {"A-v0": {"n_timesteps": 10, "batch_size": 64, "tau": 1.0}}},
            "A-v0: batch_size 32 there, 64 now; A-v0: tau 'not given' there, 1.0 now",
        ),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    store = Store(tmp_path)
    before = store.agree_on(SETTINGS)
    with pytest.raises(SettingsError, match=message):
        store.agree_on(changed(seeds=[5], **changes))
    assert store.settings() == before


def test_more_environments_agents_and_seeds_come_on_top(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.agree_on(SETTINGS)
    merged = store.agree_on(
        changed(
            environments={"B-v0": {"n_timesteps": 5}},
            agents=["per", "uniform"],
            seeds=[3, 1],
            analysis={"window": 7, "thresholds": {"B-v0": None}},
            versions={"torch": "2"},
        )
    )
    assert list(merged["environments"]) == ["A-v0", "B-v0"]
    # The first stays the one that the others are compared with
    assert merged["agents"] == ["uniform", "per"]
    assert merged["seeds"] == [0, 1, 3]
    assert merged["analysis"] == {"window": 7, "thresholds": {"A-v0": 1.0, "B-v0": None}}
    assert merged["versions"] == {"torch": "2"}


def test_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(SettingsError, match="has other files"):
        Store(tmp_path).agree_on(SETTINGS)
    assert files(tmp_path) == {"thesis.tex"}
    with pytest.raises(SettingsError, match="is a file"):
        Store(tmp_path / "thesis.tex").agree_on(SETTINGS)


@pytest.mark.parametrize(("text", "message"), [("{", "can't read"), ('{"format": 9}', "format 9")])
def test_settings_that_can_not_be_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(SettingsError, match=message):
        Store(tmp_path).settings()


def test_runs_are_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path)
    broken = tables(run())
    # An object that Parquet has no column for, in the last table
    broken[TABLES[-1]] = pd.DataFrame({"value": [object()]})
    with pytest.raises(Exception, match="object"):
        store.write(run(), broken)
    assert not store.has(run())
    assert files(tmp_path) == set()

    store.write(run(), tables(run()))
    assert store.has(run())
    assert not store.has(run(seed=1))
    assert not store.has(run(agent="per"))
    about = json.loads((store.run_folder(run()) / "run.json").read_text())
    assert about == {
        "env": "A-v0",
        "agent": "uniform",
        "seed": 0,
        "versions": package_versions(),
    }


def test_what_a_kill_left_behind_is_no_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.agree_on(SETTINGS)
    store.write(run(), tables(run()))
    unfinished = store.run_folder(run(seed=1)).parent / ".unfinished-abc"
    shutil.copytree(store.run_folder(run()), unfinished)
    assert not store.has(run(seed=1))
    store.merge_tables()
    assert len(store.read_tables()["runs"]) == 1


def test_tables_are_in_the_order_of_the_settings_whatever_came_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.agree_on(
        changed(environments={"B-v0": {}, "A-v0": {}}, agents=["uniform", "per"], seeds=[0, 10, 2])
    )
    keys = [
        (env_id, agent, seed)
        for env_id in ("B-v0", "A-v0")
        for agent in ("uniform", "per")
        for seed in (0, 2, 10)
    ]
    for env_id, agent, seed in reversed(keys):
        store.write(run(seed, agent, env_id), tables(run(seed, agent, env_id), value=seed))
    store.merge_tables()
    for table in store.read_tables().values():
        found = table[["env", "agent", "seed"]].itertuples(index=False, name=None)
        assert [tuple(key) for key in found] == keys
        assert (table["value"] == table["seed"]).all()


def test_no_tables_before_a_run_is_finished(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.agree_on(SETTINGS)
    store.merge_tables()
    with pytest.raises(SettingsError, match="no run of the comparison is finished"):
        store.read_tables()


def test_failures_are_kept_until_the_run_succeeds(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.write_failure(run(), "Traceback: why")
    assert path.read_text() == "Traceback: why"
    assert store.failures() == ["A-v0--uniform--seed-0.txt"]
    store.write(run(), tables(run()))
    assert store.failures() == []


def test_names_become_file_names_that_differ() -> None:
    names = [
        "per(alpha=0.5)",
        "per(alpha=0.5, loss='mse')",
        "per(loss='mse')",
        "per",
        "ns/X-v0",
        "ns-X-v0",
        "ns+X-v0",
        "ns.X-v0",
        "ns:X-v0",
        "module:ns/X-v0",
        "module:ns-X-v0",
        "Ünd-v0",
        "Änd-v0",
        *(f"per({'x' * 300}={n})" for n in (1, 2)),
    ]
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._=+-]{1,110}", name) for name in files)
    assert (file_name("per"), file_name("CartPole-v1")) == ("per", "CartPole-v1")
    assert file_name("sb3_per/GridWorld-v0") == "sb3_per+GridWorld-v0"


@pytest.mark.parametrize("name", ["../../x", "..", ".", "/etc/x", "a\\..\\b", "C:x"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = Store(tmp_path).run_folder(run(env_id=name))
    assert folder.parent.parent.parent == tmp_path / "runs"
    assert folder.resolve().is_relative_to(tmp_path / "runs")
    assert "\\" not in folder.parts[-3]


def test_versions_of_what_the_numbers_depend_on() -> None:
    import numpy as np
    import torch as th

    versions = package_versions()
    assert versions["numpy"] == np.__version__
    assert versions["torch"].split("+")[0] == th.__version__.split("+")[0]
    assert {"python", "sb3-per", "stable-baselines3", "gymnasium"} <= set(versions)
