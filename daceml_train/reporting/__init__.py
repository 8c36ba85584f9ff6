"""Report: what compilation did to a module or a training step, as text, HTML, JSON and a trace.

A compiled function is one program (a training step) or two (a forward pass and its backward pass), which are shown
together. Sizes that vary between calls are shown at their most recent values.
"""

import importlib
from typing import TYPE_CHECKING, Any

from daceml_train.reporting.model import Change, Compiled, Contents, Eager, Group, Kept, Launched, grouped
from daceml_train.reporting.numbers import bytes_text, number, share

if TYPE_CHECKING:
    from daceml_train.reporting.collect import Report, report

__all__ = [
    "Change",
    "Compiled",
    "Contents",
    "Eager",
    "Group",
    "Kept",
    "Launched",
    "Report",
    "bytes_text",
    "grouped",
    "number",
    "report",
    "share",
]


def __getattr__(name: str) -> Any:
    """Import the collection of reports on demand: it needs all of the compiler, and numbers do not."""
    if name in ("Report", "report"):
        return getattr(importlib.import_module("daceml_train.reporting.collect"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
