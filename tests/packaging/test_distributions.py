"""What the built wheel and the source distribution contain."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PACKAGES = {"sb3_per": ROOT / "sb3_per", "sb3_per_envs": ROOT / "envs" / "sb3_per_envs"}

pytestmark = pytest.mark.skipif(
    not PACKAGES["sb3_per"].is_dir(),
    reason="builds from the sources, which aren't beside these tests",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the source distribution of a checkout and the wheel that it gives."""
    copy = tmp_path_factory.mktemp("checkout") / "copy"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist", "logs", "runs")
    )
    # not to be shipped, wherever someone leaves it
    (copy / "stray").mkdir()
    (copy / "stray" / "__init__.py").touch()
    subprocess.run(
        [sys.executable, "-I", "-m", "build", "--no-isolation", "--outdir", "dist"],
        cwd=copy,
        check=True,
        capture_output=True,
    )
    return copy / "dist"


def expected_files() -> set[str]:
    return {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_the_two_packages_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - metadata == expected_files()
    assert {name.split("/")[-1] for name in metadata} == {
        "LICENSE",
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
    }


def test_source_distribution_holds_what_the_checks_need(built: Path) -> None:
    """The tests, and every folder that mypy's settings and the documentation name."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {
        *settings["tool"]["mypy"]["files"],
        *settings["tool"]["pytest"]["ini_options"]["testpaths"],
        "docs",
    }
    assert {"scripts", "studies", "tests"} <= folders
    expected = {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    files = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md"}
    assert expected | files | {"constraints.txt", "pyproject.toml"} <= names
    assert not any(name.startswith("stray") for name in names)
