"""A transposed matmul becomes a matmul of transposed factors."""

from daceml_train.transformations.intra_operator.transpose_matmul import TransposeMatmul
from tests.transformations.checking import assert_text, check_refused, check_rewrite, program


def test_matrices() -> None:
    graph = program("a: f32[3, 4], b: f32[4, 5]", "%t = matmul(%a, %b)\n%y = permute(%t, dims=(1, 0))", "%y")
    after = check_rewrite(graph, TransposeMatmul(), exact=False)
    assert_text(
        after,
        """\
        %permute: f32[5, 4]@10 = permute(%b, dims=(1, 0))
        %permute_1: f32[4, 3]@10 = permute(%a, dims=(1, 0))
        %matmul: f32[5, 3] = matmul(%permute, %permute_1)
        return %matmul
        """,
    )


def test_batches() -> None:
    graph = program("a: f32[n, 3, 4], b: f32[n, 4, 5]", "%t = matmul(%a, %b)\n%y = permute(%t, dims=(0, 2, 1))", "%y")
    after = check_rewrite(graph, TransposeMatmul(), exact=False, n=2)
    assert_text(
        after,
        """\
        %permute: f32[n, 5, 4]@021 = permute(%b, dims=(0, 2, 1))
        %permute_1: f32[n, 4, 3]@021 = permute(%a, dims=(0, 2, 1))
        %matmul: f32[n, 5, 3] = matmul(%permute, %permute_1)
        return %matmul
        """,
    )


def test_a_product_that_is_used_as_it_is_stays() -> None:
    graph = program(
        "a: f32[3, 4], b: f32[4, 5]", "%t = matmul(%a, %b)\n%y = permute(%t, dims=(1, 0))\n%z = exp(%t)", "%y, %z"
    )
    check_refused(graph, TransposeMatmul(), "%t is also used untransposed")
