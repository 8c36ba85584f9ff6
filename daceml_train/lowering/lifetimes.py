"""Lifetimes: from which launch to which other a buffer is in use, and what arrays a lowering knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from daceml_train.codegen.cpu.launch import Layout
from daceml_train.lowering.program import (
    BufferView,
    Program,
    touched,
)
from daceml_train.tensor import Dim, simplify


def _seen(place: BufferView, seen: Sequence[int | None]) -> BufferView:
    """A library call's view of a buffer view; see `lowering.aten.Call.seen`."""
    if not seen or len(place.shape) != sum(d is not None for d in seen):
        return place
    shape: list[Dim] = []
    strides: list[Dim] = []
    for d in reversed(seen):
        if d is None:
            shape, strides = [1, *shape], [simplify(shape[0] * strides[0]), *strides]
        else:
            shape, strides = [place.shape[d], *shape], [place.strides[d], *strides]
    return replace(place, shape=tuple(shape), strides=tuple(strides))


def _layout(place: BufferView) -> Layout:
    return Layout(place.shape, place.strides, place.dtype)


def set_lifetimes(program: Program) -> None:
    """Set each slot's first and last launch."""
    for index, launch in enumerate(program.launches):
        for slot in touched(launch):
            entry = program.slots[slot]
            entry.first = index if entry.first < 0 else entry.first
            entry.last = index
