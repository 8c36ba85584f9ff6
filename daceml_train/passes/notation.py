"""Pipelines as text and as JSON; both read back exactly.

forward: common_subexpressions(), fuse_softmax_cross_entropy()
fusion: fuse_elementwise(limit=32),  # levels may go over several lines, in any order; absent ones are empty
fuse_epilogue()
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from daceml_train.errors import Invalid
from daceml_train.passes.base import LEVELS, Pass
from daceml_train.passes.options import check_names, option_types, plain, read_option, restored
from daceml_train.passes.registry import find

Levels = Mapping[str, Sequence[Pass]]
_HEAD = re.compile(r"(\w+)[ \t]*:(.*)", re.DOTALL)


def known_level(name: str) -> str:
    """The name itself. Raises `Invalid` if it is not a level."""
    if name not in LEVELS:
        raise Invalid(f"no level is called {name!r}", advice=f"known: {', '.join(LEVELS)}")
    return name


def show(levels: Levels) -> str:
    """The text form: a line per level, with options that differ from their defaults."""
    return "\n".join(f"{level}: {', '.join(map(str, passes))}".rstrip() for level, passes in levels.items())


def parse(text: str) -> dict[str, tuple[Pass, ...]]:
    """The passes of each level in a text. Raises `Invalid`, which names the line, for anything else."""
    if not isinstance(text, str):
        raise Invalid(f"a pipeline's text is a string, given {type(text).__name__}")
    levels: dict[str, tuple[Pass, ...]] = {}
    for line, level, body in _levels(text):
        where = f"line {line} of the pipeline"
        if level in levels:
            raise Invalid(f"level {level} is given twice", where=where)
        try:
            tree = ast.parse(f"[{body}\n]", mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise Invalid(
                f"{shortened(body.strip())!r} is not a list of passes", where=where, advice="check its brackets"
            ) from None
        assert isinstance(tree, ast.List)
        levels[level] = tuple(_read(element, where) for element in tree.elts)
    return levels


def parse_pass(text: str) -> Pass:
    """The pass of a text such as `fuse_elementwise(limit=32)`. Raises `Invalid` for anything else."""
    where = f"the pass {shortened(text)!r}"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Invalid(f"{shortened(text)!r} is not a pass", advice="expected name(option=value, ...)") from None
    return _read(tree, where)


def shortened(text: str) -> str:
    """A long text truncated for messages."""
    return text if len(text) <= 200 else f"{text[:200]}..."


def _levels(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, level, text after its colon up to the next level)."""
    held: tuple[int, str, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        head = _HEAD.match(line)
        if head:
            if held:
                yield held
            held = number, known_level(head[1]), head[2]
        elif held:
            held = (held[0], held[1], f"{held[2]}\n{line}")
        elif line.strip() and not line.lstrip().startswith("#"):
            where = f"line {number} of the pipeline"
            raise Invalid(f"{line.strip()!r} belongs to no level", where=where, advice=f"begin with {LEVELS[0]!r}:")
    if held:
        yield held


def _read(element: ast.expr, where: str) -> Pass:
    call = element if isinstance(element, ast.Call) else ast.Call(element, [], [])
    if not isinstance(call.func, ast.Name) or call.args or any(k.arg is None for k in call.keywords):
        raise Invalid(f"{ast.unparse(element)} is not a pass", where=where, advice="expected name(option=value, ...)")
    return built(call.func.id, {str(k.arg): read_option(k.value, where) for k in call.keywords}, where)


def built(name: str, options: Mapping[str, Any], where: str = "") -> Pass:
    """The pass named `name` with options in their text or JSON form."""
    kind = find(name, where)
    check_names(name, kind, options)
    types = option_types(kind)
    result: Pass = kind(**{option: restored(value, types[option]) for option, value in options.items()})
    return result


def to_entries(levels: Levels) -> dict[str, list[dict[str, Any]]]:
    """The JSON form: `{"fusion": [{"pass": "fuse_elementwise", "options": {"limit": 32}}], ...}`."""
    return {
        level: [{"pass": p.name, "options": {o: plain(v) for o, v in p.options.items()}} for p in passes]
        for level, passes in levels.items()
    }


def from_entries(entries: Any) -> dict[str, tuple[Pass, ...]]:
    """The passes of each level in the output of `to_entries`. Raises `Invalid` for anything else."""
    if not isinstance(entries, dict):
        raise Invalid(f"a pipeline's JSON is an object with a list per level, given {type(entries).__name__}")
    levels: dict[str, tuple[Pass, ...]] = {}
    for level, listed in entries.items():
        known_level(level)
        if not isinstance(listed, list):
            expected = 'expected a list of {"pass": ..., "options": {...}}'
            raise Invalid(f"level {level} is {shortened(repr(listed))}", advice=expected)
        levels[level] = tuple(_entry(entry, f"entry {number} of {level}") for number, entry in enumerate(listed))
    return levels


def _entry(entry: Any, where: str) -> Pass:
    given = entry if isinstance(entry, dict) else {"pass": entry}
    name, options = given.get("pass"), given.get("options", {})
    if not isinstance(name, str) or not isinstance(options, dict) or not given.keys() <= {"pass", "options"}:
        raise Invalid(
            f"{shortened(repr(entry))} is not a pass", where=where, advice='expected {"pass": ..., "options": {...}}'
        )
    return built(name, options, where)
