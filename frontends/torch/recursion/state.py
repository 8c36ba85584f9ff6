"""The state of a model's modules that records depend on: a record is repeated only while it is equal."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as base

from daceml_train.frontends.torch.recursion.watches import Contents

SCALARS = (int, float, bool, str, type(None))
_OWN = frozenset(vars(torch.nn.Module())) - {"training"}
"""What each module has, beside `training`: tables of parameters, of modules, and of hooks."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Identity:
    """Equal for one object only, which stays alive: its identity is no other object's."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Identity and other.value is self.value


@dataclass(frozen=True)
class State:
    """What was seen of modules, of which `modules` has the identities."""

    seen: tuple[Any, ...]
    modules: frozenset[int] = field(compare=False)


def of_torch(kind: type) -> bool:
    """Whether a class of modules is PyTorch's."""
    return kind.__module__.startswith("torch.nn.")


def hooked(module: torch.nn.Module) -> bool:
    """Whether calls of a module call hooks of its own."""
    return any(getattr(module, hook) for hook in _HOOKS)


def all_hooked() -> bool:
    """Whether calls of any module call hooks."""
    return any(getattr(base, f"_global{hook}") for hook in _HOOKS)


def hooked_at_results(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether calls hook the last operator of their results, as `register_backward_hook` does: lazy ones have none."""
    if base._global_backward_hooks and base._global_is_full_backward_hook is False:
        return True
    return any(m._backward_hooks and m._is_full_backward_hook is False for m in modules)


def state_of(model_modules: Sequence[torch.nn.Module], contents: Contents) -> State:
    """The state of modules: methods of classes, parameters, modules, hooks, and the rest of PyTorch's own."""
    kinds = tuple(dict.fromkeys(map(type, model_modules)))
    found: list[Any] = [torch.get_default_dtype(), contents.of(tuple(filter(of_torch, kinds))), all_hooked()]
    for kind in kinds:
        found += _of_class(kind)
    for m in model_modules:
        found += _of_module(m)
    return State(tuple(found), frozenset(map(id, model_modules)))


def _of_module(m: torch.nn.Module) -> Iterator[Any]:
    kind = type(m)
    yield from (Identity(m), Identity(kind), hooked(m))
    for tensors in (m._parameters, m._buffers):
        yield tuple(
            [
                (name, None if t is None else (id(t), t.requires_grad, t.shape, t.dtype, t.device))
                for name, t in tensors.items()
            ]
        )
    yield tuple([(name, id(child)) for name, child in m._modules.items()])
    if of_torch(kind):
        yield tuple([(name, _value(v)) for name, v in vars(m).items() if name not in _OWN])
    else:  # what takes the place of a method; blocks that read all else compare it
        yield tuple([(name, Identity(v)) for name, v in vars(m).items() if name not in _OWN and hasattr(kind, name)])


def _of_class(kind: type) -> Iterator[Any]:
    """The methods of a class, and what is computed when it is read."""
    if of_torch(kind):
        yield from _of_function(getattr(kind, "forward", None))
        return
    for owner in kind.__mro__:
        if owner.__module__.startswith("torch."):
            continue
        yield Identity(owner)
        for name, value in tuple(vars(owner).items()):
            if isinstance(value, types.FunctionType):
                yield (name, *_of_function(value))
            elif hasattr(type(value), "__get__"):
                yield name, Identity(value)


def _of_function(function: Any) -> Iterator[Any]:
    yield Identity(function)
    if isinstance(function, types.FunctionType):
        yield Identity(function.__code__)
        yield _value(function.__defaults__)
        yield _value(function.__kwdefaults__)


def _value(v: Any) -> Any:
    """What stands for a value: scalars and sequences of them are equal if their types and signs are."""
    kind = type(v)
    if kind in SCALARS:
        return kind, str(v) if kind is float else v
    if kind in (tuple, list, torch.Size):
        return (kind, *map(_value, v))
    if kind is dict:
        return (kind, *((_value(name), _value(each)) for name, each in v.items()))
    return Identity(v)
