"""A graph of operators through PyTorch calls, at once: what an operator of a plugin does outside of compiled code.

A graph is prepared once: each node becomes a function of tensors. PyTorch's autograd records them, so what they compute
has derivatives of every order. An operator that no function here computes runs in NumPy, which autograd cannot see.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.expressions.evaluate import FORMULA, call, native
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import leaves
from daceml_train.ops.contraction import Matmul, MatmulAdd
from daceml_train.ops.elementwise import TABLE, Cast, Elementwise, Full, Iota
from daceml_train.ops.movement import Concat, Expand, Flip, Pad, Permute, Reorder, Slice, View
from daceml_train.ops.operator import REGISTRY, Operator
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import DType, Tensor

Function = Callable[..., torch.Tensor]


class EagerGraph:
    """A graph that runs as PyTorch calls, on tensors of the types of its inputs."""

    def __init__(self, graph: Graph) -> None:
        prepared = leaves(graph).graph
        self.inputs, self.outputs = list(prepared.inputs), list(prepared.outputs)
        self.calls = [(_function(prepared, node), node.inputs, node.outputs) for node in prepared.nodes]
        self.native = all(_is_native(node.op) for node in prepared.nodes)
        """Whether each operator is one of PyTorch's, which has its derivative."""
        self.dtypes = [types.TORCH_DTYPES[prepared.tensors[name].dtype] for name in prepared.outputs]

    def __call__(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs; none of them is an input or shares memory with one."""
        device = given[0].device.type if given else "cpu"
        if torch.is_autocast_enabled(device):  # the element types are those of the graph
            with torch.autocast(device, enabled=False):
                return self._run(given)
        return self._run(given)

    def _run(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values = dict(zip(self.inputs, given, strict=True))
        for function, inputs, outputs in self.calls:
            results = function(*(values[name] for name in inputs))
            if len(outputs) == 1 and isinstance(results, torch.Tensor):
                values[outputs[0]] = results
            else:
                values.update(zip(outputs, results, strict=True))
        return self._apart([values[name] for name in self.outputs], given)

    @staticmethod
    def _apart(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        taken, found = {x.untyped_storage()._cdata for x in given if _has_storage(x)}, []
        for result in results:
            storage = result.untyped_storage()._cdata if _has_storage(result) else None
            apart = storage is not None and storage not in taken and result.is_contiguous()
            found.append(result if apart else result.clone(memory_format=torch.contiguous_format))
            taken.add(found[-1].untyped_storage()._cdata if storage is not None else 0)
        return found


def _is_native(op: Operator) -> bool:
    return native(op.kind) if isinstance(op, Elementwise) else type(op) in _RULES


def derived(op: Operator, operands: Sequence[Tensor]) -> bool:
    """Whether the derivative of an operator is that of the operators that it lowers to, and of no other composite."""
    if not op.is_composite or getattr(type(op), "vjp", None) is not None:
        return False
    graph = Graph()
    graph.output(*graph.emit(op, *(graph.input(f"x{i}", x) for i, x in enumerate(operands))))
    lowered = leaves(graph, REGISTRY.keys() - {op.label, op.name}).graph
    return not any(node.op.is_composite for node in lowered.nodes)


def _has_storage(x: torch.Tensor) -> bool:
    return not bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def _function(graph: Graph, node: Node) -> Any:
    op, results = node.op, tuple(graph.tensors[name] for name in node.outputs)
    operands = tuple(graph.tensors[name] for name in node.inputs)
    rule = _RULES.get(type(op))
    function = rule(op, operands, results[0]) if rule is not None else None
    return function if function is not None else functools.partial(_in_numpy, op, results)


def _in_numpy(op: Operator, results: Sequence[Tensor], *operands: torch.Tensor) -> list[torch.Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        raise Unsupported(
            f"a gradient of a gradient through operator {op.label}, which runs in NumPy outside of programs"
        )
    arrays = (x.detach().double() if x.is_floating_point() else x.detach() for x in operands)
    found = op.evaluate(*(x.contiguous().numpy() for x in arrays))
    dtypes = [types.TORCH_DTYPES[r.dtype] for r in results]
    return [torch.tensor(np.ascontiguousarray(y), dtype=dtype) for y, dtype in zip(found, dtypes, strict=True)]


# ---- rules: an operator, the types of its operands, and that of its result -> a function of tensors -----------------
_ANY_TYPE = frozenset(("add", "sub", "mul", "maximum", "minimum", "where", "neg", "abs"))


@functools.cache
def _known(kind: str) -> bool:
    """Whether PyTorch has what the formula of an operator calls."""
    called = (n.func.id for n in ast.walk(ast.parse(TABLE[kind].expression)) if isinstance(n, ast.Call))  # type: ignore[attr-defined]
    return all(name in FORMULA for name in called)


def _elementwise(op: Elementwise, operands: Sequence[Tensor], result: Tensor) -> Function | None:
    plain = op.kind in _ANY_TYPE or op.row.result == "bool"
    if not _known(op.kind) or not (plain or all(x.dtype.is_float for x in operands)):
        return None
    function, dtype, shape = call(op.kind), types.TORCH_DTYPES[result.dtype], result.shape

    def run(*xs: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = function(*xs)
        y = y if y.dtype is dtype else y.to(dtype)
        return y if y.shape == shape else y.expand(shape)  # a formula may not read an operand

    return run


def _pad(op: Pad, operands: Sequence[Tensor], result: Tensor) -> Function:
    pads = [p for pair in reversed(op.pads) for p in pair]
    return lambda x: F.pad(x, pads, value=op.value)


def _slice(op: Slice, operands: Sequence[Tensor], result: Tensor) -> Function:
    index = (slice(None),) * op.dim + (slice(op.start, op.stop, op.step),)
    return lambda x: x[index]


def _reduce(op: Reduce, operands: Sequence[Tensor], result: Tensor) -> Function | None:
    dims, keep = list(op.dims), op.keepdim
    if not dims:
        return lambda x: x
    if op.kind == "sum" and operands[0].dtype is not DType.bool:
        dtype = types.TORCH_DTYPES[result.dtype]
        return lambda x: torch.sum(x, dims, keepdim=keep, dtype=dtype)
    if op.kind in ("max", "min") and operands[0].dtype is not DType.bool:
        function = torch.amax if op.kind == "max" else torch.amin
        return lambda x: function(x, dims, keepdim=keep)
    return None


def _full(op: Full, operands: Sequence[Tensor], result: Tensor) -> Function | None:
    if not isinstance(op.value, float | int | bool):
        return None
    value, dtype = op.value, types.TORCH_DTYPES[op.dtype]
    return lambda: torch.full(op.shape, value, dtype=dtype)


def _iota(op: Iota, operands: Sequence[Tensor], result: Tensor) -> Function:
    dtype, count = types.TORCH_DTYPES[op.dtype], int(op.shape[op.dim])
    along = [count if d == op.dim else 1 for d in range(len(op.shape))]

    def run() -> torch.Tensor:
        steps = torch.arange(count, dtype=dtype) * op.step + op.start
        return steps.to(dtype).view(along).expand(op.shape)

    return run


_RULES: dict[type[Operator], Callable[..., Any]] = {
    Elementwise: _elementwise,
    Cast: lambda op, xs, y: lambda x: x.to(types.TORCH_DTYPES[op.dtype]),
    Full: _full,
    Iota: _iota,
    View: lambda op, xs, y: lambda x: x.reshape(op.shape),
    Permute: lambda op, xs, y: lambda x: x.permute(op.dims),
    Reorder: lambda op, xs, y: lambda x: x,
    Expand: lambda op, xs, y: lambda x: x.expand(op.shape),
    Slice: _slice,
    Pad: _pad,
    Concat: lambda op, xs, y: lambda *parts: torch.cat(parts, op.dim),
    Flip: lambda op, xs, y: lambda x: x.flip(op.dims),
    Reduce: _reduce,
    Matmul: lambda op, xs, y: torch.matmul,
    MatmulAdd: lambda op, xs, y: lambda c, a, b: torch.matmul(a, b) + c,
}

__all__ = ["EagerGraph"]
