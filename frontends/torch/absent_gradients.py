"""`ctx.set_materialize_grads(False)`: a user's backward that receives None for a result without a gradient.

TorchDynamo traces such an `autograd.Function` as if its backward received zeros. Here it breaks the graph instead,
and PyTorch calls the function.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import higher_order_ops

from daceml_train.frontends.torch.traces import Traces, for_backend


@functools.cache
def _install() -> None:
    applied: Any = higher_order_ops.AutogradFunctionApplyVariable
    original = applied.trace_forward_graph

    def trace(self: Any, tx: Any, ctx: Any, *given: Any, **more: Any) -> Any:
        result = original(self, tx, ctx, *given, **more)
        changed = tx.output.side_effects.store_attr_mutations.get(ctx, {})
        if "materialize_grads" in changed and (traces.depth or for_backend(tx.output.compiler_fn)):
            frame = tx.frame_summary()
            where = f"(at {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
            message = f"an autograd.Function with set_materialize_grads, whose backward is called by PyTorch {where}"
            traces.note(message)
            unimplemented(
                gb_type="autograd.Function.apply: set_materialize_grads",
                context="",
                explanation="TorchDynamo gives its backward zeros in place of None.",
                hints=[*graph_break_hints.SUPPORTABLE],
            )
        return result

    applied.trace_forward_graph = trace


traces = Traces(_install)
"""Traces that break at such a function, and note why."""
