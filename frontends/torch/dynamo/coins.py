"""Random numbers that break the graph: floating-point ones of Python's `random`, and those of NumPy.

TorchDynamo describes a number of Python's in PyTorch's default type, and passes it in double precision. What a tensor
of it would have for a type is neither. Of what NumPy draws, TorchDynamo makes draws of PyTorch's, which neither heed
nor advance NumPy's stream.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from torch._dynamo.exc import unimplemented
from torch._dynamo.source import RandomValueSource
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.tensor import SymNodeVariable

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
                hints=[],
            )
        return wrap(self, value)

    builders.wrap_unspecialized_primitive = wrap_unspecialized_primitive
    functions: Any = NumpyVariable
    original = functions.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        scalar = isinstance(self.value, type) and issubclass(self.value, np.generic)
        if traces.depth and scalar and any(isinstance(arg.realize(), SymNodeVariable) for arg in args):
            unimplemented(
                gb_type="a number of NumPy's",
                context=str(self.value),
                explanation=f"NumPy rounds a number to {self.value.__name__}.",
                hints=[],
            )
        if traces.depth and isinstance(getattr(self.value, "__self__", None), np.random.RandomState):
            unimplemented(
                gb_type="a number that NumPy draws",
                context=str(self.value),
                explanation="NumPy's random numbers are drawn by NumPy.",
                hints=[],
            )
        return original(self, tx, args, kwargs)

    functions.call_function = call_function


traces = Traces(_install)
"""Traces in which they do."""
