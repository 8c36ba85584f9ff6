"""Our passes among DaCe's transformations: listed, applied, saved and loaded by DaCe's own functions."""

from __future__ import annotations

import json

import dace
import pytest
from dace.transformation.optimizer import Optimizer
from dace.transformation.transformation import PatternTransformation

from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph
from daceml_train.passes.options import option_types
from daceml_train.passes.registry import registered
from daceml_train.sdfg.convert import OperatorNode, from_sdfg, to_sdfg
from daceml_train.sdfg.transformations import TRANSFORMATIONS, OperatorTransformation
from tests.passes.training_graphs import loss_graph
from tests.transformations.checking import check_same, program


def chain() -> Graph:
    return program("x: f32[4, s0]", "%a = exp(%x)\n%b = neg(%a)\n%y = tanh(%b)", "%y")


def listed(sdfg: dace.SDFG) -> list[str]:
    ours = [m for m in Optimizer(sdfg).get_pattern_matches() if isinstance(m, OperatorTransformation)]
    state = sdfg.nodes()[0]
    return [f"{type(m).__name__} {m.match_to_str(state)}" for m in ours]


def test_the_optimizer_lists_them() -> None:
    assert "DacemlFuseElementwise [OperatorNode (neg)]" in listed(to_sdfg(chain()))
    assert "DacemlFuseElementwise [OperatorNode (tanh)]" in listed(to_sdfg(chain()))
    other = dace.SDFG("other")
    other.add_state()
    assert listed(other) == []


def test_each_pass_has_one_with_its_options() -> None:
    for name, kind in registered().items():
        if not kind.__module__.startswith("daceml_train."):
            continue
        result = TRANSFORMATIONS[name]
        assert result.__name__ == f"Daceml{kind.__name__}"
        assert result in Optimizer(to_sdfg(chain())).patterns
        assert result().transformation == kind()
        assert set(option_types(kind)) <= set(result.__properties__)


def test_apply_transformations() -> None:
    graph = chain()
    sdfg = to_sdfg(graph)
    fuse = TRANSFORMATIONS["fuse_elementwise"]
    assert sdfg.apply_transformations(fuse) == 1
    sdfg.validate()
    assert [n.op.label for n in from_sdfg(sdfg).nodes] == ["kernel", "tanh"]
    assert sdfg.apply_transformations_repeated(fuse, options={"limit": 2}) == 0
    assert sdfg.apply_transformations_repeated(fuse) == 1
    after = from_sdfg(sdfg)
    assert [n.op.label for n in after.nodes] == ["kernel"]
    check_same(graph, after, s0=3)


def test_a_chosen_match_is_applied_saved_and_loaded() -> None:
    """What the backend of DaCe's editor does: list, send as JSON, read back, apply, keep the history."""
    sdfg = to_sdfg(chain())
    (match,) = (
        m
        for m in Optimizer(sdfg).get_pattern_matches(patterns=[TRANSFORMATIONS["fuse_elementwise"]])
        if "tanh" in m.match_to_str(sdfg.nodes()[0])
    )
    again = PatternTransformation.from_json(json.loads(json.dumps(match.to_json())))
    again._sdfg = sdfg
    again.apply_pattern(append=True)
    sdfg.validate()
    assert [n.op.label for n in from_sdfg(sdfg).nodes] == ["exp", "kernel"]
    saved = json.dumps(sdfg.to_json(include_transformation_history=True))
    loaded = dace.SDFG.from_json(json.loads(saved))
    assert [type(t).__name__ for t in loaded.transformation_hist] == ["DacemlFuseElementwise"]
    assert str(from_sdfg(loaded)) == str(from_sdfg(sdfg))


def test_a_whole_training_forward() -> None:
    graph = loss_graph("mlp")
    sdfg = to_sdfg(graph)
    for name in ("common_subexpressions", "fuse_softmax_cross_entropy", "decompose", "simplify", "fuse_elementwise"):
        sdfg.apply_transformations_repeated(TRANSFORMATIONS[name], validate=False)
    sdfg.validate()
    check_same(graph, from_sdfg(sdfg), exact=False)
    assert len(from_sdfg(sdfg).nodes) < len(registered())


def test_what_matches_no_more_is_refused() -> None:
    sdfg = to_sdfg(chain())
    matches = list(Optimizer(sdfg).get_pattern_matches(patterns=[TRANSFORMATIONS["fuse_elementwise"]]))
    matches[0].apply_pattern()
    (node,) = (n for n in sdfg.nodes()[0].nodes() if isinstance(n, OperatorNode) and "kernel" in n.operator)
    stale = TRANSFORMATIONS["fuse_elementwise"]()
    stale.setup_match(sdfg, 0, 0, {type(stale).operator: sdfg.nodes()[0].node_id(node)}, 0)
    with pytest.raises(Refused, match=r"fuse_elementwise\(\) does not apply at"):
        stale.apply(sdfg.nodes()[0], sdfg)
