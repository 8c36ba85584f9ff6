"""Data-parallel training on processes that Ray starts: `python ray_train.py`. The step is that of train.py."""

import tempfile

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import daceml_train as dt


def train(config):
    """One process of the job: Ray has set up torch.distributed."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    step = dt.training_step(model, nn.functional.cross_entropy, optimizer, mesh=dist.group.WORLD, clip_norm=1.0)

    generator = torch.Generator().manual_seed(0)  # the same rows on every rank, of which each takes its part
    rows = torch.randn(64, 16, generator=generator)
    labels = rows[:, :4].argmax(1)
    for number in range(100):
        loss = step(rows[rank::world], labels[rank::world])
        if number % 20 == 19:
            ray.train.report({"step": number + 1, "loss": float(loss), "breaks": len(step.breaks)})


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        train_loop_config={"lr": 1e-2},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),  # on two cores, too
        run_config=ray.train.RunConfig(storage_path=tempfile.mkdtemp()),
    )
    found = trainer.fit().metrics
    print(f"step {found['step']}: loss {found['loss']:.3f}, {found['breaks']} breaks")
