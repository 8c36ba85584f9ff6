"""That a name is not in an object's `__dict__` is a condition of a program that looked for it; TorchDynamo adds none.

`self.__dict__.setdefault("seen", [])` makes a list in the first call. Without the condition, a later call that is equal
otherwise runs the same program, which makes another one.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables import dicts as variables

from daceml_train.frontends.torch.traces import Traces


@functools.cache
def _install() -> None:
    dicts: Any = getattr(variables, "SideEffectsProxyDict", None)
    if dicts is None:  # before PyTorch 2.12, a trace of which finds nothing by names of variables
        return
    contains = dicts.__contains__

    @functools.wraps(contains)
    def __contains__(self: Any, key: Any) -> bool:
        found: bool = contains(self, key)
        source = self.item.source
        if traces.depth and not found and source is not None:
            name = self._maybe_unwrap_key(key)
            if isinstance(name, str) and name not in self.item_dict:
                guard = functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
                install_guard(source.make_guard(guard))
        return found

    dicts.__contains__ = __contains__


traces = Traces(_install)
"""Traces that add it."""
