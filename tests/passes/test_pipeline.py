import dataclasses

import pytest

from daceml_train.errors import Invalid
from daceml_train.passes.base import LEVELS
from daceml_train.passes.pipeline import Pipeline, Step
from daceml_train.transformations.global_movement.common_subexpressions import CommonSubexpressions
from daceml_train.transformations.global_movement.dead_code import DeadCode
from daceml_train.transformations.intra_operator.decompose import Decompose
from daceml_train.transformations.intra_operator.fold_constants import FoldConstants
from daceml_train.transformations.intra_operator.simplify import Simplify
from tests.passes.test_base import Break
from tests.transformations.checking import program

SMALL = Pipeline(intra_operator=(Decompose(), Simplify()), global_movement=(DeadCode(),))


def names(pipeline: Pipeline, level: str = "intra_operator") -> list[str]:
    return [p.name for p in pipeline.level(level)]


def test_text() -> None:
    pipeline = SMALL.with_options(Decompose, keep=("softmax",))
    assert str(pipeline).splitlines() == [
        "forward:",
        "distribution:",
        "intra_operator: decompose(keep=('softmax',)), simplify()",
        "fusion:",
        "layout:",
        "global_movement: dead_code()",
    ]


def test_edits() -> None:
    assert names(SMALL.after("intra_operator", CommonSubexpressions())) == [
        "decompose",
        "simplify",
        "common_subexpressions",
    ]
    assert names(SMALL.before("intra_operator", CommonSubexpressions())) == [
        "common_subexpressions",
        "decompose",
        "simplify",
    ]
    assert names(SMALL.after(Decompose, CommonSubexpressions(), DeadCode())) == [
        "decompose",
        "common_subexpressions",
        "dead_code",
        "simplify",
    ]
    assert names(SMALL.before(Simplify, CommonSubexpressions())) == ["decompose", "common_subexpressions", "simplify"]
    assert names(SMALL.replace(Simplify, CommonSubexpressions(), FoldConstants())) == [
        "decompose",
        "common_subexpressions",
        "fold_constants",
    ]
    assert names(SMALL.without(Simplify)) == ["decompose"]
    assert names(SMALL.without(Simplify, Decompose)) == []
    assert names(SMALL.only(Simplify)) == ["simplify"]
    assert names(SMALL.only(Simplify), "global_movement") == []
    assert names(SMALL.after("fusion", CommonSubexpressions()), "fusion") == ["common_subexpressions"]


def test_edits_give_new_values() -> None:
    before = str(SMALL)
    SMALL.after("fusion", CommonSubexpressions()).without(Decompose)
    assert str(SMALL) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.passes = ()  # type: ignore[misc]


def test_equality_and_hash() -> None:
    same = Pipeline(intra_operator=(Decompose(), Simplify())).after("global_movement", DeadCode())
    assert same == SMALL
    assert hash(same) == hash(SMALL)
    assert same.key == SMALL.key
    other = SMALL.with_options(Decompose, keep=("mean",))
    assert other != SMALL
    assert other.key != SMALL.key
    assert len({SMALL, same, other}) == 2


def test_order() -> None:
    reordered = Pipeline(global_movement=(DeadCode(),), intra_operator=(Decompose(), Simplify()))
    assert reordered == SMALL
    assert [p.name for p in SMALL] == ["decompose", "simplify", "dead_code"]
    assert [level for level, _ in SMALL.passes] == list(LEVELS)


@pytest.mark.parametrize("edit", ["after", "before", "replace", "without", "with_options"])
def test_an_unknown_pass_names_the_known(edit: str) -> None:
    with pytest.raises(Invalid, match="has no pass CommonSubexpressions; it has: DeadCode, Decompose, Simplify"):
        getattr(SMALL, edit)(CommonSubexpressions)


def test_an_unknown_level_names_the_known() -> None:
    levels = "forward, distribution, intra_operator, fusion, layout, global_movement"
    with pytest.raises(
        Invalid, match=f"no level or pass is named 'fussion', did you mean 'fusion'\\?; levels: {levels}"
    ):
        SMALL.after("fussion", DeadCode())
    sentence = f"no level is called 'fussion'; known: {levels}"
    with pytest.raises(Invalid, match=sentence):
        SMALL.level("fussion")
    with pytest.raises(Invalid, match=sentence):
        Pipeline(fussion=(DeadCode(),))


def test_watch() -> None:
    graph = program("x: f32[4]", "%a = neg(%x)\n%b = neg(%a)\n%c = exp(%b)", "%c")
    steps: list[Step] = []
    sizes: list[int] = []

    def watch(step: Step) -> None:
        steps.append(step)
        assert step.graph is not None
        sizes.append(len(step.graph.nodes))

    result = SMALL.run(graph, watch=watch)
    assert [(s.level, s.transformation.name) for s in steps] == [
        ("intra_operator", "decompose"),
        ("intra_operator", "simplify"),
        ("global_movement", "dead_code"),
    ]
    assert [(s.bytes_before, s.bytes_after) for s in steps] == [(96, 96), (96, 32), (32, 32)]
    assert [(s.operators_before, s.operators_after) for s in steps] == [(3, 3), (3, 1), (1, 1)]
    assert sizes == [3, 1, 1]
    assert [s.matches for s in steps] == [0, 1, 0]
    assert [(s.position, s.passes) for s in steps] == [(0, 3), (1, 3), (2, 3)]
    assert all(s.seconds >= 0 for s in steps)
    assert len(result.nodes) == 1


def test_some_levels_only() -> None:
    graph = program("x: f32[4]", "%a = neg(%x)\n%b = neg(%a)", "%b")
    assert SMALL.run(graph, levels=("forward", "fusion")) is graph


def test_every_pass_is_verified() -> None:
    graph = program("x: f32[4]", "%a = neg(%x)", "%a")
    with pytest.raises(Invalid, match=r"the pass break\(\):"):
        SMALL.after("fusion", Break()).run(graph)
