"""Lists and deques to which a forward pass appends: their length is no condition of the captured code.

TorchDynamo captures a list with its length and replaces all of it after the graph has run, so that a model that notes a
value at each call is captured once more at each call, and a deque of limited length breaks the graph. Here a list that
is appended to, and not read, is extended by what was appended. A list that is read is captured as before.

Where a graph breaks within `notes.append(...)`, the method waits on the stack. It is another object at each call, of
which TorchDynamo compares the identity; here it is a method of a list.
"""

from __future__ import annotations

import collections
import functools
import inspect
import types
from typing import Any

from torch._dynamo.bytecode_transformation import create_call_method, create_instruction
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource, GetItemSource, LocalSource
from torch._dynamo.variables import VariableTracker, builder
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import DequeVariable, ListVariable

from daceml_train.frontends.torch.dynamo.changing_containers import look_into
from daceml_train.frontends.torch.traces import Traces

_CONTAINERS = (list, collections.deque, dict, set)
_BoundMethod: Any = getattr(builder, "BoundBuiltinMethodVariable", None)
"""A method of a builtin type that waits; not in every version."""


class _Growing:
    """A list of which nothing but what was appended is known; `items` makes it the one that TorchDynamo knows."""

    known: type[Any]
    appended: list[Any]

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """`append` without a look at the list; all other methods of the list that TorchDynamo knows."""
        if name == "append" and len(args) == 1 and not kwargs and self.is_mutable():
            tx.output.side_effects.mutation(self)
            self.appended.append(args[0])
            return ConstantVariable.create(None)
        _read(self)
        return self.call_method(tx, name, args, kwargs)

    def clone(self, **options: Any) -> Any:
        """A clone of the list that TorchDynamo knows."""
        _read(self)
        return self.clone(**options)

    def __getattr__(self, name: str) -> Any:
        if name not in ("items", "maxlen"):
            raise AttributeError(name)
        _read(self)
        return getattr(self, name)


class _GrowingList(_Growing, ListVariable):
    known = ListVariable


class _GrowingDeque(_Growing, DequeVariable):
    known = DequeVariable


def _growing(builder: Any, value: Any) -> Any:
    """A list or a deque that has not been read."""
    tx, source = builder.tx, builder.get_source()
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    found: Any = (_GrowingDeque if type(value) is collections.deque else _GrowingList)([], source=builder.source)
    del found.items
    found.__dict__.pop("maxlen", None)
    found.appended = []

    def read() -> Any:
        install_guard(builder.source.make_guard(GuardBuilder.SEQUENCE_LENGTH))
        if type(value) is collections.deque:
            found.maxlen = ConstantVariable.create(value.maxlen)
        found.items = [
            LazyVariableTracker.create(item, source=GetItemSource(source, place), **_translator(tx))
            for place, item in enumerate(value)
        ]
        for item in appended:
            found.call_method(tx, "append", [item], {})

    appended, found.read, found.look = found.appended, read, functools.partial(look_into, builder, value)
    return tx.output.side_effects.track_mutable(value, found)


def _translator(tx: Any) -> dict[str, Any]:
    """The translator as an argument, since PyTorch 2.13."""
    return {"tx": tx} if "tx" in inspect.signature(LazyVariableTracker.create).parameters else {}


def _read(found: Any) -> None:
    """Make a list the one that TorchDynamo knows."""
    read = found.__dict__.get("read")
    if read is None:  # by an argument of the call whose method was looked up before
        return
    found.look()
    del found.appended, found.read, found.look
    found.__class__ = found.known
    read()


def _method(builder: Any, value: Any) -> Any:
    """A method of a container: one of the same name of the container that is there at a call."""
    source = builder.source
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    install_guard(AttrSource(source, "__name__").make_guard(GuardBuilder.CONSTANT_MATCH))
    owner = VariableTracker.build(builder.tx, value.__self__, AttrSource(source, "__self__")).realize()
    descriptor = getattr(type(value.__self__), value.__name__)
    return _BoundMethod(descriptor, owner, source=source)


@functools.cache
def _install() -> None:
    builders: Any = VariableBuilder
    effects: Any = SideEffects
    wrap, update, wrap_any = builders.wrap_listlike, effects.codegen_update_mutated, builders._wrap

    @functools.wraps(wrap)
    def wrap_listlike(self: Any, value: Any) -> Any:
        mutable = type(value) is list or type(value) is collections.deque
        if not traces.depth or not mutable or isinstance(self.source, LocalSource):
            return wrap(self, value)
        return _growing(self, value)

    @functools.wraps(update)
    def codegen_update_mutated(self: Any, cg: Any, *arguments: Any, **options: Any) -> None:
        grown = [var for var in self._get_modified_vars() if isinstance(var, _Growing)]
        for var in grown:  # before other effects, which change what the appended values are read from
            cg(var.source)
            cg.load_method("extend")
            cg.foreach(var.appended)
            cg.append_output(create_instruction("BUILD_LIST", arg=len(var.appended)))
            cg.extend_output([*create_call_method(1), create_instruction("POP_TOP")])
            var.mutation_type.is_modified = False
        try:
            update(self, cg, *arguments, **options)
        finally:
            for var in grown:
                var.mutation_type.is_modified = True

    @functools.wraps(wrap_any)
    def wrap_value(self: Any, value: Any) -> Any:
        bound = type(value) is types.BuiltinMethodType and type(value.__self__) in _CONTAINERS
        if not traces.depth or not bound or self.source is None:
            return wrap_any(self, value)
        return _method(self, value)

    if _BoundMethod is not None:
        builders._wrap = wrap_value
    builders.wrap_listlike, effects.codegen_update_mutated = wrap_listlike, codegen_update_mutated
    builders._type_dispatch_impl.cache_clear()  # holds the replaced method where TorchDynamo has run before


traces = Traces(_install)
"""Traces in which lists may grow."""
