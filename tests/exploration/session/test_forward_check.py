"""The first comparisons of a verification: what they cover, and that they find what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.exploration.session import forward_check
from daceml_train.exploration.session.forward_check import of_results
from daceml_train.exploration.session.progress import CheckProgress
from daceml_train.exploration.session.verification import Verification
from daceml_train.graph.graph import Graph
from daceml_train.ops.elementwise import Full
from daceml_train.passes.base import Pass
from tests.exploration.models import perceptron, session


@dataclass(frozen=True)
class _Loss(Pass):
    """A pass that is wrong: the loss is a hundredth too large, and nothing else changes."""

    level = "intra_operator"

    def run(self, graph: Graph) -> Graph:
        other = graph.copy()
        (factor,) = other.emit(Full(1.01, (), other.tensors[other.outputs[0]].dtype))
        other.outputs = [(other.value(other.outputs[0]) * factor).name, *other.outputs[1:]]
        return other


def partial(of: dt.Session) -> list[Verification]:
    """The first comparisons, without the complete one."""
    told: list[Verification] = []

    def progress(at: CheckProgress) -> None:
        if at.result is not None:
            told.append(at.result)

    of.verify(progress)
    return told


@pytest.mark.compiled
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("kind", ["module", "loss", "step"])
def test_first_comparisons_say_what_they_cover(kind: str, dropout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_check, "LARGE", 4)
    monkeypatch.setattr(forward_check, "FIRST", 3)
    model = nn.Sequential(nn.Linear(16, 10), nn.Dropout(0.3) if dropout else nn.ReLU(), nn.Linear(10, 10))
    of = session(kind, model=model, optimizer="sgd")
    before = {name: p.clone() for name, p in model.named_parameters()}
    first, forward, *_ = told = partial(of)
    assert all(told) and len(told) == (2 if dropout else 3)
    assert {check.kind for check in first.checks} == {"array"}
    assert "the operators' meaning in float32, the first 3 of" in first.reference
    assert {check.kind for check in forward.checks} == {"result"}
    exact = not dropout and kind != "module"
    assert forward.reference.startswith("PyTorch," if exact else "the captured graph in float32,")
    results = 1 if kind != "module" else len(of.graph.outputs) - 4
    complete = len(of.verify().checks)
    assert first.reference.endswith(f", 0 of {complete} tensors so far")
    assert forward.reference.endswith(f"by itself, {results} of {complete} tensors so far")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.compiled
@pytest.mark.parametrize("dropout", [False, True])
def test_a_wrong_result_is_found_first(dropout: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 10), nn.Dropout(0.3) if dropout else nn.ReLU(), nn.Linear(10, 10))
    of = session("loss", model=model, pipeline=dt.Pipeline(intra_operator=(_Loss(),)))
    forward = partial(of)[0]
    assert not forward and {(check.kind, check.name) for check in forward.checks} == {("result", "loss")}


@pytest.mark.compiled
def test_a_wrong_kernel_is_found_among_the_first_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_check, "LARGE", 4)
    run = forward_check.Program.run
    monkeypatch.setattr(forward_check.Program, "run", lambda self, given: [1.01 * one for one in run(self, given)])
    assert not partial(session("loss", model=perceptron()))[0]


@pytest.mark.parametrize("pipeline", [None, dt.TRAINING])
def test_the_forward_pass_is_a_part_of_the_step(pipeline: dt.Pipeline | None) -> None:
    graph = session(pipeline=pipeline).graph
    part = of_results(graph, 1)
    assert 0 < len(part.nodes) < len(graph.nodes) and part.outputs[0] == graph.outputs[0]
    assert all(any(node is other for other in graph.nodes) for node in part.nodes)
    given: set[str] = {*part.inputs, *(name for node in part.nodes for name in node.outputs)}
    assert {name for node in part.nodes for name in node.inputs} <= given
    assert pipeline or not any("exp_avg" in name for name in part.inputs)
    kernels: dict[Any, Any] = {node.outputs[0]: node for node in graph.nodes}
    assert all(set(node.outputs) == set(kernels[node.outputs[0]].outputs) for node in part.nodes)
