"""Hashes of functions and of what they refer to: their code, constants, tensors, arrays, modules, other functions.

What has no text to compare, such as a data set object, is refused unless the user names the data.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from daceml_train.errors import Invalid
from daceml_train.trials.attributes import of_modules
from daceml_train.trials.encoding import NAMESPACES, own_fields
from daceml_train.trials.keys import digest
from daceml_train.trials.values import digest_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range)
Seen = dict[int, Any]
"""Objects by their addresses, which are theirs as long as they are kept here."""
_LIBRARIES = ("torch", "numpy", "daceml_train", "builtins")
_PYTHON = Path(sysconfig.get_paths()["stdlib"]).resolve()
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MemberDescriptorType,
)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def fingerprint(value: Any, role: str, name: str | None, seen: Seen | None = None, own: Iterable[Any] = ()) -> str:
    """A hash of a function and of what it refers to. Raises `Invalid` for what has none, unless there is a `name`.

    `seen` receives the objects that were hashed. `own` are objects whose content is part of the state.
    """
    hashed = _Hashed(role, name, {} if seen is None else seen, frozenset(map(id, own)))
    return digest(*hashed.texts(value))


def hashes_of(function: Any, own: Iterable[Any]) -> dict[str, str]:
    """Hashes of a function, of those that it refers to, and of what they refer to, by name, without large contents.

    Tensors and arrays are left out, and the text of modules.
    """
    held = frozenset(map(id, own))

    def hashed(value: Any) -> str:
        return digest(*_Hashed("", "", {}, held, contents=False).texts(value))

    if not isinstance(function, types.FunctionType):
        return {type(function).__name__: hashed(function)}
    found: dict[str, str] = {}
    todo, known = [function], {id(function)}
    while todo:
        user = todo.pop()
        for name, value in _references(user):
            if not isinstance(value, types.FunctionType) or _is_installed(str(value.__globals__.get("__name__", ""))):
                found[f"{user.__qualname__}: {name}"] = hashed(value)
                continue
            found[f"{user.__qualname__}: {name}"] = digest(*_Hashed("", "", {}, held).code(value.__code__))
            if id(value) not in known:
                known.add(id(value))
                todo.append(value)
    return found


def hooks(value: Any) -> Iterator[Any]:
    """The functions that the user has hooked to a module, a tensor, or an optimizer."""
    module, optimizer = isinstance(value, torch.nn.Module), isinstance(value, torch.optim.Optimizer)
    for group in _HOOKS if module else _HOOKS_OF_OPTIMIZERS if optimizer else _HOOKS_OF_TENSORS:
        found = getattr(value, group, None)
        yield from found.values() if found else ()


class _Hashed:
    """What is hashed on behalf of one part of the root."""

    def __init__(self, role: str, name: str | None, seen: Seen, own: frozenset[int], contents: bool = True) -> None:
        self.role, self.name, self.seen, self.own, self.contents = role, name, seen, own, contents
        self.order: dict[int, int] = {}
        """By object the number with which it was met first: other aliases are other functions."""

    def texts(self, value: Any) -> Iterator[str]:
        if type(value) in _PLAIN:
            yield f"{type(value).__name__}:{value!r}"
            return
        if id(value) in self.own:
            yield "a part of the state"
            return
        if id(value) in self.order:
            yield f"seen {self.order[id(value)]}"
            return
        self.order[id(value)] = len(self.order)
        self.seen[id(value)] = value
        for kind in (self._tensors, self._containers, self._functions, self._classes, self._objects):
            found = kind(value)
            if found is not None:
                yield from found
                return
        if self.name is None:
            where = f"{self.role} refers to {_article(type(value).__name__)}, whose content cannot be told"
            advice = "name data and their order: Stages(..., name='digits, order 1')"
            raise Invalid(where, where=_line(value), advice=advice)
        yield type(value).__qualname__

    # ---- values -------------------------------------------------------------------------------------------------
    def _tensors(self, value: Any) -> Iterator[str] | None:
        if not self.contents and isinstance(value, torch.Tensor | np.ndarray):
            return iter((type(value).__name__,))
        if isinstance(value, torch.Tensor):
            return iter((f"{type(value).__name__} {value.requires_grad}", digest_of(value.detach())))
        if isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            if array.dtype.hasobject:
                return self._all(f"array {array.shape}", array.reshape(-1).tolist())
            content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            return iter((f"{type(value).__name__} {array.dtype} {array.shape}", content))
        if isinstance(value, torch.dtype | torch.device | np.dtype | torch.layout | torch.memory_format | PurePath):
            return iter((type(value).__name__, str(value)))
        if isinstance(value, _GENERATORS):  # one that is seeded at each call is as good as a new one
            return iter((type(value).__qualname__,))
        return None

    def _all(self, head: str, entries: Sequence[Any]) -> Iterator[str]:
        yield f"{head} {len(entries)}"
        for entry in entries:
            yield from self.texts(entry)

    def _containers(self, value: Any) -> Iterator[str] | None:
        if isinstance(value, set | frozenset):
            return iter((type(value).__name__, *sorted(self._apart(entry) for entry in value)))
        if isinstance(value, dict | types.MappingProxyType):
            return self._all(type(value).__name__, [part for item in value.items() for part in item])
        if isinstance(value, list | tuple | collections.deque):
            return self._all(type(value).__name__, list(value))
        if isinstance(value, functools.partial):
            return self._all("partial", (value.func, value.args, value.keywords))
        return None

    def _apart(self, entry: Any) -> str:
        """The hash of an element of a set, whose order is one of addresses."""
        order = dict(self.order)
        try:
            return digest(*self.texts(entry))
        finally:
            self.order = order

    # ---- code ---------------------------------------------------------------------------------------------------
    def _functions(self, value: Any) -> Iterator[str] | None:
        if isinstance(value, types.ModuleType):
            return self._module(value)
        if isinstance(value, types.MethodType):
            return self._all("method", (value.__func__, value.__self__))
        if isinstance(value, _BUILTIN):
            bound = getattr(value, "__self__", None)
            free = bound is None or isinstance(bound, types.ModuleType | type)
            return self._all(f"{getattr(value, '__module__', '')}.{value.__qualname__}", () if free else (bound,))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, property | classmethod | staticmethod | functools.cached_property):
            inner = getattr(value, "__func__", None) or getattr(value, "func", None)
            parts = (value.fget, value.fset) if isinstance(value, property) else (inner,)
            return self._all(type(value).__name__, parts)
        if callable(value) and not isinstance(value, type) and inspect.isfunction(getattr(value, "__wrapped__", None)):
            return self._all("wrapped", (value.__wrapped__,))  # functools.cache
        return None

    def _function(self, value: types.FunctionType) -> Iterator[str]:
        """A library's function by its name, with the user's functions that it wraps."""
        module = str(value.__globals__.get("__name__", ""))
        if _is_installed(module):
            yield f"{_version(module)} {value.__code__.co_qualname}"
            for cell in value.__closure__ or () if hasattr(value, "__wrapped__") else ():
                yield from self.texts(cell.cell_contents)
            return
        yield from self.code(value.__code__)
        yield from self.texts((value.__defaults__, value.__kwdefaults__))
        for name, reference in _references(value):
            yield name
            yield from self.texts(reference)

    def code(self, code: types.CodeType) -> Iterator[str]:
        """A function's own code, with that of functions within it."""
        yield code.co_code.hex()
        yield " ".join((*code.co_names, *code.co_freevars, *code.co_varnames))
        for constant in code.co_consts:
            yield from self.code(constant) if isinstance(constant, types.CodeType) else (_constant(constant),)

    def _module(self, module: types.ModuleType) -> Iterator[str]:
        """A library by its version; one of the user's by its text, its values, and the user's modules it refers to."""
        yield _version(module.__name__)
        source = getattr(module, "__file__", None)
        if source is None or _is_installed(module.__name__):
            return
        if self.contents:
            try:
                yield hashlib.sha256(Path(source).read_bytes()).hexdigest()
            except OSError:
                yield "no source"
        for name, value in sorted(vars(module).items()):
            if name.startswith("__"):
                continue
            if isinstance(value, types.FunctionType | type):
                value = sys.modules.get(value.__module__, value.__module__)
            if _is_plain(value) or isinstance(value, torch.Tensor | np.ndarray | types.ModuleType):
                yield name
                yield from self.texts(value)

    def _classes(self, value: Any) -> Iterator[str] | None:
        if isinstance(value, type):
            return self._class(value)
        return iter((f"{type(value).__qualname__}.{value.name}",)) if isinstance(value, enum.Enum) else None

    def _class(self, value: type) -> Iterator[str]:
        yield value.__qualname__
        before, self.name = self.name, self.name or ""  # what a class holds besides code is told by its type
        try:
            for base in value.__mro__:
                if _is_installed(base.__module__):
                    yield f"{_version(base.__module__)} {base.__qualname__}"
                    continue
                for key, member in sorted(vars(base).items()):
                    if not key.startswith("__") or inspect.isfunction(member):
                        yield key
                        yield from self.texts(member)
        finally:
            self.name = before

    # ---- objects ------------------------------------------------------------------------------------------------
    def _objects(self, value: Any) -> Iterator[str] | None:
        kind = type(value)
        if isinstance(value, torch.nn.Module):
            return self._of_modules(value)
        if dataclasses.is_dataclass(value) or kind in NAMESPACES:
            return self._all("fields", (kind, own_fields(value)))
        held = self.role in ("the model", "the loss", "the optimizer")
        own = held and (not _is_installed(kind.__module__) or _is_plain(getattr(value, "__dict__", value)))
        if hasattr(value, "__dict__") and (callable(value) or own):
            return self._all("object", (kind, dict(vars(value))))
        if hasattr(value, "__enter__") and _is_installed(kind.__module__):  # torch.no_grad() as a decorator
            return self._all("context", (kind, getattr(value, "mode", None)))
        if isinstance(value, types.CellType) or kind.__module__ in ("typing", "types"):
            return iter((kind.__qualname__,))
        return None

    def _of_modules(self, module: torch.nn.Module) -> Iterator[str]:
        """The classes and the content of modules that are no part of the state."""
        modules = dict(module.named_modules())
        for name, part in modules.items():
            yield f"{name} {part.extra_repr()}"
            yield from self.texts(type(part))
        if self.contents:
            yield digest_of(of_modules(modules))


def _references(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The objects that a function and those within it find in their closures, and among its globals, by name; and the
    function's own attributes.
    """
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    known = function.__globals__
    for name in sorted(set(_globals(code))):
        if name in known and known[name] is not getattr(builtins, name, _MISSING):
            yield name, known[name]
    for name, value in vars(function).items():
        yield f".{name}", value


_MISSING = object()


def _globals(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant)


def _is_plain(value: Any, around: frozenset[int] = frozenset()) -> bool:
    """Whether a value is numbers, texts, types of elements, and containers of them, as configurations are.

    `around` are the identities of the containers around it, one of which it may hold again.
    """
    if type(value) in _PLAIN or isinstance(value, torch.dtype | torch.device) or id(value) in around:
        return True
    inside = around | {id(value)}
    if type(value) in NAMESPACES:
        value = vars(value)
    if not isinstance(value, list | tuple | set | frozenset | dict):
        return False
    return all(_is_plain(part, inside) for part in (*value, *(value.values() if isinstance(value, dict) else ())))


def _constant(value: Any) -> str:
    """A constant as text that is the same in all processes: sets have an order of addresses."""
    if isinstance(value, frozenset):
        return f"frozenset({', '.join(sorted(map(_constant, value)))})"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(_constant, value))})"
    return f"{type(value).__name__}:{value!r}"


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module is one of Python's or of an installed package, which its version stands for."""
    if module == "__main__":  # a program of a package runs the user's functions under this name
        return False
    if module.partition(".")[0] in _LIBRARIES:
        return True
    source = getattr(sys.modules.get(module), "__file__", None)
    if source is None:
        return module in sys.builtin_module_names
    path = Path(source).resolve()
    return path.is_relative_to(_PYTHON) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _version(module: str) -> str:
    return f"{module} {getattr(sys.modules.get(module.partition('.')[0]), '__version__', '')}"


def _line(value: Any) -> str:
    try:
        return f"{inspect.getsourcefile(type(value))}"
    except TypeError:
        return ""


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


__all__ = ["Seen", "fingerprint", "hashes_of", "hooks"]
