"""Imports point one way, and no part knows more than it should."""

import ast
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# Lowest first. A part may import the parts before it and itself, never one beside or after it.
# ``sb3_per`` stands for the package's ``__init__`` alone, any other name for a package with all
# that it contains.
LAYERS = (
    ("sb3_per.trees",),
    ("sb3_per.buffers",),
    ("sb3_per.common",),
    (
        "sb3_per.callbacks",
        "sb3_per.per_dqn",
        "sb3_per.per_qrdqn",
        "sb3_per.per_sac",
        "sb3_per.per_td3",
        "sb3_per.per_tqc",
    ),
    ("sb3_per",),
    ("sb3_per.compare", "sb3_per.zoo"),
    ("sb3_per.cli", "sb3_per.__main__"),
)
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

CORE = {"gymnasium", "numba", "numpy", "sb3_per", "sb3_per_envs", "stable_baselines3", "torch"}
EXPERIMENTS = {
    "dask",
    "distributed",
    "filelock",
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
ARRAYS = {"numba", "numpy", "sb3_per"}
# What each part may import beside the standard library; a longer name goes before a shorter one.
ALLOWED = dict.fromkeys(RANKS, CORE) | {
    "sb3_per": CORE | {"sb3_contrib"},
    "sb3_per.__main__": CORE | {"sb3_contrib"} | EXPERIMENTS,
    "sb3_per.buffers.draws": ARRAYS,
    "sb3_per.buffers.frame_rings": {"numpy", "zstandard"},
    "sb3_per.buffers.importance": {"numpy"},
    "sb3_per.buffers.kernels": ARRAYS,
    "sb3_per.common.mlp_kernels": ARRAYS,
    "sb3_per.cli": CORE | {"sb3_contrib"} | EXPERIMENTS,
    "sb3_per.compare": CORE | {"sb3_contrib"} | EXPERIMENTS,
    "sb3_per.per_qrdqn": CORE | {"sb3_contrib"},
    "sb3_per.per_tqc": CORE | {"sb3_contrib"},
    "sb3_per.trees": ARRAYS,
    "sb3_per.zoo": CORE | {"optuna", "rl_zoo3", "sb3_contrib", "yaml"},
    "sb3_per_envs": {"gymnasium", "numpy", "sb3_per_envs"},
}


ROOT = Path(__file__).parents[2]
# Beside the library, and not in the wheel
FOLDERS = ("benchmarks", "examples", "scripts", "studies")


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


def place_in(table: dict[str, object], module: str) -> str:
    """The longest name in a table that the module belongs to."""
    if module == "sb3_per":
        return module
    found = [part for part in table if part != "sb3_per" and f"{module}.".startswith(f"{part}.")]
    assert found, f"{module} has no place in this file's tables"
    return max(found, key=len)


FILES = source_files("sb3_per") | source_files("sb3_per_envs")
IMPORTS = [
    found for module, path in FILES.items() for found in imports_in(module, path, set(FILES))
]


def test_every_module_has_its_place() -> None:
    for module in FILES:
        assert place_in(dict(ALLOWED), module)


def test_imports_point_one_way() -> None:
    wrong = []
    for importer, imported, where in IMPORTS:
        if imported.split(".")[0] != "sb3_per":
            continue
        if importer.split(".")[0] == "sb3_per_envs":
            wrong.append(f"{where}: {importer} imports {imported}")
            continue
        source, target = place_in(dict(RANKS), importer), place_in(dict(RANKS), imported)
        if target != source and RANKS[target] >= RANKS[source]:
            wrong.append(f"{where}: {importer} imports {imported}")
    assert not wrong


def test_each_part_imports_only_what_it_may() -> None:
    wrong = []
    for importer, imported, where in IMPORTS:
        top = imported.split(".")[0]
        if top in sys.stdlib_module_names:
            continue
        if top not in ALLOWED[place_in(dict(ALLOWED), importer)]:
            wrong.append(f"{where}: {importer} imports {imported}")
    assert not wrong


def is_ours(module: str) -> bool:
    return module.split(".")[0] in {"sb3_per", "sb3_per_envs", *FOLDERS}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_read(path: Path) -> Iterator[str]:
    """
    Names with an underscore that a file takes from another of ours.

    Inherited ones aside: those come through ``self``, ``super()`` or the name of a base class.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found = node.names if node.level or is_ours(node.module or "") else []
        elif isinstance(node, ast.Import):
            found = [alias for alias in node.names if is_ours(alias.name)]
        else:
            continue
        imported |= {alias.asname or alias.name.split(".")[0] for alias in found}
        for alias in found:
            if is_private(alias.name):
                yield f"{path.name}:{node.lineno}: {alias.name}"
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    bases = {base.id for node in classes for base in node.bases if isinstance(base, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in imported - bases:
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_no_file_reads_private_names_of_another() -> None:
    folders = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(folders) > 10
    assert [read for path in (*FILES.values(), *folders) for read in private_names_read(path)] == []


def test_envs_load_neither_torch_nor_the_library(run_python: Callable[..., str]) -> None:
    printed = run_python("-I", "-c", "import sys, sb3_per_envs; print(*sys.modules)")
    loaded = {name.split(".")[0] for name in printed.split()}
    assert "sb3_per_envs" in loaded
    assert not loaded & {"numba", "sb3_per", "stable_baselines3", "torch"}


def test_library_needs_no_extra(run_python: Callable[..., str]) -> None:
    missing = {"sb3_contrib": None, "tyro": None}
    code = f"import sys; sys.modules.update({missing}); import sb3_per; print(sb3_per.__version__)"
    assert run_python("-I", "-c", code).strip()
