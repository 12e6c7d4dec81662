"""Imports point one way, and no part knows more than it should."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

# Lowest first. A part may import the parts before it and itself, never one after it.
# ``sb3_per`` stands for the package's ``__init__`` alone, any other name for a module or a
# package with all that it contains.
LAYERS = (
    (
        "sb3_per.common.importance",
        "sb3_per.common.losses",
        "sb3_per.common.training",
        "sb3_per.common.type_aliases",
    ),
    ("sb3_per.common.kernels",),
    ("sb3_per.common.batch_kernels", "sb3_per.common.rank_kernels", "sb3_per.common.sum_tree"),
    ("sb3_per.common.rank_tree",),
    ("sb3_per.common.buffers",),
    ("sb3_per.common.off_policy",),
    ("sb3_per.per_dqn", "sb3_per.per_qrdqn"),
    ("sb3_per.common.callbacks",),
    ("sb3_per",),
    ("sb3_per.experiments", "sb3_per.zoo"),
    ("sb3_per.cli", "sb3_per.__main__"),
)
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
# Contains no code, so that importing one module of it imports no other.
NAMESPACES = {"sb3_per.common"}
# Independent of all else in the library, each other included.
LEAVES = set(LAYERS[0])

CORE = {"gymnasium", "numba", "numpy", "sb3_per", "sb3_per_envs", "stable_baselines3", "torch"}
EXPERIMENTS = {
    "dask",
    "distributed",
    "jinja2",
    "joblib",
    "matplotlib",
    "pandas",
    "ray",
    "rich",
    "scipy",
    "tensorboard",
    "tqdm",
    "tyro",
    "yaml",
}
# What each part may import beside the standard library.
ALLOWED = dict.fromkeys(RANKS, CORE) | {
    "sb3_per": CORE | {"sb3_contrib"},
    "sb3_per.__main__": CORE | {"sb3_contrib"} | EXPERIMENTS,
    "sb3_per.cli": CORE | {"sb3_contrib"} | EXPERIMENTS,
    "sb3_per.common.importance": {"numpy", "sb3_per"},
    "sb3_per.common.batch_kernels": {"numba", "numpy", "sb3_per"},
    "sb3_per.common.kernels": {"numba", "numpy", "sb3_per"},
    "sb3_per.common.rank_kernels": {"numba", "numpy", "sb3_per"},
    "sb3_per.common.rank_tree": {"numba", "numpy", "sb3_per"},
    "sb3_per.common.sum_tree": {"numba", "numpy", "sb3_per"},
    "sb3_per.experiments": CORE | {"sb3_contrib"} | EXPERIMENTS,
    "sb3_per.per_qrdqn": CORE | {"sb3_contrib"},
    "sb3_per.zoo": CORE | {"optuna", "rl_zoo3", "sb3_contrib", "yaml"},
    "sb3_per_envs": {"gymnasium", "numpy", "sb3_per_envs"},
}


class Import(NamedTuple):
    importer: str
    imported: str
    where: str


def folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def source_files(package: str) -> dict[str, Path]:
    """Module names and their files, read from where the package is installed."""
    root = folder_of(package)
    files = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        files[".".join((package, *parts))] = path
    assert package in files
    return files


def imports_in(module: str, path: Path, known: set[str]) -> Iterator[Import]:
    """Every import statement of a file, those inside functions and ``if`` blocks too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")
                dropped = node.level - (path.name == "__init__.py")
                package = package[: len(package) - dropped]
                base = ".".join([*package, *([base] if base else [])])
            # ``from package import module`` imports the module, any other name its package
            names = [f"{base}.{alias.name}" for alias in node.names]
            targets = [name if name in known else base for name in names]
        else:
            continue
        for target in targets:
            yield Import(module, target, f"{path.name}:{node.lineno}")


def part_of(module: str) -> str:
    """The entry of ``ALLOWED`` that a module belongs to."""
    if module == "sb3_per":
        return module
    found = [part for part in ALLOWED if part != "sb3_per" and f"{module}.".startswith(f"{part}.")]
    assert len(found) == 1, f"{module} has no place in this file's tables"
    return found[0]


FILES = source_files("sb3_per") | source_files("sb3_per_envs")
IMPORTS = [
    found for module, path in FILES.items() for found in imports_in(module, path, set(FILES))
]


def test_every_module_has_its_place() -> None:
    for module in set(FILES) - NAMESPACES:
        part_of(module)


@pytest.mark.parametrize("module", sorted(NAMESPACES & set(FILES)))
def test_namespace_has_no_code(module: str) -> None:
    statements = ast.parse(FILES[module].read_text(encoding="utf-8")).body
    assert all(
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        for statement in statements
    )


def test_imports_point_one_way() -> None:
    wrong = []
    for importer, imported, where in IMPORTS:
        if importer in NAMESPACES or imported.split(".")[0] != "sb3_per":
            continue
        source, target = part_of(importer), part_of(imported)
        if source == "sb3_per_envs" or (target != source and RANKS[target] >= RANKS[source]):
            wrong.append(f"{where}: {importer} imports {imported}")
    assert not wrong


def test_leaves_import_nothing_of_the_library() -> None:
    wrong = [
        found
        for found in IMPORTS
        if found.importer in LEAVES and found.imported.split(".")[0] == "sb3_per"
    ]
    assert not wrong


def test_each_part_imports_only_what_it_may() -> None:
    wrong = []
    for importer, imported, where in IMPORTS:
        top = imported.split(".")[0]
        if importer in NAMESPACES or top in sys.stdlib_module_names:
            continue
        if top not in ALLOWED[part_of(importer)]:
            wrong.append(f"{where}: {importer} imports {imported}")
    assert not wrong


def run_isolated(code: str, folder: Path) -> str:
    """What a fresh interpreter prints that can import nothing but what is installed."""
    return subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def test_envs_load_neither_torch_nor_the_library(tmp_path: Path) -> None:
    printed = run_isolated("import sys, sb3_per_envs; print(*sys.modules)", tmp_path)
    loaded = {name.split(".")[0] for name in printed.split()}
    assert "sb3_per_envs" in loaded
    assert not loaded & {"numba", "sb3_per", "stable_baselines3", "torch"}


def test_library_needs_no_extra(tmp_path: Path) -> None:
    missing = {"sb3_contrib": None, "tyro": None}
    code = f"import sys; sys.modules.update({missing}); import sb3_per; print(sb3_per.__version__)"
    assert run_isolated(code, tmp_path).strip()
