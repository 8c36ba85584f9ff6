"""Attributes that `object.__setattr__` hides from a module break the graph: TorchDynamo would register them with it.

People keep a module or a parameter out of `state_dict` and `parameters` that way. TorchDynamo repeats the assignment as
`setattr`, which is the module's own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.nn_module import NNModuleVariable, UnspecializedNNModuleVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from daceml_train.frontends.torch.traces import Traces

_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _is_registered(owner: Any, name: Any, value: Any) -> bool:
    """Whether a module's own `setattr` would register a value, or replace what is registered."""
    value = value.realize()
    if isinstance(value, NNModuleVariable | UnspecializedNNModuleVariable):
        return True
    if value.is_tensor() and value.python_type() is torch.nn.Parameter:
        return True
    known = (vars(owner.value).get(registry, ()) for registry in _REGISTRIES)
    return not name.is_python_constant() or any(name.as_python_constant() in names for names in known)


def _check(args: Any) -> None:
    owner = args[0].realize()
    if isinstance(owner, UnspecializedNNModuleVariable) and _is_registered(owner, *args[1:]):
        unimplemented(
            gb_type="object.__setattr__ of a module",
            context=str(args[1]),
            explanation="A module or parameter that is hidden from the module whose attribute it is.",
            hints=[],
        )


@functools.cache
def _install() -> None:
    builtin: Any = BuiltinVariable
    call = builtin.call_method

    @functools.wraps(call)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if traces.depth and self.fn is object and name == "__setattr__" and len(args) == 3:
            _check(args)
        return call(self, tx, name, args, kwargs)

    builtin.call_method = call_method
    descriptors: Any = TorchInGraphFunctionVariable  # after a graph break within the arguments
    call_descriptor = descriptors.call_function

    @functools.wraps(call_descriptor)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if traces.depth and self.value is object.__setattr__ and len(args) == 3:
            _check(args)
        return call_descriptor(self, tx, args, kwargs)

    descriptors.call_function = call_function


traces = Traces(_install)
"""Traces in which they do."""
