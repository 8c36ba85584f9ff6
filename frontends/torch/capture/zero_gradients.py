"""Gradients of zeros by second derivatives that are zero everywhere, where PyTorch has zeros rather than none.

The derivative of `relu` depends on its operand by a comparison, through which an operator graph carries no gradient;
PyTorch's formula returns zeros for it, by which an optimizer with momentum or weight decay changes parameters. Whether
it does is asked of PyTorch, on tensors without data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree

from daceml_train import logs
from daceml_train.autodiff.reverse import reaching
from daceml_train.errors import why
from daceml_train.frontends.torch.capture.inner_gradients import creates_graph
from daceml_train.frontends.torch.capture.nodes import name_of
from daceml_train.frontends.torch.results import OutputSource, example_of
from daceml_train.graph.graph import Graph
from daceml_train.ops.gradient import Overwrite


def connect(
    gm: fx.GraphModule,
    operands: Sequence[Any],
    attributes: Mapping[str, Tensor],
    names: Mapping[int | str, str],
    graph: Graph,
    outputs: Sequence[OutputSource],
) -> None:
    """Connect outputs of `graph` with inputs that get zeros; `names` are the inputs by position, or attribute."""
    nodes = gm.graph.nodes
    if not any(node.target is torch.autograd.grad and creates_graph(node) for node in nodes):
        return
    if any(name_of(node.target).endswith("_increment_nesting") for node in nodes):  # `torch.func` on the way
        return
    try:
        reached = _reached(gm, operands, attributes)
    except Exception as error:  # PyTorch cannot run this graph without data; the operator graph says what is connected
        logs.event(logs.BREAKS, f"whether second derivatives are zeros or None is not known: {why(error)}")
        return
    for number, source in enumerate(outputs):
        if source.kind != "graph" or number not in reached:
            continue
        result = graph.value(graph.outputs[source.index])
        connected = reaching(graph, [result.name])
        for key in reached[number]:
            if (name := names.get(key)) is not None and name not in connected and name in graph.inputs:
                value = graph.value(name)
                before = value.sum(tuple(range(len(value.shape)))).cast(result.dtype).expand(result.shape)
                (result,) = graph.emit(Overwrite(), before, result)
        graph.outputs[source.index] = result.name


def _reached(
    gm: fx.GraphModule, operands: Sequence[Any], attributes: Mapping[str, Tensor]
) -> dict[int, list[int | str]]:
    """Per result, the operands, by position or name, that get a gradient of it in PyTorch."""
    examples = (example_of(node) for node in gm.graph.nodes if node.op == "placeholder")
    given = [
        x.detach().requires_grad_(example.requires_grad) if isinstance(x, Tensor) and isinstance(example, Tensor) else x
        for x, example in zip(operands, examples, strict=True)
    ]
    own = {name: x.requires_grad for name, x in [*gm.named_parameters(remove_duplicate=False)]}
    held = {name: x.detach().requires_grad_(own.get(name, False)) for name, x in attributes.items()}
    everything: list[tuple[int | str, Any]] = [*enumerate(given), *held.items()]
    leaves = {key: x for key, x in everything if isinstance(x, Tensor) and x.requires_grad}
    mode = detect_fake_mode(given)
    assert mode is not None
    found: dict[int, list[int | str]] = {}
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True  # PyTorch's formulas create numbers
    try:
        with mode, torch.enable_grad(), nn.utils.stateless._reparametrize_module(gm, held):
            results = pytree.tree_leaves(fx.Interpreter(gm).run(*given), is_leaf=lambda leaf: leaf is None)
        for number, result in enumerate(results):
            if isinstance(result, Tensor) and result.requires_grad and result.is_floating_point():
                gradients = torch.autograd.grad(result.sum(), [*leaves.values()], retain_graph=True, allow_unused=True)
                found[number] = [key for key, g in zip(leaves, gradients, strict=True) if g is not None]
    finally:
        mode.allow_non_fake_inputs = allowed
    return found
