import pytest

from daceml_train.errors import Refused
from daceml_train.transformations.intra_operator.accumulate_matmuls import AccumulateMatmuls
from tests.transformations.checking import assert_text, check_refused, check_rewrite, program

OPERANDS = "c: f32[4, 5], a: f32[4, 3], b: f32[3, 5]"
SUM = "%p = matmul(%a, %b)\n%y = add(%c, %p)"


def test_one() -> None:
    after = check_rewrite(program(OPERANDS, SUM, "%y"), AccumulateMatmuls())
    assert_text(
        after,
        """\
        %matmul_add: f32[4, 5] = matmul_add(%c, %a, %b)
        return %matmul_add
        """,
    )


def test_symbolic_batch() -> None:
    operands = "c: f32[s0, 4, 5], a: f32[s0, 4, 3], b: f32[s0, 3, 5]"
    after = check_rewrite(program(operands, "%p = matmul(%a, %b)\n%y = add(%p, %c)", "%y"), AccumulateMatmuls(), s0=3)
    assert_text(
        after,
        """\
        %matmul_add: f32[s0, 4, 5] = matmul_add(%c, %a, %b)
        return %matmul_add
        """,
    )


def test_sum_of_products() -> None:
    body = """
        %p = matmul(%a, %b)
        %q = matmul(%a2, %b)
        %r = matmul(%a3, %b)
        %s = add(%p, %q)
        %y = add(%s, %r)
    """
    after = check_rewrite(program(f"{OPERANDS}, a2: f32[4, 3], a3: f32[4, 3]", body, "%y"), AccumulateMatmuls())
    assert_text(
        after,
        """\
        %p: f32[4, 5] = matmul(%a, %b)
        %matmul_add: f32[4, 5] = matmul_add(%p, %a2, %b)
        %matmul_add_1: f32[4, 5] = matmul_add(%matmul_add, %a3, %b)
        return %matmul_add_1
        """,
    )


def test_through_views() -> None:
    body = """
        %p = matmul(%a, %b)
        %v = view(%p, shape=(2, 2, 5))
        %y = add(%c, %v)
    """
    after = check_rewrite(program("c: f32[2, 2, 5], a: f32[4, 3], b: f32[3, 5]", body, "%y"), AccumulateMatmuls())
    assert_text(
        after,
        """\
        %view: f32[4, 5] = view(%c, shape=(4, 5))
        %matmul_add: f32[4, 5] = matmul_add(%view, %a, %b)
        %view_1: f32[2, 2, 5] = view(%matmul_add, shape=(2, 2, 5))
        return %view_1
        """,
    )


def test_refused_for_another_reader() -> None:
    graph = program(OPERANDS, SUM + "\n%z = neg(%p)", "%y, %z")
    check_refused(graph, AccumulateMatmuls(), "the matmul %p has another reader")
    (match,) = AccumulateMatmuls().matches(graph)
    with pytest.raises(Refused, match=r"accumulate_matmuls at %y = add.*another reader"):
        match.apply()


def test_refused_for_an_output() -> None:
    check_refused(program(OPERANDS, SUM, "%y, %p"), AccumulateMatmuls(), "the matmul %p has another reader")


def test_refused_for_itself() -> None:
    graph = program(OPERANDS, "%p = matmul(%a, %b)\n%y = add(%p, %p)", "%y")
    check_refused(graph, AccumulateMatmuls(), "the matmul %p is added to itself")


def test_refused_for_a_copy() -> None:
    body = """
        %p = matmul(%a, %b)
        %v = view(%p, shape=(2, 2, 5))
        %t = permute(%c, dims=(1, 0, 2))
        %y = add(%t, %v)
    """
    graph = program("c: f32[2, 2, 5], a: f32[4, 3], b: f32[3, 5]", body, "%y")
    check_refused(graph, AccumulateMatmuls(), "%t would have to be copied to view it as the matmul %p")


def test_a_bias_is_no_match() -> None:
    graph = program("c: f32[5], a: f32[4, 3], b: f32[3, 5]", SUM, "%y")
    assert AccumulateMatmuls().matches(graph) == []


def test_refused_for_a_decayed_momentum() -> None:
    body = "%p = matmul(%a, %b)\n%c = mul(%buf, %m)\n%y = add(%c, %p)"
    graph = program("a: f32[4, 3], b: f32[3, 5], buf: f32[4, 5], m: f32[]", body, "%y")
    sentence = "%c is produced by an elementwise operator for this sum alone, which can read the matmul %p"
    check_refused(graph, AccumulateMatmuls(), sentence)
