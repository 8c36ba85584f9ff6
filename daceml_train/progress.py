"""Progress bars: of compilation, fed by `pass_callback=` and `progress=`, and of a search by stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from daceml_train.passes.pipeline import Step


@contextlib.contextmanager
def compilation_bar(console: Console | None = None) -> Iterator[dict[str, Any]]:
    """Arguments for `optimize` and `training_step` that show passes and kernels on a bar, which vanishes at the end.

    Nothing is shown where the console (stderr by default) is no terminal.
    """
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("capturing", total=None)

        def watch(step: Step) -> None:
            bar.update(task, description=step.transformation.name, total=step.passes, completed=step.position + 1)

        def progress(done: int, total: int) -> None:
            bar.update(task, description="compiling kernels", total=total, completed=done)

        yield {"pass_callback": watch, "progress": progress}


@contextlib.contextmanager
def stages_bar(console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """What `progress=` of `Stages.run_all` and `run_trials` takes: a bar of stages, which vanishes at the end.

    Nothing is shown where the console (stderr by default) is no terminal.
    """
    with counted_bar("training stages", console) as progress:
        yield progress


@contextlib.contextmanager
def counted_bar(what: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """A function of (done, in all) that moves a bar, which vanishes at the end; what `progress=` of `tune` takes.

    Nothing is shown where the console (stderr by default) is no terminal.
    """
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, total=total, completed=done)
