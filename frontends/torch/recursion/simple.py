"""Which modules and methods only compute, so that what they record can be repeated while their state is the same."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from daceml_train.frontends.torch.recursion.pure import Checker, methods_of, named
from daceml_train.frontends.torch.recursion.state import SCALARS, all_hooked, hooked, of_torch
from daceml_train.frontends.torch.recursion.watches import Reads

_REFUSED = object()
_INDEXED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential, torch.nn.ParameterList)


def only_computes(a: Any, modules: Collection[int], reads: Reads) -> bool:
    """Whether calling an operand only computes: a module of PyTorch without hooks, or a method of such statements.

    All that it depends on belongs to `modules`, which are given by their identities; `reads` receives it.
    """
    if isinstance(a, torch.nn.Module):
        return _module_computes(a, modules, reads)
    return not isinstance(a, types.MethodType) or _Method(a, modules, (), reads).computes()


def called_computes(function: types.FunctionType, modules: Sequence[torch.nn.Module]) -> Callable[[ast.expr], bool]:
    """Tells of attributes of a function's first parameter whether calling what they are now only computes.

    The parameter is any of the modules that have the function as a method, or any of all if it is none.
    """
    identities = frozenset(map(id, modules))
    owners = [m for m in modules if any(f is function for c in type(m).__mro__ for f in vars(c).values())]

    def computes(node: ast.expr) -> bool:
        found = []
        for owner in owners or modules:
            method = _Method(types.MethodType(function, owner), identities, (), Reads())
            value = method.read(node)
            if value is not _REFUSED or owners:
                found.append(method.called_computes(value))
        return bool(found) and all(found)

    return computes


def _module_computes(a: torch.nn.Module, modules: Collection[int], reads: Reads) -> bool:
    for m in a.modules():
        reads.module(m)
    return not all_hooked() and _of_library(torch.nn.Module.__call__) and all(
        id(m) in modules
        and of_torch(type(m))
        and _of_library(type(m).forward)
        and "forward" not in vars(m)
        and m._compiled_call_impl is None
        and not hooked(m)
        for m in a.modules()
    )  # fmt: skip


def _of_library(function: Any) -> bool:
    return getattr(function, "__module__", "").startswith("torch.nn.")


class _Method:
    """A bound method; `callers` are the functions that call it, one within the other; `reads` receives what is read."""

    def __init__(
        self, method: types.MethodType, modules: Collection[int], callers: tuple[Any, ...], reads: Reads
    ) -> None:
        self.owner: Any = method.__self__
        self.function: Any = method.__func__
        self.modules, self.callers, self.reads = modules, (*callers, method.__func__), reads

    def computes(self) -> bool:
        """Whether all statements only compute with tensors, from what is given, and from the state of modules."""
        function = self.function
        if not isinstance(function, types.FunctionType) or not isinstance(self.owner, torch.nn.Module):
            return False
        if id(self.owner) not in self.modules or not self._of_class() or function in self.callers[:-1]:
            return False
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if any(type(d) not in SCALARS for d in defaults):
            return False
        self.checker = Checker(function)
        self.reads.function(function)
        self.reads.files(function, self.checker.modules.intersection(function.__code__.co_names))
        self.locals = set(function.__code__.co_varnames).difference(self.checker.own)
        try:
            return all(map(self._statement, methods_of(function)))
        except ValueError:
            return False

    def _of_class(self) -> bool:
        """Whether it is a method whose changes are part of the state of modules."""
        kind = type(self.owner)
        if of_torch(kind):
            return self.function is getattr(kind, "forward", None) and _of_library(self.function)
        own = [c for c in kind.__mro__ if not c.__module__.startswith("torch.")]
        return any(vars(c).get(self.function.__name__) is self.function for c in own)

    def _statement(self, node: ast.stmt) -> bool:
        if not isinstance(node, ast.Return | ast.Assign) or node.value is None:
            return False
        if isinstance(node, ast.Assign):
            targets = named(node.targets)
            if targets is None or not self.locals.issuperset(targets):
                return False
        return self.checker.pure(node.value, frozenset()) and self._known(node.value)

    def _known(self, node: ast.AST) -> bool:
        """Whether all that an expression reads is given, computed here, PyTorch's, or state of modules."""
        checker = self.checker
        if isinstance(node, ast.Name):
            return node.id in self.locals
        if isinstance(node, ast.Attribute | ast.Subscript):
            if checker.library(node):
                return True
            if checker.chain(node) and checker.root(node) in checker.own:
                return self.called_computes(self.read(node))
            if isinstance(node, ast.Attribute) and not hasattr(torch.Tensor, node.attr):
                return False
        return all(self._known(each) for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr_context))

    def called_computes(self, value: Any) -> bool:
        """Whether calling what was read, or computing with it, only computes."""
        if isinstance(value, torch.nn.Module):
            return _module_computes(value, self.modules, self.reads)
        if isinstance(value, types.MethodType):
            return _Method(value, self.modules, self.callers, self.reads).computes()
        return value is not _REFUSED

    def read(self, node: ast.expr) -> Any:
        """What attributes of the method's object are now, if that is state of modules."""
        if isinstance(node, ast.Name):
            return self.owner
        assert isinstance(node, ast.Attribute | ast.Subscript)
        value = self.read(node.value)
        if isinstance(value, torch.nn.Module):
            return self._of_module(value, node)
        if isinstance(value, torch.Tensor):  # what follows is its type's, or a part of it
            plain = isinstance(node, ast.Subscript) or hasattr(torch.Tensor, node.attr)
            return value if plain else _REFUSED
        constant = isinstance(value, tuple) and isinstance(node, ast.Subscript)
        return value if constant else _REFUSED

    def _of_module(self, module: torch.nn.Module, node: ast.Attribute | ast.Subscript) -> Any:
        kind: Any = type(module)
        if id(module) not in self.modules:
            return _REFUSED
        if of_torch(kind):
            self.reads.module(module)
        if isinstance(node, ast.Subscript):
            assert isinstance(node.slice, ast.Constant)
            return module[node.slice.value] if kind in _INDEXED else _REFUSED  # type: ignore[index]
        usual = kind.__getattr__ is torch.nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
        if not usual:
            return _REFUSED
        name, own = node.attr, vars(module)
        self.reads.attribute(module, name)
        if name in own:
            plain = of_torch(kind) and type(own[name]) in (*SCALARS, tuple)
            return own[name] if plain else _REFUSED
        try:
            found = inspect.getattr_static(kind, name)
        except AttributeError:
            tables = (module._parameters, module._buffers, module._modules)
            return next((table[name] for table in tables if name in table), _REFUSED)
        return types.MethodType(found, module) if isinstance(found, types.FunctionType) else _REFUSED
