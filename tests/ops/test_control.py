"""Branches and loops: types, text, what is refused, meaning, bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import canonical_text, parse, show
from tests.graph import control_flow
from tests.graph.control_flow import BRANCH, LOOP, UNTIL

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("make", control_flow.ALL)
def test_texts_read_back(make: Callable[[], Graph]) -> None:
    graph = make()
    verify(graph)
    assert show(parse(show(graph))) == show(graph)
    assert canonical_text(parse(canonical_text(graph))) == canonical_text(graph)


@pytest.mark.parametrize("holds", [True, False])
def test_one_branch_runs(holds: bool) -> None:
    x, w = RNG.normal(size=(3, 4)), RNG.normal(size=(4, 4))
    (y,) = interpret(control_flow.branch(), {"c": np.array(holds), "x": x, "w": w}).outputs
    np.testing.assert_allclose(y, np.tanh(x @ w) if holds else np.sin(x))


@pytest.mark.parametrize("steps", [1, 4])
def test_a_loop_carries_and_stacks(steps: int) -> None:
    h, x, w = RNG.normal(size=(3, 4)), RNG.normal(size=(steps, 3, 4)), RNG.normal(size=(4, 4))
    last, stack = interpret(control_flow.loop(), {"h": h, "x": x, "w": w}).outputs
    rows = []
    for a in x:
        h = np.tanh(h @ w + a)
        rows.append(h * a)
    np.testing.assert_allclose(last, h)
    np.testing.assert_allclose(stack, np.stack(rows))


def test_a_loop_of_no_steps_gives_its_first_states() -> None:
    graph = parse(LOOP.replace("s0", "0"))
    h = RNG.normal(size=(3, 4))
    last, stack = interpret(graph, {"h": h, "x": np.zeros((0, 3, 4)), "w": np.zeros((4, 4))}).outputs
    np.testing.assert_array_equal(last, h)
    assert stack.shape == (0, 3, 4)


def test_a_loop_on_a_condition() -> None:
    h, w = RNG.normal(size=(3, 4)), RNG.normal(size=(4, 4))
    given = {"i": np.array(0), "h": h, "n": np.array(3), "w": w}
    count, last = interpret(control_flow.until(), given).outputs
    assert count == 3
    np.testing.assert_allclose(last, np.tanh(np.tanh(np.tanh(h @ w) @ w) @ w))


def test_bytes_of_bodies_count() -> None:
    branch, loop = control_flow.branch(), control_flow.loop()
    dearer = 4 * (12 + 16 + 12) + 4 * (12 + 12)
    assert traffic(branch).bytes == dearer  # the product, then its tanh
    step = 4 * (12 + 16 + 12) + 3 * 4 * 24 + 2 * 4 * 6 * 2
    assert traffic(loop, {"s0": 7}).bytes == 7 * step
    assert traffic(loop).bytes.subs("s0", 7) != 0


REFUSALS = {
    "one branch of cond returns": BRANCH.replace("yield %s", "yield %s, %s"),
    "a 0-d boolean first": BRANCH.replace("c: b1[]", "c: f32[]"),
    "which nothing before it produces": BRANCH.replace("sin(%a)", "sin(%z)"),
    "which it does not produce": BRANCH.replace("yield %s", "yield %z"),
    "takes 2 values, given 1": BRANCH.replace("cond(%c, %x, %w", "cond(%c, %x"),
    "arrays with as many slices": LOOP.replace("trips=s0", "trips=3"),
    "scan carries f32": LOOP.replace("yield %r, %q", "yield %b, %q"),
    "not a 0-d boolean": UNTIL.replace("yield %more", "yield %i"),
    "while carries i64": UNTIL.replace("yield %next, %t", "yield %t, %next"),
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_what_does_not_fit_is_refused(sentence: str) -> None:
    with pytest.raises(Invalid, match=sentence.replace("(", r"\(")):
        parse(REFUSALS[sentence])
