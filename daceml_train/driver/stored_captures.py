"""Captures of earlier processes: a step whose trace would be the same as one that is in the cache is not traced.

Tracing BERT-base takes TorchDynamo and AOTAutograd longer than everything else that the first step of a process does
where the programs are in the cache. What is stored is the graph and what the trace depended on; see
`frontends.torch.dynamo.stored_guards` for when it is used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import marshal
import os
import pickle
import sys
import types
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch._dynamo
import torch.utils._pytree as pytree

from daceml_train.driver.capture_only import CaptureDone
from daceml_train.driver.settings import Settings
from daceml_train.driver.store import environment
from daceml_train.frontends.torch.capture.capture import Captured
from daceml_train.frontends.torch.dynamo import floats, stored_guards
from daceml_train.frontends.torch.dynamo.tracing import LIMITS, first_to_run, tracing
from daceml_train.ops.operator import REGISTRY
from daceml_train.plugins import source_key
from daceml_train.runtime.cache import Cache
from daceml_train.storage.files import keep as write
from daceml_train.storage.files import sealed, unsealed
from daceml_train.storage.folders import usable

_FIXED, _VARYING = "fixed", "varying"
_count = itertools.count()
KEPT = 8
"""Captures that are kept of one kind of step, which differ in what their traces read."""


@dataclass(frozen=True)
class Loaded:
    """A capture of an earlier process with guards of this one, and the code that repeats effects, if there are any."""

    captured: Captured
    recipe: stored_guards.GuardRecipe
    guards: Any
    code: types.CodeType | None

    def done(self, operands: Sequence[Any]) -> CaptureDone:
        """The capture of a call whose graph reads these operands."""
        return CaptureDone(self.captured, operands, guards=self.guards, code=self.code)


class Capturing(Protocol):
    """What is read of a training step."""

    model: torch.nn.Module
    loss: Any
    options: Settings
    loaded: list[Loaded]
    """The captures that calls of it have taken from the cache."""
    _code: Any
    _captures: int

    @property
    def selects(self) -> bool:
        """Whether what the values of arguments select is computed before the program."""

    def as_traced(self) -> bool:
        """Whether a trace is of the model and the loss alone, on one rank and without hooks."""

    def answer(self, captured: Captured, arguments: Sequence[Any]) -> Any:
        """What code that TorchDynamo generated gets for its graph."""


def load(step: Capturing, scope: dict[str, Any]) -> CaptureDone | None:
    """The capture of a step with these local variables of its traced function, if the cache has it.

    None, too, if TorchDynamo has code for the call.
    """
    function = step._code
    for known in step.loaded:
        if known.guards.check(scope):
            values = stored_guards.operands(known.recipe, scope, function.__globals__)
            return None if values is None else known.done(values)
    if first_to_run(function.__code__, scope) is not None or not _may_be_stored(step):
        return None
    for path in _files(step.options.cache, _name(step, scope)):
        if (found := _read(path)) is None:
            continue
        captured, recipe, effects = found
        with torch._dynamo.config.patch(LIMITS), tracing():
            built = stored_guards.rebuilt(recipe, function.__code__, scope, function.__globals__)
        if built is not None:
            guards, operands = built
            stored_guards.note(recipe, function.__code__, scope, function.__globals__)
            floats.note(step.model, stored_guards.floats_of(recipe, scope, function.__globals__))
            code = None if effects is None else _linked(marshal.loads(effects), step, captured, guards)
            step.loaded.append(Loaded(captured, recipe, guards, code))
            step._captures += 1  # what is counted of traces decides whether Python runs the step
            with contextlib.suppress(OSError):  # a cache may be read-only
                os.utime(path)
            return step.loaded[-1].done(operands)
    return None


def keep(step: Capturing, done: CaptureDone, effects: Any, scope: dict[str, Any]) -> None:
    """Store a capture that was just traced, where another process can tell whether its trace would be the same.

    `effects` is the function with the code that TorchDynamo generated, None if the user's code assigns nothing.
    """
    captured, recorded = done.captured, stored_guards.traces.taken()
    known = all(source.kind != "attribute" for source in captured.inputs)
    if recorded is None or captured.selection is not None or not known:
        return
    if len(captured.graph.outputs) != 1 or not _may_be_stored(step):
        return
    function, code = step._code, None if effects is None else effects.__code__
    trace = stored_guards.Traced(function.__code__, scope, function.__globals__, done.sources, done.arguments, code)
    recipe = stored_guards.recipe_of(recorded, trace)
    if recipe is None:
        return
    try:
        text = None if code is None else marshal.dumps(code)
        form = pytree.treespec_dumps(captured.out_spec)
        content = pickle.dumps((replace(captured, trace=None, out_spec=cast(Any, None)), form, recipe, text))
    except Exception:  # an object that only this process has, as a function within a function
        return
    name, cache = _name(step, scope), step.options.cache
    mark = hashlib.sha256(repr((recipe.conditions, sorted(recipe.files.items()))).encode()).hexdigest()[:16]
    kind = _VARYING if captured.sized else _FIXED
    path = _folder(cache) / f"{name}-{kind}-{mark}.capture"
    write(path, sealed(zlib.compress(content, 1), path.name))
    for old in sorted(_files(cache, name), key=_time)[:-KEPT]:
        old.unlink(missing_ok=True)


def _linked(code: types.CodeType, step: Capturing, captured: Captured, guards: Any) -> types.CodeType:
    """The code that TorchDynamo generated, which gets its graph's results from a step, as long as the guards live."""
    names, own = step._code.__globals__, f"{stored_guards.GRAPH}_stored_{next(_count)}"
    reference = weakref.ref(step)

    def answer(*arguments: Any) -> Any:
        return cast(Capturing, reference()).answer(captured, arguments)

    names[own] = answer
    weakref.finalize(guards, names.pop, own, None)
    renamed = (own if name.startswith(stored_guards.GRAPH) else name for name in code.co_names)
    return code.replace(co_names=tuple(renamed))


def _may_be_stored(step: Capturing) -> bool:
    return step.as_traced() and step.options.dynamic is not True and stored_guards.plain()


def _name(step: Capturing, scope: dict[str, Any]) -> str:
    """What is known of a capture before it is made; captures of one name differ in what their traces depend on."""
    kinds = type(step), type(step.model), type(step.loss), step.loss
    names = [f"{getattr(k, '__module__', '')}.{getattr(k, '__qualname__', '')}" for k in kinds]
    versions = [sys.version, str(sys.flags), *_installed(tuple(sys.path)), source_key(REGISTRY.values())]
    flags = torch._C._dynamo.guards.GlobalStateGuard()
    state = json.loads(str(flags.__getstate__()))
    del state["num_threads"]  # a step compiled in the background is captured on one
    options = f"{step.options.randomness} {step.selects} {step.options.dynamic} {len(scope['targets'])}"
    arguments = str([_kind(leaf) for leaf in pytree.tree_leaves([scope["inputs"], *scope["targets"]])])
    text = "\n".join([environment(), *versions, json.dumps(state), _settings(), *names, options, arguments])
    return hashlib.sha256(text.encode()).hexdigest()


def _settings() -> str:
    """TorchDynamo's settings, but for texts, which are names of files; functions are known by their names."""
    found, settings = [], torch._dynamo.config.get_config_copy()
    for name, value in sorted(settings.items()):
        if isinstance(value, set | frozenset | list | tuple):
            found.append(f"{name} {sorted(getattr(each, '__qualname__', str(each)) for each in value)}")
        elif value is None or isinstance(value, bool | int | float):
            found.append(f"{name} {value}")
    return "\n".join(found)


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype} {leaf.ndim}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _folder(cache: Cache) -> Path:
    return cache.folder / "captures"


def _files(cache: Cache, name: str) -> Iterator[Path]:
    """The captures under a name: first those for fixed sizes, whose programs are the fastest, each the newest first."""
    folder = _folder(cache)
    if folder.exists() and usable(folder) == folder:
        for kind in (_FIXED, _VARYING):
            yield from sorted(folder.glob(f"{name}-{kind}-*.capture"), key=_time, reverse=True)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process was faster
        return 0.0


def _read(path: Path) -> tuple[Captured, stored_guards.GuardRecipe, bytes | None] | None:
    """A capture, what its trace depended on, and the code that TorchDynamo generated; None if there is none here."""
    if (content := unsealed(path)) is None:
        return None
    try:
        captured, form, recipe, effects = pickle.loads(zlib.decompress(content))
        return replace(captured, out_spec=pytree.treespec_loads(form)), recipe, effects
    except Exception:  # a class or an operator that this process does not have
        return None


@functools.lru_cache(maxsize=4)
def _installed(folders: tuple[str, ...]) -> tuple[str, ...]:
    """The distributions that are installed, with their versions, as the names of their folders."""
    found: list[str] = []
    for folder in folders:
        try:
            found += (name for name in os.listdir(folder) if name.endswith((".dist-info", ".egg-info")))
        except OSError:  # it need not exist
            continue
    return tuple(sorted(found))
