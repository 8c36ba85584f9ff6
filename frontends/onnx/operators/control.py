"""Control flow: Python's own, and, if `frontends.onnx.control` finds that a body preserves shapes, PyTorch's operators.

Eager execution runs Python's in either case. Where a graph is traced, a branch on data becomes `torch.cond` and a long
loop `scan`; a short one of known length is unrolled, which costs less than its steps' calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan as scanned
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode

from daceml_train.frontends.onnx.host import Host, as_host, integer
from daceml_train.frontends.onnx.rules import rule

Body = Callable[..., tuple[Any, ...]]

CAPTURED = "daceml_train.captured"
"""The domain of the rules for branches and loops that become operators of the graph."""

FEW = 8
"""Loops of up to so many steps are unrolled."""


def apart(values: Any) -> tuple[Any, ...]:
    """Copies: the results of a body of PyTorch's operators must own their memory."""
    return tuple(value.clone() for value in values)


def no_slices(step: Callable[[], Sequence[Any]], axes: Sequence[int]) -> list[Tensor]:
    """The stacks of no steps along these axes: their types are those of a step, which runs without numbers."""
    if not axes:
        return []
    with contextlib.nullcontext() if torch.compiler.is_compiling() else FakeTensorMode(allow_non_fake_inputs=True):
        types = [(list(map(int, x.shape)), x.dtype) for x in step()]
    stacks = []
    for (shape, dtype), axis in zip(types, axes, strict=True):
        shape.insert(axis % (len(shape) + 1), 0)
        stacks.append(torch.zeros(shape, dtype=dtype))
    return stacks


@rule("IfOnData", domain=CAPTURED)
def branch_on_data(condition: Tensor, *, then_branch: Body, else_branch: Body) -> tuple[Any, ...]:
    if not torch.compiler.is_compiling():
        return then_branch() if bool(condition) else else_branch()
    results: tuple[Any, ...] = torch.cond(
        condition.reshape(()), lambda: apart(then_branch()), lambda: apart(else_branch()), ()
    )
    return results


@rule("LoopInSteps", domain=CAPTURED, host="trips go")
def loop_in_steps(trips: Host, go: Host, *carried: Any, body: Body, outputs: int) -> tuple[Any, ...]:
    """A loop that never ends early."""
    last, count = integer(trips), len(carried)
    on = torch.ones((), dtype=torch.bool)
    if not torch.compiler.is_compiling() or last <= FEW:
        states: tuple[Any, ...] = carried
        rows: list[tuple[Any, ...]] = []
        for i in range(last):
            results = body(torch.tensor(i), on, *states)[1:]
            states, rows = results[:count], [*rows, results[count:]]
        stacks = [torch.stack(column) for column in zip(*rows, strict=True)]
        if not rows:
            stacks = no_slices(lambda: body(torch.tensor(0), on, *states)[1 + count :], (0,) * (outputs - count))
        return (*states, *stacks)

    def step(states: Any, i: Tensor) -> Any:
        results = apart(body(i, on, *states)[1:])
        return results[:count], results[count:] or (torch.zeros(()),)

    states, stacks = scanned(step, apart(carried), torch.arange(last))
    return (*states, *stacks)[:outputs]


@rule("LoopWithEnd", domain=CAPTURED, host="trips")
def loop_with_end(trips: Host, go: Any, *carried: Any, body: Body, outputs: int) -> tuple[Any, ...]:
    """A loop that data may end before its last step: the steps after the end pass their states on."""
    last = integer(trips)
    if not torch.compiler.is_compiling() or last == 0:
        return loop(trips, go if go is None else as_host(go), *carried, body=body, outputs=outputs)

    def step(states: Any, i: Tensor) -> Any:
        on = states[0] > 0
        return torch.cond(on, lambda: one_step(i, on, *states[1:]), lambda: apart(states), ()), torch.zeros(())

    def one_step(i: Tensor, on: Tensor, *states: Tensor) -> tuple[Any, ...]:
        again, *results = apart(body(i, on, *states))
        return (again.reshape(()).float(), *results)

    # A differentiated scan of PyTorch has no boolean states.
    first = torch.ones(()) if go is None else go.reshape(()).float()
    states, _ = scanned(step, (first, *apart(carried)), torch.arange(last))
    return tuple(states[1:])


@rule("LoopOnData", domain=CAPTURED)
def loop_on_data(trips: Any, go: Any, *carried: Any, body: Body, outputs: int) -> tuple[Any, ...]:
    """A loop with an unbounded, data-dependent number of steps: one operator if no gradient is requested."""
    if not torch.compiler.is_compiling() or torch.is_grad_enabled():
        hosted = [None if x is None else as_host(x) for x in (trips, go)]
        return loop(*hosted, *carried, body=body, outputs=outputs)

    def more(i: Tensor, on: Tensor, *states: Tensor) -> Tensor:
        return on.clone() if trips is None else on & (i < trips.reshape(()))

    def step(i: Tensor, on: Tensor, *states: Tensor) -> tuple[Any, ...]:
        again, *results = apart(body(i, on, *states))
        return (i + 1, again.reshape(()), *results)

    first = torch.ones((), dtype=torch.bool) if go is None else go.reshape(()).clone()
    return tuple(while_loop(more, step, (torch.zeros((), dtype=torch.int64), first, *apart(carried)))[2:])


@rule("If", host="condition")
def branch(condition: Host, *, then_branch: Body, else_branch: Body) -> tuple[Any, ...]:
    return then_branch() if integer(condition) else else_branch()


@rule("Loop", host="trips go")
def loop(trips: Host, go: Host, *carried: Any, body: Body, outputs: int) -> tuple[Any, ...]:
    """`body(i, go, *carried)` returns whether to continue, the states, and a slice of each stacked result."""
    state = list(carried)
    slices: list[list[Any]] = [[] for _ in range(outputs - len(state))]
    step, on = 0, True if go is None else bool(integer(go))
    last = None if trips is None else integer(trips)
    while on and (last is None or step < last):
        again, *results = body(torch.tensor(step), torch.tensor(on), *state)
        state, created = results[: len(state)], results[len(state) :]
        for column, value in zip(slices, created, strict=True):
            column.append(value)
        step, on = step + 1, bool(again)
    if step:
        return (*state, *map(torch.stack, slices))
    first = torch.tensor(0), torch.tensor(True)
    return (*state, *no_slices(lambda: body(*first, *state)[1 + len(state) :], (0,) * len(slices)))


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
    if not length:
        parts = [
            x.movedim(axis, 0).new_zeros(x.movedim(axis, 0).shape[1:]) for x, axis in zip(sequences, axes, strict=True)
        ]
        return (*state, *no_slices(lambda: body(*state, *parts)[first:], out_axes))
    out_backwards = scan_output_directions or (0,) * len(slices)
    stacked = [
        torch.stack(column[::-1] if back else column, axis if axis >= 0 else axis + column[0].dim() + 1)
        for column, axis, back in zip(slices, out_axes, out_backwards, strict=True)
    ]
    return (*state, *stacked)


@rule("ScanInSteps", domain=CAPTURED)
def scan_in_steps(
    *operands: Tensor,
    body: Body,
    num_scan_inputs: int,
    scan_input_axes: tuple[int, ...] | None = None,
    scan_input_directions: tuple[int, ...] | None = None,
    scan_output_axes: tuple[int, ...] | None = None,
    scan_output_directions: tuple[int, ...] | None = None,
    outputs: int,
) -> tuple[Any, ...]:
    """A scan whose body keeps the types of its states."""
    first = len(operands) - num_scan_inputs
    axes = scan_input_axes or (0,) * num_scan_inputs
    if not torch.compiler.is_compiling() or operands[first].shape[axes[0]] <= FEW:
        return scan(
            *operands,
            body=body,
            num_scan_inputs=num_scan_inputs,
            scan_input_axes=scan_input_axes,
            scan_input_directions=scan_input_directions,
            scan_output_axes=scan_output_axes,
            scan_output_directions=scan_output_directions,
            outputs=outputs,
        )
    backwards = scan_input_directions or (0,) * num_scan_inputs
    sequences = [
        (x.movedim(axis, 0).flip(0) if back else x.movedim(axis, 0)).contiguous()
        for x, axis, back in zip(operands[first:], axes, backwards, strict=True)
    ]

    def step(states: Any, parts: Any) -> Any:
        results = apart(body(*states, *parts))
        return results[:first], results[first:]

    states, stacks = scanned(step, apart(operands[:first]), tuple(sequences))
    out_axes = scan_output_axes or (0,) * len(stacks)
    out_backwards = scan_output_directions or (0,) * len(stacks)
    return (
        *states,
        *(
            (stack.flip(0) if back else stack).movedim(0, axis)
            for stack, axis, back in zip(stacks, out_axes, out_backwards, strict=True)
        ),
    )


@rule("Scan", since=8)
def scan_of_batches(
    lengths: Tensor | None,
    *operands: Tensor,
    body: Body,
    num_scan_inputs: int,
    directions: tuple[int, ...] | None = None,
    outputs: int,
) -> tuple[Any, ...]:
    """Version 8 has a leading batch dimension everywhere."""
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
