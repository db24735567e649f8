"""The notebook of the examples, executed from its first cell to its last."""

from __future__ import annotations

from pathlib import Path

import pytest

import phalanx

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(phalanx.__file__).parent / "examples" / "digits.ipynb"


def test_the_notebook_runs_as_it_is(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell.outputs for cell in notebook.cells if cell.cell_type == "code" and cell.outputs] == []
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    (printed,) = notebook.cells[-1].outputs
    assert printed.text.startswith("accuracy: 9")
