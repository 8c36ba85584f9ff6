from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from daceml_train.analysis.interpret import interpret
from daceml_train.errors import Invalid
from daceml_train.graph import Graph, parse
from daceml_train.ops.operator import Array, Operator
from daceml_train.tensor import Tensor
from tests.graph import programs


def normal(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape)


def test_layer_against_torch() -> None:
    x, w, b = normal(8, 5), normal(16, 5), normal(16)
    results = interpret(programs.mlp(), {"x": x, "w": w, "b": b})
    expected = torch.relu(torch.nn.functional.linear(*map(torch.tensor, (x, w, b)))).numpy()
    np.testing.assert_allclose(results.outputs[0], expected, rtol=1e-12)
    assert results.sizes == {"s0": 5}
    assert results.values["matmul"].shape == (8, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_rounded_to_their_element_types(dtype: torch.dtype) -> None:
    short = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    graph = parse(f"graph g(x: {short}[40] input, y: {short}[40] input) {{ %z = mul(%x, %y)\n return %z }}")
    x, y = normal(40) * 7, normal(40)
    x[:3] = np.inf, -np.inf, np.nan
    (result,) = interpret(graph, {"x": x, "y": y}, rounded=True).outputs
    expected = (torch.tensor(x) * torch.tensor(y)).to(dtype).double().numpy()
    np.testing.assert_array_equal(result, expected)


def test_narrow_floats_are_float32_and_inputs_stay_as_they_are() -> None:
    graph = parse("""graph g(x: f32[3, 4] input, w: f64[4] input, h: bf16[4] input, i: i64[4] input) {
      %s = softmax(%x, dim=1)
      %e = exp(%w)
      %r = exp(%h)
      %d = add(%i, %i)
      return %s, %e, %r, %d
    }""")
    x, w, i = normal(3, 4).astype(np.float32), normal(4), np.arange(4)
    before = x.copy()
    results = interpret(graph, {"x": x, "w": w, "h": x[0], "i": i}, narrow=True).outputs
    assert [result.dtype for result in results] == [np.float32, np.float64, np.float32, np.int64]
    np.testing.assert_allclose(results[0], torch.softmax(torch.tensor(x), 1).numpy(), rtol=1e-6)
    np.testing.assert_allclose(results[1], np.exp(w), rtol=1e-15)
    np.testing.assert_allclose(results[2], np.exp(x[0]), rtol=1e-6)
    np.testing.assert_array_equal(x, before)


def test_composites_against_torch() -> None:
    graph = parse("""graph g(x: f32[6, s0] input, t: i64[6] input) {
      %s = softmax(%x, dim=1)
      %m = mean(%x, dims=(0,), keepdim=True)
      %l, %h, %p, %n = cross_entropy(%x, %t)
      return %s, %m, %l
    }""")
    x, t = normal(6, 4), np.array([0, 3, 1, 1, 2, 0])
    softmax, mean, loss = interpret(graph, {"x": x, "t": t}).outputs
    given = torch.tensor(x)
    np.testing.assert_allclose(softmax, torch.softmax(given, 1).numpy(), rtol=1e-12)
    np.testing.assert_allclose(mean, given.mean(0, keepdim=True).numpy(), rtol=1e-12)
    np.testing.assert_allclose(loss, torch.nn.functional.cross_entropy(given, torch.tensor(t)).numpy(), rtol=1e-12)


def test_kernels_and_writes() -> None:
    p, g, b = normal(4, 3), normal(4, 3) + 1, normal(3)
    results = interpret(programs.update(), {"p": p, "g": g, "b": b})
    np.testing.assert_allclose(results.writes["p"], p - 0.1 * g)
    np.testing.assert_allclose(results.outputs[0], g + b)
    assert results.values["p"] is not results.writes["p"]


def test_a_size_is_a_number_in_every_attribute() -> None:
    graph = parse("""graph g(x: f32[s0, 3] input) {
      %v = view(%x, shape=(3*s0,))
      %h = slice(%v, dim=0, start=s0, stop=2*s0)
      %c = full(value=1/s0, shape=(s0,))
      %k = kernel(a=%h, b=%c) { %e = expand(%b, shape=(2, s0)) %m = mul(%e, %a) yield %m }
      return %k
    }""")
    x = normal(4, 3)
    (y,) = interpret(graph, {"x": x}).outputs
    np.testing.assert_allclose(y, np.broadcast_to(x.reshape(-1)[4:8] / 4, (2, 4)))


def test_types() -> None:
    graph = parse("""graph g(x: f32[2] input, i: i32[2] input, m: b1[2] buffer) {
      %a = neg(%x) %b = add(%i, %i) %c = logical_not(%m) return %a, %b, %c }""")
    arrays = {"x": np.array([1, 2], "float32"), "i": np.array([1, 2], "int64"), "m": np.array([True, False])}
    assert [y.dtype for y in interpret(graph, arrays).outputs] == ["float64", "int32", "bool"]


def test_inputs_that_do_not_fit() -> None:
    graph = parse("graph g(x: f32[s0, s0] input, i: i64[s0] input) { return %x }")
    with pytest.raises(Invalid, match=r"input 'i' expects i64\[s0\] where s0 = 2; given \[3\]"):
        interpret(graph, {"x": normal(2, 2), "i": np.zeros(3, int)})
    with pytest.raises(Invalid, match=r"input 'i' expects i64\[s0\]; given an array of float64"):
        interpret(graph, {"x": normal(2, 2), "i": normal(2)})
    with pytest.raises(Invalid, match="input 'i' is missing"):
        interpret(graph, {"x": normal(2, 2)})


class Wrong(Operator):
    label = "wrong"

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return operands

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        return (operands[0][:1],)


def test_a_reference_that_contradicts_its_shape_rule_is_refused() -> None:
    graph = Graph("g")
    graph.emit(Wrong(), graph.input("x", Tensor((3,))))
    with pytest.raises(Invalid, match=r"%wrong = wrong\(%x\): the reference returns float64 of \[1\], the shape"):
        interpret(graph, {"x": normal(3)})


@given(programs.graphs())
@settings(max_examples=100, deadline=None)
def test_random_graphs_run(drawn: tuple[Graph, dict[str, Any]]) -> None:
    graph, arrays = drawn
    results = interpret(graph, arrays)
    assert results.values.keys() == graph.tensors.keys()
    assert len(results.outputs) == len(graph.outputs)
    assert results.writes.keys() == graph.writes.keys()
