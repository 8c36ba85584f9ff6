"""Checkpoints of PyTorch's reentrant kind that give no gradients: PyTorch runs them.

`checkpoint(f, x, use_reentrant=True)`, which is what `checkpoint(f, x)` means, gives no gradient to the parameters in
`f` unless an argument requires one. TorchDynamo has one kind of checkpoint, which always does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable

from daceml_train.frontends.torch.traces import Traces


@functools.cache
def _install() -> None:
    checkpoints: Any = higher_order_ops.CheckpointHigherOrderVariable
    call = checkpoints._call_function

    @functools.wraps(call)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if traces.depth and torch.is_grad_enabled() and _is_reentrant(kwargs):
            if not _has_gradient(args[1:]):
                unimplemented(
                    gb_type="a reentrant checkpoint none of whose arguments requires a gradient",
                    context="use_reentrant=True",
                    explanation="It gives no gradients to the parameters in it.",
                    hints=["Pass use_reentrant=False to checkpoint."],
                )
            kwargs = kwargs | {"use_reentrant": ConstantVariable.create(False)}  # which gives the same gradients then
        return call(self, tx, args, kwargs)

    checkpoints._call_function = call_function


def _is_reentrant(kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("use_reentrant")
    return given is None or given.as_python_constant() in (None, True)


def _has_gradient(arguments: Any) -> bool:
    """Whether a tensor among the arguments requires a gradient; those inside of lists do not count."""
    found = (argument.realize() for argument in arguments)
    return any(isinstance(argument, TensorVariable) and argument.requires_grad for argument in found)


traces = Traces(_install)
"""Traces with checkpoints as in PyTorch."""
