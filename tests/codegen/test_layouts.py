"""Operands and results in every layout: permuted, expanded, sliced, transposed, empty, 0-d, updated in place."""

import pytest
import torch

from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.codegen.kernel.loops import Layout, Loops
from daceml_train.errors import Refused
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.operator import Value, make
from daceml_train.tensor import DType, Tensor
from tests.codegen.running import Case, check, describe, kernel_of

pytestmark = pytest.mark.compiled


def case(name, body, *inputs, **options) -> Case:
    return Case(name, kernel_of(body, *map(describe, inputs)), list(inputs), **options)


def add(a: Value, b: Value) -> Value:
    return a + b


def test_broadcasting():
    r = torch.randn
    shapes = [
        ((3, 4, 5), (3, 4, 5)),
        ((3, 4, 5), (5,)),
        ((3, 4, 5), (4, 1)),
        ((3, 1, 5), (4, 5)),
        ((3, 4, 5), ()),
        ((3, 1, 1), (1, 4, 5)),
        ((1, 1), (1,)),
        ((7,), (1, 1)),
        ((2, 3, 4, 5), (3, 1, 5)),
        ((), ()),
        ((2, 3, 4, 5), (1, 3, 1, 1)),
        ((0, 3), (3,)),
        ((4, 0), (4, 1)),
        ((300, 70), (300, 1)),
    ]
    check([case(f"{a} + {b}", add, r(a), r(b), blocks=1 + i % 3) for i, (a, b) in enumerate(shapes)])


def test_layouts_of_operands():
    r = torch.randn
    x = r(6, 40, 50)
    check(
        [
            case("permuted", add, r(50, 6, 40).permute(1, 2, 0), x, blocks=2),
            case("transposed", add, r(6, 50, 40).mT, x, blocks=2),
            case("transposed, large", add, r(300, 200).T, r(200, 300), blocks=3),
            case("both transposed", add, r(50, 40).T, r(50, 40).T),
            case("narrow", add, r(3, 2, 2, 20, 20).permute(0, 3, 1, 4, 2), r(3, 20, 2, 20, 2), blocks=2),
            case("narrow, across", add, r(3, 20, 2, 20, 2).permute(0, 2, 4, 1, 3), r(3, 2, 2, 20, 20), blocks=2),
            case("narrow, all of them", add, r(3, 2, 5).permute(2, 1, 0), r(5, 2, 3)),
            case("expanded", add, r(40, 1).expand(6, 40, 50), x),
            case("all expanded", add, r(1).expand(30), r(1).expand(30)),
            case("sliced", add, r(6, 40, 60)[:, :, 5:55], x),
            case("strided", add, r(12, 40, 100)[::2, :, ::2], x, blocks=2),
            case("channels last", add, r(2, 8, 6, 5).contiguous(memory_format=torch.channels_last), r(2, 8, 6, 5)),
            case("transposed half", add, r(90, 70).bfloat16().T, r(70, 90).bfloat16(), tolerance=1e-2),
            case(
                "to channels last",
                add,
                r(2, 70, 9, 9),
                r(70, 1, 1),
                outputs=[torch.empty(2, 70, 9, 9).contiguous(memory_format=torch.channels_last)],
                blocks=2,
            ),
            case("transposed result", add, r(70, 90), r(70, 90), outputs=[torch.empty(90, 70).T]),
        ]
    )


def test_movement_inside():
    r = torch.randn
    check(
        [
            case("x + x.T", lambda x: x + x.T, r(40, 40)),
            case("heads", lambda x: x.view((2, 3, 4, 5)).permute((0, 2, 1, 3)) * 2.0, r(2, 3, 20)),
            case("merge heads", lambda x: (x * 2.0).permute((0, 2, 1, 3)).view((2, 3, 20)), r(2, 4, 3, 5)),
            case(
                "qkv",
                lambda x: [x.view((2, 3, 3, 4)).slice(2, i, i + 1).view((2, 3, 4)) * 1.0 for i in range(3)],
                r(2, 3, 12),
            ),
            case("every second", lambda x: x.slice(1, 1, 20, 3) + 1.0, r(5, 20)),
            case("halves", lambda x: x.slice(0, 0, 5) * x.slice(0, 5, 10), r(10, 7)),
            case("expand", lambda a, b: a.view((7, 1)).expand((7, 9)) * b, r(7), r(9)),
            case("sum of expanded", lambda a, x: (a.view((7, 1)).expand((7, 9)) + x).sum((1,)), r(7), r(7, 9)),
            case("copy", lambda x: x.permute((1, 0)), r(33, 65)),
            case("copy of a view", lambda x: x.permute((1, 0, 2)).view((3, 8)), r(2, 3, 4)),
            case("constant", lambda x: (x * 2.0, x.builder.emit(make("full", value=3.5, shape=(4, 5)))[0]), r(4, 5)),
            case("flatten and sum", lambda x: (x.view((2, 60)) * 2.0).sum((1,)), r(2, 3, 4, 5)),
            case(
                "group norm",
                lambda x: (x.view((2, 3, 40)) - x.view((2, 3, 40)).mean((2,), True)).view((2, 6, 20)),
                r(2, 6, 20),
            ),
            case("rows of columns", lambda x: x - x.sum((0,), True), r(30, 40)),
            case(
                "iota",
                lambda x: (
                    x + x.builder.emit(make("iota", shape=(4, 5), dim=1, dtype=DType.float32, start=3, step=2))[0]
                ),
                r(4, 5),
            ),
        ]
    )


def test_updates_in_place():
    p, g = torch.randn(20, 30), torch.randn(20, 30)

    def sgd(p: Value, g: Value) -> Value:
        return p - g * 0.1

    def normalized(p: Value, g: Value) -> Value:
        return p - g / (g * p).sum((1,), True)

    cases = []
    for body in (sgd, normalized):
        kernel = kernel_of(body, describe(p), describe(g))
        kernel = Kernel(kernel.arguments, kernel.statements, kernel.yields, ((0, 0),))
        cases.append(Case(body.__name__, kernel, [p.clone(), g]))
    for blocks, shape in ((1, (70, 40, 3, 3)), (3, (64, 130, 5, 5))):  # a gradient with its channels last
        p, g = torch.randn(shape), torch.randn(shape).contiguous(memory_format=torch.channels_last)
        kernel = kernel_of(sgd, describe(p), describe(g))
        kernel = Kernel(kernel.arguments, kernel.statements, kernel.yields, ((0, 0),))
        cases.append(Case(f"another layout {shape}", kernel, [p, g], blocks=blocks))
        kernel = kernel_of(lambda g, p: sgd(p, g), describe(g), describe(p))
        kernel = Kernel(kernel.arguments, kernel.statements, kernel.yields, ((0, 1),))
        cases.append(Case(f"over the second {shape}", kernel, [g, p.clone()], blocks=blocks))
    check(cases)


def test_a_scalar_that_rows_read_is_not_updated_before_them():
    step, x = torch.tensor(3.0), torch.randn(40)
    kernel = kernel_of(lambda s, x: (s + 1.0, x * s), describe(step), describe(x))
    kernel = Kernel(kernel.arguments, kernel.statements, kernel.yields, ((0, 0),))
    with pytest.raises(Refused, match="is read after its new value is stored"):
        Case("step", kernel, [step, x])


def test_special_values():
    x = torch.randn(4, 40)
    x[0, 3], x[1, :], x[2, 5], x[3, 7] = torch.nan, -torch.inf, torch.inf, -torch.inf

    def rows(x: Value):
        largest = x.reduce("max", (1,), True)
        return largest, x.reduce("min", (1,)), x.compare("gt", largest), x.unary("isnan")

    check(
        [
            case("maxima", rows, x),
            case("exp", lambda x: (x * 25.0).unary("exp"), x, tolerance=1e-5),
            case(
                "maximum",
                lambda a, b: (a.apply(make("maximum"), b), a.apply(make("minimum"), b)),
                x,
                torch.randn(4, 40),
            ),
            case(
                "division",
                lambda a, b: a / b,
                torch.tensor([1.0, -1.0, 0.0, 2.0]),
                torch.tensor([0.0, 0.0, 0.0, torch.inf]),
            ),
            case("division by a scalar zero", lambda a, b: a / b, torch.randn(40), torch.tensor(0.0)),
        ]
    )


def test_integers_and_booleans():
    a, b = torch.randint(-9, 9, (40,)), torch.randint(1, 5, (40,)) * torch.where(torch.rand(40) < 0.5, 1, -1)
    kinds = ["add", "sub", "mul", "floor_divide", "remainder", "maximum", "eq", "lt", "logical_and", "pow"]

    def each(a: Value, b: Value):
        return [a.apply(make(kind), b) for kind in kinds] + [a.unary("abs"), a.unary("sign"), a.cast(DType.bool), -a]

    mask = torch.rand(40) < 0.5

    def masks(m: Value, x: Value):
        return (
            m.where(x, 0.0),
            m.unary("logical_not"),
            m.cast(DType.float32),
            m.cast(DType.int64).sum((0,)),
            m.apply(make("logical_or"), m),
        )

    dtypes = (torch.int64, torch.int32, torch.int16, torch.int8)
    check(
        [case(str(d), each, a.to(d), b.to(d), tolerance=0.0) for d in dtypes]
        + [case("masks", masks, mask, torch.randn(40))]
        + [
            case(
                "double",
                lambda x: x.unary("exp").unary("log1p").unary("erf"),
                torch.randn(40).double(),
                tolerance=1e-14,
            )
        ]
        + [case("bf16", lambda x: x.unary("exp") + 1.0, torch.randn(40).bfloat16(), tolerance=1e-2)]
        + [case("f16 to f32", lambda x: x.cast(DType.float32) * 3.0, torch.randn(40).half(), tolerance=1e-6)]
    )


def test_refusals():
    def sentence(body, *shapes) -> str:
        tensors = [Tensor(s) for s in shapes]
        with pytest.raises(Refused) as refusal:
            analyze(kernel_of(body, *tensors), tensors)
        return refusal.value.message

    assert "neither all rows nor all lanes" in sentence(lambda x: (x.sum((0,)), x.sum((1,)), x.sum((2,))), (2, 3, 4))
    assert "two orders" in sentence(lambda x: (x * x) + (x * x).T, (4, 4))
    assert "no common factors" in sentence(lambda x, y: (x * 2.0).view((8, 3)) + y, (6, 4), (8, 3))
    assert "slices a computed value" in sentence(lambda x: (x * 2.0).slice(0, 0, 2), (6, 4))


@pytest.mark.parametrize(
    ("shape", "lanes"), [((3, 20, 2, 20, 2), 20), ((3, 20, 4, 6, 2), 20), ((3, 2, 8), 8), ((2, 3, 2), 3)]
)
def test_a_loop_of_a_few_elements_is_no_vector(shape: tuple[int, ...], lanes: int) -> None:
    """The innermost loop of at least sixteen elements is vectorized, or the longest one."""
    order = tuple(reversed(range(len(shape))))
    a, b = torch.randn(tuple(shape[d] for d in order)).permute(order), torch.randn(shape)
    kernel = kernel_of(add, *map(describe, (a, b)))
    layouts = [Layout(tuple(t.shape), tuple(t.stride()), DType.float32) for t in (a, b, b)]
    domain = analyze(kernel, [describe(a), describe(b)])
    assert [axis.size for axis in Loops(domain, layouts[:2], layouts[2:]).lane_axes] == [lanes]
