"""What is raised for a launch that fails: the class that PyTorch raises, and the user's line."""

from __future__ import annotations

from daceml_train.errors import DacemlError, ExecutionError, execution_error
from daceml_train.lowering.program import Program

_LAUNCH = "_daceml_launch"


def failure(error: ExecutionError, program: Program) -> BaseException:
    """What is raised for `error` in a run of `program`, which names the line.

    That is the exception of an operator that is written in Python, as it was raised there.
    """
    launch = program.launches[error.tag] if 0 <= error.tag < len(program.launches) else None
    where, raised = launch.origin if launch else "", error.raised
    if raised is None or raised.__traceback__ is None or isinstance(raised, DacemlError):
        found = execution_error(error.message, error.tag, where=where, raised=raised)
        found.__cause__ = error
        return found
    vars(raised)[_LAUNCH] = error.tag
    if where:
        raised.add_note(f"daceml_train: raised by an operator (at {where})")
    return raised


def launch_of(error: BaseException) -> int | None:
    """The launch that failed, if `error` was raised for one."""
    found = error.tag if isinstance(error, ExecutionError) else vars(error).get(_LAUNCH)
    return None if found is None else int(found)


__all__ = ["failure", "launch_of"]
