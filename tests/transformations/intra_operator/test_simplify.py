"""Every rule of `Simplify`: a case that it rewrites, and what it must leave alone."""

import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.traffic import traffic
from daceml_train.tensor import DType
from daceml_train.transformations.intra_operator.arithmetic import _EXACT_IN, ARITHMETIC
from daceml_train.transformations.intra_operator.movement import MOVEMENT
from daceml_train.transformations.intra_operator.simplify import Simplify
from tests.transformations.checking import check_same, program

X = "x: f32[4, 6], z: f32[4, 6]"


def one(value: object, shape: str = "()", dtype: str = "f32") -> str:
    return f"%c = full(value={value}, shape={shape}, dtype={dtype})\n"


# signature, before, after (one operator a line; `%x` alone: nothing is left)
CASES = {
    "same_view": (X, "%y = view(%x, shape=(4, 6))", "%x"),
    "view_of_view": (X, "%a = view(%x, shape=(24,))\n%y = view(%a, shape=(2, 12))", "view(%x, shape=(2, 12))"),
    "view_back": (X, "%a = view(%x, shape=(24,))\n%y = view(%a, shape=(4, 6))", "%x"),
    "same_permute": (X, "%y = permute(%x, dims=(0, 1))", "%x"),
    "permute_of_permute": (
        "x: f32[2, 3, 4]",
        "%a = permute(%x, dims=(1, 2, 0))\n%y = permute(%a, dims=(1, 2, 0))",
        "permute(%x, dims=(2, 0, 1))",
    ),
    "permute_back": (X, "%a = permute(%x, dims=(1, 0))\n%y = permute(%a, dims=(1, 0))", "%x"),
    "permute_of_ones": ("x: f32[4, 1, 6]", "%y = permute(%x, dims=(1, 0, 2))", "view(%x, shape=(1, 4, 6))"),
    "same_expand": (X, "%y = expand(%x, shape=(4, 6))", "%x"),
    "expand_of_expand": (
        "x: f32[3]",
        "%a = expand(%x, shape=(2, 3))\n%y = expand(%a, shape=(5, 2, 3))",
        "expand(%x, shape=(5, 2, 3))",
    ),
    "whole_slice": ("x: f32[s0, 6]", "%y = slice(%x, dim=0, start=0, stop=s0)", "%x"),
    "slice_of_slice": (
        X,
        "%a = slice(%x, dim=1, start=1, stop=6, step=2)\n%y = slice(%a, dim=1, start=1, stop=3)",
        "slice(%x, dim=1, start=3, stop=6, step=2)",
    ),
    "slice_of_slice_with_symbols": (
        "x: f32[3*s0]",
        "%a = slice(%x, dim=0, start=s0, stop=3*s0)\n%y = slice(%a, dim=0, start=s0, stop=2*s0)",
        "slice(%x, dim=0, start=2*s0, stop=3*s0)",
    ),
    "slice_of_concat": (X, "%a = concat(%z, %x, dim=1)\n%y = slice(%a, dim=1, start=6, stop=12)", "%x"),
    "slice_in_concat": (
        X,
        "%a = concat(%z, %x, dim=1)\n%y = slice(%a, dim=1, start=8, stop=11)",
        "slice(%x, dim=1, start=2, stop=5)",
    ),
    "slice_of_concat_with_symbols": (
        "x: f32[s0], z: f32[2*s0]",
        "%a = concat(%z, %x, dim=0)\n%y = slice(%a, dim=0, start=2*s0, stop=3*s0)",
        "%x",
    ),
    "slice_of_pad": (
        X,
        "%a = pad(%x, pads=((0, 0), (2, 1)))\n%y = slice(%a, dim=1, start=2, stop=8)",
        "%x",
    ),
    "empty_pad": (X, "%y = pad(%x, pads=((0, 0), (0, 0)))", "%x"),
    "pad_of_pad": (
        X,
        "%a = pad(%x, pads=((1, 0), (0, 0)))\n%y = pad(%a, pads=((0, 2), (0, 3)))",
        "pad(%x, pads=((1, 2), (0, 3)))",
    ),
    "concat_of_one": (X, "%y = concat(%x, dim=0)", "%x"),
    "concat_of_slices": (
        X,
        """%a = slice(%x, dim=1, start=0, stop=2)
        %b = slice(%x, dim=1, start=2, stop=3)
        %c = slice(%x, dim=1, start=3, stop=6)
        %y = concat(%a, %b, %c, dim=1)""",
        "%x",
    ),
    "concat_of_some_slices": (
        X,
        """%a = slice(%x, dim=1, start=1, stop=2)
        %b = slice(%x, dim=1, start=2, stop=3)
        %y = concat(%z, %a, %b, dim=1)""",
        "slice(%x, dim=1, start=1, stop=3)\nconcat(%z, %slice, dim=1)",
    ),
    "flip_of_flip": (X, "%a = flip(%x, dims=(0, 1))\n%y = flip(%a, dims=(0, 1))", "%x"),
    "flip_of_ones": ("x: f32[4, 1]", "%y = flip(%x, dims=(1,))", "%x"),
    "reduce_of_ones": ("x: f32[4, 1]", '%y = reduce(%x, kind="sum", dims=(1,))', "view(%x, shape=(4,))"),
    "times_one": (X, one(1.0) + "%y = mul(%x, %c)", "%x"),
    "one_times": (X, one(1.0) + "%y = mul(%c, %x)", "%x"),
    "times_many_ones": ("x: f32[6]", one(1.0, "(4, 6)") + "%y = mul(%c, %x)", "expand(%x, shape=(4, 6))"),
    "over_one": (X, one(1.0) + "%y = div(%x, %c)", "%x"),
    "plus_zero": ("x: i64[4]", one(0, dtype="i64") + "%y = add(%x, %c)", "%x"),
    "plus_negative_zero": (X, one(-0.0) + "%y = add(%c, %x)", "%x"),
    "minus_zero": (X, one(0.0) + "%y = sub(%x, %c)", "%x"),
    "power_1": (X, one(1.0) + "%y = pow(%x, %c)", "%x"),
    "power_2": (X, one(2.0) + "%y = pow(%x, %c)", "square(%x)"),
    "power_half": ("x: f32[4]", one(0.5) + "%a = square(%x)\n%y = pow(%a, %c)", "square(%x)\nsqrt(%a)"),
    "neg_neg": (X, "%a = neg(%x)\n%y = neg(%a)", "%x"),
    "not_not": ("x: b1[4]", "%a = logical_not(%x)\n%y = logical_not(%a)", "%x"),
    "plus_negative": (X, "%a = neg(%z)\n%y = add(%x, %a)", "sub(%x, %z)"),
    "negative_plus": (X, "%a = neg(%z)\n%y = add(%a, %x)", "sub(%x, %z)"),
    "minus_negative": (X, "%a = neg(%z)\n%y = sub(%x, %a)", "add(%x, %z)"),
    "decided": (X, one("True", "()", "b1") + "%y = where(%c, %x, %z)", "%x"),
    "decided_otherwise": (X, one("False", "()", "b1") + "%y = where(%c, %z, %x)", "%x"),
    "same_choice": (f"c: b1[2, 1, 1], {X}", "%y = where(%c, %x, %x)", "expand(%x, shape=(2, 4, 6))"),
    "with_itself": (X, "%y = maximum(%x, %x)", "%x"),
    "same_cast": (X, "%y = cast(%x, dtype=f32)", "%x"),
    "cast_of_exact_cast": (X, "%a = cast(%x, dtype=f64)\n%y = cast(%a, dtype=f32)", "%x"),
    "cast_through": ("x: b1[4]", "%a = cast(%x, dtype=f32)\n%y = cast(%a, dtype=i64)", "cast(%x, dtype=i64)"),
    "broadcast_instead": ("x: f32[6], z: f32[4, 6]", "%a = expand(%x, shape=(4, 6))\n%y = mul(%a, %z)", "mul(%x, %z)"),
    "leading_ones": ("x: f32[6], z: f32[4, 6]", "%a = view(%x, shape=(1, 6))\n%y = mul(%z, %a)", "mul(%z, %x)"),
    "one_of_two_expands": (
        "x: f32[6], z: f32[6]",
        "%a = expand(%x, shape=(4, 6))\n%b = expand(%z, shape=(4, 6))\n%y = add(%a, %b)",
        "expand(%z, shape=(4, 6))\nadd(%x, %b)",
    ),
}

LEFT = {
    "view of permute": (X, "%a = permute(%x, dims=(1, 0))\n%y = view(%a, shape=(24,))"),
    "slice across pieces": (X, "%a = concat(%z, %x, dim=1)\n%y = slice(%a, dim=1, start=5, stop=7)"),
    "slice of padding": (X, "%a = pad(%x, pads=((0, 0), (2, 1)))\n%y = slice(%a, dim=1, start=1, stop=4)"),
    "slices of different dimensions": (
        X,
        "%a = slice(%x, dim=0, start=1, stop=3)\n%y = slice(%a, dim=1, start=1, stop=3)",
    ),
    "pads with two values": (
        X,
        "%a = pad(%x, pads=((1, 0), (0, 0)), value=-0.0)\n%y = pad(%a, pads=((1, 0), (0, 0)))",
    ),
    "slices in another order": (
        X,
        """%a = slice(%x, dim=1, start=0, stop=3)
        %b = slice(%x, dim=1, start=3, stop=6)
        %y = concat(%b, %a, dim=1)""",
    ),
    "float plus 0": (X, one(0.0) + "%y = add(%x, %c)"),
    "float minus -0": (X, one(-0.0) + "%y = sub(%x, %c)"),
    "zero minus": (X, one(0.0) + "%y = sub(%c, %x)"),
    "one over": (X, one(1.0) + "%y = div(%c, %x)"),
    "minus itself": (X, "%y = sub(%x, %x)"),
    "over itself": (X, "%y = div(%x, %x)"),
    "times zero": (X, one(0.0) + "%y = mul(%x, %c)"),
    "integer to a negative power": ("x: i64[4]", one(-1, dtype="i64") + "%y = pow(%x, %c)"),
    "cast that rounds": (X, "%a = cast(%x, dtype=f16)\n%y = cast(%a, dtype=f32)"),
    "large integers": ("x: i64[4]", "%a = cast(%x, dtype=f64)\n%y = cast(%a, dtype=i64)"),
    "not not of a number": (X, "%a = logical_not(%x)\n%y = logical_not(%a)"),
    "the expand that gives the shape": ("x: f32[6]", "%a = expand(%x, shape=(4, 6))\n%y = exp(%a)"),
    "broadcast of ones in between": (
        "x: f32[6], z: f32[4, 6]",
        "%a = view(%x, shape=(6, 1))\n%b = view(%z, shape=(1, 24))\n%y = mul(%a, %b)",
    ),
    "values over sizes": ("x: f32[s0]", one("s0") + "%y = mul(%x, %c)"),
}


def operators(graph: object) -> list[str]:
    lines = [line.strip() for line in str(graph).splitlines()[1:-2]]
    return [line.split(" = ", 1)[1] for line in lines if " = full(" not in line]


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    signature, before, after = CASES[name]
    graph = program(signature, before, "%y")
    simple = Simplify().run(graph)
    expected = [] if after.startswith("%") else after.splitlines()
    assert operators(simple) == expected
    if not expected:
        assert simple.outputs == [after[1:]]
    check_same(graph, simple, s0=3)
    assert Simplify().run(simple).outputs == simple.outputs
    gained = traffic(simple, {"s0": 3}).bytes - traffic(graph, {"s0": 3}).bytes
    assert gained <= 0


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    signature, body = LEFT[name]
    graph = program(signature, body, "%y")
    assert str(Simplify().run(graph)) == str(graph)


def test_every_rule_is_tested() -> None:
    rules = {rule.__name__ for table in (MOVEMENT, ARITHMETIC) for rules in table.values() for rule in rules}
    named = {name for rule in rules for name in CASES if name.startswith(rule)}
    assert rules - {"rule", "power"} <= named, "a rule without a case of its name"


def test_every_rule_draws_its_picture() -> None:
    for table in (MOVEMENT, ARITHMETIC):
        for rules in table.values():
            for rule in rules:
                assert "=>" in (rule.__doc__ or ""), rule.__name__


def test_one_sweep_is_enough() -> None:
    body = "%v0 = view(%x, shape=(24,))\n"
    for i in range(1, 30):
        body += f"%v{i} = view(%v{i - 1}, shape=({(24, 1) if i % 2 else (24,)}))\n".replace("((", "(").replace(
            "))", ")"
        )
    graph = program(X, body + "%y = view(%v29, shape=(4, 6))", "%y")
    assert Simplify().run(graph).outputs == ["x"]


@pytest.mark.parametrize("source", [t for t in _EXACT_IN if not t.is_float])
def test_exact_casts_lose_nothing(source: DType) -> None:
    """Every value of small types, and the extremes of the others, come back from each type listed."""
    kind = np.dtype(source.numpy)
    low, high = (0, 1) if source is DType.bool else (np.iinfo(kind).min, np.iinfo(kind).max)
    values = np.array(sorted({low, low + 1, 0, 1, high - 1, high} | set(range(max(low, -300), min(high, 300)))), kind)
    for target in _EXACT_IN[source]:
        narrow = {"bf16": 8, "f16": 11, "f32": 24, "c64": 24}.get(target.short)
        if narrow is None:
            assert (values.astype(target.numpy).real.astype(kind) == values).all(), target
        else:
            assert max(abs(int(low)), int(high)) <= 2**narrow, target


def test_writes_and_kernels_go_through() -> None:
    body = """
        %a = neg(%p)
        %b = neg(%a)
        %q = kernel(x0=%b) {
        %v0 = exp(%x0)
        yield %v0
        }
        write p <- %q
    """
    graph = program("p: f32[4]", body)
    simple = Simplify().run(graph)
    assert [node.inputs for node in simple.nodes] == [("p",)]
    values = np.arange(4.0)
    np.testing.assert_array_equal(interpret(simple, {"p": values}).writes["p"], np.exp(values))
