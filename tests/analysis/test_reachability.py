from daceml_train.analysis.reachability import ancestors, descendants, required
from daceml_train.ops.kernel import Statement
from tests.transformations.checking import program

GRAPH = program("x: f32[4], z: f32[4]", "%a = exp(%x)\n%b = neg(%z)\n%c = mul(%a, %x)\n%d = add(%b, %c)", "%d")


def test_what_values_need() -> None:
    nodes, read = required(GRAPH.nodes, ["c", None])
    assert [node.outputs for node in nodes] == [("a",), ("c",)] and read == {"c", "a", "x"}
    assert required(GRAPH.nodes, []) == ([], set())


def test_statements_are_walked_alike() -> None:
    statements = [Statement(node.op, node.inputs, node.outputs) for node in GRAPH.nodes]
    assert required(statements, ["c"]) == ([statements[0], statements[2]], {"c", "a", "x"})


def test_both_directions() -> None:
    assert ancestors(GRAPH.nodes, ["c"]) == {"c", "a", "x"}
    assert descendants(GRAPH.nodes, ["z"]) == {"z", "b", "d"}
