"""The notebooks run from top to bottom, and their results show themselves.

A kernel takes ten seconds to start: by default the cells are run as a script in a warm process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.warm import ROOT, warm_script


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run a notebook in a folder and return its cells of code."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    kernels = folder / "kernels" / "kernels" / "steelyard"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "test", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "kernels"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="steelyard", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> set[str]:
    return {kind for output in cell.outputs for kind in output.get("data", {})}


def test_the_cells_run_in_their_order(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    (tmp_path / "cells.py").write_text("\n".join(cells), encoding="utf-8")
    done = warm_script(tmp_path / "cells.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Use VP>CARE>DS: accuracy is " in done.stdout, "the notebook ends with an answer"
    assert (tmp_path / "compared.html").is_file()
    assert (tmp_path / "runs" / "notebook" / "run.sqlite").is_file()


@pytest.mark.slow
def test_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = executed("first_steps.ipynb", tmp_path, monkeypatch)
    shown = "".join(str(output.get("data", {}).get("text/html", "")) for output in cells[0].outputs)
    assert "text/html" in kinds(cells[0])
    assert "<table" in shown
    assert "<svg" in shown
    assert any("vega" in kind or "svg" in kind or "html" in kind for kind in kinds(cells[1])), kinds(cells[1])
    assert (tmp_path / "compared.html").is_file()


@pytest.mark.slow  # a second kernel that shows the same kinds of output
def test_hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = executed("hospitals.ipynb", tmp_path, monkeypatch)
    assert "text/html" in kinds(cells[0])
    assert "fedavg" in "".join(output.get("text", "") for output in cells[1].outputs)
    assert (tmp_path / "hospitals.svg").read_text(encoding="utf-8").startswith("<svg")
    assert "cleveland" in (tmp_path / "record.html").read_text(encoding="utf-8")
