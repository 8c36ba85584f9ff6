from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings

from daceml_train.analysis.reachability import ancestors, descendants
from daceml_train.graph import Graph, parse
from daceml_train.tensor import symbol
from tests.graph import programs


def test_nodes_say_what_they_are() -> None:
    made = programs.mlp().to_networkx()
    assert made.nodes["w"] == {
        "kind": "input",
        "arrays": ("w",),
        "role": "parameter",
        "module": "fc.weight",
        "source": "",
    }
    assert made.nodes["relu"] == {
        "kind": "operator",
        "arrays": ("relu",),
        "module": "act",
        "source": "model.py:13",
        "label": "relu",
        "operator": "relu()",
        "inputs": ("add",),
    }
    s0 = symbol("s0")
    assert made.edges["x", "matmul"] == {"arrays": ("x",), "bytes": 32 * s0}
    assert made.edges["add", "relu"] == {"arrays": ("add",), "bytes": 8 * 16 * 4}
    assert list(nx.topological_sort(made))[-1] == "relu"
    assert made.graph == {"name": "mlp", "outputs": ("relu",), "writes": {}}


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
    made = graph.to_networkx()
    assert made.nodes["p"]["becomes"] == "n"
    assert made.nodes["v"]["arrays"] == ("v", "i")
    assert made.edges["v", "t"]["arrays"] == ("i",) and made.edges["v", "t"]["bytes"] == 16
    assert set(made.edges) == {
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
    made = graph.to_networkx()
    for name in graph.results:
        key = next(k for k, arrays in made.nodes(data="arrays") if name in arrays)
        expected = {a for k in (*nx.ancestors(made, key), key) for a in made.nodes[k]["arrays"]}
        assert ancestors(graph.nodes, [name]) == expected
    for name in graph.inputs:
        expected = {a for k in (*nx.descendants(made, name), name) for a in made.nodes[k]["arrays"]}
        assert descendants(graph.nodes, [name]) == expected


def test_networkx_draws_it_as_text() -> None:
    text = "\n".join(nx.generate_network_text(programs.mlp().to_networkx()))
    assert "matmul" in text


@pytest.mark.parametrize("name", ["update", "everything"])
def test_every_operator_is_a_node(name: str) -> None:
    graph = getattr(programs, name)()
    made = graph.to_networkx()
    assert len(made) == len(graph.inputs) + len(graph.nodes)
    assert nx.is_directed_acyclic_graph(made)
