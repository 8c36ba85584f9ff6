"""Difference: two saved reports of `daceml-train report --json`, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daceml_train.errors import Invalid

NUMBERS = ("captured", "moved", "flops", "kernels", "distinct_kernels", "programs", "arena", "inputs")
ROWS = 12


@dataclass(frozen=True)
class Difference:
    """The differences of two reports. Measured times are shown but do not count: no two runs take the same time.

    `numbers` are (function, what, before, after), `operators` (launched operators, count and bytes in both), `lines`
    what only one of them has, with `-` or `+`.
    """

    numbers: tuple[tuple[str, str, Any, Any], ...]
    operators: tuple[tuple[str, tuple[int, int], tuple[int, int]], ...]
    lines: tuple[str, ...]
    seconds: tuple[float | None, float | None] = (None, None)

    @property
    def same(self) -> bool:
        """Whether the reports agree in everything but time."""
        return not (self.numbers or self.operators or self.lines)

    def as_dict(self) -> dict[str, Any]:
        """The differences as plain data."""
        return {
            "same": self.same,
            "numbers": [list(n) for n in self.numbers],
            "operators": [[o, list(a), list(b)] for o, a, b in self.operators],
            "lines": list(self.lines),
            "seconds": list(self.seconds),
        }

    def __str__(self) -> str:
        lines = [f"{function}: {what:16} {_shown(a):>18} {_shown(b):>18}" for function, what, a, b in self.numbers]
        if self.operators:
            lines.append("launches that differ, as count and bytes:")
            for name, (n, moved), (m, then) in self.operators[:ROWS]:
                lines.append(f"  {name[:60]:60} {n:4} {moved:>15,} -> {m:4} {then:>15,}")
            lines += [f"  and {len(self.operators) - ROWS} more"] if len(self.operators) > ROWS else []
        lines += self.lines
        if self.same:
            lines.append("the reports agree")
        a, b = self.seconds
        if a is not None and b is not None:
            lines.append(f"measured: {1e3 * a:.3f} ms and {1e3 * b:.3f} ms; a single measurement of each says little")
        return "\n".join(lines)


def is_report(path: Path) -> bool:
    """Whether a file is a report as JSON."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and {"kind", "functions", "breaks"} <= data.keys()


def _whole(data: Mapping[str, Any]) -> bool:
    """Whether a report has what is compared."""
    functions = data["functions"]
    if "name" not in data or not isinstance(functions, list) or not all(isinstance(f, dict) for f in functions):
        return False
    if not all({"name", "inputs", "memory", "calls", "fallbacks", "launches"} <= f.keys() for f in functions):
        return False
    launches = [launch for f in functions for launch in f["launches"]]
    return all(isinstance(launch, dict) and {"operators", "bytes"} <= launch.keys() for launch in launches)


def difference(a: Path, b: Path) -> Difference:
    """The differences of two report files. Raises `Invalid` for a file that is not a report."""
    first, second = read(a), read(b)
    numbers: list[tuple[str, str, Any, Any]] = []
    lines: list[str] = []
    seconds: list[float | None] = []
    for field in ("kind", "name"):
        lines += _only([str(first[field])], [str(second[field])], f"{field}: ")
    lines += _only(first["breaks"], second["breaks"], "runs in PyTorch: ")
    before, after = first["functions"], second["functions"]
    lines += _only([f["name"] for f in before], [f["name"] for f in after], "function: ")
    for x, y in zip(before, after, strict=False):
        numbers += [(x["name"], what, x.get(what), y.get(what)) for what in NUMBERS if x.get(what) != y.get(what)]
        peaks = [f["inputs"] + max(f["memory"], default=0) for f in (x, y)]
        numbers += [(x["name"], "peak", *peaks)] if peaks[0] != peaks[1] else []
        lines += _only(_calls(x), _calls(y), f"{x['name']}: ")
        lines += _only(_fallbacks(x), _fallbacks(y), f"{x['name']} falls back: ")
    for report in (before, after):
        times = [launch.get("seconds") for f in report for launch in f["launches"]]
        known = [t for t in times if t is not None]
        seconds.append(sum(known) if known else None)
    return Difference(tuple(numbers), tuple(_operators(before, after)), tuple(lines), (seconds[0], seconds[1]))


def _operators(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Launches by operators where their number or bytes differ, the largest difference first."""
    groups: list[dict[str, tuple[int, int]]] = []
    for functions in (before, after):
        found: dict[str, tuple[int, int]] = {}
        for launch in (launch for f in functions for launch in f["launches"]):
            count, moved = found.get(launch["operators"], (0, 0))
            found[launch["operators"]] = count + 1, moved + launch["bytes"]
        groups.append(found)
    a, b = groups
    rows = [(name, a.get(name, (0, 0)), b.get(name, (0, 0))) for name in dict.fromkeys([*a, *b])]
    yield from sorted((row for row in rows if row[1] != row[2]), key=lambda r: -abs(r[1][1] - r[2][1]))


def _calls(function: Mapping[str, Any]) -> list[str]:
    return [f"{name} called {count} times" for name, count in function["calls"].items()]


def _fallbacks(function: Mapping[str, Any]) -> list[str]:
    return [" ".join(map(str, fallback)) for fallback in function["fallbacks"]]


def _only(a: Sequence[str], b: Sequence[str], what: str) -> list[str]:
    return [f"- {what}{x}" for x in a if x not in b] + [f"+ {what}{x}" for x in b if x not in a]


def read(path: Path) -> Any:
    """A report file. Raises `Invalid` for another file."""
    if not is_report(path):
        raise Invalid(f"{path} is not a report as JSON", advice="`daceml-train report MODEL --json FILE` writes one")
    data = json.loads(path.read_text(encoding="utf-8"))
    if not _whole(data):
        raise Invalid(f"{path} is a damaged report, or one of another version", advice="write it again")
    return data


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)
