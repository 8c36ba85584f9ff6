"""accelerate: accumulation, clipping, bfloat16, state that is saved and loaded."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.clients.way import Program, Way

PACKAGE = "accelerate"


def model() -> nn.Module:
    """A small model."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def data() -> DataLoader[tuple[torch.Tensor, ...]]:
    """Batches of four, the last of two."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(22, 8, generator=generator), torch.randint(0, 4, (22,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def accelerator(**options: object) -> Accelerator:
    """One per program: its state is shared by all of a process."""
    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, **options)  # type: ignore[arg-type]


def accumulation(way: Way) -> None:
    """`accumulate`, `clip_grad_norm_` at the steps that update, a schedule."""
    acc = accelerator(gradient_accumulation_steps=2)
    net = way.optimize(model())  # changed
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    net, optimizer, batches, schedule = acc.prepare(net, optimizer, data(), schedule)
    for _ in range(2):
        for x, y in batches:
            with acc.accumulate(net):
                loss = nn.functional.cross_entropy(net(x), y)
                acc.backward(loss)
                if acc.sync_gradients:
                    way.note("norm", acc.clip_grad_norm_(net.parameters(), 0.5))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            way.note("loss", loss)
    way.parameters(acc.unwrap_model(net))


def bfloat16(way: Way) -> None:
    """`mixed_precision="bf16"`."""
    way.loose = True
    acc = accelerator(mixed_precision="bf16")
    net = way.optimize(model())  # changed
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    net, optimizer, batches = acc.prepare(net, optimizer, data())
    for x, y in batches:
        loss = nn.functional.cross_entropy(net(x), y)
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        way.note("loss", loss)
        way.note("type", str(net(x).dtype))
    way.parameters(acc.unwrap_model(net))


def saving(way: Way) -> None:
    """`save_state` and `load_state` in the middle, `save_model` at the end."""
    acc = accelerator()
    net = way.optimize(model())  # changed
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net, optimizer, batches = acc.prepare(net, optimizer, data())
    for number, (x, y) in enumerate(batches):
        if number == 3:
            acc.load_state(f"{way.folder}/state")
        loss = nn.functional.cross_entropy(net(x), y)
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        way.note("loss", loss)
        if number == 0:
            acc.save_state(f"{way.folder}/state")
    acc.save_model(net, f"{way.folder}/model")
    way.parameters(acc.unwrap_model(net))


PROGRAMS: dict[str, Program] = {
    "accumulate, clip, schedule": accumulation,
    "bf16": bfloat16,
    "save and load": saving,
}
