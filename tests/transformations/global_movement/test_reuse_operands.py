"""Results over operands: where it is legal, where not, fewer live bytes, and the same values when run."""

import pytest
from hypothesis import HealthCheck, given, settings

from daceml_train.analysis.memory import memory
from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.transformations.global_movement.reuse_operands import ReuseOperands
from daceml_train.transformations.pipelines import TRAINING
from tests.lowering.test_lower import check
from tests.transformations.checking import program
from tests.transformations.random_graphs import training_graphs

REUSE = ReuseOperands(min_bytes=0)


def updates(graph: Graph) -> dict[str, str]:
    """Result -> operand over which it is stored."""
    return {node.outputs[result]: node.inputs[argument] for node in graph.nodes for result, argument in node.op.updates}


CASES: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "a chain": ("x: f32[8]", "%a = exp(%x)\n%b = neg(%a)\n%c = sin(%b)\n%d = cos(%c)", "%d", {"b": "a", "c": "b"}),
    "one of two operands": (
        "x: f32[8]",
        "%a = exp(%x)\n%b = neg(%x)\n%c = mul(%a, %b)\n%d = add(%c, %b)\n%e = sin(%d)",
        "%e",
        {"c": "a", "d": "c"},
    ),
    "read later": ("x: f32[8]", "%a = exp(%x)\n%b = neg(%a)\n%c = mul(%a, %b)\n%d = sin(%c)", "%d", {"c": "a"}),
    "read later through a view": (
        "x: f32[8]",
        "%a = exp(%x)\n%v = view(%a, shape=(2, 4))\n%b = neg(%a)\n%w = sin(%v)\n%s = reduce.sum(%b, dims=(0,))\n%t = reduce.sum(%w, dims=(0, 1))",
        "%s, %t",
        {"w": "v"},
    ),
    "a result of the graph": ("x: f32[8]", "%a = exp(%x)\n%b = neg(%a)\n%c = sin(%b)", "%a, %c", {}),
    "a broadcast operand": (
        "x: f32[8]",
        "%a = exp(%x)\n%v = view(%a, shape=(8, 1))\n%b = add(%v, %x)\n%c = sin(%b)",
        "%c",
        {},
    ),
    "another type": ("x: f32[8]", "%a = exp(%x)\n%b = cast(%a, dtype=f64)\n%c = sin(%b)", "%c", {}),
    "the order of a transposed operand": (
        "x: f32[8, 8]",
        "%a = exp(%x)\n%t = permute(%a, dims=(1, 0))\n%b = neg(%t)\n%c = sin(%b)",
        "%c",
        {"b": "t"},
    ),
    "a view that is a copy of an input": (
        "x: f32[6, 8]",
        "%t = permute(%x, dims=(1, 0))\n%v = view(%t, shape=(48,))\n%b = neg(%v)\n%c = sin(%b)",
        "%c",
        {},
    ),
    "a view that is a copy of what is read later": (
        "x: f32[6, 8]",
        "%a = exp(%x)\n%t = permute(%a, dims=(1, 0))\n%v = view(%t, shape=(48,))\n%b = neg(%v)\n%c = sin(%b)\n%s = reduce.sum(%a, dims=(0, 1))",
        "%c, %s",
        {},
    ),
    "two readings of one operand": (
        "x: f32[8, 8]",
        "%a = exp(%x)\n%t = permute(%a, dims=(1, 0))\n%b = add(%a, %t)\n%c = sin(%b)",
        "%c",
        {},
    ),
    "a summand of a matmul": (
        "x: f32[4, 4]",
        "%a = exp(%x)\n%p = matmul_add(%a, %x, %x)\n%b = neg(%p)\n%c = sin(%b)",
        "%c",
        {"b": "p"},
    ),
    "softmax": (
        "x: f32[6, 40]",
        """%a = exp(%x)
        %y = kernel(x0=%a) {
          %m = reduce.max(%x0, dims=(1,), keepdim=True)
          %d = sub(%x0, %m)
          %e = exp(%d)
          %s = reduce.sum(%e, dims=(1,), keepdim=True)
          %q = div(%e, %s)
          yield %q
        }
        %z = sin(%y)""",
        "%z",
        {"y": "a"},
    ),
    "elements that are added": (
        "x: f32[3, 8], i: i64[3, 8]",
        "%a = exp(%x)\n%b = scatter(%a, %i, %x, dim=1, accumulate=True)\n%c = sin(%b)",
        "%c",
        {"b": "a"},
    ),
    "elements that are put into what is read later": (
        "x: f32[3, 8], i: i64[3, 1], v: f32[3, 1]",
        "%a = exp(%x)\n%b = scatter(%a, %i, %v, dim=1)\n%c = mul(%a, %b)",
        "%c",
        {},
    ),
    "columns": (
        "x: f32[6, 40]",
        """%a = exp(%x)
        %y, %t = kernel(x0=%a) {
          %s = reduce.sum(%x0, dims=(0,))
          %q = neg(%x0)
          yield %q, %s
        }
        %z = sin(%y)""",
        "%z, %t",
        {"y": "a"},
    ),
}


@pytest.mark.compiled
@pytest.mark.parametrize("name", CASES)
def test_reuse(name: str) -> None:
    signature, body, result, expected = CASES[name]
    before = program(signature, _reductions(body), result)
    after = REUSE.run(before)
    verify(after)
    assert updates(after) == expected
    assert memory(after).peak <= memory(before).peak
    assert traffic(after).bytes == traffic(before).bytes
    check(after)


def _reductions(body: str) -> str:
    """`reduce.sum(%x, dims=...)` as graph texts have it."""
    lines = []
    for line in body.splitlines():
        for kind in ("sum", "max"):
            if f"reduce.{kind}(" in line:
                name, rest = line.split(f"reduce.{kind}(")
                operand, options = rest.split(", ", 1)
                line = f'{name}reduce({operand}, kind="{kind}", {options}'
        lines.append(line)
    return "\n".join(lines)


def test_bytes_of_elements_that_are_added_in_place() -> None:
    """Those that indices name, twice; out of place, the whole array is read and written."""
    body = "%a = exp(%x)\n%b = scatter(%a, %i, %v, dim=1, accumulate=True)\n%c = sin(%b)"
    before = program("x: f32[30, 8], i: i64[30, 1], v: f32[30, 1]", body, "%c")
    after = REUSE.run(before)
    check(after)
    assert traffic(before).bytes - traffic(after).bytes == 2 * 4 * (30 * 8 - 30)


def test_small_arrays_stay() -> None:
    graph = program("x: f32[8]", "%a = exp(%x)\n%b = neg(%a)\n%c = sin(%b)", "%c")
    assert ReuseOperands().run(graph) is graph


def test_verify_refuses_what_is_read_later() -> None:
    graph = program("x: f32[8]", "%a = exp(%x)\n%b = neg(%a)\n%c = sin(%b)\n%d = cos(%c)", "%d")
    after = REUSE.run(graph)
    after.nodes[-1] = graph.nodes[-1].__class__(graph.nodes[-1].op, ("a",), graph.nodes[-1].outputs)
    with pytest.raises(Invalid, match="reads that array later"):
        verify(after)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=training_graphs())
def test_random_graphs(graph: Graph) -> None:
    before = TRAINING.without("reuse_operands").run(graph, ("intra_operator", "fusion", "layout", "global_movement"))
    after = REUSE.run(before)
    verify(after)
    sizes = {"s0": 2}
    assert memory(after, sizes).peak <= memory(before, sizes).peak
    assert traffic(after, sizes).bytes == traffic(before, sizes).bytes
