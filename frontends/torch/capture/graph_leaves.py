"""`x.requires_grad = True` or `x.requires_grad_()` in a forward pass, for a tensor of the pass itself: an inner leaf.

TorchDynamo breaks the graph at the assignment, and at the call where the graph returns what is computed from `x`. Their
only effects are that the backward pass fills `x.grad`, and that values computed from `x` have a gradient; if the graph
does not return `x`, nobody can read the former, and the parameters' gradients are the same without it. Gradient
penalties call it for `torch.autograd.grad`; audio models of `transformers` assign it for checkpointing.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._dynamo.output_graph import OutputGraph
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
    if builtins is not None:
        assign = builtins._call_setattr

        def assigned(self: Any, tx: Any, obj: Any, name: Any, value: Any) -> Any:
            named = name.is_python_constant() and name.as_python_constant() == "requires_grad"
            if named and _becomes_leaf(tx, obj, value):
                return ConstantVariable.create(None)
            return assign(self, tx, obj, name, value)

        builtins._call_setattr = assigned
    graphs: Any = OutputGraph
    check = getattr(graphs, "_check_requires_grad_intermediate_outputs", None)
    if check is None:  # before PyTorch 2.12, the graph breaks at each call
        return
    tensors: Any = TensorVariable
    call = tensors.method_requires_grad_

    def called(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        return self if _becomes_leaf(tx, self, requires_grad) else call(self, tx, requires_grad)

    tensors.method_requires_grad_ = called

    def checked(self: Any, results: Any, tx: Any) -> Any:
        """PyTorch refuses whatever is computed from a leaf; here it is the leaf alone, and what shares its memory."""
        leaves = vars(self).get(_LEAVES, [])
        memory = {_memory(leaf.as_proxy().node) for leaf in leaves}
        if any(isinstance(r, TensorVariable) and _memory(r.as_proxy().node) in memory for r in results):
            self.leaf_var_creation_order += leaves
        return check(self, results, tx)

    graphs._check_requires_grad_intermediate_outputs = checked


def _becomes_leaf(tx: Any, tensor: Any, value: Any) -> bool:
    """Note in the graph that a tensor of its own becomes a leaf; false if that is for TorchDynamo to trace."""
    if not (traces.depth and isinstance(tensor, TensorVariable) and tensor.source is None):
        return False
    node = tensor.as_proxy().node
    example = node.meta.get("example_value")
    given = value if isinstance(value, bool) else value.is_python_constant() and value.as_python_constant()
    if given is not True or not isinstance(example, torch.Tensor) or not example.is_floating_point():
        return False
    if getattr(tx.speculation_log, "graph_break_on_requires_grad_", False):
        return False  # the graph returns it, as an earlier attempt has found
    if not example.requires_grad:
        call = tx.output.create_proxy("call_method", "requires_grad_", (tensor.as_proxy(),), {})
        node.meta[MARK] = call.node.meta[MARK] = True
        example.requires_grad_()
        tensor.requires_grad = True
        vars(tx.output).setdefault(_LEAVES, []).append(tensor)
    return True


_LEAVES = "daceml_train_leaves"
"""Attribute of TorchDynamo's graphs: the variables of their leaves."""

traces = Traces(_install)
"""Traces that may contain such assignments."""


def marks_leaf(node: fx.Node) -> bool:
    """Whether a node does nothing but make a tensor of the graph a leaf."""
    return node.target == "requires_grad_" and bool(node.meta.get(MARK))


def refuse_if_seen(gm: fx.GraphModule) -> None:
    """Raise if the graph returns a leaf of its own, or a view of it: the caller could read its gradient."""
    marked = [node for node in gm.graph.nodes if node.meta.get(MARK) and not marks_leaf(node)]
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
