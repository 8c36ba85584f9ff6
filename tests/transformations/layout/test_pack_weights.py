"""Matmuls with weights that stay, and what follows them, in one kernel: the same numbers, and why not."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph, Role
from daceml_train.graph.text import parse
from daceml_train.ops.packed import PackedConvolution
from daceml_train.tensor import simplify
from daceml_train.transformations.global_movement.common_subexpressions import CommonSubexpressions
from daceml_train.transformations.layout.fuse_matmul_epilogue import FuseMatmulEpilogue
from daceml_train.transformations.layout.pack_weights import PackWeights
from daceml_train.transformations.pipelines import INFERENCE
from tests.driver.conformity import assert_compiled
from tests.transformations.checking import Golden, assert_text, check_refused, check_rewrite, check_same, program

THREE = "stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0)"
IMAGES = "x: f32[2, 16, 4, 3]@0231"


def held(signature: str, body: str, result: str) -> Graph:
    """A program whose inputs are parameters, but for x."""
    text = str(program(signature, body, result))
    return parse(re.sub(r"(\b(?!x\b)\w+: f32\[[^\]]*\](?:@\d+)?) input", r"\1 parameter", text))


CASES = {
    "matmul": ("x: f32[5, 7], w: f32[40, 7]", "%t = permute(%w, dims=(1, 0))\n%y = matmul(%x, %t)"),
    "matmul_add": ("x: f32[n, 7], w: f32[7, 8], b: f32[8]", "%y = matmul_add(%b, %x, %w)"),
    "convolution": (f"{IMAGES}, w: f32[8, 16, 3, 3], b: f32[8]", f"%y = convolution(%x, %w, %b, {THREE})"),
    "depthwise": (f"{IMAGES}, w: f32[16, 1, 3, 3]", f"%y = convolution(%x, %w, {THREE}, groups=16)"),
    "tiled": (f"{IMAGES.replace('2,', '32,', 1)}, w: f32[8, 16, 3, 3]", f"%y = convolution(%x, %w, {THREE})"),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_product(case: str, golden: Golden) -> None:
    before = held(*CASES[case], "%y")
    assert {e.role for e in before.inputs.values()} == {Role.input, Role.parameter}
    after = PackWeights().run(before)
    check_same(before, after, exact=False, **({"n": 3} if case == "matmul_add" else {}))
    golden(str(after))
    assert PackWeights().run(after) is after


def test_a_weight_of_several_products_is_packed_once() -> None:
    body = "%a = matmul(%x, %w)\n%b = relu(%a)\n%y = matmul(%b, %w)"
    before = held("x: f32[5, 8], w: f32[8, 8]", body, "%y")
    after = CommonSubexpressions().run(PackWeights().run(before))
    check_same(before, after, exact=False)
    assert [n.op.label for n in after.nodes].count("reorder") == 1
    positions = [type(p) for p in INFERENCE.level("layout")]
    assert positions.index(PackWeights) + 1 == positions.index(CommonSubexpressions)


REFUSED = {
    "another call's": (
        "x: f32[5, 7], x2: f32[7, 8]",
        "%y = matmul(%x, %x2)",
        "the weight %x2 may differ from call to call",
    ),
    "few": ("x: f32[5, 7], w: f32[7, 4]", "%y = matmul(%x, %w)", "4 columns are fewer than 8"),
    "batch": ("x: f32[2, 5, 7], w: f32[2, 7, 8]", "%y = matmul(%x, %w)", "matmul of a batch"),
    "double": ("x: f64[5, 7], w: f64[7, 8]", "%y = matmul(%x, %w)", "packed matmuls support f32, not f64"),
    "row-major": (
        "x: f32[2, 16, 4, 3], w: f32[8, 16, 3, 3]",
        f"%y = convolution(%x, %w, {THREE})",
        "%y is not channels-last",
    ),
    "channels apart": (
        "x: f32[2, 16, 4, 3], w: f32[16, 1, 3, 3]@0231",
        f"%y = convolution(%x, %w, {THREE}, groups=16)",
        "the channels of %x are not adjacent in memory",
    ),
    "groups": (
        f"{IMAGES}, w: f32[16, 2, 3, 3]",
        f"%y = convolution(%x, %w, {THREE}, groups=8)",
        "8 groups of several channels, or filters with gaps or of more than 7 columns",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_library_keeps(case: str) -> None:
    signature, body, sentence = REFUSED[case]
    graph = (
        program(signature, body, "%y")
        if case == "another call's"
        else held(signature.replace("f64", "f32"), body, "%y")
    )
    if case == "double":
        graph = parse(str(held(signature.replace("f64", "f32"), body, "%y")).replace("f32", "f64"))
    check_refused(graph, PackWeights(), sentence)


APART = {
    "x: f32[32, 1, 4, 3]": "%e = expand(%x, shape=(32, 16, 4, 3))",
    "x: f32[32, 16, 4, 3]": "%e = exp(%x)",
    "x: f32[32, 32, 4, 3]@0231": "%e = slice(%x, dim=1, start=1, stop=32, step=2)",
}


@pytest.mark.parametrize("x", APART)
def test_tiles_need_channels_side_by_side(x: str) -> None:
    signature, apart = f"{x}, w: f32[8, 16, 3, 3]@0231", APART[x]
    before = held(signature, f"{apart}\n%y = convolution(%e, %w, {THREE})", "%y")
    after = PackWeights().run(before)
    check_same(before, after, exact=False)
    assert [n.op.tiled for n in after.nodes if isinstance(n.op, PackedConvolution)] == [False]


PRODUCT = "x: f32[5, 8], p: f32[1, 8, 32], o: f32[5, 32], b: f32[32]"


def test_what_follows_goes_into_the_kernel() -> None:
    body = "%s = packed_matmul(%x, %p, columns=32)\n%t = mul(%s, %b)\n%y = add(%o, %o)\n%z = exp(%y)"
    after = check_rewrite(program(PRODUCT, body, "%t, %z"), FuseMatmulEpilogue(), exact=False)
    assert_text(
        after,
        """\
        %kernel: f32[5, 32] = kernel(x0=%x, x1=%p, x2=%b) {
          %v0 = packed_matmul(%x0, %x1, columns=32)
          %v1 = mul(%v0, %x2)
          yield %v1
        }
        %y: f32[5, 32] = add(%o, %o)
        %z: f32[5, 32] = exp(%y)
        return %kernel, %z
        """,
    )


def test_a_chain_goes_into_the_kernel() -> None:
    body = "%s = packed_matmul(%x, %p, columns=32)\n%t = add(%s, %b)\n%u = relu(%t)\n%y = add(%o, %u)"
    before = program(PRODUCT, body, "%y")
    after = FuseMatmulEpilogue().run(before)
    check_same(before, after, exact=False)
    assert_text(
        after,
        """\
        %kernel: f32[5, 32] = kernel(x0=%x, x1=%p, x2=%b, x3=%o) {
          %v0 = packed_matmul(%x0, %x1, columns=32)
          %v1 = add(%v0, %x2)
          %v2 = relu(%v1)
          %v3 = add(%x3, %v2)
          yield %v3
        }
        return %kernel
        """,
    )
    assert simplify(traffic(after).bytes - traffic(before).bytes) == -3 * 2 * 4 * 5 * 32


@pytest.mark.parametrize(
    ("following", "result", "sentence"),
    [
        ("%y = exp(%s)", "%y, %s", "%s has another reader"),
        ("%y = mul(%s, %s)", "%y", "%s has another reader"),
        ('%r = reduce(%s, kind="sum", dims=(1,))\n%y = exp(%r)', "%y", None),
        ("%q = view(%o, shape=(32, 5))\n%t = permute(%q, dims=(1, 0))\n%y = add(%s, %t)", "%y", "another order"),
    ],
)
def test_what_stays(following: str, result: str, sentence: str | None) -> None:
    graph = program(PRODUCT, f"%s = packed_matmul(%x, %p, columns=32)\n{following}", result)
    found = FuseMatmulEpilogue().matches(graph)
    if sentence is None:
        assert not found
    else:
        (match,) = found
        assert sentence in (match.refusal or "")
        assert FuseMatmulEpilogue().run(graph) is graph


class Block(nn.Module):
    """All kinds of matmuls in a row, with what follows each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.deep, self.wide = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 40, 1)
        self.three, self.down = nn.Conv2d(40, 40, 3, padding=1), nn.Conv2d(40, 24, 3, 2, 1)
        self.linear, self.last = nn.Linear(24, 50), nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        x = nn.functional.silu(self.deep(x))
        x = self.wide(x)
        x = (self.three(x) + x).relu()
        x = self.down(x).mean((2, 3))
        return self.last(nn.functional.gelu(self.linear(x)))


@pytest.mark.compiled
@pytest.mark.parametrize("size", [(2, 3, 33, 30), (1, 3, 8, 8), (5, 3, 64, 32)])
def test_a_network(size: tuple[int, ...]) -> None:
    """Compared with eager execution, before and after a change of parameters."""
    torch.manual_seed(0)
    model = Block().eval()
    model.norm.running_mean.normal_()
    ours = dt.optimize(model)
    for _ in range(2):
        x = torch.randn(size)
        with torch.no_grad():
            want, got = model(x), ours(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert got.stride() == want.stride()
        with torch.no_grad():
            model.three.weight += 0.1
            model.linear.weight.mul_(-1)


@pytest.mark.compiled
def test_nan_stays_nan() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU6()).eval()
    ours, x = dt.optimize(model), torch.randn(1, 16, 12, 12)
    x[0, 0, 5, 5] = float("nan")
    with torch.no_grad():
        want, got = model(x), ours(x)
    assert np.isnan(got.numpy())[np.isnan(want.numpy())].all()


class Joined(nn.Module):
    """Matmuls whose results are parts of concatenations."""

    def __init__(self) -> None:
        super().__init__()
        self.point, self.three = nn.Conv2d(16, 32, 1, bias=False), nn.Conv2d(16, 32, 3, padding=1)
        self.deep, self.linear = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.cat([self.point(x), self.three(x).relu(), self.deep(x), x], 1)
        return y.sigmoid(), torch.cat([self.linear(t), t], -1).exp(), self.three(x[..., ::2])


@pytest.mark.compiled
def test_parts_of_concatenations() -> None:
    torch.manual_seed(0)
    model = Joined().eval()
    ours = dt.optimize(model)
    for last in (False, True):
        x, t = torch.randn(2, 16, 12, 10), torch.randn(5, 8)
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        with torch.no_grad():
            for want, got in zip(model(x, t), ours(x, t), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
                assert got.stride() == want.stride()
    assert_compiled(ours)
