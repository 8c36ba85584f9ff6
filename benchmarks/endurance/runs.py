"""Runs: repeated work, and the results of eager execution in float64."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import daceml_train as dt
from benchmarks.endurance.measuring import often
from daceml_train.driver.faster import NEW_KINDS_SLOWER

BOUND = 1e-9
"""Relative difference of float64 losses that is rounding: 1e-16 a step, 20,000 steps that contract, and room."""
Say = Callable[[str], None]


class Recurrent(nn.Module):
    """A GRU cell over a few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 6)
        for _ in range(3):
            state = self.cell(x, state)
        return self.out(state)


def perceptron(width: int = 12) -> nn.Module:
    """Linear layers and a normalization."""
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 3))


def convolution() -> nn.Module:
    """A convolution over what four numbers are laid out as."""
    convolved = nn.Conv2d(1, 3, 2, padding=1)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), convolved, nn.ReLU(), nn.Flatten(), nn.Linear(27, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolution": convolution,
    "recurrent": Recurrent,
}


class Pair:
    """A model trained compiled and eagerly, in float64."""

    def __init__(self, model: nn.Module, cache: Path) -> None:
        self.model = model.double()
        self.other = copy.deepcopy(self.model)
        sgd = functools.partial(torch.optim.SGD, lr=0.05, weight_decay=1e-3)
        ours, self.optimizer = sgd(self.model.parameters()), sgd(self.other.parameters())
        self.step = dt.training_step(self.model, nn.functional.mse_loss, ours, cache=cache)
        self.worst = 0.0

    def train(self, x: torch.Tensor, y: torch.Tensor, compare: bool = True) -> float:
        """One compiled step; the eager one and their difference if asked for."""
        result = self.step(x, y)
        if compare:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.other(x), y)
            loss.backward()
            self.optimizer.step()
            wanted = float(loss.detach())
            self.worst = max(self.worst, abs(float(result.detach()) - wanted) / max(1.0, abs(wanted)))
        return float(result.detach())


def batch(number: int, size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """One of many batches."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return x, torch.sin(x[:, :3])


def steps(count: int, cache: Path, say: Say) -> dict[str, Any]:
    """Three small models through many steps each."""
    found = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        pair, batches = Pair(make(), cache), [batch(i) for i in range(16)]
        result = often(count, lambda i, p=pair, b=batches: p.train(*b[i % 16]) and None, say)
        found[name] = {**result, "steps": count, "difference": pair.worst, "breaks": len(pair.step.breaks)}
        say(f"{name}: {found[name]['growth']:+.3%}, difference {pair.worst:.1e}")
    return found


def models(count: int, cache: Path, say: Say) -> dict[str, Any]:
    """Many different models, each compiled, trained for two steps and dropped."""
    worst, breaks = 0.0, 0

    def work(number: int) -> None:
        nonlocal worst, breaks
        torch.compiler.reset()
        torch.default_generator.manual_seed(number)  # torch.manual_seed queues a call for a GPU each time
        pair = Pair(perceptron(4 + number), cache)
        for turn in range(2):
            pair.train(*batch(turn))
        worst, breaks = max(worst, pair.worst), breaks + len(pair.step.breaks)

    return {**often(count, work, say), "models": count, "difference": worst, "breaks": breaks}


def dropped(count: int, cache: Path, say: Say) -> dict[str, Any]:
    """Many equal models, as searches and notebooks make them: a step and an optimized module of each, then dropped.

    Nothing of TorchDynamo's is reset in between: what it keeps of code that has gone would show.
    """
    worst, breaks = 0.0, 0

    def work(number: int) -> None:
        nonlocal worst, breaks
        torch.default_generator.manual_seed(number)
        pair = Pair(perceptron(), cache)
        module = dt.optimize(perceptron().double(), cache=cache)
        for turn in range(2):
            pair.train(*batch(turn))
            x, y = batch(turn)
            nn.functional.mse_loss(module(x), y).backward()
        worst, breaks = max(worst, pair.worst), breaks + len(pair.step.breaks)

    return {**often(count, work, say), "models": count, "difference": worst, "breaks": breaks}


def shapes(count: int, cache: Path, say: Say) -> dict[str, Any]:
    """One model on batches whose size changes at every step.

    PyTorch may run sizes that are met for the first time, where that is faster; each size is met about four times.
    """
    torch.manual_seed(0)
    pair = Pair(perceptron(), cache)
    result = often(count, lambda i: pair.train(*batch(i, 2 + i * 37 % 509)) and None, say)
    breaks = [reason for reason in pair.step.breaks if reason != NEW_KINDS_SLOWER]
    return {**result, "steps": count, "difference": pair.worst, "breaks": len(breaks)}


def processes(count: int, cache: Path, say: Say) -> dict[str, Any]:
    """Children that fork and that spawn after compilation, which train on; each must return the parent's loss."""
    torch.manual_seed(0)
    pair = Pair(perceptron(), cache)
    pair.train(*batch(0))
    wanted = copy.deepcopy(pair.other)
    expected = float(nn.functional.mse_loss(wanted(batch(1)[0]), batch(1)[1]).detach())
    found: dict[str, Any] = {"expected": expected}
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        told = []
        for _ in range(count):
            forked = method == "fork"
            target, arguments = (_child, (pair, queue)) if forked else (_fresh, (str(cache), queue))
            process = context.Process(target=target, args=arguments)
            process.start()
            process.join(120)
            if process.is_alive():
                process.kill()
                told.append("hangs")
            else:
                told.append(queue.get(timeout=10) if process.exitcode == 0 else f"exit {process.exitcode}")
        found[method] = told
        say(f"{method}: {told}")
    every = [*found["fork"], *found["spawn"]]
    found["failures"] = [told for told in every if not isinstance(told, float)]
    found["difference"] = max((abs(told - expected) for told in every if isinstance(told, float)), default=0.0)
    return found


def _child(pair: Pair, queue: Any) -> None:
    queue.put(pair.train(*batch(1), compare=False))


def _fresh(cache: str, queue: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pair = Pair(perceptron(), Path(cache))
    pair.train(*batch(0))
    queue.put(pair.train(*batch(1)))


def threads(count: int, cache: Path, say: Say) -> dict[str, Any]:
    """Eight threads, each with a model of its own, at once."""
    pairs = []
    for number in range(8):
        torch.manual_seed(number)
        pairs.append(Pair([*MODELS.values()][number % 3](), cache))
    failures: list[str] = []

    def work(pair: Pair) -> None:
        try:
            for i in range(count):
                pair.train(*batch(i % 16))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    running = [threading.Thread(target=work, args=(pair,)) for pair in pairs]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    say(f"threads: {failures or 'well'}")
    return {"steps": count, "difference": max(pair.worst for pair in pairs), "failures": failures}
