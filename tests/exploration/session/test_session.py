"""A session lists, previews, applies, undoes; what fails leaves it as it was."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.analysis.traffic import traffic
from daceml_train.errors import Invalid, Refused, Unsupported
from daceml_train.exploration import Session
from daceml_train.exploration.session.listing import every_pass
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import show
from daceml_train.passes.base import Measured, Pass
from daceml_train.transformations.forward.cross_entropy import FuseSoftmaxCrossEntropy
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise
from tests.exploration.models import session


def picture(session: Session) -> tuple[object, ...]:
    """All that a failure must leave as it was."""
    return show(session.graph), session.history, session.undone, session.version


@pytest.mark.parametrize("kind", ["step", "loss", "module"])
def test_it_begins_with_the_training_graph(kind: str) -> None:
    result = session(kind)
    labels = {node.op.label for node in result.graph.nodes}
    assert ("adam_update" in labels) == (kind == "step")
    assert ("nll_loss" in labels) == (kind != "module")
    assert not result.history
    outputs = result.subject.labels
    assert len(outputs) == len(result.graph.outputs)
    assert (kind == "step") != ("gradient of 1.fc.weight" in outputs)


def test_nodes_say_which_module_they_belong_to() -> None:
    result = session("step", pipeline=dt.TRAINING)
    silent = [str(n) for n in result.graph.nodes if not n.origin.module and n.op.label not in ("full", "view", "iota")]
    outside = [text for text in silent if "nll" not in text and "loss" not in text]
    assert len(outside) <= 3, outside
    assert {"0.norm", "0.fc", "1.norm", "2"} <= {n.origin.module for n in result.graph.nodes}


def test_matches_are_ranked_by_bytes_and_keep_their_promise() -> None:
    result = session()
    found = result.matches(pass_=FuseElementwise)
    sizes = [m.bytes for m in found]
    assert all(size is not None for size in sizes)
    assert sizes == sorted(sizes, key=lambda b: b or 0)
    before = int(traffic(result.graph).bytes)
    step = result.apply(found[0])
    assert step.bytes == (before, int(traffic(result.graph).bytes))
    assert step.bytes[1] - step.bytes[0] == sizes[0]
    assert (step.module, step.source != "") == (found[0].module, True)


def test_matches_are_filtered() -> None:
    result = session()
    every = result.matches()
    assert {m.refusal for m in every} == {None}
    assert [m.bytes is None for m in every] == sorted(m.bytes is None for m in every)
    inside = result.matches(module_path="1")
    assert inside
    assert all(any(n.origin.module.split(".")[0] == "1" for n in m.nodes) for m in inside)
    array = inside[0].arrays[0]
    assert all(array in m.arrays for m in result.matches(selection=[array]))
    refused = result.matches(pass_="fuse_elementwise", refused=True)
    assert any(m.refusal for m in refused)
    assert [m.refusal is not None for m in refused] == sorted(m.refusal is not None for m in refused)
    assert result.matches(pass_="fuse_elementwise(limit=1)") == []
    assert result.matches(module_path="nowhere") == []
    for options, message in (
        ({"module_path": 1}, "module_path is the path of a module as a text, given 1"),
        ({"selection": array}, "selection is a collection of names of arrays, given"),
        ({"selection": 3}, "selection is a collection of names of arrays, given 3"),
        ({"selection": [[1]]}, "selection is a collection of names of arrays, given"),
    ):
        with pytest.raises(dt.Invalid, match=message):
            result.matches(**options)


def test_a_preview_changes_nothing() -> None:
    result = session()
    match = result.matches(pass_="fuse_elementwise")[0]
    before = picture(result)
    told = result.preview(match)
    assert picture(result) == before
    assert told.reason is None
    assert told.removed
    assert told.added
    assert match.where.split()[0][1:] in {name for node in told.removed for name in node.outputs}
    step = result.apply(match)
    assert (told.bytes, told.peak, told.flops) == (step.bytes, step.peak, step.flops)


def test_options_can_be_edited_before_applying() -> None:
    result = session()
    match = result.matches(pass_="fuse_elementwise")[0]
    assert "limit" in (result.preview(match, limit=1).reason or "") or result.preview(match, limit=1).reason
    assert "did you mean 'limit'" in (result.preview(match, limits=1).reason or "")
    assert "fuse_elementwise" in str(result.preview("fuse_elementwise", limit="8"))
    step = result.apply(match, limit=2)
    assert step.transformation == FuseElementwise(limit=2)


def test_undo_redo_jump() -> None:
    result = session()
    start = show(result.graph)
    texts = [start]
    for _ in range(3):
        result.apply(result.matches(pass_="fuse_elementwise")[0])
        texts.append(show(result.graph))
    assert [s.number for s in result.history] == [1, 2, 3]
    assert result.undo() is result.undone[0]
    assert show(result.graph) == texts[2]
    result.jump(0)
    assert (show(result.graph), len(result.undone)) == (start, 3)
    result.jump(3)
    assert show(result.graph) == texts[3]
    result.jump(1)
    result.redo()
    assert show(result.graph) == texts[2]
    result.apply("decompose")
    assert [s.name for s in result.history] == ["fuse_elementwise", "fuse_elementwise", "decompose"]
    assert not result.undone
    for wrong in (-1, 4, True, "1"):
        with pytest.raises(Invalid, match="there is no step"):
            result.jump(wrong)  # type: ignore[arg-type]
    result.jump(0)
    with pytest.raises(Invalid, match="nothing to undo"):
        result.undo()
    result.jump(3)
    with pytest.raises(Invalid, match="nothing to redo"):
        result.redo()


def test_a_stale_match_names_what_changed() -> None:
    result = session()
    first, second = result.matches(pass_="fuse_elementwise")[:2]
    result.apply(first)
    before = picture(result)
    with pytest.raises(Invalid, match=r"out of date: since it was found, step 1 \(fuse_elementwise at %.*\) changed"):
        result.apply(second)
    assert "out of date" in (result.preview(second).reason or "")
    assert picture(result) == before
    result.undo()
    result.apply(second)
    third = result.matches(pass_="fuse_elementwise")[0]
    result.undo()
    with pytest.raises(Invalid, match="found after step 1, and the session is now at step 0"):
        result.apply(third)
    result.apply("common_subexpressions")
    with pytest.raises(Invalid, match="no longer in the history"):
        result.apply(third)


def test_passes_before_differentiation_come_first() -> None:
    result = session("loss")
    match = result.matches(pass_=FuseSoftmaxCrossEntropy)[0]
    result.apply(match)
    assert {"nll_loss", "log_softmax"}.isdisjoint(n.op.label for n in result.graph.nodes)
    result.undo()
    result.apply("fuse_elementwise")
    assert result.matches(pass_=FuseSoftmaxCrossEntropy) == []
    before = picture(result)
    with pytest.raises(Refused, match="before differentiation, and a later pass was applied already; undo that first"):
        result.apply(FuseSoftmaxCrossEntropy)
    assert picture(result) == before


def test_a_pipeline_is_a_step_per_pass() -> None:
    result = session(pipeline=dt.TRAINING)
    assert [str(s.transformation) for s in result.history] == [str(p) for p in dt.TRAINING]
    assert result.pipeline() == dt.TRAINING
    assert result.state.bytes < result.start.bytes
    other = session()
    other.apply(dt.TRAINING)
    assert other.state.totals == result.state.totals


def test_a_failing_pass_leaves_the_session_as_it_was() -> None:
    @dataclass(frozen=True)
    class Explodes(Pass):
        level = "fusion"
        broken: bool = False

        def run(self, graph: Graph) -> Graph:
            if not self.broken:
                raise ZeroDivisionError("boom")
            other = graph.copy()
            other.nodes = other.nodes[1:]
            return other

    result = session()
    result.apply("common_subexpressions")
    before = picture(result)
    with pytest.raises(Refused, match="raised ZeroDivisionError: boom"):
        result.apply(Explodes())
    assert result.preview(Explodes()).reason == "explodes() raised ZeroDivisionError: boom"
    with pytest.raises(Invalid):
        result.apply(Explodes(broken=True))
    with pytest.raises(Refused, match="boom"):
        result.apply(dt.TRAINING.without("forward").after("fuse_epilogue", Explodes()))
    with pytest.raises(Refused, match="changes nothing"):
        result.apply("common_subexpressions")
    with pytest.raises(Invalid, match="no pass is named 'fuse_elementwize', did you mean"):
        result.apply("fuse_elementwize")
    with pytest.raises(Invalid, match="expected a match, a pass or its name, given int"):
        result.apply(3)  # type: ignore[arg-type]
    assert picture(result) == before


def test_steps_by_hand_become_a_pipeline() -> None:
    result = session()
    for _ in range(4):
        result.apply(result.matches(pass_="fuse_elementwise")[0])
    result.apply("simplify")
    pipeline = result.pipeline()
    assert [p.name for p in pipeline] == ["at_place"] * 4 + ["simplify"]
    assert dt.Pipeline.from_json(pipeline.to_json()) == pipeline == dt.Pipeline.parse(str(pipeline))
    again = session()
    again.apply(pipeline)
    assert show(again.graph) == show(result.graph)


def test_a_pass_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Stumbles(Pass):
        level = "fusion"
        late: bool = False

        def run(self, graph: Graph) -> Graph:
            if not self.late:
                raise KeyError("x")
            other = graph.copy()
            other.outputs = ["nowhere"]
            return other

    result = session()
    monkeypatch.setattr(
        "daceml_train.exploration.session.history.every_pass",
        lambda: iter((Stumbles(), Stumbles(late=True), FuseElementwise())),
    )
    assert {m.name for m in result.matches()} == {"fuse_elementwise"}
    assert result.failing == {"stumbles": "KeyError: 'x'"}
    (broken,) = [m for m in result.matches(refused=True) if m.name == "stumbles"]
    assert "the pass fails here: KeyError" in (broken.refusal or "")
    with pytest.raises(Refused, match="fails: KeyError"):
        result.matches(pass_=Stumbles())


def test_listing_applies_few_passes_however_large_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that need a pass applied per match are left to previews where that would take quadratic time."""
    output = session(count=14)
    applied: list[int] = []
    result = Measured.after.func  # type: ignore[attr-defined]
    monkeypatch.setattr(Measured, "after", property(lambda self: applied.append(1) or result(self)))
    found = output.matches(refused=True)
    assert len(found) > 300
    assert len(applied) <= len(list(every_pass()))
    unknown = next(m for m in found if m.bytes is None and m.refusal is None)
    told = output.preview(unknown)
    assert told.reason is None
    assert told.bytes[0] == output.state.bytes


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_what_cannot_be_explored() -> None:
    with pytest.raises(Invalid, match=r"takes a torch.nn.Module, given int"):
        Session(3)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="not one graph"):
        Session(Branching(), torch.ones(3))
    with pytest.raises(Invalid, match="no parameter of ReLU requires a gradient"):
        Session(nn.ReLU(), torch.ones(3), loss=lambda y: y.sum())


def test_a_step_is_left_out() -> None:
    result = session("module", count=1)
    result.apply(dt.Pipeline.parse("intra_operator: decompose, bucket\nfusion: fuse_elementwise, fuse_siblings"))
    replayed = result.leave_out(1)
    assert [step.name for step in result.history] == ["bucket", "fuse_elementwise", "fuse_siblings"]
    assert [step.number for step in result.history] == [1, 2, 3]
    assert replayed.steps == result.history and not replayed.missed
    result.leave_out(3)
    assert result.redo().name == "fuse_siblings"  # nothing followed it
    for number in (0, 4, True, "1"):
        with pytest.raises(Invalid, match="to leave out"):
            result.leave_out(number)  # type: ignore[arg-type]
