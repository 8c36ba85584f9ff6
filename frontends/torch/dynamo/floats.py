"""Python floats that users change between steps: the probability of dropout, label smoothing, numbers of a loss.

TorchDynamo burns a float in until it has seen it change, and whatever PyTorch's own functions take as a C++ number
for ever. Here those that are hyper-parameters are inputs from the first trace on, so that no value of theirs is in
a program, and the functions that take them are composed of operators that read them. Comparisons with them (`p ==
0`) are guards.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import UserFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from daceml_train import logs
from daceml_train.errors import Unsupported

Result = TypeVar("Result")
_traces = threading.local()


def traced(call: Callable[[], Result], wanted: bool) -> Result:
    """The result of a call that may be traced, with such inputs if they are `wanted`.

    What cannot be traced with them, as a size that is computed from one, is traced with constants, and the log of
    recompilations says so: each of their values has a program. Errors of programs that ran are not caught.
    """
    if not wanted:
        return call()
    _install()
    _traces.used = False
    try:
        with _mode("inputs"):
            return call()
    except (TorchDynamoException, Unsupported) as error:
        if not _traces.used:
            raise
        reason = str(error).partition("\n")[0]
        logs.event(logs.RECOMPILES, f"floats of the model and the loss are constants of the program: {reason}")
    with _mode("constants"):
        return call()


@contextlib.contextmanager
def _mode(mode: str) -> Iterator[None]:
    before, _traces.mode = getattr(_traces, "mode", ""), mode
    try:
        yield
    finally:
        _traces.mode = before


@contextlib.contextmanager
def _setting(name: str, value: bool) -> Iterator[None]:
    before = getattr(torch._dynamo.config, name)
    setattr(torch._dynamo.config, name, value)
    try:
        yield
    finally:
        setattr(torch._dynamo.config, name, before)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`F.dropout` with a probability that is an input; nothing and everything dropped are programs of their own."""
    if p < 0.0 or p > 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return input
    if p == 1.0:
        return F.dropout(input, 1.0, True, False)
    result: Tensor = torch.ops.daceml_train.dropout(input, p)
    return result


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of class indices with a label smoothing that is an input, composed as ATen does it."""
    if label_smoothing < 0.0 or label_smoothing > 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    if label_smoothing == 0.0:
        return F.cross_entropy(input, target, ignore_index=ignore_index, reduction=reduction)
    dim = 0 if input.dim() == 1 else 1
    classes = input.shape[dim]
    logp = F.log_softmax(input, dim)
    picked = F.nll_loss(logp, target, ignore_index=ignore_index, reduction=reduction)
    ignored = target == ignore_index
    smooth = (-logp.sum(dim)).masked_fill(ignored, 0.0)
    if reduction == "mean":
        smooth = smooth.sum() / torch.logical_not(ignored).sum()
    elif reduction == "sum":
        smooth = smooth.sum()
    return (1 - label_smoothing) * picked + smooth * (label_smoothing / classes)


def _plain_dropout(input: Any, p: Any = None, training: Any = None, inplace: Any = None) -> Any:
    """The probability of a call of dropout that can be replaced; else None."""
    return p if inplace is None or (inplace.is_python_constant() and not inplace.as_python_constant()) else None


def _smoothing_of_indices(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = None,
    reduce: Any = None,
    reduction: Any = None,
    label_smoothing: Any = None,
) -> Any:
    """The smoothing of a cross entropy of class indices without weights; else None."""
    absent = all(x is None or x.is_constant_none() for x in (weight, size_average, reduce))
    example = target.as_proxy().node.meta.get("example_value") if absent else None
    indices = isinstance(example, Tensor) and not example.is_floating_point()
    return label_smoothing if indices else None


_FUNCTIONS: dict[Any, tuple[Callable[..., Any], Any]] = {
    F.dropout: (_plain_dropout, dropout),
    F.cross_entropy: (_smoothing_of_indices, cross_entropy),
}
"""Function of PyTorch -> the number of a call that may be an input, and the function that can read it."""


def _hyperparameter(builder: Any) -> bool:
    """Whether a float is a hyper-parameter by where it is: in the loss, or the one that an operator of ours reads.

    What else modules of PyTorch hold, and what a model computes from its sizes (the scale of attention), is a constant
    until it changes.
    """
    source = builder.source
    if not isinstance(source, AttrSource):
        return False
    owner = builder.tx.output.resolve_source_value(source.base)
    if isinstance(owner, nn.modules.dropout._DropoutNd):
        return bool(source.member == "p")
    if isinstance(owner, nn.CrossEntropyLoss):
        return bool(source.member == "label_smoothing")
    own = isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch.nn.")
    return own and source.name.startswith("L['self'].loss")


@functools.cache
def _install() -> None:
    builder: Any = VariableBuilder
    functions: Any = TorchInGraphFunctionVariable
    wrap, call = builder.wrap_symfloat, functions.call_function

    def wrap_symfloat(self: Any, value: float) -> Any:
        mode = getattr(_traces, "mode", "")
        if mode == "constants":
            with _setting("specialize_float", True):
                return wrap(self, value)
        if mode != "inputs":
            return wrap(self, value)
        if _hyperparameter(self):
            with _setting("assume_static_by_default", False):
                found = wrap(self, value)
        else:
            found = wrap(self, value)
        _traces.used = _traces.used or isinstance(found, SymNodeVariable)
        return found

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found = _FUNCTIONS.get(self.value) if getattr(_traces, "mode", "") == "inputs" else None
        if found is not None:
            number = found[0](*args, **kwargs)
            if number is not None and isinstance(number.realize(), SymNodeVariable):
                return UserFunctionVariable(found[1]).call_function(tx, args, kwargs)
        return call(self, tx, args, kwargs)

    builder.wrap_symfloat, functions.call_function = wrap_symfloat, call_function
