"""Reading an ONNX model: from a path, bytes or an object to a checked `ModelProto` whose functions are inlined."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import checker, external_data_helper, helper, inliner, shape_inference

from daceml_train.errors import Invalid, Unsupported
from daceml_train.frontends.onnx.rules import find

OLDEST = 7
"""Operator sets before this one (2017) broadcast by attributes and are not read."""

_SMALL = 1 << 16
"""Initializers up to this many bytes are checked completely; larger ones by type and shape only."""


@dataclass(frozen=True)
class Source:
    """A checked model, the folder of its external data if it has one, and its name in messages."""

    proto: onnx.ModelProto
    folder: Path | None
    name: str
    owned: bool
    """Whether `proto` has no other owner, so that its weights may be taken out of it."""


def read(model: Any) -> Source:
    """The model at a path, in bytes, or as `ModelProto`, checked.

    Raises `Invalid` for a file that is missing, damaged, or breaks ONNX's rules, `Unsupported` for an operator set
    beyond the installed `onnx`'s.
    """
    if isinstance(model, onnx.ModelProto):
        source = Source(model, None, model.graph.name or "model", False)
    elif isinstance(model, bytes | bytearray | memoryview):
        source = Source(_parse(bytes(model), "the bytes"), None, "model", True)
    elif isinstance(model, str | os.PathLike):
        path = Path(model).expanduser()
        if not path.is_file():
            raise Invalid(f"there is no ONNX file {path}")
        source = Source(_parse(path.read_bytes(), path.name), path.absolute().parent, path.stem, True)
    else:
        raise Invalid(f"an ONNX model is a path, bytes or an onnx.ModelProto, given {type(model).__name__}")
    try:
        _check(source)
    except UnicodeDecodeError as error:
        raise Invalid(f"{source.name} has a name that is no text, it is damaged: {error}") from None
    return source


def inlined(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model without its own functions, with the standard's definition of nodes without a rule."""
    versions = opsets(proto)
    if not proto.functions and not any(_by_definition(node, versions) for node in _nodes(proto.graph)):
        return proto
    light = _without_large(proto)
    try:
        light = inliner.inline_local_functions(light) if proto.functions else light
        for _ in range(_DEEPEST):  # a definition may use operators that have one themselves
            if not _define(light, versions):
                break
            light = inliner.inline_local_functions(light)
    except Exception as error:
        raise Invalid(f"the functions of the model cannot be inlined: {_sentence(error)}") from None
    _restore(light.graph, proto.graph)
    return light


_DEEPEST = 8
_OWN = "daceml_train.definition"


def _define(proto: onnx.ModelProto, versions: dict[str, int]) -> bool:
    """Turn nodes without a rule into calls of the standard's definitions. Returns whether there were any."""
    chosen = [node for node in _nodes(proto.graph) if _by_definition(node, versions)]
    if not chosen:
        return False
    types = value_types(proto)
    for count, node in enumerate(chosen):
        schema = _schema(node, versions)
        _spell_out(node, versions)
        function = onnx.FunctionProto()
        if schema.has_context_dependent_function:
            kinds = [types[name].SerializeToString() if name in types else b"" for name in node.input]
            body = schema.get_context_dependent_function(node.SerializeToString(), kinds)
            function.ParseFromString(body if isinstance(body, bytes) else _bytes(body))
        else:
            function.ParseFromString(_bytes(schema.function_body))
        function.domain, function.name = _OWN, f"{node.op_type}_{count}"
        function.attribute.extend(
            name
            for name in schema.attributes
            if name not in function.attribute and name not in {default.name for default in function.attribute_proto}
        )
        proto.functions.append(function)
        node.domain, node.op_type = _OWN, function.name
    if all(entry.domain != _OWN for entry in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(_OWN, 1))
    return True


def _bytes(message: Any) -> bytes:
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


def value_types(proto: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """The types that ONNX infers, by value, including subgraphs; none if inference fails."""
    try:
        inferred = shape_inference.infer_shapes(_without_large(proto))
    except Exception:  # only nodes with rules that take types need them, and they raise
        return {}
    found: dict[str, onnx.TypeProto] = {}
    _collect_types(inferred.graph, found)
    return found


def _collect_types(graph: onnx.GraphProto, found: dict[str, onnx.TypeProto]) -> None:
    for value in (*graph.input, *graph.value_info, *graph.output):
        found[value.name] = value.type
    for tensor in graph.initializer:
        found[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _collect_types(inner, found)


def opsets(proto: onnx.ModelProto) -> dict[str, int]:
    """The version of each domain that the model imports."""
    return {("" if entry.domain == "ai.onnx" else entry.domain): entry.version for entry in proto.opset_import}


def _parse(data: bytes, name: str) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except (DecodeError, RuntimeError, ValueError) as error:
        raise Invalid(f"{name} is no ONNX model, or a damaged one: {error}") from None
    if not proto.HasField("graph"):
        raise Invalid(f"{name} holds no graph: it is no ONNX model, or a truncated one")
    return proto


def _check(source: Source) -> None:
    proto = source.proto
    versions = opsets(proto)
    newest = onnx.defs.onnx_opset_version()
    version = versions.get("", OLDEST)
    if version > newest:
        raise Unsupported(
            f"{source.name} uses operator set {version}, the installed onnx knows up to {newest}", advice="upgrade onnx"
        )
    if version < OLDEST:
        raise Unsupported(
            f"{source.name} uses operator set {version}, the oldest that is read is {OLDEST}",
            advice="convert it with onnx.version_converter",
        )
    for domain, number in versions.items():
        if not 0 < number < 1 << 30:
            raise Invalid(f"{source.name} imports version {number} of operator domain {domain!r}, which cannot be")
    for node in _nodes(proto.graph):
        names = (node.op_type, node.domain, node.name, *node.input, *node.output)
        if any(isinstance(name, bytes) for name in names):  # how Python's protobuf reports text that is not UTF-8
            raise Invalid(f"{source.name} has a node whose names are no text: it is damaged")
    light = _without_large(proto)
    for node in _nodes(light.graph):  # inference visits definitions, which need explicit defaults
        if _has_definition(node, versions):
            _spell_out(node, versions)
    try:
        checker.check_model(light)
        shape_inference.infer_shapes(light, check_type=True, strict_mode=True)
    except checker.ValidationError as error:
        raise Invalid(f"{source.name} is no valid ONNX model: {_sentence(error)}") from None
    except shape_inference.InferenceError as error:
        if not _only_unknown(str(error)):
            raise Invalid(f"types or shapes of {source.name} conflict: {_sentence(error)}") from None
    except (RuntimeError, ValueError, UnicodeDecodeError) as error:
        raise Invalid(f"{source.name} is no valid ONNX model: {_sentence(error)}") from None


def _only_unknown(text: str) -> bool:
    """Inference also fails for operators of other domains, which it does not know."""
    return "No opset import" not in text and ("Unsupported" in text or "No Op registered" in text)


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


def _without_large(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose large and external initializers are inputs: small, and complete as to types and shapes."""
    light = onnx.ModelProto()
    for name in ("ir_version", "producer_name", "domain"):
        setattr(light, name, getattr(proto, name))
    light.opset_import.extend(proto.opset_import)
    light.functions.extend(proto.functions)
    graph = light.graph
    graph.name = proto.graph.name or "graph"
    graph.node.extend(proto.graph.node)
    graph.output.extend(proto.graph.output)
    graph.value_info.extend(proto.graph.value_info)
    graph.sparse_initializer.extend(proto.graph.sparse_initializer)
    graph.quantization_annotation.extend(proto.graph.quantization_annotation)
    graph.input.extend(proto.graph.input)
    declared = {value.name for value in graph.input}
    for tensor in proto.graph.initializer:
        if external_data_helper.uses_external_data(tensor) or tensor.ByteSize() > _SMALL or _empty(tensor):
            if tensor.name not in declared:
                graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            graph.initializer.append(tensor)
    return light


def _empty(tensor: onnx.TensorProto) -> bool:
    """The module stores its values: see `module.skeleton`."""
    return not tensor.HasField("raw_data") and tensor.ByteSize() < 1024 and not onnx_data(tensor)


def onnx_data(tensor: onnx.TensorProto) -> bool:
    """Whether typed fields of a tensor have values."""
    fields = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
    return any(len(getattr(tensor, field)) for field in fields)


def _restore(graph: onnx.GraphProto, original: onnx.GraphProto) -> None:
    """Initializers and inputs as they were; inlining changed nodes alone."""
    del graph.initializer[:]
    graph.initializer.extend(original.initializer)
    del graph.input[:]
    graph.input.extend(original.input)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _nodes(inner)


def _by_definition(node: onnx.NodeProto, versions: dict[str, int]) -> bool:
    """Whether a node has no rule but a definition in the standard."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    known = find(domain, node.op_type, versions.get(domain, 1))
    return not (known is not None and known.accepts(node)) and _has_definition(node, versions)


def _has_definition(node: onnx.NodeProto, versions: dict[str, int]) -> bool:
    schema = _schema(node, versions)
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def _schema(node: onnx.NodeProto, versions: dict[str, int]) -> Any:  # onnx's annotations omit parts of a schema
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = versions.get(domain, 1)
    known = onnx.defs.has(node.op_type, version, domain)
    return onnx.defs.get_schema(node.op_type, version, domain) if known else None


def _spell_out(node: onnx.NodeProto, versions: dict[str, int]) -> None:
    """Add the defaults of attributes that a node omits."""
    schema = _schema(node, versions)
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in schema.attributes.items() if schema is not None else ():
        if name not in given and attribute.default_value.name:
            node.attribute.append(onnx.AttributeProto.FromString(_bytes(attribute.default_value)))
