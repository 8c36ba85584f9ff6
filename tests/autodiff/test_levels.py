"""Derivatives of levels, against PyTorch's of the same recursion, node by node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.verify import verify
from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Unsupported
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse, show
from daceml_train.ops.levels import Levels
from tests.graph import levels
from tests.graph.levels import Node

RNG = np.random.default_rng(0)
CASES: dict[str, tuple[str, list[Node]]] = {
    "a tree": ("tree", [levels.random_tree(RNG, 7)]),
    "trees": ("tree", [levels.random_tree(RNG, n) for n in (1, 5, 2, 9)]),
    "a node": ("tree", [Node()]),
    "a chain": ("tree", [levels.chain(30)]),
    "a dag": ("child_sum", levels.random_dag(RNG, 30)),
    "shared nodes": ("child_sum", [Node((shared := Node((Node(),)), shared)), Node((shared,))]),
    "no inner nodes": ("child_sum", [Node(), Node()]),
}


def joint(graph: Graph, of: list[str], wrt: list[str]) -> Graph:
    """A graph with the cotangents of `of` as inputs, and gradients of `wrt` as further outputs."""
    other = graph.copy()
    seeds = {o: other.input(f"grad_{o}", graph.tensors[o]) for o in of}
    found = differentiate(other, seeds, wrt)
    other.output(*(g for name in wrt if (g := found[name]) is not None))
    return other


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("outputs", ["all", "first", "last"])
def test_gradients_are_those_of_recursion(case: str, outputs: str) -> None:
    name, roots = CASES[case]
    graph: Graph = getattr(levels, name)()
    result = levels.forest(name, roots)
    given = levels.inputs(name, result, RNG)
    of = {"all": graph.outputs, "first": graph.outputs[:1], "last": graph.outputs[-1:]}[outputs]
    wrt = [n for n, x in given.items() if x.dtype.kind == "f"]
    whole = joint(graph, of, wrt)
    verify(whole)
    assert show(parse(show(whole))) == show(whole)
    values = {n: torch.tensor(x, requires_grad=n in wrt) for n, x in given.items()}
    expected = dict(zip(graph.outputs, levels.eager(name, result, values), strict=True))
    weights: dict[str, Any] = {o: RNG.normal(size=tuple(expected[o].shape)) for o in of}
    loss = values["w"].sum() * 0
    for o, w in weights.items():
        loss = loss + (expected[o] * torch.tensor(w)).sum()
    gradients = torch.autograd.grad(loss, [values[n] for n in wrt], allow_unused=True)
    results = interpret(whole, {**given, **{f"grad_{o}": w for o, w in weights.items()}}).outputs[len(graph.outputs) :]
    for reference, gradient in zip(gradients, results, strict=True):
        expected_gradient = np.zeros(gradient.shape) if reference is None else reference.numpy()
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-13)


def test_gradients_of_parameters_are_matmuls_of_all_rows() -> None:
    whole = joint(levels.tree(), ["h"], ["x", "w", "u", "b"])
    forward, backward = (n.op for n in whole.nodes if isinstance(n.op, Levels))
    assert backward.reverse
    labels = [[s.op.label for s in body.statements] for body in backward.cells]
    assert labels[0].count("matmul") == 0, "those of leaves concern all rows"
    assert labels[1].count("matmul") == 1, "only the children's cotangents run level by level"
    assert [n.op.label for n in whole.nodes].count("matmul") == 3
    assert len(forward.cells[1].yields) == 2, "the concatenated children; the state is there already"


def test_only_what_was_asked_for_is_built() -> None:
    whole = joint(levels.tree(), ["h"], ["w"])
    assert [n.op.label for n in whole.nodes].count("matmul") == 1
    (forward, _) = (n.op for n in whole.nodes if isinstance(n.op, Levels))
    assert len(forward.cells[1].yields) == 1


def test_a_second_derivative_is_refused() -> None:
    whole = joint(levels.tree(), ["h"], ["w"])
    with pytest.raises(Unsupported, match="second derivative of levels"):
        joint(whole, whole.outputs[-1:], ["x"])


def test_a_cell_that_mixes_its_rows_is_refused() -> None:
    mixed = levels.TREE.replace("%s = add(%m, %bias)", '%z = reduce(%m, kind="sum", dims=(0,))\n    %s = add(%m, %z)')
    with pytest.raises(Unsupported, match="mixes its rows"):
        joint(parse(mixed), ["h"], ["w"])
