"""`torch.set_grad_enabled(...)` in a forward pass outlives the call, so graphs leave gradients enabled or disabled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def leaving(called: Callable[..., Any], module: torch.fx.GraphModule) -> Callable[..., Any]:
    """What runs a graph of TorchDynamo's, and leaves gradients enabled or disabled as the graph does."""
    nodes = module.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    if not nodes or nodes[-1].args[0] == torch.is_grad_enabled():
        return called
    enabled = bool(nodes[-1].args[0])

    def call(*arguments: Any) -> Any:
        results = called(*arguments)
        torch._C._set_grad_enabled(enabled)
        return results

    return call


def transform_of_torch() -> str:
    """The active transform that compiled code does not know; empty for none."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func, which PyTorch runs"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation, which PyTorch runs"
    return ""


__all__ = ["leaving", "transform_of_torch"]
