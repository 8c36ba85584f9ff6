"""What TorchDynamo takes for what never changes is guarded: methods of classes, and that two objects are not one.

A method that is replaced in its class, or whose code is, is traced again. TorchDynamo guards functions that are global
variables alone; Jupyter's `autoreload` changes the code of methods, and people assign others. And where the model asks
whether `a is b`, as for weights that may be tied, both are guarded if they are not.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import TypeDictSource
from torch._dynamo.symbolic_convert import compare_op_handlers
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserMethodVariable

from daceml_train.frontends.torch.traces import Traces, for_backend

_SEEN = "_daceml_train_methods"
"""The attribute of a trace that has the functions which it guards."""


@functools.cache
def _install() -> None:
    methods: Any = UserMethodVariable
    original = methods.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, *given: Any, **more: Any) -> Any:
        if self.source_fn is not None and (traces.depth or for_backend(tx.output.compiler_fn)):
            _guard_method(tx.output, self)
        return original(self, tx, *given, **more)

    methods.call_function = call_function
    for name, same in (("is", True), ("is not", False)):
        compare_op_handlers[name] = functools.partial(_compared, compare_op_handlers[name], same)


def _compared(compare: Any, same: bool, tx: Any, operands: Any, *more: Any) -> Any:
    """The answer to `a is b`, or to `a is not b`."""
    found = compare(tx, operands, *more)
    ours = traces.depth or for_backend(tx.output.compiler_fn)
    if ours and found.is_python_constant() and found.as_python_constant() is not same:
        _guard_difference(*operands)
    return found


def _guard_method(trace: Any, method: Any) -> None:
    seen: set[Any] = vars(trace).setdefault(_SEEN, set())
    function, owner = method.fn, method.obj
    if type(function) is not types.FunctionType or (function.__module__ or "").startswith("torch."):
        return
    if id(function) not in seen:
        seen.add(id(function))
        install_guard(method.source_fn.make_guard(GuardBuilder.CLOSURE_MATCH))
    kind, name, source = type(getattr(owner, "value", None)), function.__name__, getattr(owner, "cls_source", None)
    if source is None or (kind, name) in seen or name in vars(kind):
        return
    if getattr(kind, name, None) is function:  # inherited: TorchDynamo guards the bases between, and not the class
        seen.add((kind, name))
        missing = functools.partial(GuardBuilder.DICT_NOT_CONTAINS, key=name)
        install_guard(TypeDictSource(source).make_guard(missing))


def _guard_difference(left: Any, right: Any) -> None:
    """Guard two objects of one type that are not the same, unless TorchDynamo does: tensors, except for parameters."""
    sources = left.source, right.source
    if None in sources or sources[0] == sources[1] or isinstance(left, ConstantVariable):
        return
    try:
        kinds = {left.python_type(), right.python_type()}
    except NotImplementedError:
        return
    tensors = left.is_tensor() or right.is_tensor()
    if len(kinds) == 1 and (not tensors or kinds == {torch.nn.Parameter}):
        for source in sources:
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))


traces = Traces(_install)
"""Traces that guard them."""
