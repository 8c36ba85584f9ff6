"""What runs in every child: a small model in float64 trained for a few steps, eager and compiled."""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from daceml_train.storage.folders import CACHE

STEPS = 4
BOUND = 1e-11
"""Relative difference of losses that is rounding: float64 has 1e-16, a loss sums some hundred terms over few steps."""


@dataclass(frozen=True)
class Trained:
    """Losses of compiled and of eager training, the program's breaks, and what was warned."""

    compiled: tuple[float, ...]
    eager: tuple[float, ...]
    whole: bool
    warned: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether every loss is eager's but for rounding."""
        pairs = zip(self.compiled, self.eager, strict=True)
        return all(abs(a - b) <= BOUND * max(1.0, abs(b)) for a, b in pairs)


def model(number: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """One of many models: their widths differ, so that each has programs of its own."""
    torch.manual_seed(number)
    width = 8 + number
    body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 3)).double()
    return body, torch.randn(5, 6).double(), torch.randn(5, 3).double()


def train(number: int, cache: Path, marks: int | None = None, save: Path | None = None, steps: int = STEPS) -> Trained:
    """Train model `number`; `marks` is a descriptor that hears of the moments, `save` where the result is stored.

    The moments: "capture"; for each kernel "build" and "install"; "store", the program; "step", "save", "done".
    """
    os.environ[CACHE] = str(cache)  # the executor is there, too

    import daceml_train as dt
    from daceml_train.codegen.cpu import compile as kernels
    from daceml_train.runtime.cache import Cache

    kernels.FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in kernels.FLAGS)  # the moments stay the same

    def mark(moment: str) -> None:
        if marks is not None:
            os.write(marks, f"{moment}\n".encode())

    def marked(moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            mark(moment)
            return function(*args)

        return call

    if marks is not None:  # in a child of its own
        kernels.build = marked("build", kernels.build)
        kernels.install = marked("install", kernels.install)
        Cache.store = marked("store", Cache.store)  # type: ignore[method-assign]

    body, x, y = model(number)
    other = copy.deepcopy(body)
    optimizer, reference = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (body, other))
    eager = []
    for _ in range(steps):
        reference.zero_grad()
        loss = nn.functional.mse_loss(other(x), y)
        loss.backward()
        reference.step()
        eager.append(float(loss.detach()))
    mark("capture")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = dt.training_step(body, nn.functional.mse_loss, optimizer, cache=cache)
        compiled = [float(step(x, y).detach())]
        mark("step")
        compiled += [float(step(x, y).detach()) for _ in range(steps - 1)]
        if save is not None:
            mark("save")
            partial = save.with_suffix(".partial")
            torch.save({"model": body.state_dict(), "optimizer": optimizer.state_dict()}, partial)
            os.replace(partial, save)
    mark("done")
    ours = tuple(str(w.message) for w in caught if "daceml_train" in str(w.message))
    return Trained(tuple(compiled), tuple(eager), not step.breaks, ours)


def main() -> None:
    """`python -m benchmarks.faults.training NUMBER CACHE`: for children that need an environment of their own."""
    result = train(int(sys.argv[1]), Path(sys.argv[2]))
    print(int(result.right), int(result.whole), len(result.warned), *result.warned, sep="\t")


if __name__ == "__main__":
    main()
