"""The functional ATen graph of a function, by running it once.

`aot_export_module` runs a function twice: first for what it changes and what its results share memory with, then for
the graph. Graphs of ours need only the first of these, which is known after the run for the graph as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import preserve_rng_state
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, has_metadata_mutation, to_fun
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx, maybe_enable_thunkify
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_FUNCTIONALIZE = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)


@dataclass(frozen=True)
class FunctionalGraph:
    """A functional graph: its outputs are `tokens` of effects, new values of `changed`, then results.

    Its placeholders are as many tokens and the operands.
    """

    module: fx.GraphModule
    changed: tuple[str, ...]
    """Placeholders of operands that the function changes in place."""
    tokens: tuple[str, ...] = ()
    """Placeholders of tokens, which order effects."""


def traced_once(
    function: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> FunctionalGraph | None:
    """The graph of `function` on fake operands without gradients, without dead nodes.

    None where one run does not tell: effects, operands that share memory and are changed, memory of operands that is
    replaced, or operators that stay in place.
    """
    changed: list[int] = []
    told = True
    functional = FunctionalTensorMode(export=True, _allow_token_discovery=True)

    def run(*given: Any) -> list[Any]:
        nonlocal told
        with maybe_enable_thunkify(), torch._C._ExcludeDispatchKeyGuard(_FUNCTIONALIZE):
            wrapped = [to_fun(x) for x in given]
            results = function(*wrapped)
            changed.extend(i for i, x in enumerate(wrapped) if has_data_mutation(x))
            told = not any(map(_replaced, wrapped, given))
            return [from_fun(x) for x in (*(wrapped[i] for i in changed), *results)]

    if any(isinstance(x, Tensor) and is_traceable_wrapper_subclass(x) for x in operands):
        return None
    with (
        torch.no_grad(),
        torch.autograd.set_multithreading_enabled(False),
        preserve_rng_state(),
        mode,
        enable_python_dispatcher(),
        functional,
    ):
        distinct = [_detached(x) if isinstance(x, Tensor) else x for x in operands]
        module = make_fx(run, decomposition_table=dict(decompositions), _disable_torch_fn_metadata_mode=True)(*distinct)
    module.graph.eliminate_dead_code()
    if (
        functional._tokens
        or not told
        or (changed and _share_memory(operands))
        or any(map(_mutates, module.graph.nodes))
    ):
        return None
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    return FunctionalGraph(module, tuple(names[i] for i in changed))


def _detached(operand: Any) -> Any:
    """An object of its own: a trace knows operands by identity, and one tensor may be several operands."""
    result: Any = operand.detach()
    if hasattr(operand, "item_memo"):  # the symbol of its number, which other traces know already
        result.item_memo = operand.item_memo
    return result


def _replaced(wrapped: Any, given: Any) -> bool:
    return bool(has_metadata_mutation(wrapped, given, check_only_storage_mutation=False))


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _share_memory(operands: Sequence[Any]) -> bool:
    memories = [x.untyped_storage()._cdata for x in operands if isinstance(x, Tensor)]
    return len(set(memories)) < len(memories)
