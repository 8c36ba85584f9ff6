"""Steps along paths whose loss, or what user code keeps, shares memory with something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt

pytestmark = pytest.mark.compiled

Keeps = Callable[[Any, Tensor], None]


class Branching(nn.Module):
    """Follows paths, and keeps tensors at each call."""

    def __init__(self, keeps: Keeps, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.keeps, self.loss, self.kept = keeps, loss, (torch.zeros(0),)
        self.w = nn.Parameter(torch.linspace(-1, 2, 12).view(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = (x @ self.w).tanh()
        if h.sum().item() > 1e9:
            h = h * 2
        self.keeps(self, h)
        return self.loss(self, h)


def keep(*tensors: Callable[[Any, Tensor], Tensor]) -> Keeps:
    return lambda model, h: setattr(model, "kept", tuple(f(model, h) for f in tensors))


def mean(model: Any, h: Tensor) -> Tensor:
    return h.mean()


CASES = {
    "a part of a parameter as the loss": (keep(), lambda m, h: m.w.flatten()[1]),
    "a view of a parameter": (keep(lambda m, h: m.w.detach()[1:]), mean),
    "data of a parameter": (keep(lambda m, h: m.w.data.t()), mean),
    "two views of a result": (keep(lambda m, h: h.detach(), lambda m, h: h.detach()[1:]), mean),
    "a result and the same without a gradient": (keep(lambda m, h: h, lambda m, h: h.detach()), mean),
    "a result and its view": (keep(lambda m, h: h, lambda m, h: h.detach().t()), mean),
    "an expanded result": (keep(lambda m, h: h.detach()[:, :1].expand(2, 5, 7)), mean),
    "a transposed result": (keep(lambda m, h: h.detach().t()), mean),
    "results of their own": (keep(lambda m, h: h.detach(), lambda m, h: h.detach() * 2), mean),
}


SAME = "a result and the same without a gradient"


@pytest.mark.parametrize("name", CASES)
def test_what_outlives_a_step_along_paths(name: str) -> None:
    x, seen = torch.linspace(-2, 1, 20).sin().view(5, 4), []
    for ours in (False, True):
        model = Branching(*CASES[name])
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
        step = dt.training_step(model, lambda y: y, optimizer) if ours else None
        for number in range(6):
            if step is not None:
                loss = step(x + number)
            else:
                optimizer.zero_grad()
                loss = model(x + number)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            kept = [t.detach() for t in model.kept]
            memories = [t.untyped_storage()._cdata for t in (model.w, *kept)]
            found.append(
                (
                    loss.detach().clone(),
                    [
                        (t.clone(), t.stride(), t._version if m != memories[0] else 0)
                        for t, m in zip(kept, memories[1:], strict=True)
                    ],
                    [memories.index(m) for m in memories],
                    model.w.detach().clone(),
                )
            )
        seen.append(found)
        if step is not None and name in ("an expanded result", "a transposed result", "results of their own", SAME):
            assert "by programs" in str(dt.report(step)) and "no longer" not in str(dt.report(step))
    for number, (eager, compiled) in enumerate(zip(*seen, strict=True)):
        torch.testing.assert_close(compiled, eager, msg=lambda text, n=number: f"call {n}: {text}")  # type: ignore[misc]


def test_kept_tensors_have_the_versions_of_eager_execution() -> None:
    def changed(model: Any, h: Tensor) -> None:
        doubled = h * 2
        doubled.squeeze().detach().add_(0.5)
        model.kept = (doubled.detach(), (h * 3).detach())

    models = [Branching(changed, lambda m, h: h.mean()) for _ in range(2)]
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    step = dt.training_step(models[1], lambda loss: loss, optimizer)
    for number in range(5):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
        models[0](x)
        step(x)
        assert [t._version for t in models[0].kept] == [t._version for t in models[1].kept] == [1, 0], number
    (paths,) = step.paths.values()
    assert sum(leaf.followed for leaf in paths.leaves) >= 2


def test_a_change_that_leaves_all_values_counts_as_one() -> None:
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            x.copy_(x)
            return (x * self.w).sum()

    model = Copying()
    step = dt.training_step(model, lambda loss: loss, torch.optim.SGD(model.parameters(), lr=0.1))
    for call in (step, dt.optimize(Copying())):
        for _ in range(3):
            x = torch.randn(3)
            call(x)
            assert x._version == 1
