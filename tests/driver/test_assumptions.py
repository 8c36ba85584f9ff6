"""What TorchDynamo takes for what never changes: methods of classes, their code, and which objects are one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt


class Scale:
    """A plain object."""

    def go(self, y: Tensor) -> Tensor:
        return y * 2

    @classmethod
    def of_class(cls, y: Tensor) -> Tensor:
        return y + 1

    def __len__(self) -> int:
        return 3


class Base(nn.Module):
    def inherited(self, y: Tensor) -> Tensor:
        return y - 1


class Net(Base):
    """Calls methods of several kinds, and compares objects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 3), Scale()
        self.a, self.b = (nn.Parameter(torch.ones(3)) for _ in range(2))
        self.left: list[int] = []
        self.right: list[int] = []

    def helper(self, y: Tensor) -> Tensor:
        return y * 3

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale.of_class(self.scale.go(self.helper(self.inherited(self.layer(x))))) * len(self.scale)
        y = y * self.a * (1 if self.a is self.b else 2)
        return y * (3 if self.left is not self.right else 4)


def _seven(self: Any, y: Tensor) -> Tensor:
    return y * 7


def _tie(net: Any) -> None:
    net.b = net.a


def _share(net: Any) -> None:
    net.left = net.right


def _set(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch, Any], None]:
    return lambda patch, _: patch.setattr(owner, name, value)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "method": _set(Net, "helper", _seven),
    "code of a method": lambda patch, _: patch.setattr(Net.helper, "__code__", _seven.__code__),
    "inherited": _set(Base, "inherited", _seven),
    "overridden": lambda patch, _: patch.setattr(Net, "inherited", _seven, raising=False),
    "of a plain object": _set(Scale, "go", _seven),
    "classmethod": _set(Scale, "of_class", classmethod(_seven)),
    "length": _set(Scale, "__len__", lambda self: 5),
    "tied": lambda _, net: _tie(net),
    "shared": lambda _, net: _share(net),
}


@pytest.mark.compiled
@pytest.mark.parametrize("way", ["optimize", "step"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, model = Net(), Net()
    x = torch.randn(5, 4)

    def loss(y: Tensor) -> Tensor:
        return y.square().mean()

    ours, theirs = (torch.optim.SGD(m.parameters(), 1e-4) for m in (model, eager))
    step = dt.training_step(model, loss, ours, cache=tmp_path) if way == "step" else None
    optimized = dt.optimize(model, cache=tmp_path) if step is None else model
    with monkeypatch.context() as patch:
        for call in range(4):
            if call == 2:
                for net in (eager, model):
                    CHANGES[change](patch, net)
            theirs.zero_grad()
            expected = loss(eager(x))
            expected.backward()
            theirs.step()
            if step is not None:
                found = step(x)
            else:
                ours.zero_grad()
                found = loss(optimized(x))
                found.backward()
                ours.step()
            torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-4, atol=1e-6, msg=f"call {call}")
