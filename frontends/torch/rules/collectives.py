"""Rules for the collectives of `torch.distributed` in a model's own code.

PyTorch's own operators find the message that is on its way by the storage of its result. In a program they are
operators that end when the message has arrived, so waiting for one is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import fx

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.dynamo.origin import origin
from daceml_train.frontends.torch.rules.translate import Translator, rule
from daceml_train.ops.group_collective import GroupCollective
from daceml_train.ops.operator import Value

NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"})
"""Namespaces of the operators by which the processes of `torch.distributed` communicate."""

HAVE_RULES = frozenset(
    f"_c10d_functional.{name}.default"
    for name in (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "broadcast",
        "wait_tensor",
    )
)


DIFFERENTIABLE = hasattr(functional, "all_reduce_backward")
"""Whether PyTorch differentiates these operators; before 2.13 it did so for those of another namespace."""


def refuse_in_place(nodes: Iterable[fx.Node]) -> None:
    """Raise `Unsupported` for a collective of TorchDynamo's graph that writes over a tensor what has a gradient.

    Dynamo makes an operator of it through which gradients flow; in eager execution none does.
    """
    for node in nodes:
        written = node.args[1] if "copy_" in str(node.target) and len(node.args) > 1 else None
        if isinstance(written, fx.Node) and "wait_tensor" in str(written.target):
            example = written.meta.get("example_value")
            if isinstance(example, torch.Tensor) and example.requires_grad:
                raise Unsupported(
                    "a collective that overwrites a tensor with what has a gradient",
                    advice="detach the operand, or use torch.distributed._functional_collectives",
                    where=str(origin(node)),
                )


def refuse_collectives(nodes: Iterable[fx.Node]) -> None:
    """Raise `Unsupported` for the first collective without a rule, and for one whose result nothing reads: a program
    would leave it out, and other processes would wait for it.
    """
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in NAMESPACES:
            if str(node.target) in HAVE_RULES and _read(node):
                continue
            why = "whose result nothing reads, " if str(node.target) in HAVE_RULES else ""
            raise Unsupported(
                f"the collective {node.target} of torch.distributed, {why}inside a compiled graph",
                advice="call it outside, or put DistributedDataParallel around daceml_train.optimize(...)",
                where=str(origin(node)),
            )


def _read(node: fx.Node) -> bool:
    """Whether anything but waiting reads a result."""
    return any("wait_tensor" not in str(user.target) or _read(user) for user in node.users)


def _emit(t: Translator, x: Value, kind: str, group: Any, reduction: str = "sum", root: int = 0) -> Value:
    resolve = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009 - private
    ranks: dist.ProcessGroup = group if isinstance(group, dist.ProcessGroup) else resolve(str(group))
    if not x.dtype.is_float:
        raise Unsupported(f"the collective {kind} of whole numbers", where=str(origin(t.node)))
    position = sum(isinstance(node.op, GroupCollective) for node in t.graph.nodes)
    op = GroupCollective(ranks.size(), position, kind, ranks.group_name, reduction, root, DIFFERENTIABLE)
    return t.graph.emit(op, x)[0]


@rule("_c10d_functional.all_reduce.default")
def _all_reduce(t: Translator, x: Value, reduction: str, group: Any) -> Value:
    return _emit(t, x, "all_reduce", group, reduction.lower())


@rule("_c10d_functional.all_gather_into_tensor.default")
def _all_gather(t: Translator, x: Value, size: int, group: Any) -> Value:
    return _emit(t, x, "all_gather", group)


@rule("_c10d_functional.reduce_scatter_tensor.default")
def _reduce_scatter(t: Translator, x: Value, reduction: str, size: int, group: Any) -> Value:
    return _emit(t, x, "reduce_scatter", group, reduction.lower())


@rule("_c10d_functional.all_to_all_single.default")
def _all_to_all(t: Translator, x: Value, received: Sequence[Any], sent: Sequence[Any], group: Any) -> Value:
    if len({*map(str, received), *map(str, sent)}) > 1:
        raise Unsupported("all_to_all_single of parts of different lengths", where=str(origin(t.node)))
    return _emit(t, x, "all_to_all", group)


@rule("_c10d_functional.broadcast.default")
def _broadcast(t: Translator, x: Value, root: int, group: Any) -> Value:
    return _emit(t, x, "broadcast", group, root=root)


@rule("_c10d_functional.wait_tensor.default")
def _wait(t: Translator, x: Value) -> Value:
    return x
