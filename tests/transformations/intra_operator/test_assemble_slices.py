import functools
import itertools
import operator

import pytest

from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph
from daceml_train.ops.movement import Pad
from daceml_train.ops.operator import Value
from daceml_train.tensor import Tensor
from daceml_train.transformations.intra_operator.assemble_slices import AssembleSlices
from daceml_train.transformations.intra_operator.simplify import Simplify
from tests.transformations.checking import Golden, check_refused, check_rewrite, check_same, program


def unrolled(steps: int, outer: bool = False, nested: bool = False) -> Graph:
    """A gradient as the slices of a sequence leave it: every step's is padded with zeros, and all are added up."""
    graph = Graph("unrolled")
    shape = (steps, 8, 16) if outer else (8, steps, 16)
    x, c = graph.input("x", Tensor(shape)), graph.input("c", Tensor((steps, 8, 16)))
    dim = 0 if outer else 1
    pieces = []
    for t in range(steps):
        scale = c.slice(0, t, t + 1).view((8, 16))
        step = x.slice(dim, t, t + 1).view((8, 16)) * scale
        if nested:
            parts = [step.slice(1, 4 * i, 4 * i + 4).view((8, 2, 2)).unary("square") for i in range(4)]
            step = added([padded(part.view((8, 4)), 1, 4 * i, 16) for i, part in enumerate(parts)])
        pieces.append(padded(step.view((1, 8, 16) if outer else (8, 1, 16)), dim, t, steps))
    graph.output(added(pieces))
    return graph


def padded(x: Value, dim: int, start: int, size: int) -> Value:
    """Zeros around x, so that it is at `start` of `size` elements of a dimension."""
    pads = [(0, 0)] * len(x.shape)
    pads[dim] = (start, size - start - x.shape[dim])
    return x.apply(Pad(tuple(pads)))


def added(values: list[Value]) -> Value:
    return functools.reduce(operator.add, values)


@pytest.mark.parametrize("outer", [False, True])
def test_steps_of_a_sequence(golden: Golden, outer: bool) -> None:
    before = Simplify().run(unrolled(3, outer))
    after = check_rewrite(before, AssembleSlices(), golden)
    assert [node.op.label for node in after.nodes].count("pad") == 0


@pytest.mark.parametrize("nested", [False, True])
def test_bytes_grow_with_the_length_not_its_square(nested: bool) -> None:
    def bytes_of(steps: int, assemble: bool) -> int:
        graph = Simplify().run(unrolled(steps, nested=nested))
        moved = traffic(AssembleSlices().run(graph) if assemble else graph).bytes
        assert isinstance(moved, int)
        return moved

    assert bytes_of(64, assemble=True) < 2.1 * bytes_of(32, assemble=True)
    assert bytes_of(64, assemble=False) > 3 * bytes_of(32, assemble=False)


def test_nested_views(golden: Golden) -> None:
    before = Simplify().run(unrolled(2, nested=True))
    after = check_rewrite(before, AssembleSlices(), golden)
    labels = [node.op.label for node in after.nodes]
    assert "pad" not in labels
    assert labels.count("concat") == 3  # one per step, one of the steps


def test_gaps_and_order(golden: Golden) -> None:
    body = """
        %c = pad(%x, pads=((4, 2),))
        %a = pad(%y, pads=((1, 6),))
        %s = add(%c, %a)
    """
    check_rewrite(program("x: f32[2], y: f32[1]", body, "%s"), AssembleSlices(), golden)


def test_symbolic_ranges(golden: Golden) -> None:
    body = """
        %b = pad(%y, pads=((s0, 0), (0, 0)))
        %a = pad(%x, pads=((0, 2*s0), (0, 0)))
        %s = add(%b, %a)
    """
    check_rewrite(program("x: f32[s0, 3], y: f32[2*s0, 3]", body, "%s"), AssembleSlices(), golden, s0=2)


def test_equal_places_and_other_terms(golden: Golden) -> None:
    body = """
        %a = pad(%x, pads=((0, 0), (0, 2)))
        %b = pad(%y, pads=((0, 0), (2, 0)))
        %c = pad(%z, pads=((0, 0), (0, 2)))
        %s = add(%w, %a)
        %t = add(%b, %c)
        %u = add(%s, %t)
    """
    signature = "x: f32[3, 2], y: f32[3, 2], z: f32[3, 2], w: f32[3, 4]"
    check_rewrite(program(signature, body, "%u"), AssembleSlices(), golden, exact=False)


def test_tiles(golden: Golden) -> None:
    tiles = [(i, j) for i in range(2) for j in range(2)]
    body = [f"%p{i}{j} = pad(%x{i}{j}, pads=(({2 * i}, {2 - 2 * i}), ({3 * j}, {3 - 3 * j})))" for i, j in tiles]
    body += ["%a = add(%p00, %p11)", "%b = add(%a, %p10)", "%c = add(%b, %p01)"]
    signature = ", ".join(f"x{i}{j}: f32[2, 3]" for i, j in tiles)
    check_rewrite(program(signature, "\n".join(body), "%c"), AssembleSlices(), golden)


def test_common_margin(golden: Golden) -> None:
    """All pieces lie in one column: the margin is padded once."""
    body = """
        %a = pad(%x, pads=((0, 2), (1, 1)))
        %b = pad(%y, pads=((2, 0), (1, 1)))
        %s = add(%a, %b)
    """
    check_rewrite(program("x: f32[2, 3], y: f32[2, 3]", body, "%s"), AssembleSlices(), golden)


def test_through_permute(golden: Golden) -> None:
    body = """
        %a = pad(%x, pads=((0, 2), (0, 0)))
        %b = permute(%a, dims=(1, 0))
        %c = pad(%y, pads=((0, 0), (2, 0)))
        %s = add(%b, %c)
    """
    check_rewrite(program("x: f32[2, 3], y: f32[3, 2]", body, "%s"), AssembleSlices(), golden)


def test_a_view_that_mixes_dimensions_starts_a_new_piece(golden: Golden) -> None:
    body = """
        %a = pad(%x, pads=((0, 0), (0, 1)))
        %v = view(%a, shape=(8,))
        %b = pad(%v, pads=((0, 2),))
        %c = pad(%y, pads=((8, 0),))
        %s = add(%b, %c)
    """
    check_rewrite(program("x: f32[4, 1], y: f32[2]", body, "%s"), AssembleSlices(), golden)


def test_refused_for_overlap() -> None:
    body = "%a = pad(%x, pads=((0, 1),))\n%b = pad(%y, pads=((1, 0),))\n%s = add(%a, %b)"
    graph = program("x: f32[3], y: f32[3]", body, "%s")
    check_refused(graph, AssembleSlices(), "the places of the pieces %x, %y overlap without being equal")


def test_a_padded_array_that_is_needed_stays() -> None:
    body = "%a = pad(%x, pads=((0, 3),))\n%b = pad(%y, pads=((3, 0),))\n%s = add(%a, %b)"
    assert AssembleSlices().matches(program("x: f32[3], y: f32[3]", body, "%s, %a")) == []


def test_other_values_are_no_zeros() -> None:
    body = "%a = pad(%x, pads=((0, 3),), value=1.0)\n%b = pad(%y, pads=((3, 0),))\n%s = add(%a, %b)"
    assert AssembleSlices().matches(program("x: f32[3], y: f32[3]", body, "%s")) == []


def test_doubled_sums_take_no_time() -> None:
    """A chain of x + x is no tree of 2^60 terms."""
    graph = Graph()
    x = graph.input("x", Tensor((4,)))
    for _ in range(60):
        x = x + x
    graph.output(x)
    assert AssembleSlices().run(graph) is graph


def test_every_split_of_an_array() -> None:
    """All ways to cut 5 elements and to order the sum give the array back."""
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, 5), n) for n in range(1, 5)):
        graph = Graph()
        x = graph.input("x", Tensor((2, 5)))
        edges = [0, *cuts, 5]
        parts = [x.slice(1, a, b).unary("neg") for a, b in itertools.pairwise(edges)]
        padded = [p.apply(_pad(a, 5 - b)) for p, (a, b) in zip(parts, itertools.pairwise(edges), strict=True)]
        total = padded[-1]
        for part in padded[:-1]:
            total = part + total
        graph.output(total)
        after = AssembleSlices().run(graph)
        check_same(graph, after)
        assert [node.op.label for node in after.nodes].count("add") == 0


def _pad(before: int, after: int):  # type: ignore[no-untyped-def]
    from daceml_train.ops.movement import Pad

    return Pad(((0, 0), (before, after)))
