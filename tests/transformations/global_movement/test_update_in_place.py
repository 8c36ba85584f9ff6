"""What is stored over the array it replaces: elements, columns and rows, permuted gradients, numbers of rank 0."""

from __future__ import annotations

import pytest

from daceml_train.analysis.verify import verify
from daceml_train.graph.graph import Graph
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import CopyLaunch, KernelLaunch
from daceml_train.ops.kernel import Kernel
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise, FuseEpilogue, FuseIntoReduction
from daceml_train.transformations.fusion.siblings import FuseSiblings
from daceml_train.transformations.global_movement import update_in_place
from daceml_train.transformations.global_movement.remat_costs import finished, remat_costs_of
from daceml_train.transformations.global_movement.reuse_operands import ReuseOperands
from daceml_train.transformations.global_movement.scalar_updates import MOST, with_scalar_updates
from daceml_train.transformations.global_movement.update_in_place import UpdateInPlace
from tests.transformations.checking import check_same, program

FUSION = FuseElementwise(), FuseIntoReduction(), FuseEpilogue(), FuseSiblings()


def updated(signature: str, body: str, result: str = "") -> Graph:
    """The graph after fusion and updates in place, which computes the same."""
    graph = program(signature, body, result)
    after = UpdateInPlace().run(fused(graph))
    check_same(graph, after, exact=False)
    return after


def fused(graph: Graph) -> Graph:
    """The graph after fusion."""
    for transformation in FUSION:
        graph = transformation.run(graph)
    return graph


def in_place(graph: Graph) -> set[str]:
    """The inputs that a kernel overwrites."""
    return {node.inputs[argument] for node in graph.nodes for _, argument in node.op.updates}


def launches(graph: Graph) -> tuple[int, int]:
    """Kernels and copies."""
    results = lower(graph).launches
    return sum(isinstance(x, KernelLaunch) for x in results), sum(isinstance(x, CopyLaunch) for x in results)


def test_a_permuted_gradient() -> None:
    body = "%t = permute(%g, dims=(1, 0))\n%n = sub(%p, %t)\nwrite p <- %n"
    graph = updated("p: f32[4, 6], g: f32[6, 4]", body)
    assert in_place(graph) == {"p"} and launches(graph) == (1, 0)


def test_columns() -> None:
    """A bias, whose gradient is a sum over rows, and a weight that the rows read before."""
    body = """
    %y = mul(%g, %w)
    %h = mul(%g, %x)
    %gw = reduce(%h, kind="sum", dims=(0,))
    %gb = reduce(%g, kind="sum", dims=(0,))
    %nw = sub(%w, %gw)
    %nb = sub(%b, %gb)
    write w <- %nw
    write b <- %nb
    """
    graph = updated("g: f32[50, 40], x: f32[50, 40], w: f32[40], b: f32[40]", body, "%y")
    assert in_place(graph) == {"w", "b"} and launches(graph)[1] == 0


def test_what_overwrites_an_operand_already_stays_after_its_readers() -> None:
    """The update waits until its parameter is read, and so does what overwrites the update's other operand."""
    body = """
    %h = mul(%x, %x)
    %n = add(%p, %h)
    %y = neg(%h)
    %z = sin(%y)
    %r = mul(%p, %p)
    write p <- %n
    """
    graph = program("x: f32[50, 40], p: f32[50, 40]", body, "%z, %r")
    after = ReuseOperands(min_bytes=0).run(graph)
    assert in_place(after) == {"h"}
    after = UpdateInPlace().run(after)
    verify(after)
    check_same(graph, after, exact=False)
    assert in_place(after) == {"h", "p"}


def test_rows_are_copied() -> None:
    """The threads of a row share it: one may read the old value after another has stored the new one."""
    body = '%s = reduce(%x, kind="sum", dims=(1,))\n%n = add(%m, %s)\nwrite m <- %n'
    graph = updated("x: f32[50, 40], m: f32[50]", body)
    assert not in_place(graph) and launches(graph) == (1, 1)


STEP = """
%one{i} = full(shape=(), value=1.0, dtype=f32)
%s{i} = add(%p{i}_step, %one{i})
%f{i} = div(%rate, %s{i})
%m{i} = mul(%p{i}_grad, %f{i})
%n{i} = sub(%p{i}, %m{i})
"""
WRITES = "write p{i}_step <- %s{i}\nwrite p{i} <- %n{i}\n"


def steps(count: int) -> tuple[str, str]:
    """Parameters with a step counter each."""
    arrays = "p{i}: f32[8, {n}], p{i}_grad: f32[8, {n}], p{i}_step: f32[]"
    signature = ", ".join(["rate: f32[]", *(arrays.format(i=i, n=i + 3) for i in range(count))])
    return signature, "".join(text.format(i=i) for text in (STEP, WRITES) for i in range(count))


def test_step_counters_are_one_kernel() -> None:
    graph = updated(*steps(5))
    assert in_place(graph) == {f"p{i}{rest}" for i in range(5) for rest in ("", "_step")}
    assert launches(graph) == (6, 0)
    (counters,) = [node for node in graph.nodes if len(node.outputs) == 5]
    assert all(graph.tensors[name].rank == 0 for name in (*counters.inputs, *counters.outputs))


def test_a_kernel_of_many_results_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One result more at a time would plan it as often as it has results."""
    planned = []
    can_store = update_in_place.can_store
    monkeypatch.setattr(update_in_place, "can_store", lambda *inputs: planned.append(inputs) or can_store(*inputs))
    graph = updated(*steps(40))
    kernels = [node.op for node in graph.nodes if isinstance(node.op, Kernel) and node.op.updates]
    assert max(len(kernel.updates) for kernel in kernels) == 40
    assert len(planned) == len(kernels)


def test_step_counters_are_planned_as_they_run() -> None:
    """Rematerialization plans the order that follows: a weight's update waits for its own gradient alone."""
    graph = fused(program(*steps(5)))
    planned = remat_costs_of(graph, 16.0).graph
    assert [node.outputs for node in planned.nodes] == [node.outputs for node in finished(graph).nodes]


def test_many_step_counters_are_several_kernels() -> None:
    graph = updated(*steps(MOST + 2))
    assert launches(graph) == (MOST + 2 + 2, 0)


@pytest.mark.parametrize("old", ["%p0_step", "%p1_step"])
def test_a_counter_that_is_read_later_is_copied(old: str) -> None:
    """The old value is a result: it cannot be overwritten before, so one number is copied at the end."""
    signature, body = steps(2)
    graph = updated(signature, body, old)
    assert in_place(graph) == {"p0", "p1", "p0_step", "p1_step"} - {old[1:]}
    assert launches(graph)[1] >= 1


def test_counters_that_depend_on_one_another() -> None:
    body = """
    %one = full(shape=(), value=1.0, dtype=f32)
    %a = add(%s, %one)
    %b = mul(%t, %a)
    %c = mul(%p, %b)
    %d = mul(%q, %a)
    write s <- %a
    write t <- %b
    write p <- %c
    write q <- %d
    """
    graph = updated("s: f32[], t: f32[], p: f32[8], q: f32[9]", body)
    assert {"p", "q"} <= in_place(graph)


def test_a_number_from_a_reduction_stays_in_its_kernel() -> None:
    body = '%s = reduce(%x, kind="sum", dims=(0, 1))\n%n = add(%m, %s)\n%y = mul(%x, %s)\nwrite m <- %n'
    graph = program("x: f32[8, 6], m: f32[]", body, "%y")
    assert with_scalar_updates(graph) is graph
    assert "m" not in in_place(updated("x: f32[8, 6], m: f32[]", body, "%y"))


def test_a_value_under_another_index_is_copied() -> None:
    """`p` is read transposed as well: its element may be needed after it was overwritten."""
    body = "%t = permute(%p, dims=(1, 0))\n%n = add(%p, %t)\nwrite p <- %n"
    graph = updated("p: f32[6, 6]", body)
    assert not in_place(graph) and isinstance(lower(graph).launches[-1], CopyLaunch)


def test_a_column_that_later_rows_read_is_copied() -> None:
    """The rows of the second phase need the old weight after its new value is known."""
    body = """
    %h = mul(%g, %x)
    %gw = reduce(%h, kind="sum", dims=(0,))
    %nw = sub(%w, %gw)
    %m = mul(%x, %w)
    %y = mul(%m, %gw)
    write w <- %nw
    """
    graph = updated("g: f32[50, 40], x: f32[50, 40], w: f32[40]", body, "%y")
    kernels = [node for node in graph.nodes if "w" in node.inputs and len(node.outputs) == 2]
    assert not kernels or "w" not in in_place(graph)


@pytest.mark.parametrize("count", [2, 3])
def test_kernels_that_read_what_others_store_over(count: int) -> None:
    """Each of them has to come before another one: one stores elsewhere. The scale of normalized channels is so."""
    names = [f"p{k}" for k in range(count)]
    steps = [f"%g{k} = mul(%x{k}, %p{(k + 1) % count})\n%n{k} = sub(%p{k}, %g{k})" for k in range(count)]
    body = "\n".join([*steps, *(f"write p{k} <- %n{k}" for k in range(count))])
    signature = ", ".join([*(f"{p}: f32[4, 6]" for p in names), *(f"x{k}: f32[4, 6]" for k in range(count))])
    graph = program(signature, body)
    for transformation in (FuseElementwise(), UpdateInPlace()):
        graph = transformation.run(graph)
    verify(graph)
    check_same(program(signature, body), graph, exact=False)
    assert len(in_place(graph)) == count - 1


def test_a_kernel_that_waits_is_waited_for() -> None:
    """The first kernel stores over `p` after its last reader, so what the first one reads is stored over later."""
    body = """
    %n = sub(%p, %q)
    %m = sub(%q, %x)
    %y = mul(%p, %x)
    write p <- %n
    write q <- %m
    """
    graph = program("p: f32[4, 6], q: f32[4, 6], x: f32[4, 6]", body, "%y")
    after = UpdateInPlace().run(FuseElementwise().run(graph))
    verify(after)
    check_same(graph, after, exact=False)
    assert in_place(after) == {"p", "q"}


@pytest.mark.parametrize("target", ["t", "r"])
def test_rows_are_added_to_the_table_alone(target: str) -> None:
    """A state whose rows are added to another array takes a copy of the sum: that array stays as it is."""
    body = f"%n = add_rows(%t, %i, %r)\nwrite {target} <- %n"
    graph = updated("t: f32[6, 4], i: i64[6], r: f32[6, 4]", body)
    assert in_place(graph) == ({"t"} if target == "t" else set())
