"""Texts with numbers that change break the graph where their value matters: as keys, and in comparisons.

TorchDynamo formats such a text after the graph has run, and takes it for a key of its own until then.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.misc import StringFormatVariable

from daceml_train.frontends.torch.traces import Traces

_METHODS = ("is_hashable", "hash_impl", "richcompare_impl", "is_python_hashable", "get_python_hash", "is_python_equal")
"""What asks for the value, in some version or other."""


@functools.cache
def _install() -> None:
    texts: Any = StringFormatVariable
    for name in _METHODS:
        if hasattr(texts, name):
            setattr(texts, name, _breaking(getattr(texts, name)))


def _breaking(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if traces.depth:
            unimplemented(
                gb_type="a text with a number",
                context=str(self),
                explanation="Python forms a text whose number changes where its value matters.",
                hints=[],
            )
        return method(self, *arguments, **keywords)

    return call


traces = Traces(_install)
"""Traces in which they do."""
