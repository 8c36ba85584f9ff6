from __future__ import annotations

import pytest
import sympy

from daceml_train.analysis.sizes import bind, derivation, solve
from daceml_train.errors import Invalid
from daceml_train.graph import Input
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.operator import make
from daceml_train.tensor import Dim, Tensor, symbol
from tests.graph.programs import statement

a, b, c = symbol("a"), symbol("b"), symbol("c")


def inputs(**shapes: tuple[Dim, ...]) -> dict[str, Input]:
    return {name: Input(Tensor(shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("declared", "given", "expected"),
    [
        ({"x": (a, 3)}, {"x": (5, 3)}, {"a": 5}),
        ({"x": (2 * a + 1,)}, {"x": (7,)}, {"a": 3}),
        ({"x": (a + b,), "y": (a,)}, {"x": (7,), "y": (3,)}, {"a": 3, "b": 4}),
        ({"x": (a * b,), "y": (a**2, a)}, {"x": (12,), "y": (9, 3)}, {"a": 3, "b": 4}),
        ({"x": (sympy.floor(a / 2),), "y": (c - a,), "z": (a,)}, {"x": (2,), "y": (1,), "z": (5,)}, {"a": 5, "c": 6}),
        ({"x": ()}, {"x": ()}, {}),
    ],
)
def test_solve(
    declared: dict[str, tuple[Dim, ...]], given: dict[str, tuple[int, ...]], expected: dict[str, int]
) -> None:
    assert solve(inputs(**declared), given) == expected


@pytest.mark.parametrize(
    ("declared", "given", "sentence"),
    [
        ({"x": (a, 3)}, {"x": (5, 4)}, "input 'x' expects f32[a, 3] where a = 5; given [5, 4]"),
        ({"x": (a, a)}, {"x": (5, 4)}, "input 'x' expects f32[a, a] where a = 5; given [5, 4]"),
        ({"x": (a,), "y": (a + 1,)}, {"x": (5,), "y": (5,)}, "input 'y' expects f32[a + 1] where a = 5; given [5]"),
        ({"x": (a,)}, {"x": (5, 1)}, "input 'x' expects f32[a]; given [5, 1]"),
        ({"x": (2 * a,)}, {"x": (5,)}, "input 'x' expects f32[2*a]; given [5]"),
        ({"x": (a,)}, {"x": (0,)}, "input 'x' expects f32[a]; given [0]"),
        ({"x": (a,), "y": (1,)}, {"x": (1,)}, "input 'y' is missing: f32[1]"),
        ({"x": (a,)}, {"x": (1,), "z": ()}, "there is no input 'z'; the inputs are x"),
        ({"x": (a * b,)}, {"x": (6,)}, "has no value; an input's shape must contain it"),
    ],
)
def test_refusals(declared: dict[str, tuple[Dim, ...]], given: dict[str, tuple[int, ...]], sentence: str) -> None:
    with pytest.raises(Invalid) as caught:
        solve(inputs(**declared), given)
    assert sentence in str(caught.value)


def test_derivation_goes_one_symbol_at_a_time() -> None:
    steps = derivation(inputs(x=(a * b + c,), y=(2 * a,), z=(c + 1,)))
    assert [(s.symbol, s.input, s.factor, s.offset) for s in steps] == [(a, "y", 2, 0), (c, "z", 1, 1), (b, "x", a, c)]
    assert derivation(inputs(x=(a**2,), y=(a * b,))) == []


def test_bind_reaches_every_attribute() -> None:
    sizes = {"a": 4, "b": 3}
    assert bind(make("view", shape=(a, 2 * b)), sizes) == make("view", shape=(4, 6))
    body = (statement("full", "", "v", value=1 / a, shape=(a,)), statement("slice", "v", "w", dim=0, start=0, stop=b))
    bound = bind(Kernel((), body, ("w",)), sizes)
    expected = (
        statement("full", "", "v", value=0.25, shape=(4,)),
        statement("slice", "v", "w", dim=0, start=0, stop=3),
    )
    assert bound == Kernel((), expected, ("w",))
    op = make("relu")
    assert bind(op, sizes) is op
    with pytest.raises(Invalid, match="size c has no value"):
        bind(make("view", shape=(c,)), sizes)
