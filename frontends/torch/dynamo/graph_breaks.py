"""Why TorchDynamo breaks a graph where a function may be compiled in pieces: for the report, with the user's line."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from daceml_train.frontends.torch.traces import Traces


@functools.cache
def _install() -> None:
    translators: Any = InstructionTranslatorBase
    original = getattr(translators, "log_graph_break", None)
    if original is None:
        return

    def log(self: Any, *arguments: Any, **keywords: Any) -> None:
        given = (*arguments, *keywords.values())
        error = next((a for a in given if isinstance(a, Exception)), None)
        if traces.depth and error is not None:
            traces.note(_text(error))
        original(self, *arguments, **keywords)

    translators.log_graph_break = log


DECIDED = "a Python decision on a tensor's value"
_OF_A_NUMBER = re.compile(r"guard on data-dependent expression .*\bzuf\d")
"""What TorchDynamo says of a comparison of `float(tensor)`, whose symbols begin with these letters."""


REPEATED = "a Python object is changed within a function that PyTorch calls, as often as it likes"
"""What a program along a path would do once; a checkpointed function is called again in the backward pass."""
_WITHIN = ("HOP: Non-nullified side effect", "HOP: Unsafe side effect")


def explained(text: str) -> str | None:
    """A text of TorchDynamo's as one sentence with its explanation, without hints; None if it has no explanation."""
    if text.startswith("generic_jump") or _OF_A_NUMBER.search(text):
        return DECIDED
    if text.startswith(_WITHIN):
        return REPEATED
    lines = [line.strip() for line in text.strip().splitlines()]
    found = next((line for line in lines if line.startswith("Explanation:")), None)
    return None if found is None else f"{lines[0]}: {found.removeprefix('Explanation:').strip().rstrip('.')}"


def _text(error: Exception) -> str:
    """What broke the graph and its explanation, without TorchDynamo's hints to its developers."""
    stack = getattr(error, "real_stack", None)
    lines = [line.strip() for line in str(error).strip().splitlines()]
    kept = [line for line in lines[:2] if line and not line.startswith(("Hint:", "Developer debug context:"))]
    where = f" (at {Path(stack[-1].filename).name}:{stack[-1].lineno})" if stack else ""
    return ": ".join(line.removeprefix("Explanation: ").rstrip(".") for line in kept) + where


traces = Traces(_install)
"""Traces whose graph breaks are noted."""
