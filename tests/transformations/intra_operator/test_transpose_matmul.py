"""A transposed matmul becomes a matmul of transposed factors."""

from daceml_train.transformations.intra_operator.transpose_matmul import TransposeMatmul
from tests.transformations.checking import Golden, check_refused, check_rewrite, program


def test_matrices(golden: Golden) -> None:
    graph = program("a: f32[3, 4], b: f32[4, 5]", "%t = matmul(%a, %b)\n%y = permute(%t, dims=(1, 0))", "%y")
    check_rewrite(graph, TransposeMatmul(), golden, exact=False)


def test_batches(golden: Golden) -> None:
    graph = program("a: f32[n, 3, 4], b: f32[n, 4, 5]", "%t = matmul(%a, %b)\n%y = permute(%t, dims=(0, 2, 1))", "%y")
    check_rewrite(graph, TransposeMatmul(), golden, exact=False, n=2)


def test_a_product_that_is_used_as_it_is_stays() -> None:
    graph = program(
        "a: f32[3, 4], b: f32[4, 5]", "%t = matmul(%a, %b)\n%y = permute(%t, dims=(1, 0))\n%z = exp(%t)", "%y, %z"
    )
    check_refused(graph, TransposeMatmul(), "%t is also used untransposed")
