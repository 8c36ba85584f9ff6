"""Which modules and methods only compute, so that what they record can be repeated, and the state they depend on."""

from __future__ import annotations

import ast
import types
from collections.abc import Sequence
from typing import Any

import torch

from daceml_train.frontends.torch.recursion.pure import Checker, methods_of, named


def only_computes(a: Any) -> bool:
    """Whether calling an operand only computes: a module of PyTorch without hooks, or a method of such statements."""
    if isinstance(a, torch.nn.Module):
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return all(
            type(m).__module__.startswith("torch.nn.") and not any(getattr(m, hook) for hook in hooks)
            for m in a.modules()
        )
    return not isinstance(a, types.MethodType) or _method_computes(a)


def _method_computes(method: types.MethodType) -> bool:
    function = method.__func__
    if not isinstance(function, types.FunctionType) or not isinstance(method.__self__, torch.nn.Module):
        return False
    checker = Checker(function)
    try:
        statements = list(methods_of(function))
    except ValueError:
        return False
    for node in statements:
        if not isinstance(node, ast.Return | ast.Assign) or node.value is None:
            return False
        if isinstance(node, ast.Assign) and named(node.targets) is None:
            return False
        if not checker.pure(node.value, frozenset()):
            return False
        for each in ast.walk(node.value):
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in checker.own:
                value = getattr(method.__self__, each.attr, None)
                if not isinstance(value, torch.Tensor) and not _called_computes(value):
                    return False
    return True


def _called_computes(value: Any) -> bool:
    return isinstance(value, torch.nn.Module | types.MethodType) and only_computes(value)


def state_of(model_modules: Sequence[torch.nn.Module]) -> tuple[Any, ...]:
    """The plain attributes of modules: a record is repeated only while they are equal."""
    found: list[Any] = [torch.get_default_dtype()]
    for m in model_modules:
        found.append(id(m))
        found += [(name, v) for name, v in vars(m).items() if type(v) in (int, float, bool, str)]
        found += [len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)]
    return tuple(found)
