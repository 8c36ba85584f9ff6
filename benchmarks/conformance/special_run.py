"""The stages of the sweep over special values, and how one entry is run in each."""

from __future__ import annotations

import contextlib
import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.testing._internal.opinfo.core import SampleInput

import daceml_train as dt
from benchmarks.conformance import compiled
from benchmarks.conformance.bits import Limit, distance
from benchmarks.conformance.captured import Prepared, eager, flattened, graph_of, interpreted, seeds
from benchmarks.conformance.compare import Results
from benchmarks.conformance.outcome import general
from benchmarks.conformance.samples import label
from benchmarks.conformance.special import by_element, one_shape, special_samples, without
from benchmarks.conformance.special_limits import INTERPRETED, TRACED, limit
from benchmarks.provenance import commit
from daceml_train.driver.module import state_of
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.capture import capture

TOGETHER = {False: 16, True: 24}
"""Samples in one graph, interpreted and compiled: most of the time goes into each trace and each compilation."""
Notice = Callable[[int, bool], None]
"""Told the number of the sample that is run next, and whether eager execution runs it."""


@dataclass(frozen=True)
class Stage:
    """One way of running the samples."""

    name: str
    dtype: torch.dtype
    compiled: bool


_INTEGERS = (torch.int64, torch.int32, torch.uint8)
STAGES = (
    Stage("interpreted-float64", torch.float64, False),
    *(Stage(f"interpreted-{str(t)[6:]}", t, False) for t in (*_INTEGERS, torch.int16, torch.int8, torch.bool)),
    Stage("compiled-float32", torch.float32, True),
    Stage("compiled-float64", torch.float64, True),
    *(Stage(f"compiled-{str(t)[6:]}", t, True) for t in _INTEGERS),
)  # fmt: skip


@dataclass
class Found:
    """One entry in one stage: its samples, what is wrong, how far results are from eager's, and what is not ours."""

    stage: str
    entry: str
    samples: int = 0
    ulps: int = 0
    epsilons: float = 0.0
    signs: int = 0
    left_out: int = 0
    as_pytorch: int = 0
    aten: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Why samples are left out, and why PyTorch runs them."""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    commit: str = ""


@dataclass(frozen=True)
class Case:
    """A sample, and the results of eager execution in several memory layouts."""

    number: int
    sample: SampleInput
    expected: tuple[Results, ...]
    cotangents: list[Tensor]


def swept(
    stage: Stage,
    op: Any,
    cache: str,
    notice: Notice = lambda number, eager: None,
    skipped: Mapping[int, str] = MappingProxyType({}),
    together: int | None = None,
) -> Found:
    """All special samples of one entry, but those that are to be `skipped`, each for a reason."""
    found = Found(stage.name, label(op), commit=commit())
    start = time.perf_counter()
    cases, left = [], Counter[str]()
    reason = None if stage.compiled else INTERPRETED.get(label(op))
    for number, sample in enumerate(special_samples(op, stage.dtype, stage.dtype.is_floating_point)):
        notice(number, True)
        result = reason or skipped.get(number) or _case(op, number, sample, stage.dtype)
        if isinstance(result, str):
            left[result] += 1
        else:
            cases.append(result)
    found.samples, found.left_out, found.reasons = len(cases), left.total(), dict(left)
    run = _compiled if stage.compiled else _interpreted
    size = together or TOGETHER[stage.compiled]
    for first in range(0, len(cases), size):
        notice(cases[first].number, False)
        run(stage, op, cases[first : first + size], found, cache)
    found.seconds = round(time.perf_counter() - start, 2)
    return found


def _case(op: Any, number: int, sample: SampleInput, dtype: torch.dtype) -> Case | str:
    """Results of eager execution for the sample as it is, and with every other element of wider tensors.

    PyTorch's vectorized loops, and its loops over strides and remainders, differ at special values: either is right.
    Otherwise why the sample cannot be compared.
    """
    if without(op, sample, dtype):
        return "division of integers by 0 or -1, which may end the process"
    call, tensors, _ = flattened(op, sample)
    try:
        plain, through, _, _ = eager(call, tensors, None)
        cotangents = seeds(through)
        given = cotangents if through else None
        expected = eager(call, tensors, given)[0]
        others = []
        with contextlib.suppress(Exception):
            others.append(eager(_strided(call), tensors, given)[0])
        if by_element(op):
            with contextlib.suppress(Exception):
                others += [_first(r, expected) for r in [eager(_tiled(call), tensors, _wider(given))[0]]]
        if label(op) in TRACED:
            traced = copy.copy(op)
            traced.op = TRACED[label(op)][0]
            others.append(eager(flattened(traced, sample)[0], tensors, given)[0])
        again = eager(call, tensors, None)[0]
    except Exception as error:
        return f"eager execution raises {type(error).__name__}"
    if distance(again, [plain], Limit()).wrong:
        return "draws random numbers"
    return Case(number, sample, (expected, *others), cotangents)


def _strided(call: Any) -> Any:
    def spread(x: Tensor) -> Tensor:
        if not x.ndim or not x.numel() or x.layout is not torch.strided:
            return x
        return torch.stack([x, x], -1).select(-1, 0)

    return lambda *tensors: call(*map(spread, tensors))


_TIMES = 64


def _tiled(call: Any) -> Any:
    """The call on operands repeated along a new last dimension, so that PyTorch's loops have no remainder."""

    def spread(x: Tensor) -> Tensor:
        return x.unsqueeze(-1).expand(*x.shape, _TIMES).contiguous() if isinstance(x, Tensor) else x

    return lambda *tensors: call(*map(spread, tensors))


def _wider(cotangents: Sequence[Tensor] | None) -> list[Tensor] | None:
    """Cotangents of which only the first repetition counts, as the gradients of repeated operands are summed."""
    if cotangents is None:
        return None
    return [torch.cat([c.unsqueeze(-1), c.new_zeros(*c.shape, _TIMES - 1)], -1) for c in cotangents]


def _first(tiled: Results, like: Results) -> Results:
    values = [v[..., 0] for v in tiled.values]
    if any(v.shape != e.shape for v, e in zip(values, like.values, strict=True)):
        raise ValueError("the operator does not work by element")
    return Results(values, tiled.gradients, [], [])


def _judge(op: Any, stage: Stage, case: Case, ours: Results, found: Found) -> None:
    result = distance(ours, case.expected, limit(op, not by_element(op) or not one_shape(case.sample)))
    found.ulps, found.epsilons = max(found.ulps, result.ulps), max(found.epsilons, round(result.epsilons, 3))
    found.signs += result.signs
    if result.wrong:
        found.wrong.append(f"#{case.number} {_shown(case.sample)}: {result.wrong}")


def _as_pytorch(found: Found, reason: str) -> None:
    reason = f"as PyTorch: {general(reason)}"
    found.as_pytorch += 1
    found.reasons[reason] = found.reasons.get(reason, 0) + 1


def _raised(case: Case, error: Exception) -> str:
    return f"#{case.number} {_shown(case.sample)}: raised {type(error).__name__}: {error}"[:200]


def _shown(sample: SampleInput) -> str:
    given = [a for a in sample.args if not isinstance(a, Tensor)]
    named = {k: v for k, v in sample.kwargs.items() if not isinstance(v, Tensor)}
    return f"{given or ''}{named or ''}"[:100]


def _interpreted(stage: Stage, op: Any, cases: Sequence[Case], found: Found, cache: str) -> None:
    group = list(_prepared(op, cases))
    try:
        graph = capture(graph_of(group), [t for p in group for t in p.tensors])
        results = interpreted(graph, group)
    except Exception as error:
        if len(cases) > 1:
            for case in cases:
                _interpreted(stage, op, [case], found, cache)
        elif isinstance(error, Unsupported):
            _as_pytorch(found, str(error.message))
        else:
            found.wrong.append(_raised(cases[0], error))
        return
    for case, (ours, calls) in zip(cases, results, strict=True):
        found.aten += bool(calls)
        _judge(op, stage, case, ours, found)


def _prepared(op: Any, cases: Sequence[Case]) -> Iterator[Prepared]:
    for case in cases:
        call, tensors, flat = flattened(op, case.sample)
        _, through, views, leaves = eager(call, tensors, None)
        cotangents = case.cotangents if through else None
        yield Prepared(op, case.number, case.sample, tensors, flat, views, leaves, case.expected[0], cotangents)


def _compiled(stage: Stage, op: Any, cases: Sequence[Case], found: Found, cache: str) -> None:
    result, tensors = compiled.as_module(op.op, [(c.sample, False) for c in cases])
    module = dt.optimize(result(), cache=cache, jobs=1)
    processes = [c.sample.output_process_fn_grad for c in cases]
    cotangents = [t for c in cases for t in c.cotangents]
    try:
        ours = eager(compiled._then(module, processes), tensors, cotangents if cotangents else None)[0]
    except Exception as error:
        torch._dynamo.reset()
        if len(cases) > 1:
            for case in cases:
                _compiled(stage, op, [case], found, cache)
        else:
            found.wrong.append(_raised(cases[0], error))
        return
    torch._dynamo.reset()
    state = state_of(module)
    assert state is not None
    if state.backend.breaks and len(cases) > 1:
        for case in cases:
            _compiled(stage, op, [case], found, cache)
        return
    if state.backend.breaks:
        _as_pytorch(found, state.backend.breaks[0])
    found.wrong += [b for b in state.backend.breaks if b.startswith("internal error")]
    found.aten += len(cases) if any(record.fallbacks for record in state.backend.records) else 0
    for case, own in zip(cases, _parts(ours, cases), strict=True):
        _judge(op, stage, case, own, found)


def _parts(ours: Results, cases: Sequence[Case]) -> Iterator[Results]:
    """The results of a module of several samples, for each of them."""
    values, gradients = iter(ours.values), iter(ours.gradients)
    for case in cases:
        first = case.expected[0]
        wanted = sum(t.requires_grad for t in flattened_tensors(case.sample))
        own = [next(gradients, None) for _ in range(wanted)]
        yield Results([next(values) for _ in first.values], own if first.gradients else [], [], [])


def flattened_tensors(sample: SampleInput) -> list[Tensor]:
    """The tensors of a sample in their order."""
    return flattened(_NOTHING, sample)[1]


class _Nothing:
    op = staticmethod(lambda *args, **kwargs: None)


_NOTHING = _Nothing()
