"""Blocks: parts of a recursive function that only compute with tensors; what they record is kept, and repeated."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daceml_train.frontends.torch.recursion.lazy import Lazy, local, meta_of
from daceml_train.frontends.torch.recursion.pure import Checker, methods_of, named
from daceml_train.frontends.torch.recursion.runs import Run

SCALARS = (int, float, bool, str, type(None))


@dataclass
class Repeat:
    """What a block records for operands of certain types: a run, its inputs and results by their positions."""

    at: Any
    inputs: tuple[int, ...]
    metas: tuple[Any, ...]
    template: Any
    held: tuple[Any, ...]
    """Operands whose identity is part of the key."""


class Unkept(Exception):
    """Operands or results for which a record cannot be repeated."""


class Block:
    """A function of what some statements of a recursive function read."""

    def __init__(self, function: Callable[..., Any], owner: types.FunctionType) -> None:
        self.function, self.owner = function, owner

    def __call__(self, *operands: Any) -> Any:
        recorder = local.recorder
        if recorder is None or recorder.eager:
            return self.function(*operands)
        shared = recorder.shared
        key: list[Any] = [self, torch.is_grad_enabled()]
        for a in operands:
            kind = type(a)
            if kind is Lazy and a.value is None:
                key.append(a.meta)
            elif kind is types.MethodType:
                key += (a.__func__, id(a.__self__))
            elif kind in SCALARS:
                key += (kind, a)
            elif isinstance(a, torch.nn.Module):
                key.append(id(a))
            elif kind is torch.Tensor or kind is torch.nn.Parameter:
                key.append(shared.get(id(a)) or meta_of(a))
            else:
                return self.function(*operands)
        memo = recorder.memo
        found = memo.get(whole := tuple(key), self)
        if found is self:
            return self._first(recorder, whole, operands)
        return self.function(*operands) if found is None else repeated(recorder, found, operands)

    def _first(self, recorder: Any, key: tuple[Any, ...], operands: Sequence[Any]) -> Any:
        before, events = len(recorder.pending), recorder.events
        result = self.function(*operands)
        recorder.memo[key] = None
        results = recorder.pending[before:]
        if recorder.events != events or len(results) != 1 or not all(_only_computes(a) for a in operands):
            return result
        run: Run = results[0]
        ids = [id(a) for a in operands if isinstance(a, torch.Tensor)]
        positions = {id(a): k for k, a in enumerate(operands)}
        try:
            if len(set(ids)) != len(ids) or any(id(a) not in positions for a in run.inputs):
                raise Unkept
            template = _template(result, run, positions)
        except Unkept:
            return result
        run.sealed = True
        inputs = tuple(positions[id(a)] for a in run.inputs)
        held = tuple(a for a in operands if not isinstance(a, torch.Tensor))
        recorder.memo[key] = Repeat(run.at, inputs, tuple(v.meta for v in run.values), template, held)
        return result


def _template(found: Any, run: Run, positions: dict[int, int]) -> Any:
    """A result of a block: a number of a value of its run, `(position,)` of an operand, or a list or tuple of such."""
    if type(found) is Lazy and found.source is run:
        return found.index
    if id(found) in positions and isinstance(found, torch.Tensor):
        return [None, positions[id(found)]]
    if type(found) in (list, tuple):
        return (type(found), *(_template(f, run, positions) for f in found))
    raise Unkept


def repeated(recorder: Any, kept: Repeat, operands: Sequence[Any]) -> Any:
    """Record again what a block records, on other operands."""
    run = Run(recorder, kept.at, False)
    run.sealed = True
    inputs = run.inputs
    height = stage = 0
    for position in kept.inputs:
        a = operands[position]
        inputs.append(a)
        if type(a) is Lazy:
            source = a.source
            if type(source) is Run and source.forest is None:
                source.sealed = True
                source.used.add(a.index)
                if height <= source.height:
                    height = source.height + 1
            if stage < source.stage:
                stage = source.stage
    run.height, run.stage = height, stage
    values: list[Any] = [None] * len(kept.metas)
    run.values = values
    recorder.pending.append(run)
    metas = kept.metas

    def filled(template: Any) -> Any:
        if type(template) is int:
            value = values[template]
            if value is None:
                value = values[template] = Lazy(run, template, metas[template])
            return value
        if type(template) is list:
            return operands[template[1]]
        return template[0]([filled(t) for t in template[1:]])

    return filled(kept.template)


def _only_computes(a: Any) -> bool:
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
                if not isinstance(value, torch.Tensor) and not _only_computes_called(value):
                    return False
    return True


def _only_computes_called(value: Any) -> bool:
    return isinstance(value, torch.nn.Module | types.MethodType) and _only_computes(value)


def state_of(model_modules: Sequence[torch.nn.Module]) -> tuple[Any, ...]:
    """The plain attributes of modules: a record is repeated only while they are equal."""
    found: list[Any] = [torch.get_default_dtype()]
    for m in model_modules:
        found.append(id(m))
        found += [(name, v) for name, v in vars(m).items() if type(v) in (int, float, bool, str)]
        found += [len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)]
    return tuple(found)
