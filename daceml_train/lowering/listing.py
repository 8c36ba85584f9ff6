"""Listing: a lowered program as text: its buffers with their live ranges, and its launches in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from daceml_train.lowering.cost import Cost
from daceml_train.lowering.program import (
    Allocation,
    Buffer,
    BufferView,
    CallLaunch,
    ControlLaunch,
    CopyLaunch,
    KernelLaunch,
    Launch,
    Program,
)


def listing(program: Program, costs: Sequence[Cost] = ()) -> str:
    """The plan of a program; `costs` has one entry per launch, or none."""
    return "\n".join([f"program {program.name}", *_lines(program, costs), ""])


def _lines(program: Program, costs: Sequence[Cost]) -> Iterator[str]:
    yield f"  buffers ({len(program.slots)}), alive from launch to launch"
    for number, buffer in enumerate(program.slots):
        yield f"    {f'b{number}':<5} {_buffer(program, buffer)}"
    yield f"  launches ({len(program.launches)})"
    for number, launch in enumerate(program.launches):
        about = f"  # {_about(costs[number])}" if len(costs) == len(program.launches) else f"  # {launch.origin}"
        yield f"    {number:>4} {_launch(program, launch)}{about.rstrip(' #')}"
        for body in launch.bodies if isinstance(launch, ControlLaunch) else ():
            yield from (f"      {line}" for line in (f"body {body.name}", *_lines(body, ())))
    yield f"  outputs {', '.join(map(_view, program.outputs))}"


def _buffer(program: Program, buffer: Buffer) -> str:
    extent = ", ".join(map(str, buffer.shape))
    what = buffer.home.value
    if buffer.home is Allocation.input:
        entry = program.inputs[buffer.input]
        what += f" {entry.role.value} {entry.path or entry.name}" + (", written" if buffer.mutable else "")
    strides = ", ".join(map(str, buffer.strides))
    return f"{buffer.dtype.name}[{extent}] strides ({strides})  {buffer.first}..{buffer.last}  {what}"


def _about(cost: Cost) -> str:
    parts = (cost.name, f"[{cost.operators}]", cost.source, f"{cost.bytes} bytes, {cost.flops} operations")
    return "  ".join(part for part in parts if part)


def _launch(program: Program, launch: Launch) -> str:
    match launch:
        case KernelLaunch(code=code, places=places, writes=writes):
            read = ", ".join(_view(p) for i, p in enumerate(places) if i not in writes)
            written = ", ".join(_view(p) for i, p in enumerate(places) if i in writes)
            return f"{written} = kernel_{program.codes[code].key}({read})"
        case CallLaunch(target=target, overload=overload, arguments=arguments, returns=returns):
            result = ", ".join("_" if r is None else f"b{r}" for r in returns)
            return f"{result} = {target}{f'.{overload}' if overload else ''}({', '.join(map(_argument, arguments))})"
        case CopyLaunch(pairs=pairs):
            goals, sources = (", ".join(map(_view, views)) for views in zip(*pairs, strict=True))
            return f"{goals} = copy({sources})"
        case ControlLaunch(kind=kind, returns=results):
            return f"{', '.join(f'b{r}' for r in results)} = {kind}({', '.join(map(_view, launch.places))})"


def _argument(argument: Any) -> str:
    if isinstance(argument, BufferView):
        return _view(argument)
    if isinstance(argument, tuple):
        return f"[{', '.join(map(_argument, argument))}]"
    return str(argument)


def _view(view: BufferView) -> str:
    return f"b{view.slot}" + (f"+{view.offset}" if view.offset != 0 else "")
