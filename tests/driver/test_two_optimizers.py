"""Two networks that train against each other, each by an optimizer of its own: two steps over shared modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from tests.driver.conformity import distance

pytestmark = pytest.mark.compiled


class Critic(nn.Module):
    """What the second network learns: to tell samples from what the first one makes."""

    def __init__(self, generator: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.generator, self.network = generator, network

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        with torch.no_grad():
            result = self.generator(noise)
        return F.softplus(self.network(result)).mean() + F.softplus(-self.network(real)).mean()


class Generator(nn.Module):
    """What the first network learns: to be taken for samples."""

    def __init__(self, generator: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.generator, self.network = generator, network

    def forward(self, noise: Tensor) -> Tensor:
        return F.softplus(-self.network(self.generator(noise))).mean()


def trained(compiled: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    network = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    of_critic = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.5)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-4)
    models = Critic(generator, network), Generator(generator, network)
    optimizers = of_critic, of_generator
    steps = [dt.training_step(m, lambda y: y, o) for m, o in zip(models, optimizers, strict=True)] if compiled else []
    losses = []
    noise = torch.Generator().manual_seed(1)
    for _ in range(3):
        batches = (
            (torch.randn(6, 3, generator=noise), torch.randn(6, 4, generator=noise)),
            (torch.randn(6, 3, generator=noise),),
        )
        for number, (model, optimizer, batch) in enumerate(zip(models, optimizers, batches, strict=True)):
            if compiled:
                losses.append(float(steps[number](batch)))
                continue
            loss = model(*batch)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    assert all(step.breaks == [] for step in steps)
    state = {f"{i}.{name}": t for i, part in enumerate((generator, network)) for name, t in part.state_dict().items()}
    return losses, {name: tensor.detach().clone() for name, tensor in state.items()}


def test_two_steps_over_shared_networks() -> None:
    expected, theirs = trained(False)
    found, ours = trained(True)
    assert found == pytest.approx(expected, rel=1e-4)
    for name, tensor in theirs.items():
        assert distance(ours[name], tensor) < 1e-4, name
