"""The forward pass by itself, for the first results of a verification: a third of the operators, and no optimizer.

A large forward pass begins with its first operators, whose kernels are compiled within seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.reachability import required
from daceml_train.driver.settings import Settings
from daceml_train.exploration.session.eager_copy import EagerCopy, Named
from daceml_train.exploration.session.program import DRAWN, RATE, Inputs, Program
from daceml_train.exploration.session.progress import CheckProgress, OnProgress, compiling
from daceml_train.exploration.session.subject import Subject
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import leaves
from daceml_train.ops.operator import Array

FIRST = 24
"""Operators of the first comparison, composites counted as what they lower to."""
LARGE = 150
"""Operators of a forward pass above which there is such a comparison."""


@dataclass(frozen=True)
class ForwardCheck:
    """Tensors of a program and the same of a reference, and what they cover."""

    found: Named
    reference: Named
    covered: str


def forward_checks(subject: Subject, graph: Graph, options: Settings, progress: OnProgress) -> Iterator[ForwardCheck]:
    """Of a large graph the first operators, then the results of the forward pass.

    The reference of operators is their meaning. That of the results is PyTorch where it draws the same random numbers,
    else the captured graph.
    """
    inputs, part = Inputs.captured(subject), of_results(graph, subject.results)
    if not part.inputs.keys() <= inputs.tensors.keys():  # a kernel computes a result along with an update
        inputs = Inputs.of(subject, RATE)
    lowered = leaves(part).graph
    if len(lowered.nodes) > LARGE:
        yield _beginning(lowered, inputs, compiling(options, "the first operators", progress))
    program = Program.of(part, compiling(options, "the forward pass", progress))
    values = program.run(inputs.fresh())
    captured, labels = subject.seen.captured, subject.labels[: subject.results]
    if captured.random or captured.draws or subject.kind == "module":
        progress(CheckProgress("evaluating the captured graph"))
        reference, name = _meaning(subject.captured, inputs.tensors), "the captured graph in float32"
    else:
        progress(CheckProgress("running PyTorch's forward pass"))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(DRAWN)
            reference, name = EagerCopy(subject).forward(), "PyTorch"
    keys = [("result", label) for label in labels]
    yield ForwardCheck(
        dict(zip(keys, values, strict=False)),
        dict(zip(keys, (value.detach() for value in reference), strict=False)),
        f"{name}, the forward pass by itself",
    )


def of_results(graph: Graph, count: int) -> Graph:
    """The operators that the first `count` outputs need.

    An operator with several results keeps those that are used elsewhere, so that its kernel is that of the whole graph.
    """
    kept, _ = required(graph.nodes, graph.outputs[:count])
    needed = {id(node) for node in kept}
    elsewhere = {name for node in graph.nodes if id(node) not in needed for name in node.inputs} | set(graph.results)
    several = [name for node in kept if len(node.outputs) > 1 for name in node.outputs if name in elsewhere]
    return _portion(graph, kept, list(dict.fromkeys([*graph.outputs[:count], *several])))


def _beginning(graph: Graph, inputs: Inputs, options: Settings) -> ForwardCheck:
    """The first operators of a graph, compiled and by their meaning."""
    kept, rest = graph.nodes[:FIRST], graph.nodes[FIRST:]
    later = {name for node in rest for name in node.inputs} | set(graph.results)
    part = _portion(graph, kept, [name for node in kept for name in node.outputs if name in later])
    tensors = {name: inputs.tensors[name] for name in part.inputs}
    values = Program.of(part, options).run(Inputs(tensors).fresh())
    keys = [("array", name) for name in part.outputs]
    meant = _meaning(part, tensors)
    covered = f"the operators' meaning in float32, the first {len(kept)} of {len(graph.nodes)} of the forward pass"
    return ForwardCheck(dict(zip(keys, values, strict=True)), dict(zip(keys, meant, strict=True)), covered)


def _portion(graph: Graph, kept: Sequence[Node], outputs: list[str]) -> Graph:
    """Some operators of a graph, with these outputs and the inputs that they read."""
    produced = {name for node in kept for name in node.outputs}
    part = graph.copy()
    part.nodes, part.outputs = list(kept), outputs
    part.writes = {target: name for target, name in graph.writes.items() if name in produced}
    read = {name for node in kept for name in node.inputs} | set(outputs) | set(part.writes)
    part.inputs = {name: given for name, given in graph.inputs.items() if name in read}
    part.tensors = {name: t for name, t in graph.tensors.items() if name in produced or name in part.inputs}
    return part


def _meaning(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a graph whose operators run one by one in float32."""
    arrays: dict[str, Array] = {}
    for name in graph.inputs:
        tensor = tensors[name]
        arrays[name] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    outputs = interpret(graph, arrays, keep=False, narrow=True).outputs
    return [torch.from_numpy(np.asarray(value)) for value in outputs]
