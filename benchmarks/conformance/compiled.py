"""A sample as the forward method of a module, compiled by `optimize`, against eager execution; also as `h + op(h)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

import daceml_train as dt
from benchmarks.conformance.captured import eager, seeds
from benchmarks.conformance.compare import Results, difference
from benchmarks.conformance.outcome import Outcome
from benchmarks.conformance.samples import doubled
from daceml_train.driver.module import state_of


def outcomes(op: Any, samples: Iterator[Any], count: int, cache: str, gradients: bool = True) -> Iterator[Outcome]:
    """The outcomes of the first samples of one entry; of the first also as `h + op(h)`, where shapes allow."""
    for number, sample in enumerate(islice(samples, count)):
        for residual in (False, True) if number == 0 and fits(op, sample) else (False,):
            name = f"{number}{'+' * residual}"
            try:
                yield outcome(op, name, sample, residual, cache, gradients)
            except Exception as error:
                yield Outcome(name, "raised", f"while comparing, {type(error).__name__}: {error}")
            finally:
                torch._dynamo.reset()


def as_module(function: Callable[..., Any], sample: Any, residual: bool) -> tuple[type[nn.Module], list[Tensor]]:
    """A module class whose forward takes the sample's tensors and calls `function` as written out in the sample."""
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

    given = [text(a) for a in (sample.input, *sample.args)] + [f"{k}={text(v)}" for k, v in sample.kwargs.items()]
    call = f"function({', '.join(given)})"
    taken = "".join(f", x{i}" for i in range(len(tensors)))
    exec(f"def forward(self{taken}):\n    return {'x0 + ' if residual else ''}{call}\n", names)
    return type("Sample", (nn.Module,), {"forward": names["forward"]}), tensors


def outcome(op: Any, name: str, sample: Any, residual: bool, cache: str, gradients: bool) -> Outcome:
    """Compare one sample in one form."""
    made, tensors = as_module(op.op, sample, residual)
    process = sample.output_process_fn_grad
    try:
        plain, through, _ = eager(_then(made(), process), tensors, None)
        cotangents = seeds(through) if gradients else None
        expected = eager(_then(made(), process), tensors, cotangents)[0]
    except Exception as error:
        return Outcome(name, "left out", f"eager execution raises {type(error).__name__}")
    if difference(plain, dataclasses.replace(expected, gradients=[]), None):
        return Outcome(name, "left out", "draws random numbers")
    compiled = dt.optimize(made(), cache=cache, jobs=1)
    try:
        ours = eager(_then(compiled, process), tensors, cotangents)[0]
    except Exception as error:
        return Outcome(name, "raised", f"{type(error).__name__}: {error}")
    state = state_of(compiled)
    assert state is not None
    fallbacks = tuple(dict.fromkeys(name for record in state.backend.records for name, _ in record.fallbacks))
    if said := difference(ours, expected, None):
        said = difference(ours, expected, _exact(op, sample, residual, cotangents))
    if said:
        return Outcome(name, "wrong", said, fallbacks)
    breaks = state.backend.breaks
    internal = [reason for reason in breaks if reason.startswith("internal error")]
    if breaks:
        return Outcome(name, "raised" if internal else "as PyTorch", (internal or breaks)[0])
    if not state.backend.graphs:
        return Outcome(name, "as PyTorch", "Dynamo found nothing to compile")
    return Outcome(name, "ATen" if fallbacks else "native", "", fallbacks)


def _then(module: nn.Module, process: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *tensors: process(module(*tensors))


def _exact(op: Any, sample: Any, residual: bool, cotangents: Sequence[Tensor] | None) -> Results | None:
    wide = sample.transform(doubled)
    try:
        made, tensors = as_module(op.op, wide, residual)
        given = None if cotangents is None else [doubled(c) for c in cotangents]
        return eager(_then(made(), wide.output_process_fn_grad), tensors, given)[0]
    except Exception:
        return None


def fits(op: Any, sample: Any) -> bool:
    """Whether `h + op(h)` has the shape of `h`."""
    h = sample.input
    if not isinstance(h, Tensor) or not h.is_floating_point():
        return False
    try:
        made = op.op(h.detach().clone(), *sample.args, **sample.kwargs)
    except Exception:
        return False
    return isinstance(made, Tensor) and made.shape == h.shape and made.dtype is h.dtype
