"""NumPy's functions that select by order: NumPy runs them.

TorchDynamo replaces a call of NumPy by PyTorch's operators. `numpy.quantile` and its relatives find a few elements
without sorting all of them, for which PyTorch has no operator: a graph with a sort takes several times as long.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.misc import NumpyVariable

from daceml_train.frontends.torch.traces import Traces

_SELECTING = (np.quantile, np.percentile, np.median, np.partition, np.argpartition)


@functools.cache
def _install() -> None:
    functions: Any = NumpyVariable
    call = functions.call_function

    @functools.wraps(call)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if traces.depth and any(self.value is function for function in _SELECTING):
            unimplemented(
                gb_type="a selection of NumPy's",
                context=str(self.value),
                explanation="NumPy selects by order without sorting.",
                hints=[*graph_break_hints.SUPPORTABLE],
            )
        return call(self, tx, args, kwargs)

    functions.call_function = call_function


traces = Traces(_install)
"""Traces in which NumPy selects."""
