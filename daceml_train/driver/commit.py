"""What a step that raised an error half-way has changed of what it trains."""

from __future__ import annotations

from daceml_train.graph.graph import Role
from daceml_train.lowering.program import Program
from daceml_train.runtime.failures import launch_of
from daceml_train.runtime.lane_works import written

UNCHANGED = "Parameters, buffers and the optimizer's state are those from before the step."
BUFFERS = "Parameters and the optimizer's state are those from before the step; buffers may be updated."
PARTLY = "The step failed half-way: parameters and the optimizer's state may be partly updated."


def what_changed(program: Program, launch: int) -> str:
    """What the user should know of a run in which this launch failed.

    Passes place updates after all checks of data, so that a batch that is refused changes nothing but large buffers on
    which the check depends.
    """
    written_slots = {slot for each in program.launches[: max(launch, 0)] for slot in written(each)}
    inputs = (program.slots[slot].input for slot in written_slots if program.slots[slot].mutable)
    roles = {program.inputs[number].role for number in inputs if number >= 0}
    if roles & {Role.parameter, Role.state}:
        return PARTLY
    return BUFFERS if roles else UNCHANGED


def note_what_changed(error: Exception, program: Program) -> None:
    """Add a note that says so to an error of a launch."""
    launch = launch_of(error)
    if launch is not None:
        error.add_note(what_changed(program, launch))
