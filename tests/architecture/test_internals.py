"""Each private name that the sources take from PyTorch is in the table of `daceml_train.internals`, and exists."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from daceml_train import internals

ROOT = Path(__file__).parents[2]
FOLDERS = ("daceml_train", "frontends", "transformations")


def private(name: str) -> bool:
    """Whether a name is PyTorch's own: operators have names of their own in `torch.ops`."""
    parts = name.split(".")
    own = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[0] == "torch" and parts[1:2] != ["ops"] and (own or "experimental" in parts)


def taken(tree: ast.AST) -> Iterator[str]:
    """The private names of PyTorch's that a module uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from filter(private, (f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from filter(private, (alias.name for alias in node.names))
        elif isinstance(node, ast.Attribute) and private(name := ast.unparse(node)):
            yield name


def test_the_table_is_what_the_sources_take() -> None:
    found: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "internals.py":
                found.update(taken(ast.parse(path.read_text(encoding="utf-8"))))
    whole = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    listed = {*internals.ON_A_GPU, *(name for names in internals.TAKEN.values() for name in names)}
    assert whole == listed, f"edit TAKEN: {sorted(whole ^ listed)}"


def test_this_pytorch_has_all_of_them() -> None:
    assert internals.missing() == {} and internals.refusal() == ""


def test_a_name_that_is_missing_is_named() -> None:
    program = "import torch._dynamo.exc as e; del e.SkipFrame; import daceml_train; daceml_train.optimize"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: daceml_train does not fit PyTorch 2.")
    assert "lacks torch._dynamo.exc.SkipFrame (" in last
