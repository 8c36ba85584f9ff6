"""Regions under activation checkpointing that change memory from outside them, as a batch norm does in training.

Eager execution runs such a region a second time in the backward pass, and so changes the memory a second time. A
captured graph saves what it needs in its own way and would change the memory once: PyTorch runs such a graph instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils.checkpoint import checkpoint

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.dynamo.origin import origin
from daceml_train.frontends.torch.results import example_of, version

Changed = Callable[[fx.Node], fx.Node | None]
"""The node of the tensor that a node changes in place; None where it changes none."""


def refuse_repeated_changes(region: fx.GraphModule, changed: Changed) -> None:
    """Raise if eager execution changes memory from outside the region once more when it reruns the region."""
    nodes = list(region.graph.nodes)
    if not any(_requires_gradient(node) for node in nodes):
        return  # nothing is saved for a backward pass, so nothing is rerun
    for node in _changing(region, changed):
        raise Unsupported(
            "a checkpointed region that changes a buffer or an argument, which PyTorch does a second time in the "
            "backward pass",
            where=str(origin(node)),
            advice="checkpoint the layers between the batch norms, or leave checkpointing to `optimize`",
        )


def refuse_absent_gradients(operands: Sequence[Any], options: Mapping[str, Any], where: str) -> None:
    """Raise for a region of PyTorch's reentrant kind that gives no gradients to the parameters in it.

    TorchDynamo gives them in traces for `torch.compile`; in those of ours it leaves such a region to PyTorch.
    """
    if gives_no_gradients(operands, options):
        raise Unsupported(
            "a reentrant checkpoint none of whose arguments requires a gradient, which gives none",
            where=where,
            advice="pass use_reentrant=False to checkpoint",
        )


def gives_no_gradients(operands: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether a region is reentrant and no operand but a parameter, which it reads, requires a gradient."""
    reads = [x for x in operands if isinstance(x, torch.Tensor) and x.requires_grad]
    return (
        bool(reads)
        and options.get("use_reentrant") in (None, True)
        and all(isinstance(x, torch.nn.Parameter) for x in reads)
    )


def _changing(region: fx.GraphModule, changed: Changed) -> Iterator[fx.Node]:
    """The nodes of a region, and of regions inside it, that change the region's operands."""
    given = {_storage(n) for n in region.graph.nodes if n.op in ("placeholder", "get_attr")} - {None}
    for node in region.graph.nodes:
        target = changed(node)
        written = [target] if target is not None else _statistics(node)
        if any(_storage(n) in given for n in written):
            yield node
        for inner in node.all_input_nodes:
            body = getattr(region, str(inner.target), None) if inner.op == "get_attr" else None
            if isinstance(body, fx.GraphModule):
                yield from _changing(body, changed)


def _statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a normalization changes."""
    if "norm" not in str(getattr(node.target, "__name__", node.target)):
        return []
    return [n for n in node.all_input_nodes if isinstance(e := example_of(n), torch.Tensor) and version(e) > 0]


def _requires_gradient(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr") and bool(getattr(example_of(node), "requires_grad", False))


def _storage(node: fx.Node) -> Any:
    example = example_of(node)
    return example.untyped_storage()._cdata if isinstance(example, torch.Tensor) else None


# ---- in place of the operator that Dynamo puts into graphs --------------------------------------------------------
def as_eager(module: fx.GraphModule) -> Callable[..., Any]:
    """The graph as a function, with its regions run by `torch.utils.checkpoint`, as outside of compilers.

    Dynamo's operator keeps the tensors that a region is given as they are, and so fails where the region changes one.
    """
    for inner in module.modules():
        if not isinstance(inner, fx.GraphModule):
            continue
        found = inner.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
        for node in found:
            if "_checkpoint_context_fn" not in getattr(inner, node.args[0].target).meta:
                node.target = _checkpointed
        if found:
            inner.recompile()

    def run(*arguments: Any) -> Any:
        _LazyGraphModule.force_recompile(module)
        return module.forward(*arguments)  # without what prints a traceback of its own

    return run


def _checkpointed(region: fx.GraphModule, *operands: Any, **options: Any) -> Any:
    run = fx.Interpreter(region).run
    if gives_no_gradients(operands, options) and torch.is_grad_enabled():
        with torch.no_grad():
            return run(*operands)
    return checkpoint(lambda: run(*operands), **options | {"use_reentrant": False})
