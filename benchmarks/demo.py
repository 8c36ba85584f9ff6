"""`make demo`: two networks, trained by PyTorch eager and by daceml_train on the same batches from the same start.

A small residual network reads handwritten digits (scikit-learn's, test images held out); a small transformer learns to
predict the text of Python's standard library. Both ways take their steps in turn, so that the machine's moods hit
both. Shows losses and times side by side, and the bytes that a step moves before and after each level of
transformations; writes figures to `demo_output/`. Ends with 1 if the test accuracy stays below 98 % or the losses come
apart.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from benchmarks import figures
from benchmarks.data import Digits, Text, digits, standard_library
from benchmarks.networks.resnet import BasicBlock, convolution
from benchmarks.networks.transformer import LanguageModel, token_loss
from daceml_train.reporting import Compiled, bytes_text

ACCURACY = 0.98
"""Test accuracy on digits that both ways must reach."""
AT_FIRST = 2e-3
"""Relative difference of losses allowed in the first `FIRST` steps.

Rounding grows from there as in any training: eager execution comes apart from itself in float64 as quickly.
"""
FIRST = 5
AT_LAST = 0.1
"""Difference allowed between the mean losses of the last tenth, relative or absolute, whichever allows more."""


@dataclass
class Run:
    """One way of training: its losses and seconds, step by step."""

    title: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        """The median step, without the first ones."""
        times = sorted(self.seconds[5:])
        return 1e3 * times[len(times) // 2]

    @property
    def last(self) -> float:
        """The mean loss over the last tenth of the steps."""
        tail = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(tail) / len(tail)


@dataclass
class Training:
    """A model trained in both ways; `accuracies` on the test set where there are classes."""

    title: str
    eager: Run
    ours: Run
    moved: Compiled
    compile_seconds: float
    accuracies: tuple[float, float] | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, show, draw; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder for figures")
    parser.add_argument("--steps", type=int, help="training steps of each network (default: enough)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 110)
    start = time.perf_counter()
    results = [train_digits(console, options.steps or 360), train_text(console, options.steps or 200)]
    options.out.mkdir(parents=True, exist_ok=True)
    paths = [figures.losses(t, options.out) for t in results] + [figures.bytes_per_level(results, options.out)]
    failures = [failure for t in results for failure in failed(t)]
    console.print(summary(results))
    console.print(f"figures: {', '.join(str(p) for p in paths)}")
    console.print(f"{time.perf_counter() - start:.0f} s in all")
    for failure in failures:
        console.print(f"[red]{failure}[/red]")
    return int(bool(failures))


# ---- the two networks -----------------------------------------------------------------------------------------------
class DigitNetwork(nn.Module):
    """Residual blocks over 8x8 images, a global mean and a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(1, 32, 3), nn.ReLU())
        self.blocks = nn.Sequential(BasicBlock(32, 32, 1), BasicBlock(32, 64, 2), BasicBlock(64, 64, 1))
        self.classifier = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


def train_digits(console: Console, steps: int) -> Training:
    """The residual network on handwritten digits."""
    data: Digits = digits()
    console.rule("[bold]Handwritten digits: residual network")
    console.print(f"{len(data.images)} images to train on, {len(data.test_images)} to test on")
    torch.manual_seed(0)
    start = DigitNetwork()

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    models, result = both(console, "Digits", start, optimizer, F.cross_entropy, data.batches(steps), steps)
    result.accuracies = tuple(accuracy(m, data) for m in models)  # type: ignore[assignment]  # two models, two numbers
    return result


def train_text(console: Console, steps: int) -> Training:
    """The transformer on Python's standard library."""
    data: Text = standard_library()
    console.rule("[bold]Python's standard library: character-level transformer")
    console.print(f"{len(data.characters):,} characters of {len(data.alphabet)} kinds, from {data.modules} modules")
    torch.manual_seed(0)
    start = LanguageModel(len(data.alphabet), 128, width=128, heads=4, layers=3)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=2e-3)

    return both(console, "Text", start, optimizer, token_loss, data.batches(steps, 8, 128), steps)[1]


def accuracy(model: nn.Module, data: Digits) -> float:
    """The share of test images that are recognized."""
    model.eval()
    with torch.no_grad():
        found = model(data.test_images).argmax(1)
    model.train()
    return float((found == data.test_labels).float().mean())


# ---- training in both ways ------------------------------------------------------------------------------------------
def both(
    console: Console,
    title: str,
    start: nn.Module,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Iterator[tuple[Tensor, Tensor]],
    steps: int,
) -> tuple[tuple[nn.Module, nn.Module], Training]:
    """Train two copies of `start` on the same batches, in turn; the copies and what was seen.

    The learning rate falls along a cosine, by PyTorch's own scheduler on both sides.
    """
    eager_model, model = copy.deepcopy(start).train(), copy.deepcopy(start).train()
    eager_optimizer, own_optimizer = optimizer(eager_model), optimizer(model)
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(o, steps, eta_min=1e-5) for o in (eager_optimizer, own_optimizer)
    ]

    def eager(x: Tensor, y: Tensor) -> Tensor:
        eager_optimizer.zero_grad(set_to_none=True)
        value = loss(eager_model(x), y)
        value.backward()
        eager_optimizer.step()
        return value.detach()

    runs = Run("PyTorch eager"), Run("daceml_train")
    table = Table(box=None, pad_edge=False)
    for heading in ("step", *(f"loss, {run.title}" for run in runs), "difference"):
        table.add_column(heading, justify="right")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    compile_seconds = 0.0
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("capturing", total=steps)
        step = dt.training_step(
            model,
            loss,
            own_optimizer,
            pass_callback=lambda one: progress.update(task, description=one.transformation.name),
            progress=lambda done, total: progress.update(task, description=f"kernel {done} of {total}"),
        )
        for number, (x, y) in enumerate(batches):
            for run, take in zip(runs, (eager, step), strict=True):
                began = time.perf_counter()
                run.losses.append(float(take(x, y)))
                run.seconds.append(time.perf_counter() - began)
            for schedule in schedules:
                schedule.step()
            if number == 0:
                compile_seconds = runs[1].seconds[0]
            if number % max(1, steps // 8) == 0 or number == steps - 1:
                theirs, ours = (run.losses[-1] for run in runs)
                table.add_row(f"{number}", f"{theirs:.6f}", f"{ours:.6f}", f"{abs(theirs - ours):.0e}")
            progress.update(task, advance=1, description="training")
    console.print(table)
    report = dt.report(step)
    function = report.functions[0]
    console.print(f"first call: {compile_seconds:.1f} s, {'from the cache' if function.warm else 'compiled'}")
    console.print(movement(function))
    for reason in report.breaks:
        console.print(f"runs partly in PyTorch: {reason}")
    return (eager_model, model), Training(title, *runs, function, compile_seconds)


def failed(training: Training) -> Iterator[str]:
    """What is wrong with a training, in sentences."""
    for number, (theirs, ours) in enumerate(zip(training.eager.losses, training.ours.losses, strict=True)):
        if number < FIRST and not abs(theirs - ours) <= AT_FIRST * abs(theirs):
            yield f"{training.title}: in step {number} the losses are {theirs} and {ours}"
    theirs, ours = training.eager.last, training.ours.last
    if not abs(theirs - ours) <= AT_LAST * max(1.0, theirs):
        yield f"{training.title}: the losses end at {theirs:.3f} and {ours:.3f}"
    for run, reached in zip((training.eager, training.ours), training.accuracies or (), strict=False):
        if reached < ACCURACY:
            wanted = f"expected at least {100 * ACCURACY:.0f} %"
            yield f"{training.title}, {run.title}: {100 * reached:.1f} % of the test images, {wanted}"


# ---- tables ---------------------------------------------------------------------------------------------------------
def movement(function: Compiled) -> Table:
    """The bytes that a step moves, level by level."""
    table = Table(box=None, pad_edge=False)
    table.add_column("bytes a step moves")
    table.add_column("", justify="right")
    table.add_column("saved", justify="right")
    table.add_row("one kernel or library call per operator", bytes_text(function.captured), "")
    for level in function.levels:
        saved = f"{100 * level.saved:.1f} %" if level.saved is not None else ""
        table.add_row(f"after {level.name.replace('_', ' ')}", bytes_text(level.after), saved)
    return table


def summary(results: Sequence[Training]) -> Table:
    """Both trainings side by side."""
    table = Table(title="Both ways, side by side", title_justify="left")
    table.add_column("")
    for training in results:
        for run in (training.eager, training.ours):
            table.add_column(f"{training.title}\n{run.title}", justify="right")
    runs = [(t, run) for t in results for run in (t.eager, t.ours)]
    table.add_row("median ms a step", *(f"{run.milliseconds:.2f}" for _, run in runs))
    times = [f"{t.eager.milliseconds / run.milliseconds:.2f} x" if run is t.ours else "" for t, run in runs]
    table.add_row("times as fast", *times)
    table.add_row("loss at the end", *(f"{run.last:.4f}" for _, run in runs))
    reached = [a for t in results for a in t.accuracies or (None, None)]
    table.add_row("test accuracy", *("" if a is None else f"{100 * a:.2f} %" for a in reached))
    amounts = [size for t in results for size in (t.moved.captured, t.moved.moved)]
    table.add_row("bytes of a step, counted", *map(bytes_text, amounts))
    return table


if __name__ == "__main__":
    sys.exit(main())
