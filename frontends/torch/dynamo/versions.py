"""Inputs of a trace begin with version 0, so that their versions count the changes in place of the graph.

PyTorch's fake tensor of an input that is no view, but shares another input's memory or begins inside its own (such as
`x[1:].detach()`), is put there by `set_`, which counts as a change.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.output_graph import SubgraphTracer

from daceml_train.frontends.torch.traces import Traces, for_backend


@functools.cache
def _install() -> None:
    tracers: Any = SubgraphTracer
    create = tracers.create_graph_input

    @functools.wraps(create)
    def create_graph_input(self: Any, name: str, type_expr: Any, example: Any, *others: Any, **keywords: Any) -> Any:
        root = self.parent is None and isinstance(example, Tensor)
        if root and (traces.depth or for_backend(self.output_graph.compiler_fn)):
            start_at_zero(example)
        return create(self, name, type_expr, example, *others, **keywords)

    tracers.create_graph_input = create_graph_input


def start_at_zero(example: Tensor) -> None:
    """Set the version of a new fake tensor to 0; a view's is that of its base, which may have been changed since."""
    if not example._is_view() and not example.is_inference() and example._version:
        torch._C._autograd._unsafe_set_version_counter((example,), (0,))


traces = Traces(_install)
"""Traces in which they do."""
