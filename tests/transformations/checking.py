"""check_rewrite: what every rewrite must fulfil on a graph; check_pass: the same for passes that promise no formula."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from expecttest import assert_expected_inline

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.sizes import bind
from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.verify import verify
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse
from daceml_train.passes.base import Pass, Rewrite
from daceml_train.tensor import DType, same_shape, simplify

Golden = Callable[..., None]


def assert_text(graph: Graph, expected: str) -> None:
    """The operators of `graph`, which stand in the test beside its input; `--refresh-golden` writes them.

    `expected` is a triple-quoted literal at the call, indented by eight spaces; the signature is left out.
    """
    lines = str(graph).rstrip("\n").splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith("{")) + 1
    text = "\n".join([" " * 8 + line.removeprefix("  ") for line in lines[start:-1]])
    assert_expected_inline(f"{text}\n        ", expected, skip=1)


def program(signature: str, body: str, result: str = "") -> Graph:
    """A graph from its text without frame and roles: `program("x: f32[4]", "%y = neg(%x)", "%y")`."""
    signature = re.sub(r"(\](?:@\d+)?)(?! \w)", r"\1 input", signature)
    lines = [line.strip() for line in body.strip().splitlines()]
    frame = [f"graph test({signature}) {{", *lines, f"return {result}".rstrip(), "}"]
    graph = parse("\n".join(frame))
    verify(graph)
    return graph


def arrays(graph: Graph, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    """Random inputs: floats of a normal distribution, integers in 0..2, booleans; `sizes` gives symbols values."""
    random = np.random.default_rng(seed)
    results: dict[str, np.ndarray] = {}
    for name, entry in graph.inputs.items():
        shape = bind(entry.tensor.shape, sizes)
        if entry.tensor.dtype.is_float:
            results[name] = random.standard_normal(shape)
        else:
            results[name] = random.integers(0, 2 if entry.tensor.dtype is DType.bool else 3, shape)
            results[name] = results[name].astype(entry.tensor.dtype.numpy)
    return results


def check_same(before: Graph, after: Graph, exact: bool = True, seed: int = 0, **sizes: int) -> None:
    """Both graphs are valid, and make the same results from random inputs, of the same sizes and element types."""
    verify(after)
    inputs = arrays(before, seed, **sizes)
    expected, given = interpret(before, inputs), interpret(after, inputs)
    assert len(expected.outputs) == len(given.outputs)
    for a, b in zip(expected.outputs, given.outputs, strict=True):
        compare(a, b, exact)
    for name, value in expected.writes.items():
        compare(value, given.writes.get(name, inputs[name]), exact)
    for a, b in zip(before.outputs, after.outputs, strict=True):
        assert before.tensors[a].dtype is after.tensors[b].dtype
        assert same_shape(before.tensors[a].shape, after.tensors[b].shape)


def compare(expected: Any, given: Any, exact: bool) -> None:
    assert expected.shape == given.shape
    assert expected.dtype == given.dtype
    if exact:
        np.testing.assert_array_equal(given, expected)
    else:
        np.testing.assert_allclose(given, expected, rtol=1e-9, atol=1e-12)


def check_pass(before: Graph, transformation: Pass, exact: bool = True, **sizes: int) -> Graph:
    """Same values, no byte more, nothing left to do, and the graph itself left alone."""
    text = str(before)
    after = transformation.run(before)
    assert str(before) == text, "the pass changed its input"
    check_same(before, after, exact, **sizes)
    gained = simplify(traffic(after).bytes - traffic(before).bytes)
    assert gained <= 0 if isinstance(gained, int) else gained.is_nonpositive, f"the pass adds {gained} bytes"
    assert str(transformation.run(after)) == str(after), "a second run finds more to do"
    return after


def check_rewrite(before: Graph, rewrite: Rewrite, exact: bool = True, **sizes: int) -> Graph:
    """What `check_pass` checks, and: promised bytes are measured bytes, and no match is left."""
    legal = [m for m in rewrite.matches(before) if m.refusal is None]
    assert legal, f"{rewrite.name} finds nothing"
    promised = simplify(sum((m.traffic for m in legal), start=0))
    after = check_pass(before, rewrite, exact, **sizes)
    measured = simplify(traffic(after).bytes - traffic(before).bytes)
    assert promised == measured, f"{rewrite.name} promises {promised} bytes, measured are {measured}"
    assert all(m.refusal for m in rewrite.matches(after)), "a match is left"
    assert all(str(m.apply()) for m in legal)
    return after


def refusals(graph: Graph, rewrite: Rewrite) -> list[str]:
    """Why the matches in `graph` are refused."""
    return [m.refusal for m in rewrite.matches(graph) if m.refusal]


def check_refused(graph: Graph, rewrite: Rewrite, sentence: str) -> None:
    """The rewrite finds one match, refuses it with `sentence`, and leaves the graph as it is."""
    assert refusals(graph, rewrite) == [sentence]
    assert rewrite.run(graph) is graph
