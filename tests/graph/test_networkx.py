from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings

from daceml_train.analysis.reachability import ancestors, descendants
from daceml_train.graph import Graph, parse
from daceml_train.tensor import symbol
from tests.graph import programs


def test_nodes_say_what_they_are() -> None:
    result = programs.mlp().to_networkx()
    assert result.nodes["w"] == {
        "kind": "input",
        "arrays": ("w",),
        "role": "parameter",
        "module": "fc.weight",
        "source": "",
    }
    assert result.nodes["relu"] == {
        "kind": "operator",
        "arrays": ("relu",),
        "module": "act",
        "source": "model.py:13",
        "label": "relu",
        "operator": "relu()",
        "inputs": ("add",),
    }
    s0 = symbol("s0")
    assert result.edges["x", "matmul"] == {"arrays": ("x",), "bytes": 32 * s0}
    assert result.edges["add", "relu"] == {"arrays": ("add",), "bytes": 8 * 16 * 4}
    assert list(nx.topological_sort(result))[-1] == "relu"
    assert result.graph == {"name": "mlp", "outputs": ("relu",), "writes": {}}


def test_several_arrays_are_one_edge_and_writes_are_told() -> None:
    graph = parse("""graph g(p: f32[4] parameter, x: f32[6] input) {
      %v, %i = topk(%x, count=2, dim=0)
      %t = gather(%x, %i, dim=0)
      %d = sub(%v, %t)
      %s = sub(%d, %v)
      %n = neg(%p)
      write p <- %n
      return %s
    }""")
    result = graph.to_networkx()
    assert result.nodes["p"]["becomes"] == "n"
    assert result.nodes["v"]["arrays"] == ("v", "i")
    assert result.edges["v", "t"]["arrays"] == ("i",) and result.edges["v", "t"]["bytes"] == 16
    assert set(result.edges) == {
        ("x", "v"),
        ("x", "t"),
        ("v", "t"),
        ("v", "d"),
        ("t", "d"),
        ("d", "s"),
        ("v", "s"),
        ("p", "n"),
    }


@given(programs.graphs())
@settings(max_examples=30, deadline=None)
def test_reachability_is_networkx_s(drawn: tuple[Graph, object]) -> None:
    graph, _ = drawn
    result = graph.to_networkx()
    for name in graph.results:
        key = next(k for k, arrays in result.nodes(data="arrays") if name in arrays)
        expected = {a for k in (*nx.ancestors(result, key), key) for a in result.nodes[k]["arrays"]}
        assert ancestors(graph.nodes, [name]) == expected
    for name in graph.inputs:
        expected = {a for k in (*nx.descendants(result, name), name) for a in result.nodes[k]["arrays"]}
        assert descendants(graph.nodes, [name]) == expected


def test_networkx_draws_it_as_text() -> None:
    text = "\n".join(nx.generate_network_text(programs.mlp().to_networkx()))
    assert "matmul" in text


@pytest.mark.parametrize("name", ["update", "everything"])
def test_every_operator_is_a_node(name: str) -> None:
    graph = getattr(programs, name)()
    results = graph.to_networkx()
    assert len(results) == len(graph.inputs) + len(graph.nodes)
    assert nx.is_directed_acyclic_graph(results)
