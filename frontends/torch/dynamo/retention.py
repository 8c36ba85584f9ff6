"""What TorchDynamo and fake tensors keep of a traced function after its code has gone: memory that grew by each model.

For each object that guards identify, TorchDynamo registers a finalizer that holds all guards of the function. Classes
and functions of PyTorch never die, so neither did the guards of any model. In this package's traces, they live as long
as the compiled code instead. The results that fake tensors remember per operator and sizes have no bound of their own.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch._dynamo.guards import CheckFunctionManager
from torch._subclasses.fake_tensor import FakeTensorMode

from daceml_train.frontends.torch.traces import Traces

REMEMBERED = 2048
"""Results of fake operators after which all are forgotten, about 1 KiB each; a capture of ResNet-50 has some 600."""

_traces = Traces()


def enter() -> None:
    """Let the guards of this thread's traces die with their code, until `leave`, for this package's backend only."""
    _install()
    if len(FakeTensorMode.cache) > REMEMBERED:
        FakeTensorMode.cache_clear()
    _traces.depth += 1


def leave() -> None:
    """End what `enter` began."""
    _traces.depth -= 1


@functools.cache
def _install() -> None:
    managers: Any = CheckFunctionManager
    init, id_ref = managers.__init__, managers.id_ref

    @functools.wraps(init)
    def keep_with_code(self: Any, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        if _traces.depth:
            self.guard_manager.owner = self  # the compiled code holds its guards, and these what invalidates them

    @functools.wraps(id_ref)
    def watch(self: Any, obj: Any, obj_str: str) -> int:
        if not _traces.depth or id(obj) in self._weakrefs:
            return int(id_ref(self, obj, obj_str))
        manager = weakref.ref(self)

        def invalidate(_: Any) -> None:
            if (alive := manager()) is not None:
                alive.invalidate(obj_str=obj_str)

        try:
            reference = weakref.ref(obj, invalidate)
        except TypeError:  # as a bool
            return id(obj)
        self._weakrefs[id(obj)] = reference  # TorchDynamo clears these once the guards are built
        self.__dict__.setdefault("watched", []).append(reference)
        return id(obj)

    managers.__init__, managers.id_ref = keep_with_code, watch
