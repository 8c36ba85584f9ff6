"""Floating-point numbers that Python's `random` draws break the graph: Python draws them.

TorchDynamo describes such a number in PyTorch's default type, and passes it in double precision. What a tensor of it
would have for a type is neither.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.source import RandomValueSource
from torch._dynamo.variables.builder import VariableBuilder

from daceml_train.frontends.torch.traces import Traces


@functools.cache
def _install() -> None:
    builders: Any = VariableBuilder
    wrap = builders.wrap_unspecialized_primitive

    @functools.wraps(wrap)
    def wrap_unspecialized_primitive(self: Any, value: Any) -> Any:
        if traces.depth and isinstance(value, float) and isinstance(self.get_source(), RandomValueSource):
            unimplemented(
                gb_type="a number that Python draws",
                context=self.name,
                explanation="Python's random numbers are drawn by Python.",
                hints=[*graph_break_hints.SUPPORTABLE],
            )
        return wrap(self, value)

    builders.wrap_unspecialized_primitive = wrap_unspecialized_primitive


traces = Traces(_install)
"""Traces in which they do."""
