"""Copies together: one launch for the new values that no kernel stored in place, and for operands that are joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from daceml_train.errors import Refused
from daceml_train.lowering.program import BufferView, CopyLaunch, Launch, Program
from daceml_train.ops.elementwise import Cast
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.tensor import Tensor

TOGETHER = 16
"""Arrays that a kernel copies at most: each is a stream of memory, and a launch takes as long as a few KB."""


class Lowering(Protocol):
    """The interface of lowering that this module uses."""

    program: Program

    def launch(
        self, kernel: Kernel, operands: Sequence[BufferView], results: Sequence[BufferView], origin: str
    ) -> None:
        """Launch a generated kernel."""


def joined(launches: Iterable[Launch]) -> list[Launch]:
    """The launches with their bytewise copies as one, after the others.

    All of them write inputs, and none reads what another one writes: lowering copies such values before.
    """
    pairs: list[tuple[BufferView, BufferView]] = []
    origins: list[str] = []
    others: list[Launch] = []
    for launch in launches:
        if isinstance(launch, CopyLaunch):
            pairs += launch.pairs
            origins.append(launch.origin)
        else:
            others.append(launch)
    if not pairs:
        return others
    origin = origins[0] if len(origins) == 1 else f"{origins[0]} and {len(origins) - 1} more"
    return [*others, CopyLaunch(tuple(pairs), origin)]


def copy_together(lowering: Lowering, pairs: Sequence[tuple[BufferView, BufferView]], origin: str) -> None:
    """Copy sources to targets, none of which is a source, in few launches: those of equal layouts together.

    Copies are bytewise where both have the same dense layout, else by kernels.
    """
    bytewise: list[tuple[BufferView, BufferView]] = []
    groups: dict[object, list[tuple[BufferView, BufferView]]] = {}
    for source, target in pairs:
        dense = Tensor(source.shape).strides
        if source.dtype is target.dtype and source.strides == target.strides == dense:
            bytewise.append((target, source))
        else:
            layout = source.shape, source.strides, source.dtype, target.strides, target.dtype
            groups.setdefault(layout, []).append((source, target))
    if bytewise:
        lowering.program.launches.append(CopyLaunch(tuple(bytewise), origin))
    for group in groups.values():
        for first in range(0, len(group), TOGETHER):
            some = group[first : first + TOGETHER]
            sources, targets = zip(*some, strict=True)
            cast = Cast(targets[0].dtype)
            arguments = tuple(f"x{i}" for i in range(len(some)))
            results = tuple(f"v{i}" for i in range(len(some)))
            statements = [Statement(cast, (x,), (v,)) for x, v in zip(arguments, results, strict=True)]
            try:
                lowering.launch(Kernel(arguments, tuple(statements), results), sources, targets, origin)
            except Refused:  # together they are not one loop nest
                if len(some) == 1:
                    raise
                for pair in some:
                    copy_together(lowering, [pair], origin)
