"""The cut into forward and backward: both halves together compute the joint graph, and little is kept in between."""

from __future__ import annotations

import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.verify import verify
from daceml_train.autodiff.partition import Halves, partition
from daceml_train.autodiff.reverse import differentiate
from daceml_train.graph.graph import Graph, Role
from daceml_train.tensor import DType, Tensor, symbol
from tests.transformations.checking import arrays, program


def joint_of(graph: Graph, wrt: list[str]) -> tuple[Graph, int]:
    """The graph with the gradients of its outputs after them, and how many results it had."""
    joint, results = graph.copy(), len(graph.outputs)
    seeds = {}
    for name in graph.outputs:
        seeds[name] = joint.input(joint.fresh(f"grad_{name}"), graph.tensors[name], Role.cotangent)
    found = differentiate(joint, seeds, wrt)
    joint.outputs += [value.name for value in found.values() if value is not None]
    verify(joint)
    return joint, results


def check(joint: Graph, results: int) -> Halves:
    """Cut `joint`, run both halves on random arrays, and compare with the whole."""
    halves = partition(joint, results)
    verify(halves.forward)
    verify(halves.backward)
    given = arrays(joint)
    whole = interpret(joint, given)
    first = interpret(halves.forward, {n: given[n] for n in halves.forward.inputs})
    saved = dict(zip(halves.saved, first.outputs[results:], strict=True))
    kept = {n: given[n] for n in halves.kept}
    cotangents = {n: a for n, a in given.items() if joint.inputs[n].role is Role.cotangent}
    assert list(halves.backward.inputs) == [*halves.kept, *halves.saved, *cotangents]
    second = interpret(halves.backward, {**kept, **saved, **cotangents})
    for a, b in zip([*first.outputs[:results], *second.outputs], whole.outputs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    for name, value in whole.writes.items():
        np.testing.assert_allclose(first.writes[name], value, rtol=1e-12)
        assert name not in halves.kept
    return halves


LAYER = program(
    "x: f32[4, 8], w: f32[8, 8], v: f32[8, 2]",
    "%a = matmul(%x, %w)\n%b = tanh(%a)\n%c = mul(%b, %b)\n%d = exp(%c)\n%y = matmul(%d, %v)",
    "%y",
)


def test_cheap_values_are_computed_again_from_what_a_product_makes() -> None:
    halves = check(*joint_of(LAYER, ["x", "w", "v"]))
    assert set(halves.saved) == {"a", "d"}  # made and read by products: in memory anyway
    assert set(halves.kept) == {"x", "w", "v"}


def test_only_what_is_asked_for_is_kept() -> None:
    halves = check(*joint_of(LAYER, ["v"]))
    assert (halves.saved, halves.kept) == (("d",), ())


def test_a_result_is_not_computed_again() -> None:
    halves = check(*joint_of(program("x: f32[4]", "%a = exp(%x)\n%y = mul(%a, %a)", "%a, %y"), ["x"]))
    assert "a" in halves.saved or halves.saved == ()


def test_views_are_taken_again() -> None:
    graph = program(
        "x: f32[4, 8], w: f32[8, 8]",
        "%a = matmul(%x, %w)\n%t = permute(%a, dims=(1, 0))\n%b = matmul(%t, %a)\n%y = tanh(%b)",
        "%y",
    )
    halves = check(*joint_of(graph, ["x", "w"]))
    assert set(halves.saved) <= {"a", "y", "b"} and "t" not in halves.saved


def test_what_a_written_input_made_is_saved() -> None:
    """Its value is gone when the backward pass runs."""
    graph = program("x: f32[4], s: f32[4]", "%a = tanh(%s)\n%b = mul(%x, %a)\n%y = mul(%b, %s)", "%y")
    following = graph.value("s") * 0.5
    graph.write("s", following)
    halves = check(*joint_of(graph, ["x"]))
    assert halves.kept == () and set(halves.saved) == {"a", "s"}


def test_a_loss_without_parameters_in_between() -> None:
    graph = program("x: f32[4], z: f32[4]", "%y = add(%x, %z)", "%y")
    halves = check(*joint_of(graph, ["x", "z"]))
    assert halves.saved == halves.kept == ()


@pytest.mark.parametrize("kind", ["tanh", "neg"])
def test_long_chains_need_no_deep_recursion(kind: str) -> None:
    graph = Graph("chain")
    value = graph.input("x", Tensor((3,)))
    for _ in range(3000):
        value = value.unary(kind)
    graph.output(value)
    joint, results = joint_of(graph, ["x"])
    halves = partition(joint, results)
    verify(halves.backward)
    assert set(halves.kept) <= {"x"}


def test_an_input_that_only_tells_a_size_is_kept() -> None:
    graph = Graph("sum")
    x = graph.input("x", Tensor((symbol("n"), 3), DType.float32), Role.input)
    graph.output(x.sum((0,)))
    halves = partition(*joint_of(graph, ["x"]))
    assert (halves.kept, halves.saved) == (("x",), ())
    verify(halves.backward)
