"""Expressions as operators of the graph: their lowering against the evaluation through PyTorch."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import daceml_train as dt
from benchmarks.novel import operators
from benchmarks.novel.cases import SMALL, operands
from daceml_train.analysis.interpret import interpret
from daceml_train.autodiff.reverse import differentiate
from daceml_train.expressions import array
from daceml_train.expressions.operator import Expression
from daceml_train.frontends.torch import types
from daceml_train.graph.graph import Graph
from daceml_train.tensor import DType
from daceml_train.transformations.global_movement.common_subexpressions import CommonSubexpressions
from daceml_train.transformations.intra_operator.decompose import Decompose
from daceml_train.transformations.intra_operator.simplify import Simplify


@pytest.mark.parametrize("name", SMALL)
def test_lowering_and_derivative(name: str) -> None:
    """The graph of the operator and of its derivative, interpreted, against eager execution and autograd."""
    torch.manual_seed(0)
    given = operands(SMALL[name])
    operator = getattr(operators, name)
    results = operator(*given)
    results = results if isinstance(results, tuple) else (results,)
    seeds = [torch.randn_like(r) for r in results]
    wanted = [x for x in given if x.requires_grad]
    expected = [*results, *torch.autograd.grad(results, wanted, seeds)]

    graph = Graph()
    values = [graph.input(f"x{i}", types.tensor(x)) for i, x in enumerate(given)]
    outputs = graph.emit(Expression(operator.program(*given).text), *values)
    cotangents = {r.name: graph.input(f"g{i}", r.tensor) for i, r in enumerate(outputs)}
    names = [v.name for v, x in zip(values, given, strict=True) if x.requires_grad]
    gradients = differentiate(graph, cotangents, names)
    graph.output(*outputs, *(gradients[n] for n in names))
    arrays = dict(zip(graph.inputs, (x.detach().numpy() for x in (*given, *seeds)), strict=True))
    for a, b in zip(interpret(graph, arrays).outputs, expected, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("embed_sum", {"embedding": 1, "embedding_grad": 1}),
        ("bilinear", {"gather": 4, "scatter": 4}),
        ("shift", {"gather": 1, "scatter": 1}),
    ],
)
def test_rows_and_elements_have_one_number(name: str, calls: dict[str, int]) -> None:
    """Indices that depend on data become the number of a row, or of an element: libraries are slow for several. The
    derivative, whose stages have their axes in another order, reads what the expression has looked up.
    """
    given = operands(SMALL[name])
    operator = getattr(operators, name)
    graph = Graph()
    values = [graph.input(f"x{i}", types.tensor(x)) for i, x in enumerate(given)]
    (output,) = graph.emit(Expression(operator.program(*given).text), *values)
    seed = graph.input("g", output.tensor)
    gradients = differentiate(graph, {output.name: seed}, [values[0].name])
    graph.output(output, gradients[values[0].name])
    graph = CommonSubexpressions().run(Simplify().run(Decompose().run(graph)))
    assert Counter(node.op.label for node in graph.nodes if node.op.vendor) == calls


def test_only_the_place_along_other_axes_is_looked_up() -> None:
    """Channels share the points of a grid: indices have no dimension for them."""
    given = operands(SMALL["bilinear"])
    graph = Graph()
    values = [graph.input(f"x{i}", types.tensor(x)) for i, x in enumerate(given)]
    graph.output(*graph.emit(Expression(operators.bilinear.program(*given).text), *values))
    graph = Simplify().run(Decompose().run(graph))
    (batch, channels, height, width), points = given[0].shape, given[1].shape[1]
    gathers = [node for node in graph.nodes if node.op.label == "gather"]
    assert {graph.tensors[n.inputs[0]].shape for n in gathers} == {(batch, channels, height * width)}
    computed = [n for n in graph.nodes if graph.tensors[n.outputs[0]].dtype is DType.int64]
    assert max(graph.tensors[n.outputs[0]].size for n in computed if n.op.label != "expand") == batch * points


@pytest.mark.parametrize(
    "body",
    [
        lambda x, ids: array(x[ids[i]] * x[0] for i in ids.shape[0]),
        lambda x, ids: array(x[0] * x[ids[i]] for i in ids.shape[0]),
        lambda x, ids: array(x[ids[i]] * x[ids[i] // 2] * x[i] for i in ids.shape[0]),
    ],
)
def test_gradients_that_are_added_at_places_of_data_and_others(body: Any) -> None:
    """A sum at data's places begins with what covers the whole array, and with nothing that covers a part."""
    operator = dt.expression(body)
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 4, 4])
    (expected,) = torch.autograd.grad(operator(x, ids).sum(), x)
    graph = Graph()
    values = [graph.input(f"x{k}", types.tensor(t)) for k, t in enumerate((x, ids))]
    (output,) = graph.emit(Expression(operator.program(x, ids).text), *values)
    gradients = differentiate(graph, {output.name: graph.input("g", output.tensor)}, [values[0].name])
    graph.output(gradients[values[0].name])
    graph = Decompose().run(graph)
    arrays = {"x0": x.detach().numpy(), "x1": ids.numpy(), "g": np.ones(3)}
    np.testing.assert_allclose(interpret(graph, arrays).outputs[0], expected.numpy(), rtol=1e-12)
