"""Branches and loops of ONNX models: which are captured, and that they compute and train as the model says."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import daceml_train as dt
from daceml_train.driver.module import state_of
from daceml_train.errors import Invalid
from daceml_train.frontends.onnx import load
from tests.frontends.onnx.models import model, tensor

BOOL, INT = TensorProto.BOOL, TensorProto.INT64


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def branch() -> onnx.ModelProto:
    def body(kind: str) -> onnx.GraphProto:
        return helper.make_graph([node(kind, "x w", kind)], kind, [], [tensor(kind, 3)])

    nodes = [
        node("ReduceSum", "x", "s", keepdims=0),
        node("Greater", "s zero", "positive"),
        node("If", "positive", "y", then_branch=body("Mul"), else_branch=body("Sub")),
    ]
    weights = {"w": np.array([1, 2, 3], np.float32), "zero": np.array(0, np.float32)}
    return model(nodes, [tensor("x", 3)], [tensor("y", 3)], **weights)


def loop(steps: int, stacked: bool = True, ends: bool = False) -> onnx.ModelProto:
    """x <- tanh(x * w + i), stacked; with `ends`, as long as the sum is small."""
    inner = [
        node("Cast", "i", "number", to=TensorProto.FLOAT),
        node("Mul", "state w", "scaled"),
        node("Add", "scaled number", "next"),
        node("ReduceSum", "next", "size", keepdims=0),
        node("Less", "size limit", "small"),
        node("Identity", "small" if ends else "go", "again"),
        node("Sin", "next", "row"),
    ]
    body = helper.make_graph(
        inner,
        "body",
        [tensor("i", element=INT), tensor("go", element=BOOL), tensor("state", 3)],
        [tensor("again", element=BOOL), tensor("next", 3), *([tensor("row", 3)] if stacked else [])],
    )
    outputs = [tensor("last", 3), *([tensor("all", steps, 3)] if stacked else [])]
    nodes = [node("Loop", "trips  x".replace("  ", " go0 "), " ".join(o.name for o in outputs), body=body)]
    weights = {
        "trips": np.array(steps),
        "go0": np.array(True),
        "w": np.array([1, 0.5, -1], np.float32),
        "limit": np.array(30, np.float32),
    }
    return model(nodes, [tensor("x", 3)], outputs, **weights)


def scan(steps: int) -> onnx.ModelProto:
    body = helper.make_graph(
        [node("Mul", "state w", "scaled"), node("Add", "scaled part", "next"), node("Tanh", "next", "row")],
        "body",
        [tensor("state", 3), tensor("part", 3)],
        [tensor("next", 3), tensor("row", 3)],
    )
    nodes = [
        helper.make_node(
            "Scan",
            ["x", "parts"],
            ["last", "all"],
            body=body,
            num_scan_inputs=1,
            scan_input_axes=[1],
            scan_input_directions=[1],
            scan_output_axes=[1],
            scan_output_directions=[1],
        )
    ]
    return model(
        nodes,
        [tensor("x", 3), tensor("parts", 3, steps)],
        [tensor("last", 3), tensor("all", 3, steps)],
        w=np.array([1, 0.5, -1], np.float32),
    )


CASES = {
    "if": (branch, "IfOnData", (torch.tensor([1.0, 2, 0.5]),)),
    "else": (branch, "IfOnData", (-torch.tensor([1.0, 2, 0.5]),)),
    "loop": (lambda: loop(12), "LoopInSteps", (torch.tensor([1.0, 2, 0.5]),)),
    "short loop": (lambda: loop(3), "LoopInSteps", (torch.tensor([1.0, 2, 0.5]),)),
    "loop without end": (lambda: loop(5, False), "LoopInSteps", (torch.tensor([1.0, 2, 0.5]),)),
    "loop that data ends": (lambda: loop(40, False, True), "LoopWithEnd", (torch.tensor([1.0, 2, 0.5]),)),
    "loop of no step": (lambda: loop(0, False), "LoopInSteps", (torch.tensor([1.0, 2, 0.5]),)),
    "scan": (lambda: scan(11), "ScanInSteps", (torch.tensor([1.0, 2, 0.5]), torch.linspace(-1, 1, 33).view(3, 11))),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", CASES)
def test_captured_and_right(name: str) -> None:
    make, rule, inputs = CASES[name]
    proto = make()
    module = load(proto, trainable=["w"])
    assert f"{rule_name(rule)}(" in module.source
    names = [value.name for value in proto.graph.input]
    eager = module(*inputs)
    eager = eager if isinstance(eager, tuple) else (eager,)
    expected: Any = [y.detach() for y in eager]
    if name != "scan":  # the reference takes no directions
        expected = ReferenceEvaluator(proto).run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
    if trains := name != "loop of no step":
        sum((y * torch.arange(1.0, 1 + y.numel()).view(y.shape)).sum() for y in eager).backward()
    gradient, module.w.grad = module.w.grad, None
    optimized = dt.optimize(module)
    results = optimized(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    for a, b, c in zip(results, expected, eager, strict=True):
        torch.testing.assert_close(a, torch.as_tensor(b), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
    if trains:
        sum((y * torch.arange(1.0, 1 + y.numel()).view(y.shape)).sum() for y in results).backward()
        torch.testing.assert_close(module.w.grad, gradient, rtol=1e-3, atol=1e-3)
    state = state_of(optimized)
    assert state is not None and not state.backend.breaks and state.backend.graphs == 1


def rule_name(rule: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in rule).strip("_")


TREE = """
<ir_version: 8, opset_import: ["" : 18]>
tree (float[9,4] x, int64[9] left, int64[9] right, int64[9] inner) => (float[1,4] y)
<int64 nine = {9}, bool yes = {1}, int64[1] last = {8}, int64[1] axis = {0}>
{
  states = Loop(nine, yes, start) <body = node (int64 i, bool go, float[9,4] h) => (bool more, float[9,4] next) {
    more = Identity(go)
    l = Gather(left, i)
    r = Gather(right, i)
    a = Gather(h, l)
    b = Gather(h, r)
    c = Concat<axis = 0>(a, b)
    z = MatMul(c, w)
    k = Gather(inner, i)
    is = Cast<to = 9>(k)
    own = Gather(x, i)
    s = Add(z, own)
    p = Where(is, s, own)
    t = Tanh(p)
    at = Unsqueeze(i, axis)
    place = Unsqueeze(at, axis)
    row = Unsqueeze(t, axis)
    next = ScatterND(h, place, row)
  }>
  y = Gather(states, last)
}
"""
"""A recursive network over a binary tree, as ONNX can say it: a loop over nodes, whose states have a row each."""


@pytest.mark.compiled
@pytest.mark.parametrize("known", [True, False])
def test_a_loop_of_no_steps_stacks_no_rows(known: bool) -> None:
    """They were float32 and of rank one. A step reads a row of `x`, which has none."""
    inner = [node("Gather", "x i", "row", axis=0), node("Identity", "go", "again"), node("Neg", "s", "next")]
    given = [tensor("i", element=INT), tensor("go", element=BOOL), tensor("s", 3)]
    body = helper.make_graph(
        inner, "body", given, [tensor("again", element=BOOL), tensor("next", 3), tensor("row", 2, element=INT)]
    )
    nodes = [] if known else [node("Shape", "x", "size", end=1), node("Squeeze", "size", "trips")]
    nodes.append(node("Loop", "trips  s".replace("  ", " go0 "), "last all", body=body))
    outputs = [tensor("last", 3), tensor("all", "n", 2, element=INT)]
    weights = {"go0": np.array(True), **({"trips": np.array(0)} if known else {})}
    module = load(model(nodes, [tensor("x", "n", 2, element=INT), tensor("s", 3)], outputs, **weights))
    x, s = torch.zeros(0, 2, dtype=torch.int64), torch.ones(3)
    for called in (module, dt.optimize(module)):
        last, stacked = called(x, s)
        assert torch.equal(last, s) and stacked.dtype is torch.int64 and stacked.shape == (0, 2)


@pytest.mark.compiled
def test_a_scan_over_nothing_stacks_no_rows() -> None:
    inner = [node("Add", "state part", "next"), node("Greater", "next part", "row")]
    body = helper.make_graph(
        inner, "body", [tensor("state", 3), tensor("part", 3)], [tensor("next", 3), tensor("row", 3, element=BOOL)]
    )
    scan = node("Scan", "s x", "last all", body=body, num_scan_inputs=1, scan_output_axes=[1])
    outputs = [tensor("last", 3), tensor("all", 3, "n", element=BOOL)]
    module = load(model([scan], [tensor("s", 3), tensor("x", "n", 3)], outputs))
    for called in (module, dt.optimize(module)):
        last, stacked = called(torch.ones(3), torch.zeros(0, 3))
        assert torch.equal(last, torch.ones(3)) and stacked.dtype is torch.bool and stacked.shape == (3, 0)


@pytest.mark.compiled
def test_a_recursion_that_is_a_loop_over_nodes_trains() -> None:
    proto = onnx.parser.parse_model(TREE)
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    for name, value in (("w", weights), ("start", np.zeros((9, 4), np.float32))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    module = load(proto, trainable=["w"])
    left, right = torch.tensor([0, 0, 0, 0, 0, 0, 2, 6, 7]), torch.tensor([0, 0, 0, 0, 0, 1, 3, 4, 5])
    inner, x = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1]), torch.randn(9, 4)
    w = torch.tensor(weights, requires_grad=True)

    def state(node: int) -> torch.Tensor:
        below = [state(int(left[node])), state(int(right[node]))] if inner[node] else []
        return (torch.cat(below) @ w + x[node] if below else x[node]).tanh()

    expected = state(8)
    expected.sum().backward()
    optimized = dt.optimize(module)
    result = optimized(x, left, right, inner)
    result.sum().backward()
    torch.testing.assert_close(result[0], expected.detach())
    torch.testing.assert_close(module.w.grad, w.grad)
    found = state_of(optimized)
    assert found is not None and not found.backend.breaks and found.backend.graphs == 1


def test_a_function_that_calls_itself_is_refused_by_name() -> None:
    proto = onnx.parser.parse_model("""
<ir_version: 8, opset_import: ["" : 18, "own" : 1]>
calls (float[3] x, bool c) => (float[3] y) { y = own.visit(x, c) }
<opset_import: ["" : 18, "own" : 1], domain: "own">
visit (x, c) => (y) {
  n = Not(c)
  y = If(c) <then_branch = then () => (float[3] t) { t = own.visit(x, n) }, else_branch = other () => (float[3] e) { e = Tanh(x) }>
}
""")
    with pytest.raises(Invalid, match="own::visit -> own::visit"):
        load(proto)


def endless() -> onnx.ModelProto:
    proto = loop(3, False, True)
    (steps,) = (t for t in proto.graph.initializer if t.name == "trips")
    steps.CopyFrom(onnx.numpy_helper.from_array(np.array(2**62), "trips"))
    return proto


@pytest.mark.compiled
def test_a_loop_on_data_is_one_graph_where_no_gradient_is_asked_for() -> None:
    module = load(endless(), trainable=["w"])
    x = torch.tensor([1.0, 2, 0.5])
    (expected,) = ReferenceEvaluator(endless()).run(None, {"x": x.numpy()})
    optimized = dt.optimize(module)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), torch.as_tensor(expected), rtol=1e-4, atol=1e-4)
    state = state_of(optimized)
    assert state is not None and not state.backend.breaks and state.backend.graphs == 1


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_a_loop_on_data_trains_in_python() -> None:
    module = load(endless(), trainable=["w"])
    x = torch.tensor([1.0, 2, 0.5])
    module(x).sum().backward()
    gradient, module.w.grad = module.w.grad, None
    dt.optimize(module)(x).sum().backward()
    torch.testing.assert_close(module.w.grad, gradient)


def test_what_changes_shapes_stays_python() -> None:
    body = helper.make_graph(
        [node("Concat", "state x", "next", axis=0), node("Identity", "go", "again")],
        "body",
        [tensor("i", element=INT), tensor("go", element=BOOL), tensor("state", None)],
        [tensor("again", element=BOOL), tensor("next", None)],
    )
    nodes = [helper.make_node("Loop", ["trips", "", "x"], ["y"], body=body)]
    module = load(model(nodes, [tensor("x", 2)], [tensor("y", None)], trips=np.array(2)))
    assert "loop_" not in module.source.replace("loop_1", "")
    assert module(torch.ones(2)).shape == (6,)
