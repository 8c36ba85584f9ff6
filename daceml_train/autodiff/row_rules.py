"""Row rules: how a value of a micro-batch relates to that of the whole batch, operator by operator.

A batch is cut into parts along its rows. A value is *fixed* (the same in every part), has *rows* (the whole value
consists of the parts' elements), is a *sum* over rows (the whole value is the sum of the parts' values), or *open*:
none of these. `factor` is the number by which the value of each part must be multiplied for that to hold, None if no
number does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from daceml_train.ops.attention import Attention
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.convolution import Convolution
from daceml_train.ops.divided_tables import LookupRows
from daceml_train.ops.elementwise import Cast, Elementwise, Full, Iota
from daceml_train.ops.embedding import Embedding
from daceml_train.ops.indexing import Gather, Index, Scatter
from daceml_train.ops.loss import CrossEntropy, NLLLoss
from daceml_train.ops.movement import Concat, Expand, Flip, Pad, Permute, Reorder, Slice, View
from daceml_train.ops.normalization import BatchNorm
from daceml_train.ops.operator import Operator
from daceml_train.ops.ordering import CumSum, Sort, TopK
from daceml_train.ops.pooling import Window
from daceml_train.ops.random import Dropout, DropoutGiven, Uniform
from daceml_train.ops.reduction import Reduce
from daceml_train.ops.requirement import Require
from daceml_train.ops.resample import Col2Im, Im2Col, Resampling
from daceml_train.tensor import product

Sizes = tuple[int, ...]
Form = Literal["fixed", "rows", "sum", "open"]
ONE = Fraction(1)


@dataclass(frozen=True)
class Kind:
    """See the module. The rows are in dimension `dim`, of size outer * rows * inner in row-major order."""

    form: Form
    factor: Fraction | None = ONE
    dim: int = 0
    outer: int = 1
    inner: int = 1
    why: str = ""
    """Of an open value: the operator that is responsible, and the user's line."""

    @property
    def place(self) -> tuple[int, int]:
        """The position of rows within their dimension."""
        return self.outer, self.inner

    def at(self, dim: int) -> Kind:
        """The same kind with rows in another dimension."""
        return replace(self, dim=dim)


FIXED = Kind("fixed")


class Undecided(Exception):
    """No rule relates a result to that of the whole batch; the message completes "because it ..."."""


@dataclass(frozen=True)
class Applied:
    """An operator on a part, and the operand and result types on the whole batch. All sizes are numbers."""

    op: Operator
    whole: Operator
    operands: tuple[Kind, ...]
    reads: tuple[Sizes, ...]
    makes: tuple[Sizes, ...]
    whole_makes: tuple[Sizes, ...]
    rows: int
    """Rows of a part."""
    count: int
    """Parts of the batch."""

    def grown(self, position: int = 0) -> list[int]:
        """The dimensions of a result that are larger on the whole batch."""
        pairs = zip(self.makes[position], self.whole_makes[position], strict=True)
        return [d for d, (part, whole) in enumerate(pairs) if part != whole]

    def forms(self) -> set[str]:
        """The forms of the operands."""
        return {kind.form for kind in self.operands}

    def all_results(self, kind: Kind) -> list[Kind]:
        """`kind` for every result."""
        return [kind] * len(self.makes)


def results(a: Applied) -> list[Kind]:
    """The kinds of the results. Raises `Undecided`."""
    kinds = _results(a)
    for position, kind in enumerate(kinds):
        expected = [kind.dim] if kind.form == "rows" and a.count > 1 else []
        if kind.form != "open" and a.grown(position) != expected:
            raise Undecided("has sizes that do not follow the number of rows")
    return kinds


def _results(a: Applied) -> list[Kind]:
    if isinstance(a.op, Require):
        return [FIXED]  # it computes nothing; each part is checked
    if "open" in a.forms():
        raise Undecided(next(kind.why for kind in a.operands if kind.form == "open"))
    if a.forms() <= {"fixed"}:
        return _of_fixed(a)
    rule = next((rule for kind, rule in RULES if isinstance(a.op, kind)), None)
    if rule is None:
        raise Undecided("has no rule for rows")
    return rule(a)


def _of_fixed(a: Applied) -> list[Kind]:
    if all(part == whole for part, whole in zip(a.makes, a.whole_makes, strict=True)):
        if isinstance(a.op, Full) and isinstance(a.whole, Full):
            return [Kind("fixed", _ratio(a.op.value, a.whole.value))]
        if a.op != a.whole:
            raise Undecided("depends on the number of rows")
        return a.all_results(Kind("fixed", _factor(a.op, [kind.factor for kind in a.operands])))
    (d, *more) = a.grown()
    result = isinstance(a.op, Full | Iota | Expand | Uniform | Dropout | DropoutGiven)
    if not result or more or a.makes[0][d] % a.rows or (isinstance(a.op, Iota) and d == a.op.dim):
        raise Undecided("numbers the rows of a batch" if isinstance(a.op, Iota) else "depends on the number of rows")
    factors = [kind.factor for kind in a.operands]
    if isinstance(a.op, Full) and isinstance(a.whole, Full):
        factors = [_ratio(a.op.value, a.whole.value)]
    factor = factors[0] if factors else ONE
    return [Kind("rows", factor, d, 1, a.makes[0][d] // a.rows)]


def _ratio(part: Any, whole: Any) -> Fraction | None:
    if part == whole or (part != part and whole != whole):
        return ONE
    if isinstance(part, bool) or not part or not math.isfinite(part) or not math.isfinite(whole):
        return None
    exact = Fraction(whole) / Fraction(part)
    simple = exact.limit_denominator(1 << 20)  # 1/24 over 1/8 is a third, whatever was rounded
    return simple if abs(simple - exact) <= abs(exact) / (1 << 50) else exact


def _factor(op: Operator, factors: Sequence[Fraction | None]) -> Fraction | None:
    """The factor of a result of operands with these factors."""
    if all(f == 1 for f in factors):
        return ONE
    known = [f for f in factors if f is not None]
    if len(known) < len(factors):
        return None
    label = op.label
    if label == "mul" or isinstance(op, Matmul):
        return known[0] * known[1]
    if label == "div":
        return known[0] / known[1] if known[1] else None
    if label == "where":
        return known[1] if known[0] == 1 and known[1] == known[2] else None
    linear = label in ("add", "sub", "neg", "cast", "reduce.sum", "concat", "detach") or isinstance(op, _MOVED)
    return known[0] if linear and len(set(known)) == 1 else None


def sources(op: Operator, operands: int, result: int) -> range:
    """The positions of the operands on which a result depends."""
    if isinstance(op, CrossEntropy | NLLLoss) and result == len(op.results) - 1:
        return range(1, operands)  # the total weight of the targets
    return range(operands)


# ---- elementwise ----------------------------------------------------------------------------------------------------
def _elementwise(a: Applied) -> list[Kind]:
    factor = _factor(a.op, [kind.factor for kind in a.operands])
    if "sum" in a.forms():
        if not _linear(a):
            raise Undecided("needs a sum over the rows of the whole batch")
        return [Kind("sum", factor)]
    rank, found = len(a.makes[0]), []
    for kind, shape in zip(a.operands, a.reads, strict=True):
        if kind.form == "rows":
            found.append((kind.dim + rank - len(shape), *kind.place))
    if len(set(found)) > 1:
        raise Undecided("puts rows of the batch against each other")
    return [Kind("rows", factor, *found[0])]


def _linear(a: Applied) -> bool:
    """Whether the sum of the results is the result of the sums."""
    forms = [kind.form for kind in a.operands]
    match a.op.label:
        case "neg":
            return True
        case "add" | "sub":
            return forms == ["sum", "sum"]
        case "mul":
            return sorted(forms) == ["fixed", "sum"]
        case "div":
            return forms == ["sum", "fixed"]
        case "where":
            return forms == ["fixed", "sum", "sum"]
    return False


def _cast(a: Applied) -> list[Kind]:
    (kind,) = a.operands
    assert isinstance(a.op, Cast)
    if kind.form == "sum" and not a.op.dtype.is_float:
        raise Undecided("rounds a sum over the rows of the whole batch")
    return [kind]


# ---- reductions and contractions ------------------------------------------------------------------------------------
def _reduce(a: Applied) -> list[Kind]:
    assert isinstance(a.op, Reduce)
    (kind,) = a.operands
    factor = kind.factor if a.op.kind == "sum" or kind.factor == 1 else None
    if kind.form == "sum":
        if a.op.kind != "sum":
            raise Undecided("needs a sum over the rows of the whole batch")
        return [kind]
    if kind.dim not in a.op.dims:
        before = 0 if a.op.keepdim else sum(d < kind.dim for d in a.op.dims)
        return [replace(kind, factor=factor, dim=kind.dim - before)]
    if a.op.kind != "sum":
        raise Undecided(f"takes the {a.op.kind} over the rows of the batch")
    return [Kind("sum", factor)]


def _loss(a: Applied) -> list[Kind]:
    """The rule of losses of scores and targets; means are already expressed as quotients."""
    op = a.op
    assert isinstance(op, CrossEntropy | NLLLoss)
    scores, target, *weights = a.operands
    if scores.form != "rows" or target.form != "rows" or any(w.form != "fixed" for w in weights):
        raise Undecided("has rows only in its scores or only in its targets")
    if scores.place != target.place or scores.dim - (scores.dim > 1) != target.dim or scores.factor != 1:
        raise Undecided("compares scores of one row with the target of another one")
    total = Kind("sum")
    loss = total if op.reduction == "sum" else target
    return [loss, total] if isinstance(op, NLLLoss) else [loss, target, target, total]


def _matmul(a: Applied) -> list[Kind]:
    x, y = a.operands
    factor, batched = _factor(a.op, [x.factor, y.factor]), len(a.reads[0]) - 2
    if "sum" in a.forms():
        if sorted((x.form, y.form)) != ["fixed", "sum"]:
            raise Undecided("multiplies sums over the rows of the batch")
        return [Kind("sum", factor)]
    match (x.form, x.dim - batched), (y.form, y.dim - batched):
        case ("rows", 0), ("fixed", _):
            return [replace(x, factor=factor)]
        case ("fixed", _), ("rows", 1):
            return [replace(y, factor=factor)]
        case ("rows", -1), ("rows", -1) if x.place == y.place:
            return [replace(x, factor=factor)]
        case ("rows", 1), ("rows", 0) if x.place == y.place:
            return [Kind("sum", factor)]
    raise Undecided("multiplies rows of the batch with one another")


# ---- movement -------------------------------------------------------------------------------------------------------
def _moved(a: Applied) -> list[Kind]:
    """The rule of movement; a sum of arrays moves as each of them does."""
    factor = _factor(a.op, [kind.factor for kind in a.operands])
    padded = isinstance(a.op, Pad) and a.op.value != 0
    if "sum" in a.forms():
        if a.forms() != {"sum"} or padded:
            raise Undecided("needs a sum over the rows of the whole batch")
        return [Kind("sum", factor)]
    kind = replace(next(k for k in a.operands if k.form == "rows"), factor=None if padded and factor != 1 else factor)
    match a.op:
        case View():
            return [_viewed(a, kind)]
        case Permute(dims=dims):
            return [kind.at(dims.index(kind.dim))]
        case Expand():
            return [kind.at(kind.dim + len(a.makes[0]) - len(a.reads[0]))]
        case Slice(dim=d) if d == kind.dim and a.makes != a.reads:
            raise Undecided("takes some of the rows of the batch")
        case Pad(pads=pads) if tuple(pads[kind.dim]) != (0, 0):
            raise Undecided("adds rows to the batch")
        case Flip(dims=dims) if kind.dim in dims:
            raise Undecided("changes the order of the rows")
        case Concat(dim=d):
            others = {(k.form, k.dim, k.place) for k in a.operands}
            if d == kind.dim or len(others) > 1:
                raise Undecided("joins rows of the batch with others")
    return [kind]


def _viewed(a: Applied, kind: Kind) -> Kind:
    (shape,), (outputs,) = a.reads, a.makes
    before, after = product(shape[: kind.dim]) * kind.outer, kind.inner * product(shape[kind.dim + 1 :])
    for d in a.grown():
        lead, rest = product(outputs[:d]), product(outputs[d + 1 :])
        if lead and rest and before % lead == 0 and after % rest == 0:
            outer, inner = before // lead, after // rest
            if outputs[d] == outer * a.rows * inner:
                return replace(kind, dim=d, outer=outer, inner=inner)
    raise Undecided("cuts the batch dimension in two")


# ---- row by row -----------------------------------------------------------------------------------------------------
def _leading(limit: int, everywhere: bool = False) -> Callable[[Applied], list[Kind]]:
    """The rule of operators that are independent per index below dimension `limit`; `everywhere`: all have rows."""

    def rule(a: Applied) -> list[Kind]:
        first = a.operands[0]
        others = a.operands[1:]
        same = [k for k in others if k.form == "rows"]
        if first.form != "rows" or first.dim >= limit or first.place != (1, 1) or "sum" in a.forms():
            raise Undecided("works along the rows of the batch")
        if (same and not everywhere) or any(k.dim != first.dim or k.place != first.place for k in same):
            raise Undecided("puts rows of the batch against each other")
        if everywhere and any(k.form != "rows" for k in others[:2]):
            raise Undecided("puts all rows of the batch against the same values")
        if isinstance(a.op, Im2Col | Col2Im) and len(a.reads[0]) < (4 if isinstance(a.op, Im2Col) else 3):
            raise Undecided("takes the rows of the batch for channels")
        factor = ONE if all(k.factor == 1 for k in a.operands) else None
        return a.all_results(replace(first, factor=factor))

    return rule


def _along(a: Applied) -> list[Kind]:
    """The rule of operators along one dimension, whose operands all have rows in another one."""
    kinds = set(a.operands)
    (first, *more) = kinds
    if more or first.form != "rows" or first.factor != 1 or a.op.dim == first.dim:  # type: ignore[attr-defined]
        raise Undecided("works along the rows of the batch")
    return a.all_results(first)


def _looked_up(a: Applied) -> list[Kind]:
    table, indices = a.operands
    if table.form != "fixed" or indices.form != "rows" or indices.factor != 1:
        raise Undecided("looks rows of the batch up")
    return [replace(indices, factor=table.factor)]


def _indexed(a: Applied) -> list[Kind]:
    """The rule of indexing: rows of a table, or all rows at fixed positions."""
    assert isinstance(a.op, Index)
    x, *indices = a.operands
    ranks = {len(shape) for shape in a.reads[1:]}
    if x.form == "fixed" and len(set(indices)) == 1 and len(ranks) == 1 and indices[0].form == "rows":
        follow = a.op.dims == tuple(range(a.op.dims[0], a.op.dims[0] + len(a.op.dims)))
        return [replace(indices[0], factor=x.factor).at(indices[0].dim + (a.op.dims[0] if follow else 0))]
    if x.form == "rows" and all(k == FIXED for k in indices) and x.dim not in a.op.dims and len(a.op.dims) == 1:
        return [x.at(x.dim + (max(ranks) - 1 if x.dim > a.op.dims[0] else 0))]
    raise Undecided("chooses among the rows of the batch")


def _batch_norm(a: Applied) -> list[Kind]:
    """The rule of batch normalization: each part uses its own statistics, as documented."""
    x, *others = a.operands
    if x.form != "rows" or x.dim != 0 or any(k.form != "fixed" for k in others):
        raise Undecided("normalizes over dimensions other than the rows of the batch")
    statistic = Kind("open", why="a statistic of batch_norm, which each part has for itself")
    return [x, *[statistic] * (len(a.makes) - 1)]


def _dropout(a: Applied) -> list[Kind]:
    """The rule of random numbers: each part draws its own, as documented."""
    if a.operands[0].form != "rows":
        raise Undecided("draws random numbers for a sum over rows")
    return [a.operands[0]]


_MOVED = (View, Permute, Reorder, Expand, Slice, Pad, Concat, Flip)
Rule = Callable[[Applied], list[Kind]]
RULES: list[tuple[Any, Rule]] = [
    (Elementwise, _elementwise),
    (Cast, _cast),
    (Reduce, _reduce),
    ((CrossEntropy, NLLLoss), _loss),
    (Matmul, _matmul),
    (_MOVED, _moved),
    ((Dropout, DropoutGiven), _dropout),
    ((Convolution, Window, Im2Col, Col2Im, Resampling), _leading(1)),
    (Attention, _leading(2, everywhere=True)),
    ((Gather, Scatter, CumSum, Sort, TopK), _along),
    ((Embedding, LookupRows), _looked_up),
    (Index, _indexed),
    (BatchNorm, _batch_norm),
]
"""Classes of operators -> rule; composites without one are lowered."""

DIRECT = (CrossEntropy, NLLLoss, Dropout, DropoutGiven, BatchNorm, Attention)
"""Operators, composite or not, that have a rule of their own."""

__all__ = ["DIRECT", "FIXED", "ONE", "Applied", "Kind", "Undecided", "results", "sources"]
