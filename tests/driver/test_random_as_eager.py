"""`random="eager"`: dropout and all other random numbers are those that eager execution draws, gradients included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from tests.driver.conformity import assert_compiled
from tests.driver.holding import Function, close, total

pytestmark = pytest.mark.compiled


def hold(make: Callable[[], nn.Module], *shape: int, steps: int = 2) -> None:
    """Module and step against eager execution on the same numbers; the generators end in the same state."""
    torch.manual_seed(1)
    theirs = make()
    ours, stepped = copy.deepcopy(theirs), copy.deepcopy(theirs)
    optimized = dt.optimize(ours, random="eager")
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.0)
    step = dt.training_step(stepped, total, optimizer, random="eager", keep_gradients=True)
    x = torch.randn(shape)
    runs = []
    for owner, called in (
        (theirs, lambda: total(theirs(x))),
        (ours, lambda: total(optimized(x))),
        (stepped, lambda: step(x)),
    ):
        torch.manual_seed(5)
        found: list[Any] = []
        for _ in range(steps):
            for parameter in owner.parameters():
                parameter.grad = None
            loss = called()
            if loss.requires_grad:
                loss.backward()
            found += [loss.detach(), *(p.grad for p in owner.parameters())]
        runs.append([*found, torch.rand(3)])
    for run, name in zip(runs[1:], ("module", "step"), strict=True):
        for i, (a, b) in enumerate(zip(run, runs[0], strict=True)):
            close(a, b, f"{name}: {i}", 1e-5)
    assert_compiled(optimized)
    assert step.breaks == []


def test_a_transformer() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Linear(4, 8), nn.Linear(8, 4)
            self.encoder = nn.TransformerEncoderLayer(8, 2, 8, 0.2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.encoder(F.dropout(self.embedding(x), 0.1, self.training)))

    hold(Network, 2, 3, 4)


@pytest.mark.wide
def test_encoder_and_decoder() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.2, activation="gelu", batch_first=True)
            self.decoder = nn.TransformerDecoderLayer(8, 2, 16, 0.3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            memory = self.encoder(F.dropout(x, 0.1, self.training))
            return self.decoder(x, memory)

    hold(Network, 2, 5, 8)


def test_attention_with_dropout() -> None:
    def attend(w: Tensor, x: Tensor) -> Tensor:
        mask = torch.ones(5, 5).tril().bool()
        a = F.scaled_dot_product_attention(x * w, x, x, dropout_p=0.3, is_causal=True)
        return F.scaled_dot_product_attention(a, x, x * w, attn_mask=mask, dropout_p=0.5)

    hold(lambda: Function(attend, 4), 2, 2, 5, 4)


def test_all_kinds_of_random_numbers() -> None:
    def draw(w: Tensor, x: Tensor) -> Any:
        F.dropout(x, 0.5)  # nobody reads it, eager execution draws it
        h = x * w * torch.rand_like(x) + torch.randn(4) + torch.randint(0, 9, (3, 1))
        h = h[:, torch.randperm(4)] + torch.empty(3, 4).uniform_(-1, 1) + torch.empty(4).normal_(1, 2)
        h = F.dropout1d(F.alpha_dropout(h, 0.2)[None], 0.3)[0] + torch.empty(4).exponential_(2.0)
        return (
            F.dropout(h.t(), 0.4),
            F.dropout(h, 1.0),
            F.dropout(h, 0.0),
            torch.bernoulli(torch.full((2,), 0.5), p=0.3),
        )

    hold(lambda: Function(draw, 4), 3, 4)


def test_recurrent_layers_with_dropout() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(4, 4, 2, dropout=0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]

    hold(Network, 2, 2, 4)


def test_sizes_that_vary() -> None:
    theirs = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    ours = dt.optimize(copy.deepcopy(theirs), random="eager")
    for size in (6, 3, 5):
        x = torch.randn(size, 4)
        results = []
        for module in (theirs, ours):
            torch.manual_seed(size)
            results.append(module(x))
        close(results[1], results[0], "result", 1e-5)
    assert_compiled(ours, graphs=2)


def test_numbers_that_depend_on_data_run_as_pytorch() -> None:
    module = Function(lambda w, x: torch.bernoulli(x.sigmoid()) * w, 4)
    ours = dt.optimize(copy.deepcopy(module), random="eager")
    x = torch.randn(3, 4)
    torch.manual_seed(2)
    expected = module(x)
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match="bernoulli.* depend on data"):
        assert torch.equal(ours(x), expected)


DRAWS: dict[str, Callable[[], Any]] = {
    "normal": lambda: np.random.normal(0, 1, size=4),
    "rand": lambda: np.random.rand(4),
    "permutation": lambda: np.random.permutation(4) + 0.5,
    "a generator": lambda: np.random.RandomState(3).rand(4),
    "a number": lambda: np.array(np.random.beta(0.4, 0.4)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_that_numpy_draws(name: str) -> None:
    """TorchDynamo would draw them from PyTorch's generator."""
    draw = DRAWS[name]

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + torch.from_numpy(draw()))

    torch.manual_seed(1)
    model, x, found = Network(), torch.randn(3, 4).double(), []
    step = dt.training_step(model, total, torch.optim.SGD(model.parameters(), lr=0.0))
    for run in (lambda: total(model(x)), lambda: total(dt.optimize(model)(x)), lambda: step(x)):
        np.random.seed(5)
        torch.manual_seed(5)
        found.append([*(run().item() for _ in range(2)), np.random.rand(), torch.rand(()).item()])
    for run in found[1:]:
        assert run == pytest.approx(found[0], rel=1e-12)


def test_what_is_no_choice() -> None:
    with pytest.raises(dt.Invalid, match="seeded, eager, given 'cuda'"):
        dt.optimize(nn.Linear(2, 2), random="cuda")  # type: ignore[arg-type]
