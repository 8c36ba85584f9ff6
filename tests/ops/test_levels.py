"""Levels of cells: types, text, what is refused, meaning, bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.sizes import bind, symbols_of
from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import canonical_text, parse, show
from daceml_train.ops.fallback import Body
from daceml_train.ops.levels import Levels
from daceml_train.ops.operator import make
from daceml_train.tensor import Tensor, evaluate
from tests.graph import levels
from tests.graph.levels import CHILD_SUM, TREE, Node

RNG = np.random.default_rng(0)
FORESTS = {
    "a tree": [levels.random_tree(RNG, 7)],
    "trees": [levels.random_tree(RNG, n) for n in (1, 5, 2, 9)],
    "a node": [Node()],
    "a chain": [levels.chain(40)],
}
DAGS = {
    "a dag": levels.random_dag(RNG, 30),
    "shared": [Node((shared := Node((Node(),)), shared)), Node((shared,))],
    "a node": [Node()],
    "no inner nodes": [Node(), Node()],
}


@pytest.mark.parametrize("make", [levels.tree, levels.child_sum])
def test_texts_read_back(make: Callable[[], Graph]) -> None:
    graph = make()
    verify(graph)
    assert show(parse(show(graph))) == show(graph)
    assert canonical_text(parse(canonical_text(graph))) == canonical_text(graph)


@pytest.mark.parametrize(
    ("name", "roots"),
    [("tree", roots) for roots in FORESTS.values()] + [("child_sum", roots) for roots in DAGS.values()],
    ids=[*FORESTS, *DAGS],
)
def test_meaning_is_recursion(name: str, roots: list[Node]) -> None:
    graph = getattr(levels, name)()
    result = levels.forest(name, roots)
    given = levels.inputs(name, result, RNG)
    expected = levels.eager(name, result, {n: torch.tensor(x) for n, x in given.items()})
    for value, reference in zip(interpret(graph, given).outputs, expected, strict=True):
        np.testing.assert_allclose(value, reference.numpy(), rtol=1e-12, atol=1e-14)


def test_empty_levels_and_unused_rows_are_zero() -> None:
    result = levels.forest("tree", [levels.random_tree(RNG, 5)])
    given = levels.inputs("tree", result, RNG)
    (expected,) = interpret(levels.tree(), given).outputs
    given["bounds"] = np.repeat(given["bounds"], 2, axis=0)
    given["x"] = np.concatenate([given["x"], np.ones((3, 3))])
    leaves = result.counts[0]
    for name in ("left", "right"):
        given[name] = np.append(np.where(given[name] < leaves, given[name], given[name] + 3), -1)
    (value,) = interpret(levels.tree(), given).outputs
    np.testing.assert_array_equal(value[:leaves], expected[:leaves])
    np.testing.assert_array_equal(value[leaves + 3 : -1], expected[leaves:])
    assert not value[leaves : leaves + 3].any() and not value[-1].any()
    given["bounds"] = given["bounds"][:1]
    assert not interpret(levels.tree(), given).outputs[0].any()


def test_bytes_and_operations_are_those_of_all_rows() -> None:
    sizes = {"levels": 4, "leaves": 5, "inner": 3}
    counted = traffic(levels.tree(), sizes)
    leaf = 4 * (5 * 3 + 3 * 4 + 5 * 4) + 2 * 4 * 5 * 4
    inner = 2 * 4 * 3 * 8 + 4 * (3 * 8 + 8 * 4 + 3 * 4) + 4 * (2 * 3 * 4 + 4) + 2 * 4 * 3 * 4
    assert counted.bytes == leaf + inner
    assert evaluate(traffic(levels.tree()).bytes, sizes) == leaf + inner
    tanh = make("tanh").flops(Tensor((1,)))
    assert counted.flops == 5 * 4 * (2 * 3 + tanh) + 3 * 4 * (2 * 8 + 1 + tanh)


def test_the_number_of_rows_in_a_body_is_its_own() -> None:
    (node,) = levels.tree().nodes
    assert {s.name for s in symbols_of(node.op)} == {"leaves", "inner"}
    assert bind(node.op, {"leaves": 2, "inner": 1}).counts == (2, 1)


REFUSALS = {
    "bounds i64[levels + 1, kinds] first, given i64[levels, 3]": TREE.replace("i64[levels, 2]", "i64[levels, 3]"),
    "kind 0 of levels has inner rows, its operand 1 is f32[leaves, 3]": TREE.replace(
        "(leaves, inner)", "(inner, inner)"
    ),
    "takes children as i64[inner], its operand 2 is f32[3, 4]": TREE.replace("((0, 3), (0, 4))", "((0, 2), (0, 4))"),
    "names state 1 of 1": TREE.replace("((0, 3), (0, 4))", "((1, 3), (0, 4))"),
    "reads operand 9, which is not in 1..6": TREE.replace("(5, 6)", "(5, 9)"),
    "2 kinds of cells, but shared for 1": TREE.replace("((2,), (5, 6))", "((2,),)"),
    "its states are f32[rows, 5]": TREE.replace("types=(f32[4],)", "types=(f32[5],)").replace(
        "f32[8, 4]", "f32[10, 4]"
    ),
    "kind 1 of levels returns f32[4], its states": TREE.replace("yield %h\n  }]", "yield %bias\n  }]"),
    "is not an array of rows rows": CHILD_SUM.replace("%gate0\n", "%f\n"),
    "no kind of levels computes state 1": TREE.replace("(f32[4],)", "(f32[4], f32[4])"),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_what_does_not_fit_is_refused(sentence: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse(REFUSALS[sentence])
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("bounds", lambda x: x[::-1], "not sorted"),
        ("bounds", lambda x: x * 2, "not sorted, or not in"),
        ("left", lambda x: x + 100, "of 9"),
        ("left", lambda x: np.full_like(x, 8), "which no earlier level computes"),
    ],
)
def test_bad_structure_is_refused(
    name: str,
    change: Callable[[np.ndarray], np.ndarray],
    sentence: str,  # type: ignore[type-arg]
) -> None:
    given = levels.inputs("tree", levels.forest("tree", [levels.random_tree(RNG, 5)]), RNG)
    given[name] = change(given[name])
    with pytest.raises(Invalid, match=sentence):
        interpret(levels.tree(), given)


def test_results_depend_on_the_operands_of_kinds_below() -> None:
    op = Levels(
        cells=(Body(("x", "w"), (), ("x",)), Body(("h",), (), ("h",)), Body(("h", "u"), (), ("h",))),
        types=(Tensor((4,)),),
        counts=(2, 3, 1),
        rows=((1,), (), ()),
        children=((), ((0, 2),), ((0, 3),)),
        shared=((4,), (), (5,)),
        states=((0,), (0,), ()),
    )
    assert op.read_for([0]) == {0, 1, 2, 4}
    assert op.read_for([1]) == {0, 1, 2, 3, 4, 5}
    assert op.read_for([]) == {0}
