"""BERT on text or DLRM on clicks, with checkpoints from which a job goes on, also on another number of processes:

torchrun --nproc-per-node 2 --max-restarts 2 restart.py bert --folder checkpoints
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt

MASK = 0
"""The byte that stands for a hidden one."""


class Bert(nn.Module):
    """A small encoder of bytes that predicts those that are hidden (Devlin et al., 2019)."""

    def __init__(self, width: int = 64, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Parameter(torch.zeros(length, width))
        blocks = (nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(text) + self.position)).flatten(0, 1)


class DLRM(nn.Module):
    """Scores of clicks from dense features and one large table (Naumov et al., 2019)."""

    def __init__(self, rows: int = 200_000, width: int = 16) -> None:
        super().__init__()
        self.table, self.dense = (
            nn.Embedding(rows, width),
            nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width)),
        )
        self.top = nn.Sequential(nn.Linear(2 * width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: Tensor, items: Tensor) -> Tensor:
        return self.top(torch.cat([self.dense(features), self.table(items).mean(1)], 1)).squeeze(1)


def text_batch(step: int, rows: int, text: Tensor) -> tuple[Tensor, Tensor]:
    """Stretches of the text in which every seventh byte is hidden, and the bytes."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - 64, (rows, 1), generator=generator)
    expected = text[starts + torch.arange(64)]
    hidden = torch.rand(expected.shape, generator=generator) < 1 / 7
    return expected.masked_fill(hidden, MASK), expected.flatten()


def click_batch(step: int, rows: int, table: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Features, items of which small numbers are frequent, and clicks that depend on both."""
    generator = torch.Generator().manual_seed(step)
    features, uniform = torch.randn(rows, 13, generator=generator), torch.rand(rows, 8, generator=generator)
    items = (table**uniform).long() - 1
    return (features, items), ((features[:, 0] + (items.float().mean(1) > table / 10)) > 0).float()


def main() -> None:
    """Train, save every ten steps, and go on from the last checkpoint that is complete."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("bert", "dlrm"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--fail-at", type=int, default=-1, help="the last rank ends before this step, once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model: nn.Module = Bert() if options.model == "bert" else DLRM()
    loss = F.cross_entropy if options.model == "bert" else F.binary_cross_entropy_with_logits
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mesh = dist.group.WORLD
    step = dt.training_step(model, loss, optimizer, mesh=mesh, shard="optimizer", sparse="auto", clip_norm=1.0)

    complete = sorted(int(path.name) for path in options.folder.glob("[0-9]*") if not path.suffix)
    start = complete[-1] if complete else 0
    if start:
        dcp.load({"step": step}, checkpoint_id=options.folder / str(start))
    if rank == 0:
        print(f"{world} ranks begin at step {start}", flush=True)
    for number in range(start, options.steps):
        if number == options.fail_at and rank == world - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os._exit(1)
        inputs, targets = text_batch(number, 32, text) if options.model == "bert" else click_batch(number, 512, 200_000)
        own = slice(rank * 32 // world, (rank + 1) * 32 // world)
        if options.model == "bert":
            value = step(inputs[own], targets.view(32, -1)[own].flatten())
        else:
            own = slice(rank * 512 // world, (rank + 1) * 512 // world)
            value = step(tuple(x[own] for x in inputs), targets[own])
        if number % 10 == 9:
            dcp.save({"step": step}, checkpoint_id=options.folder / f"{number + 1}.part")
            if rank == 0:  # what has this name is complete
                (options.folder / f"{number + 1}.part").rename(options.folder / str(number + 1))
                print(f"step {number + 1}: loss {value:.3f}", flush=True)
            dist.barrier()
    if rank == 0:
        print(f"{len(step.breaks)} breaks; each rank sends {sum(step.network.values())} bytes per step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
