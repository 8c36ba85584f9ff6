"""F-strings of numbers that programs take as inputs: texts are those of eager execution, in every call."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt

pytestmark = pytest.mark.compiled


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.calls, self.rate, self.seen = nn.Linear(4, 4), 0, 1.0, dict[str, Any]()
        self.alone = self.exact = self.both = self.converted = ""

    def forward(self, x: Tensor) -> Tensor:
        self.alone, self.exact = f"{self.calls:03d}", f"{self.rate:.2f}"
        self.both, self.converted = f"call {self.calls} at {self.rate:.1e}", f"{self.calls!r:>4}"
        self.calls += 1
        self.rate *= 0.9
        return self.l(x)


class Printed(Texts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        print("std", f"{h.std().item():.4f}")
        return h.tanh()


class Keys(Texts):
    """A text that has to be known while the graph is captured."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen[f"{self.calls}"] = self.calls
        return self.l(x)


@pytest.mark.parametrize("way", ["step", "optimize"])
@pytest.mark.parametrize("kind", [Texts, Printed, Keys])
def test_texts(kind: type[Texts], way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    ours = kind()
    theirs = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    if way == "step":
        call: Any = dt.training_step(ours, torch.sum, optimizer, cache=tmp_path)
    else:
        call = dt.optimize(ours, cache=tmp_path)
    x = torch.randn(3, 4)
    for _ in range(4):
        call(x)
        printed = capsys.readouterr().out
        theirs(x)
        assert printed == capsys.readouterr().out
        for name in ("alone", "exact", "both", "converted", "seen"):
            assert getattr(ours, name) == getattr(theirs, name)
    if kind is Texts and way == "step":
        assert len(call.records) == 2 and not call.breaks
