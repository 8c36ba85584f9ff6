"""`training_step(..., mesh=)`: two processes on halves of a batch against PyTorch on the whole of it."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver import distribution
from tests.driver.ranks import GONE, Ranks

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

ROUNDING = {"rtol": 1e-5, "atol": 2e-6}
"""The sum of two halves of a gradient is rounded otherwise than that of all rows, and AdamW divides by its root."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    result = Ranks(tmp_path_factory.mktemp("ranks"))
    yield result
    result.close()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(30, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.norm(self.table(words).mean(1)))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 4)
    )


def batch(model: str, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    sizes = {"dense": (8, 6), "images": (8, 2, 6, 6)}
    x = torch.randint(30, (8, 5), generator=g) if model == "Words" else torch.randn(sizes[model], generator=g)
    return x, torch.randint(4, (8,), generator=g)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}
MODELS = {"dense": dense, "images": images, "Words": Words}


def half(tensors: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
    return tuple(t[4 * rank : 4 * rank + 4] for t in tensors)


def by_pytorch(kind: str, optimizer: str, clip_norm: float | None, steps: int) -> tuple[nn.Module, list[Any], Any]:
    """Eager steps on whole batches, where batch norm sees each half by itself, as DistributedDataParallel has it."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    other = copy.deepcopy(model)
    updates, told = OPTIMIZERS[optimizer](model.parameters()), []
    for step in range(steps):
        other.load_state_dict({**other.state_dict(), **dict(model.named_parameters())})
        losses = []
        for rank, replica in enumerate((model, other)):
            replica.zero_grad()
            x, y = half(batch(kind, step), rank)
            losses.append(F.cross_entropy(replica(x), y))
            losses[-1].backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            if p.grad is not None:
                p.grad = (p.grad + q.grad) / 2
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm) if clip_norm else None
        updates.step()
        told.append((sum(losses).detach() / 2, norm))
    return model, told, updates


def step_together(rank: int, kind: str, optimizer: str, options: dict[str, Any], steps: int) -> tuple[Any, ...]:
    torch.manual_seed(rank)  # other parameters on each rank, until the step is made
    model = MODELS[kind]()
    if rank == 0:
        torch.manual_seed(0)
        model = MODELS[kind]()
    given = init_device_mesh("cpu", (2,)) if kind == "dense" else dist.group.WORLD
    step = dt.training_step(model, F.cross_entropy, OPTIMIZERS[optimizer](model.parameters()), mesh=given, **options)
    told = []
    for number in range(steps):
        loss = step(*half(batch(kind, number), rank))
        told.append((loss, step.gradient_norm))
    assert "1 collective, in which each rank sends" in str(dt.report(step))
    kept = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return model.state_dict(), told, step.breaks, kept


@pytest.mark.parametrize(
    ("kind", "optimizer", "options"),
    [
        ("dense", "sgd", {}),
        ("dense", "adamw", {"micro_batches": 2}),
        ("images", "adamw", {"clip_norm": 0.5}),
        ("Words", "adamw", {"clip_norm": 0.05, "keep_gradients": True}),
    ],
)
def test_ranks_train_as_one_process_on_the_whole_batch(
    ranks: Ranks, kind: str, optimizer: str, options: dict[str, Any]
) -> None:
    theirs, expected, _ = by_pytorch(kind, optimizer, options.get("clip_norm"), 3)
    found = ranks(step_together, kind, optimizer, options, 3)
    names = [name for name, _ in theirs.named_parameters()]
    for state, told, breaks, kept in found:
        assert breaks == []
        for name in names:
            torch.testing.assert_close(state[name], theirs.state_dict()[name], **ROUNDING)
            assert torch.equal(state[name], found[0][0][name])
        for (loss, norm), (their_loss, their_norm) in zip(told, expected, strict=True):
            torch.testing.assert_close(loss, their_loss, **ROUNDING)
            torch.testing.assert_close(norm, their_norm, **ROUNDING)
        if "keep_gradients" in options:
            for ours, p in zip(kept, theirs.parameters(), strict=True):
                torch.testing.assert_close(ours, p.grad, **ROUNDING)
    for name, buffer in theirs.named_buffers():  # of the first rank, whose statistics are those of its own rows
        torch.testing.assert_close(found[0][0][name], buffer, **ROUNDING)


def differing(rank: int, how: str) -> str:
    """The error of a rank whose model, step, batch or learning rate is not that of the other, and one more step."""
    model = nn.Linear(6, 4 if how != "model" else 4 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None
    try:
        clip = {"options": None if rank else 1.0}.get(how, 1.0)
        step = dt.training_step(model, F.cross_entropy, optimizer, mesh=dist.group.WORLD, clip_norm=clip)
        before = copy.deepcopy(model.state_dict())
        x, y = half(batch("dense", 0), rank)
        if how == "rate":
            optimizer.param_groups[0]["lr"] = 0.1 + rank
        if how == "bound":
            step.clip_norm = 1.0 + rank
        if how == "kind":
            step.clip_norm = None if rank else 1.0
        if how == "trains":
            model.weight.requires_grad = rank == 0
        if how == "raises":
            x = x[:, rank:]
        step(x, y)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        return "no error"
    if step is not None:
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
        model.weight.requires_grad, optimizer.param_groups[0]["lr"], step.clip_norm = True, 0.1, 1.0
        step(*half(batch("dense", 1), rank))
        after = [torch.empty_like(model.weight) for _ in range(2)]
        dist.all_gather(after, model.weight.detach())
        assert torch.equal(*after) and not torch.equal(after[0], before["weight"])
    return text


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("model", r"rank 1 differs from rank 0, which has: weight \[4, 6\].*rank 1 has: weight \[5, 6\]"),
        ("trains", r"rank 1 differs from rank 0, which has: .*weight.*rank 1 has: .*all_reduce 0 of \[6\]"),
        ("rate", "different learning rates"),
        ("bound", "different learning rates or other options"),
        ("kind", r"rank 1 differs from rank 0, which has: SGD: .*clip_norm"),
        ("options", r"rank 1 differs from rank 0, which has: clipping=Clipping\(norm=1.0.*norm=None"),
        ("raises", "rank 1 raised .*no rank has updated a parameter in step 1|shapes cannot be multiplied"),
    ],
)
def test_ranks_that_differ_stop_with_an_error_that_names_them(ranks: Ranks, how: str, message: str) -> None:
    for error in ranks(differing, how):
        assert re.search(message, error, re.DOTALL), error


class ByFunction(nn.Module):
    """An embedding by a function of PyTorch, and a linear layer; the graph breaks in between if it is told so."""

    def __init__(self, function: Any, options: dict[str, Any], breaks: bool = False, skipped: bool = False) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(9, 6)), nn.Linear(6, 4)
        self.function, self.options, self.breaks = function, options, breaks
        if skipped:
            self.function = torch._dynamo.disable(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.function(x.view(-1, 1), self.weight, **self.options).view(-1, 6)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(rows)


def drifting(rank: int, how: str) -> str:
    """The error of a step in which each rank would change a table by the rows that it reads alone."""
    models = {
        "max_norm": lambda: nn.Sequential(nn.Embedding(9, 6, max_norm=1.0), nn.Linear(6, 4)),
        "scale_grad_by_freq": lambda: nn.Sequential(nn.EmbeddingBag(9, 6, scale_grad_by_freq=True), nn.Linear(6, 4)),
        "function": lambda: ByFunction(F.embedding, {"max_norm": 1.0}),
        "scaled": lambda: ByFunction(F.embedding, {"scale_grad_by_freq": True}),
        "scaled bag": lambda: ByFunction(F.embedding_bag, {"scale_grad_by_freq": True, "mode": "sum"}),
        "function, broken": lambda: ByFunction(F.embedding, {"max_norm": 1.0}, breaks=True),
        "scaled, broken": lambda: ByFunction(F.embedding, {"scale_grad_by_freq": True}, breaks=True),
        "function, skipped": lambda: ByFunction(F.embedding, {"max_norm": 1.0}, skipped=True),
        "scaled, skipped": lambda: ByFunction(F.embedding, {"scale_grad_by_freq": True}, skipped=True),
        "clamped, skipped": lambda: ByFunction(clamped, {}, skipped=True),
    }
    model = models[how.removesuffix(", in parts")]()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    parts: dict[str, Any] = {"micro_batches": 2, "reduction": "mean"} if how.endswith("in parts") else {}
    try:
        step = dt.training_step(model, F.cross_entropy, optimizer, mesh=dist.group.WORLD, **parts)
        for _ in range(2):
            step(torch.tensor([rank, 3]), torch.tensor([0, 1]))
    except (dt.Invalid, distribution.RankError) as error:
        return str(error)
    return "no error"


def clamped(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of a table that all ranks change in one way."""
    with torch.no_grad():
        weight.clamp_(-1, 1)
    return F.embedding(x, weight)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("max_norm", "0 has max_norm: ranks scale the rows that they read alone"),
        ("scale_grad_by_freq", "0 has scale_grad_by_freq: a rank counts its own part of the batch alone"),
        ("function", "the model changes weight by its batch, and ranks would drift apart"),
        ("function, in parts", "the model changes weight by its batch, and ranks would drift apart"),
        ("scaled", "an embedding has scale_grad_by_freq (at test_mesh.py:"),
        ("scaled bag", "an embedding has scale_grad_by_freq (at test_mesh.py:"),
        ("scaled, in parts", "an embedding has scale_grad_by_freq (at test_mesh.py:"),
        ("function, broken", "the model changes weight by its batch, and ranks would drift apart"),
        ("scaled, broken", "an embedding has scale_grad_by_freq (at test_mesh.py:"),
        ("function, skipped", "the model changes parameter 0 [9, 6] by its batch, and ranks drift apart"),
        ("function, skipped, in parts", "the model changes parameter 0 [9, 6] by its batch, and ranks drift apart"),
        ("scaled, skipped", "an embedding has scale_grad_by_freq, in a function that TorchDynamo does not trace"),
        ("clamped, skipped", "no error"),
    ],
)
def test_tables_that_would_drift_apart_are_refused(ranks: Ranks, how: str, message: str) -> None:
    assert all(message in error for error in ranks(drifting, how))


def damaged(rank: int) -> str:
    """The error of a step whose parameters change on their way to one rank."""
    model, sent = dense(), distribution.Ranks.broadcast

    def broadcast(self: Any, tensor: Tensor, root: int = 0) -> None:
        sent(self, tensor, root)
        tensor[0] ^= rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distribution.Ranks, "broadcast", broadcast)
        with pytest.raises(RuntimeError) as error:
            dt.training_step(model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()), mesh=dist.group.WORLD)
    return str(error.value)


def test_parameters_that_arrive_damaged_are_an_error_on_all_ranks(ranks: Ranks) -> None:
    for error in ranks(damaged):
        assert error.startswith("parameters, buffers or state of rank 1 are not those that rank 0 sent")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 4)
        self.register_buffer("mask", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        self.mask.copy_(F.dropout(torch.ones(64)))
        return self.out(x) * self.mask.mean()


def masks(rank: int) -> Tensor:
    model = Masked()
    step = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), mesh=dist.group.WORLD)
    torch.manual_seed(3)
    step(*half(batch("dense", 0), rank))
    assert step.breaks == []
    return model.mask


def test_ranks_draw_other_numbers_from_equal_seeds(ranks: Ranks) -> None:
    first, second = ranks(masks)
    assert set(first.tolist()) == set(second.tolist()) == {0.0, 2.0} and not torch.equal(first, second)


def scaled(rank: int) -> tuple[dict[str, Tensor], list[float], list[str]]:
    """Three steps, in the second of which one rank has an infinite gradient."""
    torch.manual_seed(0)
    model = dense()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.training_step(model, F.cross_entropy, optimizer, mesh=dist.group.WORLD, scaler=scaler, clip_norm=1.0)
    scales = []
    for number in range(3):
        x, y = half(batch("dense", number), rank)
        step(x * (torch.inf if number == rank == 1 else 1.0), y)
        scales.append(scaler.get_scale())
    return model.state_dict(), scales, step.breaks


def test_an_infinite_gradient_of_one_rank_skips_the_update_on_all(ranks: Ranks) -> None:
    torch.manual_seed(0)
    theirs = dense()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for number in (0, 2):
        x, y = batch("dense", number)
        optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
    for state, scales, breaks in ranks(scaled):
        assert breaks == [] and scales == [8.0, 4.0, 4.0]
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(state[name], value, **ROUNDING)


def in_pieces(rank: int) -> tuple[dict[str, Tensor], list[Tensor], list[str]]:
    torch.manual_seed(0)
    model = dense()
    model[0].weight.register_hook(lambda grad: None)
    step = dt.training_step(model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()), mesh=dist.group.WORLD)
    losses = [step(*half(batch("dense", number), rank)) for number in range(2)]
    return model.state_dict(), losses, step.breaks


@pytest.mark.filterwarnings("ignore:daceml_train runs")
def test_a_step_in_pieces_reduces_gradients(ranks: Ranks) -> None:
    theirs, told, _ = by_pytorch("dense", "sgd", None, 2)
    for state, losses, breaks in ranks(in_pieces):
        assert breaks == ["a parameter has a gradient hook"]
        torch.testing.assert_close(losses, [loss for loss, _ in told], **ROUNDING)
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(state[name], value, **ROUNDING)


def of_length(rank: int) -> tuple[Tensor, Tensor]:
    """The gradient of a step on sentences that are longer on one rank, and that of the rank alone, in PyTorch."""
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words, y = torch.randint(30, (4, 5 + 2 * rank)), torch.randint(4, (4,))
    F.cross_entropy(model(words), y).backward()
    own = model.table.weight.grad.clone()
    step = dt.training_step(model, F.cross_entropy, optimizer, mesh=dist.group.WORLD, keep_gradients=True)
    step(words, y)
    assert step.breaks == []
    return model.table.weight.grad, own


def test_ranks_may_have_other_lengths(ranks: Ranks) -> None:
    (first, one), (second, other) = ranks(of_length)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, (one + other) / 2, **ROUNDING)


def left(rank: int) -> tuple[str, str]:
    """The errors of a step during which the other rank ends, and of the one after."""
    model = dense()
    step = dt.training_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), mesh=dist.group.WORLD)
    step(*half(batch("dense", 0), rank))
    if rank == 1:
        os._exit(1)
    errors = []
    for number in (1, 2):
        with pytest.raises(RuntimeError) as error:
            step(*half(batch("dense", number), rank))
        errors.append(str(error.value))
    return errors[0], errors[1]


def test_a_rank_that_ends_is_named(tmp_path: Path) -> None:
    own = Ranks(tmp_path)
    try:
        (first, second), gone = own(left)
    finally:
        own.close()
    assert gone == GONE
    assert first.startswith("rank 1 is gone in step 2") and "start all processes from a checkpoint" in second


def failing_late(rank: int) -> list[str]:
    """The errors of a step in which one rank finds a class out of range, of the next one, and of another step."""
    model = dense()
    errors = []

    def make() -> Any:
        return dt.training_step(model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()), mesh=dist.group.WORLD)

    step = make()
    x, y = half(batch("dense", 0), rank)
    for call in (lambda: step(x, y + 10 * rank), lambda: step(x, y), make):
        with pytest.raises((RuntimeError, IndexError)) as error:
            call()
        errors.append(f"{type(error.value).__name__}: {error.value}")
    return errors


def test_an_error_within_the_program_stops_all_ranks(tmp_path: Path) -> None:
    own = Ranks(tmp_path)
    try:
        (there, *later), (here, *further) = own(failing_late)
    finally:
        own.close()
    cause = "rank 1 raised OutOfRange: a target is out of bounds"
    assert there.startswith(f"RankError: {cause}") and here.startswith("OutOfRange: a target is out of bounds")
    assert all(cause in text and "start all processes from a checkpoint" in text for text in (*later, *further))
