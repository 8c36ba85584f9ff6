"""Recipes: every optimizer and every scheduler that this version of PyTorch has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

from benchmarks.recipes.way import STEPS, Way, batch, small, train

Recipe = Callable[[Way], None]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, {"momentum": 0.9, "foreach": True}],
    "Adam": [
        {},
        {"amsgrad": True},
        {"weight_decay": 0.1, "maximize": True},
        {"foreach": True},
        {"fused": True},
        {"lr": torch.tensor(0.01, dtype=torch.float64)},
    ],
    "AdamW": [{}, {"amsgrad": True, "foreach": True}, {"fused": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Adagrad": [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
}
"""Options beyond the defaults, for optimizers with a rule in this package or with a second algorithm."""
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.8),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=6),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
}


def known(module: Any, base: type) -> list[str]:
    """The classes of a module of PyTorch's that extend `base`."""
    kinds = inspect.getmembers(module, inspect.isclass)
    return [name for name, kind in kinds if issubclass(kind, base) and kind is not base and name[0] != "_"]


def recipes() -> Iterator[tuple[str, Recipe]]:
    """All of them, by name; one that this table lacks fails by its name."""
    for name in known(optim, optim.Optimizer):
        for options in VARIANTS.get(name, [{}]):
            message = ", ".join(f"{key}={value}" for key, value in options.items())
            yield f"optimizer {name}({message})", _optimizer(name, options)
    names = known(schedulers, schedulers.LRScheduler)
    for name in sorted({*names, "ChainedScheduler", "ReduceLROnPlateau"} - {"LRScheduler"}):
        yield f"scheduler {name}", _scheduler(name)


def _optimizer(name: str, options: dict[str, Any]) -> Recipe:
    def recipe(way: Way) -> None:
        if name == "LBFGS":
            return _closure(way)
        if name == "SparseAdam":
            return _sparse(way)
        model = small()
        if name == "Muon":  # takes matrices alone
            model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)).to(torch.float64)
            for parameter in model.parameters():
                nn.init.orthogonal_(parameter)
        given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        optimizer = getattr(optim, name)(list(model.parameters()), **given)
        train(way, model, optimizer)

    return recipe


def _closure(way: Way) -> None:
    """LBFGS evaluates the loss several times in a step; `training_step` passes it the closure."""
    model = small()
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    if way.kind == "training_step":
        return train(way, model, optimizer)
    called = way.compiled(model)
    for number in range(STEPS):
        x, y = batch(number, 6 if number < STEPS - 1 else 4)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(called(x), y)
            loss.backward()
            return loss

        way.note("loss", optimizer.step(closure))
    way.finish(model, optimizer)
    return None


def _sparse(way: Way) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(9, 4, sparse=True).to(torch.float64)
    optimizer = optim.SparseAdam(model.parameters(), lr=0.1)
    step = way.trainer(model, optimizer)
    for number in range(STEPS):
        rows = torch.tensor([number, 2, 8])
        way.note("loss", step(rows, torch.ones(3, 4, dtype=torch.float64)))
    model.weight.grad = None
    way.finish(model, optimizer)


def _scheduler(name: str) -> Recipe:
    def recipe(way: Way) -> None:
        model = small()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        step = way.trainer(model, optimizer)
        for number in range(STEPS):
            loss = step(*batch(number))
            way.note("loss", loss)
            schedule.step(*((float(loss),) if name == "ReduceLROnPlateau" else ()))
            way.note("rate", optimizer.param_groups[0]["lr"])
        way.finish(model, optimizer)

    return recipe
