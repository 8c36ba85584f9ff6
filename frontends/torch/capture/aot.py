"""PyTorch's functional tracing, without NetworkX, which its partitioner imports and which takes 12 MB of every process.

The partitioner is not used here. Should anything else use it later, NetworkX is imported then.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class Later(ModuleType):
    """Stands in for a module: while others are imported its attributes are only named, then they are the module's."""

    naming = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Any if self.naming else getattr(importlib.import_module(self.__name__), name)


@contextmanager
def later(name: str) -> Iterator[None]:
    """Within it, importing a module that is not loaded gives what stands in for it."""
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None:
        yield
        return
    stand_in = sys.modules[name] = Later(name)
    stand_in.__spec__ = spec
    try:
        yield
    finally:
        stand_in.naming = False
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


importlib.import_module("torch._dynamo")  # before: its rules look for packages
with later("networkx"):
    from torch._functorch._aot_autograd.schemas import GraphSignature
    from torch._functorch.aot_autograd import aot_export_joint_simple, aot_export_module

__all__ = ["GraphSignature", "aot_export_joint_simple", "aot_export_module"]
