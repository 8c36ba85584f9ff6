"""Training steps on a CUDA device: numbers, CUDA graphs, streams, memory, mixed precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from benchmarks.networks.table import NETWORKS
from daceml_train.driver.module import state_of
from daceml_train.errors import DeviceMismatch, OutOfMemory
from daceml_train.runtime.gpu.cuda_graph import CudaGraphs
from tests.driver.conformity import distance
from tests.driver.networks import mlp
from tests.driver.test_control_flow import Two, both_signs, branch_in_a_loop, each_row, nested_branches
from tests.driver.test_gpu_step import NETWORKS as SMALL

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-3
"""Of parameters after a few steps against PyTorch's, in float32 without TF32."""


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def moved(value: Any) -> Any:
    return tuple(t.cuda() for t in value) if isinstance(value, tuple) else value.cuda()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Both:
    """A step, and PyTorch's loop, on the device."""

    def __init__(
        self, model: nn.Module, loss: Any, optimizer: Callable[..., Any] = sgd, scaler: bool = False, **options: Any
    ) -> None:
        self.theirs, self.loss = model.cuda(), loss
        self.ours = copy.deepcopy(self.theirs)
        self.their_optimizer, self.our_optimizer = (optimizer(m.parameters()) for m in (self.theirs, self.ours))
        self.scalers = [torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=2) for _ in range(2 * scaler)]
        if scaler:
            options["scaler"] = self.scalers[1]
        self.step = dt.training_step(self.ours, loss, self.our_optimizer, **options)

    def run(self, x: Any, y: Tensor, tolerance: float = TOLERANCE) -> Tensor:
        self.their_optimizer.zero_grad()
        expected = self.loss(self.theirs(*x) if isinstance(x, tuple) else self.theirs(x), y)
        if self.scalers:
            self.scalers[0].scale(expected).backward()
            self.scalers[0].step(self.their_optimizer)
            self.scalers[0].update()
        else:
            expected.backward()
            self.their_optimizer.step()
        found = self.step(x, y)
        assert found.is_cuda and distance(found.cpu(), expected.cpu()) < tolerance
        for (name, a), b in zip(self.ours.state_dict().items(), self.theirs.state_dict().values(), strict=True):
            scale = max(float(b.abs().max()), 0.1)  # some are zero but for rounding
            assert float((a - b).abs().max()) < tolerance * scale, name
        return found

    @property
    def graphs(self) -> CudaGraphs:
        (graphs,) = self.step.cuda_graphs.values()
        return graphs


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8, device="cuda"), torch.randn(size, 4, device="cuda")


@pytest.mark.parametrize("schedule", ["ahead_of_time", "plain"])
@pytest.mark.parametrize("network", SMALL)
def test_small_networks(network: str, schedule: str) -> None:
    model, draw, loss = SMALL[network]
    both = Both(model(), loss, schedule=schedule)
    for _ in range(5):
        both.run(*map(moved, draw()))
    assert both.step.breaks == []
    if schedule == "ahead_of_time":
        assert both.graphs.reasons == [] and both.graphs.replayed == 4


@pytest.mark.parametrize("name", list(NETWORKS))
def test_networks(name: str) -> None:
    """Every network of the benchmarks in its small size, three steps: two of them replayed."""
    problem = NETWORKS[name].build(small=True, dropout=False)
    both = Both(problem.model, problem.loss, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    for _ in range(3):
        both.run(moved(problem.inputs), moved(problem.targets), tolerance=1e-2)
    assert both.step.breaks == [] and both.graphs.reasons == []


def test_one_launch_per_step() -> None:
    both = Both(mlp(), F.mse_loss)
    x, y = batch()
    for _ in range(3):
        both.step(x, y)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        both.step(x, y)
        torch.cuda.synchronize()
    launches = [e for e in profile.events() if "Launch" in e.name]
    graphs = [e for e in launches if "Graph" in e.name]
    assert len(graphs) == 1 and len(launches) == 1, [e.name for e in launches]


def test_a_modules_forward_and_backward() -> None:
    theirs = mlp().cuda()
    ours = dt.optimize(copy.deepcopy(theirs))
    for size in (6, 3):
        x, y = batch(size)
        for model in (ours, theirs):
            model.zero_grad()
            F.mse_loss(model(x), y).backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and distance(p.grad.cpu(), q.grad.cpu()) < 1e-4


def test_a_modules_passes_are_captured() -> None:
    """Each is one launch; passes that overlap, and results that are kept, have memory of their own."""
    theirs = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 4)).cuda()
    mine = copy.deepcopy(theirs)
    ours = dt.optimize(mine, schedule="ahead_of_time")
    for turn in range(6):
        batches = [batch(6 if turn < 4 else 3) for _ in range(1 + turn % 2)]
        results = []
        for module, owner in ((ours, mine), (theirs, theirs)):
            owner.zero_grad()
            losses = [F.mse_loss(module(x), y) for x, y in batches]
            sum(losses).backward()  # type: ignore[union-attr]
            results.append(losses)
        for a, b in zip(*results, strict=True):
            assert distance(a.cpu(), b.cpu()) < 1e-4
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            assert float((p.grad - q.grad).abs().max()) < 1e-4 * max(float(q.grad.abs().max()), 1.0)
    state = state_of(ours)
    assert state is not None and not state.backend.breaks
    graphs = state.backend.cuda_graphs
    assert sum(r.replayed for r in graphs) >= 4 and not any(r.reasons for r in graphs)


def test_shapes_of_kernels_are_compared() -> None:
    """On kernels of megabytes, and whatever is found computes the same."""
    found = {}
    for search in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 1024), nn.LayerNorm(1024), nn.GELU(), nn.Linear(1024, 4)).cuda()
        step = dt.training_step(model, F.mse_loss, sgd(model.parameters()), autotune=search)
        x, y = torch.randn(8192, 8, device="cuda"), torch.randn(8192, 4, device="cuda")
        found[search] = [float(step(x, y)) for _ in range(4)]
        measured, _ = step.records[0].executable.autotuned()  # type: ignore[union-attr]
        assert (measured > 0) is search
        print(dt.report(step))
    assert found[True] == pytest.approx(found[False], rel=1e-4)


@pytest.mark.parametrize("function", [each_row, nested_branches, branch_in_a_loop], ids=lambda f: f.__name__)
def test_control_flow(function: Callable[[Any, Tensor], Tensor]) -> None:
    own = Two(function).cuda()
    other = copy.deepcopy(own)
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (own, other))
    step = dt.training_step(other, F.mse_loss, ours)
    for x in [x.cuda() for x in both_signs()] * 3:
        theirs.zero_grad()
        loss = F.mse_loss(own(x), x.cos())
        loss.backward()
        theirs.step()
        assert distance(step(x, x.cos()).cpu(), loss.detach().cpu()) < 1e-4
    (graphs,) = step.cuda_graphs.values()
    assert not step.breaks and bool(graphs.reasons) is (function is not each_row)


@pytest.mark.parametrize("schedule", ["ahead_of_time", "plain"])
def test_other_streams(schedule: str) -> None:
    """Work goes to the current stream: what another stream made just before is read in time."""
    model = nn.Linear(4096, 4096).cuda()
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0), schedule=schedule)
    y = torch.zeros(512, 4096, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    for turn in range(6):
        stream = streams[turn % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x = torch.randn(512, 4096, device="cuda")
            for _ in range(20):
                x = x @ model.weight.detach() * 0.1 + turn
            found = step(x, y)
            with torch.no_grad():
                expected = F.mse_loss(model(x), y)
        stream.synchronize()
        assert distance(found.cpu(), expected.cpu()) < 1e-4


def test_autocast_and_loss_scaling() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        both = Both(mlp(), F.mse_loss)
        for _ in range(4):
            both.run(*batch(), tolerance=3e-2)
    both = Both(mlp(), F.mse_loss, scaler=True)
    for _ in range(6):
        both.run(*batch())
        assert both.scalers[0].get_scale() == both.scalers[1].get_scale()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys", "size"), [(64, 64, 64), (197, 197, 32), (50, 70, 24)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(dtype: torch.dtype, queries: int, keys: int, size: int, causal: bool) -> None:
    shapes = ((2, 3, n, size) for n in (queries, keys, keys))
    q, k, v = (torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes)

    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    found, expected = dt.optimize(Attend())(q, k, v), Attend().double()(q.double(), k.double(), v.double())
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    assert distance(found.double().cpu(), expected.cpu()) < tolerance
    grad = torch.randn_like(found)
    ours = torch.autograd.grad(found, (q, k, v), grad)
    theirs = torch.autograd.grad(expected, (q, k, v), grad.double())
    for a, b in zip(ours, theirs, strict=True):
        assert distance(a.double().cpu(), b.double().cpu()) < 2 * tolerance


def test_dropout_advances() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4)).cuda()
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0))
    x, y = batch()
    torch.manual_seed(1)
    first = [float(step(x, y)) for _ in range(5)]
    torch.manual_seed(1)
    assert len(set(first)) == 5 and first == [float(step(x, y)) for _ in range(5)]


def test_memory_does_not_grow() -> None:
    both = Both(mlp(), F.mse_loss)
    for size in (6, 6, 6, 4, 4, 4):
        both.step(*batch(size))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        both.step(*batch(4))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 4096


def test_out_of_memory_names_arrays() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8192, 8192, bias=False), nn.GELU()) for _ in range(2))).cuda()
    step = dt.training_step(model, lambda y, t: (y * t).mean(), torch.optim.SGD(model.parameters(), lr=0.0))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**29) / total))
    try:
        with pytest.raises((OutOfMemory, torch.OutOfMemoryError)) as caught:
            x = torch.randn(1 << 12, 8192, device="cuda")
            step(x, x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "biggest arrays" in str(caught.value) or isinstance(caught.value, torch.OutOfMemoryError)


def test_tensors_elsewhere_are_refused() -> None:
    model = mlp().cuda()
    step = dt.training_step(model, F.mse_loss, sgd(model.parameters()))
    with pytest.raises(DeviceMismatch, match="argument"):
        step(torch.randn(6, 8), torch.randn(6, 4, device="cuda"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_a_second_device() -> None:
    model = mlp().to("cuda:1")
    step = dt.training_step(model, F.mse_loss, sgd(model.parameters()))
    for _ in range(3):
        assert step(torch.randn(6, 8, device="cuda:1"), torch.randn(6, 4, device="cuda:1")).device.index == 1
