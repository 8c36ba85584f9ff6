"""Pipelines as text and JSON, and what is said of texts that do not read."""

import enum
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import daceml_train as dt
from daceml_train.errors import Duplicate, Invalid
from daceml_train.graph.graph import Graph
from daceml_train.passes import Pipeline
from daceml_train.passes.base import LEVELS, Pass
from daceml_train.passes.registry import registered
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise
from daceml_train.transformations.fusion.siblings import FuseSiblings
from daceml_train.transformations.intra_operator.decompose import Decompose
from daceml_train.transformations.intra_operator.simplify import Simplify
from daceml_train.transformations.pipelines import INFERENCE, MIXED_PRECISION, TRAINING


class Color(enum.Enum):
    red = 1
    green = 2


@dataclass(frozen=True)
class Nothing(Pass):
    """x => x"""

    level = "fusion"
    count: int = 0
    share: float = 0.5
    name_of_it: str = ""
    mode: Literal["fast", "small"] = "fast"
    color: Color = Color.red
    budget: int | str | None = None
    pairs: tuple[tuple[int, str], ...] = ()

    def run(self, graph: Graph) -> Graph:
        return graph


@pytest.mark.parametrize(
    "pipeline", [TRAINING, INFERENCE, MIXED_PRECISION, Pipeline()], ids=["training", "inference", "mixed", "empty"]
)
def test_texts_and_json_read_back(pipeline: Pipeline) -> None:
    assert Pipeline.parse(str(pipeline)) == pipeline
    assert Pipeline.from_json(pipeline.to_json()) == pipeline
    assert Pipeline.parse(str(pipeline)).key == pipeline.key


options = st.fixed_dictionaries(
    {},
    optional={
        "count": st.integers(),
        "share": st.floats(allow_nan=False) | st.integers(-5, 5),
        "name_of_it": st.text(),
        "mode": st.sampled_from(["fast", "small"]),
        "color": st.sampled_from(Color),
        "budget": st.none() | st.integers() | st.text(),
        "pairs": st.lists(st.tuples(st.integers(), st.text())).map(tuple),
    },
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(LEVELS), st.lists(options.map(lambda o: Nothing(**o))).map(tuple)))
def test_any_options_read_back(levels: dict[str, Any]) -> None:
    pipeline = Pipeline(**levels)
    for again in (Pipeline.parse(str(pipeline)), Pipeline.from_json(pipeline.to_json())):
        assert again == pipeline
        assert (str(again), again.key, hash(again)) == (str(pipeline), pipeline.key, hash(pipeline))


def test_free_layout() -> None:
    text = """
    # what a person writes
fusion: fuse_elementwise(limit=32),   # few operators
    fuse_siblings,
intra_operator: decompose(keep=("softmax",))
"""
    assert Pipeline.parse(text) == Pipeline(
        intra_operator=(Decompose(keep=("softmax",)),), fusion=(FuseElementwise(limit=32), FuseSiblings())
    )


def test_the_key_is_the_same_in_every_process() -> None:
    code = "import daceml_train as dt; print(dt.TRAINING.key)"
    message = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert message.strip() == TRAINING.key


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "fusion: fuse_elementwize()",
            "no pass is named 'fuse_elementwize', did you mean 'fuse_elementwise'? (at line 1",
        ),
        ("\nfusion: qqq()", "no pass is named 'qqq' (at line 2 of the pipeline); known: accumulate_matmuls, "),
        ("fusing: simplify()", "no level is called 'fusing'; known: forward, distribution, intra_operator"),
        (
            "fusion: fuse_elementwise(limits=3)",
            "fuse_elementwise has no option 'limits', did you mean 'limit'?; it has: limit: int, repeated: int",
        ),
        ("fusion: simplify(deep=True)", "simplify has no option 'deep'; it has: none"),
        ("fusion: fuse_elementwise(limit=0.5)", "option limit of fuse_elementwise is int, given 0.5"),
        ("fusion: fuse_elementwise(limit=True)", "option limit of fuse_elementwise is int, given True"),
        ("fusion: fuse_siblings(share='a')", "option share of fuse_siblings is float, given 'a'"),
        ("fusion: decompose(keep='softmax')", "option keep of decompose is tuple[str, ...], given 'softmax'"),
        ("fusion: nothing(mode='huge')", "option mode of nothing is typing.Literal['fast', 'small'], given 'huge'"),
        ("fusion: nothing(color='blue')", "option color of nothing is Color, given 'blue'"),
        (
            "fusion: fuse_elementwise(3)",
            "fuse_elementwise(3) is not a pass (at line 1 of the pipeline); expected name(option=value, ...)",
        ),
        ("fusion: fuse_elementwise(limit=limit)", "limit is not a literal (at line 1"),
        ("fusion: simplify(\nlayout:", "'simplify(' is not a list of passes (at line 1 of the pipeline)"),
        ("fusion: simplify()\nfusion: simplify()", "level fusion is given twice (at line 2 of the pipeline)"),
        ("simplify()", "'simplify()' belongs to no level (at line 1 of the pipeline); begin with 'forward'"),
    ],
)
def test_what_is_wrong_with_a_text(text: str, sentence: str) -> None:
    with pytest.raises(Invalid) as caught:
        Pipeline.parse(text)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "the pipeline is not JSON"),
        ("[]", "an object with a list per level, given list"),
        ('{"fusion": {}}', "level fusion is {}; expected a list"),
        ('{"fusion": [{"pass": "simplify", "limit": 3}]}', "is not a pass (at entry 0 of fusion)"),
        ('{"fusion": [{"pass": "simplify", "options": {"limit": 3}}]}', "simplify has no option 'limit'"),
        ('{"fusion": ["simplifi"]}', "no pass is named 'simplifi', did you mean 'simplify'? (at entry 0 of fusion)"),
    ],
)
def test_what_is_wrong_with_json(text: str, sentence: str) -> None:
    with pytest.raises(Invalid) as caught:
        Pipeline.from_json(text)
    assert sentence in str(caught.value)


def test_options_are_checked_when_a_pass_is_made() -> None:
    with pytest.raises(Invalid, match="simplify has no option 'limit'; it has: none"):
        Simplify(limit=3)  # type: ignore[call-arg]
    with pytest.raises(Invalid, match="fuse_elementwise has no option 'limits', did you mean 'limit'"):
        TRAINING.with_options(FuseElementwise, limits=3)
    with pytest.raises(Invalid, match="option limit of fuse_elementwise is int, given 'x'"):
        TRAINING.with_options("fuse_elementwise", limit="x")
    assert type(FuseSiblings(share=1).share) is float
    with pytest.raises(Invalid, match="a pipeline consists of passes, given <class '.*Simplify'>; expected Simplify()"):
        Pipeline(fusion=(Simplify,))  # type: ignore[arg-type]
    misplaced = type("Misplaced", (Simplify,), {"level": "fusing"})
    with pytest.raises(Invalid, match="Misplaced has level 'fusing'; levels: forward, .*global_movement"):
        Pipeline(fusion=(misplaced(),))


def test_edits_by_name() -> None:
    assert TRAINING.without("simplify") == TRAINING.without(Simplify)
    assert TRAINING.only("fusion", "decompose") == Pipeline(
        intra_operator=(Decompose(),), fusion=TRAINING.level("fusion")
    )
    assert TRAINING.without("fusion").level("fusion") == ()
    assert TRAINING.replace("fusion", Simplify()).level("fusion") == (Simplify(),)


def test_pipelines_come_as_value_text_or_file(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(TRAINING.to_json())
    (tmp_path / "p.txt").write_text(str(TRAINING))
    for form in (TRAINING, str(TRAINING), tmp_path / "p.json", str(tmp_path / "p.json"), tmp_path / "p.txt"):
        assert Pipeline.of(form) == TRAINING
    with pytest.raises(Invalid, match="the pipeline's file cannot be read: .*none.json"):
        Pipeline.of(tmp_path / "none.json")
    with pytest.raises(Invalid, match="a pipeline is a Pipeline, its text or a file's path, given int"):
        Pipeline.of(3)  # type: ignore[arg-type]


def test_all_passes_are_known_where_users_parse() -> None:
    assert dt.Pipeline is Pipeline
    assert {p.name for p in (*TRAINING, *INFERENCE)} <= set(registered())
    assert "fusion" not in registered()  # abstract
    assert "rewrite" not in registered()


def test_a_name_that_is_taken_names_both_owners() -> None:
    with pytest.raises(Duplicate) as caught:
        type("Simplify", (Nothing,), {"__module__": "elsewhere", "__qualname__": "Simplify"})
    assert "daceml_train.transformations.intra_operator.simplify.Simplify and by elsewhere.Simplify" in str(
        caught.value
    )
    assert registered()["simplify"] is Simplify
