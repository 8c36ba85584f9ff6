"""Every module and every public class and function says its contract."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("daceml_train", "transformations", "frontends")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
    ]
    public = [node for node in public if not _is_rule(node)]
    missing = [f"{path}:{node.lineno} {node.name}" for node in public if not ast.get_docstring(node)]
    if not ast.get_docstring(tree):
        missing.insert(0, f"{path}:1 the module itself")
    assert not missing, "no docstring: " + ", ".join(missing)


def _is_rule(node: ast.AST) -> bool:
    """A rule of an ONNX operator is registered under the operator's name, and ONNX's own text says what it does."""
    calls = [decorator.func for decorator in getattr(node, "decorator_list", ()) if isinstance(decorator, ast.Call)]
    return any(isinstance(call, ast.Name) and call.id in ("rule", "on_host") for call in calls)
