"""A table divided among ranks trains as the whole one does in one process, and each rank sends the rows that others read."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from tests.driver.ranks import Ranks

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

ROUNDING = {"rtol": 1e-5, "atol": 5e-6}
ROWS = 1001
SIZES = ((3, 3, 3, 3), (4, 2, 1, 5), (3, 3, 3, 3))


class Words(nn.Module):
    """A table that is read twice, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.table: nn.Module = nn.Embedding(ROWS, 8)
        self.small, self.out = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words).mean(1) * self.table(words[:, 0] // 2) + self.small(words[:, 0] % 5)
        return self.out(x)


def model(seed: int = 0) -> Words:
    torch.manual_seed(seed)
    return Words()


def divided(seed: int = 0, group: Any = None) -> Words:
    found = model(seed)
    assert isinstance(found.table, nn.Embedding)
    found.table = dt.ShardedEmbedding.from_embedding(found.table, group or dist.group.WORLD)
    return found


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randint(ROWS, (rows, 6), generator=g), torch.randint(5, (rows,), generator=g)


def own(sizes: tuple[int, ...], step: int, rank: int) -> tuple[Tensor, ...]:
    start = sum(sizes[:rank])
    return tuple(t[start : start + sizes[rank]] for t in batch(sum(sizes), step))


def by_one(
    optimizer: str,
    sizes: tuple[tuple[int, ...], ...],
    clip_value: float | None = None,
    clip_norm: float | None = None,
    kind: float = 2.0,
) -> tuple[Words, list[Tensor], list[Tensor]]:
    """Steps of PyTorch on the whole batch: the model, losses, and norms of gradients."""
    theirs = model()
    chosen, losses, norms = OPTIMIZERS[optimizer](theirs.parameters()), [], []
    for number, of_step in enumerate(sizes):
        chosen.zero_grad()
        x, y = batch(sum(of_step), number)
        loss = F.cross_entropy(theirs(x), y)
        loss.backward()
        if clip_value is not None:
            nn.utils.clip_grad_value_(theirs.parameters(), clip_value)
        if clip_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm, kind))
        chosen.step()
        losses.append(loss.detach())
    return theirs, losses, norms


def trained(rank: int, optimizer: str, sizes: tuple[tuple[int, ...], ...], clip_value: float | None) -> Any:
    ours = divided()
    chosen = OPTIMIZERS[optimizer](ours.parameters())
    step = dt.training_step(ours, F.cross_entropy, chosen, mesh=dist.group.WORLD, clip_value=clip_value)
    kind = torch.int64 if clip_value is not None else torch.int32
    parts = [own(of_step, number, rank) for number, of_step in enumerate(sizes)]
    losses = [step(words.to(kind), target) for words, target in parts]
    held = sum(v.numel() for v in chosen.state[ours.table.weight].values() if v.ndim)
    with pytest.raises(dt.Invalid, match="int64 or int32 indices, given torch.float32"):
        ours.table(torch.ones(2))
    return ours.state_dict(), losses, step.breaks, step.network, held


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("sizes", "clip_value"), [(SIZES[:1] * 3, None), (SIZES, 0.01)])
def test_parameters_are_those_of_one_process(
    ranks: Ranks, optimizer: str, sizes: tuple[tuple[int, ...], ...], clip_value: float | None
) -> None:
    theirs, expected, _ = by_one(optimizer, sizes, clip_value)
    found = ranks(trained, optimizer, sizes, clip_value)
    whole = torch.cat([state["table.weight"] for state, *_ in found])
    assert all(len(state["table.weight"]) == 251 for state, *_ in found)
    torch.testing.assert_close(whole[:ROWS], theirs.table.weight.detach(), **ROUNDING)
    for state, losses, breaks, network, held in found:
        assert breaks == []
        assert held == {"sgd": 1, "adamw": 2}[optimizer] * 251 * 8
        torch.testing.assert_close(losses, expected, **ROUNDING)
        for name, value in theirs.state_dict().items():
            if name != "table.weight":
                assert torch.equal(state[name], found[0][0][name])
                torch.testing.assert_close(state[name], value, **ROUNDING, msg=name)
        assert 0 < network["return_rows"] <= 21 * 32 and network["lookup_rows"] > 0
    asked = sum(network["return_rows"] // 32 for *_, network, _ in found)
    assert sum(network["lookup_rows"] for *_, network, _ in found) == asked * (8 + 32) + 4 * 2 * 3 * 8


def in_eager_execution(rank: int) -> Any:
    """Values and gradients of PyTorch's own execution, and of `optimize`, which leaves the module to it."""
    results = []
    frozen = nn.Embedding(ROWS, 8).requires_grad_(False)
    assert not dt.ShardedEmbedding.from_embedding(frozen, dist.group.WORLD).weight.requires_grad
    for compiled in (False, True):
        ours = divided()
        called: Any = dt.optimize(ours) if compiled else ours
        x, y = own((3, 3, 3, 3), 0, rank)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loss = F.cross_entropy(called(x), y, reduction="sum")
            loss.backward()
            with torch.no_grad():
                scores = called(x)
        texts = [str(w.message) for w in told if "ShardedEmbedding" in str(w.message)]
        results.append((scores, ours.table.weight.grad, bool(texts)))
    return results


def test_pytorch_runs_it_elsewhere(ranks: Ranks) -> None:
    theirs = model()
    scores = []
    for rank in range(4):
        x, y = own((3, 3, 3, 3), 0, rank)
        scores.append(theirs(x).detach())
        F.cross_entropy(theirs(x), y, reduction="sum").backward()
    for compiled in (False, True):
        found = [of_rank[compiled] for of_rank in ranks(in_eager_execution)]
        grad = torch.cat([g for _, g, _ in found])[:ROWS]
        torch.testing.assert_close(grad, theirs.table.weight.grad, **ROUNDING)
        for (ours, _, told), expected in zip(found, scores, strict=True):
            torch.testing.assert_close(ours, expected, **ROUNDING)
            assert told is compiled


def stepped(rank: int, folder: str, world: int, load: bool) -> Any:
    """Two steps and a checkpoint, or two further ones from it on another number of ranks."""
    group = dist.new_group(list(range(world)))
    if rank >= world:
        return None
    ours = model(int(load))
    ours.table = dt.ShardedEmbedding.from_embedding(ours.table, group)
    step = dt.training_step(ours, F.cross_entropy, OPTIMIZERS["adamw"](ours.parameters()), mesh=group)
    sizes = (12 // world,) * world
    if load:
        dcp.load({"step": step}, checkpoint_id=folder, process_group=group)
    for number in range(2 * load, 2 + 2 * load):
        step(*own(sizes, number, rank))
    if not load:
        dcp.save({"step": step}, checkpoint_id=folder, process_group=group)
    return copy.deepcopy(ours.state_dict())


class TestCheckpoints:
    def test_they_load_on_another_number_of_ranks(self, ranks: Ranks, tmp_path: Path) -> None:
        ranks(stepped, str(tmp_path / "step"), 4, False)
        theirs, *_ = by_one("adamw", ((3, 3, 3, 3),) * 4)
        for world in (4, 2):
            found = [state for state in ranks(stepped, str(tmp_path / "step"), world, True) if state is not None]
            whole = torch.cat([state["table.weight"] for state in found])[:ROWS]
            torch.testing.assert_close(whole, theirs.table.weight.detach(), **ROUNDING)
            torch.testing.assert_close(found[0]["out.weight"], theirs.out.weight.detach(), **ROUNDING)


EMPTY = ((3, 3, 3, 3), (4, 0, 2, 5), (0, 0, 3, 0), (3, 3, 3, 3))
PARTS = ((4, 4, 4, 4), (2, 6, 4, 4), (4, 4, 4, 4))


def with_options(
    rank: int, sizes: tuple[tuple[int, ...], ...], options: dict[str, Any], scale: bool
) -> tuple[Tensor, dict[str, Tensor], list[Any], list[str], int, int]:
    ours = divided()
    chosen = OPTIMIZERS["adamw"](ours.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scale else None
    step = dt.training_step(ours, F.cross_entropy, chosen, mesh=dist.group.WORLD, scaler=scaler, **options)
    told = []
    for number, of_step in enumerate(sizes):
        told.append((step(*own(of_step, number, rank)), step.gradient_norm))
    held = sum(v.numel() for v in chosen.state[ours.out.weight].values() if v.ndim)
    of_table = sum(v.numel() for v in chosen.state[ours.table.weight].values() if v.ndim)
    return ours.table.whole().full_tensor(), ours.state_dict(), told, step.breaks, held, of_table


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (SIZES, {"clip_norm": 0.05}),
        (SIZES, {"clip_norm": 0.05, "norm_type": math.inf}),
        (SIZES, {"clip_norm": 0.05, "norm_type": 0.0}),
        (SIZES, {"shard": "optimizer"}),
        (EMPTY, {}),
        (EMPTY, {"clip_norm": 0.05, "shard": "optimizer"}),
        (PARTS, {"micro_batches": 2}),
        (PARTS, {"micro_batches": 2, "clip_norm": 0.05, "shard": "optimizer"}),
    ],
)
@pytest.mark.parametrize("scale", [pytest.param(False, marks=pytest.mark.wide), True])
def test_it_goes_with_other_options(
    ranks: Ranks, sizes: tuple[tuple[int, ...], ...], options: dict[str, Any], scale: bool
) -> None:
    bound, kind = options.get("clip_norm"), options.get("norm_type", 2.0)
    theirs, expected, norms = by_one("adamw", sizes, None, bound, kind)
    for whole, state, told, breaks, held, of_table in ranks(with_options, sizes, options, scale):
        assert breaks == [] and of_table == 2 * 251 * 8
        assert held == 2 * (10 if options.get("shard") else 40)
        torch.testing.assert_close(whole, theirs.table.weight.detach(), **ROUNDING)
        torch.testing.assert_close([loss for loss, _ in told], expected, **ROUNDING)
        if bound:
            torch.testing.assert_close([norm for _, norm in told], norms, **ROUNDING)
        for name, value in theirs.state_dict().items():
            if name != "table.weight":
                torch.testing.assert_close(state[name], value, **ROUNDING, msg=name)


def infinite(rank: int) -> tuple[bool, float]:
    """Whether a step changed this rank's rows, of which another rank's gradient is infinite, and the scale after it."""
    ours = divided()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    step = dt.training_step(
        ours, F.cross_entropy, OPTIMIZERS["adamw"](ours.parameters()), mesh=dist.group.WORLD, scaler=scaler
    )
    before = ours.table.weight.detach().clone()
    x, y = own((3, 3, 3, 3), 0, rank)
    if rank == 2:
        ours.small.weight.data.mul_(torch.inf)
    step(x, y)
    return torch.equal(before, ours.table.weight), scaler.get_scale()


def test_an_infinite_gradient_of_one_rank_skips_the_update_of_all_rows(ranks: Ranks) -> None:
    assert ranks(infinite) == [(True, 32.0)] * 4


def wrong(rank: int) -> tuple[str, str]:
    """The errors of a rank without data in micro-batches, and of an index that is out of range on one rank."""
    ours = divided()
    with pytest.raises(dt.Invalid, match="a ShardedEmbedding trains in a step of its own ranks"):
        dt.training_step(ours, F.cross_entropy, OPTIMIZERS["sgd"](ours.parameters()), mesh=False)
    ours.table.weight = ours.small.weight = nn.Parameter(torch.randn(251, 8))  # tied to a table that all ranks have
    step = dt.training_step(ours, F.cross_entropy, OPTIMIZERS["sgd"](ours.parameters()), mesh=dist.group.WORLD)
    with pytest.raises(dt.Unsupported, match="ShardedEmbedding in a step that runs in pieces"):
        step(*own((3, 3, 3, 3), 0, rank))
    errors = []
    for parts, sizes in ((2, (2, 0, 2, 2)), (1, (3, 3, 3, 3))):
        group = dist.new_group()  # a rank that raises ends its group
        ours = divided(group=group)
        before = copy.deepcopy(ours.state_dict())
        chosen = OPTIMIZERS["sgd"](ours.parameters())
        step = dt.training_step(ours, F.cross_entropy, chosen, mesh=group, micro_batches=parts)
        x, y = own(sizes, 0, rank)
        if parts == 1 and rank == 2:
            x[1, 1] = ROWS
        with pytest.raises((dt.Unsupported, IndexError, RuntimeError)) as error:
            step(x, y)
        assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
        errors.append(str(error.value))
    return errors[0], errors[1]


@pytest.mark.filterwarnings("ignore:daceml_train runs")
def test_what_it_does_not_go_with_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    for without_data, out_of_range in ranks(wrong):
        assert "a rank without data in micro-batches that read a ShardedEmbedding" in without_data
        assert f"index {ROWS} is out of range for a table of {ROWS} rows" in out_of_range
