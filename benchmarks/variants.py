"""VARIANTS: the ways to run one training step that are compared, as functions from a network to a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import daceml_train as dt
from benchmarks.networks import Network, Problem


class Step:
    """A training step on a problem's batch."""

    problem: Problem

    def __call__(self) -> object:
        return self.problem.step()


@dataclass(frozen=True)
class Variant:
    """How to create a step of a problem.

    `ours` tells this project from PyTorch, `compiled` what starts warm, `mixed` steps in bfloat16 and float32.
    """

    title: str
    channels_last: bool
    fused: bool
    make: Callable[[Problem, Path | None], Step]
    ours: bool = False
    compiled: bool = False
    mixed: bool = False

    def suits(self, network: Network) -> bool:
        """Whether the network has such a layout."""
        return network.images or not self.channels_last

    def of(self, network: Network, cache: Path | None = None) -> Step | None:
        """The step, or None where it does not suit the network; ours keeps what it compiles in `cache`."""
        if not self.suits(network):
            return None
        return self.make(network.build(channels_last=self.channels_last, fused=self.fused), cache)


class Theirs(Step):
    """A step by PyTorch."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def _eager(problem: Problem, _: Path | None) -> Step:
    return Theirs(problem)


def _inductor(problem: Problem, _: Path | None) -> Step:
    torch._dynamo.reset()
    return Theirs(replace(problem, model=torch.compile(problem.model)))  # type: ignore[arg-type]


def _eager_mixed(problem: Problem, _: Path | None) -> Step:
    return Theirs(problem.autocast())


def _inductor_mixed(problem: Problem, _: Path | None) -> Step:
    return _inductor(problem.autocast(), None)


class Ours(Step):
    """A step by this project; `compiled` is what `daceml_train.report` takes."""

    compiled: Any


class OwnModule(Ours):
    """The drop-in module under PyTorch's autograd and optimizer."""

    def __init__(self, problem: Problem, cache: Path | None = None) -> None:
        self.compiled = dt.optimize(problem.model, cache=cache)
        self.problem = replace(problem, model=self.compiled)


class OwnStep(Ours):
    """The whole step."""

    def __init__(self, problem: Problem, cache: Path | None = None, pipeline: dt.Pipeline = dt.TRAINING) -> None:
        self.problem = problem
        model, loss, optimizer = problem.model, problem.loss, problem.optimizer
        self.compiled = dt.training_step(model, loss, optimizer, cache=cache, pipeline=pipeline)

    def __call__(self) -> object:
        return self.compiled(self.problem.inputs, self.problem.targets)


def _own_mixed(problem: Problem, cache: Path | None) -> Step:
    return OwnStep(problem, cache, dt.MIXED_PRECISION)


VARIANTS: dict[str, Variant] = {
    "eager": Variant("PyTorch eager", False, False, _eager),
    "eager-fused": Variant("eager, fused optimizer", False, True, _eager),
    "eager-cl": Variant("eager, channels-last, fused optimizer", True, True, _eager),
    "inductor": Variant("torch.compile, fused optimizer", False, True, _inductor, compiled=True),
    "inductor-cl": Variant("torch.compile, channels-last, fused optimizer", True, True, _inductor, compiled=True),
    "module": Variant("daceml_train.optimize, PyTorch's optimizer", False, True, OwnModule, ours=True, compiled=True),
    "step": Variant("daceml_train.training_step", False, False, OwnStep, ours=True, compiled=True),
    "eager-bf16": Variant("eager, autocast, fused optimizer", False, True, _eager_mixed, mixed=True),
    "eager-cl-bf16": Variant("eager, autocast, channels-last, fused optimizer", True, True, _eager_mixed, mixed=True),
    "inductor-bf16": Variant(
        "torch.compile, autocast, fused optimizer", False, True, _inductor_mixed, compiled=True, mixed=True
    ),
    "inductor-cl-bf16": Variant(
        "torch.compile, autocast, channels-last, fused optimizer",
        *(True, True, _inductor_mixed),
        compiled=True,
        mixed=True,
    ),
    "step-bf16": Variant(
        "daceml_train.training_step, MixedPrecision", False, False, _own_mixed, ours=True, compiled=True, mixed=True
    ),
}
"""PyTorch's variants take its fused update where it is worth anything: what we compare with is the best of them."""
