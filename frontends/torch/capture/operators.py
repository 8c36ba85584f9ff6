"""Operators that the pre-pass puts into a trace, so that what a trace without autograd would lose has a name.

They exist for tracing only: translation turns each into an operator of ours, and none is ever run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from daceml_train.errors import Unsupported

NAMESPACE = "daceml_train"

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("graft(Tensor source, Tensor x) -> Tensor")
_library.define("overwrite(Tensor before, Tensor x) -> Tensor")
_library.define("require(Tensor x, Tensor holds, str message) -> Tensor")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale) -> (Tensor, Tensor)")
_library.define("custom_vjp(int key, Tensor[] xs) -> Tensor[]")
_library.define("control(int key, Tensor[] xs) -> Tensor[]")
_library.define("loss_gradients(Tensor loss, Tensor[] parameters) -> Tensor[]")
_library.define("final_gradients(Tensor[] gradients) -> Tensor[]")
_library.define("dropout(Tensor x, Scalar p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


@dataclass(frozen=True, eq=False)
class CustomFunction:
    """A user's `autograd.Function` as Dynamo gives it: the bodies, and which results carry no gradient."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    once: str = ""
    """What in it makes the derivative of its derivative another one than in eager execution; empty if nothing does."""


@dataclass(frozen=True, eq=False)
class Control:
    """A branch or loop as Dynamo gives it: its name, its bodies, and their operands, which need not all be tensors.

    `groups` counts the operands that are states, those that are sliced, and those that are given to all steps;
    `examples` are the results.
    """

    name: str
    bodies: tuple[fx.GraphModule, ...]
    operands: tuple[Any, ...]
    groups: tuple[int, int, int]
    examples: tuple[Tensor, ...]
    grad_enabled: bool
    reverse: bool = False


custom_functions: ContextVar[list[CustomFunction | Control]] = ContextVar("custom_functions")
"""The functions and control flow met by the capture that is going on; an operator's `key` is an index into it."""


def result_counts(function: CustomFunction) -> tuple[int, bool]:
    """How many results a function has, and whether it returns them as a sequence."""
    (output,) = (n for n in function.forward.graph.nodes if n.op == "output")
    results = output.args[0][0]
    return (len(results), True) if isinstance(results, tuple | list) else (1, False)


def run_forward(function: CustomFunction, operands: Sequence[object]) -> list[Any]:
    """Results and then saved values of a function's forward body."""
    results, saved = fx.Interpreter(without_grad_modes(function.forward)).run(*operands)[:2]
    return [*(results if isinstance(results, tuple | list) else [results]), *saved]


def without_grad_modes(body: fx.GraphModule) -> fx.GraphModule:
    """The body without its switches of the gradient mode, which would outlive it; edited in place."""
    for node in list(body.graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            body.graph.erase_node(node)
    body.recompile()
    return body


def _graft(source: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _require(x: Tensor, holds: Tensor, message: str) -> Tensor:
    return torch.empty_like(x)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    statistics = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    return q.new_empty(batch, heads, length, v.shape[-1]), q.new_empty(batch, heads, length, dtype=statistics)


def _custom_vjp(key: int, xs: list[Tensor]) -> list[Tensor]:
    function = custom_functions.get()[key]
    assert isinstance(function, CustomFunction)
    environment = xs[0].fake_mode.shape_env if isinstance(xs[0], FakeTensor) else None
    known = contextlib.nullcontext() if environment is None else environment.ignore_fresh_unbacked_symbols()
    with known:  # numbers that the body reads of its tensors
        results = run_forward(function, xs)
    if not all(isinstance(t, Tensor) for t in results):
        raise Unsupported("an autograd.Function that returns or saves what is not a tensor")
    return [torch.empty_like(t) for t in results]


def _control(key: int, xs: list[Tensor]) -> list[Tensor]:
    control = custom_functions.get()[key]
    assert isinstance(control, Control)
    return [xs[0].new_empty(e.shape, dtype=e.dtype) for e in control.examples]


def _loss_gradients(loss: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(p) for p in parameters]


def _final_gradients(gradients: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(g) for g in gradients]


def _dropout(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x)


_MEANINGS: dict[str, Callable[..., Any]] = {
    "graft": _graft,
    "overwrite": _graft,
    "require": _require,
    "attention": _attention,
    "custom_vjp": _custom_vjp,
    "control": _control,
    "loss_gradients": _loss_gradients,
    "final_gradients": _final_gradients,
    "dropout": _dropout,
}
for _name, _meaning in _MEANINGS.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _meaning, lib=_library)


def _no_backward(context: Any, *gradients: Any) -> Any:
    raise NotImplementedError("an operator that exists for tracing only")


torch.library.register_autograd(f"{NAMESPACE}::dropout", _no_backward, lib=_library)  # TorchDynamo asks what has one
