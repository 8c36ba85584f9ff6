"""One word for one thing: names and phrases that the project has given up, each with its replacement.

`daceml_train.renamed` lists the old identifiers; it and its tests are the only places where they may be written. Phrases
are looked for in the pages, in the docstrings and comments of the sources, tests and benchmarks, in the C++ sources,
and in the notebooks.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from daceml_train import renamed

ROOT = Path(__file__).parents[2]
OWN = ("daceml_train", "transformations", "frontends")
EXCEPT = {ROOT / "daceml_train" / "renamed.py", ROOT / "tests" / "test_renamed.py", Path(__file__)}
SOURCES = [
    path
    for folder in (*OWN, "benchmarks", "tests", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path not in EXCEPT
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GLOSSARY = ROOT / "docs" / "glossary.md"
TEXTS = [
    *(page for page in PAGES if page != GLOSSARY),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
    *(path for kind in ("h", "cpp", "cu", "cuh") for path in sorted((ROOT / "daceml_train").rglob(f"*.{kind}"))),
]
"""Files of which every line is looked at."""

ORDINARY = {
    *("Items", "Pair", "Place", "Recipe", "Recorder", "Seen", "Stages", "View"),
    *("chains", "look", "narrowed", "piece", "pieces", "recomputed", "said"),
}
"""Old names that are also fitting names of other things, so that they are not banned as identifiers."""

IDENTIFIERS = {old: new for names in renamed.SYMBOLS.values() for old, new in names.items() if old not in ORDINARY} | {
    old: new for old, new in renamed.PASSES.items() if old != "recompute"
}
MODULES = {o: n for o, n in renamed.MODULES.items() if not (ROOT / "daceml_train" / o.replace(".", "/")).is_dir()}
KEYWORDS = {"observe=": "dump=", "watch=": "pass_callback=", "search=": "autotune="}


@dataclass(frozen=True)
class Phrase:
    """A phrase that is not written any more, as a regular expression, and what is written instead."""

    pattern: str
    instead: str


PHRASES = (
    Phrase(r"matrix[- ]products?", "matmul, GEMM in prose"),
    Phrase(r"\bproducts? of matrices", "matmul, GEMM in prose"),
    Phrase(r"\b(?:made|make|makes|computed) again\b", "rematerialized, or recomputed within a kernel"),
    Phrase(r"\bruns? again\b", "runs a second time, rematerialization"),
    Phrase(r"\bbehind\b(?! \w+'s back)", "after"),
    Phrase(r"\bin front of (?:the|a|an|it|its|all|every|each|readers|late)\b", "before"),
    Phrase(r"\bbears?\b", "has, produces"),
    Phrase(r"\b[Ff]rom now on is\b", "is"),
    Phrase(r"\banew\b", "again, or the verb alone"),
    Phrase(r"\blearnt\b", "learned"),
    Phrase(r"\bdearer\b", "more expensive"),
    Phrase(r"\bas ever\b", "as usual, as before"),
    Phrase(r"\bshapes? of (?:a|the|each|large) kernels?\b", "kernel launch configuration"),
    Phrase(r"\bin strips\b", "blocked"),
    Phrase(r"\bmerge equal\b|\bequal operators merged\b", "CSE"),
    Phrase(r"\bgradients? in parts\b", "chunked gradient"),
)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _identifiers(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(_tree(path)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                yield from ((node.lineno, part) for alias in names for part in alias.name.split("."))


@cache
def _prose(path: Path) -> tuple[tuple[int, str], ...]:
    """The docstrings and comments of a source file, line by line."""
    return tuple(_docstrings_and_comments(path))


def _docstrings_and_comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), node.lineno)


def _found(path: Path, lines: Iterable[tuple[int, str]], pattern: str, instead: str) -> list[str]:
    where = path.relative_to(ROOT)
    return [f"{where}:{n}: {m[0]!r}: write {instead}" for n, line in lines for m in re.finditer(pattern, line)]


def _pages(pages: list[Path], pattern: str, instead: str) -> list[str]:
    return [
        entry
        for page in pages
        for entry in _found(page, enumerate(page.read_text(encoding="utf-8").splitlines(), 1), pattern, instead)
    ]


def _report(found: list[str]) -> None:
    assert not found, "\n".join(["old words:", *found])


def test_identifiers() -> None:
    _report(
        [
            f"{path.relative_to(ROOT)}:{line}: {name!r}: write {IDENTIFIERS[name]}"
            for path in SOURCES
            for line, name in _identifiers(path)
            if name in IDENTIFIERS
        ]
    )


def test_names_of_passes_modules_and_options_in_pages_and_docstrings() -> None:
    found: list[str] = []
    classes = {old: new for old, new in IDENTIFIERS.items() if re.search(r"[a-z][A-Z]|_", old)}
    for table, form in ((classes, r"\b{}\b"), (MODULES, r"(?<![\w./]){}\b(?!\.py)"), (KEYWORDS, r"(?<!\w){}")):
        pattern = "|".join(form.format(re.escape(old)) for old in table)
        for path in SOURCES:
            if path.parts[len(ROOT.parts)] in OWN:
                found += _found(path, _prose(path), pattern, "the new name (daceml_train/renamed.py)")
        found += _pages([page for page in PAGES if page != GLOSSARY], pattern, "the new name (daceml_train/renamed.py)")
    _report(found)


@pytest.mark.parametrize("phrase", PHRASES, ids=lambda phrase: phrase.instead)
def test_phrases(phrase: Phrase) -> None:
    found = _pages(TEXTS, phrase.pattern, phrase.instead)
    for path in SOURCES:
        found += _found(path, _prose(path), phrase.pattern, phrase.instead)
    _report(found)


def test_an_old_word_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    source, page = tmp_path / "old.py", tmp_path / "old.md"
    source.write_text('"""A matrix product."""\nfrom passes import MergeEqual  # behind it\n')
    page.write_text("One matrix product\n")
    assert (2, "MergeEqual") in list(_identifiers(source)) and IDENTIFIERS["MergeEqual"] == "CommonSubexpressions"
    assert _found(source, _prose(source), r"\bbehind\b", "after") == ["old.py:2: 'behind': write after"]
    assert _pages([page], PHRASES[0].pattern, "matmul") == ["old.md:1: 'matrix product': write matmul"]
