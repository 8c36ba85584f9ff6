"""Operators whose errors the user's code may catch break the graph: PyTorch calls them where the handler is."""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo import graph_break_hints, symbolic_convert
from torch._dynamo.exc import unimplemented
from torch._dynamo.output_graph import SubgraphTracer

from daceml_train.frontends.torch.handlers import catches, is_caught_outside, is_library, may_fail
from daceml_train.frontends.torch.traces import Traces


@functools.cache
def _install() -> None:
    convert: Any = symbolic_convert
    tracers: Any = SubgraphTracer
    detect, create = convert._detect_and_normalize_assert_statement, tracers.create_proxy

    @functools.wraps(detect)
    def is_assertion(self: Any, *arguments: Any) -> bool:
        return not (traces.depth and _caught(self)) and bool(detect(self, *arguments))

    @functools.wraps(create)
    def create_proxy(self: Any, kind: str, target: Any, args: Any, *others: Any, **keywords: Any) -> Any:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        if traces.depth and kind.startswith("call_") and may_fail(name, args) and _caught(self.output_graph.current_tx):
            unimplemented(
                gb_type="an error that the model may catch",
                context=name,
                explanation=f"{name} fails for some data within a try statement.",
                hints=[*graph_break_hints.SUPPORTABLE],
            )
        return create(self, kind, target, args, *others, **keywords)

    convert._detect_and_normalize_assert_statement, tracers.create_proxy = is_assertion, create_proxy


def _caught(translator: Any) -> bool:
    """Whether an error here meets a handler in this function or in one that called it."""
    while translator is not None:
        if not is_library(translator.f_code) and _catches(translator):
            return True
        translator = getattr(translator, "parent", None)
    return is_caught_outside()


def _catches(translator: Any) -> bool:
    """Whether an error at a function's current instruction meets a handler within the function."""
    instructions, seen = translator.instructions, set[int]()
    entry = translator.current_instruction.exn_tab_entry
    while entry is not None and id(entry.target) not in seen:
        seen.add(id(entry.target))
        handler = instructions[translator.indexof[entry.target] :]
        if catches(translator.f_code, ((i.opname, i.argval) for i in handler)):
            return True
        entry = entry.target.exn_tab_entry
    return False


traces = Traces(_install)
"""Traces in which they do."""
