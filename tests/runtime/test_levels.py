"""Levels as they run: cells as programs for any number of rows, against recursion in PyTorch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daceml_train.autodiff.reverse import differentiate
from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.errors import ExecutionError
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse
from daceml_train.lowering.lower import lower
from daceml_train.runtime import tune_matmul
from daceml_train.runtime.encoding import decode, encode
from daceml_train.runtime.executable import Executable
from daceml_train.runtime.tune_matmul import MatmulShape
from daceml_train.transformations.pipelines import TRAINING
from tests.graph import levels
from tests.graph.levels import Node

pytestmark = pytest.mark.compiled
KERNELS = Path(os.environ["DACEML_TRAIN_CACHE"]) / "kernels"
RNG = np.random.default_rng(0)
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12}
"""The error of a result as a share of its norm, by type: a program may add up in another order than PyTorch."""
TEXTS = {"tree": levels.TREE, "child_sum": levels.CHILD_SUM}
FORESTS: dict[str, list[list[Node]]] = {
    "tree": [
        [levels.random_tree(RNG, 7)],
        [levels.random_tree(RNG, n) for n in (1, 30, 2, 9)],
        [Node()],
        [levels.chain(3)],
    ],
    "child_sum": [
        levels.random_dag(RNG, 30),
        [Node((shared := Node((Node(),)), shared)), Node((shared,))],
        [Node(), Node()],
        levels.random_dag(RNG, 70),
    ],
}


def executable(graph: Graph) -> Executable:
    program = decode(encode(lower(graph)))
    paths = compile_kernels([code for each in program.all for code in each.codes], KERNELS)
    return Executable(program, {key: load(path, key) for key, path in paths.items()})


def trained(name: str, dtype: str, transformed: bool) -> tuple[Graph, list[str], Executable]:
    """The graph, the parameters and inputs with gradients, and the program of results and gradients."""
    graph = parse(TEXTS[name].replace("f32[", f"{dtype}["))
    wrt = [n for n, entry in graph.inputs.items() if entry.tensor.dtype.is_float]
    whole = graph.copy()
    seeds = {o: whole.input(f"grad_{o}", graph.tensors[o]) for o in graph.outputs}
    found = differentiate(whole, seeds, wrt)
    whole.output(*(g for n in wrt if (g := found[n]) is not None))
    steps = ("intra_operator", "fusion", "layout", "global_movement") if transformed else ("intra_operator",)
    return graph, wrt, executable(TRAINING.run(whole, steps))


def check(name: str, roots: list[Node], graph: Graph, wrt: list[str], run: Executable, dtype: torch.dtype) -> None:
    result = levels.forest(name, roots)
    given = {
        n: torch.tensor(x, dtype=dtype if x.dtype.kind == "f" else torch.int64)
        for n, x in levels.inputs(name, result, RNG).items()
    }
    values = {n: x.double().requires_grad_() if n in wrt else x for n, x in given.items()}
    expected = levels.eager(name, result, values)
    weights = [torch.randn(e.shape, dtype=dtype) for e in expected]
    loss = sum((e * w.double()).sum() for e, w in zip(expected, weights, strict=True)) + values["w"].sum() * 0
    gradients = torch.autograd.grad(loss, [values[n] for n in wrt], allow_unused=True)
    results: list[Any] = run([*given.values(), *weights])
    limit = LIMITS[dtype]
    for value, reference in zip(results, (*expected, *gradients), strict=True):
        wanted = torch.zeros_like(value) if reference is None else reference
        assert (value.double() - wanted).norm() <= limit * max(float(wanted.detach().norm()), 1.0)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(("dtype", "transformed"), [("f32", True), ("f32", False), ("f64", True)])
def test_one_program_serves_all_structures(name: str, dtype: str, transformed: bool) -> None:
    graph, wrt, run = trained(name, dtype, transformed)
    torch_dtype = torch.float64 if dtype == "f64" else torch.float32
    for roots in (*FORESTS[name], *FORESTS[name]):
        check(name, roots, graph, wrt, run, torch_dtype)
    assert len(run._cells) == 2 * len(levels.ARITIES[name]), "a plan per kind and direction, for all sizes"


def test_libraries_of_matmuls_are_not_compared_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[MatmulShape] = []
    monkeypatch.setattr(tune_matmul, "SMALLEST", 0)
    monkeypatch.setattr(tune_matmul, "measure", lambda product: measured.append(product) or "blas")
    graph, wrt, run = trained("tree", "f32", transformed=True)
    for leaves in range(65, 127):
        check("tree", [levels.random_tree(RNG, leaves)], graph, wrt, run, torch.float32)
    assert 1 <= len(measured) <= 4, "those of one power of two"


MATMULS = """
graph matmuls(bounds: i64[levels, 1] input, x: f32[calls, INNER] input, w: f32[INNER, COLUMNS] parameter,
    v: f32[COLUMNS, INNER] parameter) {
  %a, %b = levels(%bounds, %x, %w, %v, cells=[body(x, w, v) {
    %a = matmul(%x, %w)
    %t = permute(%v, dims=(1, 0))
    %b = matmul(%x, %t)
    yield %a, %b
  }], types=(), counts=(calls,), rows=((1,),), children=((),), shared=((2, 3),), states=((),))
  return %a, %b
}
"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inner", "columns"), [(40, 48), (21, 37), (3, 5), (600, 130)])
def test_matmuls_of_any_number_of_rows(inner: int, columns: int, threads: int) -> None:
    rows = [*range(1, 20), 31, 64, 127, 128, 129, 150]
    run = executable(parse(MATMULS.replace("INNER", str(inner)).replace("COLUMNS", str(columns))))
    bounds = torch.tensor([0, *np.cumsum(rows)]).reshape(-1, 1)
    x, w, v = torch.randn(sum(rows), inner), torch.randn(inner, columns), torch.randn(columns, inner)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = run([bounds, x, w, v])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(a.double(), x.double() @ w.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(b.double(), x.double() @ v.double().T, rtol=1e-5, atol=1e-4)


def test_a_list_of_ten_thousand_nodes() -> None:
    run = executable(TRAINING.run(levels.tree(), ("intra_operator",)))
    result = levels.forest("tree", [levels.chain(10_000)])
    given = {n: torch.tensor(x) for n, x in levels.inputs("tree", result, np.random.default_rng(1)).items()}
    expected = levels.eager("tree", result, given)
    (value,) = run([x.float() if x.is_floating_point() else x for x in given.values()])
    assert (value.double() - expected[0]).norm() <= LIMITS[torch.float32] * expected[0].norm()


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("bounds", lambda x: x.flip(0), "the bounds of levels"),
        ("left", lambda x: x + 100, "reads row"),
        ("left", lambda x: torch.full_like(x, 8), "which no earlier level computes"),
    ],
)
def test_bad_structure_is_refused_before_it_is_read(name: str, change: Any, sentence: str) -> None:
    run = executable(TRAINING.run(levels.tree(), ("intra_operator",)))
    result = levels.forest("tree", [levels.random_tree(RNG, 5)])
    given = {n: torch.tensor(x) for n, x in levels.inputs("tree", result, RNG).items()}
    given[name] = change(given[name])
    with pytest.raises(ExecutionError, match=sentence):
        run([x.float() if x.is_floating_point() else x for x in given.values()])
