"""Gradients of arrays that are read in slices: one concatenation, the numbers of PyTorch, and sums where pieces meet."""

import numpy as np
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.autodiff.reverse import differentiate
from daceml_train.graph.graph import Graph, Role
from daceml_train.passes.base import without_dead_code
from tests.transformations.checking import program

WEIGHTS = (1.0, 2.0, 5.0)


def gradient(ranges: list[tuple[int, int]], dim: int, also: bool = False) -> tuple[Graph, np.ndarray, torch.Tensor]:
    """The gradient of a weighted sum of slices of x [4, 6], by our reverse pass and by PyTorch."""
    lines, terms = [], []
    for k, (start, stop) in enumerate(ranges):
        weight = WEIGHTS[k % 3]
        lines += [f"%s{k} = slice(%x, dim={dim}, start={start}, stop={stop})", f"%m{k} = mul(%s{k}, %s{k})"]
        lines += [
            f'%r{k} = reduce(%m{k}, kind="sum", dims=(0, 1))',
            f"%w{k} = full(value={weight}, shape=(), dtype=f32)",
        ]
        lines += [f"%t{k} = mul(%r{k}, %w{k})"]
        terms.append(f"t{k}")
    if also:
        lines += ["%e = exp(%x)", '%te = reduce(%e, kind="sum", dims=(0, 1))']
        terms.append("te")
    total = terms[0]
    for k, term in enumerate(terms[1:]):
        lines.append(f"%y{k} = add(%{total}, %{term})")
        total = f"y{k}"
    graph = program("x: f32[4, 6]", "\n".join(lines), f"%{total}")
    seed = graph.input("g", graph.tensors[total], Role.cotangent)
    (found,) = differentiate(graph, {total: seed}, ["x"]).values()
    assert found is not None
    graph.outputs = [found.name]
    graph = without_dead_code(graph)
    numbers = np.random.default_rng(0).standard_normal((4, 6))
    given = interpret(graph, {"x": numbers, "g": np.ones(())}).outputs[0]
    x = torch.tensor(numbers, requires_grad=True)
    loss = torch.zeros((), dtype=torch.float64)
    for k, (start, stop) in enumerate(ranges):
        loss = loss + WEIGHTS[k % 3] * x.narrow(dim, start, stop - start).square().sum()
    if also:
        loss = loss + x.exp().sum()
    loss.backward()
    return graph, given, x.grad


def labels(graph: Graph) -> list[str]:
    return [n.op.label for n in graph.nodes if n.op.label in ("pad", "concat")]


def test_slices_side_by_side() -> None:
    for dim, ranges in ((0, [(0, 1), (1, 2), (2, 4)]), (1, [(3, 6), (0, 3)])):
        graph, given, expected = gradient(ranges, dim)
        np.testing.assert_allclose(given, expected, rtol=1e-12)
        assert labels(graph) == ["concat"]


def test_other_readers_are_added() -> None:
    graph, given, expected = gradient([(0, 2), (2, 4)], 0, also=True)
    np.testing.assert_allclose(given, expected, rtol=1e-12)
    assert labels(graph) == ["concat"]


def test_gaps_and_overlaps_are_sums() -> None:
    for ranges in ([(0, 1), (2, 4)], [(0, 3), (1, 4)], [(0, 2), (0, 2)], [(0, 2), (2, 4), (0, 2)]):
        graph, given, expected = gradient(ranges, 0)
        np.testing.assert_allclose(given, expected, rtol=1e-12)
        assert "concat" not in labels(graph)
