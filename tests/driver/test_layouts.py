"""Networks of convolutions train to the same numbers whichever layout their arrays have, outside and inside."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.lowering.program import CallLaunch
from tests.driver.conformity import assert_conforms, through_optimize, through_step
from tests.driver.networks import Problem

pytestmark = pytest.mark.compiled


class Images(nn.Module):
    """What meets convolutions: normalization, pooling, branches, concatenation, depthwise, gates, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.wide = nn.Conv2d(8, 16, 1)
        self.depthwise = nn.Conv2d(16, 16, 5, 1, 2, groups=16)
        self.gate = nn.Conv2d(16, 16, 1)
        self.narrow = nn.Conv2d(16, 8, 1)  # no normalization after the gate: its gradient would be all cancellation
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1), nn.SiLU())
        self.up = nn.ConvTranspose2d(12, 8, 2, 2)
        self.last = nn.Conv2d(16, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = F.silu(self.depthwise(F.relu6(self.wide(x))))
        h = h * self.gate(h.mean((2, 3), keepdim=True)).sigmoid()
        x = x + self.narrow(h)
        x = torch.cat([F.pad(self.up(self.down(x)), (0, 0, 0, 0)), F.avg_pool2d(x, 3, 1, 1)], 1)
        return self.head(self.last(x).mean((2, 3)))


def problem(last: bool, strided: bool) -> Problem:
    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(4, 3, 48, 32)
        if strided:
            x = torch.randn(8, 48, 3, 64).permute(0, 2, 1, 3)[::2, :, :, ::2]
        elif last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, torch.randint(0, 4, (4,))

    def model() -> nn.Module:
        return Images().to(memory_format=torch.channels_last if last else torch.contiguous_format)  # type: ignore[call-overload]

    return Problem(model, batch, F.cross_entropy)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize("run", [through_step, through_optimize])
@pytest.mark.parametrize(("last", "strided"), [(False, False), (True, False), (False, True)])
def test_trains_to_the_same_numbers(run, last: bool, strided: bool) -> None:
    assert_conforms(problem(last, strided), adam, run, steps=4)


def test_convolutions_run_with_their_channels_last() -> None:
    model, (x, y) = problem(False, False).build()
    step = dt.training_step(model, F.cross_entropy, adam(model.parameters()))
    step(x, y)
    launches = step.records[0].executable.program.launches
    calls = [c for c in launches if isinstance(c, CallLaunch) and "convolution" in c.target]
    own = {code.key for code in step.records[0].executable.program.codes if "depthwise" in code.text}
    assert len(own) == 1, "the weight gradient of the depthwise convolution is our own"
    assert len(calls) >= 19
    for call in calls:
        for place in call.arguments[:2]:
            if hasattr(place, "strides") and min(place.shape[1:]) > 1:
                assert place.strides[1] == 1, call.origin


class Heavy(nn.Module):
    """Weights that outweigh their images: convolved by products, with padding, strides and single pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 3, 2, 1)
        self.wide = nn.Conv2d(48, 96, 3, 2, 1, bias=False)
        self.point = nn.Conv2d(96, 128, 1)
        self.dilated = nn.Conv2d(128, 64, 3, padding=2, dilation=2)
        self.whole = nn.Conv2d(64, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.wide(F.relu(self.stem(x))))
        return self.whole(F.silu(self.dilated(self.point(x)))).flatten(1)


@pytest.mark.parametrize("run", [through_step, through_optimize])
def test_heavy_weights_are_multiplied(run) -> None:
    heavy = Problem(Heavy, lambda: (torch.randn(2, 3, 16, 16), torch.randint(0, 32, (2,))), F.cross_entropy)
    assert_conforms(heavy, adam, run, steps=3)


def test_products_read_the_weight_as_it_lies() -> None:
    model = Heavy()
    step = dt.training_step(model, F.cross_entropy, adam(model.parameters()))
    step(torch.randn(2, 3, 16, 16), torch.randint(0, 32, (2,)))
    launches = step.records[0].executable.program.launches
    targets = [c.target for c in launches if isinstance(c, CallLaunch)]
    assert sum("convolution" in t for t in targets) <= 2, "the stem's alone"
    own = [code for code in step.records[0].executable.program.codes if "im2col.h" in code.text]
    assert own, "windows are gathered and added up by kernels of our own"
