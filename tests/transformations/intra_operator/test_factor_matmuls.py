from daceml_train.transformations.intra_operator.factor_matmuls import FactorMatmuls
from tests.transformations.checking import assert_text, check_refused, check_rewrite, program

OPERANDS = "a: f32[4, 3, 3], c: f32[4, 3, 3], b: f32[4, 3, 16]"
BODY = "%p = matmul(%a, %b)\n%y = matmul_add(%p, %c, %b)"


def test_a_common_right_factor() -> None:
    after = check_rewrite(program(OPERANDS, BODY, "%y"), FactorMatmuls(), exact=False)
    assert_text(
        after,
        """\
        %add: f32[4, 3, 3] = add(%a, %c)
        %matmul: f32[4, 3, 16] = matmul(%add, %b)
        return %matmul
        """,
    )


def test_a_common_left_factor() -> None:
    body = "%p = matmul(%b, %a)\n%y = matmul_add(%p, %b, %c)"
    after = check_rewrite(
        program("a: f32[4, 5], c: f32[4, 5], b: f32[16, 4]", body, "%y"), FactorMatmuls(), exact=False
    )
    assert_text(
        after,
        """\
        %add: f32[4, 5] = add(%a, %c)
        %matmul: f32[16, 5] = matmul(%b, %add)
        return %matmul
        """,
    )


def test_a_matrix_and_its_transpose() -> None:
    """The sum reads the matrix once."""
    body = "%t = permute(%a, dims=(0, 2, 1))\n%p = matmul(%a, %b)\n%y = matmul_add(%p, %t, %b)"
    after = check_rewrite(program("a: f32[4, 3, 3], b: f32[4, 3, 16]", body, "%y"), FactorMatmuls(), exact=False)
    assert_text(
        after,
        """\
        %t: f32[4, 3, 3]@021 = permute(%a, dims=(0, 2, 1))
        %add: f32[4, 3, 3] = add(%a, %t)
        %matmul: f32[4, 3, 16] = matmul(%add, %b)
        return %matmul
        """,
    )


def test_refused_for_another_reader() -> None:
    graph = program(OPERANDS, BODY + "\n%z = exp(%p)", "%y, %z")
    check_refused(graph, FactorMatmuls(), "the matmul %p has another reader")


def test_refused_where_it_moves_more() -> None:
    graph = program("a: f32[4, 90], c: f32[4, 90], b: f32[90, 2]", BODY, "%y")
    check_refused(graph, FactorMatmuls(), "the sum of the operands would move 2096 bytes more")


def test_products_of_different_factors_are_no_match() -> None:
    body = "%p = matmul(%a, %b)\n%y = matmul_add(%p, %c, %d)"
    assert FactorMatmuls().matches(program(OPERANDS + ", d: f32[4, 3, 16]", body, "%y")) == []
