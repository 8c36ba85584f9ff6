"""Branches and loops as they run: bodies as programs of their own, against the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.autodiff.reverse import differentiate
from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.errors import ExecutionError
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import ControlLaunch
from daceml_train.runtime.executable import Executable
from daceml_train.transformations.pipelines import TRAINING
from tests.graph import control_flow
from tests.graph.control_flow import LOOP

pytestmark = pytest.mark.compiled
KERNELS = Path(os.environ["DACEML_TRAIN_CACHE"]) / "kernels"
RNG = np.random.default_rng(0)


def executable(graph: Graph) -> Executable:
    program = lower(graph)
    paths = compile_kernels([code for each in program.all for code in each.codes], KERNELS)
    return Executable(program, {key: load(path, key) for key, path in paths.items()})


def check(graph: Graph, run: Executable, **given: np.ndarray) -> None:
    inputs = {
        name: given.get(name, RNG.normal(size=[4 if not isinstance(s, int) else s for s in entry.tensor.shape]))
        for name, entry in graph.inputs.items()
    }
    dtypes = {"f": torch.float32, "b": torch.bool, "i": torch.int64}
    for _ in range(2):
        results = run([torch.tensor(x, dtype=dtypes[x.dtype.kind]) for x in map(np.asarray, inputs.values())])
        for a, b in zip(results, interpret(graph, inputs).outputs, strict=True):
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-4, atol=1e-5)


CASES: dict[str, tuple[Callable[[], Graph], dict[str, np.ndarray]]] = {
    "then": (control_flow.branch, {"c": np.array(True)}),
    "else": (control_flow.branch, {"c": np.array(False)}),
    "loop": (control_flow.loop, {}),
    "no steps": (lambda: parse(LOOP.replace("s0", "0")), {}),
    "nested": (control_flow.nested, {}),
    "until": (control_flow.until, {"i": np.array(0), "n": np.array(3)}),
    "until at once": (control_flow.until, {"i": np.array(0), "n": np.array(0)}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transformed", [False, True])
def test_results_are_the_interpreters(name: str, transformed: bool) -> None:
    make, given = CASES[name]
    graph = make()
    if not name.startswith("until"):
        seeds = {o: graph.input(f"grad_{o}", graph.tensors[o]) for o in graph.outputs}
        found = differentiate(graph, seeds, [n for n, i in graph.inputs.items() if i.tensor.rank and "grad" not in n])
        graph.output(*(g for g in found.values() if g is not None))
    levels = ("intra_operator", "fusion", "layout", "global_movement")
    after = TRAINING.run(graph, levels if transformed else ("intra_operator",))
    check(after, executable(after), **given)


def test_operands_that_do_not_lie_densely() -> None:
    graph = parse(
        LOOP.replace("x: f32[s0, 3, 4]", "xt: f32[4, s0, 3]")
        .replace("h: f32[3, 4]", "ht: f32[4, 6]")
        .replace(
            "  %last,",
            "  %h0 = slice(%ht, dim=1, start=0, stop=6, step=2)\n  %h = permute(%h0, dims=(1, 0))\n"
            "  %x = permute(%xt, dims=(1, 2, 0))\n  %last,",
        )
        .replace("%h, %x, %w,", "%h, %x, %w,", 1)
    )
    check(graph, executable(graph))


def test_only_the_branch_taken_runs() -> None:
    text = control_flow.BRANCH.replace("%s = sin(%a)", "%s = sin(%a)\n    %z = matmul(%s, %b)").replace(
        "yield %s", "yield %z"
    )
    run = executable(parse(text))
    (launch,) = run.program.launches
    assert isinstance(launch, ControlLaunch)
    assert [len(body.launches) for body in launch.bodies] == [2, 2]
    x, w = torch.randn(3, 4), torch.full((4, 4), torch.nan)
    assert run([torch.tensor(True), x, w])[0].isnan().all()
    chosen = executable(control_flow.branch())  # whose other side does not read w
    assert not chosen([torch.tensor(False), x, w])[0].isnan().any()


def test_a_failure_inside_names_the_line() -> None:
    text = """
    graph g(c: b1[] input, x: f32[3, 4] input, i: i64[2] input) {
      %y = cond(%c, %x, %i, then=body(x, i) {
        %e = embedding(%x, %i)
        yield %e
      }, orelse=body(x, i) {
        %e = embedding(%x, %i)
        yield %e
      })  # layer model.py:12
      return %y
    }
    """
    run = executable(parse(text))
    given = [torch.tensor(True), torch.randn(3, 4), torch.tensor([0, 7])]
    with pytest.raises(ExecutionError, match=r"model\.py:12"):
        run(given)
    given[2] = torch.tensor([0, 2])
    torch.testing.assert_close(run(given)[0], given[1][[0, 2]])
