"""Random differentiable graphs, made of what the passes look for: cut and reassembled arrays, matmuls, constants."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from daceml_train.autodiff.reverse import differentiate
from daceml_train.graph.graph import Graph, Role
from daceml_train.ops.operator import Value, make
from daceml_train.passes.base import Pass
from daceml_train.tensor import DType, Tensor, broadcast, same, symbol

BATCH = symbol("s0")
LIMIT = 64
"""Elements of the largest array, with the batch counted as 2."""


@st.composite
def training_graphs(draw: st.DrawFn, forward: tuple[Pass, ...] = ()) -> Graph:
    """A random network, after random passes of `forward`, with its gradients by all float inputs as outputs."""
    graph = Graph("random")
    seed = graph.input("seed", Tensor((), DType.int64), Role.state)
    shapes = st.sampled_from([(BATCH, 3), (BATCH, 2, 4), (2, 3), (4,), (BATCH, 4, 4)])
    values = [graph.input("x", Tensor((BATCH, 4)))]
    values += [graph.input(f"x{i}", Tensor(draw(shapes)), Role.parameter) for i in range(draw(st.integers(1, 2)))]
    kinds = st.sampled_from(sorted(EMITTERS))
    for _ in range(draw(st.integers(2, 10))):
        results = EMITTERS[draw(kinds)](draw, graph, draw(st.sampled_from(values)), values, seed)
        values += [v for v in results if v.dtype is DType.float32 and _elements(v) <= LIMIT]
    total: Value | None = None
    for value in [*values[-2:], *draw(st.lists(st.sampled_from(values), max_size=2))]:
        loss = value.unary("tanh").sum(range(value.tensor.rank))
        total = loss if total is None else total + loss
    assert total is not None
    graph.output(total, *draw(st.lists(st.sampled_from(values), max_size=2)))
    for transformation in forward:
        if draw(st.booleans()):
            graph = transformation.run(graph)
    total = graph.value(graph.outputs[0])
    wrt = [name for name in graph.inputs if name != "seed"]
    gradients = differentiate(graph, {total.name: total.constant(1.0)}, wrt)
    graph.output(*(g for g in gradients.values() if g is not None))
    return graph


def _elements(value: Value) -> int:
    size = value.tensor.size
    return size if isinstance(size, int) else int(size.subs(BATCH, 2))


def _unary(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    return [x.unary(draw(st.sampled_from(["tanh", "neg", "sin", "square"])))]


def _binary(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    fitting = [v for v in values if _broadcasts(x, v)]
    return [x._binary(draw(st.sampled_from(["add", "mul", "sub", "add"])), draw(st.sampled_from(fitting)))]


def _broadcasts(a: Value, b: Value) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return a.dtype is b.dtype and all(same(m, n) or same(m, 1) or same(n, 1) for m, n in pairs)


def _constant(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    number = draw(st.sampled_from([0.0, -0.0, 1.0, 2.0, 0.5]))
    shape = draw(st.sampled_from([(), x.shape]))
    (c,) = graph.emit(make("full", value=number, shape=shape))
    if draw(st.booleans()):
        c = (c * 3).expand(broadcast(x.shape, shape))
    return [x._binary(draw(st.sampled_from(["add", "mul", "sub"])), c)]


def _split(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    dims = [d for d, size in enumerate(x.shape) if isinstance(size, int) and size > 1]
    if not dims:
        return []
    dim = draw(st.sampled_from(dims))
    edges = sorted({0, x.shape[dim], *draw(st.lists(st.integers(1, x.shape[dim] - 1), max_size=3))})
    return [x.slice(dim, a, b, draw(st.sampled_from([1, 1, 1, 2]))) for a, b in itertools.pairwise(edges)]


def _unroll(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    """A recurrence over the slices of one dimension, whose states are stacked again."""
    dims = [d for d, size in enumerate(x.shape) if isinstance(size, int) and 1 < size < 5]
    if not dims:
        return []
    dim = draw(st.sampled_from(dims))
    rest = (*x.shape[:dim], *x.shape[dim + 1 :])
    states = [x.slice(dim, 0, 1).view(rest)]
    for t in range(1, x.shape[dim]):
        states.append((states[-1] + x.slice(dim, t, t + 1).view(rest)).unary("tanh"))
    column = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    return [*graph.emit(make("concat", dim=dim), *(s.view(column) for s in states)), states[-1]]


def _concat(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    if not x.shape:
        return []
    same_type = [v for v in values if v.shape == x.shape]
    return list(
        graph.emit(make("concat", dim=draw(st.integers(0, len(x.shape) - 1))), x, draw(st.sampled_from(same_type)))
    )


def _move(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    rank = len(x.shape)
    match draw(st.sampled_from(["flatten", "ones", "permute", "expand", "pad", "flip"])):
        case "flatten" if rank > 1:
            return [x.view((x.tensor.size,)).view((*x.shape[1:], x.shape[0])), x.view((x.tensor.size,))]
        case "ones" if rank < 3:
            return [x.view((*x.shape, 1)), x.view((1, *x.shape))]
        case "permute":
            return [x.permute(draw(st.permutations(range(rank))))]
        case "expand" if rank < 3:
            return [x.expand((2, *x.shape))]
        case "pad" if rank:
            return [x.apply(make("pad", pads=((draw(st.integers(0, 1)), draw(st.integers(0, 1))),) * rank, value=0.0))]
        case "flip" if rank:
            return [x.apply(make("flip", dims=(draw(st.integers(0, rank - 1)),)))]
    return []


def _product(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    rank = len(x.shape)
    if rank not in (2, 3):
        return []
    if draw(st.integers(0, 3)) == 0:
        return [x @ x.T]
    w = graph.input(graph.fresh("w"), Tensor((x.shape[-1], draw(st.integers(1, 3)))), Role.parameter)
    y = x @ (w.expand((x.shape[0], *w.shape)) if rank == 3 else w)
    if draw(st.booleans()):
        y = y + graph.input(graph.fresh("b"), Tensor(y.shape[-1:]), Role.parameter)
    return [y]


def _reduce(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    if not x.shape:
        return []
    dims = tuple(sorted(draw(st.sets(st.integers(0, len(x.shape) - 1), min_size=1))))
    keep = draw(st.booleans())
    return [x.sum(dims, keep) if draw(st.booleans()) else x.mean(dims, keep)]


def _normalize(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    if not x.shape:
        return []
    name = draw(st.sampled_from(["softmax", "log_softmax", "dropout"]))
    if name == "dropout":
        return [x.apply(make("dropout", p=0.5, stream=draw(st.integers(0, 1))), seed)]
    return [x.apply(make(name, dim=draw(st.integers(0, len(x.shape) - 1))))]


def _loss(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    if len(x.shape) != 2:
        return []
    (target,) = graph.emit(make("full", value=0, shape=x.shape[:1], dtype=DType.int64))
    logp = x.apply(make("log_softmax", dim=1))
    return [graph.emit(make("nll_loss"), logp, target)[0]]


def _cast(draw: st.DrawFn, graph: Graph, x: Value, values: list[Value], seed: Value) -> list[Value]:
    return [x.cast(DType.float64).unary("tanh").cast(DType.float32), x.cast(DType.float64).cast(DType.float32)]


EMITTERS = {
    "unary": _unary,
    "binary": _binary,
    "constant": _constant,
    "split": _split,
    "unroll": _unroll,
    "concat": _concat,
    "move": _move,
    "matmul": _product,
    "reduce": _reduce,
    "normalize": _normalize,
    "loss": _loss,
    "cast": _cast,
}
