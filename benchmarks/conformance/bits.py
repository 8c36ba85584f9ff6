"""How far results are from eager's in units in the last place, and where they are of another kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.conformance.compare import Results

_WORDS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
_WORDS[torch.float16] = torch.int16


@dataclass(frozen=True)
class Limit:
    """What is allowed: units in the last place, or multiples of the type's epsilon times 1 or the largest element.

    `largest`: the multiples are of the largest finite element where it exceeds 1. `signs`: zeros have eager's signs.
    `nonfinite`: NaN and infinities may stand for one another. `gradients`: they are compared.
    """

    ulps: int = 0
    epsilons: int = 0
    largest: bool = False
    signs: bool = True
    nonfinite: bool = False
    gradients: bool = True


@dataclass(frozen=True)
class Distance:
    """The worst of a comparison: units in the last place, epsilons where those are more than a few, signs of zeros."""

    ulps: int = 0
    epsilons: float = 0.0
    signs: int = 0
    wrong: str = ""


def distance(ours: Results, alternatives: Sequence[Results], limit: Limit) -> Distance:
    """Compare with eager execution, whose results may depend on the memory layout: any of them is correct.

    A gradient that does not exist is zero.
    """
    worst = Distance()
    first = alternatives[0]
    for what in ("values", "gradients") if limit.gradients else ("values",):
        found = getattr(ours, what)
        if len(found) != len(getattr(first, what)):
            return Distance(wrong=f"{len(found)} {what} instead of {len(getattr(first, what))}")
        for i, a in enumerate(found):
            others = [getattr(other, what)[i] for other in alternatives]
            result = _tensor(a, others, limit)
            wrong = f"{what}[{i}]: {result.wrong}" if result.wrong and not worst.wrong else worst.wrong
            worst = Distance(
                max(worst.ulps, result.ulps), max(worst.epsilons, result.epsilons), worst.signs + result.signs, wrong
            )
    return worst


def _tensor(ours: Tensor | None, others: Sequence[Tensor | None], limit: Limit) -> Distance:
    if ours is None or others[0] is None:
        left = [t for t in (ours, *others) if t is not None]
        one = any(bool(t.count_nonzero()) for t in left)
        return Distance(wrong="one side has no gradient, the other one is not zero" if one else "")
    eager = [t for t in others if t is not None]
    if (ours.dtype, ours.shape) != (eager[0].dtype, eager[0].shape):
        return Distance(wrong=f"{ours.dtype}{list(ours.shape)} instead of {eager[0].dtype}{list(eager[0].shape)}")
    if not ours.numel() or ours.is_complex() or ours.layout is not torch.strided:
        return Distance()
    if not ours.is_floating_point():
        off = torch.stack([ours != e for e in eager]).all(0)
        return Distance(wrong=_said(ours, eager[0], off, off) if bool(off.any()) else "")
    apart = torch.stack([_apart(ours, e) for e in eager]).amin(0)
    unit = torch.finfo(ours.dtype).eps * (_largest(eager[0]) if limit.largest else 1.0)
    away = torch.stack([(ours.double() - e.double()).abs() / unit for e in eager]).nan_to_num(torch.inf).amin(0)
    if limit.nonfinite:
        apart = torch.where(~ours.isfinite() & torch.stack([~e.isfinite() for e in eager]).any(0), 0, apart)
    bad = (apart > limit.ulps) & ((apart >= _NEVER) | (away > limit.epsilons))
    signs = torch.stack([(ours == 0) & (ours.signbit() != e.signbit()) for e in eager]).all(0)
    signs &= apart == 0
    further = apart[(apart < _NEVER) & ~bad]
    epsilons = away[(apart > max(limit.ulps, FEW)) & ~bad]
    wrong = ""
    if bool(bad.any()):
        wrong = _said(ours, eager[0], bad, apart)
    elif limit.signs and bool(signs.any()):
        wrong = f"{_said(ours, eager[0], signs, signs)} (its sign)"
    most = int(further.max()) if further.numel() else 0
    return Distance(most, float(epsilons.max()) if epsilons.numel() else 0.0, int(signs.sum()), wrong)


FEW = 4
"""Units in the last place that need no other measure."""
_NEVER = 2**62


def _largest(eager: Tensor) -> float:
    finite = eager[eager.isfinite()].abs()
    return max(1.0, float(finite.max())) if finite.numel() else 1.0


def _said(ours: Tensor, eager: Tensor, bad: Tensor, by: Tensor) -> str:
    """How many elements are wrong, and the worst."""
    at = int(torch.where(bad, by.to(torch.int64), -1).reshape(-1).argmax())
    a, b = ours.reshape(-1)[at].item(), eager.reshape(-1)[at].item()
    shown = (f"{a:.9g}", f"{b:.9g}") if ours.is_floating_point() else (str(a), str(b))
    return f"{int(bad.sum())} of {bad.numel()} elements, at {at} {shown[0]} instead of {shown[1]}"


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """The count of numbers in between, plus one; far if only one is NaN, or only one is infinite."""
    words = _WORDS[a.dtype]
    lowest = torch.iinfo(words).min

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(words).to(torch.int64)
        return torch.where(bits < 0, lowest - bits, bits)

    first, second = ordered(a), ordered(b)
    about = (first.double() - second.double()).abs().clamp(max=2.0**61)
    far = torch.where(about < 2.0**60, (first - second).abs(), about.to(torch.int64))
    far = torch.where(a == b, 0, far)
    other = (a.isnan() != b.isnan()) | ((a.isinf() | b.isinf()) & (a != b))
    return torch.where(a.isnan() & b.isnan(), 0, torch.where(other, _NEVER, far))
