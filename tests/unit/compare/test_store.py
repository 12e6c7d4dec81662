import copy
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
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
    "run": {"n_evals": 2, "eval_episodes": 1, "snapshot_episodes": (0, 50)},
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
    assert written["run"] == {"n_evals": 2, "eval_episodes": 1, "snapshot_episodes": [0, 50]}
    # Tuples and lists are the same
    assert store.agree_on(SETTINGS) == written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": {**SETTINGS["run"], "n_evals": 3}}, "run: n_evals 2 there, 3 now"),
        (
            {"run": {"n_evals": 2, "eval_episodes": 1}},
            r"snapshot_episodes \[0, 50\] there, 'not given' now",
        ),
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
    for folder, message in (
        (tmp_path, r"has other files than those of a comparison, as thesis\.tex"),
        (tmp_path / "thesis.tex", "is a file"),
    ):
        with pytest.raises(SettingsError, match=message), Store(folder).lock():
            pass
        with pytest.raises(SettingsError, match=message):
            Store(folder).agree_on(SETTINGS)
    assert files(tmp_path) == {"thesis.tex"}


WRITTEN = {"format": 1, **SETTINGS}


def without(*keys: str) -> dict[str, Any]:
    """The settings without one of their parts."""
    changed = copy.deepcopy(WRITTEN)
    part = changed
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    return changed


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{", "can't read"),
        ("", "can't read"),
        ("[" * 100_000, "can't read"),
        ([], "has the format None, this version reads 1"),
        ("null", "has the format None"),
        ({"format": 9}, "has the format 9, this version reads 1"),
        (without("environments"), "it has no 'environments'"),
        (without("agents"), "it has no 'agents'"),
        (without("versions"), "it has no 'versions'"),
        (without("run", "eval_episodes"), "run has no 'eval_episodes'"),
        (without("analysis", "window"), "analysis has no 'window'"),
        (without("analysis", "thresholds"), "analysis has no 'thresholds'"),
        ({**WRITTEN, "seeds": 3}, "seeds is 3"),
        ({**WRITTEN, "seeds": [0, "1"]}, r'seeds\[1\] is "1"'),
        ({**WRITTEN, "seeds": [True]}, r"seeds\[0\] is true"),
        ({**WRITTEN, "environments": ["A-v0"]}, r'environments is \["A-v0"\]'),
        ({**WRITTEN, "environments": {"A-v0": 1}}, "environments A-v0 is 1"),
        ({**WRITTEN, "agents": [None]}, r"agents\[0\] is null"),
        ({**WRITTEN, "agents": ["ppo"]}, "there is no 'ppo'"),
        ({**WRITTEN, "agents": ["per(alpha=inf)"]}, "can't read 'per"),
    ],
)
def test_settings_that_can_not_be_read(tmp_path: Path, written: Any, message: str) -> None:
    text = written if isinstance(written, str) else json.dumps(written)
    (tmp_path / "settings.json").write_text(text)
    for read in (Store(tmp_path).settings, lambda: Store(tmp_path).agree_on(SETTINGS)):
        with pytest.raises(SettingsError, match=message) as error:
            read()
        assert str(tmp_path / "settings.json") in str(error.value)
        assert len(str(error.value).splitlines()) == 1
    assert (tmp_path / "settings.json").read_text() == text


# Folders that can't be written


@pytest.mark.parametrize("path", ["a-file/below", "x" * 300])
def test_folder_that_can_not_be_made(tmp_path: Path, path: str) -> None:
    (tmp_path / "a-file").write_text("")
    with (
        pytest.raises(SettingsError, match=r"can't write .*(a-file|xxx)"),
        Store(tmp_path / path).lock(),
    ):
        pass


def test_full_disk_is_told_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, new = Store(tmp_path / "old"), Store(tmp_path / "new")
    store.agree_on(SETTINGS)

    def fail(self: Path, *_: Any, **__: Any) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    writes: list[Callable[[], object]] = [
        lambda: new.agree_on(SETTINGS),
        lambda: store.agree_on(SETTINGS),
        lambda: store.write(run(), tables(run())),
        lambda: store.write_failure(run(), "why"),
        lambda: store.write_text("summary.csv", "a,b"),
    ]
    for write in writes:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", fail)
            with pytest.raises(SettingsError, match=r"can't write .*: No space left on device"):
                write()
    assert not [name for name in files(tmp_path) if "unfinished" in name]
    # The next time goes on, as if nothing had happened
    for there in (store, new):
        with there.lock():
            there.agree_on(SETTINGS)
            there.write(run(), tables(run()))
        assert there.has(run())


def test_merged_tables_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.agree_on(SETTINGS)
    store.write(run(), tables(run()))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", fail)
    with pytest.raises(SettingsError, match=r"can't write .*no space left"):
        store.merge_tables()


# Two commands, and one that was killed


def test_folder_is_for_one_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path / "x")
    with store.lock():
        with (
            pytest.raises(SettingsError, match=r"another command is at work in .*x:"),
            Store(tmp_path / "x").lock(),
        ):
            pass
        store.agree_on(SETTINGS)
    with Store(tmp_path / "x").lock():
        pass


HOLD = """
import sys
from pathlib import Path
from sb3_per.compare.store import Store

with Store(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_killed_command_leaves_no_lock(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == b"locked"
            with (
                pytest.raises(SettingsError, match="another command is at work"),
                Store(tmp_path).lock(),
            ):
                pass
        finally:
            process.kill()
    with Store(tmp_path).lock():
        assert Store(tmp_path).agree_on(SETTINGS)["seeds"] == [0, 1]


def test_what_a_killed_command_left_behind_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    # At the first of all writes
    (tmp_path / ".lock").touch()
    (tmp_path / ".settings.json.unfinished").write_text("{")
    with store.lock():
        store.agree_on(SETTINGS)
    store.write(run(), tables(run()))
    before = files(tmp_path) - {".lock"}
    # And at later ones
    (tmp_path / ".episodes.parquet.unfinished").write_text("PAR1")
    unfinished = store.run_folder(run()).parent / ".unfinished-abc"
    shutil.copytree(store.run_folder(run()), unfinished)
    with store.lock():
        assert files(tmp_path) - {".lock"} == before
    assert store.has(run())


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
    assert set(about.pop("checksums")) == {f"{name}.parquet" for name in TABLES}
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


def damage_nothing(folder: Path) -> None:
    pass


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def replace(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, 20)


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def copy_from_other_seed(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("seed-0"), folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_nothing, None),
        (remove("run.json"), "run.json is missing"),
        (remove("snapshots.parquet"), "snapshots.parquet is missing"),
        (cut("episodes.parquet"), "episodes.parquet is damaged"),
        (replace("runs.parquet", b""), "runs.parquet is damaged"),
        (replace("run.json", b""), "can't read .*run.json"),
        (replace("run.json", b"[1]"), "can't read .*run.json"),
        (replace("run.json", b"{}"), "can't read .*run.json"),
        (replace("run.json", b"\xff\xfe"), "can't read .*run.json"),
        (replace_by_a_file, "can't read .*run.json"),
        (copy_from_other_seed, "run.json is of another run"),
    ],
)
def test_damaged_runs_are_named_and_removed(
    tmp_path: Path,
    damage: Callable[[Path], object],
    message: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = Store(tmp_path)
    store.agree_on(SETTINGS)
    for seed in (0, 1):
        store.write(run(seed), tables(run(seed)))
    damage(store.run_folder(run(1)))
    store.remove_damaged()
    assert store.has(run(0))
    assert store.has(run(1)) is (message is None)
    told = capsys.readouterr().err
    if message is None:
        assert told == ""
    else:
        assert re.fullmatch(f".*{message}.*: the run is made again when it is asked for\n", told)
        assert str(store.run_folder(run(1))) in told
    store.merge_tables()
    assert store.read_tables()["runs"]["seed"].tolist() == ([0, 1] if message is None else [0])
    if message is not None:
        store.write(run(1), tables(run(1)))
        assert store.has(run(1))


def test_runs_that_the_settings_do_not_have_are_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.agree_on(SETTINGS)
    for seed in (0, 7):
        store.write(run(seed), tables(run(seed)))
    store.merge_tables()
    assert store.read_tables()["runs"]["seed"].tolist() == [0]
    store.agree_on(changed(seeds=[7]))
    store.merge_tables()
    assert store.read_tables()["runs"]["seed"].tolist() == [0, 7]


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


@pytest.mark.parametrize("content", [b"", b"PAR1", b"text"])
def test_damaged_tables_are_named(tmp_path: Path, content: bytes) -> None:
    store = Store(tmp_path)
    store.agree_on(SETTINGS)
    store.write(run(), tables(run()))
    store.merge_tables()
    (tmp_path / "episodes.parquet").write_bytes(content)
    with pytest.raises(SettingsError, match=r"can't read .*episodes\.parquet"):
        store.read_tables()
    store.merge_tables()
    assert len(store.read_tables()["episodes"]) == 1


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
