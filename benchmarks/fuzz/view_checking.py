"""Holds a program of views to eager execution: values, gradients, strides, whose memory it is, versions."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn

import daceml_train as dt
from benchmarks.fuzz.checking import Rejected
from benchmarks.fuzz.interpreted import interpreting
from benchmarks.fuzz.view_programs import ViewProgram
from daceml_train.driver.module import Backend, state_of
from daceml_train.driver.options import Options
from daceml_train.errors import DacemlError

WAYS = ("interpreted", "compiled", "optimize")
"""Kernels in NumPy; kernels by the compiler; and TorchDynamo before them, as users run it."""

Seen = dict[str, Any]


@dataclass
class Verdict:
    """What is wrong, if anything; `breaks` says why a program runs as PyTorch runs it."""

    wrong: str = ""
    breaks: tuple[str, ...] = ()


def check(program: ViewProgram, way: str) -> Verdict:
    """Run a program both ways. Raises `Rejected` where PyTorch refuses it."""
    torch._dynamo.reset()
    module = program.module()
    try:
        expected = observed(module, module, program)
    except (RuntimeError, IndexError, ValueError, NameError, TypeError, AttributeError) as error:
        raise Rejected(str(error)) from error
    module = program.module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if way == "interpreted":
                with interpreting():
                    found, breaks = observed(_compiled(module, program), module, program), ()
            elif way == "compiled":
                found, breaks = observed(_compiled(module, program), module, program), ()
            else:
                called = dt.optimize(module)
                found = observed(called, module, program)
                state = state_of(called)
                breaks = tuple(state.backend.breaks) if state is not None else ()
        except DacemlError as error:
            return Verdict("" if _refused(error) else f"{type(error).__name__}: {error}", (str(error),))
        except Exception as error:
            return Verdict(f"{type(error).__name__}: {error}")
    internal = [reason for reason in breaks if "internal error" in reason]
    return Verdict(internal[0] if internal else differences(expected, found), breaks)


def _refused(error: DacemlError) -> bool:
    return type(error).__name__ in ("Unsupported", "Refused")


def _compiled(module: Any, program: ViewProgram) -> Callable[..., Any]:
    """The compiled form without TorchDynamo, whose part is `torch.fx`'s: parameters and buffers become arguments."""

    def forward(x: Any, y: Any, w: Any, b: Any) -> Any:
        return type(module).forward(SimpleNamespace(w=w, b=b), x, y)

    traced = fx.GraphModule(nn.Module(), fx.Tracer().trace(forward))
    given = [*program.inputs(), module.w, module.b]
    for node, tensor in zip(traced.graph.find_nodes(op="placeholder"), given, strict=True):
        node.meta["requires_grad"] = tensor.requires_grad
    called = Backend(Options().settings()).compile(traced, given)
    return lambda x, y: called(x, y, module.w, module.b)


def observed(called: Callable[..., Any], owner: Any, program: ViewProgram) -> Seen:
    """What can be seen of a call and its backward pass."""
    x, y = program.inputs()
    results = called(x, y)
    held = {"x": x, "y": y, "w": owner.w, "b": owner.b}
    named: dict[str, Tensor] = {**held, **{f"result {i}": r for i, r in enumerate(results)}}
    storages = [t.untyped_storage()._cdata for t in named.values()]
    tensors = {id(t): t.untyped_storage()._cdata for t in named.values()}
    seen: Seen = {}
    for place, (name, t) in enumerate(named.items()):
        seen[f"{name} memory"] = storages.index(storages[place])
        seen[f"{name} kind"] = t.dtype, tuple(t.shape), t.requires_grad, t.is_leaf
        seen[f"{name} version"] = t._version
        seen[name] = t.detach().clone()
        strides = [s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1]
        if t.numel() and [*tensors.values()].count(storages[place]) > 1:
            seen[f"{name} place"] = strides, t.storage_offset(), t.untyped_storage().nbytes()
        elif _is_dense(t):
            seen[f"{name} strides"] = strides
    loss = torch.zeros(())
    for i, r in enumerate(results):
        if r.requires_grad:
            loss = loss + (r * torch.linspace(-1, 1 + i, r.numel()).view(r.shape)).sum()
    wanted = [x, owner.w]
    found = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else (None, None)
    seen |= {f"gradient of {name}": g for name, g in zip("xw", found, strict=True)}
    return seen


def _is_dense(t: Tensor) -> bool:
    ordered = sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1)
    step = 1
    for stride, size in ordered:
        if stride != step:
            return False
        step *= size
    return True


def differences(expected: Seen, found: Seen) -> str:
    """What differs, in a sentence; empty if nothing does."""
    wrong = []
    for name, value in expected.items():
        other = found.get(name)
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            scale = max(1.0, float(value.abs().nan_to_num(0, 0, 0).max())) if value.numel() else 1.0
            if value.shape != other.shape or not torch.allclose(value, other, 0, 2e-5 * scale, equal_nan=True):
                wrong.append(name)
        elif isinstance(value, Tensor) or isinstance(other, Tensor) or value != other:
            wrong.append(f"{name} ({other} for {value})" if not isinstance(value, Tensor) else f"{name} ({other})")
    return "; ".join(wrong)


def shrunk(program: ViewProgram, way: str) -> ViewProgram:
    """A smaller program that still fails: without lines, results and views of results that it does not need."""
    while True:
        for smaller in _smaller(program):
            try:
                if check(smaller, way).wrong:
                    program = smaller
                    break
            except Rejected:
                continue
        else:
            return program


def _smaller(program: ViewProgram) -> list[ViewProgram]:
    lines, results = program.lines, program.results
    fewer = range(len(results)) if len(results) > 1 else ()
    found = [replace(program, results=(*results[:i], *results[i + 1 :])) for i in fewer]
    found += [replace(program, lines=(*lines[:i], *lines[i + 1 :])) for i in reversed(range(len(lines)))]
    for i, result in enumerate(results):
        if (name := re.match(r"\w+", result)) and name[0] != result:
            found.append(replace(program, results=(*results[:i], name[0], *results[i + 1 :])))
    plain = replace(program, layouts=("plain", "plain"))
    return found + ([plain] if plain != program else [])
