"""Which inputs of a graph user code copies: the copy outlives a change of the input, which autograd would notice."""

from __future__ import annotations

import torch
from torch import fx


def copied_inputs(module: torch.fx.GraphModule) -> frozenset[int]:
    """The positions of placeholders that `clone` copies, all or in part."""
    position = {node: k for k, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder")}
    found = set()
    for node in module.graph.nodes:
        if node.target in ("clone", torch.clone, torch.ops.aten.clone.default):
            source = node
            while source not in position and source.args and isinstance(source.args[0], fx.Node):
                source = source.args[0]
            found.add(position.get(source, -1))
    return frozenset(found - {-1})
