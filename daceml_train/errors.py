"""The errors of the project: what went wrong, where in the user's source, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DacemlError(Exception):
    """Base of every error this package raises on purpose.

    `where` names the user's source line or module path, if it is known; `advice` says what to do next.
    """

    def __init__(self, message: str, *, where: str = "", advice: str = "") -> None:
        self.message, self.where, self.advice = message, where, advice
        text = message + (f" (at {where})" if where else "") + (f"; {advice}" if advice else "")
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text  # without what tracers append on its way


class Unsupported(DacemlError):
    """The model uses something that is not compiled yet; eager execution goes on where that is possible."""


class Invalid(DacemlError, ValueError):
    """An argument, a graph or an input breaks its contract; nothing has run."""


class BudgetInfeasible(Invalid):
    """What an option asks for cannot be met, such as a memory budget below the minimum: the user decides what then."""


class DeviceMismatch(Invalid):
    """Tensors of one program lie on different devices; the message names two of them."""


class Duplicate(Invalid):
    """Two passes or operators have the same name; `owners` are both."""

    def __init__(self, what: str, name: str, *owners: str) -> None:
        self.owners = owners
        super().__init__(f"{what} {name!r} is defined twice: by {' and by '.join(owners)}", advice="rename one of them")


class Refused(DacemlError):
    """A transformation or lowering does not apply; the sentence names the node that is in the way."""


class CompilerError(DacemlError):
    """The native compiler is missing or failed; its output is in the message."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class Rejected(CompilerError):
    """The native compiler rejected a kernel that this package generated."""


class ExecutionError(DacemlError, RuntimeError):
    """A compiled program failed while running; `tag` is the launch that failed."""

    def __init__(self, message: str, tag: int, *, where: str = "") -> None:
        self.tag = tag
        super().__init__(message, where=where)


class OutOfRange(ExecutionError, IndexError):
    """An index or a class that the data hold is outside of what it points into."""


def execution_error(message: str, tag: int, *, where: str = "") -> ExecutionError:
    """The error of a launch: an `IndexError` where PyTorch's message speaks of an index that is out of range."""
    outside = "out of range" in message or "out of bounds" in message
    return (OutOfRange if outside else ExecutionError)(message, tag, where=where)


class OutOfMemory(DacemlError):
    """A program found too little memory on its device; the message names the biggest arrays."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            advice="make the batch smaller, cut it (micro_batches=...), or keep less for the backward pass: "
            'pipeline=TRAINING.after(..., Rematerialize(budget="...")), see docs/guide/memory.md',
        )


INTERNAL = "internal error"
"""How the reason for running something in PyTorch begins where the cause is a defect of this package."""
_EXPECTED = (Unsupported, BudgetInfeasible, DeviceMismatch, CompilerError, OutOfMemory)


def internal(error: BaseException) -> bool:
    """Whether an error raised while a graph is compiled is a defect of this package.

    PyTorch accepted the program, so `Invalid` and `Refused` here speak of our graphs and not of the user's arguments.
    """
    return isinstance(error, Rejected) or not isinstance(error, _EXPECTED)


def why(error: BaseException) -> str:
    """The reason for running a graph in PyTorch: it begins with `INTERNAL` where the error is a defect of ours."""
    text = str(error) if isinstance(error, DacemlError) else f"{type(error).__name__}: {error}"
    return f"{INTERNAL}, {text}" if internal(error) else text


def message_of(error: Exception) -> str:
    """What an error says in a sentence."""
    return str(error) if isinstance(error, DacemlError) else f"{type(error).__name__}: {error}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` where a known name is like `name`, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
