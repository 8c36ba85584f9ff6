"""A model in `fully_shard` trains as one program, against one process with the whole batch and against PyTorch's hooks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import daceml_train as dt
from tests.driver.ranks import Ranks

pytestmark = [pytest.mark.compiled, pytest.mark.slow]

ROUNDING = {"rtol": 1e-5, "atol": 5e-6}


class Words(nn.Module):
    """Parameters whose rows are no multiple of the ranks or fewer than these, a tied, a frozen, and an unused one."""

    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(30, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6) if normalized else nn.LayerNorm(6)
        self.out, self.unused, self.bias = nn.Linear(6, 30, bias=False), nn.Linear(2, 3), nn.Parameter(torch.zeros(1))
        self.out.weight = self.table.weight
        self.mix.bias.requires_grad_(False)
        self.steps = 0

    def forward(self, words: Tensor) -> Tensor:
        self.steps += 1
        x = self.norm(torch.tanh(self.mix(self.table(words).mean(1))))
        return self.out(x) * (1 + self.bias)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
}
SIZES = {"even": ((3, 3, 3, 3),) * 3, "uneven": ((3, 3, 3, 3), (4, 0, 1, 3), (0, 2, 0, 0), (3, 3, 3, 2))}


def own(sizes: tuple[int, ...], step: int, rank: int | None) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(step)
    whole = torch.randint(30, (sum(sizes), 4), generator=g), torch.randint(30, (sum(sizes),), generator=g)
    if rank is None:
        return whole
    start = sum(sizes[:rank])
    return tuple(t[start : start + sizes[rank]] for t in whole)


def sharded(layers: bool = False, normalized: bool = False, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = Words(normalized)
    if layers:
        fully_shard(model.mix, **options)
    return fully_shard(model, **options)


def by_one(optimizer: str, sizes: str, clip_norm: float | None, normalized: bool = False) -> tuple[Any, list[Any]]:
    torch.manual_seed(0)
    model = Words(normalized)
    updates, told = OPTIMIZERS[optimizer](model.parameters()), []
    for step, of_ranks in enumerate(SIZES[sizes]):
        x, y = own(of_ranks, step, None)
        updates.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm) if clip_norm else None
        updates.step()
        told.append((loss.detach(), norm))
    return model, told


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in state.items()}


def together(rank: int, optimizer: str, sizes: str, layers: bool, scale: bool, options: dict[str, Any]) -> Any:
    model = sharded(layers, options.get("sync_batch_norm", False))
    updates = OPTIMIZERS[optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scale else None
    step = dt.training_step(model, F.cross_entropy, updates, scaler=scaler, **options)
    told = []
    for number, of_ranks in enumerate(SIZES[sizes]):
        told.append((step(*own(of_ranks, number, rank)), step.gradient_norm))
    held = {n: t for n, t in updates.state[model.table.weight].items() if t.ndim}
    assert all(isinstance(t, DTensor) and t.to_local().shape == (8 if rank < 3 else 6, 6) for t in held.values())
    return whole(model.state_dict()), told, step.breaks, step.network, model.steps


@pytest.mark.parametrize(
    ("optimizer", "sizes", "layers", "scale", "options"),
    [
        ("sgd", "even", False, False, {}),
        ("momentum", "uneven", True, False, {"clip_norm": 0.5}),
        ("adamw", "uneven", False, True, {"clip_norm": 0.5}),
        ("adagrad", "even", True, True, {}),
        ("momentum", "even", True, False, {"sync_batch_norm": True}),
    ],
)
def test_ranks_do_as_one_process(
    ranks: Ranks, optimizer: str, sizes: str, layers: bool, scale: bool, options: dict[str, Any]
) -> None:
    theirs, expected = by_one(optimizer, sizes, options.get("clip_norm"), options.get("sync_batch_norm", False))
    found = ranks(together, optimizer, sizes, layers, scale, options)
    for state, told, breaks, network, steps in found:
        assert breaks == [] and network["all_gather"] > 0 and network["reduce_scatter"] > 0
        assert steps == len(SIZES[sizes])  # also without data
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5, msg=name)
        for (loss, norm), (their_loss, their_norm) in zip(told, expected, strict=True):
            torch.testing.assert_close(loss, their_loss, **ROUNDING)
            torch.testing.assert_close(norm, their_norm, **ROUNDING)


def evaluated(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Scores of PyTorch's own call between steps, in both modes, and of a step of one process."""
    model = sharded(normalized=True)
    step = dt.training_step(model, F.cross_entropy, OPTIMIZERS["adamw"](model.parameters()))
    x, y = own((3, 3, 3, 3), 0, rank)
    found = []
    for _ in range(3):
        step(x, y)
        model.eval()
        with torch.no_grad():
            found.append(model(x).clone())
        model.train()
    before = model.norm.running_mean.clone()
    model.norm.eval()  # no statistics are gathered any more
    step(x, y)
    assert torch.equal(before, model.norm.running_mean) and step.breaks == []
    for trains in (False, True):  # a parameter that is frozen between steps, and trains again
        model.mix.weight.requires_grad_(trains)
        weight = whole(model.state_dict())["mix.weight"]
        step(x, y)
        assert torch.equal(weight, whole(model.state_dict())["mix.weight"]) is not trains and step.breaks == []
    hook = model.mix.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(dt.Invalid, match="a module in fully_shard has a new hook"):
        step(x, y)
    hook.remove()
    step(x, y)
    eager = sharded(normalized=True)
    updates, expected = OPTIMIZERS["adamw"](eager.parameters()), []
    for _ in range(3):
        updates.zero_grad()
        F.cross_entropy(eager(x), y).backward()
        updates.step()
        eager.eval()
        with torch.no_grad():
            expected.append(eager(x).clone())
        eager.train()
    return found, expected


def test_pytorch_evaluates_between_steps(ranks: Ranks) -> None:
    for found, expected in ranks(evaluated):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def shown(rank: int) -> tuple[str, str, int, list[str]]:
    """The graph of a step, its report and its SDFG, before and after it has run."""
    model = sharded()
    step = dt.training_step(model, F.cross_entropy, OPTIMIZERS["adamw"](model.parameters()))
    x, y = own((3, 3, 3, 3), 0, rank)
    graph, nodes = str(step.graph(x, y)), len(step.sdfg(x, y).nodes())
    step(x, y)
    return graph, str(dt.report(step, ranks=8, link=dt.Link(1e-5, 1e9))), nodes, step.breaks


def test_it_is_shown_as_it_runs(ranks: Ranks) -> None:
    for graph, report, nodes, breaks in ranks(shown):
        assert breaks == [] and nodes > 0
        assert "all_gather" in graph and "reduce_scatter" in graph and "adam_update" in graph
        assert "in which each rank sends" in report and "simulated on 8 ranks" in report


def stepped(rank: int, folder: str, load: bool) -> dict[str, Tensor]:
    model = sharded(seed=int(load))
    updates = OPTIMIZERS["adamw"](model.parameters())
    step = dt.training_step(model, F.cross_entropy, updates)
    if load:
        dcp.load({"step": step}, checkpoint_id=folder)
    for number in range(2):
        step(*own((3, 3, 3, 3), number + 2 * load, rank))
    if not load:
        dcp.save({"step": step}, checkpoint_id=folder)
        for number in range(2, 4):
            step(*own((3, 3, 3, 3), number, rank))
    return whole(model.state_dict())


def test_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    (expected, *_), (found, *_) = ranks(stepped, str(tmp_path), False), ranks(stepped, str(tmp_path), True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def pieces(rank: int, how: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """The breaks of a model that stays PyTorch's, and parameters beside those of PyTorch's own steps."""
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)} if how == "policy" else {}
    ours, theirs = sharded(**options), sharded(**options)
    if how == "gradient hook":
        for p in ours.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: None)
    if how == "forward hook":
        ours.register_forward_hook(lambda module, inputs, output: output * 1.0)
    optimizers = [OPTIMIZERS["momentum"](m.parameters()) for m in (ours, theirs)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = dt.training_step(ours, F.cross_entropy, optimizers[0])
        for number in range(2):
            x, y = own((3, 3, 3, 3), number, rank)
            step(x, y)
            optimizers[1].zero_grad()
            F.cross_entropy(theirs(x), y).backward()
            optimizers[1].step()
    return step.breaks, whole(ours.state_dict()), whole(theirs.state_dict())


@pytest.mark.parametrize("how", ["policy", "gradient hook", "forward hook"])
def test_what_a_program_cannot_do_stays_with_pytorch(ranks: Ranks, how: str) -> None:
    for breaks, ours, theirs in ranks(pieces, how):
        assert breaks
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, **ROUNDING)


def other_mesh(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = sharded(mesh=mesh["a"])
    with pytest.raises(dt.Invalid) as error:
        dt.training_step(model, F.cross_entropy, OPTIMIZERS["sgd"](model.parameters()), mesh=dist.group.WORLD)
    return str(error.value)


def test_a_mesh_has_to_be_that_of_the_model(ranks: Ranks) -> None:
    assert all("other processes than the fully_shard" in text for text in ranks(other_mesh))
