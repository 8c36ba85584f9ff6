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
ANY_PHRASE = re.compile("|".join(phrase.pattern for phrase in PHRASES))


def _pattern_of_names() -> re.Pattern[str]:
    """Old names of passes, classes, modules and options, as pages and docstrings would write them."""
    classes = {old for old in IDENTIFIERS if re.search(r"[a-z][A-Z]|_", old)}
    tables = ((classes, r"\b{}\b"), (MODULES, r"(?<![\w./]){}\b(?!\.py)"), (KEYWORDS, r"(?<!\w){}"))
    return re.compile("|".join(form.format(re.escape(old)) for table, form in tables for old in sorted(table)))


NAMES = _pattern_of_names()


def _identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                yield from ((node.lineno, part) for alias in names for part in alias.name.split("."))


def _prose(text: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a source file, line by line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), node.lineno)


def _phrases(where: str, lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    for number, line in lines:
        if ANY_PHRASE.search(line):
            for phrase in PHRASES:
                yield from (
                    f"{where}:{number}: {m[0]!r}: write {phrase.instead}" for m in re.finditer(phrase.pattern, line)
                )


def _names(where: str, lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    for number, line in lines:
        for match in NAMES.finditer(line):
            yield f"{where}:{number}: {match[0]!r}: write the new name (daceml_train/renamed.py)"


def _in_source(path: Path, *, names: bool) -> Iterator[str]:
    """The old identifiers and phrases of a source file, and with `names` the old names in its docstrings."""
    where, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    for line, name in _identifiers(tree):
        if name in IDENTIFIERS:
            yield f"{where}:{line}: {name!r}: write {IDENTIFIERS[name]}"
    prose = list(_prose(text, tree))
    yield from _phrases(where, prose)
    if names:
        yield from _names(where, prose)


def _in_page(path: Path, *, names: bool) -> Iterator[str]:
    where = str(path.relative_to(ROOT))
    lines = list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
    yield from _phrases(where, lines)
    if names:
        yield from _names(where, lines)


def test_no_old_words() -> None:
    found = [entry for path in SOURCES for entry in _in_source(path, names=path.relative_to(ROOT).parts[0] in OWN)]
    found += [entry for page in TEXTS for entry in _in_page(page, names=page in PAGES)]
    assert not found, "\n".join(["old words:", *found])


def test_an_old_word_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    source, page = tmp_path / "old.py", tmp_path / "old.md"
    source.write_text('"""A matrix product by MergeEqual."""\nfrom passes import MergeEqual  # behind it\n')
    page.write_text("One matrix product, search=False\n")
    new = "write the new name (daceml_train/renamed.py)"
    assert list(_in_source(source, names=True)) == [
        "old.py:2: 'MergeEqual': write CommonSubexpressions",
        "old.py:2: 'behind': write after",
        "old.py:1: 'matrix product': write matmul, GEMM in prose",
        f"old.py:1: 'MergeEqual': {new}",
    ]
    assert list(_in_page(page, names=True)) == [
        "old.md:1: 'matrix product': write matmul, GEMM in prose",
        f"old.md:1: 'search=': {new}",
    ]
