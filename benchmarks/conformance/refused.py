"""Samples with element types that eager execution refuses: what it raises for, a graph must not compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.conformance.captured import Prepared, flattened, graph_of, outcome
from benchmarks.conformance.compare import Results
from benchmarks.conformance.outcome import Outcome
from daceml_train.analysis.interpret import interpret
from daceml_train.frontends.torch.capture.capture import capture

ALL_OF = (torch.int64, torch.bool)
FIRST_OF = (torch.float64, torch.int64)
RESULTS = 64
"""At most as many results has an entry."""


def outcomes(op: Any, given: Sequence[Any]) -> Iterator[Outcome]:
    """Samples of which all tensors of floating-point numbers are cast, or the first alone, or numbers are truth values.

    What eager execution computes is compared.
    """
    for number, (name, sample) in enumerate(pair for one in given for pair in variants(one)):
        found = outcome(op, number, sample, False)
        if found.detail.startswith("eager execution raises"):
            found = refused(op, number, sample)
        found.sample = f"{found.sample} {name}"
        yield found


def variants(sample: Any) -> Iterator[tuple[str, Any]]:
    """Names and samples."""
    for dtype in ALL_OF:
        yield f"of {dtype}", sample.transform(lambda v, dtype=dtype: v.to(dtype) if _is_float(v) else v)
    for dtype in FIRST_OF:
        if _is_float(sample.input):
            yield f"first of {dtype}", _with_input(sample, sample.input.to(dtype))
    if any(type(a) in (int, float) for a in sample.args):
        changed = tuple(True if type(a) in (int, float) else a for a in sample.args)
        yield "of truth values", type(sample)(sample.input, args=changed, kwargs=sample.kwargs)


def refused(op: Any, number: int, sample: Any) -> Outcome:
    """The outcome of a sample that eager execution refuses: computing it is wrong."""
    said = _said(op, sample)
    if not said:
        return Outcome(str(number), "left out", "eager execution raises after the call")
    _, tensors, flat = flattened(op, sample)
    prepared = Prepared(op, number, sample, tensors, flat, [False] * RESULTS, 0, Results([], [], [], []), None)
    try:
        captured = capture(graph_of([prepared]), tensors)
        arrays = {s.name: tensors[s.position].numpy() for s in captured.inputs if s.name and s.kind == "tensor"}
        results = interpret(captured.graph, arrays).outputs
    except Exception as error:
        return Outcome(str(number), "left out", f"eager execution raises, and so does this: {type(error).__name__}")
    described = ", ".join(f"{np.asarray(r).dtype}{np.asarray(r).shape}" for r in results)
    return Outcome(str(number), "wrong", f"computes {described}, where eager execution raises: {said}")


def _said(op: Any, sample: Any) -> str:
    try:
        op.op(sample.input, *sample.args, **sample.kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _with_input(sample: Any, value: Tensor) -> Any:
    return type(sample)(value, args=sample.args, kwargs=sample.kwargs)
