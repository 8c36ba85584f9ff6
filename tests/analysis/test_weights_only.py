"""What is moved before a graph, and what stays."""

import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.verify import verify
from daceml_train.analysis.weights_only import Split, again, split
from daceml_train.graph.graph import Graph
from daceml_train.ops.operator import make
from tests.transformations.checking import arrays, program


def parts(graph: Graph) -> Split:
    """The two parts, which together mean what the graph means."""
    result = split(graph)
    assert result is not None
    for part in (result.prologue, result.main):
        verify(part)
    given = arrays(graph, s0=3)
    prepared = interpret(result.prologue, {n: given[n] for n in result.prologue.inputs}).outputs
    known = {**given, **dict(zip(result.prepared, prepared, strict=True))}
    want, got = interpret(graph, given), interpret(result.main, {n: known[n] for n in result.main.inputs})
    for a, b in zip(want.outputs, got.outputs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert want.writes.keys() == got.writes.keys()
    return result


def labels(graph: Graph) -> list[str]:
    return [node.op.label for node in graph.nodes]


def test_arithmetic_of_parameters_moves() -> None:
    body = "%a = mul(%w, %g)\n%b = exp(%a)\n%y = add(%x, %b)\n%z = mul(%y, %a)"
    result = parts(program("x: f32[s0, 4], w: f32[4] parameter, g: f32[4] buffer", body, "%z"))
    assert (labels(result.prologue), labels(result.main)) == (["mul", "exp"], ["add", "mul"])
    assert result.prepared == ("b", "a")
    assert list(result.main.inputs) == ["x", "b", "a"]


def test_views_stay_with_who_reads_them() -> None:
    result = split(
        program("x: f32[3, 4], w: f32[5, 4] parameter", "%t = permute(%w, dims=(1, 0))\n%y = matmul(%x, %t)", "%y")
    )
    assert result is None
    body = "%e = exp(%w)\n%t = permute(%e, dims=(1, 0))\n%y = matmul(%x, %t)"
    moved = parts(program("x: f32[3, 4], w: f32[5, 4] parameter", body, "%y"))
    assert (labels(moved.prologue), labels(moved.main)) == (["exp"], ["permute", "matmul"])


def test_constants_are_made_on_both_sides() -> None:
    body = "%c = full(value=2.0, shape=())\n%a = mul(%w, %c)\n%y = mul(%x, %c)\n%z = add(%y, %a)"
    result = parts(program("x: f32[4], w: f32[4] parameter", body, "%z"))
    assert (labels(result.prologue), labels(result.main)) == (["full", "mul"], ["full", "mul", "add"])


@pytest.mark.parametrize(
    "body, result",
    [
        ("%a = exp(%w)", "%a"),  # the user's own: they may write to it
        ("%a = exp(%x)\n%y = add(%a, %w)", "%y"),
        ("%c = full(value=2.0, shape=(4,))\n%e = exp(%c)\n%y = add(%x, %e)", "%y"),
        ("%e = expand(%w, shape=(64, 4))\n%a = exp(%e)\n%y = add(%x, %a)", "%y"),  # much larger than what it is made of
    ],
)
def test_what_stays(body: str, result: str) -> None:
    assert split(program("x: f32[4], w: f32[4] parameter", body, result)) is None


def test_what_depends_on_sizes_stays() -> None:
    body = "%e = expand(%w, shape=(s0, 4))\n%a = exp(%e)\n%y = add(%x, %a)"
    assert split(program("x: f32[s0, 4], w: f32[4] parameter", body, "%y")) is None


def test_what_is_written_stays() -> None:
    graph = program("x: f32[4], w: f32[4] buffer", "%a = exp(%w)\n%y = add(%x, %a)\n%n = add(%w, %w)", "%y")
    graph.write("w", graph.value("n"))
    assert split(graph) is None


def test_random_numbers_stay() -> None:
    body = "%u = uniform(%seed, shape=(4,))\n%y = add(%x, %u)"
    assert split(program("x: f32[4], seed: i64[] buffer", body, "%y")) is None


def test_writes_stay_in_the_main_part() -> None:
    graph = program(
        "x: f32[4], w: f32[4] parameter, n: f32[4] buffer", "%a = exp(%w)\n%y = add(%x, %a)\n%m = add(%n, %y)", "%y"
    )
    graph.write("n", graph.value("m"))
    result = parts(graph)
    assert result.main.writes == {"n": "m"}
    assert not result.prologue.writes


def test_what_passes_leave_moves_after_the_first_prologue() -> None:
    body = "%a = exp(%w)\n%y = matmul(%x, %a)\n%z = add(%y, %g)"
    graph = program("x: f32[3, 4], w: f32[4, 4] parameter, g: f32[4] parameter", body, "%z")
    first = split(graph)
    assert first is not None
    main = first.main.empty()
    (moved,) = main.append(make("mul"), ("a", "a"))
    (halved,) = main.append(make("mul"), ("g", "g"), ["exp"])  # a name that the first prologue may have
    (y,) = main.append(make("matmul"), ("x", moved.name))
    (z,) = main.append(make("add"), (y.name, halved.name))
    (last,) = main.append(make("matmul"), (z.name, "a"))
    main.output(last)
    second = again(first, main)
    assert second is not None
    verify(second.prologue)
    verify(second.main)
    assert (labels(second.prologue), labels(second.main)) == (["exp", "mul", "mul"], ["matmul", "add", "matmul"])
    given = arrays(graph)
    results = interpret(second.prologue, {n: given[n] for n in second.prologue.inputs}).outputs
    known = {**given, **dict(zip(second.prepared, results, strict=True))}
    a = np.exp(given["w"])
    want = (given["x"] @ (a * a) + given["g"] ** 2) @ a
    got = interpret(second.main, {n: known[n] for n in second.main.inputs}).outputs[0]
    np.testing.assert_allclose(got, want)
    assert list(second.main.inputs)[-len(second.prepared) :] == list(second.prepared)


def test_nothing_more_to_move() -> None:
    graph = program("x: f32[4], w: f32[4] parameter", "%a = exp(%w)\n%y = add(%x, %a)", "%y")
    first = split(graph)
    assert first is not None
    assert again(first, first.main) == first
    assert again(None, first.main.empty()) is None
