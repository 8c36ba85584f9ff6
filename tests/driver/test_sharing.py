"""What ranks share, against one process with the whole batch: uneven batches, sharded state, rows of tables."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import daceml_train as dt
from tests.driver.ranks import Ranks

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

ROUNDING = {"rtol": 1e-5, "atol": 5e-6}


class Words(nn.Module):
    """Two tables, one of which is large, a parameter that is no multiple of the ranks, a tied one, and an unused one."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.small = nn.Embedding(3000, 8, padding_idx=3, sparse=sparse), nn.Embedding(5, 8)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 5, bias=False)
        self.out.weight = self.small.weight
        self.unused, self.bias = nn.Linear(2, 2), nn.Parameter(torch.zeros(()))

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words).mean(1) + self.small(words[:, 0] % 5)
        return self.out(self.norm(x)) * (1 + self.bias)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
}
SIZES = {"even": ((3, 3, 3, 3),) * 3, "uneven": ((3, 3, 3, 3), (4, 0, 1, 3), (0, 2, 0, 0), (3, 3, 3, 2))}


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randint(3000, (rows, 6), generator=g), torch.randint(5, (rows,), generator=g)


def own(sizes: tuple[int, ...], step: int, rank: int) -> tuple[Tensor, ...]:
    start = sum(sizes[:rank])
    return tuple(t[start : start + sizes[rank]] for t in batch(sum(sizes), step))


def by_one(optimizer: str, sizes: str, clip_norm: float | None, sparse: bool = False) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = Words(sparse)
    updates, told = OPTIMIZERS[optimizer](model.parameters()), []
    for step, of_ranks in enumerate(SIZES[sizes]):
        x, y = batch(sum(of_ranks), step)
        updates.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm) if clip_norm else None
        updates.step()
        told.append((loss.detach(), norm))
    return model, told


def together(rank: int, optimizer: str, sizes: str, sparse: bool, options: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(rank)
    model = Words(sparse)
    if rank == 0:
        torch.manual_seed(0)
        model = Words(sparse)
    updates = OPTIMIZERS[optimizer](model.parameters())
    step = dt.training_step(model, F.cross_entropy, updates, mesh=dist.group.WORLD, **options)
    told = []
    for number, of_ranks in enumerate(SIZES[sizes]):
        loss = step(*own(of_ranks, number, rank))
        told.append((loss, step.gradient_norm))
    held = sum(t.numel() for s in updates.state.values() for k, t in s.items() if k != "step")
    return model.state_dict(), told, step.breaks, step.network, held


@pytest.mark.parametrize(
    ("optimizer", "sizes", "sparse", "options"),
    [
        ("momentum", "uneven", False, {"clip_norm": 0.5}),
        ("adamw", "uneven", False, {"clip_norm": 0.5, "shard": "optimizer"}),
        ("adagrad", "even", False, {"shard": "optimizer", "sparse": "dense"}),
        ("sgd", "uneven", True, {"sparse": "gather"}),
        ("sgd", "even", True, {"sparse": "dense"}),
    ],
)
def test_ranks_do_as_one_process(
    ranks: Ranks, optimizer: str, sizes: str, sparse: bool, options: dict[str, Any]
) -> None:
    theirs, expected = by_one(optimizer, sizes, options.get("clip_norm"), sparse)
    found = ranks(together, optimizer, sizes, sparse, options)
    for state, told, breaks, network, _ in found:
        assert breaks == []
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(state[name], value, **ROUNDING, msg=name)
            assert torch.equal(state[name], found[0][0][name])
        for (loss, norm), (their_loss, their_norm) in zip(told, expected, strict=True):
            torch.testing.assert_close(loss, their_loss, **ROUNDING)
            torch.testing.assert_close(norm, their_norm, **ROUNDING)
        if options.get("sparse") != "dense":
            assert 0 < network["sum_rows"] <= 3 * 4 * 6 * (8 * 4 + 8) + 24
        else:
            assert "sum_rows" not in network
    if options.get("shard"):
        sizes_of = [p.numel() for p in theirs.parameters() if p.grad is not None]
        entries, untrained = {"adamw": (2, 0), "adagrad": (1, 6)}[optimizer]  # Adagrad makes its state beforehand
        assert {held for *_, held in found} == {entries * sum(math.ceil(n / 4) for n in sizes_of) + untrained}


def save_and_go_on(rank: int, folder: str) -> Any:
    """Two steps, a checkpoint, and two more."""
    torch.manual_seed(0)
    model = Words()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    options = {"mesh": dist.group.WORLD, "shard": "optimizer", "scaler": scaler, "clip_norm": 1.0}
    step = dt.training_step(model, F.cross_entropy, OPTIMIZERS["adamw"](model.parameters()), **options)
    for number in range(2):
        step(*own((3, 3, 3, 3), number, rank))
    dcp.save({"step": step}, checkpoint_id=folder)
    for number in range(2, 4):
        step(*own((3, 3, 3, 3), number, rank))
    return model.state_dict()


def go_on(rank: int, folder: str, world: int) -> Any:
    """The two steps after the checkpoint, on fewer ranks."""
    torch.manual_seed(rank + 5)
    group = dist.new_group(list(range(world)))
    if rank >= world:
        return None
    model = Words()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    mesh = {"mesh": group, "shard": "optimizer"} if world > 1 else {"mesh": False}
    step = dt.training_step(model, F.cross_entropy, optimizer, scaler=scaler, clip_norm=1.0, **mesh)
    dcp.load({"step": step}, checkpoint_id=folder, process_group=group, no_dist=world == 1)
    assert scaler.get_scale() == 8.0
    for number in range(2, 4):
        step(*own((12 // world,) * world, number, rank))
    assert step.breaks == []
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("world", [3, 1])
def test_a_checkpoint_loads_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path, world: int) -> None:
    expected, *_ = ranks(save_and_go_on, str(tmp_path))
    for found in ranks(go_on, str(tmp_path), world)[:world]:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **ROUNDING, msg=name)


def save_and_load_buffers(rank: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The buffers of a rank, and those that it loads."""
    torch.manual_seed(0)
    model, other = Images(), Images()
    steps = []
    for each in (model, other):
        optimizer = OPTIMIZERS["momentum"](each.parameters())
        steps.append(dt.training_step(each, F.cross_entropy, optimizer, mesh=dist.group.WORLD))
    for number in range(2):
        steps[0](*images((4, 4, 4, 4), number, rank))
    saved = {name: value.clone() for name, value in model.named_buffers()}
    dcp.save({"step": steps[0]}, checkpoint_id=folder)
    dcp.load({"step": steps[1]}, checkpoint_id=folder)
    return saved, dict(other.named_buffers())


def test_buffers_of_a_checkpoint_are_those_of_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    """Without `sync_batch_norm`, each rank has running statistics of its own."""
    found = ranks(save_and_load_buffers, str(tmp_path))
    first = found[0][0]
    assert not torch.equal(first["norm.running_mean"], found[1][0]["norm.running_mean"])
    for _, loaded in found:
        assert all(torch.equal(loaded[name], value) for name, value in first.items())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.mix, self.flat = nn.Linear(6 * 9, 8), nn.BatchNorm1d(8, affine=False)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.out(self.flat(self.mix(x)))


def images(sizes: tuple[int, ...], step: int, rank: int | None) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(sum(sizes), 2, 5, 5, generator=g), torch.randint(4, (sum(sizes),), generator=g)
    start = sum(sizes[:rank]) if rank is not None else 0
    return (x, y) if rank is None else (x[start : start + sizes[rank]], y[start : start + sizes[rank]])


def normalized(
    rank: int, wrap: bool, sizes: list[tuple[int, ...]], shard: str | None
) -> tuple[dict[str, Tensor], list[str], list[Tensor]]:
    torch.manual_seed(0)
    model = Images()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    given = DistributedDataParallel(model) if wrap else model
    mesh = {} if wrap else {"mesh": dist.group.WORLD}
    step = dt.training_step(given, F.cross_entropy, optimizer, sync_batch_norm=True, shard=shard, **mesh)
    losses = [step(*images(of_ranks, number, rank)) for number, of_ranks in enumerate(sizes)]
    return model.state_dict(), step.breaks, losses


@pytest.mark.parametrize(("wrap", "shard"), [(False, None), (True, None), (False, "optimizer")])
@pytest.mark.parametrize("sizes", [[(4, 2, 3, 3)] * 3, [(4, 2, 3, 3), (5, 0, 4, 3), (0, 0, 12, 0)]])
def test_batch_norm_has_the_statistics_of_all_ranks(
    ranks: Ranks, wrap: bool, sizes: list[tuple[int, ...]], shard: str | None
) -> None:
    """A rank without data has the running statistics of the others, too."""
    torch.manual_seed(0)
    theirs = Images()
    optimizer = OPTIMIZERS["momentum"](theirs.parameters())
    expected = []
    for number in range(3):
        x, y = images((12,), number, None)
        optimizer.zero_grad()
        expected.append(F.cross_entropy(theirs(x), y))
        expected[-1].backward()
        optimizer.step()
    for state, breaks, losses in ranks(normalized, wrap, sizes, shard):
        assert breaks == []
        torch.testing.assert_close(losses, [loss.detach() for loss in expected], **ROUNDING)
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)


def normalized_in_parts(rank: int) -> tuple[dict[str, Tensor], list[str], list[Tensor]]:
    torch.manual_seed(0)
    model = Images()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    options = {"mesh": dist.group.WORLD, "sync_batch_norm": True, "micro_batches": 2}
    step = dt.training_step(model, F.cross_entropy, optimizer, **options)
    losses = [step(*images((4, 4, 4, 4), number, rank)) for number in range(2)]
    return model.state_dict(), step.breaks, losses


def test_batch_norm_of_parts_has_the_statistics_of_all_ranks(ranks: Ranks) -> None:
    """Part k of a step consists of the parts k of all ranks."""
    torch.manual_seed(0)
    theirs = Images()
    optimizer = OPTIMIZERS["momentum"](theirs.parameters())
    expected = []
    for number in range(2):
        whole = [images((4, 4, 4, 4), number, rank) for rank in range(4)]
        optimizer.zero_grad()
        losses = []
        for part in (slice(0, 2), slice(2, 4)):
            x, y = (torch.cat([of_rank[i][part] for of_rank in whole]) for i in range(2))
            losses.append(F.cross_entropy(theirs(x), y) / 2)
            losses[-1].backward()
        optimizer.step()
        expected.append((losses[0] + losses[1]).detach())
    for state, breaks, losses in ranks(normalized_in_parts):
        assert breaks == []
        torch.testing.assert_close(losses, expected, **ROUNDING)
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 4)
        self.register_buffer("masks", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        self.masks.add_(F.dropout(torch.ones(64)))
        return self.out(x)


def masks_of_parts(rank: int) -> Tensor:
    model = Dropped()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options = {"mesh": dist.group.WORLD, "micro_batches": 2, "reduction": "mean"}
    step = dt.training_step(model, F.cross_entropy, optimizer, **options)
    found = []
    forward = step.accumulating._run_bound
    step.accumulating._run_bound = lambda *a: (forward(*a), found.append(model.masks.clone()))[0]  # type: ignore[method-assign]
    torch.manual_seed(3)
    step(torch.randn(4, 6), torch.zeros(4, dtype=torch.long))
    assert step.breaks == []
    return found[0]


def test_ranks_draw_other_numbers_for_each_part(ranks: Ranks) -> None:
    first, *others = ranks(masks_of_parts)
    assert first.any() and not any(torch.equal(first, other) for other in others)


def wrapped(rank: int) -> list[str]:
    """A model in DistributedDataParallel is one program; in its contexts it is refused."""
    texts = []
    model = Images()
    ddp = DistributedDataParallel(model)
    step = dt.training_step(ddp, F.cross_entropy, OPTIMIZERS["sgd"](ddp.parameters()))
    step(*images((3, 3, 3, 3), 0, rank))
    assert step.breaks == [] and sum(step.network.values()) > 0
    for context in (ddp.no_sync(), ddp.join(throw_on_early_termination=False)):
        with pytest.raises(dt.Invalid) as error, context:
            step(*images((3, 3, 3, 3), 0, rank))
        texts.append(str(error.value))
    return texts


def test_a_wrapped_model_is_one_program(ranks: Ranks) -> None:
    for first, second in ranks(wrapped):
        assert first.startswith("no_sync() around a training step") and second.startswith("join() around a training")


def combined(rank: int) -> tuple[Any, ...]:
    """Micro-batches, shards, a scaler, clipping, and a schedule, where one rank has no data in the last step."""
    torch.manual_seed(0)
    model = Words()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    options = {"micro_batches": 2, "shard": "optimizer", "scaler": torch.amp.GradScaler("cpu", init_scale=64.0)}
    step = dt.training_step(model, F.cross_entropy, optimizer, mesh=dist.group.WORLD, clip_norm=0.5, **options)
    told = []
    for number, sizes in enumerate(PARTS):
        told.append(step(*own(sizes, number, rank)))
        schedule.step()
    return model.state_dict(), told, step.breaks


PARTS = ((4, 4, 4, 4), (2, 6, 4, 4), (2, 0, 4, 2))


def test_options_go_together(ranks: Ranks) -> None:
    torch.manual_seed(0)
    theirs = Words()
    optimizer = OPTIMIZERS["adamw"](theirs.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    expected = []
    for number, sizes in enumerate(PARTS):
        x, y = batch(sum(sizes), number)
        optimizer.zero_grad()
        expected.append(F.cross_entropy(theirs(x), y))
        expected[-1].backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        schedule.step()
    for state, told, breaks in ranks(combined):
        assert breaks == []
        torch.testing.assert_close(told, [loss.detach() for loss in expected], **ROUNDING)
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(state[name], value, **ROUNDING, msg=name)


def by_links(rank: int) -> list[int]:
    """The messages of a step whose buckets a link chooses: many for a fast one, one for a slow one."""
    found = []
    for link in (dt.Link(0.0, 1e9), dt.Link(1e-3, 1e9)):
        model = Images()
        step = dt.training_step(
            model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()), mesh=dist.group.WORLD, bucket=link
        )
        step(*images((3, 3, 3, 3), 0, rank))
        assert step.breaks == []
        calls = step.records[-1].calls
        found.append(calls.get("daceml::all_reduce", 0) + calls.get("daceml::start", 0))
    return found


def test_links_choose_the_size_of_buckets(ranks: Ranks) -> None:
    for many, one in ranks(by_links):
        assert many > 5 and one == 1


def refused(rank: int) -> list[str]:
    """The errors of steps that cannot share: hooks under `shard=`, and a batch that no rank has."""
    texts = []
    for options in ({"shard": "optimizer"}, {}):
        model = Words()
        if options:
            model.norm.weight.register_hook(lambda grad: None)
        step = dt.training_step(
            model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()), mesh=dist.group.WORLD, **options
        )
        with pytest.raises((RuntimeError, dt.Unsupported)) as error:
            step(*own((3, 3, 3, 3) if options else (0, 0, 0, 0), 0, rank))
        texts.append(str(error.value))
    for options in (
        {"shard": "all"},
        {"sparse": "rows"},
        {"bucket": 0},
        {"shard": "optimizer", "keep_gradients": True},
    ):
        with pytest.raises(dt.Invalid):
            dt.training_step(
                model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()), mesh=dist.group.WORLD, **options
            )
    return texts


@pytest.mark.filterwarnings("ignore:daceml_train runs")
def test_what_cannot_be_shared_is_refused(ranks: Ranks) -> None:
    for hooked, empty in ranks(refused):
        assert "shard='optimizer' divides the state" in hooked and "gradient hook" in hooked
        assert "no rank has data" in empty


def silent(rank: int) -> str:
    """The error of a step for which the other rank does not come."""
    model = nn.Linear(4, 3)
    step = dt.training_step(model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()), mesh=dist.group.WORLD)
    batch = torch.randn(2, 4), torch.randint(3, (2,))
    step(*batch)
    if rank == 1:
        time.sleep(40)
        return ""
    with pytest.raises(RuntimeError) as error:
        step(*batch)
    return str(error.value)


def test_a_rank_that_hangs_is_named_within_the_timeout(tmp_path: Path) -> None:
    few = Ranks(tmp_path, 2, patience=20)
    try:
        error, _ = few(silent)
    finally:
        few.close()
    assert error.startswith("rank 1 is gone in step 2") and "imed out" in error
