"""A session is saved as a pipeline and replayed, here, on another model, and by `optimize`; bad files are one error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.autodiff.partition import partition
from daceml_train.errors import Invalid
from daceml_train.exploration import Session
from daceml_train.graph import parse
from daceml_train.graph.text import show
from daceml_train.passes.pipeline import Step
from daceml_train.transformations.at_place import AtPlace
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise
from tests.exploration.models import batch, blocks, perceptron, session


def by_hand() -> Session:
    """One pass before differentiation, places by hand in both blocks, and a pass everywhere."""
    result = session()
    result.apply("fuse_softmax_cross_entropy")
    result.apply("decompose")
    for module in ("0", "1.norm", "1"):
        result.apply(result.matches(pass_="fuse_elementwise", module_path=module)[0])
    result.apply("simplify")
    result.apply(result.matches(pass_="fuse_siblings")[0], limit=12)
    return result


@pytest.mark.parametrize("ending", ["json", "txt", "py"])
def test_saved_and_replayed(ending: str, tmp_path: Path) -> None:
    result = by_hand()
    path = result.save(tmp_path / f"mine.{ending}")
    assert dt.Pipeline.of(path) == dt.Pipeline.of(str(path)) == result.pipeline()
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = dt.replay(path, model, *batch(), loss=F.cross_entropy, optimizer=optimizer)
    assert {p.name for p, _ in other.missed} <= {"at_place"}
    again = session().replay(path)
    assert not again.missed
    assert show(again.session.graph) == show(result.graph)
    assert [s.bytes for s in again.steps] == [s.bytes for s in result.history]
    assert again.session.pipeline() == result.pipeline()
    text = path.read_text()
    assert "%" not in text, "names of a graph's arrays"
    assert "limit=12" in text


def test_the_order_of_levels_is_kept() -> None:
    result = by_hand()
    assert [s.level for s in result.history][-2:] == ["intra_operator", "fusion"]
    assert [level for level, passes in result.pipeline().passes for _ in passes] == [
        "forward",
        "intra_operator",
        *["fusion"] * 5,
    ]


def test_the_python_form_can_be_imported(tmp_path: Path) -> None:
    result = by_hand()
    text = result.save(tmp_path / "mine.py").read_text()
    names: dict[str, object] = {}
    exec(compile(text, "mine.py", "exec"), names)
    assert names["PIPELINE"] == result.pipeline()


def test_on_another_model_what_does_not_match_is_listed(tmp_path: Path) -> None:
    path = by_hand().save(tmp_path / "mine.json")
    shorter = session(count=1)
    told = shorter.replay(path)
    reasons = [reason for _, reason in told.missed]
    assert [p.name for p, _ in told.missed] == ["at_place"] * len(reasons)
    assert "no operator belongs to module '1.norm'" in reasons
    elsewhere = AtPlace("fuse_elementwise()", "0", "tan, atan").missing(shorter.start.graph)
    assert re.fullmatch(
        r"fuse_elementwise finds no place at tan, atan in module '0', but \d+ at other operators", elsewhere
    )
    assert [s.name for s in told.steps][:3] == ["fuse_softmax_cross_entropy", "decompose", "fuse_elementwise"]
    assert "not applied: at_place" in str(told)
    longer = session(count=3).replay(path)
    assert longer.missed == ()
    replayed_late = shorter.replay(path)
    assert any("before differentiation" in reason for _, reason in replayed_late.missed)


def test_places_count_from_the_first() -> None:
    result = session()
    same = [m for m in result.matches(pass_="fuse_elementwise") if (m.module, m.operators) == ("1", "mul, mul")]
    anchored = [m.anchored for m in same]
    assert [p.options.get("occurrence", 0) for p in anchored] == list(range(len(same)))
    for match, place in zip(same, anchored, strict=True):
        assert show(place.run(result.graph)) == show(match.candidate.apply())
    beyond = AtPlace(**{**anchored[0].options, "occurrence": 99})
    assert "not 100" in beyond.missing(result.graph)


def test_places_keep_to_their_pass_where_it_is_a_graph_of_its_own() -> None:
    """`optimize` gives later levels the forward and the backward pass as two graphs, here with alike operators."""
    joint = parse("""graph g(x: f32[6, 6] input, g: f32[6, 6] cotangent) {
      %a = matmul(%x, %x)
      %b = exp(%a)
      %y = neg(%b)
      %s = mul(%g, %a)
      %c = exp(%s)
      %d = neg(%c)
      return %y, %d
    }""")
    halves = partition(joint, 1)
    matches = {m.arrays: m for m in FuseElementwise().matches(joint)}
    early, late = (AtPlace.of(joint, matches[pair]) for pair in (("b", "y"), ("c", "d")))
    assert early.operators == late.operators and (early.occurrence, late.occurrence) == (0, 0)
    assert (early.phase, late.phase) == ("forward", "backward")
    for place, own, other in ((early, halves.forward, halves.backward), (late, halves.backward, halves.forward)):
        assert len(place.run(own).nodes) == len(own.nodes) - 1
        assert place.run(other) is other
        assert len(place.run(joint).nodes) == len(joint.nodes) - 1
    assert "of the backward pass" in late.missing(halves.forward)
    with pytest.raises(Invalid, match="phase is one of forward, backward, update"):
        AtPlace(phase="sideways")


@pytest.mark.compiled
def test_a_saved_session_is_a_pipeline_for_compilation(tmp_path: Path) -> None:
    result = session(model=perceptron(), optimizer="sgd")
    result.apply(result.matches(pass_="fuse_elementwise", module_path="1")[0])
    result.apply(dt.TRAINING.without("forward"))
    path = result.save(tmp_path / "mine.json")
    eager, model = perceptron(), perceptron()
    model.load_state_dict(eager.state_dict())
    x, y = batch()
    steps: list[Step] = []
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (eager, model))
    step = dt.training_step(model, F.cross_entropy, ours, pipeline=path, pass_callback=steps.append)
    for _ in range(2):
        theirs.zero_grad()
        loss = F.cross_entropy(eager(x), y)
        loss.backward()
        theirs.step()
        assert torch.allclose(step(x, y), loss.detach(), rtol=1e-4)
    assert not step.breaks
    assert [s.matches for s in steps] == [s.matches for s in result.history]
    assert steps[-1].bytes_after == result.state.bytes
    drop_in = dt.optimize(eager, pipeline=path)
    with torch.no_grad():
        assert torch.allclose(drop_in(x), eager(x), rtol=1e-4, atol=1e-6)


CASES: dict[str, tuple[str, Callable[[str], str | bytes], str]] = {
    "truncated": ("json", lambda t: t[: len(t) // 2], "is not JSON"),
    "empty": ("json", lambda t: "", "is not JSON"),
    "binary": ("json", lambda t: b"\x80\x04\x95pickle\xff", "is not a text file"),
    "version": ("json", lambda t: t.replace('"version": 1', '"version": 2'), "version is 2, this package reads 1"),
    "no version": ("json", lambda t: t.replace('"version": 1,', ""), "version is None"),
    "format": ("json", lambda t: t.replace('"daceml_train pipeline"', '"a cake"'), "format is 'a cake'"),
    "unknown pass": ("json", lambda t: t.replace("decompose", "decomposed"), "did you mean 'decompose'"),
    "unknown inner pass": (
        "json",
        lambda t: t.replace("fuse_siblings", "fuse_sisters"),
        "no pass is named 'fuse_sist",
    ),
    "wrong type": (
        "json",
        lambda t: re.sub('"module": "[^"]*"', '"module": 1', t),
        "module of at_place is str, given 1",
    ),
    "negative": (
        "json",
        lambda t: re.sub('("module": "[^"]*")', r'\1, "occurrence": -1', t),
        "occurrence counts from 0",
    ),
    "nested place": ("json", lambda t: t.replace("fuse_siblings(limit=12)", "at_place()"), "cannot apply at_place"),
    "levels": (
        "json",
        lambda t: json.dumps({"format": "daceml_train pipeline", "version": 1, "levels": [1]}),
        "an object with a list per level",
    ),
    "more": ("json", lambda t: t.replace('"notes"', '"code"'), "has no entry 'code'"),
    "deep": ("json", lambda t: "[" * 100_000, "is not JSON"),
    "huge": ("json", lambda t: "x" * (5 << 20), "no pipeline is larger"),
    "no pass": ("json", lambda t: json.dumps({"fusion": [{"__reduce__": "os.system"}]}), "is not a pass"),
    "code in py": ("py", lambda t: t + "\nimport os\nos.system('true')\n", "is code"),
    "call in py": ("py", lambda t: t.replace("dt.Pipeline.parse(", "eval("), "is code"),
    "two in py": ("py", lambda t: t + t, "once, not 2 times"),
    "broken py": ("py", lambda t: t + "(", "is not Python source"),
    "call in text": (
        "txt",
        lambda t: t.replace("decompose()", "decompose(__import__('os').system('true'))"),
        "is not a pass",
    ),
    "option in text": (
        "txt",
        lambda t: t.replace("occurrence=1", "occurrence=open('x')").replace("limit=12", "limit=print()"),
        "is not a literal|is not a pass",
    ),
    "line in text": ("txt", lambda t: "hello\n" + t, "belongs to no level"),
}


@pytest.fixture(scope="module")
def kept() -> Session:
    torch.manual_seed(0)
    return by_hand()


@pytest.mark.parametrize("name", CASES)
def test_a_bad_file_is_one_error(name: str, kept: Session, tmp_path: Path) -> None:
    ending, spoil, message = CASES[name]
    path = kept.save(tmp_path / f"bad.{ending}")
    spoiled = spoil(path.read_text())
    path.write_bytes(spoiled if isinstance(spoiled, bytes) else spoiled.encode())
    before = show(kept.graph), kept.history, kept.version
    with pytest.raises(Invalid, match=message) as raised:
        kept.replay(path)
    assert len(str(raised.value)) < 600
    assert (show(kept.graph), kept.history, kept.version) == before


def test_files_that_are_not_there(kept: Session, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read"):
        kept.replay(tmp_path / "nothing.json")
    with pytest.raises(Invalid, match="saved as .json, .txt or .py"):
        kept.save(tmp_path / "mine.pkl")
    with pytest.raises(Invalid, match="cannot be written"):
        kept.save(tmp_path / "nowhere" / "mine.json")
