"""How a call enters compiled code: as by `torch.compile`'s own wrapper, without the settings that matter to a
compilation alone, which take as long as a kernel of a small model.

Where something is unusual, as a stance of `torch.compiler.set_stance` or an export, that wrapper takes the call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo
from torch._C._dynamo import eval_frame as native
from torch._dynamo import eval_frame
from torch._dynamo.exc import ShortenTraceback
from torch._guards import TracingContext
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

_NEEDED = "set_eval_frame", "set_eval_frame_isolate_recompiles_id"
_functorch = torch._C._functorch


def entered(wrapper: Callable[..., Any], cells: Mapping[str, Any]) -> Callable[..., Any]:
    """A faster form of `wrapper`, which `torch.compile` returned and whose closure has these cells; or `wrapper`."""
    if not {"self", "fn", "callback"} <= cells.keys():
        return wrapper
    context = cells["self"].cell_contents
    isolated: Any = getattr(context, "_isolate_recompiles_id", None)
    known = isolated is not None and all(hasattr(native, name) for name in _NEEDED)
    if not known or context.fullgraph or context.error_on_graph_break is not None:
        return wrapper
    if torch._dynamo.config.compiled_autograd:
        return wrapper
    function, callback = cells["fn"].cell_contents, cells["callback"].cell_contents
    enter, isolate = native.set_eval_frame, native.set_eval_frame_isolate_recompiles_id

    @functools.wraps(wrapper)
    def call(*arguments: Any, **keywords: Any) -> Any:
        stance = eval_frame._stance
        if (
            stance.stance != "default"
            or stance.skip_guard_eval_unsafe
            or stance.backend is not None
            or TracingContext.try_get() is not None
            or torch.compiler.is_exporting()
            or is_fx_symbolic_tracing()
            or torch._C._is_tracing()
        ):
            return wrapper(*arguments, **keywords)
        before = enter(None)
        depth = _functorch.get_dynamic_layer_stack_depth()
        others = isolate(isolated)
        try:
            enter(callback)
            return function(*arguments, **keywords)
        except ShortenTraceback as error:
            raise error.remove_dynamo_frames() from None
        finally:
            enter(None)
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            isolate(others)
            if before is not None:
                enter(before)

    return call


@contextlib.contextmanager
def settings(cells: Mapping[str, Any]) -> Iterator[None]:
    """What the wrapper sets around each call, for a compilation."""
    context = cells["self"].cell_contents if "self" in cells else None
    cleanups = [enter() for enter in getattr(context, "enter_exit_hooks", ())]
    try:
        yield
    finally:
        for cleanup in cleanups:
            cleanup()


__all__ = ["entered", "settings"]
