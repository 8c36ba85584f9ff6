"""Formatted numbers in Python effects: an f-string of a number that is an input keeps its format.

TorchDynamo replaces `f"{x:.4f}"` by the source of `x` where the number is not a constant, so that the second call of
compiled code prints `0.5737600922584534`, or stores a number in place of its text. Formats are delayed until the graph
has run instead, as TorchDynamo does for `str.format`. It uses this with any backend; eager execution never does.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.misc import StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from daceml_train.frontends.torch.dynamo.rounded import RoundedVariable

CONVERSIONS = ("", "!s", "!r", "!a")
_translators: Any = InstructionTranslatorBase
_of_constants: Any = _translators._format_value


def _format_value(translator: Any, form: Any, flags: int) -> None:
    """A part of an f-string: the number on the stack in the format `form`."""
    if not isinstance(translator.stack[-1], (SymNodeVariable, RoundedVariable)):
        _of_constants(translator, form, flags)
        return
    template = f"{{{CONVERSIONS[flags & 3]}:{form.as_python_constant()}}}"
    translator.push(StringFormatVariable.create(template, [translator.pop()], {}))


def install() -> None:
    """Let TorchDynamo delay the formats of numbers."""
    _translators._format_value = _format_value
