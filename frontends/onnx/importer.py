"""From an ONNX graph to the Python source of a module's `forward`.

Every node becomes one call of its rule, in the graph's order, with a comment that names it:

    v7 = softmax(v6, axis=-1)  # /encoder/attention/Softmax

TorchDynamo then sees ordinary PyTorch code, so a model from ONNX is captured, differentiated and compiled like any
other module, and a data-dependent branch breaks the graph at its place. The import evaluates nodes over constants, and
turns shape arithmetic into Python arithmetic on sizes (`host`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import AttributeProto

from daceml_train.errors import DacemlError, Invalid, Unsupported
from daceml_train.frontends.onnx import elements, host
from daceml_train.frontends.onnx.control import chosen
from daceml_train.frontends.onnx.expressions import (
    FOLDED,
    GREATEST,
    Constant,
    Expression,
    Imported,
    Operand,
    _advice,
    _attribute,
    _constant,
    _dense,
    _estimate,
    _first_line,
    _Source,
    expect,
)
from daceml_train.frontends.onnx.naming import access, identifier, snake_case
from daceml_train.frontends.onnx.operators.control import CAPTURED
from daceml_train.frontends.onnx.operators.shapes import CASTS
from daceml_train.frontends.onnx.rules import Rule, find, find_on_host, table

CONTROL = ("If", "Loop", "Scan")
"""Operators with bodies."""


@dataclass
class Importer:
    """One import. `homes` has the path of each initializer in the module, `trainable` those that are parameters."""

    graph: onnx.GraphProto
    versions: Mapping[str, int]
    folder: Path | None
    homes: Mapping[str, str]
    trainable: set[str]
    supplied: Mapping[str, torch.Tensor]
    train_mode: bool
    types: Mapping[str, onnx.TypeProto]
    lines: list[str] = field(default_factory=list)
    namespace: dict[str, Any] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _references: dict[Callable[..., Any], str] = field(default_factory=dict)
    _count: int = 0
    _used: dict[int, Constant] = field(default_factory=dict)
    _depth: int = 1

    def run(self) -> Imported:
        """Import the whole graph. Raises `Invalid` or `Unsupported`, naming operator, domain, version and node."""
        self._names = {"torch", "as_tensor", "as_host", "expect", "single"}
        self.namespace = {"torch": torch, "as_tensor": host.as_tensor, "as_host": host.as_host, "expect": expect}
        self.namespace["single"] = host.single
        scope = self.initializers(self.graph)
        inputs = []
        reserved = {snake_case(rule.operator) for rule in table()}
        for value in self.graph.input:
            if value.name in scope:
                continue
            name = identifier(value.name, self._names | reserved)
            self._names.add(name)
            inputs.append(name)
            scope[value.name] = Expression(name)
        self.lines.append(f"def forward({', '.join(['self', *inputs])}):")
        for name, value in zip(
            inputs, [v for v in self.graph.input if isinstance(scope[v.name], Expression)], strict=True
        ):
            self.expectation(name, value)
        self.body(self.graph, scope)
        results = [
            self.as_tensor(self.operand(scope, value.name, "the graph's outputs")) for value in self.graph.output
        ]
        self.emit(f"return {results[0] if len(results) == 1 else '(' + ', '.join(results) + ')'}", "")
        names = [value.name for value in self.graph.output]
        return Imported(
            "\n".join(self.lines) + "\n",
            self.namespace,
            inputs,
            names,
            list(self._used.values()),
        )

    # ---- graphs -----------------------------------------------------------------------------------------------------
    def initializers(self, graph: onnx.GraphProto) -> dict[str, Operand]:
        scope: dict[str, Operand] = {}
        for tensor in graph.initializer:
            count = 1
            for extent in tensor.dims:
                count *= extent
            if count > GREATEST or count < 0:
                raise Invalid(f"initializer {tensor.name!r} has the absurd shape {tuple(tensor.dims)}")
            at_top = graph is self.graph
            scope[tensor.name] = Constant(
                tensor.name,
                self._loader(tensor),
                self.homes.get(tensor.name, "") if at_top else "",
                at_top and tensor.name in self.trainable,
                count,
            )
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            dense = _dense(sparse)
            scope[name] = Constant(name, lambda dense=dense: dense, elements=dense.numel())  # type: ignore[misc]
        return scope

    def _loader(self, tensor: onnx.TensorProto) -> Callable[[], torch.Tensor]:
        if tensor.name in self.supplied:
            return lambda: self.supplied[tensor.name]
        return lambda: elements.tensor(tensor, self.folder)

    def body(self, graph: onnx.GraphProto, scope: dict[str, Operand]) -> None:
        for node in graph.node:
            try:
                results = self.node(node, scope)
            except DacemlError as error:
                raise type(error)(error.message, where=self.where(node), advice=_advice(error)) from error.__cause__
            for name, result in zip(node.output, results, strict=False):
                if name:
                    scope[name] = result

    def where(self, node: onnx.NodeProto) -> str:
        """The description of a node in messages: operator, domain, version, name."""
        domain = node.domain or "ai.onnx"
        version = self.versions.get("" if domain == "ai.onnx" else domain, "?")
        name = node.name or (f"the node that produces {node.output[0]!r}" if node.output else "a node without a name")
        return f"{domain}:{node.op_type} version {version}, {name}"

    # ---- nodes ------------------------------------------------------------------------------------------------------
    def node(self, node: onnx.NodeProto, scope: dict[str, Operand]) -> list[Operand]:
        operands = [self.operand(scope, name, "") for name in node.input]
        while operands and operands[-1] is None:
            operands.pop()
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            return [self.constant(_constant(node), node.output[0])]
        domain = "" if node.domain == "ai.onnx" else node.domain
        rule = find(domain, node.op_type, self.versions.get(domain, 1))
        if rule is None:
            raise Unsupported("there is no rule for this ONNX operator")
        start = len(self.lines)
        attributes = self.attributes(node, rule, scope)
        if node.op_type in CONTROL and domain == "" and "lengths" not in rule.operands:
            rule = self.captured(node, rule, operands, scope, self.lines[start:])
        if folded := self.folded(rule, node, operands, attributes):
            return folded
        if computed := self.on_host(rule, node, operands, attributes):
            return [computed]
        call = self.call(rule, node, operands, attributes)
        returns = str(rule.function.__annotations__.get("return", ""))
        if returns == "Tensor" and any(node.output[1:]):
            raise Unsupported(f"the rule of this operator has one result, the node asks for {len(node.output)}")
        if node.op_type not in CONTROL and returns.startswith("tuple[") and returns.endswith("]"):
            call += "[0]" if len(node.output) == 1 else f"[:{len(node.output)}]"
        if node.op_type not in CONTROL and (len(node.output) == 1 or returns == "Tensor"):
            return [self.assign(call, node, rule.shape_only)]
        names = [self.fresh() if name else "_" for name in node.output]
        self.emit(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}", self.label(node))
        return [None if name == "_" else Expression(name) for name in names]

    def captured(
        self,
        node: onnx.NodeProto,
        rule: Rule,
        operands: Sequence[Operand],
        scope: Mapping[str, Operand],
        source: list[str],
    ) -> Rule:
        """The rule of a branch or loop that becomes an operator of the graph, or its own, which is Python."""

        def known(position: int) -> bool:
            operand = operands[position]
            return operand.element is not None if isinstance(operand, Expression) else True

        def value(name: str) -> Any:
            operand = scope.get(name)
            single = isinstance(operand, Constant) and operand.elements == 1 and operand.literal
            return operand.value.item() if single and isinstance(operand, Constant) else None

        return find(CAPTURED, chosen(node, self.types, source, known, value), 1) or rule

    def call(self, rule: Rule, node: onnx.NodeProto, operands: Sequence[Operand], attributes: Mapping[str, Any]) -> str:
        """The text of a rule's call."""
        if not rule.variadic and len(operands) > len(rule.operands):
            raise Unsupported(
                f"the rule of this operator takes {len(rule.operands)} operands, the node has {len(operands)}"
            )
        texts = []
        for at, operand in enumerate(operands):
            name = rule.operands[at] if at < len(rule.operands) else ""
            texts.append(
                "None" if operand is None else self.as_host(operand) if name in rule.host else self.as_tensor(operand)
            )
        for name, value in attributes.items():
            texts.append(f"{name}={value if isinstance(value, _Source) else self.literal(value)}")
        texts += [f"{name}={self.asked(name, node, operands)}" for name in rule.asks]
        return f"{self.reference(rule)}({', '.join(texts)})"

    def asked(self, name: str, node: onnx.NodeProto, operands: Sequence[Operand]) -> str:
        if name == "outputs":
            return str(len(node.output))
        if name == "opset":
            return str(self.versions.get("" if node.domain == "ai.onnx" else node.domain, 1))
        if name == "element":
            first = operands[0]
            if isinstance(first, Constant):
                return str(first.value.dtype)
            assert first is not None
            return f"{first.text}.dtype" if first.element is None else str(first.element)
        if name == "types":
            return repr(self.element_types(node))
        return "self.training" if self.train_mode else "False"

    def element_types(self, node: onnx.NodeProto) -> tuple[int, ...]:
        known = (self.types.get(name) for name in node.input)
        return tuple(kind.tensor_type.elem_type if kind is not None else 0 for kind in known)

    def attributes(self, node: onnx.NodeProto, rule: Rule, scope: dict[str, Operand]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for attribute in node.attribute:
            if attribute.name not in rule.attributes:
                raise Unsupported(f"attribute {attribute.name!r} of this operator is not known here")
            if attribute.type == AttributeProto.GRAPH:
                found[attribute.name] = self.function(attribute.g, scope, rule.operator)
            elif attribute.type == AttributeProto.GRAPHS:
                raise Unsupported(f"attribute {attribute.name!r} is a list of graphs")
            else:
                found[attribute.name] = _attribute(attribute, self.folder)
        return found

    def function(self, graph: onnx.GraphProto, scope: dict[str, Operand], operator: str) -> _Source:
        """A nested function for a subgraph, which sees the names around it."""
        self._count += 1
        name = f"{operator.lower()}_{self._count}"
        inner = dict(scope)
        inner.update(self.initializers(graph))
        parameters = []
        for value in graph.input:
            parameters.append(identifier(value.name, self._names))
            inner[value.name] = Expression(parameters[-1])
        self.emit(f"def {name}({', '.join(parameters)}):", graph.name)
        self._depth += 1
        self.body(graph, inner)
        results = [self.as_tensor(self.operand(inner, value.name, "a subgraph's outputs")) for value in graph.output]
        self.emit(f"return ({''.join(result + ', ' for result in results)})", "")
        self._depth -= 1
        return _Source(name)

    # ---- what is known at import ------------------------------------------------------------------------------------
    def folded(
        self, rule: Rule, node: onnx.NodeProto, operands: Sequence[Operand], attributes: Mapping[str, Any]
    ) -> list[Operand] | None:
        """The results of a node over constants, computed at import; None if it has other operands or large results."""
        constants = [operand for operand in operands if isinstance(operand, Constant)]
        if len(constants) != sum(operand is not None for operand in operands) or rule.random:
            return None
        if any(isinstance(value, _Source) for value in attributes.values()) or (
            self.train_mode and "training" in rule.asks
        ):
            return None
        if any(constant.trainable for constant in constants) and not rule.shape_only:
            return None
        bound = max([FOLDED, *(constant.elements for constant in constants)])
        if _estimate(node, operands) > bound:
            return None
        arguments: list[Any] = []
        for at, operand in enumerate(operands):
            if operand is None:
                arguments.append(None)
                continue
            assert isinstance(operand, Constant)
            named = rule.operands[at] if at < len(rule.operands) else ""
            arguments.append(operand.value.tolist() if named in rule.host else operand.value.detach())
        asked = {name: self._asked_now(name, node, operands) for name in rule.asks}
        try:
            with torch.no_grad():
                result = rule.function(*arguments, **attributes, **asked)
        except DacemlError:
            raise
        except Exception as error:
            raise Invalid(f"its operands do not fit: {_first_line(error)}") from error
        results = [result] if len(node.output) == 1 and not isinstance(result, tuple) else list(result)
        if rule.shape_only:
            results = [torch.tensor(results[0], dtype=torch.int64)]
        if not all(isinstance(value, torch.Tensor) for value in results):
            return None
        return [self.constant(value, name) for value, name in zip(results, node.output, strict=False)]

    def _asked_now(self, name: str, node: onnx.NodeProto, operands: Sequence[Operand]) -> Any:
        if name == "element":
            first = operands[0]
            assert isinstance(first, Constant)
            return first.value.dtype
        if name == "types":
            return self.element_types(node)
        return {"outputs": len(node.output), "training": False}.get(
            name, self.versions.get("" if node.domain == "ai.onnx" else node.domain, 1)
        )

    def constant(self, value: torch.Tensor, name: str) -> Constant:
        return Constant(name, lambda: value, elements=value.numel(), _value=value)

    def on_host(
        self, rule: Rule, node: onnx.NodeProto, operands: Sequence[Operand], attributes: Mapping[str, Any]
    ) -> Expression | None:
        """The node as Python arithmetic, if all its operands are values of the host; None otherwise."""
        known = find_on_host(rule.domain, rule.operator)
        hosts = [operand for operand in operands if isinstance(operand, Expression) and operand.element is not None]
        if known is None or not hosts or len(node.output) != 1:
            return None
        if rule.operator == "ConstantOfShape" and not hosts[0].shape_like:
            return None
        for operand in operands:
            if operand is not None and not (operand in hosts or (isinstance(operand, Constant) and operand.literal)):
                return None
        chosen = dict(attributes)
        element = hosts[0].element if rule.operator != "Where" else self._element(operands[1])
        if rule.operator == "Cast":
            if chosen["to"] not in CASTS:
                return None
            element = elements.dtype(chosen["to"])
        elif rule.operator in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not"):
            element = torch.bool
        elif rule.operator in ("Shape", "Size"):
            element = torch.int64
        elif rule.operator == "ConstantOfShape":
            value = chosen.get("value")
            element = torch.float32 if value is None else value.dtype
            chosen["value"] = None if value is None else value.reshape(()).item()
        elif rule.operator in ("Gather", "Slice", "Reshape", "Squeeze", "Unsqueeze"):
            element = self._element(operands[0])
        texts = ["None" if operand is None else self.as_host(operand) for operand in operands]
        taken = {*known.attributes, *known.operands}  # attributes of earlier versions may be operands of later ones
        texts += [f"{name}={_text(value)}" for name, value in chosen.items() if name in taken]
        name = self.fresh()
        call = f"{self.reference(known)}({', '.join(texts)})"
        if element is torch.float32 and rule.operator in ("Add", "Sub", "Mul", "Div", "Sqrt", "Cast"):
            call = f"single({call})"
        self.emit(f"{name} = {call}", self.label(node))
        return Expression(name, element, rule.operator == "Shape")

    @staticmethod
    def _element(operand: Operand) -> torch.dtype | None:
        return operand.value.dtype if isinstance(operand, Constant) else operand.element if operand else None

    # ---- text -------------------------------------------------------------------------------------------------------
    def operand(self, scope: Mapping[str, Operand], name: str, whose: str) -> Operand:
        if not name:
            return None
        if name not in scope:
            raise Invalid(
                f"value {name!r}{' of ' + whose if whose else ''} is not produced by any node, input or initializer"
            )
        return scope[name]

    def as_tensor(self, operand: Operand) -> str:
        if operand is None:
            return "None"
        if isinstance(operand, Expression):
            return operand.text if operand.element is None else f"as_tensor({operand.text}, {operand.element})"
        if not operand.path:
            operand.path = f"constant_{len(self._used)}"
        self._used.setdefault(id(operand), operand)
        return access(operand.path)

    def as_host(self, operand: Operand) -> str:
        if isinstance(operand, Constant):
            if operand.literal:
                return _text(operand.value.tolist())
            return f"as_host({self.as_tensor(operand)})"
        assert operand is not None
        return operand.text if operand.element is not None else f"as_host({operand.text})"

    def literal(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self.as_tensor(self.constant(value, "attribute"))
        return _text(value)

    def reference(self, rule: Rule) -> str:
        """The name of a rule's function in the source."""
        name = self._references.get(rule.function)
        if name is None:
            base = snake_case(rule.operator)
            name = self._references[rule.function] = identifier(base, self._names)
            self.namespace[name] = rule.function
        return name

    def assign(self, call: str, node: onnx.NodeProto, shape_only: bool) -> Expression:
        name = self.fresh()
        self.emit(f"{name} = {call}", self.label(node))
        return Expression(name, torch.int64 if shape_only else None)

    def fresh(self) -> str:
        self._count += 1
        return identifier(f"v{self._count}", self._names)

    def label(self, node: onnx.NodeProto) -> str:
        return node.name or node.op_type

    def emit(self, text: str, comment: str) -> None:
        comment = " ".join(comment.split())
        self.lines.append("    " * self._depth + text + (f"  # {comment}" if comment else ""))

    def expectation(self, name: str, value: onnx.ValueInfoProto) -> None:
        """A check of an input against its declared type and fixed extents."""
        if not value.type.HasField("tensor_type"):
            return
        declared = value.type.tensor_type
        element = elements.dtype(declared.elem_type, f"input {value.name!r}")
        extents = None
        if declared.HasField("shape"):
            extents = tuple(d.dim_value if d.HasField("dim_value") else None for d in declared.shape.dim)
            if any(extent is not None and not 0 <= extent <= GREATEST for extent in extents):
                raise Invalid(f"input {value.name!r} has the absurd shape {extents}")
        self.emit(f"expect({name}, {value.name!r}, {element}, {extents})", "")


def _text(value: Any) -> str:
    """A number, a string, or a list or tuple of these as Python source; infinity and NaN have no literals."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(_text(part) + ', ' for part in value)})"
    return repr(value)


__all__ = ["Constant", "Expression", "Imported", "Importer", "expect"]
