"""A program trained in one way: eagerly, through daceml_train, or through torch.compile."""

from __future__ import annotations

import io
import random
import resource
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
import torch._dynamo.utils
from torch import Tensor, nn

import daceml_train as dt
from benchmarks.programs.program import PROGRAMS
from daceml_train.driver.module import Backend, state_of
from daceml_train.driver.step import TrainingStep

OURS = ("training_step", "optimize")
WAYS = ("eager", *OURS, "torch.compile")

Streams = tuple[Tensor, Any, Any]
"""The states of PyTorch's, Python's and NumPy's random streams."""


def streams() -> Streams:
    """The states now."""
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def continue_from(state: Streams) -> None:
    """Set all random streams."""
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def processor_seconds() -> float:
    """Processor time of this process and of the compilers that it ran."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Way:
    """A program of its own per way, with streams and printed lines of its own, so that ways can take turns."""

    def __init__(self, program: str, kind: str) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.kind, self.program = kind, PROGRAMS[program]()
        self.initial = {name: p.detach().clone() for name, p in self.program.named_parameters()}
        self.printed, self.times, self.losses = io.StringIO(), list[float](), list[float]()
        self.wall, self.graph_breaks, self.trained = 0.0, 0, 0
        self.counts: list[int] = []
        """Programs compiled so far, after each step."""
        self.ran: list[dict[int, int]] = []
        """How often each program ran so far, after each step."""
        self.pieces: list[int] = []
        """How many calls ran in pieces so far, after each step."""
        self.along: list[int] = []
        """How many calls ran along paths so far, after each step."""
        self.calls_in_pieces = 0
        self.calls: list[int] = []
        """How many parts were trained so far, after each step."""
        self.steps: list[TrainingStep] = []
        self.backends: list[Backend] = []
        parts = self.program.parts()
        self.trainers = {name: self._trainer(model, loss) for name, (model, loss) in parts.items()}
        self.streams = streams()

    def _trainer(self, model: nn.Module, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if self.kind == "training_step":
            step = dt.training_step(model, loss, optimizer, random="eager")
            self.steps.append(step)
            self._count_pieces(step)
            return step
        called: Any = model
        if self.kind == "optimize":
            called = dt.optimize(model, random="eager")
            state = state_of(called)
            assert state is not None
            self.backends.append(state.backend)
        elif self.kind == "torch.compile":
            called = torch.compile(model)

        def train(inputs: Any, *targets: Any) -> Tensor:
            optimizer.zero_grad()
            output = called(*inputs) if isinstance(inputs, tuple) else called(inputs)
            value = loss(output, *targets)
            value.backward()
            optimizer.step()
            return value.detach()

        return train

    def _train(self, part: str, *arguments: Any) -> Tensor:
        self.trained += 1
        return self.trainers[part](*arguments)

    def _count_pieces(self, step: TrainingStep) -> None:
        run = step._run_in_pieces

        def counted(*arguments: Any) -> Tensor:
            self.calls_in_pieces += 1
            return run(*arguments)

        setattr(step, "_run_in_pieces", counted)  # noqa: B010 (mypy: a method)

    def step(self, number: int) -> None:
        """Train once: its loss, processor time, and the programs there are then."""
        continue_from(self.streams)
        counters = torch._dynamo.utils.counters["graph_break"]
        breaks = sum(counters.values())
        wall, start = time.perf_counter(), processor_seconds()
        with redirect_stdout(self.printed):
            loss = self.program.step(self._train, number)
        self.times.append(1e3 * (processor_seconds() - start))
        self.wall += time.perf_counter() - wall
        self.streams = streams()
        self.losses.append(float(loss))
        self.graph_breaks += sum(counters.values()) - breaks
        self.pieces.append(self.calls_in_pieces)
        self.along.append(sum(paths.calls for step in self.steps for paths in step.paths.values()))
        self.calls.append(self.trained)
        backends = self._backends()
        self.counts.append(sum(len(step.records) for step in self.steps) + sum(b.graphs for b in backends))
        programs = [p for backend in backends for kept in backend.programs.values() for p in kept]
        self.ran.append({id(program): program.runs for program in programs})

    def _backends(self) -> list[Backend]:
        states = [state_of(step.pieces) for step in self.steps if step.pieces is not None]
        return [*self.backends, *(state.backend for state in states if state is not None)]

    @property
    def mode(self) -> str:
        """How the last third of the steps ran: whole, along paths, in pieces, or eagerly."""
        if self.kind not in OURS or not self.ran:
            return ""
        before = -1 - max(1, len(self.ran) // 3) if len(self.ran) > 1 else 0
        if self.kind == "training_step" and self.pieces[before] == self.pieces[-1]:
            return "whole" if self.along[before] == self.along[-1] else "paths"
        runs = sum(runs - self.ran[before].get(program, 0) for program, runs in self.ran[-1].items())
        if not runs:
            return "eager"
        calls = self.calls[-1] - self.calls[before]
        whole = self.kind == "optimize" and runs == calls and not self.graph_breaks and not self.reasons()
        return "whole" if whole else "pieces"

    def reasons(self) -> list[str]:
        """Why not all of it is one program."""
        found = [reason for step in self.steps for reason in step.breaks]
        found += [reason for backend in self._backends() for reason in backend.breaks]
        return list(dict.fromkeys(" ".join(reason.split()) for reason in found))
