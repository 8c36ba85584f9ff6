from __future__ import annotations

import dataclasses
from collections.abc import Callable
from cProfile import Profile
from typing import Any

import pytest
from hypothesis import given, settings

from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph import Graph, Input, Node, Role, parse
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.operator import Operator, Origin, make
from daceml_train.tensor import DType, Tensor, symbol
from tests.graph import programs
from tests.graph.programs import UPDATE, statement


@pytest.mark.parametrize("name", ["mlp", "update"])
def test_accepts(name: str) -> None:
    verify(getattr(programs, name)())


@given(programs.graphs())
@settings(max_examples=100, deadline=None)
def test_accepts_random(drawn: tuple[Graph, Any]) -> None:
    verify(drawn[0])


class Meaningless(Operator):
    label = "meaningless"

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return operands


def small() -> Graph:
    return parse("""graph small(x: f32[4] input, y: f32[4] buffer) {
      %add = add(%x, %y)  # fc model.py:3
      %neg = neg(%add)
      write y <- %neg
      return %add
    }""")


def edit(**changes: Any) -> Callable[[Graph], None]:
    """Replace fields of the first node."""

    def change(graph: Graph) -> None:
        graph.nodes[0] = dataclasses.replace(graph.nodes[0], **changes)

    return change


def kernel(*statements: Any, arguments: str = "a b", yields: str = "v") -> Callable[[Graph], None]:
    return edit(op=Kernel(tuple(arguments.split()), statements, tuple(yields.split())))


def append(op: Operator, inputs: str, outputs: str, *types: Tensor) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        graph.nodes.append(Node(op, tuple(inputs.split()), tuple(outputs.split())))
        graph.tensors.update(zip(outputs.split(), types, strict=True))

    return change


def swap(graph: Graph) -> None:
    graph.nodes.reverse()


F = Tensor((4,))
ADD = "%add = add(%x, %y): "
CELL = statement("add", "a b", "v")
BROKEN: dict[str, tuple[Callable[[Graph], Any], str]] = {
    "input's type": (
        lambda g: g.inputs.update(x=Input(Tensor((5,)))),
        "input 'x' is declared as f32[5] but recorded as f32[4]",
    ),
    "reads nothing": (
        edit(inputs=("x", "z")),
        "%add = add(%x, %z): it reads %z, which no node produces (at fc model.py:3)",
    ),
    "reads a later array": (swap, "%neg = neg(%add): it reads %add, which a later node produces"),
    "no type": (lambda g: g.tensors.pop("add"), ADD + "%add is recorded as None, the operator produces f32[4]"),
    "wrong type": (
        lambda g: g.tensors.update(add=Tensor((4,), DType.float64)),
        ADD + "%add is recorded as f64[4], the operator produces f32[4]",
    ),
    "operator refuses": (edit(inputs=("x",)), "%add = add(%x): add takes 2 operands, not 1 (at fc model.py:3)"),
    "number of results": (edit(outputs=("add", "b")), "%add, %b = add(%x, %y): it produces 1 arrays but names 2"),
    "written twice": (append(make("neg"), "x", "add", F), "%add = neg(%x): %add is written a second time"),
    "writes an input": (append(make("neg"), "x", "y", F), "%y = neg(%x): %y is written a second time"),
    "left over": (
        lambda g: g.tensors.update(z=F),
        "%z is recorded as f32[4] but is neither an input nor produced by a node",
    ),
    "meaningless": (
        append(Meaningless(), "x", "m", F),
        "%m = meaningless(%x): meaningless has neither a lowering nor a reference",
    ),
    "output": (lambda g: g.outputs.append("z"), "graph 'small' returns %z, which does not exist"),
    "write of nothing": (lambda g: g.writes.update(y="z"), "graph 'small' writes %z to 'y', but %z does not exist"),
    "write to no input": (lambda g: g.writes.update(add="neg"), "graph 'small' writes 'add', which is not an input"),
    "write of another type": (
        lambda g: g.input("p", Tensor((5,))) and g.writes.update(p="neg"),
        "graph 'small' writes %neg, f32[4], to 'p', f32[5]",
    ),
    "underived size": (
        lambda g: g.input("p", Tensor((symbol("a") * symbol("b"),))),
        "of input 'p', f32[a*b], does not follow from the inputs' shapes",
    ),
    "free size": (
        append(make("full", value=0, shape=(symbol("n"),)), "", "full", Tensor((symbol("n"),))),
        "%full = full(): size n occurs in no input",
    ),
    "free attribute": (
        append(make("full", value=symbol("n")), "", "full", Tensor(())),
        "%full = full(): size n occurs in no input",
    ),
    "kernel's arguments": (kernel(CELL, arguments="a b c"), "the kernel has 3 arguments and 2 operands"),
    "kernel's names": (kernel(CELL, arguments="a a"), "two arguments of the kernel have one name"),
    "kernel reads": (
        kernel(statement("add", "a w", "v")),
        "in its body, v = add(a, w) reads w, which nothing before it produces",
    ),
    "kernel's order": (
        kernel(statement("neg", "w", "v"), statement("neg", "a", "w")),
        "in its body, v = neg(w) reads w, which nothing before it produces",
    ),
    "kernel writes": (kernel(statement("add", "a b", "a")), "in its body, a = add(a, b) writes a a second time"),
    "kernel's leaves": (
        kernel(statement("softmax", "a", "v", dim=0)),
        "in its body, v = softmax(a) is not a leaf",
    ),
    "kernel in a kernel": (
        kernel(statement("kernel", "a", "v", arguments=("z",), statements=(), yields=("z",))),
        "in its body, v = kernel(a) is not a leaf",
    ),
    "kernel yields": (kernel(CELL, yields="w"), "the kernel yields w, which its body does not produce"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_refuses(case: str) -> None:
    change, sentence = BROKEN[case]
    graph = small()
    change(graph)
    with pytest.raises(Invalid) as caught:
        verify(graph)
    assert sentence in str(caught.value)


def updating(*after: Callable[[Graph], Any], inputs: str = "p g b") -> Graph:
    """`programs.update` with an alias of p made before, and more nodes after."""
    graph = programs.update()
    graph.nodes.insert(0, Node(make("permute", dims=(1, 0)), ("p",), ("t",)))
    graph.tensors["t"] = Tensor((3, 4), order=(1, 0))
    for change in after:
        change(graph)
    return graph


NODE = "%kernel, %kernel_1 = kernel(%p, %g, %b): it updates %p in place"


def reader(name: str, tensor: Tensor) -> Callable[[Graph], None]:
    return append(make("neg"), name, "n", tensor)


def operands(*names: str) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        graph.nodes[1] = dataclasses.replace(graph.nodes[1], inputs=names)

    return change


def updates(*pairs: tuple[int, int]) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        graph.nodes[1] = dataclasses.replace(graph.nodes[1], op=dataclasses.replace(UPDATE, updates=pairs))

    return change


UNSAFE: dict[str, tuple[Callable[[Graph], Any], str]] = {
    "read later": (reader("p", Tensor((4, 3))), NODE + ", but %n = neg(%p) reads that input later"),
    "alias read later": (
        reader("t", Tensor((3, 4), order=(1, 0))),
        NODE + ", but %n = neg(%t) reads that input later",
    ),
    "returned": (lambda g: g.outputs.append("p"), NODE + ", but the result %p is its memory"),
    "alias returned": (lambda g: g.outputs.append("t"), NODE + ", but the result %t is its memory"),
    "no write": (lambda g: g.writes.clear(), NODE + ", but the graph does not write %kernel to it"),
    "another write": (lambda g: g.writes.update(p="kernel_1"), NODE + ", but the graph does not write %kernel to it"),
    "read twice": (operands("p", "p", "b"), "it updates %p in place and reads it through another argument"),
    "out of range": (updates((2, 0)), "the update (2, 0) names no result or no argument"),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_refuses_update(case: str) -> None:
    verify(updating())
    change, sentence = UNSAFE[case]
    with pytest.raises(Invalid) as caught:
        verify(updating(change))
    assert sentence in str(caught.value)


def test_an_alias_of_an_updated_input_may_be_read_before() -> None:
    graph = updating()
    graph.nodes.insert(1, Node(make("neg"), ("t",), ("n",), Origin()))
    graph.tensors["n"] = graph.tensors["t"]
    verify(graph)


def deep(layers: int) -> Graph:
    graph = Graph("deep")
    h = graph.input("x", Tensor((symbol("s0"), 64)))
    for layer in range(layers):
        w = graph.input(f"w{layer}", Tensor((64, 64)), Role.parameter)
        h = h + (h @ w.T * 0.5).unary("relu")
    graph.output(h)
    return graph


def calls(graph: Graph) -> int:
    """How many functions are called, and comprehensions run, in a verification; unlike its time, always the same."""
    with Profile(builtins=False) as profile:
        verify(graph)
    return sum(entry.callcount for entry in profile.getstats())


def test_is_linear_in_the_number_of_operators() -> None:
    graphs = deep(100), deep(400)
    verify(graphs[0])  # fills caches
    few, many = map(calls, graphs)
    assert len(graphs[1].nodes) == 2400 and many < 4.2 * few
