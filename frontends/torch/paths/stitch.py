"""A path as one graph of PyTorch's functions, for `capture`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.capture import Captured, capture
from daceml_train.frontends.torch.dynamo.tracing import tracing
from daceml_train.frontends.torch.paths.functions import GETTER, name_of
from daceml_train.frontends.torch.paths.trie import (
    ARITHMETIC,
    Call,
    Number,
    Operand,
    Result,
    Step,
    filled,
    leaves_of,
    operands_of,
)

TAKES_TENSORS = ARITHMETIC | frozenset(["clamp", "clip", "clamp_min", "clamp_max", "pow", "masked_fill", "where"])
"""Functions that take a tensor without dimensions wherever they take a number."""


@dataclass(frozen=True, eq=False)
class PathGraph:
    """A captured path: the loss, then what user code keeps of it, then what it looks at, are the graph's outputs."""

    captured: Captured
    sources: dict[str, Any]
    """Graph input -> the operand's position, the number, or the tensor that the model holds."""
    kept: int
    looked: list[str]
    """The graph's values that user code looks at."""


def captured_path(
    path: Sequence[Step],
    call: Call,
    loss: Result,
    kept: Sequence[Result],
    looked: Sequence[tuple[Step, Result]],
    names: dict[int, str],
) -> PathGraph:
    """The operator graph of a path. Raises `Unsupported` for what cannot be captured, or draws random numbers."""
    builder = _Builder(path, call, names)
    for step in path:
        builder.append(step)
        builder.copies.update({(at, r): builder.copy(r) for at, r in looked if at is step})
    builder.enable(True)
    results = [builder.nodes[loss], *(builder.copy(r) for r in kept), *(builder.copies[entry] for entry in looked)]
    module = builder.module(results)
    with tracing(), torch.enable_grad():
        captured = capture(module, builder.examples, "eager")
    if captured.random:
        raise Unsupported("random numbers that depend on what a path computes")
    written = [s for s in captured.inputs if s.name in captured.graph.writes]
    if any(s.kind != "attribute" for s in written):
        raise Unsupported("a model that changes data in place")
    graph = captured.graph.copy()
    graph.name = "training_step"
    values = [graph.outputs[o.index] if o.kind == "graph" and o.view is None else "" for o in captured.outputs]
    if not all(values) or captured.detached[0] or not all(captured.detached[1:]):
        raise Unsupported("results that share memory, or a loss without a gradient")
    end = 1 + len(kept)
    graph.outputs = values[:end]
    sources = {
        s.name: builder.sources[s.position] if s.position is not None else s.value for s in captured.inputs if s.name
    }
    return PathGraph(replace(captured, graph=graph), sources, len(kept), values[end:])


def as_tensor(number: float) -> Tensor:
    """A number as the input of a program."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)


class _Builder:
    def __init__(self, path: Sequence[Step], call: Call, names: dict[int, str]) -> None:
        self.graph, self.call, self.names = fx.Graph(), call, names
        self.nodes: dict[Any, fx.Node] = {}
        """By result, position of an operand, or number."""
        self.copies: dict[Any, fx.Node] = {}
        self.examples: list[Tensor] = []
        self.sources: list[Any] = []
        """Per placeholder the operand's position, or the number."""
        self.held: dict[str, Tensor] = {}
        self.enabled = True
        operands = {operand.index: operand for operand in operands_of(path)}
        used = {
            leaf.index if type(leaf) is Operand else leaf
            for step in path
            for leaf in leaves_of([step.arguments, step.keywords])
            if type(leaf) in (Operand, Number)
        }
        for position in sorted(p for p in used if isinstance(p, int)):
            operand = operands.get(position)
            if operand is None or not operand.held:
                self.nodes[position] = self.placeholder(f"operand_{position}", call.operands[position], position)
        for number in (n for step in path for n in step.numbers if n.varies):
            self.nodes[number] = self.placeholder(f"number_{len(self.sources)}", as_tensor(number.value), number)
        for position in sorted(p for p in used if isinstance(p, int)):
            if position not in self.nodes:
                self.nodes[position] = self.attribute(call.operands[position])

    def placeholder(self, name: str, example: Tensor, source: Any) -> fx.Node:
        self.examples.append(example)
        self.sources.append(source)
        node = self.graph.placeholder(name)
        node.meta["requires_grad"] = example.requires_grad
        return node

    def attribute(self, tensor: Tensor) -> fx.Node:
        name, other = self.names.get(id(tensor), ""), f"held_{len(self.held)}"
        if not name or hasattr(fx.GraphModule, name.partition(".")[0]):  # as `code`, which FX has itself
            name = other
        self.held[name] = tensor
        return self.graph.get_attr(name)

    def append(self, step: Step) -> None:
        """Append the call of a step."""
        self.enable(step.enabled)
        args, kwargs = filled(step.arguments, self._node), filled(step.keywords, self._node)
        if any(number.varies for number in step.numbers):
            args, kwargs = self._read(step, args), self._read(step, kwargs)
        node = self._call(step.function, args, kwargs)
        node.meta["stack_trace"] = step.where
        self._note(step.result, node)

    def _read(self, step: Step, value: Any) -> Any:
        """The arguments of a step with its numbers as what its function takes: tensors, or numbers read from them."""
        if isinstance(value, dict):
            return {key: self._read(step, v) for key, v in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._read(step, v) for v in value)
        number = next((n for n in step.numbers if n.varies and self.nodes[n] is value), None)
        if number is None:
            return value
        if name_of(step.function) in TAKES_TENSORS and type(step.result) is Result:
            dtype = step.result.tensor.dtype
            return self.graph.call_method("to", (value, dtype)) if isinstance(number.value, float) else value
        return self.graph.call_method("item", (value,))

    def _node(self, leaf: Any) -> Any:
        if type(leaf) is Number:
            return self.nodes[leaf] if leaf.varies else leaf.value
        return self.nodes[leaf.index if type(leaf) is Operand else leaf]

    def _call(self, function: Any, args: Any, kwargs: Any) -> fx.Node:
        name = name_of(function)
        if type(function) is GETTER:
            return self.graph.call_function(getattr, (args[0], function.__self__.__name__))
        if function is Tensor.__getitem__:
            return self.graph.call_function(operator.getitem, args)
        if function is Tensor.__setitem__:
            return self.graph.call_function(operator.setitem, args)
        if getattr(Tensor, name, None) is function:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(function, args, kwargs)

    def _note(self, template: Any, node: fx.Node) -> None:
        if type(template) is Result:
            self.nodes.setdefault(template, node)
        elif type(template) in (tuple, list):
            for position, entry in enumerate(template):
                if any(type(leaf) is Result for leaf in leaves_of(entry)):
                    self._note(entry, self.graph.call_function(operator.getitem, (node, position)))

    def enable(self, enabled: bool) -> None:
        """Enable or disable gradients from here on."""
        if enabled is not self.enabled:
            self.enabled = enabled
            self.graph.call_function(torch._C._set_grad_enabled, (enabled,))

    def copy(self, result: Result) -> fx.Node:
        """A result as it is here, in memory of its own and without a gradient."""
        return self.graph.call_method("clone", (self.graph.call_method("detach", (self.nodes[result],)),))

    def module(self, results: Sequence[fx.Node]) -> fx.GraphModule:
        """The module with these results."""
        self.graph.output(tuple(results))
        return fx.GraphModule(self.held, self.graph)
