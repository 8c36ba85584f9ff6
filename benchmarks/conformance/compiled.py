"""A sample as the forward method of a module, compiled by `optimize`, against eager execution; also as `h + op(h)`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

import daceml_train as dt
from benchmarks.conformance.captured import eager, prepared, seeds
from benchmarks.conformance.compare import Results, difference
from benchmarks.conformance.outcome import Outcome
from benchmarks.conformance.samples import doubled
from daceml_train.driver.module import state_of

Form = tuple[str, Any, bool]
"""A name, a sample, and whether it is `h + op(h)`."""
TOGETHER = 6
"""Samples that are one module, which saves most of the time."""
CALLS = 3
"""Of which the last one is compared, and runs without Python."""


def outcomes(op: Any, samples: Iterator[Any], count: int, cache: str, gradients: bool = True) -> Iterator[Outcome]:
    """The first samples of one entry; the first also as `h + op(h)` where shapes allow, and with one gradient alone."""
    forms = [(str(number), sample, False) for number, sample in enumerate(islice(samples, count))]
    if forms and fits(op, forms[0][1]):
        forms.insert(1, ("0+", forms[0][1], True))
    if forms and gradients:
        forms += [(f"0 of {position}", sample, False) for position, sample in enumerate(one_gradient(forms[0][1]))]
    yield from compare(op, forms, cache, gradients)


def one_gradient(sample: Any) -> Iterator[Any]:
    """A sample in which several tensors have a gradient, with that of one of them alone."""
    counted = itertools.count()
    sample.transform(lambda t: next(counted) if isinstance(t, Tensor) and t.requires_grad else t)
    number = next(counted)
    for kept in range(number if number > 1 else 0):
        position = itertools.count()

        def alone(t: Any, kept: int = kept, position: Iterator[int] = position) -> Any:
            constant = isinstance(t, Tensor) and t.requires_grad and next(position) != kept
            return t.detach() if constant else t

        yield sample.transform(alone)


def compare(op: Any, forms: Sequence[Form], cache: str, gradients: bool) -> Iterator[Outcome]:
    """Samples, several as one module; each as a module of its own where together they are not all in graphs."""
    for start in range(0, len(forms), TOGETHER):
        group = list(forms[start : start + TOGETHER])
        comparable = [form for form in group if _comparable(op, form[1], gradients)]
        together = _tried(op, comparable, cache, gradients) if len(comparable) > 1 else []
        if together and all(o.kind in ("native", "ATen") for o in together):
            yield from (Outcome(name, together[0].kind, "", together[0].fallbacks) for name, _, _ in comparable)
            group = [form for form in group if form not in comparable]
        for form in group:
            yield from _tried(op, [form], cache, gradients)


def _comparable(op: Any, sample: Any, gradients: bool) -> bool:
    result = prepared(op, 0, sample, gradients)
    return not isinstance(result, Outcome)


def _tried(op: Any, forms: Sequence[Form], cache: str, gradients: bool) -> list[Outcome]:
    try:
        return [outcome(op, forms, cache, gradients)]
    except Exception as error:
        return [Outcome(forms[0][0], "raised", f"while comparing, {type(error).__name__}: {error}")]
    finally:
        torch._dynamo.reset()


def as_module(function: Callable[..., Any], forms: Sequence[tuple[Any, bool]]) -> tuple[type[nn.Module], list[Tensor]]:
    """A module class whose forward takes the tensors of samples and calls `function` as written out in each."""
    tensors: list[Tensor] = []
    names: dict[str, Any] = {"function": function}

    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            tensors.append(value)
            return f"x{len(tensors) - 1}"
        if type(value) is list:
            return f"[{', '.join(map(text, value))}]"
        if type(value) is tuple:
            return f"({''.join(text(v) + ', ' for v in value)})"
        names[f"c{len(names)}"] = value
        return f"c{len(names) - 1}"

    calls: list[str] = []
    for sample, residual in forms:
        first = f"x{len(tensors)} + " if residual else ""
        given = [text(a) for a in (sample.input, *sample.args)] + [f"{k}={text(v)}" for k, v in sample.kwargs.items()]
        calls.append(f"{first}function({', '.join(given)})")
    taken = "".join(f", x{i}" for i in range(len(tensors)))
    exec(f"def forward(self{taken}):\n    return ({', '.join(calls)},)\n", names)
    return type("Sample", (nn.Module,), {"forward": names["forward"]}), tensors


def outcome(op: Any, forms: Sequence[Form], cache: str, gradients: bool) -> Outcome:
    """Compare samples as one module; the outcome is that of all."""
    name = forms[0][0]
    result, tensors = as_module(op.op, [form[1:] for form in forms])
    processes = [sample.output_process_fn_grad for _, sample, _ in forms]
    try:
        plain, through, _, _ = eager(_then(result(), processes), tensors, None)
        cotangents = seeds(through) if gradients else None
        expected = eager(_then(result(), processes), tensors, cotangents)[0]
    except Exception as error:
        return Outcome(name, "left out", f"eager execution raises {type(error).__name__}")
    if difference(plain, dataclasses.replace(expected, gradients=[]), None):
        return Outcome(name, "left out", "draws random numbers")
    compiled = dt.optimize(result(), cache=cache, jobs=1)
    try:
        for _ in range(CALLS):
            ours = eager(_then(compiled, processes), tensors, cotangents)[0]
    except Exception as error:
        return Outcome(name, "raised", f"{type(error).__name__}: {error}")
    state = state_of(compiled)
    assert state is not None
    fallbacks = tuple(dict.fromkeys(name for record in state.backend.records for name, _ in record.fallbacks))
    if message := difference(ours, expected, None):
        message = difference(ours, expected, _exact(op, forms, cotangents))
    if message:
        return Outcome(name, "wrong", message, fallbacks)
    breaks = state.backend.breaks
    internal = [reason for reason in breaks if reason.startswith("internal error")]
    if breaks:
        return Outcome(name, "raised" if internal else "as PyTorch", (internal or breaks)[0])
    if not state.backend.graphs:
        return Outcome(name, "as PyTorch", "Dynamo found nothing to compile")
    return Outcome(name, "ATen" if fallbacks else "native", "", fallbacks)


def _then(module: nn.Module, processes: Sequence[Callable[[Any], Any]]) -> Callable[..., Any]:
    return lambda *tensors: [process(y) for process, y in zip(processes, module(*tensors), strict=True)]


def _exact(op: Any, forms: Sequence[Form], cotangents: Sequence[Tensor] | None) -> Results | None:
    wide = [(sample.transform(doubled), residual) for _, sample, residual in forms]
    try:
        result, tensors = as_module(op.op, wide)
        given = None if cotangents is None else [doubled(c) for c in cotangents]
        return eager(_then(result(), [s.output_process_fn_grad for s, _ in wide]), tensors, given)[0]
    except Exception:
        return None


def fits(op: Any, sample: Any) -> bool:
    """Whether `h + op(h)` has the shape of `h`."""
    h = sample.input
    if not isinstance(h, Tensor) or not h.is_floating_point():
        return False
    try:
        result = op.op(h.detach().clone(), *sample.args, **sample.kwargs)
    except Exception:
        return False
    return isinstance(result, Tensor) and result.shape == h.shape and result.dtype is h.dtype
