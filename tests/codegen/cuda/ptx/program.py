"""PTX as nvcc writes it: the entries of a file, with their parameters, shared memory, registers and instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

TYPES = {
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (32, 64)},
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "pred": np.dtype(bool),
}
"""PTX type -> element type."""


@dataclass(frozen=True)
class Instruction:
    """`@guard op.part.part operand, operand`."""

    parts: tuple[str, ...]
    operands: tuple[str, ...]
    text: str
    guard: str = ""
    negated: bool = False

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def type(self) -> str:
        return self.parts[-1]


@dataclass
class Entry:
    """A kernel."""

    name: str
    parameters: list[tuple[str, np.dtype]]
    shared: dict[str, int]
    """Variable in shared memory -> its offset."""
    shared_bytes: int
    registers: dict[str, str]
    """Prefix of registers -> their type."""
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def entries(text: str) -> dict[str, Entry]:
    """The kernels of a file by name."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    everywhere: dict[str, int] = {}
    top = _shared(re.split(r"\.visible \.entry", text)[0], everywhere, 0)
    found = {}
    for match in re.finditer(r"\.visible \.entry (\w+)\((.*?)\)\s*(.*?)\{(.*?)\n\}", text, re.DOTALL):
        name, parameters, body = match[1], match[2], match[4]
        shared = dict(everywhere)
        size = _shared(body, shared, top)
        entry = Entry(
            name,
            [(p, TYPES[kind]) for kind, p in re.findall(r"\.param \.(\w+) (\w+)", parameters)],
            shared,
            max(16, _up(size, 16)),
            {prefix: kind for kind, prefix in re.findall(r"\.reg \.(\w+)\s+(%\w+?)<\d+>", body)},
        )
        _read(re.sub(r"\.pragma[^;]*;", "", body), entry)
        found[name] = entry
    return found


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _shared(text: str, where: dict[str, int], top: int) -> int:
    """Lay out variables in shared memory, from `top` on; where they end."""
    for align, name, size in re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]", text):
        top = _up(top, max(16, int(align)))
        where[name] = top
        top += int(size)
    return top


def _read(body: str, entry: Entry) -> None:
    for statement in body.split(";"):
        text = " ".join(statement.split())
        while found := re.match(r"(\$\w+):\s*|\{(?!%)\s*|\}\s*", text):
            if found[1]:
                entry.labels[found[1]] = len(entry.code)
            text = text[found.end() :]
        if not text or text.startswith("."):
            continue
        guard = re.match(r"@(!?)(%\w+)\s+", text)
        op, _, rest = text[guard.end() if guard else 0 :].partition(" ")
        taken = (guard[2], bool(guard[1])) if guard else ("", False)
        entry.code.append(Instruction(tuple(op.split(".")), split(rest), text, *taken))


def split(text: str) -> tuple[str, ...]:
    """Operands, separated by commas outside of brackets."""
    operands, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and not depth:
            operands.append(current.strip())
            current = ""
        else:
            current += letter
    return tuple([*operands, current.strip()] if current.strip() else operands)
