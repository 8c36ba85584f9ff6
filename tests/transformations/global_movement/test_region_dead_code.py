"""Branches and loops lose what nobody sees of them, and keep what is seen."""

from __future__ import annotations

import numpy as np

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.verify import verify
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse
from daceml_train.transformations.global_movement.dead_code import DeadCode
from tests.graph import control_flow

RNG = np.random.default_rng(0)
LOOP = """
graph g(h: f32[4] input, k: f32[4] input, x: f32[5, 4] input, z: f32[5, 4] input, w: f32[4] input) {
  %a, %b, %p, %q = scan(%h, %k, %x, %z, %w, body=body(c, d, s, t, w) {
    %e = add(%c, %s)
    %f = mul(%d, %t)
    %g = mul(%f, %w)
    %r = sin(%e)
    yield %e, %g, %r, %g
  }, carried=2, sliced=2, trips=5)
  return RESULT
}
"""


def narrowed(graph: Graph) -> Graph:
    after = DeadCode().run(graph)
    verify(after)
    given = {n: RNG.normal(size=i.tensor.shape) for n, i in graph.inputs.items()}
    given = {n: x > 0 if graph.inputs[n].tensor.dtype.short == "b1" else x for n, x in given.items()}
    before = interpret(graph, given).outputs
    for a, b in zip(interpret(after, given).outputs, before, strict=True):
        np.testing.assert_array_equal(a, b)
    return after


def test_a_loop_keeps_what_is_seen() -> None:
    whole = parse(LOOP.replace("RESULT", "%a, %b, %p, %q"))
    assert narrowed(whole).nodes[0] is whole.nodes[0]
    (node,) = narrowed(parse(LOOP.replace("RESULT", "%p"))).nodes
    assert (node.inputs, node.outputs) == (("h", "x"), ("a", "p"))
    (node,) = narrowed(parse(LOOP.replace("RESULT", "%b"))).nodes
    assert (node.inputs, node.outputs) == (("k", "z", "w"), ("b",))
    assert traffic(narrowed(parse(LOOP.replace("RESULT", "%p")))).bytes < traffic(whole).bytes


def test_a_branch_keeps_what_is_seen() -> None:
    text = control_flow.BRANCH.replace("%y =", "%y, %z =").replace("yield %r", "yield %r, %a")
    text = text.replace("yield %s", "yield %s, %a")
    (node,) = narrowed(parse(text.replace("return %y", "return %z"))).nodes
    assert (node.inputs, node.outputs) == (("c", "x"), ("z",))
    (node,) = narrowed(parse(text)).nodes
    assert (node.inputs, node.outputs) == (("c", "x", "w"), ("y",))
