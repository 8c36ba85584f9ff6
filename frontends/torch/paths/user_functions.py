"""Calls of `autograd.Function`: their gradient is Python, which no program of a path calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo

Apply = Callable[..., Any]

_BASE: Any = torch.autograd.function._SingleLevelFunction
"""Whose `apply` that of `Function` calls; users keep the latter (`exp = Exp.apply`), so it cannot be replaced."""

_threads = threading.local()
_lock = threading.Lock()
_contexts = 0


@contextlib.contextmanager
def watched(applied: Callable[[Apply, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Within this context, `applied(apply, arguments)` returns what this thread's calls of `Function.apply` return."""
    before = getattr(_threads, "applied", None)
    _count(1)
    _threads.applied = applied
    try:
        yield
    finally:
        _threads.applied = before
        _count(-1)


def _count(change: int) -> None:
    """Replace the function within contexts alone: TorchDynamo would trace it."""
    global _contexts
    with _lock:
        _contexts += change
        if _contexts == change == 1:
            _BASE.apply = classmethod(_apply)
        elif _contexts == 0:
            del _BASE.apply


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _apply(cls: Any, *arguments: Any, **keywords: Any) -> Any:
    def run(*arguments: Any) -> Any:
        return super(_BASE, cls).apply(*arguments, **keywords)

    applied = getattr(_threads, "applied", None)
    return run(*arguments) if applied is None else applied(run, arguments)


__all__ = ["watched"]
