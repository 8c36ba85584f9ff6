"""The reverse pass: what it builds, what it leaves out, and what it refuses."""

from dataclasses import dataclass

import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.verify import verify
from daceml_train.autodiff.reverse import differentiate, sum_to
from daceml_train.errors import Invalid, Unsupported
from daceml_train.graph.graph import Graph
from daceml_train.ops.elementwise import Full
from daceml_train.ops.operator import Builder, Operator, Value
from daceml_train.tensor import DType, Tensor
from tests.transformations.checking import program


def gradients(graph: Graph, wrt: list[str], inputs: dict[str, np.ndarray]) -> list[np.ndarray | None]:
    graph = graph.copy()
    y = graph.value(graph.outputs[0])
    (one,) = graph.emit(Full(1.0, y.shape, y.dtype))
    found = differentiate(graph, {y.name: one}, wrt)
    verify(graph)
    results = interpret(graph, inputs).values
    return [None if g is None else results[g.name] for g in found.values()]


def test_contributions_at_a_fan_out_are_added() -> None:
    graph = program("x: f32[3]", '%a = mul(%x, %x)\n%b = add(%a, %x)\n%y = reduce(%b, kind="sum", dims=(0,))', "%y")
    x = np.array([1.0, -2.0, 3.0])
    np.testing.assert_allclose(gradients(graph, ["x"], {"x": x})[0], 2 * x + 1)


def test_a_broadcast_operand_gets_the_sum() -> None:
    graph = program(
        "x: f32[4, 3], b: f32[3], c: f32[4, 1]",
        '%a = add(%x, %b)\n%d = mul(%a, %c)\n%y = reduce(%d, kind="sum", dims=(0, 1))',
        "%y",
    )
    x, b, c = np.random.rand(4, 3), np.random.rand(3), np.random.rand(4, 1)
    gx, gb, gc = gradients(graph, ["x", "b", "c"], {"x": x, "b": b, "c": c})
    np.testing.assert_allclose(gx, np.broadcast_to(c, (4, 3)))
    np.testing.assert_allclose(gb, np.full(3, c.sum()))
    np.testing.assert_allclose(gc, (x + b).sum(1, keepdims=True))


def test_nothing_is_built_for_what_is_not_asked() -> None:
    graph = program("x: f32[3], w: f32[3]", '%a = mul(%x, %w)\n%y = reduce(%a, kind="sum", dims=(0,))', "%y")
    before = len(graph.nodes)
    copy = graph.copy()
    (one,) = copy.emit(Full(1.0, ()))
    found = differentiate(copy, {"y": one}, ["w"])
    added = [n for n in copy.nodes[before:] if n.op.label == "mul"]
    assert list(found) == ["w"] and len(added) == 1 and "x" in added[0].inputs


def test_an_input_without_influence_has_no_gradient() -> None:
    graph = program("x: f32[3], w: f32[3]", '%y = reduce(%x, kind="sum", dims=(0,))', "%y")
    assert gradients(graph, ["w"], {"x": np.ones(3), "w": np.ones(3)}) == [None]


def test_rounding_and_comparisons_cut_the_gradient_silently_as_pytorch_does() -> None:
    graph = program("x: f32[3]", '%a = round(%x)\n%b = add(%a, %x)\n%y = reduce(%b, kind="sum", dims=(0,))', "%y")
    np.testing.assert_allclose(gradients(graph, ["x"], {"x": np.ones(3)})[0], np.ones(3))


@pytest.mark.parametrize("kind", ["sign", "floor", "ceil", "round", "trunc"])
def test_what_is_only_rounded_has_zeros_and_what_is_detached_or_compared_has_no_gradient(kind: str) -> None:
    graph = program(
        "x: f32[3], w: f32[3], v: f32[3]",
        f"%a = {kind}(%x)\n%b = mul(%a, %a)\n%d = detach(%w)\n%c = gt(%v, %d)\n%e = where(%c, %b, %d)\n"
        '%y = reduce(%e, kind="sum", dims=(0,))',
        "%y",
    )
    x, w, v = gradients(graph, ["x", "w", "v"], {n: np.ones(3) for n in "xwv"})
    np.testing.assert_array_equal(x, np.zeros(3))
    assert w is None and v is None


def test_an_active_operator_without_a_derivative_is_an_error_that_names_it() -> None:
    graph = program(
        "x: f32[3]",
        '%a = aten(%x, target="aten.lgamma.default", arguments=(operand(0),), types=(f32[3],))\n'
        '%y = reduce(%a, kind="sum", dims=(0,))',
        "%y",
    )
    copy = graph.copy()
    (one,) = copy.emit(Full(1.0, ()))
    with pytest.raises(Unsupported, match="aten.lgamma has no derivative"):
        differentiate(copy, {"y": one}, ["x"])
    inactive = graph.copy()
    (one,) = inactive.emit(Full(1.0, ()))
    assert differentiate(inactive, {"y": one}, []) == {}


def test_a_cotangent_of_another_shape_is_refused() -> None:
    graph = program("x: f32[3]", "%y = exp(%x)", "%y")
    wrong = graph.input("g", Tensor((4,)))
    with pytest.raises(Invalid, match=r"cotangent of y has shape \[4\], expected \[3\]"):
        differentiate(graph, {"y": wrong}, ["x"])


def test_sum_to_drops_leading_and_grown_dimensions() -> None:
    graph = Graph()
    value = graph.input("x", Tensor((2, 3, 4), DType.float64))
    assert sum_to(value, (3, 1)).shape == (3, 1)
    assert sum_to(value, (2, 3, 4)) is value


@dataclass(frozen=True)
class Blend(Operator):
    """x * sigmoid(w) summed over the last dimension, and x itself: two results, no VJP of its own."""

    name = "blend_for_test_reverse"
    operands = ("x", "w")
    results = ("y", "z")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, _ = operands
        return Tensor(x.shape[:-1], x.dtype), x

    def lower(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        x, w = operands
        return (x * w.unary("sigmoid")).sum((len(x.shape) - 1,)), x


def test_a_composite_without_a_vjp_is_differentiated_through_its_lowering() -> None:
    graph = Graph()
    x, w = graph.input("x", Tensor((3, 4), DType.float64)), graph.input("w", Tensor((4,), DType.float64))
    g, h = graph.input("g", Tensor((3,), DType.float64)), graph.input("h", Tensor((3, 4), DType.float64))
    y, z = graph.emit(Blend(), x, w)
    gradients = differentiate(graph, {y.name: g, z.name: h}, ["x", "w"])
    graph.output(*(v for v in gradients.values() if v is not None))
    verify(graph)
    arrays = {n: np.random.default_rng(i).standard_normal(graph.tensors[n].shape) for i, n in enumerate("xwgh")}
    dx, dw = interpret(graph, arrays).outputs
    s = 1 / (1 + np.exp(-arrays["w"]))
    np.testing.assert_allclose(dx, arrays["g"][:, None] * s + arrays["h"])
    np.testing.assert_allclose(dw, (arrays["g"][:, None] * arrays["x"]).sum(0) * s * (1 - s))
