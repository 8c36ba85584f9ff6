"""Native calls: parts of PyTorch that take tensors apart without asking their classes are given the values."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._functorch import eager_transforms, vmap
from torch._functorch import utils as functorch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from daceml_train.frontends.torch.recursion.arguments import laziness
from daceml_train.frontends.torch.recursion.lazy import known, recording

_PLACES: tuple[tuple[Any, str], ...] = (
    (functorch, "unwrap_dead_wrappers"),  # with which `torch.autograd.Function.apply` begins
    (checkpoint, "_checkpoint_without_reentrant_generator"),
    (vmap, "_process_batched_inputs"),
    (eager_transforms, "grad_impl"),
    (eager_transforms, "grad_and_value_impl"),
    (eager_transforms, "_vjp_with_argnums"),
    (eager_transforms, "_jvp_with_argnums"),
    (eager_transforms, "_wrap_all_tensors_to_functional"),
    (torch.nn.Parameter, "__new__"),
)


def _enables(mode: Any) -> bool:
    """Whether a context of autocast changes the types of operators on a CPU."""
    return bool(mode._enabled) and mode.device == "cpu"


_MODES: tuple[tuple[Any, str, str, Callable[[Any], bool]], ...] = (
    (torch.autocast, "__enter__", "autocast", _enables),
    (torch.inference_mode, "__enter__", "inference mode", lambda mode: bool(mode.mode)),
    (saved_tensors_hooks, "__enter__", "hooks of saved tensors", lambda mode: type(mode) is saved_tensors_hooks),
    (torch._C, "_set_default_dtype", "another default type", lambda dtype: dtype is not torch.get_default_dtype()),
)
"""Functions after which operators compute otherwise, what they do, and for which arguments."""
APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
"""What runs the `forward` of a user's function for autograd, whose results have to be tensors."""


_LOCK = threading.Lock()
_USERS = [0]


@contextmanager
def values_given() -> Iterator[None]:
    """Have these functions called with tensors in place of lazy values.

    Only meanwhile: TorchDynamo knows some of them by identity.
    """
    _teach_script()
    with _LOCK:
        _USERS[0] += 1
        if _USERS[0] == 1:
            for owner, name, _, taught in _functions():
                setattr(owner, name, taught)
    try:
        yield
    finally:
        with _LOCK:
            _USERS[0] -= 1
            if not _USERS[0]:
                for owner, name, original, _ in _functions():
                    setattr(owner, name, original)


@functools.cache
def _functions() -> tuple[tuple[Any, str, Any, Any], ...]:
    """Where functions are, they themselves, and what takes their place."""
    values = [(owner, name, f := inspect.getattr_static(owner, name), _taught(f)) for owner, name in _PLACES]
    modes = [(owner, name, f := getattr(owner, name), _leaving(f, *rest)) for owner, name, *rest in _MODES]
    stance = eval_frame._callback_from_stance
    return (*values, *modes, (eval_frame, "_callback_from_stance", stance, _without_compiler(stance)))


@functools.cache
def _teach_script() -> None:
    """The same for TorchScript, whose classes of native code do not take their methods back."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        kind.__call__ = _with_values(kind.__call__)  # type: ignore[method-assign]


def _taught(original: Any) -> Any:
    if isinstance(original, staticmethod):
        return staticmethod(_with_values(original.__func__))
    return _with_values(original)


def _without_compiler(original: Callable[..., Any]) -> Callable[..., Any]:
    """What TorchDynamo asks for at a function that `torch.compile` has: the recording follows its Python code."""

    @functools.wraps(original)
    def called(callback: Any) -> Any:
        return original(callback) if recording() is None else None

    return called


def _leaving(original: Callable[..., Any], what: Any, changes: Any) -> Callable[..., Any]:
    """The same function, before which PyTorch takes over."""

    @functools.wraps(original)
    def called(given: Any) -> Any:
        recorder = recording()
        if recorder is not None and not recorder.eager and changes(given):
            recorder.abandon(f"{what} that is enabled")
        return original(given)

    return called


def _with_values(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if recording() is not None and laziness((*args, *kwargs.values())) & 5:
            args, kwargs = known(args), known(kwargs)
        return original(*args, **kwargs)

    return called
