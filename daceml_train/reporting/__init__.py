"""Report: what compilation did to a module or a training step, as text, HTML, JSON and a trace.

A compiled function is one program (a training step) or two (a forward pass and its backward pass), which are shown
together. Sizes that vary between calls are shown at the values they had last.
"""

from daceml_train.reporting.collect import Report, report
from daceml_train.reporting.model import Change, Compiled, Contents, Eager, Group, Kept, Launched, grouped
from daceml_train.reporting.numbers import bytes_text, number, share

__all__ = [
    "Change", "Compiled", "Contents", "Eager", "Group", "Kept", "Launched", "Report", "bytes_text", "grouped",
    "number", "report", "share",
]  # fmt: skip
