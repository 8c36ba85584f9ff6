"""Links between pages lead to files and headings that exist; paths of pages in sources do, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PACKAGE = ROOT / "daceml_train"
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
NAMED = re.compile(r"\bdocs/[\w/-]+\.(?:md|png)\b")
SOURCES = [
    path
    for folder in ("daceml_train", "transformations", "frontends", "benchmarks", "tests", "examples", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


FILE = re.compile(r"`([\w/]+\.(?:py|h|cpp|cuh|toml))`")
MODULE = re.compile(rf"`({'|'.join(ROOMS)})\.(\w+)[\w.]*(?:\([^`]*\))?`")
CLASS = re.compile(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", re.MULTILINE)


def _prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(_prose(page)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    missing = []
    for path, anchor in LINK.findall(_prose(page)):
        target = page.parent / path if path else page
        if not target.exists():
            missing.append(f"{page.relative_to(ROOT)}: there is no {path}")
        elif anchor and anchor not in _anchors(target):
            missing.append(f"{page.relative_to(ROOT)}: {path or page.name} has no heading #{anchor}")
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    assert not broken(page)


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# One `two`\n[a](page.md#one-two) [b](#three) [c](gone.md) [d](https://example.org)\n")
    assert broken(page) == ["page.md: page.md has no heading #three", "page.md: there is no gone.md"]


def test_pages_named_in_sources_exist() -> None:
    named = {(path, name) for path in SOURCES for name in NAMED.findall(path.read_text(encoding="utf-8"))}
    assert named
    assert not [f"{path.relative_to(ROOT)}: {name}" for path, name in named if not (ROOT / name).exists()]


def _exists(name: str) -> bool:
    """Whether a file is named by its path from the root, the package, the kernels written by hand, or PyTorch."""
    library, packages = PACKAGE / "codegen" / "library", Path(torch.__file__).parents[1]
    return any((folder / name).exists() for folder in (ROOT, PACKAGE, library, PACKAGE / "runtime", packages))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sources_named_in_pages_exist(page: Path) -> None:
    text = _prose(page)
    assert not [name for name in FILE.findall(text) if not _exists(name)]
    for room, name in MODULE.findall(text):
        inside = PACKAGE / room
        defined = re.search(rf"\b{name}\b", (inside / "__init__.py").read_text(encoding="utf-8"))
        assert (inside / name).is_dir() or (inside / f"{name}.py").exists() or defined, f"{room}.{name}"


def test_classes_of_the_architecture_exist() -> None:
    listed = CLASS.findall(_prose(ROOT / "docs" / "architecture.md"))
    assert 20 <= len(listed) <= 25
    missing = [name for name, file in listed if f"\nclass {name}" not in (PACKAGE / file).read_text(encoding="utf-8")]
    assert not missing


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / path).resolve() for path, _ in LINK.findall(_prose(index)) if path}
    pages = {page for page in PAGES if page.parent != ROOT and page != index}
    assert not sorted(str(page.relative_to(ROOT)) for page in pages if page.resolve() not in linked)
