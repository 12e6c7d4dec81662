"""The package's metadata, and that the files beside it agree with it."""

import json
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import sb3_per

ROOT = Path(__file__).parents[2]
PACKAGES = ("sb3_per", "sb3_per_envs")


@pytest.fixture
def installed() -> Distribution:
    return distribution("sb3-per")


def requirements(installed: Distribution, *extras: str) -> Iterator[Requirement]:
    """What the package requires, with the extras that an extra names followed."""
    for line in installed.requires or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        if requirement.name == "sb3-per":
            yield from requirements(installed, *requirement.extras)
        else:
            yield requirement


def pins() -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            found.setdefault(requirement.name, []).append(requirement)
    return found


def lower_bound(requirement: Requirement) -> Version:
    (version,) = (part.version for part in requirement.specifier if part.operator == ">=")
    return Version(version)


def test_version_is_that_of_the_installed_package(installed: Distribution) -> None:
    assert installed.version == sb3_per.__version__


@pytest.mark.parametrize("package", PACKAGES)
def test_package_says_that_it_is_typed(package: str) -> None:
    assert (files(package) / "py.typed").is_file()


def test_entry_point_for_old_gymnasium_registers_the_envs(installed: Distribution) -> None:
    (entry_point,) = installed.entry_points.select(group="gymnasium.envs")
    # the ids have their namespace already; any other name would put a second one before it
    assert entry_point.name == "__root__"
    assert entry_point.value == "sb3_per_envs.registration:register_envs"
    assert callable(entry_point.load())


def test_installation_brings_two_packages_and_nothing_else(installed: Distribution) -> None:
    direct_url = json.loads(installed.read_text("direct_url.json") or "{}")
    tops = {
        path.parts[0]
        for path in installed.files or []
        if path.parts[0] != ".." and not path.parts[0].endswith(".dist-info")
    }
    if direct_url.get("dir_info", {}).get("editable"):
        assert all(top.endswith(".pth") for top in tops)
    else:
        assert tops == set(PACKAGES)


def test_every_dependency_is_pinned_inside_its_range(installed: Distribution) -> None:
    pinned = pins()
    for requirement in requirements(installed, "dev"):
        assert requirement.name in pinned, f"no pin for {requirement}"
        for pin in pinned[requirement.name]:
            (version,) = (part.version for part in pin.specifier)
            assert version in requirement.specifier, f"{pin} is not in {requirement}"


def test_oldest_run_takes_the_lower_bounds(installed: Distribution) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    (line,) = re.findall(r"^OLDEST := (.*)", makefile, re.MULTILINE)
    oldest = dict(pin.split("==") for pin in line.split())
    for requirement in requirements(installed, "contrib", "experiments"):
        if requirement.name != "torch":
            assert Version(oldest[requirement.name]) == lower_bound(requirement)


def test_contributing_lists_every_target_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    listed = re.findall(r"^\| `make ([a-z-]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(set(targets) - {"help"})
