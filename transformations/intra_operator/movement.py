"""Rules on movement: operators that only rename indices are merged, or removed if they change nothing."""

from __future__ import annotations

import bisect
import math

from daceml_train.ops.movement import Concat, Expand, Flip, Pad, Permute, Slice, View
from daceml_train.ops.operator import Value
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import Dim, same, same_shape, simplify
from daceml_train.transformations.intra_operator.peephole import Rules, Site, memory_order


def at_most(a: Dim, b: Dim) -> bool:
    """Whether `a <= b` is provable for all values of the size symbols."""
    room = simplify(b - a)
    return room >= 0 if isinstance(room, int) else bool(room.is_nonnegative)


def same_number(a: float, b: float) -> bool:
    """Whether two constants are equal, including the sign of zero."""
    return a == b and math.copysign(1, a) == math.copysign(1, b)


# ---- view, permute, expand ------------------------------------------------------------------------------------------
def same_view(s: Site) -> Value | None:
    """view(x), of the same shape => x"""
    return s.x if same_shape(s.x.shape, s.result.shape) else None


def view_of_view(s: Site) -> Value | None:
    """view(view(x)) => view(x)"""
    results = s.made_by(s.x, View)
    return results[1][0].apply(s.op) if results else None


def same_permute(s: Site) -> Value | None:
    """permute(x), in the order it has => x"""
    assert isinstance(s.op, Permute)
    return s.x if s.op.dims == tuple(range(s.x.tensor.rank)) else None


def permute_of_permute(s: Site) -> Value | None:
    """permute(permute(x)) => permute(x)"""
    assert isinstance(s.op, Permute)
    if result := s.made_by(s.x, Permute):
        inner, (x,) = result
        return x.permute(tuple(inner.dims[d] for d in s.op.dims))
    return None


def permute_of_ones(s: Site) -> Value | None:
    """permute(x), where only dimensions of size 1 change places => view(x)"""
    assert isinstance(s.op, Permute)
    moved = tuple(d for d in s.op.dims if not same(s.x.shape[d], 1))
    if moved == tuple(sorted(moved)) and memory_order(s.x.tensor) == moved:
        return s.x.view(s.result.shape)
    return None


def same_expand(s: Site) -> Value | None:
    """expand(x), to the shape it has => x"""
    return s.x if same_shape(s.x.shape, s.result.shape) else None


def expand_of_expand(s: Site) -> Value | None:
    """expand(expand(x)) => expand(x)"""
    results = s.made_by(s.x, Expand)
    return results[1][0].apply(s.op) if results else None


# ---- slice ----------------------------------------------------------------------------------------------------------
def whole_slice(s: Site) -> Value | None:
    """slice(x), of all elements => x"""
    assert isinstance(s.op, Slice)
    return s.x if s.op.step == 1 and same(s.op.start, 0) and same(s.op.stop, s.x.shape[s.op.dim]) else None


def slice_of_slice(s: Site) -> Value | None:
    """slice(slice(x)), along one dimension => slice(x)"""
    assert isinstance(s.op, Slice)
    results = s.made_by(s.x, Slice)
    if results is None or results[0].dim != s.op.dim or same(s.op.count, 0):
        return None
    inner, (x,) = results
    start = simplify(inner.start + s.op.start * inner.step)
    step = inner.step * s.op.step
    past = s.op.stop - s.op.start if step == 1 else (s.op.count - 1) * step + 1
    return x.slice(s.op.dim, start, simplify(start + past), step)


def slice_of_concat(s: Site) -> Value | None:
    """slice(concat(..., x, ...)), inside x => slice(x)"""
    assert isinstance(s.op, Slice)
    results = s.made_by(s.x, Concat)
    if results is None or results[0].dim != s.op.dim:
        return None
    starts = s.sweep.notes.get(s.x.name)
    if starts is None:
        starts = [0]
        for piece in results[1]:
            starts.append(simplify(starts[-1] + piece.shape[s.op.dim]))
        s.sweep.notes[s.x.name] = starts
    if all(isinstance(place, int) for place in (*starts, s.op.start)):
        candidates = [min(bisect.bisect_right(starts, s.op.start), len(results[1])) - 1]
    else:
        candidates = [i for i, place in enumerate(starts[:-1]) if at_most(place, s.op.start)][-1:]
    for i in candidates:
        if at_most(s.op.stop, starts[i + 1]):
            start, stop = simplify(s.op.start - starts[i]), simplify(s.op.stop - starts[i])
            return results[1][i].slice(s.op.dim, start, stop, s.op.step)
    return None


def slice_of_pad(s: Site) -> Value | None:
    """slice(pad(x)), inside x, where nothing else is padded => slice(x)"""
    assert isinstance(s.op, Slice)
    result = s.made_by(s.x, Pad)
    if result is None:
        return None
    pad, (x,) = result
    if any(not (same(low, 0) and same(high, 0)) for d, (low, high) in enumerate(pad.pads) if d != s.op.dim):
        return None
    start, stop = simplify(s.op.start - pad.pads[s.op.dim][0]), simplify(s.op.stop - pad.pads[s.op.dim][0])
    if at_most(0, start) and at_most(stop, x.shape[s.op.dim]):
        return x.slice(s.op.dim, start, stop, s.op.step)
    return None


# ---- pad, concat, flip, reduce --------------------------------------------------------------------------------------
def empty_pad(s: Site) -> Value | None:
    """pad(x), by nothing => x"""
    return s.x if same_shape(s.x.shape, s.result.shape) else None


def pad_of_pad(s: Site) -> Value | None:
    """pad(pad(x)), with one value => pad(x)"""
    assert isinstance(s.op, Pad)
    results = s.made_by(s.x, Pad)
    if results is None or not same_number(results[0].value, s.op.value):
        return None
    inner, (x,) = results
    pairs = zip(inner.pads, s.op.pads, strict=True)
    return x.apply(Pad(tuple((simplify(a + c), simplify(b + d)) for (a, b), (c, d) in pairs), s.op.value))


def concat_of_one(s: Site) -> Value | None:
    """concat(x) => x"""
    return s.x if len(s.operands) == 1 else None


def concat_of_slices(s: Site) -> Value | None:
    """concat(slice(x, 0:a), slice(x, a:b), ...) => slice(x, 0:b), the whole of x where b is its size"""
    assert isinstance(s.op, Concat)
    dim = s.op.dim
    pieces: list[tuple[Value, Dim, Dim]] = []  # source and range; an operand that is no slice is its own whole
    for piece in s.operands:
        results = s.made_by(piece, Slice)
        if results and results[0].dim == dim and results[0].step == 1:
            source, start, stop = results[1][0], results[0].start, results[0].stop
        else:
            source, start, stop = piece, 0, piece.shape[dim]
        if pieces and pieces[-1][0].name == source.name and same(pieces[-1][2], start):
            start = pieces.pop()[1]
        pieces.append((source, start, stop))
    if len(pieces) == len(s.operands):
        return None
    joined = [source.slice(dim, start, stop) for source, start, stop in pieces]
    return joined[0].apply(s.op, *joined[1:])


def flip_of_flip(s: Site) -> Value | None:
    """flip(flip(x)), of the same dimensions => x"""
    assert isinstance(s.op, Flip)
    results = s.made_by(s.x, Flip)
    return results[1][0] if results and results[0].dims == s.op.dims else None


def flip_of_ones(s: Site) -> Value | None:
    """flip(x), of dimensions of size 1 => x"""
    assert isinstance(s.op, Flip)
    return s.x if all(same(s.x.shape[d], 1) for d in s.op.dims) else None


def reduce_of_ones(s: Site) -> Value | None:
    """reduce(x), over dimensions of size 1 => view(x)"""
    assert isinstance(s.op, Reduce)
    return s.x.view(s.result.shape) if all(same(s.x.shape[d], 1) for d in s.op.dims) else None


_REDUCE = (reduce_of_ones,)

MOVEMENT: Rules = {
    "view": (same_view, view_of_view),
    "permute": (same_permute, permute_of_permute, permute_of_ones),
    "expand": (same_expand, expand_of_expand),
    "slice": (whole_slice, slice_of_slice, slice_of_concat, slice_of_pad),
    "pad": (empty_pad, pad_of_pad),
    "concat": (concat_of_one, concat_of_slices),
    "flip": (flip_of_flip, flip_of_ones),
    "reduce.sum": _REDUCE,
    "reduce.max": _REDUCE,
    "reduce.min": _REDUCE,
    "reduce.prod": _REDUCE,
}
"""None of these changes a value, and none adds bytes."""
