"""The root of a tree: what two trials have in common before their first step, as named hashes.

Functions are hashed by their code and by what it refers to: constants, tensors, arrays, and other functions. What has
no such text, such as a data set object, is refused unless the user names the data.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from daceml_train.driver.micro_batches import MicroBatchedStep
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import Invalid
from daceml_train.runtime.roofline import processor
from daceml_train.trials.keys import digest
from daceml_train.trials.state import State, Training
from daceml_train.trials.values import digest_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range)
Seen = dict[int, Any]
"""Objects by their addresses, which are theirs as long as they are kept here."""
_LIBRARIES = ("torch", "numpy", "daceml_train", "builtins")


def root_parts(
    training: Training, state: State, functions: Mapping[str, Any], name: str | None, seen: Seen
) -> dict[str, str]:
    """What a root depends on: each part with its hash, or its text where that is short.

    `seen` receives what the functions refer to.
    """
    step = training.step
    initial = {key: value for key, value in state.items() if key != "generators"}
    parts = {
        "model": _modules(training, name),
        "loss": "" if step.loss is None else fingerprint(step.loss, "the loss", name),
        "optimizer": _optimizer(step.optimizer),
        "options": _options(step),
        "initial state": digest_of(initial),
        "generators": digest_of(state["generators"]),
        "name": name or "",
        "versions": versions(step),
    }
    for role, function in functions.items():
        found: Seen = {}
        parts[role] = "" if function is None else fingerprint(function, role, name, found)
        seen |= found
    return parts


def versions(step: TrainingStep) -> str:
    """What decides about the bits of a step besides its text: versions, threads, the processor, determinism."""
    device = next((p.device for p in step.model.parameters()), torch.device("cpu"))
    found = {
        "torch": torch.__version__,
        "daceml_train": importlib.import_module("daceml_train").__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
    }
    return ", ".join(f"{key} {value}" for key, value in found.items())


def fingerprint(value: Any, role: str, name: str | None, seen: Seen | None = None) -> str:
    """A hash of a function and of what it refers to. Raises `Invalid` for what has none, unless there is a `name`.

    `seen` receives the objects that were hashed.
    """
    return digest(*_texts(value, role, name, {} if seen is None else seen))


def _modules(training: Training, name: str | None) -> str:
    texts: list[str] = []
    for path, module in training.modules.items():
        texts += [path, type(module).__qualname__, module.extra_repr()]
    for kind in sorted({type(module) for module in training.modules.values()}, key=lambda k: k.__qualname__):
        texts += _texts(kind, "the model", name or "", {})
    return digest(*texts)


def _optimizer(optimizer: torch.optim.Optimizer) -> str:
    names = {id(p): str(i) for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    texts = [type(optimizer).__qualname__]
    for group in optimizer.param_groups:
        texts += [f"{key}={value!r}" for key, value in sorted(group.items()) if key != "params"]
        texts += [names[id(p)] for p in group["params"]]
    return digest(*texts)


def _options(step: TrainingStep) -> str:
    own = step.options
    texts = [type(step).__name__, repr(step.clipping), str(own.pipeline), own.randomness, str(own.dynamic)]
    if isinstance(step, MicroBatchedStep):
        texts += [str(step.count), str(step.share)]
    if step.scaler is not None:
        texts += [f"{key}={value}" for key, value in step.scaler.state_dict().items()]
    return digest(*texts)


def _texts(value: Any, role: str, name: str | None, seen: Seen) -> Iterator[str]:
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__}:{value!r}"
        return
    if id(value) in seen:
        yield "seen"
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        yield digest_of(value)
    elif isinstance(value, np.ndarray):
        yield digest_of(torch.from_numpy(np.ascontiguousarray(value))) if value.dtype.kind in "biufc" else repr(value)
    elif isinstance(value, list | tuple | set | frozenset):
        entries = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        yield f"{type(value).__name__} {len(entries)}"
        for entry in entries:
            yield from _texts(entry, role, name, seen)
    elif isinstance(value, dict):
        yield f"dict {len(value)}"
        for key, entry in value.items():
            yield from _texts(key, role, name, seen)
            yield from _texts(entry, role, name, seen)
    elif isinstance(value, torch.dtype | torch.device | np.dtype):
        yield str(value)
    elif isinstance(value, functools.partial):
        yield from _texts((value.func, value.args, value.keywords), role, name, seen)
    elif isinstance(value, types.ModuleType):
        yield f"{value.__name__} {getattr(value, '__version__', '')}"
    else:
        yield from _code_texts(value, role, name, seen)


def _code_texts(value: Any, role: str, name: str | None, seen: Seen) -> Iterator[str]:
    if _of_library(value):
        yield f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    elif isinstance(value, types.FunctionType):
        yield from _code(value.__code__)
        yield from _texts((value.__defaults__, value.__kwdefaults__), role, name, seen)
        for reference in _references(value):
            yield from _texts(reference, role, name, seen)
    elif isinstance(value, types.MethodType):
        yield from _texts(value.__func__, role, name, seen)
        yield from _texts(value.__self__, role, name, seen)
    elif isinstance(value, type):
        yield value.__qualname__
        for base in value.__mro__:
            if not _of_library(base):
                yield from _members(base, role, name, seen)
    elif isinstance(value, torch.nn.Module):
        yield "a module"  # part of the state, or of what the name stands for
        yield from _texts(type(value), role, name, seen)
    elif isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | types.GetSetDescriptorType):
        yield value.__qualname__
    elif isinstance(value, property | classmethod | staticmethod | functools.cached_property):
        inner = getattr(value, "fget", None) or getattr(value, "__func__", None) or getattr(value, "func", None)
        yield from _texts(inner, role, name, seen)
    elif name is None:
        where = f"{role} refers to {_article(type(value).__name__)}, whose content cannot be told"
        advice = "name data and their order: Stages(..., name='digits, order 1')"
        raise Invalid(where, where=_line(value), advice=advice)
    else:
        yield type(value).__qualname__


def _members(kind: type, role: str, name: str | None, seen: Seen) -> Iterator[str]:
    for key, member in sorted(vars(kind).items()):
        if not key.startswith("__") or inspect.isfunction(member):
            yield key
            yield from _texts(member, role, name if name is not None else "", seen)


def _code(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield " ".join((*code.co_names, *code.co_freevars, *code.co_varnames))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        else:
            yield f"{type(constant).__name__}:{constant!r}"


def _references(function: Callable[..., Any]) -> Iterator[Any]:
    """The objects that a function finds in its closure and among its globals."""
    found = inspect.getclosurevars(function)
    for group in (found.nonlocals, found.globals):
        for _, value in sorted(group.items()):
            yield value


def _of_library(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    return (
        isinstance(module, str)
        and module.partition(".")[0] in _LIBRARIES
        and not isinstance(value, torch.Tensor | torch.nn.Module)
    )


def _line(value: Any) -> str:
    try:
        return f"{inspect.getsourcefile(type(value))}"
    except TypeError:
        return ""


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


__all__ = ["fingerprint", "root_parts", "versions"]
