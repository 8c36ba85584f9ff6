from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph import Graph, parse, show
from daceml_train.graph.leaves import leaves
from daceml_train.ops.operator import Builder, Operator, Value
from daceml_train.tensor import Tensor


def test_composites_are_lowered_all_the_way(golden: object) -> None:
    graph = parse("""graph g(x: f32[4, s0] input) {
      %neg = neg(%x)
      %variance = variance(%neg, dims=(1,), correction=0)  # norm model.py:1
      %relu = relu(%variance)
      return %variance, %relu
    }""")
    lowered = leaves(graph)
    verify(lowered.graph)
    golden(show(lowered.graph))  # type: ignore[operator]
    assert not any(node.op.is_composite for node in lowered.graph.nodes)
    assert lowered.owners == [0] + [1] * (len(lowered.owners) - 2) + [2]
    assert lowered.names["neg"] == "neg"
    assert lowered.graph.outputs == [lowered.names["variance"], "relu"]
    assert show(graph) == show(parse(show(graph)))


def test_kept_composites_stay() -> None:
    graph = parse("graph g(x: f32[4] input) { %v = variance(%x, dims=(0,), correction=0) return %v }")
    labels = [node.op.label for node in leaves(graph, keep=["mean"]).graph.nodes]
    assert labels.count("mean") == 1
    assert "reduce.sum" in labels


def test_inner_names_do_not_collide() -> None:
    graph = parse("""graph g(x: f32[4] input) {
      %mean.sum = neg(%x)
      %mean = mean(%mean.sum, dims=(0,))
      return %mean
    }""")
    assert "mean.sum_1" in leaves(graph).graph.tensors


class Liar(Operator):
    label = "liar"

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return (Tensor((7,)),)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        return operands


def test_a_lowering_that_contradicts_its_shape_rule_is_refused() -> None:
    graph = Graph("g")
    graph.emit(Liar(), graph.input("x", Tensor((4,))))
    with pytest.raises(Invalid, match=r"%liar = liar\(%x\): the lowering has f32\[4\], the shape rule f32\[7\]"):
        leaves(graph)


def test_an_operator_without_a_meaning_is_named() -> None:
    class Empty(Operator):
        label = "empty_one"

    with pytest.raises(Invalid, match="empty_one has neither lower nor evaluate; define lower, of simpler operators"):
        Empty().evaluate()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: None, "lower of careless returns a sequence of values, and returned NoneType"),
        (lambda x: x, r"and returned Value; return \(value,\)"),
        (lambda x: (x, 1), r"and returned \['Value', 'int'\]"),
    ],
)
def test_a_lowering_that_returns_no_values_names_its_operator(returned: Callable[[Value], Any], message: str) -> None:
    class Careless(Operator):
        label = "careless"

        def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
            return operands

        def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
            return returned(operands[0])  # type: ignore[no-any-return]

    graph = Graph("g")
    graph.emit(Careless(), graph.input("x", Tensor((4,))))
    with pytest.raises(Invalid, match=message):
        leaves(graph)
