import pytest

from daceml_train.ops.fallback import Aten, Operand
from daceml_train.tensor import Tensor
from daceml_train.transformations.global_movement.common_subexpressions import COMMUTATIVE, CommonSubexpressions
from tests.transformations.checking import assert_text, check_pass, program

TWO = "x: f32[3], z: f32[3]"


def test_chains() -> None:
    body = """
        %a = exp(%x)
        %b = neg(%a)
        %c = exp(%x)
        %d = neg(%c)
        %y = mul(%b, %d)
    """
    after = check_pass(program(TWO, body, "%y, %d"), CommonSubexpressions())
    assert_text(
        after,
        """\
        %a: f32[3] = exp(%x)
        %b: f32[3] = neg(%a)
        %y: f32[3] = mul(%b, %b)
        return %y, %b
        """,
    )


@pytest.mark.parametrize("kind", ["add", "mul", "eq", "maximum", "sub"])
def test_operands_exchanged(kind: str) -> None:
    graph = program(TWO, f"%a = {kind}(%x, %z)\n%b = {kind}(%z, %x)", "%a, %b")
    assert len(CommonSubexpressions().run(graph).nodes) == (1 if kind in COMMUTATIVE else 2)


def test_attributes_tell_operators_apart() -> None:
    body = """
        %a = reduce(%x, kind="sum", dims=(0,))
        %b = reduce(%x, kind="sum", dims=(0,), keepdim=True)
        %c = full(value=0.0)
        %d = full(value=-0.0)
        %e = full(value=0.0, dtype=f64)
    """
    graph = program(TWO, body, "%a, %b, %c, %d, %e")
    assert len(CommonSubexpressions().run(graph).nodes) == 5


def test_random_numbers() -> None:
    """`uniform` is a function of its seed and stream; a fallback that draws by itself is not."""
    body = "%a = uniform(%s, shape=(3,))\n%b = uniform(%s, shape=(3,))\n%c = uniform(%s, shape=(3,), stream=1)"
    graph = program("s: i64[]", body, "%a, %b, %c")
    assert CommonSubexpressions().run(graph).outputs == ["a", "a", "c"]
    graph = program("x: f32[3]", "")
    for random in (True, False):
        op = Aten("aten.bernoulli.default", (Operand(0),), (Tensor((3,)),), random=random)
        graph.output(*(graph.emit(op, graph.value("x"))[0] for _ in range(2)))
    assert len(CommonSubexpressions().run(graph).nodes) == 3


def test_operators_that_cannot_be_hashed_stay() -> None:
    graph = program("x: f32[3]", "")
    op = Aten("mylib.filter.default", (Operand(0), ([1],)), (Tensor((3,)),))
    graph.output(*(graph.emit(op, graph.value("x"))[0] for _ in range(2)))
    assert len(CommonSubexpressions().run(graph).nodes) == 2


def test_memory_order_is_part_of_the_result() -> None:
    """x + z and z + x of different memory orders are stored differently."""
    graph = program("x: f32[2, 3]@10, z: f32[2, 3]", "%a = add(%x, %z)\n%b = mul(%z, %z)\n%c = add(%z, %x)", "%a, %c")
    assert len(CommonSubexpressions().run(graph).nodes) == len({str(graph.tensors[n]) for n in ("a", "c")})


def test_writes_follow() -> None:
    graph = program("p: f32[3], q: f32[3]", "%a = neg(%p)\n%b = neg(%p)\nwrite p <- %a\nwrite q <- %b")
    assert CommonSubexpressions().run(graph).writes == {"p": "a", "q": "a"}
