"""Progress of a verification or a measurement: what it does, how far it is, and what is known so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from daceml_train.driver.settings import Settings
from daceml_train.errors import Invalid


@dataclass(frozen=True)
class CheckProgress:
    """A moment of a check. `result` is a partial `Verification` or `Measurement`, where there is a new one."""

    what: str
    """What it does, and for which program."""
    done: int = 0
    of: int = 0
    """0 where it is not known."""
    left: float | None = None
    """Seconds that are left, estimated; None where they are not known."""
    result: Any = None

    def __str__(self) -> str:
        count = f": {self.done} of {self.of}" if self.of else ""
        left = "" if self.left is None else f", about {self.left:.0f} s left"
        return f"{self.what}{count}{left}"


OnProgress = Callable[[CheckProgress], None]
"""Is called in the thread of the check; what it raises ends the check."""


def check_progress(given: Any) -> None:
    """Raise `Invalid` for what cannot be called, before a check begins."""
    if not callable(given):
        raise Invalid(f"progress is called during a check, given {given!r}")


def unheard(_: CheckProgress) -> None:
    """Nobody listens."""


def compiling(options: Settings, program: str, progress: OnProgress) -> Settings:
    """The options with which a program compiles whose kernels `progress` counts, beside who counts already."""
    before = options.progress

    def counted(done: int, of: int) -> None:
        if before is not None:
            before(done, of)
        progress(CheckProgress(f"compiling {program}, kernel", done, of))

    progress(CheckProgress(f"lowering {program}"))
    return dataclasses.replace(options, progress=counted)
