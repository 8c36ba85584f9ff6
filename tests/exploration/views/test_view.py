"""What is drawn of a graph: modules that open, at most so many boxes, edges, and the viewer's JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.analysis.phases import phases
from daceml_train.analysis.traffic import traffic
from daceml_train.exploration.export.page import graph_html, session_html
from daceml_train.exploration.session.lineage import _shown, lineage
from daceml_train.exploration.views.details import Sources, code_of, details
from daceml_train.exploration.views.saved import crossings
from daceml_train.exploration.views.sdfg import sdfg_of
from daceml_train.exploration.views.tree import MOST, checking, hidden, tree_of
from daceml_train.exploration.views.view import FIRST, LIMIT, view_of
from daceml_train.graph.graph import Graph
from daceml_train.ops.movement import Concat
from daceml_train.ops.operator import Origin
from daceml_train.tensor import Tensor
from tests.timing import thread_seconds


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def session() -> dt.Session:
    model = nn.Sequential(Block(8), Block(8), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
    return dt.Session(model, x, y, loss=nn.functional.cross_entropy, optimizer=optimizer)


def chain(length: int, module: str = "") -> Graph:
    """So many operators in a row, without modules or all in one."""
    graph = Graph("chain")
    value = graph.input("x", Tensor((4,)))
    with graph.at(Origin(module, "model.py:3")):
        for _ in range(length):
            value = value + value
    graph.output(value)
    return graph


def test_opens_on_phases_and_modules(session: dt.Session) -> None:
    view = view_of(session.graph)
    labels = [item.label for item in view.tree.root.children]
    assert labels == ["forward", "backward", "update"]
    modules = {item.module for item in view.tree.items.values() if item.kind == "module" and item.phase == "forward"}
    assert {"0", "1", "0.up", "0.down"} <= modules
    assert len(view.boxes) <= FIRST + 2


def test_every_drawn_operator_is_in_one_box(session: dt.Session) -> None:
    view = view_of(session.graph)
    shown = sorted(n for item in view.boxes.values() for n in item.nodes)
    assert shown == [n for n, node in enumerate(session.graph.nodes) if not hidden(node)]
    assert view.tree.root.bytes == traffic(session.graph, {}).bytes


def test_what_only_checks_data_is_one_box(session: dt.Session) -> None:
    view = view_of(session.graph)
    (box,) = [item for item in view.boxes.values() if item.label == "checks"]
    assert (box.kind, box.phase) == ("checks", "forward") and box.key not in view.open
    inside = [session.graph.nodes[n] for n in box.nodes]
    assert "require" in {node.op.label for node in inside} and len(inside) > 5
    names = {name for node in inside for name in node.outputs}
    results = {name for node in inside if node.op.label == "require" for name in node.outputs}
    read = {name for node in session.graph.nodes if node not in inside for name in node.inputs} & names
    assert read == results, "others read only that the condition holds"
    assert "nll_loss" not in {node.op.label for node in inside}
    opened = view.opening(box.key)
    assert {f"op:{node.outputs[0]}" for node in inside} <= set(opened.boxes)
    assert not checking(chain(5))


def test_edges_join_what_is_drawn(session: dt.Session) -> None:
    view = view_of(session.graph)
    keys = {*view.boxes, *view.ends}
    assert view.edges
    assert all(e.source in keys and e.target in keys and e.source != e.target for e in view.edges)


@pytest.mark.parametrize("length", [10, 600, 3000])
def test_never_more_boxes_than_the_limit(length: int) -> None:
    view = view_of(chain(length))
    assert all(len(item.children) <= MOST for item in view.tree.items.values())
    for item in list(view.tree.items.values()):
        if item.opens and item.kind != "operator":
            view = view.opening(item.key)
            assert item.key in view.open
            assert len(view.boxes) + len(view.ends) <= LIMIT
        if len(view.open) > 40:
            break


def test_large_graphs_are_quick() -> None:
    """Nothing quadratic: ten times the operators may take twenty times as long, not a hundred."""

    def seconds(length: int) -> float:
        graph = chain(length, "a.b")
        return thread_seconds(lambda: sdfg_of(view_of(graph)))

    seconds(100)
    assert seconds(3000) < 20 * seconds(300) + 0.2


def test_what_is_open_stays_open_after_a_pass(session: dt.Session) -> None:
    view = view_of(session.graph).opening("backward")
    after = view.over(session.preview("fuse_elementwise").after.graph)
    assert "backward" in after.open


def test_a_kernel_opens_to_its_statements(session: dt.Session) -> None:
    view = view_of(session.preview("fuse_elementwise").after.graph)
    kernel = next(i for i in view.tree.of_node.values() if " + " in i.label)
    inside = view.opening(kernel.key)
    statements = [i for i in inside.boxes.values() if i.kind == "statement"]
    assert len(statements) > 1
    assert any(e.target == statements[0].key or e.source == statements[0].key for e in inside.edges)
    assert kernel.key not in inside.boxes


def test_phases(session: dt.Session) -> None:
    graph = session.graph
    found = phases(graph)
    results = {name: phase for node, phase in zip(graph.nodes, found, strict=True) for name in node.outputs}
    assert results[graph.outputs[0]] == "forward"
    assert {results[value] for value in graph.writes.values()} == {"update"}
    assert set(phases(chain(3))) == {"forward"}


def test_gradients_as_outputs_are_backward() -> None:
    model = nn.Linear(4, 2)
    session = dt.Session(model, torch.randn(3, 4), torch.randn(3, 2), loss=nn.functional.mse_loss)
    assert set(phases(session.graph, 1)) == {"forward", "backward"}


def test_highlight_and_reveal(session: dt.Session) -> None:
    view = view_of(session.graph)
    array = next(node.outputs[0] for node in reversed(session.graph.nodes) if not hidden(node))
    (closed,) = view.keys_of([array])
    assert view.boxes[closed].kind != "operator"
    opened = view.revealing([array])
    assert opened.keys_of([array]) == [f"op:{array}"]
    assert view.keys_of(["no such array"]) == []


def test_search(session: dt.Session) -> None:
    found = view_of(session.graph).search("gelu")
    assert found and all("gelu" in item.label for item in found)
    assert view_of(session.graph).search("  ") == []


def test_the_viewer_gets_valid_json(session: dt.Session) -> None:
    results = json.loads(json.dumps(sdfg_of(view_of(session.graph))))
    (state,) = results["nodes"]
    ids = {str(node["id"]) for node in state["nodes"]}
    assert all(edge["src"] in ids and edge["dst"] in ids for edge in state["edges"])
    assert state["scope_dict"]["-1"] == [node["id"] for node in state["nodes"]]
    data = [n["attributes"]["data"] for n in state["nodes"] if n["type"] == "AccessNode"]
    data += [e["attributes"]["data"]["attributes"]["data"] for e in state["edges"]]
    assert all(name in results["attributes"]["_arrays"] and "." not in name for name in data)
    inner = [n["attributes"]["sdfg"]["cfg_list_id"] for n in state["nodes"] if n["type"] == "NestedSDFG"]
    assert len({0, *inner}) == len(inner) + 1


def test_details_name_the_users_line_and_the_code(session: dt.Session) -> None:
    view = view_of(session.preview("fuse_elementwise").after.graph)
    kernel = next(i for i in view.tree.of_node.values() if " + " in i.label and i.phase == "forward" and i.module)
    told = details(view.tree, kernel, {}, Sources(session.subject.model))
    assert told["reads"] and told["writes"] and told["lines"]
    line = told["source"]["lines"][told["source"]["line"] - told["source"]["first"]]
    assert told["source"]["file"].endswith("test_view.py") and "self" in line
    graph = view.tree.graph
    assert "void kernel_" in code_of(graph, graph.nodes[kernel.nodes[0]])
    product = next(i for i in view.tree.of_node.values() if "matmul" in i.label)
    assert code_of(graph, graph.nodes[product.nodes[0]]).startswith("// library call: ")


def test_what_gradients_read(session: dt.Session) -> None:
    found = crossings(session.graph)
    assert found == sorted(found, key=lambda c: (-c.bytes, c.array))
    gelu = next(c for c in found if c.module == "0.up" and c.gradients)
    assert not gelu.rematerialized and gelu.bytes > 0
    assert crossings(chain(5)) == []


def test_html_is_small_escaped_and_loads_nothing(session: dt.Session) -> None:
    assert len(session_html(session)) < 300_000
    text = graph_html(chain(3000, '<img src=x onerror="alert(1)">'))
    assert len(text) < 300_000
    assert "<img" not in text and "&lt;img" in text
    assert "http" not in text and "<script" not in text
    assert tree_of(chain(3)).root.bytes > 0


def test_notebooks_show_graphs(session: dt.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    from daceml_train.exploration.export.page import show_graphs

    shell = InteractiveShell.instance()
    try:
        show_graphs()
        results, _ = shell.display_formatter.format(session.graph)
        assert results["text/html"].startswith("<style>") and "matmul" in results["text/html"]
    finally:
        InteractiveShell.clear_instance()


def test_a_source_line_is_of_the_only_file_with_its_name(tmp_path: Path) -> None:
    """Not of PyTorch's `linear.py` where the user's model has one, too."""

    def model(folder: str) -> nn.Module:
        path = tmp_path / folder / "linear.py"
        path.parent.mkdir()
        path.write_text(f"class Scale(nn.Module):\n    def forward(self, x):\n        return x  # {folder}\n")
        names: dict[str, Any] = {"nn": nn}
        exec(compile(path.read_text(), path, "exec"), names)
        scale: nn.Module = names["Scale"]()
        return scale

    one = model("one")
    told = Sources(nn.Sequential(nn.Linear(2, 2), one)).lines("linear.py:3")
    assert told is not None and told["lines"][-1].endswith("# one")
    assert Sources(nn.Sequential(one, model("two"))).lines("linear.py:3") is None
    vision = compile("def forward(self, x):\n    return x\n", f"{Path(torch.__file__).parent}vision/vgg.py", "exec")
    names: dict[str, Any] = {}
    exec(vision, names)
    assert "vgg.py" in Sources(type("Vision", (nn.Module,), {"forward": names["forward"]})()).files  # beside PyTorch


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x.sin().cos(), (x,))


def test_the_code_of_control_flow_is_that_of_its_bodies() -> None:
    branching = dt.Session(Branches(), torch.randn(3, 3))
    (node,) = (node for node in branching.graph.nodes if node.op.label == "cond")
    code = code_of(branching.graph, node)
    assert "// library call: mm" in code and "sin(" in code and "cos(" in code
    names = [launch.name for launch in lineage(branching, node.outputs[0]).launches]
    assert "library call mm" in names and any(name.startswith("kernel_") for name in names)


def test_an_operator_of_many_arrays_names_some() -> None:
    graph = Graph("g")
    (joined,) = graph.emit(Concat(dim=0), *(graph.input(f"x{i}", Tensor((2,))) for i in range(20)))
    text = _shown(graph.nodes[-1])
    assert text == f"%{joined.name} = concat({', '.join(f'%x{i}' for i in range(10))}, and 10 more)"
