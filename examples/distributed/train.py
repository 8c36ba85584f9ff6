"""Data-parallel training: `torchrun --nproc-per-node 2 train.py`, or one process without torchrun."""

import os

import torch
import torch.distributed as dist
from torch import nn

import daceml_train as dt

torch.set_num_threads(1)
if "RANK" not in os.environ:  # started without torchrun
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = dt.training_step(model, nn.functional.cross_entropy, optimizer, mesh=dist.group.WORLD, clip_norm=1.0)

batch = 64
generator = torch.Generator().manual_seed(0)  # the same rows on every rank, of which each takes its part
rows = torch.randn(batch, 16, generator=generator)
labels = rows[:, :4].argmax(1)
for number in range(100):
    loss = step(rows[rank::world], labels[rank::world])
    if rank == 0 and number % 20 == 19:
        print(f"step {number + 1}: loss {loss:.3f}, gradient norm {step.gradient_norm:.3f}")

if rank == 0:
    print(f"{world} ranks, {len(step.breaks)} breaks; each sends {sum(step.network.values())} bytes per step")
dist.destroy_process_group()
