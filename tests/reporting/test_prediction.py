"""Predictions of steps on devices that are not there, and of eager PyTorch beside them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from benchmarks import gpu_prediction
from benchmarks.networks import TWELVE
from daceml_train.analysis.device_model import DEVICES
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.eager_operations import eager_operations, with_foreach
from daceml_train.frontends.torch.capture.eager_traffic import fake
from daceml_train.lowering.device_time import timed
from daceml_train.reporting.prediction import Prediction, predict

H100, L4 = DEVICES["h100"], DEVICES["l4"]


def mlp(width: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))
    return model, torch.randn(64, width), torch.randint(0, 10, (64,))


def prediction(width: int, device: Any, **options: Any) -> Prediction:
    model, x, y = mlp(width)
    step = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    return predict(lambda: step(x, y), device, **options)


def test_nothing_runs_and_the_figures_are_the_devices() -> None:
    model, x, y = mlp(2048)
    before = [p.detach().clone() for p in model.parameters()]
    step = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    found = predict(lambda: step(x, y), H100)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    slow = prediction(2048, L4)
    assert slow.seconds > 2 * found.seconds  # a tenth of the bandwidth, more of it from the L2
    assert found.seconds <= found.alone and len(found.longest()) == 10
    assert [t.seconds for t in found.longest()] == sorted((t.seconds for t in found.launches), reverse=True)[:10]
    text = str(found)
    assert "predicted on NVIDIA H100 80 GB SXM, not measured" in text and "sgd 0.weight" in text


def test_bytes_are_those_of_the_report() -> None:
    """The operations touch what the program's costs say, besides partial results of blocks."""
    found = prediction(512, H100)
    calls = [t.operation for t in found.launches if t.operation.kind == "call" and t.operation.dtype]
    weight, activations = 512 * 512 * 4, 64 * 512 * 4
    assert calls[0].bytes == weight + 2 * activations
    assert sum(c.flops for c in calls) == pytest.approx(2 * 64 * 512 * (2 * 512 + 3 * 10), rel=0.01)


def eager_step(width: int) -> Callable[[], None]:
    model, x, y = mlp(width)
    optimizer = with_foreach(torch.optim.Adam(model.parameters()))

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    run()
    return run


def test_eager_on_fake_tensors() -> None:
    """The kernels are those of a real run: one per call of the dispatcher, multi-tensor ones for the update."""
    real = eager_operations(eager_step(64))
    with fake():
        pretended = eager_operations(eager_step(64))
    assert [o.name for o in pretended] == [o.name for o in real]
    assert [o.bytes for o in pretended] == [o.bytes for o in real]
    names = [o.name for o in real]
    assert names.count("addmm") == 2 and any(n.startswith("_foreach") for n in names) and "addcdiv_" not in names
    (first,) = [o for o in real if o.name == "addmm"][:1]
    assert first.dtype == "float32" and first.flops == 2 * 64**3


def test_beside_eager() -> None:
    def watched(run: Any) -> Any:
        return run(eager_step(256))

    found = prediction(256, H100, eager=watched)
    assert found.eager is not None and found.speedup is not None and found.device_speedup is not None
    assert found.eager.host_seconds == pytest.approx(5e-6 * found.eager.kernels)
    assert found.speedup >= found.device_speedup > 0
    assert found.eager.device_seconds == pytest.approx(
        sum(t.seconds for t in timed(H100, eager_operations(eager_step(256))))
    )
    assert "times as fast" in str(found)


def test_convolutions_of_row_major_images_are_converted() -> None:
    x, conv = torch.randn(2, 8, 16, 16), nn.Conv2d(8, 4, 3, padding=1, bias=False)
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    (first,) = eager_operations(lambda: conv(x))
    assert first.converted == 2 * 4 * (x.numel() + conv.weight.numel() + 2 * 4 * 256) and first.dtype == "tf32"
    (last,) = eager_operations(
        lambda: conv.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    )[-1:]
    assert last.converted == 0
    assert eager_operations(lambda: depthwise(x))[0].converted == 0


def test_what_is_not_compiled_is_refused() -> None:
    with pytest.raises(Unsupported, match="nothing was compiled"):
        predict(lambda: None, H100)


def test_the_benchmark_and_its_page() -> None:
    found = gpu_prediction.predicted(TWELVE["mobilenet_v2"], "h100", "tf32", small=True)
    row = gpu_prediction.row("mobilenet_v2", "h100", "tf32", found)
    assert "mobilenet_v2" in gpu_prediction.line(row)
    text = "\n".join(gpu_prediction.page({"date": "today", "rows": [row, row | {"network": "bert", "speedup": 1.1}]}))
    assert "Nothing on this page has run on a GPU" in text and "Below 1.3: " in text and "bert" in text
