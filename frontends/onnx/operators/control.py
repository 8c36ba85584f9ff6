"""Control flow: Python's own, so that TorchDynamo unrolls loops of known length and breaks at a branch on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from daceml_train.frontends.onnx.host import Host, integer
from daceml_train.frontends.onnx.rules import rule

Body = Callable[..., tuple[Any, ...]]


@rule("If", host="condition")
def branch(condition: Host, *, then_branch: Body, else_branch: Body) -> tuple[Any, ...]:
    return then_branch() if integer(condition) else else_branch()


@rule("Loop", host="trips go")
def loop(trips: Host, go: Host, *carried: Any, body: Body, outputs: int) -> tuple[Any, ...]:
    """`body(i, go, *carried)` gives whether to go on, what is carried, and a slice of each result that is stacked."""
    state = list(carried)
    slices: list[list[Any]] = [[] for _ in range(outputs - len(state))]
    step, on = 0, True if go is None else bool(integer(go))
    last = None if trips is None else integer(trips)
    while on and (last is None or step < last):
        again, *results = body(torch.tensor(step), torch.tensor(on), *state)
        state, made = results[: len(state)], results[len(state) :]
        for column, value in zip(slices, made, strict=True):
            column.append(value)
        step, on = step + 1, bool(again)
    return (*state, *(torch.stack(column) if column else torch.zeros(0) for column in slices))


@rule("Scan", since=9)
def scan(
    *operands: Tensor,
    body: Body,
    num_scan_inputs: int,
    scan_input_axes: tuple[int, ...] | None = None,
    scan_input_directions: tuple[int, ...] | None = None,
    scan_output_axes: tuple[int, ...] | None = None,
    scan_output_directions: tuple[int, ...] | None = None,
    outputs: int,
) -> tuple[Any, ...]:
    first = len(operands) - num_scan_inputs
    state, sequences = list(operands[:first]), operands[first:]
    axes = scan_input_axes or (0,) * num_scan_inputs
    backwards = scan_input_directions or (0,) * num_scan_inputs
    length = sequences[0].shape[axes[0]]
    slices: list[list[Any]] = [[] for _ in range(outputs - first)]
    for step in range(length):
        parts = [
            x.select(axis, length - 1 - step if back else step)
            for x, axis, back in zip(sequences, axes, backwards, strict=True)
        ]
        results = body(*state, *parts)
        state = list(results[:first])
        for column, value in zip(slices, results[first:], strict=True):
            column.append(value)
    out_axes = scan_output_axes or (0,) * len(slices)
    out_backwards = scan_output_directions or (0,) * len(slices)
    stacked = [
        torch.stack(column[::-1] if back else column, axis if axis >= 0 else axis + column[0].dim() + 1)
        for column, axis, back in zip(slices, out_axes, out_backwards, strict=True)
    ]
    return (*state, *stacked)


@rule("Scan", since=8)
def scan_of_batches(
    lengths: Tensor | None,
    *operands: Tensor,
    body: Body,
    num_scan_inputs: int,
    directions: tuple[int, ...] | None = None,
    outputs: int,
) -> tuple[Any, ...]:
    """Version 8 has a batch dimension in front of everything."""
    results = []
    for entry in range(operands[0].shape[0]):
        one = [x[entry] for x in operands]
        if lengths is not None:
            first = len(one) - num_scan_inputs
            one = one[:first] + [x[: int(lengths[entry])] for x in one[first:]]
        results.append(
            scan(*one, body=body, num_scan_inputs=num_scan_inputs, scan_input_directions=directions, outputs=outputs)
        )
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
