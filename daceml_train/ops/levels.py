"""Levels: a recursion over trees or DAGs, a level at a time; the structure is data, so one program serves all of them.

A recursion consists of *cells*. All calls of one kind of cell are rows of a batch: call `r` of kind `k` is row `r` of
the arrays that kind reads. A level contains calls that do not depend on each other, and its children are in earlier
levels. Results of calls are rows of *state* buffers, which all kinds share: the rows of kind 0 come first, then those
of kind 1, and so on, so call `r` of kind `k` is row `counts[0] + ... + counts[k - 1] + r` of every state. Children are
indices of such rows. A tree with leaves (kind 0: `x -> h, c`) and inner nodes of two children (kind 1):

    graph tree(
        bounds: i64[levels, 2] input,
        x: f32[leaves, 8] input,
        left: i64[inner] input,
        right: i64[inner] input,
        w: f32[8, 4] parameter,
        u: f32[8, 4] parameter,
    ) {
      %h = levels(%bounds, %x, %w, %left, %right, %u, cells=[body(x, w) {
        %m = matmul(%x, %w)
        %h = tanh(%m)
        yield %h
      }, body(a, b, u) {
        %c = concat(%a, %b, dim=1)
        %m = matmul(%c, %u)
        %h = tanh(%m)
        yield %h
      }], types=(f32[4],), counts=(leaves, inner), rows=((1,), ()), children=((), ((0, 3), (0, 4))),
      shared=((2,), (5,)), states=((0,), (0,)))
      return %h
    }

`bounds[l, k]` is the first row of kind `k` in level `l`, and `bounds[l + 1, k]` is the one after its last. A kind may
have no rows in a level. A row that no level contains is zero in every result, so arrays may be longer than the batch:
a kind without calls has one unused row, and such a row serves as a child that is missing.

A body is typed with `ROWS` rows: its arguments and yields have this symbol as their first size. It treats rows
independently of each other. It takes, in this order: its rows of the operands `rows[k]`; for each pair (state,
operand) in `children[k]`, the rows of that state that the operand, an i64[counts[k]] array, names; the operands
`shared[k]` as they are. Operands are named by their positions; `bounds` is operand 0. It yields its rows of the states
`states[k]`, then rows of results of its own. Results of the operator: the states, of `sum(counts)` rows, then the own
results of kind 0, of `counts[0]` rows, of kind 1, and so on.

With `reverse`, levels run from the last to the first, and what forward reads, reverse adds to: operands 1, 2, ... are
the states' first values; a body takes its rows of `rows[k]`, then its rows of the states `states[k]`, then the shared
operands; it yields rows to add to its children, one per pair in `children[k]`, then its own results. Contributions are
added in a fixed order: kind by kind, pair by pair, row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import sympy

from daceml_train.errors import Invalid
from daceml_train.ops.control import ControlFlow, alike, body_flops, dense, shown
from daceml_train.ops.fallback import Body
from daceml_train.tensor import Dim, DType, Tensor, same, simplify, symbol

ROWS = symbol("rows")
"""The number of rows of a body: those of its kind in one level."""


@dataclass(frozen=True)
class Levels(ControlFlow):
    """Cells of a recursion over trees or DAGs, a level at a time; see the module."""

    name = "levels"
    operands = ("bounds", "*xs")
    own_sizes: ClassVar[frozenset[sympy.Symbol]] = frozenset({ROWS})
    cells: tuple[Body, ...]
    types: tuple[Tensor, ...]
    """Types of one row of each state."""
    counts: tuple[Dim, ...]
    rows: tuple[tuple[int, ...], ...]
    children: tuple[tuple[tuple[int, int], ...], ...]
    shared: tuple[tuple[int, ...], ...]
    states: tuple[tuple[int, ...], ...]
    reverse: bool = False

    @property
    def bodies(self) -> tuple[Body, ...]:
        return self.cells

    def with_bodies(self, *bodies: Body) -> Self:
        return replace(self, cells=bodies)

    @property
    def size(self) -> Dim:
        """The number of rows of a state."""
        return simplify(sum(self.counts, start=0))

    def starts(self) -> Iterator[Dim]:
        """Per kind, the row of its first call in the states."""
        start: Dim = 0
        for count in self.counts:
            yield start
            start = simplify(start + count)

    def placed(self, kind: int) -> tuple[int, ...]:
        """The states that the first yields of a kind go to: its own rows of them or, with `reverse`, its children's."""
        return tuple(state for state, _ in self.children[kind]) if self.reverse else self.states[kind]

    def read_for(self, results: Iterable[int]) -> set[int]:
        """The operands on which results depend, by position; not with `reverse`."""
        owners = [k for k, body in enumerate(self.cells) for _ in body.yields[len(self.states[k]) :]]
        count = len(self.types)
        states = {r for r in results if r < count}
        waiting = {owners[r - count] for r in results if r >= count}
        waiting.update(k for k, own in enumerate(self.states) if not states.isdisjoint(own))
        kinds: set[int] = set()
        while waiting:
            kinds.add(kind := waiting.pop())
            below = {state for state, _ in self.children[kind]}
            waiting.update(k for k, own in enumerate(self.states) if k not in kinds and not below.isdisjoint(own))
        operands = [(*self.rows[k], *self.shared[k], *(operand for _, operand in self.children[k])) for k in kinds]
        return {0}.union(*operands)

    # ---- types --------------------------------------------------------------------------------------------------
    def arguments(self, operands: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
        self._check_attributes(len(operands))
        bounds = operands[0]
        if bounds.dtype is not DType.int64 or bounds.rank != 2 or not same(bounds.shape[1], len(self.cells)):
            raise Invalid(
                f"levels of {len(self.cells)} kinds takes bounds i64[levels + 1, kinds] first, given {bounds}"
            )
        for state, given in zip(self.types, operands[1:], strict=False) if self.reverse else ():
            if not alike(self._many(state, self.size), given):
                raise Invalid(f"levels with states of {self.size} rows of {state} starts from {given}")
        return tuple(self._arguments(kind, operands) for kind in range(len(self.cells)))

    def _check_attributes(self, count: int) -> None:
        kinds = len(self.cells)
        for name in ("counts", "rows", "children", "shared", "states"):
            if len(getattr(self, name)) != kinds:
                raise Invalid(f"levels has {kinds} kinds of cells, but {name} for {len(getattr(self, name))}")
        first = 1 + len(self.types) if self.reverse else 1
        for kind in range(kinds):
            indices = tuple(operand for _, operand in self.children[kind])
            for operand in (*self.rows[kind], *indices, *self.shared[kind]):
                if not first <= operand < count:
                    raise Invalid(
                        f"kind {kind} of levels reads operand {operand}, which is not in {first}..{count - 1}"
                    )
            for state in (*self.states[kind], *(state for state, _ in self.children[kind])):
                if not 0 <= state < len(self.types):
                    raise Invalid(f"kind {kind} of levels names state {state} of {len(self.types)}")
            if len(set(self.states[kind])) != len(self.states[kind]):
                raise Invalid(f"kind {kind} of levels names a state twice")
        for state in range(0 if self.reverse else len(self.types)):
            if not any(state in states for states in self.states):
                raise Invalid(f"no kind of levels computes state {state}")

    def _arguments(self, kind: int, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        count = self.counts[kind]
        for operand in self.rows[kind]:
            x = operands[operand]
            if not x.rank or not same(x.shape[0], count):
                raise Invalid(f"kind {kind} of levels has {count} rows, its operand {operand} is {x}")
        for _, operand in self.children[kind]:
            x = operands[operand]
            if x.dtype is not DType.int64 or x.rank != 1 or not same(x.shape[0], count):
                raise Invalid(f"kind {kind} of levels takes children as i64[{count}], its operand {operand} is {x}")
        own = self.states[kind] if self.reverse else tuple(state for state, _ in self.children[kind])
        return (
            *(Tensor((ROWS, *operands[i].shape[1:]), operands[i].dtype) for i in self.rows[kind]),
            *(self._many(self.types[state], ROWS) for state in own),
            *(dense(operands[i]) for i in self.shared[kind]),
        )

    @staticmethod
    def _many(row: Tensor, count: Dim) -> Tensor:
        return Tensor((count, *row.shape), row.dtype)

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        if not operands:
            raise Invalid("levels takes the bounds of its levels first, given nothing")
        stacks = []
        for kind, results in enumerate(self.yielded(operands)):
            expected = tuple(self._many(self.types[state], ROWS) for state in self.placed(kind))
            if len(results) < len(expected) or not all(map(alike, expected, results)):
                raise Invalid(f"kind {kind} of levels returns {shown(results)}, its states are {shown(expected)}")
            for t in results[len(expected) :]:
                if not t.rank or t.shape[0] != ROWS or any(ROWS in Tensor((d,)).symbols for d in t.shape[1:]):
                    raise Invalid(f"kind {kind} of levels returns {t}, which is not an array of {ROWS} rows")
                stacks.append(self._many(Tensor(t.shape[1:], t.dtype), self.counts[kind]))
        return (*(self._many(state, self.size) for state in self.types), *stacks)

    # ---- cost ---------------------------------------------------------------------------------------------------
    def flops(self, *operands: Tensor) -> Dim:
        pairs = zip(self.cells, self.arguments(operands), self.counts, strict=True)
        return simplify(sum((at_rows(body_flops(body, given), count) for body, given, count in pairs), start=0))


def at_rows(size: Dim, count: Dim) -> Dim:
    """A size in a body, for `count` rows."""
    return size if isinstance(size, int) else simplify(size.xreplace({ROWS: sympy.sympify(count)}))
