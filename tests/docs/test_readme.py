import re
import subprocess
import sys
from pathlib import Path

import pytest

# Old releases of other packages use what newer ones of theirs deprecate
WARNINGS = ("-W", "error", "-W", "default::DeprecationWarning")
README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def run(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *WARNINGS, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_readme_has_the_snippets_that_these_tests_run() -> None:
    assert len(SNIPPETS) == 6
    assert README.read_text().count("```python") == len(SNIPPETS)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs_by_itself_in_an_empty_folder(number: int, tmp_path: Path) -> None:
    # What the snippet must have done by its end
    proofs = [
        "assert (model.num_timesteps, env.action_space.contains(action)) == (2000, True)",
        "assert (buffer.n_transitions, buffer.beta, batch.weights.shape) == (100, 0.401, (32, 1))",
        "assert (set(indices), len(priorities)) == ({0, 2}, 256)",
        "assert (first.episode, last.episode, len(last.td_errors) > 100) == (0, 20, True)",
        "assert env.observation_space.shape == (20,)",
        "assert env.observation_space.shape == (12,)",
    ]
    result = run(f"{SNIPPETS[number]}\n{proofs[number]}", tmp_path)
    assert result.returncode == 0, result.stderr


DOCS = README.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_snippets_of_the_docs_run(page: Path, tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert page.read_text().count("```python") == len(snippets)
    for snippet in snippets:
        result = run(snippet, tmp_path)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: str(page.stem))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_arguments_table_has_the_defaults_of_the_code() -> None:
    import inspect

    from sb3_per import PERDQN

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
    sys.path.insert(0, str(README.parent / "examples"))
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
