"""The module that an ONNX model becomes."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import external_data_helper

from daceml_train.errors import Invalid
from daceml_train.frontends.onnx.importer import Imported, Importer
from daceml_train.frontends.onnx.naming import homes
from daceml_train.frontends.onnx.reading import Source, inlined, opsets, read, value_types
from daceml_train.frontends.onnx.weights import FLOATS, Trainable, trainable
from daceml_train.plugins import ONNX_OPERATORS, load_plugins


@dataclass(frozen=True)
class Held:
    """The place of one of the model's initializers in the module."""

    name: str
    path: str
    trainable: bool


class OnnxModule(torch.nn.Module):
    """A model that came from ONNX: `forward` takes its inputs in order and returns its output, or a tuple of them.

    `source` is the Python code that runs. Created by `load`.
    """

    source: str
    """The Python source of `forward`, a line per node."""
    skeleton: onnx.ModelProto
    """The model without the values that the module stores."""
    held: list[Held]
    notes: list[str]
    input_names: list[str]
    output_names: list[str]
    _options: dict[str, Any]

    def __reduce__(self) -> Any:
        state = self.state_dict(keep_vars=True)
        training = {name: value.requires_grad for name, value in self.named_parameters()}
        return _rebuilt, (self.skeleton.SerializeToString(), self._options, state, training, self.training)

    def extra_repr(self) -> str:
        inputs, outputs = ", ".join(self.input_names), ", ".join(self.output_names)
        count = sum(entry.trainable for entry in self.held)
        return (
            f"{self._options['name']}: ({inputs}) -> ({outputs}), {count} parameters, {len(self.held) - count} buffers"
        )


def load(model: Any, *, trainable: Trainable = None, train_mode: bool = False) -> OnnxModule:
    """An `nn.Module` from an ONNX model: a path, bytes or an `onnx.ModelProto`.

    Initializers become parameters and buffers under their own names. `trainable` says which are parameters: by default
    the floating-point ones that are weight operands; names, a predicate over names, True (every floating-point one) or
    False. With `train_mode`, BatchNormalization and Dropout of an inference graph behave as in training while the
    module is in training mode. Raises `Invalid` for a model that breaks ONNX's rules and
    `Unsupported` for what is not imported, naming operator, domain, version and node.
    """
    if train_mode is not True and train_mode is not False:
        raise Invalid(f"train_mode is True or False, given {train_mode!r}")
    load_plugins(ONNX_OPERATORS)
    source = read(model)
    try:
        return _build(source, trainable, train_mode, {})
    except UnicodeDecodeError as error:
        raise Invalid(f"{source.name} has a name or attribute that is no text, it is damaged: {error}") from None


def _build(source: Source, choice: Trainable, train_mode: bool, supplied: Mapping[str, torch.Tensor]) -> OnnxModule:
    proto = source.proto
    flat = inlined(proto)
    chosen = trainable(flat.graph, choice)
    importer = Importer(
        flat.graph,
        opsets(flat),
        source.folder,
        homes(tensor.name for tensor in flat.graph.initializer),
        chosen,
        supplied,
        train_mode,
        value_types(flat),
    )
    imported = importer.run()
    module = _class(source.name, imported)()
    module._options = {"trainable": sorted(chosen), "train_mode": train_mode, "name": source.name}
    module.held = []
    known = {tensor.name for tensor in flat.graph.initializer}
    statistics = _statistics(flat.graph) if train_mode else set()
    for constant in imported.constants:
        values = constant.value.clone() if constant.name in statistics else constant.value
        initializer = constant.name in known and not constant.path.startswith("constant_")
        _place(module, constant.path, values, constant.trainable, persistent=initializer)
        if initializer:
            module.held.append(Held(constant.name, constant.path, constant.trainable))
    module.notes = _remarks(flat, train_mode) + _still(flat.graph, module.held)
    module.skeleton = _skeleton(source, {entry.name for entry in module.held})
    return module


def _class(name: str, imported: Imported) -> type[OnnxModule]:
    """A class of its own for each model: its `forward` is generated, and tracebacks show the generated lines."""
    file = f"<onnx {name}>"
    count = 1
    while file in linecache.cache:
        count += 1
        file = f"<onnx {name} {count}>"
    namespace: dict[str, Any] = dict(imported.namespace)
    exec(
        compile(imported.source, file, "exec"), namespace
    )  # generated text: names and literals, no strings from the model
    lines = imported.source.splitlines(keepends=True)
    linecache.cache[file] = (len(imported.source), None, lines, file)
    title = "".join(part.capitalize() for part in re.findall(r"[A-Za-z0-9]+", name)) or "Model"
    title = title if title[0].isalpha() else f"Onnx{title}"
    members = {
        "forward": namespace["forward"],
        "source": imported.source,
        "input_names": imported.inputs,
        "output_names": imported.outputs,
        "__module__": __name__,
    }
    return type(title, (OnnxModule,), members)


def _place(module: torch.nn.Module, path: str, values: torch.Tensor, trains: bool, persistent: bool) -> None:
    *folders, name = path.split(".")
    for folder in folders:
        if folder not in module._modules:
            module.add_module(folder, torch.nn.Module())
        module = module._modules[folder]  # type: ignore[assignment]
    if trains:
        module.register_parameter(name, torch.nn.Parameter(values))
    else:
        module.register_buffer(name, values, persistent=persistent)


def _statistics(graph: onnx.GraphProto) -> set[str]:
    """Running statistics, which training changes in place."""
    return {name for node in graph.node if node.op_type == "BatchNormalization" for name in node.input[3:5]}


def _remarks(proto: onnx.ModelProto, train_mode: bool) -> list[str]:
    """Warnings for users who train the model."""
    kinds = {node.op_type for node in proto.graph.node}
    notes = []
    present = sorted(kinds & {"BatchNormalization", "Dropout"})
    if present and not train_mode:
        notes.append(f"{' and '.join(present)} run as in inference; train_mode=True makes them train")
    if "Conv" in kinds and "BatchNormalization" not in kinds:
        notes.append(
            "there is no BatchNormalization; if the exporter folded it into convolutions, it cannot be restored"
        )
    return notes


def _still(graph: onnx.GraphProto, held: list[Held]) -> list[str]:
    """Floating-point arrays that do not train, by name, so that none is frozen silently."""
    floats = {tensor.name for tensor in graph.initializer if tensor.data_type in FLOATS and tensor.dims}
    names = [entry.name for entry in held if entry.name in floats and not entry.trainable]
    if not names:
        return []
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return [f"these arrays are buffers and do not train, unless trainable names them: {', '.join(names[:8])}{more}"]


def _skeleton(source: Source, held: set[str]) -> onnx.ModelProto:
    """The model without the values that the module stores, so that they are in memory once."""
    if source.owned:
        skeleton = source.proto
    else:
        skeleton = onnx.ModelProto()
        for descriptor, value in source.proto.ListFields():
            if descriptor.name == "graph":
                for inner, part in value.ListFields():
                    if inner.name != "initializer":
                        _copy(skeleton.graph, inner, part)
            else:
                _copy(skeleton, descriptor, value)
        for tensor in source.proto.graph.initializer:
            added = skeleton.graph.initializer.add()
            if tensor.name in held:
                added.name, added.data_type, added.doc_string = tensor.name, tensor.data_type, tensor.doc_string
                added.dims.extend(tensor.dims)
                if external_data_helper.uses_external_data(tensor):
                    added.data_location = tensor.data_location
                    added.external_data.extend(tensor.external_data)
            else:
                added.CopyFrom(tensor)
        return skeleton
    for tensor in skeleton.graph.initializer:
        if tensor.name in held:
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
    return skeleton


def _copy(message: Any, descriptor: Any, value: Any) -> None:
    target = getattr(message, descriptor.name)
    if hasattr(target, "extend"):
        target.extend(value)
    elif hasattr(target, "CopyFrom"):
        target.CopyFrom(value)
    else:
        setattr(message, descriptor.name, value)


def _rebuilt(
    data: bytes,
    options: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    training: Mapping[str, bool],
    mode: bool,
) -> OnnxModule:
    """A module from its skeleton and state, for unpickling and `copy.deepcopy`."""
    load_plugins(ONNX_OPERATORS)
    proto = onnx.ModelProto.FromString(data)
    flat = inlined(proto)
    paths = homes(tensor.name for tensor in flat.graph.initializer)
    supplied = {name: state[path] for name, path in paths.items() if path in state}
    source = Source(proto, None, str(options["name"]), True)
    module = _build(source, options["trainable"], bool(options["train_mode"]), supplied)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(training[name])
    return module.train(mode)


__all__ = ["Held", "OnnxModule", "load"]
