"""Matmuls in bfloat16: what is rounded and what is not, and errors beside those under autocast."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from benchmarks.agreement import mixed_agreement
from benchmarks.networks import TWELVE
from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.verify import verify
from daceml_train.graph.graph import Graph
from daceml_train.ops.contraction import Matmul
from daceml_train.tensor import DType
from daceml_train.transformations.intra_operator.mixed_precision import MixedPrecision
from tests.transformations.checking import arrays, assert_text, program

MIXED = MixedPrecision(least=1)
PIPELINE = dt.MIXED_PRECISION.with_options(MixedPrecision, least=1)


def types(graph: Graph, kind: type) -> list[DType]:
    return [graph.tensors[n.outputs[0]].dtype for n in graph.nodes if isinstance(n.op, kind)]


def near(before: Graph, after: Graph, tolerance: float) -> None:
    """Valid, results of the same types, and as near as matmuls of rounded factors are."""
    verify(after)
    inputs = arrays(before)
    expected, given = interpret(before, inputs), interpret(after, inputs)
    for a, b in zip(
        (*expected.outputs, *expected.writes.values()), (*given.outputs, *given.writes.values()), strict=True
    ):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * abs(a).max())


def test_what_a_product_reads_is_kept_in_bfloat16_alone() -> None:
    graph = program(
        "x: f32[16, 8], w: f32[4, 8] parameter",
        """
        %a = exp(%x)
        %t = permute(%w, dims=(1, 0))
        %y = matmul(%a, %t)
        %z = sin(%a)
        %v = neg(%w)
        """,
        "%y, %z, %v",
    )
    after = MIXED.run(graph)
    assert_text(
        after,
        """\
        %a: f32[16, 8] = exp(%x)
        %cast: bf16[16, 8] = cast(%a, dtype=bf16)
        %cast_1: f32[16, 8] = cast(%cast, dtype=f32)
        %cast_2: bf16[4, 8] = cast(%w, dtype=bf16)
        %permute: bf16[8, 4]@10 = permute(%cast_2, dims=(1, 0))
        %y_bf16: bf16[16, 4] = matmul(%cast, %permute)
        %y: f32[16, 4] = cast(%y_bf16, dtype=f32)
        %z: f32[16, 8] = sin(%cast_1)
        %v: f32[4, 8] = neg(%w)
        return %y, %z, %v
        """,
    )
    near(graph, after, 2e-2)
    assert types(after, Matmul) == [DType.bfloat16]
    exact = interpret(after, arrays(graph)).outputs[2]
    np.testing.assert_array_equal(exact, interpret(graph, arrays(graph)).outputs[2])  # parameters are not rounded


def test_results_are_not_rounded() -> None:
    graph = program(
        "x: f32[16, 8], w: f32[8, 4]", "%a = exp(%x)\n%b = view(%a, shape=(16, 8))\n%y = matmul(%b, %w)", "%y, %a, %b"
    )
    after = MIXED.run(graph)
    near(graph, after, 2e-2)
    for place in (1, 2):
        expected, given = (interpret(g, arrays(graph)).outputs[place] for g in (graph, after))
        np.testing.assert_array_equal(given, expected)


def test_a_matrix_that_is_added_stays_in_float32_and_a_row_does_not() -> None:
    graph = program(
        "c: f32[16, 4], r: f32[4], x: f32[16, 8], w: f32[8, 4]",
        "%y = matmul_add(%c, %x, %w)\n%z = matmul_add(%r, %x, %w)\n%p = matmul(%x, %w)\n%q = add(%p, %c)",
        "%y, %z, %q",
    )
    after = MIXED.run(graph)
    near(graph, after, 2e-2)
    y, _, q = interpret(after, arrays(graph)).outputs
    np.testing.assert_array_equal(y, q)


def test_a_product_of_a_product_is_rounded_once() -> None:
    graph = program("x: f32[8, 8], w: f32[8, 8]", "%a = matmul(%x, %w)\n%b = matmul(%a, %w)\n%c = matmul(%b, %b)", "%c")
    after = MIXED.run(graph)
    near(graph, after, 5e-2)
    casts = [n for n in after.nodes if n.op.label == "cast"]
    assert len(casts) == 3, "two factors, and the result"


def test_small_products_groups_and_other_types_stay() -> None:
    matmul = program("x: f32[8, 8], w: f32[8, 8]", "%y = matmul(%x, %w)", "%y")
    assert MixedPrecision(least=513).run(matmul) is matmul
    assert MixedPrecision(least=512).run(matmul) is not matmul
    double = program("x: f64[8, 8], w: f64[8, 8]", "%y = matmul(%x, %w)", "%y")
    assert MIXED.run(double) is double
    shape = "stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0)"
    groups = program("x: f32[1, 4, 5, 5], w: f32[4, 1, 3, 3]", f"%y = convolution(%x, %w, {shape}, groups=4)", "%y")
    assert MIXED.run(groups) is groups


def test_a_second_run_finds_nothing() -> None:
    graph = program("x: f32[8, 8], w: f32[8, 8]", "%a = exp(%x)\n%y = matmul(%a, %w)", "%y")
    after = MIXED.run(graph)
    assert MIXED.run(after) is after


def test_fewer_bytes_move() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = dt.training_step(model, nn.functional.mse_loss, optimizer).graph(torch.randn(512, 64), torch.randn(512, 64))
    moved = [float(traffic(p.run(graph)).bytes) for p in (dt.TRAINING, PIPELINE)]
    assert moved[1] < 0.75 * moved[0]


KINDS = ("resnet50", "bert", "lstm", "mixer")
"""Networks that run without `--wide`: one of each kind."""


def smooth(x: Tensor, *_: float, **__: bool) -> Tensor:
    return nn.functional.softplus(x)


@pytest.mark.compiled
@pytest.mark.parametrize("name", [n if n in KINDS else pytest.param(n, marks=pytest.mark.wide) for n in TWELVE])
def test_gradients_are_as_near_as_under_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kinks: an activation at one has either gradient, and chance decides how many have the other one."""
    for kinked in ("relu", "hardtanh"):
        monkeypatch.setattr(nn.functional, kinked, smooth)
    mixed_agreement(TWELVE[name], small=True)


@pytest.mark.compiled
def test_parameters_stay_in_float32_and_small_updates_are_not_lost() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    step = dt.training_step(
        model,
        nn.functional.mse_loss,
        optimizer,
        pipeline=PIPELINE,
        keep_gradients=True,
    )
    before = model.weight.detach().clone()
    step(torch.randn(256, 64), torch.randn(256, 64))
    torch.testing.assert_close(model.weight.detach(), before - 1e-6 * model.weight.grad, rtol=0, atol=1e-7)
    assert model.weight.dtype is torch.float32
    assert bool((model.weight != before).any())


@pytest.mark.compiled
def test_under_optimize() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(1024, 10))
    x = torch.randn(4, 3, 12, 12, requires_grad=True)
    model(x).square().mean().backward()  # of activations without kinks, which rounding would decide
    expected = {n: p.grad.clone() for n, p in model.named_parameters()} | {"x": x.grad.clone()}
    model.zero_grad()
    x.grad = None
    dt.optimize(model, pipeline=PIPELINE)(x).square().mean().backward()
    for name, gradient in [*((n, p.grad) for n, p in model.named_parameters()), ("x", x.grad)]:
        error = float((gradient - expected[name]).norm() / expected[name].norm())
        assert 0 < error < 2e-2, name
