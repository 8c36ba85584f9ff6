"""The blocks of the documentation run, print what the page shows, and files quoted in it are the files."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/architecture.md",
    "docs/guide/accounting.md",
    "docs/guide/debugging.md",
    "docs/guide/explore.md",
    "docs/guide/expressions.md",
    "docs/guide/first-step.md",
    "docs/guide/interactive.md",
    "docs/guide/mixed-precision.md",
    "docs/guide/pipelines.md",
    "docs/guide/sdfg.md",
    "docs/guide/search.md",
    "docs/guide/training-step.md",
    "docs/guide/vscode.md",
    "docs/guide/writing-a-pass.md",
    "docs/guide/writing-an-operator.md",
    "docs/internals/layouts.md",
    "docs/internals/paths.md",
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"<!-- file: (\S+) -->\n$")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "plugin"))


@pytest.mark.compiled
@pytest.mark.parametrize("page", PAGES)
def test_blocks(page: str, plugin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    module = type(sys)(re.sub(r"\W", "_", page.removesuffix(".md")))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # for dataclasses defined in a block
    names = module.__dict__
    printed, ran = "", 0
    for block in BLOCK.finditer(text):
        language, body = block.groups()
        if quoted := FILE.search(text[: block.start()]):
            assert body == (ROOT / quoted[1]).read_text(encoding="utf-8"), f"{quoted[1]} differs from {page}"
        elif language == "python":
            out, line = io.StringIO(), text[: block.start()].count("\n") + 1
            code = compile("\n" * line + body, page, "exec")
            with contextlib.redirect_stdout(out):
                exec(code, names)
            printed, ran = out.getvalue(), ran + 1
        elif language == "" and printed:
            assert body.rstrip() == printed.rstrip(), f"{page} shows something else than is printed"
            printed = ""
    assert ran
