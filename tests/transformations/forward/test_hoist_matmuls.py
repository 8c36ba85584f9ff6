"""Matmuls of slices with one matrix are one matmul, forward and backward."""

import pytest

from daceml_train.analysis.traffic import traffic
from daceml_train.errors import Refused
from daceml_train.transformations.forward.hoist_matmuls import HoistMatmuls
from tests.transformations.checking import assert_text, check_pass, check_same, program

STEPS = """
    %a = slice(%x, dim=1, start=0, stop=1)
    %b = view(%a, shape=(4, 5))
    %p = matmul(%b, %w)
    %c = tanh(%p)
    %d = slice(%x, dim=1, start=1, stop=2)
    %e = view(%d, shape=(4, 5))
    %q = matmul(%e, %w)
    %r = add(%c, %q)
"""


def test_steps_of_a_sequence() -> None:
    graph = program("x: f32[4, 2, 5], w: f32[5, 6]", STEPS, "%r")
    (family,) = HoistMatmuls().matches(graph)
    after = check_pass(graph, HoistMatmuls(), exact=False)
    assert_text(
        after,
        """\
        %view: f32[8, 5] = view(%x, shape=(8, 5))
        %matmul: f32[8, 6] = matmul(%view, %w)
        %view_1: f32[4, 2, 6] = view(%matmul, shape=(4, 2, 6))
        %slice: f32[4, 1, 6] = slice(%view_1, dim=1, start=0, stop=1)
        %view_2: f32[4, 6] = view(%slice, shape=(4, 6))
        %c: f32[4, 6] = tanh(%view_2)
        %slice_1: f32[4, 1, 6] = slice(%view_1, dim=1, start=1, stop=2)
        %view_3: f32[4, 6] = view(%slice_1, shape=(4, 6))
        %r: f32[4, 6] = add(%c, %view_3)
        return %r
        """,
    )
    assert traffic(after).bytes - traffic(graph).bytes == family.traffic == -5 * 6 * 4
    assert HoistMatmuls().matches(after) == []
    assert family.arrays == ("p", "q")
    assert str(family.apply()) == str(after)


def test_rows_of_a_matrix_and_symbolic_sizes() -> None:
    body = """
        %a = slice(%x, dim=0, start=0, stop=3)
        %p = matmul(%a, %w)
        %b = slice(%x, dim=0, start=3, stop=8)
        %q = matmul(%b, %w)
    """
    graph = program("x: f32[8, 5], w: f32[5, s0]", body, "%p, %q")
    after = HoistMatmuls().run(graph)
    assert [n.op.label for n in after.nodes].count("matmul") == 1
    check_same(graph, after, exact=False, s0=3)


def test_names_that_the_graph_has_already() -> None:
    body = STEPS.replace("%d", "%slice_1").replace("%e", "%view_1").replace("%b", "%view")
    graph = program("x: f32[4, 2, 5], w: f32[5, 6]", body, "%r")
    check_same(graph, HoistMatmuls().run(graph), exact=False)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("start=1, stop=2", "start=2, stop=3", "overlap or leave gaps"),
        ("start=1, stop=2", "start=0, stop=1", "overlap or leave gaps"),
        ("f32[4, 2, 5]", "f32[4, 3, 5]", "leave gaps: rows would be multiplied for nothing"),
        ("f32[4, 2, 5]", "f32[4, 2, 5]@102", "would have to be copied to view it as one matrix"),
    ],
)
def test_refusals(old: str, new: str, sentence: str) -> None:
    signature = "x: f32[4, 3, 5], w: f32[5, 6]" if "start=2" in new else "x: f32[4, 2, 5], w: f32[5, 6]"
    graph = program(signature.replace(old, new), STEPS.replace(old, new), "%r")
    (family,) = HoistMatmuls().matches(graph)
    assert family.refusal is not None
    assert sentence in family.refusal
    assert HoistMatmuls().run(graph) is graph
    with pytest.raises(Refused, match="matmuls of slices of %x with %w"):
        family.apply()
