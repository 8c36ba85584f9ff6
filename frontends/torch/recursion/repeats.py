"""Repeats: what a block recorded for operands of certain types, as a generated function that records it once more.

The function compares the operands with those that the record was made for, and returns `MISS` where they differ.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from daceml_train.frontends.torch.recursion import columns
from daceml_train.frontends.torch.recursion.effects import settled
from daceml_train.frontends.torch.recursion.lazy import Lazy, Meta, lazy_of, meta_of, recording
from daceml_train.frontends.torch.recursion.runs import Run, Shared
from daceml_train.frontends.torch.recursion.watches import ABSENT, Watch

MISS = ABSENT
"""Stands for operands that a record was not made for."""


@dataclass(frozen=True)
class Numbers:
    """A list of Python's numbers of one kind, which stands for a tensor."""

    count: int
    kind: type


@dataclass(frozen=True)
class Known:
    """A tensor of a type, which is no parameter or buffer."""

    kind: type
    meta: Meta


@dataclass(frozen=True)
class Place:
    """Where a tensor is among operands: in a list, `element` is its position there."""

    operand: int
    element: int | None = None


@dataclass(frozen=True)
class Alias:
    """The object that an operand before this one is."""

    operand: int


Operand: TypeAlias = (
    "Meta | list[Meta] | Numbers | Known | Alias | Shared | torch.nn.Module | types.MethodType | tuple[type, Any]"
)


class _Source:
    """The text of a function under construction, and the objects that it names."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def name(self, value: Any) -> str:
        """A name for an object."""
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def guards(self, position: int, operand: Operand) -> Iterator[str]:
        """Conditions for an operand."""
        a = f"a{position}"
        if isinstance(operand, Meta):
            yield f"{self._lazy(a, operand)}"
        elif isinstance(operand, list):
            yield f"type({a}) is list and len({a}) == {len(operand)}"
            yield from (self._lazy(f"{a}[{j}]", meta) for j, meta in enumerate(operand))
        elif isinstance(operand, Numbers):
            kind = operand.kind.__name__
            yield f"len({a}) == {operand.count}"
            yield from (f"type({a}[{j}]) is {kind}" for j in range(operand.count))
        elif isinstance(operand, Known):
            yield f"type({a}) is {self.name(operand.kind)} and id({a}) not in recorder.shared"
            yield f"meta_of({a}) is {self.name(operand.meta)}"
        elif isinstance(operand, Alias):
            yield f"{a} is a{operand.operand}"
        elif isinstance(operand, Shared):
            yield f"{a} is {self.name(operand.tensor)}"
        elif isinstance(operand, types.MethodType):
            yield f"type({a}) is MethodType and {a} == {self.name(operand)}"  # compares identities
        elif isinstance(operand, torch.nn.Module):
            yield f"{a} is {self.name(operand)}"
        else:
            kind_, value = operand
            yield f"type({a}) is {self.name(kind_)} and {a} == {self.name(value)}"
            if kind_ is float:  # 0.0 and -0.0 differ
                yield f"str({a}) == {str(value)!r}"

    def function(self, name: str, parameters: Sequence[str], lines: Sequence[str]) -> Callable[..., Any]:
        """A function of these lines."""
        text = f"def {name}({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in lines)
        exec(compile(text, "<a block of a recursion>", "exec"), self.names)
        function: Callable[..., Any] = self.names[name]
        return function

    def _lazy(self, a: str, meta: Meta) -> str:
        name = self.name(meta)
        return f"(({a}.meta is {name} and {a}.value is None) if type({a}) is Lazy else False)"

    def result(self, template: Any) -> str:
        """An expression for what the block returns."""
        if isinstance(template, int):
            return f"v{template}"
        if isinstance(template, Place):
            return _place(template)
        kind, *parts = template
        inner = "".join(f"{self.result(p)}, " for p in parts)
        return f"[{inner}]" if kind is list else f"({inner})"


def _place(place: Place) -> str:
    return f"a{place.operand}" if place.element is None else f"a{place.operand}[{place.element}]"


def returned(template: Any) -> Iterator[int]:
    """The values that a template has."""
    if isinstance(template, int):
        yield template
    elif isinstance(template, tuple):
        for part in template[1:]:
            yield from returned(part)


def repeat(
    at: Any,
    grad: bool,
    operands: Sequence[Operand],
    inputs: Sequence[Place],
    metas: Sequence[Meta],
    template: Any,
    watch: Watch | None = None,
) -> Callable[..., Any]:
    """A function of a recorder and a block's operands that records a run that ends in `at`.

    `inputs` tells where the run's inputs are; `metas` has the types of its values, and `template` what is returned.
    `watch` has what the record depends on besides.
    """
    native, guards = columns.native("record"), _native_guards(operands, watch)
    if native is not None and guards is not None:
        used = frozenset(returned(template))
        places = tuple((*_pair(p), isinstance(operands[p.operand], Meta | list)) for p in inputs)
        kept = tuple(m if k in used else None for k, m in enumerate(metas))
        function: Callable[..., Any] = native(
            grad, len(operands), at, used, guards, places, kept, tuple(_prefix(template))
        )
        return function
    source = _Source({"Lazy": Lazy, "Run": Run, "MISS": MISS, "MethodType": types.MethodType})
    source.names |= {"grad_enabled": torch.is_grad_enabled, "meta_of": meta_of, "settled": settled, "lazy_of": lazy_of}
    conditions = [f"grad_enabled() is {grad}"]
    conditions += [c for k, operand in enumerate(operands) for c in source.guards(k, operand)]
    conditions += _unchanged(source, watch) if watch is not None else []
    lines = [f"if not ({' and '.join(conditions)}): return MISS", "height = stage = 0"]
    for place in inputs:
        if not isinstance(operands[place.operand], Meta | list):
            continue
        lines += [
            f"a = {_place(place)}",
            "source = a.source",
            "if a.index not in source.used: source.use(a.index)",
            "if source.height >= height: height = source.height + 1",
            "if source.stage > stage: stage = source.stage",
        ]
    lines += ["run = Run()", "run.recorder = recorder", f"run.at = {source.name(at)}", "run.outer = False"]
    lines += ["run.slots = run.group = run.forest = None", "run.position = 0", "run.sealed = True"]
    lines.append(f"run.used = {source.name(frozenset(returned(template)))}")
    lines += ["run.height = height", "run.stage = stage", "recorder.pending.append(run)"]
    given = [f"settled({_place(p)})" if isinstance(operands[p.operand], Known) else _place(p) for p in inputs]
    lines.append(f"run.inputs = ({''.join(f'{each}, ' for each in given)})")
    values = sorted(set(returned(template)))
    for k in values:
        lines.append(f"v{k} = lazy_of(run, {k}, {source.name(metas[k])})")
    own = ", ".join(f"v{k}" if k in values else "None" for k in range(len(metas)))
    lines += [f"run.values = ({own},)", f"return {source.result(template)}"]
    return source.function("repeated", ["recorder", *_operands(len(operands))], lines)


def _unchanged(source: _Source, watch: Watch) -> Iterator[str]:
    """Conditions for what a record depends on besides its operands."""
    native, whole = columns.native("unchanged"), source.name(watch)
    if native is None or watch.entries or watch.functions:
        yield f"{whole}.holds()"
    else:
        yield f"{source.name(native)}({watch.address}, {len(watch.dicts)})"


# ---- native functions -----------------------------------------------------------------------------------------------
LAZY, IS_LIST, NUMBERS, SAME, METHOD, SCALAR, AGAIN, UNCHANGED, ENTRY, CODE = range(10)
"""Kinds of guards in `runtime/native/records.h`."""


def _pair(place: Place) -> tuple[int, int]:
    return place.operand, -1 if place.element is None else place.element


def _native_guards(operands: Sequence[Operand], watch: Watch | None) -> tuple[Any, ...] | None:
    """Conditions for operands: kind, operand, element, count, object. None if one has no native form."""
    found: list[tuple[int, int, int, int, Any]] = []
    if watch is not None:
        found.append((UNCHANGED, 0, watch.address, len(watch.dicts), watch))
        found += [(ENTRY, 0, 0, 0, each) for each in watch.entries]
        found += [(CODE, 0, 0, 0, each) for each in watch.functions]
    for k, operand in enumerate(operands):
        if isinstance(operand, Meta):
            found.append((LAZY, k, -1, 0, operand))
        elif isinstance(operand, list):
            found.append((IS_LIST, k, -1, len(operand), None))
            found += [(LAZY, k, j, 0, meta) for j, meta in enumerate(operand)]
        elif isinstance(operand, Numbers):
            found.append((NUMBERS, k, -1, operand.count, operand.kind))
        elif isinstance(operand, Alias):
            found.append((AGAIN, k, -1, operand.operand, None))
        elif isinstance(operand, Shared):
            found.append((SAME, k, -1, 0, operand.tensor))
        elif isinstance(operand, types.MethodType):
            found.append((METHOD, k, -1, 0, operand))
        elif isinstance(operand, torch.nn.Module):
            found.append((SAME, k, -1, 0, operand))
        elif isinstance(operand, tuple):
            found.append((SCALAR, k, -1, 0, operand[1]))
        else:
            return None
    return tuple(found)


def _prefix(template: Any) -> Iterator[int]:
    """A template in prefix notation: 0 and a value; 1, an operand, and an element; 2 or 3, a count, and the parts."""
    if isinstance(template, int):
        yield from (0, template)
    elif isinstance(template, Place):
        yield from (1, *_pair(template))
    else:
        kind, *parts = template
        yield from (3 if kind is list else 2, len(parts))
        for part in parts:
            yield from _prefix(part)


def entry(count: int, block: Any, rest: Callable[..., Any]) -> Callable[..., Any]:
    """A function of so many operands that repeats what a block recorded last, or calls `rest`.

    It is a plain function of as many parameters, which Python calls without a tuple and without a method.
    """
    if (native := columns.native("entry")) is not None:
        function: Callable[..., Any] = native(block, rest)
        return function
    source = _Source({"MISS": MISS, "recording": recording, "block": block, "rest": rest})
    operands = ", ".join(_operands(count))
    lines = [
        "recorder = recording()",
        "if recorder is not None:",
        "    repeated = recorder.last.get(block)",
        "    if repeated is not None:",
        f"        found = repeated(recorder, {operands})",
        "        if found is not MISS: return found",
        f"return rest({operands})",
    ]
    return source.function("called", _operands(count), lines)


def _operands(count: int) -> list[str]:
    return [f"a{k}" for k in range(count)]
