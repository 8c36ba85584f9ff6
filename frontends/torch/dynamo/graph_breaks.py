"""Why TorchDynamo breaks a graph where a function may be compiled in pieces: for the report, with the user's line."""

from __future__ import annotations

import functools
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


def _text(error: Exception) -> str:
    """What broke the graph and its explanation, without TorchDynamo's hints to its developers."""
    stack = getattr(error, "real_stack", None)
    lines = [line.strip() for line in str(error).strip().splitlines()]
    kept = [line for line in lines[:2] if line and not line.startswith(("Hint:", "Developer debug context:"))]
    where = f" (at {Path(stack[-1].filename).name}:{stack[-1].lineno})" if stack else ""
    return ": ".join(line.removeprefix("Explanation: ").rstrip(".") for line in kept) + where


traces = Traces(_install)
"""Traces whose graph breaks are noted."""
