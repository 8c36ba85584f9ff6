"""The graphs that the passes of a pipeline meet on the way through small networks' training steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from daceml_train.autodiff.reverse import differentiate
from daceml_train.frontends.torch.capture.capture import capture
from daceml_train.graph.graph import Graph, Role
from daceml_train.passes.pipeline import Pipeline, Step
from daceml_train.transformations.pipelines import TRAINING
from tests.driver.networks import PROBLEMS


def captured(function: Callable[..., Any], *inputs: Any) -> Graph:
    """The captured graph of a call that is one graph."""
    found: list[Graph] = []

    def backend(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        found.append(capture(gm, examples).graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    (graph,) = found
    return graph


@functools.cache
def loss_graph(name: str) -> Graph:
    """Model and loss of a small network."""
    problem = PROBLEMS[name]
    model, (x, y) = problem.build()
    return captured(lambda x, y: problem.loss(model(x), y), x, y)


def stages(name: str, pipeline: Pipeline = TRAINING) -> Iterator[tuple[type, Graph]]:
    """(a pass's class, the graph that the pass is given) in the order of the pipeline."""
    seen: list[tuple[type, Graph]] = []
    before = loss_graph(name)

    def watch(step: Step) -> None:
        nonlocal before
        seen.append((type(step.transformation), before))
        assert step.graph is not None
        before = step.graph

    graph = pipeline.run(before, ("forward",), watch).copy()
    loss = graph.value(graph.outputs[0])
    parameters = [n for n, entry in graph.inputs.items() if entry.role is Role.parameter]
    for parameter, gradient in differentiate(graph, {loss.name: loss.constant(1.0)}, parameters).items():
        if gradient is not None:
            graph.write(parameter, graph.value(parameter) - gradient * 0.1)
    before = graph
    pipeline.run(graph, tuple(level for level, _ in pipeline.passes if level != "forward"), watch)
    yield from seen
