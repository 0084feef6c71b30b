"""The notebook runs from top to bottom, and its results show themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def test_every_cell_runs_and_results_show_a_table_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kernels = tmp_path / "kernels" / "kernels" / "steelyard"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "test", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "kernels"))
    source = Path(__file__).parents[2] / "src"
    monkeypatch.setenv("PYTHONPATH", str(source))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "the notebook is kept without outputs"
    nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="steelyard", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    first = {kind for output in cells[0].outputs for kind in output.get("data", {})}
    shown = "".join(str(output.get("data", {}).get("text/html", "")) for output in cells[0].outputs)
    assert "text/html" in first
    assert "<table" in shown
    assert "<svg" in shown
    weights = {kind for output in cells[1].outputs for kind in output.get("data", {})}
    assert any("vega" in kind or "svg" in kind or "html" in kind for kind in weights), weights
    assert (tmp_path / "compared.html").is_file()
