"""Files and functions stay short enough to be read in one go."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("daceml_train", "transformations", "frontends", "benchmarks", "examples", "scripts", "tests")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
LINES, IN_FUNCTION = 450, 80


def test_no_file_and_no_function_is_long() -> None:
    assert len(FILES) > 400
    long = []
    for path in FILES:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        if (count := len(text.splitlines())) > LINES:
            long.append(f"{name}: {count} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (count := node.end_lineno - node.lineno + 1) > IN_FUNCTION:  # type: ignore[operator]
                long.append(f"{name}:{node.lineno} {node.name}: {count} lines")
    assert not long
