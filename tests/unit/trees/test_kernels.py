"""What holds for every compiled function: interrupts, numba's cache, plain Python in its place."""

import ast
import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numba
import numpy as np
import pytest

import sb3_per
from sb3_per.buffers.kernels import gather, look_ahead, priorities_of, weights_of
from sb3_per.trees import RankTree, SumTree, sum_kernels
from tree_helpers import assert_valid, random_tree

# --- rules that the source keeps ---


def compiled_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """All functions under a decorator that compiles: this package's, or one of numba's own."""
    for path in Path(sb3_per.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for decorator in map(ast.unparse, node.decorator_list):
                    if "compile" in decorator or "jit" in decorator:
                        yield decorator, node


def test_kernels_are_compiled_in_one_way_and_return_no_arrays() -> None:
    """Those that only other kernels call, with a leading underscore, may return arrays."""
    functions = list(compiled_functions())
    assert {"write", "draw", "gather_into"} <= {node.name for _, node in functions}
    for decorator, node in functions:
        assert "jit" not in decorator
        assert node.returns is not None
        assert node.name.startswith("_") or "Array" not in ast.unparse(node.returns)


# --- interrupts ---


@numba.njit
def array_and_number(n: int) -> Any:
    """A kernel as it must not be: to make an object of an array, numba runs Python code."""
    return np.empty(n), 1.0


def operations() -> dict[str, Callable[[], Any]]:
    """Everything public that runs compiled code."""
    calls: dict[str, Callable[[], Any]] = {}
    indices, priorities = np.arange(0, 70, 3), np.random.default_rng(0).random(24)
    for kind in (SumTree, RankTree):
        tree: Any = random_tree(kind)
        calls |= {
            f"{kind.__name__}.{name}": call
            for name, call in {
                "update": lambda tree=tree: tree.update(indices, priorities),
                "update of many": lambda tree=tree: tree.update(np.tile(indices, 50), 0.5),
                "write": lambda tree=tree: tree.write(indices, priorities),
                "fill": lambda tree=tree: tree.fill(3, 9, 0.5),
                "sample": lambda tree=tree: tree.sample(32),
                "get_leaf": lambda tree=tree: tree.get_leaf([0.5, 0.25]),
                "masses": lambda tree=tree: tree.masses(indices),
                "all masses": lambda tree=tree: tree.masses(slice(None)),
                "total": lambda tree=tree: tree.total,
                "min_mass": lambda tree=tree: tree.min_mass,
                "check_valid": lambda tree=tree: tree.check_valid(),
            }.items()
        }
    floats = priorities.astype(np.float32)
    factors = np.ones(4, np.float32)
    places = np.arange(10)
    return calls | {
        "RankTree.ranks": lambda: tree.ranks(indices),
        "gather": lambda: gather(places, floats, floats, floats),
        "look_ahead": lambda: look_ahead(places, 1, 5, floats, floats, floats, factors),
        "weights_of": lambda: weights_of(priorities, 0.0, 0.4),
        "priorities_of": lambda: priorities_of(floats, np.arange(24), 24, 1e-6, 0.6, 1e300),
    }


def numba_functions_called_by(call: Callable[[], Any]) -> set[str]:
    """Python functions of numba's that run during a call: there, handlers of signals can run."""
    call()  # compiles
    names = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "numba" in Path(frame.f_code.co_filename).parts:
            names.add(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names


@pytest.mark.parametrize("name", operations())
def test_no_python_code_runs_inside_a_kernel(name: str) -> None:
    """Else a handler that raises does so where numba does not look for an exception."""
    assert numba_functions_called_by(operations()[name]) == set()


def test_python_code_inside_a_kernel_is_found() -> None:
    assert numba_functions_called_by(lambda: array_and_number(3)) != set()


def interrupted(call: Callable[[], Any], times: int) -> list[type[BaseException]]:
    """
    Call again and again until an interrupt comes, as often as told.

    :return: what came out each time
    """
    call()  # compiles
    outcomes: list[type[BaseException]] = []
    is_wanted, is_over = threading.Event(), threading.Event()

    def interrupt_when_wanted() -> None:
        while is_wanted.wait() and not is_over.is_set():
            is_wanted.clear()
            interrupt_main()

    thread = threading.Thread(target=interrupt_when_wanted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        while len(outcomes) < times:
            try:
                is_wanted.set()
                while True:
                    call()
            except BaseException as error:
                outcomes.append(type(error))
    finally:
        is_over.set()
        is_wanted.set()
        thread.join()
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGINT, handler)
    return outcomes


@pytest.mark.parametrize("kind", [SumTree, RankTree])
def test_an_interrupt_comes_out_as_keyboard_interrupt(kind: Any) -> None:
    tree = random_tree(kind, 3_000)
    priorities = np.random.default_rng(0).random(256)

    def learn() -> None:
        indices, masses = tree.sample(256)
        weights_of(masses, tree.min_mass, 0.4)
        tree.write(indices, priorities_of(masses.astype(np.float32), indices, 3_000, 0, 1, 9)[0])
        tree.update(indices, priorities)
        tree.fill(0, 8, tree.max_priority)
        tree.masses(slice(None))

    assert set(interrupted(learn, 200)) == {KeyboardInterrupt}
    assert_valid(tree)


def test_interrupts_that_come_out_as_something_else_are_found() -> None:
    assert SystemError in interrupted(lambda: array_and_number(3), 200)


# --- numba's cache ---

MODULE = """
from sb3_per.trees.sum_kernels import compile_kernel


@compile_kernel
def _double(x):
    return 2 * x


@compile_kernel
def double_and_one(x):
    return _double(x) + 1
"""


@pytest.fixture
def fresh_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Kernels as a new process has them, with a cache in a folder of the test's own."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "kernels.py"
    path.write_text(MODULE, encoding="utf-8")

    def load() -> Any:
        spec = importlib.util.spec_from_file_location("kernels", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.double_and_one

    return load


def was_cached(kernel: Any) -> bool:
    return bool(sum(kernel.stats.cache_hits.values()))


def test_the_second_process_finds_what_the_first_compiled(
    fresh_kernel: Callable[[], Any],
) -> None:
    first, second = fresh_kernel(), fresh_kernel()
    assert (first(3), second(3)) == (7, 7)
    assert (was_cached(first), was_cached(second)) == (False, True)


@pytest.mark.parametrize("damage", ["nothing", "half", "text", "other pickle"])
@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_damaged_cache_is_replaced(
    fresh_kernel: Callable[[], Any], tmp_path: Path, damage: str, suffix: str
) -> None:
    """A power cut or a full disk leaves files of any length, with anything in them."""
    fresh_kernel()(3)
    files = list((tmp_path / "cache").rglob(f"*{suffix}"))
    assert len(files) == 2
    for file in files:
        content = file.read_bytes()
        file.write_bytes(
            {
                "nothing": b"",
                "half": content[: len(content) // 2],
                "text": b"no such thing\n" * 20,
                "other pickle": b"N.",
            }[damage]
        )
    kernels = [fresh_kernel() for _ in range(3)]
    assert [kernel(3) for kernel in kernels] == [7, 7, 7]
    # One throws the damaged file away, that one or the next stores what it compiled
    assert [was_cached(kernels[0]), was_cached(kernels[2])] == [False, True]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_done_without(
    fresh_kernel: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(path: Any, mode: str = "r") -> Any:
        if "w" in mode:
            raise OSError(code, os.strerror(code), path)
        return open(path, mode)

    monkeypatch.setattr("numba.core.caching.open", refuse, raising=False)
    for _ in range(2):
        kernel = fresh_kernel()
        assert (kernel(3), kernel(0.25)) == (7, 1.5)
        assert not was_cached(kernel)


def test_no_place_for_a_cache(
    fresh_kernel: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files stand where the folders would have to be made: that stops root, too."""
    (tmp_path / "a_file").touch()
    (tmp_path / "__pycache__").touch()
    blocked = str(tmp_path / "a_file" / "cache")
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    for variable in ("HOME", "LOCALAPPDATA", "USERPROFILE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, blocked)
    kernel = fresh_kernel()
    with pytest.raises(RuntimeError, match="cannot cache function"):
        kernel.enable_caching()
    assert kernel(3) == 7


def test_errors_of_the_compiler_come_out(fresh_kernel: Callable[[], Any]) -> None:
    """They are no errors of the cache, whatever was tried."""
    with pytest.raises(numba.TypingError):
        fresh_kernel()("text")


# --- without numba's compiler ---

SCENARIO = """
import numpy as np
from sb3_per.trees import RankTree, SumTree

rng = np.random.default_rng(0)
np.random.seed(0)
indices, numbers = [], []
for kind in (SumTree, RankTree):
    for capacity in (1, 2, 8, 9, 65, 300):
        tree = kind(capacity)
        for step in range(6):
            n = int(rng.integers(1, 40))
            priorities = np.abs(rng.standard_cauchy(n)) * rng.integers(0, 2, n)
            tree.update(rng.integers(capacity, size=n), np.round(priorities, step % 2))
            start = int(rng.integers(capacity))
            tree.fill(start, int(rng.integers(start, capacity)) + 1, float(rng.integers(0, 3)))
            tree.update(capacity // 2, 0.5)
            assert tree.check_valid() == (True, ""), tree.check_valid()
            drawn, masses = tree.sample(8)
            found = tree.get_leaf([tree.total / 3, 0.0, tree.total])[0]
            for index, priority in ((capacity, 1.0), (0, np.nan)):
                try:
                    tree.update([0, index], [9.0, priority])
                except (IndexError, ValueError) as error:
                    indices.append(str(error))
            indices.append([*drawn.tolist(), *found.tolist()])
            if kind is RankTree:
                indices.append(tree.ranks(slice(None)).tolist())
                indices.append(tree.ranks(range(capacity)).tolist())
                tree.alpha = rng.random() * 2
            numbers += [*tree[:].tolist(), *masses.tolist(), *tree.masses(slice(None)).tolist()]
            numbers += [tree.total, tree.max_priority, tree.min_priority, tree.min_mass]
    # More than are put in one by one
    tree.update(rng.integers(300, size=1_500), rng.random(1_500))
    assert tree.check_valid() == (True, ""), tree.check_valid()
    numbers += tree.masses(slice(None)).tolist()
"""


def test_plain_python_gives_the_same(tmp_path: Path) -> None:
    """NUMBA_DISABLE_JIT=1 is how to debug the kernels. A copy of the trees alone needs no torch."""
    package = tmp_path / "sb3_per"
    source = Path(sum_kernels.__file__).parent
    shutil.copytree(source, package / "trees", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    code = SCENARIO + (
        "import json; from sb3_per.trees import sum_kernels\n"
        "print(json.dumps([hasattr(sum_kernels.write, 'py_func'), indices, numbers]))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment | {"PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled, indices, numbers = json.loads(done.stdout)
    assert compiled is False
    state: dict[str, Any] = {}
    exec(SCENARIO, state)
    assert indices == json.loads(json.dumps(state["indices"]))
    # Powers, and so sums of them, may differ in the last places
    np.testing.assert_allclose(numbers, state["numbers"], rtol=1e-12)
    assert len(numbers) > 5_000
