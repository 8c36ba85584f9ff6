"""Operations of a training step on gradients before the update: clipping and loss scaling, as operators.

They are equivalent to `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` over the optimizer's parameters, and to a
step through `torch.amp.GradScaler`: unscale, clip, update if all gradients are finite, adapt the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.operator import Value, make
from daceml_train.ops.reduction import wide_type
from daceml_train.tensor import DType
from daceml_train.training.distribution import Exchange

SCALER = ("_scale", "_growth_tracker")
"""The names of a `GradScaler`'s state, which belongs to a step but to no parameter."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


@dataclass(frozen=True)
class Clipping:
    """At most `norm` for the `kind`-norm of all gradients together, or at most `value` for each element's size."""

    norm: float | None = None
    kind: float = 2.0
    value: float | None = None
    given: bool = False
    """Whether a program reads the bound at each call: `norm` or `value` is then a placeholder."""

    def __post_init__(self) -> None:
        if self.norm is not None and self.value is not None:
            raise Invalid("clip_norm and clip_value exclude each other")
        for name, bound in (("clip_norm", self.norm), ("clip_value", self.value)):
            if bound is not None and not (_is_number(bound) and bound >= 0):
                raise Invalid(f"{name} is a number of at least 0, given {bound!r}")
        if not _is_number(self.kind):
            raise Invalid(f"norm_type is the order of a norm, a number, given {self.kind!r}")

    @property
    def bounds(self) -> dict[str, float]:
        """The bound, under the name that a program reads it by."""
        named = {"clip_norm": self.norm, "clip_value": self.value}
        return {name: float(bound) for name, bound in named.items() if bound is not None}

    def read_at_each_call(self) -> Clipping:
        """What a program is compiled for that reads a positive bound at each call; zero is part of the program."""
        if not any(self.bounds.values()):
            return self
        return replace(self, norm=self.norm and 1.0, value=self.value and 1.0, given=True)

    def apply(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Clip `.grad` in PyTorch; returns the norm before clipping if the norm is clipped."""
        if self.norm is not None:
            return torch.nn.utils.clip_grad_norm_(parameters, self.norm, self.kind)
        if self.value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self.value)
        return None


@dataclass(frozen=True)
class Scaling:
    """How a `GradScaler` adapts its scale."""

    growth: float
    backoff: float
    interval: int


@dataclass(frozen=True)
class GradientOptions:
    """The operations on the gradients of a step."""

    clipping: Clipping = Clipping()
    scaling: Scaling | None = None
    ranks: int = 1
    """The processes that train together: gradients are means over them before anything else happens to them."""
    shard: bool = False
    """Whether a pass gives each of them a shard of every parameter to update, with that shard of the state."""
    rows: tuple[tuple[str, int], ...] = ()
    """Inputs that are read as tables of embeddings alone, and how many of their rows any of the processes reads."""
    parameters: tuple[str, ...] = ()
    """The parameters of which each process has a part of the rows, by their inputs."""
    sync_batch_norm: bool = False
    """Whether batch norms have statistics of the batches of all processes together."""
    idle: bool = False
    """Whether this process has no data in the step."""


PLAIN = GradientOptions()
"""Nothing."""


def scaling_of(scaler: torch.amp.GradScaler | None) -> Scaling | None:
    """The current scaling of a scaler; None for no scaler or a disabled one."""
    if scaler is None or not scaler.is_enabled():
        return None
    return Scaling(scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())


def scaler_state(scaler: torch.amp.GradScaler, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a scaler's state, created as its first use creates them."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    return {name: getattr(scaler, name) for name in SCALER}


def clip(
    clipping: Clipping,
    gradients: Sequence[Value],
    given: Value | None = None,
    sharded: Exchange | None = None,
    whole: AbstractSet[str] = frozenset(),
) -> tuple[list[Value], Value | None]:
    """The clipped gradients, and the norm of all of them before clipping if the norm is clipped.

    `given` is the bound, a 0-d float64 value, where the program reads it at each call. `sharded` says that the
    gradients but for those that are named in `whole` are this rank's shards, and combines scalars of all ranks.
    """
    if clipping.value is not None:
        return [_bounded(g, float(clipping.value) if given is None else given) for g in gradients], None
    if clipping.norm is None or not gradients:
        return list(gradients), None
    total = _total_norm(gradients, clipping.kind, sharded, whole)
    if given is None:
        factor = total.constant(float(clipping.norm)) / (total + 1e-6)
    else:
        wide = wide_type(total.dtype)  # the bound enters arithmetic unrounded, as a constant does
        factor = (given.cast(wide) / (total + 1e-6).cast(wide)).cast(total.dtype)
    factor = factor._binary("minimum", 1.0)
    return [g * factor.cast(g.dtype) for g in gradients], total


def _total_norm(gradients: Sequence[Value], kind: float, sharded: Exchange | None, whole: AbstractSet[str]) -> Value:
    """The norm of all gradients together, of which a rank may have shards: zeros beyond their ends change nothing."""
    if sharded is None:
        return _norm(_together([_norm(g, kind) for g in gradients]), kind)
    shards = [g for g in gradients if g.name not in whole]
    norms = [_norm_of_shards(shards, kind, sharded)] if shards else []
    if len(shards) < len(gradients):
        norms.append(_norm(_together([_norm(g, kind) for g in gradients if g.name in whole]), kind))
    together = _together(norms)
    return together.sum((0,)) if kind == 0.0 and len(norms) > 1 else _norm(together, kind) if norms[1:] else norms[0]


def _norm_of_shards(gradients: Sequence[Value], kind: float, sharded: Exchange) -> Value:
    own = _norm(_together([_norm(g, kind) for g in gradients]), kind)
    if math.isinf(kind):
        if kind < 0:
            raise Unsupported("the smallest gradient as a norm, of gradients in padded shards")
        return sharded.extreme(own, "max")
    if kind == 0.0:  # how many parameters have a gradient that is not zero, of which each rank sees a part
        flags = _together([_norm(g, kind) for g in gradients]).compare("ne", 0.0)
        return _norm(sharded.sum_all(flags.cast(own.dtype)), kind)
    wide = own.cast(wide_type(own.dtype))
    return _power(sharded.sum(_power(wide, kind)), 1 / kind).cast(own.dtype)


def _power(x: Value, exponent: float) -> Value:
    match exponent:
        case 1.0:
            return x
        case 2.0:
            return x * x
        case 0.5:
            return x.unary("sqrt")
    return x._binary("pow", exponent)


def _bounded(g: Value, bound: float | Value) -> Value:
    if isinstance(bound, float):
        return g._binary("maximum", -bound)._binary("minimum", bound)
    wide = wide_type(g.dtype)
    above = bound.cast(wide)
    return g.cast(wide)._binary("maximum", above.unary("neg"))._binary("minimum", above).cast(g.dtype)


def _norm(x: Value, kind: float) -> Value:
    """The `kind`-norm of all elements, as in `torch.linalg.vector_norm`."""
    dims = tuple(range(len(x.shape)))
    wide, kind = x.cast(wide_type(x.dtype)), float(kind)
    match kind:
        case 2.0:
            found = (wide * wide).sum(dims).unary("sqrt")
        case 1.0:
            found = wide.unary("abs").sum(dims)
        case 0.0:
            found = wide.compare("ne", 0.0).cast(wide.dtype).sum(dims)
        case _ if math.isinf(kind):
            found = wide.unary("abs").reduce("max" if kind > 0 else "min", dims)
        case _:
            powers = wide.unary("abs")._binary("pow", kind).sum(dims)
            found = powers._binary("pow", 1 / kind)
    return found.cast(x.dtype)


def _together(scalars: Sequence[Value]) -> Value:
    """0-d values as one array, in the widest of their element types."""
    widest = max((s.dtype for s in scalars), key=lambda dtype: dtype.bytes)
    if len({s.dtype for s in scalars if s.dtype.bytes == widest.bytes}) > 1:
        widest = DType.float32  # common type of bfloat16 and float16
    if len(scalars) == 1:
        return scalars[0].cast(widest)
    first, *others = (s.cast(widest).view((1,)) for s in scalars)
    return first.apply(make("concat", dim=0), *others)


def unscale(gradients: Sequence[Value], scale: Value, sharded: Exchange | None = None) -> tuple[list[Value], Value]:
    """The gradients divided by the scale, and whether any of them was not finite, on any rank if these are shards."""
    inverse = (1.0 / scale.cast(DType.float64)).cast(DType.float32)
    results, found = [], []
    for g in gradients:
        if g.dtype is DType.float16:
            raise Unsupported("a GradScaler unscales no float16 gradients", advice="keep parameters in float32")
        wide = wide_type(g.dtype)
        results.append((g.cast(wide) * inverse.cast(wide)).cast(g.dtype))
        finite = g.unary("abs").compare("lt", math.inf)  # false for NaN
        bad = finite.unary("logical_not").cast(DType.float32)
        found.append(bad.reduce("max", tuple(range(len(g.shape)))))
    together = _together(found)
    worst = together.reduce("max", tuple(range(len(together.shape))))
    return results, (worst if sharded is None else sharded.sum(worst)).compare("gt", 0.0)


def next_scale(scaling: Scaling, scale: Value, tracker: Value, found: Value) -> tuple[Value, Value]:
    """Scale and growth tracker after a step in which `found` says whether a gradient was not finite."""
    exact = scale.cast(DType.float64)
    smaller, larger = (exact * scaling.backoff).cast(scale.dtype), (exact * scaling.growth).cast(scale.dtype)
    count = tracker + 1
    due = count.compare("eq", scaling.interval)
    grown = larger.compare("lt", math.inf).where(larger, scale)
    following = found.where(smaller, due.where(grown, scale))
    reset = found._binary("logical_or", due)
    return following, reset.where(tracker.constant(0), count)
