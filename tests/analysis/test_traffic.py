from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daceml_train.analysis.sizes import bind, solve
from daceml_train.analysis.traffic import Known, traffic
from daceml_train.graph import Graph, parse
from daceml_train.lowering.cost import costs
from daceml_train.lowering.lower import lower
from daceml_train.transformations.pipelines import TRAINING
from tests.graph import programs
from tests.transformations.random_graphs import training_graphs

s0 = programs.s0


def moved(text: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Bytes read and written by each node that moves any."""
    return [(e.reads, e.writes) for e in traffic(parse(f"graph g{text}")).entries if e.bytes != 0]


def test_one_layer() -> None:
    counted = traffic(programs.mlp())
    assert [(e.label, e.bytes) for e in counted.entries] == [
        ("permute", 0),
        ("matmul", 8 * s0 * 4 + 16 * s0 * 4 + 8 * 16 * 4),
        ("add", 512 + 64 + 512),
        ("relu", 512 + 512),
    ]
    assert counted.bytes == 96 * s0 + 2624
    assert counted.flops == 2 * 8 * 16 * s0 + 128 + 128
    assert counted.by_module() == {"fc": 96 * s0 + 1600, "act": 1024}
    assert counted.by_label() == {"permute": 0, "matmul": 96 * s0 + 512, "add": 1088, "relu": 1024}
    numbers = traffic(programs.mlp(), {"s0": 10})
    assert (numbers.bytes, type(numbers.bytes), numbers.flops) == (3584, int, 2816)


def test_fused_layer() -> None:
    text = """(x: f32[8, 10] input, w: f32[10, 16] parameter, b: f32[16] parameter) {
      %matmul = matmul(%x, %w)
      %kernel = kernel(x0=%matmul, x1=%b) { %v0 = add(%x0, %x1) %v1 = relu(%v0) yield %v1 }
      return %kernel
    }"""
    assert moved(text) == [({"x": 320, "w": 640}, {"matmul": 512}), ({"matmul": 512, "b": 64}, {"kernel": 512})]


def test_residual_reads_its_input_in_both_operators() -> None:
    text = "(x: f32[8, 4] input) { %r = relu(%x) %y = add(%r, %x) %z = mul(%y, %y) return %z }"
    assert moved(text) == [
        ({"x": 128}, {"r": 128}),
        ({"r": 128, "x": 128}, {"y": 128}),
        ({"y": 128}, {"z": 128}),
    ]


def test_module_paths_are_grouped_to_a_depth() -> None:
    graph = parse("""graph g(x: f32[4] input) {
      %a = neg(%x)  # net.one.act
      %b = neg(%a)  # net.one.norm
      %c = neg(%b)  # net.two
      return %c
    }""")
    assert traffic(graph).by_module(2) == {"net.one": 64, "net.two": 32}
    assert traffic(graph).by_module(1) == {"net": 96}


ALIASES = {
    "broadcast operand, its real size": (
        "(x: f32[8, 4] input, b: f32[1, 4] input) { %e = expand(%b, shape=(8, 4)) %y = add(%x, %e) return %y }",
        {"x": 128, "b": 16},
    ),
    "slice, what it shows": (
        "(x: f32[8, 4] input) { %s = slice(%x, dim=0, start=2, stop=5) %y = neg(%s) return %y }",
        {"x": 48},
    ),
    "two slices, each": (
        """(x: f32[8, 4] input) { %a = slice(%x, dim=1, start=0, stop=1) %b = slice(%x, dim=1, start=2, stop=3)
        %y = mul(%a, %b) return %y }""",
        {"x": 64},
    ),
    "overlapping slices, at most the whole": (
        """(x: f32[8] input) { %a = slice(%x, dim=0, start=0, stop=7) %b = slice(%x, dim=0, start=1, stop=8)
        %y = mul(%a, %b) return %y }""",
        {"x": 32},
    ),
    "an array and its transpose, once": (
        "(x: f32[4, 4] input) { %t = permute(%x, dims=(1, 0)) %y = add(%x, %t) return %y }",
        {"x": 64},
    ),
    "view of a slice": (
        """(x: f32[8, 4] input) { %s = slice(%x, dim=0, start=0, stop=2) %v = view(%s, shape=(8,)) %y = neg(%v)
        return %y }""",
        {"x": 32},
    ),
    "slice of a broadcast dimension": (
        """(x: f32[4] input) { %e = expand(%x, shape=(8, 4)) %s = slice(%e, dim=0, start=0, stop=3) %y = neg(%s)
        return %y }""",
        {"x": 16},
    ),
    "view and slice of a broadcast array": (
        """(x: f32[4] input) { %e = expand(%x, shape=(8, 4)) %v = view(%e, shape=(2, 16))
        %s = slice(%v, dim=1, start=0, stop=16) %y = neg(%s) return %y }""",
        {"x": 16},
    ),
    "transposed broadcast": (
        """(x: f32[4] input) { %e = expand(%x, shape=(8, 4)) %t = permute(%e, dims=(1, 0))
        %s = slice(%t, dim=0, start=0, stop=2) %y = neg(%s) return %y }""",
        {"x": 8},
    ),
    "constants": (
        """(x: f32[4] input) { %c = full(value=2.0) %i = iota(shape=(4,), dtype=f32)
        %a = kernel(p=%i, q=%c) { %v = mul(%p, %q) yield %v } %y = add(%x, %a) return %y }""",
        {},
    ),
    "a slice inside a kernel": (
        """(x: f32[8, 4] input) { %y = kernel(p=%x) { %a = slice(%p, dim=1, start=0, stop=2) %v = neg(%a) yield %v }
        return %y }""",
        {"x": 64},
    ),
    "a gated unit": (
        """(x: f32[8, 4] input) { %y = kernel(p=%x) { %a = slice(%p, dim=1, start=0, stop=2)
        %b = slice(%p, dim=1, start=2, stop=4) %v = mul(%a, %b) yield %v } return %y }""",
        {"x": 128},
    ),
    "an argument that nothing touches": (
        "(x: f32[4] input, z: f32[4] input) { %y = kernel(p=%x, q=%z) { %v = neg(%p) yield %v } return %y }",
        {"x": 16},
    ),
    "rows of a table": (
        "(w: f32[100, 4] parameter, i: i64[3] input) { %y = embedding(%w, %i) return %y }",
        {"w": 48, "i": 24},
    ),
    "all of a small table": (
        "(w: f32[2, 4] parameter, i: i64[3] input) { %y = embedding(%w, %i) return %y }",
        {"w": 32, "i": 24},
    ),
    "a constant for a library call": (
        "(x: f32[2, 3] input) { %c = full(value=1.0, shape=(3, 2)) %y = matmul(%x, %c) return %y }",
        {"x": 24, "c": 24},
    ),
}


@pytest.mark.parametrize("case", ALIASES)
def test_reads(case: str) -> None:
    text, reads = ALIASES[case]
    nodes = moved(text)
    assert nodes[0 if case == "constants" else -1][0] == reads


def test_views_that_strides_cannot_express_are_copies() -> None:
    """A transposed array has no contiguous rows; a transposed axis of one element changes nothing."""
    text = """(x: f32[2, 3, 4] input, w: f32[3, 5] parameter) {
      %k = kernel(x0=%x) { %v0 = exp(%x0) yield %v0 }
      %t = permute(%k, dims=(0, 2, 1))
      %r = view(%t, shape=(8, 3))
      %y = matmul(%r, %w)
      return %y
    }"""
    graph = parse(f"graph g{text}")
    counted = traffic(graph)
    assert counted.entries[2].reads == {"k": 96} and counted.entries[2].writes == {"r": 96}
    assert counted.entries[3].reads == {"r": 96, "w": 60}
    lowered = lower(graph)
    found = costs(graph, lowered)
    assert [c.operators for c in found] == ["exp", "copy", "matmul"]
    assert sum(c.bytes for c in found) == counted.bytes
    same = parse(f"graph g{text}".replace("[2, 3, 4]", "[2, 3, 1]").replace("(8, 3)", "(2, 3)"))
    assert [bool(e.bytes) for e in traffic(same).entries] == [True, False, False, True]
    constant = "(w: f32[3, 2] parameter) { %c = full(value=1.0, shape=(2, 3), dtype=f32) %t = permute(%c, dims=(1, 0))"
    constant += " %v = view(%t, shape=(2, 3)) %y = add(%v, %v) return %y }"
    assert moved(constant) == [({}, {"y": 24})]


def test_a_constant_for_a_library_call_is_stored() -> None:
    assert moved(ALIASES["a constant for a library call"][0])[0] == ({}, {"c": 24})
    assert moved("() { %c = full(value=1.0, shape=(3, 2)) return %c }") == [({}, {"c": 24})]


def test_composites_count_as_their_leaves() -> None:
    graph = parse("graph g(x: f32[8, 4] input) { %m = mean(%x, dims=(1,)) return %m }")
    (entry,) = traffic(graph).entries
    assert entry.label == "mean"
    assert entry.bytes == (128 + 32) + (32 + 32)  # the sum; its division by a constant
    assert entry.flops == 32 + 4 * 8


def test_dead_code_and_unread_results_count_nothing() -> None:
    text = """(x: f32[4] input) { %dead = neg(%x)
      %a, %b = kernel(p=%x) { %v = exp(%p) %w = neg(%p) yield %v, %w }
      return %b
    }"""
    assert moved(text) == [({"x": 16}, {"b": 16})]
    pooled = "(x: f32[1, 1, 4, 4] input) { %y, %i = max_pool2d(%x, kernel=(2, 2), stride=(2, 2)) return %y }"
    ((_, writes),) = moved(pooled)
    assert writes == {"y": 16, "i": 32}


def test_writes_are_copies_unless_updated_in_place() -> None:
    counted = traffic(programs.update())
    assert (counted.copies, counted.bytes) == ({}, 48 + 48 + 12 + 48 + 48)
    graph = parse(
        "graph g(p: f32[4] parameter, q: f32[4] parameter) { %n = neg(%p) write p <- %n write q <- %q return }"
    )
    counted = traffic(graph)
    assert {t: (e.reads, e.writes) for t, e in counted.copies.items()} == {"p": ({"n": 16}, {"p": 16})}
    assert counted.bytes == 32 + 32
    assert counted.by_label() == {"neg": 32, "write": 32}


def test_an_empty_graph_moves_nothing() -> None:
    assert traffic(Graph()).bytes == 0
    assert traffic(parse("graph g(x: f32[0, 4] input) { %v = view(%x, shape=(0,)) %y = neg(%v) return %y }")).bytes == 0


@given(programs.graphs())
@settings(max_examples=100, deadline=None)
def test_symbols_and_numbers_agree(drawn: tuple[Graph, dict[str, Any]]) -> None:
    graph, arrays = drawn
    sizes = solve(graph.inputs, {name: value.shape for name, value in arrays.items()})
    over_symbols, numbers = traffic(graph), traffic(graph, sizes)
    for symbolic, number in zip(over_symbols.all, numbers.all, strict=True):
        assert isinstance(number.bytes, int)
        assert bind(symbolic.bytes, sizes) == number.bytes
        assert bind(symbolic.flops, sizes) == number.flops
    assert bind(over_symbols.bytes, sizes) == numbers.bytes


CHANGED = {
    "its type": ("%a = exp(%x)\n%b = neg(%a)", "%b", "%a = view(%x, shape=(2, 2))\n%b = neg(%a)", "%b"),
    "its operator": ("%a = exp(%x)", "%a", "%a = matmul(%x, %x)", "%a"),
    "its origin": ("%a = exp(%x)  # one", "%a", "%a = exp(%x)  # two", "%a"),
    "whether it runs": ("%a = exp(%x)\n%b = neg(%a)", "%b", "%a = exp(%x)\n%b = neg(%x)", "%b"),
    "whether a constant is stored": (
        "%a = full(shape=(4,), value=2.0, dtype=f32)\n%b = add(%y, %a)", "%b",
        "%a = full(shape=(4,), value=2.0, dtype=f32)\n%b = add(%y, %a)", "%a, %b",
    ),
    "whether its operand is a constant": (
        "%a = full(shape=(4,), value=2.0, dtype=f32)\n%b = neg(%a)", "%b", "%a = exp(%y)\n%b = neg(%a)", "%b",
    ),
    "how much of an array it reads": (
        "%a = slice(%y, dim=0, start=0, stop=2)\n%b = exp(%a)\n%c = neg(%a)", "%b, %c",
        "%a = slice(%y, dim=0, start=0, stop=3)\n%b = exp(%a)\n%c = neg(%a)", "%b, %c",
    ),
    "which array it reads": (
        "%a = permute(%x, dims=(1, 0))\n%b = neg(%a)", "%b", "%a = permute(%z, dims=(1, 0))\n%b = neg(%a)", "%b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_an_entry_is_counted_again_where_something_that_it_depends_on_differs(name: str) -> None:
    first, one, second, other = CHANGED[name]
    signature = "x: f32[2, 2] input, z: f32[2, 2] input, y: f32[4] input, w: f32[1, 3] input"
    a, b = (
        parse(f"graph g({signature}) {{\n{body}\nreturn {found}\n}}") for body, found in ((first, one), (second, other))
    )
    for before, after in ((a, b), (b, a)):
        known = Known()
        kept = traffic(before, known=known).entries
        counted = traffic(after, known=known)
        assert counted == traffic(after) != traffic(before)
        again = traffic(after, known=known)
        assert again == counted and all(x is y for x, y in zip(again.entries, counted.entries, strict=True))
        assert any(all(entry is not other for other in kept) for entry in counted.entries)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=training_graphs(), data=st.data())
def test_what_is_known_of_other_graphs_changes_no_figure(graph: Graph, data: st.DataObject) -> None:
    """Whatever the order is: arrays disappear between passes, and come back as something else."""
    stages = [graph]
    TRAINING.run(graph, watch=lambda step: stages.append(step.graph) if step.graph is not None else None)
    known = Known()
    for stage in data.draw(st.lists(st.sampled_from(stages), min_size=2, max_size=30)):
        assert traffic(stage, known=known) == traffic(stage)
