"""Files that survive: a save replaces the old file or leaves it, whatever happens meanwhile."""

import io
import itertools
import os
import pickle
import resource
import signal
import stat
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_per import PERDQN, PrioritizedReplayBuffer
from sb3_per.common.saving import replaced_file

SMALL: dict[str, Any] = {"policy_kwargs": {"net_arch": [8]}, "device": "cpu", "seed": 0}


def make_model(buffer_size: int = 20, **options: Any) -> PERDQN:
    return PERDQN("MlpPolicy", "CartPole-v1", buffer_size=buffer_size, **{**SMALL, **options})


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """As if the disk were full: the system refuses to write more into a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save(model: PERDQN, what: str, path: Any) -> None:
    (model.save if what == "zip" else model.save_replay_buffer)(path)


WHAT = pytest.mark.parametrize("what", ["zip", "pkl"])


# --- writing ---


@WHAT
def test_a_full_disk_leaves_the_old_file_and_nothing_else(what: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{what}"
    save(make_model(), what, path)
    old = path.read_bytes()
    larger = make_model(buffer_size=5000, policy_kwargs={"net_arch": [200, 200]})
    with (
        files_of_at_most(40_000),
        pytest.raises(OSError, match=rf"too large while saving {path}: nothing was changed there"),
    ):
        save(larger, what, path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]
    # With room again, it works
    save(larger, what, path)
    assert path.stat().st_size > 40_000
    assert os.listdir(tmp_path) == [path.name]


@WHAT
def test_what_ends_a_save_leaves_the_old_file(what: str, tmp_path: Path) -> None:
    class Stop:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    path = tmp_path / f"model.{what}"
    model = make_model()
    save(model, what, path)
    old = path.read_bytes()
    model.replay_buffer.hook = Stop()  # type: ignore[attr-defined]
    model.hook = Stop()  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        save(model, what, path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]


def save_again_and_again(path: Path) -> None:
    """Never returns: each time a file full of another byte."""
    for number in itertools.count():
        with replaced_file(path, "bin") as file:
            for _ in range(50):
                file.write(bytes([number % 256]) * 20_000)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_is_killed_leaves_an_old_file_or_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    n_leftovers = 0
    for number in range(12):
        process = os.fork()
        if not process:
            try:
                save_again_and_again(path)
            finally:
                os._exit(1)
        # At another moment each time, once it has begun
        while not list(tmp_path.glob(".file.bin.*.part")):
            time.sleep(0.001)
        if number:
            while not path.exists():
                time.sleep(0.001)
            time.sleep(0.002 * number)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        n_leftovers += len(list(tmp_path.glob(".*")))
        if path.exists():
            content = path.read_bytes()
            assert len(content) == 1_000_000
            assert len(set(content)) == 1
    assert n_leftovers > 0
    # The next save clears away what they left
    with replaced_file(path, "bin") as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_two_who_save_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    with replaced_file(path, "bin") as one:
        one.write(b"one")
        with replaced_file(path, "bin") as two:
            two.write(b"two")
        assert path.read_bytes() == b"two"
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_names_folders_links_and_permissions_are_as_in_sb3(tmp_path: Path) -> None:
    model, dqn = make_model(), DQN("MlpPolicy", "CartPole-v1", buffer_size=5, **SMALL)
    for agent, name in ((model, "ours"), (dqn, "sb3s")):
        folder = tmp_path / name
        with pytest.warns(UserWarning, match="does not exist. Will create it"):
            agent.save(folder / "a")
        agent.save_replay_buffer(str(folder / "b"))
        agent.save(folder / "c.v1")
        (folder / "d.zip").mkdir()
        with pytest.warns(UserWarning, match="is a folder. Will save instead to"):
            agent.save(folder / "d")
        (folder / "e.pkl").symlink_to("b.pkl")
        os.chmod(folder / "b.pkl", 0o604)
        agent.save_replay_buffer(folder / "e")
    ours, theirs = (
        {
            path.name: (path.is_symlink(), stat.S_IMODE(path.stat().st_mode), path.is_dir())
            for path in (tmp_path / name).iterdir()
        }
        for name in ("ours", "sb3s")
    )
    assert ours == theirs
    assert ours["b.pkl"] == (False, 0o604, False)


def test_opened_files_are_written_as_in_sb3() -> None:
    model = make_model().learn(15)
    content, zipped = io.BytesIO(), io.BytesIO()
    model.save_replay_buffer(content)
    model.save(zipped)
    content.seek(0)
    zipped.seek(0)
    loaded = PERDQN.load(zipped, env=model.env)
    loaded.load_replay_buffer(content)
    np.testing.assert_array_equal(loaded.replay_buffer.priorities, model.replay_buffer.priorities)
    with pytest.raises(TypeError, match="has invalid type"):
        model.save(7)  # type: ignore[arg-type]


def test_saving_takes_no_memory_for_copies_of_arrays() -> None:
    class Watched(io.BufferedIOBase):
        """Notes the largest piece that isn't the memory of an array itself."""

        copied = 0
        written = 0

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            size = memoryview(data).nbytes
            self.written += size
            if isinstance(data, bytes):
                self.copied = max(self.copied, size)
            return size

    images = spaces.Box(0, 255, (4, 50, 50), np.uint8)
    buffer = PrioritizedReplayBuffer(300, images, spaces.Discrete(3), "cpu")
    file = Watched()
    pickle.dump(buffer, file, protocol=pickle.HIGHEST_PROTOCOL)
    assert file.written > buffer.observations.nbytes * 2
    assert file.copied < buffer.observations.nbytes / 10


# --- reading ---


class NotInstalled:
    pass


def broken_buffers(whole: bytes) -> dict[str, tuple[bytes, str]]:
    zipped = io.BytesIO()
    make_model().save(zipped)
    missing = pickle.dumps(NotInstalled()).replace(b"NotInstalled", b"NotInstallex")
    return {
        "half.pkl": (whole[: len(whole) // 2], "it is truncated: its end is missing"),
        "no_end.pkl": (whole[:-1], "it is truncated: its end is missing"),
        "empty.pkl": (b"", "it is empty"),
        "model.zip": (zipped.getvalue(), "it is a zip file, such as a saved model"),
        "text.pkl": (b"step,reward\n0,1\n", "it is not a pickle, or it is damaged"),
        "damaged.pkl": (b"\x80\x05" + bytes(100) + whole[102:], "it is not a pickle, or it is dam"),
        "dict.pkl": (pickle.dumps({"a": 1}), "there is no replay buffer in it, but an object of "),
        "none.pkl": (pickle.dumps(None), "an object of the type NoneType"),
        "missing.pkl": (missing, "it contains something that is not installed here"),
    }


def test_what_is_wrong_with_a_buffers_file_is_said_in_one_line(tmp_path: Path) -> None:
    model = make_model().learn(15)
    before, leaves = model.replay_buffer, model.replay_buffer.priorities
    for name, (content, reason) in broken_buffers(pickle.dumps(before)).items():
        path = tmp_path / name
        path.write_bytes(content)
        for source in (path, io.BytesIO(content)):
            with pytest.raises(ValueError, match="can't load ") as caught:
                model.load_replay_buffer(source)
            message = str(caught.value)
            assert reason in message
            assert (name in message) is (source is path)
            assert "\n" not in message
    with pytest.raises(FileNotFoundError):
        model.load_replay_buffer(tmp_path / "nowhere.pkl")
    assert model.replay_buffer is before
    np.testing.assert_array_equal(before.priorities, leaves)


def test_what_is_wrong_with_a_models_file_is_said_in_one_line(tmp_path: Path) -> None:
    model = make_model()
    model.save(tmp_path / "model.zip")
    whole = (tmp_path / "model.zip").read_bytes()
    other, damaged = io.BytesIO(), bytearray(whole)
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("notes.txt", "nothing")
    at = whole.index(b"policy.pth") + 2000
    damaged[at] ^= 255
    parameters = {name: th.clone(value) for name, value in model.policy.state_dict().items()}
    for name, content, reason in (
        ("half.zip", whole[: len(whole) // 2], "it is truncated: the end of the zip file is"),
        ("empty.zip", b"", "it is empty"),
        ("buffer.zip", pickle.dumps(model.replay_buffer), "it is a pickle, such as a saved replay"),
        ("text.zip", b"nothing of the kind", "it is not a zip file"),
        ("other.zip", other.getvalue(), "it is a zip file without a model in it"),
        ("damaged.zip", bytes(damaged), "it is damaged, at "),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        loaders: list[Any] = [PERDQN.load, model.set_parameters]
        for load in loaders:
            with pytest.raises(ValueError, match=f"can't load .*{name}: ") as caught:
                load(path)
            assert reason in str(caught.value)
            assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError):
        PERDQN.load(tmp_path / "nowhere")
    for name, value in model.policy.state_dict().items():
        assert th.equal(value, parameters[name])


def test_parameters_that_do_not_fit_leave_the_model_as_it_was() -> None:
    model, other = make_model(), make_model(seed=1)
    before = {name: th.clone(value) for name, value in model.policy.state_dict().items()}
    parameters: Any = other.get_parameters()
    # SB3 has put these in by the time it finds that the optimizer's are missing
    del parameters["policy.optimizer"]
    with pytest.raises(ValueError, match=r"policy\.optimizer"):
        model.set_parameters(parameters)
    for name, value in model.policy.state_dict().items():
        assert th.equal(value, before[name])
    model.set_parameters(parameters, exact_match=False)
    assert not th.equal(next(iter(model.policy.parameters())), next(iter(before.values())))


def test_a_plain_buffer_of_an_older_sb3_is_loaded() -> None:
    model = make_model()
    old = ReplayBuffer(20, model.observation_space, model.action_space, "cpu")
    observation = np.zeros((1, 4), np.float32)
    old.add(observation, observation, np.zeros(1), np.ones(1), np.ones(1), [{}])
    del old.handle_timeout_termination, old.timeouts
    with pytest.warns(UserWarning, match="without priorities"):
        model.load_replay_buffer(io.BytesIO(pickle.dumps(old)))
    assert model.replay_buffer.n_transitions == 1
    assert not model.replay_buffer.handle_timeout_termination
