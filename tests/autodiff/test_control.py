"""Derivatives of branches and loops, against finite differences of the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.verify import verify
from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Unsupported
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse, show
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.control import Scan
from daceml_train.ops.reduction import Reduce
from tests.graph import control_flow
from tests.graph.control_flow import LOOP, RECURRENT

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.normal(size=shape)


CASES: dict[str, tuple[Callable[[], Graph], dict[str, Any]]] = {
    "then": (control_flow.branch, {"c": np.array(True), "x": normal(3, 4), "w": normal(4, 4)}),
    "else": (control_flow.branch, {"c": np.array(False), "x": normal(3, 4), "w": normal(4, 4)}),
    "loop": (control_flow.loop, {"h": normal(3, 4), "x": normal(5, 3, 4), "w": normal(4, 4)}),
    "one step": (control_flow.loop, {"h": normal(3, 4), "x": normal(1, 3, 4), "w": normal(4, 4)}),
    "recurrent": (
        control_flow.recurrent,
        {"h": normal(2, 4), "x": normal(5, 2, 3), "wi": normal(4, 3), "wh": normal(4, 4), "b": normal(4)},
    ),
    "nested": (
        control_flow.nested,
        {"h": normal(4), "x": normal(5, 4), "limit": np.array(0.1), "w": normal(4)},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("outputs", ["all", "first", "last"])
def test_derivatives_are_those_of_finite_differences(name: str, outputs: str) -> None:
    make, given = CASES[name]
    graph = make()
    of = {"all": graph.outputs, "first": graph.outputs[:1], "last": graph.outputs[-1:]}[outputs]
    joint = graph.copy()
    seeds = {o: joint.input(f"grad_{o}", graph.tensors[o]) for o in of}
    wrt = [n for n, x in given.items() if x.dtype.kind == "f" and n != "limit"]
    found = differentiate(joint, seeds, wrt)
    joint.output(*(g for g in found.values() if g is not None))
    verify(joint)
    assert show(parse(show(joint))) == show(joint)
    base = dict(zip(graph.outputs, interpret(graph, given).outputs, strict=True))
    weights = {o: normal(*base[o].shape) for o in of}
    results = interpret(joint, {**given, **{f"grad_{o}": v for o, v in weights.items()}}).outputs[len(graph.outputs) :]

    def loss(values: dict[str, Any]) -> float:
        results = dict(zip(graph.outputs, interpret(graph, values).outputs, strict=True))
        return float(sum((results[o] * weights[o]).sum() for o in of))

    for n, gradient in zip((n for n in wrt if found[n] is not None), results, strict=True):
        along = normal(*given[n].shape)
        slope = (loss({**given, n: given[n] + 1e-6 * along}) - loss({**given, n: given[n] - 1e-6 * along})) / 2e-6
        np.testing.assert_allclose((gradient * along).sum(), slope, rtol=1e-5, atol=1e-7)


def test_no_gradient_is_built_that_nobody_asked_for() -> None:
    graph = control_flow.loop()
    joint = graph.copy()
    found = differentiate(joint, {"last": joint.input("g", graph.tensors["last"])}, ["h"])
    (backward,) = (n for n in joint.nodes[1:] if isinstance(n.op, Scan))
    assert found["h"] is not None and found["h"].name in backward.outputs
    assert len(backward.outputs) == 1
    assert backward.op.reverse


def test_gradients_of_parameters_are_matmuls_of_the_rows_of_all_steps() -> None:
    graph = control_flow.recurrent()
    found = differentiate(graph, {"last": graph.input("g", graph.tensors["last"])}, ["wi", "wh", "b"])
    backward = graph.nodes[1]
    assert isinstance(backward.op, Scan) and backward.op.carried == 1, "the state's cotangent, and no sums"
    assert len(backward.outputs) == 2, "what is stacked is stacked once for all three"
    outside = [node.op for node in graph.nodes[2:]]
    assert sum(isinstance(op, Matmul) for op in outside) == 2
    assert sum(isinstance(op, Reduce) for op in outside) == 1
    assert all(found.values())


def test_a_sum_that_is_smaller_than_what_would_be_stacked_stays_in_the_loop() -> None:
    graph = parse(RECURRENT.replace("[2, ", "[9, ").replace("s0, 2,", "s0, 9,"))
    differentiate(graph, {"last": graph.input("g", graph.tensors["last"])}, ["wi", "wh", "b"])
    (backward,) = (node.op for node in graph.nodes[1:] if isinstance(node.op, Scan))
    assert backward.carried == 4


def test_only_states_that_are_read_are_kept() -> None:
    graph = parse(LOOP.replace("%m = matmul(%c, %b)", "%z = matmul(%a, %b)\n    %m = add(%c, %z)"))
    joint = graph.copy()
    differentiate(joint, {"last": joint.input("g", graph.tensors["last"])}, ["w"])
    assert len(joint.nodes[0].outputs) == 3  # tanh's argument depends on the state
    linear = parse(LOOP.replace("tanh(%n)", "neg(%n)"))
    joint = linear.copy()
    differentiate(joint, {"last": joint.input("g", graph.tensors["last"])}, ["h"])
    assert len(joint.nodes[0].outputs) == 2


def test_a_loop_on_a_condition_has_no_derivative() -> None:
    graph = control_flow.until()
    with pytest.raises(Unsupported, match="whose number of steps depends on data"):
        differentiate(graph, {"last": graph.input("g", graph.tensors["last"])}, ["w"])


def test_what_is_asked_for_but_not_reached_is_zero() -> None:
    graph = parse(LOOP.replace("%n = add(%m, %a)", "%n = sign(%m)"))
    joint = graph.copy()
    found = differentiate(joint, {"last": joint.input("g", graph.tensors["last"])}, ["w"])
    joint.output(*(g for g in found.values() if g is not None))
    given = {"h": normal(3, 4), "x": normal(2, 3, 4), "w": normal(4, 4), "g": normal(3, 4)}
    assert not interpret(joint, given).outputs[-1].any()
