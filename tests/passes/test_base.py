import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import daceml_train as dt
from daceml_train.errors import PassFailed, Refused
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.operator import Origin, Value
from daceml_train.passes.base import Match, Pass, Rewrite, Uses, checked, without_dead_code
from daceml_train.passes.pipeline import Pipeline
from daceml_train.tensor import DType, Tensor
from tests.transformations.checking import program


@dataclass(frozen=True)
class SquareProducts(Rewrite):
    """x -> [mul x] -> y     =>     x -> [square] -> y"""

    level = "intra_operator"
    spare: str = ""

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        return {"x": node.inputs[0]} if node.op.label == "mul" and node.inputs[0] == node.inputs[1] else None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        yield match.bindings["x"] != self.spare, f"%{self.spare} is to be left alone"
        yield match.uses.only_reader(match.bindings["x"], match.root), "another reader"

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        return (values[match.bindings["x"]].unary("square"),)


@dataclass(frozen=True)
class Break(Pass):
    """Makes a graph that returns what does not exist."""

    level = "fusion"

    def run(self, graph: Graph) -> Graph:
        other = graph.copy()
        other.outputs = ["nowhere"]
        return other


CHAIN = "%a = mul(%x, %x)\n%b = mul(%a, %a)\n%c = mul(%b, %b)"


def test_all_matches_of_a_sweep() -> None:
    graph = program("x: f32[4]", CHAIN, "%c")
    after = SquareProducts().run(graph)
    assert [str(node) for node in after.nodes] == [
        "%square = square(%x)",
        "%square_1 = square(%square)",
        "%square_2 = square(%square_1)",
    ]
    assert [node.op.label for node in graph.nodes] == ["mul"] * 3
    assert SquareProducts().run(after) is after


def test_one_match() -> None:
    graph = program("x: f32[4]", CHAIN, "%c")
    second = SquareProducts().matches(graph)[1]
    assert [node.op.label for node in second.apply().nodes] == ["mul", "square", "mul"]
    assert second.traffic == 0


def test_refusal() -> None:
    graph = program("x: f32[4]", "")
    with graph.at(Origin("net", "model.py:3")):
        graph.output(graph.value("x") * graph.value("x"))
    (match,) = SquareProducts(spare="x").matches(graph)
    assert match.refusal == "%x is to be left alone"
    with pytest.raises(Refused, match=r"square_products at %mul = mul\(%x, %x\): %x is to be left alone \(at net mod"):
        match.apply()


def test_origins_and_names_stay() -> None:
    graph = Graph()
    x = graph.input("x", Tensor((4,)))
    with graph.at(Origin("net", "model.py:3")):
        y = x * x
    graph.output(y.unary("exp"))
    after = SquareProducts().run(graph)
    assert [(str(node), str(node.origin)) for node in after.nodes] == [
        ("%square = square(%x)", "net model.py:3"),
        ("%exp = exp(%square)", ""),
    ]


def test_readers() -> None:
    graph = program("x: f32[4]", CHAIN + "\n%d = neg(%a)", "%b, %c, %d")
    uses = Uses.of(graph)
    nodes = dict(zip("abcd", graph.nodes, strict=True))
    assert uses.only_reader("x", nodes["a"])
    assert not uses.only_reader("x", nodes["b"])
    assert not uses.only_reader("a", nodes["b"])  # d reads it too
    assert not uses.only_reader("b", nodes["c"])  # it is an output
    assert uses.bytes("a", "b") == 32


def test_dead_code() -> None:
    graph = program("x: f32[4]", CHAIN + "\n%d = neg(%a)", "%b")
    alive = without_dead_code(graph)
    assert sorted(alive.tensors) == ["a", "b", "x"]
    assert len(graph.nodes) == 4


def test_text() -> None:
    assert str(SquareProducts()) == "square_products()"
    assert str(SquareProducts(spare="x")) == "square_products(spare='x')"
    assert SquareProducts(spare="x") == SquareProducts(spare="x") != SquareProducts()


@dataclass(frozen=True)
class Wrong(Pass):
    """A pass that does something else than to return a graph like the one that it is given."""

    level = "fusion"
    how: str = "raises"

    def run(self, graph: Graph) -> Graph:
        other = graph.copy()
        match self.how:
            case "raises":
                raise ZeroDivisionError("oops")
            case "nothing":
                return None  # type: ignore[return-value]
            case "empty":
                return Graph()
            case "fewer results":
                other.outputs = []
            case "another type":
                other.outputs = [other.value("c").cast(DType.float64).name]
        return other


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    with pytest.raises(PassFailed, match=r"the pass break\(\): .*returns %nowhere, which does not exist"):
        checked(Break(), program("x: f32[4]", CHAIN, "%c"))


WRONG = [
    ("raises", "raised ZeroDivisionError: oops"),
    ("nothing", "it returns a graph, and returned NoneType"),
    ("empty", "keeps the inputs of a graph: "),
    ("fewer results", "keeps the outputs of a graph: f32[4] before it, none after it"),
    ("another type", "keeps the outputs of a graph: f32[4] before it, f64[4] after it"),
]


@pytest.mark.parametrize(("how", "message"), WRONG)
def test_a_pass_keeps_the_signature(how: str, message: str) -> None:
    wrong = Wrong(how)
    with pytest.raises(PassFailed, match=re.escape(f"the pass {wrong}") + ".*" + re.escape(message)):
        Pipeline(fusion=(wrong,)).run(program("x: f32[4]", CHAIN, "%c"))


@dataclass(frozen=True)
class Forgets(SquareProducts):
    """Returns no replacement."""

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        return ()


def test_a_rewrite_without_a_replacement_is_named() -> None:
    message = r"the pass forgets\(\): emit returned 0 values for the 1 results of %a = mul\(%x, %x\)"
    with pytest.raises(PassFailed, match=message):
        Pipeline(fusion=(Forgets(),)).run(program("x: f32[4]", CHAIN, "%c"))


@pytest.mark.parametrize("how", ["raises", "nothing", "empty"])
def test_modules_and_sessions_name_a_pass_that_fails(how: str) -> None:
    """PyTorch runs the graph of a module, and the warning names the pass."""
    wrong, model, x = Wrong(how), torch.nn.Linear(2, 2), torch.ones(3, 2)
    module = dt.optimize(model, pipeline=dt.TRAINING.after("fusion", wrong))
    with pytest.warns(UserWarning, match=r"runs a graph as PyTorch does: the pass wrong\("):
        torch.testing.assert_close(module(x), model(x))
    with pytest.raises((PassFailed, Refused), match=r"wrong\("):
        dt.Session(model, x).apply(wrong)
