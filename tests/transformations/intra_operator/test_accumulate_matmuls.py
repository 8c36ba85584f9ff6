import pytest

from daceml_train.errors import Refused
from daceml_train.transformations.intra_operator.accumulate_matmuls import AccumulateMatmuls
from tests.transformations.checking import Golden, check_refused, check_rewrite, program

OPERANDS = "c: f32[4, 5], a: f32[4, 3], b: f32[3, 5]"
SUM = "%p = matmul(%a, %b)\n%y = add(%c, %p)"


def test_one(golden: Golden) -> None:
    check_rewrite(program(OPERANDS, SUM, "%y"), AccumulateMatmuls(), golden)


def test_symbolic_batch(golden: Golden) -> None:
    operands = "c: f32[s0, 4, 5], a: f32[s0, 4, 3], b: f32[s0, 3, 5]"
    check_rewrite(program(operands, "%p = matmul(%a, %b)\n%y = add(%p, %c)", "%y"), AccumulateMatmuls(), golden, s0=3)


def test_sum_of_products(golden: Golden) -> None:
    body = """
        %p = matmul(%a, %b)
        %q = matmul(%a2, %b)
        %r = matmul(%a3, %b)
        %s = add(%p, %q)
        %y = add(%s, %r)
    """
    check_rewrite(program(f"{OPERANDS}, a2: f32[4, 3], a3: f32[4, 3]", body, "%y"), AccumulateMatmuls(), golden)


def test_through_views(golden: Golden) -> None:
    body = """
        %p = matmul(%a, %b)
        %v = view(%p, shape=(2, 2, 5))
        %y = add(%c, %v)
    """
    check_rewrite(program("c: f32[2, 2, 5], a: f32[4, 3], b: f32[3, 5]", body, "%y"), AccumulateMatmuls(), golden)


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
