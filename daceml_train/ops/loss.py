"""Losses as masks and sums: comparing an index with the target selects a class, so nothing is gathered.

In a kernel such a loss reads its logits once; the comparison costs an integer operation per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Builder, Operator, Value, make
from daceml_train.ops.reduction import require_float, scalar, wide, wide_type
from daceml_train.tensor import Dim, DType, Shape, Tensor, broadcast, same, same_shape, show_shape, simplify

REDUCTIONS = ("mean", "sum", "none")


def check_reduction(label: str, reduction: str) -> None:
    """Raise `Invalid` for an unknown reduction."""
    if reduction not in REDUCTIONS:
        raise Invalid(f"{label} expects a reduction among {', '.join(REDUCTIONS)}, given {reduction!r}")


def check_target(label: str, scores: Tensor, target: Tensor, class_weight: Sequence[Tensor]) -> None:
    """Raise `Invalid` unless scores are [N, C, ...] or [C], and target [N, ...] or [] of integers."""
    require_float(scores, label)
    expected = (*scores.shape[: scores.rank > 1], *scores.shape[2:])
    if scores.rank == 0 or not same_shape(target.shape, expected) or target.dtype not in (DType.int64, DType.int32):
        raise Invalid(f"{label} of {scores} expects an i64 target {show_shape(expected)}, given {target}")
    classes = scores.shape[min(1, scores.rank - 1)]
    if len(class_weight) > 1 or any(not same_shape(w.shape, (classes,)) for w in class_weight):
        raise Invalid(
            f"{label} expects at most one class weight [{classes}], given {', '.join(map(str, class_weight))}"
        )


@dataclass(frozen=True)
class Classes:
    """Targets against the class dimension `dim` of scores of `shape`; a class outside 0..C-1 selects nothing."""

    target: Value
    shape: Shape
    ignore_index: int

    @property
    def dim(self) -> int:
        """The class dimension."""
        return min(1, len(self.shape) - 1)

    @property
    def column(self) -> Shape:
        """The target's sizes with the class dimension as 1."""
        return tuple(1 if d == self.dim else size for d, size in enumerate(self.shape))

    def hot(self) -> Value:
        """A mask: true where the index along the class dimension equals the target."""
        size = tuple(s if d == self.dim else 1 for d, s in enumerate(self.shape))
        (index,) = self.target.builder.emit(make("iota", shape=size, dim=self.dim, dtype=DType.int32))
        return index.compare("eq", self.target.cast(DType.int32).view(self.column))

    def valid(self) -> Value:
        """A mask in the target's shape: true where the target is not ignored."""
        return self.target.compare("ne", self.ignore_index)

    def weights(self, class_weight: Sequence[Value], dtype: DType) -> Value:
        """The weight of each target: its class's, or 1; 0 where ignored."""
        if not class_weight:
            return self.valid().cast(dtype)
        row = class_weight[0].cast(dtype).view(tuple(s if d == self.dim else 1 for d, s in enumerate(self.shape)))
        return self.valid().where(self.hot().where(row, 0.0).sum((self.dim,)), 0.0)


def combine(losses: Value, weights: Value, reduction: str) -> tuple[Value, Value]:
    """(loss, total weight): `losses`, already weighted, reduced. A mean over no weight is NaN, as in PyTorch."""
    dims = tuple(range(len(losses.shape)))
    total = weights.sum(dims)
    if reduction == "none":
        return losses, total
    loss = losses.sum(dims)
    return (loss / total if reduction == "mean" else loss), total


@dataclass(frozen=True)
class NLLLoss(Operator):
    """Negative log likelihood of log-probabilities [N, C, ...] or [C] at integer targets [N, ...] or [].

    Operands: logp, target, and at most one class weight [C]. Results: the loss (0-d, or like the target for `none`)
    and the 0-d total weight of the targets that count, by which `mean` divides. Targets equal to `ignore_index` do not
    count; a target outside 0..C-1 is not detected and contributes nothing.
    """

    name = "nll_loss"
    operands = ("logp", "target", "*class_weight")
    results = ("loss", "total")
    reduction: str = "mean"
    ignore_index: int = -100

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        logp, target, *class_weight = operands
        check_reduction(self.name, self.reduction)
        check_target(self.name, logp, target, class_weight)
        shape = target.shape if self.reduction == "none" else ()
        return Tensor(shape, logp.dtype), Tensor((), wide_type(logp.dtype))

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        logp, target, *class_weight = operands
        classes, v = Classes(target, logp.shape, self.ignore_index), wide(logp)
        weights = classes.weights(class_weight, v.dtype)
        picked = -classes.hot().where(v, 0.0).sum((classes.dim,))
        losses = classes.valid().where(picked * weights if class_weight else picked, 0.0)
        loss, total = combine(losses, weights, self.reduction)
        return loss.cast(logp.dtype), total

    def vjp(
        self,
        b: Builder,
        logp: Value,
        target: Value,
        class_weight: tuple[Value, ...],
        total: Value,
        grad_loss: Value | None,
    ) -> tuple[Value | None, None, tuple[None, ...]]:
        if grad_loss is None:
            return None, None, (None,) * len(class_weight)
        classes = Classes(target, logp.shape, self.ignore_index)
        g = wide(grad_loss) / total if self.reduction == "mean" else wide(grad_loss)
        weights = classes.weights(class_weight, g.dtype)
        each = classes.valid().where(-g * weights, 0.0).view(classes.column)  # zero also where nothing counts
        return classes.hot().where(each, 0.0).cast(logp.dtype), None, (None,) * len(class_weight)

    def flops(self, *operands: Tensor) -> Dim:
        logp, target, *_ = operands
        return simplify(logp.size + 3 * target.size)


def _normalizer(x: Value, dim: int) -> tuple[Value, Value]:
    """The maximum m along a dimension, and `sum(exp(x - m))`."""
    if same(x.shape[dim], 0):
        nothing = x.sum((dim,))
        return nothing, nothing
    highest = x.reduce("max", (dim,), keepdim=True)
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    return highest.view(shape), (x - highest).unary("exp").sum((dim,))


@dataclass(frozen=True)
class CrossEntropy(Operator):
    """Cross-entropy of logits [N, C, ...] or [C] with integer targets [N, ...] or []; e = `label_smoothing`.

    Per target: `logsumexp(x) - (1 - e) x[target] - e / C sum(x)`. Results: the loss (0-d, or like the target for
    `none`), the maximum m of a row and `normalizer = sum(exp(x - m))`, both like the target, and the 0-d number of
    targets that count. The gradient, `(softmax(x) - (1 - e) onehot - e / C) g`, reads x once, m and normalizer, C times
    smaller: rematerializing those would need two more passes over each row; storing the softmax would write and read
    an array as large as x. One number, logsumexp, would be rounded to its own magnitude: where logits are large, all of
    a row's probabilities would be off by the same factor, and gradients would not add up to 0.
    """

    name = "cross_entropy"
    operands = ("logits", "target")
    results = ("loss", "maximum", "normalizer", "total")
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        logits, target = operands
        check_reduction(self.name, self.reduction)
        check_target(self.name, logits, target, ())
        if not 0 <= self.label_smoothing <= 1:
            raise Invalid(f"cross_entropy expects a label smoothing in 0..1, given {self.label_smoothing}")
        statistic = wide_type(logits.dtype)
        shape = target.shape if self.reduction == "none" else ()
        row = Tensor(target.shape, statistic)
        return Tensor(shape, logits.dtype), row, row, Tensor((), statistic)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        logits, target = operands
        classes, x = Classes(target, logits.shape, self.ignore_index), wide(logits)
        dim, smoothing = classes.dim, self.label_smoothing
        maximum, normalizer = _normalizer(x, dim)
        picked = classes.hot().where(x, 0.0).sum((dim,))
        if smoothing:
            share = scalar(b, logits.shape[dim], x.dtype)
            picked = picked * (1 - smoothing) + x.sum((dim,)) * smoothing / share
        losses = classes.valid().where(normalizer.unary("log") - (picked - maximum), 0.0)
        loss, total = combine(losses, classes.weights((), x.dtype), self.reduction)
        return loss.cast(logits.dtype), maximum, normalizer, total

    def vjp(
        self,
        b: Builder,
        logits: Value,
        target: Value,
        maximum: Value,
        normalizer: Value,
        total: Value,
        grad_loss: Value | None,
        grad_normalizer: Value | None,
    ) -> tuple[Value | None, None]:
        """The maximum counts as a constant: functions of it and of the normalizer depend on logsumexp alone."""
        classes, x = Classes(target, logits.shape, self.ignore_index), wide(logits)
        powers, total_power = (x - maximum.view(classes.column)).unary("exp"), normalizer.view(classes.column)
        result = None
        if grad_loss is not None:
            g = wide(grad_loss) / total if self.reduction == "mean" else wide(grad_loss)
            each = classes.valid().where(g, 0.0).view(classes.column)
            smoothing = self.label_smoothing
            expected = classes.hot().where(total_power * (1 - smoothing), 0.0)
            if smoothing:
                expected = expected + total_power * smoothing / scalar(b, logits.shape[classes.dim], x.dtype)
            result = (powers - expected) * (each / total_power)
        if grad_normalizer is not None:
            part = powers * grad_normalizer.view(classes.column)
            result = part if result is None else result + part
        return None if result is None else result.cast(logits.dtype), None

    def flops(self, *operands: Tensor) -> Dim:
        logits, target = operands
        return simplify(15 * logits.size + 16 * target.size)


@dataclass(frozen=True)
class MSELoss(Operator):
    """The squared distance of x and target, which broadcast: its mean, its sum, or `none`: element by element."""

    name = "mse_loss"
    operands = ("x", "target")
    reduction: str = "mean"

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, target = operands
        require_float(x, self.name)
        check_reduction(self.name, self.reduction)
        if x.dtype is not target.dtype:
            raise Invalid(f"mse_loss expects one element type, given {x} and {target}; cast first")
        shape = broadcast(x.shape, target.shape)
        return (Tensor(shape if self.reduction == "none" else (), x.dtype),)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        x, target = operands
        squares = (wide(x) - wide(target)).unary("square")
        dims = tuple(range(len(squares.shape)))
        if self.reduction != "none":
            squares = squares.mean(dims) if self.reduction == "mean" else squares.sum(dims)
        return (squares.cast(x.dtype),)

    def vjp(self, b: Builder, x: Value, target: Value, grad_y: Value) -> tuple[Value, Value]:
        difference, g = wide(x) - wide(target), wide(grad_y)
        if self.reduction == "mean":
            g = g / scalar(b, difference.tensor.size, g.dtype)
        gradient = (difference * (g * 2)).cast(x.dtype)
        return gradient, -gradient

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(3 * Tensor(broadcast(*(t.shape for t in operands))).size)
