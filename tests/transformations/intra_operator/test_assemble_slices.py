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
from tests.transformations.checking import Golden, assert_text, check_refused, check_rewrite, check_same, program


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
    after = check_rewrite(before, AssembleSlices())
    golden(str(after))
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


def test_nested_views() -> None:
    before = Simplify().run(unrolled(2, nested=True))
    after = check_rewrite(before, AssembleSlices())
    assert_text(
        after,
        """\
        %slice: f32[1, 8, 16] = slice(%c, dim=0, start=0, stop=1)
        %view: f32[8, 16] = view(%slice, shape=(8, 16))
        %slice_1: f32[8, 1, 16] = slice(%x, dim=1, start=0, stop=1)
        %view_1: f32[8, 16] = view(%slice_1, shape=(8, 16))
        %mul: f32[8, 16] = mul(%view_1, %view)
        %slice_2: f32[8, 4] = slice(%mul, dim=1, start=0, stop=4)
        %view_2: f32[8, 2, 2] = view(%slice_2, shape=(8, 2, 2))
        %square: f32[8, 2, 2] = square(%view_2)
        %slice_3: f32[8, 4] = slice(%mul, dim=1, start=4, stop=8)
        %view_3: f32[8, 2, 2] = view(%slice_3, shape=(8, 2, 2))
        %square_1: f32[8, 2, 2] = square(%view_3)
        %slice_4: f32[8, 4] = slice(%mul, dim=1, start=8, stop=12)
        %view_4: f32[8, 2, 2] = view(%slice_4, shape=(8, 2, 2))
        %square_2: f32[8, 2, 2] = square(%view_4)
        %slice_5: f32[8, 4] = slice(%mul, dim=1, start=12, stop=16)
        %view_5: f32[8, 2, 2] = view(%slice_5, shape=(8, 2, 2))
        %square_3: f32[8, 2, 2] = square(%view_5)
        %view_6: f32[8, 4] = view(%square, shape=(8, 4))
        %view_7: f32[8, 4] = view(%square_1, shape=(8, 4))
        %view_8: f32[8, 4] = view(%square_2, shape=(8, 4))
        %view_9: f32[8, 4] = view(%square_3, shape=(8, 4))
        %concat: f32[8, 16] = concat(%view_6, %view_7, %view_8, %view_9, dim=1)
        %view_10: f32[8, 1, 16] = view(%concat, shape=(8, 1, 16))
        %slice_6: f32[1, 8, 16] = slice(%c, dim=0, start=1, stop=2)
        %view_11: f32[8, 16] = view(%slice_6, shape=(8, 16))
        %slice_7: f32[8, 1, 16] = slice(%x, dim=1, start=1, stop=2)
        %view_12: f32[8, 16] = view(%slice_7, shape=(8, 16))
        %mul_1: f32[8, 16] = mul(%view_12, %view_11)
        %slice_8: f32[8, 4] = slice(%mul_1, dim=1, start=0, stop=4)
        %view_13: f32[8, 2, 2] = view(%slice_8, shape=(8, 2, 2))
        %square_4: f32[8, 2, 2] = square(%view_13)
        %slice_9: f32[8, 4] = slice(%mul_1, dim=1, start=4, stop=8)
        %view_14: f32[8, 2, 2] = view(%slice_9, shape=(8, 2, 2))
        %square_5: f32[8, 2, 2] = square(%view_14)
        %slice_10: f32[8, 4] = slice(%mul_1, dim=1, start=8, stop=12)
        %view_15: f32[8, 2, 2] = view(%slice_10, shape=(8, 2, 2))
        %square_6: f32[8, 2, 2] = square(%view_15)
        %slice_11: f32[8, 4] = slice(%mul_1, dim=1, start=12, stop=16)
        %view_16: f32[8, 2, 2] = view(%slice_11, shape=(8, 2, 2))
        %square_7: f32[8, 2, 2] = square(%view_16)
        %view_17: f32[8, 4] = view(%square_4, shape=(8, 4))
        %view_18: f32[8, 4] = view(%square_5, shape=(8, 4))
        %view_19: f32[8, 4] = view(%square_6, shape=(8, 4))
        %view_20: f32[8, 4] = view(%square_7, shape=(8, 4))
        %concat_1: f32[8, 16] = concat(%view_17, %view_18, %view_19, %view_20, dim=1)
        %view_21: f32[8, 1, 16] = view(%concat_1, shape=(8, 1, 16))
        %concat_2: f32[8, 2, 16] = concat(%view_10, %view_21, dim=1)
        return %concat_2
        """,
    )
    labels = [node.op.label for node in after.nodes]
    assert "pad" not in labels
    assert labels.count("concat") == 3  # one per step, one of the steps


def test_gaps_and_order() -> None:
    body = """
        %c = pad(%x, pads=((4, 2),))
        %a = pad(%y, pads=((1, 6),))
        %s = add(%c, %a)
    """
    after = check_rewrite(program("x: f32[2], y: f32[1]", body, "%s"), AssembleSlices())
    assert_text(
        after,
        """\
        %full: f32[2] = full(value=0.0, shape=(2,))
        %full_1: f32[2] = full(value=0.0, shape=(2,))
        %full_2: f32[1] = full(value=0.0, shape=(1,))
        %concat: f32[8] = concat(%full_2, %y, %full_1, %x, %full, dim=0)
        return %concat
        """,
    )


def test_symbolic_ranges() -> None:
    body = """
        %b = pad(%y, pads=((s0, 0), (0, 0)))
        %a = pad(%x, pads=((0, 2*s0), (0, 0)))
        %s = add(%b, %a)
    """
    after = check_rewrite(program("x: f32[s0, 3], y: f32[2*s0, 3]", body, "%s"), AssembleSlices(), s0=2)
    assert_text(
        after,
        """\
        %concat: f32[3*s0, 3] = concat(%x, %y, dim=0)
        return %concat
        """,
    )


def test_equal_places_and_other_terms() -> None:
    body = """
        %a = pad(%x, pads=((0, 0), (0, 2)))
        %b = pad(%y, pads=((0, 0), (2, 0)))
        %c = pad(%z, pads=((0, 0), (0, 2)))
        %s = add(%w, %a)
        %t = add(%b, %c)
        %u = add(%s, %t)
    """
    signature = "x: f32[3, 2], y: f32[3, 2], z: f32[3, 2], w: f32[3, 4]"
    after = check_rewrite(program(signature, body, "%u"), AssembleSlices(), exact=False)
    assert_text(
        after,
        """\
        %add: f32[3, 2] = add(%x, %z)
        %concat: f32[3, 4] = concat(%add, %y, dim=1)
        %add_1: f32[3, 4] = add(%concat, %w)
        return %add_1
        """,
    )


def test_tiles() -> None:
    tiles = [(i, j) for i in range(2) for j in range(2)]
    body = [f"%p{i}{j} = pad(%x{i}{j}, pads=(({2 * i}, {2 - 2 * i}), ({3 * j}, {3 - 3 * j})))" for i, j in tiles]
    body += ["%a = add(%p00, %p11)", "%b = add(%a, %p10)", "%c = add(%b, %p01)"]
    signature = ", ".join(f"x{i}{j}: f32[2, 3]" for i, j in tiles)
    after = check_rewrite(program(signature, "\n".join(body), "%c"), AssembleSlices())
    assert_text(
        after,
        """\
        %concat: f32[2, 6] = concat(%x00, %x01, dim=1)
        %concat_1: f32[2, 6] = concat(%x10, %x11, dim=1)
        %concat_2: f32[4, 6] = concat(%concat, %concat_1, dim=0)
        return %concat_2
        """,
    )


def test_common_margin() -> None:
    """All pieces lie in one column: the margin is padded once."""
    body = """
        %a = pad(%x, pads=((0, 2), (1, 1)))
        %b = pad(%y, pads=((2, 0), (1, 1)))
        %s = add(%a, %b)
    """
    after = check_rewrite(program("x: f32[2, 3], y: f32[2, 3]", body, "%s"), AssembleSlices())
    assert_text(
        after,
        """\
        %concat: f32[4, 3] = concat(%x, %y, dim=0)
        %pad: f32[4, 5] = pad(%concat, pads=((0, 0), (1, 1)))
        return %pad
        """,
    )


def test_through_permute() -> None:
    body = """
        %a = pad(%x, pads=((0, 2), (0, 0)))
        %b = permute(%a, dims=(1, 0))
        %c = pad(%y, pads=((0, 0), (2, 0)))
        %s = add(%b, %c)
    """
    after = check_rewrite(program("x: f32[2, 3], y: f32[3, 2]", body, "%s"), AssembleSlices())
    assert_text(
        after,
        """\
        %permute: f32[3, 2]@10 = permute(%x, dims=(1, 0))
        %concat: f32[3, 4] = concat(%permute, %y, dim=1)
        return %concat
        """,
    )


def test_a_view_that_mixes_dimensions_starts_a_new_piece() -> None:
    body = """
        %a = pad(%x, pads=((0, 0), (0, 1)))
        %v = view(%a, shape=(8,))
        %b = pad(%v, pads=((0, 2),))
        %c = pad(%y, pads=((8, 0),))
        %s = add(%b, %c)
    """
    after = check_rewrite(program("x: f32[4, 1], y: f32[2]", body, "%s"), AssembleSlices())
    assert_text(
        after,
        """\
        %a: f32[4, 2] = pad(%x, pads=((0, 0), (0, 1)))
        %v: f32[8] = view(%a, shape=(8,))
        %concat: f32[10] = concat(%v, %y, dim=0)
        return %concat
        """,
    )


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
