"""Imports run one way: the layers are the import-linter contract in pyproject.toml; no module is in an import cycle."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]


def test_imports_point_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0, capsys.readouterr().out


def test_no_import_cycles() -> None:
    graph = grimp.build_graph("daceml_train", cache_dir=None)
    symlinked = {"daceml_train.transformations.fusion", "daceml_train.frontends.torch"}
    assert symlinked <= graph.modules
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_nothing_inside_imports_the_public_names() -> None:
    """The root imports nothing of ours and reaches every layer lazily; code inside imports the layer itself."""
    graph = grimp.build_graph("daceml_train", cache_dir=None)
    assert graph.find_modules_directly_imported_by("daceml_train") == {"daceml_train.renamed"}  # old names
    importers = graph.find_modules_that_directly_import("daceml_train")
    importers = {name for name in importers if not name.startswith("daceml_train.cli.")}
    assert not importers, f"{sorted(importers)} import `daceml_train`: import the module that defines the name"
