"""Trials on several processes of one machine, which share a storage and need no one to tell them what to do.

Each process builds the same tree and takes the ready stage with the longest path that nobody else trains, under a lock
that the operating system releases where its holder is killed. The process that was killed is replaced.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pickle
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from daceml_train.errors import DacemlError, Invalid
from daceml_train.trials.checks import as_rungs, as_trials, check_numbers, check_progress
from daceml_train.trials.keys import Path
from daceml_train.trials.stages import Stages, Trial
from daceml_train.trials.tree import Stage, Tree

_PAUSE = 0.01
"""Seconds between two looks at what others train, where nothing else is ready."""


class TrialFailed(DacemlError, RuntimeError):
    """A trial of a pool failed; the message names the trial."""


def run_trials(
    make: Callable[[], Stages],
    trials: Iterable[Trial],
    until: int | Sequence[int],
    *,
    workers: int = 2,
    threads: int = 1,
    restarts: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[int, Any]]:
    """The values of all trials at all numbers of steps in `until`, trained by `workers` processes.

    `make` returns a `Stages` with a storage; each process calls it, with `threads` threads in PyTorch. It is a function
    of a module, which processes import. A process that is killed is replaced; raises `TrialFailed` where that happens
    more than `restarts` times in one stage, and where a trial raises an error. `progress` is told (stages done, stages
    in all).
    """
    if not callable(make):
        raise Invalid(f"make is a function that returns a daceml_train.Stages, given {type(make).__name__}")
    check_numbers(workers=workers, threads=threads)
    check_numbers(least=0, restarts=restarts)
    check_progress(progress)
    rungs, listed = as_rungs(until), as_trials(trials)
    if wrong := [trial for trial in listed if not isinstance(trial, Mapping)]:
        raise Invalid(f"the settings of a trial are a dictionary by name, given {type(wrong[0]).__name__}")
    listed = [dict(trial) for trial in listed]
    job = _Job(make, listed, rungs, threads, uuid.uuid4().hex)
    try:
        pickle.dumps(job)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        advice = "make is a function of a module, and settings are values and schedules"
        raise Invalid(f"processes cannot be handed make and the trials: {error}", advice=advice) from error
    pool = _Pool(job, restarts, progress)
    try:
        for _ in range(workers):
            pool.start()
        while pool.running:
            pool.listen()
    finally:
        pool.close()
    assert pool.values is not None
    return pool.values


@dataclass(frozen=True)
class _Job:
    make: Callable[[], Stages]
    trials: list[dict[str, Any]]
    rungs: tuple[int, ...]
    threads: int
    run: str


@dataclass
class _Pool:
    """The processes, as the one that started them sees them."""

    job: _Job
    restarts: int
    progress: Callable[[int, int], None] | None
    running: dict[Any, Any] = field(default_factory=dict)
    """The processes by the connection on which they tell what they do."""
    now: dict[Any, str] = field(default_factory=dict)
    """What each process does."""
    killed: Counter[str] = field(default_factory=Counter)
    values: list[dict[int, Any]] | None = None
    done: int = 0
    """The most stages that any process knows to be done: each looks at a moment of its own."""

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, its = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(self.job, its), daemon=True)
        process.start()
        its.close()
        self.running[ours] = process

    def listen(self) -> None:
        """Hear what processes tell, and replace those that were killed."""
        for ready in multiprocessing.connection.wait(list(self.running)):
            connection: Any = ready
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):
                self._ended(connection)
                continue
            if kind == "stage":
                self.now[connection], done, total = content
                self.done = max(self.done, done)
                if self.progress is not None:
                    self.progress(self.done, total)
            elif kind == "values":
                self.values = content
            else:
                raise TrialFailed(f"{self.now.get(connection, 'a process of the pool')} failed\n{content}")

    def _ended(self, connection: Any) -> None:
        process, doing = self.running.pop(connection), self.now.pop(connection, "a process that was starting")
        process.join()
        connection.close()
        if process.exitcode == 0:
            return
        self.killed[doing] += 1
        if self.killed[doing] > self.restarts:
            how = f"by signal {-process.exitcode}" if process.exitcode < 0 else f"with status {process.exitcode}"
            raise TrialFailed(
                f"{doing}: its process ended {self.killed[doing]} times, the last time {how}",
                advice="signal 9 often means too little memory: use fewer workers",
            )
        self.start()

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.join()


def _work(job: _Job, connection: Any) -> None:
    """A process of the pool: train what is ready until nothing is left, and tell the values."""
    try:
        torch.set_num_threads(job.threads)
        stages = job.make()
        if not isinstance(stages, Stages) or stages.store.folder is None:
            raise Invalid("a pool of processes needs a storage", advice="return Stages(..., storage=folder) from make")
        stages.name_of_run = job.run
        paths = [stages.path(trial, job.rungs[-1]) for trial in job.trials]
        tree = stages.know(paths, job.rungs)
        train_tree(stages, tree, connection.send)
        connection.send(("values", _values(stages, paths, job.rungs)))
    except (BrokenPipeError, KeyboardInterrupt):  # the process that started this one is gone
        return
    except BaseException:
        connection.send(("error", traceback.format_exc()))


def _values(stages: Stages, paths: Sequence[Path], rungs: tuple[int, ...]) -> list[dict[int, Any]]:
    return [dict(stages.values(number, path, rungs)) for number, path in enumerate(paths)]


def train_tree(stages: Stages, tree: Tree, tell: Callable[[tuple[str, Any]], Any]) -> None:
    """Train the stages of a tree together with all processes that do so on the same storage, until all are trained.

    `tell` is handed `("stage", (what is trained next, stages done, stages in all))`.
    """
    pending, total = list(tree.stages()), sum(1 for _ in tree.stages())
    done: set[int] = {id(tree.root)}
    last: Stage | None = None
    while pending:
        finished = [stage for stage in pending if id(stage.parent) in done and stages.is_done(stage)]
        done |= {id(stage) for stage in finished}
        pending = [stage for stage in pending if id(stage) not in done]
        ready = [stage for stage in pending if id(stage.parent) in done]
        ready.sort(key=lambda stage: (-tree.longest(stage), stage.parent is not last))
        for stage in ready:
            with stages.store.lock_at_once((stage.end, stage.key)) as free:
                if not free:
                    continue
                message = (
                    f"trial {min(stage.trials or [stages.first_trial(stage)])}, steps {stage.start} to {stage.end}"
                )
                tell(("stage", (message, len(done) - 1, total)))
                stages.execute(stage)
                last = stage
                break
        else:
            if ready and not finished:
                time.sleep(_PAUSE)
    tell(("stage", ("the values", total, total)))


__all__ = ["TrialFailed", "run_trials", "train_tree"]
