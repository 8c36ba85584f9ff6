"""`h.requires_grad = True` inside a forward pass: part of the graph where nobody can see `h`, else the graph breaks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of


class Assigning(nn.Module):
    """Makes a tensor of its own a leaf; `seen` says how others come to know it."""

    def __init__(self, seen: str) -> None:
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(4, 4), nn.Linear(4, 3), seen
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = x[:, None] * 2
        h.requires_grad = True
        assert h.requires_grad
        y = self.second(torch.tanh(self.first(h)))
        if self.seen == "attribute":
            self.kept = h
        return (y, h) if self.seen == "result" else (y, h[:, 0]) if self.seen == "view" else y


def gradients(model: Assigning, called: nn.Module, x: Tensor) -> list[Tensor]:
    """Of the parameters, and of the leaf where it is seen."""
    model.zero_grad()
    result = called(x)
    results = result if isinstance(result, tuple) else (result,)
    torch.stack([r.square().sum() for r in results]).sum().backward()
    found = [p.grad for p in model.parameters()]
    found += [model.kept.grad] if model.kept is not None else []
    found += [results[1].grad] if model.seen == "result" else []
    return [g.clone() for g in found if g is not None]


@pytest.mark.parametrize("seen", ["", "result", "view", "attribute"])
def test_gradients_are_eagers(seen: str) -> None:
    model, x = Assigning(seen), torch.randn(5, 4)
    compiled = dt.optimize(model)
    expected, found = gradients(model, model, x), gradients(model, compiled, x)
    assert len(expected) == len(found) == 4 + (seen in ("result", "attribute"))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # sums of float32 in another order
    state = state_of(compiled)
    assert state is not None
    refused = ["requires_grad = True of a tensor that the graph returns"] if seen else []  # PyTorch 2.11
    assert [reason.split(" (")[0] for reason in state.backend.breaks] in ([], refused)


def test_other_backends_get_what_they_got() -> None:
    model, x = Assigning(""), torch.randn(5, 4)
    dt.optimize(model)(x)
    graphs = []

    def backend(gm: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        graphs.append(gm)
        return gm.forward

    found = gradients(model, torch.compile(model, backend=backend), x)
    assert len(graphs) > 1
    for a, b in zip(gradients(model, model, x), found, strict=True):
        torch.testing.assert_close(a, b)
