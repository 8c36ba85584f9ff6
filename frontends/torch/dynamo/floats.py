"""Python floats that users change between steps: the probability of dropout, label smoothing, a model's own floats.

TorchDynamo burns a float in until it has seen it change, and whatever PyTorch's own functions take as a C++ number
for ever. Here those that are hyper-parameters are inputs from the first trace on, so that no value of theirs is in
a program, and the functions that take them are composed of operators that read them. Comparisons with them (`p ==
0`) are guards.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import UserFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from daceml_train import logs
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.dynamo.float_functions import FUNCTIONS
from daceml_train.frontends.torch.traces import Traces

Result = TypeVar("Result")
_traces = threading.local()


def traced(call: Callable[[], Result]) -> Result:
    """The result of a call that may be traced, with such inputs.

    What cannot be traced with them, as a size that is computed from one, is traced with constants, and the log of
    recompilations says so: each of their values has a program. Errors of programs that ran are not caught.
    """
    _install()
    for _ in range(2):
        _traces.used, _traces.all, _traces.of_model = False, False, None
        try:
            with _mode("inputs"):
                return call()
        except (TorchDynamoException, Unsupported) as error:
            if not _traces.used:
                raise
            reason = str(error).partition("\n")[0]
            if not _traces.all:
                logs.event(logs.RECOMPILES, f"floats of the model and the loss are constants of the program: {reason}")
                break
            _traces.of_model.refused = True
            logs.event(logs.RECOMPILES, f"floats of the model become inputs one by one: {reason}")
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


_OF_MODULES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.modules.dropout._DropoutNd, "p"),
    (nn.CrossEntropyLoss, "label_smoothing"),
)
"""Floats of PyTorch's modules that a function of ours reads."""
_OF_LARGE_MODULES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.MultiheadAttention, "dropout"),
    (nn.RNNBase, "dropout"),
)
"""The same, but not where they are zero, which is the rule: PyTorch's function is then called as it is."""


class _Held:
    """The floats that the modules of a model hold, as they were traced, by module and name."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], tuple[weakref.ref[nn.Module], float]] = {}
        self.inputs = False
        """Whether one of them has changed since; from then on all are inputs."""
        self.refused = False
        """Whether a trace with all of them as inputs has failed."""

    def note(self, owner: nn.Module, name: str, value: float) -> None:
        self.values[id(owner), name] = weakref.ref(owner), value

    def changed(self) -> bool:
        return any(
            (owner := reference()) is not None and vars(owner).get(name) != value
            for (_, name), (reference, value) in self.values.items()
        )


_held: weakref.WeakKeyDictionary[nn.Module, _Held] = weakref.WeakKeyDictionary()


def note(model: nn.Module, inputs: Iterable[tuple[Any, str]]) -> None:
    """Note the floats of a model as if it had been traced; some of them are `inputs`: objects, and names of floats."""
    held = _held.setdefault(model, _Held())
    for module in model.modules():
        for name, value in vars(module).items() if _of_user(module) else ():
            if type(value) is float:
                held.note(module, name, value)
    held.inputs = held.inputs or any(_of_user(owner) for owner, _ in inputs)


def _of_user(owner: Any) -> bool:
    """Whether an object is a module, and none of PyTorch's."""
    return isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch.nn.")


def _hyperparameter(builder: Any, value: float) -> bool:
    """Whether a float is a hyper-parameter by where it is: in the loss, or the one that an operator of ours reads.

    What a model's own modules hold is a constant until one of these floats changes; then all of them are inputs. What
    else modules of PyTorch hold, and what a model computes from its sizes (the scale of attention), is a constant
    until it changes itself.
    """
    source = builder.source
    if _of_optimizer(source):
        return value > 0
    if not isinstance(source, AttrSource):
        return False
    frame = builder.tx.output.root_tx
    owner = source.base.get_value({"G": frame.f_globals, "L": frame.f_locals}, {}, {})
    if any(isinstance(owner, kind) and source.member == name for kind, name in _OF_MODULES):
        return True
    if value > 0 and any(isinstance(owner, kind) and source.member == name for kind, name in _OF_LARGE_MODULES):
        return True
    if not _of_user(owner):
        return False
    if source.name.startswith("L['self'].loss"):
        return True
    return source.name.startswith("L['self'].model") and _of_model(builder, owner, source.member, value)


def _of_optimizer(source: Any) -> bool:
    """Whether this is an option or a state of an optimizer whose step is traced."""
    return bool(source.name.startswith("L['self'].optimizer."))


def _of_model(builder: Any, owner: nn.Module, name: str, value: float) -> bool:
    """Whether a float of a model is an input, by what the floats of the model were at earlier traces."""
    model = getattr(builder.tx.output.root_tx.f_locals.get("self"), "model", None)
    if not isinstance(model, nn.Module):
        return False
    held = _held.setdefault(model, _Held())
    if _traces.of_model is None:  # the first one of this trace
        _traces.of_model = held
        held.inputs = held.inputs or held.changed()
    held.note(owner, name, value)
    _traces.all = held.inputs and not held.refused
    return bool(_traces.all)


@functools.cache
def _install() -> None:
    builder: Any = VariableBuilder
    functions: Any = TorchInGraphFunctionVariable
    wrap, call, wrap_integer = builder.wrap_symfloat, functions.call_function, builder.wrap_symint

    def wrap_symfloat(self: Any, value: float) -> Any:
        mode = getattr(_traces, "mode", "")
        if mode == "constants":
            with _setting("specialize_float", True):
                return wrap(self, value)
        if mode != "inputs":
            return wrap(self, value)
        if _hyperparameter(self, value):
            with _setting("assume_static_by_default", False):
                found = wrap(self, value)
        else:
            found = wrap(self, value)
        _traces.used = _traces.used or isinstance(found, SymNodeVariable)
        return found

    def wrap_symint(self: Any, value: int, *arguments: Any, **keywords: Any) -> Any:
        if getattr(_traces, "mode", "") != "inputs" or value < 2 or not _of_optimizer(self.source):
            return wrap_integer(self, value, *arguments, **keywords)
        with _setting("assume_static_by_default", False):  # a counter, which the next step changes
            found = wrap_integer(self, value, *arguments, **keywords)
        _traces.used = _traces.used or isinstance(found, SymNodeVariable)
        return found

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        mode = getattr(_traces, "mode", "")
        ours = mode == "inputs" or (mode != "constants" and traces.depth)
        found = FUNCTIONS.get(self.value) if ours else None
        if found is not None:
            try:
                number = found[0](*args, **kwargs)
            except TypeError:  # arguments of another number or name, which PyTorch refuses
                number = None
            if number is not None and isinstance(number.realize(), SymNodeVariable):
                return UserFunctionVariable(found[1]).call_function(tx, args, kwargs)
        return call(self, tx, args, kwargs)

    builder.wrap_symfloat, functions.call_function, builder.wrap_symint = wrap_symfloat, call_function, wrap_symint


traces = Traces(_install)
"""Traces in which functions read numbers that have become inputs."""
