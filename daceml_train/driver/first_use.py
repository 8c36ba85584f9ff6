"""The first use of a step that was compiled in the background: PyTorch takes the same step, and its result stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daceml_train.driver.bound_step import BoundStep
from daceml_train.driver.interrupts import raise_from_handler
from daceml_train.errors import why

LOSS, UPDATE = 1e-3, 0.25
"""How far loss and update may be apart, relative to PyTorch's.

The update is compared over all tensors of a type at once: a gradient that is zero but for rounding, such as that of a
bias before a normalization, becomes a step of full size in Adam, in a direction of its own.
"""

LOOSE = 20
"""How many times as far they may be apart in 16 bits."""


@dataclass(frozen=True)
class FirstUse:
    """What PyTorch returned, and why the compiled step must not be used; empty if it may."""

    loss: torch.Tensor
    refusal: str
    compared: str
    """What was compared, for the report."""


def first_use(bound: BoundStep, flat: Sequence[Any], eager: Callable[[], torch.Tensor], half: bool) -> FirstUse:
    """Take one step twice, compiled and by `eager`, from the same state and random numbers; the latter's stays."""
    tensors = bound.mutable
    random = torch.get_rng_state()
    before = [tensor.detach().clone() for tensor in tensors]
    ours: torch.Tensor | None = None
    failure: Exception | None
    refusal, after, failure = "", before, None
    try:
        ours = bound.run(flat, False)
        ours = None if ours is None else ours.clone()
        after = [tensor.detach().clone() for tensor in tensors]
    except Exception as error:  # PyTorch's step raises what is wrong with the data
        failure = error
        refusal = f"the compiled step failed: {why(error)}"
    with torch.no_grad():
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
    torch.set_rng_state(random)
    if failure is not None:
        raise_from_handler(failure)
    loss = eager()
    if refusal or ours is None:
        return FirstUse(loss, refusal, refusal or f"not compared: {bound.why}")
    if bound.seed is not None:
        return FirstUse(loss, "", "not compared with PyTorch's step, which draws other random numbers")
    tolerance = LOOSE if half else 1
    apart = _apart(ours, loss)
    updates = [_update_apart(dtype, tensors, before, after) for dtype in {t.dtype for t in tensors}]
    update = max(updates, default=0.0)
    if not apart <= LOSS * tolerance:  # NaN is far apart
        refusal = f"its loss was {float(ours):.6g}, PyTorch's {float(loss):.6g}"
    elif not update <= min(UPDATE * tolerance, 0.6):
        refusal = f"its update was {update:.2g} of PyTorch's away from it"
    return FirstUse(loss, refusal, f"loss {apart:.1e}, update {update:.1e} apart from PyTorch's")


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    one, other = float(ours), float(theirs)
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) / max(abs(other), 1e-2)


def _update_apart(
    dtype: torch.dtype, now: Sequence[torch.Tensor], before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
) -> float:
    """The distance of two updates of all tensors of a type, as a share of the one that stands; NaN if one is not
    finite where the other is.
    """
    distance = length = rounding = 0.0
    for tensor, old, ours in zip(now, before, after, strict=True):
        if tensor.dtype is not dtype:
            continue
        theirs = tensor.detach()
        if not dtype.is_floating_point:
            distance += float((theirs != ours).sum())
            continue
        if not torch.equal(theirs.isfinite(), ours.isfinite()):
            return math.nan
        distance += float((theirs - ours).double().nan_to_num(0, 0, 0).square().sum())
        length += float((theirs - old).double().nan_to_num(0, 0, 0).square().sum())
        rounding += float(theirs.double().nan_to_num(0, 0, 0).square().sum()) * torch.finfo(dtype).eps ** 2
    if not dtype.is_floating_point:
        return math.inf if distance else 0.0
    distance = max(math.sqrt(distance) - 8 * math.sqrt(rounding), 0.0)
    return distance / math.sqrt(length) if length else (math.inf if distance else 0.0)


__all__ = ["FirstUse", "first_use"]
