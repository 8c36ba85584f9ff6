from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.operator import make
from daceml_train.transformations.layout.matmul_bias import FuseMatmulBias
from tests.transformations.checking import assert_text, check_refused, check_rewrite, program

OPERANDS = "a: f32[s0, 3], b: f32[3, 5], bias: f32[5]"


def test_operator() -> None:
    after = check_rewrite(program(OPERANDS, "%p = matmul(%a, %b)\n%y = add(%p, %bias)", "%y"), FuseMatmulBias(), s0=4)
    assert_text(
        after,
        """\
        %matmul_add: f32[s0, 5] = matmul_add(%bias, %a, %b)
        return %matmul_add
        """,
    )


def test_kernel_of_one_addition() -> None:
    body = """
        %p = matmul(%a, %b)
        %y = kernel(x0=%bias, x1=%p) {
        %v0 = add(%x1, %x0)
        yield %v0
        }
    """
    after = check_rewrite(program(OPERANDS, body, "%y"), FuseMatmulBias(), s0=4)
    assert_text(
        after,
        """\
        %matmul_add: f32[s0, 5] = matmul_add(%bias, %a, %b)
        return %matmul_add
        """,
    )


def test_through_a_view() -> None:
    body = """
        %p = matmul(%a, %b)
        %v = view(%p, shape=(2, 2, 5))
        %y = add(%bias, %v)
    """
    after = check_rewrite(program("a: f32[4, 3], b: f32[3, 5], bias: f32[5]", body, "%y"), FuseMatmulBias())
    assert_text(
        after,
        """\
        %matmul_add: f32[4, 5] = matmul_add(%bias, %a, %b)
        %view: f32[2, 2, 5] = view(%matmul_add, shape=(2, 2, 5))
        return %view
        """,
    )


def test_refused_for_another_reader() -> None:
    graph = program(OPERANDS, "%p = matmul(%a, %b)\n%y = add(%p, %bias)\n%z = exp(%p)", "%y, %z")
    check_refused(graph, FuseMatmulBias(), "the matmul %p has another reader")


def test_kernels_that_do_more_are_no_match() -> None:
    graph = program(OPERANDS, "%p = matmul(%a, %b)")
    p, bias = graph.value("p"), graph.value("bias")
    add, relu = Statement(make("add"), ("x0", "x1"), ("v0",)), Statement(make("relu"), ("v0",), ("v1",))
    graph.output(*graph.emit(Kernel(("x0", "x1"), (add, relu), ("v1",)), p, bias))
    assert FuseMatmulBias().matches(graph) == []


def test_a_bias_of_another_shape_is_no_match() -> None:
    for signature, body in (
        ("a: f32[4, 3], b: f32[3, 5], bias: f32[1, 5]", "%p = matmul(%a, %b)\n%y = add(%p, %bias)"),
        ("a: f32[4, 3], b: f32[3, 1], bias: f32[5]", "%p = matmul(%a, %b)\n%y = add(%p, %bias)"),
        ("a: f32[2, 4, 3], b: f32[2, 3, 5], bias: f32[5]", "%p = matmul(%a, %b)\n%y = add(%p, %bias)"),
        (
            "a: f32[5, 3], b: f32[3, 5], bias: f32[5]",
            "%p = matmul(%a, %b)\n%v = view(%p, shape=(25,))\n%y = mul(%v, %v)",
        ),
    ):
        assert FuseMatmulBias().matches(program(signature, body, "%y")) == []
