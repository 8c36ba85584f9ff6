"""Lowering: from stages to operators of the graph.

An affine read is a `Read` of the array, padded where it may leave it; other reads index by arrays. A body is
elementwise operators over the axes of its stage, a reduction follows, and phases are interleaved to their target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from daceml_train.errors import Unsupported
from daceml_train.expressions.affine import Map, affine, interval, of_map
from daceml_train.expressions.contract import Factor, contracted
from daceml_train.expressions.lookups import Lookup, axes_of, lookup
from daceml_train.expressions.prepared import prepared
from daceml_train.expressions.program import Program, Stage
from daceml_train.expressions.term import Array, Axis, Term, constant, substituted
from daceml_train.expressions.unrolled import unrolled, window
from daceml_train.expressions.views import plain, turned
from daceml_train.ops.embedding import AddRows, Embedding, EmbeddingGrad
from daceml_train.ops.indexing import Gather, Index, Scatter, zeros
from daceml_train.ops.movement import Concat, Pad
from daceml_train.ops.operator import Builder, Value, make
from daceml_train.ops.reduction import wide
from daceml_train.tensor import DType

Place = tuple[int, int, int]
"""Where a dimension of a stage's result lies in its target: first index, step, and size of the target's dimension."""
_ARGUMENTS = {"argmax": "max", "argmin": "min"}
_COPIES = 8
"""An array is repeated by an index from so many whole copies on."""
_REDUCE = {"sum": "sum", "amax": "max", "amin": "min", "prod": "prod"}


class Lowering:
    """The lowering of one program."""

    def __init__(self, builder: Builder, program: Program, operands: Sequence[Value]) -> None:
        self.builder, self.program = builder, prepared(program)
        self.values: dict[Array, Value] = dict(zip(program.inputs, operands, strict=True))
        self.fixed: dict[Axis, int] = {}
        """Axes that have one value, while the elements of a window are read one by one."""

    def results(self) -> list[Value]:
        """The values of the outputs."""
        pending: dict[Array, list[tuple[list[Place], Value]]] = {}
        for stage in map(_forwards, self.program.stages):
            for array in {t.array for t in stage.loads() if t.array is not None}:
                self.settle(array, pending)
            result = self.stage(stage)
            if stage.plain:
                self.values[stage.target] = result
            elif stage.scatters:
                whole = [(0, 1, n) for n in stage.target.shape]
                parts = pending.setdefault(stage.target, [])
                covers = parts and parts[-1][0] == whole and parts[-1][1].shape == stage.target.shape
                added = parts.pop()[1] if covers else None
                parts.append((whole, self.scattered(stage, result, added)))
            else:
                places, result = self.placed(stage, result)
                pending.setdefault(stage.target, []).append((places, result))
        for array in self.program.outputs:
            self.settle(array, pending)
        return [self.values[o] for o in self.program.outputs]

    def settle(self, array: Array, pending: dict[Array, list[tuple[list[Place], Value]]]) -> None:
        """Combine the parts of an array that several stages write."""
        if array in self.values:
            return
        parts = pending.pop(array, [])
        self.values[array] = self.combined(array, parts) if parts else zeros(self.builder, array.shape, array.dtype)

    # ---- stages -----------------------------------------------------------------------------------------------------
    def stage(self, stage: Stage) -> Value:
        """The value of a stage, over its axes."""
        sizes = tuple(a.size for a in stage.axes)
        product = self.contraction(stage)
        if product is not None:
            return product
        around = window(stage, self.readable)
        reduced = tuple(a for a in stage.reduced if a not in around)
        domain = (*stage.axes, *reduced)
        if around:
            body = unrolled(stage, around, lambda place: self.element(stage.body, domain, place))
            if not reduced:
                return body.expand(sizes)
        else:
            bare = stage.kind == "point" and self.readable(stage.body)
            body = self.read(stage.body, domain, True) if bare else self.value(stage.body, domain, {})
            body = body if stage.kind in _ARGUMENTS else body.cast(stage.target.dtype)
        if stage.kind == "point":
            return body.expand(sizes)
        lead, rank = len(sizes), len(domain)
        body = body.expand((*body.shape[:lead], *(a.size for a in reduced)))
        dims = tuple(range(lead, rank))
        if stage.kind in _ARGUMENTS:
            flat = body.view((*body.shape[:lead], prod(a.size for a in reduced)))
            (_, place) = self.builder.emit(make("extremum", kind=_ARGUMENTS[stage.kind], dim=lead), flat)
            return place.cast(stage.target.dtype).expand(sizes)
        if stage.kind == "lse":
            return body.apply(make("logsumexp", dims=dims)).expand(sizes)
        body = wide(body) if stage.kind in ("sum", "prod") else body
        return body.reduce(_REDUCE[stage.kind], dims).cast(stage.target.dtype).expand(sizes)

    def element(self, body: Term, domain: Sequence[Axis], place: dict[Axis, int]) -> Value:
        """A body over `domain`, at one place of its other axes."""
        self.fixed = place
        value = self.value(body, domain, {})
        self.fixed = {}
        return value

    def contraction(self, stage: Stage) -> Value | None:
        """A sum of the products of two reads as a matmul, where it has rows, columns, and a depth."""
        if stage.kind != "sum" or not stage.target.dtype.is_float:
            return None
        parts = _factors(stage.body)
        loads = [p for p in parts if p.op == "load" and p.dtype is stage.target.dtype]
        numbers = [p.value for p in parts if p.op == "number"]
        if len(loads) != 2 or len(loads) + len(numbers) != len(parts):
            return None
        maps = [self.maps(t) for t in loads]
        if None in maps:
            return None
        factors = [Factor([a for a in m or {} if a is not None]) for m in (axes_of(t) for t in loads)]
        layout = contracted(stage.axes, stage.reduced, factors)
        if layout is None:
            return None
        results = [self.read(t, order, True) for t, order in zip(loads, layout.orders, strict=True)]
        result = layout.emit(*results)
        for n in numbers:
            result = result * float(n)
        return result

    # ---- terms ------------------------------------------------------------------------------------------------------
    def value(self, term: Term, domain: Sequence[Axis], memo: dict[Term, Value]) -> Value:
        """A term over `domain`: one dimension per axis, of size 1 where it does not depend on the axis."""
        if term not in memo:
            memo[term] = self.computed(term, domain, memo)
        return memo[term]

    def computed(self, term: Term, domain: Sequence[Axis], memo: dict[Term, Value]) -> Value:
        rank = len(domain)
        if term.axis in self.fixed:
            return self.number(self.fixed[term.axis], DType.int64, rank)
        if term.axis is not None:
            shape = tuple(a.size if a is term.axis else 1 for a in domain)
            dim = next(d for d, a in enumerate(domain) if a is term.axis)
            return self.builder.emit(make("iota", shape=shape, dim=dim, dtype=DType.int64))[0]
        if term.op == "number":
            dtype = DType.float64 if isinstance(term.value, float) else DType.int64  # exact: what reads it has a type
            return self.number(term.value, DType.bool if isinstance(term.value, bool) else dtype, rank)
        if term.op == "load":
            return self.load(term, domain, memo)
        if term.op == "cast":
            assert term.dtype is not None
            if term.args[0].op == "number":
                return self.number(term.args[0].value, term.dtype, rank)
            value = self.value(term.args[0], domain, memo)
            return (
                value.compare("ne", 0)
                if term.dtype is DType.bool and value.dtype is not DType.bool
                else value.cast(term.dtype)
            )
        dtype = next((a.dtype for a in term.args[::-1] if a.dtype is not None), DType.int64)
        given = []
        for a in term.args:
            own = dtype if a is not term.args[0] or term.op != "where" else DType.bool
            given.append(self.number(a.value, own, rank) if a.op == "number" else self.value(a, domain, memo))
        return self.builder.emit(make(term.op), *given)[0]

    def number(self, value: Any, dtype: DType, rank: int) -> Value:
        value = bool(value) if dtype is DType.bool else float(value) if dtype.is_float else int(value)
        return self.builder.emit(make("full", value=value, shape=(1,) * rank, dtype=dtype))[0]

    def load(self, term: Term, domain: Sequence[Axis], memo: dict[Term, Value]) -> Value:
        if self.maps(term) is not None:
            return self.read(term, domain)
        assert term.array is not None
        x, shape = self.values[term.array], term.array.shape
        if 0 in shape and term.fill is not None:
            return self.number(term.fill, term.array.dtype, len(domain))
        found = lookup(term.args, shape, domain)
        number, inside = self.row_number(term.args, shape, found, term.fill is None)
        lead, width = tuple(a.size for a in found.along), prod(a.size for a in found.rows)
        left = number.shape[len(lead) : len(lead) + len(found.between)]
        if found.rows:
            table = x.view((prod(shape) // width, width))
            taken = table.apply(Embedding(), number.view((prod(left),)))
        else:
            places = number.view((*number.shape[: len(lead)], prod(left))).expand((*lead, prod(left)))
            taken = x.view((*lead, prod(shape) // prod(lead))).apply(Gather(len(lead)), places)
        taken = taken.view((*lead, *left, *(a.size for a in found.rows)))
        if term.fill is not None and inside is not None:
            taken = inside.where(taken, taken.constant(term.fill))
        sizes = dict(zip(found.axes, taken.shape, strict=True))
        order = sorted(range(len(sizes)), key=lambda d: domain.index(found.axes[d]))
        return taken.permute(order).view(tuple(sizes.get(a, 1) for a in domain))

    def row_number(
        self, indices: Sequence[Term], shape: Sequence[int], found: Lookup, checked: bool
    ) -> tuple[Value, Value | None]:
        """Which row of an array the indices between name, over the axes of a lookup; whether they are inside.

        A `checked` one that is not becomes an error of the library call, any other is row 0.
        """
        memo: dict[Term, Value] = {}
        lead = list(zip(indices, shape, strict=True))[len(found.along) : len(shape) - len(found.rows)]
        number, inside = None, None
        for i, n in lead:
            value, bounds = self.typed(i, found.axes, memo), interval(i)
            if bounds is None or bounds[0] < 0 or bounds[1] >= n:
                told = self.value(i.args[0], found.axes, memo) if _exact(i, n) else value
                within = self.builder.emit(make("logical_and"), told.compare("ge", 0), told.compare("lt", n))[0]
                inside = within if inside is None else self.builder.emit(make("logical_and"), inside, within)[0]
            number = value if number is None else number * n + value
        assert number is not None
        if inside is not None:
            number = inside.where(number, prod(n for _, n in lead) if checked else 0)
        return number, inside

    def typed(self, index: Term, domain: Sequence[Axis], memo: dict[Term, Value]) -> Value:
        """An index as an array of integers."""
        if index.op == "number":
            return self.number(index.value, DType.int64, len(domain))
        return self.value(index, domain, memo).cast(DType.int64)

    # ---- reads ------------------------------------------------------------------------------------------------------
    def maps(self, term: Term) -> list[Map] | None:
        """The affine map of each index, under `.clamp` and `.wrap`; None where one is not affine."""
        assert term.array is not None
        found = [affine(_inner(i, n)) for i, n in zip(term.args, term.array.shape, strict=True)]
        known = [m for m in found if m is not None]
        return known if len(known) == len(found) and 0 not in term.array.shape else None

    def readable(self, term: Term) -> bool:
        """Whether a term is an affine read."""
        return term.op == "load" and self.maps(term) is not None

    def read(self, term: Term, domain: Sequence[Axis], forwards: bool = False) -> Value:
        """An affine read over `domain`. Kernels may read backwards; library calls need views that go `forwards`."""
        assert term.array is not None
        maps = self.maps(term)
        assert maps is not None
        x, pads = self.values[term.array], []
        for dim, (index, n, m) in enumerate(zip(term.args, term.array.shape, maps, strict=True)):
            low, high = interval(of_map(m)) or (0, 0)
            before, after = max(0, -low), max(0, high - n + 1)
            m[None] = m.get(None, 0) + before
            around = _inner(index, n) is not index
            if around and (before or after):
                x = self.surrounded(x, dim, n, before, after, index.op)
            pads.append((0, 0) if around else (before, after))
        if any(p != (0, 0) for p in pads):
            fill = term.fill if term.fill is not None else 0
            x = x.apply(Pad(tuple(pads), fill))
        for m in maps:
            for a in [a for a in m if a in self.fixed]:
                m[None] = m.get(None, 0) + m.pop(a) * self.fixed[a]
        flipped = turned(maps, x.tensor.strides) if forwards else set[Axis]()
        used = {a for m in maps for a in m}
        shape = tuple(a.size if a in used else 1 for a in domain)
        terms = tuple((domain.index(a), d, c) for d, m in enumerate(maps) for a, c in m.items() if a is not None)
        offsets = tuple(m.get(None, 0) for m in maps)
        y = plain(x, shape, terms, offsets)
        backwards = tuple(d for d, a in enumerate(domain) if a in flipped)
        return y.apply(make("flip", dims=backwards)) if backwards else y

    def surrounded(self, x: Value, dim: int, n: int, before: int, after: int, kind: str) -> Value:
        """An array with what lies around it copied along one dimension."""
        if kind == "clamp":
            edges = [(x.slice(dim, start, start + 1), count) for start, count in ((0, before), (n - 1, after))]
            low, high = (
                [e.expand(tuple(count if d == dim else size for d, size in enumerate(e.shape)))] if count else []
                for e, count in edges
            )
            return self.builder.emit(Concat(dim), *low, x, *high)[0]
        if before // n + after // n < _COPIES:
            low = [x.slice(dim, n - before % n, n)] if before % n else []
            high = [x.slice(dim, 0, after % n)] if after % n else []
            whole = [x] * (before // n + 1 + after // n)
            return self.builder.emit(Concat(dim), *low, *whole, *high)[0]
        size = before + n + after
        index = self.builder.emit(make("iota", shape=(size,), dim=0, dtype=DType.int64, start=-before))[0]
        index = self.builder.emit(make("remainder"), index, index.constant(n))[0]
        return x.apply(Index((dim,)), index)

    # ---- stores -----------------------------------------------------------------------------------------------------
    def scattered(self, stage: Stage, result: Value, total: Value | None) -> Value:
        """`total`, or zeros, to which results are added at indices that depend on data; those outside are dropped."""
        shape, dtype = stage.target.shape, stage.target.dtype
        found = lookup(stage.store, shape, stage.axes)
        number, inside = self.row_number(stage.store, shape, found, stage.checked)
        unnamed = [a for a in stage.axes if a not in found.axes]
        lead, rows = tuple(a.size for a in found.along), tuple(a.size for a in found.rows)
        left = tuple(a.size for a in (*found.between, *unnamed))
        order = (*found.along, *found.between, *unnamed, *found.rows)
        result = result.permute(tuple(map(stage.axes.index, order)))

        def wider(x: Value) -> Value:
            """What depends on a lookup, over its leading axes and those of `left`, with ones for those of rows."""
            n = len(lead) + len(found.between)
            x = x.view((*x.shape[:n], *(1,) * (len(unnamed) + len(rows))))
            return x.expand((*x.shape[: len(lead)], *left, *(1,) * len(rows)))

        if inside is not None and not stage.checked:
            result = wider(inside).where(result, result.constant(0.0)).expand(result.shape)
        number, count = wider(number), prod(left)
        table = (prod(shape) // prod(rows), prod(rows)) if rows else (*lead, prod(shape) // prod(lead))
        if rows and total is None:
            added = result.view((*lead, *left, prod(rows)))
            return added.apply(EmbeddingGrad(table[0]), number.view((*lead, *left))).view(shape)
        start = zeros(self.builder, table, dtype) if total is None else total.view(table)
        if rows:
            return start.apply(AddRows(), number.view((count,)), result.view((count, prod(rows)))).view(shape)
        places = number.view((*number.shape[: len(lead)], count)).expand((*lead, count))
        put = Scatter(len(lead), accumulate=True)
        return start.apply(put, places, result.view((*lead, count))).view(shape)

    def placed(self, stage: Stage, result: Value) -> tuple[list[Place], Value]:
        """Where the dimensions of a result lie in its target."""
        places: list[Place] = []
        order: list[int] = []
        sizes: list[int] = []
        for index, n in zip(stage.store, stage.target.shape, strict=True):
            found = affine(index) or {}
            axes = sorted((a for a in found if a is not None), key=lambda a: -found[a])  # as digits of a number
            order += [next(d for d, other in enumerate(stage.axes) if other is a) for a in axes]
            places.append((found.get(None, 0), found[axes[-1]] if axes else 1, n))
            sizes.append(prod(a.size for a in axes))
        if sorted(order) != list(range(len(stage.axes))):
            dropped = [d for d in range(len(stage.axes)) if d not in order and stage.axes[d].size == 1]
            if sorted([*order, *dropped]) != list(range(len(stage.axes))):
                raise Unsupported(f"a store at {stage.store!r}")
            result = result.permute((*order, *dropped))
        else:
            result = result.permute(order)
        return places, result.view(sizes)

    def combined(self, array: Array, parts: list[tuple[list[Place], Value]]) -> Value:
        """The sum of the parts of an array, dimension by dimension: phases are interleaved."""
        for dim, n in enumerate(array.shape):
            groups: dict[Any, list[tuple[list[Place], Value]]] = {}
            for places, value in parts:
                _, step, size = places[dim]
                key = (step, size, *((p, value.shape[d]) for d, p in enumerate(places) if d != dim))
                groups.setdefault(key, []).append((places, value))
            parts = []
            for members in groups.values():
                step = members[0][0][dim][1]
                merged = self.interleaved(dim, n, step, [(p[dim][0], v) for p, v in members])
                places = [(0, 1, n) if d == dim else p for d, p in enumerate(members[0][0])]
                parts.append((places, merged))
        total = parts[0][1]
        for _, value in parts[1:]:
            total = total + value
        return total

    def joined(self, dim: int, n: int, parts: list[tuple[int, Value]]) -> Value:
        """The sum of values that begin at some index of a dimension of size `n`: one after the other, or padded."""
        parts = sorted(parts, key=lambda part: part[0])
        ends = [start + value.shape[dim] for start, value in parts]
        if len(parts) > 1 and all(end <= start for end, (start, _) in zip(ends, parts[1:], strict=False)):
            pieces: list[Value] = []
            for end, (start, value) in zip([0, *ends], parts, strict=False):
                pieces += [*self.gap(dim, start - end, value), value]
            pieces += self.gap(dim, n - ends[-1], parts[-1][1])
            return self.builder.emit(Concat(dim), *pieces)[0]
        total: Value | None = None
        for end, (start, value) in zip(ends, parts, strict=True):
            if start or end < n:
                pads = tuple((start, n - end) if d == dim else (0, 0) for d in range(len(value.shape)))
                value = value.apply(Pad(pads, 0.0 if value.dtype.is_float else 0))
            total = value if total is None else total + value
        assert total is not None
        return total

    def gap(self, dim: int, size: int, like: Value) -> list[Value]:
        """Zeros between two parts, if there is room."""
        shape = tuple(size if d == dim else n for d, n in enumerate(like.shape))
        return [zeros(self.builder, shape, like.dtype)] if size else []

    def interleaved(self, dim: int, n: int, step: int, members: list[tuple[int, Value]]) -> Value:
        """Values at `start, start + step, ...` of a dimension of size `n`; what no value covers is zero."""
        parts: dict[int, list[tuple[int, Value]]] = {}
        for start, value in members:
            parts.setdefault(start % step, []).append((start // step, value))
        lanes = {lane: self.joined(dim, -(-(n - lane) // step), own) for lane, own in parts.items()}
        if step == 1:
            return lanes[0]
        whole = -(-n // step)
        pieces: list[Value] = []
        like = next(iter(lanes.values()))
        shape = tuple(whole if d == dim else size for d, size in enumerate(like.shape))
        for lane in range(step):
            value = lanes[lane] if lane in lanes else zeros(self.builder, shape, like.dtype)
            if (missing := whole - value.shape[dim]) > 0:
                pads = tuple((0, missing) if d == dim else (0, 0) for d in range(len(shape)))
                value = value.apply(Pad(pads, 0.0 if value.dtype.is_float else 0))
            pieces.append(value.view((*shape[: dim + 1], 1, *shape[dim + 1 :])))
        (joined,) = self.builder.emit(Concat(dim + 1), *pieces)
        joined = joined.view((*shape[:dim], whole * step, *shape[dim + 1 :]))
        return joined.slice(dim, 0, n) if whole * step > n else joined


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _forwards(stage: Stage) -> Stage:
    """The same stage with reduced axes reversed that are read backwards: views have no negative strides."""
    weights: dict[Axis, int] = {}  # the elements that are read forwards, less those that are read backwards
    for term in stage.loads():
        points = prod(a.size for a in axes_of(term))
        for index, n in zip(term.args, term.array.shape if term.array is not None else (), strict=True):
            for axis, c in (affine(_inner(index, n)) or {}).items():
                if axis is not None:
                    weights[axis] = weights.get(axis, 0) + (points if c > 0 else -points)
    turned = {a: of_map({a: -1, None: a.size - 1}) for a in stage.reduced if weights.get(a, 0) < 0}
    if not turned or stage.kind in _ARGUMENTS:
        return stage
    body = substituted(stage.body, turned)
    return replace(stage, body=body)


def _inner(index: Term, size: int) -> Term:
    """The affine index under `.clamp` or `.wrap`; the index itself where it is neither."""
    wraps = index.op == "remainder" and constant(index.args[1]) == size
    clamps = index.op == "clamp" and tuple(map(constant, index.args[1:])) == (0, size - 1)
    return index.args[0] if wraps or clamps else index


def _exact(index: Term, size: int) -> bool:
    """Whether an index is a float32 or float64 that tells by itself whether it is below `size`.

    It has an integer value, and is compared before it is converted: for int64, processors without AVX-512 have no
    vectors. What is not finite is outside either way.
    """
    dtype = index.args[0].dtype if index.op == "cast" else None
    return dtype is DType.float64 or (dtype is DType.float32 and size <= 1 << 24)


def _factors(term: Term) -> list[Term]:
    return [f for a in term.args for f in _factors(a)] if term.op == "mul" else [term]
