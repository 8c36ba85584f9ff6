"""Stack rules: an operator on values of K trials, which lie in a new first dimension, leaf by leaf.

A rule is handed the operands with a flag for each that is stacked, emits operators on them, and returns stacked
results. A rule sees only operators of which at least one operand is stacked: what no trial has for itself is computed
once for all. Rows of a result are what the operator computes from the rows of its operands, rounded differently at most
where a library multiplies matrices of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daceml_train.errors import Unsupported
from daceml_train.ops.attention import ScaledDotProduct
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.convolution import Convolution, ConvolutionInputGrad, ConvolutionWeightGrad
from daceml_train.ops.elementwise import Cast, Elementwise, Iota
from daceml_train.ops.embedding import Embedding, EmbeddingGrad
from daceml_train.ops.indexing import Gather, Index, IndexPut, Scatter
from daceml_train.ops.movement import Concat, Expand, Flip, Pad, Permute, Reorder, Slice, View
from daceml_train.ops.operator import Operator, Value
from daceml_train.ops.ordering import CumSum, Sort, TopK
from daceml_train.ops.pooling import Window
from daceml_train.ops.reduction import Reduce
from daceml_train.ops.requirement import Require
from daceml_train.ops.resample import Col2Im, Im2Col, Resampling
from daceml_train.tensor import Dim, same, simplify


@dataclass(frozen=True)
class Operand:
    """An operand of an operator: its value, of which the first dimension is that of trials if it is `stacked`."""

    value: Value
    stacked: bool

    @property
    def rank(self) -> int:
        """The rank for one trial."""
        return len(self.value.shape) - self.stacked

    def everywhere(self, count: int) -> Value:
        """The value, stacked."""
        return self.value if self.stacked else self.value.expand((count, *self.value.shape))

    def of_rank(self, rank: int) -> Value:
        """A value that broadcasts against those of this rank for one trial, stacked or not."""
        shape = self.value.shape
        return self.value.view((shape[0], *(1,) * (rank - self.rank), *shape[1:])) if self.stacked else self.value


@dataclass(frozen=True)
class Stacking:
    """An operator, its operands, and the number of trials."""

    op: Any
    operands: Sequence[Operand]
    count: int

    def all(self) -> list[Value]:
        """The operands, all stacked."""
        return [operand.everywhere(self.count) for operand in self.operands]

    def emit(self, op: Operator, *operands: Value) -> Sequence[Value]:
        """The results of an operator."""
        return operands[0].builder.emit(op, *operands)


def stacked_results(stacking: Stacking) -> Sequence[Value]:
    """The results of an operator for all trials. Raises `Unsupported` where it has no rule."""
    for kinds, rule in RULES:
        if isinstance(stacking.op, kinds):
            return rule(stacking)
    raise Unsupported(f"{stacking.op.label} has no rule for several trials in one program")


def _elementwise(s: Stacking) -> Sequence[Value]:
    rank = max(operand.rank for operand in s.operands)
    return s.emit(s.op, *(operand.of_rank(rank) for operand in s.operands))


def _shifted(name: str) -> Callable[[Stacking], Sequence[Value]]:
    """The rule of operators with a dimension, or with several, as the attribute `name`."""

    def rule(s: Stacking) -> Sequence[Value]:
        dims = getattr(s.op, name)
        later = dims + 1 if isinstance(dims, int) else tuple(d + 1 for d in dims)
        return s.emit(replace(s.op, **{name: later}), *s.all())

    return rule


def _movement(s: Stacking) -> Sequence[Value]:
    (x,) = s.all()
    match s.op:
        case View(shape=shape):
            return (x.view((s.count, *shape)),)
        case Permute(dims=dims):
            return (x.permute((0, *_after(dims))),)
        case Reorder(order=order):
            return s.emit(Reorder((0, *_after(order))), x)
        case Expand(shape=shape):
            return (s.operands[0].of_rank(len(shape)).expand((s.count, *shape)),)
        case Pad(pads=pads):
            return s.emit(replace(s.op, pads=((0, 0), *pads)), x)
    raise AssertionError(s.op)


def _after(dims: Iterable[int]) -> tuple[int, ...]:
    return tuple(d + 1 for d in dims)


def _require(s: Stacking) -> Sequence[Value]:
    (holds,) = s.all()
    (checked,) = s.emit(s.op, holds.reduce("min", (0,)))
    return (checked.expand((s.count,)),)


def _matmul(s: Stacking) -> Sequence[Value]:
    """One matmul of larger matrices where the trials share an operand; else a batch of matmuls."""
    a, b = s.operands
    if a.rank == 3:
        x, y = (_merged(value, 2) for value in s.all())
        return (_parted(x @ y, s.count),)
    if not b.stacked:
        rows = a.value.view((simplify(a.value.shape[0] * a.value.shape[1]), a.value.shape[2]))
        return (_parted(rows @ b.value, s.count),)
    if not a.stacked:
        columns = b.value.T
        columns = columns.view((simplify(columns.shape[0] * columns.shape[1]), columns.shape[2]))
        return (_parted(columns @ a.value.T, s.count).T,)
    return (a.value @ b.value,)


def _merged(x: Value, dims: int) -> Value:
    """The first `dims` dimensions as one."""
    size: Dim = 1
    for d in range(dims):
        size = simplify(size * x.shape[d])
    return x.view((size, *x.shape[dims:]))


def _parted(x: Value, count: int) -> Value:
    """The first dimension in `count` parts."""
    size = x.shape[0]
    each = size // count if isinstance(size, int) else simplify(size / count)
    return x.view((count, each, *x.shape[1:]))


def _rows(s: Stacking) -> Sequence[Value]:
    """The rule of operators that are independent per index of their operands' first dimension."""
    op = s.op
    if isinstance(op, Im2Col | Col2Im) and s.operands[0].rank == (3 if isinstance(op, Im2Col) else 2):
        return s.emit(op, *s.all())  # of one image, without a dimension for several
    if hasattr(op, "input_shape"):
        (first, *rest) = op.input_shape
        op = replace(op, input_shape=(simplify(first * s.count), *rest))
    results = s.emit(op, *(_merged(value, 2) for value in s.all()))
    return [_parted(value, s.count) for value in results]


def _attention(s: Stacking) -> Sequence[Value]:
    """Trials are further images of a batch; random numbers would be those of other elements."""
    if getattr(s.op, "p", 0.0):
        raise Unsupported(f"{s.op.label} with dropout has no rule for several trials in one program")
    first = list(s.op.operands).index(s.op.operands[-1])
    arrays, masks = s.operands[:first], s.operands[first:]
    batch = arrays[0].value.shape[arrays[0].stacked]
    given = [_merged(operand.everywhere(s.count), 2) for operand in arrays]
    results = s.emit(s.op, *given, *(_mask(mask, batch, s.count) for mask in masks))
    return [_parted(value, s.count) for value in results]


def _mask(mask: Operand, batch: Dim, count: int) -> Value:
    if not mask.stacked and (mask.rank < 4 or same(mask.value.shape[0], 1)):
        return mask.value
    value = mask.of_rank(4) if mask.stacked else mask.everywhere(count)
    return _merged(value.expand((count, batch, *value.shape[2:])), 2)


# ---- convolutions: trials are groups of channels -------------------------------------------------------------------
def _as_channels(x: Value) -> Value:
    """Images [T, N, C, ...] as [N, T C, ...]."""
    x = x.permute((1, 0, *range(2, len(x.shape))))
    return x.view((x.shape[0], simplify(x.shape[1] * x.shape[2]), *x.shape[3:]))


def _as_trials(x: Value, count: int) -> Value:
    """Images [N, T C, ...] as [T, N, C, ...]."""
    each = simplify(x.shape[1] / count) if not isinstance(x.shape[1], int) else x.shape[1] // count
    x = x.view((x.shape[0], count, each, *x.shape[2:]))
    return x.permute((1, 0, *range(2, len(x.shape))))


def _images(s: Stacking, images: Operand) -> tuple[Value, int]:
    """Images as the convolution of all trials reads them, and its groups: the trials may share them."""
    if not images.stacked and s.op.groups == 1 and not s.op.transposed:
        return images.value, 1
    return _as_channels(images.everywhere(s.count)), s.op.groups * s.count


def _convolution(s: Stacking) -> Sequence[Value]:
    x, *weights = s.operands
    images, groups = _images(s, x)
    merged = (_merged(operand.everywhere(s.count), 2) for operand in weights)
    return [_as_trials(y, s.count) for y in s.emit(replace(s.op, groups=groups), images, *merged)]


def _convolution_input_grad(s: Stacking) -> Sequence[Value]:
    grad, w = s.all()
    (images, channels, *sizes) = s.op.input_shape
    shape = (images, simplify(channels * s.count), *sizes)
    op = replace(s.op, groups=s.op.groups * s.count, input_shape=shape)
    return [_as_trials(x, s.count) for x in s.emit(op, _as_channels(grad), _merged(w, 2))]


def _convolution_weight_grad(s: Stacking) -> Sequence[Value]:
    grad, x = s.operands
    images, groups = _images(s, x)
    (first, *rest) = s.op.weight_shape
    op = replace(s.op, groups=groups, weight_shape=(simplify(first * s.count), *rest))
    return [_parted(w, s.count) for w in s.emit(op, _as_channels(grad.everywhere(s.count)), images)]


# ---- tables ---------------------------------------------------------------------------------------------------------
def _numbered(indices: Operand, rows: Dim, count: int) -> Value:
    """Row numbers in a table that consists of those of all trials."""
    (first,) = indices.value.builder.emit(Iota((count,), dtype=indices.value.dtype, step=rows))
    shifted = first.view((count, *(1,) * indices.rank)) + indices.of_rank(indices.rank)
    return shifted.expand((count, *shifted.shape[1:]))


def _embedding(s: Stacking) -> Sequence[Value]:
    table, indices = s.operands
    rows = table.value.shape[-2]
    (found,) = s.emit(
        Embedding(sparse=s.op.sparse), _merged(table.everywhere(s.count), 2), _numbered(indices, rows, s.count)
    )
    return (found,)


def _embedding_grad(s: Stacking) -> Sequence[Value]:
    grad, indices = s.operands
    value = grad.everywhere(s.count)
    if s.op.padding_idx >= 0:
        padding = indices.of_rank(indices.rank).compare("eq", s.op.padding_idx)
        value = padding.view((*padding.shape, 1)).where(0.0, value)
    op = EmbeddingGrad(simplify(s.op.rows * s.count))
    return [_parted(table, s.count) for table in s.emit(op, value, _numbered(indices, s.op.rows, s.count))]


def _index(s: Stacking) -> Sequence[Value]:
    """The rule of positions that the trials share, in dimensions that are next to each other."""
    arrays = 1 if isinstance(s.op, Index) else 2
    dims = s.op.dims
    if any(index.stacked for index in s.operands[arrays:]) or dims != tuple(range(dims[0], dims[0] + len(dims))):
        raise Unsupported(f"{s.op.label} at positions of each trial has no rule for several trials in one program")
    values = [x.everywhere(s.count) for x in s.operands[:arrays]]
    return s.emit(replace(s.op, dims=_after(dims)), *values, *(index.value for index in s.operands[arrays:]))


Rule = Callable[[Stacking], Sequence[Value]]
RULES: list[tuple[Any, Rule]] = [
    ((Elementwise, Cast), _elementwise),
    ((Reduce, Flip), _shifted("dims")),
    ((Slice, Concat, Gather, Scatter, CumSum, Sort, TopK), _shifted("dim")),
    ((View, Permute, Reorder, Expand, Pad), _movement),
    (Require, _require),
    (Matmul, _matmul),
    ((Window, Im2Col, Col2Im, Resampling), _rows),
    (Convolution, _convolution),
    (ConvolutionInputGrad, _convolution_input_grad),
    (ConvolutionWeightGrad, _convolution_weight_grad),
    (Embedding, _embedding),
    (EmbeddingGrad, _embedding_grad),
    ((Index, IndexPut), _index),
    (ScaledDotProduct, _attention),
]
"""Classes of leaves -> rule."""

__all__ = ["RULES", "Operand", "Stacking", "stacked_results"]
