"""Chains of accumulated matmuls become one matmul."""

from daceml_train.transformations.intra_operator.concatenate_matmuls import ConcatenateMatmuls
from tests.transformations.checking import Golden, check_refused, check_rewrite, program


def chain(count: int, first: str, rows: int = 3, columns: int = 5, more: str = "") -> str:
    lines = [first]
    for t in range(1, count):
        lines.append(f"%s{t} = matmul_add(%s{t - 1}, %a{t}, %b{t})")
    return "\n".join([*lines, more])


def signature(count: int, m: int = 8, k: int = 1, n: int = 9) -> str:
    return ", ".join(f"a{t}: f32[{m}, {k}], b{t}: f32[{k}, {n}]" for t in range(count))


def test_a_chain_that_begins_with_a_product(golden: Golden) -> None:
    graph = program(signature(4), chain(4, "%s0 = matmul(%a0, %b0)"), "%s3")
    after = check_rewrite(graph, ConcatenateMatmuls(), golden, exact=False)
    assert [n.op.label for n in after.nodes] == ["concat", "concat", "matmul"]


def test_a_chain_that_begins_with_a_matrix(golden: Golden) -> None:
    graph = program("c: f32[8, 9], " + signature(5), chain(5, "%s0 = matmul_add(%c, %a0, %b0)"), "%s4")
    check_rewrite(graph, ConcatenateMatmuls(), golden, exact=False)


def test_transposed_factors_are_joined_by_rows(golden: Golden) -> None:
    inputs = ", ".join(f"x{t}: f32[1, 8], b{t}: f32[1, 9]" for t in range(4))
    transposes = "\n".join(f"%a{t} = permute(%x{t}, dims=(1, 0))" for t in range(4))
    graph = program(inputs, transposes + "\n" + chain(4, "%s0 = matmul(%a0, %b0)"), "%s3")
    check_rewrite(graph, ConcatenateMatmuls(), golden, exact=False)


def test_a_sum_that_is_used_on_the_way_ends_the_chain(golden: Golden) -> None:
    graph = program(signature(6), chain(6, "%s0 = matmul(%a0, %b0)"), "%s5, %s1")
    after = check_rewrite(graph, ConcatenateMatmuls(), golden, exact=False)
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
