import pytest

from daceml_train.analysis.traffic import traffic
from daceml_train.autodiff.reverse import differentiate
from daceml_train.graph.graph import Graph
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.operator import make
from daceml_train.passes.base import Rewrite
from daceml_train.tensor import Tensor, symbol
from daceml_train.transformations.intra_operator.batch_matmul import MergeBatch, MergeSummedBatch
from daceml_train.transformations.intra_operator.simplify import Simplify
from tests.transformations.checking import assert_text, check_refused, check_rewrite, check_same, program

SUMMED = """
    %t = permute(%x, dims=(0, 2, 1))
    %p = matmul(%t, %g)
    %y = reduce(%p, kind="sum", dims=(0,))
"""


def test_expanded_matrix() -> None:
    body = "%e = expand(%w, shape=(s0, 3, 5))\n%y = matmul(%x, %e)"
    after = check_rewrite(program("x: f32[s0, 4, 3], w: f32[3, 5]", body, "%y"), MergeBatch(), exact=False, s0=2)
    assert_text(
        after,
        """\
        %view: f32[4*s0, 3] = view(%x, shape=(4*s0, 3))
        %matmul: f32[4*s0, 5] = matmul(%view, %w)
        %view_1: f32[s0, 4, 5] = view(%matmul, shape=(s0, 4, 5))
        return %view_1
        """,
    )


def test_transposed_and_merged_batch() -> None:
    body = """
        %v = view(%w, shape=(1, 1, 5, 3))
        %e = expand(%v, shape=(2, 6, 5, 3))
        %m = view(%e, shape=(12, 5, 3))
        %t = permute(%m, dims=(0, 2, 1))
        %y = matmul(%x, %t)
    """
    after = check_rewrite(program("x: f32[12, 4, 3], w: f32[5, 3]", body, "%y"), MergeBatch(), exact=False)
    assert_text(
        after,
        """\
        %v: f32[1, 1, 5, 3] = view(%w, shape=(1, 1, 5, 3))
        %view: f32[5, 3] = view(%v, shape=(5, 3))
        %view_1: f32[48, 3] = view(%x, shape=(48, 3))
        %permute: f32[3, 5]@10 = permute(%view, dims=(1, 0))
        %matmul: f32[48, 5] = matmul(%view_1, %permute)
        %view_2: f32[12, 4, 5] = view(%matmul, shape=(12, 4, 5))
        return %view_2
        """,
    )


def test_sum_of_products() -> None:
    graph = program("x: f32[s0, 4, 3], g: f32[s0, 4, 5]", SUMMED, "%y")
    after = check_rewrite(graph, MergeSummedBatch(), exact=False, s0=2)
    assert_text(
        after,
        """\
        %view: f32[4*s0, 3] = view(%x, shape=(4*s0, 3))
        %view_1: f32[4*s0, 5] = view(%g, shape=(4*s0, 5))
        %permute: f32[3, 4*s0]@10 = permute(%view, dims=(1, 0))
        %matmul: f32[3, 5] = matmul(%permute, %view_1)
        return %matmul
        """,
    )


def test_sum_over_two_batches() -> None:
    body = """
        %t = permute(%x, dims=(0, 2, 1))
        %p = matmul(%t, %g)
        %v = view(%p, shape=(2, 3, 3, 5))
        %y = reduce(%v, kind="sum", dims=(0, 1), keepdim=True)
    """
    after = check_rewrite(program("x: f32[6, 4, 3], g: f32[6, 4, 5]", body, "%y"), MergeSummedBatch(), exact=False)
    assert_text(
        after,
        """\
        %view: f32[24, 3] = view(%x, shape=(24, 3))
        %view_1: f32[24, 5] = view(%g, shape=(24, 5))
        %permute: f32[3, 24]@10 = permute(%view, dims=(1, 0))
        %matmul: f32[3, 5] = matmul(%permute, %view_1)
        %view_2: f32[1, 1, 3, 5] = view(%matmul, shape=(1, 1, 3, 5))
        return %view_2
        """,
    )


def test_gradient_of_a_shared_factor() -> None:
    """x @ w of a 3-D x: the matmuls forward, for x and for w become matmuls."""
    graph = Graph("linear")
    batch = symbol("s0")
    x, w, g = (graph.input(n, Tensor(s)) for n, s in (("x", (batch, 4, 3)), ("w", (3, 5)), ("g", (batch, 4, 5))))
    y = x @ w.expand((batch, 3, 5))
    graph.output(y)
    gradients = differentiate(graph, {y.name: g}, ["x", "w"])
    graph.output(*(v for v in gradients.values() if v is not None))
    after = Simplify().run(MergeSummedBatch().run(MergeBatch().run(graph)))
    check_same(graph, after, exact=False, s0=2)
    assert_text(
        after,
        """\
        %view: f32[4*s0, 3] = view(%x, shape=(4*s0, 3))
        %matmul: f32[4*s0, 5] = matmul(%view, %w)
        %view_1: f32[s0, 4, 5] = view(%matmul, shape=(s0, 4, 5))
        %view_2: f32[4*s0, 5] = view(%g, shape=(4*s0, 5))
        %permute_1: f32[5, 3]@10 = permute(%w, dims=(1, 0))
        %matmul_1: f32[4*s0, 3] = matmul(%view_2, %permute_1)
        %view_3: f32[s0, 4, 3] = view(%matmul_1, shape=(s0, 4, 3))
        %view_4: f32[4*s0, 3] = view(%x, shape=(4*s0, 3))
        %view_5: f32[4*s0, 5] = view(%g, shape=(4*s0, 5))
        %permute: f32[3, 4*s0]@10 = permute(%view_4, dims=(1, 0))
        %matmul_3: f32[3, 5] = matmul(%permute, %view_5)
        return %view_1, %view_3, %matmul_3
        """,
    )
    assert [node.op for node in after.nodes].count(Matmul()) == 3
    assert all(after.tensors[node.outputs[0]].rank == 2 for node in after.nodes if node.op == Matmul())
    assert traffic(after, {"s0": 2}).bytes < traffic(graph, {"s0": 2}).bytes


def test_merge_batch_refused_for_a_copy() -> None:
    body = "%e = expand(%w, shape=(4, 3, 5))\n%t = permute(%x, dims=(1, 0, 2))\n%y = matmul(%t, %e)"
    graph = program("x: f32[2, 4, 3], w: f32[3, 5]", body, "%y")
    check_refused(graph, MergeBatch(), "%t would have to be copied to view it as one matrix")


@pytest.mark.parametrize(
    "body",
    [
        "%y = matmul(%x, %b)",
        "%a = view(%b, shape=(1, 2, 3, 5))\n%e = expand(%a, shape=(2, 2, 3, 5))\n%y = matmul(%z, %m)",
        "%s = slice(%b, dim=1, start=0, stop=1)\n%m = expand(%s, shape=(2, 3, 5))\n%y = matmul(%x, %m)",
    ],
)
def test_matrices_that_differ_are_no_match(body: str) -> None:
    body = body.replace("%y = matmul(%z", "%m = view(%e, shape=(4, 3, 5))\n%y = matmul(%z")
    graph = program("x: f32[2, 4, 3], z: f32[4, 4, 3], b: f32[2, 3, 5]", body, "%y")
    assert MergeBatch().matches(graph) == []


OPERANDS = "x: f32[2, 4, 3], g: f32[2, 4, 5]"
REFUSED = {
    "the matmul %p has another reader": (OPERANDS, SUMMED, "%y, %p"),
    "%x is no transposed array without gaps: viewing it as one matrix would copy it": (
        "x: f32[2, 3, 4], g: f32[2, 4, 5]",
        SUMMED.replace("%t,", "%x,"),
        "%y",
    ),
    "%h would have to be copied to view it as one matrix": (
        "x: f32[2, 4, 3], g: f32[2, 5, 4]",
        "%h = permute(%g, dims=(0, 2, 1))\n" + SUMMED.replace("%g", "%h"),
        "%y",
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_sum_refused(sentence: str) -> None:
    rewrite: Rewrite = MergeSummedBatch()
    check_refused(program(*REFUSED[sentence]), rewrite, sentence)


@pytest.mark.parametrize("sum_", ['kind="max", dims=(0,)', 'kind="sum", dims=(1,)', 'kind="sum", dims=(0, 1)'])
def test_other_reductions_are_no_match(sum_: str) -> None:
    assert MergeSummedBatch().matches(program(OPERANDS, SUMMED.replace('kind="sum", dims=(0,)', sum_), "%y")) == []


def test_gaps_are_refused() -> None:
    """A slice of the inner dimensions leaves gaps, a slice of the outermost does not."""
    inner = "%h = slice(%g, dim=2, start=0, stop=4)\n" + SUMMED.replace("%g", "%h")
    outer = "%h = slice(%g, dim=0, start=1, stop=3)\n" + SUMMED.replace("%g", "%h")
    graph = program("x: f32[2, 4, 3], g: f32[2, 4, 5]", inner, "%y")
    check_refused(graph, MergeSummedBatch(), "%h would have to be copied to view it as one matrix")
    graph = program("x: f32[2, 4, 3], g: f32[3, 4, 5]", outer, "%y")
    (match,) = MergeSummedBatch().matches(graph)
    assert match.refusal is None
    graph = Graph()
    z = graph.input("z", Tensor((2, 4, 6)))
    strided = z.apply(make("slice", dim=0, start=0, stop=2, step=2))
    assert strided.shape == (1, 4, 6)
