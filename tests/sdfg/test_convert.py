from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dace
import pytest
from hypothesis import given, settings

from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Invalid, Refused
from daceml_train.graph import Graph, parse, show
from daceml_train.sdfg.convert import OperatorNode, from_sdfg, to_sdfg
from daceml_train.transformations.pipelines import TRAINING
from tests.graph import control_flow, levels, programs


@pytest.mark.parametrize("name", ["mlp", "update", "everything"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    graph = getattr(programs, name)()
    if name == "everything":
        graph = without_odd_sizes(graph)
    sdfg = to_sdfg(graph)
    sdfg.validate()
    assert show(from_sdfg(sdfg)) == show(graph)
    again = dace.SDFG.from_json(json.loads(json.dumps(sdfg.to_json())))
    again.validate()
    assert show(from_sdfg(again)) == show(graph)
    sdfg.save(str(tmp_path / "graph.sdfgz"), compress=True)
    assert show(from_sdfg(dace.SDFG.from_file(str(tmp_path / "graph.sdfgz")))) == show(graph)


def test_a_size_that_dace_cannot_name_is_refused() -> None:
    with pytest.raises(Invalid, match="DaCe accepts no size that is called 'a b'"):
        to_sdfg(programs.everything())


def without_odd_sizes(graph: Graph) -> Graph:
    return parse(show(graph).replace('symbol("f32")', "t").replace('symbol("a b")', "u"))


@given(programs.graphs())
@settings(max_examples=30, deadline=None)
def test_round_trip_of_random_graphs(drawn: tuple[Graph, Any]) -> None:
    graph, _ = drawn
    sdfg = to_sdfg(graph)
    if graph.nodes:
        sdfg.validate()
    assert show(from_sdfg(sdfg)) == show(graph)


def test_what_viewers_see() -> None:
    sdfg = to_sdfg(programs.mlp())
    (state,) = sdfg.nodes()
    matmul = next(n for n in state.nodes() if isinstance(n, OperatorNode) and n.operator == "matmul()")
    assert matmul.label == "matmul (fc)"
    assert (matmul.module, matmul.source) == ("fc", "model.py:12")
    assert (matmul.debuginfo.filename, matmul.debuginfo.start_line) == ("model.py", 12)
    assert (matmul.operands, matmul.results) == (["f32[8, s0]", "f32[s0, 16]@10"], ["f32[8, 16]"])
    permuted = sdfg.arrays["permute"]
    assert [str(s) for s in permuted.shape] == ["s0", "16"]
    assert [str(s) for s in permuted.strides] == ["1", "s0"]
    assert {n for n, a in sdfg.arrays.items() if not a.transient} == {"x", "w", "b", "relu"}
    assert sdfg.arrays["x"].dtype == dace.float32
    (edge,) = state.out_edges(matmul)
    assert str(edge.data.subset) == "0:8, 0:16"


def nodes(sdfg: Any) -> list[str]:
    return [n.operator.split("(")[0] for n, _ in sdfg.all_nodes_recursive() if isinstance(n, OperatorNode)]


def test_composites_and_kernels_open() -> None:
    graph = parse("""graph g(x: f32[4, s0] input) {
      %m = mean(%x, dims=(1,))  # norm
      %k, %a = kernel(p=%m) { %v = exp(%p) %w = neg(%v) yield %w, %p }
      return %k, %a
    }""")
    sdfg = to_sdfg(graph)
    (state,) = sdfg.nodes()
    for node in [n for n in state.nodes() if isinstance(n, OperatorNode)]:
        node.expand(state)
    sdfg.validate()
    assert sorted(nodes(sdfg)) == sorted(["reduce", "full", "div", "view", "exp", "neg", "view", "view"])
    assert sum(isinstance(n, dace.nodes.NestedSDFG) for n in state.nodes()) == 2
    with pytest.raises(Invalid, match="which is no operator; it may have been expanded"):
        from_sdfg(sdfg)


def test_leaves_do_not_open() -> None:
    with pytest.raises(
        Refused, match=r"permute is a leaf, which has no expansion to a nested SDFG \(at fc model.py:12\)"
    ):
        to_sdfg(programs.mlp()).expand_library_nodes()


def test_other_sdfgs_are_refused() -> None:
    sdfg = dace.SDFG("other")
    sdfg.add_state()
    with pytest.raises(Invalid, match="SDFG 'other' is not one of operators"):
        from_sdfg(sdfg)


def test_nodes_added_in_another_order_come_back_in_topological_order() -> None:
    sdfg = to_sdfg(programs.mlp())
    (state,) = sdfg.nodes()
    first = next(n for n in state.nodes() if isinstance(n, OperatorNode))
    edges = [(e.src, e.src_conn, e.dst, e.dst_conn, e.data) for e in state.all_edges(first)]
    state.remove_node(first)
    state.add_node(first)
    for edge in edges:
        state.add_edge(*edge)
    assert show(from_sdfg(sdfg)) == show(programs.mlp())


def test_a_cycle_is_refused_by_name() -> None:
    sdfg = to_sdfg(parse("graph g(x: f32[4] input) { %a = neg(%x) %b = exp(%a) %c = relu(%b) return %c }"))
    (state,) = sdfg.nodes()
    first, last = (n for n in state.nodes() if isinstance(n, OperatorNode) and n.label in ("neg", "exp"))
    (edge,) = state.in_edges(first)
    (result,) = state.out_edges(last)
    state.remove_edge(edge)
    state.add_edge(result.dst, None, first, "_in0", dace.Memlet.from_array(result.dst.data, sdfg.arrays["b"]))
    with pytest.raises(Invalid, match="operators of SDFG 'g' read each other's results: neg -> exp"):
        from_sdfg(sdfg)


def test_dace_is_imported_on_demand_and_quietly() -> None:
    code = """
import builtins, sys
import daceml_train.graph, daceml_train.analysis.verify, daceml_train.analysis.traffic, daceml_train.analysis.interpret
assert "dace" not in sys.modules
class ZMQInteractiveShell: pass
builtins.get_ipython = ZMQInteractiveShell
import daceml_train.sdfg.convert
assert builtins.get_ipython is ZMQInteractiveShell
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("make", control_flow.ALL)
@pytest.mark.parametrize("differentiated", [False, True])
def test_control_flow_is_regions_and_comes_back(
    make: Callable[[], Graph], differentiated: bool, tmp_path: Path
) -> None:
    graph = make()
    if differentiated and make is not control_flow.until:
        seeds = {o: graph.input(f"grad_{o}", graph.tensors[o]) for o in graph.outputs}
        found = differentiate(graph, seeds, [n for n, i in graph.inputs.items() if i.tensor.rank and "grad" not in n])
        graph.output(*(g for g in found.values() if g is not None))
        graph = TRAINING.run(graph, ("intra_operator", "fusion"))
    sdfg = to_sdfg(graph)
    sdfg.validate()
    regions = list(sdfg.all_control_flow_regions(recursive=True))
    kinds = {type(r).__name__ for r in regions}
    wanted = {"branch": {"ConditionalBlock"}, "nested": {"LoopRegion", "ConditionalBlock"}}
    assert wanted.get(make.__name__, {"LoopRegion"}) <= kinds
    assert show(from_sdfg(sdfg)) == show(graph)
    sdfg.save(str(tmp_path / "control.sdfg"))
    assert show(from_sdfg(dace.SDFG.from_file(str(tmp_path / "control.sdfg")))) == show(graph)


@pytest.mark.parametrize("text", [levels.TREE, levels.CHILD_SUM], ids=["tree", "child_sum"])
@pytest.mark.parametrize("differentiated", [False, True])
def test_levels_are_a_loop_over_levels_and_come_back(text: str, differentiated: bool, tmp_path: Path) -> None:
    graph = parse(text.replace("ones", "singles"))  # NumPy has a function of this name, and DaCe reads names as it does
    if differentiated:
        seeds = {o: graph.input(f"grad_{o}", graph.tensors[o]) for o in graph.outputs}
        found = differentiate(graph, seeds, [n for n, i in graph.inputs.items() if i.tensor.dtype.is_float])
        graph.output(*(g for n, g in found.items() if g is not None and "grad" not in n))
        graph = TRAINING.run(graph, ("intra_operator", "fusion"))
    sdfg = to_sdfg(graph)
    sdfg.validate()
    loops = [n for n in sdfg.nodes() if isinstance(n, dace.sdfg.state.LoopRegion)]
    assert len(loops) == 1 + differentiated
    for loop in loops:
        kinds = [n for n in loop.nodes() if isinstance(n, dace.sdfg.state.ControlFlowRegion)]
        assert all("rows" in loop.in_edges(kind)[0].data.assignments for kind in kinds)
        assert len(kinds) >= 2
    sdfg.save(str(tmp_path / "levels.sdfg"))
    assert show(from_sdfg(dace.SDFG.from_file(str(tmp_path / "levels.sdfg")))) == show(graph)


def test_an_operand_given_twice_comes_back() -> None:
    graph = parse(control_flow.BRANCH.replace("cond(%c, %x, %w", "cond(%c, %w, %w").replace("f32[3, 4]", "f32[4, 4]"))
    assert show(from_sdfg(to_sdfg(graph))) == show(graph)
