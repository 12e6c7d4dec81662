"""The notebook runs from top to bottom, and is stored as it ran."""

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "prioritized_experience_replay.ipynb"
N_PICTURES = 14

# In a process of its own: nbclient and what it builds on leave warnings and an event loop behind
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=3600, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""

nbformat = pytest.importorskip("nbformat", reason="extra: tests")


def read(path: Path) -> Any:
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    return notebook


def execute(folder: Path, scale: str) -> Any:
    pytest.importorskip("nbclient", reason="extra: tests")
    pytest.importorskip("ipykernel", reason="extra: tests")
    pytest.importorskip("joblib", reason="extra: experiments")
    executed = folder / "executed.ipynb"
    result = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(executed)],
        cwd=folder,
        env={**os.environ, "SB3_PER_NOTEBOOK_SCALE": scale},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    # The notebook leaves nothing behind
    assert list(folder.iterdir()) == [executed]
    return read(executed)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def pictures(notebook: Any) -> list[bytes]:
    data = [output.get("data", {}) for output in outputs(notebook)]
    return [base64.b64decode(each["image/png"]) for each in data if "image/png" in each]


def texts(notebook: Any) -> str:
    """What can be read in the outputs, pictures left out."""
    found = []
    for output in outputs(notebook):
        found.append(output.get("text", ""))
        data = output.get("data", {})
        found += [text for kind, text in data.items() if not kind.startswith("image/")]
    return "\n".join(found)


def check(notebook: Any) -> None:
    """What every run of the notebook must show."""
    assert len(pictures(notebook)) == N_PICTURES
    text = texts(notebook)
    # The sum-tree by hand: 13.5 is behind the 8 of the first four leaves, within the 7 of the next
    assert "total 24, dart at 13.5: transition 4, by the nodes [1, 3, 6, 12]" in text
    # Shapes of states, actions, TD errors and indices
    for shape in ("(32, 4)", "(32, 1)", "(32, 2)", "(32,)", "()"):
        assert f">{shape}<" in text
    assert "uniform" in text
    assert "P(better), steps to threshold" in text


def test_small_run(tmp_path: Path) -> None:
    check(execute(tmp_path, "0.1"))


@pytest.mark.slow
def test_full_run(tmp_path: Path) -> None:
    notebook = execute(tmp_path, "1")
    check(notebook)
    # The numbers of section 1 come from seeds alone
    stored = next(cell for cell in read(NOTEBOOK).cells if "medians.insert" in cell.source)
    again = next(cell for cell in notebook.cells if "medians.insert" in cell.source)
    assert again.outputs[0].data["text/plain"] == stored.outputs[0].data["text/plain"]


def test_stored_as_it_ran() -> None:
    notebook = read(NOTEBOOK)
    check(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.output_type for output in outputs(notebook)}
    assert "error" not in kinds
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    text = texts(notebook)
    assert "Traceback" not in text
    folders = [f"/{name}/" for name in ("home", "root", "tmp", "usr", "var", "work")]
    for root in (*folders, "site-packages", "C:\\"):
        assert root not in text
    assert NOTEBOOK.stat().st_size < 1_500_000
    # The cells run on any kernel of Python 3
    assert notebook.metadata.kernelspec.name == "python3"


def test_links_lead_somewhere() -> None:
    text = "\n".join(cell.source for cell in read(NOTEBOOK).cells if cell.cell_type == "markdown")
    links = [part.split(")")[0] for part in text.split("](")[1:]]
    assert [link for link in links if link.startswith("..")]
    for link in links:
        assert link.startswith("https://") or (NOTEBOOK.parent / link).exists(), link
