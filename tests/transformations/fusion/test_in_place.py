"""Fusion after updates in place: what is stored over an input stays so, after its readers, and promises are kept."""

import pytest

from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.verify import verify
from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Pass
from daceml_train.transformations.fusion.duplicate import DuplicateCheapProducers
from daceml_train.transformations.fusion.grouping import Grouping
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise
from daceml_train.transformations.fusion.siblings import FuseSiblings
from daceml_train.transformations.global_movement.update_in_place import UpdateInPlace
from tests.transformations.checking import check_same, program

STEP = """
%a = mul(%p, %x)
%e = exp(%a)
%n = sub(%p, %g)
%b = tanh(%x)
%m = sub(%q, %g)
%c = mul(%b, %e)
%d = sin(%x)
write p <- %n
write q <- %m
"""


def updated() -> Graph:
    """`n` overwrites `p`, which `a` reads; `a`, `b` and `d` read `x`, on both sides of it."""
    signature = ", ".join(f"{name}: f32[4, 6]" for name in "pqxg")
    return UpdateInPlace().run(program(signature, STEP, "%c, %d"))


def updates(graph: Graph) -> int:
    return sum(len(node.op.updates) for node in graph.nodes)


@pytest.mark.parametrize("transformation", [FuseElementwise(), FuseSiblings(), DuplicateCheapProducers()])
def test_promises_are_kept_after_updates_in_place(transformation: Pass) -> None:
    graph = updated()
    assert updates(graph) == 2
    matches = [match for match in transformation.matches(graph) if match.refusal is None]
    for match in matches:
        after = match.apply()
        assert traffic(after).bytes - traffic(graph).bytes == match.traffic, match.where
        assert updates(after) == 2
        check_same(graph, after, exact=False)
    everywhere = transformation.run(graph)
    verify(everywhere)
    assert updates(everywhere) == 2
    assert traffic(everywhere).bytes <= traffic(graph).bytes
    check_same(graph, everywhere, exact=False)
    if isinstance(transformation, FuseSiblings):
        assert matches


def test_a_reader_is_not_moved_after_what_overwrites_its_operand() -> None:
    after = FuseSiblings().run(updated())
    order = [name for node in after.nodes for name in node.outputs]
    assert order.index("a" if "a" in order else "e") < order.index("n")


def test_what_was_overwritten_is_not_computed_again() -> None:
    """The cheap `a` would be recomputed from `p` for `c`, which stands after the update of `p`."""
    body = "%a = neg(%p)\n%h = matmul(%a, %a)\n%n = sub(%p, %h)\n%k = matmul(%h, %n)\n%c = mul(%k, %a)\nwrite p <- %n"
    graph = UpdateInPlace().run(program("p: f32[6, 6]", body, "%c"))
    after = DuplicateCheapProducers().run(graph)
    verify(after)
    check_same(graph, after, exact=False)


def test_what_is_stored_in_place_joins_nothing() -> None:
    grouping = Grouping(updated())
    first, second = (grouping.producer[name].group for name in ("a", "n"))
    assert first is not None and second is not None
    assert grouping.refusal(first, second, 96) == "n is stored over what it replaces"


def test_an_array_that_is_read_permuted_as_well_can_be_replaced() -> None:
    """The update of a weight joins the cast of the weight, transposed, which a later matmul reads in 16 bits."""
    body = """
%t = permute(%w, dims=(1, 0))
%u = cast(%t, dtype=bf16)
%n = sub(%w, %g)
%y = matmul(%x, %u)
write w <- %n
"""
    graph = program("w: f32[6, 4], g: f32[6, 4], x: bf16[5, 4]", body, "%y")
    after = UpdateInPlace().run(FuseSiblings().run(graph))
    (kernel,) = (node for node in after.nodes if node.outputs[-1] == "n")
    assert kernel.inputs == ("w", "g")
    assert kernel.op.updates == ((1, 0),)
    check_same(graph, after, exact=False)


def test_a_kernel_that_also_reads_the_transposed_element_replaces_nothing() -> None:
    body = "%t = permute(%p, dims=(1, 0))\n%e = exp(%t)\n%n = mul(%e, %p)\nwrite p <- %n"
    graph = program("p: f32[6, 6]", body)
    after = UpdateInPlace().run(FuseElementwise().run(graph))
    assert [node.inputs for node in after.nodes if node.outputs == ("n",)] == [("p",)]
    assert updates(after) == 0
    check_same(graph, after, exact=False)
