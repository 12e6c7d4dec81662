"""Files that survive: written beside the old one, which they replace when they are complete."""

import contextlib
import glob
import io
import os
import pathlib
import pickle
import secrets
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

from stable_baselines3.common.save_util import open_path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["check_model_file", "load_pickle", "replaced_file"]

#: Ends of the names of files that are being written
PART = ".part"


class _NotingFile(io.FileIO):
    """A file that remembers why it could not be written; others may hide it in errors of theirs."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


@contextlib.contextmanager
def replaced_file(
    path: str | pathlib.Path, suffix: str, verbose: int = 0
) -> Iterator[io.BufferedWriter]:
    """
    Open a file for writing that takes the place of the old one when the block ends. Until then, and
    if the block fails or the process is killed, the old file is there, whole.

    Names are chosen, and folders made, as in SB3.

    :param path: where to save
    :param suffix: of a path that has none
    :param verbose: from 2 on, warn where a file is replaced
    :return: the opened file
    :raises OSError: if it can't be written, for lack of space, say; what was written is removed
    """
    # Of a link, the file that it points to
    target = pathlib.Path(os.path.realpath(_target_of(pathlib.Path(path), suffix)))
    if target.exists() and not target.is_file():
        # A device or a pipe can't be replaced
        with target.open("wb") as file:
            yield file
        return
    if target.exists():
        if verbose >= 2:
            warnings.warn(f"Path '{target}' exists, will overwrite it.", stacklevel=3)
        if not os.access(target, os.W_OK):
            raise PermissionError(f"{target} is write-protected")
    _remove_leftovers(target)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART}")
    raw = _NotingFile(part, "x")
    if fcntl is not None:
        # Says to `_remove_leftovers` that someone is writing; not every file system can
        with contextlib.suppress(OSError):
            fcntl.flock(raw, fcntl.LOCK_EX)
    file = io.BufferedWriter(raw)
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        if target.exists():
            shutil.copymode(target, part)
        os.replace(part, target)
        _sync_folder(target.parent)
    except BaseException as error:
        # What is left in memory can't be written, either
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            part.unlink()
        reason = raw.error or (error if isinstance(error, OSError) else None)
        if reason is None:
            raise
        raise OSError(
            reason.errno,
            f"{reason.strerror} while saving {target}: nothing was changed there. There must be "
            "room for the new file beside the old one.",
        ) from error


def _target_of(path: pathlib.Path, suffix: str) -> pathlib.Path:
    """
    :param path: where to save
    :param suffix: of a path that has none
    :return: the file that SB3 would write
    """
    if path.suffix == "":
        path = pathlib.Path(f"{path}.{suffix}")
    if path.is_dir():
        warnings.warn(f"Path '{path}' is a folder. Will save instead to {path}_2", stacklevel=4)
        path = pathlib.Path(f"{path}_2")
    if not path.parent.exists():
        warnings.warn(f"Path '{path.parent}' does not exist. Will create it.", stacklevel=4)
        path.parent.mkdir(exist_ok=True, parents=True)
    return path


def _remove_leftovers(target: pathlib.Path) -> None:
    """
    Remove what killed processes left.

    :param target: the file to be written; they wrote beside it
    """
    for part in target.parent.glob(f".{glob.escape(target.name)}.*{PART}"):
        # On Windows, a file that someone writes can't be removed; elsewhere it can't be locked
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if fcntl is not None:
                file = stack.enter_context(part.open("rb"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def _sync_folder(folder: pathlib.Path) -> None:
    """
    :param folder: whose entries are to be on the disk, too; where it can't be opened, as on
        Windows, that is up to the system
    """
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def load_pickle(path: str | pathlib.Path | io.BufferedIOBase, verbose: int = 0) -> Any:
    """
    :param path: path of a file, with or without the suffix ``.pkl``, or the opened file
    :param verbose: as in SB3
    :return: the object in it
    :raises ValueError: if that can't be loaded, with the name of the file and the reason
    """
    with _opened(path, verbose, "pkl") as file:
        try:
            return pickle.load(file)
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"can't load {_name_of(path, file)}: {_fault_of(file, error)}"
            ) from error


def check_model_file(path: str | pathlib.Path | io.BufferedIOBase) -> None:
    """
    :param path: path of a model's zip file, with or without the suffix, or the opened file, which
        is left where it was
    :raises ValueError: if no model can be in it, with the name of the file and the reason
    """
    with _opened(path, 0, "zip") as file:
        position = file.tell()
        try:
            with zipfile.ZipFile(file) as archive:
                broken = archive.testzip()
                names = archive.namelist()
            fault = f"it is damaged, at {broken}" if broken else None
            if not broken and not {"data", "policy.pth"} <= set(names):
                fault = "it is a zip file without a model in it"
        except zipfile.BadZipFile as error:
            fault = _fault_of(file, error)
        file.seek(position)
        if fault:
            raise ValueError(f"can't load {_name_of(path, file)}: {fault}")


@contextlib.contextmanager
def _opened(
    path: str | pathlib.Path | io.BufferedIOBase, verbose: int, suffix: str
) -> Iterator[io.BufferedReader]:
    """
    :param path: path of a file, with or without the suffix, or the opened file
    :param verbose: as in SB3
    :param suffix: that it may have
    :return: the opened file; afterwards it is closed, unless it was open before
    """
    file: Any = open_path(path, "r", verbose=verbose, suffix=suffix)
    try:
        yield file
    finally:
        if file is not path:
            file.close()


def _name_of(path: Any, file: Any) -> str:
    """
    :param path: as the user gave it
    :param file: what was opened
    :return: of the file, for error messages
    """
    return str(getattr(file, "name", path if isinstance(path, str | pathlib.Path) else "the file"))


def _fault_of(file: Any, error: Exception) -> str:
    """
    :param file: that could not be loaded
    :param error: that loading it ended with
    :return: what is wrong with it, in words
    """
    start = b""
    if file.seekable():
        file.seek(0)
        start = file.read(4)
        if not start:
            return "it is empty"
    is_zip = isinstance(error, zipfile.BadZipFile)
    if start.startswith(b"PK\x03\x04"):
        if is_zip:
            return "it is truncated: the end of the zip file is missing"
        return "it is a zip file, such as a saved model, not a replay buffer (a pickle)"
    if is_zip:
        if start.startswith(b"\x80"):
            return "it is a pickle, such as a saved replay buffer, not a model (a zip file)"
        return "it is not a zip file"
    if isinstance(error, EOFError) or "truncated" in str(error):
        return "it is truncated: its end is missing"
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, ImportError | AttributeError):
        return f"it contains something that is not installed here ({reason})"
    return f"it is not a pickle, or it is damaged ({reason})"
