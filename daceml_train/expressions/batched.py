"""Batched: a program whose results, and those inputs that have one, begin with one more axis, for `torch.vmap`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from daceml_train.expressions.program import Program, Stage, parsed
from daceml_train.expressions.term import Array, Axis, Term, at, load, rebuilt


@functools.lru_cache(maxsize=1024)
def batched(text: str, size: int, inputs: Sequence[bool]) -> str:
    """The text of the program for `size` samples at once; `inputs` says which of its inputs differ between them."""
    program = parsed(text)
    arrays = {a: _longer(a, size) for a, own in zip(program.inputs, inputs, strict=True) if own}
    arrays |= {a: _longer(a, size) for a in (*(s.target for s in program.stages), *program.outputs) if a not in arrays}
    given = tuple(arrays[a] if own else a for a, own in zip(program.inputs, inputs, strict=True))
    stages = tuple(_with_axis(stage, Axis(size), arrays) for stage in program.stages)
    return Program(given, stages, tuple(arrays[o] for o in program.outputs)).text


def _longer(array: Array, size: int) -> Array:
    return Array(array.name, (size, *array.shape), array.dtype)


def _with_axis(stage: Stage, axis: Axis, arrays: dict[Array, Array]) -> Stage:
    def change(term: Term) -> Term:
        if term.op != "load" or term.array not in arrays:
            return term
        return load(arrays[term.array], (at(axis), *term.args), term.fill, term.line)

    return Stage(
        arrays[stage.target],
        (axis, *stage.axes),
        stage.kind,
        stage.reduced,
        rebuilt(stage.body, change),
        (at(axis), *(rebuilt(s, change) for s in stage.store)),
        stage.adds,
        stage.checked,
    )


__all__ = ["batched"]
