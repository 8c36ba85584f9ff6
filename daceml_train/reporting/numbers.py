"""Numbers as people read them: sizes with units, shares, counts."""

from __future__ import annotations

from collections.abc import Mapping

from daceml_train.tensor import Dim

ROUNDS_TO_ONE = 0.9995
"""What has this many of a unit is 1 of it to three digits, and would be 1e+03 of the next smaller one."""


def number(size: Dim, sizes: Mapping[str, int]) -> int | str:
    """A size as a number where all its symbols have values, else as a text."""
    if not isinstance(size, int):
        size = size.subs({s: sizes[str(s)] for s in size.free_symbols if str(s) in sizes})
    return str(size) if getattr(size, "free_symbols", None) else int(size)


def share(before: int | str, after: int | str) -> float | None:
    """The share of `before` that `after` saves; None where they are not numbers, or there was nothing."""
    if isinstance(before, str) or isinstance(after, str) or not before:
        return None
    return 1 - after / before


def bytes_text(count: int | str) -> str:
    """A number of bytes with its unit: `38.4 MB`."""
    if isinstance(count, str):
        return f"{count} B"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if round(abs(value), 1) < 1000 or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def percent(saved: float | None) -> str:
    """A share as a percentage; nothing for None."""
    return "" if saved is None else f"{100 * saved:.1f} %"


def counted(count: int, thing: str, things: str = "") -> str:
    """A count with its noun: `1 kernel`, `2 kernels`; `things` is a plural that is not formed by an s."""
    return f"{count} {thing if count == 1 else things or f'{thing}s'}"


def seconds_text(seconds: float) -> str:
    """A time with its unit: `3.2 ms`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= ROUNDS_TO_ONE or unit == "µs":
            return f"{_three_digits(seconds * factor)} {unit}"
    raise AssertionError


def flops_text(count: float) -> str:
    """A number of operations with its unit: `12.5 GFLOP`."""
    for unit, factor in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= factor * ROUNDS_TO_ONE:
            return f"{_three_digits(count / factor)} {unit}"
    return f"{_three_digits(count / 1e3)} kFLOP"


def _three_digits(value: float) -> str:
    """A number to three digits; all of them where it has more before its point, since no larger unit exists."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def roofline_text(part: float | None) -> str:
    """A share of the roofline. More than all of it means that bytes came from a cache instead of memory."""
    return "from cache" if part is not None and part > 1 else percent(part)
