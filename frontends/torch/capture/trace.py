"""The trace: a Dynamo graph becomes a functional ATen graph, without autograd but with what gradients depend on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import Source, TracingContext, detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from daceml_train.errors import DacemlError, Unsupported
from daceml_train.frontends.torch.capture import python_kernels
from daceml_train.frontends.torch.capture.decompositions import table, table_with_random_operators
from daceml_train.frontends.torch.capture.functional_trace import FunctionalGraph, traced_once
from daceml_train.frontends.torch.capture.prepass import GradientAware
from daceml_train.frontends.torch.capture.rng_draws import Randomness
from daceml_train.frontends.torch.dynamo.versions import start_at_zero


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """PyTorch logs no traceback of an operator that fails on fake tensors, nor of a guard that does not fit.

    The error itself reaches the user, or is expected.
    """
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch._guards")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def fake_mode(operands: Sequence[object]) -> FakeTensorMode:
    """The mode of the compilation in progress, whose shape environment knows the symbols; else a new one."""
    context = TracingContext.try_get()
    found = context.fake_mode if context is not None and context.fake_mode is not None else None
    return found or detect_fake_mode(list(operands)) or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def fake(mode: FakeTensorMode, operand: Any, name: str, source: Source | None = None) -> Any:
    """A tensor as the trace sees it: fake, with Dynamo's symbols for its sizes, and without `requires_grad`.

    The trace must not build an autograd graph of its own; `capture` decides what requires a gradient.
    """
    if not isinstance(operand, Tensor):
        return operand
    if isinstance(operand, FakeTensor) and operand.fake_mode is mode:
        result: Tensor = operand
    else:
        context = TracingContext.try_get()
        symbolic = context.tensor_to_context.get(operand) if context is not None else None
        source = symbolic.tensor_source if symbolic is not None else source or ConstantSource(name)
        result = mode.from_tensor(
            operand, static_shapes=symbolic is None, symbolic_context=symbolic, source=source, trace=symbolic is None
        )
        if context is None:  # TorchDynamo's own begin so, and have been changed by its trace since
            start_at_zero(result)
    if not result.requires_grad:
        return result
    with mode, torch.no_grad():
        return result.detach()


@contextlib.contextmanager
def functorch_levels() -> Iterator[None]:
    """Leave the transforms of `torch.func` that are active as they are, also where a trace fails inside of one, and
    gradients enabled or disabled as they are.
    """
    enabled = torch.is_grad_enabled()
    depth, forward = torch._C._functorch.get_dynamic_layer_stack_depth(), torch._C._is_fwd_grad_enabled()
    dual = _in_dual_level()
    try:
        yield
    except BaseException:
        if torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        torch._C._set_fwd_grad_enabled(forward)
        torch._C._set_grad_enabled(enabled)
        if _in_dual_level() and not dual:
            torch._C._exit_dual_level(level=0)
        raise


def _in_dual_level() -> bool:
    """Whether forward-mode differentiation is active, of which PyTorch has one level."""
    try:
        level = torch._C._enter_dual_level()
    except RuntimeError:
        return True
    torch._C._exit_dual_level(level=level)
    return False


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """OneDNN's recurrent kernels are inference operators: without them a recurrent layer is traced step by step."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


_REPLACED = "a set_ on a graph input"
"""A part of PyTorch's error for an assignment to `.data` of a tensor that the graph is given."""
_KEPT = "x.data.copy_(...) keeps the memory, and is part of the graph"


def trace(
    module: fx.GraphModule,
    attributes: dict[str, Tensor],
    operands: Sequence[Any],
    grad_enabled: bool,
    further: Sequence[fx.Node] = (),
    randomness: Randomness = "seeded",
) -> FunctionalGraph:
    """The functional ATen graph of `module` on fake operands: placeholders are `attributes`, then the operands.

    Its outputs are the new values of operands that the module changes, then the flattened results, then the values
    that the nodes `further` have at the end.
    """
    decompositions = table() if randomness == "seeded" else table_with_random_operators()
    aware = GradientAware(module, grad_enabled, further)
    flat, structure = pytree.tree_flatten((attributes, *operands))

    def run(*given: Any) -> tuple[Any, ...]:
        results: tuple[Any, ...] = aware(*pytree.tree_unflatten(given, structure))
        return results

    try:
        with functorch_levels(), _without_onednn(), python_kernels.ours():
            traced = traced_once(run, flat, fake_mode(flat), decompositions)
            if traced is None:
                traced = _exported(aware, (attributes, *operands), decompositions)
    except DacemlError:
        raise
    except Exception as error:
        if _REPLACED in str(error):
            raise Unsupported("a tensor whose memory is replaced (x.data = ...)", advice=_KEPT) from error
        raise Unsupported(f"PyTorch cannot trace this graph: {first_line(error)}") from error
    return traced


def _exported(module: nn.Module, operands: tuple[Any, ...], decompositions: dict[Any, Any]) -> FunctionalGraph:
    graph, signature = aot_export_module(module, operands, trace_joint=False, decompositions=decompositions)
    assert isinstance(graph, fx.GraphModule)
    return FunctionalGraph(graph, tuple(signature.user_inputs_to_mutate.values()), tuple(signature.input_tokens))
