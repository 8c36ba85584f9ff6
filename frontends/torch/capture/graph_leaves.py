"""`x.requires_grad = True` in a forward pass, for a tensor of the pass itself: a leaf that is invisible outside.

TorchDynamo breaks the graph at the assignment. Its only effects are that the backward pass fills `x.grad`, and that
values computed from `x` have a gradient; if the graph does not return `x`, nobody can read the former, and the
parameters' gradients are the same without it. Audio models of `transformers` assign it for checkpointing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables import builtin
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.dynamo.origin import origin
from daceml_train.frontends.torch.traces import Traces

MARK = "daceml_train leaf"
"""Key in `meta` of the node that becomes a leaf, and of the call that does so."""


@functools.cache
def _install() -> None:
    builtins: Any = getattr(builtin, "SetAttrBuiltinVariable", None)  # since PyTorch 2.13; before, the graph breaks
    if builtins is None:
        return
    original = builtins._call_setattr

    def call(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
        named = name.is_python_constant() and name.as_python_constant() == "requires_grad"
        if not (traces.depth and named and isinstance(obj, TensorVariable) and obj.source is None):
            return original(self, tx, obj, name, value)
        node = obj.as_proxy().node
        example = node.meta.get("example_value")
        given = value.as_python_constant() if value.is_python_constant() else None
        if given is not True or not isinstance(example, torch.Tensor) or not example.is_floating_point():
            return original(self, tx, obj, name, value)
        if not example.requires_grad:
            call = tx.output.create_proxy("call_method", "requires_grad_", (obj.as_proxy(),), {})
            node.meta[MARK] = call.node.meta[MARK] = True
            example.requires_grad_()
            obj.requires_grad = True
        return ConstantVariable.create(None)

    builtins._call_setattr = call


traces = Traces(_install)
"""Traces that may contain such assignments."""


def refuse_if_seen(gm: fx.GraphModule) -> None:
    """Raise if the graph returns a leaf of its own, or a view of it: the caller could read its gradient."""
    marked = [node for node in gm.graph.nodes if node.meta.get(MARK) and node.op != "call_method"]
    if not marked:
        return
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    returned = {_memory(node) for node in output.all_input_nodes}
    for node in marked:
        if _memory(node) in returned:
            raise Unsupported(
                "requires_grad = True of a tensor that the graph returns",
                where=str(origin(node)),
                advice="set it outside the model",
            )


def _memory(node: fx.Node) -> Any:
    example = node.meta.get("example_value")
    return example.untyped_storage()._cdata if isinstance(example, torch.Tensor) else node
