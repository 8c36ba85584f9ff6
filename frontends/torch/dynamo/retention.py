"""What TorchDynamo and fake tensors keep of a traced function after its code has gone: memory that grew by each model.

For each object that guards identify, TorchDynamo registers a finalizer that holds all guards of the function. Classes
and functions of PyTorch never die, so neither did the guards of any model. In this package's traces, they live as long
as the compiled code instead. The results that fake tensors remember per operator and sizes, the source text of all code
that FX generates, and a few smaller records have no bound of their own; here they have one.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import weakref
from collections import deque
from typing import Any

import torch._dynamo.guards
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.utils import get_metrics_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph_module import _loader

from daceml_train.frontends.torch.traces import Traces

REMEMBERED = 2048
"""Results of fake operators after which all are forgotten, about 1 KiB each; a capture of ResNet-50 has some 600."""
CODES = 64
"""Code objects whose variables guards remember, after which all are forgotten."""
SOURCES = 64
"""Graph modules of our traces whose source text is kept for tracebacks."""

_sources: deque[str] = deque()
"""Names of the sources of our traces, the oldest first."""


def _bound() -> None:
    if len(FakeTensorMode.cache) > REMEMBERED:
        FakeTensorMode.cache_clear()
    context = get_metrics_context()
    if not context.in_progress():  # stacks of who set a metric, for an error within one compilation
        getattr(context, "_edits", []).clear()
    names = getattr(torch._dynamo.guards, "code_framelocals_names_reversed_cached", None)  # since PyTorch 2.12
    if names is not None and names.cache_info().currsize > CODES:
        names.cache_clear()


def forget_with(owner: object, function: Any) -> None:
    """Let go of what TorchDynamo compiled of a function, as `compiled` returned it, when `owner` dies.

    TorchDynamo keeps it with the code, where Python's search for cycles does not find it: a program that reaches the
    code in some way would stay for ever.
    """
    code = getattr(getattr(function, "_torchdynamo_orig_callable", None), "__code__", None)
    if code is not None:
        weakref.finalize(owner, reset_code, code).atexit = False


class _BoundedTraces(Traces):
    sources: int = 0
    """How many source texts FX had before the first of the traces."""

    def begin(self) -> None:
        _bound()
        if not self.depth:
            self.sources = len(_loader.eval_cache)

    def end(self) -> None:
        if self.depth:
            return
        texts = _loader.eval_cache
        _sources.extend(reversed([*itertools.islice(reversed(texts), max(0, len(texts) - self.sources))]))
        while len(_sources) > SOURCES:
            name = _sources.popleft()
            texts.pop(name, None)
            linecache.cache.pop(name, None)


@functools.cache
def _install() -> None:
    managers: Any = CheckFunctionManager
    init, id_ref = managers.__init__, managers.id_ref

    @functools.wraps(init)
    def keep_with_code(self: Any, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        if traces.depth:
            self.guard_manager.owner = self  # the compiled code holds its guards, and these what invalidates them

    @functools.wraps(id_ref)
    def watch(self: Any, obj: Any, obj_str: str) -> int:
        if not traces.depth or id(obj) in self._weakrefs:
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


traces = _BoundedTraces(_install)
"""Traces whose guards die with their code."""
