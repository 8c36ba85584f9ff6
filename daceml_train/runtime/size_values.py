"""The values of size expressions, for one set of sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import sympy

from daceml_train.lowering.program import ControlLaunch, Launch
from daceml_train.tensor import Dim, DType, evaluate, evaluate_all

BLOCKS = "blocks"
"""The symbol whose value depends on the kernel."""

_BLOCKS, _WITH_BLOCKS = -1, -2
"""What stands for the position of that symbol, and of an expression that has it."""

KEPT_EXPRESSIONS = 1 << 14
"""Objects that a table keeps: expressions made for one plan each would fill it."""


def varies(launch: Launch) -> bool:
    """Whether a launch's sizes differ in nearly every run: those of levels are numbers of nodes."""
    return isinstance(launch, ControlLaunch) and launch.cells is not None


def rounded(sizes: dict[str, int]) -> dict[str, int]:
    """Sizes rounded up to powers of two: libraries are compared for those, since each comparison takes milliseconds."""
    return {name: 1 << max(size - 1, 0).bit_length() for name, size in sizes.items()}


class SizeTable:
    """The size expressions of a program: from its second plan on, one compiled function evaluates all of them.

    They are found by identity: SymPy takes microseconds to find two objects equal, and a plan asks for hundreds.
    """

    def __init__(self) -> None:
        self.symbols: set[str] = set()
        """The symbols that occur in them."""
        self.positions: dict[int, int] = {}
        """Identity of an expression -> its position among the values, negative for one that depends on blocks."""
        self._kept: list[sympy.Expr] = []
        self._distinct: dict[sympy.Expr, int] = {}
        self._compiled = 0
        self._function: Callable[[Mapping[str, int]], list[int | None]] | None = None

    def values(self, sizes: Mapping[str, int]) -> list[int | None]:
        """The values of all expressions that are known by now; None for those that are to be evaluated when needed."""
        count = len(self._distinct)
        if self._compiled != count:
            self._compiled, self._function = count, evaluate_all(list(self._distinct))
        return [] if self._function is None else self._function(sizes)

    def add(self, size: sympy.Expr) -> int:
        """The position of an expression that is not known by its identity."""
        names = {str(symbol) for symbol in size.free_symbols}
        if BLOCKS in names:
            position = _BLOCKS if size.is_Symbol else _WITH_BLOCKS
        else:
            position = self._distinct.setdefault(size, len(self._distinct))
        self.symbols |= names
        if len(self._kept) < KEPT_EXPRESSIONS:
            self._kept.append(size)  # another object may not get its identity
            self.positions[id(size)] = position
        return position


def evaluator(sizes: Mapping[str, int], table: SizeTable) -> Callable[..., int]:
    """A function from size expressions to integers; `blocks` may be given where the expression has it."""
    known, positions = table.values(sizes), table.positions

    def value(size: Dim, blocks: int = 1) -> int:
        if isinstance(size, int):
            return size
        position = positions.get(id(size))
        if position is None:
            position = table.add(size)
        if position < 0:
            return blocks if position == _BLOCKS else evaluate(size, {**sizes, BLOCKS: blocks})
        if position >= len(known):
            known.extend([None] * (position + 1 - len(known)))
        found = known[position]
        if found is None:
            found = known[position] = evaluate(size, sizes)
        return found

    return value


def bytes_of(dtype: DType, shape: Sequence[Dim], value: Callable[..., int], blocks: int = 1) -> int:
    """The bytes of a dense array: an expression for them would be expanded once more for each plan."""
    result = dtype.bytes
    for size in shape:
        result *= value(size, blocks)
    return result
