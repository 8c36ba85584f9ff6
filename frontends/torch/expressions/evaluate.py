"""Evaluate: a program through PyTorch calls, at once: the schedule to start with, and the oracle of generated code.

An affine read is a strided view with one dimension per axis (of a padded copy if it may leave its array), so a sum of
products is one einsum: windows, strides, dilations, and permutations become matmuls without a name for any of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from daceml_train.errors import OutOfRange
from daceml_train.expressions.affine import Map, affine, interval
from daceml_train.expressions.prepared import prepared
from daceml_train.expressions.program import Program, Stage
from daceml_train.expressions.term import Array, Axis, Term, constant
from daceml_train.frontends.torch import types
from daceml_train.ops.elementwise import TABLE

_MOST_STEPS = 512
"""Steps of a loop over reduced axes for products that are no matmuls."""

_CALLS: dict[str, Callable[..., Any]] = {
    "silu": F.silu,
    "relu": F.relu,
    "softplus": F.softplus,
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "elu": F.elu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamp": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
    "sinh": torch.sinh,
    "cosh": torch.cosh,
}
_NAMES = """
add sub mul div pow remainder maximum minimum where neg abs sign square reciprocal sqrt rsqrt exp expm1 log log1p
sin cos tan atan asin acos asinh acosh atanh atan2 exp2 log2 log10 hypot copysign tanh sigmoid erf logaddexp floor
ceil round trunc floor_divide eq ne lt le gt ge isnan isinf bitwise_and bitwise_or bitwise_xor bitwise_not logical_and
logical_or logical_not fmod
"""
_DIRECT = frozenset(_NAMES.split())
"""Operators that PyTorch has under the same name."""


def native(kind: str) -> bool:
    """Whether PyTorch has a row of the table of elementwise operators itself, with its derivative."""
    return kind in _DIRECT or kind in _CALLS


def call(kind: str) -> Callable[..., Any]:
    """The function of PyTorch for a row of the table of elementwise operators."""
    if kind in _CALLS:
        return _CALLS[kind]
    if kind in _DIRECT:
        return getattr(torch, kind)  # type: ignore[no-any-return]
    code = compile(TABLE[kind].expression, kind, "eval")
    scope = {name: call(other) for name, other in FORMULA.items()}

    def composed(*operands: Any) -> Any:
        return eval(code, {**scope, "__builtins__": {}}, dict(zip("abc", operands, strict=False)))

    return composed


def _between(name: str) -> Callable[..., Any]:
    """`maximum` and `minimum` of tensors and numbers, as formulas have them."""
    function = getattr(torch, name)
    return lambda *v: function(*(x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in v))


FORMULA = {kind: kind for kind in _DIRECT}
"""What the formulas of that table call -> the row, or the entry of `_CALLS`, that computes it."""
FORMULA |= {"bit_and": "bitwise_and", "bit_or": "bitwise_or", "bit_xor": "bitwise_xor"}
_CALLS |= {"max": _between("maximum"), "min": _between("minimum")}
FORMULA |= {"max": "max", "min": "min", "softplus": "softplus"}


class _Run:
    """One evaluation."""

    def __init__(self, program: Program, given: Sequence[torch.Tensor]) -> None:
        self.program = prepared(program)
        self.arrays: dict[Array, torch.Tensor] = dict(zip(program.inputs, given, strict=True))
        self.device = given[0].device if given else torch.device("cpu")

    def results(self) -> list[torch.Tensor]:
        for stage in self.program.stages:
            self.stage(stage)
        return [self.arrays[o] if o in self.arrays else self.zeros(o) for o in self.program.outputs]

    def zeros(self, array: Array) -> torch.Tensor:
        return torch.zeros(array.shape, dtype=types.TORCH_DTYPES[array.dtype], device=self.device)

    # ---- stages -----------------------------------------------------------------------------------------------------
    def stage(self, stage: Stage) -> None:
        result = self.contraction(stage)
        if result is None:
            result = self.reduced(stage)
        target, dtype = stage.target, types.TORCH_DTYPES[stage.target.dtype]
        if stage.plain:
            result = result.to(dtype).contiguous()
            alias = stage.kind == "point" and stage.body.op in ("load", "cast")  # a copy must not be the array itself
            self.arrays[target] = result.clone() if alias else result
            return
        if target not in self.arrays:
            self.arrays[target] = self.zeros(target)
        out = self.arrays[target]
        if stage.scatters:
            self.scatter(stage, out, result.to(dtype))
            return
        maps = [affine(i) or {} for i in stage.store]
        strides = [sum(m.get(a, 0) * s for m, s in zip(maps, out.stride(), strict=True)) for a in stage.axes]
        offset = sum(m.get(None, 0) * s for m, s in zip(maps, out.stride(), strict=True))
        torch.as_strided(out, [a.size for a in stage.axes], strides, offset).add_(result)

    def scatter(self, stage: Stage, out: torch.Tensor, values: torch.Tensor) -> None:
        sizes = [a.size for a in stage.axes]
        if 0 in (*sizes, *out.shape):
            return
        index = [self.value(i, stage.axes, {}) for i in stage.store]
        place, inside = _place(stage.store, index, out)
        if inside is not None:
            values = torch.where(inside, values, torch.zeros((), dtype=values.dtype, device=values.device))
        out.view(-1).index_add_(0, place.expand(sizes).reshape(-1), values.expand(sizes).reshape(-1))

    def reduced(self, stage: Stage) -> torch.Tensor:
        domain = (*stage.axes, *stage.reduced)
        body = self.value(stage.body, domain, {}).expand([a.size for a in domain])
        dims = list(range(len(stage.axes), len(domain)))
        match stage.kind:
            case "sum":
                return body.sum(dims)
            case "amax" | "amin":
                flat = body.flatten(len(stage.axes))
                return (flat.max(-1) if stage.kind == "amax" else flat.min(-1)).values
            case "lse":
                return torch.logsumexp(body, dims)
            case "prod":
                return body.flatten(len(stage.axes)).prod(-1)
            case "argmax" | "argmin":
                flat = body.flatten(len(stage.axes))
                return (flat.max(-1) if stage.kind == "argmax" else flat.min(-1)).indices
        return body

    # ---- sums of products -------------------------------------------------------------------------------------------
    def contraction(self, stage: Stage) -> torch.Tensor | None:
        """The stage as an einsum of strided views, or as a loop over the reduced axes; None if it is neither."""
        parts = _factors(stage.body)
        if stage.kind != "sum" or not stage.target.dtype.is_float or any(p.op not in ("load", "number") for p in parts):
            return None
        scale = math.prod(p.value for p in parts if p.op == "number")
        loads = [p for p in parts if p.op == "load" and p.dtype is stage.target.dtype]
        views = [self.view(p) for p in loads]
        if len(loads) != len([p for p in parts if p.op == "load"]) or len(views) < 2 or None in views:
            return None
        found = [v for v in views if v is not None]
        have = dict.fromkeys(a for _, axes in found for a in axes)
        scale *= math.prod(a.size for a in stage.reduced if a not in have)
        result = self.looped(stage, found) if _no_matmul(stage, found) else _einsum(stage, found)
        result = result.reshape([a.size if a in have else 1 for a in stage.axes]).expand([a.size for a in stage.axes])
        return result if scale == 1 else result * scale

    def looped(self, stage: Stage, views: Sequence[tuple[torch.Tensor, list[Axis]]]) -> torch.Tensor:
        """The sum of the products, one step of the reduced axes after the other: no matmul computes it."""
        have = {a for _, axes in views for a in axes}
        reduced = [a for a in stage.reduced if a in have]
        axes = [a for a in stage.axes if a in have]
        out = torch.zeros([a.size for a in axes], dtype=views[0][0].dtype, device=self.device)
        aligned = []
        for tensor, own in views:
            order = [own.index(a) for a in (*reduced, *axes) if a in own]
            tensor = tensor.permute(order)
            lead = len([a for a in reduced if a in own])
            shape = (*tensor.shape[:lead], *(a.size if a in own else 1 for a in axes))
            aligned.append(
                (tensor.reshape(shape) if tensor.dim() != len(shape) else tensor, [a in own for a in reduced])
            )
        for point in itertools.product(*(range(a.size) for a in reduced)):
            factors = [t[tuple(p for p, own in zip(point, owned, strict=True) if own)] for t, owned in aligned]
            first = factors[0] if len(factors) == 2 else math.prod(factors[:-1], start=torch.ones((), dtype=out.dtype))
            out.addcmul_(first, factors[-1])
        return out

    # ---- terms ------------------------------------------------------------------------------------------------------
    def value(self, term: Term, domain: Sequence[Axis], memo: dict[Term, torch.Tensor]) -> torch.Tensor:
        """A term over `domain`: one dimension per axis, of size 1 where it does not depend on the axis."""
        if term not in memo:
            memo[term] = self.computed(term, domain, memo)
        return memo[term]

    def computed(self, term: Term, domain: Sequence[Axis], memo: dict[Term, torch.Tensor]) -> torch.Tensor:
        match term.op:
            case "number":
                wide = torch.float64 if isinstance(term.value, float) else None  # exact: what reads it has a type
                return torch.tensor(term.value, dtype=wide, device=self.device).reshape((1,) * len(domain))
            case "axis":
                assert term.axis is not None
                index = torch.arange(term.axis.size, device=self.device)
                return index.view([-1 if a is term.axis else 1 for a in domain])
            case "load":
                return self.load(term, domain, memo)
            case "cast":
                assert term.dtype is not None
                return self.value(term.args[0], domain, memo).to(types.TORCH_DTYPES[term.dtype])
        dtype = next((a.dtype for a in term.args[::-1] if a.dtype is not None), None)
        given = [self.operand(a, dtype, domain, memo) for a in term.args]
        result = call(term.op)(*given)
        wanted = types.TORCH_DTYPES[term.dtype] if term.dtype is not None else result.dtype
        return result if result.dtype is wanted else result.to(wanted)  # type: ignore[no-any-return]

    def operand(self, term: Term, dtype: Any, domain: Sequence[Axis], memo: dict[Term, torch.Tensor]) -> torch.Tensor:
        """An operand; numbers have the type of the others."""
        if term.op == "number" and dtype is not None:
            return torch.full((1,) * len(domain), term.value, dtype=types.TORCH_DTYPES[dtype], device=self.device)
        return self.value(term, domain, memo)

    def load(self, term: Term, domain: Sequence[Axis], memo: dict[Term, torch.Tensor]) -> torch.Tensor:
        assert term.array is not None
        found = self.view(term)
        if found is not None:
            tensor, axes = found
            order = sorted(range(len(axes)), key=lambda j: domain.index(axes[j]))
            return tensor.permute(order).reshape([a.size if a in axes else 1 for a in domain])
        x = self.arrays[term.array]
        index = [self.value(i, domain, memo) for i in term.args]
        if x.numel() == 0 and term.fill is not None:
            return torch.full((1,) * len(domain), term.fill, dtype=x.dtype, device=x.device)
        if x.numel() == 0:
            return x[tuple(index)]  # which raises, unless nothing is read
        place, inside = _place(term.args, index, x)
        if inside is not None and term.fill is None and not bool(inside.all()):
            raise _out_of_range(term, index)
        taken = torch.take(x, place)
        if inside is None or term.fill is None:
            return taken
        return torch.where(inside, taken, torch.tensor(term.fill, dtype=x.dtype, device=x.device))

    def view(self, term: Term) -> tuple[torch.Tensor, list[Axis]] | None:
        """A read as a strided view and its axes; None where an index is not affine."""
        assert term.array is not None
        x = self.arrays[term.array]
        maps: list[Map] = []
        pads: list[tuple[int, int]] = []
        for dim, (index, n) in enumerate(zip(term.args, term.array.shape, strict=True)):
            around = _around(index, n)
            inner = index.args[0] if around else index
            found, bounds = affine(inner), interval(inner)
            if found is None or bounds is None:
                return None
            before, after = max(0, -bounds[0]), max(0, bounds[1] - n + 1)
            if around:  # what lies around is copied there, as padding is
                position = torch.arange(-before, n + after, device=x.device)
                position = position.clamp(0, n - 1) if index.op == "clamp" else position.remainder(n)
                x = x.index_select(dim, position)
            pads.append((0, 0) if around else (before, after))
            maps.append({**found, None: found.get(None, 0) + before})
        if any(p != (0, 0) for p in pads):
            x = F.pad(x, [v for p in reversed(pads) for v in p], value=term.fill or 0)
        axes = list(dict.fromkeys(a for m in maps for a in m if a is not None))
        return _strided(x, maps, axes), axes


def _place(
    terms: Sequence[Term], index: Sequence[torch.Tensor], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The position of each element in the row-major array `x`, as if it were inside, and whether it is; None where all
    are known to be.
    """
    place, inside, stride = torch.zeros((), dtype=torch.int64, device=x.device), None, 1
    for term, i, n in reversed(list(zip(terms, index, x.shape, strict=True))):
        bounds = interval(term)
        if bounds is None or bounds[0] < 0 or bounds[1] >= n:
            within = (i >= 0) & (i < n)
            inside = within if inside is None else inside & within
            i = i.to(torch.int64).clamp(0, n - 1)
        place = place + i.to(torch.int64) * stride
        stride *= n
    return place, inside


def _strided(x: torch.Tensor, maps: Sequence[Map], axes: Sequence[Axis]) -> torch.Tensor:
    strides = [sum(m.get(a, 0) * s for m, s in zip(maps, x.stride(), strict=True)) for a in axes]
    offset = sum(m.get(None, 0) * s for m, s in zip(maps, x.stride(), strict=True)) + x.storage_offset()
    offset += sum(s * (a.size - 1) for a, s in zip(axes, strides, strict=True) if s < 0)
    offset = offset if all(a.size for a in axes) else 0  # nothing is read
    view = torch.as_strided(x, [a.size for a in axes], [abs(s) for s in strides], offset)
    backwards = [j for j, s in enumerate(strides) if s < 0]  # PyTorch has no negative strides
    return view.flip(backwards) if backwards else view


def _around(index: Term, size: int) -> bool:
    """Whether an index is an affine one that `.clamp` or `.wrap` brings inside."""
    if index.op == "remainder":
        return constant(index.args[1]) == size and affine(index.args[0]) is not None
    bounds = tuple(map(constant, index.args[1:])) if index.op == "clamp" else None
    return bounds == (0, size - 1) and affine(index.args[0]) is not None


def _factors(term: Term) -> list[Term]:
    return [f for a in term.args for f in _factors(a)] if term.op == "mul" else [term]


def _no_matmul(stage: Stage, views: Sequence[tuple[torch.Tensor, list[Axis]]]) -> bool:
    """Whether einsum would compute products with one row or column: a pair of factors with no M or no N axis."""
    steps = math.prod(a.size for a in stage.reduced)
    if len(views) != 2 or steps > _MOST_STEPS:
        return False
    left, right = (set(axes) for _, axes in views)
    rows = math.prod(a.size for a in stage.axes if a in left and a not in right)
    columns = math.prod(a.size for a in stage.axes if a in right and a not in left)
    batch = math.prod(a.size for a in stage.axes if a in right and a in left)
    return min(rows, columns) < 2 and batch > 1


def _einsum(stage: Stage, views: Sequence[tuple[torch.Tensor, list[Axis]]]) -> torch.Tensor:
    order = {a: n for n, a in enumerate(dict.fromkeys((*stage.axes, *stage.reduced)))}
    operands: list[Any] = []
    for tensor, axes in views:
        operands += [tensor, [order[a] for a in axes]]
    have = {a for _, axes in views for a in axes}
    return torch.einsum(*operands, [order[a] for a in stage.axes if a in have])


def _out_of_range(term: Term, index: Sequence[torch.Tensor]) -> OutOfRange:
    assert term.array is not None
    ranges = [(int(i.min()), int(i.max())) for i in index]
    dim = next(d for d, (r, n) in enumerate(zip(ranges, term.array.shape, strict=True)) if r[0] < 0 or r[1] >= n)
    low, high = ranges[dim]
    name, _, line = term.line.partition(" at ")
    size = term.array.shape[dim]
    return OutOfRange(
        f"index {dim} of {name or term.array.name} runs over {low}..{high}, out of range for size {size}; "
        "say what lies outside: .outside(value), .clamp, or .wrap",
        0,
        where=line,
    )


def evaluate(program: Program, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a program on tensors, in its element types; none is an input or shares memory with one."""
    device = given[0].device.type if given else "cpu"
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _Run(program, given).results()
    return _Run(program, given).results()
