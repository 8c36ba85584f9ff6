"""Graphs that several tests look at, and a Hypothesis strategy for random ones."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from daceml_train.analysis.sizes import bind
from daceml_train.graph import Graph, Role
from daceml_train.ops.fallback import Aten, Body, Operand
from daceml_train.ops.gradient import CustomVJP
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.operator import Array, Origin, Value, make
from daceml_train.tensor import DType, Tensor, symbol

s0 = symbol("s0")


def mlp() -> Graph:
    """One layer: relu(x @ w.T + b)."""
    graph = Graph("mlp")
    x = graph.input("x", Tensor((8, s0)))
    w = graph.input("w", Tensor((16, s0)), Role.parameter, "fc.weight")
    b = graph.input("b", Tensor((16,)), Role.parameter, "fc.bias")
    with graph.at(Origin("fc", "model.py:12")):
        y = x @ w.T + b
    with graph.at(Origin("act", "model.py:13")):
        y = y.unary("relu")
    graph.output(y)
    return graph


def statement(name: str, inputs: str, outputs: str, **attributes: object) -> Statement:
    """`statement("add", "x y", "z")`."""
    return Statement(make(name, **attributes), tuple(inputs.split()), tuple(outputs.split()))


UPDATE = Kernel(
    ("x0", "x1", "x2"),
    (
        statement("full", "", "v0", value=0.1),
        statement("mul", "x1 v0", "v1"),
        statement("sub", "x0 v1", "v2"),
        statement("add", "x1 x2", "v3"),
    ),
    ("v2", "v3"),
    ((0, 0),),
)
"""p - 0.1 * g over p, and g + b."""


def update() -> Graph:
    """A kernel that updates a parameter in place."""
    graph = Graph("update")
    p = graph.input("p", Tensor((4, 3)), Role.parameter, "weight")
    g = graph.input("g", Tensor((4, 3)), Role.cotangent)
    b = graph.input("b", Tensor((3,)))
    following, total = graph.emit(UPDATE, p, g, b)
    graph.write("p", following)
    graph.output(total)
    return graph


def everything() -> Graph:
    """One of each thing that a text can hold."""
    graph = Graph("every thing")
    x = graph.input("x", Tensor((2, s0, 4)), path='with "quotes" and \n lines')
    last = graph.input("channels.last", Tensor((2, 3, 4, 5), DType.bfloat16, (0, 2, 3, 1)))
    seed = graph.input("seed of it", Tensor((), DType.int64), Role.state)
    odd = graph.input("f32", Tensor((symbol("f32"), symbol("a b"), 1)), Role.saved)
    with graph.at(Origin("layers.0.attention", "model.py:7")):
        x.view((2 * s0, 4)).slice(0, s0, 2 * s0, 2)
    with graph.at(Origin("a module with spaces", 'C:\\model "a".py:1')):
        x.reduce("max", (0, 2), keepdim=True).cast(DType.float16)
    with graph.at(Origin("", "model.py:9")):
        (u,) = graph.emit(make("uniform", shape=(2, s0, 4), stream=3), seed)
    with graph.at(Origin("only.module")):
        x.compare("lt", u).where(float("-inf"), x.constant(float("nan")))
    last.unary("neg")
    odd.expand((symbol("f32"), symbol("a b"), 2 * s0 // 3 + s0**2))
    body = (statement("mul", "g a", "v"),)
    arguments = (Operand(0), (1, -2.5, None), (Operand(1),), DType.float64, True, "text", s0 / 2 + 1)
    backward = Body(("a", "b", "y", "g"), body, ("v", None))
    types = (Tensor((2, s0, 4)), Tensor((), DType.bool))
    aten = Aten("mylib.filter.default", arguments, types, (("alpha", 1e-300),), random=True, backward=backward)
    y, flag = graph.emit(aten, x, u)
    square = Body(("a",), (statement("square", "a", "v"),), ("v", "a"))
    double = Body(("g", "s"), (statement("mul", "g s", "v"),), ("v",))
    custom = CustomVJP(square, double, 1)
    graph.output(graph.emit(custom, y)[0], flag, x)
    graph.write("x", y)
    return graph


KINDS = (
    "relu",
    "exp",
    "neg",
    "add",
    "mul",
    "maximum",
    "full",
    "permute",
    "view",
    "slice",
    "expand",
    "reduce",
    "softmax",
    "mean",
    "matmul",
    "kernel",
    "cast",
)


@st.composite
def graphs(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> tuple[Graph, dict[str, Array]]:
    """A random valid graph of up to a dozen operators, with inputs for it."""
    sizes = {"s0": draw(st.integers(1, 4)), "s1": draw(st.integers(1, 3))}
    graph = Graph("random")
    choices = st.sampled_from([1, 2, 3, symbol("s0"), symbol("s1"), 2 * symbol("s0")])
    values: list[Value] = [graph.input(s, Tensor((symbol(s),)), Role.state) for s in sizes]
    for position in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(choices, max_size=3)))
        role = draw(st.sampled_from(list(Role)))
        values.append(graph.input(f"x{position}", Tensor(shape), role, draw(st.text(max_size=5))))
    for _ in range(draw(st.integers(0, 12))):
        origin = Origin(draw(st.sampled_from(["", "a.b", "c d"])), draw(st.sampled_from(["", "m.py:3"])))
        with graph.at(origin):
            values += _emit(draw, graph, draw(st.sampled_from(kinds)), values)
    graph.output(*draw(st.lists(st.sampled_from(values), max_size=3)))
    for name, entry in list(graph.inputs.items()):
        fitting = [v for v in values if v.tensor == entry.tensor]
        if draw(st.booleans()):
            graph.write(name, draw(st.sampled_from(fitting)))
    generator = np.random.default_rng(draw(st.integers(0, 9)))
    arrays = {name: generator.standard_normal(bind(i.tensor.shape, sizes)) for name, i in graph.inputs.items()}
    return graph, arrays


def _emit(draw: st.DrawFn, graph: Graph, kind: str, values: list[Value]) -> list[Value]:
    x = draw(st.sampled_from(values))
    rank = len(x.shape)
    others = [v for v in values if v.shape == x.shape and v.dtype is x.dtype] or [x]
    match kind:
        case "relu" | "exp" | "neg":
            return [x.unary(kind)]
        case "add" | "mul" | "maximum":
            return [x._binary(kind, draw(st.sampled_from(others)))]
        case "full":
            return [x.constant(draw(st.floats(width=32)))]
        case "permute":
            return [x.permute(draw(st.permutations(range(rank))))]
        case "view":
            return [x.view((x.tensor.size,))]
        case "expand":
            return [x.expand((draw(st.sampled_from([1, 2, symbol("s0")])), *x.shape))] if rank < 3 else []
        case "cast":
            return [x.cast(draw(st.sampled_from([DType.float64, DType.float32, DType.float16])))]
        case "matmul":
            flat = x.view((x.tensor.size, 1))
            return [flat @ flat.T] if rank else []
        case "kernel":
            body = (statement("exp", "p", "v"), statement("add", "v q", "w"))
            yields = draw(st.sampled_from([("w",), ("v", "w"), ("w", "p")]))
            return list(graph.emit(Kernel(("p", "q"), body, yields), x, draw(st.sampled_from(others))))
    if rank == 0:
        return []
    dim = draw(st.integers(0, rank - 1))
    match kind:
        case "slice":
            return [x.slice(dim, 0, draw(st.sampled_from([x.shape[dim], 1])))]
        case "reduce":
            return [x.reduce(draw(st.sampled_from(["sum", "max", "min"])), (dim,), draw(st.booleans()))]
        case "softmax":
            return [x.apply(make("softmax", dim=dim))]
        case "mean":
            return [x.mean((dim,), draw(st.booleans()))]
    raise AssertionError(kind)
