"""The notebooks run from a clean kernel, and what is committed of them is small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WANTED = {
    *("interactive", "many_ranks", "onnx_training", "own_expression", "own_operator", "own_pass", "quickstart"),
    *("search", "trees"),
}
MOST = 300_000
"""Bytes of a notebook at most, outputs and pictures included."""


RUN = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.wide] if path.stem == "interactive" else [])
    for path in NOTEBOOKS
]
"""`interactive` compiles a layer of BERT four times over: `make test-browser` runs it."""


def test_all_are_there() -> None:
    assert {path.stem for path in NOTEBOOKS} == WANTED


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs(path: Path) -> None:
    """Outputs are committed, without errors and without paths of the machine that made them."""
    text = path.read_text(encoding="utf-8")
    assert len(text) < MOST
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]
    assert "/tmp/" not in text and "/root/" not in text and "/home/" not in text


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("path", RUN)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    assert len(json.dumps(notebook)) < MOST, "something displays more than it should"
