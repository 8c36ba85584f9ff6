"""Checks the models of many seeds in processes, and keeps what became of them in a file that later runs go on from."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzz.checking import Rejected, check, references
from benchmarks.fuzz.generate import random_case
from daceml_train.codegen.cpu import compile as kernels


@dataclass
class Outcome:
    """What became of one seed: `kind` is rejected, compiled, partly or wrong; `wrong` says why."""

    seed: int
    kind: str
    wrong: str = ""
    breaks: tuple[str, ...] = ()
    seconds: float = 0.0
    """Of the processor, the compiler's included."""


def examined(seed: int, layers: int, flags: str) -> Outcome:
    """Make and check the model of a seed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if flags == "mixed":
        flags = "O3" if seed % 10 == 0 else "O0"
    set_flags(flags)
    before = sum(os.times()[:4])
    try:
        verdict = check(random_case(seed, layers))
    except Rejected:
        return Outcome(seed, "rejected", seconds=sum(os.times()[:4]) - before)
    spent = sum(os.times()[:4]) - before
    breaks = tuple({reason.split("\n", maxsplit=1)[0][:120] for reason in verdict.breaks})
    return Outcome(seed, "wrong" if verdict.wrong else "partly" if breaks else "compiled", verdict.wrong, breaks, spent)


def set_flags(level: str) -> None:
    """Compile kernels at this level of optimization from here on."""
    wanted = tuple(f"-{level}" if re.fullmatch(r"-O\d", flag) else flag for flag in kernels.FLAGS)
    if wanted != kernels.FLAGS:
        kernels.FLAGS = wanted
        kernels._machine.cache_clear()


def outcomes(first: int, models: int, layers: int, flags: str, jobs: int, seconds: float) -> Iterator[Outcome]:
    """Outcomes of the seeds from `first` on, until `models` of them were models that PyTorch takes."""
    end, seeds, accepted = time.perf_counter() + seconds, itertools.count(first), 0

    def more(pending: int = 0) -> bool:
        return accepted + pending < models and time.perf_counter() < end

    while more():
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, context, max_tasks_per_child=60) as pool:
            running: dict[Any, int] = {}
            try:
                while running or more():
                    while len(running) < 2 * jobs and more(len(running)):
                        seed = next(seeds)
                        running[pool.submit(examined, seed, layers, flags)] = seed
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        outcome = future.result()
                        del running[future]
                        accepted += outcome.kind != "rejected"
                        yield outcome
            except BrokenProcessPool:
                for lost in sorted(running.values()):
                    outcome = _examined_alone(lost, layers, flags)
                    accepted += outcome.kind != "rejected"
                    yield outcome


def _examined_alone(seed: int, layers: int, flags: str) -> Outcome:
    """The outcome of a seed in a separate process; wrong if the process dies, unless it does so under PyTorch alone."""
    context = multiprocessing.get_context("spawn")
    for function, arguments in ((examined, (seed, layers, flags)), (_taken, (seed, layers))):
        with ProcessPoolExecutor(1, context) as pool:
            try:
                outcome = pool.submit(function, *arguments).result()
            except BrokenProcessPool:
                outcome = Outcome(seed, "rejected", "PyTorch alone makes the process die")
            else:
                return outcome
    return outcome


def _taken(seed: int, layers: int) -> Outcome:
    """The outcome of a seed whose check kills the process, if PyTorch's own runs do not."""
    with contextlib.suppress(Rejected):
        references(random_case(seed, layers))
    return Outcome(seed, "wrong", "the process died")


@dataclass
class Run:
    """The findings of one run of the command; a result file lists runs, each with the seeds after those of the last."""

    arguments: dict[str, Any]
    versions: dict[str, str]
    """Of PyTorch, and the commit of this project."""
    first: int
    next: int
    """Seeds from `first` on, before `next`."""
    outcomes: dict[str, int] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    seed_of: dict[str, int] = field(default_factory=dict)
    """The first seed with such a break."""
    wrong: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    processor_seconds: float = 0.0

    @property
    def accepted(self) -> int:
        """Models that PyTorch takes."""
        return sum(count for kind, count in self.outcomes.items() if kind != "rejected")

    def add(self, outcome: Outcome) -> None:
        """Count an outcome."""
        self.next = max(self.next, outcome.seed + 1)
        self.outcomes[outcome.kind] = self.outcomes.get(outcome.kind, 0) + 1
        for reason in outcome.breaks:
            self.breaks[reason] = self.breaks.get(reason, 0) + 1
            self.seed_of.setdefault(reason, outcome.seed)
        if outcome.kind == "wrong":
            self.wrong[outcome.seed] = outcome.wrong
        self.processor_seconds = round(self.processor_seconds + outcome.seconds, 1)


def read(path: Path | None) -> list[Run]:
    """The runs of a file of results; none if there is no such file."""
    if path is None or not path.exists():
        return []
    found = [Run(**run) for run in json.loads(path.read_text())]
    for run in found:
        run.wrong = {int(seed): wrong for seed, wrong in run.wrong.items()}
    return found


def write(path: Path, runs: Sequence[Run]) -> None:
    """Keep the runs in a file."""
    path.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")
