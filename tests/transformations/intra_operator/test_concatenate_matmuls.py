"""Chains of accumulated matmuls become one matmul."""

from daceml_train.transformations.intra_operator.concatenate_matmuls import ConcatenateMatmuls
from tests.transformations.checking import assert_text, check_refused, check_rewrite, program


def chain(count: int, first: str, rows: int = 3, columns: int = 5, more: str = "") -> str:
    lines = [first]
    for t in range(1, count):
        lines.append(f"%s{t} = matmul_add(%s{t - 1}, %a{t}, %b{t})")
    return "\n".join([*lines, more])


def signature(count: int, m: int = 8, k: int = 1, n: int = 9) -> str:
    return ", ".join(f"a{t}: f32[{m}, {k}], b{t}: f32[{k}, {n}]" for t in range(count))


def test_a_chain_that_begins_with_a_product() -> None:
    graph = program(signature(4), chain(4, "%s0 = matmul(%a0, %b0)"), "%s3")
    after = check_rewrite(graph, ConcatenateMatmuls(), exact=False)
    assert_text(
        after,
        """\
        %concat: f32[8, 4] = concat(%a0, %a1, %a2, %a3, dim=1)
        %concat_1: f32[4, 9] = concat(%b0, %b1, %b2, %b3, dim=0)
        %matmul: f32[8, 9] = matmul(%concat, %concat_1)
        return %matmul
        """,
    )
    assert [n.op.label for n in after.nodes] == ["concat", "concat", "matmul"]


def test_a_chain_that_begins_with_a_matrix() -> None:
    graph = program("c: f32[8, 9], " + signature(5), chain(5, "%s0 = matmul_add(%c, %a0, %b0)"), "%s4")
    after = check_rewrite(graph, ConcatenateMatmuls(), exact=False)
    assert_text(
        after,
        """\
        %concat: f32[8, 5] = concat(%a0, %a1, %a2, %a3, %a4, dim=1)
        %concat_1: f32[5, 9] = concat(%b0, %b1, %b2, %b3, %b4, dim=0)
        %matmul_add: f32[8, 9] = matmul_add(%c, %concat, %concat_1)
        return %matmul_add
        """,
    )


def test_transposed_factors_are_joined_by_rows() -> None:
    inputs = ", ".join(f"x{t}: f32[1, 8], b{t}: f32[1, 9]" for t in range(4))
    transposes = "\n".join(f"%a{t} = permute(%x{t}, dims=(1, 0))" for t in range(4))
    graph = program(inputs, transposes + "\n" + chain(4, "%s0 = matmul(%a0, %b0)"), "%s3")
    after = check_rewrite(graph, ConcatenateMatmuls(), exact=False)
    assert_text(
        after,
        """\
        %concat: f32[4, 8] = concat(%x0, %x1, %x2, %x3, dim=0)
        %permute: f32[8, 4]@10 = permute(%concat, dims=(1, 0))
        %concat_1: f32[4, 9] = concat(%b0, %b1, %b2, %b3, dim=0)
        %matmul: f32[8, 9] = matmul(%permute, %concat_1)
        return %matmul
        """,
    )


def test_a_sum_that_is_used_on_the_way_ends_the_chain() -> None:
    graph = program(signature(6), chain(6, "%s0 = matmul(%a0, %b0)"), "%s5, %s1")
    after = check_rewrite(graph, ConcatenateMatmuls(), exact=False)
    assert_text(
        after,
        """\
        %s0: f32[8, 9] = matmul(%a0, %b0)
        %s1: f32[8, 9] = matmul_add(%s0, %a1, %b1)
        %concat: f32[8, 4] = concat(%a2, %a3, %a4, %a5, dim=1)
        %concat_1: f32[4, 9] = concat(%b2, %b3, %b4, %b5, dim=0)
        %matmul_add: f32[8, 9] = matmul_add(%s1, %concat, %concat_1)
        return %matmul_add, %s1
        """,
    )
    assert [n.op.label for n in after.nodes].count("matmul_add") == 2


def test_few_products_stay() -> None:
    graph = program(signature(3), chain(3, "%s0 = matmul(%a0, %b0)"), "%s2")
    assert not ConcatenateMatmuls().matches(graph)


def test_large_factors_stay_where_they_are() -> None:
    graph = program(signature(4, m=2, k=64, n=2), chain(4, "%s0 = matmul(%a0, %b0)"), "%s3")
    check_refused(graph, ConcatenateMatmuls(), "copying the operands of %s3 moves as many bytes as its sums")


def test_a_chain_on_a_bias_stays() -> None:
    graph = program("c: f32[9], " + signature(4), chain(4, "%s0 = matmul_add(%c, %a0, %b0)"), "%s3")
    check_refused(graph, ConcatenateMatmuls(), "the chain begins with one row %c, not with a matrix")
