"""When results are equal: as close to a float64 run as float32, or ten times eager's own error, allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RELATIVE, ABSOLUTE, FACTOR = 1e-4, 1e-5, 10.0


@dataclass
class Results:
    """Values, gradients of the inputs that require them, and inputs after the call, which may have been written."""

    values: list[Tensor]
    gradients: list[Tensor | None]
    inputs: list[Tensor]
    differentiable: list[bool]


def difference(ours: Results, eager: Results, exact: Results | None) -> str:
    """What differs, or an empty text."""
    if ours.differentiable != eager.differentiable:
        return f"requires_grad is {ours.differentiable} instead of {eager.differentiable}"
    for what in ("values", "gradients", "inputs"):
        found, expected = getattr(ours, what), getattr(eager, what)
        reference = getattr(exact, what) if exact is not None else [None] * len(expected)
        if len(found) != len(expected):
            return f"{len(found)} {what} instead of {len(expected)}"
        if len(reference) != len(expected):
            reference = [None] * len(expected)
        for i, (a, b, c) in enumerate(zip(found, expected, reference, strict=True)):
            if message := _differs(a, b, c):
                return f"{what}[{i}]: {message}"
    return ""


def _differs(ours: Tensor | None, eager: Tensor | None, exact: Tensor | None) -> str:
    if eager is None or ours is None:  # weight decay acts on a gradient of zeros, and not without a gradient
        return "" if eager is ours else f"there is one only {'in eager' if ours is None else 'in ours'}"
    if (ours.dtype, ours.shape) != (eager.dtype, eager.shape):
        return f"{ours.dtype}{list(ours.shape)} instead of {eager.dtype}{list(eager.shape)}"
    if eager.layout is not torch.strided or not eager.numel():
        return ""
    if not (eager.is_floating_point() or eager.is_complex()):
        off = ours != eager
        if exact is not None and (exact.shape, exact.dtype) == (eager.shape, eager.dtype):
            off &= ours != exact  # a choice between numbers that differ in double precision only
        return f"{int(off.sum())} of {eager.numel()} elements" if bool(off.any()) else ""
    if eager.is_complex():
        ours, eager = torch.view_as_real(ours.resolve_conj()), torch.view_as_real(eager.resolve_conj())
        exact = torch.view_as_real(exact.resolve_conj()) if exact is not None and exact.is_complex() else None
    if exact is not None and (exact.shape != eager.shape or not exact.is_floating_point()):
        exact = None
    ours, eager = ours.double(), eager.double()
    exact = eager if exact is None else exact.double()
    settled = eager.isfinite() & exact.isfinite()
    odd = ~eager.isfinite() & ~exact.isfinite()
    same = torch.where(eager.isnan(), ours.isnan(), ours == eager)
    if not bool((same | ~odd).all()):
        return f"{int((~same & odd).sum())} of {eager.numel()} elements should not be finite, or otherwise so"
    a, b, c = ours[settled], eager[settled], exact[settled]
    if not a.numel():
        return ""
    allowed = RELATIVE * c.abs() + ABSOLUTE * c.abs().median().clamp(min=1.0) + FACTOR * (b - c).abs().max()
    error = (a - c).abs()
    bad = ~(error <= allowed)
    if not bool(bad.any()):
        return ""
    at = int(torch.where(bad, error.nan_to_num(torch.inf), -1.0).argmax())
    return f"{int(bad.sum())} of {eager.numel()} elements, such as {a[at]:.6g} instead of {c[at]:.6g}"
