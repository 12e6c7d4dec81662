"""README and docs: links lead somewhere, tables say what the code does."""

import inspect
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sb3_per import PERDQN

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def is_there(target: Path) -> bool:
    """Whether a file exists; one of the library may be where that is installed."""
    parts = target.resolve().relative_to(ROOT).parts
    if parts[0] != "sb3_per":
        return target.exists()
    spec = find_spec("sb3_per")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*parts[1:]).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not is_there(page.parent / link)] == []


def test_arguments_table_has_the_defaults_of_the_code() -> None:
    parameters = inspect.signature(PERDQN).parameters
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", README.read_text(), re.MULTILINE)
    documented = {
        name: default
        for names, defaults in rows
        for name, default in zip(
            re.findall(r"`(\w+)`", names), defaults.replace("`", "").split(","), strict=False
        )
        if name in parameters
    }
    own = [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in own:
        shown = documented[name].strip().strip('"')
        default = parameters[name].default
        is_number = isinstance(default, float)
        assert (float(shown) == default) if is_number else (shown == str(default)), name


def test_settings_table_is_that_of_the_cartpole_example() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from cartpole import SETTINGS, TIMESTEPS
    finally:
        sys.path.pop(0)
    section = README.read_text().split("## CartPole-v1, solved")[1].split("\n## ")[0]
    assert f"{TIMESTEPS:,} steps" in section
    assert "`learning_rate` | 2.3e-3, falling linearly to 0 |" in section
    assert (
        repr(SETTINGS["learning_rate"]) == "LinearSchedule(start=0.0023, end=0.0, end_fraction=1.0)"
    )
    for name in ("buffer_size", "learning_starts", "batch_size"):
        value = SETTINGS[name]
        shown = re.search(rf"`{name}` \| ([^| ]+)", section)
        assert shown is not None, name
        assert float(shown[1].replace(",", "")) == value, name
    for names in (
        ("train_freq", "gradient_steps"),
        ("exploration_fraction", "exploration_final_eps"),
    ):
        row = "`, `".join(names) + "` | " + ", ".join(str(SETTINGS[name]) for name in names)
        assert row in section
    assert f"`target_update_interval` | {SETTINGS['target_update_interval']} " in section
    assert str(SETTINGS["policy_kwargs"]).replace("'", '"') in section
