"""What Python costs a step: `python -m benchmarks.programs.rows [changes|observation|flips] [--update]`.

- changes: a counter, a schedule, a coin, and lengths over a thousand steps, against the step without them;
- observation: a value that is only looked at, against the step without the look, less what that costs eager execution;
- flips: a branch that goes another way than all calls before, at every position, against eager execution.

Ways take turns step by step in one process; times are medians in processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import daceml_train as dt
from benchmarks.programs import page
from benchmarks.programs.program import BATCH, WIDTH, drawn
from daceml_train.driver.paths import Paths
from daceml_train.driver.step import TrainingStep

STEPS = 1000


class Model(nn.Module):
    """Two layers, and what happens between them."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between, self.calls, self.rate, self.notes = between, 0, 1.0, list[Any]()
        self.seen = {"rows": 0}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)).tanh())


def nothing(model: Any, h: Tensor) -> Tensor:
    """The step without."""
    return h


def counter(model: Any, h: Tensor) -> Tensor:
    """A counter on the module."""
    model.calls += 1
    return h


def entry(model: Any, h: Tensor) -> Tensor:
    """A counter in a dictionary."""
    model.seen["rows"] += len(h)
    return h


def schedule(model: Any, h: Tensor) -> Tensor:
    """A rate that falls at every call."""
    model.rate *= 0.999
    return h * model.rate


def coin(model: Any, h: Tensor) -> Tensor:
    """A coin of Python's that leaves out an operator."""
    return h * 2 if random.random() < 0.5 else h


def listed(model: Any, h: Tensor) -> Tensor:
    """A list that grows."""
    model.notes.append(model.calls)
    return h


def looked(model: Any, h: Tensor) -> Tensor:
    """A mean that is kept as a number."""
    model.notes.append(h.mean().item())
    return h


def printed(model: Any, h: Tensor) -> Tensor:
    """A formatted norm."""
    model.line = f"{h.norm().item():.4f}"
    return h


def asked(model: Any, h: Tensor) -> Tensor:
    """Two values and a comparison."""
    if h.max().item() > 1e9 or h.std().item() > 1e9:
        raise OverflowError
    return h


class Way:
    """A step with its times."""

    def __init__(self, model: nn.Module, ours: bool) -> None:
        torch.manual_seed(0)
        self.model, self.ours, self.times = model, ours, list[float]()
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0, 0.05)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.step: Any = dt.training_step(model, loss_of, self.optimizer, random="eager") if ours else self._eager

    def _eager(self, x: Tensor, target: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.model(x), target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, x: Tensor, target: Tensor) -> None:
        """One step."""
        start = time.process_time()
        self.step(x, target)
        self.times.append(1e3 * (time.process_time() - start))

    @property
    def ms(self) -> float:
        """The median of the last half."""
        return statistics.median(self.times[len(self.times) // 2 :])

    @property
    def programs(self) -> int:
        """Compiled programs."""
        assert isinstance(self.step, TrainingStep)
        return len(self.step.records)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return (output - target).square().mean()


def turns(ways: Sequence[Way], steps: int, inputs: Callable[[int], Tensor]) -> None:
    """Let the ways take turns, another one first in each round: what ran before leaves other caches."""
    for number in range(steps):
        x, first = inputs(number), number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            way.run(x, x)


def same_sizes(number: int) -> Tensor:
    """A batch of a few that recur."""
    return drawn(number % 8, BATCH, WIDTH)


def changes(steps: int) -> list[dict[str, Any]]:
    """Rows of what changes at every step."""
    kinds = (counter, entry, schedule, coin, listed)
    ways = [Way(Model(kind), True) for kind in (nothing, *kinds)]
    turns(ways, steps, same_sizes)
    base, rows = ways[0], []
    for kind, way in zip(kinds, ways[1:], strict=True):
        rows.append({"what": _doc(kind), "programs": way.programs, "ratio": way.ms / base.ms})
    lengths = Way(Recurrent(), True)
    turns([lengths], 200, lambda number: drawn(number % 12, 16, 3 + number % 12, WIDTH))
    return [*rows, {"what": "Twelve lengths of a recurrent loop, 200 steps", "programs": lengths.programs}]


class Recurrent(nn.Module):
    """A loop over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, found = torch.zeros_like(x[:, 0]), []
        for position in range(x.shape[1]):
            h = torch.tanh(self.first(x[:, position]) + self.last(h))
            found.append(h)
        return torch.stack(found, 1)


def observation(steps: int) -> list[dict[str, Any]]:
    """Rows of looks that decide nothing."""
    kinds = (looked, printed, asked)
    rows = []
    for batch, count in ((BATCH, steps), (16 * BATCH, steps // 6)):
        ours = [Way(Model(kind), True) for kind in (nothing, *kinds)]
        eager = [Way(Model(kind), False) for kind in (nothing, *kinds)]
        turns([*ours, *eager], count, lambda number, batch=batch: drawn(number % 8, batch, WIDTH))  # type: ignore[misc]
        for kind, way, other in zip(kinds, ours[1:], eager[1:], strict=True):
            more, own = way.ms - ours[0].ms, max(0.0, other.ms - eager[0].ms)
            what = f"{_doc(kind)}, {batch} rows"
            rows.append(
                {"what": what, "step": ours[0].ms, "more": more, "eager": own, "cost": (more - own) / ours[0].ms}
            )
    return rows


class Decided(nn.Module):
    """Four decisions on values that the batch settles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for position, layer in enumerate(self.layers):
            h = layer(h).tanh()
            if (h.detach()[0, 0] * 0 + x[0, position]).item() > 0:
                h = h * 2 + x
        return h


def flips(steps: int) -> list[dict[str, Any]]:
    """Rows of branches that go another way for the first time, and of ways that are known."""
    compiling = [0.0]
    compiled = Paths._compile

    def timed(*arguments: Any) -> None:
        start = time.process_time()
        compiled(*arguments)
        compiling[0] += 1e3 * (time.process_time() - start)

    Paths._compile = timed  # type: ignore[method-assign]
    ours, eager, rows = Way(Decided(), True), Way(Decided(), False), list[dict[str, Any]]()

    def both(bits: Sequence[int], count: int) -> tuple[list[float], list[float]]:
        found: tuple[list[float], list[float]] = [], []
        for number in range(count):
            x = drawn(number, BATCH, WIDTH)
            x[0, :4] = torch.tensor([1.0 if bit else -1.0 for bit in bits])
            for way, times in zip((ours, eager), found, strict=True):
                compiling[0] = 0.0
                way.run(x, x)
                times.append(way.times[-1] - compiling[0])
        return found

    both((0, 0, 0, 0), 30)
    for position in range(4):
        bits = [int(other == position) for other in range(4)]
        base = statistics.median(both((0, 0, 0, 0), steps)[1])
        first = both(bits, 1)[0][0]
        both(bits, 2)
        known = [both(way, 1)[0][0] for _ in range(steps) for way in ((0, 0, 0, 0), bits)][1::2]
        what = f"A branch after layer {position + 1} of 4 flips"
        rows.append({"what": what, "first": first / base, "known": statistics.median(known) / base})
    Paths._compile = compiled  # type: ignore[method-assign]
    return rows


def _doc(kind: Callable[..., Any]) -> str:
    return (kind.__doc__ or "").strip(".")


KINDS: dict[str, tuple[Callable[[int], list[dict[str, Any]]], int]] = {
    "changes": (changes, STEPS),
    "observation": (observation, 300),
    "flips": (flips, 20),
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], help="default: all")
    parser.add_argument("--update", action="store_true", help="write the results and the page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = page.stored_rows()
    for name in options.kinds or KINDS:
        measure, steps = KINDS[name]
        found[name] = measure(steps)
        for row in found[name]:
            print(name, json.dumps(row), flush=True)
    if options.update:
        page.ROWS.write_text(json.dumps(found, indent=1) + "\n")
        page.write(page.stored())
    return 0


if __name__ == "__main__":
    sys.exit(main())
