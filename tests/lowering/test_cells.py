"""Cells of levels as programs: what is gathered and added by the executor, without a launch of the cell's program."""

from __future__ import annotations

import dataclasses
from typing import Any

from daceml_train.graph.bodies import bodies
from daceml_train.graph.text import parse
from daceml_train.lowering.cells import CellProgram, cell_program
from daceml_train.lowering.program import Added, Gather
from daceml_train.ops.levels import Levels
from tests.graph.levels import TREE


def programs(text: str, **changes: Any) -> list[CellProgram]:
    """The programs of the cells in a graph of one operator."""
    graph = parse(text)
    (node,) = graph.nodes
    assert isinstance(node.op, Levels)
    op = dataclasses.replace(node.op, **changes)
    return [cell_program(op, kind, b) for kind, b in enumerate(bodies(op, [graph.tensors[i] for i in node.inputs]))]


def test_a_concatenation_of_children_is_gathered() -> None:
    leaf, inner = programs(TREE)
    assert (leaf.gathers, leaf.written, list(leaf.graph.inputs)) == ((), (), ["x", "w"])
    assert inner.gathers == (Gather((0, 1)),)
    assert list(inner.graph.inputs) == ["c", "u", "bias"]
    assert [node.op.label for node in inner.graph.nodes] == ["matmul", "add", "tanh"]


def test_the_order_of_children_is_that_of_the_concatenation() -> None:
    inner = programs(TREE.replace("concat(%a, %b, dim=1)", "concat(%b, %a, dim=1)"))[1]
    assert inner.gathers == (Gather((1, 0)),)


def test_a_result_of_gathered_rows_is_where_they_are_gathered() -> None:
    text = TREE.replace("%h = levels", "%h, %joined = levels").replace(
        "tanh(%s)\n    yield %h", "tanh(%s)\n    yield %h, %c"
    )
    inner = programs(text)[1]
    assert (inner.gathers, inner.written, inner.graph.outputs) == ((Gather((0, 1), result=0),), (), ["h"])


def test_children_that_are_read_elsewhere_are_gathered_alone() -> None:
    inner = programs(TREE.replace("%s = add(%m, %bias)", "%n = add(%m, %a)\n    %s = add(%n, %bias)"))[1]
    assert inner.gathers == (Gather((0,)), Gather((1,)))
    assert [node.op.label for node in inner.graph.nodes] == ["concat", "matmul", "add", "add", "tanh"]


REVERSE = """
graph back(bounds: i64[levels, 1] input, g: f32[calls, 1, 4] input, left: i64[calls] input, right: i64[calls] input,
    u: f32[4, 8] parameter) {
  %h, %own = levels(%bounds, %g, %left, %right, %u, cells=[body(g, u) {
    %rows = view(%g, shape=(rows, 4))
    %m = matmul(%rows, %u)
    %v = view(%m, shape=(rows, 1, 8))
    %a = slice(%v, dim=2, start=0, stop=4)
    %b = slice(%v, dim=2, start=4, stop=8)
    yield %a, %b, %m
  }], types=(f32[1, 4],), counts=(calls,), rows=((),), children=(((0, 2), (0, 3)),), shared=((4,),), states=((0,),),
  reverse=True)
  return %h, %own
}
"""


def test_slices_that_are_added_to_children_are_read_where_they_are() -> None:
    (cell,) = programs(REVERSE)
    assert cell.added == (Added(0, 0), Added(0, 4))
    assert (cell.graph.outputs, cell.written) == (["m", "m"], (0,))
    assert [node.op.label for node in cell.graph.nodes] == ["view", "matmul"]


def test_slices_with_gaps_are_copied() -> None:
    text = REVERSE.replace("start=4, stop=8", "start=1, stop=8, step=2")
    (cell,) = programs(text)
    assert cell.added == (Added(0, 0), Added(1, 0))
    assert cell.graph.outputs == ["m", "b", "m"]
