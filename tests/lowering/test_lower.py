"""Lowering and execution of whole graphs, against the interpreter: views, copies, writes, updates, shared results."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from daceml_train.analysis.aliases import view_strides
from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.traffic import traffic
from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.graph.graph import Graph
from daceml_train.lowering.cost import costs
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import CopyLaunch, KernelLaunch
from daceml_train.runtime.executable import Executable
from daceml_train.tensor import Tensor, symbol
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise
from daceml_train.transformations.global_movement.concatenate_in_place import ConcatenateInPlace
from daceml_train.transformations.global_movement.schedule import Schedule
from daceml_train.transformations.global_movement.update_in_place import UpdateInPlace
from tests.transformations.checking import arrays, program

pytestmark = pytest.mark.compiled
KERNELS = Path(os.environ["DACEML_TRAIN_CACHE"]) / "kernels"


def executable(graph: Graph, results: int | None = None) -> Executable:
    lowered = lower(graph, results)
    paths = compile_kernels(lowered.codes, KERNELS)
    return Executable(lowered, {key: load(path, key) for key, path in paths.items()})


def check(graph: Graph, **sizes: int) -> Executable:
    """Outputs and written inputs equal the interpreter's; twice, so that nothing depends on a first run."""
    run = executable(graph)
    inputs = arrays(graph, **sizes)
    for _ in range(2):
        tensors = {
            name: torch.as_tensor(x.copy(), dtype=getattr(torch, graph.inputs[name].tensor.dtype.name))
            for name, x in inputs.items()
        }
        expected = interpret(graph, inputs)
        results = run(list(tensors.values()))
        for a, b in zip(results, expected.outputs, strict=True):
            np.testing.assert_allclose(a.numpy(), b, rtol=1e-5, atol=1e-6)
        for name in graph.inputs:
            wanted = expected.writes.get(name, inputs[name])
            np.testing.assert_allclose(tensors[name].numpy(), wanted, rtol=1e-5, atol=1e-6)
    return run


GRAPHS = {
    "view that takes a copy": program(
        "x: f32[4, 6]", "%t = permute(%x, dims=(1, 0))\n%v = view(%t, shape=(24,))\n%y = exp(%v)", "%y"
    ),
    "views of views": program(
        "x: f32[4, 6]",
        "%a = slice(%x, dim=1, start=1, stop=5, step=2)\n%b = permute(%a, dims=(1, 0))\n"
        "%c = expand(%b, shape=(3, 2, 4))\n%y = neg(%c)",
        "%y",
    ),
    "an output that is an input": program("x: f32[4]", "%y = exp(%x)", "%x, %y"),
    "an output that is a view of an input": program("x: f32[4, 6]", "%y = permute(%x, dims=(1, 0))", "%y"),
    "one array as two outputs": program("x: f32[4]", "%y = exp(%x)", "%y, %y"),
    "an output and a view of it": program("x: f32[4]", "%y = exp(%x)\n%v = view(%y, shape=(2, 2))", "%y, %v"),
    "a constant for a library call": program(
        "x: f32[3, 3]", "%c = full(value=2.0, shape=(3, 3))\n%y = matmul(%x, %c)", "%y, %c"
    ),
    "product of transposed views": program(
        "x: f32[5, 3], w: f32[5, 4]", "%t = permute(%x, dims=(1, 0))\n%y = matmul(%t, %w)", "%y"
    ),
    "matmul with a broadcast operand": program(
        "x: f32[2, 3, 4], w: f32[4, 5]", "%e = expand(%w, shape=(2, 4, 5))\n%y = matmul(%x, %e)", "%y"
    ),
    "a mask of two index arrays": program(
        "x: f32[4, 4]",
        """
        %y = kernel(x0=%x) {
          %r = iota(shape=(4, 1), dim=0)
          %c = iota(shape=(1, 4), dim=1)
          %m = le(%c, %r)
          %z = full(value=0.0)
          %w = where(%m, %x0, %z)
          yield %w
        }
        """,
        "%y",
    ),
    "attention with a filled and an added mask": program(
        "q: f32[2, 3, 35, 5], k: f32[2, 3, 37, 5], v: f32[2, 3, 37, 5], b: b1[2, 1, 1, 37], "
        "m: f32[35, 1], g: f32[2, 3, 35, 5]",
        """
        %y, %l = fused_attention(%q, %k, %v, %b, %m, scale=0.4, fills=(-2.0, None))
        %gq, %gk, %gv = fused_attention_grad(%g, %q, %k, %v, %y, %l, %b, %m, scale=0.4, fills=(-2.0, None))
        """,
        "%y, %l, %gq, %gk, %gv",
    ),
    "attention on views, with dropout": program(
        "x: f32[2, 40, 3, 2, 16], g: f32[2, 2, 40, 16], s: i64[]",
        """
        %p = permute(%x, dims=(2, 0, 3, 1, 4))
        %a = slice(%p, dim=0, start=0, stop=1)
        %b = slice(%p, dim=0, start=1, stop=2)
        %c = slice(%p, dim=0, start=2, stop=3)
        %q = view(%a, shape=(2, 2, 40, 16))
        %k = view(%b, shape=(2, 2, 40, 16))
        %v = view(%c, shape=(2, 2, 40, 16))
        %y, %l = fused_attention(%q, %k, %v, %s, scale=0.25, p=0.3, stream=1)
        %gq, %gk, %gv = fused_attention_grad(%g, %q, %k, %v, %y, %l, %s, scale=0.25, p=0.3, stream=1)
        """,
        "%y, %l, %gq, %gk, %gv",
    ),
    "attention with a mask, and dropout whose probability is read": program(
        "q: f32[2, 3, 35, 5], k: f32[2, 3, 37, 5], v: f32[2, 3, 37, 5], s: i64[], n: f64[], m: f32[35, 1], "
        "g: f32[2, 3, 35, 5]",
        """
        %o = sigmoid(%n)
        %y, %l = fused_attention(%q, %k, %v, %s, %o, %m, scale=0.4, fills=(None,), stream=1, given=True)
        %gq, %gk, %gv = fused_attention_grad(%g, %q, %k, %v, %y, %l, %s, %o, %m, scale=0.4, fills=(None,), stream=1, given=True)
        """,
        "%y, %l, %gq, %gk, %gv",
    ),
    "attention without masks": program(
        "q: f32[1, 2, 20, 24], k: f32[1, 2, 37, 24], v: f32[1, 2, 37, 24], g: f32[1, 2, 20, 24]",
        """
        %y, %l = fused_attention(%q, %k, %v, scale=0.3)
        %gq, %gk, %gv = fused_attention_grad(%g, %q, %k, %v, %y, %l, scale=0.3)
        %z, %n = fused_attention(%q, %k, %v, scale=-0.3)
        %hq, %hk, %hv = fused_attention_grad(%g, %q, %k, %v, %z, %n, scale=-0.3)
        """,
        "%y, %l, %gq, %gk, %gv, %z, %n, %hq, %hk, %hv",
    ),
    "attention in float64, one query": program(
        "q: f64[1, 2, 1, 3], k: f64[1, 2, 9, 3], v: f64[1, 2, 9, 3], g: f64[1, 2, 1, 3]",
        """
        %y, %l = fused_attention(%q, %k, %v, scale=1.0)
        %gq, %gk, %gv = fused_attention_grad(%g, %q, %k, %v, %y, %l, scale=1.0)
        """,
        "%y, %gq, %gk, %gv",
    ),
    "a convolution of sequences": program(
        "x: f32[2, 3, 9], w: f32[4, 3, 2], b: f32[4], g: f32[2, 4, 6]",
        """
        %y = convolution(%x, %w, %b, stride=(2,), padding=(3,), dilation=(3,), output_padding=(0,))
        %gx = convolution_input_grad(%y, %w, input_shape=(2, 3, 9), stride=(2,), padding=(3,), dilation=(3,), output_padding=(0,))
        %gw = convolution_weight_grad(%y, %x, weight_shape=(4, 3, 2), stride=(2,), padding=(3,), dilation=(3,), output_padding=(0,))
        """,
        "%y, %gx, %gw",
    ),
    "a convolution of sequences with their channels last": program(
        "s: f32[2, 9, 3], v: f32[4, 2, 3], b: f32[4]",
        """
        %x = permute(%s, dims=(0, 2, 1))
        %w = permute(%v, dims=(0, 2, 1))
        %y = convolution(%x, %w, %b, stride=(1,), padding=(1,), dilation=(3,), output_padding=(0,))
        %gx = convolution_input_grad(%y, %w, input_shape=(2, 3, 9), stride=(1,), padding=(1,), dilation=(3,), output_padding=(0,))
        %gw = convolution_weight_grad(%y, %x, weight_shape=(4, 3, 2), stride=(1,), padding=(1,), dilation=(3,), output_padding=(0,))
        """,
        "%y, %gx, %gw",
    ),
    "sequences with their channels last, moved": program(
        "s: f32[2, 5, 3], t: f32[2, 5, 4]",
        """
        %x = permute(%s, dims=(0, 2, 1))
        %y = permute(%t, dims=(0, 2, 1))
        %p = pad(%x, pads=((0, 1), (2, 0), (3, 4)), value=0.5)
        %c = concat(%x, %y, %x, dim=1)
        %f = flip(%c, dims=(1, 2))
        %e = exp(%p)
        """,
        "%p, %c, %f, %e",
    ),
    "no elements": program("x: f32[0, 3]", '%y = exp(%x)\n%s = reduce(%x, kind="sum", dims=(0,))', "%y, %s"),
    "one element": program("x: f32[1, 1]", '%y = exp(%x)\n%s = reduce(%y, kind="sum", dims=(0, 1))', "%y, %s"),
    "integers and booleans": program(
        "i: i64[4], b: b1[4], x: f32[4]", "%j = add(%i, %i)\n%n = logical_not(%b)\n%y = where(%n, %x, %x)", "%j, %n, %y"
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_lowered_graphs_compute_what_they_mean(name: str) -> None:
    check(GRAPHS[name])


def test_operands_of_a_concatenation_are_copied_together() -> None:
    """Results of a library lie apart: those of equal layouts are copied by one launch, dense ones bytewise by one."""
    parts = ", ".join(f"w{i}: f32[6, 8]" for i in range(5))
    matmuls = "".join(f"%m{i} = matmul(%x, %w{i})\n" for i in range(5))
    for dim, kind in ((1, KernelLaunch), (0, CopyLaunch)):
        graph = program(
            f"x: f32[3, 6], {parts}, z: f32[3, 8]",
            f"{matmuls}%k = exp(%z)\n%c = concat({', '.join(f'%m{i}' for i in range(5))}, %k, dim={dim})\n%y = exp(%c)",
            "%y",
        )
        graph = ConcatenateInPlace().run(graph)
        check(graph)
        lowered = lower(graph)
        copies = [launch for launch in lowered.launches if isinstance(launch, kind)]
        assert len(lowered.launches) == 5 + 1 + 1 + 1 and len(copies) == (3 if kind is KernelLaunch else 1)
        found = costs(graph, lowered)
        assert sum(cost.bytes for cost in found) == traffic(graph).bytes


def test_results_of_the_user_share_no_memory() -> None:
    run = check(GRAPHS["one array as two outputs"])
    first, second = run([torch.ones(4)])
    first.zero_()
    assert second.any()


def test_arrays_kept_for_the_backward_pass_may_share_memory() -> None:
    lowered = lower(GRAPHS["one array as two outputs"], results=1)
    assert len(lowered.launches) == 1


def test_a_body_that_is_no_loop_nest_runs_statement_by_statement() -> None:
    graph = program(
        "x: f32[3, 4, 5], p: f32[4]",
        """
        %s, %t, %q = kernel(x0=%x, x1=%p) {
          %c = full(value=2.0)
          %d = mul(%x0, %c)
          %a = reduce(%d, kind="sum", dims=(0,))
          %b = reduce(%d, kind="sum", dims=(1,))
          %e = reduce(%d, kind="sum", dims=(2,))
          %f = add(%x1, %c)
          yield %a, %b, %f
        }
        """,
        "%s, %t, %q",
    )
    check(graph)


WRITES = program(
    "p: f32[8], g: f32[8], m: f32[8]",
    "%k = full(value=0.5)\n%a = mul(%m, %k)\n%n = add(%a, %g)\n%q = sub(%p, %n)\nwrite p <- %q\nwrite m <- %n",
    "%g",
)


def test_writes_come_after_every_reader() -> None:
    run = check(WRITES)
    assert any(isinstance(launch, CopyLaunch) for launch in run.program.launches)


def test_updates_in_place_need_no_copy_and_no_memory() -> None:
    graph = UpdateInPlace().run(FuseElementwise().run(WRITES))
    run = check(graph)
    assert sum(isinstance(launch, KernelLaunch) for launch in run.program.launches) == 1
    assert run.plan(()).arena_bytes == 0


def test_inputs_that_exchange_their_values() -> None:
    graph = program("a: f32[4], b: f32[4]", "write a <- %b\nwrite b <- %a", "")
    check(graph)


def test_an_input_that_becomes_its_transpose() -> None:
    """No element is stored over another one that is still to be read."""
    check(program("a: f32[40, 40], b: f32[4]", "%t = permute(%a, dims=(1, 0))\nwrite a <- %t\nwrite b <- %b"))


WAITING = {
    "a view of what a check needs": """
        %t = permute(%p, dims=(1, 0))
        %m = mul(%q, %t)
        %n = add(%p, %x)
        %y = embedding(%n, %i)
        write q <- %m
        write p <- %n
        """,
    "a reader of both": """
        %m = add(%q, %x)
        %l = mul(%m, %p)
        %e = exp(%l)
        %n = add(%p, %x)
        %y = embedding(%n, %i)
        write q <- %m
        write p <- %n
        write r <- %e
        """,
}


@pytest.mark.parametrize("case", WAITING)
def test_states_that_a_check_needs_are_read_before(case: str) -> None:
    """Updates wait for checks of the data, unless what they read is overwritten before the check."""
    states = ", ".join(f"{name}: f32[160, 160]" for name in "pqr")
    graph = program(f"x: f32[160, 160], i: i64[8], {states}", WAITING[case], "%y")
    check(Schedule().run(UpdateInPlace().run(graph)))


def test_versions_of_written_inputs_move() -> None:
    run = executable(WRITES)
    p, g, m = torch.ones(8), torch.ones(8), torch.ones(8)
    run([p, g, m])
    assert (p._version, g._version, m._version) == (1, 0, 1)


def test_one_program_serves_many_sizes() -> None:
    graph = program(
        "x: f32[n, 6], w: f32[6, 5]",
        '%y = matmul(%x, %w)\n%t = tanh(%y)\n%s = reduce(%t, kind="sum", dims=(0,))',
        "%t, %s",
    )
    run = executable(graph)
    for n in (2, 7, 1000, 3):
        x, w = torch.randn(n, 6), torch.randn(6, 5)
        t, s = run([x, w])
        torch.testing.assert_close(t, torch.tanh(x @ w))
        torch.testing.assert_close(s, torch.tanh(x @ w).sum(0), rtol=1e-4, atol=1e-4)
    assert len(run._plans) == 4


@pytest.mark.parametrize(
    ("shape", "strides", "target"),
    [
        ((4, 6), (6, 1), (24,)),
        ((4, 6), (1, 4), (24,)),
        ((2, 3, 4), (12, 4, 1), (6, 4)),
        ((2, 3, 4), (4, 8, 1), (6, 4)),
        ((4, 6), (12, 1), (2, 2, 6)),
        ((4, 6), (12, 2), (4, 3, 2)),
        ((1, 6), (99, 1), (6, 1, 1)),
        ((4, 6), (0, 1), (2, 2, 6)),
        ((0, 3), (3, 1), (3, 0)),
        ((1,), (5,), ()),
    ],
)
def test_view_strides_is_pytorchs_rule(shape: tuple, strides: tuple, target: tuple) -> None:
    extent = 1 + sum(max(s - 1, 0) * t for s, t in zip(shape, strides, strict=True))
    tensor = torch.arange(float(extent)).as_strided(shape, strides)
    try:
        viewed = tensor.view(target)
    except RuntimeError:
        assert view_strides(shape, strides, target) is None
        return
    found = view_strides(shape, strides, target)
    assert found is not None
    if tensor.numel():
        assert torch.equal(tensor.as_strided(target, found), viewed)


def test_view_strides_of_symbolic_sizes() -> None:
    n = symbol("n")
    assert view_strides((n, 4, 6), (24, 6, 1), (4 * n, 6)) == (6, 1)
    assert view_strides((n, 4, 6), Tensor((n, 4, 6), order=(1, 0, 2)).strides, (4 * n, 6)) is None


def test_values_that_are_written_back_are_one_launch() -> None:
    """Also where values change places: what another copy overwrites is copied before."""
    graph = program(
        "a: f32[4], b: f32[4], c: f32[3], x: f32[4]",
        "%y = add(%a, %x)\n%z = neg(%c)\n%s = exp(%y)",
        "%s",
    )
    for target, value in {"a": "b", "b": "a", "c": "z", "x": "y"}.items():
        graph.write(target, graph.value(value))
    launches = check(graph).program.launches
    final = launches[-1]
    assert isinstance(final, CopyLaunch) and len(final.pairs) == 4
    assert final.origin == "write a and 3 more"
    assert sum(isinstance(launch, CopyLaunch) for launch in launches) == 1 + 2  # a and b, before they are overwritten
