"""Weights in oneDNN's own layout: the same results, and plain weights where packing is not allowed."""

import pytest
import torch
from torch import Tensor

from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import CallLaunch, Program
from daceml_train.runtime.executable import Executable
from daceml_train.runtime.executor import Plan
from daceml_train.runtime.prepack import FEWEST_ROWS, pack, packed
from daceml_train.runtime.tune_matmul import available
from tests.transformations.checking import arrays, program

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.skipif(not available(), reason="this PyTorch has no oneDNN"),
]


def given(graph: Graph, **sizes: int) -> dict[str, Tensor]:
    """Random inputs in the memory order that the graph declares."""
    results = {}
    for name, array in arrays(graph, **sizes).items():
        t = graph.inputs[name].tensor
        x = torch.as_tensor(array, dtype=getattr(torch, t.dtype.name))
        results[name] = (
            x if t.order is None else x.permute(t.order).contiguous().permute([t.order.index(d) for d in range(t.rank)])
        )
    return results


def packed_names(lowered: Program) -> list[str]:
    return [entry.name for entry in lowered.inputs if entry.packing is not None]


def check(graph: Graph, held: set[str], names: list[str], **sizes: int) -> Program:
    """Results with packed weights are those with plain ones; twice, with other weights the second time."""
    plain, other = Executable(lower(graph), {}), lower(graph)
    assert pack(other, held) is other
    assert packed_names(other) == names
    run = Executable(other, {})
    for factor in (1.0, 2.0):
        inputs = {n: x * factor if n in held and x.is_floating_point() else x for n, x in given(graph, **sizes).items()}
        expected = plain([inputs[e.name] for e in plain.program.inputs])
        found = run([packed(e, inputs[e.name]) for e in other.inputs])
        for a, b in zip(found, expected, strict=True):
            rounding = 1e-5 * float(b.abs().max()) if b.is_floating_point() else 0  # of sums that may cancel out
            torch.testing.assert_close(a, b, rtol=1e-4, atol=rounding)
            assert a.stride() == b.stride()
    return other


@pytest.mark.parametrize("last", [False, True], ids=["row-major", "channels-last"])
@pytest.mark.parametrize(
    ("shape", "geometry"),
    [
        ("f32[8, 6, 3, 3]", "stride=(1, 1), padding=(1, 1), dilation=(1, 1)"),
        ("f32[8, 6, 1, 1]", "stride=(2, 2), padding=(0, 0), dilation=(1, 1)"),
        ("f32[8, 6, 3, 2]", "stride=(2, 1), padding=(2, 1), dilation=(2, 1)"),
        ("f32[8, 3, 3, 3]", "stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=2"),
        ("f32[12, 1, 5, 5]", "stride=(1, 1), padding=(2, 2), dilation=(1, 1), groups=6"),
    ],
)
def test_convolutions(shape: str, geometry: str, last: bool) -> None:
    order = "@0231" if last else ""
    signature = (
        f"x: f32[2, 6, 9, 11]{order}, w: {shape} parameter, b: f32[{shape.split('[')[1].split(',')[0]}] parameter"
    )
    call = f"%y = convolution(%x, %w, %b, {geometry}, output_padding=(0, 0))"
    check(program(signature, call, "%y"), {"w", "b"}, ["w"])


def test_a_sequence_and_any_batch() -> None:
    geometry = "stride=(1,), padding=(2,), dilation=(2,), output_padding=(0,)"
    check(
        program("x: f32[2, 6, 40], w: f32[8, 6, 3] parameter", f"%y = convolution(%x, %w, {geometry})", "%y"),
        {"w"},
        ["w"],
    )
    geometry = "stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0)"
    graph = program("x: f32[n, 6, 8, 8], w: f32[8, 6, 3, 3] parameter", f"%y = convolution(%x, %w, {geometry})", "%y")
    for n in (1, 5):
        check(graph, {"w"}, ["w"], n=n)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("added", ["", "c: f32[96], ", "c: f32[64, 96], "], ids=["nothing", "row", "matrix"])
def test_products(added: str, transposed: bool) -> None:
    shape = "f32[96, 256]" if transposed else "f32[256, 96]"
    view = "%t = permute(%w, dims=(1, 0))\n" if transposed else ""
    w = "%t" if transposed else "%w"
    call = f"%y = matmul_add(%c, %x, {w})" if added else f"%y = matmul(%x, {w})"
    check(program(f"{added}x: f32[64, 256], w: {shape} parameter", view + call, "%y"), {"w"}, ["w"])


@pytest.mark.parametrize(
    ("signature", "body", "result", "held"),
    [
        (f"x: f32[{FEWEST_ROWS - 1}, 512], w: f32[512, 512] parameter", "%y = matmul(%x, %w)", "%y", {"w"}),
        ("x: f32[64, 256], w: f32[256, 256]", "%y = matmul(%x, %w)", "%y", set()),
        ("x: f32[64, 256], w: f32[256, 256] parameter", "%a = matmul(%x, %w)\n%y = matmul(%a, %w)", "%y", {"w"}),
        ("w: f32[256, 256] parameter", "%y = matmul(%w, %w)", "%y", {"w"}),
        ("x: f64[64, 256], w: f64[256, 256] parameter", "%y = matmul(%x, %w)", "%y", {"w"}),
    ],
    ids=["few rows", "not held", "read twice", "both factors", "float64"],
)
def test_what_stays_plain(signature: str, body: str, result: str, held: set[str]) -> None:
    check(program(signature, body, result), held, [])


def test_a_weight_that_is_written_stays_plain() -> None:
    graph = program("x: f32[256, 256], w: f32[256, 256] parameter", "%y = matmul(%x, %w)", "%y")
    graph.write("w", graph.value("y"))
    assert packed_names(pack(lower(graph), {"w"})) == []


def test_a_weight_in_another_order_is_laid_out_first() -> None:
    graph = program("x: f32[64, 256], w: f32[256, 96] parameter", "%y = matmul(%x, %w)", "%y")
    lowered = pack(lower(graph), {"w"})
    inputs = given(graph)
    other = inputs["w"].t().contiguous().t()
    assert other.stride() != inputs["w"].stride()
    (y,) = Executable(lowered, {})([packed(e, {**inputs, "w": other}[e.name]) for e in lowered.inputs])
    torch.testing.assert_close(y, inputs["x"] @ inputs["w"], rtol=1e-4, atol=1e-4)


def test_a_library_is_called() -> None:
    geometry = "stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0)"
    graph = program("x: f32[2, 6, 9, 9], w: f32[8, 6, 3, 3] parameter", f"%y = convolution(%x, %w, {geometry})", "%y")
    (call,) = pack(lower(graph), {"w"}).launches
    assert isinstance(call, CallLaunch)
    assert call.target == "mkldnn::_convolution_pointwise"


def test_kernels_do_not_read_opaque_inputs() -> None:
    plan = Plan(2)
    plan.opaque_slot(0, 0, torch.float32, [4], [1])
    plan.fresh_slot(1, torch.float32, [4], [1])
    plan.copy((1, 0), (0, 0), 16)
    with pytest.raises(Invalid, match="reads slot 0, whose layout only a library knows"):
        plan.finalize(0, [1])


def test_an_opaque_input_must_be_there() -> None:
    plan = Plan(2)
    plan.opaque_slot(0, 0, torch.float32, [4, 4], [4, 1])
    view = plan.view(0, 0, torch.float32, [4, 4], [4, 1])
    plan.result_slot(1, torch.float32, [4, 4], [4, 1])
    plan.call("aten::to_dense", "", [view], [1])
    plan.finalize(0, [1])
    x = torch.randn(4, 4)
    for _ in range(2):
        (y,) = plan.run([x.to_mkldnn()])
        torch.testing.assert_close(y, x)
