"""What lets ranks drift apart: parameters, or their gradients, that depend on a rank's own part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from daceml_train.analysis.reachability import descendants
from daceml_train.driver.function import CompiledGraph
from daceml_train.driver.module import Backend
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph, Role
from daceml_train.graph.node import Node
from daceml_train.ops.fallback import Aten

EMBEDDINGS = ("aten.embedding.default", "aten._embedding_bag.default")
"""Operators whose fourth argument is `scale_grad_by_freq`."""
ALONE = "a rank counts its own part of the batch alone"


def check_embeddings(*parts: object) -> None:
    """Raise `Invalid` for an embedding whose options depend on which rows a rank reads."""
    for part in parts:
        for path, module in part.named_modules() if isinstance(part, nn.Module) else ():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            if module.max_norm is not None:
                advice = "scale the rows between steps, on all ranks"
                raise Invalid(f"{path} has max_norm: ranks scale the rows that they read alone", advice=advice)
            if module.scale_grad_by_freq:
                raise Invalid(f"{path} has scale_grad_by_freq: {ALONE}")


def drift(graph: Graph, trains: Callable[[str], bool]) -> str:
    """Why ranks would drift apart; empty if they would not. `trains` says which inputs are trained."""
    for node in graph.nodes:
        if _by_frequency(node):
            where = f" (at {node.origin})" if str(node.origin) else ""
            return f"an embedding has scale_grad_by_freq{where}: {ALONE}"
    changed = [name for name in graph.writes if trains(name)]
    given = [name for name, entry in graph.inputs.items() if entry.role is Role.input]
    of_batch = descendants(graph.nodes, given) if changed else ()
    for name in changed:
        if graph.writes[name] in of_batch:
            what = f"the model changes {graph.inputs[name].path} by its batch, and ranks would drift apart"
            return f"{what}; change it between steps, on all ranks"
    return ""


def drift_in_pieces(backend: Backend) -> str:
    """The same of the graphs of a model in pieces."""
    return next(filter(None, map(_drift_of, _graphs(backend))), "")


def drift_of_loss(loss: torch.Tensor) -> str:
    """The same of what PyTorch has recorded of a loss, as where TorchDynamo skips a function."""
    todo: list[Any] = [loss.grad_fn]
    seen = {None, *todo}
    while todo:
        node = todo.pop()
        if getattr(node, "_saved_scale_grad_by_freq", False):
            return f"an embedding has scale_grad_by_freq, in a function that TorchDynamo does not trace: {ALONE}"
        found = [n for n, _ in getattr(node, "next_functions", ()) if n not in seen]
        seen.update(found)
        todo += found
    return ""


class Changes:
    """Which parameters a forward pass changes."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self._versions = [p._version for p in parameters]

    def numbers(self) -> list[int]:
        """Those that have changed until now."""
        pairs = zip(self.parameters, self._versions, strict=True)
        return [number for number, (p, version) in enumerate(pairs) if p._version != version]


def _graphs(backend: Backend) -> Iterator[Graph]:
    for programs in backend.programs.values():
        yield from (program.captured.graph for program in programs if isinstance(program, CompiledGraph))


def _drift_of(graph: Graph) -> str:
    return drift(graph, lambda name: graph.inputs[name].role is Role.parameter)


def _by_frequency(node: Node) -> bool:
    """Whether a node is an embedding that divides its gradient by how often each row is read."""
    op = node.op
    return isinstance(op, Aten) and op.target in EMBEDDINGS and len(op.arguments) > 3 and op.arguments[3] is True
