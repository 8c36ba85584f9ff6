"""Holds a program of views to eager execution: values, gradients, strides, whose memory it is, versions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import daceml_train as dt
from benchmarks.fuzz.checking import Rejected
from benchmarks.fuzz.interpreted import interpreting
from benchmarks.fuzz.view_programs import ViewProgram
from benchmarks.fuzz.view_steps import ViewStep
from benchmarks.noise import RUNS, Rounding
from daceml_train.driver.module import Backend, state_of
from daceml_train.driver.options import Options
from daceml_train.errors import DacemlError

WAYS = ("interpreted", "compiled", "optimize", "step")
"""Kernels in NumPy; kernels by the compiler; TorchDynamo before them, as users run it; and whole training steps."""

STEPS, RATE = 3, 0.125
"""Of what is trained."""

CALLS = 4
"""Of what is observed, each with a backward pass: later ones run without Python."""

Seen = dict[str, Any]


@dataclass
class Verdict:
    """What is wrong, if anything; `breaks` says why a program runs as PyTorch runs it."""

    wrong: str = ""
    breaks: tuple[str, ...] = ()


def check(program: ViewProgram, way: str) -> Verdict:
    """Run a program both ways. Raises `Rejected` where PyTorch refuses it."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _eager(program)
        except (RuntimeError, IndexError, ValueError, NameError, TypeError, AttributeError) as error:
            raise Rejected(str(error)) from error
        try:
            found, breaks = _ours(program, way)
        except Rejected:
            raise
        except DacemlError as error:
            return Verdict("" if _refused(error) else f"{type(error).__name__}: {error}", (str(error),))
        except Exception as error:
            return Verdict(f"{type(error).__name__}: {error}")
    internal = [reason for reason in breaks if "internal error" in reason]
    wrong = internal[0] if internal else differences(expected, found)
    if wrong:
        _check_defined(program)
    if wrong and not internal:
        wrong = differences(expected, found, _spread(program, expected))
    return Verdict(wrong, breaks)


def _eager(program: ViewProgram) -> Seen:
    """What is seen of a program that PyTorch runs."""
    module = program.module()
    if isinstance(program, ViewStep):
        return trained(_eager_step(module, module, program), module, program)
    return observed(module, module, program)


def _spread(program: ViewProgram, expected: Seen) -> Seen:
    """How far values are from `expected` in eager runs that round otherwise, such as the sine of a large sum."""
    found: Seen = {}
    for seed in range(RUNS):
        with warnings.catch_warnings(), Rounding(seed, terms=True):
            warnings.simplefilter("ignore")
            noisy = _eager(program)
        for name, value in noisy.items():
            if isinstance(value, Tensor) and isinstance(expected[name], Tensor):
                distance = (value - expected[name]).abs().nan_to_num(0, 0, 0)
                found[name] = distance.maximum(found.get(name, distance))
    return found


def _check_defined(program: ViewProgram) -> None:
    """Raise `Rejected` if eager execution reads what it writes: it refuses that only in memory without gaps."""
    module = program.module()
    with warnings.catch_warnings(), Overlaps():
        warnings.simplefilter("ignore")
        x, y = program.inputs()
        module(x, y)


class Overlaps(TorchDispatchMode):
    """Raises `Rejected` where an operator changes a tensor by an overlapping one whose elements are elsewhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.endswith("_") and isinstance(args[0], Tensor):
            written = args[0]
            for other in args[1:]:
                if isinstance(other, Tensor) and _lies_elsewhere(other, written):
                    raise Rejected("a change by elements that it changes")
        return func(*args, **(kwargs or {}))


def _lies_elsewhere(read: Tensor, written: Tensor) -> bool:
    """Whether some elements are read that are written in another place of the tensor."""
    if read.untyped_storage()._cdata != written.untyped_storage()._cdata:
        return False
    places = torch.arange(written.untyped_storage().nbytes() // written.element_size())
    a, b = (places.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (read, written))
    return bool(torch.isin(a.flatten(), b.flatten()).any()) and not torch.equal(a.expand(b.shape), b)


def _ours(program: ViewProgram, way: str) -> tuple[Seen, tuple[str, ...]]:
    """What is seen of a program that this project runs, and why PyTorch runs it."""
    module = program.module()
    if way == "step" and isinstance(program, ViewStep):
        step = dt.training_step(module, _loss(program), torch.optim.SGD([module.w], lr=RATE))
        return trained(lambda x, y: step((x, y)), module, program), tuple(step.breaks)
    if way == "interpreted":
        with interpreting():
            return observed(_compiled(module, program), module, program), ()
    if way == "compiled":
        return observed(_compiled(module, program), module, program), ()
    called = dt.optimize(module)
    if isinstance(program, ViewStep):
        found = trained(_eager_step(called, module, program), module, program)
    else:
        found = observed(called, module, program)
    state = state_of(called)
    return found, tuple(state.backend.breaks) if state is not None else ()


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
    """What can be seen of the first and the last call, and of their backward passes."""
    calls = [_observed(called, owner, program) for _ in range(CALLS)]
    return calls[0] | {f"{name} of the last call": value for name, value in calls[-1].items()}


def _observed(called: Callable[..., Any], owner: Any, program: ViewProgram) -> Seen:
    x, y = program.inputs()
    results = called(x, y)
    held = {"x": x, "y": y, "w": owner.w, "b": owner.b}
    named: dict[str, Tensor] = {**held, **{f"result {i}": r for i, r in enumerate(results)}}
    seen = described(named)
    loss = torch.zeros(())
    for i, r in enumerate(results):
        if r.requires_grad:
            loss = loss + (r * torch.linspace(-1, 1 + i, r.numel()).view(r.shape)).sum()
    wanted = [x, owner.w]
    found = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else (None, None)
    seen |= {f"gradient of {name}": g for name, g in zip("xw", found, strict=True)}
    return seen


def described(named: dict[str, Tensor]) -> Seen:
    """Values, kinds, versions, whose memory it is, and where in it they are."""
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
    return seen


def trained(step: Callable[..., Tensor], owner: Any, program: ViewStep) -> Seen:
    """What can be seen of training steps: losses, the parameter, buffer and inputs, and what the model keeps.

    The loss's memory and versions in the parameter's are not: a step returns a loss of its own, and an update is one
    change here.
    """
    found: Seen = {}
    for number in range(STEPS):
        x, y = (t.mul_(1 + number / 2) for t in program.inputs())
        loss = step(x, y)
        named = {"x": x, "y": y, "w": owner.w, "b": owner.b, "k": owner.kept}
        named |= {f"kept {i}": t for i, t in enumerate(owner.seen)}
        seen = described(named)
        for name, t in named.items():
            if t.untyped_storage()._cdata == owner.w.untyped_storage()._cdata:
                del seen[f"{name} version"]
        found |= {f"{name} of step {number}": value for name, value in seen.items()}
        found[f"loss of step {number}"] = loss.detach().clone()
    return found


def _loss(program: ViewStep) -> Callable[[Tensor], Tensor]:
    result: Callable[[Tensor], Tensor] = eval(f"lambda h: {program.loss}")
    return result


def _eager_step(called: Any, owner: Any, program: ViewStep) -> Callable[..., Tensor]:
    """A training step of PyTorch's around a module, compiled or not."""
    optimizer, loss_of = torch.optim.SGD([owner.w], lr=RATE), _loss(program)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(called(x, y))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    return step


def _is_dense(t: Tensor) -> bool:
    ordered = sorted((s, n) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1)
    step = 1
    for stride, size in ordered:
        if stride != step:
            return False
        step *= size
    return True


def differences(expected: Seen, found: Seen, spread: Seen | None = None) -> str:
    """What differs, in a sentence; empty if nothing does. Values may be three times as far off as `spread`."""
    wrong = []
    for name, value in expected.items():
        other = found.get(name)
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            if not _equal(value, other, (spread or {}).get(name)):
                wrong.append(name)
        elif isinstance(value, Tensor) or isinstance(other, Tensor) or value != other:
            wrong.append(f"{name} ({other} for {value})" if not isinstance(value, Tensor) else f"{name} ({other})")
    return "; ".join(wrong)


def _equal(value: Tensor, other: Tensor, spread: Tensor | None) -> bool:
    """Whether two values are the same but for rounding."""
    if value.shape != other.shape or not value.numel():
        return value.shape == other.shape
    scale = max(1.0, float(value.abs().nan_to_num(0, 0, 0).max()))
    close = torch.isclose(value, other, 0, 2e-5 * scale, equal_nan=True)
    if spread is not None:
        close |= (value - other).abs() <= 3 * spread
    return bool(close.all())


def shrunk(program: ViewProgram, way: str) -> ViewProgram:
    """A smaller program that still fails: without lines, results and views of results that it does not need."""
    while True:
        for smaller in program.smaller():
            try:
                if check(smaller, way).wrong:
                    program = smaller
                    break
            except Rejected:
                continue
        else:
            return program
