"""Requirements on data: PyTorch's checks of values, as operators that a graph's results depend on."""

from __future__ import annotations

from daceml_train.frontends.torch.rules.translate import Translator, rule
from daceml_train.ops.operator import Value
from daceml_train.tensor import Dim, DType


def required(t: Translator, holds: Value, message: str) -> Value:
    """A 0-d truth value that is true, or a run-time error; `holds` has to be true everywhere."""
    bad = holds.unary("logical_not").cast(DType.int64).sum(tuple(range(len(holds.shape))))
    return t.emit("require", bad.compare("eq", 0), message=message)


def index_within(t: Translator, index: Value, size: Dim, message: str, ignored: int | None = None) -> Value:
    """`index` with every element in 0..size-1, or equal to `ignored`; a run-time error otherwise."""
    inside = t.emit("logical_and", index.compare("ge", 0), index.compare("lt", t.value(size, index.dtype)))
    if ignored is not None:
        inside = t.emit("logical_or", inside, index.compare("eq", ignored))
    return required(t, inside, message).where(index, 0)


@rule("daceml_train.require.default")
def _require(t: Translator, x: Value, holds: Value, message: str) -> Value:
    return required(t, holds, message).where(x, 0)


@rule("_functional_assert_async.msg", "_assert_async.msg")
def _assertion(t: Translator, holds: Value, message: str, token: Value | None = None) -> Value | None:
    """A check without a result: the graph's results depend on it, see `Translator.dependent`."""
    truth = holds if holds.dtype is DType.bool else holds.compare("ne", 0)
    t.required.append(required(t, truth, message))
    return token


@rule("_assert_async.default")
def _plain_assertion(t: Translator, holds: Value) -> None:
    _assertion(t, holds, "Expected Tensor with single nonzero value, but got zero")
