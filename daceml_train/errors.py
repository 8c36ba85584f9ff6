"""The errors of the package: what went wrong, where in the user's source, and what to do next."""

from __future__ import annotations

import difflib
import functools
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
        return self.text  # without the context that tracers append


class Unsupported(DacemlError):
    """The model uses an unsupported feature; execution continues in eager mode where possible."""


class Invalid(DacemlError, ValueError):
    """An argument, a graph or an input violates its contract; nothing has run."""


class BudgetInfeasible(Invalid):
    """A limit that an option sets cannot be met, such as a memory budget below the minimum; the user must decide."""


class DeviceMismatch(Invalid):
    """Tensors of one program are on different devices; the message names two of them."""


class Duplicate(Invalid):
    """Two passes or operators have the same name; `owners` are both."""

    def __init__(self, what: str, name: str, *owners: str) -> None:
        self.owners = owners
        super().__init__(f"{what} {name!r} is defined twice: by {' and by '.join(owners)}", advice="rename one of them")


class NotCompiled(DacemlError):
    """The cache does not have a program, and it must not be compiled in this call."""


class Refused(DacemlError):
    """A transformation or lowering does not apply; the message names the node that prevents it."""


class PassFailed(Invalid):
    """A pass raised an error, or returned a graph that is not valid; the message names the pass.

    `ours` says whether this package defines the pass.
    """

    def __init__(self, message: str, *, ours: bool, where: str = "", advice: str = "") -> None:
        self.ours = ours
        super().__init__(message, where=where, advice=advice)


class CompilerError(DacemlError):
    """The native compiler is missing or failed; its output is in the message."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class Rejected(CompilerError):
    """The native compiler rejected a kernel that this package generated."""


class ExecutionError(DacemlError, RuntimeError):
    """A compiled program failed while running; `tag` is the launch that failed.

    `raised` is what PyTorch raises for it, where that is known.
    """

    raised: BaseException | None = None

    def __init__(self, message: str, tag: int, *, where: str = "") -> None:
        self.tag = tag
        super().__init__(message, where=where)


class OutOfRange(ExecutionError, IndexError):
    """An index or a class in the data is out of range."""


def execution_error(message: str, tag: int, *, where: str = "", raised: BaseException | None = None) -> ExecutionError:
    """The error of a launch for which PyTorch raises `raised`: it is of that class, too.

    An `IndexError` where PyTorch's message reports an out-of-range index.
    """
    kind: type = type(raised) if raised is not None and raised.__traceback__ is None else RuntimeError
    outside = "out of range" in message or "out of bounds" in message or kind is IndexError
    error = (OutOfRange if outside else _error_class(kind))(message, tag, where=where)
    error.raised = raised
    return error


@functools.cache
def _error_class(kind: type) -> type[ExecutionError]:
    """The class of errors of launches for which PyTorch raises one of the class `kind`."""
    if kind not in (ValueError, TypeError, NotImplementedError) and kind.__name__ != "_LinAlgError":
        return ExecutionError
    return type(kind.__name__.removeprefix("_"), (ExecutionError, kind), {"__module__": __name__})


class OutOfMemory(DacemlError):
    """The device has too little memory for a program; the message names the largest arrays."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            advice="make the batch smaller, cut it (micro_batches=...), or keep less for the backward pass: "
            'pipeline=TRAINING.after(..., Rematerialize(budget="...")), see docs/guide/memory.md',
        )


INTERNAL = "internal error"
"""The prefix of the reason for running something in PyTorch when the cause is a defect of this package."""
EXPECTED = (Unsupported, BudgetInfeasible, DeviceMismatch, CompilerError, OutOfMemory)
"""Errors that concern what the user asks for, or the machine."""


def internal(error: BaseException) -> bool:
    """Whether an error raised while a graph is compiled is a defect of this package.

    PyTorch accepted the program, so `Invalid` and `Refused` concern this package's graphs, not the user's arguments.
    """
    if isinstance(error, PassFailed):
        return error.ours
    return isinstance(error, Rejected) or not isinstance(error, EXPECTED)


def why(error: BaseException) -> str:
    """The reason for running a graph in PyTorch: it begins with `INTERNAL` if the error is a defect of this package."""
    text = str(error) if isinstance(error, DacemlError) else f"{type(error).__name__}: {error}"
    return f"{INTERNAL}, {text}" if internal(error) else text


def message_of(error: Exception) -> str:
    """The message of an error, as one sentence."""
    return str(error) if isinstance(error, DacemlError) else f"{type(error).__name__}: {error}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` where a known name is like `name`, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
