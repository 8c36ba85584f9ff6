"""Native calls: parts of PyTorch that take tensors apart without asking their classes are given the values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap
from torch._functorch import utils as functorch
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
    (torch._C.ScriptFunction, "__call__"),
    (torch._C.ScriptMethod, "__call__"),
)


APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
"""What runs the `forward` of a user's function for autograd, whose results have to be tensors."""


@functools.cache
def give_values() -> None:
    """Have these functions called with tensors in place of lazy values, from here on."""
    for owner, name in _PLACES:
        if (original := getattr(owner, name, None)) is not None:
            setattr(owner, name, _with_values(original))


def _with_values(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if recording() is not None and laziness((*args, *kwargs.values())) & 5:
            args, kwargs = known(args), known(kwargs)
        return original(*args, **kwargs)

    return called
