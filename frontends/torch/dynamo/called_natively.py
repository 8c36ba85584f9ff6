"""Native functions as compiled graphs: TorchDynamo calls them as they are.

Around what a backend returns, TorchDynamo puts a function that lets nothing be traced within. A native function has no
frame that could be, and the function around it takes as long as a kernel of a small model.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch._dynamo import decorators

from daceml_train.frontends.torch.traces import Traces


@functools.cache
def _install() -> None:
    original: Any = decorators.disable

    def disable(fn: Any = None, *arguments: Any, **options: Any) -> Any:
        if traces.depth and type(fn) is types.BuiltinFunctionType:
            return fn
        return original(fn, *arguments, **options)

    decorators.disable = disable


traces = Traces(_install)
