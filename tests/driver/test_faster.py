"""Pieces that are slower than PyTorch are given up: when calls are timed, and what is decided."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import daceml_train as dt
from daceml_train.driver import faster
from daceml_train.driver.faster import NEW_KINDS_SLOWER, TIMED, WARM, FasterModule, NewKinds, NewSizes
from daceml_train.driver.function import CompiledGraph
from daceml_train.driver.module import state_of
from tests.driver.imperative import SIZE, Imperative, batches


def decided(monkeypatch: pytest.MonkeyPatch, pieces: float, eager: float, ran: int, broken: bool) -> list[bool]:
    """Whether each call runs compiled code, where calls take these seconds and run so many programs."""
    clock, timer, found, runs = [0.0], FasterModule(), list[bool](), 0
    monkeypatch.setattr(faster.time, "thread_time", lambda: clock[0])
    for _ in range(WARM + 2 * TIMED + 4):
        takes = timer.takes_pieces(1, runs, broken)
        clock[0] += pieces if takes else eager
        runs += ran if takes else 0
        found.append(takes)
    return found


@pytest.mark.parametrize(
    ("seconds", "ran", "broken", "ends"),
    [
        ((1.0, 2.0), 2, False, True),
        ((2.0, 1.0), 2, False, False),
        ((2.0, 1.0), 1, True, False),
        ((2.0, 1.0), 1, False, True),  # one program is all of it: not timed
        ((1.0, 2.0), 0, True, False),  # nothing is compiled
    ],
)
def test_the_faster_way_is_taken(
    seconds: tuple[float, float], ran: int, broken: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = decided(monkeypatch, *seconds, ran, broken)
    assert all(found[: WARM + TIMED - 1]) and set(found[-4:]) == {ends}


class Broken(Imperative):
    """One program, and code that TorchDynamo leaves to Python."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.r(self.l(x))
        torch._dynamo.graph_break()
        return h


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_a_graph_that_is_divided_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[bool]()
    takes = FasterModule.takes_pieces

    def watched(self: FasterModule, programs: int, runs: int, broken: bool) -> bool:
        told.append(broken)
        return takes(self, programs, runs, broken)

    monkeypatch.setattr(FasterModule, "takes_pieces", watched)
    model = Broken().double()
    trained(model, dt.optimize(model), batches(3))
    assert told == [False, True, True]


def test_calls_that_belong_to_no_training_are_not_timed() -> None:
    timer = FasterModule()
    for _ in range(5 * TIMED):
        assert timer.takes_pieces(1, 0, True)
        timer.disturbed()
    assert timer.compiled is None


class Bank(Imperative):
    """Keys of earlier batches in a buffer, which is written at a position that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.arange(12.0 * SIZE).reshape(SIZE, 12).sin())
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        logits = h @ self.queue.clone().detach()
        with torch.no_grad():
            at = int(self.pointer)
            self.queue[:, at : at + len(x)] = h.detach().T
            self.pointer[0] = (at + len(x)) % 12
        return self.r(h) + logits.logsumexp(1, keepdim=True)


def trained(model: nn.Module, called: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for x in inputs:
        loss = called(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore")
def test_a_module_in_pieces_is_timed_and_reads_copies_that_outlive_their_source() -> None:
    theirs = Bank().double()
    ours = copy.deepcopy(theirs)
    module = dt.optimize(ours)
    inputs = batches(WARM + 2 * TIMED + 8)
    torch.testing.assert_close(trained(ours, module, inputs), trained(theirs, theirs, inputs))
    torch.testing.assert_close(ours.queue, theirs.queue)
    state = state_of(module)
    assert state is not None and state.faster.compiled is not None


@pytest.mark.parametrize(("binding", "eager"), [(2.0, 1.0), (1.0, 2.0)])
def test_kinds_that_are_new_at_every_call(binding: float, eager: float) -> None:
    kinds, found = NewKinds(), list[bool]()
    for number in range(40):
        binds = kinds.binds(number)
        kinds.ran(binds, True, binding if binds else eager)
        found.append(binds)
    assert all(found[:7]) and False in found[7:16]
    assert found[20:] == [binding < eager] * 20
    left = found.index(False)
    assert kinds.binds(left)  # it is met again
    for _ in range(8):
        kinds.ran(True, False, binding)
    assert kinds.binds(99)  # few calls are new by now


class Ragged(Imperative):
    """Rows of lengths that differ at each call."""

    def forward(self, rows: list[Tensor]) -> Tensor:
        sizes = [len(row) for row in rows]
        h = self.l(torch.cat(rows))
        return self.r(torch.stack([part.sum(0) for part in h.split(sizes)]))


def test_a_step_whose_sizes_never_recur(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster, "CLEARLY", 0.0)  # PyTorch counts as faster
    torch.manual_seed(0)
    ours = Ragged().double()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (ours, theirs)]
    step = dt.training_step(ours, torch.sum, optimizers[0])
    for number in range(24):
        sizes = (2 + number, 3 + number % 3, 2 + number % 5)
        rows = [torch.randn(size, SIZE, dtype=torch.float64) for size in sizes]
        optimizers[1].zero_grad()
        loss = theirs(rows).sum()
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(step((rows,)), loss.detach(), rtol=1e-9, atol=1e-9)
    assert step.breaks == [NEW_KINDS_SLOWER]
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("binding", "eager"), [(2.0, 1.0), (1.0, 2.0)])
@pytest.mark.parametrize("turns", [1, 2])
def test_new_sizes_are_timed_from_call_to_call(
    binding: float, eager: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `turns`, what follows a call takes other times: a second call of one step has the backward pass after it."""
    clock, sizes, found = [0.0], NewSizes(), list[bool]()
    monkeypatch.setattr(faster.time, "thread_time", lambda: clock[0])
    for number in range(40):
        found.append(sizes.binds((number,), False, 0))
        clock[0] += (binding if found[-1] else eager) + 10 * (number % turns)
    assert all(found[:7]) and False in found[7:16]
    assert found[20:] == [binding < eager] * 20 and sizes.slower == (eager < binding)
    left = (found.index(False),)
    assert sizes.binds(left, False, 0) and sizes.binds(left, True, 0)  # it is met again, and has a plan then
    assert sizes.binds((99,), False, 50)  # most calls were of known sizes in between


class Edges(Imperative):
    """Sums over the edges of a graph, of which no two batches have one size."""

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        for layer in (self.l, self.r):
            x = x + torch.zeros_like(x).index_add_(0, e[1], layer(x[e[0]]).relu())
        return x.mean(0)


def edges(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(5 + number, SIZE, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 5 + number, (2, 9 + 7 * number % 31), generator=generator)


def of_edges(module: nn.Module) -> CompiledGraph:
    """The compiled graph of any sizes."""
    state = state_of(module)
    assert state is not None
    (found,) = (g for graphs in state.backend.programs.values() for g in graphs if g.compiled.forward.program.symbols)
    return found


def same_gradients(ours: nn.Module, theirs: nn.Module, called: nn.Module, numbers: Sequence[int]) -> None:
    """Calls for these sizes have PyTorch's results and gradients; those of two calls each are summed."""
    for number in numbers:
        results = []
        for model, run in ((ours, called), (theirs, theirs)):
            model.zero_grad()
            x, e = edges(number)
            x.requires_grad_()
            out = run(x, e)
            (out.square().sum() + run(x.detach(), e).sum()).backward()
            results.append((out.detach(), x.grad, *(p.grad for p in model.parameters())))
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.compiled
@pytest.mark.parametrize("share", [0.0, float("inf")], ids=["PyTorch", "programs"])
def test_a_module_whose_sizes_never_recur(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster, "CLEARLY", share)  # which of the two ways counts as faster
    torch.manual_seed(0)
    ours = Edges().double()
    theirs, module = copy.deepcopy(ours), dt.optimize(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    for number in range(26):
        optimizer.zero_grad()
        module(*edges(number)).square().sum().backward()
        optimizer.step()
        theirs.load_state_dict(ours.state_dict())
    graph, state = of_edges(module), state_of(module)
    assert state is not None and graph.compiled.backward is not None
    programs = graph.compiled.forward, graph.compiled.backward
    bound = [len(program._plans) for program in programs]
    same_gradients(ours, theirs, module, range(30, 40))
    if share:
        assert state.backend.breaks == [] and [len(program._plans) for program in programs] == [b + 10 for b in bound]
        return
    assert state.backend.breaks == [NEW_KINDS_SLOWER]
    assert all(b <= 16 for b in bound)
    kept = len(programs[0]._plans)
    same_gradients(ours, theirs, module, [39] * 4)  # which recurs
    assert len(programs[0]._plans) <= kept + 1
    before = graph.native_runs
    same_gradients(ours, theirs, module, [39] * 4)
    assert graph.native_runs > before


@pytest.mark.compiled
def test_a_checkpoint_that_calls_the_module_again_has_the_same_tensors_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faster, "CLEARLY", 0.0)
    ours = Edges().double()
    theirs, module = copy.deepcopy(ours), dt.optimize(ours)
    for number in range(24):
        module(*edges(number)).sum().backward()

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor, e: Tensor) -> Tensor:
            result: Tensor = checkpoint(module, x, e, use_reentrant=False)
            return result

    same_gradients(ours, theirs, Checkpointed(), range(30, 36))
