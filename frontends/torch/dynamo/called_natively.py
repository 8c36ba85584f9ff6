"""Native functions as compiled graphs: TorchDynamo calls them as they are.

Around what a backend returns, TorchDynamo puts a function that lets nothing be traced within. A native function has no
frame that could be, and the function around it takes as long as a kernel of a small model.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

from torch._dynamo import decorators

from daceml_train.frontends.torch.traces import Traces

_SKIPS_WRONGLY = sys.version_info < (3, 12)
"""Python 3.11's specialized call of a builtin function skips the next instruction without the prefix that it has where
there are more than 255 arguments, and crashes. Python's own compiler never passes as many; TorchDynamo does."""


@functools.cache
def _install() -> None:
    original: Any = decorators.disable

    def disable(fn: Any = None, *arguments: Any, **options: Any) -> Any:
        if traces.depth and type(fn) is types.BuiltinFunctionType:
            return functools.partial(fn) if _SKIPS_WRONGLY else fn
        return original(fn, *arguments, **options)

    decorators.disable = disable


traces = Traces(_install)
