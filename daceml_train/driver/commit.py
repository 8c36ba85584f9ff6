"""What a step that raised an error half-way has changed of what it trains."""

from __future__ import annotations

from daceml_train.graph.graph import Role
from daceml_train.lowering.program import Program
from daceml_train.runtime.lane_works import written

_TRAINED = (Role.parameter, Role.state)
UNCHANGED = "Parameters and the optimizer's state are those from before the step; buffers may be updated."
PARTLY = "The step failed half-way: parameters and the optimizer's state may be partly updated."


def what_changed(program: Program, launch: int) -> str:
    """What the user should know of a run in which this launch failed.

    The pass `Schedule` places updates after all checks of data, so that a batch that is refused changes nothing.
    """
    inputs = program.inputs
    trained = {
        number
        for number, slot in enumerate(program.slots)
        if slot.mutable and 0 <= slot.input < len(inputs) and inputs[slot.input].role in _TRAINED
    }
    before = program.launches[: max(launch, 0)]
    return PARTLY if any(not trained.isdisjoint(written(each)) for each in before) else UNCHANGED
