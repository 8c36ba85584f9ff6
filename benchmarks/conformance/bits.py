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
class Distance:
    """The worst of a comparison: what is of another kind (or more than `ulps` away), and how often only a sign is."""

    ulps: int = 0
    signs: int = 0
    wrong: str = ""


def distance(ours: Results, alternatives: Sequence[Results], allowed: int) -> Distance:
    """Compare with eager execution, whose results may depend on the memory layout: any of them is correct.

    A gradient that does not exist is zero.
    """
    ulps, signs = 0, 0
    first = alternatives[0]
    for what in ("values", "gradients"):
        found = getattr(ours, what)
        if len(found) != len(getattr(first, what)):
            return Distance(wrong=f"{len(found)} {what} instead of {len(getattr(first, what))}")
        for i, a in enumerate(found):
            others = [getattr(other, what)[i] for other in alternatives]
            made = _tensor(a, others, allowed)
            if made.wrong:
                return Distance(wrong=f"{what}[{i}]: {made.wrong}")
            ulps, signs = max(ulps, made.ulps), signs + made.signs
    return Distance(ulps, signs)


def _tensor(ours: Tensor | None, others: Sequence[Tensor | None], allowed: int) -> Distance:
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
        where = off.nonzero()[0].tolist() if bool(off.any()) else None
        return Distance(wrong=f"{int(off.sum())} of {off.numel()} elements, at {where} {ours[tuple(where)]} instead of "
                              f"{eager[0][tuple(where)]}" if where is not None else "")  # fmt: skip
    apart = torch.stack([_apart(ours, e) for e in eager]).amin(0)
    if allowed > 0:  # a function that underflows does so a little earlier or later
        tiny = torch.stack([(ours - e).abs() for e in eager]).nan_to_num(torch.inf).amin(0)
        apart = torch.where(tiny <= 64 * torch.finfo(ours.dtype).eps, 0, apart)
    if allowed < 0:  # relative to the largest number, as sums are
        finite = eager[0][eager[0].isfinite()]
        largest = finite.abs().max() if finite.numel() else torch.zeros((), dtype=ours.dtype)
        eps, size = torch.finfo(ours.dtype).eps, largest.clamp(min=1.0)
        apart_by = torch.stack([(ours - e).abs() for e in eager]).nan_to_num(torch.inf).amin(0)
        near = apart_by <= -allowed * eps * size
        apart = torch.where(near & ours.isfinite(), 0, apart)
        allowed = -allowed
    bad = apart > allowed
    if bool(bad.any()):
        at = tuple(torch.where(bad, apart, -1).reshape(-1).argmax().reshape(1).tolist())
        a, b = ours.reshape(-1)[at], eager[0].reshape(-1)[at]
        said = f"{a.item():.9g} instead of {b.item():.9g}"
        return Distance(wrong=f"{int(bad.sum())} of {bad.numel()} elements, at {at[0]} {said}")
    signs = torch.stack([(ours == 0) & (ours.signbit() != e.signbit()) for e in eager]).all(0)
    return Distance(int(apart.max()), int(signs.sum()))


_NEVER = 2**62


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """The count of numbers in between, plus one; far if only one is NaN, or only one is infinite."""
    words = _WORDS[a.dtype]
    lowest = torch.iinfo(words).min

    def ordered(x: Tensor) -> Tensor:
        bits = x.contiguous().view(words).to(torch.int64)
        return torch.where(bits < 0, lowest - bits, bits)

    far = torch.where(a == b, 0, (ordered(a).double() - ordered(b).double()).abs().clamp(max=2.0**61).to(torch.int64))
    return torch.where(a.isnan() & b.isnan(), 0, torch.where(a.isnan() | b.isnan(), _NEVER, far))
