"""Arrays that wait for the backward pass in 16 bits: the loss stays, gradients are off by what is documented."""

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.analysis.memory import memory
from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.tensor import DType
from daceml_train.transformations.fusion.compress_saved import CompressSaved
from tests.transformations.checking import assert_text, program

STEP = """
    %a = exp(%x)
    %b = sin(%a)
    %c = mul(%b, %b)
    %l = reduce(%c, kind="sum", dims=(0, 1))
    %v = view(%b, shape=(64,))
    %d = mul(%v, %l)
    %e = view(%d, shape=(8, 8))
    %f = mul(%e, %a)
"""


def step() -> Graph:
    return as_step("f32")


def as_step(dtype: str) -> Graph:
    graph = program(f"x: {dtype}[8, 8], p: {dtype}[8, 8] parameter", STEP, "%l")
    graph.write("p", graph.value("f"))
    return graph


def test_late_readers_read_what_is_stored() -> None:
    graph = step()
    after = CompressSaved(min_bytes=100).run(graph)
    verify(after)
    assert_text(
        after,
        """\
        %a, %a_stored: f32[8, 8], bf16[8, 8] = kernel(x0=%x) {
          %v0 = exp(%x0)
          %v1 = cast(%v0, dtype=bf16)
          yield %v0, %v1
        }
        %b, %b_stored: f32[8, 8], bf16[8, 8] = kernel(x0=%a) {
          %v0 = sin(%x0)
          %v1 = cast(%v0, dtype=bf16)
          yield %v0, %v1
        }
        %c: f32[8, 8] = mul(%b, %b)
        %l: f32[] = reduce(%c, kind="sum", dims=(0, 1))
        %view: bf16[64] = view(%b_stored, shape=(64,))
        %d: f32[64] = kernel(x0=%view, x1=%l) {
          %v0 = cast(%x0, dtype=f32)
          %v1 = mul(%v0, %x1)
          yield %v1
        }
        %e: f32[8, 8] = view(%d, shape=(8, 8))
        %f: f32[8, 8] = kernel(x0=%e, x1=%a_stored) {
          %v0 = cast(%x1, dtype=f32)
          %v1 = mul(%x0, %v0)
          yield %v1
        }
        write p <- %f
        return %l
        """,
    )
    stored = {n for n, t in after.tensors.items() if t.dtype is DType.bfloat16}
    assert len(stored) == 3, "two arrays and a view of one"
    readers = {n.outputs[0]: n.inputs for n in after.nodes}
    assert readers["c"] == ("b", "b"), "the forward pass stays as it is"
    assert "a" not in readers["f"]


def test_forward_graphs_and_halves_of_a_step_stay() -> None:
    graph = program("x: f32[8, 8]", STEP, "%l, %f")
    assert CompressSaved(min_bytes=0).run(graph) is graph


def test_small_arrays_and_other_types_stay() -> None:
    graph = step()
    assert CompressSaved().run(graph) is graph
    double = as_step("f64")
    assert CompressSaved(min_bytes=100).run(double) is double


def test_types_are_named() -> None:
    with pytest.raises(Invalid, match="compress_saved stores in bfloat16 or float16, given 'int8'"):
        CompressSaved(dtype="int8")


def stored(dtype: str) -> dt.Pipeline:
    return dt.TRAINING.after("fusion", CompressSaved(dtype, min_bytes=512))


class Layers(nn.Module):
    """Linear layers, an activation, a normalization, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x).mean((2, 3)))
        return self.second(nn.functional.gelu(self.first(x)))


@pytest.mark.compiled
@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_gradients_are_off_by_what_is_documented(dtype: str, unit: float) -> None:
    torch.manual_seed(0)
    model = Layers()
    x, y = torch.randn(16, 3, 6, 6), torch.randint(0, 5, (16,))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = dt.training_step(model, nn.functional.cross_entropy, optimizer)
    result = dt.training_step(
        model, nn.functional.cross_entropy, optimizer, pipeline=stored(dtype), keep_gradients=True
    )
    assert float(plain(x, y)) == float(result(x, y)), "the forward pass is the same, to the bit"
    off = 0.0
    for name, parameter in model.named_parameters():
        error = (parameter.grad - expected[name]).abs().max() / expected[name].abs().max()
        off = max(off, float(error))
        assert error < 4 * unit, name
    assert off > unit / 64, "nothing was stored in fewer bits"


def test_less_is_held() -> None:
    """A chain of matmuls, whose activations are all that lives: the peak falls towards a half."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = dt.training_step(model, nn.functional.mse_loss, optimizer)
    graph = result.graph(torch.randn(512, 64), torch.randn(512, 64))
    peaks = [memory(pipeline.run(graph)).peak for pipeline in (dt.TRAINING, stored("bfloat16"))]
    assert peaks[1] < 0.75 * peaks[0]


class Greatest(nn.Module):
    """The gradient of a maximum, and a mask, compare an array with another one that is computed from it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(16, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x))).view(-1, 8, 8)
        match self.kind:
            case "amax":
                return h.amax(-1)
            case "amin":
                return h.amin(1)
            case "norm":
                return torch.linalg.vector_norm(h, float("inf"), -1)
            case "after a sigmoid":
                return h.sigmoid().amax(-1)
        return torch.where(h >= h.amax(-1, keepdim=True), h.exp(), 0).sum(-1)


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["amax", "amin", "norm", "after a sigmoid", "mask"])
def test_what_the_backward_pass_compares_is_stored_as_it_is(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Greatest(kind), torch.randn(64, 16)
    model(x).square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = dt.training_step(
        model, lambda y: y.square().mean(), optimizer, pipeline=stored("bfloat16"), keep_gradients=True
    )
    step(x)
    off = []
    for name, parameter in model.named_parameters():
        off.append(float((parameter.grad - expected[name]).norm() / expected[name].norm()))
        assert off[-1] < 2.0**-8, name
    assert max(off) > 2.0**-16, "nothing was stored in fewer bits"
