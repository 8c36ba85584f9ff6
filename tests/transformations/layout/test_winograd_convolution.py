"""3x3 convolutions and their gradients in tiles: the same numbers, the bytes promised, and why not."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import daceml_train as dt
from daceml_train.analysis.traffic import traffic
from daceml_train.tensor import simplify
from daceml_train.transformations.global_movement.dead_code import DeadCode
from daceml_train.transformations.layout.winograd_convolution import WinogradConvolution
from tests.transformations.checking import Golden, check_refused, check_same, program

THREE = "stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0)"
X, G, W = "x: f32[8, 16, 10, 9]@0231", "g: f32[8, 32, 10, 9]@0231", "w: f32[32, 16, 3, 3]"
LAST = f"{W}@0231"
REORDERED = f"%v = reorder(%w, order=(0, 2, 3, 1))\n%y = convolution(%x, %v, {THREE})"
WEIGHT = f"%y = convolution_weight_grad(%g, %x, weight_shape=(32, 16, 3, 3), {THREE})"
IMAGES = f"%y = convolution_input_grad(%g, %w, input_shape=(8, 32, 10, 9), {THREE})"
CASES = {
    "convolution": (f"{X}, {W}, b: f32[32]", f"%y = convolution(%x, %w, %b, {THREE})", "%y"),
    "reordered weight": (f"{X}, {W}", REORDERED, "%y"),
    "input_grad": (f"{G}, w: f32[32, 32, 3, 3]", IMAGES, "%y"),
    "weight_grad": (f"{G}, {X}", WEIGHT, "%y"),
    "weight_grad, reordered": (f"{G}, {X}", f"{WEIGHT}\n%r = reorder(%y, order=(0, 1, 2, 3))", "%r"),
    "weight_grad, read": (f"{G}, {X}", f"{WEIGHT}\n%r = exp(%y)", "%r"),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_convolution(case: str, golden: Golden) -> None:
    before = program(*CASES[case])
    found = [m for m in WinogradConvolution().matches(before) if m.refusal is None]
    after = WinogradConvolution().run(before)
    check_same(before, after, exact=False)
    assert simplify(traffic(after).bytes - traffic(before).bytes - sum(m.traffic for m in found)) == 0
    golden(str(DeadCode().run(after)))
    assert WinogradConvolution().run(after) is after
    same = before.tensors[before.outputs[0]] == after.tensors[after.outputs[0]]
    assert same or case == "weight_grad, read", "what is visible is as it was"


REFUSED = {
    "stride": (
        f"{X}, {W}",
        f"%y = convolution(%x, %w, {THREE.replace('(1, 1)', '(2, 1)', 1)})",
        "tiles are for windows of 3x3, each once",
    ),
    "double": (f"{X}, {W}".replace("f32", "f64"), f"%y = convolution(%x, %w, {THREE})", "tiles are of f32, not of f64"),
    "padding": (
        f"{X}, {W}",
        f"%y = convolution(%x, %w, {THREE.replace('padding=(1, 1)', 'padding=(3, 1)', 1)})",
        "a padding of (3, 1) is wider than the windows",
    ),
    "channels": (
        "x: f32[8, 12, 10, 9]@0231, w: f32[32, 12, 3, 3]",
        f"%y = convolution(%x, %w, {THREE})",
        "12 channels do not fill vectors",
    ),
    "columns": (
        f"{X}, w: f32[16, 16, 3, 3]",
        f"%y = convolution(%x, %w, {THREE})",
        "16 columns fill less than three quarters of 32",
    ),
    "row-major": (
        f"x: f32[8, 16, 10, 9], {LAST}",
        f"%y = convolution(%x, %w, {THREE})",
        "the channels of %x are not adjacent in memory",
    ),
    "every second channel": (
        "z: f32[8, 32, 10, 9]@0231, w: f32[32, 16, 3, 3]",
        f"%x = slice(%z, dim=1, start=0, stop=32, step=2)\n%y = convolution(%x, %w, {THREE})",
        "the channels of %x are not adjacent in memory",
    ),
    "few": (
        f"x: f32[2, 16, 10, 9]@0231, {W}",
        f"%y = convolution(%x, %w, {THREE})",
        "50 tiles are fewer than 100",
    ),
    "small images": (
        f"x: f32[99, 16, 3, 3]@0231, {W}",
        f"%y = convolution(%x, %w, {THREE})",
        "396 tiles have only 891 results",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_library_keeps(case: str) -> None:
    signature, body, sentence = REFUSED[case]
    check_refused(program(signature, body, "%y"), WinogradConvolution(), sentence)


class Images(nn.Module):
    """Convolutions with and without bias, normalization, residuals, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1, bias=False)
        self.norm, self.second = nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3, padding=1)
        self.third, self.head = nn.Conv2d(64, 48, 3), nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(torch.relu(self.stem(x)))))
        return self.head(torch.relu(self.third(torch.relu(x + self.second(x)))).mean((2, 3)))


@pytest.mark.compiled
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_network_trains(channels_last: bool) -> None:
    """Losses, gradients and buffers of a module, and the updates of steps, against eager execution in float64."""
    torch.manual_seed(0)
    model = Images()
    model = model.to(memory_format=torch.channels_last) if channels_last else model
    twin, whole = copy.deepcopy(model).double(), copy.deepcopy(model)
    module = dt.optimize(model)
    step = dt.training_step(whole, nn.functional.cross_entropy, torch.optim.SGD(whole.parameters(), lr=0.1))
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, model))
    for rows in (6, 6, 5):
        x, t = torch.randn(rows, 3, 22, 19), torch.randint(0, 10, (rows,))
        theirs.zero_grad(), ours.zero_grad()
        want = nn.functional.cross_entropy(twin(x.double()), t)
        want.backward()
        nn.functional.cross_entropy(module(x), t).backward()
        torch.testing.assert_close(step(x, t).double(), want, rtol=1e-5, atol=1e-6)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            close(a.grad, b.grad)
        theirs.step(), ours.step()
    for a, b in zip((*whole.parameters(), *whole.buffers()), (*twin.parameters(), *twin.buffers()), strict=True):
        close(a, b)
    text = "".join(code.text for code in step.records[0].executable.program.codes)
    assert text.count("run_in_tiles") >= 3, "forward and backward"
    assert "winograd_gradient.h" in text


def close(ours: Any, theirs: Any) -> None:
    """Within float32's rounding of sums; F(2x2, 3x3) at most doubles a convolution's."""
    bound = 2e-5 * float(theirs.detach().abs().max()) if theirs.is_floating_point() else 0
    torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=0, atol=bound)
