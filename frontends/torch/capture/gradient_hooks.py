"""`h.register_hook(f)` in a forward pass: the identity with the hook's body as its derivative.

TorchDynamo traces the body, and later uses of `h` read the hooked tensor. A hook gets the sum of all gradients of `h`,
so uses before the hook must carry none; a body with side effects is not traced at all. The body is traced where the
hook is registered, but PyTorch calls it later: a hook that reads anything that may have changed by then breaks the
graph, and PyTorch registers it.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import NestedUserFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.operators import CustomFunction
from daceml_train.frontends.torch.dynamo.origin import origin
from daceml_train.frontends.torch.traces import Traces


@functools.cache
def _install() -> None:
    tensors: Any = TensorVariable
    original = getattr(tensors, "_method_register_hook", None)
    if original is None:
        return

    def register(self: Any, tx: Any, name: str, hook: Any) -> Any:
        if traces.depth and not self.source and not _same_later(tx, hook):
            unimplemented(
                gb_type="register_hook of a hook that reads what may change",
                context="",
                explanation="The hook reads attributes or variables when it is called, in the backward pass.",
                hints=[*graph_break_hints.SUPPORTABLE],
            )
        return original(self, tx, name, hook)

    tensors._method_register_hook = register


traces = Traces(_install)
"""Traces that may contain hooks."""


def _same_later(tx: Any, hook: Any) -> bool:
    """Whether a hook reads its argument, functions, tensors and numbers alone, and none under a name stored again."""
    hook = hook.realize()
    if not isinstance(hook, NestedUserFunctionVariable | UserFunctionVariable):
        return False
    code, scope = hook.get_code(), hook.get_globals()
    read = [scope.get(i.argval, len) for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    if code.co_argcount != 1 or not all(callable(x) or isinstance(x, types.ModuleType) for x in read):
        return False
    names = code.co_freevars
    if not names or not isinstance(hook, NestedUserFunctionVariable):
        return not names
    closure: Any = hook.closure
    own, cells = tx.f_code, closure.items
    if not set(names) <= set(own.co_cellvars) or any("JUMP_BACKWARD" in i.opname for i in dis.get_instructions(own)):
        return False
    values = [tx.output.side_effects.load_cell(cell).realize() for cell in cells]
    if not all(isinstance(value, TensorVariable | ConstantVariable) for value in values):
        return False
    stores = [name for code in _codes(own) for name in _stored(code) if name in names]
    return len(stores) == len(set(stores))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _stored(code: types.CodeType) -> Iterator[str]:
    return (i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF"))


def refuse_unhookable(node: fx.Node, changed: Callable[[fx.Node], fx.Node | None]) -> None:
    """Raise `Unsupported` where the identity would not be what PyTorch's hook is."""
    tensor = node.all_input_nodes[0]
    example = tensor.meta.get("example_value")
    where = str(origin(node))
    if not isinstance(example, torch.Tensor) or not example.requires_grad:
        raise Unsupported("register_hook of a tensor that requires no gradient", where=where)
    if example._base is not None or tensor.op not in ("call_function", "call_method"):
        raise Unsupported("register_hook of a view or of an input inside a compiled graph", where=where)
    before = {n for n in tensor.users if n is not node and n < node}
    read = {_memory(n) for n in node.all_input_nodes[1:]} - {None}
    later = (changed(n) for n in node.graph.nodes if n > node)
    if any(n is not None and _memory(n) in read for n in later):
        raise Unsupported("register_hook of a hook that reads a tensor that is changed in place later", where=where)
    if any(_requires_gradient(n) for n in before):
        raise Unsupported(
            "register_hook after a use of the tensor",
            where=where,
            advice="register the hook before the tensor is used",
        )


def refuse_visible(module: fx.GraphModule) -> None:
    """Raise `Unsupported` where a hooked tensor is a result: its gradient, after the hook, could be read."""
    (output,) = module.graph.find_nodes(op="output")
    results = set(output.all_input_nodes)
    for node in module.graph.nodes:
        if getattr(node.target, "__name__", "") == "register_hook" and not results.isdisjoint(
            {node, node.all_input_nodes[0]}
        ):
            raise Unsupported("register_hook of a result of a compiled graph", where=str(origin(node)))


def hooked(body: fx.GraphModule, free: int) -> CustomFunction:
    """The identity of one tensor and `free` tensors that the body of its hook reads, with the body as derivative."""
    forward = fx.Graph()
    x, *others = (forward.placeholder(f"x{i}") for i in range(1 + free))
    forward.output(((forward.call_method("clone", (x,)),), others))
    backward = fx.Graph()
    gradient, *saved = (backward.placeholder(f"g{i}") for i in range(1 + free))
    inner = iter((gradient, *saved))
    result = backward.graph_copy(body.graph, {n: next(inner) for n in body.graph.nodes if n.op == "placeholder"})
    (result,) = result if isinstance(result, tuple | list) else (result,)
    backward.output((gradient if result is None else result, *[None] * free))
    return CustomFunction(fx.GraphModule(body, forward), fx.GraphModule(body, backward), "a hook on a gradient")


def _memory(node: fx.Node) -> int | None:
    example = node.meta.get("example_value")
    return int(example.untyped_storage()._cdata) if isinstance(example, torch.Tensor) else None


def _requires_gradient(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return not isinstance(example, torch.Tensor) or example.requires_grad
