from __future__ import annotations

import math
import random
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from daceml_train.errors import DacemlError, Invalid
from daceml_train.graph import Graph, canonical_text, parse, show, text
from daceml_train.graph.grammar import Reader, show_type, show_value
from daceml_train.graph.text import parse_operator, show_operator
from daceml_train.ops.fallback import Operand
from daceml_train.ops.operator import Origin
from daceml_train.tensor import DType, Tensor, symbol
from tests.graph import programs

SMALL = """graph small(x: f32[4] input, y: f32[4] buffer) {
  %add: f32[4] = add(%x, %y)
  write y <- %add
  return %add
}
"""


@pytest.mark.parametrize("name", ["mlp", "update", "everything"])
def test_golden(name: str, golden: Callable[..., None]) -> None:
    graph = getattr(programs, name)()
    golden(show(graph), name)
    assert show(parse(show(graph))) == show(graph)


@given(programs.graphs())
@settings(max_examples=150, deadline=None)
def test_round_trip(drawn: tuple[Graph, object]) -> None:
    graph, _ = drawn
    again = parse(show(graph))
    assert show(again) == show(graph)
    assert again.inputs == graph.inputs
    assert again.tensors == graph.tensors
    assert [(n.inputs, n.outputs, n.origin) for n in again.nodes] == [
        (n.inputs, n.outputs, n.origin) for n in graph.nodes
    ]
    assert [repr(n.op) for n in again.nodes] == [repr(n.op) for n in graph.nodes]  # repr: NaN equals itself
    assert (again.outputs, again.writes) == (graph.outputs, graph.writes)


def test_example_in_the_documentation() -> None:
    example = textwrap.dedent("    graph mlp" + str(text.__doc__).split("    graph mlp")[1].split("\n\n")[0]) + "\n"
    assert show(parse(example)) == example


def test_types_may_be_left_out() -> None:
    assert show(parse(SMALL.replace("%add: f32[4] =", "%add ="))) == SMALL


def test_layout_is_free_and_remarks_are_ignored() -> None:
    loose = (
        "# a remark\ngraph small(x: f32[4] input,\n y: f32[4] buffer) { %add = add(%x, %y) # of two words: a remark\n"
    )
    loose += "# another\n write y <- %add return %add }"
    assert show(parse(loose)) == SMALL


def test_canonical_text_has_no_origins() -> None:
    graph, other = programs.mlp(), programs.mlp()
    other.nodes = [type(n)(n.op, n.inputs, n.outputs, Origin("elsewhere", "other.py:1")) for n in other.nodes]
    assert show(graph) != show(other)
    assert canonical_text(graph) == canonical_text(other)
    assert show(parse(canonical_text(graph))) == canonical_text(graph)


s0, s1 = symbol("s0"), symbol("s1")
VALUES = [
    0,
    -3,
    1.0,
    -0.0,
    1e-300,
    0.1,
    math.inf,
    -math.inf,
    True,
    False,
    None,
    "",
    'a "b"\\ \n#',
    "é",
    (),
    (1,),
    (1, (2.5, "x")),
    DType.float32,
    DType.bool,
    Operand(3),
    s0,
    2 * s0 + 1,
    s0 * s1 - 3,
    s0**2 / 2,
    sympy.floor(s0 / 2),
    sympy.Mod(s0, 3),
    sympy.Max(1, s0 - 4),
    sympy.ceiling(s0 / 3),
    1 / s0,
    sympy.sqrt(s0),
    0.5 * s0,
    symbol("f32"),
    symbol("a b"),
    symbol("body"),
    Tensor((2, s0), DType.int8, (1, 0)),
    Tensor(()),
    (s0, DType.int64, Tensor((1,))),
    symbol("complex"),
    1j,
    complex(-0.0, math.inf),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values(value: Any) -> None:
    read = Reader(show_value(value)).value()
    assert read == value
    assert type(read) is type(value)
    assert math.copysign(1, read) == math.copysign(1, value) if isinstance(value, float) else True


def test_nan() -> None:
    assert math.isnan(Reader(show_value(math.nan)).value())


@given(st.floats())
def test_floats(value: float) -> None:
    assert repr(Reader(show_value(value)).value()) == repr(value)


@given(st.text())
def test_strings(value: str) -> None:
    assert Reader(show_value(value)).value() == value


@given(st.text(), st.text())
def test_origins(module: str, source: str) -> None:
    graph = programs.update()
    graph.nodes = [type(n)(n.op, n.inputs, n.outputs, Origin(module, source)) for n in graph.nodes]
    assert parse(show(graph)).nodes[0].origin == Origin(module, source)


def test_sizes_read_from_python_notation() -> None:
    assert Reader("(s0 + 1) // 2").value() == sympy.floor(s0 / 2 + sympy.Rational(1, 2))


@pytest.mark.parametrize(
    "value",
    [[1], {1: 2}, object(), sympy.sin(s0), sympy.Function("FloorDiv")(s0, 2)],
    ids=lambda value: type(value).__name__,
)
def test_values_that_texts_refuse(value: object) -> None:
    with pytest.raises(Invalid, match=r"graph texts (cannot show|do not hold)"):
        show_value(value)


def test_operator() -> None:
    assert show_operator(programs.UPDATE).startswith("kernel(x0, x1, x2) {\n")
    assert parse_operator(show_operator(programs.UPDATE)) == programs.UPDATE
    with pytest.raises(Invalid, match="the text of an operator has operands"):
        parse_operator("neg(%x)")


def test_type() -> None:
    assert show_type(Tensor((2, 2 * s0), DType.float16, (1, 0))) == "f16[2, 2*s0]@10"


def small(old: str, new: str) -> str:
    assert old in SMALL
    return SMALL.replace(old, new)


MALFORMED = {
    "no graph": ("hello", "expected 'graph', found 'hello' (at line 1)"),
    "empty": ("", "expected 'graph', found the end of the text (at line 1)"),
    "character": (small("add(%x", "add(%x ; "), "unexpected character ';' (at line 2)"),
    "quote": (small("buffer", 'buffer "a'), "unexpected character '\"' (at line 1)"),
    "escape": (small("buffer", 'buffer "\\q"'), "malformed string"),
    "role": (small("buffer", "button"), "'button' is not a role of an input"),
    "type": (small("y: f32[4]", "y: f31[4]"), "expected a type such as f32[8, s0], found 'f31' (at line 1)"),
    "size": (small("y: f32[4]", 'y: f32["4"]'), "'4' is not a size (at line 1)"),
    "boolean size": (small("y: f32[4]", "y: f32[True]"), "True is not a size (at line 1)"),
    "order": (small("y: f32[4]", "y: f32[4]@1"), "@1 is not an order of 1 dimensions (at line 1)"),
    "input twice": (
        small("y: f32[4] buffer", "x: f32[4] buffer"),
        "array 'x' exists already in graph 'small' (at line 1)",
    ),
    "undefined": (small("%x, %y", "%x, %z"), "add reads %z, which is not defined above (at line 2)"),
    "unknown operator": (small("add(", "sum("), "no operator is called 'sum', did you mean 'sub'? (at line 2)"),
    "attribute": (small("%y)", "%y, alpha=1)"), "unexpected keyword argument 'alpha' (at line 2)"),
    "attribute twice": (small("add(%x, %y)", "full(value=1, value=2)"), "attribute 'value' is given twice (at line 2)"),
    "operand after attribute": (small("%x, %y)", "dim=1, %x)"), "operands must precede attributes (at line 2)"),
    "operator refuses": (small("%x, %y)", "%x)"), "add takes 2 operands, not 1 (at line 2)"),
    "number of results": (small("%add:", "%add, %b:"), "add produces 1 arrays, not 2 (at line 2)"),
    "type of result": (small("%add: f32[4]", "%add: f32[5]"), "add produces f32[4], not f32[5] (at line 2)"),
    "written twice": (small("%add: f32[4]", "%x: f32[4]"), "%x is written twice (at line 2)"),
    "write to no input": (small("write y", "write z"), "'z' is written but is not an input (at line 3)"),
    "write of nothing": (small("<- %add", "<- %sub"), "%sub is not defined (at line 3)"),
    "return of nothing": (small("return %add", "return %sub"), "%sub is not defined (at line 4)"),
    "no end": (small("\n}", ""), "expected '}', found the end of the text (at line 5)"),
    "more": (SMALL + "graph", "expected the end of the text, found 'graph' (at line 6)"),
    "call": (small("add(%x, %y)", 'full(value=__import__("os"))'), "expected ')', found '(' (at line 2)"),
    "division": (small("y: f32[4]", "y: f32[4/0]"), "division by zero (at line 1)"),
    "power": (small("y: f32[4]", "y: f32[9**9]"), "9**9 is not a power of a size up to the 64th (at line 1)"),
    "great power": (small("y: f32[4]", "y: f32[s0**65]"), "s0**65 is not a power of a size up to the 64th (at line 1)"),
    "sum of strings": (small("add(%x, %y)", 'full(value="a" + 1)'), "'a' is not a number (at line 2)"),
    "negative string": (small("add(%x, %y)", 'full(value=-"a")'), "'a' cannot be negated (at line 2)"),
    "nested": (small("add(%x, %y)", f"full(value={'(' * 10000}"), "the text is nested too deeply (at line 2)"),
    "kernel operands": (
        small("add(%x, %y)", "kernel(a=%x, b) { yield %a }"),
        "either every argument has an operand, or none has",
    ),
    "kernel update": (
        small("add(%x, %y)", "kernel(a=%x) {\nyield %a over %b }"),
        "%b is not an argument of the kernel (at line 3)",
    ),
    "kernel types": (
        small("add(%x, %y)", "kernel(a=%x) {\n%v: f32[4] = neg(%a) yield %v }"),
        "a body has no types (at line 3)",
    ),
    "body operands": (small("add(%x, %y)", "custom_vjp(forward=body(a=%x) { yield %a })"), "a body has no operands"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case: str) -> None:
    malformed, sentence = MALFORMED[case]
    with pytest.raises(Invalid) as caught:
        parse(malformed)
    assert sentence in str(caught.value)
    assert "at line" in str(caught.value)


def test_damage_never_escapes_as_another_error() -> None:
    """Whatever one deleted or doubled piece makes of a text: a graph, or an error of ours."""
    generator = random.Random(0)
    for whole in (show(programs.everything()), show(programs.update())):
        for _ in range(400):
            start = generator.randrange(len(whole))
            stop = min(len(whole), start + generator.randrange(1, 6))
            damaged = whole[:start] + generator.choice(["", whole[start:stop] * 2, "%", "(", "1", '"']) + whole[stop:]
            try:
                parse(damaged)
            except DacemlError as error:
                assert isinstance(error, Invalid)
