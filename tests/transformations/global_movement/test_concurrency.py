"""Concurrency: what the pass writes onto a graph, and what becomes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.lanes import Lanes
from daceml_train.graph.text import canonical_text, parse, parse_frame, show, show_frame
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import LaneRules
from daceml_train.runtime.encoding import decode, encode
from daceml_train.transformations.global_movement.common_subexpressions import CommonSubexpressions
from daceml_train.transformations.global_movement.concurrency import Concurrency
from daceml_train.transformations.pipelines import TRAINING

TWO = """
graph two(x: f32[64, 64] input, v: f32[64, 64] parameter "v", w: f32[64, 64] parameter "w") {
  %a: f32[64, 64] = matmul(%x, %v)
  %b: f32[64, 64] = matmul(%x, %w)
  return %a, %b
}
"""


def test_the_pass_writes_what_is_allowed() -> None:
    graph = parse(TWO)
    found = Concurrency(lanes=2, memory=1.5, threads=(("a", 1),), alone=("b",)).run(graph)
    assert graph.lanes is None and found.lanes == Lanes(2, 1.5, (("a", 1),), ("b",))
    assert found.applied == graph.applied + 1 and found.nodes == graph.nodes
    assert Concurrency(lanes=2, memory=1.5, threads=(("a", 1),), alone=("b",)).run(found) is found
    assert CommonSubexpressions().run(found).lanes == found.lanes, "later passes keep it"


def test_texts_keep_it() -> None:
    found = Concurrency(lanes=3, threads=(("a", 1), ("b", 2)), alone=("b",)).run(parse(TWO))
    assert '  lanes (3, 1.1, (("a", 1), ("b", 2)), ("b",))' in show(found)
    assert parse(show(found)).lanes == found.lanes
    assert parse_frame(show_frame(found)).lanes == found.lanes
    assert canonical_text(found) != canonical_text(parse(TWO))
    with pytest.raises(Invalid, match="%c is not defined"):
        parse(show(found).replace('("b",))', '("c",))'))


def test_launches_get_the_rules_of_their_operators() -> None:
    found = lower(Concurrency(lanes=2, threads=(("b", 1),), alone=("a",)).run(parse(TWO)))
    assert found.rules == LaneRules(2, 1.1, ((1, 1),), (0,))
    assert lower(parse(TWO)).rules is None
    assert decode(encode(found)).rules == found.rules
    assert all(isinstance(code, KernelCode) for code in found.codes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lanes": -1}, "lanes is at least 0"),
        ({"memory": 0.5}, "memory at least 1"),
        ({"threads": (("a", 0),)}, "a number of threads at least 1"),
        ({"alone": "a"}, "option alone of concurrency"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        Concurrency(**options)


def test_an_array_that_no_operator_produces_is_named() -> None:
    with pytest.raises(Invalid, match="concurrency names 'c', which no operator of graph 'two' produces"):
        Concurrency(alone=("c",)).run(parse(TWO))


def test_renamed_arrays_keep_their_rules() -> None:
    graph, other = Concurrency(threads=(("a", 1),), alone=("b",)).run(parse(TWO)), Graph("other")
    assert graph.finish(other, {"a": "c"}).lanes == Lanes(threads=(("c", 1),), alone=("b",))


@pytest.mark.compiled
def test_a_session_pins_threads_and_forbids_lanes_and_a_replay_repeats_it(tmp_path: Path) -> None:
    def session() -> dt.Session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(32, 64), torch.randn(32, 8)
        return dt.Session(model, *data, loss=F.mse_loss, optimizer=optimizer)

    first = session()
    first.apply(TRAINING)
    name = next(node.outputs[0] for node in first.graph.nodes if node.op.label == "matmul")
    before = first.graph.lanes
    step = first.apply(Concurrency(threads=((name, 1),), alone=(name,)))
    assert step.matches == 1 and before == Lanes()
    assert first.graph.lanes == Lanes(threads=((name, 1),), alone=(name,))
    first.undo()
    assert first.graph.lanes == before
    first.redo()
    again = session()
    assert not again.replay(first.save(tmp_path / "steps.json")).missed
    assert again.graph.lanes == first.graph.lanes
    assert lower(again.graph).rules == lower(first.graph).rules != LaneRules()
    assert again.verify().ok
