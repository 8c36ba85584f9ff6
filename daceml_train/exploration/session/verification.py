"""Verification: a session's compiled program against PyTorch, tensor by tensor, with float64 as the reference."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.driver.settings import Settings
from daceml_train.errors import Unsupported
from daceml_train.exploration.session.eager_copy import EagerCopy, Named
from daceml_train.exploration.session.forward_check import forward_checks
from daceml_train.exploration.session.program import RATE, Inputs, Program, cotangents
from daceml_train.exploration.session.progress import CheckProgress, OnProgress, compiling, unheard
from daceml_train.exploration.session.subject import NORM, Subject
from daceml_train.graph.graph import Graph
from daceml_train.ops.operator import Array
from daceml_train.runtime.torch_types import torch_dtype
from daceml_train.tensor import DType

FACTOR, FLOOR = 10.0, 2e-5
"""An error may be this many times eager execution's error against float64, or this large relative to the exact value:
sums in another order differ that much. Of eager execution's memory layouts the worse one counts. Where PyTorch cannot
be the reference, the captured graph is, with each operator's results rounded to their types."""
ALONE = {DType.float64: 1e-9, DType.float16: 2e-2, DType.bfloat16: 1e-1}
"""The allowed error, by element type, where no eager error is known; 1e-3 for float32 and the rest."""
SMALL = 1e-3
"""A tensor much smaller than the others of its kind is compared with this share of their median."""
NOISE = 0.05
"""An eager error above which a tensor is rounding noise, so that a comparison says nothing."""
FEW = 0.01
"""The share of a tensor's elements that may be noise by themselves; see `_settled`."""
SAMPLE = 24
"""The most tensors of the first comparison, besides results."""


@dataclass(frozen=True)
class Check:
    """One tensor: the program's relative error against the exact value, and the allowed error.

    `kind` is `result`, `gradient`, `update` (what a step adds to a parameter), `state` or `buffer`, and in a first
    comparison of a large graph `array`, an array of the graph; `eager` is the
    error of PyTorch in the model's own element types, or of the captured graph with every operator's results rounded
    to them where PyTorch draws other random numbers; None where neither is known.
    """

    kind: str
    name: str
    error: float
    allowed: float
    eager: float | None

    @property
    def ok(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.allowed

    @property
    def noise(self) -> bool:
        """Whether the tensor is rounding noise also in eager execution, such as Adam's update by a gradient of zero."""
        return self.eager is not None and self.eager > NOISE

    def __str__(self) -> str:
        eager = "" if self.eager is None else f", eager {self.eager:.1e}"
        mark = ("noise" if self.noise else "ok   ") if self.ok else "WRONG"
        return f"{mark} {self.kind:8} {self.name}: error {self.error:.1e}, allowed {self.allowed:.1e}{eager}"


@dataclass(frozen=True)
class Verification:
    """All tensors that were compared, and the reference; truthy if all errors are allowed."""

    checks: tuple[Check, ...]
    reference: str
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all errors are allowed."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def worst(self) -> Check | None:
        """The tensor with the largest share of its allowed error."""
        telling = [check for check in self.checks if not (check.noise and check.ok)]
        return max(telling, key=lambda c: c.error / c.allowed if c.allowed else float("inf"), default=None)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if not self.checks:
            return "\n".join(["nothing to compare: the program computes no result of its own", *self.notes])
        wrong = [check for check in self.checks if not check.ok]
        counts = {kind: sum(c.kind == kind for c in self.checks) for kind in dict.fromkeys(c.kind for c in self.checks)}
        summary = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items())
        first = f"{len(wrong)} of {len(self.checks)} tensors are wrong" if wrong else f"all right: {summary}"
        shown = wrong or [c for c in (self.worst,) if c is not None]
        shown += [check for check in self.checks if check.ok and check.noise]
        return "\n".join([f"{first}; compared with {self.reference}", *map(str, shown), *self.notes])


def verify(
    subject: Subject,
    graph: Graph,
    with_gradients: Callable[[Subject], tuple[Graph, Sequence[str]]],
    options: Settings,
    progress: OnProgress = unheard,
) -> Verification:
    """Run `graph` as a compiled program and compare. `with_gradients` turns a step into one with its gradients as
    outputs, and returns what differs between the two.

    `progress` receives progress and first comparisons: of the first operators if there are many, of the results once
    the forward pass has run by itself, and of some tensors with PyTorch once both have run.
    """
    total = len(graph.outputs) + len(graph.writes) + (len(subject.trained) if subject.kind == "step" else 0)
    for first in forward_checks(subject, graph, options, progress):
        count = sum(kind == "result" for kind, _ in first.found)
        covered = f"{first.covered}, {count} of {total} tensors so far"
        partial = Verification(tuple(_compared(first.found, [], first.reference)), covered)
        progress(CheckProgress("compared what runs first", result=partial))
    inputs = Inputs.of(subject, RATE)
    found = _program_results(subject, graph, inputs, compiling(options, "the program", progress))
    notes: list[str] = []
    seeds = cotangents(subject, graph, inputs)
    eager = _eager(subject, seeds, progress)
    if eager:
        progress(CheckProgress("compared some tensors", result=sampled(found, eager[0])))
    if subject.kind == "step":  # whose gradients need not exist as arrays
        progress(CheckProgress("applying the steps to a program with gradients as results"))
        wider = subject.with_gradients()
        other, differs = with_gradients(wider)
        notes += differs
        named = compiling(options, "the program with gradients", progress)
        results = _program_results(wider, other, Inputs.of(wider, RATE), named)
        found |= {key: value for key, value in results.items() if key[0] == "gradient"}
    if not eager:  # what rounding alone does to the same graph on the same random numbers
        progress(CheckProgress("evaluating the captured graph and its derivative, rounded"))
        eager = [_meaning(subject, rounded=True)]
    progress(CheckProgress("running PyTorch in float64"))
    exact, reference = _exact(subject, seeds, notes)
    if exact is None:
        progress(CheckProgress("evaluating the captured graph and its derivative in float64"))
        exact = _meaning(subject)
    progress(CheckProgress("comparing all tensors"))
    return Verification(tuple(_compared(found, eager, exact)), reference, tuple(notes))


def sampled(found: Named, eager: Named) -> Verification:
    """A comparison of all results and of `SAMPLE` other tensors, evenly spread, with PyTorch in the model's types.

    Updates are left out where the optimizer has a state: Adam's update by a gradient of zero is rounding noise.
    """
    stateful = any(kind == "state" for kind, _ in found)
    others = [key for key in found if key in eager and key[0] != "result" and (key[0] != "update" or not stateful)]
    step = max(1, -(-len(others) // SAMPLE))
    keys = [key for key in found if key[0] == "result" and key in eager] + others[::step]
    checks = _compared({key: found[key] for key in keys}, [], {key: eager[key] for key in keys})
    total = len({*found, *eager})
    return Verification(tuple(checks), f"PyTorch, {len(keys)} of {total} tensors so far")


def _eager(subject: Subject, seeds: Mapping[int, torch.Tensor], progress: OnProgress) -> list[Named]:
    """PyTorch's results in the model's own element types, in each layout; none where they cannot be compared."""
    captured = subject.seen.captured
    if captured.random and not captured.draws:
        return []
    images = any(t.ndim == 4 for t in subject.seen.tensors.values()) and not captured.draws
    layouts = ((False, ""), (True, ", channels last")) if images else ((False, ""),)
    results = []
    for last, name in layouts:
        progress(CheckProgress(f"running PyTorch{name}"))
        try:
            results.append(EagerCopy(subject, channels_last=last).results(seeds, RATE))
        except Unsupported:  # `_exact` notes why
            return []
    return results


def _exact(subject: Subject, seeds: Mapping[int, torch.Tensor], notes: list[str]) -> tuple[Named | None, str]:
    """PyTorch's results in float64, None where there are none, and the name of the reference."""
    captured = subject.seen.captured
    if captured.random and not captured.draws:
        notes.append("random numbers are drawn otherwise than in PyTorch: random='eager' draws the same")
        return None, "the captured graph's meaning in float64"
    if captured.draws:
        return None, "the captured graph's meaning in float64, on PyTorch's random numbers"
    try:
        return EagerCopy(subject, wide=True).results(seeds, RATE), "PyTorch in float64"
    except Exception as error:  # a model may insist on its element types
        told = "" if isinstance(error, Unsupported) else "PyTorch does not run the model in float64: "
        notes.append(f"{told}{error}")
        return None, "the captured graph's meaning in float64"


def _program_results(subject: Subject, graph: Graph, inputs: Inputs, options: Settings) -> Named:
    """The compiled program's results on these inputs."""
    tensors = inputs.fresh()
    outputs = Program.of(graph, options).run(tensors)
    return _named(subject, inputs, outputs, {n: tensors[n] for n in graph.writes}, inputs.tensors)


def _meaning(subject: Subject, rounded: bool = False) -> Named:
    """The meaning of the training graph before all passes, gradients included, in float64; or with the exact results of
    each operator rounded to their own element types.
    """
    subject = subject.with_gradients()
    graph, inputs = subject.training_graph(subject.captured), Inputs.of(subject, RATE)
    result = interpret(graph, _arrays(graph, inputs), rounded, keep=False)

    def tensor(array: Array, name: str) -> torch.Tensor:
        value = torch.from_numpy(np.asarray(array))
        return value.to(torch_dtype(graph.tensors[name].dtype)) if rounded else value  # which loses nothing

    outputs = [tensor(value, name) for name, value in zip(graph.outputs, result.outputs, strict=True)]
    after = {name: tensor(value, name) for name, value in result.writes.items()}
    before = {name: inputs.tensors[name] if rounded else _wide(inputs.tensors[name]) for name in after}
    return _named(subject, inputs, outputs, after, before)


def _arrays(graph: Graph, inputs: Inputs) -> dict[str, Array]:
    """The inputs of a graph in NumPy, which has no bfloat16."""
    tensors = {name: inputs.tensors[name] for name in graph.inputs}
    return {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for n, t in tensors.items()}


def _named(
    subject: Subject,
    inputs: Inputs,
    outputs: Sequence[torch.Tensor],
    after: Mapping[str, torch.Tensor],
    before: Mapping[str, torch.Tensor],
) -> Named:
    """Outputs and written inputs of a program by their user names."""
    found: Named = {}
    for position, value in enumerate(outputs[: subject.results]):
        found["result", subject.labels[position]] = value
    ends = subject.results + len(subject.gradients)
    for name, value in zip(subject.gradients, outputs[subject.results : ends], strict=True):
        found["gradient", subject.path(name)] = value
    for label, value in zip(subject.labels[ends:], outputs[ends:], strict=True):
        found["result" if label == NORM else "state", label] = value
    trained = {t.parameter for t in subject.trained}
    for name, value in after.items():
        if name in trained:
            found["update", subject.path(name)] = value - before[name]
        elif name in inputs.state:
            parameter, state = inputs.state[name]
            found["state", f"{state} of {subject.path(parameter)}"] = value
        else:
            found["buffer", subject.path(name)] = value
    return found


def _compared(found: Named, eager: Sequence[Named], exact: Named) -> list[Check]:
    """A check per tensor that exists on both sides; a gradient that exists on one side only is compared with zero."""
    norms: dict[str, list[float]] = {}
    for (kind, _), value in exact.items():
        norms.setdefault(kind, []).append(_norm(value))
    typical = {kind: statistics.median(values) for kind, values in norms.items()}
    checks = []
    for key in [*found, *(k for k in exact if k not in found and k[0] != "buffer")]:
        kind, name = key
        if key not in found or key not in exact:
            there = found.get(key, exact.get(key))
            assert there is not None
            checks.append(Check(kind, name, float(torch.count_nonzero(there)), 0.0, None))
            continue
        ours, value, others = found[key], exact[key], [of[key] for of in eager if key in of]
        scale = max(_norm(value), SMALL * typical[kind]) or 1.0
        settled = _settled(name, eager, exact) if kind == "update" else None
        if settled is not None and ours.shape == value.shape == settled.shape:
            ours, value, *others = (t[settled] for t in (ours, value, *others))
        theirs = [_off(other, value) / scale for other in others]
        allowed = FACTOR * max(theirs) + FLOOR if theirs else ALONE.get(_dtype(ours), 1e-3)
        checks.append(Check(kind, name, _off(ours, value) / scale, allowed, max(theirs, default=None)))
    return checks


def _settled(name: str, eager: Sequence[Named], exact: Named) -> torch.Tensor | None:
    """The elements of a parameter whose update by Adam and its kind is more than rounding; None where all count.

    A first update is the sign of the gradient: where the gradient is as small as its own rounding, one sum in another
    order turns the whole element round. Such elements are compared in the optimizer's state alone, if they are few.
    """
    key = ("state", f"exp_avg of {name}")
    found = [of[key] for of in eager if key in of]
    if key not in exact or not found:
        return None
    moment = _wide(exact[key])
    off = ((_wide(of) - moment).abs() for of in found if of.shape == moment.shape and of.numel())
    rounding = max((float(values.max()) for values in off), default=0.0)
    settled = moment.abs() > FACTOR * rounding
    unsettled = moment.numel() - int(settled.sum())
    return settled if 0 < unsettled <= FEW * moment.numel() else None


def _norm(tensor: torch.Tensor) -> float:
    wide = _wide(tensor)
    return float(wide[wide.isfinite()].norm()) if wide.is_floating_point() else float(wide.double().norm())


def _off(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference; infinite where shapes, or positions of non-finite elements, differ."""
    a, b = _wide(ours).double(), _wide(exact).double()
    if a.shape != b.shape:
        return float("inf")
    odd = ~(a.isfinite() & b.isfinite())
    if bool(odd.any()) and not torch.equal(a[odd].nan_to_num(nan=1.5), b[odd].nan_to_num(nan=1.5)):
        return float("inf")
    return float((a - b)[~odd].norm())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach()


def _dtype(tensor: torch.Tensor) -> DType:
    return next((d for d in DType if d.name == str(tensor.dtype).removeprefix("torch.")), DType.float32)
